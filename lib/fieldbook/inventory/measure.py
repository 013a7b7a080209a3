"""What the links of this machine carry, measured in a process of its own: planning loads no torch, and a link that hangs takes only that process along."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from fieldbook import processes

from .links import gpu_pcie_gb_s
from .model import Gpu, Link, Measurement, Spread

WORKER = "fieldbook.inventory.measure_worker"
NCCL_WORKER = "fieldbook.inventory.nccl_worker"
NCCL_TIMEOUT_S = 60
THROUGH_HOST = ", through host"
# Quantity of the worker -> what was timed, in words, and its unit. Copies: from all GPUs at rest to all GPUs at rest again, the start of the copies included.
WHAT = {
    "h2d": ("host to device, pinned memory", "GB/s"),
    "d2h": ("device to host, pinned memory", "GB/s"),
    "copy": ("device copy, bytes read + bytes written", "GB/s"),
    "product": ("product of two square matrices of 16-bit floats", "TFLOP/s"),
    "pair": ("copy between two GPUs", "GB/s"),
    "both": ("copies both ways at once, sum of both", "GB/s"),
    "pair_latency": ("8 bytes copied there and back in stream order, half the round trip", "us"),
    "nccl": ("send/recv of two ranks through NCCL", "GB/s"),
    "nccl_latency": ("4 KiB sent there and back through NCCL in stream order, half the round trip", "us"),
    "nccl_reduce": ("all-reduce of two ranks through NCCL, bytes that each sends", "GB/s"),
    "nccl_reduce_latency": ("all-reduce of 4 KiB by two ranks through NCCL", "us"),
    "loopback": ("send/recv between two processes, until an 8-byte answer is back", "GB/s"),
    "loopback_latency": ("8 bytes sent and 8 received by two processes, half the round trip", "us"),
}
# Under which name a link has what NCCL makes of it.
NCCL_KEYS = {
    "nccl": "{}->{} through NCCL", "nccl_latency": "{}<->{} through NCCL",
    "nccl_reduce": "{}<->{} all-reduce through NCCL", "nccl_reduce_latency": "{}<->{} all-reduce through NCCL",
}  # fmt: skip
ALL_PAIRS_UP_TO_GPUS = 4
# Clocks and link rates are told rounded.
GPU_SLACK = 1.05
# A process in the middle of a driver call ends late, or never.
END_S = 5.0


def pairs_to_measure(gpu_count: int, pairs: list[tuple[int, int]] | None = None) -> list[tuple[int, int]]:
    """Pairs a < b: all of up to 4 GPUs; of more the given ones (one for each kind of link), or GPU 0 with each other where none are given."""
    if gpu_count <= ALL_PAIRS_UP_TO_GPUS:
        return [(a, b) for a in range(gpu_count) for b in range(a + 1, gpu_count)]
    chosen = {(min(pair), max(pair)) for pair in ([(0, b) for b in range(1, gpu_count)] if pairs is None else pairs)}
    return sorted((a, b) for a, b in chosen if 0 <= a < b < gpu_count)


def measure(
    gpu_count: int, pairs: list[tuple[int, int]] | None = None, timeout_s: float = 60, nccl_env: dict[str, str] | None = None
) -> tuple[list[Measurement], list[str]]:
    """(measurements, notes why something could not be measured) of the GPUs nvidia-smi numbers 0 to gpu_count - 1, or of loopback where there are none.

    Every pair is measured each way, both ways at once, and with 8 bytes; then through NCCL, with nccl_env on top of this environment (None: not through
    NCCL). Nothing raises but an interrupt; what was measured before the time limit is kept. When this returns or is interrupted, the measuring process and
    its children are gone.
    """
    chosen = pairs_to_measure(gpu_count, pairs)
    found, notes = _asked([f"--gpus={gpu_count}", f"--pairs={','.join(f'{a}-{b}' for a, b in chosen)}"], WORKER, timeout_s)
    # What arrives garbled by a copy is no link for NCCL either.
    sound = [pair for pair in chosen if any(_quantity(m) == "pair" and set(_ends(m)) == set(pair) for m in found)]
    for a, b in sound if nccl_env is not None else []:
        more, told = _asked([f"--pair={a}-{b}"], NCCL_WORKER, NCCL_TIMEOUT_S, nccl_env)
        found, notes = found + more, notes + told
    return found, notes


def _asked(words: list[str], worker: str, timeout_s: float, env: dict[str, str] | None = None) -> tuple[list[Measurement], list[str]]:
    try:
        out, err, status = _run([sys.executable, "-m", worker, *words], timeout_s, env)
    except (OSError, subprocess.SubprocessError) as error:
        return [], [f"links not measured: {sys.executable} cannot be started ({error})"]
    return read_results(out, err, f"stopped after {timeout_s:g} s" if status is None else _ending(status))


def read_results(out: str, err: str, ending: str) -> tuple[list[Measurement], list[str]]:
    """(measurements, notes) from the worker's stdout. Where its last line is missing, `ending` and the last line of its stderr say why."""
    measured, notes, doing, done = [], [], "start of the measuring process", False
    for line in out.splitlines():
        try:
            result = json.loads(line)
        except ValueError:  # cut off in the middle of a line
            continue
        doing, done = result.get("doing", doing), result.get("done", done)
        if "note" in result:
            notes.append(result["note"])
        if "quantity" in result:
            what, unit = WHAT[result["quantity"]]
            what += THROUGH_HOST if result["through_host"] else ""
            spread = spread_of(result["samples"])
            measured.append(Measurement(what=what, where=result["where"], unit=unit, size_bytes=result["size_bytes"], spread=spread))
    if not done:
        last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
        notes.append(f"links: measuring {ending} at: {doing}; what would have followed is not measured{f' ({last})' if last else ''}")
    return measured, notes


