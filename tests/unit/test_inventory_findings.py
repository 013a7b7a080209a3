"""What a box is told to have wrong: each finding with a box that must give it and one that must not, and nothing out of what nobody told."""

import itertools
import json
import random
import types
import typing

import pytest

from fieldbook import tables, terminal
from fieldbook.inventory import Finding, Gpu, Host, Inventory, Link, Measurement, Reading, Spread, findings, merge, with_offload
from fieldbook.inventory.model import GpuProcess, MigDevice, PciePort

GIB, MIB = 2**30, 2**20
SOUND = {"name": "A", "compute_capability": "8.0", "memory_total_bytes": 80 * GIB, "memory_used_bytes": 0, "processes": [], "numa_node": 0}
SOUND |= {"pcie_generation": 4, "pcie_generation_max": 4, "pcie_width_lanes": 16, "pcie_width_max_lanes": 16, "persistence": True, "mig": False}
SOUND |= {"pcie_generation_device_max": 4, "pcie_generation_host_max": 4, "pstate": "P0", "ecc": True, "ecc_uncorrected": 0, "throttle_reasons": []}
SOUND |= {"compute_mode": "Default", "power_limit_w": 400.0, "power_limit_default_w": 400.0}


def box(*gpus, links=None, host=None, ports=(), measured=None) -> Inventory:
    """Sound GPUs with the given differences, joined by PIX with peer access where no links are given."""
    cards = [Gpu(index=i, **{**SOUND, **changes}) for i, changes in enumerate(gpus)]
    if links is None:
        links = [Link(a=a, b=b, kind="PIX", nvlinks=0, p2p={"read": "OK", "write": "OK"}) for a, b in itertools.combinations(range(len(cards)), 2)]
    reading = Reading(command="NVML", gpus=cards, gpu_count=len(cards), links=links, host=host, ports=list(ports))
    return merge.combine([reading], "test", measured=measured)


def found(inventory: Inventory, name: str) -> Finding | None:
    """The one finding of that id, or None; there are never two of what is one."""
    same = [f for f in inventory.findings if f.id == name]
    assert len(same) <= 1, same
    return same[0] if same else None


def said(inventory: Inventory, name: str) -> tuple[str, list[int]] | None:
    """(severity, GPUs) of a finding."""
    one = found(inventory, name)
    return (one.severity, one.gpus) if one else None


def test_a_sound_box_has_no_finding():
    assert box({}, {}).findings == [] and box({}).findings == [] and box().findings == []


# One GPU.


