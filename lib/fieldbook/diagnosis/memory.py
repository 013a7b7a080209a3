"""Causes that are about memory: of the device, of the KV pool, of the host."""

import re

from .log import Log
from .rules import Rule


def _wanted(match: re.Match, log: Log, line: int) -> str:
    device, free, total, share, wanted = match.groups()
    return f"{device} has {free} of {total} GiB free before vLLM takes anything, and gpu_memory_utilization {share} asks for {wanted} GiB"


def _lower_share(match: re.Match, log: Log, line: int) -> str:
    _, free, total, _, _ = match.groups()
    fits = int(float(free) / float(total) * 1000) / 1000
    return f"end the process that holds the rest (nvidia-smi shows it), or set gpu_memory_utilization to at most {fits:.3f}"


def _kv_needed(match: re.Match, log: Log, line: int) -> str:
    longest, needed, available = match.groups()
    text = f"the longest request ({longest} tokens) needs {needed} GiB of KV cache, and there are {available} GiB"
    split = log.partition
    if len(split) > 1:
        shares = ", ".join(f"stage {i} needs {float(needed) * layers / sum(split):.1f}" for i, layers in enumerate(split))
        text += f"; vLLM compares the whole model with its smallest stage: of {sum(split)} layers as {'+'.join(map(str, split))}, {shares} GiB"
    return text


def _shorter(match: re.Match, log: Log, line: int) -> str:
    fits = re.search(r"estimated maximum model length is (\d+)", " ".join(log.window(i) for i in range(line, min(line + 2, len(log.lines)))))
    length = f"lower max_model_len to at most {fits[1]}" if fits else "lower max_model_len"
    if len(log.partition) > 1:
        length += " (too little where stages are unequal; a split that follows the cards' memory gives more: `fieldbook partition FILE`)"
    return f"{length}, raise gpu_memory_utilization, or take a smaller KV type"


# What the log shows before, what was going on then, and the way out; the latest first.
_PHASES = (
    (
        r"Graph captur|Capturing CUDA graph|capture_model",
        " while or after graphs were captured",
        "lower gpu_memory_utilization by 0.01 to 0.02: the estimate for graphs was too small; or fewer cudagraph_capture_sizes, or --enforce-eager",
    ),
    (
        r"KV cache size|# GPU blocks",
        " after the KV pool was allocated",
        "lower gpu_memory_utilization, so that less of the card goes to the KV pool",
    ),
    (
        r"determine_available_memory|profile_run|Loading weights took|Model loading took",
        " in the profiling run, which is one step of max_num_batched_tokens",
        "lower max_num_batched_tokens or max_num_seqs; raising gpu_memory_utilization does not help here",
    ),
    (
        r"Starting to load model|load_model|Loading safetensors",
        " while weights were loaded",
        "more tensor or pipeline ranks, a quantized checkpoint, or --cpu-offload-gb; the weights alone do not fit",
    ),
)
_ANY_PHASE = ("", "see with nvidia-smi what else is on the card; then more ranks, a smaller checkpoint, or fewer max_num_batched_tokens")


def _phase(log: Log, line: int) -> tuple[str, str]:
    """What was going on when memory ran out, in words, and the way out."""
    return next(((words, remedy) for before, words, remedy in _PHASES if log.says_before(line, before)), _ANY_PHASE)


def _oom(match: re.Match, log: Log, line: int) -> str:
    message = log.window(line)
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", message)
    devices = sorted(set(re.findall(r"Tried to allocate [\d.]+ \w+\. GPU (\d+)", " ".join(log.lines))))
    where = f"GPU {', '.join(devices)}" if devices else "a GPU"
    facts = f": {asked[1]} asked for, {asked[4]} of {asked[3]} free" if asked else ""
    return f"{where} ran out of memory{_phase(log, line)[0]}{facts}"


def _oom_remedy(match: re.Match, log: Log, line: int) -> str:
    return _phase(log, line)[1]


_ENOUGH = "raise gpu_memory_utilization, use more tensor or pipeline ranks, lower max_num_batched_tokens, or end what else is on the card"

RULES = (
    Rule(
        "device-memory-taken",
        r"Free memory on device (\S+) \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory utilization \(([\d.]+), ([\d.]+) GiB\)",
        _wanted,
        _lower_share,
    ),
    Rule(
        "kv-does-not-fit",
        r"max seq len \((\d+)\), \(?([\d.]+) Gi?B KV cache is needed, which is larger than the available KV cache memory \(([\d.]+) Gi?B\)",
        _kv_needed,
        _shorter,
    ),
    Rule(
        "kv-does-not-fit",
        r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)",
        lambda match, log, line: f"the longest request has {match[1]} tokens, and the KV pool holds {match[2]}",
        lambda match, log, line: f"lower max_model_len to at most {match[2]}, or raise gpu_memory_utilization",
    ),
    Rule(
        "no-memory-for-kv",
        r"No available memory for the cache blocks",
        "weights and activations take all of the budget: nothing is left for the KV cache",
        _ENOUGH,
    ),
    Rule("no-memory-for-kv", r"# GPU blocks: 0\b", "no KV block fits beside weights and activations", _ENOUGH, at_info=True),
    Rule("out-of-device-memory", r"(?:OutOfMemoryError|CUDA out of memory|HIP out of memory)", _oom, _oom_remedy),
    Rule(
        "out-of-host-memory",
        r"(?:oom-kill|Out of memory: Killed process|exit(?:ed)? (?:code|status):? -9\b|signal 9\b|SIGKILL)",
        "the operating system killed a process of the server, as it does when host memory runs out",
        "look in dmesg for oom-kill; lower VLLM_CPU_KVCACHE_SPACE, --cpu-offload-gb or the number of ranks, or give the container more memory",
        sure="medium",
    ),
    Rule(
        "shared-memory-full",
        r"(?:Bus error|exit(?:ed)? (?:code|status):? -7\b|SIGBUS|No space left on device.*/dev/shm|/dev/shm.*No space left on device)",
        "/dev/shm is full: ranks exchange data through it",
        "start the container with --ipc=host or --shm-size=16g, and remove what ended servers left in /dev/shm",
    ),
    Rule(
        "disk-full",
        r"No space left on device",
        "a file could not be written: the disk is full",
        "make room, or point VLLM_CACHE_ROOT, HF_HOME and TMPDIR to a disk that has some",
    ),
)
