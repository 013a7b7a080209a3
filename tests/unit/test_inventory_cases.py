"""Outputs out of the wild: every case of ../shared/cases/A and B gives its expected reading, and no edit of an output leads to a traceback or to a
wrong number of GPUs that nobody is told of.

The first part runs where that folder lies beside the checkout; the edits run on the outputs in tests/unit/outputs too.
"""

import itertools
import random
import time
from pathlib import Path

import pytest
from conftest import ROOT

from fieldbook import inventory
from fieldbook.errors import BadInput
from fieldbook.inventory import captured, merge

CASES = ROOT.parent / "shared" / "cases"
OUTPUTS = Path(__file__).parent / "outputs"
MIB = 2**20


def case(name: str):
    """The inventory of one case; skips where the folder is not there."""
    found = next((CASES / name[0]).glob(f"{name[1:]}-*[!t].txt"), None) if CASES.is_dir() else None
    files = [p for p in (CASES / name[0]).glob(f"{name[1:]}-*.txt") if not p.name.endswith(".expect.txt")] if CASES.is_dir() else []
    if not files:
        pytest.skip("no cases beside this checkout")
    assert found is None or files
    return inventory.read_captured(files[0])


def refusal(name: str) -> str:
    """The line with which a case is refused."""
    with pytest.raises(BadInput) as refused:
        case(name)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def kinds(box) -> dict[str, set]:
    """Kind -> pairs; 'None' for the unknown ones."""
    found: dict[str, set] = {}
    for link in box.links:
        found.setdefault(str(link.kind), set()).add((link.a, link.b))
    return found


def pairs(*groups):
    """All pairs inside each group."""
    return {pair for group in groups for pair in itertools.combinations(group, 2)}


def across(one, other):
    """All pairs between two groups."""
    return {(min(a, b), max(a, b)) for a in one for b in other}


def test_every_case_is_named_here():
    if not CASES.is_dir():
        pytest.skip("no cases beside this checkout")
    there = {folder + p.name[:2] for folder in "AB" for p in (CASES / folder).glob("*.expect.txt")}
    assert there == set(READINGS)


def a01(name):
    box = case(name)
    assert kinds(box) == {"NV2": {(0, 1)}} and [g.cpu_affinity for g in box.gpus] == ["0-23", "0-23"]
    assert all(g.numa_node is None and g.unknown["numa_node"] == "N/A" and g.gpu_numa_id is None and "gpu_numa_id" not in g.unknown for g in box.gpus)
    assert box.islands == [[0, 1]]


def a02(name):
    box = case(name)
    assert kinds(box) == {"PHB": {(0, 1)}} and box.links[0].nvlinks == 0 and box.islands == [[0], [1]] and box.gpus[0].unknown["numa_node"] == "N/A"


def a05(name):
    box = case(name)
    assert len(box.gpus) == 8 and kinds(box) == {"None": pairs(range(8))} and all(list(k.p2p.values()) == ["OK"] for k in box.links)
    assert "p2p" in box.readings[0]["command"]


def a06(name):
    box = case(name)
    assert len(box.gpus) == 2 and kinds(box) == {"None": {(0, 1)}} and list(box.links[0].p2p.values()) == ["CNS"]
    assert "chipset not supported" in next(f.evidence for f in box.findings if f.id == "p2p-off")


def a07(name):
    box = case(name)
    assert kinds(box) == {"NODE": {(0, 1), (2, 3)}, "SYS": across((0, 1), (2, 3))} and [n.name for n in box.nics] == ["NIC0", "NIC1", "NIC2", "NIC3"]
    assert [g.numa_node for g in box.gpus] == [0, 0, 1, 1] and all(g.unknown["gpu_numa_id"] == "N/A" for g in box.gpus) and box.incomplete == []
    assert box.nics[2].links == {"0": "SYS", "1": "SYS", "2": "NODE", "3": "NODE"}


def a10(name):
    box = case(name)
    assert kinds(box) == {"NV18": pairs(range(8))} and {k: n.gpus for k, n in box.numa.items()} == {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]}