@pytest.mark.parametrize(
    ("changes", "name", "severity"),
    [
        ({"pcie_width_lanes": 4}, "pcie-width", "serious"),
        ({"pcie_width_lanes": 1}, "pcie-width", "serious"),
        ({"pcie_width_lanes": 8}, "pcie-width", "warning"),
        ({"pcie_width_lanes": 16}, "pcie-width", None),
        ({"pcie_width_lanes": -1}, "pcie-width", None),
        ({"pcie_width_lanes": 0}, "pcie-width", None),
        ({"pcie_width_lanes": 4, "pcie_width_max_lanes": None}, "pcie-width", None),
        # Gen1 of an idle card rests; at work it is a fault; where nothing tells, it is only perhaps one.
        ({"pcie_generation": 1, "pstate": "P8"}, "pcie-idle", "note"),
        ({"pcie_generation": 1, "pstate": "P8"}, "pcie-generation", None),
        ({"pcie_generation": 1, "pstate": "P0", "idle": True}, "pcie-idle", "note"),
        ({"pcie_generation": 1, "pstate": "P0", "utilization_percent": 98}, "pcie-generation", "serious"),
        ({"pcie_generation": 1, "pstate": "P0", "idle": False}, "pcie-generation", "serious"),
        ({"pcie_generation": 1, "pstate": "P0", "utilization_percent": 0}, "pcie-generation", "warning"),
        ({"pcie_generation": 1, "pstate": None}, "pcie-generation", "warning"),
        ({"pcie_generation": 1, "pstate": "highest"}, "pcie-generation", "warning"),
        ({"pcie_generation": 1, "pstate": "P"}, "pcie-generation", "warning"),
        ({"pcie_generation": 1, "pcie_generation_max": None}, "pcie-generation", None),
        ({"pcie_generation": 4}, "pcie-generation", None),
        # Gen2 x4: 5 GT/s x 0.8 x 4 / 8 = 2.0 GB/s; Gen3 x4: 3.94; Gen3 x8: 7.9.
        ({"pcie_generation": 2, "pcie_generation_max": 2, "pcie_width_lanes": 4, "pcie_width_max_lanes": 4}, "pcie-slow", "warning"),
        ({"pcie_generation": 3, "pcie_generation_max": 3, "pcie_width_lanes": 4, "pcie_width_max_lanes": 4}, "pcie-slow", "warning"),
        ({"pcie_generation": 3, "pcie_generation_max": 3, "pcie_width_lanes": 8, "pcie_width_max_lanes": 8}, "pcie-slow", None),
        # The width is the finding then, not said twice.
        ({"pcie_generation": 2, "pcie_generation_max": 2, "pcie_width_lanes": 4}, "pcie-slow", None),
        ({"pcie_generation_device_max": 5, "pcie_generation_host_max": 4}, "slot-generation", "note"),
        ({"pcie_generation_device_max": 5, "pcie_generation_host_max": None}, "slot-generation", "note"),
        ({"pcie_generation_device_max": 5, "pcie_generation_host_max": None, "pcie_generation_max": None}, "slot-generation", None),
        ({"pcie_generation_device_max": 4, "pcie_generation_host_max": 5}, "slot-generation", None),
        ({"lost": "GPU is lost"}, "gpu-lost", "serious"),
        ({"ecc_uncorrected": 3}, "ecc-uncorrected", "serious"),
        ({"ecc_uncorrected": None}, "ecc-uncorrected", None),
        ({"throttle_reasons": ["hw_thermal_slowdown"]}, "slowed-down", "warning"),
        ({"throttle_reasons": ["sw_power_cap"]}, "slowed-down", None),
        ({"persistence": False}, "persistence", "note"),
        ({"persistence": None}, "persistence", None),
        ({"mig": True}, "mig", "warning"),
        ({"mig": None}, "mig", None),
        ({"compute_mode": "Prohibited"}, "compute-mode", "serious"),
        ({"compute_mode": "Exclusive_Process"}, "compute-mode", "note"),
        ({"compute_mode": None}, "compute-mode", None),
        ({"power_limit_w": 250.0}, "power-limit", "note"),
        ({"power_limit_default_w": None}, "power-limit", None),
        ({"driver_model": "WDDM"}, "wddm", "note"),
        # 9 GiB of 80 are more than a tenth.
        ({"memory_used_bytes": 9 * GIB, "processes": [GpuProcess(pid=7, name="python", memory_bytes=9 * GIB)]}, "memory-held", "serious"),
        ({"memory_used_bytes": 2 * GIB, "processes": [GpuProcess(pid=7)]}, "memory-held", "warning"),
        ({"memory_used_bytes": None, "processes": [GpuProcess(pid=7, memory_bytes=9 * GIB)]}, "memory-held", "serious"),
        ({"memory_used_bytes": 60 * GIB, "processes": []}, "memory-held", "warning"),
        ({"memory_used_bytes": 60 * GIB, "processes": None}, "memory-held", "warning"),
        ({"memory_used_bytes": 300 * MIB, "processes": []}, "memory-held", None),
        ({"memory_used_bytes": None, "processes": [GpuProcess(pid=7)]}, "memory-held", None),
        ({"memory_used_bytes": 60 * GIB, "lost": "GPU is lost", "processes": None}, "memory-held", None),
    ],
)
def test_one_gpu(changes, name, severity):
    assert said(box(changes), name) == ((severity, [] if name == "wddm" else [0]) if severity else None)


