"""From a Hugging Face config.json to ModelSpec: one function per family of models, each with the vLLM file it was read from.

No torch, no transformers, no weights. A config that cannot be read exactly is refused with one line, and what it leaves out is named.
"""

import json
from collections.abc import Callable
from pathlib import Path

from .. import quantization
from ..errors import BadInput, short
from ..spec import ModelSpec
from . import dense, hybrid, mla, moe, qwen4
from .defaults import with_defaults
from .source import Decoder, Source

# Family: what reads it, and its text-model types. Architectures are vLLM's (model_executor/models/registry.py).
FAMILIES: dict[str, tuple[Callable[[Source], Decoder], tuple[str, ...]]] = {
    "llama": (dense.llama, ("LlamaForCausalLM", "LLaMAForCausalLM")),
    "mistral": (dense.llama, ("MistralForCausalLM", "Mistral3ForConditionalGeneration")),
    "ministral3": (dense.llama, ("Ministral3ForCausalLM",)),
    "mixtral": (moe.mixtral, ("MixtralForCausalLM",)),
    "qwen2": (dense.qwen2, ("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")),
    "qwen2_moe": (moe.qwen2_moe, ("Qwen2MoeForCausalLM",)),
    "qwen3": (dense.qwen3, ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration")),
    "qwen3_moe": (moe.qwen3_moe, ("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration")),
    "qwen3_next": (hybrid.qwen3_next, ("Qwen3NextForCausalLM",)),
    "qwen3_5": (hybrid.qwen3_5, ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")),
    "qwen3_5_moe": (hybrid.qwen3_5, ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")),
    "qwen4_exp": (qwen4.qwen4_exp, ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")),
    "deepseek_v2": (mla.deepseek, ("DeepseekForCausalLM", "DeepseekV2ForCausalLM")),
    "deepseek_v3": (mla.deepseek, ("DeepseekV3ForCausalLM",)),
    "deepseek_v32": (mla.deepseek, ("DeepseekV32ForCausalLM",)),
    "deepseek_v4": (mla.deepseek_v4, ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration")),
    "kimi_k2": (mla.deepseek, ("KimiK2ForCausalLM", "KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration")),
    "glm4_moe_lite": (mla.deepseek, ("Glm4MoeLiteForCausalLM",)),
    "glm_moe_dsa": (mla.deepseek, ("GlmMoeDsaForCausalLM",)),
    "glm4_moe": (moe.glm4_moe, ("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration")),
    "kimi_linear": (hybrid.kimi_linear, ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")),
    "minimax_m2": (moe.minimax_m2, ("MiniMaxM2ForCausalLM",)),
    "minimax_m3": (moe.minimax_m3, ("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")),
    "gpt_oss": (moe.gpt_oss, ("GptOssForCausalLM",)),
    "gemma": (dense.gemma, ("GemmaForCausalLM",)),
    "gemma2": (dense.gemma2, ("Gemma2ForCausalLM",)),
    "gemma3": (dense.gemma3, ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")),
    "gemma4": (dense.gemma4, ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")),
    "phi3": (dense.llama, ("Phi3ForCausalLM",)),
    "granite": (dense.granite, ("GraniteForCausalLM", "GraniteSWAForCausalLM")),
    "nemotron_h": (hybrid.nemotron_h, ("NemotronHForCausalLM",)),
    "olmo2": (dense.olmo, ("Olmo2ForCausalLM",)),
    "olmo3": (dense.olmo, ("Olmo3ForCausalLM",)),
}
BY_ARCHITECTURE = {architecture: family for family, (_, names) in FAMILIES.items() for architecture in names}
# Text-model types that differ from the family's name.
BY_TYPE = {name: name for name in FAMILIES} | {
    "ministral": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen4_exp_text": "qwen4_exp",
    "glm4v_moe_text": "glm4_moe",
    "kimi_k3": "kimi_linear",
    "minimax_m3_text": "minimax_m3",
    "minimax_m3_vl": "minimax_m3",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "deepseek": "deepseek_v2",
}
TEXT_KEYS = ("text_config", "llm_config", "language_config")
OTHER_PARTS = {"vision_config": "vision tower", "audio_config": "audio tower"}
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


def read(config: dict, name: str = "", quant_config: dict | None = None) -> ModelSpec:
    """ModelSpec of a config.json; quant_config is the hf_quant_config.json beside it, read when the config itself names no quantization (as vLLM does).

    name stands in messages and in the result. Raises BadInput for an architecture that is not covered, a missing key or a value of the wrong type.
    """
    where = f"{name}: config.json" if name else "config.json"
    if not isinstance(config, dict):
        raise BadInput(f"{where}: not a model config, which is a mapping of keys to values")
    text = config
    for key in TEXT_KEYS:
        if isinstance(config.get(key), dict) and config[key]:
            text, where = config[key], f"{where}: {key}"
            break
    architecture, family = _family(config, text, where)
    source = with_defaults(Source(text, config, where, architecture), family)
    try:
        decoder = FAMILIES[family][0](source)
    except RecursionError:
        raise BadInput(f"{where}: nested too deeply") from None
    schemes = config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config") or quant_config
    experts = source.text_value("expert_dtype", "fp4") if family == "deepseek_v4" else None
    towers = tuple(f"{what} ({key})" for key, what in OTHER_PARTS.items() if isinstance(config.get(key), dict))
    return ModelSpec(
        name=name,
        architecture=architecture,
        model_type=_type_of(text) or _type_of(config) or family,
        hidden_size=source.count("hidden_size"),
        vocab_size=source.count("vocab_size"),
        tie_word_embeddings=_tied(source, decoder.tied),
        max_position_embeddings=source.any_count(("max_position_embeddings", "max_sequence_length", "model_max_length", "seq_length")),
        dtype=_dtype(source),
        layers=decoder.layers,
        mtp_layers=decoder.mtp_layers,
        quantization=quantization.read(schemes, where, experts) if schemes else None,
        state_dtype=decoder.state_dtype,
        embeddings_on_every_stage=decoder.embeddings_on_every_stage,
        lm_head_on_last_stage=decoder.lm_head_on_last_stage,
        parts_with_embedding=decoder.parts_with_embedding,
        parts_last_stage=decoder.parts_last_stage,
        defaulted=source.defaulted + decoder.defaulted,
        not_counted=decoder.not_counted + towers,
        boundary_values=_boundary_values(family, source),
        deepstack_layers=_deepstack(config),
        mtp_own_embeddings=decoder.mtp_own_embeddings and bool(decoder.mtp_layers),
    )


def load(path: Path | str, name: str = "") -> ModelSpec:
    """read() of a config.json, or of the one in a folder, with the hf_quant_config.json beside it. name: else the folder's.

    Raises BadInput for a missing file, one that is no JSON, and all that read() raises.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    quant_file = file.with_name("hf_quant_config.json")
    config = _json(file)
    return read(config, name or file.resolve().parent.name, _json(quant_file) if quant_file.is_file() and quant_file != file else None)


def _json(file: Path) -> dict:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadInput(f"{file}: not a mapping of keys to values")
    return document


def _type_of(config: dict) -> str | None:
    found = config.get("model_type")
    return found if isinstance(found, str) else None


def _family(config: dict, text: dict, where: str) -> tuple[str, str]:
    """Architecture and family: by the outer architectures as vLLM does; where those wrap several text models, by the type of the text model."""
    named = config.get("architectures") or text.get("architectures")
    if named is not None and not (isinstance(named, list) and named and all(isinstance(a, str) for a in named)):
        raise BadInput(f"{where}: architectures: got {short(named)}, expected a list of names")
    kind = _type_of(text)
    if named is None:
        if kind not in BY_TYPE:
            raise BadInput(f"{where}: neither architectures nor a model_type that is known (got {kind!r}); known: {', '.join(FAMILIES)}")
        return FAMILIES[BY_TYPE[kind]][1][0], BY_TYPE[kind]
    architecture = next((a for a in named if a in BY_ARCHITECTURE), None)
    if architecture is None:
        raise BadInput(
            f"{where}: architecture {named[0]} is not covered: what its layers hold and cache is not known here, and nothing is guessed; "
            f"covered families: {', '.join(FAMILIES)}"
        )
    family = BY_ARCHITECTURE[architecture]
    if text is not config and kind is not None:
        # A wrapper such as Mistral3ForConditionalGeneration or KimiVL can hold more than one kind of text model.
        if kind not in BY_TYPE:
            raise BadInput(f"{where}: model_type {kind!r} inside {architecture} is not covered; covered families: {', '.join(FAMILIES)}")
        family = BY_TYPE[kind]
    return architecture, family


def _boundary_values(family: str, source: Source) -> int:
    """Values per token that a pipeline stage sends to the next: hidden state and residual, but for these (each model's make_empty_intermediate_tensors).

    Granite and OLMo (by the transformers backend) send the hidden state alone, Gemma 4 also the per-layer inputs of all layers, models with
    hyper-connections all their streams. Kimi K3 sends more the deeper the cut; two states are the least of it.
    """
    hidden = source.count("hidden_size")
    if family in ("granite", "olmo2", "olmo3"):
        return hidden
    if family == "gemma4":
        return hidden + source.layers * source.count("hidden_size_per_layer_input", 0, least=0)
    streams = {"qwen4_exp": "hc_count", "deepseek_v4": "hc_mult"}.get(family)
    return hidden * source.count(streams) if streams else 2 * hidden


def _deepstack(config: dict) -> int:
    """How many first layers take features of the image encoder: one for each of its deepstack_visual_indexes (vLLM: models/qwen3_vl.py).

    Qwen3-VL's default is three (transformers: Qwen3VLVisionConfig); other models have none unless their config lists them.
    """
    vision = config.get("vision_config")
    # Qwen3.5 has such features too and no check that they stay on the first stage; its released configs list none.
    if not isinstance(vision, dict) or not str(_type_of(config)).startswith(("qwen3_vl", "qwen4")):
        return 0
    listed = vision.get("deepstack_visual_indexes")
    if listed is None:
        return 3 if str(_type_of(config)).startswith("qwen3_vl") else 0
    return len(listed) if isinstance(listed, list) else 0


def _tied(source: Source, default: bool) -> bool:
    for keys in (source.text, source.outer):
        if keys.get("tie_word_embeddings") is not None:
            return Source(keys, keys, source.where, source.architecture).flag("tie_word_embeddings")
    return default


def _dtype(source: Source) -> str:
    """dtype, or torch_dtype as it was called before transformers 5; bfloat16 when neither is there (vLLM: config/model.py:_get_and_verify_dtype)."""
    for keys in (source.text, source.outer):
        for key in ("dtype", "torch_dtype"):
            found = keys.get(key)
            if found is None or found == "auto":
                continue
            plain = found.removeprefix("torch.") if isinstance(found, str) else None
            if plain not in DTYPES:
                raise BadInput(f"{source.where}: {key}: got {short(found)}, expected one of {', '.join(DTYPES)}")
            return DTYPES[plain]
    return "bfloat16"
