"""What is in the box: small captures written out here, the real ones beside the checkout, and this machine against psutil."""

import json
import os
import types

import psutil
import pytest
from conftest import ROOT

from fieldbook import inventory

CAPTURE = ROOT.parent / "shared" / "captures" / "h200-x1"
MEMINFO = "MemTotal:       131072000 kB\nMemFree:        1024 kB\nMemAvailable:   65536000 kB\nHugePages_Total:       0\n"
NUMACTL = """\
available: 2 nodes (0-1)
node 0 cpus: 0 1 2 3
node 0 size: 64000 MB
node 0 free: 100 MB
node 1 cpus:
node 1 size: 32000 MB
node distances:
node   0   1
  0:  10  20
"""
LSCPU = [
    {"field": "Architecture:", "data": "x86_64", "children": [{"field": "CPU op-mode(s):", "data": "64-bit"}]},
    {"field": "CPU(s):", "data": "8", "children": [{"field": "On-line CPU(s) list:", "data": "0-7"}]},
    {
        "field": "Vendor ID:",
        "data": "GenuineIntel",
        "children": [
            {
                "field": "Model name:",
                "data": "A Processor",
                "children": [
                    {"field": "Thread(s) per core:", "data": "2"},
                    {"field": "Core(s) per socket:", "data": "2"},
                    {"field": "Socket(s):", "data": "2"},
                    {"field": "Flags:", "data": "fpu avx2 avx512f xavx512_bf16"},
                ],
            }
        ],
    },
]


@pytest.fixture
def capture(tmp_path):
    (tmp_path / "lscpu.json").write_text(json.dumps({"lscpu": LSCPU}))
    (tmp_path / "meminfo.txt").write_text(MEMINFO)
    (tmp_path / "numactl-H.txt").write_text(NUMACTL)
    return tmp_path


def test_a_capture_worked_by_hand(capture):
    box = inventory.read_captured(capture)
    # 2 sockets of 2 cores with 2 threads each.
    assert (box.cpu_model, box.sockets, box.cores, box.logical_cpus) == ("A Processor", 2, 4, 8)
    assert box.isa == ["avx2", "avx512f"]
    # kB of /proc are KiB, MB of numactl are MiB.
    assert (box.memory_total_bytes, box.memory_available_bytes) == (131_072_000 * 1024, 65_536_000 * 1024)
    assert [(n.node, n.cpus, n.memory_total_bytes) for n in box.numa] == [(0, [0, 1, 2, 3], 64_000 * 2**20), (1, [], 32_000 * 2**20)]
    assert (box.gpus, box.driver) == ([], None) and box.notes == ["no GPU outputs were captured"]


def test_an_older_lscpu_has_one_flat_list(capture):
    flat = []

    def flatten(entries):
        for entry in entries:
            flat.append({"field": entry["field"], "data": entry["data"]})
            flatten(entry.get("children", []))

    flatten(LSCPU)
    nested = inventory.read_captured(capture)
    (capture / "lscpu.json").write_text(json.dumps({"lscpu": flat}))
    assert inventory.read_captured(capture) == nested


def test_gpu_captures_are_told_and_not_ignored(capture):
    (capture / "nvidia-smi.txt").write_text("x")
    (capture / "topo-m.txt").write_text("x")
    assert inventory.read_captured(capture).notes == ["GPU captures are not read yet: nvidia-smi.txt, topo-m.txt"]


def test_what_was_not_told_is_none(capture):
    (capture / "meminfo.txt").write_text("MemTotal:       1000 kB\n")
    (capture / "numactl-H.txt").write_text("node 0 cpus: 0\n")
    box = inventory.read_captured(capture)
    assert box.memory_available_bytes is None and box.numa[0].memory_total_bytes is None


@pytest.mark.parametrize("name", ["lscpu.json", "meminfo.txt", "numactl-H.txt"])
def test_a_missing_file_is_named(capture, command, name):
    (capture / name).unlink()
    status, out, err = command("inventory", "--from", capture)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and f"{name}: missing" in err


