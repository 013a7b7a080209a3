"""Benchmark arithmetic on timelines built by hand, the reasons that void a sample, and the schedule."""

import math

import pytest

from fieldbook import bench, ceilings, memory, paths
from fieldbook.arms import probe_problems
from fieldbook.errors import BadInput
from fieldbook.inventory.model import Host, Inventory


def steady(start, ttft, gap, events):
    """A stream: request at `start`, first token `ttft` later, then `events` more, `gap` apart."""
    return start, ttft, [gap] * events


def rate(*streams, counts=None):
    starts, ttfts, gaps = zip(*streams, strict=True)
    return bench.decode_tok_s(list(starts), list(ttfts), list(gaps), counts or [len(g) + 1 for g in gaps])


def test_one_stream_counts_the_intervals():
    # 31 intervals of 0.05 s: 20 tok/s, however long the prompt took.
    assert rate(steady(0, 1.5, 0.05, 31)) == pytest.approx(20)
    # Uneven gaps 0.1, 0.3, 0.2: three tokens in 0.6 s.
    assert rate((0, 1, [0.1, 0.3, 0.2])) == pytest.approx(5)


def test_streams_in_step_add_up():
    assert rate(*[steady(0, 1, 0.1, 10)] * 4) == pytest.approx(40)


def test_only_the_time_when_all_decode_counts():
    # A: tokens at 1.0, 1.1, ..., 3.0 (10 a second). B: at 2.0, 2.1, ..., 4.0. Between 2.0 (excluded) and 3.0 (included) each has ten: 20 tok/s.
    # A token of the start-up of either, when it runs alone, would make it less.
    assert rate(steady(0, 1, 0.1, 20), steady(0.5, 1.5, 0.1, 20)) == pytest.approx(20, rel=0.06)
    # The same with binary fractions, where the sums are exact. A: 1, 1.25, ..., 3. B: 2, 2.25, ..., 4.
    assert rate(steady(0, 1, 0.25, 8), steady(0.5, 1.5, 0.25, 8)) == 8


def test_a_slow_start_of_one_stream_does_not_lower_the_rate():
    # Three streams wait 2 s for the fourth; the window is 2.0 to 3.0 with 4 tokens a second each.
    assert rate(*[steady(0, 1, 0.25, 8)] * 3, steady(0, 2, 0.25, 8)) == 16


def test_start_times_are_used():
    # Same ttft, but the second request was sent a second later: tokens 1, 1.25, ..., 3 and 2, ..., 4.
    assert rate(steady(0, 1, 0.25, 8), steady(1, 1, 0.25, 8)) == 8
    # Absolute clocks (perf_counter is some large number) change nothing.
    assert rate(steady(1024, 1, 0.25, 8), steady(1025, 1, 0.25, 8)) == 8


def test_events_that_carry_several_tokens():
    # 5 events after the first, 11 tokens by the server's count: 10 tokens in 5 x 0.5 s = 4 tok/s.
    assert rate(steady(0, 1, 0.5, 5), counts=[11]) == pytest.approx(4)
    # Two streams, one with two tokens an event: window 1 to 3.5, 5 + 10 tokens in 2.5 s.
    assert rate(steady(0, 1, 0.5, 5), steady(0, 1, 0.5, 5), counts=[6, 11]) == pytest.approx(6)


def test_streams_of_different_speed():
    # A: 1, 1.25, ..., 3 (8 intervals). B: 1, 1.5, ..., 5. Window 1 to 3: 8 and 4 tokens in 2 s.
    assert rate(steady(0, 1, 0.25, 8), steady(0, 1, 0.5, 8)) == 6


def test_streams_that_never_overlap_have_no_rate():
    assert rate(steady(0, 1, 0.25, 4), steady(5, 1, 0.25, 4)) == 0.0
    # Touching in one instant is no overlap either: the first ends at 2, the second starts at 2.
    assert rate(steady(0, 1, 0.25, 4), steady(1, 1, 0.25, 4)) == 0.0


def test_a_stream_with_one_event_or_none_has_no_rate():
    assert rate((0, 1, [])) == 0.0
    assert rate(steady(0, 1, 0.25, 4), (0, 1, [])) == 0.0


def test_stream_lists_must_match():
    with pytest.raises(ValueError, match="shorter|longer"):
        bench.decode_tok_s([0, 0], [1], [[0.1]], [2])


