"""Several outputs of one box put together, and boxes that a report only describes."""

import csv
import itertools
import json

import pytest
import yaml
from conftest import ROOT

from fieldbook import inventory
from fieldbook.errors import BadInput
from fieldbook.inventory import Gpu, Host, Link, NumaNode, Reading, Spread, merge, stated
from fieldbook.inventory.model import GpuProcess, Nic, PciePort

GIB, MIB = 2**30, 2**20
FIGURES = ROOT.parent / "shared" / "golden" / "report_figures.csv"
XML, CSV, TOPO, LIST, TABLE = ("nvidia-smi -q -x", "nvidia-smi --query-gpu", "nvidia-smi topo -m", "nvidia-smi -L", "nvidia-smi (table)")


def combined(*readings):
    return merge.combine(list(readings), "test")


def reading(command, *gpus, source="", **more):
    return Reading(command=command, source=source, gpus=[Gpu(**g) for g in gpus], **more)


def numbers(box):
    return [g.index for g in box.gpus]


# Which output wins.


def test_the_fullest_output_wins_wherever_it_stands_and_the_rest_fills_in():
    table = reading(TABLE, {"index": 0, "name": "NVIDIA A100-SXM4...", "memory_total_bytes": 81920 * MIB, "pstate": "P8"}, driver="1")
    xml = reading(XML, {"index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory_total_bytes": 81920 * MIB + 5, "uuid": "GPU-1"}, cuda="12.4")
    for order in ((table, xml), (xml, table)):
        box = combined(*order)
        (gpu,) = box.gpus
        assert (gpu.name, gpu.memory_total_bytes, gpu.pstate, gpu.uuid) == ("NVIDIA A100-SXM4-80GB", 81920 * MIB + 5, "P8", "GPU-1")
        assert (box.driver, box.cuda) == ("1", "12.4")
    # A whole name in a lesser output completes one that was cut.
    cut, whole = reading(XML, {"index": 0, "name": "NVIDIA A..."}), reading(LIST, {"index": 0, "name": "NVIDIA A100"})
    assert combined(cut, whole).gpus[0].name == "NVIDIA A100"


def test_zero_and_an_empty_list_are_answers():
    one = reading(XML, {"index": 0, "memory_used_bytes": 0, "processes": [], "ecc": False, "nvlink_gb_s": []})
    other = reading(TABLE, {"index": 0, "memory_used_bytes": 5, "processes": None, "ecc": True, "nvlink_gb_s": None})
    (gpu,) = combined(other, one).gpus
    assert (gpu.memory_used_bytes, gpu.processes, gpu.ecc, gpu.nvlink_gb_s) == (0, [], False, [])
    # Nothing told, then told that there is none; and a list that holds something beats an empty one.
    assert combined(reading(XML, {"index": 0}), reading(TABLE, {"index": 0, "processes": []})).gpus[0].processes == []
    listed = {"index": 0, "processes": [GpuProcess(pid=1)]}
    assert len(combined(reading(XML, {"index": 0, "processes": []}), reading(TABLE, listed)).gpus[0].processes) == 1


def test_a_reason_for_not_knowing_goes_once_the_value_is_known():
    silent = reading(XML, {"index": 0, "unknown": {"memory_total_bytes": "[N/A]", "uuid": "Unknown Error"}})
    (gpu,) = combined(silent, reading(TABLE, {"index": 0, "memory_total_bytes": GIB})).gpus
    assert gpu.unknown == {"uuid": "Unknown Error"}
    host = combined(Reading(command="lscpu", host=Host(unknown={"sockets": "-"})), Reading(command="x", host=Host(sockets=2))).host
    assert (host.sockets, host.unknown) == (2, {})


