"""`fieldbook trial` and `fieldbook compare` on the recorded replay, walked once: the commands say what notebook 07 says."""

import json
import os

import pytest
from conftest import ROOT

from fieldbook import params, receipts, walk

FILE = "params/cpu-smollm2-replay.yml"


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Run folder of a finished walk of the recorded box."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    before = {name: os.environ.get(name) for name in ("FIELDBOOK_ROOT", "FIELDBOOK_REPORTS")}
    os.environ |= {"FIELDBOOK_ROOT": str(ROOT), "FIELDBOOK_REPORTS": str(folder.parent)}
    try:
        assert walk.run(params.load(ROOT / FILE), run_dir=str(folder)).status == 0
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return folder


def test_trial_says_what_the_notebook_says(replayed, command):
    said = receipts.read(replayed, "07_verdict")
    status, out, err = command("trial", ROOT / FILE, "--run-dir", replayed, "--json")
    document = json.loads(out)
    assert status == 0 and document["verdict"] == said.verdict and document["run_dir"] == str(replayed)
    assert list(document["steps"]) == ["preflight", "control", "boot", "verify"] and "verdict: ..." in err
    assert document["steps"]["preflight"]["pools"] == {"candidate": 46592, "baseline": 23296}
    assert said.data["measured_outcome"] | {"problem": ""} == {k: v for k, v in document.items() if k not in ("steps", "run_dir")}
    assert said.data["degenerate"] is False


def test_one_step_alone(replayed, command):
    status, out, _ = command("trial", ROOT / FILE, "--run-dir", replayed, "--step", "preflight")
    assert status == 0 and out.startswith("Preflight\n") and "46,592" in out and "Verdict" not in out
    status, out, _ = command("trial", ROOT / FILE, "--run-dir", replayed, "--step", "verdict")
    assert status == 0 and "traffic floor, µs a token" in out and "rank 1: weights, GiB" in out
    assert out.strip().splitlines()[-1] == receipts.read(replayed, "07_verdict").verdict


def test_compare_says_it_as_well(replayed, command):
    status, out, _ = command("compare", replayed, "--json")
    assert status == 0 and json.loads(out)["verdict"] == receipts.read(replayed, "07_verdict").verdict


def test_the_tables_of_the_notebook(replayed):
    text = (replayed / "07_verdict.ipynb").read_text()
    steps = [f"## {step}" for step in ("Preflight", "Control", "Boot", "Verify", "Verdict")]
    assert [w for w in ("tightest headroom", "of the reserved KV space", "measured / model", "weights read, and links", *steps) if w not in text] == []
