"""The lines of a start-up log as people paste them: what was said, and by which process.

Prefixes: vLLM 0.30 utils/system_utils.py:_add_prefix and v1/executor/multiproc_executor.py:setup_proc_title_and_log_prefix; heads: logging_utils/formatter.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# Colours as the terminal gets them, in caret notation, as syslog writes the escape byte, and with the escape byte lost.
_ANSI = re.compile(
    r"(?:\x1b|\^\[|#033)\[[0-9;?]*[A-Za-z]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\[(?:0|1|2|3|4|22|39|[349]\d|10\d)(?:;\d{1,3})*m(?![\]a-z])"
)
_NAMES = r"EngineCore\w*|APIServer\w*|ApiServer\w*|DPCoordinator|VllmWorker\w*|Worker(?:_[A-Z]+\d+)*|RayWorker\w*"
# '(Worker_PP0_TP1 pid=3)', '(VllmWorker rank=1 pid=3)', '(VllmWorker TP1 pid=3)', '(RayWorkerWrapper pid=3, ip=10.0.0.2)', '(pid=3)', '(EngineCore)'.
PREFIX = re.compile(
    r"\((?:(?P<name>[A-Za-z]\w*(?: (?:[A-Z]{2,3}\d+[_ ]?)+)?)(?: rank=(?P<rank>\d{1,9}))? |)pid=(?P<pid>\d{1,12})(?:, ip=(?P<ip>[\w.:-]+))?\)"
    rf"|\((?P<bare>{_NAMES})\)"
)
# 'INFO 11-29 13:20:53 [core.py:12]', without its time, and as before 0.8 'INFO 11-18 18:07:28 engine.py:366]'.
HEAD = re.compile(
    r"(?<![A-Z_])(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\b(?:"
    r"(?: [\w.]+)? +(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?(?: +|$)(?:\[?(?P<file>[\w./<>-]+):?\d*\]?(?:\(http\S+\)\]?)?)?"
    r"| +\[?(?P<untimed>[\w./-]+\.py)(?::\d*)?\]?| *:\s)"
)
_MARK = re.compile(rf"(?P<prefix>{PREFIX.pattern.replace('(?P<', '(?P<p_')})|(?P<head>{HEAD.pattern.replace('(?P<', '(?P<h_')})")
_PLACE = re.compile(r"(?:^|[_ \d])(DP|PP|TP)(\d{1,9})(?!\d)")
_NO_CONTINUATION = re.compile(rf"\s*$|\s*(?:\((?:{_NAMES})\b|```|~~~|\||#|>\s*$|[-*=]{{3}}|\[?\d{{4}}-\d\d-\d\d[T ]|Traceback )")
# A line that was cut by a terminal or an editor is about as long as these are wide; a shorter one ended where it does.
_WRAPPED_FROM = 40
_MAX_PARTS = 200
_FILE = re.compile(r"(\w+\.py)(?::\d+)?\]")
# What a server writes for each request and every ten seconds: most of a long log, and nothing of it is read.
_OF_THE_RUN = re.compile(r'HTTP/\d\.\d" \d{3}|Avg prompt throughput')
# Put after a last line that has no line end: a number there may go on.
CUT = "\u2026"


def loosely(pattern: str) -> re.Pattern:
    """A pattern in which a blank stands for any white space or none."""
    return re.compile(pattern.replace(" ", r"\s*"))


def is_of_a_log(line: str) -> bool:
    """Whether a line has the form of one that a server wrote."""
    return any(form.search(line) for form in (HEAD, PREFIX, _OF_THE_RUN))


@dataclass(frozen=True)
class Speaker:
    """A process that writes to the log; None where its prefix does not say. `rank` counts over TP and PP, `dp` is the engine's number."""

    name: str
    pid: int | None = None
    ip: str | None = None
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    rank: int | None = None

    @property
    def is_engine(self) -> bool:
        return self.name.startswith(("EngineCore", "APIServer", "ApiServer", "DPCoordinator"))

    @property
    def is_placed(self) -> bool:
        """Whether the prefix says which rank it is."""
        return (self.pp, self.tp, self.rank) != (None, None, None)


