"""The verdict: two arms, one primary metric, an expectation written first, three possible answers.

Samples are pooled over both rounds and compared within rounds, by an exact permutation test; what two boots of the same arm differ by is the noise floor
(measuring protocol 1). `repeating` says what more repetitions would do, `correctness` which arm answers worse.
"""

import itertools
import math
import random
import statistics
from dataclasses import dataclass
from functools import lru_cache

from .errors import NoSamples
from .params import metric_label
from .repeating import WIDEST_SAME, More, would_decide

BOOTSTRAP_DRAWS = 4000
# Equal arms whose boots differ by chance leave the A/A band in so many of all verdicts. Two boots tell little of what boots do: with the largest difference
# seen between two boots of an arm as the band they would in 22 of 100 (tests/unit/test_verdict.py). Less than the 0.05 that is promised, since boots need not
# be normally distributed.
OUTSIDE_BAND = 0.035
# Labellings that are looked at one by one; of more, so many are drawn.
MOST_LABELLINGS, DRAWN_LABELLINGS = 2_000_000, 200_000
SEED = 20260101


@dataclass(frozen=True)
class Comparison:
    """Candidate against baseline in one metric. ratio = candidate median / baseline median; spread, band and interval are relative to 1.

    spread: largest difference between two boots (or rounds) of one arm, the noise floor as it was seen; None where no arm was measured twice.
    aa_band: equal arms have a ratio between 1 / (1 + aa_band) and 1 + aa_band; None where no arm was booted twice. more: for 'cannot tell', what would
    decide.
    """

    metric: str
    candidate_median: float
    baseline_median: float
    ratio: float
    p_value: float
    spread: float | None
    aa_band: float | None
    interval: tuple[float, float]
    answer: str
    more: More | None = None


def pooled(rounds: list[list[float]]) -> list[float]:
    """All values of all rounds."""
    return [value for values in rounds for value in values]


def permutation_p(candidate: list[list[float]], baseline: list[list[float]]) -> float:
    """Exact two-sided p-value of the difference of means, labels exchanged within each round.

    candidate[r] and baseline[r] are the values of round r. Every relabelling is looked at: C(6,3)^2 = 400 for two rounds of three against
    three, so the smallest possible p is 2/400. Of more than MOST_LABELLINGS, a sample is drawn by a fixed seed, the observed one among them.
    """
    import numpy as np

    observed = abs(statistics.fmean(pooled(candidate)) - statistics.fmean(pooled(baseline)))
    per_round = [(ours + theirs, len(ours)) for ours, theirs in zip(candidate, baseline, strict=True)]
    sums = np.zeros(1)
    if math.prod(math.comb(len(together), ours) for together, ours in per_round) <= MOST_LABELLINGS:
        for together, ours in per_round:
            sums = np.add.outer(sums, [sum(chosen) for chosen in itertools.combinations(together, ours)]).ravel()
    else:
        draw = np.random.default_rng(SEED)
        sums = np.zeros(DRAWN_LABELLINGS)
        for together, ours in per_round:
            # The first ones of a shuffled round are a random choice of the candidate's.
            order = np.argsort(draw.random((DRAWN_LABELLINGS, len(together))), axis=1)[:, :ours]
            sums += np.array(together)[order].sum(axis=1)
        sums = np.append(sums, sum(pooled(candidate)))
    total, ours, theirs = sum(pooled(candidate) + pooled(baseline)), len(pooled(candidate)), len(pooled(baseline))
    differences = np.abs(sums / ours - (total - sums) / theirs)
    # Sums of floats in another order differ in the last bits; the observed labelling must count itself.
    as_extreme = differences >= observed * (1 - 1e-9) - 1e-13 * total
    return float(as_extreme.mean())


def noise_floor(candidate: list[list[float]], baseline: list[list[float]], repeated: list[list[list[float]]] | None = None) -> float | None:
    """The largest relative difference between the medians of two rounds of the same arm; None where no arm has two rounds.

    repeated: more such rounds, each entry those of one boot (or of boots of one arm), which are not compared otherwise. Empty rounds are left out.
    """
    spreads = []
    for rounds in (candidate, baseline, *(repeated or [])):
        medians = [statistics.median(values) for values in rounds if values]
        if len(medians) > 1:
            spreads.append((max(medians) - min(medians)) / statistics.median(pooled(rounds)))
    return max(spreads, default=None)


def aa_band(candidate: list[list[float]], baseline: list[list[float]], repeated: list[list[list[float]]] | None = None) -> float | None:
    """How far the ratio of two equal arms may lie from 1, either way: within 1 / (1 + band) and 1 + band. None where no arm has two rounds.

    Student's t bound on the difference of the arms' mean log medians, one median for each boot (the rounds that are compared), variance pooled over both
    arms: with two boots each, 2 degrees of freedom. In logarithms, so that exchanged arms get the mirrored answer. Never less than what `repeated` rounds
    (as in noise_floor) differ by.
    """
    from scipy.stats import t

    logs = [[math.log(statistics.median(values)) for values in rounds if values] for rounds in (candidate, baseline)]
    freedom = sum(len(one) - 1 for one in logs)
    if freedom < 1:
        return None
    variance = sum((value - statistics.fmean(one)) ** 2 for one in logs for value in one) / freedom
    bound = float(t.isf(OUTSIDE_BAND / 2, freedom)) * math.sqrt(variance * sum(1 / len(one) for one in logs))
    again = [[statistics.median(values) for values in rounds if values] for rounds in repeated or []]
    return max([math.expm1(bound), *(max(medians) / min(medians) - 1 for medians in again if medians)])


