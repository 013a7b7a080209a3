"""GPU matrices, link groups and link rates: right values worked by hand, every mangling that forums and terminals do, and what must be refused."""

import itertools
import random

import pytest
from conftest import least_seconds

from fieldbook.errors import BadInput
from fieldbook.inventory import bandwidths, links, matrix, topology
from fieldbook.inventory.captured import looks_like, read_text
from fieldbook.inventory.model import Gpu, Link
from fieldbook.inventory.values import clean

TITLES = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
# Four GPUs, NVLink in pairs, one NUMA node a pair.
PAIRS4 = {(0, 1): "NV4", (2, 3): "NV4"}
NODES4 = [("0-15", "0"), ("0-15", "0"), ("16-31", "1"), ("16-31", "1")]


def rows_of(count, kinds, other="SYS"):
    return [[f"GPU{a}", *(" X " if a == b else kinds.get((min(a, b), max(a, b)), other) for b in range(count))] for a in range(count)]


def printed(count, kinds, nodes=None, other="SYS"):
    """As nvidia-smi prints it: tabs, ' X ', and a second tab behind the NUMA node, whose title is wide."""
    titles = ["CPU Affinity", "NUMA Affinity\tGPU NUMA ID"] if nodes else []
    lines = ["\t".join(["", *(f"GPU{i}" for i in range(count)), *titles])]
    for i, row in enumerate(rows_of(count, kinds, other)):
        lines.append("\t".join([*row, *([nodes[i][0], nodes[i][1], "", "N/A"] if nodes else [])]))
    return "\n".join(lines) + "\n"


def read(text, source=""):
    """(reading, {pair: kind}) of the one topology in a text, through the door that users take."""
    reading = next(r for r in read_text(text, source) if r.command.startswith("nvidia-smi topo -m"))
    return reading, {(k.a, k.b): k.kind for k in reading.links}


def is_pairs4(text, affinity=True):
    reading, kinds = read(text)
    assert reading.gpu_count == 4 and [g.index for g in reading.gpus] == [0, 1, 2, 3]
    assert kinds == {pair: PAIRS4.get(pair, "SYS") for pair in itertools.combinations(range(4), 2)}
    assert [k.nvlinks for k in reading.links] == [4, 0, 0, 0, 0, 4]
    assert not reading.incomplete
    if affinity:
        assert [(g.cpu_affinity, g.numa_node) for g in reading.gpus] == [("0-15", 0), ("0-15", 0), ("16-31", 1), ("16-31", 1)]
    return reading


CLEAN4 = printed(4, PAIRS4, NODES4)


def each_line(text, change):
    return "".join(change(line) + "\n" for line in text.rstrip("\n").split("\n"))