def a11(name):
    box = case(name)
    assert len(box.gpus) == 1 and box.links == [] and (box.gpus[0].cpu_affinity, box.gpus[0].numa_node) == ("0-23", 0)
    assert box.gpus[0].unknown == {"gpu_numa_id": "N/A"}


def a12(name):
    box = case(name)
    gpu = box.gpus[0]
    assert len(box.gpus) == 1 and (gpu.cpu_affinity, gpu.numa_node, gpu.gpu_numa_id) == (None, None, None) and gpu.unknown["gpu_numa_id"] == "N/A"


def a15(name):
    box = case(name)
    assert kinds(box)["PIX"] == {(0, 1), (2, 3), (4, 5), (6, 7)} and kinds(box)["SYS"] == across(range(4), range(4, 8)) and len(box.gpus) == 8
    assert [g.numa_node for g in box.gpus] == [0] * 4 + [1] * 4 and kinds(box)["NODE"] == across((0, 1), (2, 3)) | across((4, 5), (6, 7))


def a16(name):
    box = case(name)
    assert kinds(box) == {
        "PIX": {(0, 1), (2, 3), (4, 5), (6, 7)},
        "PXB": across((0, 1), (2, 3)) | across((4, 5), (6, 7)),
        "NODE": across(range(4), range(4, 8)),
    }
    assert box.switches == [[0, 1, 2, 3], [4, 5, 6, 7]] and all(g.cpu_affinity is None and g.numa_node is None for g in box.gpus)


def a17(name):
    assert kinds(case(name)) == {"PIX": pairs(range(4), range(4, 8)), "NODE": across(range(4), range(4, 8))}


def a20(name):
    line = refusal(name)
    assert "not a topology matrix" in line and "35.9 to 53.9" in line and "GB/s" in line


def a21(name):
    box = case(name)
    assert kinds(box) == {"NV4": {(0, 1), (2, 3)}, "PHB": across((0, 1), (2, 3))} and box.islands == [[0, 1], [2, 3]]
    found = next(f for f in box.findings if f.id == "nvlink-islands")
    assert "custom all-reduce" in found.advice and "0-1, 2-3" in found.what and box.cuts[0]["kinds"] == ["PHB"]


def a22(name):
    box = case(name)
    assert kinds(box) == {"NV18": pairs(range(8))} and [n.name for n in box.nics] == [f"NIC{i}" for i in range(12)]
    assert [g.numa_node for g in box.gpus] == [0] * 4 + [1] * 4
    # Row GPU5 has 'NODEPXB' where NIC8 and NIC9 stand.
    assert (box.nics[8].links["5"], box.nics[9].links["5"], box.nics[10].links["6"]) == ("NODE", "PXB", "PXB")


def a25(name):
    box = case(name)
    assert kinds(box) == {"PHB": {(1, 2), (3, 4)}, "NODE": across((1, 2), (3, 4)), "SYS": across((0,), (1, 2, 3, 4))}
    assert [g.numa_node for g in box.gpus] == [1, 0, 0, 0, 0]


def a26(name):
    box = case(name)
    assert kinds(box) == {"SYS": pairs(range(8))} and {k: n.gpus for k, n in box.numa.items()} == {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]}
    assert box.nics[0].links["6"] == "PHB" and any(f.id == "numa-split" for f in box.findings)


def a27(name):
    box = case(name)
    assert len(box.gpus) == 16 and kinds(box) == {"NV6": pairs(range(16)) - pairs(range(4, 16)), "None": pairs(range(4, 16))}
    assert any("no row for GPU 4, 5" in text for text in box.incomplete) and [n.name for n in box.nics] == [f"mlx5_{i}" for i in range(10)]
    assert all(g.numa_node is None for g in box.gpus)


def a30(name):
    box = case(name)
    assert kinds(box) == {"PHB": {(0, 1)}} and box.links[0].p2p == {"read": "GNS", "write": "GNS"} and len(box.gpus) == 2


def a31(name):
    assert kinds(case(name)) == {"PHB": pairs(range(4))}


def a32(name):
    box = case(name)
    known = pairs(range(8)) - pairs(range(4, 8))
    assert kinds(box) == {"NODE": pairs(range(4)), "SYS": across(range(4), range(4, 8)), "None": pairs(range(4, 8))} and len(box.gpus) == 8
    assert all(k.nvlinks is None and k.kind_is_pcie_path for k in box.links if (k.a, k.b) in known) and box.islands is None


