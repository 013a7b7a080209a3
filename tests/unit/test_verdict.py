"""The statistics of the verdict: against scipy, against labellings written out one by one, and by hand."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from scipy import stats

from fieldbook import repeating, verdict
from fieldbook.errors import NoSamples


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


def test_noise_floor_by_hand():
    # Candidate medians 10 and 11, pooled median of 9, 10, 11, 10, 11, 12 is 10.5: 1 / 10.5. Baseline medians 20 and 20.5: 0.5 / 20.25 is less.
    assert verdict.noise_floor([[9, 10, 11], [10, 11, 12]], [[19, 20, 21], [19.5, 20.5, 21.5]]) == pytest.approx(1 / 10.5)
    assert verdict.noise_floor([[5, 5, 5], [5, 5, 5]], [[7], [7]]) == 0
    # More rounds of some boot count as well, empty ones do not, and one round alone tells nothing.
    assert verdict.noise_floor([[5], [5]], [[7], [7]], [[[4], [6], []]]) == pytest.approx(2 / 5)
    assert verdict.noise_floor([[5, 6], []], [[7]]) is None


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
    found = verdict.compare("m", FAST, SLOW, 0.005)
    assert found.answer == "cannot tell" and found.more.repetitions == 4


def test_same_needs_the_interval_inside_the_band():
    # Rounds of each arm differ by 10% (the band), the arms do not differ at all, so the interval stays inside.
    rounds = [[10.0, 10.0, 10.0], [11.0, 11.0, 11.0]]
    result = verdict.compare("m", rounds, rounds, 0.05)
    assert result.answer == "same" and result.p_value == 1 and result.spread == pytest.approx(1 / 10.5)
    # Both arms' log medians are ln 10 and ln 11: s^2 = 2 (ln 1.1)^2 / 2 / 2, times (1/2 + 1/2), and t of 2 degrees of freedom.
    bound = stats.t.isf(0.0175, 2) * math.log(1.1) / math.sqrt(2)
    assert result.aa_band == pytest.approx(math.exp(bound) - 1) and result.more is None


def test_nothing_is_the_same_where_boots_of_one_arm_are_far_apart():
    # As seen on a machine with a load average of ten: a planted slowdown of 30%, and boots of the baseline that differ by 70%.
    found = verdict.compare("m", [[13.9, 14.0, 14.1], [14.0, 14.2, 14.4]], [[14.0, 14.1, 14.2], [27.9, 28.0, 28.1]], 0.05)
    assert found.spread > 0.5 and found.answer == "cannot tell" and found.more.repetitions is None
    rounds = [[10.0] * 3, [12.0] * 3]
    assert verdict.compare("m", rounds, rounds, 0.05).answer == "cannot tell"


def test_cannot_tell_when_the_interval_leaves_the_band():
    # No drift between rounds, so the band is nothing, but samples spread: neither a difference nor sameness is shown.
    noisy = [[8.0, 10.0, 12.0], [8.0, 10.0, 12.0]]
    assert verdict.compare("m", noisy, [[9.0, 10.0, 11.5], [9.0, 10.0, 11.5]], 0.05).answer == "cannot tell"


def test_a_sure_difference_inside_the_band_is_not_called_one():
    # All candidate values above all baseline values in each round (p = 2/400), but each arm drifts by 20% from round to round.
    result = verdict.compare("m", [[10.1, 10.2, 10.3], [12.1, 12.2, 12.3]], [[9.9, 9.8, 9.7], [11.9, 11.8, 11.7]], 0.05)
    assert result.p_value == 0.005 and abs(result.ratio - 1) < result.aa_band
    assert result.answer in ("same", "cannot tell")


def test_the_band_is_wider_than_the_noise_floor():
    # 14% apart in each round (p = 2/400), and boots of one arm differ by 8%: more than the floor, less than two equal arms may.
    result = verdict.compare("m", [[11.9, 12, 12.1], [12.9, 13, 13.1]], [[10.4, 10.5, 10.6], [11.2, 11.3, 11.4]], 0.05)
    assert result.p_value == 0.005 and result.spread < abs(result.ratio - 1) < result.aa_band
    assert result.answer == "cannot tell" and result.more.repetitions is None and "lies within the A/A band" in result.more.words


def boots(draw, mean, boot, within, repetitions=3):
    """Two boots of one arm: each with a speed of its own, samples around it."""
    speeds = [mean * (1 + draw.gauss(0, boot)) for _ in range(2)]
    return [[speed * (1 + draw.gauss(0, within)) for _ in range(repetitions)] for speed in speeds]


@pytest.mark.parametrize(("boot", "within"), [(0.05, 0.001), (0.03, 0.02), (0.01, 0.05)])
def test_equal_arms_are_called_different_in_at_most_one_verdict_of_twenty(boot, within):
    draw = random.Random(1)
    answers = [verdict.compare("m", boots(draw, 20, boot, within), boots(draw, 20, boot, within), 0.05).answer for _ in range(500)]
    assert sum(answer in ("faster", "slower") for answer in answers) <= 25


def test_exchanged_arms_get_the_mirrored_answer():
    draw = random.Random(4)
    mirrored = {"faster": "slower", "slower": "faster", "cannot tell": "cannot tell"}
    for _ in range(200):
        ours, theirs = boots(draw, 15, 0.04, 0.02), boots(draw, 20, 0.04, 0.02)
        one, other = verdict.compare("m", ours, theirs, 0.05), verdict.compare("m", theirs, ours, 0.05)
        assert other.answer == mirrored[one.answer] and other.aa_band == pytest.approx(one.aa_band)


def test_more_boots_make_the_band_smaller():
    two, four = [[10.0], [10.4]], [[10.0], [10.4], [10.0], [10.4]]
    assert verdict.aa_band(four, four) < 0.5 * verdict.aa_band(two, two)
    # But never smaller than what rounds on one boot differ by.
    assert verdict.aa_band(four, four, [[[10.0], [15.0]]]) == pytest.approx(0.5)


def test_with_the_noise_floor_as_band_they_would_be_in_one_of_five(monkeypatch):
    monkeypatch.setattr(verdict, "aa_band", verdict.noise_floor)
    draw = random.Random(1)
    answers = [verdict.compare("m", boots(draw, 20, 0.05, 0.001), boots(draw, 20, 0.05, 0.001), 0.05).answer for _ in range(1000)]
    assert 150 < sum(answer in ("faster", "slower") for answer in answers) < 280


@pytest.mark.parametrize(("boot", "within", "least"), [(0.01, 0.02, 1.0), (0.02, 0.02, 0.99), (0.05, 0.02, 0.6)])
def test_a_planted_slowdown_of_30_percent_is_called(boot, within, least):
    # Always, where boots differ by what they do on a quiet machine; on a busy one it may not be told, but is never called the other thing.
    draw, answers = random.Random(2), []
    for _ in range(1000):
        slow, base = boots(draw, 14, boot, within), boots(draw, 20, boot, within)
        answers.append(verdict.compare("m", slow, base, 0.05).answer)
    assert set(answers) <= {"slower", "cannot tell"} and answers.count("slower") >= least * len(answers)
    assert verdict.compare("m", base, slow, 0.05).answer in ("faster", "cannot tell")


def test_a_round_without_a_sound_sample_of_one_arm_is_left_out():
    found = verdict.compare("m", [[20.0, 20.2, 20.1], []], SLOW, 0.05)
    # Three against three alone: 2 of 20 labellings.
    assert found.p_value == 0.1 and found.answer == "cannot tell" and found.more.repetitions == 4


@pytest.mark.parametrize(("candidate", "baseline", "who"), [([[], []], SLOW, "candidate"), (FAST, [[], []], "baseline"), ([[1.0], []], [[], [1.0]], "both")])
def test_an_arm_without_any_is_said_in_one_line(candidate, baseline, who):
    with pytest.raises(NoSamples, match=who):
        verdict.compare("decode_c4_tok_s", candidate, baseline, 0.05)


def test_one_boot_each_has_no_noise_floor():
    found = verdict.compare("m", [FAST[0]], [SLOW[0]], 0.5)
    assert (found.spread, found.aa_band, found.answer) == (None, None, "cannot tell")
    assert found.more.repetitions is None and "no arm was measured twice" in found.more.words


def test_equal_values_throughout_are_the_same():
    found = verdict.compare("m", [[5.0] * 3] * 2, [[5.0] * 3] * 2, 0.05)
    assert (found.answer, found.ratio, found.p_value, found.aa_band, found.interval) == ("same", 1, 1, 0, (1, 1))


def test_a_band_of_nothing_lets_any_sure_difference_through():
    # Boots that agree to the last bit: whatever the arms differ by is no chance.
    found = verdict.compare("m", [[5.1, 5.2, 5.3]] * 2, [[5.0, 4.9, 4.8]] * 2, 0.05)
    assert (found.spread, found.answer) == (0, "faster")


def slow_estimate(candidate, baseline, draws=20_000):
    """The same p-value, from shuffles made here."""
    draw, observed = random.Random(5), abs(np.mean(sum(candidate, [])) - np.mean(sum(baseline, [])))
    hits = 0
    for _ in range(draws):
        shuffled = [draw.sample(a + b, len(a + b)) for a, b in zip(candidate, baseline, strict=True)]
        ours, theirs = (sum((r[: len(r) // 2] if first else r[len(r) // 2 :] for r in shuffled), []) for first in (True, False))
        hits += abs(sum(ours) - sum(theirs)) / len(ours) >= observed - 1e-9
    return hits / draws


def test_many_repetitions_are_drawn_from_the_labellings():
    ours, theirs = [[1.0 + 0.1 * i for i in range(14)]] * 2, [[1.05 + 0.1 * i for i in range(14)]] * 2
    p = verdict.permutation_p(ours, theirs)
    assert p == verdict.permutation_p(ours, theirs) and abs(p - slow_estimate(ours, theirs)) < 0.01
    assert verdict.permutation_p([[v + 100 for v in values] for values in ours], theirs) < 1e-4


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
    assert verdict.sentence(same, "same", {"candidate": "A", "baseline": "B"}).endswith("; as expected (within a noise floor of ±9.5%)")
    unknown = verdict.compare("decode_c2_tok_s", FAST, SLOW, 0.005)
    line = verdict.sentence(unknown, "", {"candidate": "A", "baseline": "B"})
    assert line.endswith("; nothing was expected (4 repetitions per round and arm would decide)")


def test_least_repetitions_by_hand():
    # 2 / C(6,3)^2 = 0.005 and 2 / C(4,2)^2 = 0.056; one round: 2 / C(8,4) = 0.029 and 2 / C(6,3) = 0.1.
    assert (repeating.least_repetitions(2, 0.05), repeating.least_repetitions(1, 0.05), repeating.least_repetitions(2, 0.005)) == (3, 4, 4)


def test_repetitions_to_differ_by_hand():
    # Within each round and arm the variance is 1, the means differ by 1: n = 2 * (1.96 + 0.8416)^2 / 2 = 7.85.
    assert repeating.to_differ([[9, 10, 11], [9, 10, 11]], [[10, 11, 12], [10, 11, 12]], 0.05) == 8
    assert repeating.to_differ([[9, 10, 11]], [[9, 10, 11]], 0.05) is None
    # One value in a round tells no variance: then only what the test can reach counts.
    assert repeating.to_differ([[9.0], [9.1]], [[10.0], [10.1]], 0.05) == 3


def test_so_many_repetitions_do_decide():
    # What it says for a weak difference, taken at its word: the test calls it in about 8 of 10.
    draw = random.Random(3)
    rounds = [[9.0, 10.0, 11.0]] * 2, [[10.0, 11.0, 12.0]] * 2
    n = repeating.to_differ(*rounds, 0.05)
    hits = 0
    for _ in range(60):
        ours, theirs = ([[draw.gauss(mean, 1) for _ in range(n)] for _ in range(2)] for mean in (10, 11))
        hits += verdict.permutation_p(ours, theirs) < 0.05
    assert 40 <= hits <= 57


def test_repetitions_to_be_the_same():
    # The interval reaches 1/16 to either side of 1, the floor 1/32: half as wide takes four times as many.
    assert repeating.to_be_same(3, 1.0, (0.9375, 1.0625), 0.03125) == 12
    assert repeating.to_be_same(3, 1.02, (0.98, 1.06), 0.02) is None and repeating.to_be_same(3, 1.0, (0.9, 1.1), 0.0) is None


def test_samples_that_spread_too_far_are_not_asked_for_without_end():
    found = verdict.compare("m", [[1.0, 100.0, 50.0], [50.5, 100.0, 1.0]], [[1.0, 101.0, 50.0], [50.0, 101.0, 1.0]], 0.05)
    assert found.answer == "cannot tell" and found.more.repetitions is None
