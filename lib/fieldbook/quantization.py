"""How a checkpoint stores its weights: quantization_config or hf_quant_config.json -> spec.Quantization, and which modules it covers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate

from .errors import BadInput
from .quantization_keys import Keys
from .quantization_methods import EXPERTS, METHODS, MXFP4, NVFP4, modelopt
from .spec import Quantization

# Modules that are no quantizable linear layer in any of vLLM's model classes: norms, routers (GateLinear), convolutions, embeddings, the scales themselves,
# the indexer's weights_proj (merged without a quant_config) and the draft's eh_proj (a plain nn.Linear). lm_head only where a config names it.
NEVER = re.compile(r"norm|embed|^(gate|router|shared_expert_gate|conv1d|weights_proj|eh_proj|A_log|dt_bias|e_score_correction_bias|sinks|attn_sink|D)$")
# vLLM's fused modules, which some ignore lists name, by their checkpoint's name.
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
# What wraps a text model's module names, in one checkpoint or another.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "backbone.", "model.")
# What Nemotron-H, MiniMax, Kimi and DeepSeek V4 call these two components.
ALIASES = {"self_attn": ("mixer", "attn"), "mlp": ("mixer", "block_sparse_moe", "ffn")}


def read(config: dict, where: str = "config.json", expert_dtype: str | None = None) -> Quantization | None:
    """Quantization of a quantization_config, or of a whole hf_quant_config.json; None when it says that nothing is quantized.

    expert_dtype: of DeepSeek V4, whose experts are MXFP4 unless it is fp8 (vLLM: models/deepseek_v4/quant_config.py). Raises BadInput for a method that is
    not covered, and for a key that is missing or of the wrong type.
    """
    if not isinstance(config, dict):
        raise BadInput(f"{where}: quantization_config: got {type(config).__name__}, expected a mapping")
    keys = Keys(config, f"{where}: quantization_config")
    if "quantization" in config:
        return modelopt(Keys(keys.mapping("quantization"), keys.where))
    method = keys.string("quant_method", "modelopt" if "quant_algo" in config else None)
    if method is None:
        raise BadInput(f"{keys.where}: key 'quant_method' is missing")
    reader = METHODS.get(method.lower().replace("_", "-"))
    if reader is None:
        raise BadInput(f"{keys.where}: quant_method {method!r} is not covered; covered: {', '.join(METHODS)}")
    found = reader(keys)
    if found is not None and expert_dtype == "fp4" and found.method == "fp8":
        # Such checkpoints keep the scales of their fp8 linears in one byte too.
        experts = NVFP4 if (keys.string("moe_quant_algo") or "").upper() == "NVFP4" else MXFP4
        return replace(found, scale_bytes=1, others=(replace(experts, only=(EXPERTS,), ignored=found.ignored),))
    return found


def is_quantized(quantization: Quantization | None, module_name: str) -> bool:
    """Whether a module's weight is stored quantized; module_name as in the checkpoint, without .weight."""
    return scheme_of(quantization, module_name) is not None


def scheme_of(quantization: Quantization | None, module_name: str) -> Quantization | None:
    """The scheme that a module's weight is stored in, None for the model's own dtype. Mixed checkpoints have several, of which the first match wins."""
    if quantization is None:
        return None
    name = module_name.removesuffix(".weight")
    last = name.rsplit(".", 1)[-1]
    if NEVER.search(last) or matches(quantization.ignored, name):
        return None
    for scheme in (*quantization.others, quantization):
        if matches(scheme.only, name) or (not scheme.only and last != "lm_head"):
            return scheme if scheme.weight_bits < 16 else None
    return None


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether one of the patterns means a module: exact, a run of whole components (prefix, suffix or middle), fnmatch, or 're:' and a regex.

    Prefixes that wrap a text model are left out of both; names that vLLM fuses are tried fused as well, and self_attn and mlp under their other names.
    A regex that cannot be compiled matches nothing.
    """
    return bool(patterns) and _matches_any(_compile(patterns), bare_name(name))


@lru_cache(maxsize=65536)
def _matches_any(compiled: "_Patterns", bare: str) -> bool:
    head, _, last = bare.rpartition(".")
    names = [bare]
    if last in FUSED and FUSED[last] in compiled.words:
        names.append(f"{head}.{FUSED[last]}" if head else FUSED[last])
    for component, others in ALIASES.items():
        if f".{component}." in bare:
            names += [bare.replace(f".{component}.", f".{other}.") for other in others if other in compiled.words]
    return any(_matches_bare(compiled, each) for each in names)


@dataclass(frozen=True, eq=False)
class _Patterns:
    """An ignore list sorted by how it is looked up: lists have up to thousands of entries, and a model asks for thousands of names."""

    words: frozenset[str]  # of all patterns, to rule out what none of them mentions
    heads: frozenset[str]  # whole components from the beginning of a name
    runs: frozenset[str]  # whole components anywhere
    firsts: frozenset[str]  # the first components of these
    starts: frozenset[str]  # of 'prefix*'
    globs: tuple[str, ...]
    regexes: tuple[re.Pattern, ...]


@lru_cache(maxsize=256)
def _compile(patterns: tuple[str, ...]) -> _Patterns:
    heads, runs, starts, globs, regexes = set(), set(), set(), [], []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                regexes.append(re.compile(pattern[3:]))
            except (re.error, OverflowError, RecursionError):
                continue
            continue
        full = pattern.removesuffix(".weight").strip(".")
        plain = bare_name(full)
        wild = re.search(r"[*?\[]", plain)
        if wild is None:
            # What begins with the layers of the model does not mean mtp.layers.
            (heads if plain != full or plain.startswith("layers.") else runs).add(plain)
        elif wild.start() == len(plain) - 1 and plain.endswith("*"):
            starts.add(plain[:-1])
        else:
            globs.append(plain)
    heads.discard("")
    runs.discard("")
    firsts = frozenset(run.partition(".")[0] for run in runs)
    return _Patterns(
        frozenset(re.findall(r"\w+", " ".join(patterns))), frozenset(heads), frozenset(runs), firsts, frozenset(starts), tuple(globs), tuple(regexes)
    )


def _matches_bare(patterns: _Patterns, bare: str) -> bool:
    if patterns.heads and any(head in patterns.heads for head in accumulate(bare.split("."), "{}.{}".format)):
        return True
    if patterns.runs and any(run in patterns.runs for run in _runs(bare, patterns.firsts)):
        return True
    if patterns.starts and any(bare[:end] in patterns.starts for end in range(len(bare) + 1)):
        return True
    if any(fnmatchcase(bare, glob) for glob in patterns.globs):
        return True
    return any(regex.match(variant) for regex in patterns.regexes for variant in (bare, *(prefix + bare for prefix in PREFIXES)))


def _runs(bare: str, firsts: frozenset[str]) -> Iterator[str]:
    parts = bare.split(".")
    for start in range(len(parts)):
        if parts[start] not in firsts:
            continue
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])


def bare_name(name: str) -> str:
    """A module name without what wraps the text model."""
    return next((name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix)), name)
