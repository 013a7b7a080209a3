"""The process that measures links: `python -m fieldbook.inventory.measure_worker --gpus=2 --pairs=0-1`. Started by measure.py, the only one to read it.

Every finished quantity is one line of JSON on stdout, so that what was measured before a GPU hangs is not lost. The fields: quantity, where,
through_host, size_bytes, samples (GB/s or us); or note; or doing (what is tried next); the last line is {"done": true}.
torch is imported once and vLLM never: importing them is most of the time this takes.
"""

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30
SAMPLES = 7
# One sample lasts about this long: far above the 20 us that starting and awaiting a copy take, short enough for boxes with many or slow links.
SAMPLE_S_MIN, SAMPLE_S_MAX = 0.01, 0.03
PROBE_BYTES = 8 * MIB
# Above the 50 to 130 MB of last-level cache of today's GPUs by a wide margin, so that a copy cannot live in it.
DEVICE_BUFFER_BYTES = GIB
PINNED_BUFFER_BYTES = 256 * MIB
# Other work may be using the GPU: all buffers on it together take at most this share of what is free, and a nearly full GPU is left alone.
FREE_SHARE = 0.05
FREE_BYTES_MIN = GIB
TOO_FULL = "less than 1 GiB of GPU memory is free"
COPIES_MAX = 16
PRODUCT_SIDE_MAX = 8192
ROUND_TRIPS = 100
LOOPBACK_BYTES_MIN, LOOPBACK_BYTES_MAX = 64 * MIB, 256 * MIB
ANSWER_BYTES = 8
PATIENCE_S = 10  # of the two processes with each other

Emit = Callable[..., None]


def power_of_two_below(n: float) -> int:
    """Largest power of two not above n, n >= 1."""
    return 2 ** int(math.log2(n))


def buffer_bytes(free_bytes: int, buffers: int, most: int) -> int:
    """Size of each of `buffers` buffers on a GPU that has free_bytes left: a power of two, at most `most`; 0 where the GPU is too full to measure."""
    return min(most, power_of_two_below(free_bytes * FREE_SHARE / buffers)) if free_bytes >= FREE_BYTES_MIN else 0


def plan(bytes_s: float, most: int) -> tuple[int, int]:
    """(bytes per copy, copies per sample) for a link that a first try found to carry bytes_s: samples of SAMPLE_S_MIN to SAMPLE_S_MAX, copies up to `most`."""
    size = min(most, max(PROBE_BYTES, power_of_two_below(max(1.0, bytes_s * SAMPLE_S_MAX))))
    return size, max(1, min(COPIES_MAX, math.ceil(bytes_s * SAMPLE_S_MIN / size)))


def visible_gpus(text: str | None, gpus: int) -> list[int] | None:
    """GPU numbers in the order CUDA counts them, from CUDA_VISIBLE_DEVICES: '1,3' -> [1, 3], unset -> all. None where it names them otherwise (UUID, MIG)."""
    if text is None:
        return list(range(gpus))
    words = [word.strip() for word in text.split(",") if word.strip()]
    return [int(word) for word in words] if all(word.isdigit() for word in words) else None


def parse_pairs(text: str) -> list[tuple[int, int]]:
    """'0-1,0-4' -> [(0, 1), (0, 4)]. Raises ValueError for anything else."""
    return [(int(a), int(b)) for a, b in (part.split("-") for part in text.split(",") if part)]


def largest_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache of CPU 0 ('32768K' in index*/size); 0 where the machine does not tell."""
    found = [0]
    for file in folder.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text().strip().removesuffix("K")) * 1024)
    return max(found)


def loopback_bytes(cache_bytes: int) -> int:
    """Message size for which the memory's read rate is a ceiling: twice the largest cache, within limits that keep the measurement short."""
    return min(LOOPBACK_BYTES_MAX, max(LOOPBACK_BYTES_MIN, 2 * cache_bytes))


def elapsed_s(start_one: Callable[[], None], wait: Callable[[], None], times: int) -> float:
    """Seconds from all GPUs at rest to all GPUs at rest again, with `times` copies started in between; `wait` returns when all is done."""
    wait()
    start = time.perf_counter()
    for _ in range(times):
        start_one()
    wait()
    return time.perf_counter() - start


