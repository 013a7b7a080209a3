"""What the readers of nvidia-smi's outputs share: lines without log prefixes, strict conversions, counting, and the driver's words for a lost GPU."""

import re
from collections import Counter
from collections.abc import Callable, Iterable

from .model import Gpu, MigDevice
from .values import MIB, Picked, bus_id, integer, number, size_bytes

BUS_ID = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
MAX_INDEX = 1023  # more than any box has; guards against an index made of noise
COMMAND = re.compile(r"(?:^|[\s/\"'`(])nvidia-smi(?:\.exe)?\b([^\n`]*)", re.I)

# Where an output starts: what stands before it on that line, and again before the others, is a log's prefix.
_ANCHOR = re.compile(r"={8,}NVSMI LOG|<\?xml|<nvidia_smi_log|\+[-=+]{30,}|\| NVIDIA-SMI \d|\bGPU 0: .*\(UUID")
_QUOTE = re.compile(r"^[ \t]*(?:>[ \t]?)+(?=\S|\s|$)")
# A line as an element of a list of strings in some program.
_STRING = re.compile(r"^[ \t]*(?:\[)?([\"'])([^\"']{3,})\1[\],\s]*$")
_STAMP = re.compile(r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?[ \t]")
_LOST = re.compile(
    rf"Unable to determine the device handle for gpu\s*(?:(?P<index>\d{{1,4}})\s*:(?![0-9a-fA-F]{{2}}:)\s*)?(?:(?P<bus>{BUS_ID})\s*:)?\s*(?P<words>[^\n]*)",
    re.I,
)
# Drivers of 2012 printed other groups; integrated GPUs have no 'GPU-' in front.
_UUID = re.compile(r"(?:GPU-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|GPU-[0-9a-fA-F]{16}(?:-[0-9a-fA-F]{8})+|GPU-[0-9a-fA-F]{32}")
_DEAD = re.compile(r"\b(?:gpu is lost|gpu has fallen off the bus|gpu requires reset)\b", re.I)


def lines(text: str, longest: int | None = 1000) -> list[str]:
    """Lines with tabs as spaces, without `> ` quotes, time stamps, and the prefix that a log or a comment puts before each line of an output.

    Longer lines are cut to `longest` characters: no output has them, and patterns would be slow on them.
    """
    found = [_STAMP.sub("", _QUOTE.sub("", line)).rstrip() for line in text.expandtabs(8).split("\n")]
    found = [string[2].removesuffix("\\n").rstrip() if (string := _STRING.match(line)) else line for line in found]
    shapes: set[str] = set()
    for line in found:
        start = _ANCHOR.search(line)
        if start and line[: start.start()].strip():
            shapes.add(_shape(line[: start.start()]))
    for shape in sorted(shapes, key=len, reverse=True)[:8]:
        found = [line[len(shape) :] if _shape(line[: len(shape)]).ljust(len(shape)) == shape else line for line in found]
    return [line[:longest] for line in found] if longest else found


def is_border(row: str) -> bool:
    """True for a line of a table that is drawn only. One that ends in dots is cut."""
    return not re.search(r"\w", row) and len(re.findall("[-=+—–─━═]", row)) > 5 and not row.rstrip(" '\",]").endswith(("..", "…"))


def _shape(prefix: str) -> str:
    return re.sub(r"\d", "0", prefix)


def gpu_index(text: str) -> int:
    """A GPU's number. Raises ValueError for more than any box has."""
    value = integer(text)
    if not 0 <= value <= MAX_INDEX:
        raise ValueError(f"{text!r} is no GPU index")
    return value


def small(text: str) -> int:
    """A count such as '5' or '16x', '36 C', '0 %', '1980 MHz'. Raises ValueError beyond 10**9 and below -273."""
    value = integer(text)
    if not -273 <= value <= 10**9:
        raise ValueError(f"{text!r} is beyond sense")
    return value


def small_with(unit: str) -> Callable[[str], int]:
    """A reader like small that refuses a number without its unit: in an output that always prints it, the number is the start of a longer one."""

    def read(text: str) -> int:
        if not text.rstrip().endswith(unit):
            raise ValueError(f"{text!r} has no {unit}")
        return small(text)

    return read


def watts(text: str) -> float:
    """'78.50 W' -> 78.5. Raises ValueError."""
    value = number(text)
    if not 0 <= value <= 10**6:
        raise ValueError(f"{text!r} is beyond sense")
    return value


def watts_with_unit(text: str) -> float:
    """Like watts, but a bare number is refused."""
    if not text.rstrip().endswith("W"):
        raise ValueError(f"{text!r} has no W")
    return watts(text)


def memory(text: str, unit: str = "MiB") -> int:
    """'143771 MiB' -> bytes; `unit` where the text has none. Raises ValueError, also beyond 1 PiB."""
    value = size_bytes(text, unit) if len(text) < 40 else 2**60
    if value > MIB * 2**30:
        raise ValueError(f"{text!r} is beyond sense")
    return value


def memory_with_unit(text: str) -> int:
    """Like memory, but a bare number is refused: in an output that always prints the unit it is the start of a longer one."""
    if not re.search(r"[a-z]", text, re.I):
        raise ValueError(f"{text!r} has no unit")
    return memory(text)


def uuid(text: str) -> str:
    """A whole UUID as nvidia-smi prints it. Raises ValueError for one that is cut or blacked out."""
    found = _UUID.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no whole UUID")
    return found[0]


def pstate(text: str) -> str:
    """'P0' to 'P15'. Raises ValueError."""
    found = re.fullmatch(r"\s*(P(?:\d|1[0-5]))\s*", text, re.I)
    if not found:
        raise ValueError(f"{text!r} is no performance state")
    return found[1].upper()


def compute_capability(text: str) -> str:
    """'9.0'. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d{1,2}\.\d)\s*", text)
    if not found:
        raise ValueError(f"{text!r} is no compute capability")
    return found[1]


def compute_mode(text: str) -> str:
    """The long name, also where the table shortens it: 'E. Process' -> 'Exclusive_Process'. Raises ValueError for anything nvidia-smi does not print."""
    modes = {"default": "Default", "process": "Exclusive_Process", "thread": "Exclusive_Thread", "prohibited": "Prohibited"}
    found = re.fullmatch(r"(?:e(?:xclusive)?[._ ]*)?(default|process|thread|prohibited)", text.strip(), re.I)
    if not found:
        raise ValueError(f"{text!r} is no compute mode")
    return modes[found[1].lower()]


def driver_model(text: str) -> str:
    """'WDDM', 'TCC' or 'MCDM'. Raises ValueError."""
    found = re.fullmatch(r"\s*(WDDM|TCC|MCDM)\s*(?:\(.*\))?\s*", text, re.I)
    if not found:
        raise ValueError(f"{text!r} is no driver model")
    return found[1].upper()


def usable(picked: Picked, reserved: str | None) -> None:
    """memory_usable_bytes from the total and what the driver keeps for itself; nothing where the output does not name a reserve."""
    total = picked.values.get("memory_total_bytes")
    rest = Picked()
    rest.take("reserved", reserved, memory)
    if (kept := rest.values.get("reserved")) is not None and total is not None and kept <= total:
        picked.values["memory_usable_bytes"] = total - kept
    elif why := rest.unknown.get("reserved"):
        picked.unknown["memory_usable_bytes"] = f"reserved memory: {why}"


def reason_name(text: str) -> str:
    """One name for a clock event reason, whatever output and age: 'HW Thermal Slowdown' -> 'hw_thermal_slowdown', 'Idle' -> 'gpu_idle'."""
    name = re.sub(r"\W+", "_", re.sub(r"^clocks_(?:event|throttle)_reasons?_", "", text.strip().lower())).strip("_")
    return {"idle": "gpu_idle", "display_clock_setting": "display_clocks_setting"}.get(name, name)


def take_reasons(picked: Picked, reasons: dict[str, str]) -> None:
    """idle and throttle_reasons from {name: 'Active' or 'Not Active'}. A reason that the driver does not tell leaves the list unknown only if none is told."""
    if not reasons:
        return
    states = {name: re.match(r"(not |in)?active\b", words.strip(), re.I) for name, words in reasons.items()}
    told = {name: not state[1] for name, state in states.items() if state}
    if "gpu_idle" in told:
        picked.values["idle"] = told["gpu_idle"]
    elif "gpu_idle" in reasons:
        picked.unknown["idle"] = reasons["gpu_idle"].strip() or "empty"
    slowing = [name for name in reasons if name not in ("gpu_idle", "applications_clocks_setting")]
    if any(name in told for name in slowing):
        picked.values["throttle_reasons"] = [name for name in slowing if told.get(name)]
    elif slowing:
        picked.unknown["throttle_reasons"] = reasons[slowing[0]].strip() or "empty"


def take_uncorrected(picked: Picked, counters: list[str]) -> None:
    """ecc_uncorrected: the sum of the counters that hold a number; unknown, in the driver's words, where none does."""
    sums = [int(words) for words in counters if re.fullmatch(r"\s*\d{1,18}\s*", words)]
    if sums:
        picked.values["ecc_uncorrected"] = sum(sums)
    elif counters:
        picked.unknown["ecc_uncorrected"] = counters[0].strip() or "empty"


def lost_words(text: str) -> str | None:
    """The driver's words where a value says that the GPU is gone, else None."""
    found = _DEAD.search(text)
    return found[0] if found else None


def lost_gpu(line: str) -> Gpu | None:
    """The GPU of a line 'Unable to determine the device handle for GPU ...', else None."""
    found = _LOST.search(line)
    if not found:
        return None
    picked = Picked(lost=re.split(r"\.\s|`|\.$", found["words"].strip()[:200])[0].strip(" .\"'") or "no answer")
    picked.take("index", found["index"], gpu_index)
    picked.take("bus_id", found["bus"], bus_id)
    return picked.gpu()


def counted(gpus: list[Gpu], stated: int | None = None, beyond: int = -1) -> tuple[int | None, list[str]]:
    """How many GPUs the text speaks of, and what is missing or twice. `stated`: its own count; `beyond`: highest index it names elsewhere.

    Without a stated count it is the highest index + 1; None where the text numbers nothing.
    """
    indexes = [gpu.index for gpu in gpus if gpu.index is not None]
    top = max([*indexes, beyond])
    missing = [str(index) for index in sorted(set(range(top + 1)) - set(indexes))] if indexes or beyond >= 0 else []
    faults = []
    if missing and not (stated is not None and not indexes):
        faults.append(f"no GPU with index {', '.join(missing[:16])}{' and more' if len(missing) > 16 else ''} is listed")
    for what, values in (("index", indexes), ("bus id", [gpu.bus_id for gpu in gpus if gpu.bus_id])):
        faults += [f"{what} {value} is listed {times} times" for value, times in Counter(values).items() if times > 1][:16]
    if stated is not None and stated != len(gpus):
        faults.append(f"the text speaks of {stated} GPU{'s' * (stated != 1)}, {len(gpus)} {'is' if len(gpus) == 1 else 'are'} listed")
    return stated if stated is not None else top + 1 if top >= 0 else None, faults


def same_uuid_note(gpus: list[Gpu]) -> list[str]:
    """A note where several GPUs state one UUID, as in outputs with the identifiers blacked out."""
    known = [gpu.uuid for gpu in gpus if gpu.uuid]
    return ["several GPUs state the same UUID: it was replaced before the text was shared"] if len(set(known)) < len(known) else []


def mig_device(number: str, gi: str, ci: str, total: str | None, used: str | None) -> MigDevice:
    """A MIG device by its own numbers, those of its instances, and the texts of its memory sizes."""
    sizes = Picked()
    sizes.take("total", total, memory_with_unit)
    sizes.take("used", used, memory_with_unit)
    instance = f"device {number} (GI {gi}, CI {ci})"
    return MigDevice(instance=instance, memory_total_bytes=sizes.values.get("total"), memory_used_bytes=sizes.values.get("used"))


def take_lost(picked: Picked, texts: Iterable[str]) -> None:
    """Keep the first words that tell of a GPU that is off the bus."""
    if words := next((words for text in texts if (words := lost_words(text))), None):
        picked.values["lost"] = words


def is_among(gone: Gpu, gpus: list[Gpu]) -> bool:
    """Whether a lost GPU is one of these, by index or bus address."""
    return any(gone.index is not None and gone.index == gpu.index or gone.bus_id and gone.bus_id == gpu.bus_id for gpu in gpus)