# Two streams of 32 prompt and 32 output tokens, as a sound server counts them.
BEFORE = {"prompt": 100.0, "generation": 50.0, "cache_queries": 100.0, "cache_hits": 10.0, "preemptions": 1.0}
AFTER = {"prompt": 164.0, "generation": 114.0, "cache_queries": 164.0, "cache_hits": 10.0, "preemptions": 1.0}
RESULT = {"errors": ["", ""], "output_lens": [32, 32]}


def reasons(result=None, after=None, value=10.0, ceiling=100.0):
    return bench.void_reasons({**RESULT, **(result or {})}, 32, 32, 2, BEFORE, {**AFTER, **(after or {})}, value, ceiling)


def test_a_sound_sample_has_no_reasons():
    assert reasons() == [] and reasons(ceiling=None) == [] and reasons(value=100.0) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"result": {"errors": ["", "Connection refused"]}}, "error: Connection refused"),
        ({"result": {"output_lens": [32, 31]}}, "output lengths [32, 31], expected 32 each"),
        ({"result": {"output_lens": [32]}}, "output lengths [32], expected 32 each"),
        ({"after": {"prompt": 165.0}}, "the server counted 65 prompt tokens, expected 64"),
        ({"after": {"generation": 113.0}}, "the server counted 63 generated tokens, expected 64"),
        ({"after": {"cache_hits": 11.0}}, "1 of 64 queried tokens came from the prefix cache"),  # 1 of 64 is 1.6%
        ({"after": {"preemptions": 3.0}}, "2 preemptions"),
        ({"value": 0.0}, "did not decode at the same time"),
        ({"value": math.nan}, "did not decode at the same time"),
        ({"value": 100.1}, "100.1 tok/s is above the ceiling of 100.0"),
    ],
)
def test_each_reason_voids(change, words):
    found = reasons(**change)
    assert len(found) == 1 and words in found[0]


def test_up_to_one_percent_of_cached_tokens_is_allowed():
    assert reasons(after={"cache_queries": 300.0, "cache_hits": 12.0}) == []  # 2 of 200
    assert len(reasons(after={"cache_queries": 300.0, "cache_hits": 13.0})) == 1


METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="smollm2"} 1234.0
vllm:prompt_tokens_total{engine="1",model_name="smollm2"} 1.0e+03
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:generation_tokens_total 32.0
vllm:prefix_cache_queries_total{engine="0"} 64.0
vllm:prefix_cache_hits_total{engine="0"} 0.0
"""


def test_counters_are_summed_over_engines_and_missing_ones_are_zero():
    assert bench.parse_counters(METRICS) == {"prompt": 2234.0, "generation": 32.0, "cache_queries": 64.0, "cache_hits": 0.0, "preemptions": 0}


def test_a_label_may_hold_any_character():
    assert bench.parse_counters('vllm:prompt_tokens_total{model_name="a}b c"} 5.0\n')["prompt"] == 5.0


def test_points_of_the_default_box(changed):
    assert bench.points(changed()) == [
        ("prefill_128_tok_s", 128, 1, 1),
        ("prefill_512_tok_s", 512, 1, 1),
        ("decode_c1_tok_s", 32, 32, 1),
        ("decode_c4_tok_s", 32, 32, 4),
    ]


def test_no_seed_is_used_twice():
    seeds = [
        bench.seed_of(arm, number, point, repetition)
        for arm in ("candidate", "baseline")
        for number in (1, 2)
        for point in range(20)
        for repetition in range(100)
    ]
    assert len(set(seeds)) == len(seeds)


def test_client_arguments(changed):
    words = bench.arguments(changed(), {"port": 4711}, 32, 33, 4, 99)
    options = dict(zip(words[::1], words[1:], strict=False))
    assert options["--base-url"] == "http://127.0.0.1:4711" and options["--model"] == "smollm2-135m-instruct"
    assert (options["--random-input-len"], options["--random-output-len"], options["--num-prompts"], options["--max-concurrency"], options["--seed"]) == (
        "32",
        "33",
        "4",
        "4",
        "99",
    )
    assert "--ignore-eos" in words and options["--num-warmups"] == "0"


class FakeServer:
    """Stands for server and client: counts what it is asked, answers with steady streams, and may go wrong in one sample."""

    def __init__(self, wrong_at=()):
        self.totals = dict.fromkeys(bench.COUNTERS, 0.0)
        self.calls, self.wrong_at = [], wrong_at

    def counters(self, state):
        return dict(self.totals)

    def run(self, words):
        options = dict(zip(words, words[1:], strict=False))
        prompt, output, streams = (int(options[key]) for key in ("--random-input-len", "--random-output-len", "--num-prompts"))
        self.calls.append((prompt, output, streams, int(options["--seed"])))
        self.totals["prompt"] += prompt * streams
        self.totals["cache_queries"] += prompt * streams
        self.totals["generation"] += output * streams
        if len(self.calls) in self.wrong_at:
            self.totals["cache_hits"] += prompt
        return {
            "ttfts": [0.5] * streams, "itls": [[0.25] * (output - 1)] * streams, "start_times": [7.0] * streams, "output_lens": [output] * streams,
            "input_lens": [prompt] * streams, "errors": [""] * streams,
        }  # fmt: skip


def test_a_round_warms_up_each_point_and_keeps_every_repetition(changed, monkeypatch):
    fake = FakeServer(wrong_at=(3,))
    monkeypatch.setattr(bench, "counters", fake.counters)
    said = []
    samples = bench.measure_round(changed(), {"port": 1}, fake.run, "candidate", 1, {"decode_c4_tok_s": 15.0}, said.append)
    # Four points, a warm-up and three repetitions each, in order, all with seeds of their own.
    assert [call[:3] for call in fake.calls] == [(128, 1, 1)] * 4 + [(512, 1, 1)] * 4 + [(32, 32, 1)] * 4 + [(32, 32, 4)] * 4
    assert len({call[3] for call in fake.calls}) == 16 and len(said) == 16
    assert [(s.metric, s.repetition) for s in samples] == [
        (m, r) for m in ("prefill_128_tok_s", "prefill_512_tok_s", "decode_c1_tok_s", "decode_c4_tok_s") for r in (1, 2, 3)
    ]
    # 128 tokens in 0.5 s; 4 events a second and stream.
    assert [s.value_tok_s for s in samples] == [256.0] * 3 + [1024.0] * 3 + [4.0] * 3 + [16.0] * 3
    # Call 3 is the second repetition of the first point (call 1 was the warm-up); the ceiling voids all of the last point.
    assert [s.repetition for s in samples if s.metric == "prefill_128_tok_s" and s.void] == [2]
    assert all("above the ceiling" in s.void[0] for s in samples[-3:]) and not any(s.void for s in samples[3:-3])
    assert samples[0].start_s == [0.0] and samples[-1].prompt_tokens == [32] * 4


def sample(arm="candidate", number=1, metric="decode_c1_tok_s", value=10.0, repetition=1, void=()):
    return bench.Sample(
        arm=arm, round=number, metric=metric, repetition=repetition, value_tok_s=value, ttft_s=[0.5], itl_s=[[0.1]], start_s=[0.0], output_tokens=[2],
        prompt_tokens=[3], load_average=0.5, void=list(void),
    )  # fmt: skip


def test_void_samples_are_never_averaged_in():
    samples = [
        sample(value=10),
        sample(value=12, repetition=2),
        sample(value=1e6, repetition=3, void=["why"]),
        sample(number=2, value=14),
        sample(arm="baseline", value=5),
    ]
    assert bench.values(samples, "candidate", "decode_c1_tok_s") == [10, 12, 14]
    assert bench.values(samples, "candidate", "decode_c1_tok_s", 1) == [10, 12] and bench.values(samples, "candidate", "decode_c1_tok_s", 2) == [14]
    rows = bench.summary_rows(samples, ["decode_c1_tok_s", "prefill_128_tok_s"])
    assert rows[0] == {"arm": "candidate", "metric": "decode_c1_tok_s", "samples": 3, "void": 1, "min": 10, "median": 12, "max": 14}
    assert rows[1] == {"arm": "candidate", "metric": "prefill_128_tok_s", "samples": 0, "void": 0, "min": None, "median": None, "max": None}
    assert rows[2]["arm"] == "baseline" and rows[2]["median"] == 5


def test_samples_by_round_as_the_verdict_takes_them():
    samples = [
        sample(value=10),
        sample(value=12, repetition=2),
        sample(number=2, value=14),
        sample(arm="baseline", value=5),
        sample(arm="baseline", number=2, value=6, void=["x"]),
    ]
    assert bench.by_round(samples, ["decode_c1_tok_s"]) == {"decode_c1_tok_s": {"candidate": [[10, 12], [14]], "baseline": [[5], []]}}


def test_samples_are_kept_once_however_often_a_round_is_measured(tmp_path):
    file = tmp_path / "samples.jsonl"
    assert bench.read_samples(file) == []
    bench.keep_samples(file, [sample(value=1), sample(value=2, repetition=2)])
    bench.keep_samples(file, [sample(arm="baseline", value=3)])
    bench.keep_samples(file, [sample(number=2, value=4)])
    together = bench.keep_samples(file, [sample(value=9)])
    assert bench.read_samples(file) == together
    assert sorted((s.arm, s.round, s.value_tok_s) for s in together) == [("baseline", 1, 3), ("candidate", 1, 9), ("candidate", 2, 4)]
    assert [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]


def test_ceilings_by_hand(changed):
    spec = memory.model_spec("smollm2-135m-instruct")
    found = ceilings.by_metric(changed(), spec, read_bytes_s=10e9, flops=1e12)
    # Decode: 538,060,032 bytes a step at 1.25 x 10 GB/s: 23.23 steps a second, times the streams. Prefill: 1e12 / (2 x 30 x 3,540,096) tokens.
    assert found["decode_c1_tok_s"] == pytest.approx(12.5e9 / 538_060_032) and found["decode_c4_tok_s"] == pytest.approx(4 * found["decode_c1_tok_s"])
    assert found["prefill_128_tok_s"] == found["prefill_512_tok_s"] == pytest.approx(1e12 / 212_405_760)


@pytest.mark.parametrize(
    ("answer", "problems"),
    [
        ({"text": "Red, green and blue.", "finish_reason": "stop", "completion_tokens": 7}, []),
        ({"text": "Red, green and", "finish_reason": "length", "completion_tokens": 24}, []),
        ({"text": "  ", "finish_reason": "stop", "completion_tokens": 1}, ["empty"]),
        ({"text": "Red", "finish_reason": "abort", "completion_tokens": 1}, ["finish reason abort"]),
        ({"text": "Red", "finish_reason": "length", "completion_tokens": 20}, ["20 tokens, 24 were allowed"]),
        ({"text": "the " * 24, "finish_reason": "length", "completion_tokens": 24}, ["one word over and over"]),
        ({"text": "no " * 7, "finish_reason": "stop", "completion_tokens": 8}, []),
    ],
)
def test_probe_problems(answer, problems):
    assert probe_problems(answer, 24) == problems


def test_the_processors_ceilings_are_not_a_gpus(changed):
    """They would call every sound result of a GPU void."""
    spec = memory.model_spec("smollm2-135m-instruct")
    assert ceilings.by_metric(changed({"engine.device": "cuda"}), spec, read_bytes_s=10e9, flops=1e12) == {}
    assert set(ceilings.by_metric(changed(), spec, None, flops=1e12)) == {"prefill_128_tok_s", "prefill_512_tok_s"}
    assert ceilings.by_metric(changed(), spec, None, None) == {}
    for known in ({}, {"logical_cpus": 2}, {"isa": ["avx2"]}):
        assert ceilings.peak_flops(Inventory.model_construct(host=Host(**known))) is None
    assert ceilings.peak_flops(Inventory.model_construct(host=Host(logical_cpus=2, isa=["avx2"]))) == 2 * 5.7e9 * 32


def test_a_box_of_which_only_outputs_were_captured_has_no_ceilings(changed):
    assert ceilings.memory_read_bytes_s(changed({"box.kind": "recorded", "box.name": "nobody"}), None) is None


def test_a_recorded_run_without_ceilings_is_one_line(changed, monkeypatch):
    monkeypatch.setattr(paths, "only_captured", lambda name: False)
    box = changed({"box.kind": "recorded", "box.name": "nobody"})
    with pytest.raises(BadInput, match="data/boxes/nobody/ceilings.json: missing"):
        ceilings.memory_read_bytes_s(box, None)
