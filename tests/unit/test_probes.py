"""Probes: exact bounds and tests of counts, what is wrong with an answer, strata, baselines, and what fails a run."""

import csv
import json

import pytest
from conftest import ROOT
from scipy.stats import binomtest, fisher_exact

from fieldbook import probes, stated
from fieldbook.__main__ import main
from fieldbook.errors import BadInput, GateFailed
from fieldbook.probes import answers as asking
from fieldbook.probes import cases, likelihood, running
from fieldbook.probes.counting import bounds, more_p, share_text, trials_to_see, trials_to_tell
from fieldbook.schema import Probes


# Clopper and Pearson (1934); one-sided 95% bounds are the ends of a 90% interval.
@pytest.mark.parametrize(("k", "n"), [(0, 20), (0, 200), (21, 100), (1, 16), (16, 16), (99, 100), (0, 1)])
def test_bounds_are_those_of_the_exact_binomial_test(k, n):
    low, high = binomtest(k, n).proportion_ci(confidence_level=0.90, method="exact")
    assert bounds(k, n) == pytest.approx((low, high), abs=1e-9)


def test_bounds_by_hand():
    # Nothing in n trials: the rate at which that still happens once in twenty, 1 - 0.05^(1/n).
    assert bounds(0, 20)[1] == pytest.approx(1 - 0.05 ** (1 / 20)) == pytest.approx(0.139, abs=5e-4)
    assert bounds(0, 200)[1] == pytest.approx(0.01487, abs=5e-6) and bounds(0, 200)[1] < 0.015
    assert bounds(0, 5)[0] == 0.0 and bounds(5, 5)[1] == 1.0
    for k, n in ((1, 0), (-1, 4), (5, 4)):
        with pytest.raises(ValueError, match="no count"):
            bounds(k, n)


@pytest.mark.parametrize("table", [(21, 100, 0, 120), (19, 100, 0, 120), (1, 16, 0, 64), (3, 16, 0, 64), (0, 100, 21, 100), (5, 5, 5, 5)])
def test_fishers_test_is_scipys(table):
    k, n, base_k, base_n = table
    assert more_p(*table) == pytest.approx(float(fisher_exact([[k, n - k], [base_k, base_n - base_k]], alternative="greater").pvalue), rel=1e-9)


def test_the_second_reports_counts():
    # 21 of 100 against 0 of 120: the report states 7.4e-9, which is not what its counts give.
    found = stated.fisher("p", 7.4e-9, (21, 100), (0, 120))
    assert found.recomputed == pytest.approx(1.8e-8, rel=0.01) and not found.agrees
    assert found.text == "p: stated 7.4e-09, recomputed 1.8e-08 - DISAGREES"
    # Medians of 84 and 37 tokens: 2.3 times as long, which is told.
    assert stated.ratio("median length", 2.3, 84, 37).agrees
    ours, base = ({"median_tokens": m, "counts": {}, "logprobs": None, "distance_again": None} for m in (84, 37))
    assert running.signs(ours, base) == ["sampled answers have a median of 84 tokens, the baseline's 37"]


@pytest.mark.parametrize(
    ("what", "said", "ours", "theirs", "recomputed", "agrees"),
    [
        ("prefill 32k", 5.2, 10_156, 1_950, 5.21, True),
        ("prefill 8k", 4.2, 8_014, 1_898, 4.22, True),
        ("decode, 8 streams", 1.5, 441.9, 290.2, 1.52, True),
        ("decode, 1 stream", 1.7, 76.0, 44.1, 1.72, True),
        ("KV pool", 4.52, 904_109, 232_000, 3.90, False),
    ],
)
def test_the_first_reports_ratios(what, said, ours, theirs, recomputed, agrees):
    found = stated.ratio(what, said, ours, theirs)
    assert round(found.recomputed, 2) == recomputed and found.agrees is agrees and ("DISAGREES" in found.text) is not agrees
    file = ROOT.parent / "shared" / "golden" / "report_figures.csv"
    if file.is_file():
        values = {row[5] for row in csv.reader(file.open())}
        assert {f"{ours:g}" if isinstance(ours, float) and ours % 1 else str(ours), str(said)} <= values


def test_how_many_trials_a_question_needs():
    # 0.95^59 = 0.0485: with 59 trials a fault of 5% stays unseen less than once in twenty times, with 58 more often.
    assert trials_to_see(0.05) == 59 and 0.95**59 < 0.05 < 0.95**58
    assert trials_to_see(0.5) == 5
    n = trials_to_tell(0.2, 0, 120)
    chance = [sum(binomtest(k, m).statistic >= 0 and more_p(k, m, 0, 120) < 0.05 and _binomial(k, m, 0.2) for k in range(m + 1)) for m in (n - 1, n)]
    assert chance[0] < 0.8 <= chance[1]
    assert trials_to_tell(0.05, 0, 5) is None
    with pytest.raises(ValueError, match="between 0 and 1"):
        trials_to_see(0)


