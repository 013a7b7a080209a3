"""What the end of a process says where its log says nothing: the signal that ended it, and whether memory was short then."""

import signal
from dataclasses import replace

from .judge import NONE, RULES, UNKNOWN, Diagnosis, diagnose

GIB = 2**30
# Signals by the cause that they speak for; SIGKILL is judged by the memory beside it.
_CAUSES = {
    signal.SIGILL: "wrong-processor-build",
    signal.SIGSEGV: "crash-in-native-code",
    signal.SIGABRT: "crash-in-native-code",
    signal.SIGFPE: "crash-in-native-code",
    # Writing to a map of a full tmpfs ends so.
    signal.SIGBUS: "shared-memory-full",
}


def signal_of(status: int | None) -> int:
    """The signal that an exit status tells, 0 for none: -9 as Python has it, or 137 as a shell does."""
    if status is None:
        return 0
    number = -status if status < 0 else status - 128 if 128 < status < 128 + 65 else 0
    return number if number in set(signal.Signals) else 0


def diagnose_end(text: str, status: int | None = None, oom_kills: int = 0, free_bytes: int | None = None) -> Diagnosis:
    """The cause by the log; where that knows none, by the exit status and the host's memory at that moment.

    oom_kills: processes that the kernel killed for lack of memory meanwhile; free_bytes: host memory that was available.
    """
    found, number = diagnose(text), signal_of(status)
    if found.cause not in (UNKNOWN, NONE) or not (number or oom_kills):
        return found
    name = signal.Signals(number).name if number else "no signal of its own"
    free = "" if free_bytes is None else f", {free_bytes / GIB:.1f} GiB of host memory free"
    evidence = (*found.evidence, (0, f"ended by {name}{free}"))
    if oom_kills:
        rule = next(rule for rule in RULES if rule.id == "out-of-host-memory")
        return replace(found, cause=rule.id, what="the kernel killed it for lack of host memory", remedy=rule.remedy, evidence=evidence, confidence="high")
    if number == signal.SIGKILL:
        what = f"somebody killed it (SIGKILL{free}): not the kernel for lack of memory, as far as its counter tells"
        remedy = "look who did: a job scheduler's limit, a container that was stopped, a person"
        return replace(found, cause="killed-from-outside", what=what, remedy=remedy, evidence=evidence, confidence="medium")
    if number not in _CAUSES:
        return replace(found, what=f"{found.what}; it was ended by {name}", evidence=evidence)
    rule = next(rule for rule in RULES if rule.id == _CAUSES[number])
    return replace(found, cause=rule.id, what=f"{rule.what} ({name}{free})", remedy=rule.remedy, evidence=evidence, confidence="medium")


def told_of_end(text: str, status: int | None, oom_kills: int = 0, free_bytes: int | None = None) -> str:
    """What a cause means and the way out of it, for the end of an error message; '' where nothing is known."""
    found = diagnose_end(text, status, oom_kills, free_bytes)
    return "" if found.cause in (UNKNOWN, NONE) or not found.remedy else f"; {found.what}: {found.remedy}"
