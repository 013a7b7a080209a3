"""Benchmark arithmetic on timelines built by hand, the reasons that void a sample, and the schedule."""

import dataclasses
import json
import math
import time

import pytest
from samples import boot_of

from fieldbook import bench, bench_tables, ceilings, memory, paths
from fieldbook.bench import checks, conditions, counters, measuring, prompts, rates
from fieldbook.bench.target import Target
from fieldbook.errors import BadInput, GateFailed
from fieldbook.inventory.measure import WHAT
from fieldbook.inventory.model import Gpu, Host, Inventory, Measurement, Spread
from fieldbook.spec import Quantization


def steady(start, ttft, gap, events):
    """A stream: request at `start`, first token `ttft` later, then `events` more, `gap` apart."""
    return start, ttft, [gap] * events


def rate(*streams, counts=None):
    starts, ttfts, gaps = zip(*streams, strict=True)
    return rates.decode_tok_s(list(starts), list(ttfts), list(gaps), counts or [len(g) + 1 for g in gaps])


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
        rates.decode_tok_s([0, 0], [1], [[0.1]], [2])


# Two streams of 32 prompt and 32 output tokens, as a sound server counts them and a sound client sees them.
COUNTED = counters.Counters(
    prompt_tokens=64, generation_tokens=64, cache_queries=64, cache_hits=0, preemptions=0, finished_length=2, finished_otherwise=0, queue_s=0.001,
    ttft_s=1.0, e2e_s=7.2, drafts=0, accepted_tokens=0,
)  # fmt: skip
RESULT = {
    "errors": ["", ""], "output_lens": [32, 32], "input_lens": [32, 32], "ttfts": [0.5, 0.5], "itls": [[0.1] * 31] * 2, "client_cpu_s": 0.1,
    "client_wall_s": 4.0,
}  # fmt: skip
DECODE = checks.Asked("decode_c2_tok_s", 32, 32, 2)
GPU = {"index": 1, "slowed": [], "sm_clock_mhz_start": 1980, "sm_clock_mhz_end": 1950, "temperature_c": [60, 61]}


def reasons(result=None, counted=None, text=(32, 32), gpu=None, value=10.0, ceiling=100.0, asked=DECODE):
    seen = dataclasses.replace(COUNTED, **(counted or {}))
    conditions = {"gpus": [{**GPU, **gpu}]} if gpu else {}
    return bench.void_reasons(asked, {**RESULT, **(result or {})}, seen, list(text), conditions, value, ceiling)


