"""A command that starts servers: it names itself as their owner, and the first SIGINT or SIGTERM becomes an exception, so that they are stopped."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from . import processes


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception, so that nothing on the way mistakes it for a failed cell."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextmanager
def owning(outlived: bool) -> Iterator[None]:
    """Name this process as owner of the servers that the notebooks start, or the one above when they are to outlive this run."""
    before = os.environ.get("FIELDBOOK_OWNER")
    if not before:
        os.environ["FIELDBOOK_OWNER"] = str(processes.owner_of_servers() if outlived else processes.identify(os.getpid()))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("FIELDBOOK_OWNER", None)


@contextmanager
def signals() -> Iterator[None]:
    """Raise Interrupted at the first SIGINT or SIGTERM; a second one must not stop the stopping of servers."""

    def interrupt(number, _frame):
        ignore_signals()
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