def test_the_message_names_the_folder_that_was_given(capture, command):
    (capture / "lscpu.json").unlink()
    assert str(capture) in command("inventory", "--from", capture)[2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lscpu.json", b"{"),
        ("lscpu.json", b"[]"),
        ("lscpu.json", b'{"lscpu": [1]}'),
        ("lscpu.json", b'{"lscpu": []}'),
        ("lscpu.json", json.dumps({"lscpu": [{"field": "CPU(s):", "data": "eight"}]}).encode()),
        ("lscpu.json", b"\xff\xfe\x00"),
        ("meminfo.txt", b"nothing"),
        ("meminfo.txt", b"\xff\xfe\x00"),
    ],
)
def test_an_unreadable_file_is_one_line(capture, command, name, content):
    (capture / name).write_bytes(content)
    status, out, err = command("inventory", "--from", capture)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and name in err


def test_sockets_that_a_virtual_machine_does_not_tell(capture):
    # lscpu writes '-' where the kernel tells nothing (seen on Arm).
    text = (capture / "lscpu.json").read_text().replace('{"field": "Socket(s):", "data": "2"}', '{"field": "Socket(s):", "data": "-"}')
    (capture / "lscpu.json").write_text(text)
    assert inventory.read_captured(capture).logical_cpus == 8


def test_inventory_command_on_a_capture(capture, command):
    status, out, err = command("inventory", "--from", capture, "--json")
    assert (status, err) == (0, "") and json.loads(out)["cores"] == 4
    status, out, err = command("inventory", "--from", capture / "nowhere")
    assert (status, out) == (2, "") and "is no folder" in err


def test_a_real_capture_of_an_h200_host():
    if not CAPTURE.is_dir():
        pytest.skip("no captures beside this checkout")
    box = inventory.read_captured(CAPTURE)
    text = dict(line.split(":", 1) for line in (CAPTURE / "lscpu.txt").read_text().splitlines() if ":" in line)
    text = {key.strip(): value.strip() for key, value in text.items()}
    assert box.cpu_model == text["Model name"] and box.logical_cpus == int(text["CPU(s)"])
    assert box.cores == int(text["Socket(s)"]) * int(text["Core(s) per socket"]) and box.sockets == int(text["Socket(s)"])
    assert {flag for flag in box.isa} <= set(text["Flags"].split())
    # `free -b` of the same host, to the megabyte.
    total = int((CAPTURE / "free-b.txt").read_text().split("Mem:")[1].split()[0])
    assert abs(box.memory_total_bytes - total) < 2**20
    assert box.notes[0].startswith("GPU captures are not read yet: nvidia-smi")


def test_cpu_lists():
    assert inventory.parse_cpu_list("0-2,5\n") == [0, 1, 2, 5] and inventory.parse_cpu_list("7") == [7] and inventory.parse_cpu_list("\n") == []
    assert inventory.parse_cpu_list("0-1,4-5,8-8") == [0, 1, 4, 5, 8]


def test_this_machine_against_psutil():
    box = inventory.read_live()
    assert box.memory_total_bytes == psutil.virtual_memory().total
    assert box.logical_cpus == len(os.sched_getaffinity(0))
    if psutil.cpu_count(logical=False):
        assert box.cores == psutil.cpu_count(logical=False)
    assert sorted(cpu for node in box.numa for cpu in node.cpus) == sorted(range(psutil.cpu_count())) or not box.numa
    assert 0 < box.memory_available_bytes <= box.memory_total_bytes and box.system.startswith("Linux ")
    assert bool(box.gpus) or "NVML" in box.notes[0]


def test_gpus_through_nvml(monkeypatch):
    """Two GPUs, one of which refuses a question: that value stays empty, the rest is there."""
    import pynvml

    def refuse_second(value):
        def answer(handle):
            if handle == 1:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return value

        return answer

    fakes = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlSystemGetDriverVersion": lambda: "580.1", "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"CMP 170HX {handle}", "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=64 * 2**30, used=0), "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 0),
        "nvmlDeviceGetCurrPcieLinkGeneration": refuse_second(2), "nvmlDeviceGetCurrPcieLinkWidth": refuse_second(4),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    gpus, driver, note = inventory.read_nvml()
    assert driver == "580.1" and note is None and [g.name for g in gpus] == ["CMP 170HX 0", "CMP 170HX 1"]
    assert (gpus[0].pcie_generation, gpus[0].pcie_width_lanes, gpus[0].compute_capability) == (2, 4, "8.0")
    assert (gpus[1].pcie_generation, gpus[1].pcie_width_lanes) == (None, None)
    # Nothing used is a value and not an absence.
    assert (gpus[1].memory_total_bytes, gpus[1].memory_used_bytes) == (64 * 2**30, 0)