def test_a_sound_sample_has_no_reasons():
    assert reasons() == [] and reasons(ceiling=None) == [] and reasons(value=100.0) == [] and reasons(gpu={"slowed": ["sw_power_cap"]}) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"result": {"errors": ["", "Traceback\n  x\nConnection refused"]}}, "error: Connection refused"),
        ({"result": {"output_lens": [32, 31], "itls": [[0.1] * 31, [0.1] * 30]}}, "tokens: output lengths [32, 31], expected 32 each"),
        ({"result": {"output_lens": [32]}}, "tokens: output lengths [32], expected 32 each"),
        ({"result": {"input_lens": [32, 33]}}, "tokens: prompt lengths [32, 33], expected 32 each"),
        ({"counted": {"prompt_tokens": 65}}, "tokens: the server counted 65 prompt tokens, expected 64"),
        ({"counted": {"generation_tokens": 63}}, "tokens: the server counted 63 generated tokens, expected 64"),
        ({"counted": {"finished_length": 1, "finished_otherwise": 1}}, "tokens: 1 requests ended by length, 1 otherwise"),
        ({"text": (32, 16)}, "tokens: stream 1: the text holds 16 tokens, usage says 32"),
        ({"text": (32, 64)}, "tokens: stream 1: the text holds 64 tokens, usage says 32"),
        ({"result": {"itls": [[0.1] * 31, [0.05] * 62]}}, "tokens: stream 1: 63 events for 32 tokens"),
        ({"counted": {"cache_hits": 1}}, "prefix cache: 1 of 64 queried tokens"),  # 1.6%
        ({"counted": {"preemptions": 2}}, "preemptions: 2"),
        ({"result": {"client_cpu_s": 3.7}}, "load client: busy on 0.93 of a core"),
        ({"result": {"ttfts": [0.75, 0.75]}}, "lag: the client saw the first token 0.250 s after the server had it"),
        ({"result": {"ttfts": [0.25, 0.25]}}, "lag: the client saw the first token 0.250 s before the server had it"),
        # 31 gaps of 0.11 s where the server decoded for 3.1 s: 3.41 s.
        ({"result": {"itls": [[0.11] * 31] * 2}}, "lag: from first to last token the client saw 3.410 s, the server 3.100 s"),
        ({"gpu": {"slowed": ["hw_thermal_slowdown", "sw_power_cap"]}}, "clocks: GPU 1 was slowed down: hw_thermal_slowdown"),
        ({"gpu": {"sm_clock_mhz_end": 1700}}, "clocks: GPU 1: its clock fell from 1980 to 1700 MHz"),
        ({"value": 0.0}, "overlap: the streams did not decode at the same time"),
        ({"value": math.nan}, "overlap: the streams did not decode at the same time"),
        ({"value": 100.1}, "ceiling: 100.1 tok/s is above the ceiling of 100.0"),
    ],
)
def test_each_reason_voids(change, words):
    found = reasons(**change)
    assert len(found) == 1 and words in found[0] and found[0].partition(":")[0] in checks.CHECKS


def test_a_prompt_timed_alone_may_be_neither_late_nor_queued():
    asked = checks.Asked("prefill_32_tok_s", 32, 1, 1)
    result = {"errors": [""], "output_lens": [1], "input_lens": [32], "itls": [[]], "ttfts": [0.5]}
    counted = {"prompt_tokens": 32, "generation_tokens": 1, "cache_queries": 32, "finished_length": 1, "ttft_s": 0.5, "e2e_s": 0.5}
    assert reasons(result, counted, (1,), asked=asked) == []
    assert reasons({**result, "ttfts": [0.54]}, counted, (1,), asked=asked) == []
    assert "0.060 s after" in reasons({**result, "ttfts": [0.56]}, counted, (1,), asked=asked)[0]
    assert reasons(result, {**counted, "queue_s": 0.03}, (1,), asked=asked) == ["queue: it waited 0.030 s of 0.500 s there"]


def test_clocks_are_those_of_a_working_gpu(monkeypatch):
    # As an H200 was seen: 345 MHz idle, then 1,485 MHz at first and 1,455 at last while its power cap held it.
    idle = {"index": 0, "sm_clock_mhz": 345, "temperature_c": 35, "power_w": 80.1, "power_limit_w": 700.0, "busy_percent": 0, "slowed": [], "processes": 0}
    busy = {**idle, "busy_percent": 100, "power_w": 694.7, "temperature_c": 57, "slowed": ["sw_power_cap"], "processes": 1}
    looks = [idle, *({**busy, "sm_clock_mhz": clock} for clock in (1485, 1485, 1470, 1470, 1470, 1470, 1455, 1455)), {**idle, "temperature_c": 58}]
    pending = iter([[look] for look in [looks[0], *looks]])
    monkeypatch.setattr(conditions.nvml, "speeds", lambda: next(pending, []))
    monkeypatch.setattr(conditions, "EVERY_S", 0.001)
    with conditions.Conditions(True) as watch:
        time.sleep(0.3)
    (seen,) = watch.document()["gpus"]
    assert (seen["sm_clock_mhz_start"], seen["sm_clock_mhz_end"]) == (1485, 1455) and seen["temperature_c"] == [35, 58] and seen["power_w_max"] == 694.7
    assert seen["slowed"] == ["sw_power_cap"] and seen["processes"] == 1 and reasons(gpu=seen) == []
    with conditions.Conditions(False) as watch:
        pass
    assert watch.document() == {}


