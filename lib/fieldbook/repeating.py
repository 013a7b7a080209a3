"""What would decide a comparison that cannot be told: so many repetitions, or no number of them, and why."""

import math
import statistics
from dataclasses import dataclass

POWER = 0.8
MOST_REPETITIONS = 1000
# A wider noise floor holds nothing that could be called the same: on a busy machine boots of one arm differed by 70%, and a slowdown of 30% lay within.
WIDEST_SAME = 0.10


@dataclass(frozen=True)
class More:
    """repetitions: of each point, per round and arm, that would decide with a probability of POWER; None where no number would. words: the same for people."""

    repetitions: int | None
    words: str


def least_repetitions(rounds: int, max_p: float) -> int:
    """Fewest repetitions per round and arm with which the permutation test can go below max_p at all: two labellings of C(2n, n)^rounds are the extremes.

    3 for two rounds at 0.05 (2 of 400), 4 for one round (2 of 70).
    """
    n = 1
    while 2 / math.comb(2 * n, n) ** rounds >= max_p:
        n += 1
    return n


def to_differ(candidate: list[list[float]], baseline: list[list[float]], max_p: float) -> int | None:
    """Repetitions per round and arm after which the test would call a difference as large as the observed one with probability POWER.

    Normal approximation: the difference of means over R rounds of n has the variance 2 s^2 / (R n), s^2 pooled within rounds and arms; so
    n = 2 s^2 (z(max_p / 2) + z(POWER))^2 / (R D^2). Never fewer than least_repetitions. None where the observed difference is nothing.
    """
    from scipy.stats import norm

    difference = abs(statistics.fmean(v for r in candidate for v in r) - statistics.fmean(v for r in baseline for v in r))
    if not difference:
        return None
    groups = [values for arm in (candidate, baseline) for values in arm if len(values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    variance = sum((len(values) - 1) * statistics.variance(values) for values in groups) / freedom if freedom else 0.0
    needed = 2 * variance * (norm.isf(max_p / 2) + norm.ppf(POWER)) ** 2 / (len(candidate) * difference**2)
    return max(math.ceil(needed), least_repetitions(len(candidate), max_p))


def to_be_same(repetitions: int, ratio: float, interval: tuple[float, float], spread: float) -> int | None:
    """Repetitions after which the interval around this ratio would lie within the noise floor: it narrows as the root of their number.

    None where the ratio itself lies outside, or on its edge, and where the floor is wider than WIDEST_SAME.
    """
    room = [spread - (ratio - 1), spread + (ratio - 1)]
    if min(room) <= 0 or spread > WIDEST_SAME:
        return None
    widths = [interval[1] - ratio, ratio - interval[0]]
    return max(math.ceil(repetitions * (width / have) ** 2) for width, have in zip(widths, room, strict=True))


def would_decide(
    candidate: list[list[float]],
    baseline: list[list[float]],
    max_p: float,
    p_value: float,
    spread: float | None,
    band: float | None,
    interval: tuple[float, float],
) -> More:
    """What would decide: arguments as verdict.compare has them; spread is the noise floor as seen, band what equal arms stay within.

    Outside the band more repetitions sharpen the test; inside the noise floor they narrow the interval until it says 'same'. Between the two, and where the
    test is sure already, no number of them helps: what is seen there may be the boots, and only more of these (or a quieter box) make the band smaller.
    """
    if spread is None or band is None:
        return More(None, "no number of repetitions would decide: no arm was measured twice, so nothing tells what changes by itself; a second boot would")
    ours, theirs = (statistics.median(v for r in arm for v in r) for arm in (candidate, baseline))
    ratio, now = ours / theirs, min(len(values) for arm in (candidate, baseline) for values in arm)
    outside = max(ratio, 1 / ratio) - 1 > band
    needed = to_differ(candidate, baseline, max_p) if outside else to_be_same(now, ratio, interval, spread)
    if needed is None or (not outside and p_value < max_p):
        inside = f"a ratio of {ratio:.3f} lies within the A/A band of {1 / (1 + band):.3f} to {1 + band:.3f}"
        return More(None, f"no number of repetitions would decide: {inside}; more boots or a quieter box would make the band smaller")
    # Nearly enough is not enough: it was not told with as many as there are.
    needed = max(needed, now + 1)
    if needed > MOST_REPETITIONS:
        return More(None, f"not even {MOST_REPETITIONS:,} repetitions would decide: samples of one round differ by too much; a quieter box would")
    return More(needed, f"{needed} repetitions per round and arm would decide")
