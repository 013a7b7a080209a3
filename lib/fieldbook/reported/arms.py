"""What a report tells in place of a boot log, samples and answers: figures only, so that nothing can be measured again or tested."""

from typing import Any

from ..bootlog import BootLog
from .figures import Report

Rows = list[dict[str, Any]]


def boot_log(report: Report, arm: str) -> BootLog:
    """The figures that the report gives of an arm's start-up; what it does not give is None or empty."""
    told = report.arms.get(arm, {})
    pool = told.get("pool_tokens")
    return BootLog(
        vllm_version=told.get("vllm_version"),
        runner=None,
        pool_tokens=int(report.number(pool)) if pool else None,
        max_concurrency=None,
        max_model_len=None,
        available_kv_gib={stage: report.number(one) for stage, one in enumerate(told.get("available_kv_gib", []))},
        weights_load_s={},
        phases=[],
        error=None,
    )


def summary(report: Report, arm: str, metrics: list[str]) -> Rows:
    """Rows like bench.summary_rows: the median that the report gives of each metric, or lowest and highest where it gives a range."""
    told, rows = report.arms.get(arm, {}).get("metrics", {}), []
    for metric in metrics:
        values = sorted(report.number(one) for one in told.get(metric, []))
        row = {"arm": arm, "metric": metric, "samples": None, "void": None, "min": None, "median": None, "max": None}
        row |= {"median": values[0]} if len(values) == 1 else {"min": values[0], "max": values[-1]} if values else {}
        rows.append(row)
    return rows


def speed(report: Report, arm: str, metric: str) -> tuple[float, str] | None:
    """(tok/s, where it stands) of a metric, the lowest of a range; None where the report does not give it."""
    ids = report.arms.get(arm, {}).get("metrics", {}).get(metric, [])
    if not ids:
        return None
    lowest = min(ids, key=report.number)
    return report.number(lowest), f"{report.name}, {lowest}" + (f", lowest of {' and '.join(f'{report.number(one):g}' for one in ids)}" if len(ids) > 1 else "")


def pairs(report: Report, metrics: list[str]) -> dict[str, tuple[float, float]]:
    """{metric: (candidate's tok/s, baseline's)} of every metric that the report gives of both arms, the lowest of a range."""
    found = {metric: [speed(report, arm, metric) for arm in ("candidate", "baseline")] for metric in metrics}
    return {metric: (ours[0], theirs[0]) for metric, (ours, theirs) in found.items() if ours and theirs}


def told(report: Report, arm: str) -> dict[str, Any]:
    """What probes.summary tells of a run, as far as the report does: the count of degenerate samples."""
    counted = report.arms.get(arm, {}).get("degenerate")
    counts = {"degeneration/report": list(report.counted(counted))} if counted else {}
    return {"counts": counts, "median_tokens": None, "logprobs": None, "distance_again": None}