def test_contradictions_are_said_with_the_file():
    one = reading(XML, {"index": 0, "memory_total_bytes": 80 * GIB, "bus_id": "0000:3b:00.0", "uuid": "GPU-1", "compute_capability": "8.0"}, driver="550.1")
    other = {"index": 0, "memory_total_bytes": 40 * GIB, "bus_id": "0000:3c:00.0", "uuid": "GPU-2", "compute_capability": "9.0"}
    notes = combined(one, reading(CSV, other, source="query.csv", driver="535.2")).notes
    assert "GPU 0: memory is 81920 MiB, but query.csv says 40960 MiB" in notes
    assert "GPU 0: bus id is 0000:3b:00.0, but query.csv says 0000:3c:00.0" in notes
    assert "GPU 0: UUID is GPU-1, but query.csv says GPU-2" in notes and "GPU 0: compute capability is 8.0, but query.csv says 9.0" in notes
    assert any("550.1, 535.2" in note for note in notes)
    # Tables round to MiB: that is none.
    close = reading(CSV, {"index": 0, "memory_total_bytes": 80 * GIB - MIB})
    assert combined(reading(XML, {"index": 0, "memory_total_bytes": 80 * GIB}), close).notes == []


# Which GPU is which.


def test_gpus_are_joined_by_bus_id_uuid_index_and_last_by_order():
    first = reading(XML, {"index": 0, "bus_id": "0000:3b:00.0", "uuid": "GPU-a"}, {"index": 1, "bus_id": "0000:3c:00.0", "uuid": "GPU-b"})
    swapped = [{"bus_id": "0000:3c:00.0", "pstate": "P1"}, {"bus_id": "0000:3b:00.0", "pstate": "P0"}]
    assert [g.pstate for g in combined(first, reading(CSV, *swapped)).gpus] == ["P0", "P1"]
    assert [g.pstate for g in combined(first, reading(CSV, {"uuid": "GPU-b", "pstate": "P1"}, {"uuid": "GPU-a", "pstate": "P0"})).gpus] == ["P0", "P1"]
    assert [g.pstate for g in combined(first, reading(CSV, {"index": 1, "pstate": "P1"}, {"index": 0, "pstate": "P0"})).gpus] == ["P0", "P1"]
    assert [g.pstate for g in combined(first, reading(CSV, {"pstate": "P0"}, {"pstate": "P1"})).gpus] == ["P0", "P1"]
    alone = combined(reading(CSV, {"name": "A"}, {"name": "B"}))
    assert numbers(alone) == [0, 1] and any("numbered in its order" in note for note in alone.notes)


def test_uuids_painted_over_join_nothing():
    first = reading(XML, *[{"index": i, "uuid": "GPU-xxxx"} for i in range(3)])
    box = combined(first, reading(CSV, *[{"uuid": "GPU-xxxx", "pstate": f"P{i}"} for i in range(3)]))
    assert [(g.index, g.pstate) for g in box.gpus] == [(0, "P0"), (1, "P1"), (2, "P2")]


def test_a_gpu_that_only_a_lesser_output_shows_is_numbered_and_said():
    first = reading(XML, {"index": 0, "bus_id": "0000:3b:00.0"}, gpu_count=1)
    box = combined(first, reading(CSV, {"bus_id": "0000:af:00.0"}))
    assert numbers(box) == [0, 1] and any("0000:af:00.0 that the other outputs do not: it is numbered 1" in note for note in box.notes)
    assert any("disagree on the number of GPUs" in text and "2 are listed in all" in text for text in box.incomplete)
    by_uuid = combined(reading(XML, {"index": 0, "uuid": "GPU-a"}), reading(CSV, {"uuid": "GPU-b"}))
    assert numbers(by_uuid) == [0, 1] and any("with UUID GPU-b" in note for note in by_uuid.notes)


def test_indexes_with_gaps_and_one_listed_twice():
    box = combined(reading(XML, {"index": 5, "name": "B"}, {"index": 2, "name": "A"}))
    assert [(g.index, g.name) for g in box.gpus] == [(2, "A"), (5, "B")]
    twice = combined(reading(XML, {"index": 0, "name": "A"}, {"index": 0, "name": "B"}, source="a.xml"))
    assert numbers(twice) == [0, 1] and any("a.xml lists GPU 0 more than once" in note for note in twice.notes)
    # One that says its index keeps it, whatever stands before it without.
    mixed = combined(reading(XML, {"name": "none"}, {"index": 0, "name": "zero"}))
    assert [(g.index, g.name) for g in mixed.gpus] == [(0, "zero"), (1, "none")]


