"""The verdict: two arms, one primary metric, an expectation written first, three possible answers.

Samples are pooled over both rounds and compared within rounds, by an exact permutation test; the spread between two rounds of the same arm is the
noise floor (measuring protocol 1).
"""

import itertools
import random
import statistics
from dataclasses import dataclass

from .params import metric_label

BOOTSTRAP_DRAWS = 4000


@dataclass(frozen=True)
class Comparison:
    """Candidate against baseline in one metric. ratio = candidate median / baseline median; band and interval are relative to 1."""

    metric: str
    candidate_median: float
    baseline_median: float
    ratio: float
    p_value: float
    aa_band: float
    interval: tuple[float, float]
    answer: str


def pooled(rounds: list[list[float]]) -> list[float]:
    """All values of all rounds."""
    return [value for values in rounds for value in values]


def permutation_p(candidate: list[list[float]], baseline: list[list[float]]) -> float:
    """Exact two-sided p-value of the difference of means, labels exchanged within each round.

    candidate[r] and baseline[r] are the values of round r. Every relabelling is looked at: C(6,3)^2 = 400 for two rounds of three against
    three, so the smallest possible p is 2/400.
    """
    observed = abs(statistics.fmean(pooled(candidate)) - statistics.fmean(pooled(baseline)))
    per_round = []
    for ours, theirs in zip(candidate, baseline, strict=True):
        together = ours + theirs
        sums = [sum(together[i] for i in chosen) for chosen in itertools.combinations(range(len(together)), len(ours))]
        per_round.append((sums, sum(together)))
    count_candidate, count_baseline = len(pooled(candidate)), len(pooled(baseline))
    total = sum(whole for _, whole in per_round)
    as_extreme = looked_at = 0
    for choice in itertools.product(*(sums for sums, _ in per_round)):
        ours = sum(choice)
        difference = abs(ours / count_candidate - (total - ours) / count_baseline)
        looked_at += 1
        # Sums of floats in another order differ in the last bits; the observed labelling must count itself.
        as_extreme += difference >= observed * (1 - 1e-9)
    return as_extreme / looked_at


def aa_band(candidate: list[list[float]], baseline: list[list[float]], repeated: list[list[list[float]]] | None = None) -> float:
    """Noise floor: the largest relative difference between the medians of two rounds of the same arm.

    repeated: more such rounds, each entry those of one boot, which are not compared otherwise.
    """
    spreads = []
    for rounds in (candidate, baseline, *(repeated or [])):
        medians = [statistics.median(values) for values in rounds]
        spreads.append((max(medians) - min(medians)) / statistics.median(pooled(rounds)))
    return max(spreads)


def bootstrap_interval(candidate: list[list[float]], baseline: list[list[float]], level: float = 0.90) -> tuple[float, float]:
    """Percentile interval of the ratio of medians, resampled within rounds. A fixed seed makes it repeatable."""
    draw = random.Random(20260101)
    ratios = []
    for _ in range(BOOTSTRAP_DRAWS):
        medians = [statistics.median([v for values in rounds for v in draw.choices(values, k=len(values))]) for rounds in (candidate, baseline)]
        ratios.append(medians[0] / medians[1])
    ratios.sort()
    tail = (1 - level) / 2
    return ratios[int(tail * BOOTSTRAP_DRAWS)], ratios[int((1 - tail) * BOOTSTRAP_DRAWS) - 1]


def compare(
    metric: str, candidate: list[list[float]], baseline: list[list[float]], max_p: float, repeated: list[list[list[float]]] | None = None
) -> Comparison:
    """Compare two arms in one metric; each list holds one list of sound values per round, at least one value in each; repeated as in aa_band.

    'faster' or 'slower': p < max_p and the difference of medians outside the A/A band. 'same': the 90% interval lies inside the band.
    Else 'cannot tell'.
    """
    ours, theirs = statistics.median(pooled(candidate)), statistics.median(pooled(baseline))
    ratio, p, band = ours / theirs, permutation_p(candidate, baseline), aa_band(candidate, baseline, repeated)
    low, high = bootstrap_interval(candidate, baseline)
    if p < max_p and abs(ratio - 1) > band:
        answer = "faster" if ratio > 1 else "slower"
    elif 1 - band <= low and high <= 1 + band:
        answer = "same"
    else:
        answer = "cannot tell"
    return Comparison(metric, ours, theirs, ratio, p, band, (low, high), answer)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm's step-down adjustment of several p-values."""
    adjusted, running = {}, 0.0
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    for rank, (metric, p) in enumerate(ordered):
        running = max(running, min(1.0, p * (len(ordered) - rank)))
        adjusted[metric] = running
    return adjusted


def sentence(primary: Comparison, expectation: str, names: dict[str, str]) -> str:
    """The verdict in one line: what was found, how sure, and whether it was expected."""
    ours, theirs = names["candidate"], names["baseline"]
    found = f"{ours} is {primary.answer} than {theirs}" if primary.answer in ("faster", "slower") else f"{ours} against {theirs}: {primary.answer}"
    agrees = "as expected" if primary.answer == expectation else f"expected was '{expectation}'"
    figures = f"{primary.candidate_median:.1f} against {primary.baseline_median:.1f} tok/s, x{primary.ratio:.2f}, p = {primary.p_value:.3f}"
    return f"{found} in {metric_label(primary.metric)}: {figures}; {agrees}"