# ---- clean ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("affinity", [True, False])
def test_clean_matrices(count, affinity):
    kinds = {(a, a + 1): "NV8" for a in range(0, count - 1, 2)}
    nodes = [("0-47", "0") if i < (count + 1) // 2 else ("48-95", "1") for i in range(count)] if affinity else None
    reading, found = read(printed(count, kinds, nodes, "NODE"))
    assert reading.gpu_count == count == len(reading.gpus)
    assert found == {pair: kinds.get(pair, "NODE") for pair in itertools.combinations(range(count), 2)}
    assert (reading.incomplete, reading.notes) == ([], [])
    for i, gpu in enumerate(reading.gpus):
        assert (gpu.cpu_affinity, gpu.numa_node) == ((nodes[i][0], int(nodes[i][1])) if affinity else (None, None))
        assert gpu.gpu_numa_id is None and ("gpu_numa_id" in gpu.unknown) == affinity


def test_more_gpus_than_any_box_has():
    reading, kinds = read(printed(128, {}, [("0-15", "0")] * 128))
    assert reading.gpu_count == 128 and len(kinds) == 128 * 127 // 2 and set(kinds.values()) == {"SYS"}


# ---- manglings that leave everything readable ------------------------------------------------------------------------------------------------------------

PLAIN4 = CLEAN4.expandtabs()
LINES4 = CLEAN4.rstrip("\n").split("\n")
BARRED4 = [
    ["", "GPU0", "GPU1", "GPU2", "GPU3", "CPU Affinity", "NUMA Affinity"],
    *([*row, *node] for row, node in zip(rows_of(4, PAIRS4), NODES4, strict=True)),
]
MANGLED = {
    "no leading tab": CLEAN4.lstrip("\t"),
    "no leading blanks": PLAIN4.lstrip(" "),
    "blanks for tabs": PLAIN4,
    "blanks squeezed": each_line(PLAIN4, lambda line: " ".join(line.split())),
    "mixed tabs and blanks": CLEAN4.replace("GPU1\tNV4", "GPU1    NV4").replace("GPU2\tSYS\t", "GPU2  SYS   "),
    "Windows line ends": CLEAN4.replace("\n", "\r\n"),
    "no last line end": CLEAN4.rstrip("\n"),
    "escapes before the tab": "\x1b[4m" + CLEAN4.replace("\n", "\x1b[0m\n", 1),
    "escapes behind the tab": "\t\x1b[4m" + CLEAN4[1:].replace("\n", "\x1b[0m\n", 1),
    "escapes without escape character": "\t[4m" + CLEAN4[1:].replace("\n", "[0m\n", 1),
    "escapes as cat -v shows them": "\t^[[4m" + CLEAN4[1:].replace("\n", "^[[0m\n", 1),
    "escapes as symbols": "\t␛[4m" + CLEAN4[1:].replace("\n", "␛[0m\n", 1),
    "glued header": CLEAN4.replace("\tGPU0\tGPU1\tGPU2\tGPU3\tCPU", "GPU0GPU1GPU2GPU3 CPU"),
    "glued cells": each_line(PLAIN4, lambda line: " ".join(line.split()).replace("SYS SYS", "SYSSYS").replace("X NV4", "XNV4")),
    "quoted mail": each_line(CLEAN4, lambda line: "> " + line),
    "quoted twice, blanks": each_line(PLAIN4, lambda line: ">> " + line),
    "log prefix": each_line(CLEAN4, lambda line: "2026-01-01 10:00:00 INFO " + line),
    "vLLM's log prefix": each_line(CLEAN4, lambda line: "(Worker pid=31) INFO 11-29 13:20:50 [topo.py:7] " + line),
    "docker compose prefix": each_line(CLEAN4, lambda line: "worker-1  | " + line),
    "no-break spaces": PLAIN4.replace(" ", "\u00a0"),
    "Unicode digits": CLEAN4.replace("GPU1", "GPU１").replace("NV4", "NV４").replace("\t1\t", "\t١\t"),
    "leading zeros": CLEAN4.replace("GPU", "GPU0").replace("GPU0 NUMA", "GPU NUMA"),
    "rows out of order": "\n".join([LINES4[0], LINES4[4], LINES4[2], LINES4[1], LINES4[3]]),
    "Markdown": "\n".join("| " + " | ".join(row) + " |" for row in [BARRED4[0], ["---"] * 7, *BARRED4[1:]]),
    "Markdown, bold": "\n".join("| " + " | ".join([f"**{r[0]}**", *r[1:]]) + " |" for r in BARRED4),
    "boxed": "\n+----+\n".join("|" + "|".join(f"{cell:^15}" for cell in row) + "|" for row in BARRED4),
    "boxed with lines": "\n├────┼────┤\n".join("│" + "│".join(f"{cell:^15}" for cell in row) + "│" for row in BARRED4),
    "Python string": "T = " + repr(CLEAN4),
    "bytes": repr(CLEAN4.encode()),
    "JSON": '{"out": "' + CLEAN4.replace("\t", "\\t").replace("\n", "\\n") + '", "rc": 0}',
    "list of strings": "L = [\n" + each_line(CLEAN4, lambda line: '    "' + line.replace("\t", "\\t") + '",') + "]\n",
    "C strings": "char *t =\n" + each_line(CLEAN4, lambda line: '    "' + line.replace("\t", "\\t") + '\\n"') + ";\n",
    "strings with plus and backslash": "t = \\\n" + each_line(CLEAN4, lambda line: "    '" + line.replace("\t", "\\t") + "\\n' + \\"),
    "wrapped title": PLAIN4.replace("NUMA Affinity", "NUMA\nAffinity", 1),
    "wrapped rows": each_line(
        PLAIN4.replace("GPU NUMA ID", ""), lambda line: line if "Aff" in line else line[:24].rstrip() + "\n" + line[24:].replace("N/A", "")
    ),
    "wrapped header": PLAIN4.replace("GPU1    GPU2", "GPU1\nGPU2", 1),
    "header on two lines, titles apart": PLAIN4.replace("GPU3    CPU", "GPU3\nCPU", 1),
}


@pytest.mark.parametrize("name", MANGLED)
def test_a_mangled_matrix_reads_as_the_clean_one(name):
    is_pairs4(MANGLED[name])


def test_soc_is_what_sys_was_called():
    assert read(printed(2, {(0, 1): "SOC"}))[1] == {(0, 1): "SYS"}


def test_cpu_lists_that_ran_into_the_last_cell():
    reading, kinds = read("GPU0GPU1CPU AffinityNUMA Affinity\nGPU0 X SYS0-7 0\nGPU1 SYS X8-15 1\n")
    assert kinds == {(0, 1): "SYS"} and [(g.cpu_affinity, g.numa_node) for g in reading.gpus] == [("0-7", 0), ("8-15", 1)]
    # NV4 and 0-15 or NV40 and -15: both can be meant.
    reading, kinds = read("GPU0 GPU1 CPU Affinity\nGPU0 X NV40-15\nGPU1 NV4 X 16-31\n")
    assert kinds == {(0, 1): None} and "NV40-15" in reading.links[0].unknown["kind"]


@pytest.mark.parametrize("names", [("NIC0", "NIC1"), ("mlx5_0", "mlx5_1"), ("mlx5_0", "mlx5_bond_1")])
def test_network_cards_are_no_gpus(names):
    one, two = names
    text = (
        f"\tGPU0\tGPU1\t{one}\t{two}\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\tPIX\tSYS\t0-7\t0\nGPU1\tPHB\t X \tSYS\tPIX\t8-15\t1\n"
        f"{one}\tPIX\tSYS\t X \tSYS\t\t\n{two}\tSYS\tPIX\tSYS\t X \t\t\n"
    )
    reading, kinds = read(text)
    assert reading.gpu_count == 2 and kinds == {(0, 1): "PHB"} and [g.numa_node for g in reading.gpus] == [0, 1]
    assert [(n.name, n.links) for n in reading.nics] == [(one, {"0": "PIX", "1": "SYS"}), (two, {"0": "SYS", "1": "PIX"})]


def test_a_network_card_between_the_gpus_moves_no_cell():
    text = "\tGPU0\tNIC0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\tNV4\t0-15\nNIC0\tPIX\t X \tSYS\nGPU1\tNV4\tSYS\t X \t16-31\n"
    reading, kinds = read(text)
    assert kinds == {(0, 1): "NV4"} and reading.nics[0].links == {"0": "PIX", "1": "SYS"} and not reading.incomplete
    text = "\tNIC0\tGPU0\tGPU1\nNIC0\t X \tPIX\tSYS\nGPU0\tPIX\t X \tNV4\nGPU1\tSYS\tNV4\t X \n"
    reading, kinds = read(text)
    assert kinds == {(0, 1): "NV4"} and reading.nics[0].links == {"0": "PIX", "1": "SYS"}


# ---- affinity columns -----------------------------------------------------------------------------------------------------------------------------------

HEAD = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"


def first_gpu(header, row):
    reading, kinds = read(f"{header}GPU0{row}\nGPU1\tPHB\t X \n")
    assert kinds == {(0, 1): "PHB"}
    gpu = reading.gpus[0]
    return gpu.cpu_affinity, gpu.numa_node, gpu.gpu_numa_id


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("\t X \tPHB\t0-7\t0\t\t1", ("0-7", 0, 1)),
        ("\t X \tPHB\t0-7,16-23\t0\t\tN/A", ("0-7,16-23", 0, None)),
        ("\t X \tPHB\t\t0\t\tN/A", (None, 0, None)),
        ("\t X \tPHB\t0-7\t\t\tN/A", ("0-7", None, None)),
        ("\t X \tPHB\t\t\t\tN/A", (None, None, None)),
        ("\t X \tPHB\tN/A\tN/A\t\tN/A", (None, None, None)),
        ("\t X \tPHB\t0-7\tN/A\t\tN/A", ("0-7", None, None)),
        ("\t X \tPHB\t0-7\t0-1\t\tN/A", ("0-7", None, None)),  # two nodes are not one
        ("\t X \tPHB\t0-7\t-1\t\tN/A", ("0-7", None, None)),
        ("\t X \tPHB\t0-7\t²\t\tN/A", ("0-7", None, None)),  # str.isdigit says yes, int() says no
        ("\t X \tPHB\t0-7\t123456789\t\tN/A", ("0-7", None, None)),
        ("\t X \tPHB", (None, None, None)),
    ],
)
def test_affinity_columns_with_tabs(row, expected):
    assert first_gpu(HEAD, row) == expected
    # The same with blanks, as a terminal shows it, and with a header that lost its indent.
    reading, _ = read(f"{HEAD}GPU0{row}\nGPU1\tPHB\t X \n".expandtabs())
    assert (reading.gpus[0].cpu_affinity, reading.gpus[0].numa_node, reading.gpus[0].gpu_numa_id) == expected
    reading, _ = read(f"{HEAD}GPU0{row}\nGPU1\tPHB\t X \n".expandtabs().lstrip())
    assert (reading.gpus[0].cpu_affinity, reading.gpus[0].numa_node, reading.gpus[0].gpu_numa_id) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (" X PHB 0-7 0 N/A", ("0-7", 0, None)),
        (" X PHB 0-7 N/A", ("0-7", None, None)),
        (" X PHB 0-7 1", ("0-7", None, None)),  # node 1, or no node and a GPU's own node 1
        (" X PHB 0 N/A", (None, None, None)),
        (" X PHB 0", (None, None, None)),
    ],
)
def test_squeezed_blanks_leave_open_which_column_is_empty(row, expected):
    reading, _ = read(f"GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0{row}\nGPU1 PHB X\n")
    gpu = reading.gpus[0]
    assert (gpu.cpu_affinity, gpu.numa_node, gpu.gpu_numa_id) == expected
    assert gpu.numa_node is not None or "numa_node" in gpu.unknown