def test_the_words_of_a_narrow_link():
    one = found(box({"pcie_width_lanes": 4}), "pcie-width")
    # Gen4: 16 GT/s x 128/130 / 8 = 1.969 GB/s a lane.
    assert one.what == "GPU 0: 4 of its 16 PCIe lanes (7.9 instead of 31.5 GB/s per direction)" and "now x4, at most x16" in one.evidence
    port = PciePort(address="0000:3a:00.0", is_bridge=True, secondary_bus="0000:3b", width_lanes=4, width_cap_lanes=4)
    assert "the slot is the limit" in found(box({"pcie_width_lanes": 4, "bus_id": "0000:3b:00.0"}, ports=[port]), "pcie-width").evidence
    assert "slot" not in found(box({"pcie_width_lanes": 4, "bus_id": "0000:3c:00.0"}, ports=[port]), "pcie-width").evidence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pstate": "P8"}, "performance state P8 is one of rest"),
        ({"idle": True}, "the driver says the clocks are low because it is idle"),
        ({"utilization_percent": 98}, "performance state P0 with 98% load"),
        ({"pstate": None}, "the output does not tell whether the card was idle"),
    ],
)
def test_how_a_resting_link_was_told_apart(changes, why):
    (one,) = [f for f in box({"pcie_generation": 1, **changes}).findings if f.id.startswith("pcie-")]
    assert one.evidence == f"PCIe generation now 1, at most 4; {why}"


def test_a_low_generation_without_its_maximum_may_be_rest():
    """Gen1 x8 carries 2.0 GB/s; at rest it says nothing of the link at work, and no rate is claimed."""
    alone = {"pcie_generation": 1, "pcie_generation_max": None, "pcie_generation_device_max": None, "pcie_generation_host_max": None, "pcie_width_lanes": 8}
    alone |= {"pcie_width_max_lanes": 8}
    resting = box({**alone, "pstate": "P8"}, {**alone, "pstate": None})
    assert found(resting, "pcie-slow") is None and resting.links[0].theoretical_gb_s is None
    assert said(box({**alone, "utilization_percent": 90}), "pcie-slow") == ("warning", [0])
    # What the card itself can do bounds the link from above: Gen4 x8 is 15.75 GB/s.
    assert found(box({**alone, "pcie_generation_device_max": 4}), "pcie-slow") is None


def test_processes_are_named():
    held = [GpuProcess(pid=7, name="python", memory_bytes=2 * GIB), GpuProcess(pid=8), GpuProcess(name="Xorg", memory_bytes=0)]
    assert found(box({"memory_used_bytes": 2 * GIB, "processes": held}), "memory-held").evidence == "python (pid 7, 2048 MiB), a process (pid 8)"
    assert "another container" in found(box({"memory_used_bytes": 2 * GIB}), "memory-held").evidence
    assert "not told" in found(box({"memory_used_bytes": 2 * GIB, "processes": None}), "memory-held").evidence
    assert "pid not told" in found(box({"memory_used_bytes": 2 * GIB, "processes": [GpuProcess(name="a")]}), "memory-held").evidence


def test_mig_instances_are_counted_only_where_they_are_listed():
    assert "2 instances" in found(box({"mig": True, "mig_devices": [MigDevice(instance="0"), MigDevice(instance="1")]}), "mig").evidence
    assert "no instances listed" in found(box({"mig": True}), "mig").evidence


# GPUs against each other.


def test_unequal_memory():
    one = found(box({}, {"memory_total_bytes": 8 * GIB}), "unequal-memory")
    assert (one.severity, one.gpus) == ("warning", [1]) and "share one name" in one.what and one.evidence == "GPU 1: 8192 MiB; GPU 0: 81920 MiB"
    assert "share" not in found(box({}, {"memory_total_bytes": 8 * GIB, "name": "B"}), "unequal-memory").what
    # Two names that nobody told are not one name.
    assert "share" not in found(box({"name": None}, {"memory_total_bytes": 8 * GIB, "name": None}), "unequal-memory").what
    assert found(box({}, {"memory_total_bytes": None}), "unequal-memory") is None
    only_usable = {"memory_total_bytes": None, "memory_usable_bytes": 79 * GIB}
    assert found(box(only_usable, {**only_usable, "memory_usable_bytes": 7 * GIB}), "unequal-memory").gpus == [1]
    assert found(box({}, only_usable), "unequal-memory") is None


