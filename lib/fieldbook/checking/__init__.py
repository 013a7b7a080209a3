"""Check a run folder, or a zip of one, without the machine it came from: recompute every figure that can be, and name what differs.

Nothing of the run is executed: receipts, params, samples, answers, logs and the HTML report are read as data. What a figure is recomputed with stands in
plain dictionaries, `RECOMPUTED` of each module below: station -> figure key (or pattern, as `fnmatch` reads it) -> a function of the run and the key, or
a text that says why the figure is taken as it is. Keys "data.NAME", "data.NAME.*" (each item of a mapping), "receipt.verdict" and "receipt.passed" stand
for what a receipt holds besides its figures. A function returns `Found`, or a text to take the figure as it is, and raises `CannotTell`.

To check more figures, write a module with such a dictionary and name it in `MODULES`. A key counts before a pattern, a longer pattern before a shorter one,
and for the same key a later module before an earlier one. Of a published report's box, `reported` says what takes the place of samples and logs:

    def pool(run, key):
        return Found(memory.pool(run.asked, run.spec, run.layers).pool_tokens, "memory.pool of the params", disagrees="its inputs give 4,137")

    RECOMPUTED = {"03_partition_selection": {"glm-pool-*": pool}}
"""

import fnmatch
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import paths
from ..errors import BadInput
from ..receipts import Receipt
from . import integrity, judged, launched, page, planned, reported, samples
from .compare import CannotTell, Found, Row, attempt, plain
from .opening import opened
from .run import Run, other_version, read, said

__all__ = ["MODULES", "CannotTell", "Checked", "Found", "Row", "Run", "check"]

MODULES: tuple[types.ModuleType, ...] = (planned, launched, judged)


@dataclass(frozen=True)
class Checked:
    """What a check found: one row for each figure, what does not belong together, and what is only to be told. samples: how many were checked."""

    rows: tuple[Row, ...]
    integrity: tuple[str, ...]
    notes: tuple[str, ...]
    samples: int

    def of(self, outcome: str) -> list[Row]:
        """The rows with this outcome."""
        return [row for row in self.rows if row.outcome == outcome]

    @property
    def sound(self) -> bool:
        """Whether nothing differs."""
        return not self.of("differs") and not self.integrity

    def document(self) -> dict[str, Any]:
        """The check as the command's JSON."""
        lists = {outcome: [row.document() for row in self.of(outcome)] for outcome in ("differs", "taken", "not_recomputed")}
        counts = {"agrees": len(self.of("agrees")), "samples": self.samples}
        return {"differs": lists["differs"], **counts, **lists, "integrity": list(self.integrity), "notes": list(self.notes)}

    def text(self) -> str:
        """The check for people: a line for each difference, one for all figures of a station left as they are for one reason, then the counts."""
        lines = [
            f"differs: {row.station}, {row.figure}: the receipt says {_shown(row.says)}, recomputed {_shown(row.recomputed)}, from {row.why}"
            for row in self.of("differs")
        ]
        lines += [f"integrity: {text}" for text in self.integrity]
        lines += _grouped("not recomputed", self.of("not_recomputed")) + _grouped("taken as it is", self.of("taken"))
        lines += [f"note: {text}" for text in self.notes]
        counts = [f"{len(self.of('agrees'))} agree", f"{len(self.of('differs'))} differ", f"{len(self.of('taken'))} taken as they are"]
        counts += [f"{len(self.of('not_recomputed'))} not recomputed", f"{len(self.integrity)} integrity problems", f"{self.samples} samples checked"]
        return "\n".join([*lines, ", ".join(counts)])


def _grouped(what: str, rows: list[Row]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row.station, row.why), []).append(row.figure)
    return [f"{what}: {station}, {', '.join(keys)}: {why}" for (station, why), keys in groups.items()]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def check(given: str | Path) -> Checked:
    """Check a run folder or a zip of one. Raises BadInput with one line for what is neither."""
    try:
        with opened(given) as folder:
            return _check(read(folder, str(given)))
    except RecursionError:
        raise BadInput(f"{given}: nested too deeply to be a run's") from None
    except OSError as error:
        raise BadInput(f"{given}: {error.filename or 'it'} cannot be read ({error.strerror})") from None