def test_an_empty_cell_of_a_markdown_table_stays_empty():
    reading, _ = read("| | GPU0 | GPU1 | CPU Affinity | NUMA Affinity |\n|---|---|---|---|---|\n| GPU0 | X | NV4 | | 0 |\n| GPU1 | NV4 | X | 8-15 | |\n")
    assert [(g.cpu_affinity, g.numa_node) for g in reading.gpus] == [(None, 0), ("8-15", None)]


@pytest.mark.parametrize("header", ["\tGPU0\tGPU1\n", "\tGPU0\tGPU1\tCPU Affinity\n"])
def test_numa_written_out_behind_the_row(header):
    reading, kinds = read(header + "GPU0\t X \tPHB NUMA 0\nGPU1\tPHB\t X  NUMA 1\n")
    assert kinds == {(0, 1): "PHB"} and [g.numa_node for g in reading.gpus] == [0, 1]


def test_one_cpu_is_no_node():
    reading, _ = read("GPU0    GPU1    CPU Affinity    NUMA Affinity\nGPU0     X      PHB     3\nGPU1    PHB      X      8\n")
    assert [(g.cpu_affinity, g.numa_node) for g in reading.gpus] == [("3", None), ("8", None)]


# ---- damage that must show ------------------------------------------------------------------------------------------------------------------------------

