"""The plain table of `nvidia-smi` of any driver age, its one-line failures, `nvidia-smi -L`, and reports that quote nvidia-smi GPU by GPU.

Layouts: drivers 285 (memory in MB, 'Nb.' column) to 610 ('KMD Version' in the banner); a table whose line ends were lost is put back into lines.
"""

import re

from .model import Gpu, Reading
from .smi_boxes import take_mig, take_processes
from .smi_csv import read_csv
from .smi_lists import read_list, read_prose
from .smi_text import (
    BUS_ID,
    MAX_INDEX,
    compute_mode,
    counted,
    driver_model,
    is_among,
    is_border,
    lines,
    lost_gpu,
    lost_words,
    memory_with_unit,
    pstate,
    same_uuid_note,
    small,
    watts,
)
from .values import Picked, bus_id, says_nothing, switch

__all__ = ["read_csv", "read_list", "read_prose", "read_table"]

_BANNER = re.compile(r"\bNVIDIA-SMI (\d[\w.]*)\s+(?:Driver|KMD) Version: *(\S+)(?:\s+CUDA (?:UMD )?Version: *(\S+))?")
_OTHER_BANNER = re.compile(r"\|\s*(?:HL|PPU|MX|NPU|IX|CN|MTHREADS|HY)-SMI\b|^\s*\|\s*(?:AIP|PPU|NPU)\s+Name\b", re.I | re.M)
_FIRST = re.compile(r"\s*(\d+)(?:\\?\.)?\s+(?=\S*[A-Za-z!])(.*?)\s*$")
_FLAG = re.compile(r"^(.*?)(?:\s+|(?<=\.\.\.)\s*)(On|Off|N/A|ERR!|Enabled|Disabled|WDDM|TCC|MCDM)$")
_BUS = re.compile(rf"\s*({BUS_ID}|N/A|ERR!|Unknown Error|[x*]{{2,8}}:\S+)", re.I)
_MEMORY = re.compile(r"\d+\s*MiB\s*/\s*\d+\s*MiB")
_WORD = r"(?:Unknown Error|Not Supported|GPU is lost|\[[^\]]*\]|\d+\s?C\b|\S+)"
_DEAD = (
    (re.compile(r"^\W*No devices were found\.?\W*$", re.I), 0),
    (re.compile(r"NVIDIA-SMI has failed because it could.{1,8}t communicate with the NVIDIA driver", re.I), None),
    (re.compile(r"Failed to initialize NVML: [^\n]*", re.I), None),
    (re.compile(r"NVIDIA-SMI could.{1,8}t find [^\n]*", re.I), None),
    (re.compile(r"nvidia-smi: (?:command )?not found", re.I), None),
)


def read_table(text: str) -> Reading | None:
    """Read the plain `nvidia-smi` table, or the line it prints where it cannot; None where the text holds neither. Bytes, W, C.

    A second table (another host, a later time) is not read, which a note says.
    """
    rows = [row[:1000] for row in _unfolded(lines(text, None))]
    banner: re.Match[str] | None = None
    gpus: list[_Row] = []
    section, foreign, second, memory_rows = "gpus", False, False, 0
    boxes: dict[str, list[str]] = {"mig": [], "processes": []}
    for row in rows:
        head = _BANNER.search(row)
        memory_rows += section == "gpus" and not foreign and bool(_MEMORY.search(row))
        if _OTHER_BANNER.search(row):
            foreign = True
        elif head:
            if gpus:
                second = True
                break
            banner, foreign, section = banner or head, False, "gpus"
        elif re.search(r"\|\s*MIG devices:", row):
            section = "mig"
        elif re.search(r"\|\s*(?:Compute p|P)rocesses:", row):
            section = "processes"
        elif foreign:
            continue
        elif len(gpus) <= MAX_INDEX and (first := _first_row(row)):
            if section == "processes" and any(boxes["processes"]) or any(gpu.index == first.index and gpu.bus == first.bus for gpu in gpus):
                second = True
                break
            section = "gpus"
            gpus.append(first)
        elif section == "gpus" and gpus:
            gpus[-1].add(row)
        elif section in boxes:
            boxes[section].append(row)
    failed = next(((found[0].strip(), count) for row in rows for words, count in _DEAD if (found := words.search(row))), None)
    lost = [gone for row in rows if (gone := lost_gpu(row))]
    if not (gpus or banner or failed or lost):
        return None
    if not (gpus or banner or failed) and any(gpu.lost for other in (read_csv(text), read_list(text)) if other for gpu in other.gpus):
        return None  # the line belongs to that other output
    reading = _reading(gpus, banner, boxes, failed, lost, second)
    if memory_rows > len(gpus):
        # Each GPU has one line with its memory; more of them than GPUs means that the line with an index was damaged.
        damaged = f"the table has {memory_rows} lines with memory, but {len(gpus)} GPUs can be read"
        return reading.model_copy(update={"incomplete": [*reading.incomplete, damaged]})
    return reading