def sample_rate(copy: Callable[[int], None], wait: Callable[[], None], most: int, counted: int = 1) -> tuple[int, list[float]]:
    """(bytes per copy, GB/s of each sample) of `copy(bytes)`, which starts a copy of at most `most` bytes; each byte counts `counted` times."""
    first = min(PROBE_BYTES, most)
    elapsed_s(lambda: copy(first), wait, 1)  # peer access, mappings and clocks come up
    size, copies = plan(first / elapsed_s(lambda: copy(first), wait, 1), most)
    samples = [counted * size * copies / elapsed_s(lambda: copy(size), wait, copies) / 1e9 for _ in range(SAMPLES + 1)]
    return size, samples[1:]


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def attempt(emit: Emit, label: str, step: Callable[[], None]) -> None:
    """Do one step; what goes wrong in it becomes a note, so that the others still come."""
    emit(doing=label)
    try:
        step()
    except Exception as error:  # torch has its own error types for a GPU that fell off the bus, no memory left, no kernel image, ...
        emit(note=f"{label}: not measured ({first_line(error)})")


def measure_gpu(torch, gpu: int, device: int, pinned: list, emit: Emit) -> None:
    """Copies between pinned host memory and one GPU, and inside it (each byte counted twice: read and written). Emits quantities h2d, d2h, copy."""
    torch.cuda.empty_cache()  # of the step before, so that it does not count as taken
    size = buffer_bytes(torch.cuda.mem_get_info(device)[0], 2, DEVICE_BUFFER_BYTES)
    if not size:
        return emit(note=f"GPU {gpu}: not measured ({TOO_FULL})")
    torch.cuda.set_device(device)
    one, other = (torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(2))

    def wait() -> None:
        torch.cuda.synchronize(device)

    def report(quantity: str, target, source, counted: int = 1) -> None:
        def copy(n: int) -> None:
            target[:n].copy_(source[:n], non_blocking=True)

        n, samples = sample_rate(copy, wait, min(len(target), len(source)), counted)
        emit(quantity=quantity, where=f"GPU {gpu}", through_host=False, size_bytes=n, samples=samples)

    for host in pinned:
        report("h2d", one, host)
        report("d2h", host, one)
    report("copy", other, one, counted=2)