SIX = {(0, 1): "NV1", (0, 2): "NV2", (0, 3): "NV3", (1, 2): "PIX", (1, 3): "PXB", (2, 3): "PHB"}


def test_truncated_rows_give_what_they_have_and_say_so():
    reading, kinds = read("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV4\tNV4\nGPU1\tNV4\t X \nGPU2\tNV4\n")
    assert reading.gpu_count == 3 and kinds == {(0, 1): "NV4", (0, 2): "NV4", (1, 2): None}
    assert reading.links[2].unknown["kind"] and reading.links[2].nvlinks is None
    assert reading.incomplete == ["row GPU1 ends after 2 of 3 cells", "row GPU2 ends after 1 of 3 cells"]


def test_missing_rows():
    reading, kinds = read("\n".join(LINES4[:3]))
    assert reading.gpu_count == 4 and kinds == {(0, 1): "NV4", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): None}
    assert "no row for GPU 2, 3" in reading.incomplete[0]


@pytest.mark.parametrize("text", ["\tGPU0\tGPU1\tGPU2\tCPU Affinity\n", "\tGPU0\tGPU1\tGPU2\n"])
def test_a_header_without_rows(text):
    reading, kinds = read(text)
    assert reading.gpu_count == 3 and set(kinds.values()) == {None} and "no row for GPU 0, 1, 2" in reading.incomplete[0]


def test_a_cell_lost_before_the_cpu_list_moves_no_link():
    text = printed(4, SIX, NODES4)
    for a, b in SIX:
        lines = text.split("\n")
        cells = lines[a + 1].split("\t")
        lines[a + 1] = "\t".join(cells[: b + 1] + cells[b + 2 :])
        reading, kinds = read("\n".join(lines))
        assert reading.gpu_count == 4 and kinds == SIX and reading.incomplete  # the other half of the matrix tells
        # Without the other half nothing that may have moved is told.
        reading, kinds = read("\n".join(lines[: a + 2]))
        assert all(kind in (SIX[pair], None) for pair, kind in kinds.items()), (a, b, kinds)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("GPU0\tNV4\t X \tSYS\tSYS", "its X is not in its own column"),
        ("GPU0\t X \t X \tSYS\tSYS", "its X is not in its own column"),
        ("GPU0\tNV4\tSYS\tSYS\tSYS", "its X is not in its own column"),
        ("GPU9\tNV4\tSYS\tSYS\tSYS", "row GPU9 has no column of its own"),
        ("GPU1\tNV4\t X \tSYS\tSYS", "row GPU1 stands there twice"),
    ],
)
def test_a_row_that_cannot_be_right_is_not_read(row, why):
    lines = printed(4, PAIRS4).split("\n")
    reading, kinds = read("\n".join([lines[0], row, *lines[2:]]))
    assert reading.gpu_count == 4 and any(why in line for line in reading.incomplete)
    assert kinds == {pair: PAIRS4.get(pair, "SYS") for pair in itertools.combinations(range(4), 2)}


def test_halves_that_contradict_each_other():
    reading, kinds = read(printed(2, {(0, 1): "NV4"}).replace("X \tNV4", "X \tNV2"))
    assert kinds == {(0, 1): None} and reading.links[0].unknown["kind"] == "the matrix says NV2 one way and NV4 the other"
    assert reading.links[0].nvlinks is None and links.islands(reading.gpus, reading.links) is None


