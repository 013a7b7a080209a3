"""`fieldbook compare`: finished runs out of folders and .zip files, what is told of them, and what is refused in one line."""

import json
import math
import shutil
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT
from samples import answer, boot_of
from scipy import stats

from fieldbook import bench, comparing, correctness, files, outcome, params, paths, probes, receipts, runfiles
from fieldbook.errors import BadInput

METRICS = ["prefill_128_tok_s", "prefill_512_tok_s", "decode_c1_tok_s", "decode_c4_tok_s"]


@pytest.fixture
def made(tmp_path, changed):
    """A finished run of the default box: made(name, rates, changes, ...) -> its folder."""

    def make(name, candidate=70.0, baseline=90.0, changes=None, loops=(), started="2026-01-01T00:00:00Z", vllm="0.30.0", finished=True, box="cpu-smollm2"):
        run, loaded = tmp_path / name, changed(changes or {})

        def write(station, data, passed=True):
            told = {"box": box, "kind": "live", "params_hash": loaded.hash, "params": loaded.shareable(), "versions": {"vllm": vllm}}
            told |= {"started_at": started, "ended_at": started, "verdict": "", "figures": {}}
            receipts.write(run, receipts.Receipt(notebook=station, passed=passed, data=data, **told))

        arms = {"candidate": candidate, "baseline": baseline}
        write("03_partition_selection", {"layers_per_stage": [15, 15]})
        answers = [answer(arm, "goes round" if arm in loops else "") for arm in arms for _ in range(12)]
        write("06_benchmarks", {"measured_probes": probes.counts([a for a in answers if a.arm == "candidate"])}, passed="candidate" not in loops)
        bench.write_samples(
            run / "samples.jsonl", [s for arm, rate in arms.items() for boot in (1, 2) for s in boot_of(arm, boot, rate * (1 + boot / 200), METRICS)]
        )
        probes.keep_answers(run / "answers.jsonl", answers)
        if finished:
            write("07_verdict", {"measured_answer": "slower", "measured_probes": {}})
        return run

    return make


