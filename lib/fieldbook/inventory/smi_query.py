"""The text of `nvidia-smi -q`, whole or in pieces: key : value lines under headings, which indentation tells apart where it survived."""

import re

from .model import Gpu, GpuProcess, MigDevice, Reading
from .smi_text import (
    BUS_ID,
    MAX_INDEX,
    compute_mode,
    counted,
    driver_model,
    lines,
    lost_gpu,
    memory_with_unit,
    mig_device,
    pstate,
    reason_name,
    same_uuid_note,
    small,
    small_with,
    take_lost,
    take_reasons,
    take_uncorrected,
    usable,
    uuid,
    watts_with_unit,
)
from .values import Picked, bus_id, says_nothing, switch

_GPU = re.compile(rf"^\s*GPU ({BUS_ID}|[0-9a-fA-F]{{1,4}}:[0-9a-fA-F]{{1,2}}:[0-9a-fA-F]{{1,2}})\s*$")
_HEADING = re.compile(r"^(\s*)([A-Z][\w .,/&()-]{1,60}?)\s*$")
# Lines of this output and of no other.
_STRONG = re.compile(
    r"={8,}NVSMI LOG|^[ \t>\"']*(?:FB Memory Usage|GPU Link Info|Clocks (?:Event|Throttle) Reasons|Max Clocks|GPU Power Readings)[ \t\"',]*$|"
    r"^[ \t>\"']*Attached GPUs *: \d|"
    rf"^[ \t>\"']*(?:Product Name|GPU UUID|Performance State|Bus Id) *: |^GPU {BUS_ID}\s*$",
    re.M,
)
_END = re.compile(r"^\s*(?:\$ |[\w.-]+@[\w.-]+[:~ ].*[$#] |# source:|```|\+-{20,}|<\?xml|<nvidia_smi_log|PS [A-Z]:\\)")
_POWER = ("GPU Power Readings", "Power Readings")
# Field of Gpu, how to read it, (heading or '' for none, key) to try in turn.
_FIELDS = (
    ("name", str.strip, [("", "Product Name")]),
    ("uuid", uuid, [("", "GPU UUID")]),
    ("bus_id", bus_id, [("PCI", "Bus Id"), ("", "Bus Id")]),
    ("architecture", str.strip, [("", "Product Architecture")]),
    ("memory_total_bytes", memory_with_unit, [("FB Memory Usage", "Total"), ("Memory Usage", "Total")]),
    ("memory_used_bytes", memory_with_unit, [("FB Memory Usage", "Used"), ("Memory Usage", "Used")]),
    ("pcie_generation", small, [("PCIe Generation", "Current"), ("PCIe Generation", "Device Current")]),
    ("pcie_generation_max", small, [("PCIe Generation", "Max")]),
    ("pcie_generation_device_max", small, [("PCIe Generation", "Device Max")]),
    ("pcie_generation_host_max", small, [("PCIe Generation", "Host Max")]),
    ("pcie_width_lanes", small_with("x"), [("Link Width", "Current")]),
    ("pcie_width_max_lanes", small_with("x"), [("Link Width", "Max")]),
    ("pstate", pstate, [("", "Performance State"), *((power, "Power State") for power in _POWER)]),
    ("utilization_percent", small_with("%"), [("Utilization", "Gpu"), ("Utilization", "GPU")]),
    ("temperature_c", small_with("C"), [("Temperature", "GPU Current Temp"), ("Temperature", "Gpu")]),
    ("power_draw_w", watts_with_unit, [(power, key) for power in _POWER for key in ("Power Draw", "Average Power Draw", "Instantaneous Power Draw")]),
    ("power_limit_w", watts_with_unit, [(power, key) for power in _POWER for key in ("Current Power Limit", "Enforced Power Limit", "Power Limit")]),
    ("power_limit_default_w", watts_with_unit, [(power, "Default Power Limit") for power in _POWER]),
    ("clock_sm_mhz", small_with("MHz"), [("Clocks", "SM")]),
    ("clock_sm_max_mhz", small_with("MHz"), [("Max Clocks", "SM")]),
    ("clock_memory_mhz", small_with("MHz"), [("Clocks", "Memory")]),
    ("clock_memory_max_mhz", small_with("MHz"), [("Max Clocks", "Memory")]),
    ("ecc", switch, [("ECC Mode", "Current"), ("Ecc Mode", "Current")]),
    ("persistence", switch, [("", "Persistence Mode")]),
    ("compute_mode", compute_mode, [("", "Compute Mode")]),
    ("driver_model", driver_model, [("Driver Model", "Current")]),
    ("mig", switch, [("MIG Mode", "Current")]),
)
_LINE = tuple[tuple[str, ...], str, str]  # headings from the outside in, key, value


