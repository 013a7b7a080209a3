"""Weights of whole layers, of what lies outside the layers, and of the checkpoint."""

from dataclasses import replace

from ..spec import Layer, ModelSpec, Part
from .attention import attention_components
from .component import Component, build, dtype_bytes, linear
from .mlp import mlp_components
from .names import Names, names_of


def components(layer: Layer, spec: ModelSpec, prefix: str | None = None) -> list[Component]:
    """Every weight of one decoder layer: attention, feed-forward, norms, parts. prefix: its module path, else that of layer.index."""
    names = names_of(spec)
    at = prefix or f"{names.layers}.{layer.index}"
    found = attention_components(layer.attention, spec, at, names) + mlp_components(layer.mlp, spec, at, names)
    return found + _norms(layer.norms, spec, at, names) + [_part(part, spec, f"{at}.") for part in layer.parts]


def _norms(count: int, spec: ModelSpec, at: str, names: Names) -> list[Component]:
    """Vectors of hidden_size besides those of the attention; Gemma 4 has one more number per layer (models/gemma4.py: layer_scalar)."""
    known = [names.norms[i] if i < len(names.norms) else f"norm_{i}" for i in range(count)]
    found = [build(spec, f"norms.{norm}", f"{at}.{norm}", spec.hidden_size) for norm in known]
    return [*found, build(spec, "norms.layer_scalar", f"{at}.layer_scalar", 1)] if spec.model_type.startswith("gemma4") else found


def _part(part: Part, spec: ModelSpec, prefix: str = "") -> Component:
    """Weights that the spec only counts; replicated unless the part says that TP divides it."""
    width = dtype_bytes(part.dtype) if part.dtype else None
    name, module = f"parts.{part.name}", f"{prefix}{part.name}"
    return build(spec, name, module, part.parameters, None, "column" if part.sharded else "replicated", quantizable=part.linear, width_bytes=width)


def embedding(spec: ModelSpec) -> Component:
    """Token embedding, cut by vocabulary (vLLM: vocab_parallel_embedding.py:VocabParallelEmbedding); no format quantizes it."""
    return build(spec, "embedding.tokens", names_of(spec).embedding, spec.vocab_size, spec.hidden_size, "vocab")


def lm_head(spec: ModelSpec) -> Component:
    """Output head, cut by vocabulary. Not in the checkpoint where it is tied; quantized only where the format names it."""
    module, stored = names_of(spec).lm_head, not spec.tie_word_embeddings
    return build(spec, "lm_head.weight", module, spec.vocab_size, spec.hidden_size, "vocab", quantizable=stored, stored=stored)


def parts_with_embedding(spec: ModelSpec) -> list[Component]:
    """What lies beside the token embedding, wherever that is (Gemma 4: per-layer embeddings)."""
    return [_part(part, spec, _root(spec)) for part in spec.parts_with_embedding]


def last_stage(spec: ModelSpec) -> list[Component]:
    """The final norm and what else only the last stage has. Qwen4Exp has a mixer in the norm's place (qwen4_exp/nvidia/model.py:Qwen4ExpModel)."""
    parts = [_part(part, spec, _root(spec)) for part in spec.parts_last_stage]
    if spec.model_type.startswith("qwen4"):
        return parts
    return [build(spec, "final_norm.weight", names_of(spec).final_norm, spec.hidden_size), *parts]


def _root(spec: ModelSpec) -> str:
    """Module path of the decoder, with its dot."""
    return names_of(spec).layers.removesuffix("layers")


def mtp_components(spec: ModelSpec) -> list[Component]:
    """Draft layers of multi-token prediction and what joins embedding and hidden state before them, all under the name mtp.

    A draft layer's norms beyond those of a decoder layer are those of the join. The join's projection is in no field of the spec. The embedding and
    head that a checkpoint may store once more are in mtp_embeddings.
    """
    names = names_of(spec)
    usual = spec.layers[-1].norms if spec.layers else 2
    found = []
    for number, layer in enumerate(spec.mtp_layers):
        position = number if names.mtp_layers.startswith("mtp") else layer.index
        at = f"{names.mtp_layers}.{position}"
        found += components(replace(layer, norms=min(usual, layer.norms)), spec, at)
        for i in range(layer.norms - usual):
            norm = names.draft_norms[i] if i < len(names.draft_norms) else f"draft_norm_{i}"
            found.append(build(spec, f"join.{norm}", f"{names.mtp or at + '.'}{norm}", spec.hidden_size))
        found += _join(spec, at, names, number)
    return [replace(one, name=f"mtp.{one.name}") for one in found]


def _join(spec: ModelSpec, at: str, names: Names, number: int) -> list[Component]:
    """The projection of embedding and hidden state to one hidden state, 2 x hidden_size to hidden_size.

    DeepSeek and GLM have one per draft layer, an nn.Linear: replicated and plain (vLLM: deepseek_mtp.py, glm4_moe_mtp.py, deepseek_v32/nvidia/mtp.py).
    Qwen (qwen3_next_mtp.py, qwen3_5_mtp.py; two halves in qwen4_exp/nvidia/mtp.py) and Nemotron-H (nemotron_h_mtp.py) have one in all, by columns.
    """
    hidden = spec.hidden_size
    if names.mtp_layers.startswith("mtp"):
        if number:
            return []
        if spec.model_type.startswith("qwen4"):
            halves = ("fc_embedding", "fc_hidden")
            return [one for half in halves for one in linear(spec, f"join.{half}", f"{names.mtp}{half}", hidden, hidden, "column")]
        name = f"{names.mtp}fc" if names.mtp else f"{at}.eh_proj"
        return linear(spec, "join.fc", name, hidden, 2 * hidden, "column")
    return [build(spec, "join.eh_proj", f"{at}.eh_proj", hidden, 2 * hidden)]


def mtp_embeddings(spec: ModelSpec) -> list[Component]:
    """Copies of embedding and head that the checkpoint stores with each draft layer (DeepSeek V3: model.layers.61.embed_tokens, .shared_head.head)."""
    if not spec.mtp_own_embeddings:
        return []
    names = names_of(spec)
    pairs = [(f"{names.mtp_layers}.{layer.index}", side) for layer in spec.mtp_layers for side in ("embed_tokens", "shared_head.head")]
    return [build(spec, f"mtp.{side}", f"{at}.{side}", spec.vocab_size, spec.hidden_size, "vocab") for at, side in pairs]


def checkpoint_components(spec: ModelSpec) -> list[Component]:
    """Every weight that the checkpoint stores, draft layers included."""
    found = [embedding(spec), *parts_with_embedding(spec)]
    for layer in spec.layers:
        found += components(layer, spec)
    found += [*last_stage(spec), lm_head(spec), *mtp_components(spec), *mtp_embeddings(spec)]
    return [one for one in found if one.stored]


def layer_bytes(layer: Layer, spec: ModelSpec) -> int:
    """Checkpoint bytes of one decoder layer."""
    return sum(one.bytes for one in components(layer, spec))


def checkpoint_bytes(spec: ModelSpec) -> int:
    """Bytes of all weights of the checkpoint, tied embeddings once."""
    return sum(one.bytes for one in checkpoint_components(spec))


def checkpoint_parameters(spec: ModelSpec) -> int:
    """Parameters of the checkpoint; a quantized weight counts its values, not its scales."""
    return sum(one.parameters for one in checkpoint_components(spec))
