"""GPU matrices: `nvidia-smi topo -m`, `topo -mp` and `topo -p2p`, as terminals, forums and chat windows leave them.

The header says how many GPUs there are, and each row carries an X in its own column: both are checked, so that a cell that lost its blank or a
row that was cut shows, instead of moving the cells behind it.
"""

import collections
import itertools
import re

from ..errors import BadInput
from .matrix import CELL, KINDS, NUMBER, P2P, Matrix, Row, find_matrices
from .model import Gpu, Link, Nic, Reading
from .values import says_nothing

P2P_MEANING = {
    "OK": "works",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key of the driver",
    "U": "unknown",
}
_CAPABILITY = {"r": ["read"], "w": ["write"], "rw": ["read", "write"], "n": ["nvlink"], "a": ["atomics"], "p": ["pcie"]}


def read_topology(text: str, source: str = "") -> Reading | None:
    """The link kinds of `topo -m` or `topo -mp` (told by the command line above, or by the name of the file). None: no such matrix in the text.

    Raises BadInput for one that nvidia-smi cannot have printed.
    """
    found = [m for m in find_matrices(text) if _class_of(m) == "topology"]
    if not found:
        return None
    matrix = found[0]
    made_up = next((c for c in matrix.columns if c == "CPU"), None)
    if made_up:
        raise BadInput(
            f"line {matrix.line}: a matrix with a device column '{made_up}', which nvidia-smi does not print; give the output of `nvidia-smi topo -m`"
        )
    words = collections.Counter(c for name, row, *_ in matrix.rows if name.startswith("GPU") for c in row[: len(matrix.gpu_columns)])
    foreign = next((w for w, count in words.most_common() if count > 1 and re.fullmatch(r"[A-Z]{2,5}\d{0,2}", w) and not CELL.fullmatch(w) and w != "NA"), None)
    if foreign:
        raise BadInput(
            f"line {matrix.line}: a matrix of {len(matrix.gpu_columns)} GPUs with '{foreign}' between them, which nvidia-smi does not print: "
            "it looks like another vendor's (MX: MetaX's mx-smi, HCCS: Ascend's npu-smi, XGMI: AMD's rocm-smi)"
        )
    gpus, cells, incomplete = _square(matrix)
    notes = []
    if len(found) > 1:
        notes.append(f"a second topology matrix in line {found[1].line} is not read")
    pcie_only = matrix.command.endswith("-mp") or (not matrix.command and bool(re.search(r"topo[-_ ]?mp(?![a-z])", source)))
    links = []
    for a, b in itertools.combinations(sorted(gpus), 2):
        kind, why = _both_ways(cells, a, b)
        links.append(_link(a, b, kind, why, pcie_only))
    if pcie_only:
        notes.append("topo -mp shows the PCIe path only: whether there is NVLink beside it is unknown")
    nics = _nics(matrix, gpus, notes)
    return Reading(
        command="nvidia-smi topo -mp" if pcie_only else "nvidia-smi topo -m",
        gpus=[_gpu(matrix, index) for index in gpus],
        gpu_count=len(gpus),
        links=links,
        nics=nics,
        incomplete=incomplete,
        notes=notes,
    )


def read_p2p(text: str, source: str = "") -> list[Reading]:
    """Every peer-access matrix of the text (`topo -p2p`); the capability comes from the command line above it or from the name of the file."""
    readings = []
    for matrix in find_matrices(text):
        if _class_of(matrix, source) != "p2p":
            continue
        gpus, cells, incomplete = _square(matrix)
        asked = re.search(r"p2p[ -](rw|[rwnap])\b", matrix.command) or re.search(r"p2p[-_ ](rw|[rwnap])\b", source)
        names = _CAPABILITY[asked[1]] if asked else ["unstated"]
        command = f"nvidia-smi topo -p2p {asked[1] if asked else '?'}"
        if any(r.command == command for r in readings):
            readings[-1] = readings[-1].model_copy(update={"notes": [*readings[-1].notes, f"a second peer matrix in line {matrix.line} is not read"]})
            continue
        links = []
        for a, b in itertools.combinations(sorted(gpus), 2):
            status, why = _both_ways(cells, a, b)
            ways = [cells.get(pair, "") for pair in ((a, b), (b, a))]
            if status is None and all(re.fullmatch(P2P, way) for way in ways):
                status = f"{ways[0]} {a}->{b}, {ways[1]} {b}->{a}"  # peer access may hold one way only
            if status is None:
                links.append(Link(a=a, b=b, unknown={f"p2p {name}": why for name in names}))
            else:
                links.append(Link(a=a, b=b, p2p=dict.fromkeys(names, status)))
        readings.append(Reading(command=command, gpus=[Gpu(index=i) for i in gpus], gpu_count=len(gpus), links=links, incomplete=incomplete))
    return readings


def number_matrix(text: str) -> str | None:
    """What to say of a matrix of numbers between GPUs (bandwidths, hops, weights); None when there is none."""
    for matrix in find_matrices(text):
        if _class_of(matrix) == "numbers":
            values = [float(c) for _, cells, _, _, _ in matrix.rows for c in cells if NUMBER.fullmatch(c)]
            return f"a matrix of numbers between {len(matrix.gpu_columns)} GPUs ({min(values):g} to {max(values):g}), perhaps bandwidths in GB/s"
    return None


