"""verdict.baseline.extra_args and extra_env: one knob that the baseline alone has, from the params file to the command line, with no secret told."""

import pytest

from fieldbook import gates, server
from fieldbook.command import command_line
from fieldbook.errors import BadInput
from fieldbook.gates import room

SECRET = "hunter22hunter22"
BASE = {"pipeline_parallel_size": 1}


def commands(params):
    arms = (params.parallel, (15, 15)), (params.verdict.baseline, (30,))
    return [command_line(params, arm, layers, 8000) for arm, layers in arms]


def test_the_baseline_alone_gets_them(changed):
    extras = {"extra_args": ["--seed", "7"], "extra_env": {"NOTE": "base", "MORE": "1"}}
    params = changed({"server.extra_args": ["--disable-log-stats"], "server.extra_env": {"NOTE": "both"}, "verdict.baseline": {**BASE, **extras}})
    ours, theirs = commands(params)
    assert ours.argv[-1] == "--disable-log-stats" and theirs.argv[-3:] == ("--disable-log-stats", "--seed", "7")
    assert ours.env["NOTE"] == "both" and "MORE" not in ours.env
    # A variable given for the baseline replaces the server section's.
    assert (theirs.env["NOTE"], theirs.env["MORE"]) == ("base", "1")
    assert params.hash != changed({"verdict.baseline": BASE}).hash


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("extra_env", {"HF_TOKEN": SECRET}, "verdict.baseline.extra_env.HF_TOKEN: expected $NAME"),
        ("extra_env", {"VLLM_PP_LAYER_PARTITION": "15,15"}, "verdict.baseline.extra_env.VLLM_PP_LAYER_PARTITION: is set by parallel.layer_partition"),
        ("extra_env", {"A=B": "x"}, "verdict.baseline.extra_env: key 1 is no name of a variable"),
        ("extra_env", {"OMP_NUM_THREADS": "7"}, "verdict.baseline.extra_env.OMP_NUM_THREADS: is set by engine.omp_threads_per_rank"),
        ("extra_env", {"HF_TOKEN": [SECRET]}, "verdict.baseline.extra_env.HF_TOKEN: got a list"),
        ("extra_args", f"--api-key {SECRET}", "verdict.baseline.extra_args: got a str"),
        ("extra_args", ["--api-key", SECRET], "verdict.baseline.extra_args.0: --api-key is set by server.api_key"),
        ("extra_args", ["--hf-token", SECRET], "verdict.baseline.extra_args.0: holds a secret"),
        ("extra_args", ["--max-num-seqs", "4"], "verdict.baseline.extra_args.0: --max-num-seqs is set by engine.max_num_seqs"),
        ("extra_arg", [], "verdict.baseline.extra_arg: unknown key; did you mean 'extra_args'?"),
    ],
)
def test_what_must_not_stand_there_is_one_line_without_a_secret(changed, key, value, words):
    with pytest.raises(BadInput) as refused:
        changed({"verdict.baseline": {**BASE, key: value}})
    assert words in str(refused.value) and SECRET not in str(refused.value) and "\n" not in str(refused.value)


def test_a_secret_as_a_name_is_told_as_its_name(changed):
    params = changed({"verdict.baseline": {**BASE, "extra_env": {"HF_TOKEN": "$HF_TOKEN"}}})
    assert params.shareable()["verdict"]["baseline"]["extra_env"] == {"HF_TOKEN": "$HF_TOKEN"}
    assert commands(params)[1].document()["env"]["HF_TOKEN"] == "$HF_TOKEN" and "HF_TOKEN" not in commands(params)[0].env


def test_gates_look_at_the_arm_that_is_meant(changed, tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    monkeypatch.setenv("VLLM_KNOB", "1")
    params = changed({"verdict.baseline": {**BASE, "extra_env": {"A": "$NOT_SET_ANYWHERE", "VLLM_KNOB": "2"}}})
    ours, theirs = (gates.looking.facts_of(params, arm, tmp_path) for arm in (params.parallel, params.verdict.baseline))
    assert (ours.unset, theirs.unset) == ((), ("$NOT_SET_ANYWHERE",))
    assert "VLLM_KNOB" in ours.inherited and "VLLM_KNOB" not in theirs.inherited


def test_cards_and_host_memory_of_the_arm(changed):
    cuda = {"engine.device": "cuda", "engine.kv_cache_gib_per_rank": 1}
    params = changed({**cuda, "verdict.baseline": {**BASE, "extra_env": {"CUDA_VISIBLE_DEVICES": "3"}, "extra_args": ["--cpu-offload-gb", "2"]}})
    assert server.cards_of(params, params.verdict.baseline) == [3] and server.cards_of(params, params.parallel) == [0, 1]
    assert room.host_weights_bytes(params, params.verdict.baseline) == 2 * 2**30 and room.host_weights_bytes(params) == 0
