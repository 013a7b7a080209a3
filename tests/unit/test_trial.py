"""The steps of a verdict: what each leaves, what is not done again, what is gone on with. Servers are stood in for; tests/live has real ones."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from conftest import ROOT
from samples import answer, boot_of

from fieldbook import arms, bench, bootlog, causal, files, inventory, probes, station, trial, verdict_tables
from fieldbook import params as params_module
from fieldbook.arms import Boot
from fieldbook.budget import Budget, Gpus
from fieldbook.errors import GateFailed, NoSamples

METRICS = ["prefill_128_tok_s", "prefill_512_tok_s", "decode_c1_tok_s", "decode_c4_tok_s"]
POOLS = {"candidate": 46592, "baseline": 23296}


class Fake:
    """Boots, measures and probes without a server, and says what was done. rates, failing and log can be changed."""

    def __init__(self, st):
        self.st, self.done, self.fail_at, self.counts = st, [], None, {"degeneration/en": [0, 12]}
        self.after = set()
        self.rates = {"candidate": 70.0, "baseline": 90.0}
        self.pools = dict(POOLS)

    def boot(self, st, name, layout, layers, first_token=True):
        self._do(f"boot {name}")
        log = bootlog.parse(f"INFO [kv_cache_utils.py:1] GPU KV cache size: {self.pools[name.partition('-')[0]]:,} tokens\n")
        return Boot(name, log, 12.34, [], None)

    def measure(self, st, booted, arm, rounds, limits, run, after=""):
        self.after.add(after)
        left = st.run_dir / "servers" / f"{st.unfinished}{booted.name}.jsonl"
        files.write_whole(left, "")
        self._do(f"measure {booted.name}")
        fresh = boot_of(arm, int(booted.name[-1]), self.rates[arm] * (1 + int(booted.name[-1]) / 200), METRICS)
        bench.keep_samples(st.run_dir / "samples.jsonl", fresh)
        return fresh

    def probe(self, st, booted, arm, asked=None):
        self._do(f"probe {arm}")
        failed = self.counts["degeneration/en"][0] and arm != "baseline"
        answers = [answer(arm, "goes round" if failed else "") for _ in range(12)]
        probes.keep_answers(st.run_dir / "answers.jsonl", answers)
        return answers, {"counts": probes.counts(answers)}

    def _do(self, what):
        if what == self.fail_at:
            raise GateFailed(f"planted: {what}")
        self.done.append(what)


@pytest.fixture
def opened(tmp_path, sections):
    """A station of notebook 07 whose earlier receipts are there: open(changes) -> Station."""

    def make(**changes):
        whole = {**sections, **changes}
        run = tmp_path / "run"
        for name, data in (
            ("01_hardware_inventory", {"inventory": inventory.read_captured(empty_box(tmp_path)).model_dump(), "ceilings_tok_s": {}}),
            ("03_partition_selection", {"layers_per_stage": [15, 15]}),
            ("05_server_launch", {"escaped": []}),
            ("06_benchmarks", {"measured_probes": {"degeneration/en": [0, 12]}, "server": {"state_file": None}}),
        ):
            if not (run / f"{name}.json").is_file():
                st = station.open_station(name, str(run), **whole)
                st.data = data
                st.close("ok")
        bench.keep_samples(run / "samples.jsonl", boot_of("candidate", 1, 70.0, METRICS))
        probes.keep_answers(run / "answers.jsonl", [answer("candidate") for _ in range(12)])
        return station.open_station("07_verdict", str(run), **whole)

    return make


def empty_box(tmp_path):
    (tmp_path / "captured").mkdir(exist_ok=True)
    (tmp_path / "captured" / "lscpu.txt").write_text("Architecture: x86_64\nCPU(s): 2\n")
    return tmp_path / "captured"


@pytest.fixture
def faked(opened, monkeypatch):
    """(trial, fake) with gates that pass."""
    st = opened()
    fake = Fake(st)
    monkeypatch.setattr(arms, "boot", fake.boot)
    monkeypatch.setattr(arms, "measure", fake.measure)
    monkeypatch.setattr(arms, "probe", fake.probe)
    monkeypatch.setattr(arms, "look", lambda *_: None)
    monkeypatch.setattr(trial.gates, "check", lambda _: [{"gate": "memory", "result": "pass", "reason": "", "escaped": False}])
    monkeypatch.setattr(trial.proofs, "states_after", lambda _: [])
    monkeypatch.setattr(trial.load, "client", lambda *_: contextlib.nullcontext())
    return trial.plan(st), fake


def whole(planned):
    return [trial.FUNCTIONS[step](planned) for step in trial.STEPS][-1]


IN_ORDER = [
    "boot baseline-1", "measure baseline-1", "probe baseline", "boot baseline-2", "measure baseline-2", "boot candidate-2", "boot candidate-2",
    "measure candidate-2", "probe candidate-2",
]  # fmt: skip


def test_the_steps_in_order_and_what_they_leave(faked):
    planned, fake = faked
    assert trial.missing(planned) == list(trial.STEPS)
    found = whole(planned)
    # The stand-in has no state file, so verify does not find what boot left up.
    assert fake.done == IN_ORDER and trial.missing(planned) == []
    assert found.outcome.primary.answer == "slower" and found.problem == "" and "as expected" in found.line
    left = {step: json.loads((planned.station.run_dir / "steps" / f"{step}.json").read_text()) for step in trial.STEPS}
    assert all(left[step]["params_hash"] == planned.station.params.hash and left[step]["done"] for step in trial.STEPS)
    assert all(left[step]["started_at"] <= left[step]["ended_at"] for step in trial.STEPS)
    assert left["preflight"]["data"]["pools"] == POOLS and left["boot"]["data"]["pool"] == {"predicted": 46592, "logged": 46592, "residual": 0}
    assert left["control"]["data"]["boots"]["baseline-2"] == {"name": "baseline-2", "pool_tokens": 23296, "vllm": None, "ready_s": 12.3, "available_kv_gib": {}}
    assert left["verdict"]["data"]["answer"] == "slower" and left["verdict"]["data"]["not_interleaved"] is False
    # The candidate was asked twice: by notebook 06 and on its fresh boot.
    assert found.counts["candidate"]["degeneration/en"] == [0, 24]
    # Nothing is left that a measurement made anew would go on with.
    assert list((planned.station.run_dir / "servers").iterdir()) == []


def test_what_is_done_is_not_done_again(faked):
    planned, fake = faked
    first = whole(planned)
    fake.done.clear()
    assert whole(planned).line == first.line and fake.done == []


def test_a_failure_is_gone_on_with_where_it_was(faked):
    planned, fake = faked
    trial.preflight(planned)
    fake.fail_at = "measure baseline-2"
    with pytest.raises(GateFailed, match="planted"):
        trial.control(planned)
    assert trial.missing(planned) == ["control", "boot", "verify", "verdict"]
    fake.fail_at, fake.done = None, []
    trial.control(planned)
    # The first boot was whole, its probes included.
    assert fake.done == ["boot baseline-2", "measure baseline-2"]
    assert fake.after == {trial.follows_on(planned, "control")}


def test_notebook_06_run_again_makes_all_but_preflight_anew(faked, opened):
    planned, fake = faked
    whole(planned)
    receipt = planned.station.run_dir / "06_benchmarks.json"
    document = json.loads(receipt.read_text())
    files.write_json(receipt, document | {"ended_at": "2031-01-01T00:00:00Z"})
    assert trial.missing(planned) == ["control", "boot", "verify", "verdict"]
    fake.done.clear()
    whole(planned)
    assert fake.done == IN_ORDER


def test_other_params_make_all_anew(faked, opened, sections):
    planned, _ = faked
    whole(planned)
    for name in ("01_hardware_inventory", "03_partition_selection", "05_server_launch", "06_benchmarks"):
        (planned.station.run_dir / f"{name}.json").unlink()
    other = trial.plan(opened(probes={"trials": 5}))
    assert trial.missing(other) == list(trial.STEPS)


def test_a_damaged_step_counts_as_none(faked):
    planned, _ = faked
    whole(planned)
    for text in ("", "{", "[]", '{"step": "boot"}'):
        (planned.station.run_dir / "steps" / "boot.json").write_text(text)
        assert trial.missing(planned) == ["boot"]


@pytest.mark.parametrize(("step", "needed"), [("boot", "control"), ("verify", "control and boot"), ("verdict", "preflight and control and boot and verify")])
def test_a_step_alone_says_what_it_needs(faked, step, needed):
    planned, fake = faked
    with pytest.raises(GateFailed, match=f"^{step}: needs {needed} first: `fieldbook trial FILE --step"):
        trial.FUNCTIONS[step](planned)
    assert fake.done == []


def test_a_refusal_is_not_kept_as_done_and_starts_nothing(faked, monkeypatch):
    planned, fake = faked
    row = {"gate": "memory", "result": "refuse", "reason": "too little", "ways_out": ["less"], "escape": "", "escaped": False}
    monkeypatch.setattr(trial.gates, "check", lambda _: [row])
    data = trial.preflight(planned)
    assert data["refused"].startswith("the candidate is refused: memory: too little") and "pools" not in data
    with pytest.raises(GateFailed, match="control: the candidate is refused"):
        trial.control(planned)
    assert fake.done == [] and trial.missing(planned) == list(trial.STEPS)


def test_a_degenerate_candidate_fails_and_a_wrong_pool_does(faked):
    planned, fake = faked
    fake.counts = {"degeneration/en": [12, 12]}
    found = whole(planned)
    assert found.degenerate and "loses on correctness" in found.problem and "Speed: " in found.problem
    assert found.outcome.failure.exit_status == 2


def test_a_pool_that_is_not_as_predicted_fails(faked):
    planned, fake = faked
    fake.pools["baseline"] = 1000
    found = whole(planned)
    assert found.problem == "pool not as predicted: PP1" and not found.degenerate


def test_a_pool_that_nobody_can_predict_fails_nothing(faked, monkeypatch):
    planned, _ = faked
    monkeypatch.setattr(trial.arms, "pool_of", lambda *_: (None, "nothing tells the memory of the cards"))
    found = whole(planned)
    before = trial.preflight(planned)
    assert before["pools"] == {"candidate": None, "baseline": None} and before["no_pool"]["baseline"].startswith("nothing tells")
    assert found.problem == "" and trial.boot(planned)["pool"]["residual"] is None
    rows = verdict_tables.arms(found, planned, {"candidate": None, "baseline": None})
    assert {row["quantity"]: row["PP1"] for row in rows}["tightest headroom"] == "memory of the cards unknown"
    assert verdict_tables.story(found, planned, before)[0]["model says"] is None


def test_both_arms_in_columns_and_the_story(faked):
    planned, _ = faked
    found = whole(planned)
    pools = {arm: trial.arms.pool_of(planned.station, one, planned.layers[arm])[0] for arm, one in planned.arms.items()}
    rows = {row["quantity"]: row for row in verdict_tables.arms(found, planned, pools)}
    assert rows["rank 1: KV space, GiB"]["PP2 15+15"] == 1 and rows["rank 1: KV space, GiB"]["PP1"] is None
    assert rows["degenerate samples"]["PP2 15+15"] == "0 of 24: below 11.7%" and rows["first token after, s"]["PP1"] == "12, 12"
    assert rows["tightest headroom"]["PP1"].startswith("rank 0: ") and rows["tightest headroom"]["PP1"].endswith(" MiB of the reserved KV space")
    story = verdict_tables.story(found, planned, trial.preflight(planned))
    assert [(row["model says"], row["measured"], row["measured / model"]) for row in story[:2]] == [(46592, 46592, 1), (23296, 23296, 1)]
    assert [row["what"] for row in story[2::2]] == METRICS and all(row["measured"] for row in story)


def test_headroom_of_cards_is_what_is_left_of_them():
    budget = Budget(1000, 900, 300, 10, 20, 30, 40, "estimated", 0)
    ranks = [SimpleNamespace(rank=r, budget=budget, weights_bytes=300, kv_bytes_per_block=b, available_kv_bytes=500) for r, b in ((0, 5), (1, 10))]
    # 1000 - 300 - (10 + 20 + 30 + 40) - 40 blocks of 10 bytes.
    assert causal.headroom(SimpleNamespace(ranks=ranks, blocks=40)) == causal.Headroom(1, 200, "of the card")


def test_arms_of_one_layout_get_names_that_tell_them_apart():
    assert trial.named({"candidate": "PP1", "baseline": "PP1"}) == {"candidate": "PP1 (candidate)", "baseline": "PP1 (baseline)"}
    assert trial.named({"candidate": "PP2 15+15", "baseline": "PP1"}) == {"candidate": "PP2 15+15", "baseline": "PP1"}


def test_a_recorded_box_without_samples_says_so_in_one_line(opened, monkeypatch, tmp_path):
    st = opened(box={"name": "nobody-s-box", "kind": "live"})
    planned = trial.plan(st)
    monkeypatch.setattr(type(st), "live", property(lambda _: False))
    assert not trial.has_samples(st)
    for step in ("control", "boot", "verify", "verdict"):
        with pytest.raises(NoSamples, match="data/reports/nobody-s-box/samples.jsonl: no samples were recorded"):
            trial.FUNCTIONS[step](planned)


def test_a_pool_is_held_against_the_logs_own_kv_space_where_the_first_figure_was_an_estimate():
    """On a GPU the space is estimated before the launch: the verdict must not fail for the estimate, and must for arithmetic that does not come out."""
    asked = params_module.load(ROOT / "params" / "h200-x1.yml")
    cards = Gpus((143_155 * 2**20,))

    def off(predicted, logged, space):
        return arms.pool_is_off(asked, asked.verdict.baseline, (32,), predicted, logged, space, cards)

    assert not off(910_512, 909_728, {0: 111.05})
    assert off(910_512, 907_856, {0: 111.05}) and not off(910_512, 907_856, {0: 110.82})
    # What the log does not tell, or nobody predicted, is not held against anything; what came out as predicted needs no log.
    assert not off(910_512, 907_856, {}) and not off(None, 1, {}) and not off(910_512, None, {0: 1.0}) and not off(5, 5, {0: 111.05})
    by_hand = asked.model_copy(update={"engine": asked.engine.model_copy(update={"kv_cache_gib_per_rank": 8})})
    assert arms.pool_is_off(by_hand, asked.parallel, (32,), 65_536, 65_520, {}, cards)
