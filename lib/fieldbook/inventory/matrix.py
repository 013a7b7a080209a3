"""Square tables between devices, found in text as terminals, forums and chat windows leave it: header, rows, and what stands behind the cells."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

# nvidia-smi's words for the way between two devices. SOC is what SYS was called before 2018.
KINDS = r"NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC"
P2P = r"OK|CNS|GNS|TNS|NS|DR|U"
# Titles of the columns behind the devices; MetaX writes Node Affinity, people shorten to NUMA.
_TAIL = ((r"GPU NUMA ID", "gpu_numa_id"), (r"CPU Affinity", "cpu_affinity"), (r"(?:NUMA|Node) Affinity|NUMA(?: node)?(?=\s|$)", "numa_node"))
_LABEL = re.compile(r"(?:GPU|NIC)[ -]?\d+|mlx\d_\w*?\d+|[A-Za-z]\w*_?\d+")
_GLUED_LABELS = re.compile(r"(?:(?:GPU|NIC)\d{1,2}){2,}")
CELL = re.compile(rf"X|{KINDS}|{P2P}")
_GLUED_CELLS = re.compile(rf"(?:X|{KINDS}){{2,}}")
_KIND = re.compile(rf"X|{KINDS}")
# A kind that ends in no digit, with the CPU list that ran into it.
_GLUED_LIST = re.compile(r"(X|PIX|PXB|PHB|NODE|SYS|SOC)(\d+-\d+(?:,\d+(?:-\d+)?)*)")
_FRAMES = str.maketrans({**dict.fromkeys("│┃║", "|"), **dict.fromkeys("─━═", "-"), **dict.fromkeys("┌┐└┘├┤┬┴┼╔╗╚╝╠╣╦╩╬", "+")})
_LONGEST_LINE = 4000
_AFFINITIES = re.compile(r"\s*\d+-\d+(?:,\d+(?:-\d+)?)*(?:\s+(?:\d+|N/A)){0,2}\s*")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Row(NamedTuple):
    """One row. spots: where the words behind the cells stand, measured in the header's line; empty when the cells do not stand under their columns."""

    label: str
    cells: list[str]
    behind: str
    spots: list[int]
    tabbed: bool


@dataclass
class Matrix:
    """One matrix as it was found. at: where the columns stand in the header line, for those that do."""

    line: int
    columns: list[str]
    tail: list[tuple[str, int]]  # (field, position in the header line)
    at: list[int]
    rows: list[Row] = field(default_factory=list)
    command: str = ""
    strangers: list[str] = field(default_factory=list)  # words of the header that are no device

    @property
    def gpu_columns(self) -> list[str]:
        """Labels of the GPU columns."""
        return [c for c in self.columns if re.fullmatch(r"GPU\d{1,3}", c)]


def find_matrices(text: str) -> list[Matrix]:
    """Every matrix whose header and first row name the same kind of device."""
    # A boxed table is the same matrix between bars.
    # A title that was wrapped in the middle belongs to the line before it.
    whole = re.sub(r"\b(CPU|NUMA|GPU NUMA)[ \t]*\n[ \t]*(?=Affinity\b|ID\b)", r"\1 ", text)
    lines = [_plain(line) for line in whole.split("\n")]
    matrices: list[Matrix] = []
    at = 0
    while at < len(lines):
        matrix = _header(lines, at)
        if matrix is None:
            at += 1
            continue
        at = _rows(lines, at + 1, matrix)
        matrix.command = _command_above(lines, matrix.line - 1, matrices[-1].line if matrices else 0)
        matrices.append(matrix)
    return [_gpus_first(m) for m in matrices if m.columns and (m.rows or len(m.gpu_columns) > 1)]


def _gpus_first(matrix: Matrix) -> Matrix:
    """The columns as nvidia-smi orders them; a hand-made table may have a network card among its GPUs."""
    order = sorted(range(len(matrix.columns)), key=lambda i: matrix.columns[i] not in matrix.gpu_columns)
    if order != sorted(order):
        matrix.rows = [row._replace(cells=[row.cells[i] if i < len(row.cells) else "" for i in order]) for row in matrix.rows]
        matrix.columns = [matrix.columns[i] for i in order]
    return matrix


def _plain(line: str) -> str:
    """A line without the bars of a boxed table, the marks of Markdown and what elides columns."""
    line = line.translate(_FRAMES)
    if "|" in line:
        # Bars divide as tabs do: an empty cell between two of them is a cell.
        line = re.sub(r"\bDevice (\d+)", r"GPU\1", line.rstrip().removesuffix("|").replace("|", "\t"))
    return re.sub(r"(?<=\s)(?:\.{3}|…)(?=\s)", "   ", line.replace("**", "").replace("`", " "))


