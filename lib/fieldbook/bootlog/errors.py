"""How far a start came, and the line it died on."""

import re

from .lines import HEAD, PREFIX, clean

_KILLED = re.compile(r"((?:Worker|Engine core) proc \S+ died unexpectedly)")
# Packages print their exceptions with the module in front. StopIteration is the one of Python's own that has none of these endings and has ended servers.
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt)|StopIteration)(?:: (.*))?$")
_NAME = re.sub(r"\?P<\w+>", "?:", PREFIX.pattern)
# Time stamps of CI, names of containers, and the processes' own names.
_WHO = re.compile(rf"^(?:\[?\d{{4}}-\d\d-\d\d[T ][\d:.,]+Z?\]? |[\w.-]+ +\| |(?:{_NAME}) |\[rank\d+\]: )+")
_BARE_LEVEL = re.compile(r"(?P<level>ERROR|CRITICAL) +(?=(?:\w+\.)*\w*(?:Error|Exception)\b)")
# Raised as a ValueError, and often pasted without that word.
_TOO_LONG = re.compile(r"The model's max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV cache \(\d+\)")

# Shown while a server starts: (what the log says, what that means), in order.
PHASES = (
    ("non-default args", "arguments read"),
    ("Initializing a V1 LLM engine", "engine starting"),
    ("Starting to load model", "ranks up, loading weights"),
    ("Loading weights took", "weights loaded"),
    ("Available KV cache memory", "memory profiled"),
    ("KV cache size", "KV pool allocated"),
    ("Graph capturing finished", "graphs captured"),
    ("Application startup complete", "serving"),
)


def phases(text: str) -> list[str]:
    """Start-up phases passed so far, in words."""
    return [words for needle, words in PHASES if needle in text or re.search(needle.replace(" ", r"\s*"), text)]


def root_error(text: str) -> str | None:
    """The first exception a worker or the engine died of, with the function it was raised in; None when none is in the log.

    The first is the cause: what follows (EngineDeadError, RuntimeError of the API server) is its echo.
    """
    lines = clean(text).splitlines()
    for number, line in enumerate(lines):
        if killed := _KILLED.search(line):
            return killed[1]
        bare = _WHO.sub("", line)
        level = HEAD.match(bare) or _BARE_LEVEL.match(bare)
        if level and level["level"] not in ("ERROR", "CRITICAL"):
            # Told below ERROR: it was caught, and vLLM went on.
            continue
        found = _ERROR.match(bare[level.end() :].lstrip() if level else bare)
        if found:
            frames = [f for f in (re.search(r"in (\w+)$", earlier) for earlier in lines[max(0, number - 12) : number]) if f]
            where = f" in {frames[-1][1]}" if frames else ""
            return f"{found[1]}{where}" + (f": {found[2]}" if found[2] else "")
    too_long = _TOO_LONG.search(text)
    return too_long[0] if too_long else None
