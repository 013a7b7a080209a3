"""Correctness first: which arm loses, by what, and what is said of it."""

import subprocess

import pytest
from scipy import stats

from fieldbook import correctness, receipts, station, verdict, walk
from fieldbook.correctness import judge
from fieldbook.errors import Degenerate, GateFailed
from fieldbook.outcome import Outcome

NAMES = {"candidate": "PP2 15+15", "baseline": "PP1"}
SOUND = {"degeneration/en": [0, 12], "questions/en": [2, 16], "needle/en/204": [3, 6]}
LOOPS = SOUND | {"degeneration/en": [12, 12]}
WRONG = SOUND | {"questions/en": [16, 16]}


def judged(candidate, baseline, **more):
    return judge({"candidate": candidate, "baseline": baseline}, **more)


def outcome_of(candidate, baseline, values=((20.0, 20.2, 20.1), (10.0, 10.2, 10.1))):
    fast, slow = ([list(v), [x + 0.05 for x in v]] for v in values)
    found = verdict.compare("decode_c4_tok_s", fast, slow, 0.05)
    return Outcome(NAMES, "decode_c4_tok_s", "faster", (found,), {}, {}, judged(candidate, baseline))


def test_nobody_loses_where_both_answer_alike():
    found = judged(SOUND, SOUND)
    assert (found.loser, found.degenerate) == ("", False) and correctness.sentence(found, NAMES) == ""
    assert [row.probe for row in found.rows] == ["degeneration", "questions", "needle"]


def test_a_faster_arm_that_degenerates_loses():
    found = outcome_of(LOOPS, SOUND)
    assert found.primary.answer == "faster" and found.failure is Degenerate and found.failure.exit_status == 2
    assert found.line.startswith("PP2 15+15 loses on correctness, whatever its speed: PP2 15+15 degenerates: degenerate samples 12 of 12: above 77.9%")
    p = stats.fisher_exact([[12, 0], [0, 12]], alternative="greater").pvalue
    assert f"0 of 12: below 22.1%, p = {p:.2g} (Fisher, one-sided)" in found.line and "Speed: PP2 15+15 is faster than PP1" in found.line


def test_a_baseline_that_degenerates_loses_and_fails_nothing():
    found = outcome_of(SOUND, LOOPS)
    assert found.correctness.loser == "baseline" and found.correctness.degenerate and found.failure is None
    assert found.line.startswith("PP2 15+15 wins on correctness: PP1 degenerates: degenerate samples 12 of 12")


def test_wrong_answers_lose_with_status_1():
    found = outcome_of(WRONG, SOUND)
    assert found.failure is GateFailed and found.failure.exit_status == 1 and not found.correctness.degenerate
    assert "PP2 15+15 answers worse: questions: wrong answers 16 of 16" in found.line


def test_the_one_that_degenerates_loses_whatever_the_other_fails():
    assert judged(WRONG, LOOPS).loser == "baseline" and judged(LOOPS, WRONG).loser == "candidate"


def test_a_difference_that_chance_makes_loses_nothing():
    assert judged(SOUND | {"degeneration/en": [1, 12]}, SOUND).loser == ""
    assert judged(SOUND | {"degeneration/en": [12, 12]}, SOUND | {"degeneration/en": [11, 12]}).loser == ""


def test_an_arm_that_was_asked_nothing():
    found = judged({}, {})
    assert found.rows == () and found.loser == ""
    assert judged(SOUND, {}).loser == ""


@pytest.mark.parametrize(("ours", "theirs", "loser"), [((2, 40), (0, 40), "candidate"), ((0, 40), (1, 40), "baseline"), ((1, 40), (1, 40), "")])
def test_broken_answers_lose_by_one(ours, theirs, loser):
    found = judged(SOUND, SOUND, broken={"candidate": ours, "baseline": theirs})
    assert found.loser == loser and not found.degenerate
    assert ("broken answers" in correctness.sentence(found, NAMES)) == bool(loser)


def test_as_a_document():
    document = judged(LOOPS, SOUND).document()
    row = document["probes"][0]
    assert (document["loser"], document["degenerate"]) == ("candidate", True)
    assert (row["candidate"], row["baseline"], row["worse"]) == ([12, 12], [0, 12], "candidate")
    assert row["candidate_bounds"] == pytest.approx([0.05 ** (1 / 12), 1.0]) and row["baseline_bounds"] == pytest.approx([0.0, 1 - 0.05 ** (1 / 12)])


def receipt(name, data, passed=False):
    rest = {"box": "b", "kind": "live", "params_hash": "", "params": {}, "versions": {}, "started_at": "", "ended_at": "", "verdict": "", "figures": {}}
    return receipts.Receipt(notebook=name, passed=passed, data=data, **rest)


def test_which_failure_of_a_station_is_degeneration(changed):
    params = changed()
    asked = {"degeneration/en": [12, 12], "questions/en": [2, 16]}
    assert correctness.has_degenerated(receipt("06_benchmarks", {"measured_probes": asked}), params)
    assert not correctness.has_degenerated(receipt("06_benchmarks", {"measured_probes": asked}, passed=True), params)
    assert not correctness.has_degenerated(receipt("06_benchmarks", {"measured_probes": SOUND}), params)
    assert correctness.has_degenerated(receipt("07_verdict", {"degenerate": True}), params)
    assert not correctness.has_degenerated(receipt("07_verdict", {"degenerate": False, "measured_probes": asked}), params)
    assert not correctness.has_degenerated(None, params) and not correctness.has_degenerated(receipt("05_server_launch", {}), params)


@pytest.mark.parametrize(("asked", "status"), [({"degeneration/en": [12, 12]}, 2), ({"degeneration/en": [0, 12]}, 1)])
def test_a_walk_ends_with_the_status_of_bench(changed, tmp_path, monkeypatch, asked, status):
    params = changed({"box.kind": "recorded", "box.name": "cpu-smollm2-replay"})

    def fails(_params, name, folder):
        told = receipt(name, {"measured_probes": asked}).model_dump() | {"params_hash": params.hash}
        receipts.write(folder, receipts.Receipt.model_validate(told))
        return f"{name} failed: planted"

    monkeypatch.setenv("FIELDBOOK_REPORTS", str(tmp_path))
    monkeypatch.setattr(walk, "_run_one", fails)
    assert walk.run(params, only=6, run_dir=str(tmp_path / "box" / "run")).status == status


def test_a_station_that_needs_it_says_the_same(changed, tmp_path, monkeypatch):
    params = changed()
    st = station.Station("07_verdict", params, tmp_path, "")
    receipts.write(tmp_path, receipt("06_benchmarks", {"measured_probes": {"degeneration/en": [12, 12]}}))
    monkeypatch.setattr(station.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2, "", "box: 06 failed"))
    with pytest.raises(Degenerate, match="07_verdict needs 06_benchmarks, which failed: box: 06 failed"):
        st.earlier(6)


def test_a_station_closed_for_it_raises_what_says_so(changed, tmp_path):
    st = station.Station("07_verdict", changed(), tmp_path, receipts.now())
    with pytest.raises(Degenerate):
        st.close("it goes round", passed=False, degenerate=True)
    assert receipts.read(tmp_path, "07_verdict").passed is False
