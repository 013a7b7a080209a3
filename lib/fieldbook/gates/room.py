"""Gates of memory and disk: weights and KV cache on the cards, weights on the host, files and shared memory."""

from .. import memory
from ..budget import COMPILED_BYTES, NON_TORCH_BYTES, requested_bytes
from ..schema import Params, Ranks
from .ruling import Launch, Ruling

GIB = 2**30
# What a rank's process holds besides weights and KV cache: torch, vLLM and their libraries (0.9 GiB seen for 0.30 on CPU).
RANK_OVERHEAD_BYTES = GIB
# A pool that holds less than this much of a longest request over one has no room for a second one's prompt.
TIGHT_REQUESTS = 1.25
# Log, receipts and vLLM's compile cache took up to 300 MB here; below that a run ends in the middle of a write.
LEAST_DISK_BYTES, TIGHT_DISK_BYTES = 512 << 20, 2 * GIB
# Pages of /dev/shm that are written to: 4 MiB for each two CPU ranks (csrc/cpu/shm.cpp), an NCCL ring of about 10 MiB for each rank (NCCL_BUFFSIZE is
# 4 MiB), and of the message queues (v1/executor/multiproc_executor.py) what the largest messages fill: 64 MiB is where containers start, and fail.
SHM_BASE_BYTES, SHM_RANK_BYTES = 64 << 20, 16 << 20


def host_weights_bytes(params: Params, arm: Ranks | None = None) -> int:
    """Weights that an arm (without: the box's own layout) has in host memory: all of them on a CPU; on GPUs what its --cpu-offload-gb says, per rank in GiB."""
    if params.engine.device == "cpu":
        return memory.checkpoint_bytes(memory.model_spec(params.model.name), params.engine.dtype)
    words = [part for word in params.extra_args_of(arm or params.parallel) for part in word.split("=", 1)]
    asked = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--cpu-offload-gb", "--cpu_offload_gb")]
    return round(float(asked[-1]) * GIB) * (arm or params.parallel).ranks if asked and asked[-1].replace(".", "", 1).isdigit() else 0