def a35(name):
    box = case(name)
    assert kinds(box) == {"NV1": {(0, 1), (0, 2), (1, 3)}, "NV2": {(0, 3), (1, 2), (2, 3)}} and box.islands == [[0, 1, 2, 3]]
    assert any(f.id == "nvlink-unequal" for f in box.findings)


def a36(name):
    box = case(name)
    assert kinds(box) == {"NV1": {(0, 1)}} and [n.name for n in box.nics] == ["mlx5_0"]


def a37(name):
    box = case(name)
    assert kinds(box) == {"NV3": {(0, 1), (2, 3)}, "SYS": across((0, 1), (2, 3))} and box.islands == [[0, 1], [2, 3]] and len(box.nics) == 4


def a40(name):
    box = case(name)
    assert kinds(box) == {"PIX": {(0, 1), (2, 3), (4, 5)}, "NODE": across((0, 1), (2, 3)), "SYS": across(range(4), (4, 5))}
    assert [g.numa_node for g in box.gpus] == [0, 0, 0, 0, 1, 1]


def a41(name):
    box = case(name)
    known = {pair for pair in pairs(range(8)) if set(pair) & {0, 1, 4}}
    assert kinds(box) == {"NV18": known, "None": pairs(range(8)) - known} and len(box.nics) == 36 and box.incomplete
    assert box.gpus[4].cpu_affinity == "70-99,102-107" and (box.nics[12].links["0"], box.nics[35].links["0"]) == ("NODE", "PIX")


def a42(name):
    box = case(name)
    assert len(box.gpus) == 8 and kinds(box)["NV12"] == pairs(range(8)) - pairs(range(4, 8)) and [g.numa_node for g in box.gpus[:4]] == [3, 3, 1, 1]
    assert len(box.nics) == 18 and box.nics[1].links["2"] == "PXB" and any("no row" in text for text in box.incomplete)


def a45(name):
    assert "'CPU'" in refusal(name)


def a46(name):
    box = case(name)
    link = box.links[0]
    assert kinds(box) == {"None": {(0, 1)}} and link.p2p == {"read": "OK", "write": "OK"} and [g.name for g in box.gpus] == ["NVIDIA CMP 170HX"] * 2
    assert (link.measured_gb_s["0->1"].median, link.measured_gb_s["1->0"].median) == (6.46, 6.69)
    assert max(s.max for s in link.measured_gb_s.values()) < 14 and all(g.memory_total_bytes is None for g in box.gpus)


def a47(name):
    box = case(name)
    assert len(box.gpus) == 4 and kinds(box) == {"None": pairs(range(4))} and all(k.p2p == {"read": "OK", "write": "OK"} for k in box.links)
    assert box.links[0].measured_gb_s["0->1"].median == 5.79 and any("not in the list" in text for text in box.incomplete)


def a50(name):
    box = case(name)
    assert len(box.gpus) == 8 and kinds(box) == {"NODE": pairs(range(4), range(4, 8)), "SYS": across(range(4), range(4, 8))}
    assert any("no row for GPU 7" in text for text in box.incomplete) and [g.numa_node for g in box.gpus[:7]] == [0] * 4 + [1] * 3


def a51(name):
    line = refusal(name)
    assert "NCCL topology" in line and "GPU 0 at 0000:06:00.0" in line and "2 to 0000:85:00.0" in line


def b01(name):
    box = case(name)
    gpu = box.gpus[0]
    assert len(box.gpus) == 1 and (gpu.memory_total_bytes, gpu.memory_used_bytes) == (81559 * MIB, 59 * MIB) and gpu.ecc is True and gpu.mig is True
    assert gpu.utilization_percent is None and gpu.unknown["utilization_percent"] == "N/A"
    assert [d.memory_total_bytes for d in gpu.mig_devices] == [40448 * MIB, 20096 * MIB, 9984 * MIB, 9984 * MIB]