def test_unequal_architecture():
    one = found(box({}, {"compute_capability": "9.0", "name": None}), "unequal-architecture")
    assert one.severity == "warning" and one.what.endswith(": 8.0, 9.0") and one.evidence == "GPU 0 A: 8.0; GPU 1: 9.0"
    # 8.0 is an Ampere: one output told the number, another the name.
    assert found(box({}, {"compute_capability": None, "architecture": "Ampere"}), "unequal-architecture") is None
    assert found(box({"compute_capability": None}, {}), "unequal-architecture") is None
    named = [{"compute_capability": None, "architecture": word} for word in ("Ampere", "Hopper")]
    assert found(box(*named), "unequal-architecture").what.endswith("Ampere, Hopper")


def test_numa_split():
    assert found(box({}, {"numa_node": 1}), "numa-split").evidence == "node 0: GPU 0; node 1: GPU 1"
    assert found(box({}, {"numa_node": None}), "numa-split") is None


# Peer access.


def peers(*statuses, nvlinks=0, name="read"):
    links = [Link(a=0, b=i + 1, kind="PIX", nvlinks=nvlinks, p2p={name: s} if s else {}) for i, s in enumerate(statuses)]
    return box(*[{}] * (len(statuses) + 1), links=links)


@pytest.mark.parametrize(
    ("status", "meaning"),
    [("CNS", "chipset"), ("GNS", "GPU not"), ("TNS", "topology"), ("NS", "(not supported)"), ("DR", "registry key")],
)
def test_peer_access_that_is_off(status, meaning):
    one = found(peers(status, "OK"), "p2p-off")
    assert (one.severity, one.gpus) == ("warning", [0, 1]) and one.what.startswith("No peer access between 1 of 2 pairs")
    assert one.evidence.startswith(f"0-1: {status} (") and meaning in one.evidence
    assert found(peers(status, name="write"), "p2p-off") and ("regkey" in one.advice) == (status == "DR")
    # NVLink that nobody may use is worse than a slow bus.
    assert found(peers(status, nvlinks=4), "p2p-off").severity == "serious"
    # These say nothing of reading and writing memory.
    assert found(peers(status, name="nvlink"), "p2p-off") is None and found(peers(status, name="atomics"), "p2p-off") is None


def test_peer_access_that_works_or_is_not_told():
    assert found(peers("OK", "OK"), "p2p-off") is None and found(peers(None), "p2p-off") is None
    unknown = peers("U")
    assert found(unknown, "p2p-off") is None and said(unknown, "p2p-unknown") == ("note", [0, 1])
    # A matrix without its command line may be one of NVLink or atomics.
    unstated = peers("NS", name="unstated")
    assert found(unstated, "p2p-off") is None and "does not say what it is of" in found(unstated, "p2p-unknown").what


def test_peer_access_of_one_way_and_of_many_pairs():
    one = found(peers("OK 0->1, NS 1->0"), "p2p-off")
    assert one.what == "Peer access between 1 of 1 pairs works one way only" and one.evidence == "0-1: OK 0->1, NS 1->0"
    assert found(peers(*["NS"] * 9), "p2p-off").evidence.startswith("0-1, 0-2, 0-3, 0-4, 0-5, 0-6 and 3 more: NS")


# What isolates.


def test_acs():
    ports = [PciePort(address="0000:00:01.0", is_bridge=True, acs_redirect=True)]
    one = found(box({}, {}, ports=ports), "acs")
    assert one.severity == "warning" and "0000:00:01.0" in one.evidence
    assert found(box({}, {}, ports=[ports[0].model_copy(update={"acs_redirect": False})]), "acs") is None
    assert found(box({}, {}, ports=[ports[0].model_copy(update={"acs_redirect": None})]), "acs") is None
    # A card alone has no peer; where only bridges are listed, there may be cards.
    assert found(box({}, ports=ports), "acs") is None and found(box(ports=ports), "acs")