def test_header_faults():
    reading, _ = read(printed(2, {(0, 1): "NV4"}).replace("\tGPU0\tGPU1", "\tGPU0\tGPU0"))
    assert reading.gpu_count == 2 and "counted by position" in reading.incomplete[0]
    reading, kinds = read(printed(2, {(0, 1): "NV4"}).replace("GPU1", "GPU2"))
    assert reading.gpu_count == 2 and kinds == {(0, 2): "NV4"} and reading.incomplete == ["the header has no column for GPU 1"]
    reading, kinds = read(printed(3, {}).replace("\tGPU2\n", "\n", 1))
    assert reading.gpu_count == 3 and set(kinds.values()) == {"SYS"} and "no column for GPU 2" in reading.incomplete[0]


def test_a_number_of_nvlinks_that_is_none():
    reading, kinds = read(printed(2, {(0, 1): "NV0"}))
    assert kinds == {(0, 1): None} and reading.links[0].unknown["kind"] == "NV0 is no link kind" and reading.links[0].nvlinks is None


def test_two_matrices_are_not_mixed():
    reading, kinds = read(printed(2, {(0, 1): "NV4"}) + "\n\n\n" + printed(2, {}))
    assert kinds == {(0, 1): "NV4"} and "second topology matrix in line 7" in reading.notes[0]


@pytest.mark.parametrize("text", ["$ nvidia-smi topo -mp\n{}", "{}"])
def test_mp_leaves_nvlink_unknown(text):
    reading, kinds = read(text.format(printed(2, {(0, 1): "PHB"})), "topo-mp.txt")
    assert reading.command == "nvidia-smi topo -mp" and kinds == {(0, 1): "PHB"} and reading.links[0].kind_is_pcie_path
    assert reading.links[0].nvlinks is None and "nvlinks" in reading.links[0].unknown
    assert links.islands(reading.gpus, reading.links) is None and links.switches(reading.gpus, reading.links) == []
    assert "unknown" in reading.notes[0]


# ---- peer access ----------------------------------------------------------------------------------------------------------------------------------------

PEER = " \tGPU0\tGPU1\n GPU0\tX\t{0}\n GPU1\t{1}\tX\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"


@pytest.mark.parametrize(
    ("above", "source", "names"),
    [
        ("$ nvidia-smi topo -p2p r\n", "", ["read"]),
        ("$ nvidia-smi topo -p2p w\n", "", ["write"]),
        ("$ nvidia-smi topo -p2p n\n", "", ["nvlink"]),
        ("$ nvidia-smi topo -p2p a\n", "", ["atomics"]),
        ("$ nvidia-smi topo -p2p rw\n", "", ["read", "write"]),
        ("", "topo-p2p-w.txt", ["write"]),
        ("", "paste.txt", ["unstated"]),
    ],
)
def test_peer_access(above, source, names):
    [reading] = read_text(above + PEER.format("OK", "OK"), source)
    assert reading.gpu_count == 2 and reading.links[0].kind is None and reading.links[0].nvlinks is None
    assert reading.links[0].p2p == dict.fromkeys(names, "OK")


@pytest.mark.parametrize("status", ["CNS", "GNS", "TNS", "NS", "DR", "U"])
def test_why_there_is_no_peer_access(status):
    assert topology.read_topology(PEER.format(status, status)) is None
    assert topology.read_p2p(PEER.format(status, status), "topo-p2p-r.txt")[0].links[0].p2p == {"read": status}


def test_peer_access_one_way_only_and_several_matrices():
    [one] = topology.read_p2p("nvidia-smi topo -p2p w\n" + PEER.format("OK", "CNS"))
    assert one.links[0].p2p == {"write": "OK 0->1, CNS 1->0"}
    text = "".join(f"$ nvidia-smi topo -p2p {way}\n{PEER.format(status, status)}\n" for way, status in (("r", "OK"), ("w", "NS"), ("n", "U")))
    assert [r.links[0].p2p for r in topology.read_p2p(text)] == [{"read": "OK"}, {"write": "NS"}, {"nvlink": "U"}]
    both = "$ nvidia-smi topo -m\n" + printed(2, {(0, 1): "PHB"}) + "\n$ nvidia-smi topo -p2p r\n" + PEER.format("NS", "NS")
    assert [r.command for r in read_text(both)] == ["nvidia-smi topo -m", "nvidia-smi topo -p2p r"]


