"""One function per quantization method: its keys, as vLLM reads them (model_executor/layers/quantization/*.py:from_config), to spec.Quantization.

Sizes are those of the checkpoint: what a kernel repacks after loading is not here.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from .errors import BadInput
from .quantization_keys import Keys
from .spec import Quantization

EXPERTS = "re:.*\\.experts(\\..*)?$"


def _bits(keys: Keys, *names: str, default: int | None = None) -> int:
    bits = keys.number(*names, default=default)
    if bits > 16:
        raise BadInput(f"{keys.where}: {names[0]}: got {bits}, expected at most 16")
    return bits


def _block(keys: Keys, key: str) -> tuple[int, int] | None:
    value = keys.values.get(key)
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)):
        raise BadInput(f"{keys.where}: {key}: got {str(value)[:60]!r}, expected two whole numbers")
    return value[0], value[1]


def _fp8(keys: Keys) -> Quantization:
    """fp8.py:Fp8Config: one float32 scale per block, else one per tensor.

    scale_fmt ue8m0 rounds the scales to powers of two but stores them as float32 all the same (DeepSeek V3.1, V3.2).
    """
    block = _block(keys, "weight_block_size")
    static = keys.string("activation_scheme", "dynamic") == "static"
    ignored = keys.names("ignored_layers", "modules_to_not_convert")
    return Quantization("fp8", 8, "float", "block" if block else "tensor", None, block, 4, activation_scales=static, ignored=ignored)


def _fbgemm(keys: Keys) -> Quantization:
    """fbgemm_fp8.py:FBGEMMFp8Config: fp8 with one float32 scale per output channel."""
    return Quantization("fbgemm_fp8", 8, "float", "channel", scale_bytes=4, ignored=keys.names("modules_to_not_convert"))


def _mxfp8(keys: Keys) -> Quantization:
    """modelopt.py:ModelOptMxFp8Config, as MiniMax tags it: fp8 with a one-byte scale for 32 values."""
    return Quantization("mxfp8", 8, "float", "group", 32, scale_bytes=1, ignored=keys.names("ignored_layers", "modules_to_not_convert"))


def _awq(keys: Keys) -> Quantization:
    """auto_awq.py:AutoAWQConfig. Scales of 2 bytes; zero points packed like the weights."""
    bits, group = _bits(keys, "w_bit", "bits"), keys.number("q_group_size", "group_size", least=-1)
    zero = bits if keys.flag("zero_point", True) else 0
    return _grouped("awq", bits, group, zero, keys.names("modules_to_not_convert"), only=("lm_head", "re:.*") if keys.flag("lm_head") else ())


def _gptq(keys: Keys) -> Quantization:
    """auto_gptq.py:AutoGPTQConfig. qzeros are stored for symmetric checkpoints too. dynamic: '-:' leaves modules out, '+:' gives them bits of their own."""
    bits, group = _bits(keys, "bits"), keys.number("group_size", least=-1)
    ignored, others = [], []
    for pattern, changed in keys.mapping("dynamic").items():
        if pattern.startswith("-:"):
            ignored.append("re:" + pattern[2:])
        elif isinstance(changed, dict):
            inner = Keys({"bits": bits, "group_size": group} | changed, f"{keys.where}: dynamic")
            own = _bits(inner, "bits")
            others.append(_grouped("gptq", own, inner.number("group_size", least=-1), own, only=("re:" + pattern.removeprefix("+:"),)))
    only = keys.names("modules_in_block_to_quantize")
    if keys.flag("lm_head"):
        only = (*(only or ("re:.*",)), "lm_head")
    return _grouped("gptq", bits, group, bits, tuple(ignored), only, tuple(others))


def _auto_round(keys: Keys) -> Quantization:
    """inc/inc.py:INCConfig: GPTQ's or AWQ's layout, extra_config with bits per module, block_name_to_quantize with what is quantized at all."""
    data_type = keys.string("data_type", "int")
    bits = _bits(keys, "bits")
    if "mx_fp" in data_type or data_type in ("fp", "fp8", "nv_fp"):
        raise BadInput(f"{keys.where}: auto-round data_type {data_type!r} is not covered; covered: int")
    group, ignored, others = keys.number("group_size", least=-1), [], []
    for pattern, changed in keys.mapping("extra_config").items():
        inner = Keys({"bits": bits, "group_size": group} | changed if isinstance(changed, dict) else {}, f"{keys.where}: extra_config")
        own = _bits(inner, "bits", default=bits)
        # A key that is no plain name is a regex there (inc/config_parser.py).
        shown = f"re:{pattern}" if re.search(r"[*+?\\^$()\[\]|]", pattern) else pattern
        if own >= 16:
            ignored.append(shown)
        elif own != bits:
            others.append(_grouped("auto-round", own, inner.number("group_size", default=group, least=-1), own, only=(shown,)))
    only = tuple(part.strip() for name in keys.names("block_name_to_quantize", "to_quant_block_names") for part in name.split(","))
    return _grouped("auto-round", bits, group, bits, tuple(ignored), only, tuple(others))


def _grouped(
    method: str, bits: int, group: int, zero: int, ignored: tuple[str, ...] = (), only: tuple[str, ...] = (), others: tuple[Quantization, ...] = ()
) -> Quantization:
    # A group_size of -1 is one scale per output channel. What is ignored is so in every scheme.
    others = tuple(replace(other, ignored=ignored) for other in others)
    return Quantization(
        method, bits, "int", "group" if group > 0 else "channel", group if group > 0 else None, zero_point_bits=zero, ignored=ignored, only=only, others=others
    )


MXFP4 = Quantization("mxfp4", 4, "float", "group", 32, scale_bytes=1)


def _mxfp4(keys: Keys) -> Quantization:
    """mxfp4.py:Mxfp4Config: only experts are quantized, 32 values to a one-byte scale (gpt-oss)."""
    return replace(MXFP4, only=(EXPERTS,), ignored=keys.names("modules_to_not_convert", "ignored_layers"))


def _none(keys: Keys) -> None:
    return None


def _compressed(keys: Keys) -> Quantization | None:
    """compressed_tensors.py:CompressedTensorsConfig: one scheme per config group; a target that is no class name says which modules it is for."""
    ignored = keys.names("ignore")
    schemes = []
    for label, group in keys.mapping("config_groups").items():
        inner = Keys(group if isinstance(group, dict) else {}, f"{keys.where}: config_groups: {label}")
        targets = inner.names("targets")
        if not targets:
            raise BadInput(f"{inner.where}: key 'targets' is missing")
        if all(target.endswith("Attention") for target in targets) or not inner.mapping("weights"):
            continue
        layout = inner.string("format") or keys.string("format", "dense")
        schemes.append(_compressed_group(inner, layout, () if any(t in ("Linear", "LinearBase", "FusedMoE") for t in targets) else targets, ignored))
    if not schemes:
        if keys.string("format", "dense") == "dense" or not keys.mapping("config_groups"):
            return None
        raise BadInput(f"{keys.where}: config_groups: no group quantizes weights")
    cache = _cache_scheme(keys)
    # A scheme for everything comes last, since the first match wins.
    schemes.sort(key=lambda scheme: not scheme.only)
    return replace(schemes[-1], others=tuple(schemes[:-1]), kv_cache_scheme=cache)


def _compressed_group(group: Keys, layout: str, only: tuple[str, ...], ignored: tuple[str, ...]) -> Quantization:
    weights = Keys(group.mapping("weights"), f"{group.where}: weights")
    bits, kind, strategy = _bits(weights, "num_bits"), weights.string("type", "int"), weights.string("strategy") or "tensor"
    size, block = weights.values.get("group_size"), None
    if strategy == "block":
        block = _block(weights, "block_structure")
    elif strategy == "tensor_group" or (strategy == "tensor" and size is not None):
        strategy = "group"
    if kind not in ("int", "float") or strategy not in ("tensor", "channel", "group", "block") or (strategy == "block" and block is None):
        raise BadInput(f"{weights.where}: type {kind!r} with strategy {strategy!r} is not covered")
    group_size = weights.number("group_size") if strategy == "group" else None
    inputs = Keys(group.mapping("input_activations"), group.where)
    four_bit_float = bits == 4 and kind == "float"
    nvfp4 = four_bit_float and group_size == 16
    # Packed integers keep scales in the model's 2 bytes, NVFP4 and MXFP4 in one byte; vLLM allocates float32 for tensor, channel and block scales.
    scale_bytes = 1 if four_bit_float or layout.startswith("mxfp") else 2 if strategy == "group" else 4
    return Quantization(
        "compressed-tensors",
        bits,
        kind,
        strategy,
        group_size,
        block,
        scale_bytes,
        zero_point_bits=0 if kind == "float" or weights.flag("symmetric", True) else bits,
        activation_scales=bool(inputs.values) and inputs.values.get("dynamic") in (False, "local"),
        global_scales=1 if nvfp4 else 0,
        ignored=ignored,
        only=only,
    )


def _cache_scheme(keys: Keys) -> str | None:
    # modelopt.py: a float scheme of 8 bits is an fp8 cache. A few configs write the name itself.
    if isinstance(keys.values.get("kv_cache_scheme"), str):
        return keys.values["kv_cache_scheme"].lower()
    scheme = keys.mapping("kv_cache_scheme")
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    return {("float", 8): "fp8", ("float", 4): "nvfp4", ("int", 8): "int8"}.get((str(kind), bits if isinstance(bits, int) else 0))


def modelopt(keys: Keys) -> Quantization | None:
    """modelopt.py: quant_algo for all modules but those excluded; MIXED_PRECISION names an algorithm for each module."""
    algo, ignored = (keys.string("quant_algo") or "").upper(), keys.names("exclude_modules", "ignore")
    cache = keys.string("kv_cache_quant_algo")
    cache = cache.lower() if cache else _cache_scheme(keys)
    if algo == "MIXED_PRECISION":
        schemes = [replace(scheme, only=names, ignored=ignored) for scheme, names in _by_scheme(keys).items()]
        if not schemes:
            raise BadInput(f"{keys.where}: quant_algo MIXED_PRECISION without quantized_layers")
        return replace(schemes[0], others=tuple(schemes[1:]), kv_cache_scheme=cache)
    if algo in ("", "NONE"):
        if cache is None and not keys.values.get("quant_algo"):
            raise BadInput(f"{keys.where}: key 'quant_algo' is missing")
        return None
    return replace(_modelopt_algo(keys, algo), ignored=ignored, kv_cache_scheme=cache)


def _by_scheme(keys: Keys) -> dict[Quantization, tuple[str, ...]]:
    """Modules of each scheme. Experts are told by what holds them, since there can be tens of thousands, unless they differ among themselves."""
    where, given = f"{keys.where}: quantized_layers", keys.mapping("quantized_layers")
    short: dict[str, object] = {}
    differ = set()
    for name, value in given.items():
        head = name.partition(".experts.")[0]
        if short.setdefault(head, value) != value:
            differ.add(head)
    for head in differ:
        del short[head]
    told = {head if head in given else f"{head}.experts": value for head, value in short.items()}
    if differ:
        told |= {name: value for name, value in given.items() if name.partition(".experts.")[0] in differ}
    found: dict[Quantization, list[str]] = {}
    for name, value in told.items():
        inner = Keys(value if isinstance(value, dict) else {}, f"{where}: {name[:80]}")
        found.setdefault(_modelopt_algo(inner, (inner.string("quant_algo") or "").upper()), []).append(name)
    return {scheme: tuple(names) for scheme, names in found.items()}


NVFP4 = Quantization("modelopt", 4, "float", "group", 16, scale_bytes=1, activation_scales=True, global_scales=1)
MODELOPT_ALGOS = {
    "FP8": Quantization("modelopt", 8, "float", "tensor", scale_bytes=4, activation_scales=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Quantization("modelopt", 8, "float", "channel", scale_bytes=4),
    "FP8_PB_WO": Quantization("modelopt", 8, "float", "block", block=(128, 128), scale_bytes=4),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": replace(NVFP4, activation_scales=False),
    "MXFP8": Quantization("modelopt", 8, "float", "group", 32, scale_bytes=1),
}


def _modelopt_algo(keys: Keys, algo: str) -> Quantization:
    found = MODELOPT_ALGOS.get(algo)
    if found is None:
        raise BadInput(f"{keys.where}: quant_algo {algo!r} is not covered; covered: {', '.join(MODELOPT_ALGOS)}, MIXED_PRECISION")
    return replace(found, group_size=keys.number("group_size", default=found.group_size)) if "NVFP4" in algo else found


METHODS: dict[str, Callable[[Keys], Quantization | None]] = {
    "none": _none,
    "fp8": _fp8,
    "fbgemm-fp8": _fbgemm,
    "mxfp8": _mxfp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "modelopt": modelopt,
    "modelopt-fp4": modelopt,
    "modelopt-mixed": modelopt,
    "mxfp4": _mxfp4,
}