def _binomial(k, n, rate):
    from math import comb

    return comb(n, k) * rate**k * (1 - rate) ** (n - k)


def test_shares_in_words():
    assert (
        share_text(0, 20) == "0 of 20: below 13.9%"
        and share_text(20, 20) == "20 of 20: above 86.1%"
        and share_text(21, 100).startswith("21 of 100: 21% (14.5%")
    )


@pytest.mark.parametrize(
    ("answer", "problems"),
    [
        (("Red, green and blue.", "stop", 7, 24, [5, 6, 7, 8, 9, 10, 2]), []),
        (("Red, green and", "length", 24, 24, None), []),
        (("  ", "stop", 1, 24, [2]), ["empty"]),
        (("Red", "abort", 1, 24, [5]), ["finish reason abort"]),
        (("Red", "length", 20, 24, None), ["20 tokens, 24 were allowed"]),
        (("Red", "stop", 3, 24, [5, 2]), ["usage says 3 tokens, 2 came"]),
        (("Red", "stop", 4, 24, [5, 2, 6, 2]), ["the end of the sequence comes more than once"]),
        # Stopped by a text, not by the end of the sequence: the last token may come again.
        (("a b a", "stop", 3, 24, [5, 6, 5], "a"), []),
        (("the the the", "length", 3, 3, [5, 5, 5]), []),
    ],
)
def test_what_no_answer_may_have(answer, problems):
    assert asking.conformity(*answer) == problems


LOOP = "I will check it once more. " * 12


@pytest.mark.parametrize(
    ("text", "finish", "expect", "words"),
    [
        ("Paris.", "stop", "paris", ""),
        ("London.", "stop", "paris", "no match for paris"),
        (LOOP, "length", "", "degenerate: 12.0 rounds"),
        # Answered first, then endless: that the answer was right does not excuse it.
        ("Paris. " + LOOP, "length", "paris", "degenerate"),
        # A loop that the model ends by itself is no endless one; broken language is none either way.
        (LOOP, "stop", "", ""),
        ("The the pump is the. It has a the valve of of the the tank **, and the is warm.", "stop", "", "degenerate: broken grammar"),
    ],
)
def test_why_an_answer_fails_its_probe(text, finish, expect, words):
    failed = asking.failure(cases.Case("c", "questions", "en", [], 24, expect), text, finish)
    assert failed.startswith(words) and bool(failed) is bool(words)


def answer(probe="degeneration", case="c", language="en", failed="", tokens=10, problems=(), arm="candidate"):
    return probes.Answer(
        arm=arm, probe=probe, case=case, language=language, concurrency=1, text="t", finish_reason="stop", prompt_tokens=5, completion_tokens=tokens,
        elapsed_s=1.0, problems=list(problems), failed=failed,
    )  # fmt: skip


def test_answers_are_counted_by_probe_language_and_length():
    found = probes.counts(
        [answer(), answer(failed="x"), answer(language="zh"), answer("needle", "needle-en-92%-at-10%", failed="x"), answer("needle", "needle-en-10%-at-50%")]
        + [answer("short", "own-1", ""), answer("tools", "tool-stock", failed=asking.NO_TOOLS)]
    )
    assert found == {
        "degeneration/en": [1, 2], "degeneration/zh": [0, 1], "needle/en/92%": [1, 1], "needle/en/10%": [0, 1], "short/own": [0, 1],
    }  # fmt: skip
    assert probes.by_probe(found) == {"degeneration": (1, 3), "short": (0, 1), "needle": (1, 2)}


def row(counted, base, probe="degeneration"):
    found = {one["probe"]: one for one in probes.against({"counts": counted}, base and {"counts": base})}
    return found[probe]


def test_degenerate_samples_without_a_baseline_fail_a_run():
    assert row({"degeneration/en": [1, 20]}, None)["worse"] and not row({"degeneration/en": [0, 20]}, None)["worse"]


def test_a_model_that_degenerates_by_itself_is_measured_by_its_baseline():
    assert not row({"degeneration/en": [2, 16]}, {"degeneration/en": [8, 64]})["worse"]
    # 21 of 100 against 0 of 120: p = 1.8e-8.
    worse = row({"degeneration/en": [21, 100]}, {"degeneration/en": [0, 120]})
    assert worse["worse"] and worse["p_value"] == pytest.approx(1.8e-8, rel=0.01)
    assert probes.problems([], [worse]) == ["degenerate samples: 21 of 100, baseline 0 of 120, p = 1.8e-08"]