# ---- refusals -------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\tGPU0\tGPU1\nGPU0\t0.0\t25.7\nGPU1\t25.7\t0.0\n", "a matrix of numbers between 2 GPUs (0 to 25.7), perhaps bandwidths in GB/s"),
        (printed(3, {}, other="XGMI"), "'XGMI' between them, which nvidia-smi does not print"),
        (printed(2, {(0, 1): "MX"}), "another vendor's"),
        (printed(2, {(0, 1): "HCCS"}).replace("GPU", "NPU"), "Ascend's npu-smi"),
        (printed(2, {(0, 1): "SYS"}).replace("GPU", "DCU"), "a matrix of DCU devices of another vendor"),
        (
            "Legend:\n\n  X    = Self\n  NV#  = Connection traversing\n  PIX  = Connection traversing one bridge\n",
            "the legend of `nvidia-smi topo -m` without its matrix",
        ),
        ("GPU0 and GPU1 talk over NV4, the others over SYS.\n", "words about links"),
        ("", "empty: no output in it"),
        ("\n \n```\n", "empty: no output in it"),
        ("hello\n", "no output of a known command in it; it begins with 'hello'"),
    ],
)
def test_look_alikes_are_refused_in_one_line(text, says):
    with pytest.raises(BadInput) as refused:
        read_text(text)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_looks_like_names_the_tool():
    for text, word in (
        ("hl-smi\n", "Habana"),
        ("# nThread 1\n", "nccl-tests"),
        ("Machine (64GB)\n", "lstopo"),
        ("<!DOCTYPE html>\n", "web page"),
        ("#Idx\n", "dmon"),
    ):
        assert word in looks_like(text)


# ---- groups ---------------------------------------------------------------------------------------------------------------------------------------------


def net(count, kinds, other="SYS"):
    gpus = [Gpu(index=i) for i in range(count)]
    pairs = []
    for a, b in itertools.combinations(range(count), 2):
        kind = kinds.get((a, b), other)
        pairs.append(Link(a=a, b=b, kind=kind, nvlinks=None if kind is None else int(kind[2:]) if kind.startswith("NV") else 0))
    return gpus, pairs


def test_islands_of_complete_links():
    assert links.islands(*net(4, PAIRS4)) == [[0, 1], [2, 3]]
    assert links.islands(*net(3, {})) == [[0], [1], [2]]
    assert links.islands(*net(4, {(0, 1): "NV1", (1, 3): "NV2"})) == [[0, 1, 3], [2]]
    assert links.islands([Gpu(index=0)], []) == [[0]] and links.islands([], []) == []


def test_an_unknown_pair_matters_only_where_it_would_join_two_islands():
    assert links.islands(*net(4, {**PAIRS4, (0, 2): None})) is None
    assert links.islands(*net(3, {(0, 1): "NV4", (1, 2): "NV4", (0, 2): None})) == [[0, 1, 2]]
    gpus, pairs = net(3, {(0, 1): "NV4"})
    assert links.islands(gpus, pairs[:1]) is None and links.islands(gpus, []) is None
    assert links.islands(gpus[:2], pairs) == [[0, 1]]  # links to a GPU that is not listed


def test_switches():
    assert links.switches(*net(4, {(0, 1): "PIX", (2, 3): "PXB"})) == [[0, 1], [2, 3]]
    assert links.switches(*net(3, {}, "PHB")) == []
    assert links.switches(*net(2, {(0, 1): "NV4"})) is None  # NVLink hides the PCIe path
    assert links.switches(*net(2, {(0, 1): None})) is None


def test_cuts_and_unjoined_pairs():
    gpus, pairs = net(4, {**PAIRS4, (0, 2): "PHB"})
    pairs = [k.model_copy(update={"theoretical_gb_s": {"PHB": 31.508, "SYS": 15.754}.get(k.kind)}) for k in pairs]
    assert links.cuts([[0, 1], [2, 3]], pairs) == [{"between": [[0, 1], [2, 3]], "pairs": 4, "kinds": ["PHB", "SYS"], "best_pair_gb_s": 31.508}]
    assert links.cuts(None, pairs) == [] and links.cuts([[0, 1, 2, 3]], pairs) == []
    assert links.cuts([[0], [1]], [Link(a=0, b=1)]) == [{"between": [[0], [1]], "pairs": 1, "kinds": [], "best_pair_gb_s": None}]
    _, ring = net(4, {(0, 1): "NV1", (1, 2): "NV1", (2, 3): "NV1", (0, 3): None, (0, 2): "SYS"})
    assert links.unjoined([0, 1, 2, 3], ring) == [(0, 2), (1, 3)]
    assert [links.nearness(k) for k in ("NV12", "PIX", "PXB", "PHB", "NODE", "SYS", "XGMI")] == [0, 1, 2, 3, 4, 5, 6]


# ---- rates ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "lanes", "expected"),
    [
        (1, 1, 0.25),  # 2.5 GT/s x 8/10 / 8
        (1, 4, 1.0),
        (2, 4, 2.0),  # 5 x 8/10 x 4 / 8
        (2, 16, 8.0),
        (3, 8, 7.877),  # 8 x 128/130 x 8 / 8
        (3, 16, 15.754),
        (4, 8, 15.754),
        (4, 16, 31.508),
        (5, 16, 63.015),  # 32 x 128/130 x 16 / 8
        (6, 16, 121.0),  # 64 x 242/256 x 16 / 8
    ],
)
def test_pcie_rates(generation, lanes, expected):
    assert round(links.pcie_gb_s(generation, lanes), 3) == expected