def other_devices(text: str) -> str | None:
    """The label word of a link matrix of devices that are not called GPU ('NPU'); None when there is none."""
    for matrix in find_matrices(text):
        word = re.match(r"[A-Za-z]+", matrix.columns[0])[0]
        if not matrix.gpu_columns and matrix.rows and word not in ("GPU", "NIC", "CPU"):
            return word
    return None


def _class_of(matrix: Matrix, source: str = "") -> str:
    """'topology', 'p2p', 'numbers' or 'other', by its cells; a matrix of one GPU has no telling cell: then by header, legend, command or file name."""
    if not matrix.gpu_columns:
        return "other"
    cells = [c for name, row, *_ in matrix.rows if name.startswith("GPU") for c in row[: len(matrix.gpu_columns)]]
    kinds = sum(bool(re.fullmatch(KINDS, c)) for c in cells)
    peers = sum(bool(re.fullmatch(P2P, c)) for c in cells)
    numbers = sum(bool(NUMBER.fullmatch(c)) for c in cells)
    if numbers > max(kinds, peers):
        return "numbers"
    if kinds or peers:
        return "topology" if kinds >= peers else "p2p"
    if matrix.tail:
        return "topology"
    if "p2p" in matrix.command or "p2p" in source:
        return "p2p"
    return "topology" if not matrix.rows or any(c == "X" for c in cells) else "other"


def _square(matrix: Matrix) -> tuple[list[int], dict[tuple[int, int], str], list[str]]:
    """(GPU indexes, cells by (row, column), what is missing). A row whose X is not in its own column is not read."""
    header = [int(c[3:]) for c in matrix.gpu_columns]
    rows = [(int(row.label[3:]), row.cells) for row in matrix.rows if re.fullmatch(r"GPU\d{1,3}", row.label)]
    # The end of a row may be cut off; a row that has its CPU list but too few cells lost one of them somewhere.
    lost = {int(r.label[3:]) for r in matrix.rows if re.fullmatch(r"GPU\d{1,3}", r.label) and r.behind.strip() and len(r.cells) < len(matrix.columns)}
    incomplete = []
    width = len(header)
    # Network cards are NICn, or have the driver's name in small letters: 'GP1' is a GPU whose label was damaged.
    odd = [c for c in matrix.columns if c not in matrix.gpu_columns and re.match(r"(?!NIC\d|CPU$)[A-Z]", c)]
    if matrix.strangers:
        incomplete.append(f"the header has {', '.join(matrix.strangers[:3])}, which is no device: one that was damaged is not counted")
    if odd:
        incomplete.append(f"column {', '.join(odd)} is neither a GPU nor a network card by its name: one that was damaged is not counted")
    next_cell = {int(r.label[3:]): r.behind.split()[:1] for r in matrix.rows if re.fullmatch(r"GPU\d{1,3}", r.label)}
    if width == len(matrix.columns) and next_cell.get(width) == ["X"]:
        rows = [(label, cells + [c for c in next_cell[label] if CELL.fullmatch(c)]) for label, cells in rows]
    if header != sorted(set(header)):
        # A label was damaged; the order of the columns still counts them.
        incomplete.append(f"the header names its GPUs as {', '.join(map(str, header))}: counted by position instead")
        header = list(range(width))
    # A row without a column: the header lost its last label when the row has more link cells than the header has columns.
    for label, cells in rows:
        block = next((i for i, c in enumerate(cells) if not CELL.fullmatch(c)), len(cells))
        if label not in header:
            if label == max(header, default=-1) + 1 and cells[width : width + 1] == ["X"] and block >= width + 1:
                header.append(label)
                incomplete.append(f"the header has no column for GPU {label}, but there is a row for it")
            else:
                incomplete.append(f"row GPU{label} has no column of its own: not read")
    gaps = sorted(set(range(max(header, default=-1) + 1)) - set(header))
    if gaps:
        incomplete.append(f"the header has no column for GPU {', '.join(map(str, gaps))}")
    wider = [name for name, _, behind, *_ in matrix.rows if name.startswith("GPU") and any(re.fullmatch(rf"X|{KINDS}", w) for w in behind.split())]
    if wider:
        incomplete.append(f"row {wider[0]} has more link cells than the header has columns: the header lost one")
    cells_by_pair: dict[tuple[int, int], str] = {}
    read = set()
    for label, cells in rows:
        if label not in header:
            continue
        own = header.index(label)
        if label in read:
            incomplete.append(f"row GPU{label} stands there twice: the first one is read")
            continue
        marks = [i for i, c in enumerate(cells[: len(header)]) if c == "X" or c in ("—", "–", "-")]
        if marks != [own] and not (len(cells) <= own and not marks):
            incomplete.append(f"row GPU{label}: its X is not in its own column, the cells may have moved: not read")
            continue
        read.add(label)
        if label in lost:
            incomplete.append(f"row GPU{label} has {len(cells)} of {len(matrix.columns)} cells: those behind its X may have moved: not read")
            cells = cells[: own + 1]
        elif len(cells) < len(header):
            incomplete.append(f"row GPU{label} ends after {len(cells)} of {len(header)} cells")
        for column, cell in zip(header, cells, strict=False):
            cells_by_pair[label, column] = cell
    missing = [label for label in header if label not in read and f"row GPU{label}:" not in " ".join(incomplete)]
    if missing:
        incomplete.append(f"no row for GPU {', '.join(map(str, missing))} ({len(header)} GPUs in the header, {len(read)} rows read)")
    return header, cells_by_pair, incomplete