@pytest.mark.parametrize(
    ("options", "groups", "severity", "what"),
    [
        (["intel_iommu=on"], 40, "warning", "An IOMMU is at work"),
        (["intel_iommu=on,sm_on"], None, "warning", "The kernel is told to use an IOMMU"),
        (["intel_iommu=on", "iommu=pt"], 40, "note", "An IOMMU is at work, in pass-through"),
        (["iommu.passthrough=1"], 40, "note", "An IOMMU is at work, in pass-through"),
        ([], 40, "warning", "An IOMMU is at work"),
        (["amd_iommu=off"], None, None, None),
        (["intel_iommu=off", "iommu=off"], 0, None, None),
        # Asked for, but switched off in the BIOS.
        (["intel_iommu=on"], 0, None, None),
        (["iommu=soft"], None, None, None),
        (["intel_iommu=igfx_off"], None, None, None),
        (["pci=noacs"], None, None, None),
        ([], None, None, None),
    ],
)
def test_iommu(options, groups, severity, what):
    one = found(box({}, {}, host=Host(kernel_options=options, iommu_groups=groups)), "iommu")
    assert (one and one.severity, one and one.what) == (severity, what)
    assert one is None or all(option in one.evidence for option in options)
    assert found(box({}, host=Host(kernel_options=options, iommu_groups=groups)), "iommu") is None


# The host.


def test_host_memory_smaller_than_the_weights():
    small = box({}, host=Host(memory_total_bytes=64 * GIB, memory_available_bytes=10 * GIB))
    assert found(small, "host-memory") is None
    one = found(with_offload(small, 11 * GIB), "host-memory")
    assert one.severity == "serious" and one.evidence == "11.0 GiB of weights, 10.0 GiB available"
    assert found(with_offload(small, 10 * GIB), "host-memory") is None
    assert found(with_offload(box({}), 11 * GIB), "host-memory") is None
    # Nothing free is an answer, not a missing one.
    assert found(with_offload(box({}, host=Host(memory_total_bytes=64 * GIB, memory_available_bytes=0)), GIB), "host-memory")


@pytest.mark.parametrize(("size", "there"), [(64 * MIB, True), (0, True), (GIB, False), (None, False)])
def test_shared_memory(size, there):
    one = found(box({}, host=Host(shm_total_bytes=size)), "shm")
    assert bool(one) == there and (one is None or (one.severity == "warning" and f"only {size // MIB} MiB" in one.what))


# NVLink.


def linked(ports, pairs, count=None):
    """GPUs with NVLink ports at 25 GB/s (True: up), joined as `pairs` say: (a, b) -> number of NVLinks."""
    gpus = [{"nvlink_gb_s": [25.0 if up else None for up in own]} for own in ports]
    links = [Link(a=a, b=b, kind=f"NV{n}" if n else "SYS", nvlinks=n, p2p={"read": "OK"}) for (a, b), n in pairs.items()]
    return box(*gpus, links=links)


def test_nvlinks_that_are_down():
    one = linked([[1, 1], [1, 0]], {(0, 1): 1})
    assert said(one, "nvlink-down") == ("warning", [1]) and found(one, "nvlink-down").evidence == "inactive links 1; another GPU has 2 up, this one 1"
    # A card with none up beside its like with some is the worst case, not an unknown one.
    assert said(linked([[1, 1], [0, 0]], {(0, 1): 0}), "nvlink-down") == ("warning", [1])
    # The same number everywhere: fewer bridges than ports, said once for both.
    even = linked([[1, 0], [1, 0]], {(0, 1): 1})
    assert said(even, "nvlink-down") == ("note", [0, 1]) and found(even, "nvlink-down").what == "GPU 0, 1: 1 of 2 NVLinks are down"
    assert found(linked([[0, 0], [0, 0]], {(0, 1): 0}), "nvlink-down") is None
    assert found(linked([[1, 1], [1, 1]], {(0, 1): 2}), "nvlink-down") is None
    # Another model has another number of ports.
    gpus = [Gpu(index=0, name="A", nvlink_gb_s=[25.0] * 4), Gpu(index=1, name="B", nvlink_gb_s=[25.0, None])]
    assert said(merge.combine([Reading(command="NVML", gpus=gpus)], "test"), "nvlink-down") == ("note", [1])