def bootstrap_interval(candidate: list[list[float]], baseline: list[list[float]], level: float = 0.90) -> tuple[float, float]:
    """Percentile interval of the ratio of medians, resampled within rounds. A fixed seed makes it repeatable."""
    import numpy as np

    medians = []
    for arm, rounds in enumerate((candidate, baseline)):
        drawn = [np.array(values)[_resamples(len(values), arm, place)] for place, values in enumerate(rounds)]
        medians.append(np.median(np.concatenate(drawn, axis=1), axis=1))
    ratios = np.sort(medians[0] / medians[1])
    tail = (1 - level) / 2
    return float(ratios[int(tail * BOOTSTRAP_DRAWS)]), float(ratios[int((1 - tail) * BOOTSTRAP_DRAWS) - 1])


@lru_cache(maxsize=64)
def _resamples(count: int, arm: int, place: int):
    """Indices of BOOTSTRAP_DRAWS resamples of so many values. Python's own generator gives the same ones with every release of numpy."""
    import numpy as np

    draw = random.Random(f"{SEED}/{count}/{arm}/{place}")
    return np.array([draw.choices(range(count), k=count) for _ in range(BOOTSTRAP_DRAWS)])


def both(candidate: list[list[float]], baseline: list[list[float]]) -> tuple[list[list[float]], list[list[float]]]:
    """The rounds in which both arms have a sound value: only there can labels be exchanged."""
    pairs = [(ours, theirs) for ours, theirs in zip(candidate, baseline, strict=True) if ours and theirs]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


def compare(
    metric: str, candidate: list[list[float]], baseline: list[list[float]], max_p: float, repeated: list[list[list[float]]] | None = None
) -> Comparison:
    """Compare two arms in one metric; each list holds one list of sound values per round; repeated as in noise_floor.

    'faster' or 'slower': p < max_p and the difference of medians outside the A/A band. 'same': the 90% interval lies inside the noise floor as seen,
    and that is at most WIDEST_SAME. Else 'cannot tell', also where nothing was measured twice, so that there is no floor.
    Raises NoSamples where no round has values of both arms.
    """
    for name, rounds in (("candidate", candidate), ("baseline", baseline)):
        if not pooled(rounds):
            raise NoSamples(f"{metric}: no sound sample of the {name}")
    spread, band = noise_floor(candidate, baseline, repeated), aa_band(candidate, baseline, repeated)
    candidate, baseline = both(candidate, baseline)
    if not candidate:
        raise NoSamples(f"{metric}: no round with sound samples of both arms")
    ours, theirs = statistics.median(pooled(candidate)), statistics.median(pooled(baseline))
    ratio, p = ours / theirs, permutation_p(candidate, baseline)
    low, high = bootstrap_interval(candidate, baseline)
    if band is not None and p < max_p and max(ratio, 1 / ratio) - 1 > band:
        answer = "faster" if ratio > 1 else "slower"
    elif spread is not None and spread <= WIDEST_SAME and 1 - spread <= low and high <= 1 + spread:
        answer = "same"
    else:
        answer = "cannot tell"
    more = would_decide(candidate, baseline, max_p, p, spread, band, (low, high)) if answer == "cannot tell" else None
    return Comparison(metric, ours, theirs, ratio, p, spread, band, (low, high), answer, more)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm's step-down adjustment of several p-values."""
    adjusted, running = {}, 0.0
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    for rank, (metric, p) in enumerate(ordered):
        running = max(running, min(1.0, p * (len(ordered) - rank)))
        adjusted[metric] = running
    return adjusted


def sentence(primary: Comparison, expectation: str, names: dict[str, str]) -> str:
    """The verdict on speed in one line: what was found, how sure, whether it was expected, and what would decide where it cannot be told."""
    ours, theirs = names["candidate"], names["baseline"]
    found = f"{ours} is {primary.answer} than {theirs}" if primary.answer in ("faster", "slower") else f"{ours} against {theirs}: {primary.answer}"
    agrees = "as expected" if primary.answer == expectation else f"expected was '{expectation}'" if expectation else "nothing was expected"
    figures = f"{primary.candidate_median:.1f} against {primary.baseline_median:.1f} tok/s, x{primary.ratio:.2f}, p = {primary.p_value:.3f}"
    # 'Same' is worth no more than the floor it is said within.
    more = f" ({primary.more.words})" if primary.more else f" (within a noise floor of ±{primary.spread:.1%})" if primary.answer == "same" else ""
    return f"{found} in {metric_label(primary.metric)}: {figures}; {agrees}{more}"