def fit(launch: Launch) -> Ruling:
    """Weights fit, and beside them the KV cache of one longest request: PASS, TIGHT (a warning) or REFUSE by the ledger."""
    engine = launch.params.engine
    if launch.pool is None:
        if launch.unknown:
            return Ruling("not checked", launch.no_pool, ways_out=("engine.available_kv_gib, as a boot log tells it",))
        if not launch.bounds:
            return Ruling("not checked", "a split that is none has no ledger", ways_out=("a split that the gate of the partition passes",))
        ways = ("lower engine.max_model_len", "more or larger cards", "another layout (`fieldbook partition FILE`)")
        return Ruling("refuse", launch.no_pool, "memory ledger", ways)
    pool = launch.pool
    rank = pool.ranks[pool.binding_rank]
    told = f"{pool.pool_tokens:,} tokens, {pool.max_concurrency:.2f} longest requests; rank {rank.rank} binds"
    evidence = f"ledger: {rank.available_kv_bytes / GIB:.2f} GiB for KV on rank {rank.rank}"
    if rank.budget is not None:
        evidence += f", {rank.budget.evidence} within {rank.budget.error_bytes / GIB:.2f} GiB"
    if not pool.holds_longest_request:
        return Ruling("refuse", f"REFUSE: {told}, and one request has to fit", evidence, ("lower engine.max_model_len", "more KV space on that rank"))
    least = min((r.available_kv_bytes - r.budget.error_bytes) // r.kv_bytes_per_block if r.budget else r.blocks for r in pool.ranks)
    if least <= pool.blocks_per_request:
        return Ruling("warn", f"TIGHT: {told}; within the estimate's error not even one may fit", evidence, ("lower engine.max_model_len",))
    if pool.max_concurrency < TIGHT_REQUESTS:
        reason = f"TIGHT: {told}; requests of {engine.max_model_len:,} tokens go one after the other"
        return Ruling("warn", reason, evidence, ("lower engine.max_model_len", "give the binding rank fewer layers"))
    return Ruling("pass", f"PASS: {told}", evidence)


def host_memory(launch: Launch) -> Ruling | None:
    """Weights and KV cache of CPU ranks, or weights that GPUs leave on the host, fit in the host's memory."""
    params, engine, ranks = launch.params, launch.params.engine, launch.arm.ranks
    if engine.device == "cpu":
        if not launch.bounds:
            return None
        tp = launch.arm.tensor_parallel_size
        held = tp * launch.arm.data_parallel_size * sum(s.bytes for s in memory.rank_weights_bytes(launch.spec, params, launch.layers, tp))
        needed = held + ranks * ((engine.kv_cache_gib_per_rank or 0) * GIB + RANK_OVERHEAD_BYTES)
        text, cure = f"{needed / GIB:.1f} GiB for weights, KV space and ranks", "lower engine.kv_cache_gib_per_rank"
    else:
        needed = host_weights_bytes(params, launch.arm)
        if not needed:
            return None
        needed += ranks * RANK_OVERHEAD_BYTES
        text, cure = f"{needed / GIB:.1f} GiB for weights on the host (--cpu-offload-gb) and ranks", "lower --cpu-offload-gb"
    host = launch.box.host if launch.box else None
    told = [launch.facts and launch.facts.memory_available_bytes, host and host.memory_available_bytes, host and host.memory_total_bytes]
    have = next((value for value in told if value is not None), None)
    if have is None:
        # Nothing is refused for what nobody told.
        return Ruling("not checked", f"{text}; the outputs do not tell the host's memory", ways_out=("`fieldbook capture DIR` on the box",))
    if needed > have:
        return Ruling("refuse", f"{text}, {have / GIB:.1f} GiB available", "/proc/meminfo", (cure, "stop what else runs here", "fewer ranks"))
    return Ruling("pass", f"{text} fits in {have / GIB:.1f} GiB", "/proc/meminfo")


def device_memory(launch: Launch) -> Ruling | None:
    """Each card still has the share free that vLLM will ask for: it refuses to start otherwise."""
    if launch.params.engine.device == "cpu" or launch.facts is None or launch.box is None:
        return None
    short, close = [], []
    for gpu in (gpu for gpu in launch.box.gpus if gpu.index in launch.facts.cards):
        total, used = gpu.memory_usable_bytes or gpu.memory_total_bytes, launch.facts.gpu_used_bytes.get(gpu.index or 0)
        asked = requested_bytes(total, launch.params.engine.gpu_memory_utilization) if total else None
        if asked is None or used is None:
            continue
        text = f"GPU {gpu.index} has {(total - used) / GIB:.2f} GiB free, and vLLM will ask for {asked / GIB:.2f}"
        if total - used < asked:
            short.append(text)
        elif total - used - NON_TORCH_BYTES - COMPILED_BYTES < asked:
            close.append(text)
    ways = ("stop what uses the card (see the gate of foreign processes)", "lower engine.gpu_memory_utilization")
    if short:
        return Ruling("refuse", "; ".join(short), "NVML; v1/worker/utils.py:request_memory", ways)
    if close:
        reason = f"{'; '.join(close)}, after the context and NCCL have taken some {(NON_TORCH_BYTES + COMPILED_BYTES) / GIB:.1f} GiB"
        return Ruling("warn", reason, "NVML; v1/worker/utils.py:request_memory", ways)
    return Ruling("pass", "every card has vLLM's share free", "NVML")


def disk(launch: Launch) -> Ruling | None:
    """Log, receipts and compile caches can be written."""
    if launch.facts is None:
        return None
    if launch.facts.not_writable:
        ways = ("give the user the right to", "server.extra_env VLLM_CACHE_ROOT", "another FIELDBOOK_REPORTS")
        return Ruling("refuse", f"cannot be written: {', '.join(launch.facts.not_writable)}", "access", ways)
    least = min(launch.facts.disk_free_bytes.values(), default=None)
    if least is None:
        return Ruling("not checked", "no folder tells its free space")
    where = min(launch.facts.disk_free_bytes, key=lambda name: launch.facts.disk_free_bytes[name])
    text = f"{least / GIB:.1f} GiB free for {where}"
    if least < LEAST_DISK_BYTES:
        reason = f"{text}; log, receipts and compile cache need {LEAST_DISK_BYTES / GIB:.1f}"
        return Ruling("refuse", reason, "statvfs", ("make room", "another FIELDBOOK_REPORTS"))
    if least < TIGHT_DISK_BYTES:
        return Ruling("warn", f"{text}: enough for one run, not for many", "statvfs", ("make room",))
    return Ruling("pass", text, "statvfs")


def shared_memory(launch: Launch) -> Ruling | None:
    """Ranks exchange data through /dev/shm; containers start with 64 MiB of it."""
    if launch.facts is None or launch.arm.ranks == 1:
        return None
    free, needed = launch.facts.shm_free_bytes, SHM_BASE_BYTES + launch.arm.ranks * SHM_RANK_BYTES
    if free is None:
        return Ruling("not checked", "nothing tells how large /dev/shm is")
    text = f"{free / GIB:.2f} GiB free in /dev/shm, {launch.arm.ranks} ranks fill up to {needed / GIB:.2f}"
    if free < needed:
        return Ruling("refuse", text, "statvfs of /dev/shm", ("start the container with --ipc=host or --shm-size=16g", "remove what ended servers left there"))
    return Ruling("pass", text, "statvfs of /dev/shm")
