"""`nvidia-smi --query-gpu=FIELDS --format=csv`, with or without header and units, also as a log of repeated samples."""

import csv
import re

from .model import Gpu, Reading
from .smi_text import (
    COMMAND,
    compute_capability,
    compute_mode,
    counted,
    driver_model,
    gpu_index,
    is_among,
    lines,
    lost_gpu,
    memory,
    pstate,
    reason_name,
    same_uuid_note,
    small,
    take_lost,
    take_reasons,
    take_uncorrected,
    usable,
    uuid,
    watts,
)
from .values import Picked, bus_id, says_nothing, switch

# Field of Gpu, how to read it, names of --query-gpu (see `nvidia-smi --help-query-gpu`), the most telling first.
_FIELDS = (
    ("index", gpu_index, ["index"]),
    ("name", str.strip, ["name", "gpu_name"]),
    ("uuid", uuid, ["uuid", "gpu_uuid"]),
    ("bus_id", bus_id, ["pci.bus_id", "gpu_bus_id"]),
    ("compute_capability", compute_capability, ["compute_cap"]),
    ("memory_total_bytes", memory, ["memory.total"]),
    ("memory_used_bytes", memory, ["memory.used"]),
    ("pcie_generation", small, ["pcie.link.gen.gpucurrent", "pcie.link.gen.current"]),
    ("pcie_generation_max", small, ["pcie.link.gen.max"]),
    ("pcie_generation_device_max", small, ["pcie.link.gen.gpumax"]),
    ("pcie_generation_host_max", small, ["pcie.link.gen.hostmax"]),
    ("pcie_width_lanes", small, ["pcie.link.width.current"]),
    ("pcie_width_max_lanes", small, ["pcie.link.width.max"]),
    ("pstate", pstate, ["pstate"]),
    ("utilization_percent", small, ["utilization.gpu"]),
    ("temperature_c", small, ["temperature.gpu"]),
    ("power_draw_w", watts, ["power.draw", "power.draw.average", "power.draw.instant"]),
    ("power_limit_w", watts, ["enforced.power.limit", "power.limit"]),
    ("power_limit_default_w", watts, ["power.default_limit"]),
    ("clock_sm_mhz", small, ["clocks.current.sm", "clocks.sm"]),
    ("clock_sm_max_mhz", small, ["clocks.max.sm"]),
    ("clock_memory_mhz", small, ["clocks.current.memory", "clocks.mem"]),
    ("clock_memory_max_mhz", small, ["clocks.max.memory", "clocks.max.mem"]),
    ("ecc", switch, ["ecc.mode.current"]),
    ("persistence", switch, ["persistence_mode"]),
    ("compute_mode", compute_mode, ["compute_mode"]),
    ("driver_model", driver_model, ["driver_model.current"]),
    ("mig", switch, ["mig.mode.current"]),
)
_KNOWN = {name for _, _, names in _FIELDS for name in names} | {
    "count",
    "driver_version",
    "timestamp",
    "memory.reserved",
    "memory.free",
    "serial",
    "gpu_serial",
}
# Columns whose cells show at a glance whether a line is a row.
_IDENTITY = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id")  # columns that tell GPUs apart
_TYPED = {name: convert for _, convert, names in _FIELDS for name in names if convert is not str.strip}
_REASON = re.compile(r"clocks_(?:event|throttle)_reasons\.(?!supported$|active$)(\w+)$")
# Bits of clocks_event_reasons.active: NVML's nvmlClocksEventReason constants.
_REASON_BITS = ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown")
_REASON_BITS += ("hw_power_brake_slowdown", "display_clocks_setting")
_CELL = re.compile(r"([a-z][\w]*(?:\.\w+)*)\s*(?:\[([^\]]{1,12})\])?$")
_QUERY = re.compile(r"--query-gpu[=\s]\s*(?:\"([^\"]*)\"|'([^']*)'|([\w.]+(?:,\s*[\w.]+)*))")
_NUMBERS = {word: n for n, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])}
_STATED = re.compile(r"\((\d{1,3}|" + "|".join(_NUMBERS) + r") (?:identical |equal )?(?:rows?|lines?|gpus?|cards?)\)\s*$", re.I)
_UNIT = re.compile(r"^-?\d+(?:\.\d+)?\s*(?:MiB|W|MHz|%)$")


