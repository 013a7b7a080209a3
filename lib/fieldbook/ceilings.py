"""What the box could do at most, so that a measurement above it is recognised as wrong before it is believed."""

import concurrent.futures
import json
import time

from . import memory, paths
from .errors import BadInput
from .inventory import Inventory
from .inventory.measure import WHAT
from .params import Params
from .spec import ModelSpec
from .strategy.datasheets import memory_gb_s, tensor_tflops

# float32 operations of one core per clock cycle: two fused multiply-add units of 16, 8 or 4 lanes.
FLOPS_PER_CYCLE = {"avx512f": 64, "avx2": 32, None: 16}
# No server core clocks higher today; a ceiling has to be one.
HIGHEST_CLOCK_HZ = 5.7e9
# A read of this benchmark may be slower than the best the memory can do.
BANDWIDTH_MARGIN = 1.25
BUFFER_BYTES = 64 * 2**20


def measure_memory_read_bytes_s(threads: int, repetitions: int = 5) -> float:
    """Best rate at which `threads` threads together read buffers larger than their caches, in bytes per second."""
    import numpy as np

    threads = min(threads, 16)
    buffers = [np.ones(BUFFER_BYTES // 4, dtype=np.float32) for _ in range(threads)]
    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            start = time.perf_counter()
            # maximum.reduce does one comparison per element and releases the interpreter lock: memory is what limits it.
            list(pool.map(np.maximum.reduce, buffers))
            best = max(best, threads * BUFFER_BYTES / (time.perf_counter() - start))
    return best


def memory_read_bytes_s(params: Params, box: Inventory) -> float | None:
    """Measured here for a live box, read from data/boxes/<box>/ceilings.json for a recorded one.

    None for a box of which only outputs were captured. Raises BadInput where a run was recorded without it: its figures could not be checked.
    """
    if params.box.kind == "live":
        return measure_memory_read_bytes_s(box.host.logical_cpus)
    file = paths.box_data_dir(params.box.name) / "ceilings.json"
    if not file.is_file():
        if paths.only_captured(params.box.name):
            return None
        raise BadInput(f"data/boxes/{params.box.name}/ceilings.json: missing; a recorded box needs its measured memory_read_bytes_s")
    return json.loads(file.read_text())["memory_read_bytes_s"]


def peak_flops(box: Inventory) -> float | None:
    """float32 operations per second that the cores cannot exceed: cores x cycle rate x operations per cycle of the widest unit.

    None where cores or instruction sets are unknown: a guess could lie too low, and a ceiling must not.
    """
    if not box.host.logical_cpus or not box.host.isa:
        return None
    widest = next((flag for flag in ("avx512f", "avx2") if flag in box.host.isa), None)
    return box.host.logical_cpus * HIGHEST_CLOCK_HZ * FLOPS_PER_CYCLE[widest]


def decode_ceiling_tok_s(spec: ModelSpec, dtype: str, streams: int, read_bytes_s: float) -> float:
    """Every step reads the weights that its tokens pass and gives each stream one token, so streams x bandwidth / bytes read bounds the rate."""
    return streams * BANDWIDTH_MARGIN * read_bytes_s / memory.step_bytes(spec, dtype)


def prefill_ceiling_tok_s(spec: ModelSpec, flops: float) -> float:
    """A prompt token costs two operations per layer parameter it passes (lm_head runs once per prompt and attention adds to it: still a bound)."""
    return flops / (2 * memory.active_parameters(spec))


def gpu_rates(params: Params, spec: ModelSpec, box: Inventory) -> tuple[float | None, float | None]:
    """(bytes per second read, operations per second) of the fastest GPUs that an arm has ranks for, all together; None where a GPU is not in the tables.

    No layout can do more with as many of them, whichever way it divides the model.
    """
    ranks = max(params.parallel.ranks, params.verdict.baseline.ranks)
    reads = [memory_gb_s(gpu)[0] for gpu in box.gpus]
    fastest = [sorted(rates, reverse=True)[:ranks] if rates and all(rates) else [] for rates in (reads, _listed_flops(spec, box))]
    return sum(fastest[0]) * 1e9 or None, sum(fastest[1]) or None


def _listed_flops(spec: ModelSpec, box: Inventory) -> list[float]:
    """Operations per second of each GPU by its data sheet; empty where one is not listed. Quantized weights may be multiplied as eight-bit numbers, at
    twice the rate."""
    listed = [tensor_tflops(gpu) for gpu in box.gpus]
    return [(2 if spec.quantization else 1) * rate * 1e12 for rate in listed] if all(listed) else []


def rank_flops(params: Params, spec: ModelSpec, box: Inventory, ranks: int) -> tuple[float, float] | None:
    """(operations per second of a rank at most, what it can be expected to do); None where nothing tells.

    A GPU's data sheet bounds it, its measured matrix product is what to expect; of several kinds of cards the fastest. CPU ranks share the cores, or have
    as many threads as they are given.
    """
    if params.engine.device == "cpu":
        whole = peak_flops(box)
        if not whole:
            return None
        cores = box.host.logical_cpus
        own = whole * min(params.engine.omp_threads_per_rank or cores / ranks, cores) / cores
        return own, own
    most = max(_listed_flops(spec, box), default=None)
    if most is None:
        return None
    seen = [m.spread.median * 1e12 for m in box.measured if m.what == WHAT["product"][0]]
    return most, max(seen, default=most)


def at_measured(params: Params, spec: ModelSpec, box: Inventory) -> dict[str, float]:
    """What each metric would be at the rates that notebook 01 measured on the box's GPUs: weights read as fast as a device copy reads and writes, all
    arithmetic as fast as one large matrix product. Empty for a CPU, whose ceilings rest on a measured rate already, and where a GPU was not measured.

    No bound: a copy is not the fastest way to read. A server that stays far below has something else in its way.
    """
    ranks = max(params.parallel.ranks, params.verdict.baseline.ranks)
    found = {}
    for what in ("copy", "product"):
        rates = sorted((m.spread.median for m in box.measured if m.what == WHAT[what][0]), reverse=True)[:ranks]
        found[what] = sum(rates) if len(rates) == ranks else None
    if params.engine.device == "cpu" or None in found.values():
        return {}
    each, step = 1 + params.engine.draft_tokens, memory.step_bytes(spec, params.engine.dtype)
    prefill = {f"prefill_{n}_tok_s": prefill_ceiling_tok_s(spec, found["product"] * 1e12) for n in params.benchmarks.prefill_tokens}
    return prefill | {f"decode_c{n}_tok_s": each * n * found["copy"] * 1e9 / step for n in params.benchmarks.decode_concurrency}


def of_box(params: Params, spec: ModelSpec, box: Inventory) -> dict[str, float]:
    """Ceiling of every metric on a box whose rates are not measured yet: what `fieldbook bench FILE` holds its samples against."""
    if params.engine.device == "cpu":
        return by_metric(params, spec, memory_read_bytes_s(params, box), peak_flops(box))
    return by_metric(params, spec, None, None, box)


def by_metric(params: Params, spec: ModelSpec, read_bytes_s: float | None, flops: float | None, box: Inventory | None = None) -> dict[str, float]:
    """Ceiling of every metric the benchmarks measure, in tokens per second, as far as it is known.

    read_bytes_s and flops are the processor's; they bound a server on the CPU. One on GPUs is bound by its cards, which `box` has.
    """
    if params.engine.device != "cpu":
        read_bytes_s, flops = gpu_rates(params, spec, box) if box else (None, None)
    # A step that drafts gives each stream at most the drafted tokens and one more.
    streams, each = params.benchmarks.decode_concurrency if read_bytes_s else [], 1 + params.engine.draft_tokens
    found = {f"prefill_{n}_tok_s": prefill_ceiling_tok_s(spec, flops) for n in params.benchmarks.prefill_tokens} if flops else {}
    return found | {f"decode_c{n}_tok_s": each * decode_ceiling_tok_s(spec, params.engine.dtype, n, read_bytes_s) for n in streams}