def test_nvlink_islands_and_full_joins():
    pairs = dict.fromkeys(itertools.combinations(range(4), 2), 0) | {(0, 1): 4, (2, 3): 4}
    split = linked([[1] * 4] * 4, pairs)
    one = found(split, "nvlink-islands")
    assert split.islands == [[0, 1], [2, 3]] and one.what.endswith("0-1, 2-3") and one.severity == "warning"
    # Gen4 x16: 31.5 GB/s.
    assert one.evidence == "between the groups: SYS, at most 31.5 GB/s a pair"
    whole = linked([[1] * 4] * 4, dict.fromkeys(pairs, 4))
    assert whole.islands == [[0, 1, 2, 3]] and found(whole, "nvlink-islands") is None and found(whole, "nvlink-mesh") is None
    assert found(box({}, {}), "nvlink-islands") is None
    unknown = box({}, {}, {}, links=[Link(a=0, b=1, kind="NV4", nvlinks=4), Link(a=0, b=2), Link(a=1, b=2)])
    assert unknown.islands is None and found(unknown, "nvlink-islands") is None


def test_an_island_that_is_a_ring():
    ring = linked([[1] * 4] * 4, dict.fromkeys(itertools.combinations(range(4), 2), 2) | {(0, 2): 0, (1, 3): 0})
    one = found(ring, "nvlink-mesh")
    assert (one.severity, one.gpus) == ("note", [0, 1, 2, 3]) and one.evidence == "no NVLink between 0-2, 1-3"


def test_unequal_numbers_of_nvlinks():
    pairs = {(0, 1): 2, (0, 2): 1, (1, 2): 1}
    assert found(linked([[1] * 3] * 3, pairs), "nvlink-unequal").what.endswith("1, 2")
    assert found(linked([[1] * 3] * 3, dict.fromkeys(pairs, 2)), "nvlink-unequal") is None
    assert found(linked([[1] * 3] * 3, pairs | {(0, 1): 1, (0, 2): 0}), "nvlink-unequal") is None


# Measured.


def rate(median, ceiling, what="host to device, pinned memory", unit="GB/s", most=None):
    spread = Spread(min=median, median=median, max=most or median, samples=3)
    return Measurement(what=what, where="GPU 0", unit=unit, size_bytes=64 * MIB, spread=spread, ceiling=ceiling, ceiling_source="PCIe Gen4 x16")


@pytest.mark.parametrize(
    ("measured", "ids"),
    [
        (rate(18.8, 31.5), ["slow-link"]),  # 0.597 of the ceiling
        (rate(19.0, 31.5), []),  # 0.603
        (rate(18.8, 31.5, "copy between two GPUs"), []),
        (rate(18.8, None), []),
        (rate(500.0, 2.0, unit="us"), []),
        (rate(31.0, 31.5, most=33.0), []),
        (rate(9.0, 31.5).model_copy(update={"ceiling_source": None}), ["slow-link"]),
        (rate(31.0, 31.5, most=33.1), ["above-ceiling"]),  # 1.051 of it
    ],
)
def test_measured_links(measured, ids):
    assert [f.id for f in box({}, measured=[measured]).findings] == ids
    assert all(f.severity == "warning" and "GPU 0" in f.what and "None" not in f.evidence for f in box({}, measured=[measured]).findings)


def test_ports_that_somebody_cut_out():
    cut = box(ports=[PciePort(speed_gt_s=2.5, width_lanes=4, width_cap_lanes=16, downgraded=["width"])])
    assert said(cut, "port-link") == ("warning", []) and found(cut, "port-link").what == "A PCIe link at Gen1 x4 of 16"
    whole = [PciePort(speed_gt_s=8.0, width_lanes=4, is_bridge=True), PciePort(speed_gt_s=8.0, width_lanes=4, is_gpu=False), PciePort()]
    assert found(box(ports=whole), "port-link") is None
    # A speed that is none of PCIe's, or none at all.
    assert found(box(ports=[PciePort(width_lanes=4)]), "port-link").what.startswith("A PCIe link at x4")
    assert found(box(ports=[PciePort(speed_gt_s=3.0, width_lanes=16)]), "port-link").what.startswith("A PCIe link at x16")