def zipped(folder, target, top="run", extra=()):
    with zipfile.ZipFile(target, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{top}/{file.relative_to(folder)}")
        for name, text in extra:
            archive.writestr(name, text)
    return target


def document(command, *words):
    status, out, err = command("compare", *words, "--json")
    return status, json.loads(out) if out else None, err


def test_the_two_arms_of_one_run(made, command):
    status, found, err = document(command, made("a"))
    assert (status, err) == (0, "")
    assert (found["answer"], found["metric"], found["expectation"], found["p_value"]) == ("slower", "decode_c4_tok_s", "slower", 0.005)
    assert found["verdict"].startswith("PP2 15+15 is slower than PP1 in decode, 4 streams: ") and found["verdict"].endswith("as expected")
    assert (found["not_interleaved"], found["repetitions_that_would_decide"], found["correctness"]["loser"]) == (False, None, "")
    assert [m["metric"] for m in found["metrics"]] == METRICS and found["metrics"][0]["p_holm"] == 0.015 and found["metrics"][3]["p_holm"] is None
    assert found["aa_band"] == pytest.approx(stats.t.isf(0.0175, 2) * math.log(1.01 / 1.005) / math.sqrt(2), rel=0.02)


def test_as_text(made, command):
    status, out, _ = command("compare", made("a"))
    assert status == 0 and "decode_c4_tok_s (primary)" in out and "degenerate samples  0 of 12: below 22.1%" in out
    assert out.strip().splitlines()[-1].startswith("PP2 15+15 is slower than PP1")


def test_another_metric_has_no_expectation_but_the_one_given(made, command):
    _, found, _ = document(command, made("a"), "--metric", "prefill_512_tok_s")
    assert (found["metric"], found["expectation"]) == ("prefill_512_tok_s", None) and found["verdict"].endswith("nothing was expected")
    _, found, _ = document(command, made("a"), "--metric", "prefill_512_tok_s", "--expect", "faster")
    assert found["verdict"].endswith("expected was 'faster'")
    assert command("compare", made("a"), "--metric", "decode_c9_tok_s")[0] == 2
    assert command("compare", made("a"), "--expect", "better")[0] == 2


def test_two_runs_are_not_interleaved_and_say_so(made, command):
    one, other = made("a", candidate=60.0), made("b", candidate=90.0, started="2026-02-02T00:00:00Z", vllm="0.31.0", changes={"engine.max_num_seqs": 6})
    status, found, _ = document(command, one, other, "--expect", "slower")
    assert status == 0 and found["not_interleaved"] and found["answer"] == "slower"
    assert (found["candidate"], found["baseline"]) == ("PP2 15+15 (run A)", "PP2 15+15 (run B)")
    assert "the arms were not measured in turn" in found["verdict"]
    assert "measured: 2026-01-01T00:00:00Z, 2026-02-02T00:00:00Z" in found["differences"] and "vllm: 0.30.0, 0.31.0" in found["differences"]
    assert "engine.max_num_seqs: 8, 6" in found["differences"]
    text = command("compare", one, other)[1]
    assert "differs: vllm: 0.30.0, 0.31.0" in text


def test_the_same_baseline_in_both_is_an_aa_over_the_time_between(made, command):
    # The candidates differ by 20%; so does the box between the two runs, as its baseline tells.
    one, other = made("a", candidate=70.0, baseline=72.0), made("b", candidate=87.0, baseline=90.0)
    _, found, _ = document(command, one, other)
    assert found["answer"] == "cannot tell" and found["noise_floor"] > 0.2
    assert found["repetitions_that_would_decide"] is None and "within the A/A band" in found["why_cannot_tell"]
    # With other baselines nothing tells of the time between.
    other = made("c", candidate=87.0, baseline=90.0, changes={"verdict.baseline": {"pipeline_parallel_size": 3}})
    assert document(command, one, other)[1]["answer"] == "slower"


def test_a_candidate_that_degenerates_is_status_2(made, command):
    status, found, err = document(command, made("a", candidate=99.0, loops=("candidate",)))
    assert status == 2 and found["answer"] == "faster" and found["correctness"]["loser"] == "candidate"
    assert found["verdict"].startswith("PP2 15+15 loses on correctness") and err.count("\n") == 1
    status, found, _ = document(command, made("b", loops=("baseline",)))
    assert status == 0 and "wins on correctness: PP1 degenerates" in found["verdict"]


def test_a_zip_is_read_as_its_folder(made, command, tmp_path, monkeypatch):
    run = made("a")
    packed = zipped(run, tmp_path / "run.zip", top="some run")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    _, of_zip, _ = document(command, packed)
    assert of_zip["answer"] == "slower" and sorted(tmp_path.rglob("*")) == before
    of_folder = document(command, run)[1]
    assert {**of_zip, "runs": []} == {**of_folder, "runs": []}
    assert document(command, packed, run)[1]["answer"] in ("same", "cannot tell")


BAD_ZIPS = {
    "leads out": ([("../evil.json", "{}")], "unsafe name"),
    "absolute": ([("/etc/evil", "{}")], "unsafe name"),
    "of Windows": ([("run\\..\\evil", "{}")], "unsafe name"),
    "two folders": ([("other/06_benchmarks.json", "{}")], "expected one folder"),
    "a file beside": ([("stray.txt", "")], "expected one folder"),
}


@pytest.mark.parametrize("kind", BAD_ZIPS)
def test_a_zip_that_is_none_of_ours(made, command, tmp_path, kind):
    extra, words = BAD_ZIPS[kind]
    status, out, err = command("compare", zipped(made("a"), tmp_path / "bad.zip", extra=extra))
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def _damage(name, text):
    return lambda run: (run / name).write_text(text)


UNFIT = {
    "no such run": (shutil.rmtree, "no such run"),
    "no run": (lambda run: (run / "06_benchmarks.json").unlink(), "no run: it has no 06_benchmarks.json"),
    "unfinished": (lambda run: (run / "07_verdict.json").unlink(), "unfinished"),
    "no samples": (lambda run: (run / "samples.jsonl").unlink(), "no samples.jsonl"),
    "a damaged receipt": (_damage("06_benchmarks.json", "{"), "damaged"),
    "no receipt": (_damage("06_benchmarks.json", "{}"), "not a receipt"),
    "damaged samples": (_damage("samples.jsonl", "{}\n"), "samples.jsonl: not of this release"),
    "damaged answers": (_damage("answers.jsonl", "x\n"), "answers.jsonl: not of this release"),
    "a split that is none": (lambda run: (run / "03_partition_selection.json").unlink(), "unfinished"),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("second", [False, True])
def test_what_cannot_be_compared_is_one_line(made, command, kind, second):
    change, words = UNFIT[kind]
    run = made("unfit")
    change(run)
    status, out, err = command("compare", *([made("fit")] if second else []), run)
    assert (status, out) == (2, "") and words in err and err.startswith("fieldbook: ") and err.count("\n") == 1


def test_a_file_that_is_no_zip(command, tmp_path):
    (tmp_path / "x.zip").write_text("no zip")
    status, _, err = command("compare", tmp_path / "x.zip")
    assert status == 2 and "neither a run folder nor a .zip" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"benchmarks.decode_output_tokens": 16}, "other benchmark shapes: benchmarks.decode_output_tokens 32 and 16"),
        ({"benchmarks.decode_concurrency": [1, 4, 8]}, "other benchmark shapes: benchmarks.decode_concurrency"),
    ],
)
def test_other_shapes_are_not_compared(made, command, changes, words):
    status, _, err = command("compare", made("a"), made("b", changes=changes))
    assert status == 2 and words in err


