"""Publish: one offline HTML report per run folder. `site` writes the index over all of them.

The report is a single file without JavaScript. Nothing in it refers to anything outside the run folder: whatever a
notebook carries (scripts, frames, remote pictures, web links) is taken out or turned into text by templates/offline.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import files
from .pages import page
from .paths import STATIONS
from .templates.headings import sections
from .templates.offline import cells_html


@dataclass(frozen=True)
class PublishedStation:
    """One notebook as the run folder has it: `state` is passed, failed or not run; `reason` says why in a line."""

    name: str
    state: str
    reason: str = ""
    receipt: dict[str, Any] | None = None
    receipt_sha256: str = ""
    has_notebook: bool = False
    started: datetime | None = None
    notes: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def title(self) -> str:
        return self.name[3:].replace("_", " ").capitalize()

    @property
    def duration_s(self) -> float | None:
        ended = parse_time((self.receipt or {}).get("ended_at"))
        return (ended - self.started).total_seconds() if ended and self.started else None


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/index.html` from the folder's executed notebooks and receipts, all or nothing; return the path.

    A notebook that failed, stopped or never ran does not stop the report: the report says which and why.
    Raises FileNotFoundError when `run_dir` is not a folder, OSError when it cannot be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such run folder")
    return files.write_whole(run_dir / "index.html", report_html(run_dir))


def report_html(run_dir: Path, embedded: Mapping[str, str] | None = None) -> str:
    """The report as text. `embedded` makes it stand alone: receipts and params are downloads out of these data: addresses, by file name."""
    run = read_run(run_dir)
    cells = {s.name: cells_html(run_dir / f"{s.name}.ipynb", s.number) for s in run["stations"] if s.has_notebook}
    links = {file.name: quote(file.name) for file in run_dir.glob("*.*")} if embedded is None else embedded
    parts = {name: sections(cells.get(name, "")) for name in STATIONS}
    return page("report.html.j2", run=run, cells=cells, sections=parts, links=links, alone=embedded is not None)


def read_run(run_dir: Path) -> dict[str, Any]:
    """What the first screen shows: box, model, layout, versions, start, verdict, state, stations and their figures."""
    stations = _with_notes([read_station(run_dir, name) for name in STATIONS])
    last = next((s.receipt for s in reversed(stations) if s.receipt), {})
    params, figures = last.get("params") or {}, {s.name: station_figures(s) for s in stations}
    every_figure = [figure for group in figures.values() for figure in group]
    state, verdict, why = _outcome(stations, str(last.get("verdict") or ""))
    folder = run_dir.resolve()
    return {
        "box": str(last.get("box") or folder.parent.name),
        "run": folder.name,
        "link": quote(f"{folder.parent.name}/{folder.name}/index.html") if (folder / "index.html").exists() else "",
        "kind": last.get("kind", "live"),
        "captured": bool((last.get("data") or {}).get("only_captured")),
        "model": str((params.get("model") or {}).get("name") or ""),
        "made_up": (params.get("model") or {}).get("source") == "dummy",
        "layout": layout_text(params, every_figure),
        "versions": {name: version for name, version in (last.get("versions") or {}).items() if version},
        "started": min((s.started for s in stations if s.started), default=None),
        "state": state,
        "verdict": verdict,
        "why": why,
        "stations": stations,
        "figures": figures,
        "escaped": [str(text) for s in stations for text in ((s.receipt or {}).get("data") or {}).get("escaped") or []],
        "headline": [figure for figure in every_figure if figure["headline"]],
    }


def read_station(run_dir: Path, name: str) -> PublishedStation:
    """Judge one notebook by its receipt and its executed copy, either of which may be missing or broken."""
    receipt_path, notebook_path = run_dir / f"{name}.json", run_dir / f"{name}.ipynb"
    if not receipt_path.exists() and not notebook_path.exists():
        return PublishedStation(name, "not run")
    receipt, receipt_problem = _read_json(receipt_path)
    notebook, notebook_problem = _read_json(notebook_path)
    error, halt = _failure(notebook or {})
    begun = parse_time(((notebook or {}).get("metadata") or {}).get("papermill", {}).get("start_time"))
    ended = parse_time((receipt or {}).get("ended_at"))
    notes: tuple[str, ...] = ()
    if begun and ended and ended < begun.replace(microsecond=0):  # receipts count whole seconds
        receipt, notes = None, ("The receipt in the folder is of an earlier attempt: its figures are left out.",)
    reason = receipt_problem or notebook_problem
    if receipt and not receipt.get("passed"):
        reason = str(receipt.get("verdict") or "Its receipt says that it did not pass.")
    elif error:
        reason = error
    elif not receipt:
        reason = reason or halt or "It ended without writing its receipt."
    started = parse_time((receipt or {}).get("started_at")) or begun
    digest = files.sha256_of(receipt_path) if receipt else ""
    state = "failed" if reason else "passed"
    return PublishedStation(name, state, reason, receipt, digest, notebook is not None, started, notes)


def station_figures(station: PublishedStation) -> list[dict[str, Any]]:
    """The figures of a station's receipt in their order, each with its text (`shown`), unit and anchor in the page."""
    figures = []
    for key, given in ((station.receipt or {}).get("figures") or {}).items():
        figure = {name: given.get(name) or "" for name in ("unit", "source", "label", "evidence", "headline", "disagrees")}
        value = given.get("value")
        figure |= {"key": key, "value": value, "exact": f"{format_value(value, figure['unit'])} {figure['unit']}"}
        if figure["unit"] == "B" and isinstance(value, int) and abs(value) >= 1 << 20:
            value, figure["unit"] = value / (1 << 30), "GiB"  # bytes inside, GiB where people read
        figure["shown"] = format_value(value, figure["unit"])
        figure["anchor"] = f"s{station.number}-figure-{re.sub(r'[^0-9A-Za-z]+', '-', key)}"
        figures.append(figure)
    return figures