def spread_of(samples: list[float]) -> Spread:
    """Spread of at least one sample, to three decimals."""
    low, middle, high = (round(value, 3) for value in (min(samples), statistics.median(samples), max(samples)))
    return Spread(min=low, median=middle, max=high, samples=len(samples))


def _run(argv: list[str], timeout_s: float, env: dict[str, str] | None = None) -> tuple[str, str, int | None]:
    """(stdout, stderr, exit status or None when the time was up) of a worker in a session of its own, of which nothing is left afterwards."""
    # One thread: copies need no more, and the worker forks.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(env or {})}
    if Path("/sys/class/net/lo").exists():
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    worker = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        **pipes,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
        preexec_fn=processes.die_with_parent,
    )
    leader = processes.identify(worker.pid)
    status, out, err = None, "", ""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, err = worker.communicate(timeout=timeout_s)
            status = worker.returncode
    finally:
        if leader:
            processes.end_session(leader, 0)
        if status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = worker.communicate(timeout=END_S)
    return out, err, status


def _ending(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"


def with_ceilings(measured: list[Measurement], gpus: list[Gpu], links: list[Link], memory_read_bytes_s: float | None) -> list[Measurement]:
    """The same measurements with what each cannot exceed, in its unit, where the box tells it. Matrix product: the data sheet's rate.

    Host copies: the GPU's PCIe link. Device copy: memory clock x 2 transfers x bus width / 8. Pairs: the link between them, or the slower of
    their PCIe links where the way leads through the host; both ways at once twice that. Loopback: the memory's read rate. Latencies have none.
    """
    by_index = {gpu.index: gpu for gpu in gpus}
    by_pair = {(link.a, link.b): link for link in links}

    def ceiling(m: Measurement) -> tuple[float | None, str | None]:
        quantity, ends = _quantity(m), _ends(m)
        if quantity == "loopback" and memory_read_bytes_s:
            return memory_read_bytes_s / 1e9, "read rate of the memory: each byte is read from it once at least"
        if quantity == "copy":
            return memory_ceiling_gb_s(by_index.get(ends[0], Gpu()))
        if quantity == "product":
            from fieldbook.strategy.datasheets import tensor_tflops

            rate = tensor_tflops(by_index.get(ends[0], Gpu()))
            return rate, f"data sheet of {by_index[ends[0]].name}" if rate else None
        if quantity in ("h2d", "d2h"):
            return gpu_pcie_gb_s(by_index.get(ends[0], Gpu()))
        if quantity not in ("pair", "both", "nccl", "nccl_reduce"):
            return None, None
        if m.what.endswith(THROUGH_HOST):
            rate, source = min((gpu_pcie_gb_s(by_index.get(end, Gpu())) for end in ends), key=lambda found: found[0] or 0)
            source = f"{source}, the slower end"
        else:
            link = by_pair.get((min(ends), max(ends)))
            rate, source = (link.theoretical_gb_s, link.theoretical_source) if link else (None, None)
        return (2 * rate, f"twice {source or 'the link'}: both ways") if rate and quantity == "both" else (rate, source)

    found = [(m, *ceiling(m)) for m in measured]
    return [m.model_copy(update={"ceiling": round(rate, 3), "ceiling_source": source}) if rate else m for m, rate, source in found]


def above_ceiling(measured: list[Measurement]) -> list[Measurement]:
    """Measurements whose best sample exceeds the ceiling, so that timing or ceiling must be wrong; links of GPUs get 5% for the rounding of clocks."""
    return [m for m in measured if m.ceiling is not None and m.spread.max > m.ceiling * (GPU_SLACK if _ends(m) else 1)]


def attach(links: list[Link], measured: list[Measurement]) -> list[Link]:
    """The links with what was measured on them: rates under '0->1', '1->0' and '0<->1' (sum), latency under '0<->1', with ' through host' where so; what
    NCCL makes of it under '0->1 through NCCL' and '0<->1 all-reduce through NCCL', its latencies likewise."""
    rates: dict[tuple[int, int], dict[str, Spread]] = {}
    latencies: dict[tuple[int, int], dict[str, Spread]] = {}
    for m in measured:
        quantity, ends = _quantity(m), _ends(m)
        if quantity in ("pair", "both", "pair_latency"):
            key = f"{ends[0]}{'->' if quantity == 'pair' else '<->'}{ends[1]}{' through host' if m.what.endswith(THROUGH_HOST) else ''}"
            (latencies if quantity == "pair_latency" else rates).setdefault((min(ends), max(ends)), {})[key] = m.spread
        elif quantity in NCCL_KEYS:
            kept = latencies if quantity.endswith("latency") else rates
            kept.setdefault((min(ends), max(ends)), {})[NCCL_KEYS[quantity].format(*ends)] = m.spread
    return [
        link.model_copy(
            update={
                "measured_gb_s": {**link.measured_gb_s, **rates.get((link.a, link.b), {})},
                "measured_latency_us": {**link.measured_latency_us, **latencies.get((link.a, link.b), {})},
            }
        )
        for link in links
    ]


def _quantity(m: Measurement) -> str | None:
    return next((quantity for quantity, (what, _) in WHAT.items() if what == m.what.removesuffix(THROUGH_HOST)), None)


def _ends(m: Measurement) -> list[int]:
    """GPU numbers in `where`, in its order: 'GPU 0 -> GPU 1' -> [0, 1]; none for loopback."""
    return [int(number) for number in re.findall(r"GPU (\d+)", m.where)]


def memory_ceiling_gb_s(gpu: Gpu) -> tuple[float | None, str | None]:
    """(GB/s, how it was found) that a GPU's own memory can carry at most: clock x 2 transfers x bus width / 8. (None, None) where the driver tells less."""
    clock_mhz, width_bits = gpu.clock_memory_max_mhz or gpu.clock_memory_mhz, gpu.memory_bus_width_bits
    if not clock_mhz or not width_bits:
        return None, None
    return clock_mhz * 2 * width_bits / 8 / 1e3, f"memory: {clock_mhz} MHz x 2 x {width_bits} bit / 8"