def b02(name):
    gpu = case(name).gpus[0]
    assert gpu.name.endswith("RTX 2080 ...") and "name" in gpu.unknown and gpu.driver_model == "WDDM" and gpu.persistence is None
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes) == (8192 * MIB, 702 * MIB) and {p.memory_bytes for p in gpu.processes} == {None}


def b05(name):
    box = case(name)
    gpu = box.gpus[0]
    assert (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_width_lanes, gpu.pcie_width_max_lanes) == (1, 3, 16, 16)
    assert gpu.memory_total_bytes == 8192 * MIB and [f.severity for f in box.findings if f.id.startswith("pcie")] == ["note"]


def b06(name):
    box = case(name)
    assert [g.index for g in box.gpus] == [0, 1] and [g.memory_used_bytes for g in box.gpus] == [575 * MIB, 1234 * MIB]
    assert [g.name for g in box.gpus] == ["NVIDIA GeForce RTX 2080 SUPER", "Some Other GPU"] and all(g.memory_total_bytes is None for g in box.gpus)


def b07(name):
    box = case(name)
    assert box.gpus[0].nvlink_gb_s is None and "MIG mode" in box.gpus[0].unknown["nvlink_gb_s"] and box.gpus[0].name == "NVIDIA H200"


def b10(name):
    port = case(name).ports[0]
    assert (port.width_lanes, port.width_cap_lanes, port.speed_gt_s, port.speed_cap_gt_s, port.downgraded) == (1, 1, 2.5, 5.0, ["speed"])
    assert "the port has no more" in next(f.evidence for f in case(name).findings if f.id == "port-link")


def b11(name):
    port = case(name).ports[0]
    assert (port.width_lanes, port.width_cap_lanes, port.speed_gt_s, port.downgraded) == (16, None, 5.0, [])


def b12(name):
    box = case(name)
    assert {(g.name, g.memory_total_bytes, g.pcie_generation_max) for g in box.gpus} == {("NVIDIA CMP 170HX", 65536 * MIB, 2)}
    assert any("4 GPUs" in text for text in box.incomplete)


def b15(name):
    box = case(name)
    gpu = box.gpus[0]
    assert (gpu.memory_total_bytes, gpu.pcie_width_lanes, gpu.pcie_width_max_lanes, gpu.pcie_generation_max) == (24576 * MIB, 4, 16, 3)
    assert next(f.severity for f in box.findings if f.id == "pcie-width") == "serious"


def b16(name):
    box = case(name)
    assert [(g.memory_used_bytes, g.memory_total_bytes, g.temperature_c) for g in box.gpus] == [(23588 * MIB, 24564 * MIB, t) for t in (77, 78)]


def b17(name):
    box = case(name)
    assert [g.index for g in box.gpus] == list(range(10)) and {g.memory_total_bytes for g in box.gpus} == {46068 * MIB}
    assert [g.bus_id[5:7] for g in box.gpus] == ["4f", "52", "53", "56", "57", "ce", "d1", "d2", "d5", "d6"] and {g.memory_used_bytes for g in box.gpus} == {
        MIB
    }


def b20(name):
    gpu = case(name).gpus[0]
    assert gpu.memory_total_bytes == 95830 * MIB and gpu.memory_used_bytes == 0 and gpu.bus_id == "0000:ad:00.0" and gpu.pcie_width_lanes == 16


READINGS = {name.upper(): function for name, function in globals().items() if len(name) == 3 and name[0] in "ab" and name[1:].isdigit()}


@pytest.mark.parametrize("name", sorted(READINGS))
def test_expected_reading(name):
    READINGS[name](name)