def read_query_text(text: str) -> Reading | None:
    """Read `nvidia-smi -q`, whole or pieces of it; None where the text holds none. Bytes, W, MHz, C."""
    if "<nvidia_smi_log" in text and "NVSMI LOG" not in text or not _STRONG.search(text):
        return None
    rows = lines(text)
    starts = [number for number, row in enumerate(rows) if "NVSMI LOG" in row]
    notes = ["a second nvidia-smi -q follows in the same text and was not read"] if len(starts) > 1 else []
    rows = rows[starts[0] if starts else 0 : starts[1] if len(starts) > 1 else None]
    head, parts, lost = _split(rows)
    open_end = _key(next((row for row in reversed(rows) if row.strip()), "")) is not None
    told = {key: value for _, key, value in head}
    gpus, incomplete = [], []
    stated = int(told["Attached GPUs"]) if re.fullmatch(r"\d{1,4}", told.get("Attached GPUs", "")) else None
    named = [part for part in parts if part[0]]
    for position, (heading, found) in enumerate(parts[: MAX_INDEX + 1]):
        if not _ends(found, parts[0][1]):
            incomplete.append(f"the lines of GPU {position if heading is None else heading} break off")
            if found is parts[-1][1] and open_end:
                found = found[:-1]  # the last line may itself be cut
        gpus.append(_gpu(heading, found, position if not lost and len(named) == len(parts) == stated else None))
    if not gpus and not told and not lost:
        return None
    count, faults = counted([*gpus, *lost], stated)
    if not gpus and stated != 0:
        faults.append("the report breaks off before the first GPU")
    if gpus and len(named) < len(gpus):
        faults.append("a heading that names a GPU is missing: how many there are is not told")
    elif gpus and stated is None:
        faults.append("the line 'Attached GPUs' is missing: how many there are is not told")
    driver, cuda = (None if says_nothing(told.get(key, "")) else told[key] for key in ("Driver Version", "CUDA Version"))
    return Reading(
        command="nvidia-smi -q",
        gpus=[*gpus, *lost],
        gpu_count=count,
        driver=driver,
        cuda=cuda,
        incomplete=incomplete + faults,
        notes=notes + same_uuid_note(gpus),
    )


def _ends(rows: list[_LINE], first: list[_LINE]) -> bool:
    """False where the lines of a GPU stop early: a full report (it has the product's name) ends with processes, a piece as the first GPU's does."""
    if any(key == "Product Name" for _, key, _ in rows):
        return any("rocesses" in key or any("rocesses" in heading for heading in above) for above, key, _ in rows)
    return not first or any(row[:2] == first[-1][:2] for row in rows)


def _split(rows: list[str]) -> tuple[list[_LINE], list[tuple[str | None, list[_LINE]]], list[Gpu]]:
    """(lines before the first GPU, [(bus id of the heading or None, its lines)], GPUs that did not answer)."""
    # A paste that lost its indentation: headings then hold until the next heading.
    flat = not any(re.match(r"\s+[A-Z][^:]*:\s", row) and not _END.match(row) for row in rows)
    head: list[_LINE] = []
    parts: list[tuple[str | None, list[_LINE]]] = []
    lost: list[Gpu] = []
    above: list[tuple[int, str]] = []
    base = 0
    for row in rows:
        if gone := lost_gpu(row):
            lost.append(gone)
        elif gpu := _GPU.match(row):
            parts.append((gpu[1], []))
            above, base = [], len(row) - len(row.lstrip())
        elif _END.match(row):
            if parts and not row.lstrip().startswith("```"):
                break
        elif key := _key(row):
            indent, name, value = key
            if not flat:
                above = [entry for entry in above if entry[0] < indent]
                if parts and parts[-1][0] and indent <= base:
                    break  # a line of something else that follows
            again = parts and parts[-1][0] is None and name in ("Bus Id", "Product Name") and any(entry[1] == name for entry in parts[-1][1])
            if again or not parts and _starts_gpu(name, above):
                parts.append((None, []))
            (parts[-1][1] if parts else head).append((tuple(heading for _, heading in above), name, value))
        elif heading := _HEADING.match(row):
            indent = len(heading[1])
            above = [*above[-3:], (indent, heading[2])] if flat else [*(entry for entry in above if entry[0] < indent), (indent, heading[2])]
    return head, parts, lost


def _key(row: str) -> tuple[int, str, str] | None:
    """(indent, key, value) of a line 'key : value', else None."""
    name, colon, value = row.partition(":")
    if not colon or not name.strip() or value and not value[0].isspace():
        return None
    return len(name) - len(name.lstrip()), name.strip(), value.strip()


def _starts_gpu(key: str, above: list[tuple[int, str]]) -> bool:
    """True for a line that belongs to a GPU, in a text whose heading 'GPU 0000:..' is missing."""
    known = {"FB Memory Usage", "PCIe Generation", "Link Width", "Clocks", "Max Clocks", *_POWER, "Clocks Event Reasons", "Clocks Throttle Reasons"}
    return key in ("Product Name", "Bus Id", "GPU UUID", "Performance State") or bool(above) and above[-1][1] in known