def measure_product(torch, gpu: int, device: int, emit: Emit) -> None:
    """Square matrices of 16-bit floats, random so that they draw power as real ones do, multiplied on one GPU. Emits quantity product, in TFLOP/s."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < FREE_BYTES_MIN:
        return  # as the copies said
    # Three matrices of two bytes an element.
    side = min(PRODUCT_SIDE_MAX, power_of_two_below(math.sqrt(free * FREE_SHARE / 6)))
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    one, other = (torch.randn(side, side, device=f"cuda:{device}", dtype=dtype) for _ in range(2))
    target = torch.empty_like(one)

    def wait() -> None:
        torch.cuda.synchronize(device)

    def multiply() -> None:
        torch.matmul(one, other, out=target)

    elapsed_s(multiply, wait, 1)
    times = max(1, math.ceil(SAMPLE_S_MIN / elapsed_s(multiply, wait, 1)))
    samples = [times * 2 * side**3 / elapsed_s(multiply, wait, times) / 1e12 for _ in range(SAMPLES + 1)]
    emit(quantity="product", where=f"GPU {gpu}", through_host=False, size_bytes=2 * side * side, samples=samples[1:])


def measure_pair(torch, gpus: tuple[int, int], devices: tuple[int, int], emit: Emit) -> None:
    """Copies between two GPUs, each way, both ways at once, and 8 bytes back and forth. Emits quantities pair, both, pair_latency."""
    torch.cuda.empty_cache()
    size = buffer_bytes(min(torch.cuda.mem_get_info(d)[0] for d in devices), 2, DEVICE_BUFFER_BYTES)
    if not size:
        return emit(note=f"GPU {gpus[0]} and GPU {gpus[1]}: not measured ({TOO_FULL})")
    sources, targets = ([torch.empty(size, dtype=torch.uint8, device=f"cuda:{d}") for d in devices] for _ in range(2))
    # torch makes a copy wait for the current streams of both devices, so two copies run at once only with a pair of streams each.
    streams = [[torch.cuda.Stream(device=d) for d in devices] for _ in range(2)]
    staged = [not torch.cuda.can_device_access_peer(devices[i], devices[1 - i]) for i in range(2)]

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    def copy(n: int, i: int) -> None:
        with torch.cuda.stream(streams[i][0]), torch.cuda.stream(streams[i][1]):
            targets[1 - i][:n].copy_(sources[i][:n], non_blocking=True)

    def copy_both(n: int) -> None:
        copy(n, 0)
        copy(n, 1)

    def there_and_back() -> None:
        # All on the same streams: each copy starts when the one before it has arrived.
        for i in (0, 1):
            targets[1 - i][:ANSWER_BYTES].copy_(targets[i][:ANSWER_BYTES], non_blocking=True)

    for i in range(2):
        where, one_way = f"GPU {gpus[i]} -> GPU {gpus[1 - i]}", functools.partial(copy, i=i)
        if not _delivers(torch, sources[i], targets[1 - i], one_way, wait):
            return emit(note=f"{where}: other bytes arrived than were sent (peer access {'off' if staged[i] else 'on'}), so no more is measured on this pair")
        n, samples = sample_rate(one_way, wait, size)
        emit(quantity="pair", where=where, through_host=staged[i], size_bytes=n, samples=samples)
    ends = {"where": f"GPU {gpus[0]} <-> GPU {gpus[1]}", "through_host": any(staged)}
    n, samples = sample_rate(copy_both, wait, size, counted=2)
    emit(quantity="both", **ends, size_bytes=n, samples=samples)
    elapsed_s(there_and_back, wait, ROUND_TRIPS)
    samples = [elapsed_s(there_and_back, wait, ROUND_TRIPS) / (2 * ROUND_TRIPS) * 1e6 for _ in range(SAMPLES)]
    emit(quantity="pair_latency", **ends, size_bytes=ANSWER_BYTES, samples=samples)


def _delivers(torch, source, target, copy: Callable[[int], None], wait: Callable[[], None]) -> bool:
    # Behind an IOMMU peer copies may corrupt memory silently (CUDA C++ Programming Guide, 'IOMMU on Linux').
    # Only copies are used here, no kernels: a card may be too old for those of this torch.
    n = min(PROBE_BYTES, len(source))
    pattern = torch.frombuffer(bytearray(os.urandom(n)), dtype=torch.uint8)
    source[:n].copy_(pattern)
    target[:n].copy_(torch.zeros(n, dtype=torch.uint8))
    wait()
    copy(n)
    wait()
    return torch.equal(target[:n].cpu(), pattern)


def measure_gpus(torch, gpus: int, pairs: list[tuple[int, int]], emit: Emit) -> None:
    """All GPUs and the given pairs, by the numbers nvidia-smi gives them (CUDA_DEVICE_ORDER=PCI_BUS_ID)."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return emit(note=f"GPU links not measured: torch {torch.__version__} is built without CUDA")
    try:
        torch.cuda.init()
    except Exception as error:
        return emit(note=f"GPU links not measured: torch {torch.__version__} finds no GPU it can use ({first_line(error)})")
    visible, seen = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus), torch.cuda.device_count()
    if visible is None or len(visible) != seen:
        why = "CUDA_VISIBLE_DEVICES does not list GPUs by number" if visible is None else f"torch sees {seen} GPUs where {len(visible)} should be"
        return emit(note=f"GPU links not measured: {why}, so which is which is not known")
    device_of = {gpu: device for device, gpu in enumerate(visible)}
    if hidden := [str(gpu) for gpu in range(gpus) if gpu not in device_of]:
        emit(note=f"not measured: GPU {', '.join(hidden)} (CUDA_VISIBLE_DEVICES leaves them out)")
    pinned = []
    attempt(emit, "pinned host memory", lambda: pinned.append(torch.empty(PINNED_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)))
    for gpu, device in device_of.items():
        attempt(emit, f"GPU {gpu}", functools.partial(measure_gpu, torch, gpu, device, pinned, emit))
        # The one measurement with a kernel, which this torch may not have for an old card.
        attempt(emit, f"GPU {gpu}, matrix product", functools.partial(measure_product, torch, gpu, device, emit))
    for a, b in (pair for pair in pairs if set(pair) <= set(device_of)):
        attempt(emit, f"GPU {a} and GPU {b}", functools.partial(measure_pair, torch, (a, b), (device_of[a], device_of[b]), emit))