# All of them.


def broken():
    """A box with about everything wrong."""
    one = {"pcie_width_lanes": 4, "persistence": False, "mig": True, "ecc_uncorrected": 1, "memory_used_bytes": 9 * GIB, "compute_mode": "Prohibited"}
    other = {"pcie_generation": 1, "numa_node": 1, "compute_capability": "9.0", "memory_total_bytes": GIB, "throttle_reasons": ["hw_slowdown"]}
    third = {"lost": "GPU is lost", "pcie_generation_device_max": 5, "power_limit_w": 100.0, "nvlink_gb_s": [25.0, None]}
    links = [Link(a=0, b=1, kind="NV2", nvlinks=2, p2p={"read": "DR"}), Link(a=0, b=2, kind="SYS", nvlinks=0), Link(a=1, b=2, kind="NV1", nvlinks=1)]
    host = Host(shm_total_bytes=MIB, iommu_groups=9, memory_total_bytes=GIB)
    ports = [PciePort(address="0000:00:01.0", is_bridge=True, acs_redirect=True), PciePort(width_lanes=4)]
    return with_offload(box(one, other, third, links=links, host=host, ports=ports, measured=[rate(9.0, 31.5, most=90.0)]), 2 * GIB)


def test_every_finding_has_evidence_and_advice_and_the_most_serious_come_first():
    all_of_them = broken().findings
    assert len({f.id for f in all_of_them}) > 18
    order = [("serious", "warning", "note").index(f.severity) for f in all_of_them]
    assert order == sorted(order) and set(order) == {0, 1, 2}
    assert all(f.what and f.evidence and f.advice and "None" not in f.what + f.evidence for f in all_of_them)


def test_equal_findings_of_several_gpus_are_one():
    same = box(*[{"pcie_width_lanes": 8}] * 3, {}, {"pcie_width_lanes": 4})
    widths = [f for f in same.findings if f.id == "pcie-width"]
    assert [(f.severity, f.gpus) for f in widths] == [("serious", [4]), ("warning", [0, 1, 2])]
    assert widths[1].what.startswith("GPU 0, 1, 2: 8 of its 16")
    resting = box(*[{"pcie_generation": 1, "pstate": "P8"}] * 2)
    assert found(resting, "pcie-idle").what.startswith("GPU 0, 1's link rests")


def test_nothing_is_claimed_of_gpus_that_nobody_describes():
    for count in (0, 1, 2, 64):
        pairs = [Link(a=a, b=b) for a, b in itertools.combinations(range(count), 2)]
        silent = merge.combine([Reading(command="NVML", gpus=[Gpu(index=i) for i in range(count)], links=pairs, host=Host())], "test")
        assert silent.findings == [] and (silent.islands is None) == (count > 1)
        assert with_offload(silent, GIB).findings == []


def test_one_field_alone_is_no_finding_unless_it_says_something_by_itself():
    """Each field of a sound GPU taken away in turn: what remains is still nothing wrong."""
    for name in SOUND:
        assert box({name: None}, {}).findings == [], name


def test_gpus_without_an_index_do_not_stop_it():
    bare = box({}, {}).model_copy(update={"gpus": [Gpu(pcie_width_lanes=4, pcie_width_max_lanes=16, throttle_reasons=["hw_slowdown"])] * 2, "links": []})
    assert {f.id for f in findings.find(bare)} >= {"pcie-width", "slowed-down"} and all(f.gpus == [] for f in findings.find(bare))


def test_huge_values():
    big = 2**63
    odd = {
        "pcie_generation": big,
        "pcie_generation_max": big,
        "pcie_width_lanes": big,
        "pcie_width_max_lanes": big,
        "memory_total_bytes": big,
        "pstate": "P999",
    }
    inventory = box(odd, {**odd, "memory_used_bytes": big, "ecc_uncorrected": big, "numa_node": big})
    assert {f.id for f in inventory.findings} == {"memory-held", "ecc-uncorrected", "numa-split"} and inventory.links[0].theoretical_gb_s is None