@dataclass
class Said:
    """One message: its line number, who may have said it (none: no prefix; several: ranks whose lines run into each other), head, physical lines."""

    number: int
    speakers: tuple[Speaker, ...]
    head: str
    parts: list[str] = field(default_factory=list)

    def joined(self) -> str:
        """The message with its wraps undone: no character between the lines, so that a number cut in two is whole again."""
        return "".join(self.parts)

    @property
    def file(self) -> str:
        """Name of the source file that wrote it, '' when it does not say; the head may be wrapped as well."""
        start = self.head + self.joined()[:200]
        head = HEAD.search(start)
        if head and (name := head["file"] or head["untimed"]):
            return name.rpartition("/")[2]
        wrapped = _FILE.search(start)
        return wrapped[1] if wrapped else ""


def clean(text: str) -> str:
    """The log without terminal colours and without the ' characters' of progress bars."""
    return _ANSI.sub("", text).replace("\r", "\n")


def speaker(prefix: re.Match, group: str = "") -> Speaker:
    """The process that a matched PREFIX names; `group` is put before the names of its groups."""
    name = prefix[f"{group}name"] or prefix[f"{group}bare"] or ""
    number = {key: int(value) for key, value in _PLACE.findall(name)}
    if engine := re.fullmatch(r"EngineCore_(\d{1,9})", name):
        number["DP"] = int(engine[1])
    pid, rank = prefix[f"{group}pid"], prefix[f"{group}rank"]
    pp, tp = number.get("PP"), number.get("TP")
    if pp is not None or tp is not None:
        # A size of one is left out of the name.
        pp, tp = pp or 0, tp or 0
    return Speaker(name, int(pid) if pid else None, prefix[f"{group}ip"], number.get("DP"), pp, tp, int(rank) if rank else None)


def said(text: str) -> Iterator[Said]:
    """The messages of a cleaned log, in order. A physical line can hold several messages, a message several lines."""
    if text and not text.endswith("\n"):
        text += CUT
    current, widest, owed, owed_until = None, 0, [], 0
    for number, line in enumerate(text.split("\n")):
        if _OF_THE_RUN.search(line):
            continue
        line = line.replace("**", "").replace("`", "")
        pieces = list(_split(line))
        if len(pieces) == 1 and pieces[0][0] is None and pieces[0][1] is None:
            wide = widest >= _WRAPPED_FROM or (current and current.head and not current.parts[0].strip())
            if wide and current and len(current.parts) < _MAX_PARTS and not _NO_CONTINUATION.match(line):
                # Indentation was added by whoever pasted it; a blank between words is no longer needed, since patterns do without.
                current.parts.append(line.strip())
                widest = max(widest, len(line))
                continue
            if current:
                yield current
            current, widest = Said(number, (), "", [line.replace("|", " ") if line.lstrip().startswith("|") else line]), len(line)
            continue
        for names, head, body in pieces:
            speakers = _who(names or ())
            if len(speakers) > 1:
                owed, owed_until = [speakers] * (len(speakers) - 1), number + 3
            elif not speakers and owed and number <= owed_until:
                # Each rank writes its name first and its line after: this line's name stood before another one.
                speakers = owed.pop()
            if current:
                yield current
            current = Said(number, speakers, head["head"] if head else "", [body])
        widest = len(line)
    if current:
        yield current


def _split(line: str) -> Iterator[tuple[list[Speaker] | None, re.Match | None, str]]:
    """(names, head, text) of each message on a physical line; names and head are None where there are none."""
    names, head, at, found = [], None, 0, False
    for mark in _MARK.finditer(line):
        text = line[at : mark.start()]
        # Text before the first mark is a timestamp or a container's name; after a head it is a message.
        if (head or names) and text.strip(" *") and found:
            yield names, head, text
            names, head = [], None
        elif head and mark["prefix"]:
            names, head = [], None
        if mark["prefix"]:
            names = names + [speaker(mark, "p_")]
        else:
            head = mark
        at, found = mark.end(), True
    yield (names or [], head, line[at:]) if found else (None, None, line)


def _who(names: list[Speaker]) -> tuple[Speaker, ...]:
    """Of the names written before one message, those that may have said it.

    A worker's output passes through its engine, which puts its own name first; a process that is given a second name writes both.
    """
    workers = [name for name in names if not name.is_engine] or list(names[-1:])
    unique: dict[tuple, Speaker] = {}
    for name in workers:
        known = unique.get((name.pid, name.ip) if name.pid is not None else name)
        if known is None or name.is_placed:
            unique[(name.pid, name.ip) if name.pid is not None else name] = name
    return tuple(unique.values())
