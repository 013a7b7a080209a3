"""The statistics of the verdict: against scipy, against labellings written out one by one, and by hand."""

import itertools
import random
import statistics

import numpy as np
import pytest
from scipy import stats

from fieldbook import verdict


def slow_p(candidate, baseline):
    """Every relabelling within rounds, written out: the share whose difference of means is at least as large as the observed one."""
    observed = abs(np.mean(sum(candidate, [])) - np.mean(sum(baseline, [])))
    ways = []
    for ours, theirs in zip(candidate, baseline, strict=True):
        together = ours + theirs
        ways.append(
            [
                ([together[i] for i in chosen], [together[i] for i in range(len(together)) if i not in chosen])
                for chosen in itertools.combinations(range(len(together)), len(ours))
            ]
        )
    hits = total = 0
    for labelling in itertools.product(*ways):
        one, other = sum((w[0] for w in labelling), []), sum((w[1] for w in labelling), [])
        total += 1
        hits += bool(abs(np.mean(one) - np.mean(other)) >= observed - 1e-9)
    return hits / total


def test_by_hand_two_against_two():
    # 1, 2 against 3, 4: six labellings with mean differences -2, -1, 0, 0, 1, 2: two are as large as 2.
    assert verdict.permutation_p([[1, 2]], [[3, 4]]) == 2 / 6
    # 1, 3 against 2, 4: the difference is 1, and four of the six are at least that.
    assert verdict.permutation_p([[1, 3]], [[2, 4]]) == 4 / 6


def test_smallest_p_of_the_protocol_is_two_in_four_hundred():
    low, high = [[1, 2, 3], [1.5, 2.5, 3.5]], [[10, 11, 12], [10.5, 11.5, 12.5]]
    assert verdict.permutation_p(high, low) == verdict.permutation_p(low, high) == 2 / 400


def test_labels_are_exchanged_within_rounds_only():
    # Round 2 is ten times faster for both arms. Unblocked, the shift would drown the arms' difference; blocked it does not matter.
    candidate, baseline = [[1.1, 1.2, 1.3], [11.1, 11.2, 11.3]], [[1.0, 0.9, 0.8], [11.0, 10.9, 10.8]]
    assert verdict.permutation_p(candidate, baseline) == 2 / 400
    together = [verdict.pooled(candidate)], [verdict.pooled(baseline)]
    assert verdict.permutation_p(*together) > 0.3


@pytest.mark.parametrize("seed", range(6))
def test_one_round_against_scipy(seed):
    draw = random.Random(seed)
    ours, theirs = [draw.gauss(10, 1) for _ in range(draw.randint(2, 6))], [draw.gauss(10.7, 1) for _ in range(draw.randint(2, 6))]
    exact = stats.permutation_test(
        (ours, theirs), lambda a, b: abs(np.mean(a) - np.mean(b)), permutation_type="independent", n_resamples=np.inf, alternative="greater"
    )
    assert verdict.permutation_p([ours], [theirs]) == pytest.approx(exact.pvalue, abs=1e-12)


@pytest.mark.parametrize("shape", [((3, 3), (3, 3)), ((3, 2), (3, 3)), ((1, 3), (2, 3)), ((3, 3, 2), (2, 3, 2))])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_any_size_against_all_labellings(shape, seed):
    draw = random.Random(seed)
    candidate, baseline = [[[draw.choice((5, 5.5, 6, 7.25, 9)) for _ in range(n)] for n in sizes] for sizes in shape]
    assert verdict.permutation_p(candidate, baseline) == pytest.approx(slow_p(candidate, baseline), abs=1e-12)


def test_equal_samples_have_p_one():
    assert verdict.permutation_p([[5, 5, 5]], [[5, 5, 5]]) == 1
    assert verdict.permutation_p([[0.1, 0.2, 0.3]], [[0.3, 0.2, 0.1]]) == 1


@pytest.mark.parametrize(
    ("candidate", "baseline"),
    [([[0.1 + 0.2]], [[0.3]]), ([[1000.1, 1000.2, 1000.3]], [[1000.1, 1000.2, 1000.3000001]]), ([[1e6 + 0.1, 1e6 + 0.7]], [[1e6 + 0.3, 1e6 + 0.5 + 1e-7]])],
)
def test_p_is_never_below_one_labelling(candidate, baseline):
    # The observed labelling is one of them and always counts, also where the sums differ only in their last bits.
    labellings = len(list(itertools.combinations(range(len(candidate[0]) * 2), len(candidate[0]))))
    assert verdict.permutation_p(candidate, baseline) >= 1 / labellings


def test_p_does_not_depend_on_the_unit():
    candidate, baseline = [[5.1, 5.3, 5.2], [5.0, 5.4, 5.6]], [[5.0, 5.2, 4.9], [5.3, 4.8, 5.05]]
    p = verdict.permutation_p(candidate, baseline)
    for scale in (1e-6, 1e6):
        assert verdict.permutation_p(*[[[v * scale for v in values] for values in arm] for arm in (candidate, baseline)]) == p


def test_aa_band_by_hand():
    # Candidate medians 10 and 11, pooled median of 9, 10, 11, 10, 11, 12 is 10.5: 1 / 10.5. Baseline medians 20 and 20.5: 0.5 / 20.25 is less.
    assert verdict.aa_band([[9, 10, 11], [10, 11, 12]], [[19, 20, 21], [19.5, 20.5, 21.5]]) == pytest.approx(1 / 10.5)
    assert verdict.aa_band([[5, 5, 5], [5, 5, 5]], [[7], [7]]) == 0


