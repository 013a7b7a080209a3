"""Token for token: what hardware said, and that the ledger knew every pool beforehand. All from data/boxes/h200-x1/equality.json, without a GPU."""

import copy
import json

import pytest
import yaml
from conftest import ROOT, guide

from fieldbook import bench, ceilings, equality, files, inventory, likeness, memory, params, patches, paths, proofs
from fieldbook.errors import BadInput

BOX = "h200-x1"


def run(tokens, logprobs=None, prompt=200):
    return {"repetition": 0, "prompt_tokens": prompt, "tokens": tokens, "logprobs": logprobs or [-1.0] * len(tokens)}


def arm(*runs, **more):
    return {"outcome": "ran", "runs": list(runs), **more}


def test_likeness_by_hand():
    one, other = arm(run([1, 2, 3, 4]), run([5, 6])), arm(run([1, 2, 9, 4], [-1.0, -1.5, -1.0, -1.0]), run([5, 6]))
    found = likeness.likeness(one, other)
    assert (found.same, found.tokens, found.logprob_difference) == (5, 6, 0.5)
    assert found.shown() == "5 of 6 tokens, log-probabilities at most 0.5 apart"
    assert likeness.likeness(one, one).shown() == "6 of 6 tokens, log-probabilities identical"


@pytest.mark.parametrize("other", [arm(run([1, 2])), arm(run([1, 2]), run([3], prompt=201)), arm(run([1, 2]), run([3, 4]))])
def test_arms_that_were_asked_other_things_are_not_compared(other):
    with pytest.raises(BadInput, match="asked different prompts"):
        likeness.likeness(arm(run([1, 2]), run([3])), other)


def judge(expect, candidate, **more):
    arms = {"ref": arm(run([1, 2, 3, 4])), "cand": candidate}
    return equality.judged({"says": "x", "arm": "cand", "like": "ref", "expect": expect, **more}, arms, BOX)


def test_a_claim_can_fail_either_way():
    equal, near = arm(run([1, 2, 3, 4])), arm(run([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.01]))
    half, wrong = arm(run([1, 2, 9, 9])), arm(run([9, 9, 9, 4]))
    assert [judge("same", one).holds for one in (equal, near, half, wrong)] == [True, False, False, False]
    assert judge("same", near, apart=0.02).holds and not judge("same", half, apart=9.0).holds
    # Half of the tokens is not yet other text; one token is a difference.
    assert [judge("other", one).holds for one in (equal, half, wrong)] == [False, False, True]
    assert [judge("differs", one).holds for one in (equal, half, wrong)] == [False, True, True]
    died = {"outcome": "ended with status 1", "error": "StopIteration in allocate_kv_cache"}
    assert [judge("ends", one, words="StopIteration").holds for one in (died, equal)] == [True, False]
    assert not judge("ends", {**died, "error": "CUDA out of memory"}, words="StopIteration").holds
    failed = judge("same", died)
    assert failed.holds is False and failed.measured == "cand ended with status 1: StopIteration in allocate_kv_cache"


def repeated(*runs):
    return arm(*({**one, "repetition": n} for n, one in enumerate(runs)))


def test_a_reference_that_does_not_repeat_itself_is_matched_by_any_of_its_answers():
    """Two answers of the reference to one prompt: each answer has to be one of them, in whichever order they came."""
    reference = repeated(run([1, 2, 3, 4]), run([1, 2, 7, 8]))
    assert likeness.repeats(reference).shown() == "2 of 4 tokens, log-probabilities identical"

    def among(*runs, apart=0.0):
        claim = {"says": "x", "arm": "cand", "like": "ref", "expect": "among", "apart": apart}
        return equality.judged(claim, {"ref": reference, "cand": repeated(*runs)}, BOX)

    turned = among(run([1, 2, 7, 8]), run([1, 2, 3, 4]))
    assert turned.holds and turned.measured == "8 of 8 tokens, log-probabilities identical (ref repeats itself in 2 of 4)"
    # Half of one answer and half of the other is neither.
    assert not among(run([1, 2, 3, 8]), run([1, 2, 3, 4])).holds
    near = run([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.02])
    assert not among(near, near).holds and among(near, near, apart=0.05).holds
    with pytest.raises(BadInput, match="asked different prompts"):
        likeness.nearest(repeated(run([1], prompt=9)), reference)


def test_what_a_patch_costs_is_told_beside_how_far_equal_arms_differ():
    def timed(step_s, prefill_s):
        return {"model": "dsa-12-layers", "times": {"streams": 8, "prefill_tokens": 4096, "step_s": step_s, "prefill_s": prefill_s}}

    arms = {
        "a": timed([0.0105, 0.0110, 0.0115], [0.21]), "b": timed([0.0110], [0.23]),
        "c": timed([0.0100], [0.2]), "d": timed([0.0100, 0.0102, 0.0098], [0.2]),
    }  # fmt: skip
    found = equality.cost({"patch": "index-relay", "says": "relayed", "with": ["a", "b"], "without": ["c", "d"]}, arms)
    assert found.step_s == (0.011, 0.01) and found.prefill_s == (pytest.approx(0.22), 0.2)
    # Medians of equal arms: 11 against 11 ms and 10 against 10; 0.23 against 0.21 s. 512 picked tokens of four bytes.
    assert (found.step_noise, round(found.prefill_noise, 4), found.added_bytes_per_token) == (0.0, 0.0952, 2048)
    assert found.shown().startswith("relayed: a decode step of 8 streams takes 11 ms against 10 (+10.0%; equal arms differ by 0.0%), a prompt of 4,096")


