"""The steps of a verdict for a published report's box: its medians and counts in place of samples, so that figures are compared and nothing is tested."""

from typing import Any

from .. import arms, correctness
from ..outcome import Outcome
from ..params import metric_label
from ..schema import Verdict as VerdictParams
from ..trial import Verdict, boot_facts
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
    logged = facts["pool_tokens"]
    residual = None if None in (logged, predicted) else logged - predicted
    return {"boot": facts, "pool": {"predicted": predicted, "logged": logged, "residual": residual}}


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
    return {arm: {metric: (_speed(trial, arm, metric) or (None, ""))[0] for metric in trial.metrics} for arm in trial.arms}


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
    for metric in trial.metrics:
        ours, theirs = _speed(trial, "candidate", metric), _speed(trial, "baseline", metric)
        if ours and theirs:
            primary = " (primary)" if metric == trial.station.params.verdict.primary_metric else ""
            values = {trial.names["candidate"]: float(ours[0]), trial.names["baseline"]: float(theirs[0])}
            rows.append({"metric": metric + primary, **values, "ratio": ours[0] / theirs[0], "answer": "not tested: no single values"})
    return rows


def ratios(trial: Trial) -> dict[str, tuple[float, str]]:
    """{metric: (ratio, from what)} of every metric that the report gives of both arms."""
    found = {}
    for metric in trial.metrics:
        ours, theirs = _speed(trial, "candidate", metric), _speed(trial, "baseline", metric)
        if ours and theirs:
            found[metric] = (ours[0] / theirs[0], f"{ours[0]:,} / {theirs[0]:,} ({_report(trial).name}); no single values, so not tested")
    return found


def _planned(trial: Trial) -> str:
    """What is known of two arms of which nothing was measured: their pools by the ledger."""
    pools = {arm: arms.pool_of(trial.station, one, trial.layers[arm])[0] for arm, one in trial.arms.items()}
    told = [f"{trial.names[arm]} {f'{pool.pool_tokens:,} tokens' if pool else 'unknown'}" for arm, pool in pools.items()]
    return f"Planned, not measured. KV pool by the ledger: {', '.join(told)}"


def line(report: Report, asked: VerdictParams, names: dict[str, str]) -> str:
    """What the report says of the metric that decides, in one line. names: {arm: layout}."""
    ours, theirs = (told_arms.speed(report, arm, asked.primary_metric) for arm in ("candidate", "baseline"))
    if not ours or not theirs:
        return f"{report.name} does not give {metric_label(asked.primary_metric)} of both arms"
    ratio = ours[0] / theirs[0]
    found = "faster" if ratio > 1 else "slower" if ratio < 1 else "same"
    agrees = "as expected" if found == asked.expectation else f"expected was '{asked.expectation}'"
    how = f"{ours[0]:,} against {theirs[0]:,} tok/s, x{ratio:.2f}"
    name = f"{report.name[0].upper()}{report.name[1:]}"
    said = f"{name} has {names['candidate']} {found} than {names['baseline']} in {metric_label(asked.primary_metric)}"
    return f"{said}: {how}; {agrees}. Not tested: it gives no single values"


def _report(trial: Trial) -> Report:
    return trial.station.report


def _speed(trial: Trial, arm: str, metric: str) -> tuple[float, str] | None:
    return told_arms.speed(_report(trial), arm, metric)


def _facts(trial: Trial, arm: str) -> dict[str, Any]:
    return boot_facts(arms.boot(trial.station, f"{arm}-1", trial.arms[arm], trial.layers[arm]))