def test_only_what_both_were_asked_is_compared():
    base = {"needle/en/10%": [0, 3], "needle/en/92%": [3, 3], "degeneration/en": [1, 48], "degeneration/zh": [9, 16]}
    found = row({"degeneration/en": [0, 2]}, base)
    assert (found["base_failed"], found["base_asked"]) == (1, 48)
    assert row({"needle/en/50%": [3, 3]}, base, "needle")["base_asked"] is None
    assert (row({"needle/en/10%": [0, 3], "needle/en/92%": [3, 3]}, base, "needle")["base_failed"]) == 3


def test_other_probes_share_their_chance_of_a_false_alarm():
    ours = {"questions/en": [6, 16], "identity/en": [0, 6], "short/en": [0, 12]}
    base = {"questions/en": [0, 16], "identity/en": [0, 6], "short/en": [0, 12]}
    found = row(ours, base, "questions")
    # Holm: the smallest of three p-values counts three times.
    assert found["p_value"] == pytest.approx(3 * more_p(6, 16, 0, 16)) and not found["worse"]
    assert row({**ours, "questions/en": [12, 16]}, base, "questions")["worse"]
    # Without a baseline only a probe that nothing passes fails a run.
    assert row({"questions/en": [16, 16]}, None, "questions")["worse"] and not row({"questions/en": [15, 16]}, None, "questions")["worse"]
    assert not row({"needle/en/92%": [3, 3]}, None, "needle")["worse"] and not row({"tools/en": [2, 2]}, None, "tools")["worse"]


def test_broken_answers_fail_a_run_whatever_the_baseline():
    found = probes.problems([answer(), answer(case="q", problems=["empty"], failed="empty")], [])
    assert found == ["1 of 2 answers broken (q: empty)"]


