"""The boxes below the plain nvidia-smi table: MIG devices and processes."""

import re

from .model import GpuProcess, MigDevice
from .smi_text import MAX_INDEX, is_border, memory_with_unit, mig_device, small
from .values import Picked

_MIG = re.compile(r"\|\s*(\d{1,4})\s+(\d{1,4}|N/A)\s+(\d{1,4}|N/A)\s+(\d{1,4})\s*\|\s*([^|/]*?)\s*/\s*([^|]*?)\s*(?:\||$)")
_PROCESS = re.compile(
    r"\|\s*(?P<gpu>\d{1,4})\.?\s+(?:(?:\d{1,4}|N/A)\s+(?:\d{1,4}|N/A)\s+)?(?P<pid>\d{1,10})\s+(?:(?P<type>[CGM+]{1,5})\s+)?(?P<name>\S.*?)\s+"
    r"(?P<memory>\d+\s?[KMG]i?B|N/A|ERR!|Not Supported|Unknown Error|\[[^\]]*\])\W*$"
)
_UNTOLD = re.compile(r"\|\s*(\d{1,4})\.?\\?\.?\s+(?:ERROR: )?(Not Supported|Insufficient Permissions|N/A|ERR!)\s*\|?\s*$", re.I)


def take_mig(gpus: list[Picked], rows: list[str], incomplete: list[str]) -> None:
    """Put the devices of the MIG box to their GPUs. Bytes; memory is that of the whole GPU instance, which compute instances share."""
    found: dict[int, list[MigDevice]] = {}
    for row in rows:
        if device := _MIG.search(row):
            made = mig_device(device[4], device[2], device[3], device[6] if row.count("|") > 2 else "cut", device[5])
            found.setdefault(int(device[1]), []).append(made)
    for gpu in gpus:
        gpu.values["mig_devices"] = found.get(gpu.values["index"], [])[:64]
    for index in sorted(found):
        if not any(gpu.values["index"] == index for gpu in gpus):
            incomplete.append(f"MIG devices belong to GPU {index}, which is not in the table")
    if rows and found and not _ends(rows):
        incomplete.append("the box of MIG devices has no bottom border: it may go on")


def take_processes(gpus: list[Picked], rows: list[str], incomplete: list[str]) -> int:
    """Put the processes to their GPUs; the highest GPU index named, -1 for none. Only 'No running processes found' means that there are none."""
    if any(re.search(r"No running (?:compute )?processes found", row) for row in rows):
        for gpu in gpus:
            gpu.values["processes"] = []
        return -1
    found: dict[int, list[GpuProcess]] = {}
    untold: dict[int, str] = {}
    cut = 0
    for row in (" ".join(row.split()) for row in rows):
        if process := _PROCESS.search(row):
            picked = Picked()
            picked.take("pid", process["pid"], small)
            picked.take("name", process["name"])
            picked.take("memory_bytes", process["memory"], memory_with_unit)
            found.setdefault(int(process["gpu"]), []).append(GpuProcess(**picked.values))
        elif words := _UNTOLD.search(row):
            untold[int(words[1])] = words[2]
        elif broken := re.match(r"[^\w|]{0,20}\|\s*(\d{1,4})\s+(?:\d|N/A)", row):
            cut += 1
            untold[int(broken[1])] = "its row is cut"
    for gpu in gpus:
        index = gpu.values["index"]
        if index in found:
            gpu.values["processes"] = found[index][:10000]
        elif index in untold:
            gpu.unknown["processes"] = untold[index]
        elif found:
            gpu.unknown["processes"] = "the processes box has no row for this GPU"
        elif rows:
            gpu.unknown["processes"] = "the processes box is empty"
    if cut:
        incomplete.append(f"{cut} row{'s' * (cut > 1)} of the processes box {'are' if cut > 1 else 'is'} cut or cannot be read")
    if rows and (found or untold) and not _ends(rows):
        incomplete.append("the processes box has no bottom border: it may go on")
    named = [index for index in found if index <= MAX_INDEX]
    return max(named, default=-1)


def _ends(rows: list[str]) -> bool:
    """True where a border follows the last row of the box."""
    last = max((number for number, row in enumerate(rows) if re.search(r"\|.*\w", row)), default=-1)
    return any(is_border(row) for row in rows[last + 1 :])
