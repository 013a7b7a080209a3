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
        self._reads, self._secrets = reads, secrets
        self._log = open(log, "ab", buffering=0)  # noqa: SIM115 (closed by the thread)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float = 5.0) -> None:
        """Wait for the last line. A process outside the session may hold the pipe; it is not waited for longer."""
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        pending = b""
        with self._log:
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
                if not chunk or len(pending) - whole > LONGEST_LINE_BYTES:
                    whole = len(pending)
                self._write(pending[:whole])
                pending = pending[whole:]
                if not chunk:
                    break
        os.close(self._reads)

    def _write(self, raw: bytes) -> None:
        if raw:
            # Surrogates keep bytes that are no UTF-8 as they were.
            self._log.write(scrubbed(raw.decode("utf-8", "surrogateescape"), self._secrets).encode("utf-8", "surrogateescape"))
