"""The runner: seven notebooks through papermill, one line of progress each, one report at the end, no server left behind."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import yaml

from . import correctness, files, models, onewalk, paths, publish, receipts, server, site
from .errors import BadInput, Degenerate, FieldbookError
from .interrupts import Interrupted, ignore_signals, owning, signals
from .params import Params
from .station import BY_HAND


@dataclass(frozen=True)
class Walk:
    """What a run left behind. status: 0 done, 1 a station failed, 2 the candidate degenerates, 130 or 143 interrupted."""

    run_dir: Path
    status: int
    receipts: list[str]
    verdict: str
    report: Path | None


def say(text: str) -> None:
    """One line of progress on stderr; stdout belongs to the result."""
    print(text, file=sys.stderr, flush=True)


def choose_run_dir(params: Params, first: int, only: int | None, asked: str | None) -> Path:
    """The run folder: the asked one; for a resumed walk or a single station the latest of the box; else a new one named by the UTC time.

    Raises BadInput when a resumed walk finds no run, or one whose earlier receipts are missing or made with other params. A single station
    has no such needs: it runs what it lacks itself.
    """
    box_dir = paths.reports_dir() / params.box.name
    runs = sorted(p for p in box_dir.glob("*") if (p / "params.yml").is_file() and p.name != BY_HAND)
    if asked:
        run_dir = Path(asked).resolve()
    elif runs and (only or first > 1):
        run_dir = runs[-1]
    elif first > 1:
        raise BadInput(f"--from {first:02d}: box {params.box.name} has no run to resume; start without --from")
    else:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")  # noqa: UP017
        run_dir, number = box_dir / stamp, 2
        while run_dir.exists():
            run_dir, number = box_dir / f"{stamp}-{number}", number + 1
    for name in paths.STATIONS[: first - 1]:
        receipt = receipts.read(run_dir, name)
        if receipt is None or not receipt.passed:
            raise BadInput(f"--from {first:02d}: {run_dir} has no passed receipt of {name}; give --from {name[:2]}")
        if receipt.params_hash != params.hash:
            made, now = receipt.params_hash[:8], params.hash[:8]
            raise BadInput(f"--from {first:02d}: {name} in {run_dir} was made with other params ({made}, now {now}); start again from 01")
    return run_dir


def run(params: Params, first: int = 1, only: int | None = None, run_dir: str | None = None, keep_server: bool = False, params_file: str = "PARAMS") -> Walk:
    """Run the stations from `first`, or only one, then write the report. Never leaves a server unless `keep_server`.

    A failed station ends the walk; the report then shows the failure. While another live walk runs on this machine, it is waited for.
    """
    nested = bool(os.environ.get("FIELDBOOK_NESTED"))
    with nullcontext() if params.box.kind != "live" or nested else onewalk.alone(say):
        return _run_alone(params, first, only, run_dir, keep_server, nested, params_file)


def _run_alone(params: Params, first: int, only: int | None, run_dir: str | None, keep_server: bool, nested: bool, params_file: str) -> Walk:
    if params.box.kind == "recorded" and not paths.box_data_dir(params.box.name).is_dir():
        where = f"data/boxes/{params.box.name}"
        raise BadInput(f"box.kind: recorded, but there is no {where}; `fieldbook capture {where}` on the box writes it, or set box.kind to live")
    while True:
        folder = choose_run_dir(params, first, only, run_dir)
        # A folder named by the second may be another's who began in the same one.
        with suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=bool(run_dir) or (folder / "params.yml").is_file())
            break
    files.write_whole(folder / "params.yml", yaml.safe_dump(params.model_dump(), sort_keys=False))
    names = [paths.station_name(only)] if only else paths.STATIONS[first - 1 :]
    started, status, failure, report, setup_s = time.monotonic(), 0, "", None, 0.0
    # A killed walk leaves its last line.
    (folder / ".progress").unlink(missing_ok=True)
    with signals():
        try:
            with owning(keep_server), shown_progress(folder):
                say(f"{params.box.name}: run folder {_shown(folder)}")
                if params.box.kind == "live":
                    models.ensure(params, say)
                setup_s = time.monotonic() - started
                for name in names:
                    failure = _run_one(params, name, folder)
                    if failure:
                        # As `fieldbook bench` says it: answers that degenerate are status 2.
                        status = Degenerate.exit_status if correctness.has_degenerated(_quiet_read(folder, name), params) else 1
                        break
        except Interrupted as interrupt:
            status, failure = 128 + interrupt.number, f"interrupted by {interrupt}"
        except FieldbookError as error:
            status, failure = error.exit_status, str(error)
        finally:
            ignore_signals()
            if not keep_server or status:
                for name in server.stop_all(folder):
                    say(f"stopped server {name}")
            (folder / ".progress").unlink(missing_ok=True)
        if not nested:
            report = publish.write_report(folder)
            site.write_index(paths.reports_dir())
    present = [name for name in paths.STATIONS if receipts.path_of(folder, name).is_file()]
    last = receipts.read(folder, names[-1])
    verdict = failure or (last.verdict if last else "")
    if failure:
        resume = next((n for n in paths.STATIONS if not receipts.is_current(_quiet_read(folder, n), params)), paths.STATIONS[-1])
        where = f" --run-dir {run_dir}" if run_dir else ""
        say(f"{params.box.name}: {failure}. Resume with: fieldbook run {params_file} --from {resume[:2]}{where}")
    else:
        total_s = time.monotonic() - started
        say(f"{params.box.name}: done in {total_s:.0f} s ({_where_time_went(folder, names, total_s, setup_s)})")
    return Walk(folder, status, present, verdict, report)


def _where_time_went(folder: Path, names: list[str] | tuple[str, ...], total_s: float, setup_s: float) -> str:
    spent = {"model set-up": setup_s} if setup_s >= 1 else {}
    for name in names:
        receipt = receipts.read(folder, name)
        for what, seconds in (receipt.data.get("elapsed_s", {}) if receipt else {}).items():
            spent[what] = spent.get(what, 0.0) + seconds
    return ", ".join([*(f"{what} {seconds:.0f} s" for what, seconds in spent.items()), f"everything else {total_s - sum(spent.values()):.0f} s"])


def _quiet_read(folder: Path, name: str):
    try:
        return receipts.read(folder, name)
    except BadInput:
        return None


def _run_one(params: Params, name: str, folder: Path) -> str:
    """Execute one notebook into the run folder; returns the failure in one line, or ''."""
    import logging

    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)
    # When a signal ends a cell, the task that waited for it fails unseen, and asyncio prints that as a traceback; the walk tells it in its one line.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # A receipt of an earlier try must not pass for this one's.
    receipts.path_of(folder, name).unlink(missing_ok=True)
    started = time.monotonic()
    title = name[:2] + " " + name[3:].replace("_", " ")
    say(f"{title} ...")
    failure = ""
    try:
        papermill.execute_notebook(
            paths.root() / "notebooks" / f"{name}.ipynb",
            folder / f"{name}.ipynb",
            parameters={**params.model_dump(), "run_dir": str(folder)},
            progress_bar=False,
            cwd=paths.root() / "notebooks",
            log_output=False,
            # A kernel asked to shut down in the middle of a cell prints a traceback on its way out; what counts is on disk already.
            shutdown_kernel="immediate",
        )
    except papermill.PapermillExecutionError as error:
        failure = f"{name} failed: {error.ename}: {error.evalue}".splitlines()[0]
    except RuntimeError:
        # nbclient's DeadKernelError is one; a kernel that dies while it starts raises a plain one.
        failure = f"{name} failed: its kernel died (killed, or out of memory)"
    receipt = _quiet_read(folder, name)
    if not failure and not (receipt and receipt.passed):
        failure = f"{name} failed: it ended without a passed receipt"
    say(f"{title} {'FAILED' if failure else 'done'} after {time.monotonic() - started:.1f} s" + (f": {receipt.verdict}" if receipt and not failure else ""))
    return failure


def _shown(folder: Path) -> str:
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


@contextmanager
def shown_progress(folder: Path) -> Iterator[None]:
    """Show the line that a busy notebook leaves in the run folder whenever it changes."""
    done = threading.Event()

    def follow():
        shown = ""
        while not done.wait(1):
            try:
                line = (folder / ".progress").read_text().strip()
            except OSError:
                continue
            if line and line != shown:
                shown = line
                say(f"   {line}")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def result_document(walk: Walk) -> str:
    """The last line of stdout: one JSON document."""
    return json.dumps(
        {
            "run_dir": str(walk.run_dir),
            "report": str(walk.report) if walk.report else None,
            "receipts": walk.receipts,
            "verdict": walk.verdict,
            "status": walk.status,
        }
    )