def _both_ways(cells: dict[tuple[int, int], str], a: int, b: int) -> tuple[str | None, str]:
    """(value, '') or (None, why) of a pair from both halves of the matrix."""
    there, back = cells.get((a, b)), cells.get((b, a))
    sound = [c for c in (there, back) if c and CELL.fullmatch(c) and c != "X"]
    if there and back and there != back:
        return None, f"the matrix says {there} one way and {back} the other"
    if sound:
        return sound[0], ""
    return None, f"cannot be read: {there or back}" if there or back else "its rows are missing"


def _link(a: int, b: int, kind: str | None, why: str, pcie_only: bool) -> Link:
    if kind is None or not re.fullmatch(KINDS, kind):
        return Link(a=a, b=b, unknown={"kind": why or f"{kind} is no link kind"})
    if re.fullmatch(r"NV0+", kind):
        return Link(a=a, b=b, unknown={"kind": f"{kind} is no link kind"})
    kind = "SYS" if kind == "SOC" else kind
    nvlinks = None if pcie_only else int(kind[2:]) if kind.startswith("NV") else 0
    unknown = {"nvlinks": "topo -mp does not show NVLink"} if pcie_only else {}
    return Link(a=a, b=b, kind=kind, kind_is_pcie_path=pcie_only, nvlinks=nvlinks, unknown=unknown)


def _gpu(matrix: Matrix, index: int) -> Gpu:
    row = next((r for r in matrix.rows if re.fullmatch(rf"GPU0*{index}", r.label)), None)
    if row is None:
        return Gpu(index=index)
    values, unknown = {}, {}
    for name, text in _tail_values(matrix, row).items():
        if says_nothing(text):
            unknown[name] = text.strip() or "empty"
        elif name == "cpu_affinity":
            values[name] = text
        elif re.fullmatch("[0-9]{1,5}", text):
            values[name] = int(text)
        else:
            unknown[name] = f"not one node: {text}"
    return Gpu(index=index, **values, unknown=unknown)


def _tail_values(matrix: Matrix, row: Row) -> dict[str, str]:
    """Affinity columns behind the cells. An empty cell must not let its right neighbour move in."""
    names, words = [name for name, _ in matrix.tail], row.behind.split()
    bare = re.fullmatch(r"\s*NUMA (\d+)\s*", row.behind)
    if bare:
        return {"numa_node": bare[1]}
    if not names:
        return {}
    if len(words) == len(names):
        return dict(zip(names, words, strict=True))
    fields = [f.strip() for f in row.behind.rstrip("\n").split("\t")][1:] if row.tabbed else []
    if len(fields) == len(names) + 1 and len(names) > 1:
        # nvidia-smi pads 'NUMA Affinity', the widest title, with a second tab.
        pad = len(names) - 1
        return dict(zip(names, fields[:pad] + fields[pad + 1 :], strict=True))
    if len(fields) == len(names):
        return dict(zip(names, fields, strict=True))
    if len(words) > len(names):
        return {}
    # Ties go to the right: nvidia-smi always prints the last column.
    nearest = [max(matrix.tail, key=lambda column: (-abs(column[1] - spot), column[1]))[0] for spot in row.spots]
    if len(set(nearest)) == len(words):
        return dict.fromkeys(names, "") | dict(zip(nearest, words, strict=True))
    # Blanks were squeezed: only a CPU list in front is known by its form.
    certain = {"cpu_affinity": words.pop(0)} if names[0] == "cpu_affinity" and re.match(r"\d+[-,]", words[0]) else {}
    rest = f"unknown: which column {' '.join(words)} stands in cannot be told" if words else ""
    return dict.fromkeys(names, rest) | certain


def _nics(matrix: Matrix, gpus: list[int], notes: list[str]) -> list[Nic]:
    names = [c for c in matrix.columns if not c.startswith("GPU") and c != "CPU"]
    start = len(matrix.gpu_columns)
    links: dict[str, dict[str, str]] = {name: {} for name in names}
    for name, cells, *_ in matrix.rows:
        if not re.fullmatch(r"GPU\d{1,3}", name) or int(name[3:]) not in gpus:
            continue
        behind = cells[start:]
        if len(behind) != len(names):
            notes.append(f"row {name}: {len(behind)} cells for {len(names)} network cards: which is which is unknown")
            continue
        links |= {nic: {**links[nic], name[3:]: cell} for nic, cell in zip(names, behind, strict=True) if re.fullmatch(KINDS, cell)}
    return [Nic(name=name, links=links[name]) for name in names]