def test_lspci_lists_gpus_only_where_nothing_else_does():
    lspci = reading("lspci -vv", {"bus_id": "0000:3b:00.0"}, {"bus_id": "0000:af:00.0"})
    assert [g.bus_id for g in combined(lspci).gpus] == ["0000:3b:00.0", "0000:af:00.0"]
    box = combined(reading(XML, {"index": 0, "bus_id": "0000:3b:00.0"}), lspci)
    assert numbers(box) == [0] and box.incomplete == ["lspci shows an NVIDIA GPU at 0000:af:00.0 that no other output lists"]
    # Without a bus id from the driver nothing can be compared.
    assert combined(reading(XML, {"index": 0}), lspci).incomplete == []


def test_numbers_of_gpus_that_disagree():
    xml, topo = reading(XML, {"index": 0}, gpu_count=1, source="a"), reading(TOPO, {"index": 0}, {"index": 1}, gpu_count=2, source="b")
    assert combined(xml, topo).incomplete == [f"the outputs disagree on the number of GPUs: a ({XML}) 1, b ({TOPO}) 2"]
    # Both in one file all the same.
    assert "disagree" in combined(xml, topo.model_copy(update={"source": "a"})).incomplete[0]
    none = combined(reading(TABLE, gpu_count=0), topo)
    assert numbers(none) == [0, 1] and "disagree" in none.incomplete[0]
    assert combined(xml, reading(CSV, {"index": 0}, gpu_count=1)).incomplete == []
    assert "do not state how many" in combined(reading(CSV, {"index": 0})).notes[0]


def test_a_gpu_that_only_a_link_names_is_there_and_said():
    box = combined(reading(XML, {"index": 0}, {"index": 1}, links=[Link(a=0, b=5, kind="NV2", nvlinks=2), Link(a=0, b=1, kind="SYS", nvlinks=0)]))
    assert numbers(box) == [0, 1, 5] and box.incomplete == ["a link names GPU 5, which no output lists"] and box.islands is None


# Links.


def joined(*links):
    box = combined(*[Reading(command=c, gpus=[Gpu(index=0), Gpu(index=1)], links=[k]) for c, k in zip((XML, TOPO, TABLE), links, strict=False)])
    return box.links[0], box.incomplete


def test_a_pcie_path_gives_way_to_nvlink():
    path, nv = Link(a=0, b=1, kind="PHB", kind_is_pcie_path=True, unknown={"nvlinks": "not shown"}), Link(a=0, b=1, kind="NV4", nvlinks=4)
    for pair in ((path, nv), (nv, path)):
        link, incomplete = joined(*pair)
        assert (link.kind, link.nvlinks, link.kind_is_pcie_path, link.unknown.get("nvlinks")) == ("NV4", 4, False, None) and incomplete == []
    link, incomplete = joined(path, Link(a=0, b=1, kind="PHB", nvlinks=0))
    assert (link.kind, link.nvlinks, link.kind_is_pcie_path) == ("PHB", 0, False) and incomplete == []
    link, _ = joined(Link(a=0, b=1), path)
    assert (link.kind, link.kind_is_pcie_path, link.nvlinks) == ("PHB", True, None)


@pytest.mark.parametrize(
    ("one", "other", "disagree"),
    [
        ({"kind": "NV4"}, {"kind": "NV2"}, True),
        ({"kind": "NV4"}, {"kind": "SYS"}, True),
        ({"kind": "PIX", "nvlinks": 0}, {"kind": "SYS", "kind_is_pcie_path": True}, True),
        ({"kind": "PIX", "kind_is_pcie_path": True}, {"kind": "SYS", "kind_is_pcie_path": True}, True),
        ({"kind": "PIX", "kind_is_pcie_path": True}, {"kind": "PIX", "kind_is_pcie_path": True}, False),
        ({"kind": "PIX"}, {}, False),
    ],
)
def test_kinds_that_disagree_are_said(one, other, disagree):
    for pair in ((one, other), (other, one)):
        _, incomplete = joined(*[Link(a=0, b=1, **k) for k in pair])
        assert bool(incomplete) == disagree and all("one output says" in text for text in incomplete)