def _gpu(heading: str | None, rows: list[_LINE], index: int | None) -> Gpu:
    """One GPU from its lines."""
    inside = _end_flat_mig(rows, [_inside(above) for above, _, _ in rows])
    own = [row for row, device in zip(rows, inside, strict=True) if device is None]
    picked = Picked(index=index)
    if index is None:
        picked.unknown["index"] = "the output does not number this GPU"
    for field, convert, places in _FIELDS:
        for section, key in places:
            for above, name, value in own:
                if name == key and (not section or above and above[-1] == section):
                    picked.take(field, value, convert)
                    break
    picked.take("bus_id", heading, bus_id)
    reserved = next((value for above, key, value in own if key == "Reserved" and above and above[-1] == "FB Memory Usage"), None)
    usable(picked, reserved)
    if "memory_total_bytes" not in picked.values and "memory_total_bytes" not in picked.unknown:
        _take_unnamed_memory(picked, own)
    # The two slowdowns under 'HW Slowdown' are indented beneath a line with a value, which is no heading.
    reasons = {reason_name(key): value for above, key, value in own if above and re.fullmatch(r"Clocks (?:Event|Throttle) Reasons", above[-1])}
    take_reasons(picked, reasons)
    volatile = [(above, key, value) for above, key, value in own if "Volatile" in above and "Aggregate" not in above]
    new = [value for _, key, value in volatile if "Uncorrectable" in key]
    take_uncorrected(picked, new or [value for above, key, value in volatile if above[-1] == "Double Bit" and key == "Total"])
    picked.values["mig_devices"] = _mig_devices([(device, row) for device, row in zip(inside, rows, strict=True) if device is not None])
    _take_processes(picked, own)
    take_lost(picked, (value for _, _, value in own))
    return picked.gpu()


def _inside(above: tuple[str, ...]) -> str | None:
    """The heading of a part of the GPU (MIG device, vGPU) that the line lies under; its memory is not the GPU's."""
    return next((heading for heading in above if re.match(r"MIG Device|(?:Active )?vGPU|vGPU ID", heading)), None)


def _end_flat_mig(rows: list[_LINE], inside: list[str | None]) -> list[str | None]:
    """Without indentation the lines of MIG devices reach from the first such heading to the accounting mode, which follows in every driver."""
    first = next((n for n, device in enumerate(inside) if device), None)
    last = next((n for n, (_, key, _) in enumerate(rows) if key == "Accounting Mode"), None)
    if last is not None and first is None:
        # The heading of the MIG device was cut: the GPU's own memory always comes after the accounting mode.
        return ["MIG Device" if n < last and above and "Memory Usage" in above[-1] else None for n, (above, _, _) in enumerate(rows)]
    if first is None or last is None or last <= first:
        return inside
    return [None if n >= last else "MIG Device" if n >= first else device for n, device in enumerate(inside)]


def _take_unnamed_memory(picked: Picked, rows: list[_LINE]) -> None:
    """Memory where the headings were cut: groups Total, Reserved, Used, Free. Only the GPU's own memory has a Reserved line."""
    groups: list[dict[str, str]] = []
    for above, key, value in rows:
        if above and re.search(r"BAR1|Conf Compute", above[-1]):
            continue
        if key == "Total" and re.search(r"[KMG]i?B", value):
            groups.append({})
        if key in ("Total", "Reserved", "Used", "Free") and groups and key not in groups[-1]:
            groups[-1][key] = value
    own = [group for group in groups if "Reserved" in group]
    if own:
        picked.take("memory_total_bytes", own[0].get("Total"), memory_with_unit)
        picked.take("memory_used_bytes", own[0].get("Used"), memory_with_unit)
        usable(picked, own[0]["Reserved"])
    elif groups:
        picked.unknown["memory_total_bytes"] = "the headings are missing: which total is the GPU's own is not told"


def _mig_devices(rows: list[tuple[str, _LINE]]) -> list[MigDevice]:
    groups: list[dict[str, str]] = []
    for _, (above, key, value) in rows:
        if key == "Index" or not groups:
            groups.append({})
        name = f"FB {key}" if above and above[-1] == "FB Memory Usage" else key
        groups[-1].setdefault(name, value)
    devices = []
    for group in groups[:64]:
        if "Index" not in group and "GPU Instance ID" not in group:
            continue
        number, gi, ci = (group.get(key, "?")[:8] for key in ("Index", "GPU Instance ID", "Compute Instance ID"))
        devices.append(mig_device(number, gi, ci, group.get("FB Total"), group.get("FB Used")))
    return devices


def _take_processes(picked: Picked, rows: list[_LINE]) -> None:
    """'Processes : None' says that there are none; other words say why they are not told."""
    processes: list[Picked] = []
    for above, key, value in rows:
        if key in ("Processes", "Compute Processes") and not above:
            if value.lower() == "none":
                picked.values.setdefault("processes", [])
            else:
                picked.unknown["processes"] = value[:60] or "empty"
        elif key == "Process ID":
            processes.append(Picked())
            processes[-1].take("pid", value, small)
        elif processes and key == "Name" and any("rocess" in heading for heading in above):
            processes[-1].take("name", value)
        elif processes and key == "Used GPU Memory":
            processes[-1].take("memory_bytes", value, memory_with_unit)
    if processes:
        picked.values["processes"] = [GpuProcess(**process.values) for process in processes[:10000]]