def _reading(
    rows: list["_Row"], banner: re.Match[str] | None, boxes: dict[str, list[str]], failed: tuple[str, int | None] | None, lost: list[Gpu], second: bool
) -> Reading:
    incomplete, notes = [], []
    picked = [row.picked(last=row is rows[-1], incomplete=incomplete, notes=notes) for row in rows]
    take_mig(picked, boxes["mig"], incomplete)
    beyond = take_processes(picked, boxes["processes"], incomplete)
    gpus = [_named(one) for one in picked]
    for gone in {(gone.index, gone.bus_id): gone for gone in lost}.values():
        if not is_among(gone, gpus):
            gpus.append(gone)
    gpus.sort(key=lambda gpu: gpu.index if gpu.index is not None else 10**6)
    count, faults = counted(gpus, None, beyond)
    if rows and not boxes["processes"]:
        notes.append("no processes box follows the table: GPUs cut off at its end would not show")
    if second:
        notes.append("a second nvidia-smi table follows in the same text and was not read")
    if failed and not rows:
        notes.append(failed[0])
        count = count if lost else failed[1]
        count = None if lost and failed[1] == 0 else count
    elif failed:
        notes.append(f"the text also says: {failed[0]}")
    if not rows and lost:
        count = None
        faults = ["nvidia-smi stopped at a GPU that does not answer: the others are not listed"]
    elif banner and not rows and not failed:
        faults.append("the table breaks off before the first GPU")
    driver, cuda = (None if banner is None or says_nothing(banner[n] or "") else banner[n].strip("|") for n in (2, 3))
    return Reading(
        command="nvidia-smi (table)", gpus=gpus, gpu_count=count, driver=driver, cuda=cuda, incomplete=incomplete + faults, notes=notes + same_uuid_note(gpus)
    )


def _named(picked: Picked) -> Gpu:
    """The GPU; a name that the table shortened is kept as printed, and named as shortened."""
    gpu = picked.gpu()
    if gpu.name and gpu.name.endswith("..."):
        return gpu.model_copy(update={"unknown": {**gpu.unknown, "name": "the table cuts long names: this is its beginning"}})
    return gpu


def _unfolded(rows: list[str]) -> list[str]:
    """Rows of a table whose line ends were lost: written as backslash n, or turned into blanks."""
    out = []
    for row in rows:
        if "\\n" in row and re.search(r"\\n\s*[+|]", row):
            out += row.replace('\\"', '"').split("\\n")
        elif len(row) > 200 and row.count("|") > 12 and re.search(r"[-=+]{30,}", row):
            for piece in re.split(r"([+|][-=+|]{20,}[+|.]*)", row):
                cells = piece.strip().strip("|").split("|") if not re.fullmatch(r"[^\w]*", piece) else []
                # Three cells to a row; the bars at the end of one row and the start of the next enclose an empty fourth.
                out += [piece] if len(cells) < 6 else ["|" + "|".join(cells[at : at + 3]) + "|" * (at + 3 <= len(cells)) for at in range(0, len(cells), 4)]
        elif out and out[-1].lstrip().startswith("|") and out[-1].count("|") in (1, 3) and re.match(r"[^|+]*\|$", row):
            out[-1] += row  # a narrow terminal broke the line within its last cell
        else:
            out.append(row)
    return out


def _cells(row: str) -> list[str]:
    """Cells between the first bar and the last; what stands behind the last bar may be cut in the middle and is left out."""
    inner = row[row.find("|") + 1 : row.rfind("|")] if row.count("|") > 1 else ""
    return [" ".join(cell.split()) for cell in inner.split("|")] if inner else []


class _Row:
    """The lines of one GPU in the table."""

    def __init__(self, index: int, first: str, bus: str | None, third: str | None, whole: bool) -> None:
        self.index, self.first, self.bus, self.third, self.whole = index, first, bus, third, whole
        self.lines: list[list[str]] = []
        self.ended = False
        self.open = False

    def add(self, row: str) -> None:
        """A line below the first one."""
        if self.ended or not row.strip():
            return
        if is_border(row):
            self.ended = True
        elif "|" in row and len(self.lines) < 2:
            cells = _cells(row)
            self.open = self.open or len(cells) < 3
            self.lines.append(cells[-3:])

    def picked(self, last: bool, incomplete: list[str], notes: list[str]) -> Picked:
        """What the lines say."""
        found = Picked(index=self.index)
        flag = _FLAG.match(self.first)
        name, mode = (flag[1], flag[2]) if flag else (self.first, None)
        if self.whole or flag:
            found.take("name", name)
            if mode in ("WDDM", "TCC", "MCDM"):
                found.take("driver_model", mode, driver_model)
            else:
                found.take("persistence", mode, switch)
        else:
            found.unknown["name"] = "the row breaks off"
        found.take("bus_id", self.bus, bus_id)
        _take_ecc(found, self.third)
        values = (self.lines or [[]])[0]
        _take_values(found, values)
        mig = self.lines[1][2].strip() if len(self.lines) > 1 and len(self.lines[1]) == 3 else None
        if mig is not None and mig.endswith("*"):
            notes.append(f"GPU {self.index}: MIG mode will change from {mig[:-1]} at the next reset")
        found.take("mig", mig.rstrip("*") if mig else None, switch)
        if not self.whole or self.open or not self.lines:
            incomplete.append(f"the row of GPU {self.index} is cut" if not self.whole or self.open else f"GPU {self.index} has no line with memory and power")
            for field in ("memory_total_bytes", "memory_used_bytes"):
                if found.values.get(field) is None:
                    found.unknown.setdefault(field, "the row is cut")
        elif last and not self.ended:
            incomplete.append("the table has no bottom border: it may go on")
        words = " ".join([self.first, *(cell for line in self.lines for cell in line)])
        dead = [field for field in ("name", "temperature_c", "pstate", "utilization_percent") if found.unknown.get(field, "").startswith("ERR")]
        if gone := lost_words(words) or ("ERR!" if len(dead) > 2 else None):
            found.values["lost"] = gone
        return found


