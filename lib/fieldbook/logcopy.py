"""What a server prints, copied into its log as it comes, secrets starred out before anything reaches the disk."""

import os
import select
import threading
from pathlib import Path

from .secrecy import scrubbed

# A line that is not finished is written after this long: progress bars and prompts have no end of line.
IDLE_S = 1.0
# More than this in one line is no line of a log.
LONGEST_LINE_BYTES = 1 << 16


class LogCopy:
    """A thread that reads one end of a pipe until every writer has closed the other."""

    def __init__(self, reads: int, log: Path, secrets: tuple[str, ...]):
        self._reads, self._secrets, self._lost = reads, tuple(sorted(secrets, key=len, reverse=True)), 0
        # Of a line that has no end so much is kept back, since a secret may begin in it.
        self._kept = max([len(secret.encode()) for secret in secrets], default=0)
        self._log = open(log, "ab", buffering=0)  # noqa: SIM115 (closed by the thread)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    @property
    def lost_bytes(self) -> int:
        """What could not be written, as when the disk is full."""
        return self._lost

    def finish(self, timeout_s: float = 5.0) -> None:
        """Wait for the last line. A process outside the session may hold the pipe; it is not waited for longer."""
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        pending = b""
        with self._log, os.fdopen(self._reads, "rb", buffering=0):
            while True:
                ready, _, _ = select.select([self._reads], [], [], IDLE_S)
                if not ready:
                    self._write(pending)
                    pending = b""
                    continue
                chunk = os.read(self._reads, 1 << 16)
                pending += chunk
                # Whole lines at a time: a secret is never cut in two, so that neither half would be known.
                whole = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
                if not chunk:
                    whole = len(pending)
                elif len(pending) - whole > LONGEST_LINE_BYTES:
                    whole = len(pending) - self._kept
                self._write(pending[:whole])
                pending = pending[whole:]
                if not chunk:
                    break

    def _write(self, raw: bytes) -> None:
        if not raw:
            return
        # Surrogates keep bytes that are no UTF-8 as they were.
        text = scrubbed(raw.decode("utf-8", "surrogateescape"), self._secrets).encode("utf-8", "surrogateescape")
        try:
            self._log.write(text)
        except OSError:
            # A full disk must not stop the server, which would wait for a reader of its pipe.
            self._lost += len(text)