def test_peer_access_and_rates_of_several_outputs_stand_beside_each_other():
    spread = Spread(min=1, median=2, max=3, samples=3)
    link, incomplete = joined(
        Link(a=0, b=1, kind="PIX", p2p={"read": "OK"}, unknown={"p2p write": "its rows are missing"}),
        Link(a=0, b=1, p2p={"write": "OK"}, unknown={"kind": "not told"}),
        Link(a=0, b=1, measured_gb_s={"0->1": spread}),
    )
    assert link.p2p == {"read": "OK", "write": "OK"} and link.measured_gb_s == {"0->1": spread} and incomplete == []
    assert not {"p2p write", "kind"} & set(link.unknown)
    link, incomplete = joined(Link(a=0, b=1, p2p={"read": "OK"}), Link(a=0, b=1, p2p={"read": "NS"}))
    assert link.p2p == {"read": "OK"} and incomplete == ["GPU 0 and 1: peer access (read) is OK in one output, NS in another"]


# What else is put together.


def test_pcie_facts_of_lspci_fill_in_and_the_slot_bounds_them():
    gpu = PciePort(address="0000:3b:00.0", speed_gt_s=2.5, speed_cap_gt_s=16.0, width_lanes=8, width_cap_lanes=16, is_gpu=True)
    slot = PciePort(address="0000:3a:00.0", is_bridge=True, secondary_bus="0000:3b", speed_cap_gt_s=8.0)
    told = reading(XML, {"index": 0, "bus_id": "0000:3b:00.0", "pcie_width_lanes": 16})
    (alone,) = combined(told, Reading(command="lspci -vv", ports=[gpu])).gpus
    assert (alone.pcie_generation, alone.pcie_generation_max, alone.pcie_generation_device_max, alone.pcie_width_max_lanes) == (1, None, 4, 16)
    assert alone.pcie_width_lanes == 16  # the driver's own word stays
    (both,) = combined(told, Reading(command="lspci -vv", ports=[gpu, slot])).gpus
    assert (both.pcie_generation_host_max, both.pcie_generation_max) == (3, 3)


def test_numa_nodes_list_their_gpus():
    cpus = Reading(command="lscpu", numa=[NumaNode(node=0, cpus=[0, 1])])
    box = combined(
        reading(XML, {"index": 0, "numa_node": 0}, {"index": 1, "numa_node": 3}), cpus, Reading(command="x", numa=[NumaNode(node=0, memory_total_bytes=5)])
    )
    assert list(box.numa) == ["0", "3"] and box.numa["0"] == NumaNode(node=0, cpus=[0, 1], memory_total_bytes=5, gpus=[0]) and box.numa["3"].gpus == [1]


def test_nothing_at_all():
    box = combined()
    assert (box.gpus, box.links, box.numa, box.findings, box.islands, box.nics) == ([], [], {}, [], [], []) and box.host == Host()


