"""Measuring links: planning by values worked by hand, the loopback for real, the GPU path on a stand-in for torch, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from conftest import python, until

from fieldbook.inventory import measure as m
from fieldbook.inventory import measure_worker as w
from fieldbook.inventory.model import Gpu, Link, Measurement, Spread

GIB = 2**30
H200 = {"pcie_generation_max": 5, "pcie_generation": 1, "pcie_width_lanes": 16, "clock_memory_max_mhz": 3201, "memory_bus_width_bits": 6016}
# Both processes of the loopback stop where they would meet.
HANGING_TORCH = """
import time
from types import SimpleNamespace
set_num_threads = lambda n: None
distributed = SimpleNamespace(TCPStore=lambda *a, **k: time.sleep(60))
"""


def rate(what, where, low, high=None, through_host=False):
    text, unit = m.WHAT[what]
    spread = Spread(min=low, median=low, max=high or low, samples=7)
    return Measurement(what=text + (m.THROUGH_HOST if through_host else ""), where=where, unit=unit, size_bytes=8, spread=spread)


@pytest.fixture
def mark(monkeypatch):
    """A word in the environment of everything started from here; calling the fixture lists the processes that have it."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("FIELDBOOK_TEST_MARK", word)

    def marked():
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FIELDBOOK_TEST_MARK") == word and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass
        return found

    return marked


