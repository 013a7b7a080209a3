"""Recomputations for a published report's box: its figures as data/reports has them, and what follows from them."""

import re
from collections.abc import Callable
from typing import Any

from .. import correctness, patches, reported, trial_steps
from .. import params as params_module
from ..reported import arms as told_arms
from ..reported import judging, recompute
from . import judged
from .compare import Found, plain
from .run import Run

Recompute = Callable[[Run, str], Found | str]


def report_of(run: Run) -> reported.Report | None:
    """What stands for the run of a recorded box that has none; None for live and replayed ones, and where nothing of the box can be computed here."""
    first = next(iter(run.receipts.values()), None)
    # The box's name comes out of a stranger's receipt.
    if first is None or first.kind != "recorded" or run.params is None or run.why_no_plan or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", first.box):
        return None
    return reported.read(first.box)


def of(run: Run, number: int) -> dict[str, Recompute]:
    """What is recomputed of a station in place of what a run's samples, answers and logs would give; empty for a box without a report."""
    report = report_of(run)
    if report is None:
        return {}
    keys = [key for one in report.at(number) for key in (one.id, f"{one.id}.recomputed")]
    return dict.fromkeys(keys, _figure) | _BESIDES.get(number, lambda *_: {})(run, report)


def _figure(run: Run, key: str) -> Found:
    """A figure of the report, or what it gives recomputed."""
    report = report_of(run)
    one = recompute.check(recompute.source_of(report, run.asked, run.box), report.figures[key.removesuffix(".recomputed")])
    if key.endswith(".recomputed"):
        return Found(one.shown, one.how, rel=1e-12)
    return Found(one.reported.value, f"data/reports/{run.asked.box.name}/figures.csv", disagrees=one.flag)


def _const(found: Found | str) -> Recompute:
    return lambda run, key: found


_LINE = "a line about figures that are checked themselves"


def _patches(run: Run, report: reported.Report) -> dict[str, Recompute]:
    rows = patches.stock_rows(run.asked)
    return {"data.before": _const(Found(plain(rows), _TABLE)), "data.after": _const(Found(plain(rows), _TABLE)), "receipt.verdict": _const(_LINE)} | {
        "data.measured_proof": _const(Found([], "a report has no server to ask")),
        "receipt.passed": _const(Found(True, "nothing is patched of a report's box")),
    }


_TABLE = "patches/releases.yml"


def _launch(run: Run, report: reported.Report) -> dict[str, Recompute]:
    log = told_arms.boot_log(report, "candidate")
    return {
        "pool_tokens": _const(Found(log.pool_tokens, report.name)),
        "data.server.measured_log": _log(report),
        "receipt.verdict": _const(_LINE),
        "receipt.passed": _const(_LINE),
    }


def _log(report: reported.Report) -> Recompute:
    return _const(Found(plain(told_arms.boot_log(report, "candidate")), report.name))


def _speeds(run: Run, report: reported.Report) -> dict[str, Recompute]:
    found: dict[str, Recompute] = {}
    for metric in params_module.metric_names(run.asked):
        told = told_arms.speed(report, "candidate", metric)
        if told:
            found[metric] = _const(Found(told[0], report.name, source=told[1]))
    counts = told_arms.told(report, "candidate")["counts"]
    return found | {
        "data.server.measured_log": _log(report),
        "data.measured_probes": _const(Found(counts, report.name)),
        "probe_degeneration": _const(f"bounds of a count that {report.name} gives"),
        **dict.fromkeys(("data.measured_void", "data.signs", "data.not_quoted_for", "receipt.verdict", "receipt.passed"), _const(_LINE)),
    }


def _verdict(run: Run, report: reported.Report) -> dict[str, Recompute]:
    if not report.published:
        return dict.fromkeys(("data.measured_probes", "data.measured_answer", "data.measured_outcome", "receipt.verdict", "receipt.passed"), _const(_LINE))
    logs = [told_arms.boot_log(report, arm).pool_tokens for arm in ("candidate", "baseline")]
    found = {"pool_ratio": _const(Found(logs[0] / logs[1] if all(logs) else None, report.name, decimals=3))}
    for metric, (ours, theirs) in told_arms.pairs(report, params_module.metric_names(run.asked)).items():
        found |= {metric: _const(Found(ours, report.name)), f"{metric}_ratio": _const(Found(ours / theirs, f"{ours:,} / {theirs:,}", decimals=3))}
    found |= {"receipt.verdict": _sentence, "data.measured_probes": _const(Found(_counts(report), report.name))}
    return found | dict.fromkeys(("data.measured_answer", "data.measured_outcome", "receipt.passed"), _const(_LINE))


def _counts(report: reported.Report) -> dict[str, dict[str, list[int]]]:
    return {arm: told_arms.told(report, arm)["counts"] for arm in ("candidate", "baseline")}


def _sentence(run: Run, key: str) -> Found:
    """The verdict. Raises CannotTell where a receipt that it rests on is missing."""
    report, names = report_of(run), trial_steps.named(run.names)
    said = correctness.both(judging.line(report, run.asked.verdict, names), correctness.judge(_counts(report)), names)
    return Found(said + judged.marks(run), report.name)


_BESIDES: dict[int, Callable[[Run, reported.Report], dict[str, Any]]] = {4: _patches, 5: _launch, 6: _speeds, 7: _verdict}
