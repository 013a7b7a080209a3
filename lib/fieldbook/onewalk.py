"""One live walk at a time on a machine: two at once would falsify each other's figures, and patch one vLLM under the other's feet."""

import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import FieldbookError
from .interrupts import Interrupted, signals

# An abstract socket: one for the whole machine, whoever runs the walk and out of whichever environment, and gone with its process however that ends.
NAME = "\0fieldbook-walk"
POLL_S = 1.0


def running() -> int | None:
    """Process that a walk of this machine runs in, 0 where it cannot be told any more; None when there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        # Nobody accepts: once the queue of askers is full, a connect would wait for ever.
        asking.setblocking(False)
        try:
            asking.connect(NAME)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid


@contextmanager
def alone(say: Callable[[str], None]) -> Iterator[None]:
    """Be the one walk; wait for another to end first, and say so. Raises FieldbookError when the wait is interrupted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        told = False
        with signals():
            while not _bound(held):
                if not told:
                    say(f"another walk runs on this machine (process {running() or 'unknown'}): waiting for it, since two at once would spoil both")
                    told = True
                try:
                    time.sleep(POLL_S)
                except Interrupted as interrupt:
                    raise FieldbookError(f"interrupted by {interrupt} while waiting for another walk") from None
        # Others ask whose it is by connecting.
        held.listen(64)
        yield


def _bound(held: socket.socket) -> bool:
    try:
        held.bind(NAME)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True