def read_csv(text: str) -> Reading | None:
    """Read `nvidia-smi --query-gpu=... --format=csv`; None where the text has neither its header nor rows under a command that names the fields.

    Of samples that repeat over time the first of each GPU counts. Bytes, W, MHz, C.
    """
    rows = lines(text, None)
    start, fields, units = _header(rows)
    if start is None:
        start, fields = _commanded(rows)
        units = [None] * len(fields)
    if start is None:
        return None
    found, stated, incomplete, lost, notes = _rows(rows[start:], fields)
    if not found and not lost and start and not any(units) and "." not in "".join(fields):
        return None
    with_units = any(_UNIT.match(cell) for cells in found for cell in cells)
    gpus = [_gpu(dict(zip(fields, cells, strict=False)), dict(zip(fields, units, strict=True)), with_units) for cells in found]
    counts = set(_column("count", fields, found))
    if stated is None and len(counts) == 1 and re.fullmatch(r"\d{1,4}", told := counts.pop()):
        stated = int(told)
    gpus, repeated = _first_samples(gpus, _column("timestamp", fields, found))
    notes += repeated
    gpus += [gone for gone in lost if not is_among(gone, gpus)]
    gpus.sort(key=lambda gpu: -1 if gpu.index is None else gpu.index)
    numbered = any(name in fields for name in _IDENTITY)
    count, faults = counted(gpus, stated)
    if count is None and numbered:
        count = len(gpus)
    elif count is None:
        notes.append("no column tells the GPUs apart: whether the rows are all GPUs of the box, once each, is not told")
    if not gpus:
        faults.append("no row follows the field names")
    driver = next((words for words in _column("driver_version", fields, found) if not says_nothing(words)), None)
    return Reading(
        command="nvidia-smi --query-gpu", gpus=gpus, gpu_count=count, driver=driver, incomplete=incomplete + faults, notes=notes + same_uuid_note(gpus)
    )


def _column(name: str, fields: list[str], rows: list[list[str]]) -> list[str]:
    """Cells of one column; none where there is no such column."""
    return [row[fields.index(name)] for row in rows if name in fields and len(row) > fields.index(name)]


def _fields(line: str) -> tuple[list[str], list[str | None]] | None:
    """(names, units) where the line is a header, else None."""
    line = re.sub(r"^[#\s]+", "", line)
    cells = [_CELL.match(cell.strip().strip('"')) for cell in line.split(",")]
    if not all(cells):
        return None
    names = [cell[1] for cell in cells if cell]
    strong = [name for name in names if name in _KNOWN and ("." in name or "_" in name)] + [name for name in names if _REASON.match(name)]
    weak = [name for name in names if name in _KNOWN]
    if not (strong and (len(names) > 1 or cells[0][2] or "." in names[0]) or len(weak) > 1 and len(weak) == len(names)):
        return None
    return names, [cell[2] for cell in cells if cell]


def _header(rows: list[str]) -> tuple[int | None, list[str], list[str | None]]:
    for number, row in enumerate(rows):
        if "," in row or "." in row or "_" in row:
            header = _fields(row)
            if header:
                return number + 1, *header
    return None, [], []


def _commanded(rows: list[str]) -> tuple[int | None, list[str]]:
    """(line after the command, its fields) of the first --query-gpu command that rows follow."""
    for number, row in enumerate(rows):
        query = _QUERY.search(row) if "query-gpu" in row else None
        if not query:
            continue
        fields = [name.strip() for name in (query[1] or query[2] or query[3]).split(",") if name.strip()]
        after = number + 1
        while after < len(rows) and rows[after - 1].endswith("\\"):
            after += 1
        if after < len(rows) and rows[after].strip() == ",".join(fields):
            after += 1
        if fields and any(name in _KNOWN for name in fields) and _rows(rows[after:], fields)[0]:
            return after, fields
    return None, []


def _rows(rows: list[str], fields: list[str]) -> tuple[list[list[str]], int | None, list[str], list[Gpu], list[str]]:
    """(cells of each row, number of rows that a remark states, what is missing, GPUs that did not answer, notes)."""
    found: list[list[str]] = []
    lost, incomplete, notes = [], [], []
    stated = None
    prose = 0
    for row in rows:
        if gone := lost_gpu(row):
            lost.append(gone)
            continue
        bare = re.sub(r"^[#\s]+", "", row)
        if remark := _STATED.search(bare):
            stated = int(_NUMBERS.get(remark[1].lower(), remark[1]))
            bare = bare[: remark.start()]
        if not bare or bare.startswith("```") or re.match(r"-{3,}$", bare) or row.startswith("#") and "," not in bare:
            continue
        if found and _fields(bare):
            notes.append("a second header follows: the rows below it belong to another output and were not read")
            break
        cells, whole = _cells(bare, fields)
        if cells is None:
            # A few lines of prose may stand between the command and its rows.
            prose += 1
            if found and row is rows[-1] and "," not in bare and fields[0] in _TYPED and _fits(fields[0], bare):
                incomplete.append(f"the row '{bare[:40]}' breaks off")
            if found or COMMAND.search(row) or prose > 8:
                break
            continue
        found.append(cells)
        if len(found) > 99999:
            notes.append("only the first 100000 rows were read")
            break
        if not whole:
            incomplete.append(f"the row '{bare.strip()[:40]}' breaks off")
    if found and any("--query-gpu" in row for row in rows):
        notes.append("another --query-gpu command follows in the same text and was not read")
    return found, stated, incomplete, lost, notes


