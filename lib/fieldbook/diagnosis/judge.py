"""Which of the rules' matches is the cause."""

import re
from dataclasses import dataclass

from ..bootlog import root_error
from . import layout, machine, memory
from .log import Log
from .rules import Rule, said

RULES: tuple[Rule, ...] = (*memory.RULES, *layout.RULES, *machine.RULES)
UNKNOWN, NONE = "unknown", "none"


@dataclass(frozen=True)
class Diagnosis:
    """cause: a rule's id, 'unknown' (it failed, and this log does not say why) or 'none' (no failure in it). what: one sentence with the log's figures.

    evidence: (line from 1, text) that show it, one for each kind of line; echoes: ids of what only follows; others: sentences on further causes, which the
    first may hide; confidence: 'high', 'medium', 'low' or 'none'.
    """

    cause: str
    what: str
    evidence: tuple[tuple[int, str], ...]
    remedy: str
    confidence: str
    echoes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def document(self) -> dict:
        """As JSON has it."""
        lines = [{"line": line, "text": text} for line, text in self.evidence]
        told = {"cause": self.cause, "what": self.what, "evidence": lines, "remedy": self.remedy, "confidence": self.confidence}
        return {**told, "echoes": list(self.echoes), "others": list(self.others)}


def _matches(log: Log) -> list[tuple[int, Rule, object]]:
    """(line from 0, rule, match) of everything that a rule says something about, in the order of the lines; one rule for each line."""
    found = []
    for number, line in enumerate(log.lines):
        if not line.strip():
            continue
        message, own = log.window(number), len(" ".join(line.split()))
        for rule in RULES:
            match = rule.match(message)
            told = rule.kind == "notice" or rule.at_info or not log.is_quiet(number)
            if match and told and match.start() < own and rule.when(match, log, number):
                found.append((number, rule, match))
                break
    return found


def _evidence(log: Log, found: list[tuple[int, Rule, object]], cause: str) -> tuple[tuple[int, str], ...]:
    """Lines of a cause, those that several ranks wrote alike once."""
    seen, lines = set(), []
    for number, rule, match in found:
        shape = "".join(c for c in match[0] if not c.isdigit())
        if rule.id == cause and shape not in seen:
            seen.add(shape)
            lines.append((number + 1, log.raw[number].strip()))
    return tuple(lines)


# pydantic counts errors first and says below what was wrong.
_ARGUMENT = re.compile(r"\s*(?:Value error|Assertion failed), (.+?)(?: \[type=.*)?$")


def _of_arguments(log: Log, error: str) -> tuple[str, int]:
    """(error, its line from 0); of arguments that were refused, what was wrong with them instead of how many."""
    number = next((i for i, line in enumerate(log.raw) if error.split(": ", 1)[-1][:60] in line), 0)
    if "ValidationError" in error:
        for below in range(number, min(number + 8, len(log.lines))):
            if inner := _ARGUMENT.match(log.lines[below]):
                return inner[1], below
    return error, number


def diagnose(text: str) -> Diagnosis:
    """The cause that a log shows. Echoes and notices are only told where there is none."""
    log = Log(text)
    found = _matches(log)
    causes = [one for one in found if one[1].kind == "cause"]
    echoes = tuple(dict.fromkeys(rule.id for _, rule, _ in found if rule.kind == "echo"))
    if causes:
        number, rule, match = causes[0]
        others = {r.id: said(r.what, m, log, n) for n, r, m in reversed(causes) if r.id != rule.id}
        evidence = _evidence(log, causes, rule.id)
        what, remedy = said(rule.what, match, log, number), said(rule.remedy, match, log, number)
        return Diagnosis(rule.id, what, evidence, remedy, rule.sure, echoes, tuple(others.values()))
    error = root_error(text)
    if error and not any(rule.kind == "echo" and rule.match(error) for rule in RULES):
        error, number = _of_arguments(log, error)
        what = f"an error that no rule knows: {error}"
        return Diagnosis(UNKNOWN, what, ((number + 1, log.raw[number].strip()),), "look at the frames above it; it is the first in the log", "low", echoes)
    if echoes:
        lines = tuple((number + 1, log.raw[number].strip()) for number, rule, _ in found if rule.kind == "echo")
        first = next(rule for _, rule, _ in found if rule.kind == "echo")
        what = f"the cause is not in this log: {first.what}"
        return Diagnosis(UNKNOWN, what, lines[:5], "give the lines above, or the log of the rank or machine that ended first", "none", echoes)
    notices = [one for one in found if one[1].kind == "notice"]
    told = "; ".join(said(rule.what, match, log, number) for number, rule, match in notices)
    lines = tuple((number + 1, log.raw[number].strip()) for number, _, _ in notices)
    return Diagnosis(NONE, told or "no failure in this log", lines, "nothing to do" if notices else "", "medium", echoes)