def _words(line: str) -> list[tuple[str, int]]:
    """Words with their positions, tabs expanded; glued labels are taken apart."""
    words = []
    for found in re.finditer(r"\S+", line.expandtabs()):
        parts = re.findall(r"(?:GPU|NIC)\d{1,2}", found[0]) if _GLUED_LABELS.fullmatch(found[0]) else [found[0]]
        words += [(part, found.start()) for part in parts]
    return words


def _header(lines: list[str], at: int) -> Matrix | None:
    line = lines[at]
    if len(line) < 4 or len(line) > _LONGEST_LINE or not re.search(r"\b[A-Z][A-Za-z]*[ -]?\d", line):
        return None
    bare = re.sub(r"^[\s>#*`$]*", "", line)
    tail, flat = _titles(line)
    words = _words(re.sub(r"\bGPU[ -](\d)", r"GPU\1", flat))
    labels = [w for w, _ in words]
    first = next((i for i, w in enumerate(labels) if _LABEL.fullmatch(w) and re.fullmatch(r"[A-Za-z_]+0", w)), None)
    if first is None:
        first = next((i for i, w in enumerate(labels) if re.fullmatch(r"GPU\d+", w)), None)
    if first is None or any(CELL.fullmatch(w) or NUMBER.fullmatch(w) for w in labels[first:]):
        return None
    # A corner word, a log prefix or a quote mark may stand before the first column; prose has words among the columns.
    columns = labels[first:]
    strangers = [w for w in columns if not _LABEL.fullmatch(w)]
    prose = first > 1 or [w for w in strangers if w != "CPU"]
    if prose and (first > 1 or not tail) and not _row_follows(lines, at, columns[0], within=1):
        return None
    if bare.startswith(("GPU 0:", "GPU0:")) or ":" in columns[0]:
        return None
    devices = [(w, spot) for w, spot in words[first:] if _LABEL.fullmatch(w) or (w == "CPU" and _row_named(lines, at, "CPU"))]
    kept = [w for w, _ in devices]
    if not _row_follows(lines, at, kept[0]) and len(kept) < 2 and not tail:
        return None
    return Matrix(
        line=at + 1,
        columns=kept,
        tail=tail,
        at=[spot for _, spot in devices],
        strangers=[w for w in strangers if re.match("[A-Z0-9]", w) and w != "CPU"],
    )


def _titles(line: str) -> tuple[list[tuple[str, int]], str]:
    """The titles behind the devices with their positions, and the line with tabs expanded and blanks in their place."""
    flat, tail = line.expandtabs(), []
    for title, name in _TAIL:
        where = re.search(title.replace(" Aff", r"\s+Aff").replace("NUMA ID", r"NUMA\s+ID"), flat, re.I)
        if where:
            tail.append((name, where.start()))
            flat = flat[: where.start()] + " " * len(where[0]) + flat[where.end() :]
    return sorted(tail, key=lambda column: column[1]), flat


def _row_label(line: str) -> tuple[str, str, int] | None:
    """(label, rest of the line, position of the rest) when a line is a row: a label, then at least one cell or number."""
    if len(line) > _LONGEST_LINE:
        return None
    flat = re.sub(r"\bGPU[ -](\d+)\b", r"GPU\1 ", line)
    last_x = max((x.start() for x in re.finditer(r"(?<!\S)X(?!\S)", flat)), default=-1)
    for found in re.finditer(r"(?<![\w.])([A-Za-z]\w*\d+|CPU):?(?=\s)", flat):
        word = re.compile(r"\s*(\S*)").match(flat, found.end())[1]
        # Another vendor's words are cells too when the row has its X: MX of MetaX, HCCS of Ascend.
        foreign = bool(re.fullmatch(r"[A-Z]{2,5}\d{0,2}", word)) and last_x >= found.end()
        shaped = any(shape.fullmatch(word) for shape in (CELL, _GLUED_CELLS, _GLUED_LIST, NUMBER))
        if shaped or foreign or word in ("—", "–", "-", "N/A"):
            return found[1], flat[found.end() :], found.end()
    return None


def _row_follows(lines: list[str], at: int, first: str, within: int = 2) -> bool:
    following = [line for line in lines[at + 1 : at + 6] if line.strip(" -=+|:\t")]
    return any(label and re.match(r"[A-Za-z]+", label[0])[0] == re.match(r"[A-Za-z]+", first)[0] for label in map(_row_label, following[:within]))


def _row_named(lines: list[str], at: int, name: str) -> bool:
    return any((_row_label(line) or ("",))[0] == name for line in lines[at + 1 : at + 40])