def test_bootstrap_interval_brackets_the_ratio_and_repeats():
    draw = random.Random(1)
    candidate, baseline = [[draw.gauss(20, 1) for _ in range(3)] for _ in range(2)], [[draw.gauss(10, 0.5) for _ in range(3)] for _ in range(2)]
    low, high = verdict.bootstrap_interval(candidate, baseline)
    ratio = statistics.median(verdict.pooled(candidate)) / statistics.median(verdict.pooled(baseline))
    assert low <= ratio <= high and (low, high) == verdict.bootstrap_interval(candidate, baseline)
    assert verdict.bootstrap_interval([[4, 4], [4, 4]], [[2, 2], [2, 2]]) == (2, 2)


def test_bootstrap_interval_against_every_resample():
    # One round of two against a constant: medians of resamples of (1, 2) are 1, 1.5, 1.5, 2, a quarter each but the middle. So 5% and 95% are 1 and 2,
    # while half of the resamples (1.5) lie between 25% and 75%.
    assert verdict.bootstrap_interval([[1, 2]], [[1, 1]]) == (1, 2)
    assert verdict.bootstrap_interval([[1, 2]], [[1, 1]], level=0.40) == (1.5, 1.5)


def test_bootstrap_resamples_within_rounds():
    # Each round is constant, so nothing can vary; drawing from the pool of both would.
    assert verdict.bootstrap_interval([[1, 1, 1], [3, 3, 3]], [[1, 1, 1], [1, 1, 1]]) == (2, 2)


FAST, SLOW = [[20.0, 20.2, 20.1], [20.1, 20.3, 20.2]], [[10.0, 10.2, 10.1], [10.1, 10.3, 10.2]]


def test_faster_and_slower():
    faster, slower = verdict.compare("m", FAST, SLOW, 0.05), verdict.compare("m", SLOW, FAST, 0.05)
    assert (faster.answer, slower.answer) == ("faster", "slower")
    assert faster.p_value == slower.p_value == 0.005
    # Pooled medians: 20, 20.1, 20.1, 20.2, 20.2, 20.3 -> 20.15; and 10.15.
    assert (faster.candidate_median, faster.baseline_median) == (pytest.approx(20.15), pytest.approx(10.15))
    assert faster.ratio == pytest.approx(20.15 / 10.15) and slower.ratio == pytest.approx(10.15 / 20.15)


def test_p_at_the_limit_is_no_difference():
    assert verdict.compare("m", FAST, SLOW, 0.005).answer == "cannot tell"


def test_same_needs_the_interval_inside_the_band():
    # Rounds of each arm differ by 10% (the band), the arms do not differ at all, so the interval stays inside.
    rounds = [[10.0, 10.0, 10.0], [11.0, 11.0, 11.0]]
    result = verdict.compare("m", rounds, rounds, 0.05)
    assert result.answer == "same" and result.p_value == 1 and result.aa_band == pytest.approx(1 / 10.5)


def test_cannot_tell_when_the_interval_leaves_the_band():
    # No drift between rounds, so the band is nothing, but samples spread: neither a difference nor sameness is shown.
    noisy = [[8.0, 10.0, 12.0], [8.0, 10.0, 12.0]]
    assert verdict.compare("m", noisy, [[9.0, 10.0, 11.5], [9.0, 10.0, 11.5]], 0.05).answer == "cannot tell"


def test_a_sure_difference_inside_the_band_is_not_called_one():
    # All candidate values above all baseline values in each round (p = 2/400), but each arm drifts by 20% from round to round.
    result = verdict.compare("m", [[10.1, 10.2, 10.3], [12.1, 12.2, 12.3]], [[9.9, 9.8, 9.7], [11.9, 11.8, 11.7]], 0.05)
    assert result.p_value == 0.005 and abs(result.ratio - 1) < result.aa_band
    assert result.answer in ("same", "cannot tell")


def test_one_value_a_round_can_never_be_called_different():
    assert verdict.compare("m", [[20.0], [20.0]], [[10.0], [10.0]], 0.05).answer != "faster"


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04; step-down never falls: 0.04, 0.06, 0.06, 0.06.
    adjusted = verdict.holm({"c": 0.03, "a": 0.01, "d": 0.04, "b": 0.02})
    assert adjusted == {"a": pytest.approx(0.04), "b": pytest.approx(0.06), "c": pytest.approx(0.06), "d": pytest.approx(0.06)}
    assert verdict.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert verdict.holm({"a": 0.2}) == {"a": 0.2} and verdict.holm({}) == {}


def test_sentence():
    result = verdict.compare("decode_c4_tok_s", [[20.0, 20.4, 20.2], [20.0, 20.4, 20.2]], [[10.0, 10.2, 10.1], [10.0, 10.2, 10.1]], 0.05)
    line = verdict.sentence(result, "faster", {"candidate": "PP2 15+15", "baseline": "PP1"})
    assert line == "PP2 15+15 is faster than PP1 in decode, 4 streams: 20.2 against 10.1 tok/s, x2.00, p = 0.005; as expected"
    assert verdict.sentence(result, "slower", {"candidate": "A", "baseline": "B"}).endswith("; expected was 'slower'")
    same = verdict.compare("decode_c2_tok_s", [[10.0] * 3, [11.0] * 3], [[10.0] * 3, [11.0] * 3], 0.05)
    assert verdict.sentence(same, "same", {"candidate": "A", "baseline": "B"}).startswith("A against B: same in decode, 2 streams: ")