def test_other_boxes_only_where_asked(made, command):
    one, other = made("a"), made("b", box="another")
    status, _, err = command("compare", one, other)
    assert status == 2 and "other boxes: cpu-smollm2 and another; --any-box" in err
    status, found, _ = document(command, one, other, "--any-box")
    assert status == 0 and "box: cpu-smollm2, another" in found["differences"]


def test_another_model_is_not_compared(made, command, monkeypatch):
    one, other = made("a"), made("b")
    document_ = json.loads((other / "06_benchmarks.json").read_text())
    document_["params"]["model"]["name"] = "glm-5.3"
    files.write_json(other / "06_benchmarks.json", document_)
    monkeypatch.setattr(comparing.trial, "layouts", lambda *_: ({}, {"candidate": "PP2", "baseline": "PP1"}))
    status, _, err = command("compare", one, other, "--any-box")
    assert status == 2 and "other models: smollm2-135m-instruct" in err


def test_a_trial_without_the_notebook_is_finished_by_its_step(made, command):
    run = made("a", finished=False)
    assert command("compare", run)[0] == 2
    made_with = json.loads((run / "06_benchmarks.json").read_text())["params_hash"]
    files.write_json(run / "steps" / "verdict.json", {"step": "verdict", "done": True, "params_hash": made_with, "data": {}})
    assert command("compare", run)[0] == 0
    files.write_json(run / "steps" / "verdict.json", {"step": "verdict", "done": True, "params_hash": "other", "data": {}})
    status, _, err = command("compare", run)
    assert status == 2 and "other params" in err