def test_a_whole_capture_with_measured_links():
    """Two H200 in a virtual machine, taken with `fieldbook capture`: what NVML told live of the same machine stands here as the right values."""
    box = inventory.read_captured(OUTPUTS / "h200-x2")
    assert [(g.name, g.compute_capability, g.architecture) for g in box.gpus] == [("NVIDIA H200", "9.0", "Hopper")] * 2
    # NVML: total 150754820096, and 150109880320 after the driver's reserve of 615 MiB, which nvidia-smi rounds up to 616.
    assert {g.memory_total_bytes for g in box.gpus} == {150754820096} and all(abs(g.memory_usable_bytes - 150109880320) <= MIB for g in box.gpus)
    assert [(g.bus_id, g.numa_node, g.cpu_affinity, g.power_limit_w) for g in box.gpus] == [(f"0000:00:0{n}.0", 0, "0-31", 700.0) for n in (6, 7)]
    assert {(g.pcie_generation, g.pcie_generation_max, g.pcie_width_lanes, g.pcie_width_max_lanes) for g in box.gpus} == {(5, 5, 16, 16)}
    assert [g.nvlink_gb_s for g in box.gpus] == [[26.562] * 18] * 2 and all(g.processes == [] for g in box.gpus)
    link = box.links[0]
    assert (link.kind, link.nvlinks, link.theoretical_gb_s) == ("NV18", 18, pytest.approx(18 * 26.562)) and link.p2p == dict.fromkeys(
        ("read", "write", "nvlink"), "OK"
    )
    assert box.islands == [[0, 1]] and box.findings == [] and box.driver == "580.159.04" and box.cuda == "13.0" and box.host.logical_cpus == 32
    assert box.host.shm_total_bytes == 256 * 2**30 and box.host.iommu_groups == 0 and box.host.kernel_options == ["pci=realloc=off"]
    assert len(box.measured) == 10 and 300 < link.measured_gb_s["0->1"].median < link.theoretical_gb_s
    assert link.measured_gb_s["0<->1"].median < 2 * link.theoretical_gb_s and 1 < link.measured_latency_us["0<->1"].median < 100


JUNK = 'X01289 GPUNVSYPIXHB|,:-\t\n[]<>/"éK\u2028\x1b'


def edited(text: str, rng: random.Random) -> str:
    """One random edit: a character, a line or a span removed, doubled, moved, replaced; or one end cut off."""
    if len(text) < 2:
        return text
    at = rng.randrange(len(text))
    what = rng.randrange(9)
    if what == 0:
        return text[:at] + text[at + 1 :]
    if what == 1:
        return text[:at] + rng.choice(JUNK) + text[at:]
    if what == 2:
        return text[:at] + rng.choice(JUNK) + text[at + 1 :]
    if what == 3:
        return text[:at]
    if what == 4:
        return text[at:]
    if what == 5:
        return text[:at] + text[at + rng.randrange(1, 40) :]
    lines = text.split("\n")
    line, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    if what == 6:
        del lines[line]
    elif what == 7:
        lines.insert(other, lines[line])
    else:
        lines[line], lines[other] = lines[other], lines[line]
    return "\n".join(lines)


def outputs() -> dict[str, str]:
    """Every output to edit, by name."""
    files = [p for p in OUTPUTS.rglob("*") if p.is_file()]
    files += [p for folder in "AB" for p in (CASES / folder).glob("*.txt") if not p.name.endswith(".expect.txt")]
    return {f"{p.parent.name}/{p.name}": p.read_text(encoding="utf-8") for p in sorted(files)}


def read(text: str, name: str):
    """The inventory of a text, or None when it is refused in one line."""
    try:
        return merge.combine(captured.read_text(text, name), name)
    except BadInput as refused:
        assert "\n" not in str(refused) and str(refused)
        return None


@pytest.mark.parametrize("times", [4_000, pytest.param(20_000, marks=pytest.mark.bar)])
def test_thousands_of_edits(times):
    """A result or a refusal, in reasonable time; and where one edit changes the number of GPUs, the inventory says that something is missing or odd."""
    rng = random.Random(20261129)
    texts = outputs()
    whole = {name: read(text, name) for name, text in texts.items()}
    names, slowest, started = sorted(texts), 0.0, time.monotonic()
    for _ in range(times):
        name, edits = rng.choice(names), rng.choice((1, 1, 1, 2, 4))
        text = texts[name]
        for _ in range(edits):
            text = edited(text, rng)
        before = time.monotonic()
        box = read(text, name)
        slowest = max(slowest, time.monotonic() - before)
        if box is not None and edits == 1 and whole[name] is not None and len(box.gpus) != len(whole[name].gpus):
            assert box.incomplete or any("would not show" in note for note in box.notes), f"{name}\n{text}"
    assert slowest < 5 and time.monotonic() - started < 400
