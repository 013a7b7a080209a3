"""Charts and text of the box: what stands in the cells, that every size is drawn, and that nothing a box can hold stops them."""

import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest
import vl_convert

from fieldbook import charts, show, tables, terminal
from fieldbook.inventory import Finding, Gpu, Link, Measurement, NumaNode, Reading, Spread, merge
from fieldbook.inventory.model import Nic, PciePort

SPREAD = Spread(min=1.0, median=2.0, max=3.0, samples=3)


def box(count, links=None, **more):
    """GPUs in NVLink pairs 0-1, 2-3, ..., SYS between the pairs."""
    if links is None:
        joined = [(a, b, a // 2 == b // 2) for a, b in itertools.combinations(range(count), 2)]
        links = [Link(a=a, b=b, kind="NV2" if near else "SYS", nvlinks=2 if near else 0) for a, b, near in joined]
    gpus = [Gpu(index=i, numa_node=i // 8, memory_total_bytes=80 * 2**30, compute_capability="8.0") for i in range(count)]
    return merge.combine([Reading(command="nvidia-smi topo -m", gpus=gpus, gpu_count=count, links=links, **more)], "test")


def svg(chart):
    return vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=show.VEGA_LITE_VERSION)


def words(drawing):
    """All texts of an SVG."""
    return [text for element in ET.fromstring(drawing).iter() if element.tag.endswith("text") and (text := "".join(element.itertext()))]


@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_every_size_is_drawn_with_a_cell_per_pair(count):
    inventory = box(count)
    drawn = words(svg(charts.link_matrix(inventory)))
    assert drawn.count("–") == count and drawn.count("NV2") == 2 * (count // 2)
    sys = count * count - count - 2 * (count // 2)
    assert drawn.count("SYS") == sys + (1 if sys else 0)  # and once in the legend
    # 2 x 25 GB/s inside a pair; without PCIe facts nothing is said of the rest.
    assert drawn.count("50.0 GB/s") == drawn.count("NV2") and all(drawn.count(f"GPU {i}") == 2 for i in range(count))
    graph = words(svg(charts.box_graph(inventory)))
    assert all(graph.count(f"GPU {i}") == 1 for i in range(count)) and graph.count("node 0, 80.0 GiB") == min(count, 8)
    assert len(charts.matrix_rows(inventory)) == count * count


def test_the_same_box_gives_the_same_bytes():
    for chart in (charts.link_matrix, charts.box_graph):
        assert svg(chart(box(8))) == svg(chart(box(8)))


def test_fewer_than_two_gpus_have_no_chart():
    for count in (0, 1):
        assert charts.link_matrix(box(count)) is None and charts.box_graph(box(count)) is None


@pytest.mark.parametrize(
    ("link", "kind", "word"),
    [
        ({"kind": "NV18", "nvlinks": 18}, "NVLink", "NV18"),
        *[({"kind": kind, "nvlinks": 0}, kind, kind) for kind in ("PIX", "PXB", "PHB", "NODE", "SYS")],
        ({"nvlinks": 0}, charts.PCIE_UNKNOWN, "PCIe ?"),
        ({}, "unknown", "?"),
        ({"kind": "ODD"}, "unknown", "ODD"),
    ],
)
def test_the_word_and_the_colour_of_a_cell(link, kind, word):
    rows = charts.matrix_rows(box(2, [Link(a=0, b=1, **link)]))
    assert [(r["from"], r["to"], r["kind"], r["word"]) for r in rows if r["from"] != r["to"]] == [
        ("GPU 0", "GPU 1", kind, word),
        ("GPU 1", "GPU 0", kind, word),
    ]
    assert [(r["kind"], r["word"], r["rate"]) for r in rows if r["from"] == r["to"]] == [("self", "–", "")] * 2


def test_a_measured_rate_stands_before_the_ceiling_and_each_way_has_its_own():
    other = SPREAD.model_copy(update={"median": 7.0})
    link = Link(a=0, b=1, kind="NV2", nvlinks=2, theoretical_gb_s=50.0, measured_gb_s={"0->1": SPREAD, "1->0 through host": other, "0<->1": SPREAD})
    assert [r["rate"] for r in charts.matrix_rows(box(2, [link]))] == ["", "2.0 GB/s", "7.0 GB/s", ""]


def test_pairs_nobody_told_of_are_unknown_cells():
    rows = charts.matrix_rows(box(3, [Link(a=0, b=1, kind="PIX", nvlinks=0)]))
    assert [r["word"] for r in rows] == ["–", "PIX", "?", "PIX", "–", "?", "?", "?", "–"]


@pytest.mark.parametrize(
    "inventory",
    [
        box(64),
        box(2, []),
        merge.combine([Reading(command="x", gpus=[Gpu(index=3), Gpu(index=40)], links=[Link(a=3, b=99, kind="NV2", nvlinks=2)])], "gaps"),
        # An inventory out of a receipt may hold a link to a GPU that it does not list.
        box(3).model_copy(update={"links": [Link(a=0, b=7, kind="NV1", nvlinks=1), Link(a=0, b=1, kind="SYS")]}),
        box(3).model_copy(update={"islands": None}),
        box(2).model_copy(update={"gpus": [Gpu(index=0), Gpu(index=1, lost="GPU is lost")]}),
        merge.combine([Reading(command="x", gpus=[Gpu(), Gpu()])], "no index"),
        merge.combine([Reading(command="x", gpus=[Gpu(index=0, memory_total_bytes=2**63, numa_node=2**40), Gpu(index=10**9)])], "huge"),
    ],
    ids=["64", "no links", "gaps", "unlisted", "no islands", "lost", "no index", "huge"],
)
def test_odd_boxes_are_drawn_and_written(inventory):
    for chart in (charts.link_matrix(inventory), charts.box_graph(inventory)):
        assert svg(chart).startswith("<svg")
    text = terminal.inventory_text(inventory)
    assert "GPUs" in text and "Findings" in text
    assert all(
        tables.box_line(inventory) and f(inventory) is not None for f in (tables.gpus, tables.links, tables.groups, tables.numa, tables.unknowns, tables.gaps)
    )
    json.loads(json.dumps(inventory.model_dump(), allow_nan=False))


def test_islands_have_their_own_colours_and_single_gpus_none():
    spec = json.dumps(charts.box_graph(box(5)).to_dict())
    assert all(f'"island": "{name}"' in spec for name in ("0-1", "2-3", "none"))
    unknown = json.dumps(charts.box_graph(box(3, [Link(a=0, b=1, kind="NV2", nvlinks=2)])).to_dict())
    assert '"island": "unknown"' in unknown and '"island": "none"' not in unknown


# Text.


def lines(text, title):
    """Lines of one section."""
    return text.split(f"\n{title}\n", 1)[1].split("\n\n")[0].splitlines()


def test_a_table_of_text():
    rows = [{"name": "a", "value": 1}, {"name": "longer", "value": None}]
    assert terminal.text_table(rows).splitlines() == ["name    value", "------  -----", "a           1", "longer      –"]
    assert terminal.text_table([], "  ") == "  (none)"


def test_the_text_shows_every_part_of_a_box():
    nics = [Nic(name="NIC0"), Nic(name="NIC1", links={"0": "PIX", "1": "SYS"})]
    numa = [NumaNode(node=0, cpus=[0, 1, 2, 5], memory_total_bytes=2**30)]
    measured = Measurement(what="w", where="GPU 0", unit="GB/s", size_bytes=2**20, spread=SPREAD, ceiling=4.0, ceiling_source="c")
    reading = Reading(command="nvidia-smi topo -m", gpus=[Gpu(index=0, unknown={"uuid": "[N/A]"}), Gpu(index=1)], nics=nics, numa=numa, incomplete=["cut"])
    reading = reading.model_copy(update={"links": [Link(a=0, b=1, kind="NV2", nvlinks=2)], "source": "topo.txt", "driver": "550.1"})
    text = terminal.inventory_text(merge.combine([reading], "folder", notes=["odd"], measured=[measured]))
    assert text.startswith("Box: folder\nRead: nvidia-smi topo -m in topo.txt\n")
    assert any("550.1" in line for line in lines(text, "Host"))
    assert any("NV2" in line and "0-1" in line for line in lines(text, "Links"))
    # A card without a known cell does not hide the others' columns.
    assert [re.split(r"\s{2,}", line.strip()) for line in lines(text, "Network cards")][2:] == [["NIC0", "–", "–"], ["NIC1", "PIX", "SYS"]]
    assert any("0-2,5" in line for line in lines(text, "NUMA nodes")) and any("50%" in line for line in lines(text, "Measured links"))
    assert lines(text, "Missing or odd") == ["  - topo.txt: cut", "  - odd"]
    assert any("[N/A]" in line for line in lines(text, "Unknown"))


def test_a_box_without_gpus_shows_its_ports_and_says_that_nothing_was_found():
    text = terminal.inventory_text(merge.combine([Reading(command="lspci -vv", ports=[PciePort(address="0000:3b:00.0", width_lanes=16, speed_gt_s=8.0)])], "x"))
    assert any("0000:3b:00.0" in line for line in lines(text, "PCIe links"))
    assert "nothing wrong was found in what could be read" in terminal.inventory_text(merge.combine([], "x"))


def test_findings_are_wrapped_and_keep_their_order():
    one = Finding(id="a", severity="serious", what="word " * 60, evidence="seen", advice="do")
    other = one.model_copy(update={"severity": "note", "what": "small"})
    text = terminal.inventory_text(merge.combine([], "x").model_copy(update={"findings": [one, other]}))
    body = lines(text, "Findings")
    assert body[0].startswith("  [serious] word") and max(map(len, body)) <= 140 and any(line.strip() == "evidence: seen" for line in body)
    assert [line for line in body if line.startswith("  [")][1] == "  [note] small" and any(line.strip() == "what to do: do" for line in body)