@pytest.fixture
def other_torch(tmp_path, monkeypatch):
    """Put a module named torch before the real one, for processes started from here."""

    def put(text):
        (tmp_path / "torch.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return put


# ---- planning -------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (0, None, []),
        (1, None, []),
        (2, None, [(0, 1)]),
        (4, [(0, 1)], [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        (8, [(0, 1), (4, 0), (0, 4), (3, 3), (7, 8)], [(0, 1), (0, 4)]),
        (5, None, [(0, 1), (0, 2), (0, 3), (0, 4)]),
        (8, [], []),
    ],
)
def test_pairs(gpus, given, expected):
    assert m.pairs_to_measure(gpus, given) == expected


def test_buffers_take_at_most_a_twentieth_of_free_memory():
    assert w.buffer_bytes(140 * GIB, 2, GIB) == GIB  # 5% are 7 GiB, 3.5 for each of two: the cap counts
    assert w.buffer_bytes(8 * GIB, 2, GIB) == 128 * w.MIB  # 0.2 GiB each, down to a power of two
    assert w.buffer_bytes(GIB - 1, 2, GIB) == 0
    for free in (GIB, 3 * GIB + 5, 79 * GIB):
        assert 2 * w.buffer_bytes(free, 2, GIB) <= 0.05 * free


def test_samples_last_10_to_30_ms():
    assert w.plan(400e9, GIB) == (GIB, 4)  # 4 GiB take 10.7 ms
    assert w.plan(55e9, 256 * w.MIB) == (256 * w.MIB, 3)
    assert w.plan(0.8e9, GIB) == (16 * w.MIB, 1)  # PCIe Gen1 x4: 21 ms
    assert w.plan(1e6, GIB) == (8 * w.MIB, 1)
    assert w.plan(9e12, GIB) == (GIB, 16)
    assert w.plan(9e12, 4 * w.MIB) == (4 * w.MIB, 16)


def test_cuda_visible_devices():
    assert w.visible_gpus(None, 3) == [0, 1, 2]
    assert w.visible_gpus("3, 1", 4) == [3, 1]
    assert w.visible_gpus("", 2) == []
    assert w.visible_gpus("GPU-5a", 2) is None


def test_arguments_and_caches(tmp_path):
    assert w.parse_pairs("0-1,0-12") == [(0, 1), (0, 12)]
    assert w.parse_pairs("") == []
    for index, size in enumerate(("32K", "1024K", "98304K", "?")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert w.largest_cache_bytes(tmp_path) == 96 * w.MIB
    assert w.largest_cache_bytes(tmp_path / "none") == 0
    assert [w.loopback_bytes(n * w.MIB) // w.MIB for n in (0, 32, 96, 512)] == [64, 64, 192, 256]


def test_planning_loads_no_torch():
    code = "import sys; from fieldbook.inventory import measure; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run(python(code), capture_output=True, text=True).stdout == "[]\n"


# ---- results --------------------------------------------------------------------------------------------------------------------------------------------


def test_results_of_a_worker_that_stopped_half_way():
    finished = '{"quantity": "h2d", "where": "GPU 0", "through_host": false, "size_bytes": 8, "samples": [3.0, 1.0, 2.0, 9.0]}'
    out = f'{{"doing": "GPU 0"}}\n{finished}\n{{"doing": "GPU 1"}}\n{{"qua'
    measured, notes = m.read_results(out, "a\nCUDA error: unspecified launch failure\n\n", "was killed by SIGKILL")
    assert [(x.where, x.spread) for x in measured] == [("GPU 0", Spread(min=1.0, median=2.5, max=9.0, samples=4))]
    assert notes == [
        "links: measuring was killed by SIGKILL at: GPU 1; what would have followed is not measured (CUDA error: unspecified launch failure)",
    ]
    assert m.read_results('{"note": "n"}\n{"done": true}\n', "warnings", "") == ([], ["n"])


def test_ceilings_by_hand():
    gpus = [Gpu(index=0, **H200), Gpu(index=1, **H200), Gpu(index=2, pcie_generation_max=2, pcie_width_lanes=4), Gpu(index=3)]
    links = [Link(a=0, b=1, theoretical_gb_s=478.116, theoretical_source="18 NVLinks x 26.562 GB/s"), Link(a=0, b=2, theoretical_gb_s=2.0)]
    measured = [
        rate("h2d", "GPU 0", 54.8),
        rate("d2h", "GPU 2", 1.6),
        rate("copy", "GPU 0", 4138.9),
        rate("copy", "GPU 2", 900.0),
        rate("pair", "GPU 1 -> GPU 0", 392.0),
        rate("both", "GPU 0 <-> GPU 1", 750.0),
        rate("pair_latency", "GPU 0 <-> GPU 1", 21.0),
        rate("pair", "GPU 0 -> GPU 2", 1.5, through_host=True),
        rate("both", "GPU 0 <-> GPU 2", 2.5, through_host=True),
        rate("pair", "GPU 0 -> GPU 3", 1.5, through_host=True),
        rate("pair", "GPU 2 -> GPU 3", 1.5),
        rate("loopback", "loopback, gloo", 3.0),
        rate("loopback_latency", "loopback, gloo", 50.0),
    ]
    found = m.with_ceilings(measured, gpus, links, 21.5e9)
    # 32 GT/s x 128/130 x 16 lanes / 8 bit; 5 GT/s x 0.8 x 4 / 8; 3201 MHz x 2 x 6016 bit / 8.
    assert [x.ceiling for x in found] == [63.015, 2.0, 4814.304, None, 478.116, 956.232, None, 2.0, 4.0, None, None, 21.5, None]
    assert found[0].ceiling_source == "PCIe Gen5 x16"
    assert found[2].ceiling_source == "memory: 3201 MHz x 2 x 6016 bit / 8"
    assert found[5].ceiling_source == "twice 18 NVLinks x 26.562 GB/s: both ways"
    assert found[7].ceiling_source == "PCIe Gen2 x4, the slower end"
    assert [x.spread for x in found] == [x.spread for x in measured]
    assert m.above_ceiling(found) == []
    assert all(x.ceiling is None for x in m.with_ceilings(measured, [], [], None))


def test_above_the_ceiling():
    gpus = [Gpu(index=0, **H200)]
    measured = [rate("h2d", "GPU 0", 54.8, 66.1), rate("d2h", "GPU 0", 54.8, 66.2), rate("loopback", "loopback, gloo", 3.0, 10.01), rate("copy", "GPU 0", 1.0)]
    found = m.with_ceilings(measured, gpus, [], 10e9)
    assert [x.what for x in m.above_ceiling(found)] == [m.WHAT["d2h"][0], m.WHAT["loopback"][0]]  # 63.015 x 1.05 = 66.17


def test_attach():
    measured = [
        rate("pair", "GPU 0 -> GPU 1", 392.0),
        rate("pair", "GPU 1 -> GPU 0", 391.0),
        rate("both", "GPU 0 <-> GPU 1", 750.0),
        rate("pair_latency", "GPU 0 <-> GPU 1", 21.0),
        rate("pair", "GPU 10 -> GPU 0", 1.5, through_host=True),
        rate("h2d", "GPU 0", 54.8),
    ]
    near, far, other = m.attach([Link(a=0, b=1, kind="NV18"), Link(a=0, b=10), Link(a=1, b=10)], measured)
    assert {key: spread.median for key, spread in near.measured_gb_s.items()} == {"0->1": 392.0, "1->0": 391.0, "0<->1": 750.0}
    assert {key: spread.median for key, spread in near.measured_latency_us.items()} == {"0<->1": 21.0}
    assert near.kind == "NV18"
    assert {key: spread.median for key, spread in far.measured_gb_s.items()} == {"10->0 through host": 1.5}
    assert other == Link(a=1, b=10)


# ---- loopback, for real ---------------------------------------------------------------------------------------------------------------------------------


def memory_read_bytes_s():
    buffers, best = np.ones(2**24, dtype=np.float32), 0.0
    for _ in range(10):
        start = time.perf_counter()
        np.maximum.reduce(buffers)
        best = max(best, buffers.nbytes / (time.perf_counter() - start))
    return best


def test_loopback(tmp_path, monkeypatch, mark):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    start = time.monotonic()
    measured, notes = m.measure(0)
    took_s = time.monotonic() - start
    assert mark() == []
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared
    assert notes == []
    bandwidth, latency = m.with_ceilings(measured, [], [], memory_read_bytes_s())
    assert (bandwidth.unit, latency.unit) == ("GB/s", "us")
    for x in measured:
        assert x.where == "loopback, gloo"
        assert x.spread.samples >= 5
        assert x.spread.min <= x.spread.median <= x.spread.max
    assert bandwidth.spread.min > 0.05
    assert bandwidth.spread.max < bandwidth.ceiling
    assert m.above_ceiling([bandwidth, latency]) == []
    assert bandwidth.size_bytes >= 64 * w.MIB
    assert 2 < latency.spread.median < 5000
    assert took_s < 10  # 1.4 s on two idle cores


# ---- what goes wrong ------------------------------------------------------------------------------------------------------------------------------------


def test_time_limit(other_torch, mark, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    other_torch(HANGING_TORCH)
    start = time.monotonic()
    measured, notes = m.measure(0, timeout_s=1.5)
    assert time.monotonic() - start < 4
    assert measured == []
    assert notes == ["links: measuring stopped after 1.5 s at: loopback, gloo; what would have followed is not measured"]
    assert mark() == []
    assert {path.name for path in tmp_path.iterdir()} <= {"torch.py", "__pycache__"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted(other_torch, mark, number):
    other_torch(HANGING_TORCH)
    # A shell gives what it starts in the background a SIGINT that is ignored; the caller under test is one at a terminal.
    at_terminal = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    caller = subprocess.Popen(python("from fieldbook.inventory import measure; measure.measure(0)"), stderr=subprocess.DEVNULL, **at_terminal)
    try:
        assert until(lambda: len(mark()) == 3)  # the caller, the worker, its second rank
        workers = [process for process in mark() if process.pid != caller.pid]
        listening = [c.laddr.ip for process in workers for c in process.net_connections()]
        assert listening and set(listening) == {"127.0.0.1"}
        caller.send_signal(number)
        caller.wait(10)
        assert until(lambda: not mark())
    finally:
        caller.kill()
        caller.wait()


def test_torch_missing(other_torch):
    other_torch("raise ModuleNotFoundError(\"No module named 'torch'\")")
    for gpus in (0, 2):
        assert m.measure(gpus) == ([], [f"links not measured: {sys.executable} cannot import torch (No module named 'torch')"])


def test_worker_killed(other_torch, mark):
    other_torch("import os; os.kill(os.getpid(), 9)")
    measured, notes = m.measure(2)
    assert measured == []
    assert notes == ["links: measuring was killed by SIGKILL at: import of torch; what would have followed is not measured"]
    assert mark() == []


def test_worker_fails(other_torch):
    other_torch("print('hello'); set_num_threads = 1")
    measured, notes = m.measure(0)
    assert measured == []
    assert notes == ["loopback, gloo: not measured (module 'torch' has no attribute 'distributed')"]


def test_python_missing(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    measured, notes = m.measure(0)
    assert measured == [] and "/no/python cannot be started" in notes[0]


def test_gpus_without_cuda():
    torch = stand_in(gpus=0)
    torch.version.cuda = None
    assert emitted(torch, 1, []) == [{"note": "GPU links not measured: torch 9 is built without CUDA"}]


# ---- the GPU path on a stand-in -------------------------------------------------------------------------------------------------------------------------


class Tensor:
    """Bytes that know how to copy themselves, as far as the worker asks for it."""

    def __init__(self, array, device=None, log=None, garble=False):
        self.array, self.device, self.log, self.garble = array, device, log, garble

    def __len__(self):
        return len(self.array)

    def __getitem__(self, part):
        return Tensor(self.array[part], self.device, self.log, self.garble)

    def copy_(self, source, non_blocking=False):
        self.array[:] = source.array
        if self.garble and source.device and self.device != source.device:
            self.array[-1] ^= 1
        if self.log is not None:
            self.log.append((source.device, self.device, len(self)))

    def cpu(self):
        return self


def stand_in(gpus=2, free_bytes=2 * GIB, peers=True, garble=False, pinned=True):
    """What the worker uses of torch, on the CPU; .log holds (from, to, bytes) of every copy."""
    log = []

    def empty(n, dtype=None, device=None, pin_memory=False):
        if pin_memory and not pinned:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return Tensor(np.empty(n, np.uint8), device or "host", log, garble)

    @contextmanager
    def stream(which):
        yield

    def can_device_access_peer(a, b):
        return peers if isinstance(peers, bool) else (a, b) in peers

    cuda = SimpleNamespace(
        init=lambda: None,
        device_count=lambda: gpus,
        mem_get_info=lambda device: (free_bytes, free_bytes),
        set_device=lambda device: None,
        synchronize=lambda device: None,
        Stream=lambda device: device,
        stream=stream,
        can_device_access_peer=can_device_access_peer,
        empty_cache=lambda: None,
        get_device_capability=lambda device: (9, 0),
    )

    def matmul(one, other, out):
        assert one.shape == other.shape == out.shape and one.dtype == "bf16"
        time.sleep(1e-4)

    return SimpleNamespace(
        log=log,
        cuda=cuda,
        uint8=np.uint8,
        __version__="9",
        version=SimpleNamespace(cuda="13"),
        empty=empty,
        zeros=lambda n, dtype: Tensor(np.zeros(n, dtype)),
        frombuffer=lambda data, dtype: Tensor(np.frombuffer(data, dtype)),
        equal=lambda one, other: np.array_equal(one.array, other.array),
        bfloat16="bf16",
        float16="f16",
        randn=lambda *shape, device, dtype: SimpleNamespace(shape=shape, dtype=dtype),
        empty_like=lambda one: one,
        matmul=matmul,
    )


def emitted(torch, gpus, pairs):
    lines = []
    with patch.multiple(w, SAMPLE_S_MIN=0.001, SAMPLE_S_MAX=0.004):
        w.measure_gpus(torch, gpus, pairs, lambda **fields: lines.append(fields))
    return lines


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def results(lines):
    return [(x["quantity"], x["where"], x["through_host"]) for x in lines if "quantity" in x]


def test_two_gpus():
    torch = stand_in()
    lines = emitted(torch, 2, [(0, 1)])
    assert results(lines) == [
        *((quantity, f"GPU {gpu}", False) for gpu in (0, 1) for quantity in ("h2d", "d2h", "copy", "product")),
        ("pair", "GPU 0 -> GPU 1", False),
        ("pair", "GPU 1 -> GPU 0", False),
        ("both", "GPU 0 <-> GPU 1", False),
        ("pair_latency", "GPU 0 <-> GPU 1", False),
    ]
    assert [x["note"] for x in lines if "note" in x] == []
    assert all(len(x["samples"]) >= 5 and min(x["samples"]) > 0 and x["size_bytes"] <= 32 * w.MIB for x in lines if "quantity" in x)
    assert lines[-1]["size_bytes"] == 8
    ways = {(source, target) for source, target, n in torch.log if source and n > 8}
    assert ways == {(f"cuda:{a}", f"cuda:{b}") for a, b in ((0, 0), (1, 1), (0, 1), (1, 0))} | {
        way for d in (0, 1) for way in (("host", f"cuda:{d}"), (f"cuda:{d}", "host"))
    }


def test_rates_count_bytes_as_said(monkeypatch):
    clock = [0.0]

    def copy(n):
        clock[0] += n / 10e9

    monkeypatch.setattr(w.time, "perf_counter", lambda: clock[0])
    size, samples = w.sample_rate(copy, lambda: None, GIB)
    assert size == 256 * w.MIB  # 27 ms; twice that would be above 30
    assert samples == pytest.approx([10.0] * w.SAMPLES)
    assert w.sample_rate(copy, lambda: None, GIB, counted=2)[1] == pytest.approx([20.0] * w.SAMPLES)


def test_pair_without_peer_access_goes_through_the_host():
    lines = emitted(stand_in(peers={(0, 1)}), 2, [(0, 1)])
    assert results(lines)[-4:] == [
        ("pair", "GPU 0 -> GPU 1", False),
        ("pair", "GPU 1 -> GPU 0", True),
        ("both", "GPU 0 <-> GPU 1", True),
        ("pair_latency", "GPU 0 <-> GPU 1", True),
    ]


def test_pair_that_delivers_garbage_gets_no_rate():
    lines = emitted(stand_in(garble=True), 2, [(0, 1)])
    assert [quantity for quantity, *_ in results(lines)] == ["h2d", "d2h", "copy", "product"] * 2
    assert lines[-1] == {"note": "GPU 0 -> GPU 1: other bytes arrived than were sent (peer access on), so no more is measured on this pair"}


def test_full_gpu_and_no_pinned_memory():
    lines = emitted(stand_in(free_bytes=GIB - 1), 2, [(0, 1)])
    assert [x["note"] for x in lines if "note" in x] == [
        "GPU 0: not measured (less than 1 GiB of GPU memory is free)",
        "GPU 1: not measured (less than 1 GiB of GPU memory is free)",
        "GPU 0 and GPU 1: not measured (less than 1 GiB of GPU memory is free)",
    ]
    lines = emitted(stand_in(gpus=1, pinned=False), 1, [])
    assert results(lines) == [("copy", "GPU 0", False), ("product", "GPU 0", False)]
    assert {"note": "pinned host memory: not measured (CUDA error: out of memory)"} in lines


def test_some_gpus_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    torch = stand_in(gpus=2)
    lines = emitted(torch, 3, [(0, 1), (0, 2)])
    assert {where for _, where, _ in results(lines)} == {"GPU 0", "GPU 2", "GPU 0 -> GPU 2", "GPU 2 -> GPU 0", "GPU 0 <-> GPU 2"}
    assert {"note": "not measured: GPU 1 (CUDA_VISIBLE_DEVICES leaves them out)"} in lines
    assert emitted(stand_in(gpus=1), 3, []) == [
        {"note": "GPU links not measured: torch sees 1 GPUs where 2 should be, so which is which is not known"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert "does not list GPUs by number" in emitted(stand_in(gpus=1), 1, [])[0]["note"]


def test_worker_as_a_file():
    """On a machine with torch alone the file runs by itself."""
    file = Path(w.__file__)
    done = subprocess.run([sys.executable, "-I", str(file), "--gpus=1", "--pairs=0-x"], capture_output=True, text=True)
    assert done.returncode == 2 and "--pairs" in done.stderr