def test_sixty_four_gpus():
    pairs = [Link(a=a, b=b, kind="NV4" if a // 8 == b // 8 else "SYS", nvlinks=4 if a // 8 == b // 8 else 0) for a, b in itertools.combinations(range(64), 2)]
    box = combined(reading(TOPO, *[{"index": i, "numa_node": i // 32} for i in range(64)], links=pairs, gpu_count=64))
    assert len(box.islands) == 8 and len(box.cuts) == 28 and len(box.links) == 64 * 63 // 2 and box.switches is None and box.incomplete == []


def test_network_cards_come_from_the_first_output_that_has_them():
    nics = [Nic(name="NIC0", links={"0": "PIX"})]
    assert combined(reading(XML, {"index": 0}), reading(TOPO, {"index": 0}, nics=nics)).nics == nics


# Boxes that a report describes.


def test_the_first_report_s_box():
    box = inventory.read_captured(ROOT / "data" / "boxes" / "cmp170hx-x3")
    assert [(g.name, g.compute_capability, g.pcie_generation, g.pcie_width_lanes) for g in box.gpus] == [("NVIDIA CMP 170HX", "8.0", 2, 4)] * 3
    # Not stated: unknown, with the reason, and no 8 or 64 GiB out of the name.
    assert all(g.memory_total_bytes is None and g.unknown["memory_total_bytes"] == "not stated by field report 000" for g in box.gpus)
    assert [(k.kind, k.nvlinks, k.p2p["read"], k.theoretical_gb_s) for k in box.links] == [(None, 0, "NS", 2.0)] * 3 and box.islands == [[0], [1], [2]]
    assert {f.id for f in box.findings} == {"pcie-slow", "p2p-off"} and box.switches is None


def test_the_second_report_s_box():
    box = inventory.read_captured(ROOT / "data" / "boxes" / "a100-x8-glm53")
    assert len(box.gpus) == 8 and all(g.memory_usable_bytes == 79.25 * GIB and g.memory_total_bytes is None for g in box.gpus)
    kinds = {(k.a, k.b): k.kind for k in box.links}
    assert box.islands == [[0, 1], [2, 3], [4, 5], [6, 7]] and [kinds[a, a + 1] for a in (0, 2, 4, 6)] == ["NV8"] * 4
    assert box.numa["0"].gpus == [0, 1, 2, 3] and box.numa["1"].gpus == [4, 5, 6, 7]
    # PCIe/SYS: SYS across the nodes; within a node the path is not stated. 8 x 25 GB/s.
    assert all((kind == "SYS") == (a < 4 <= b) for (a, b), kind in kinds.items()) and kinds[0, 2] is None
    assert next(k for k in box.links if k.kind == "NV8").theoretical_gb_s == 200.0
    assert [f.id for f in box.findings] == ["nvlink-islands", "numa-split"]


def test_the_shipped_boxes_say_what_the_figures_of_the_reports_say():
    if not FIGURES.is_file():
        pytest.skip("no figures beside this checkout")
    rows = {row["id"]: row for row in csv.DictReader(FIGURES.open())}
    cmp, glm = (inventory.read_captured(ROOT / "data" / "boxes" / name) for name in ("cmp170hx-x3", "a100-x8-glm53"))
    assert len(cmp.gpus) == int(rows["cmp-gpus"]["value"]) and f"Gen{cmp.gpus[0].pcie_generation} x{cmp.gpus[0].pcie_width_lanes}" in rows["cmp-gpus"]["note"]
    assert ",".join("-".join(map(str, island)) for island in glm.islands) == rows["glm-link"]["value"]
    assert f"{glm.gpus[0].memory_usable_bytes / GIB:g} GiB usable" in rows["glm-link"]["note"]


STATED = {"stated_by": "r", "gpus": {"count": 3, "each": {"name": "A"}, "numa_node": [0, 0, 1]}, "links": {"pairs": {"NV2": [[1, 0]]}, "across_nodes": "SYS"}}


def test_unequal_cards_are_stated_one_by_one():
    two = {"stated_by": "r", "gpus": {"count": 2, "each": [{"memory_total_bytes": 24 * 2**30}, {"memory_total_bytes": 12 * 2**30, "pcie_generation": 3}]}}
    found = stated.read_stated(yaml.safe_dump(two, sort_keys=False))
    assert [gpu.memory_total_bytes for gpu in found.gpus] == [24 * 2**30, 12 * 2**30] and found.gpus[1].pcie_generation == 3
    two["gpus"]["count"] = 3
    with pytest.raises(BadInput, match="gpus.each: 2 entries for 3 GPUs; give one for each, or one mapping for all"):
        stated.read_stated(yaml.safe_dump(two, sort_keys=False))
    two["gpus"]["each"] = {"name": ["A", "B", "C"]}
    with pytest.raises(BadInput, match="gpus.each.name: got a list; for unequal GPUs make gpus.each itself a list"):
        stated.read_stated(yaml.safe_dump(two, sort_keys=False))


def test_a_stated_box_worked_by_hand():
    found = stated.read_stated(yaml.safe_dump(STATED, sort_keys=False))
    assert [(k.a, k.b, k.kind, k.nvlinks) for k in found.links] == [(0, 1, "NV2", 2), (0, 2, "SYS", 0), (1, 2, "SYS", 0)]
    assert found.gpu_count == 3 and [g.numa_node for g in found.gpus] == [0, 0, 1]
    assert stated.read_stated("gpus: {count: 1}\n") is None and stated.read_stated("# c\n\nstated_by: r\ngpus: {count: 0}\n").gpus == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus.colour": 1}, "gpus.colour"),
        ({"colour": 1}, "colour"),
        ({"gpus.each": {"nmae": "A"}}, "gpus.each.nmae"),
        ({"gpus.each": {"memory_total_bytes": "much"}}, "gpus.each.memory_total_bytes"),
        ({"gpus.each": {"power_limit_w": float("inf")}}, "gpus.each.power_limit_w"),
        ({"gpus.each": {"index": 1}}, "gpus.each.index"),
        ({"gpus.each": {"unknown": {}}}, "gpus.each.unknown"),
        ({"gpus.count": -1}, "gpus.count"),
        ({"gpus.count": 10**9}, "gpus.count"),
        ({"gpus.numa_node": [0, 1]}, "2 nodes for 3 GPUs"),
        ({"gpus.numa_node": [0, 1, 1, 1]}, "4 nodes for 3 GPUs"),
        ({"gpus": [1]}, "gpus"),
        ({"links.pairs": {"NV2": [[0]]}}, "links.pairs.NV2"),
        ({"links.pairs": {"NV2": [[]]}}, "links.pairs.NV2"),
        ({"links.pairs": {"NV2": [[0, 3]]}}, "no pair of GPUs 0 to 2"),
        ({"links.pairs": {"NV2": [[1, 1]]}}, "no pair of GPUs 0 to 2"),
        ({"links.pairs": {"NV2": [[0, 1]], "SYS": [[1, 0]]}}, "NV2 and SYS"),
        ({"links.pairs": {"NVLINK": [[0, 1]]}}, "'NVLINK' is no kind"),
        ({"links.across_nodes": "far"}, "'far' is no kind"),
        ({"links.p2p": {"read": "off"}}, "'off' is no word"),
    ],
)
def test_a_wrong_key_of_a_stated_box_is_one_line(changes, says, tmp_path, command):
    document = json.loads(json.dumps(STATED))
    for dotted, value in changes.items():
        *way, last = dotted.split(".")
        place = document
        for part in way:
            place = place[part]
        place[last] = value
    (tmp_path / "box.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    status, out, err = command("inventory", "--from", tmp_path)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and "box.yml: a stated box" in err and says in err


@pytest.mark.parametrize("tail", ["gpus: [", "gpus: {count: 1}\ndate: 2020-13-45", "gpus: &a [*b]", "gpus: " + "[" * 5000, "? {a: 1}\n: 2"])
def test_a_stated_box_that_is_no_yaml_is_one_line(tail):
    with pytest.raises(BadInput, match="a stated box") as refused:
        stated.read_stated(f"stated_by: r\n{tail}\n")
    assert "\n" not in str(refused.value)


# The folder as a whole.


@pytest.mark.parametrize("text", ["{", "[1]", '[{"what": "x"}]', "[" * 100_000, "\udcff", '[{"what":"a","where":"b","unit":"us","size_bytes":1,"spread":NaN}]'])
def test_measured_links_that_are_none_are_one_line(text, tmp_path):
    (tmp_path / "meminfo.txt").write_text("MemTotal: 1 kB\nMemFree: 1 kB\n")
    (tmp_path / inventory.MEASURED_FILE).write_text(text, errors="surrogateescape")
    with pytest.raises(BadInput, match="measured-links.json: not the measured links") as refused:
        inventory.read_captured(tmp_path)
    assert "\n" not in str(refused.value)


def test_measured_links_keep_no_number_that_json_cannot_hold(tmp_path):
    row = '[{"what":"a","where":"b","unit":"us","size_bytes":1,"spread":{"min":1,"median":NaN,"max":Infinity,"samples":1}}]'
    (tmp_path / "meminfo.txt").write_text("MemTotal: 1 kB\nMemFree: 1 kB\n")
    (tmp_path / inventory.MEASURED_FILE).write_text(row)
    with pytest.raises(BadInput, match="not the measured links"):
        inventory.read_captured(tmp_path)


def test_odd_words_of_nvidia_smi_do_not_end_the_reading_of_this_machine(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tHCCS\\nGPU1\\tHCCS\\t X \\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(inventory.nvml, "read", lambda: Reading(command="NVML", gpus=[Gpu(index=0), Gpu(index=1)], links=[Link(a=0, b=1)], gpu_count=2))
    assert numbers(inventory.read_live()) == [0, 1]


def test_one_pair_of_each_kind_is_measured():
    links = [Link(a=0, b=1, kind="NV2"), Link(a=0, b=2, kind="SYS"), Link(a=1, b=2, kind="SYS"), Link(a=2, b=3, kind="SYS", p2p={"read": "OK"})]
    assert inventory.representative_pairs(links) == [(0, 1), (0, 2), (2, 3)]