def format_value(value: Any, unit: str = "") -> str:
    """A value as text: integers in groups of three, floats to four significant digits, lists of layers as 15+15."""
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, (list, tuple)):
        return ("+" if unit.startswith("layer") else ", ").join(format_value(item) for item in value)
    if isinstance(value, int) or (isinstance(value, float) and 1000 <= abs(value) < 1e15):
        return f"{round(value):,}".replace(",", "\u202f").replace("-", "−")
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:.4g}".partition("e")
        return (mantissa + (f"\u202f×\u202f10^{int(exponent)}" if exponent else "")).replace("-", "−")
    return str(value)


def layout_text(params: dict[str, Any], figures: Iterable[dict[str, Any]] = ()) -> str:
    """The layout, such as "PP2 · TP1 · 15+15 layers"; a split not in the params is the last figure that is one."""
    parallel = params.get("parallel") or {}
    given = parallel.get("layer_partition") or ""  # a list, "15,15", or a word such as "best"
    split = given if isinstance(given, list) else re.findall(r"\d+", given)
    chosen = [f["value"] for f in figures if f["unit"] == "layers" and isinstance(f["value"], list)]
    split = split or (chosen[-1] if chosen else [])
    sizes = {"PP": parallel.get("pipeline_parallel_size"), "TP": parallel.get("tensor_parallel_size")}
    parts = [f"{name}{size}" for name, size in sizes.items() if size]
    return " · ".join(parts + ["+".join(map(str, split)) + " layers"] * bool(split))


def parse_time(text: str | None) -> datetime | None:
    """An ISO 8601 time as UTC, or None where there is none or it cannot be read."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).astimezone(UTC)
    except ValueError:
        return None


UTC = timezone.utc  # noqa: UP017 (Python 3.10 has no datetime.UTC)
EPOCH = datetime.fromtimestamp(0, UTC)


def _outcome(stations: list[PublishedStation], last_verdict: str) -> tuple[str, str, str]:
    """(state, headline, reason) of the whole walk; a verdict that says no is still the verdict, not a stop."""
    failed = next((s for s in stations if s.state == "failed"), None)
    missing = next((s for s in stations if s.state == "not run"), None)
    if failed and not (failed.name == STATIONS[-1] and failed.receipt):
        return "stopped", f"Stopped at {failed.number} {failed.title}.", failed.reason
    if missing:
        return "unfinished", f"Unfinished: {missing.number} {missing.title} has not run.", last_verdict
    return ("no" if failed else "passed"), last_verdict or "No verdict.", ""


def _with_notes(stations: list[PublishedStation]) -> list[PublishedStation]:
    """Add what a reader must know before taking the receipts for one walk: stations run again since, other params."""
    noted: list[PublishedStation] = []
    for station in stations:
        receipt = station.receipt or {}
        ended, params_hash = parse_time(receipt.get("ended_at")), receipt.get("params_hash")
        newer = [s.number for s in noted if ended and s.started and s.started > ended]
        other = [s.number for s in noted if receipt and s.receipt and s.receipt.get("params_hash") != params_hash]
        notes = list(station.notes)
        if newer:
            notes.append(f"Older than {', '.join(newer)}, run again since: resume the walk from there.")
        if other:
            notes.append(f"Made with other params than {', '.join(other)}.")
        noted.append(replace(station, notes=tuple(notes)))
    return noted


def _failure(notebook: dict[str, Any]) -> tuple[str, str]:
    """(error, halt) of an executed notebook: its first error in a line; and which code cell never finished."""
    cells = [cell for cell in notebook.get("cells") or [] if cell.get("cell_type") == "code" and cell.get("source")]
    halt = ""
    for count, cell in enumerate(cells, start=1):
        expected = "raises-exception" in (cell.get("metadata") or {}).get("tags", [])
        for output in cell.get("outputs") or []:
            if output.get("output_type") == "error" and not expected:
                lines = str(output.get("evalue") or "").strip().splitlines()
                return ": ".join([output.get("ename") or "Error", *lines[:1]]), halt
        if not halt and cell.get("execution_count") is None:
            halt = f"It stopped at code cell {count} of {len(cells)} with no error: its kernel or the runner ended."
    return "", halt


def _read_json(path: Path) -> tuple[dict[str, Any] | None, str]:
    """(content, problem): the JSON object in `path`; (None, "") where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as problem:
        return None, f"{path.name} cannot be read: {problem}"
    return (content, "") if isinstance(content, dict) else (None, f"{path.name} holds no JSON object.")