def test_no_rate_without_generation_or_lanes():
    assert links.pcie_gb_s(None, 16) is links.pcie_gb_s(5, None) is links.pcie_gb_s(5, 0) is links.pcie_gb_s(9, 16) is None
    assert [links.generation_of(speed) for speed in (2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 0.0, None)] == [1, 2, 3, 4, 5, 6, None, None]
    # Idle at Gen1 of Gen4; the lanes are those it was trained to.
    assert links.gpu_pcie_gb_s(Gpu(pcie_generation=1, pcie_generation_max=4, pcie_width_lanes=8, pcie_width_max_lanes=16))[0] == pytest.approx(
        15.7538, abs=1e-3
    )
    assert links.gpu_pcie_gb_s(Gpu()) == (None, "")


def rated(link, *gpus):
    [found] = links.with_rates([link], [g.model_copy(update={"index": i}) for i, g in enumerate(gpus)])
    return found.theoretical_gb_s, found.unknown.get("theoretical_gb_s")


def test_the_rate_of_a_pair():
    wide, narrow = Gpu(pcie_generation_max=4, pcie_width_lanes=16), Gpu(pcie_generation_max=2, pcie_width_lanes=4)
    pcie = Link(a=0, b=1, kind="PHB", nvlinks=0)
    assert rated(pcie, wide, narrow) == rated(pcie, narrow, wide) == (2.0, None)
    assert rated(pcie, wide, wide) == (31.508, None)
    assert rated(pcie, wide, Gpu()) == (None, "PCIe generation or lanes of an end are not told")
    assert rated(pcie.model_copy(update={"kind_is_pcie_path": True, "nvlinks": None}), wide, wide) == (None, "topo -mp hides NVLink")
    assert rated(Link(a=0, b=1), wide, wide)[0] is None  # neither kind nor NVLinks known


def test_the_rate_of_nvlinks():
    nv = Link(a=0, b=1, kind="NV12", nvlinks=12)
    assert rated(nv, Gpu(compute_capability="8.0"), Gpu(compute_capability="8.0")) == (300.0, None)  # 12 x 25: an A100's 600 GB/s both ways
    assert rated(Link(a=0, b=1, kind="NV18", nvlinks=18), Gpu(compute_capability="9.0"), Gpu())[0] == pytest.approx(478.116)
    assert rated(nv, Gpu(nvlink_gb_s=[None, 26.562]), Gpu()) == (318.744, None)
    assert rated(nv, Gpu(), Gpu()) == (None, "the rate of one NVLink is not told")
    assert rated(nv.model_copy(update={"theoretical_gb_s": 7.0}), Gpu(), Gpu())[0] == 7.0


# ---- rates that somebody measured -----------------------------------------------------------------------------------------------------------------------


def bandwidth_test(can="CAN", devices=True):
    table = "   D\\D     0      1 \n     0 900.00  {0} \n     1  {1} 901.00 \n"
    lines = "".join(f"Device: {i}, Some GPU, pciBusID: {bus}, pciDeviceID: 0, pciDomainID:0\n" for i, bus in enumerate(("3b", "5e"))) if devices else ""
    latency = "   GPU     0      1 \n     0   1.50   2.50 \n     1   2.60   1.60 \n\n   CPU     0      1 \n     0   9.10 9.20 \n     1 9.30 9.40 \n"
    return (
        f"[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]\n{lines}Device=0 {can} Access Peer Device=1\nDevice=1 {can} Access Peer Device=0\n\n"
        f"Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\n{table.format('11.50', '11.60')}"
        f"Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)\n{table.format('24.50', '24.60')}"
        f"Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)\n{table.format('48.10', '48.20')}P2P=Enabled Latency (P2P Writes) Matrix (us)\n{latency}"
    )


def test_p2p_bandwidth_latency_test():
    reading = bandwidths.read_bandwidth_test(bandwidth_test())
    assert reading.gpu_count == 2 and [(g.name, g.bus_id) for g in reading.gpus] == [("Some GPU", "0000:3b:00.0"), ("Some GPU", "0000:5e:00.0")]
    [link] = reading.links
    assert link.kind is None and link.p2p == {"read": "OK", "write": "OK"} and not reading.incomplete
    assert {way: s.median for way, s in link.measured_gb_s.items()} == {
        "0->1 through host": 11.5, "1->0 through host": 11.6, "0->1": 24.5, "1->0": 24.6, "0<->1": 48.1,
    }  # fmt: skip
    assert {way: s.median for way, s in link.measured_latency_us.items()} == {"0->1": 2.5, "1->0": 2.6}


def test_p2p_enabled_without_peer_access_goes_through_the_host():
    [link] = bandwidths.read_bandwidth_test(bandwidth_test("CANNOT")).links
    assert link.p2p == {"read": "NS", "write": "NS"} and set(link.measured_gb_s) == {"0->1 through host", "1->0 through host", "0<->1 through host"}


