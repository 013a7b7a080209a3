"""Samples: one measured repetition of one point each, raw times and all, kept as JSON lines so that others can redo the statistics."""

import statistics
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from .. import files


class Sample(BaseModel):
    """One measured repetition of one point. `void` lists the reasons it does not count; raw times in seconds, one entry per stream.

    boot: which start of the arm's server; round: which full pass over the points on that boot. queue_s, server_ttft_s and server_e2e_s are the server's
    own sums over the streams. conditions: clocks, temperatures and load before, during and after.
    """

    model_config = ConfigDict(frozen=True)
    arm: str
    boot: int
    round: int
    metric: str
    repetition: int
    seed: str
    started_at: str
    server_started_at_s: float | None
    value_tok_s: float
    ttft_s: list[float]
    itl_s: list[list[float]]
    start_s: list[float]
    output_tokens: list[int]
    prompt_tokens: list[int]
    text_tokens: list[int]
    queue_s: float
    server_ttft_s: float
    server_e2e_s: float
    cached_share: float
    preemptions: int
    acceptance_length: float | None
    client_cores: float
    conditions: dict[str, Any]
    ceiling_tok_s: float | None
    void: list[str]


def values(samples: list[Sample], arm: str, metric: str, boot: int | None = None, round_number: int | None = None) -> list[float]:
    """Sound values of one arm and metric, in the order measured; void samples are never averaged in."""
    return [
        s.value_tok_s
        for s in samples
        if s.arm == arm and s.metric == metric and not s.void and boot in (None, s.boot) and round_number in (None, s.round)
    ]  # fmt: skip


def by_boot(samples: list[Sample], metrics: list[str]) -> dict[str, dict[str, list[list[float]]]]:
    """Sound values of the first round of each boot as {metric: {arm: [values of boot 1, values of boot 2]}}, as the verdict compares them."""
    return {metric: {arm: [values(samples, arm, metric, boot, 1) for boot in (1, 2)] for arm in ("candidate", "baseline")} for metric in metrics}


def repeated_rounds(samples: list[Sample], metric: str) -> list[list[list[float]]]:
    """For each boot of each arm that was measured more than once, the sound values of its rounds: what changes where nothing was changed."""
    boots = sorted({(s.arm, s.boot) for s in samples if s.metric == metric})
    found = []
    for arm, boot in boots:
        numbers = sorted({s.round for s in samples if (s.arm, s.boot) == (arm, boot)})
        rounds = [sound for n in numbers if (sound := values(samples, arm, metric, boot, n))]
        found += [rounds] if len(rounds) > 1 else []
    return found


def summary_rows(samples: list[Sample], metrics: list[str]) -> list[dict[str, Any]]:
    """One row per arm and metric: how many are sound and void, minimum, median and maximum of the sound ones, for tables."""
    rows = []
    for arm in sorted({s.arm for s in samples}, reverse=True):
        for metric in metrics:
            sound = values(samples, arm, metric)
            row = {"arm": arm, "metric": metric, "samples": len(sound), "void": sum(s.arm == arm and s.metric == metric and bool(s.void) for s in samples)}
            row |= {"min": min(sound), "median": statistics.median(sound), "max": max(sound)} if sound else {"min": None, "median": None, "max": None}
            rows.append(row)
    return rows


def read_samples(file: Path) -> list[Sample]:
    """Samples of a JSON-lines file; none where there is no file. Raises BadInput for one that is damaged or older than this release."""
    return files.read_models(file, Sample, "samples")


def keep_samples(file: Path, fresh: list[Sample]) -> list[Sample]:
    """Add fresh samples to a JSON-lines file, in place of those of the same arm and boot, and return all. Written whole."""
    redone = {(s.arm, s.boot) for s in fresh}
    together = [s for s in read_samples(file) if (s.arm, s.boot) not in redone] + fresh
    write_samples(file, together)
    return together


def write_samples(file: Path, samples: list[Sample]) -> None:
    """A JSON-lines file of these samples, written whole."""
    files.write_models(file, samples)
