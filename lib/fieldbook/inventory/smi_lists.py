"""`nvidia-smi -L`, and reports that quote nvidia-smi GPU by GPU in running text."""

import re

from .model import Gpu, MigDevice, Reading
from .smi_text import BUS_ID, counted, gpu_index, lines, lost_gpu, memory_with_unit, same_uuid_note, small, uuid, watts
from .values import Picked, bus_id, switch

_LIST = re.compile(r"^[\s\-*#]*GPU (\d{1,9}): +(.+?) +\((?:S/N: [^)]*\) \()?UUID: *([^)\s]*)(\)?)\s*$")
_LIST_MIG = re.compile(r"^[\s\-*#]*MIG (\S+)\s+Device\s+(\d{1,4}): *\(UUID: *([^)\s]*)\)?\s*$")
# The beginning of a line of the list, at the end of the text.
_LIST_CUT = re.compile(r"\s*(?:G|GP|GPU|GPU \d{1,9}(?::.*)?|MIG? ?|MIG \S.*|M)$")
_PROSE = re.compile(r"^[\s\-*•]*(?:\*\*)?GPU (\d{1,4}):?(?:\*\*)?:?\s+([^|]+?)\s*\|\s*([^|]*?)\s*(?:\||$)(.*)$")


def read_list(text: str) -> Reading | None:
    """Read `nvidia-smi -L`; None where the text holds no such list (the same lines also head the blocks of `nvidia-smi nvlink`)."""
    runs: list[list[str]] = [[]]
    before: list[str] = [""]
    rows = [row for row in lines(text) if row.strip()]
    for number, row in enumerate(rows):
        if _LIST.match(row) or _LIST_MIG.match(row) or lost_gpu(row) or runs[-1] and _LIST_CUT.match(row) and number == len(rows) - 1:
            runs[-1].append(row)
        elif runs[-1]:
            if re.match(r"\s*(?:Link \d|NVML:|Nvlink|Device does not)", row, re.I):
                runs[-1] = _before_restart(runs[-1])
            if runs[-1]:
                runs.append([])
                before.append("")
            before[-1] = row
        else:
            before[-1] = row
    lists = [run for run, above in zip(runs, before, strict=True) if any(map(_LIST.match, run)) and not re.search(r"\bLink \d|nvlink", above, re.I)]
    if not lists:
        return None
    gpus: list[Gpu] = []
    incomplete: list[str] = []
    devices: list[MigDevice] = []
    for row in lists[0]:
        if found := _LIST.match(row):
            picked = Picked()
            picked.take("index", found[1], gpu_index)
            picked.take("name", found[2])
            picked.take("uuid", found[3] if found[4] else f"{found[3]} (cut)", uuid)
            if not found[4]:
                incomplete.append(f"the line of GPU {found[1]} is cut")
            gpus.append(picked.gpu())
            devices = []
        elif (mig := _LIST_MIG.match(row)) and gpus:
            devices = [*devices, MigDevice(instance=f"device {int(mig[2])} ({mig[1]})")][:64]
            gpus[-1] = gpus[-1].model_copy(update={"mig": True, "mig_devices": devices})
        elif gone := lost_gpu(row):
            gpus.append(gone)
        else:
            incomplete.append(f"the line '{row.strip()[:40]}' is cut")
    count, faults = counted(gpus)
    notes = ["a second nvidia-smi -L follows in the same text and was not read"] if len(lists) > 1 else []
    return Reading(command="nvidia-smi -L", gpus=gpus, gpu_count=count, incomplete=incomplete + faults, notes=notes + same_uuid_note(gpus))


def _before_restart(run: list[str]) -> list[str]:
    """The rows before a GPU's number comes again; none where it does not: then all of them head blocks of nvlink."""
    seen = set()
    for number, row in enumerate(run):
        if found := _LIST.match(row):
            if found[1] in seen:
                return run[:number]
            seen.add(found[1])
    return []


def read_prose(text: str) -> Reading | None:
    """Read a report that lists 'GPU 0: NAME | 24576 MiB | driver ...' with lines on power and PCIe below; None where the text holds none."""
    gpus: list[Picked] = []
    driver = None
    quoted = False
    for row in lines(text):
        if found := _PROSE.match(row):
            if not re.search(r"[KMG]i?B\b|\bdriver\b|\bVBIOS\b|N/A", row) or re.search(rf"\|\s*{BUS_ID}", found[2]):
                continue
            picked = Picked()
            picked.take("index", found[1], gpu_index)
            picked.take("name", found[2])
            picked.take("memory_total_bytes", found[3], memory_with_unit)
            rest = found[4]
            driver = driver or next((words for words in re.findall(r"\bdriver:? ([\d.]+\d)(?=\s*\|)", rest)), None)
            picked.take("persistence", next(iter(re.findall(r"\bpersistence[=:] *([\w/\[\]]+)", rest)), None), switch)
            gpus.append(picked)
            quoted = True
        elif quoted and re.match(r"^\s+[-*•]", row) and gpus:
            _take_prose(gpus[-1], row)
        elif row.strip():
            quoted = False
    if not gpus:
        return None
    made = [picked.gpu() for picked in gpus]
    count, faults = counted(made)
    return Reading(command="report quoting nvidia-smi", gpus=made, gpu_count=count, driver=driver, incomplete=faults)


def _take_prose(picked: Picked, row: str) -> None:
    """A line below a GPU of such a report."""
    for field, pattern, convert in (
        ("power_limit_w", r"\blimit=([\d.]+ ?W|\[?N/A\]?)", watts),
        ("power_limit_default_w", r"\bdefault=([\d.]+ ?W|\[?N/A\]?)", watts),
        ("power_draw_w", r"\bcurrent_draw=([\d.]+ ?W|\[?N/A\]?)", watts),
        ("pcie_width_lanes", r"\bx(\d{1,2}|\[?N/A\]?) lanes negotiated", small),
        ("pcie_width_max_lanes", r"\bGPU max x(\d{1,2}|\[?N/A\]?)(?=[,)])", small),
        ("pcie_generation_max", r"\bGen up to (\d|\[?N/A\]?)(?=[,)])", small),
        ("bus_id", rf"\bbus ({BUS_ID}|\[?N/A\]?)", bus_id),
    ):
        found = re.search(pattern, row)
        picked.take(field, found[1] if found else None, convert)