def test_a_gpu_that_is_only_implied_is_named():
    reading = bandwidths.read_bandwidth_test("Device=0 CAN Access Peer Device=9\n")
    assert reading.gpu_count == 10 and reading.incomplete == ["no word of GPU 1, 2, 3, 4, 5, 6, 7, 8"]
    assert bandwidths.read_bandwidth_test("P2P=Enabled and nothing else\n") is None


def test_pair_lists():
    reading = bandwidths.read_pair_list("[0]->[1]  OK  5.79 GB/s\n[1]->[0]  OK  5.80 GB/s\n")
    assert reading.gpu_count == 2 and {w: s.median for w, s in reading.links[0].measured_gb_s.items()} == {"0->1": 5.79, "1->0": 5.8} and not reading.incomplete
    assert bandwidths.read_pair_list("[0] -> [1] OK\n").incomplete == ["1 of 2 ordered pairs are not in the list"]
    assert bandwidths.read_pair_list("[0]->[1] FAIL\n[1]->[0] OK\n").links[0].p2p == {"read": "NS", "write": "NS"}
    assert bandwidths.read_pair_list("[0]->[1] OK 5..9 GB/s\n[1]->[0] OK\n").links[0].measured_gb_s == {}
    reading = bandwidths.read_pair_list("all 12 ordered pairs enabled\n[0]->[1] OK\n")
    assert reading.gpu_count == 4 and "12 ordered pairs are 4 GPUs, the list names 2" in reading.incomplete
    assert bandwidths.read_pair_list("[0]->[0] OK 900.0 GB/s\n") is None  # its own memory: no pair, no count


# ---- speed and damage -----------------------------------------------------------------------------------------------------------------------------------

READERS = (
    clean, topology.read_topology, topology.read_p2p, topology.number_matrix, topology.other_devices, bandwidths.read_bandwidth_test,
    bandwidths.read_pair_list, looks_like,
)  # fmt: skip
PIECES = (
    *("GPU0 ", "GPU0\t", "GPU0GPU1", "NIC0 ", "CPU ", "X ", "XNV4", "NV4 ", "MX0 ", "0-7,", "\n", " ", "\t", "a", "A1", "> ", "| ", "[4m", "\x1b[", "'"),
    *("Device=0 CAN Access Peer Device=1\n", "Device: 0, ", "[0]->[1] OK\n", "<system version=\n", "a, ", "1, ", "\u200b", "٣", "',", "\\t"),
)


@pytest.mark.parametrize("before", ["", "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\n", "GPU0\\t'", "P2P=Enabled Matrix\n"])
def test_no_text_is_slow(before):
    """1 s for 100 kB, tried at a quarter of that: a quadratic pattern takes a sixteenth of its time there, and the bad ones took minutes."""
    for piece in PIECES:
        text = before + piece * (25_000 // len(piece)) + "!\n"
        for reader in READERS:
            assert least_seconds(lambda read=reader, text=text: read(text), 0.5, BadInput) < 0.5, (reader.__name__, piece)


def test_random_damage_never_gives_a_traceback_or_a_silently_wrong_count():
    rng = random.Random(3)
    texts = [
        CLEAN4,
        PLAIN4,
        MANGLED["Markdown"],
        MANGLED["wrapped rows"],
        MANGLED["JSON"],
        printed(2, {(0, 1): "NV4"}),
        "nvidia-smi topo -p2p r\n" + PEER.format("OK", "OK"),
    ]
    pool = "GPUXNV0123456789 \t\n|-,>²٣\x1b[m"
    for _ in range(1500):
        text = rng.choice(texts)
        count = 4 if text not in texts[-2:] else 2
        for _ in range(rng.choice([1, 1, 2, 4])):
            at, cut = rng.randrange(len(text)), rng.choice([0, 1, 1, 1, 5, 40])
            text = text[:at] + "".join(rng.choices(pool, k=rng.choice([0, 1, 1, 3]))) + text[at + cut :]
        try:
            readings = read_text(text)
        except BadInput as error:
            assert "\n" not in str(error)
            continue
        for reading in readings:
            if reading.command.startswith("nvidia-smi topo"):
                assert len(reading.gpus) == reading.gpu_count
                assert reading.gpu_count == count or reading.incomplete or reading.notes, text
                assert all(k.kind is None or topology.re.fullmatch(matrix.KINDS, k.kind) for k in reading.links)


def test_a_damaged_gpu_label_is_no_network_card_without_a_word():
    reading, _ = read("\tGPU0\tGP21\nGPU0\t X \tNV4\nGP31\tNV4\t X \n")
    assert reading.gpu_count == 1 and "column GP21 is neither a GPU nor a network card" in reading.incomplete[0]


@pytest.mark.parametrize("word", ["GPU", "9PU1"])
def test_a_header_word_that_is_no_device_is_told(word):
    [reading] = read_text(f"nvidia-smi topo -p2p r\n \tGPU0\t{word}\n GPU0\tX\tOK\n GNU1\tOK\tX\n")
    assert reading.gpu_count == 1 and f"the header has {word}, which is no device" in reading.incomplete[0]