def test_the_relay_costs_what_its_bytes_take():
    """8.4 MB at the 1.91 GB/s of two ranks on one card are 4.4 ms; the prompt took 3.7 longer, and equal arms differ by 2.2."""
    (found,) = equality.costs_of(BOX)
    sent_s = found.prefill_tokens * found.added_bytes_per_token / 1.91e9
    assert sent_s == pytest.approx(4.4e-3, rel=0.01)
    assert found.prefill_s[0] - found.prefill_s[1] == pytest.approx(sent_s, abs=found.prefill_noise * found.prefill_s[1])
    text = guide("hardware")
    rows = (("decode step, 8 streams", found.step_s, found.step_noise), ("prompt of 4,096 tokens", found.prefill_s, found.prefill_noise))
    for what, (ours, theirs), noise in rows:
        assert f"| {what} | {ours * 1e3:.3g} ms | {theirs * 1e3:.3g} ms | {ours / theirs - 1:+.1%} | {noise:.1%} |" in text
    assert found.shown() in equality.proof_line("index-relay")


def test_an_arm_that_has_not_run_says_nothing():
    found = equality.judged({"says": "x", "arm": "a", "like": "b", "expect": "same"}, {"a": arm(run([1]))}, BOX)
    assert found.holds is None and found.measured == "not run: b" and found.row()["holds"] is None


def test_every_claim_that_was_tried_holds():
    claims = equality.claims_of(BOX)
    assert [f"{claim.says}: {claim.measured}" for claim in claims if claim.holds is False] == []
    assert all(claim.holds for claim in claims) and len(claims) == 33


def test_relay_and_sums_give_one_ranks_tokens_and_stock_does_not():
    """The figures of the run on the H200: 144 tokens of each arm, 24 for each of three prompts, twice."""
    told = {claim.says: claim.measured for name in ("index-relay", "tp-partial") for claim in equality.of_patch(name)}
    exact = "144 of 144 tokens, log-probabilities identical"
    for says in ("relayed, 4+8", "relayed, 9+3", "relayed, 4+8, 8-bit cache", "relayed, 4+8, CUDA graphs", "summed, TP2, 6+6", "summed and relayed, TP2, 4+8"):
        assert told[says] == exact
    assert told["stock, cut 4+8 through sharing layers"].startswith("5 of 144 tokens")
    assert told["stock, TP2, clean cut 6+6"].startswith("2 of 144 tokens")
    assert proofs.on_hardware(["index-relay"])[0]["patch"] == "index-relay" and "claims hold" in proofs.hardware(["index-relay", "cpu-eager-pp"])
    assert proofs.on_hardware(["cpu-eager-pp"]) == [{"hardware": "no GPU was asked about these"}]


RAN = {name: one for name, one in equality.read(BOX)["arms"].items() if equality.blocks(one) is not None}


@pytest.mark.parametrize("name", RAN)
def test_the_ledger_knows_every_pool_to_the_block(name):
    """Blocks and block size by vLLM 0.30.0 on the H200: 2 GiB set by hand, or bytes that its own profiling left."""
    found = RAN[name]["cache"]
    assert equality.blocks(RAN[name]) == {"blocks": found["blocks"], "block_size_tokens": found["block_size_tokens"]}


def test_pages_of_a_recurrent_state_in_two_types():
    """The state page is what blocks of attention are stretched to: 528 tokens for float32, 272 for bfloat16; pages of 1,081,344 and 557,056 bytes."""
    arms = equality.read(BOX)["arms"]
    seen = {name: (arms[name]["cache"]["block_size_tokens"], arms[name]["cache"]["groups"][0]["page_bytes"]) for name in ("q4-pp1-again", "q4-pp1-state-bf16")}
    assert seen == {"q4-pp1-again": (528, 1_081_344), "q4-pp1-state-bf16": (272, 557_056)}
    # Two stages that disagree start all the same; the engine takes the smaller block.
    assert arms["q4-pp2-state-mixed"]["outcome"] == "ran" and arms["q4-pp2-state-mixed"]["cache"]["block_size_tokens"] == 272


def test_the_edits_that_ran_are_those_of_the_catalogue():
    for name, one in equality.read(BOX)["arms"].items():
        asked = one["patches"] if one["alone"] else patches.catalogue.bundles_of(one["patches"])
        may = {site.file for patch in asked for site in patches.CATALOGUE[patch].sites if site.edit}
        assert set(one["edited"]) <= may and bool(one["edited"]) == bool(asked), name


