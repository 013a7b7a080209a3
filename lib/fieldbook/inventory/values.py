"""Values as NVIDIA's and the kernel's tools print them: numbers with a unit, and the many ways of saying nothing."""

import re
from collections.abc import Callable
from typing import Any

from .model import Gpu

MIB = 2**20
_UNIT_BYTES = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# The escape character as `cat -v` and log viewers write it.
_SHOWN_ESCAPE = re.compile(r"(?:\^\[|␛)(?=\[[0-9;]*[A-Za-z])")
# An escape sequence whose escape character was lost on the way through a web form.
BARE_ANSI = re.compile(r"(?<![\w\]])\[(?:0|1|4|7|22|24|27|3\d|4\d|9\d)(?:;\d+)*m|\[0m|(?<=\s)\[4m")


def clean(text: str) -> str:
    """Text of a terminal without escape sequences, carriage returns, no-break and zero-width spaces, byte order mark."""
    text = _SHOWN_ESCAPE.sub("\x1b", _out_of_source(text))
    if not text.isascii():
        # int() and \d take any script's digits; what is read must not depend on which of the two a reader uses.
        text = re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text)
    text = BARE_ANSI.sub("", ANSI.sub("", text))
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    return re.sub("[\ufeff\u200b\u200c\u200d\u2060\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text)


def _out_of_source(text: str) -> str:
    """A matrix that stands in strings of source code, JSON or a Python list: their escapes are the layout, their quotes are not."""
    if re.search(r"GPU0\\t|\\tGPU0|\\nGPU", text):
        text = re.sub(r"\\x1b|\\u001b|\\033|\\e(?=\[)", "\x1b", text).replace("\\t", "\t").replace("\\n", "\n")
        text = re.sub(r"""(['"]),[ \t]*\1""", "\n", text)
        text = re.sub(r"""['"][ \t,+\\]*$|^[ \t+]*['"](?=GPU|[ \t]|NIC|\x1b)|\[['"](?=[\t\x1b])|['"]\](?:, .*)?$""", "", text, flags=re.M)
    if re.search(r"""^[ \t]*(["'])GPU0 .*\1,?\s*$""", text, re.M):
        text = re.sub(r"""^[ \t]*["'](.*)["'],?[ \t]*$""", r"\1", text, flags=re.M)
    return text


def says_nothing(text: str) -> bool:
    """True for the tools' words for 'no value': [N/A], Not Supported, Unknown Error, ERR!, deprecated, GPU is lost, an empty cell."""
    words = text.strip().strip("[]<>").strip().lower()
    return (
        not words
        or words in {"-", "--", "–", "—", "?", "none reported"}
        or bool(
            re.match(
                r"n/a\b|na$|not (supported|available|applicable|found|active)|unsupported|unknown|err(or)?\b|insufficient|no permission|"
                r"requested functionality|gpu (is|has|requires)|function not found|not yet|undetermined",
                words,
            )
        )
    )


def number(text: str) -> float:
    """'143771 MiB' -> 143771.0, '16x' -> 16.0, '0x10' is refused. Raises ValueError for text that is no number with an optional unit."""
    found = re.fullmatch(r"\s*[x×]?\s*([+-]?\d+(?:\.\d+)?)\s*(?:[x×%°]|[A-Za-z/°]{1,6})?\s*", text)
    if not found:
        raise ValueError(f"{text!r} is no number")
    if len(found[1]) > 20:
        raise ValueError(f"{text[:20]!r}... has too many digits")
    return float(found[1])


def integer(text: str) -> int:
    """Like number, for whole numbers."""
    value = number(text)
    if value != int(value):
        raise ValueError(f"{text!r} is no whole number")
    return int(value)


def size_bytes(text: str, unit: str = "MiB") -> int:
    """'143771 MiB' -> bytes; NVIDIA's and numactl's MB are MiB. `unit` counts where the text has none. Raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMG]i?)?B)?\s*", text, re.I)
    if not found:
        raise ValueError(f"{text!r} is no size in bytes, KiB, MiB or GiB")
    if len(found[1]) > 20:
        raise ValueError(f"{text[:20]!r}... has too many digits")
    return round(float(found[1]) * _UNIT_BYTES[(found[2] or unit).lower()])


def switch(text: str) -> bool:
    """'Enabled', 'On', 'Yes' -> True; 'Disabled', 'Off', 'No' -> False. Raises ValueError for anything else."""
    words = text.strip().lower()
    if words in ("enabled", "on", "yes", "active", "supported", "true"):
        return True
    if words in ("disabled", "off", "no", "not active", "false"):
        return False
    raise ValueError(f"{text!r} is neither on nor off")


def bus_id(text: str) -> str:
    """'00000000:3B:00.0' or '3b:00.0' -> '0000:3b:00.0', as /sys names PCI devices. Raises ValueError."""
    found = re.fullmatch(r"\s*(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])\s*", text)
    if not found:
        raise ValueError(f"{text!r} is no PCI address")
    return f"{int(found[1] or '0', 16):04x}:{found[2]}:{found[3]}.{found[4]}".lower()


class Picked:
    """Fields of one GPU as they are found: a value, or the output's own words where it has none. Makes a Gpu in the end."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = dict(values)
        self.unknown: dict[str, str] = {}

    def take(self, field: str, text: str | None, convert: Callable[[str], Any] = str.strip) -> None:
        """Keep `text` as `field`. None: the output does not name it, nothing is kept. What cannot be converted becomes unknown, with the text as reason."""
        if text is None or self.values.get(field) is not None:
            return
        if says_nothing(text):
            self.unknown.setdefault(field, text.strip() or "empty")
            return
        try:
            self.values[field] = convert(text)
            self.unknown.pop(field, None)
        except ValueError:
            self.unknown.setdefault(field, f"cannot be read: {text.strip()[:60]}")

    def gpu(self) -> Gpu:
        """The Gpu."""
        return Gpu(**self.values, unknown={key: why for key, why in self.unknown.items() if self.values.get(key) is None})


def some(names: list[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