def _cells(row: str, fields: list[str]) -> tuple[list[str] | None, bool]:
    """(cells, whether all are there); None where the line is no row of these fields."""
    try:
        cells = [cell.strip() for cell in next(csv.reader([row.strip()], skipinitialspace=True), [])]
    except csv.Error:
        return None, False
    if len(cells) > len(fields) and (place := next((n for n, name in enumerate(fields) if name in ("name", "gpu_name")), None)) is not None:
        # A name that itself holds a comma, not quoted.
        spare = len(cells) - len(fields)
        whole_name = cells[place : place + spare + 1]
        cells = [*cells[:place], ", ".join(whole_name), *cells[place + spare + 1 :]]
        # Else it is the header that lacks a column.
        if spare > 2 or re.match(r"\d|GPU-|\[", whole_name[0]) or not all(_fits(*pair) for pair in zip(fields, cells, strict=True) if pair[0] in _TYPED):
            return None, False
    if len(cells) > len(fields) or not cells:
        return None, False
    whole = len(cells) == len(fields)
    if not whole:
        cells = cells[:-1]  # the last one may itself be cut: 143 of 143771
    typed = [(name, cell) for name, cell in zip(fields, cells, strict=False) if name in _TYPED]
    good = sum(_fits(name, cell) for name, cell in typed)
    named = any(name in _IDENTITY and not says_nothing(cell) and _fits(name, cell) for name, cell in typed)
    if typed and good * 2 < len(typed) and not named or not whole and (not typed or not _fits(*typed[0])):
        return None, False
    if not typed and len(fields) == 1 and not re.match(r"(?:NVIDIA|Tesla|GeForce|Quadro|RTX|GTX|TITAN|GRID|CMP|[A-Z]{1,2}\d{1,4})\b", cells[0]):
        return None, False  # one free column: any line of text would do
    return cells, whole


def _fits(name: str, cell: str) -> bool:
    if says_nothing(cell):
        return bool(cell)
    try:
        _TYPED[name](cell)
    except ValueError:
        return False
    return True


def _gpu(cells: dict[str, str], units: dict[str, str | None], with_units: bool) -> Gpu:
    """One GPU from its row."""
    picked = Picked()
    if "index" not in cells:
        picked.unknown["index"] = "the output has no index column"
    for field, convert, names in _FIELDS:
        for name in names:
            cell = cells.get(name)
            if cell is not None and re.fullmatch(r"\d+(?:\.\d+)?", cell) and (convert is memory or with_units and units.get(name)):
                # Bare numbers are MiB, unless other cells print units: then this one is cut.
                unit = units.get(name) or "MiB"
                cell = f"{cell} (no unit)" if with_units else f"{cell} {unit}"
            picked.take(field, cell, convert)
    usable(picked, cells.get("memory.reserved"))
    reasons = {reason_name(found[1]): cell for name, cell in cells.items() if (found := _REASON.match(name))}
    mask = next((cell for name, cell in cells.items() if re.match(r"clocks_(?:event|throttle)_reasons\.active$", name)), "")
    if not reasons and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", mask):
        reasons = {name: "Active" if int(mask, 16) >> bit & 1 else "Not Active" for bit, name in enumerate(_REASON_BITS)}
    take_reasons(picked, reasons)
    volatile = "ecc.errors.uncorrected.volatile."
    total = cells.get(volatile + "total")
    parts = [cell for place in ("dram", "device_memory", "sram") if (cell := cells.get(volatile + place)) is not None]
    take_uncorrected(picked, [total] if total is not None and not (says_nothing(total) and parts) else parts[:2])
    take_lost(picked, cells.values())
    return picked.gpu()


def _first_samples(gpus: list[Gpu], times: list[str]) -> tuple[list[Gpu], list[str]]:
    """The first row of each GPU, and a note where later ones were left out. Rows of one index that name different GPUs are all kept."""
    if not any(gpu.index is not None or gpu.bus_id or gpu.uuid for gpu in gpus):
        # Nothing tells rows apart but the time of the sample: those of the first second are one sample.
        first = [gpu for gpu, time in zip(gpus, times, strict=False) if time[:19] == times[0][:19]] if times else gpus
        return (first or gpus), (["later samples follow; the first one counts"] if len(first) < len(gpus) else [])
    kept: dict[tuple[object, ...], Gpu] = {}
    for number, gpu in enumerate(gpus):
        own = gpu.index if gpu.index is not None else gpu.bus_id or gpu.uuid
        # Anonymous rows cannot repeat; a different bus id or name at one index is another GPU.
        kept.setdefault((own, gpu.bus_id, gpu.uuid, gpu.name) if own is not None else (number, "row"), gpu)
    return list(kept.values()), ([f"{len(gpus)} rows for {len(kept)} GPUs: later samples of the same GPU were left out"] if len(kept) < len(gpus) else [])