def _first_row(row: str) -> _Row | None:
    """The first line of a GPU: index and name, bus id, ECC errors; None for other lines."""
    if "|" not in row:
        return None
    cells = _cells(row)
    if len(cells) < 2:
        # Cut within its first cells: '|   2  GRID K520'.
        if re.search(r"MiB|No running|/\s*N/A", row):
            return None
        begun = re.match(r"[^\w|]*\|\s{0,4}(\d{1,4})\s+([A-Z][A-Za-z!]\S*\s.*|[A-Z]\S+)$", row.split("|", 2)[0] + "|" + row.split("|", 2)[1])
        bare = begun and not re.match(r"\d|N/A|[CGM+]{1,3}\s", begun[2])
        return _Row(int(begun[1]), begun[2].strip(), None, None, False) if bare and int(begun[1]) < 1024 else None
    cells = cells[-3:] if len(cells) > 2 else cells
    first, bus = _FIRST.match(cells[0]), _BUS.match(cells[1])
    if not first or not bus or len(first[1]) > 4 or int(first[1]) > 1023 or "MiB" in cells[1]:
        return None
    return _Row(int(first[1]), first[2], bus[1], cells[2].strip() if len(cells) > 2 else None, len(cells) > 2)


def _take_ecc(found: Picked, cell: str | None) -> None:
    """ECC column: a count of uncorrected errors means that ECC is on; drivers before 3xx print single and double bit errors, the latter count."""
    if cell is None:
        return
    counts = re.fullmatch(r"(?:\d{1,18}\s+)?(\d{1,18})", cell)
    if counts:
        found.values.update(ecc=True, ecc_uncorrected=int(counts[1]))
        return
    words = cell.split()[0] if len(set(cell.split())) == 1 else cell
    found.take("ecc", words, switch)
    found.unknown["ecc_uncorrected"] = (words or "empty") if says_nothing(words) else f"the table says {words}"


def _take_values(found: Picked, cells: list[str]) -> None:
    """Second line: fan, temperature, state, power | memory | utilization, compute mode."""
    left = re.split(r"(?<!N)/", cells[0]) if cells else []
    if len(left) == 2:
        words = re.findall(_WORD, left[0])
        if len(words) == 4:
            found.take("temperature_c", words[1], small)
            found.take("pstate", words[2], pstate)
            found.take("power_draw_w", _with_unit(words[3], "W"), watts)
        else:
            for field, pattern, convert in (("temperature_c", r"\d+\s?C\b", small), ("pstate", r"\bP\d+\b", pstate), ("power_draw_w", r"\d+\s?W\b", watts)):
                hit = re.search(pattern, left[0])
                found.take(field, hit[0] if hit else f"{left[0].strip()[:40]} (layout)", convert)
        found.take("power_limit_w", _with_unit(left[1].strip(), "W"), watts)
    if len(cells) > 1:
        sizes = re.split(r"(?<!N)/", re.sub(r"^\s*(?:\d+%|N/A(?=\s+\d))", "", cells[1]))
        used, total = (sizes[0], sizes[1]) if len(sizes) == 2 else (cells[1], cells[1])
        found.take("memory_used_bytes", used, memory_with_unit)
        found.take("memory_total_bytes", total, memory_with_unit)
    if len(cells) > 2:
        right = re.match(rf"\s*({_WORD})\s*(.*?)\s*$", cells[2])
        found.take("utilization_percent", _with_unit(right[1], "%") if right else "", small)
        found.take("compute_mode", right[2] if right else None, compute_mode)


def _with_unit(words: str, unit: str) -> str:
    """The words; a number without its unit is marked, so that it is not taken: it may be the start of a longer one."""
    return f"{words} (no unit)" if re.fullmatch(r"\d+(?:\.\d+)?", words) and unit not in words else words