def two_ranks(rank: Callable[[int, socket.socket], Any]) -> Any:
    """What rank(0, listener) returns, with rank(1, listener) in a process forked off before; that one is gone then. listener: for `join`."""
    from fieldbook import processes

    # Bound here and handed to the store, so that the port is free and only this machine can reach it. No file, so none can be left behind.
    listener = socket.create_server(("127.0.0.1", 0))
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            processes.die_with_parent()
            if os.getppid() == parent:
                rank(1, listener)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        return rank(0, listener)
    finally:
        # Its part is over with the last answer, or it is in the way.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def join(dist, backend: str, rank: int, listener: socket.socket, patience_s: float = PATIENCE_S) -> None:
    """Make this process one of two ranks of torch.distributed (`dist`), which find each other over the listener of `two_ranks`."""
    port, patience = listener.getsockname()[1], timedelta(seconds=patience_s)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, 2, True, patience, wait_for_workers=False, master_listen_fd=listener.detach())
    else:
        listener.close()
        store = dist.TCPStore("127.0.0.1", port, 2, False, patience)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=patience)


def measure_loopback(torch, emit: Emit) -> None:
    """Gloo between two processes over 127.0.0.1, as between pipeline ranks on the CPU. Emits quantities loopback, loopback_latency."""
    size, rates, latencies = two_ranks(functools.partial(_loopback_rank, torch))
    emit(quantity="loopback", where="loopback, gloo", through_host=False, size_bytes=size, samples=rates)
    emit(quantity="loopback_latency", where="loopback, gloo", through_host=False, size_bytes=ANSWER_BYTES, samples=latencies)


def _loopback_rank(torch, rank: int, listener: socket.socket) -> tuple[int, list[float], list[float]]:
    """(message bytes, GB/s of each sample, us of each sample) as this rank sees them; rank 0 sends first and its figures count."""
    dist = torch.distributed
    torch.set_num_threads(1)
    join(dist, "gloo", rank, listener)
    size = loopback_bytes(largest_cache_bytes())
    message, answer = torch.ones(size, dtype=torch.uint8), torch.ones(ANSWER_BYTES, dtype=torch.uint8)

    def round_trips_s(there, n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            for sender, tensor in ((0, there), (1, answer)):
                dist.send(tensor, 1 - rank) if rank == sender else dist.recv(tensor, 1 - rank)
        return time.perf_counter() - start

    # The first of each warms up. The answer, some 50 us, is in the time of a message of 64 MiB, some 20 ms: less than noise.
    rates = [size / round_trips_s(message, 1) / 1e9 for _ in range(SAMPLES + 1)]
    latencies = [round_trips_s(answer, ROUND_TRIPS) / (2 * ROUND_TRIPS) * 1e6 for _ in range(SAMPLES + 1)]
    return size, rates[1:], latencies[1:]


def work(measure: Callable[[Any, Emit], None], not_measured: str) -> None:
    """The whole of a measuring process: import torch, measure(torch, emit), end. not_measured: what a note begins with where torch cannot be imported."""
    # Libraries print where they like; stdout is for the results alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(**fields) -> None:
        print(json.dumps(fields), file=out, flush=True)

    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    emit(doing="import of torch")
    gc.disable()  # a tenth of the import's time goes into looking for garbage where there is none
    try:
        import torch
    except Exception as error:  # ImportError; OSError where one of its libraries is missing
        emit(note=f"{not_measured}: {sys.executable} cannot import torch ({first_line(error)})")
    else:
        measure(torch, emit)
    emit(done=True)
    out.close()
    # Taking torch down in good order costs a third of a second and gives nothing back that the kernel does not.
    os._exit(0)


def main() -> None:
    """Parse the arguments, and measure the GPUs, or loopback where there are none."""
    parser = argparse.ArgumentParser(description="Measure the links of this machine; one JSON document a line.")
    parser.add_argument("--gpus", type=int, required=True, help="how many GPUs there are; 0 measures two processes over loopback")
    parser.add_argument("--pairs", type=parse_pairs, default=[], help="pairs of GPUs to measure, as 0-1,0-4")
    arguments = parser.parse_args()

    def measure(torch, emit: Emit) -> None:
        if arguments.gpus:
            measure_gpus(torch, arguments.gpus, arguments.pairs, emit)
        else:
            attempt(emit, "loopback, gloo", lambda: measure_loopback(torch, emit))

    work(measure, "links not measured")


if __name__ == "__main__":
    main()