def test_the_file_follows_the_plan():
    plan = yaml.safe_load((ROOT / "tools" / "equality" / "h200-x1.yml").read_text())
    found = equality.read(BOX)
    assert found["claims"] == plan["claims"] and set(found["arms"]) <= set(plan["arms"])
    named = {one for claim in plan["claims"] for one in (claim["arm"], claim.get("like")) if one}
    assert named <= set(plan["arms"])
    assert {claim["patch"] for claim in plan["claims"] if "patch" in claim} <= set(patches.CATALOGUE)


@pytest.mark.parametrize("name", ["h200-x1", "h200-x1-links", "two-cards", "cpu-links"])
def test_every_plan_is_whole(name, monkeypatch):
    """Each arm has a model of data/models, patches of the catalogue and params that the ledger takes; claims and costs name arms that there are."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "equality"))
    import prove

    plan = yaml.safe_load((ROOT / "tools" / "equality" / f"{name}.yml").read_text())
    arms = prove.arms_of(plan, [])
    for arm in arms.values():
        assert equality.params_of(arm).model.name == arm["model"] and set(arm["patches"]) <= set(patches.CATALOGUE)
        assert sum(arm["split"]) in (0, memory.model_spec(arm["model"]).num_hidden_layers)
    named = {one for claim in plan.get("claims", []) for one in (claim["arm"], claim.get("like")) if one}
    assert named | {one for cost in plan.get("costs", []) for one in (*cost["with"], *cost["without"])} <= set(arms)


def test_a_damaged_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "box_data_dir", lambda box: tmp_path / box)
    (tmp_path / "b").mkdir()
    for text in ("no json", "[]", json.dumps({"machine": "x"})):
        (tmp_path / "b" / equality.FILE).write_text(text)
        files.read_of_box.cache_clear()
        with pytest.raises(BadInput, match="data/boxes/b/equality.json: cannot be read"):
            equality.claims_of("b")


def test_prompts_of_a_comparison_differ_only_in_what_the_arm_is(monkeypatch):
    """Two arms of the plan that a claim compares are asked the same: lengths, tokens, repetitions, and all prompts together or not."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "equality"))
    import prove

    plan = yaml.safe_load((ROOT / "tools" / "equality" / "h200-x1.yml").read_text())
    arms = prove.arms_of(copy.deepcopy(plan), [])
    for claim in (one for one in plan["claims"] if "like" in one):
        asked = [[arms[one][key] for key in ("model", "lengths", "tokens", "repetitions", "together")] for one in (claim["arm"], claim["like"])]
        assert asked[0] == asked[1], claim["says"]
    with pytest.raises(SystemExit, match="a: unknown tensr; an arm has model, tensor"):
        prove.arms_of({"arms": {"a": {"model": "m", "tensr": 2}}}, [])


def test_the_guide_says_what_the_files_say():
    """Every claim, and every speed of the recorded walk, stands in docs/hardware.md as it follows from the data."""
    text = guide("hardware")
    for claim in equality.claims_of(BOX):
        measured = claim.measured if len(claim.measured) < 120 else claim.measured[:117] + "..."
        about = f"{claim.says} ({claim.patch})" if claim.patch else claim.says
        assert f"| {about} | {claim.predicted} | {measured} |" in text, about
    asked = params.load(ROOT / "params" / "h200-x1-replay.yml")
    samples = [s for s in bench.read_samples(paths.recorded_file("h200-x1-replay", "samples.jsonl")) if (s.arm, s.boot) == ("candidate", 1)]
    reach = ceilings.at_measured(asked, memory.model_spec(asked.model.name), inventory.read(asked))
    for row in bench.summary_rows(samples, params.metric_names(asked)):
        shown = f"{row['median']:,.1f}" if row["median"] < 1000 else f"{row['median']:,.0f}"
        name = params.metric_label(row["metric"])
        assert f"| {name} | {shown} | {row['median'] / reach[row['metric']]:.0%} |" in text, name
    assert f"{len(samples)} of {len(samples)} samples were sound" in text and not any(s.void for s in samples)
    assert f"at most {max(s.client_cores for s in samples):.2f} of a core" in text
    launch, last = (json.loads((ROOT / "data" / "boxes" / BOX / "walk" / f"{name}.json").read_text()) for name in ("05_server_launch", "07_verdict"))
    assert "the log told 909,728" in text and launch["figures"]["pool_tokens"]["value"] == 909_728 and "predicted 909,712" in launch["verdict"]
    ratios = {key: (figure["value"], figure["source"]) for key, figure in last["figures"].items() if key.endswith("_tok_s_ratio")}
    assert [round(ratios[f"decode_{one}_tok_s_ratio"][0], 2) for one in ("c1", "c32")] == [1.33, 1.40] and "p = 0.005" in last["verdict"]
    assert "1.33 times as fast (p = 0.005), 32 streams 1.40 times" in text and "4% slower" in text and "A/A band of 2%" in text
    assert ratios["prefill_8192_tok_s_ratio"][0] == 0.957 and "A/A band up to x1.021" in ratios["prefill_8192_tok_s_ratio"][1]
