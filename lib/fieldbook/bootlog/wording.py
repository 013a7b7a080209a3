"""What vLLM writes about memory, as patterns: named groups are the fields of RankLog and EngineLog.

A blank in a pattern stands for any white space or none, so that wrapped lines match. Files are those of vLLM 0.30, older wordings say their release.
'GB' of old releases is GiB (they divide by 2^30).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .lines import CUT, Said, loosely

# No figure has more digits; Python refuses to convert very long ones.
D = r"\d{1,12}"
N = rf"-?{D}(?:\.{D})?"
COUNT = rf"(?:\d{{1,3}}(?:,\d{{3}}){{1,4}}|{D})"
UNIT = rf"(?P<unit>GiB|GB|Gi|MiB|MB|G(?=$|{CUT}))"


@dataclass(frozen=True)
class Wording:
    """One message: its pattern, the words that must come before it, how much it is worth against others (higher wins), whether the last one told counts,
    and whether a rank writes it once (then two of them without a prefix come from two ranks)."""

    pattern: re.Pattern
    after: re.Pattern | None = None
    worth: int = 0
    last: bool = False
    once: bool = False


def _wording(pattern: str, after: str = "", **more) -> Wording:
    return Wording(loosely(pattern), loosely(after) if after else None, **more)


RANK = (
    # v1/worker/gpu/model_runner.py:load_model; 0.8 to 0.23 without 'memory', V0 with 'GB'.
    _wording(rf"Model loading took (?P<weights_gib>{N}) {UNIT}(?: memory)?(?: and (?P<model_load_s>{N}) sec)?", worth=2, once=True),
    # 0.2 to 0.7: worker/model_runner.py.
    _wording(rf"Loading model weights took (?P<weights_gib>{N}) {UNIT}", worth=2, once=True),
    # model_executor/model_loader/default_loader.py:load_weights. A draft model is loaded after its target.
    _wording(rf"Loading weights took (?P<weights_load_s>{N}) sec"),
    # v1/worker/gpu_worker.py:determine_available_memory; on a node's first rank only from 0.20 on.
    _wording(rf"Available KV cache memory[ :=]*(?P<available_kv_gib>{N}) {UNIT}", once=True),
    _wording(rf"Initial free memory (?P<free_gib>{N}) GiB, reserved (?P<available_kv_gib>{N}) GiB memory for KV Cache", once=True),
    _wording(rf"Initial free memory: (?P<free_gib>{N}) GiB; Requested memory: (?P<utilization>{N}) \(util\), (?P<requested_gib>{N}) GiB"),
    # v1/worker/cpu_worker.py:determine_available_memory.
    _wording(
        rf"(?:Explicitly|Auto) set \((?P<available_kv_gib>{N})/(?P<total_gib>{N})\) GiB for KV cache on node"
        rf"(?: \d+, with (?P<requested_gib>{N}) GiB requested memory for the worker)?(?:\. (?P<consumed_gib>{N}) GiB memory was consumed)?",
        once=True,
    ),
    # 0.6.5 to 0.11 (V0): worker/worker.py:determine_num_available_blocks.
    _wording(
        rf"can use total_gpu_memory \((?P<total_gib>{N}) GiB\) x gpu_memory_utilization \((?P<utilization>{N})\)(?: = (?P<requested_gib>{N}) GiB)?", once=True
    ),
    _wording(rf"model weights take (?P<weights_gib>{N}) {UNIT}", worth=1, once=True),
    _wording(rf"non_torch_memory takes (?P<non_torch_gib>{N}) {UNIT}", once=True),
    _wording(rf"PyTorch activation peak memory takes (?P<peak_activation_gib>{N}) {UNIT}", once=True),
    _wording(rf"reserved for KV Cache is (?P<available_kv_gib>{N}) {UNIT}", once=True),
    # 0.6.4: the same file.
    _wording(rf"\btotal_gpu_memory=(?P<total_gib>{N}) GiB", after="Memory profiling results", once=True),
    _wording(rf"\bnon_torch_memory=(?P<non_torch_gib>{N}) GiB", after="Memory profiling results", once=True),
    _wording(rf"\bkv_cache_size=(?P<available_kv_gib>{N}) GiB", after="Memory profiling results", once=True),
    _wording(r"\bgpu_memory_utilization=(?P<utilization>\d\.\d\d)", after="Memory profiling results", once=True),
    # v1/worker/gpu_worker.py:compile_or_warm_up_model, each rank (0.11 on); the first line also as the error of worker/utils.py:request_memory.
    _wording(rf"Free memory on device(?: \w+:\d+)? \((?P<free_gib>{N})/(?P<total_gib>{N}) GiB\)", once=True),
    _wording(rf"[Dd]esired GPU memory utilization(?: is)? \((?P<utilization>{N}), (?P<requested_gib>{N}) GiB\)", once=True),
    _wording(rf"(?P<weights_gib>{N}) GiB for weights?\b", after="Actual usage", worth=1, once=True),
    _wording(rf"(?P<consumed_gib>{N}) GiB for consumed memory", after="Actual usage", once=True),
    _wording(rf"(?P<peak_activation_gib>{N}) GiB for peak activation", after="Actual usage", once=True),
    _wording(rf"(?P<non_torch_gib>{N}) GiB for non-torch", after="Actual usage", once=True),
    _wording(rf"(?P<graphs_gib>{N}) GiB for (?:CUDA|NPU|XPU) ?[Gg]raph memory", after="Actual usage", worth=1, once=True),
    _wording(rf"Current (?:kv|KV) cache memory(?: in use is|:) (?:(?P<available_kv_gib>{N}) GiB|(?P<available_kv_bytes>{D}) bytes)", once=True),
    # v1/worker/gpu_worker.py: compared after the capture. 'actual' is a difference of free memory and can be negative.
    _wording(rf"CUDA graph pool memory: (?P<graphs_gib>{N}) GiB \(actual\)(?:, (?P<graphs_estimated_gib>{N}) GiB \(estimated\))?", worth=2, once=True),
    _wording(rf"Estimated CUDA graph memory: (?P<graphs_estimated_gib>{N}) GiB total"),
    # 0.30 captures once to measure and once to keep: the last counts.
    _wording(rf"Graph capturing finished in (?P<graph_capture_s>{N}) secs?(?:, took (?P<graphs_gib>{N}) {UNIT})?", last=True),
    _wording(rf"current --gpu-memory-utilization=(?P<utilization>{N}) is equivalent"),
    _wording(rf"increas(?:e|ing) --gpu-memory-utilization from (?P<utilization>{N}) to"),
    _wording(rf"torch\.compile t(?:akes|ook) (?P<compile_s>{N}) s in total"),
    # platforms/interface.py: hybrid models, and backends that want a size of their own; 0.8 to 0.11 'Forcing'.
    _wording(r"Setting attention block size to (?P<block_size_tokens>\d{1,12}) tokens", last=True),
    _wording(r"(?:Setting|Forcing) kv cache block size to (?P<block_size_tokens>\d{1,12}) for", last=True),
)
ENGINE = (
    # v1/core/kv_cache_utils.py:update_kv_cache_capacity; 0.8 to 0.29 as two messages. Hand-made tables and summaries keep these words.
    _wording(rf"KV cache size[ :=]*(?P<pool_tokens>{COUNT}) t(?:okens?\b|oke?n?{CUT}?$|{CUT}?$)"),
    _wording(
        rf"Maximum concurrency (?:for|@) (?P<max_model_len>{COUNT})(?= (?:t|:))(?: tokens(?: per request|/request)?)?"
        rf"(?:[ :=]*(?:(?P<max_concurrency>{D}(?:\.{D})?) x|(?P<loose>{D}(?:\.{D})?)[ {CUT}]*$))?"
    ),
    # V0: executor/executor_base.py ('cuda' is the device), before 0.6.5 gpu_executor.py and llm_engine.py; V1 of 0.7: v1/core/kv_cache_utils.py.
    _wording(rf"# (?P<device>(?!CPU)\w+?) blocks: (?P<gpu_blocks>{D})(?![\d{CUT}])(?:, # CPU blocks: (?P<cpu_blocks>{D})(?![\d{CUT}]))?"),
    _wording(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(?P<gpu_blocks_override>\d{1,12})(?!\d)"),
    # v1/engine/core.py:_initialize_kv_caches; V0 engine/llm_engine.py.
    _wording(rf"init engine \(profile, create kv cache, warmup model\) took (?P<init_engine_s>{N}) s"),
)
# Longer than any of the messages that are read in pieces.
_CONTEXT_CHARS = 1200
# Nothing else is looked at: a log of a long run is mostly about requests.
_WORTH_A_LOOK = re.compile(
    r"(?i)KV\s*cache|took|take|GiB|GB|block|gpu-memory-utilization|concurrency|Actual\s*usage|profiling\s*results|total_gpu|init\s*engine"
)


def read(message: Said, wordings: tuple[Wording, ...]) -> Iterator[tuple[Wording, re.Match]]:
    """(wording, match) of what a message says, in reading order of each wording. A match over a wrap replaces the shorter one that ends there."""
    joined = message.joined()
    if not _WORTH_A_LOOK.search(joined):
        return
    starts = [0]
    for part in message.parts:
        starts.append(starts[-1] + len(part))
    for wording in wordings:
        if wording.after:
            contexts = [m.start() for m in wording.after.finditer(joined)]
            for at, end in zip(contexts, [*contexts[1:], len(joined)], strict=False):
                if found := wording.pattern.search(joined, at, min(end, at + _CONTEXT_CHARS)):
                    yield wording, found
            continue
        if len(message.parts) == 1:
            for found in wording.pattern.finditer(joined):
                yield wording, found
            continue
        across = [m for m in wording.pattern.finditer(joined) if _is_across(m, starts[1:-1])]
        spans = [(m.start(), m.end()) for m in across]
        alone = [(start, m) for start, part in zip(starts, message.parts, strict=False) for m in wording.pattern.finditer(part)]
        kept = [(start + m.start(), m) for start, m in alone if not any(a <= start + m.start() < b for a, b in spans)]
        for _, found in sorted(kept + [(m.start(), m) for m in across], key=lambda pair: pair[0]):
            yield wording, found


def _is_across(found: re.Match, edges: list[int]) -> bool:
    """Whether a match runs over an edge between lines, and not just with a number at its end, which may be a number of the next line."""
    crossed = [edge for edge in edges if found.start() < edge < found.end()]
    ends = [found.start(name) for name, value in found.groupdict().items() if value is not None and found.end(name) == found.end()]
    return bool(crossed) and not any(start < edge for start in ends for edge in crossed)


def values(found: re.Match) -> dict[str, float | int]:
    """The figures of a match by field; only those told."""
    told = {key: value for key, value in found.groupdict().items() if value is not None}
    scale = 1 / 1024 if told.pop("unit", "GiB").startswith("M") else 1
    out: dict[str, float | int] = {}
    for key, value in told.items():
        if key == "available_kv_bytes":
            out["available_kv_gib"] = round(int(value) / 2**30, 4)
        elif key.endswith("_gib"):
            out[key] = round(float(value) * scale, 6)
        elif key in ("pool_tokens", "max_model_len", "gpu_blocks", "cpu_blocks", "gpu_blocks_override", "block_size_tokens"):
            out[key] = int(value.replace(",", ""))
        elif key != "device":
            out[key] = float(value)
    return out