def test_up_to_one_percent_of_cached_tokens_is_allowed():
    assert reasons(counted={"cache_queries": 200, "cache_hits": 2}) == []
    assert len(reasons(counted={"cache_queries": 200, "cache_hits": 3})) == 1


METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="smollm2"} 1234.0
vllm:prompt_tokens_total{engine="1",model_name="smollm2"} 1.0e+03
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:generation_tokens_total 32.0
vllm:prefix_cache_queries_total{engine="0"} 64.0
vllm:prefix_cache_hits_total{engine="0"} 0.0
vllm:request_success_total{engine="0",finished_reason="length"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort"} 1.0
vllm:request_success_created{engine="0",finished_reason="abort"} 1.7e+09
vllm:request_queue_time_seconds_sum{engine="0"} 2.5e-05
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 17.0
"""


def test_counters_are_summed_over_engines_and_missing_ones_are_zero():
    found = counters.parse(METRICS)
    assert (found.prompt_tokens, found.generation_tokens, found.cache_queries, found.preemptions) == (2234, 32, 64, 0)
    assert (found.finished_length, found.finished_otherwise, found.finished, found.queue_s) == (3, 3, 6, 2.5e-05)
    # 17 accepted of 10 drafts, and one token each that the model gives anyway.
    assert found.acceptance_length == 2.7 and COUNTED.acceptance_length is None
    assert found.since(found).finished == 0 and found.since(dataclasses.replace(found, prompt_tokens=2200)).prompt_tokens == 34


def test_a_label_may_hold_any_character():
    assert counters.parse('vllm:prompt_tokens_total{model_name="a}b c"} 5.0\n').prompt_tokens == 5


@pytest.mark.parametrize("text", ["", "<html>", "vllm:num_requests_running 1.0"])
def test_a_server_that_counts_nothing_cannot_be_checked(text):
    with pytest.raises(GateFailed, match="/metrics has no vllm:prompt_tokens_total"):
        counters.parse(text)


def test_points_of_the_default_box(changed):
    assert [dataclasses.astuple(point) for point in bench.points(changed().benchmarks)] == [
        ("prefill_128_tok_s", 128, 1, 1),
        ("prefill_512_tok_s", 512, 1, 1),
        ("decode_c1_tok_s", 32, 32, 1),
        ("decode_c4_tok_s", 32, 32, 4),
    ]


def words_and_one(text):
    """A tokenizer for tests: a token before every prompt, one a word, two for words of more than six letters."""
    return 1 + sum(2 if len(word) > 6 else 1 for word in text.split())


@pytest.mark.parametrize("tokens", [2, 3, 17, 32, 129, 1000])
def test_prompts_have_exactly_the_tokens_asked_for(tokens):
    texts = [prompts.exact(words_and_one, tokens, f"s/{number}") for number in range(20)]
    assert {words_and_one(text) for text in texts} == {tokens} and texts == [prompts.exact(words_and_one, tokens, f"s/{number}") for number in range(20)]
    # No two share their first block of sixteen tokens.
    assert len({tuple(text.split()[:8]) for text in texts}) == 20 or tokens < 17


def test_a_tokenizer_that_reaches_no_such_count_is_named():
    with pytest.raises(GateFailed, match="no prompt of exactly 31 tokens.*30"):
        prompts.exact(lambda text: 10 * (len(text.split()) // 10), 31, "s")


def test_client_arguments():
    words = measuring.arguments(Target("http://127.0.0.1:4711", "m"), checks.Asked("decode_c4_tok_s", 32, 33, 4))
    options = dict(zip(words, words[1:], strict=False))
    assert options["--base-url"] == "http://127.0.0.1:4711" and options["--model"] == "m" and "--ignore-eos" in words
    assert (options["--num-prompts"], options["--max-concurrency"], options["--num-warmups"]) == ("4", "4", "0")
    assert json.loads(options["--extra-body"]) == {"max_tokens": 33, "skip_special_tokens": False}


class FakeServer(Target):
    """Stands for server and client: counts what it is asked, answers with steady streams, may go wrong in one sample or be interrupted in one."""

    def __init__(self, wrong_at=(), interrupted_at=0):
        super().__init__("http://127.0.0.1:1", "m", "", 2048)
        totals = dict.fromkeys(dataclasses.asdict(COUNTED), 0.0)
        self.__dict__.update(totals=totals, calls=[], wrong_at=wrong_at, interrupted_at=interrupted_at)

    def get(self, path, timeout_s=0):
        t = self.totals
        lines = [f"{name} {t[key]}" for key, name in counters._NAMES.items()]
        return "\n".join([*lines, f'vllm:request_success_total{{finished_reason="length"}} {t["finished_length"]}', "process_start_time_seconds 7.0"])

    def post(self, path, body, timeout_s=0):
        return {"count": len(body["prompt"].split())}

    def run(self, words, texts):
        options = dict(zip(words, words[1:], strict=False))
        output, streams, prompt = json.loads(options["--extra-body"])["max_tokens"], int(options["--num-prompts"]), len(texts[0].split())
        self.calls.append((prompt, output, streams, *texts))
        if len(self.calls) == self.interrupted_at:
            raise KeyboardInterrupt
        t = self.totals
        for key, amount in (
            ("prompt_tokens", prompt), ("cache_queries", prompt), ("generation_tokens", output), ("finished_length", 1), ("ttft_s", 0.5),
            ("e2e_s", 0.5 + 0.25 * (output - 1)),
        ):  # fmt: skip
            t[key] += amount * streams
        if len(self.calls) in self.wrong_at:
            t["cache_hits"] += prompt
        return {
            "ttfts": [0.5] * streams, "itls": [[0.25] * (output - 1)] * streams, "start_times": [7.0] * streams, "output_lens": [output] * streams,
            "input_lens": [prompt] * streams, "errors": [""] * streams, "generated_texts": ["a " * output] * streams, "client_cpu_s": 0.01,
            "client_wall_s": 1.0,
        }  # fmt: skip


def measured(fake, bench_params, folder, rounds=1, limits=None, about=None, said=None):
    progress = (said if said is not None else []).append
    return bench.measure(fake, fake.run, bench_params, "candidate", 1, rounds, limits or {}, folder / "unfinished.jsonl", about or {"a": 1}, progress)


def test_a_round_warms_up_each_point_and_keeps_every_repetition(changed, tmp_path):
    fake, said = FakeServer(wrong_at=(3,)), []
    samples = measured(fake, changed().benchmarks, tmp_path, limits={"decode_c4_tok_s": 15.0}, said=said)
    # Four points, a warm-up and three repetitions each, in order, no prompt twice; one more for a void sample, two for a point that stays void.
    assert [call[:3] for call in fake.calls] == [(128, 1, 1)] * 5 + [(512, 1, 1)] * 4 + [(32, 32, 1)] * 4 + [(32, 32, 4)] * 6
    texts = [text for call in fake.calls for text in call[3:]]
    assert len(set(texts)) == len(texts) == 5 + 4 + 4 + 24 and len(said) == 19
    repetitions = {"prefill_128_tok_s": 4, "prefill_512_tok_s": 3, "decode_c1_tok_s": 3, "decode_c4_tok_s": 5}
    assert [(s.metric, s.repetition) for s in samples] == [(m, r) for m, count in repetitions.items() for r in range(1, count + 1)]
    # 128 tokens in 0.5 s; 4 events a second and stream.
    assert [s.value_tok_s for s in samples] == [256.0] * 4 + [1024.0] * 3 + [4.0] * 3 + [16.0] * 5
    # Call 3 is the second repetition of the first point (call 1 was the warm-up); the ceiling voids all of the last point.
    assert [s.repetition for s in samples if s.metric == "prefill_128_tok_s" and s.void] == [2]
    assert all("above the ceiling" in s.void[0] for s in samples[-5:]) and not any(s.void for s in samples[4:-5])
    assert samples[0].start_s == [0.0] and samples[-1].prompt_tokens == [32] * 4 and samples[0].server_started_at_s == 7.0
    # Asked for again before it is forgotten, as after an interrupt in what comes next, nothing is measured twice; afterwards all is.
    assert measured(fake, changed().benchmarks, tmp_path) == samples and len(fake.calls) == 19
    bench.forget(tmp_path / "unfinished.jsonl")
    assert list(tmp_path.iterdir()) == []
    assert measured(fake, changed().benchmarks, tmp_path) != samples and len(fake.calls) == 19 + 16


def test_another_run_has_other_prompts(changed, tmp_path):
    one, other = FakeServer(), FakeServer()
    measured(one, changed().benchmarks, tmp_path)
    measured(other, changed().benchmarks, tmp_path)
    assert not {text for call in one.calls for text in call[3:]} & {text for call in other.calls for text in call[3:]}


def test_an_interrupt_keeps_what_was_measured_and_the_next_call_goes_on(changed, tmp_path):
    # The interrupt comes in the second repetition of the third point: two points are whole.
    fake = FakeServer(interrupted_at=11)
    with pytest.raises(KeyboardInterrupt):
        measured(fake, changed().benchmarks, tmp_path)
    kept = bench.read_samples(tmp_path / "unfinished.jsonl")
    assert len(kept) == 7
    fake.__dict__["calls"] = []
    samples = measured(fake, changed().benchmarks, tmp_path)
    assert [call[:3] for call in fake.calls] == [(32, 32, 1)] * 4 + [(32, 32, 4)] * 4
    assert len(samples) == 12 and samples[:6] == kept[:6]


def test_what_was_measured_of_something_else_is_not_gone_on_with(changed, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(FakeServer(interrupted_at=11), changed().benchmarks, tmp_path)
    fake = FakeServer()
    assert len(measured(fake, changed().benchmarks, tmp_path, about={"a": 2})) == 12 and len(fake.calls) == 16


def test_a_point_longer_than_a_request_may_be_is_one_line(changed, tmp_path):
    with pytest.raises(BadInput, match=r"prefill_4000_tok_s needs 4000 \+ 1 tokens, and the server takes 2048"):
        measured(FakeServer(), changed().benchmarks.model_copy(update={"prefill_tokens": [4000]}), tmp_path)


def sample(arm="candidate", boot=1, number=1, metric="decode_c1_tok_s", value=10.0, repetition=1, void=(), **more):
    return bench.Sample(
        **{
            "arm": arm, "boot": boot, "round": number, "metric": metric, "repetition": repetition, "seed": "s", "started_at": "", "server_started_at_s": 7.0,
            "value_tok_s": value, "ttft_s": [0.5], "itl_s": [[0.1]], "start_s": [0.0], "output_tokens": [2], "prompt_tokens": [3], "text_tokens": [2],
            "queue_s": 0.001, "server_ttft_s": 0.49, "server_e2e_s": 0.6, "cached_share": 0.0, "preemptions": 0, "acceptance_length": None,
            "client_cores": 0.01, "conditions": {}, "ceiling_tok_s": None, "void": list(void), **more,
        }
    )  # fmt: skip


def test_void_samples_are_never_averaged_in():
    samples = [
        sample(value=10),
        sample(value=12, repetition=2),
        sample(value=1e6, repetition=3, void=["error: why"]),
        sample(boot=2, value=14),
        sample(arm="baseline", value=5),
    ]
    assert bench.values(samples, "candidate", "decode_c1_tok_s") == [10, 12, 14]
    assert bench.values(samples, "candidate", "decode_c1_tok_s", 1) == [10, 12] and bench.values(samples, "candidate", "decode_c1_tok_s", 2) == [14]
    rows = bench.summary_rows(samples, ["decode_c1_tok_s", "prefill_128_tok_s"])
    assert rows[0] == {"arm": "candidate", "metric": "decode_c1_tok_s", "samples": 3, "void": 1, "min": 10, "median": 12, "max": 14}
    assert rows[1] == {"arm": "candidate", "metric": "prefill_128_tok_s", "samples": 0, "void": 0, "min": None, "median": None, "max": None}
    assert rows[2]["arm"] == "baseline" and rows[2]["median"] == 5
    assert {row["tok/s"] for row in bench_tables.points(samples, ["decode_c1_tok_s"])} == {10, 12, 14, 5}


def test_samples_by_boot_as_the_verdict_takes_them():
    samples = [
        sample(value=10),
        sample(value=12, repetition=2),
        sample(value=99, number=2),
        sample(boot=2, value=14),
        sample(arm="baseline", value=5),
        sample(arm="baseline", boot=2, value=6, void=["error: x"]),
    ]
    assert bench.by_boot(samples, ["decode_c1_tok_s"]) == {"decode_c1_tok_s": {"candidate": [[10, 12], [14]], "baseline": [[5], []]}}
    # The second round of a boot is no third value of its arm; it tells what changes by itself.
    assert bench.repeated_rounds(samples, "decode_c1_tok_s") == [[[10, 12], [99]]]


def test_samples_are_kept_once_however_often_a_boot_is_measured(tmp_path):
    file = tmp_path / "samples.jsonl"
    assert bench.read_samples(file) == []
    bench.keep_samples(file, [sample(value=1), sample(value=2, repetition=2)])
    bench.keep_samples(file, [sample(arm="baseline", value=3)])
    bench.keep_samples(file, [sample(boot=2, value=4)])
    together = bench.keep_samples(file, [sample(value=9)])
    assert bench.read_samples(file) == together
    assert sorted((s.arm, s.boot, s.value_tok_s) for s in together) == [("baseline", 1, 3), ("candidate", 1, 9), ("candidate", 2, 4)]
    assert [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]


@pytest.mark.parametrize("text", ["{}", "not json", '{"arm": "candidate", "round": 1}'])
def test_damaged_samples_are_one_line(tmp_path, text):
    (tmp_path / "s.jsonl").write_text(text + "\n")
    with pytest.raises(BadInput, match="s.jsonl: no samples of this release"):
        bench.read_samples(tmp_path / "s.jsonl")


def test_the_integrity_panel_names_each_check_that_failed():
    rows = bench_tables.integrity([sample(), sample(repetition=2, void=["lag: x", "tokens: y"]), sample(repetition=3, void=["tokens: z"])])
    sound = {row["check"]: row["sound"] for row in rows}
    assert sound[checks.CHECKS["tokens"]] == "no, in 2 of 3" and sound[checks.CHECKS["lag"]] == "no, in 1 of 3"
    assert [name for name, words in checks.CHECKS.items() if sound[words] == "yes"] == [n for n in checks.CHECKS if n not in ("lag", "tokens")]
    # A run that was interrupted and went on with another start of the server says so.
    two = bench_tables.integrity([sample(), sample(repetition=2, server_started_at_s=8.0)])
    assert "no: interrupted between" in [row["sound"] for row in two]


def test_latencies_by_hand():
    one = sample(metric="decode_c2_tok_s", ttft_s=[0.5, 0.7], itl_s=[[0.1, 0.2], [0.1, 0.4]], output_tokens=[3, 3], queue_s=0.004, acceptance_length=1.5)
    (row,) = bench_tables.latencies([one, sample(void=["error: x"])], ["decode_c2_tok_s", "decode_c1_tok_s"])
    assert (row["TTFT, s"], row["ITL, ms"], row["queue, ms"], row["acceptance length"]) == (0.6, pytest.approx(150), pytest.approx(2), 1.5)
    # Two tokens in 0.3 s and in 0.5 s: 6.67 and 4 tok/s. Of 0.1, 0.1, 0.2 and 0.4 s the 95th percentile lies at 0.85 of the way from 0.2 to 0.4.
    assert row["stream, tok/s"] == pytest.approx((2 / 0.3 + 2 / 0.5) / 2) and row["p95, ms"] == pytest.approx(370)


def test_what_a_run_must_not_be_quoted_for():
    text = bench_tables.not_quoted_for([sample(prompt_tokens=[512])], 1, [])
    assert "longer than 512 tokens or more than 1 streams" in text and "between boots" in text and "between rounds" in text and "degeneration" not in text


def test_ceilings_by_hand(changed):
    spec = memory.model_spec("smollm2-135m-instruct")
    found = ceilings.by_metric(changed(), spec, read_bytes_s=10e9, flops=1e12)
    # Decode: 538,060,032 bytes a step at 1.25 x 10 GB/s: 23.23 steps a second, times the streams. Prefill: 1e12 / (2 x 30 x 3,540,096) tokens.
    assert found["decode_c1_tok_s"] == pytest.approx(12.5e9 / 538_060_032) and found["decode_c4_tok_s"] == pytest.approx(4 * found["decode_c1_tok_s"])
    assert found["prefill_128_tok_s"] == found["prefill_512_tok_s"] == pytest.approx(1e12 / 212_405_760)


def test_the_processors_ceilings_are_not_a_gpus(changed):
    """They would call every sound result of a GPU void."""
    spec = memory.model_spec("smollm2-135m-instruct")
    assert ceilings.by_metric(changed({"engine.device": "cuda"}), spec, read_bytes_s=10e9, flops=1e12) == {}
    assert set(ceilings.by_metric(changed(), spec, None, flops=1e12)) == {"prefill_128_tok_s", "prefill_512_tok_s"}
    assert ceilings.by_metric(changed(), spec, None, None) == {}
    for known in ({}, {"logical_cpus": 2}, {"isa": ["avx2"]}):
        assert ceilings.peak_flops(Inventory.model_construct(host=Host(**known))) is None
    assert ceilings.peak_flops(Inventory.model_construct(host=Host(logical_cpus=2, isa=["avx2"]))) == 2 * 5.7e9 * 32


def test_gpus_bound_by_their_data_sheets(changed):
    spec = memory.model_spec("smollm2-135m-instruct")
    box = Inventory.model_construct(gpus=[Gpu(index=0, name="NVIDIA H200"), Gpu(index=1, name="NVIDIA H200"), Gpu(index=2, name="NVIDIA A100-SXM4-80GB")])
    # Two ranks: the two fastest cards, 2 x 4,800 GB/s with the margin of a quarter, over 269,030,016 bytes of bfloat16 a step.
    found = ceilings.by_metric(changed({"engine.device": "cuda", "engine.dtype": "bfloat16"}), spec, 1.0, 1.0, box)
    assert found["decode_c1_tok_s"] == pytest.approx(1.25 * 9.6e12 / 269_030_016, rel=1e-3)
    # 2 x 990 TFLOP/s over two operations for each of 106,202,880 parameters; twice that where the weights are quantized, perhaps to eight bits.
    assert found["prefill_128_tok_s"] == pytest.approx(2 * 990e12 / (2 * 106_202_880))
    quantized = dataclasses.replace(spec, quantization=Quantization("fp8", 8, "float", "tensor"))
    assert ceilings.gpu_rates(changed({"engine.device": "cuda"}), quantized, box) == (9.6e12, 4 * 990e12)
    # A card that no table has: nothing is bound, and nothing void.
    unknown = Inventory.model_construct(gpus=[*box.gpus, Gpu(index=3, name="Graphics Device")])
    assert ceilings.by_metric(changed({"engine.device": "cuda"}), spec, 1.0, 1.0, unknown) == {}


def test_what_the_measured_rates_of_the_cards_would_give(changed):
    spec = memory.model_spec("smollm2-135m-instruct")

    def rate(quantity, gpu, value):
        what, unit = WHAT[quantity]
        return Measurement(what=what, where=f"GPU {gpu}", unit=unit, size_bytes=1, spread=Spread(min=1, median=value, max=9999, samples=7))

    cards = [Gpu(index=i, name="NVIDIA H200") for i in range(3)]
    measured = [rate("copy", i, value) for i, value in enumerate((4000.0, 3000.0, 1000.0))] + [rate("product", i, 700.0) for i in range(3)]
    box = Inventory.model_construct(gpus=cards, measured=measured)
    on_gpus = changed({"engine.device": "cuda", "engine.dtype": "bfloat16"})
    # Two ranks: the two fastest, 7,000 GB/s over 269,030,016 bytes a step; 1,400 TFLOP/s over 212,405,760 operations a token. No margin.
    found = ceilings.at_measured(on_gpus, spec, box)
    assert found["decode_c1_tok_s"] == pytest.approx(7e12 / 269_030_016, rel=1e-3) and found["decode_c4_tok_s"] == pytest.approx(4 * found["decode_c1_tok_s"])
    assert found["prefill_128_tok_s"] == pytest.approx(1.4e15 / 212_405_760)
    # A card that was not measured, or a CPU: nothing is said.
    assert ceilings.at_measured(on_gpus, spec, Inventory.model_construct(gpus=cards, measured=measured[:1])) == {}
    assert ceilings.at_measured(changed(), spec, box) == {}
    row = {"metric": "decode_c1_tok_s", "samples": 6, "void": 0, "min": 1.0, "median": 6.5e3, "max": 2.0}
    assert bench_tables.speeds([row], {"decode_c1_tok_s": 13e3}, {"decode_c1_tok_s": 26e3})[0] | row == row | {
        "ceiling": 13e3, "of ceiling": "50%", "of measured rates": "25%",
    }  # fmt: skip
    assert "of measured rates" not in bench_tables.speeds([row], {"decode_c1_tok_s": 13e3}, {})[0]


def test_times_are_kept_in_whole_microseconds_and_rates_come_from_what_is_kept():
    starts, ttfts, gaps = rates.in_microseconds([100.25, 100.0000004], [0.1234567, 0.5], [[0.0100004, 0.0099996], []])
    assert (starts, ttfts, gaps) == ([0.25, 0.0], [0.123457, 0.5], [[0.01, 0.01], []])


def test_samples_are_read_packed_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "recorded_dir", lambda name: tmp_path / name)
    (tmp_path / "box").mkdir()
    assert paths.recorded_file("box", "samples.jsonl") is None
    one = boot_of("candidate", 1, 70.0, ["decode_c1_tok_s"])
    packed = bench.write_samples(tmp_path / "box" / "samples.jsonl.xz", one) or tmp_path / "box" / "samples.jsonl.xz"
    assert paths.recorded_file("box", "samples.jsonl") == packed and bench.read_samples(packed) == one
    packed.write_bytes(b"no archive")
    with pytest.raises(BadInput, match="no samples of this release"):
        bench.read_samples(packed)
    bench.write_samples(tmp_path / "box" / "samples.jsonl", one)
    assert paths.recorded_file("box", "samples.jsonl").name == "samples.jsonl"


def test_a_box_of_which_only_outputs_were_captured_has_no_ceilings(changed):
    assert ceilings.memory_read_bytes_s(changed({"box.kind": "recorded", "box.name": "nobody"}), None) is None


def test_a_recorded_run_without_ceilings_is_one_line(changed, monkeypatch):
    monkeypatch.setattr(paths, "only_captured", lambda name: False)
    box = changed({"box.kind": "recorded", "box.name": "nobody"})
    with pytest.raises(BadInput, match="data/boxes/nobody/ceilings.json: missing"):
        ceilings.memory_read_bytes_s(box, None)