def _check(run: Run) -> Checked:
    rows = [row for number, receipt in run.receipts.items() for row in _station(run, number, receipt)]
    found, notes = integrity.problems(run)
    try:
        shown, untold = page.problems(run.folder)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # Notebooks and report are whatever a stranger put there.
        shown, untold = [f"index.html, or a notebook beside it, has a form that Fieldbook does not write ({type(error).__name__})"], []
    count = 0
    # A walk that stopped before notebook 06 has none.
    if run.receipts.keys() & {6, 7} or (run.folder / "samples.jsonl").is_file():
        try:
            if reported.report_of(run) and not (run.folder / "samples.jsonl").is_file():
                # Somebody else's report, or nothing but captured outputs: there never were samples.
                raise CannotTell("")
            rows += samples.differences(run)
            lacking, told = samples.missing(run)
            found, notes, count = found + lacking, notes + told, len(run.samples)
        except CannotTell as error:
            notes = [*notes, *([f"samples cannot be checked: {error}"] if str(error) else [])]
    return Checked(tuple(rows), (*found, *shown), (*notes, *untold), count)


def recomputations(station: str) -> dict[str, Any]:
    """All that is known for a station's keys; a later module's entry takes the place of an earlier one's."""
    return {key: how for module in MODULES for key, how in module.RECOMPUTED.get(station, {}).items()}


def _how(known: dict[str, Any], key: str) -> Any:
    """What a figure is recomputed with: by its own key, else by the longest pattern that fits; None without one."""
    fitting = [pattern for pattern in known if not pattern.startswith(("data.", "receipt.")) and fnmatch.fnmatchcase(key, pattern)]
    return known[key] if key in known else known[max(fitting, key=len)] if fitting else None


def _station(run: Run, number: int, receipt: Receipt) -> list[Row]:
    name = paths.station_name(number)
    known = recomputations(name) | reported.of(run, number)
    version, rows = other_version(receipt), []
    for key, figure in receipt.figures.items():
        how, texts = _how(known, key), {"source": figure.source, "label": figure.label, "disagrees": figure.disagrees}
        if how is None or isinstance(how, str):
            if how is None and figure.evidence in ("computed", "estimated"):
                rows.append(Row(name, key, "not_recomputed", figure.value, None, "this release knows no recomputation of it"))
            else:
                rows.append(Row(name, key, "taken", figure.value, None, how or f"{figure.evidence}, and nothing here gives it again"))
        elif version and figure.evidence in ("computed", "estimated"):
            rows.append(Row(name, key, "not_recomputed", figure.value, None, f"written by {version}"))
        else:
            rows.append(attempt(name, key, figure.value, texts, lambda how=how, key=key: how(run, key)))
    if receipt.kind == "live" and receipt.passed and not version:
        rows += _absent(run, name, receipt, known)
    for key, says in _besides(receipt, known).items():
        how = known.get(key) or known[f"{key.rpartition('.')[0]}.*"]
        if version:
            rows.append(Row(name, key, "not_recomputed", plain(says), None, f"written by {version}"))
        else:
            row = attempt(name, key, plain(says), {}, lambda how=how, key=key: how(run, key))
            # Whole inventories and tables are not printed again where nothing is compared.
            rows.append(row if row.outcome in ("agrees", "differs") else replace(row, says=None))
    return rows


def _absent(run: Run, name: str, receipt: Receipt, known: dict[str, Any]) -> list[Row]:
    """Figures that a walked station records and this receipt lacks."""
    rows = []
    for key, how in known.items():
        if key in receipt.figures or isinstance(how, str) or key.startswith(("data.", "receipt.")) or "*" in key:
            continue
        row = attempt(name, key, None, {}, lambda how=how, key=key: how(run, key))
        rows += [row] if row.outcome == "differs" else []
    return rows


def _besides(receipt: Receipt, known: dict[str, Any]) -> dict[str, Any]:
    """What of a receipt is recomputed besides its figures, by key; what it lacks is left out."""
    found: dict[str, Any] = {}
    for key in (key for key in known if key.startswith(("data.", "receipt."))):
        value = said(receipt, key.removesuffix(".*"))
        if key.endswith(".*"):
            found |= {f"{key[:-1]}{item}": inner for item, inner in value.items()} if isinstance(value, dict) else {}
        elif value is not None:
            found[key] = value
    return found
