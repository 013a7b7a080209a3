"""`nvidia-smi nvlink -s` (or `--status`): speed of each NVLink of each GPU."""

import re

from .model import Gpu, Reading
from .smi_text import counted, gpu_index, lines, same_uuid_note, uuid
from .values import Picked

_GPU = re.compile(r"^[\s\-*#]*GPU (\d{1,9}):\s*(.*?)\s*(?:\(UUID: *([^)\s]*)\)?\s*(.*))?$")
_LINK = re.compile(r"^\s*Link (\d{1,3}): *(?:(\d{1,6}(?:\.\d{1,9})?) *GB/s(?!\S).*|(<?inactive>?|off)\s*)$", re.I)
_LINK_ODD = re.compile(r"^\s*(?:L|Li|Lin|Link ?|Link \d{1,3}(?:: *<?[\w./ ]{0,20}>?)?)\s*$")
_NONE = re.compile(r"does not have or support nvlink|nvlink (?:is )?not supported (?:on|by) th", re.I)
_INACTIVE = re.compile(r"all links are in-?active", re.I)
_UNTOLD = re.compile(r"nvlink queries are not supported[^\n]*|NVML: [^\n]*|not supported[^\n]*MIG[^\n]*|Unable to[^\n]*|Insufficient Permissions", re.I)
_OTHER = re.compile(r"nvlink|ppu-smi|nvidia-smi|^\s*[$#] ", re.I)
_COMMAND = re.compile(r"nvlink\s+(?:-s\b|--status\b|-i|--id)", re.I)


def read_nvlink(text: str) -> Reading | None:
    """Read `nvidia-smi nvlink -s`; None where the text holds none. GB/s (10**9 bytes per second), per link and direction.

    A GPU without a link line is unknown: the command says nothing both for a GPU without NVLink and for one it may not ask.
    """
    groups: list[list[_Block]] = [[]]
    commanded: list[bool] = [False]
    block: _Block | None = None
    rows = [row for row in lines(text) if row.strip()]
    for row in rows:
        head = _GPU.match(row)
        if head and (commanded[-1] or any(known.told for known in groups[-1]) or re.search(r"UUID|link", row, re.I)):
            block = _Block(head)
            block.say(head[4] or "")
            if any(known.index == block.index for known in groups[-1]):
                groups.append([])  # the same GPU again: another output, such as nvidia-smi -L before this one
                commanded.append(False)
            groups[-1].append(block)
        elif _OTHER.search(row) and not _UNTOLD.search(row):
            groups.append([])
            commanded.append(bool(_COMMAND.search(row)))
            block = None
        elif block:
            block.say(row)
    found = [group for group, command in zip(groups, commanded, strict=True) if any(block.told for block in group) or command and group]
    if not found:
        return None
    if (last := _GPU.match(rows[-1])) and not last[3] and found[0]:
        found[0][-1].cut()
    incomplete: list[str] = []
    notes = ["a second nvlink -s follows in the same text and was not read"] if len(found) > 1 else []
    gpus = _cut_short([block.gpu(incomplete, notes) for block in found[0]], incomplete)
    count, faults = counted(gpus)
    return Reading(command="nvidia-smi nvlink -s", gpus=gpus, gpu_count=count, incomplete=incomplete + faults, notes=notes + same_uuid_note(gpus))


def _cut_short(gpus: list[Gpu], incomplete: list[str]) -> list[Gpu]:
    """GPUs of one name list the same number of links, active or not: one that lists fewer is cut, and its links are unknown."""
    most: dict[str | None, int] = {}
    for gpu in gpus:
        most[gpu.name] = max(most.get(gpu.name, 0), len(gpu.nvlink_gb_s or []))
    out = []
    for gpu in gpus:
        if gpu.nvlink_gb_s and len(gpu.nvlink_gb_s) < most[gpu.name]:
            why = f"{len(gpu.nvlink_gb_s)} links are listed, {most[gpu.name]} for another {gpu.name}"
            incomplete.append(f"GPU {gpu.index}: {why}")
            gpu = gpu.model_copy(update={"nvlink_gb_s": None, "unknown": {**gpu.unknown, "nvlink_gb_s": why}})
        out.append(gpu)
    return out


class _Block:
    """The lines below one GPU."""

    def __init__(self, head: re.Match[str]) -> None:
        self.picked = Picked()
        self.picked.take("index", head[1], gpu_index)
        self.picked.take("name", re.sub(r"\s*\((?:U|UU|UUI|UUID.*)?$", "", head[2]))
        self.picked.take("uuid", head[3], uuid)
        self.index = self.picked.values.get("index")
        self.links: dict[int, float | None] = {}
        self.odd: list[str] = []
        self.words: str | None = None

    @property
    def told(self) -> bool:
        return bool(self.links or self.words)

    def cut(self) -> None:
        """Nothing follows the line of this GPU in the text: the name may be cut."""
        self.picked.values.pop("name", None)
        self.picked.unknown["name"] = "the line may be cut"

    def say(self, row: str) -> None:
        """One line: a link, or why there is none."""
        if link := _LINK.match(row):
            self.links.setdefault(int(link[1]), float(link[2]) if link[2] else None)
        elif words := (_NONE.search(row) or _INACTIVE.search(row) or _UNTOLD.search(row)):
            self.words = self.words or words[0].strip()
        elif _LINK_ODD.match(row):
            self.odd.append(row.strip())

    def gpu(self, incomplete: list[str], notes: list[str]) -> Gpu:
        """What the lines say; links that are not listed are told, not made up."""
        who = f"GPU {self.index}"
        if self.links:
            gaps = [str(number) for number in range(max(self.links)) if number not in self.links]
            if self.odd:
                self.picked.unknown["nvlink_gb_s"] = f"'{self.odd[0][:40]}' cannot be read"
            elif gaps:
                # A list with holes would pass for the whole set of links.
                self.picked.unknown["nvlink_gb_s"] = f"link {', '.join(gaps)} is not listed"
                incomplete.append(f"{who}: link {', '.join(gaps)} is not listed")
            else:
                self.picked.values["nvlink_gb_s"] = [self.links[number] for number in sorted(self.links)]
        elif self.words and _NONE.search(self.words):
            self.picked.values["nvlink_gb_s"] = []
        elif self.words and _INACTIVE.search(self.words):
            self.picked.values["nvlink_gb_s"] = []
            notes.append(f"{who} has NVLink, and the driver says that all its links are inactive")
        else:
            self.picked.unknown["nvlink_gb_s"] = self.words or "no link listed"
        if self.odd:
            incomplete.append(f"{who}: '{self.odd[0][:40]}' cannot be read")
        return self.picked.gpu()