def _rows(lines: list[str], at: int, matrix: Matrix) -> int:
    """Collect the rows of a matrix; returns the line behind it. A line of cells without label continues the row before it (a wrapped terminal)."""
    known = {re.match(r"[A-Za-z]+", c)[0] for c in matrix.columns}
    blank = 0
    while at < len(lines):
        line = lines[at]
        label = _row_label(line)
        if label and (re.match(r"[A-Za-z]+", label[0])[0] in known or label[0] == "CPU"):
            name, rest, where = label
            cells, behind = _cells(rest, len(matrix.columns))
            flat = re.sub(r"\bGPU[ -](\d+)\b", r"GPU\1 ", line)
            matrix.rows.append(Row(name, cells, behind, _spots(matrix, flat, where, len(cells)), "\t" in rest))
            blank = 0
        elif not line.strip(" -=+|:\t>"):
            blank += 1
            if blank > 2 or (matrix.rows and blank > 1):
                return at
        elif matrix.rows and _continues(matrix, line):
            cells = matrix.rows[-1].cells
            more, behind = _cells(line, len(matrix.columns) - len(cells))
            matrix.rows[-1] = matrix.rows[-1]._replace(cells=cells + more, behind=behind, spots=[])
        elif matrix.rows and matrix.tail and not matrix.rows[-1].behind.strip() and _AFFINITIES.fullmatch(line):
            matrix.rows[-1] = matrix.rows[-1]._replace(behind=line, spots=[])
        elif not matrix.rows and _only_columns(line):
            more = _words(line)
            if more[0][0] in matrix.columns:
                # The header stands there again: what was taken for one was a mention of it.
                matrix.columns = []
                return at
            matrix.columns += [w for w, _ in more if _LABEL.fullmatch(w)]
            matrix.tail += [column for column in _titles(line)[0] if column[0] not in dict(matrix.tail)]
            matrix.at = []  # a header on two lines: nothing stands under its column
        elif re.fullmatch(r"[\s>|]*(?:GPU|NIC|mlx\d_)\S*\s*", line):
            blank = 0  # a row that was cut behind its label
        else:
            return at
        at += 1
    return at


def _only_columns(line: str) -> bool:
    tail, flat = _titles(line)
    words = flat.split()
    return bool(words or tail) and all(re.fullmatch(r"(?:GPU|NIC)\d+|mlx\d_\w+", w) for w in words)


def _continues(matrix: Matrix, line: str) -> bool:
    words = line.split()
    short = len(matrix.rows[-1].cells) < len(matrix.columns)
    return short and bool(words) and bool(_KIND.fullmatch(words[0]) or _GLUED_CELLS.fullmatch(words[0]))


def _spots(matrix: Matrix, line: str, where: int, cells: int) -> list[int]:
    """Row.spots of a row whose cells begin at `where`."""
    # nvidia-smi indents its X by one; a header that lost its leading tab stands 8 to the left of all rows alike.
    words = [len(line[: found.start()].expandtabs()) - (found[0] == "X") for found in re.compile(r"\S+").finditer(line, where)]
    offsets = sorted(spot - column for spot, column in zip(words, matrix.at, strict=False))
    if cells != len(matrix.at) or cells > len(words) or offsets[-1] - offsets[0] > 2:
        return []
    edges = [*matrix.at, *(spot for _, spot in matrix.tail[:1])]
    if all(b - a <= len(name) + 1 for name, a, b in zip(matrix.columns, edges, edges[1:], strict=False)):
        return []  # runs of blanks were squeezed to one: near a title means nothing
    return [spot - offsets[0] for spot in words[cells:]]


def _cells(rest: str, wanted: int) -> tuple[list[str], str]:
    """The first `wanted` cells and the text behind them. Cells that ran into each other are taken apart."""
    cells: list[str] = []
    end = 0
    for found in re.finditer(r"\S+", rest):
        if len(cells) >= wanted:
            break
        glued = _GLUED_LIST.fullmatch(found[0])
        if glued:
            return [*cells, glued[1]], rest[found.start() + len(glued[1]) :]
        parts = _KIND.findall(found[0]) if _GLUED_CELLS.fullmatch(found[0]) else [found[0]]
        # Behind the last cell come CPU lists; a row that is short of cells must not swallow them.
        if re.fullmatch(r"\d+-\d+(?:,\d+(?:-\d+)?)*|\d+(?:,\d+)+", parts[0]):
            break
        cells += parts
        end = found.end()
    return cells, rest[end:]


def _command_above(lines: list[str], header: int, floor: int) -> str:
    """The last command line that speaks of topo above a matrix, or a legend below it that tells the kind."""
    for line in reversed(lines[max(floor, header - 12) : header]):
        found = re.search(r"topo\s+(-mp|-m|-p2p\s*\w*|--matrix)|(p2p)\s*(rw|[rwnap])\b", line)
        if found:
            return "topo " + (found[1] or f"-p2p {found[3]}").strip()
    below = "\n".join(lines[header : header + 40])
    return "-p2p" if re.search(r"OK\s+= Status Ok", below) and not re.search(r"PIX\s+=", below.split("Status Ok")[0]) else ""