def test_log_probabilities_by_hand():
    one, other = {"en": [-1.0, -2.0], "zh": [-3.0]}, {"en": [-1.5, -2.0], "zh": [-3.25]}
    assert likelihood.distance(one, other) == {"mean": 0.25, "worst": 0.5, "tokens": 3}
    assert likelihood.distance(one, None) is None and likelihood.distance({"en": [-1.0]}, {"en": [-1.0, -2.0]}) is None
    ours = {"median_tokens": 10, "logprobs": one, "distance_again": {"mean": 0.0, "worst": 0.0, "tokens": 3}}
    assert running.signs(ours, {"median_tokens": 10, "logprobs": one}) == []
    assert "differ by 0.250 per token from the baseline's, by 0.000 from their own" in running.signs(ours, {"median_tokens": 10, "logprobs": other})[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(running.paths, "root", lambda: tmp_path)
    (tmp_path / "data" / "models" / "m").mkdir(parents=True)
    return tmp_path / "data" / "models" / "m" / "baseline.json"


SUMMARY = {"counts": {"degeneration/en": [0, 48], "needle/en/10%": [0, 3]}, "median_tokens": 90.0, "logprobs": None, "distance_again": None}


def test_a_baseline_is_kept_and_read_again(folder):
    assert probes.read_baseline("m", Probes())[0] is None and "there is none yet" in probes.read_baseline("m", Probes())[1]
    probes.keep_baseline("m", Probes(), SUMMARY, {"layout": "PP1"})
    found, why = probes.read_baseline("m", Probes(trials=100))
    assert found["counts"] == SUMMARY["counts"] and found["layout"] == "PP1" and why == ""
    # What was asked otherwise is left out and named; the rest still counts.
    found, why = probes.read_baseline("m", Probes(trial_tokens=64))
    assert found["counts"] == {"needle/en/10%": [0, 3]} and "degeneration (probes.trial_tokens)" in why


@pytest.mark.parametrize("text", ["", "[]", '{"counts": {}}', '{"settings": {}, "counts": {"a": [1]}}'])
def test_a_damaged_baseline_is_one_line(folder, text):
    folder.write_text(text)
    with pytest.raises(BadInput, match="data/models/m/baseline.json: damaged"):
        probes.read_baseline("m", Probes())


def test_a_baseline_belongs_to_a_model_that_is_described(folder):
    with pytest.raises(BadInput, match="data/models/other: no such folder"):
        probes.keep_baseline("other", Probes(), SUMMARY, {})


def test_the_prompt_sets():
    found = cases.sets()
    every = [entry for name in ("agent", "identity", "short", "questions", "tools", "needle") for entry in found[name]]
    assert len({entry["id"] for entry in every}) == len(every) and {entry["language"] for entry in every} == {"en", "zh"}
    trials = cases.degeneration(Probes(trials=20), "salt")
    assert len({case.messages[0]["content"] for case in trials}) == 20 and all(case.sampled for case in trials)
    assert {case.language for case in cases.short(Probes(languages=["zh"]))} == {"zh"}
    assert [case.probe for case in cases.short(Probes(prompts=["Hello?"]))][-1] == "short"


def test_a_needle_lies_where_it_is_said_to():
    class Counting:
        url, model = "u", "m"

        def post(self, path, body):
            return {"count": 20 + sum(len(message["content"].split()) for message in body["messages"])}

    asked = cases.needles(Probes(needle_shares=[0.5], needle_depths=[0.0, 0.5, 1.0]), Counting(), 2000, "s")
    assert [case.id for case in asked] == ["needle-en-50%-at-0%", "needle-en-50%-at-50%", "needle-en-50%-at-100%"]
    for case, depth in zip(asked, (0.0, 0.5, 1.0), strict=True):
        words = case.messages[0]["content"].split()
        # Half of 2,000 tokens less the answer's 24 and the 20 that the chat costs, to within a sentence.
        assert 940 <= len(words) <= 956
        assert (words.index("7391.") - 9) / (len(words) - 9 - 12) == pytest.approx(depth, abs=0.02)


def test_answers_are_kept_once_for_each_arm(tmp_path):
    file = tmp_path / "answers.jsonl"
    probes.keep_answers(file, [answer(case="a"), answer(case="b")])
    probes.keep_answers(file, [answer(case="c", arm="baseline")])
    probes.keep_answers(file, [answer(case="d")])
    assert [(one.arm, one.case) for one in probes.read_answers(file)] == [("baseline", "c"), ("candidate", "d")]
    file.write_text("{}\n")
    with pytest.raises(BadInput, match="answers.jsonl: no answers of this release"):
        probes.read_answers(file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench"], "give a params file, which is launched, or --base-url"),
        (["bench", "params/cpu-smollm2.yml", "--base-url", "http://127.0.0.1:1"], "give a params file"),
        (["bench", "--base-url", "ftp://x"], "--base-url: expected http://HOST:PORT"),
        (["bench", "--base-url", "http://me:secret@host:1"], "--base-url: expected http://HOST:PORT"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--set", "engine.dtype=float32"], "only benchmarks.KEY and probes.KEY"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--set", "probes.trials=none"], "probes.trials: got 'none', expected a valid integer"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--set", "probes.trials"], "--set: got 'trials', expected SECTION.KEY=VALUE"),
        (["bench", "--base-url", "http://127.0.0.1:1", "--api-key", "sk-literal"], "--api-key"),
        (["bench", "--detect", "2"], "--detect: got 2, expected a rate between 0 and 1"),
    ],
)
def test_bad_input_of_bench_is_one_line(words, said, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and "secret" not in err and "sk-literal" not in err


def test_nothing_at_the_address_is_one_line(capsys):
    assert main(["bench", "--base-url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "fieldbook: http://127.0.0.1:9 does not answer: ConnectError\n"


def test_how_many_trials_as_json(capsys):
    assert main(["bench", "--detect", "0.05", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials_to_see"] == 59


class ToolServer:
    """Answers the first request with a call of a tool (or what it is told to), the second with a text."""

    url, model = "http://127.0.0.1:1", "m"

    def __init__(self, calls, text="It is 18 degrees in Paris, with light rain."):
        self.calls, self.text, self.asked = calls, text, []

    def post(self, path, body, timeout_s=0):
        self.asked.append(body)
        if isinstance(self.calls, Exception):
            raise self.calls
        first = len(self.asked) == 1
        message = {"content": None, "tool_calls": self.calls} if first else {"content": self.text}
        choice = {"message": message, "finish_reason": "tool_calls" if first and self.calls else "stop", "token_ids": None}
        return {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 12}}


def call(name="get_weather", arguments='{"city": "Paris"}'):
    return [{"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}]


@pytest.mark.parametrize(
    ("calls", "text", "failed"),
    [
        (call(), "It is 18 degrees in Paris, with light rain.", ""),
        (call(), "I do not know.", "no match for 18|rain"),
        (call("get_time"), "", "no call of the tool"),
        ([], "", "no call of the tool"),
        (call(arguments='{"city": "Rome"}'), "", 'called with {"city": "Rome"}'),
        (call(arguments="{"), "", "no tool call that can be read: JSONDecodeError"),
        (GateFailed('status 400: "auto" tool choice requires --enable-auto-tool-choice'), "", asking.NO_TOOLS),
    ],
)
def test_a_tool_is_called_and_its_result_is_used(calls, text, failed):
    case = next(case for case in cases.tools(Probes()) if case.id == "tool-weather")
    server = ToolServer(calls, text)
    (found,) = asking.ask_all(server, [case], Probes(), "candidate", 1, lambda _: None)
    assert found.failed == failed and server.asked[0]["tools"][0]["function"]["name"] == "get_weather"
    if not failed:
        turns = server.asked[1]["messages"]
        assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"] and turns[2] == {
            "role": "tool", "tool_call_id": "call-1", "content": "18 degrees, light rain",
        }  # fmt: skip
