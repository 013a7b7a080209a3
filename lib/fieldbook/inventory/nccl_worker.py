"""What two ranks get out of NCCL: `python -m fieldbook.inventory.nccl_worker --pair=0-1`. Started by measure.py, the only one to read it.

A copy by CUDA (measure_worker) says what a link carries; NCCL says what a pipeline or a tensor-parallel group gets of it, with the settings of the server's
own environment: two settings alone turn NVLink into host memory, and that into sockets. The lines on stdout are those of measure_worker.
"""

import argparse
import functools
import math
import os
import socket
from collections.abc import Callable

from .measure_worker import SAMPLE_S_MIN, SAMPLES, Emit, attempt, elapsed_s, join, parse_pairs, two_ranks, visible_gpus, work

MIB = 2**20
# A prefill's hidden states; and what a decode step of a few streams hands on.
LARGE_BYTES, SMALL_BYTES = 256 * MIB, 4096
ROUND_TRIPS = 50
LARGE_TIMES_MAX = 8
PATIENCE_S = 30


def times_for(once_s: float) -> int:
    """How often a sample repeats what takes once_s, so that starting and awaiting it do not count."""
    return max(1, min(LARGE_TIMES_MAX, math.ceil(SAMPLE_S_MIN / max(once_s, 1e-9))))


def rank(torch, number: int, device: str, listener: socket.socket, backend: str, large_bytes: int) -> dict[str, tuple[int, list[float]]]:
    """{quantity: (bytes, samples)} as one of the two ranks sees them. Rank 0 sends, and its figures count."""
    dist = torch.distributed
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    join(dist, backend, number, listener, PATIENCE_S)
    large, small = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (large_bytes, SMALL_BYTES))
    # NCCL adds numbers, not bytes; a CPU adds those of 16 bits slower than a link brings them.
    kind, width = (torch.bfloat16, 2) if on_gpu else (torch.float32, 4)
    numbers = {n: torch.zeros(n // width, dtype=kind, device=device) for n in (large_bytes, SMALL_BYTES)}

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    def send() -> None:
        dist.send(large, 1) if number == 0 else dist.recv(large, 0)

    def there_and_back() -> None:
        for sender in (0, 1):
            dist.send(small, 1 - number) if number == sender else dist.recv(small, 1 - number)

    def reduce(n: int) -> None:
        dist.all_reduce(numbers[n])

    def agreed(value: int) -> int:
        # Both ranks have to repeat as often.
        told = torch.tensor([value], device=device)
        dist.broadcast(told, 0)
        return int(told.item())

    def rates(one: Callable[[], None], sent_bytes: float) -> list[float]:
        elapsed_s(one, wait, 1)
        times = agreed(times_for(elapsed_s(one, wait, 1)))
        return [times * sent_bytes / elapsed_s(one, wait, times) / 1e9 for _ in range(SAMPLES + 1)][1:]

    def latencies(one: Callable[[], None], steps: int) -> list[float]:
        return [elapsed_s(one, wait, ROUND_TRIPS) / (steps * ROUND_TRIPS) * 1e6 for _ in range(SAMPLES + 1)][1:]

    # Two ranks of a ring send each of their halves twice: as much as the whole.
    found = {
        "nccl": (large_bytes, rates(send, large_bytes)),
        "nccl_latency": (SMALL_BYTES, latencies(there_and_back, 2)),
        "nccl_reduce": (large_bytes, rates(functools.partial(reduce, large_bytes), large_bytes)),
        "nccl_reduce_latency": (SMALL_BYTES, latencies(functools.partial(reduce, SMALL_BYTES), 1)),
    }
    dist.barrier()
    return found


def measure(
    torch, gpus: tuple[int, int], devices: tuple[str, str], emit: Emit, backend: str = "nccl", large_bytes: int = LARGE_BYTES
) -> None:
    """Both ranks, one of them forked off before CUDA is touched. Emits quantities nccl, nccl_latency, nccl_reduce, nccl_reduce_latency."""
    found = two_ranks(lambda number, listener: rank(torch, number, devices[number], listener, backend, large_bytes))
    for quantity, (size, samples) in found.items():
        where = f"GPU {gpus[0]} -> GPU {gpus[1]}" if quantity == "nccl" else f"GPU {gpus[0]} <-> GPU {gpus[1]}"
        emit(quantity=quantity, where=where, through_host=False, size_bytes=size, samples=samples)


def main() -> None:
    """Parse the argument, and measure the pair."""
    parser = argparse.ArgumentParser(description="Measure what NCCL carries between two GPUs; one JSON document a line.")
    parser.add_argument("--pair", type=parse_pairs, required=True, help="the two GPUs by nvidia-smi's numbers, as 0-1")
    ((a, b),) = parser.parse_args().pair
    label = f"NCCL between GPU {a} and GPU {b}"

    def measure_pair(torch, emit: Emit) -> None:
        visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), max(a, b) + 1)
        if visible is None or not {a, b} <= set(visible):
            emit(note=f"{label}: not measured (CUDA_VISIBLE_DEVICES leaves one out, or does not list GPUs by number)")
        elif not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            emit(note=f"{label}: not measured (torch {torch.__version__} has no NCCL)")
        else:
            devices = (f"cuda:{visible.index(a)}", f"cuda:{visible.index(b)}")
            attempt(emit, label, lambda: measure(torch, (a, b), devices, emit))

    work(measure_pair, f"{label}: not measured")


if __name__ == "__main__":
    main()
