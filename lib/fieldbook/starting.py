"""From the launch to the first token: phases with their times, and what ends the wait when a start goes wrong.

Each way of failing is named as soon as it shows: a process that died, one that is stopped, a server that does nothing, an answer that is an error.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import bootlog, diagnosis, processes, server, watching
from .errors import GateFailed

POLL_S = 0.25
# Each look goes through all processes of the machine.
LOOK_S = 1.0
# A supervisor that has written nothing after this was killed at once.
NO_SUPERVISOR_S = 20
# vLLM ends itself when one of its processes dies, and its log then says why: so long it is waited for.
LAST_WORDS_S = 3.0
# Longer than any hiccup: a health check that fails, a process that is stopped by a signal.
SURE_S = 4.0
DEFAULT_STALL_S = 60
WINDOWS = 6


@dataclass
class Watch:
    """What has been seen of one start so far. since: when each sign of trouble showed first."""

    state_file: Path
    started_s: float
    phases: list[tuple[str, float]] = field(default_factory=list)
    since: dict[str, float] = field(default_factory=dict)
    active: watching.Pulse | None = None
    before: watching.Pulse | None = None
    told: watching.Pulse | None = None
    spinning: str = ""
    looked_s: float = 0.0
    read_bytes: int = -1

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.started_s

    def lasting_s(self, sign: str, shows: bool) -> float:
        """How long a sign has shown without a break."""
        if not shows:
            self.since.pop(sign, None)
            return 0.0
        return time.monotonic() - self.since.setdefault(sign, time.monotonic())


def wait_ready(
    state_file: Path, timeout_s: float, progress: Callable[[str], None] = lambda text: None, first_token: bool = True
) -> tuple[float, list[tuple[str, float]]]:
    """Wait until the server is healthy and, with first_token, has produced one. Returns (seconds waited, [(phase, seconds after the start)]).

    Raises GateFailed with the root error from the log, or with what else shows that it will not get there; it is stopped then.
    """
    watch, asking = Watch(state_file, time.monotonic()), ThreadPoolExecutor(1)
    try:
        return _wait(watch, timeout_s, progress, asking if first_token else None)
    except BaseException:
        # A start that is given up, as by an interrupt, leaves no server; one that failed has been stopped already.
        server.stop(state_file)
        raise
    finally:
        # A request that nobody answers ends with the server, or with its own time limit: it is not waited for.
        asking.shutdown(wait=False, cancel_futures=True)


def _wait(watch: Watch, timeout_s: float, progress: Callable[[str], None], asking: ThreadPoolExecutor | None) -> tuple[float, list[tuple[str, float]]]:
    token: Future | None = None
    while True:
        state = server.read_state(watch.state_file)
        _pass_phases(watch, state, progress)
        if trouble := _trouble(watch, state, timeout_s, token is not None, progress):
            # Told at once: stopping it takes its time.
            progress(f"{state['name']}: {trouble}")
            raise _failed(watch.state_file, trouble)
        if token is None and _healthy(watch, state):
            _passed(watch, state, "healthy", progress)
            if asking is None:
                return watch.waited_s, watch.phases
            token = asking.submit(server.first_token, state, max(timeout_s - watch.waited_s, 1))
        if token is not None and token.done():
            if (error := token.exception()) is not None:
                progress(f"{state['name']}: {error}")
                raise _failed(watch.state_file, _last_words(watch.state_file, str(error)))
            _passed(watch, state, "first token", progress)
            return watch.waited_s, watch.phases
        time.sleep(POLL_S)


def _passed(watch: Watch, state: dict[str, Any], phase: str, progress: Callable[[str], None]) -> None:
    watch.phases.append((phase, round(watch.waited_s, 1)))
    progress(f"{state['name']}: {phase} after {watch.waited_s:.0f} s")


def _pass_phases(watch: Watch, state: dict[str, Any], progress: Callable[[str], None]) -> None:
    log = Path(state["log"])
    size = log.stat().st_size if log.is_file() else 0
    if size == watch.read_bytes:
        return
    watch.read_bytes = size
    for phase in bootlog.phases(bootlog.clean(server.log_text(state))):
        if phase not in [name for name, _ in watch.phases]:
            _passed(watch, state, phase, progress)


def _healthy(watch: Watch, state: dict[str, Any]) -> bool:
    """Whether /health answers 200. Another answer is kept as a sign of trouble: a starting server does not answer at all."""
    import httpx

    if state["status"] != "running":
        return False
    try:
        status = server.asked(state, "/health", 2).status_code
    except httpx.ConnectError:
        status = None
    except httpx.HTTPError:
        # Connected, and no answer in time: a loaded machine, or a server that hangs; the pulse tells them apart.
        status = None
    sign = f"/health answers with status {status}"
    # Only what lasts is trouble: another answer meanwhile, or none, begins anew.
    watch.since = {one: since for one, since in watch.since.items() if not one.startswith("/health") or one == sign}
    watch.lasting_s(sign, status not in (None, 200))
    return status == 200


def _gone(state: dict[str, Any], waited_s: float) -> bool:
    """Whether the server has ended, or its supervisor before it could start one."""
    if state["status"] != "starting":
        return not server.is_up(state)
    supervisor = state.get("supervisor")
    return not processes.is_alive(processes.parse(supervisor)) if supervisor else waited_s > NO_SUPERVISOR_S


def _trouble(watch: Watch, state: dict[str, Any], timeout_s: float, asked: bool, progress: Callable[[str], None]) -> str:
    """Why this start will not succeed, '' while it may."""
    # Read once more: it may have come up since.
    if _gone(state, watch.waited_s) and _gone(server.read_state(watch.state_file), watch.waited_s):
        return "it died"
    if lost := state.get("lost"):
        return _last_words(watch.state_file, watching.lost_text(lost[0]))
    if watch.waited_s > timeout_s:
        return f"{'no token' if asked else 'not ready'} after {timeout_s:.0f} s{watch.spinning}"
    for sign, since in watch.since.items():
        if sign.startswith("/health") and time.monotonic() - since > SURE_S:
            return sign
    if state["status"] != "running" or time.monotonic() - watch.looked_s < LOOK_S:
        return ""
    watch.looked_s = time.monotonic()
    pulse = watching.pulse(processes.parse(state["server"]), Path(state["log"]))
    if watch.lasting_s("stopped", bool(pulse.stopped)) > SURE_S:
        return f"{', '.join(pulse.stopped)} {'are' if len(pulse.stopped) > 1 else 'is'} stopped by a signal (SIGSTOP, or a debugger)"
    limit = state.get("stall_timeout_s", DEFAULT_STALL_S)
    if watch.active is None or watch.before is None:
        watch.active = watch.before = pulse
    # By windows: over the whole silence a burst of work would not be seen, second by second the pollings of a hanging server would look like one.
    if pulse.at_s - watch.before.at_s >= max(limit / WINDOWS, LOOK_S):
        if not pulse.quiet_since(watch.before):
            watch.active = pulse
        _note_silence(watch, state, pulse, limit, progress)
        watch.before = pulse
    if pulse.at_s - watch.active.at_s > limit and pulse.quiet_since(watch.before):
        doing = "was asked for a token" if asked else f"came to '{watch.phases[-1][0]}'" if watch.phases else "was started"
        return f"it hangs: it {doing} and for {limit} s has logged, computed and read nothing"
    return ""


def _note_silence(watch: Watch, state: dict[str, Any], pulse: watching.Pulse, limit: float, progress: Callable[[str], None]) -> None:
    """Ranks that wait for each other on GPUs spin, and look as busy as a compiler: after a long silence it is said, and left to the time limit."""
    if watch.told is None or pulse.logged_bytes != watch.told.logged_bytes or pulse.reads_since(watch.told):
        watch.told, watch.spinning = pulse, ""
    elif pulse.at_s - watch.told.at_s > limit and not watch.spinning:
        watch.spinning = (
            f"; it computes, but has logged and read nothing since {watch.waited_s - limit:.0f} s after the start, as ranks do that wait for each other"
        )
        progress(f"{state['name']}: {watch.spinning[2:]}")


def _last_words(state_file: Path, seen: str) -> str:
    """What was seen, once the server has had the time to say in its log why; the log's own cause comes first in the message."""
    deadline = time.monotonic() + LAST_WORDS_S
    while server.is_up(server.read_state(state_file)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return seen


def _failed(state_file: Path, trouble: str) -> GateFailed:
    """The error for a start that failed: stops the server, and says the cause that its log gives, what was seen, and the way out."""
    state = server.read_state(state_file)
    # Stopping first: only then has the supervisor written why the server ended. What is logged because of the stop is no cause.
    died = not server.is_up(state)
    before = server.log_text(state)
    ended = server.stop(state_file)
    text = server.log_text(ended) if died else before
    cause, reason = bootlog.root_error(text), ended.get("reason") if died else ""
    said, lost = [cause] if cause else [], (ended.get("lost") or [{}])[0]
    kills = max(ended.get("oom_kills", 0), lost.get("oom_kills", 0))
    # A process that ends after an exception, and the status then, say nothing that the exception does not say better; a signal and a kill do.
    unsaid = not cause or "died unexpectedly" in cause or kills
    if trouble == "it died":
        said += [str(reason)] if unsaid or "killed by" in str(reason) else []
        said += [watching.lost_text(lost)] if lost and unsaid else []
    elif unsaid or " died: " not in trouble:
        said.append(trouble)
    way_out = diagnosis.told_of_end(text, ended.get("returncode") if died else None, kills, lost.get("memory_available_bytes"))
    return GateFailed(f"server {ended['name']} did not start: {'; '.join(said)}; its log is servers/{Path(ended['log']).name}{way_out}")