ODD = {
    int: (0, 1, 2, 4, 8, 16, -1, 2**31, 2**63),
    float: (0.0, 1.5, -3.0, 1e300),
    str: ("", "P0", "P8", "X", "0000:3b:00.0", "0000:af:00.0", "8.0", "GPU-1", "A..."),
    bool: (True, False),
    dict: ({}, {"name": "x", "memory_total_bytes": "[N/A]"}),
}
LISTS = {
    "throttle_reasons": ([], ["hw_slowdown"]),
    "nvlink_gb_s": ([], [25.0], [None], [25.0, None], [0.0]),
    "processes": ([], [GpuProcess()], [GpuProcess(pid=1, memory_bytes=2**40)]),
    "mig_devices": ([], [MigDevice(instance="0")]),
}


def odd_gpu(draw):
    """A GPU with about half of its fields told, with values that contradict each other."""
    values = {}
    for name, field in Gpu.model_fields.items():
        kinds = [typing.get_origin(k) or k for k in typing.get_args(field.annotation) or [field.annotation] if k is not types.NoneType]
        if draw.random() < 0.5:
            values[name] = draw.choice(LISTS.get(name) or ODD[dict if name == "unknown" else kinds[0]])
    return Gpu(**{**values, "index": draw.choice([None, 0, 1, 2, 3, 7, 63])})


def odd_link(draw):
    a, b = sorted(draw.sample([0, 1, 2, 3, 9, 63], 2))
    p2p = draw.choice([{}, {"read": "OK"}, {"read": "NS", "write": "OK"}, {"unstated": "U"}, {"read": "weird"}])
    kind = draw.choice([None, "NV4", "NV18", "PIX", "PHB", "SYS", "ODD", ""])
    return Link(a=a, b=b, kind=kind, kind_is_pcie_path=draw.random() < 0.3, nvlinks=draw.choice([None, 0, 4, 18]), p2p=p2p)


def odd_port(draw):
    def one(*values):
        return draw.choice([None, *values])

    told = {"speed_gt_s": one(2.5, 3.3), "speed_cap_gt_s": one(8.0, 1.0), "width_lanes": one(*ODD[int]), "width_cap_lanes": one(*ODD[int])}
    told |= {"acs_redirect": one(True, False), "is_bridge": one(True, False), "secondary_bus": one("0000:3b"), "is_gpu": one(True)}
    return PciePort(address=one("0000:3b:00.0", "0000:3a:00.0"), **told)


def odd_reading(draw):
    def some(make, most):
        return [make(draw) for _ in range(draw.randint(0, most))]

    numbers = {name: draw.choice([None, *ODD[int]]) for name in ("memory_total_bytes", "memory_available_bytes", "shm_total_bytes", "iommu_groups")}
    host = draw.choice([None, Host(kernel_options=draw.choice([[], ["iommu"], ["intel_iommu=on", "iommu=pt"]]), **numbers)])
    command = draw.choice(["NVML", "nvidia-smi -q -x", "nvidia-smi topo -m", "lspci -vv", "zzz", "nvidia-smi -L"])
    return Reading(command=command, gpus=some(odd_gpu, 5), gpu_count=draw.choice([None, 0, 1, 5]), links=some(odd_link, 6), ports=some(odd_port, 3), host=host)


def test_no_contradiction_stops_it():
    """300 boxes of several outputs that contradict each other: whole findings, each GPU once, JSON and text."""
    for seed in range(300):
        draw = random.Random(seed)
        readings = [odd_reading(draw) for _ in range(draw.randint(0, 4))]
        inventory = with_offload(merge.combine(readings, "test"), draw.choice([0, 2**40]))
        assert all(f.what and f.evidence and f.advice and "None" not in f.what + f.evidence for f in inventory.findings), seed
        seen = [g.index for g in inventory.gpus]
        assert None not in seen and len(set(seen)) == len(seen) and {i for k in inventory.links for i in (k.a, k.b)} <= set(seen), seed
        json.dumps(inventory.model_dump(), allow_nan=False)
        assert terminal.inventory_text(inventory) and tables.box_line(inventory), seed