def test_the_recorded_run(made, command, tmp_path):
    # Receipts of the recorded box are made here; its samples and answers are those in data/reports.
    run, loaded = made("replay"), params.load(paths.root() / "params" / "cpu-smollm2-replay.yml")
    for name in ("samples.jsonl", "answers.jsonl"):
        (run / name).unlink()
    for name in ("03_partition_selection", "06_benchmarks", "07_verdict"):
        told = json.loads((run / f"{name}.json").read_text())
        told |= {"box": loaded.box.name, "kind": "recorded", "params": loaded.shareable(), "params_hash": loaded.hash}
        files.write_json(run / f"{name}.json", told)
    status, found, _ = document(command, run)
    assert status == 0 and found["answer"] == "cannot tell" and found["p_value"] == 0.005
    assert found["ratio"] == pytest.approx(0.789, abs=1e-3) and found["repetitions_that_would_decide"] is None
    assert found["correctness"]["loser"] == "" and found["correctness"]["probes"][0]["candidate"] == [0, 16]
    again = document(command, run, run)[1]
    # Its boots differ by 22%, more than anything is called the same within.
    assert again["ratio"] == 1 and again["answer"] == "cannot tell"


def test_members_are_bounded(tmp_path, monkeypatch):
    packed = tmp_path / "x.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("run/a.json", "{}")
    monkeypatch.setattr(runfiles, "MOST_BYTES", 1)
    with runfiles.RunFiles(str(packed)) as found, pytest.raises(BadInput, match="more than a run has"):
        found.json("a.json")
    assert Path(packed).is_file()


# What a real server measured whose steps took 1 / 0.7 of their time (the candidate), beside one whose tokens go round (the baseline):
# tests/live/test_verdict.py.
PLANTED = ROOT / "tests" / "unit" / "outputs" / "planted"


def planted():
    samples = bench.read_samples(PLANTED / "samples.jsonl")
    metrics = ["prefill_64_tok_s", "decode_c2_tok_s"]
    again = {metric: bench.repeated_rounds(samples, metric) for metric in metrics}
    return outcome.compared(bench.by_boot(samples, metrics), "decode_c2_tok_s", 0.05, again)


def test_a_planted_slowdown_of_30_percent_is_called_slower_on_a_real_server():
    found, missing, _ = planted()
    primary = next(c for c in found if c.metric == "decode_c2_tok_s")
    assert (primary.answer, primary.p_value, missing) == ("slower", 0.005, {}) and primary.ratio == pytest.approx(0.67, abs=0.01)
    # The arms exchanged.
    samples = bench.read_samples(PLANTED / "samples.jsonl")
    turned = [s.model_copy(update={"arm": {"candidate": "baseline", "baseline": "candidate"}[s.arm]}) for s in samples]
    assert outcome.compared(bench.by_boot(turned, ["decode_c2_tok_s"]), "decode_c2_tok_s", 0.05, {})[0][0].answer == "faster"


def test_a_planted_degenerate_arm_loses_whatever_its_speed():
    answers = probes.read_answers(PLANTED / "answers.jsonl")
    counts = {arm: probes.counts([a for a in answers if a.arm.partition("-")[0] == arm]) for arm in ("candidate", "baseline")}
    judged = correctness.judge(counts, correctness.broken(answers))
    assert (judged.loser, judged.degenerate) == ("baseline", True)
    said = correctness.sentence(judged, {"candidate": "A", "baseline": "B"})
    assert said.startswith("A wins on correctness: B degenerates: degenerate samples 6 of 6: above 60.7%, against 0 of 12: below 22.1%")
    # As the candidate it fails the run with exit status 2, and its speed saves nothing.
    turned = correctness.judge({"candidate": counts["baseline"], "baseline": counts["candidate"]})
    found, missing, adjusted = planted()
    result = outcome.Outcome({"candidate": "B", "baseline": "A"}, "decode_c2_tok_s", "faster", found, missing, adjusted, turned)
    assert result.failure is not None and result.failure.exit_status == 2 and result.line.startswith("B loses on correctness, whatever its speed")


def test_a_word_too_many_names_the_help_of_its_own_command(capsys):
    from fieldbook.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["compare", "a", "b", "c"])
    assert ended.value.code == 2 and capsys.readouterr().err == "fieldbook: compare: unrecognized arguments: c; see `fieldbook compare --help`\n"
