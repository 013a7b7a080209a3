"""The steps of a verdict for a published report's box: its medians and counts in place of samples, so that figures are compared and nothing is tested."""

from typing import Any

from .. import arms, correctness
from ..outcome import Outcome
from ..params import metric_label
from ..schema import Verdict as VerdictParams
from ..trial import Verdict, boot_facts, held
from ..trial_steps import Trial
from . import arms as told_arms
from .figures import Report


def control(trial: Trial) -> dict[str, Any]:
    """What the report tells of the baseline."""
    told = told_arms.told(_report(trial), "baseline")["counts"]
    return {"boots": {"baseline-1": _facts(trial, "baseline")}, "counts": told}


def boot(trial: Trial, predicted: int | None) -> dict[str, Any]:
    """What it tells of the candidate's start, held against the prediction."""
    facts = _facts(trial, "candidate")
    return {"boot": facts, "pool": held(predicted, facts["pool_tokens"])}


def verify(trial: Trial) -> dict[str, Any]:
    """The candidate once more: a report has no second asking."""
    return {"boot": _facts(trial, "candidate"), "counts": {}}


def verdict(trial: Trial) -> Verdict:
    """Both arms by the report's own figures. No p and no A/A band: those need single values, and the line says so."""
    report, asked = _report(trial), trial.station.params.verdict
    counts = {arm: told_arms.told(report, arm)["counts"] for arm in trial.arms}
    judged = correctness.judge(counts)
    result = Outcome(
        names=trial.names,
        primary_metric=asked.primary_metric,
        expectation=asked.expectation,
        compared=(),
        missing={},
        adjusted={},
        correctness=judged,
        told=line(report, asked, trial.names) if report.published else _planned(trial),
    )
    boots = {arm: [_facts(trial, arm)] for arm in trial.arms}
    return Verdict(result, [], boots, counts, "", middle(trial))


def middle(trial: Trial) -> dict[str, dict[str, float | None]]:
    """{arm: {metric: tok/s}} as the report gives them, the lowest of a range."""
    return {arm: {metric: (told_arms.speed(_report(trial), arm, metric) or (None, ""))[0] for metric in trial.metrics} for arm in trial.arms}


def dots(trial: Trial) -> list[dict[str, Any]]:
    """Every value that the report gives of both arms, for the chart."""
    rows = []
    for arm, name in trial.names.items():
        for metric in trial.metrics:
            ids = _report(trial).arms.get(arm, {}).get("metrics", {}).get(metric, [])
            rows += [{"metric": metric, "tok/s": float(_report(trial).number(one)), "arm": name} for one in ids]
    return rows


def comparisons(trial: Trial) -> list[dict[str, Any]]:
    """One row per metric that the report gives of both arms: values and ratio."""
    rows = []
    for metric, (ours, theirs) in told_arms.pairs(_report(trial), trial.metrics).items():
        primary = " (primary)" if metric == trial.station.params.verdict.primary_metric else ""
        values = {trial.names["candidate"]: float(ours), trial.names["baseline"]: float(theirs)}
        rows.append({"metric": metric + primary, **values, "ratio": ours / theirs, "answer": "not tested: no single values"})
    return rows


def ratios(trial: Trial) -> dict[str, tuple[float, str]]:
    """{metric: (ratio, from what)} of every metric that the report gives of both arms."""
    why = f"({_report(trial).name}); no single values, so not tested"
    return {m: (ours / theirs, f"{ours:,} / {theirs:,} {why}") for m, (ours, theirs) in told_arms.pairs(_report(trial), trial.metrics).items()}


def _planned(trial: Trial) -> str:
    """What is known of two arms of which nothing was measured: their pools by the ledger."""
    pools = {arm: arms.pool_of(trial.station, one, trial.layers[arm])[0] for arm, one in trial.arms.items()}
    told = [f"{trial.names[arm]} {f'{pool.pool_tokens:,} tokens' if pool else 'unknown'}" for arm, pool in pools.items()]
    return f"Planned, not measured. KV pool by the ledger: {', '.join(told)}"


def line(report: Report, asked: VerdictParams, names: dict[str, str]) -> str:
    """What the report says of the metric that decides, in one line. names: {arm: layout}."""
    pair = told_arms.pairs(report, [asked.primary_metric]).get(asked.primary_metric)
    if pair is None:
        return f"{report.name} does not give {metric_label(asked.primary_metric)} of both arms"
    ours, theirs = pair
    ratio = ours / theirs
    found = "faster" if ratio > 1 else "slower" if ratio < 1 else "same"
    agrees = "as expected" if found == asked.expectation else f"expected was '{asked.expectation}'"
    how = f"{ours:,} against {theirs:,} tok/s, x{ratio:.2f}"
    name = f"{report.name[0].upper()}{report.name[1:]}"
    said = f"{name} has {names['candidate']} {found} than {names['baseline']} in {metric_label(asked.primary_metric)}"
    return f"{said}: {how}; {agrees}. Not tested: it gives no single values"


def _report(trial: Trial) -> Report:
    return trial.station.report


def _facts(trial: Trial, arm: str) -> dict[str, Any]:
    return boot_facts(arms.boot(trial.station, f"{arm}-1", trial.arms[arm], trial.layers[arm]))
