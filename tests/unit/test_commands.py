"""The committed command lines, what drifts from them, and what decides on each option: release tables of drafting, runner, links."""

import json
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT

from fieldbook import drafts, expected, memory, params, serve
from fieldbook.command import command_line, tensor_groups, without_custom_all_reduce
from fieldbook.schema import Engine, Parallel

GLM = str(ROOT / "params" / "a100-x8-glm53.yml")
QWEN = str(ROOT / "params" / "cmp170hx-x3.yml")


def options(file, *changes):
    """argv and env of a params file with changes, by its own recorded links."""
    command = expected.command_of(serve.with_changes(file, list(changes)))
    return command.argv, command.env


def value(argv, option):
    return argv[argv.index(option) + 1] if option in argv else None


@pytest.mark.parametrize("file", expected.all_params_files(), ids=lambda file: file.stem)
def test_every_params_file_starts_what_is_committed(file):
    assert expected.drift(file) == []


LOOSE = ("engine.available_kv_gib=[]", "engine.other_boots=[]")


def test_the_layouts_of_the_second_report_by_what_the_report_says():
    """Values of the report, not of this code: TP4 x PP2 41+37, drafting 3, fp8_ds_mla, 524,288 tokens; and its other layouts."""
    by_name = {entry["layout"]: entry for entry in expected.entries(GLM)}
    assert len(by_name) == 6
    default = next(e for name, e in by_name.items() if name.startswith("the default"))
    argv, env = default["argv"], default["env"]
    told = {option: value(argv, option) for option in argv if option.startswith("--")}
    assert (told["--tensor-parallel-size"], told["--pipeline-parallel-size"], told["--max-model-len"]) == ("4", "2", "524288")
    assert told["--kv-cache-dtype"] == "fp8_ds_mla" and json.loads(told["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 3}
    assert told["--gpu-memory-utilization"] == "0.95" and "--disable-custom-all-reduce" in told and told["--host"] == "127.0.0.1"
    assert env["VLLM_PP_LAYER_PARTITION"] == "41,37" and env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    # Every NCCL knob was a loss, so none is set.
    assert {name for entry in by_name.values() for name in entry["env"] if name.startswith("NCCL")} == {"NCCL_SOCKET_IFNAME"}, "where it listens, no more"
    others = {name.partition(",")[0]: entry for name, entry in by_name.items()}
    one = others["one stage"]
    assert value(one["argv"], "--tensor-parallel-size") == "8" and value(one["argv"], "--max-model-len") == "352000"
    assert "VLLM_PP_LAYER_PARTITION" not in one["env"] and "--disable-custom-all-reduce" not in one["argv"]
    wide = others["throughput"]
    assert value(wide["argv"], "--kv-cache-dtype") == "bfloat16" and wide["env"]["VLLM_PP_LAYER_PARTITION"] == "41,37"
    longest = others["a million tokens"]
    assert longest["env"]["VLLM_PP_LAYER_PARTITION"] == "20,20,20,18" and "--speculative-config" not in longest["argv"]
    assert value(longest["argv"], "--max-model-len") == "1048576" and value(longest["argv"], "--pipeline-parallel-size") == "4"
    assert others["before tuning"]["env"]["VLLM_PP_LAYER_PARTITION"] == "39,39"


def test_the_layouts_of_the_first_report():
    pipeline, dep = expected.entries(QWEN)
    assert pipeline["env"]["VLLM_PP_LAYER_PARTITION"] == "16,16,16" and value(pipeline["argv"], "--mamba-ssm-cache-dtype") == "float32"
    assert value(dep["argv"], "--data-parallel-size") == "3" and "--enable-expert-parallel" in dep["argv"]
    assert "VLLM_PP_LAYER_PARTITION" not in dep["env"] and "--mamba-ssm-cache-dtype" not in dep["argv"]
    assert all(value(entry["argv"], "--max-model-len") == "200000" for entry in (pipeline, dep))


@pytest.fixture
def committed(tmp_path, sections):
    """A params file with its expectation, in a folder of its own."""
    file = tmp_path / "params" / "box.yml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(sections))
    expected.update(file)
    return file


def test_drift_exits_2_and_shows_the_difference(command, committed):
    assert command("defaultcheck", committed)[0] == 0 and command("defaultcheck")[0] == 0
    document = yaml.safe_load(committed.read_text())
    document["engine"]["max_num_seqs"] = 4
    document["server"] = {"extra_env": {"NOTE": "1"}}
    committed.write_text(yaml.safe_dump(document))
    status, out, err = command("defaultcheck", committed)
    assert status == 2 and err.count("\n") == 1 and "not the command line that is committed" in err and "--update" in err
    assert "argv: - --max-num-seqs 8" in out and "argv: + --max-num-seqs 4" in out and "env: + NOTE=1" in out
    status, out, _ = command("defaultcheck", committed, "--json")
    assert status == 2 and list(json.loads(out)["differs"].values())[0] == [
        "as the params say, argv: - --max-num-seqs 8", "as the params say, argv: + --max-num-seqs 4", "as the params say, env: + NOTE=1",
    ]  # fmt: skip
    assert command("defaultcheck", committed, "--update")[0] == 0 and command("defaultcheck", committed)[0] == 0


def test_order_counts(committed):
    file = expected.file_of(committed)
    document = yaml.safe_load(file.read_text())
    argv = document[0]["argv"]
    at, other = argv.index("--dtype"), argv.index("--max-model-len")
    argv[at : at + 2], argv[other : other + 2] = argv[other : other + 2], argv[at : at + 2]
    file.write_text(yaml.safe_dump(document))
    assert expected.drift(committed)


def test_an_expectation_that_is_missing_or_none_is_one_line(command, committed, tmp_path):
    file = expected.file_of(committed)
    wrong = {"[": "line 1", "{}": "expected a list of layouts", "- {layout: x}": "layout 1: expected layout, changes, argv, env", None: "missing"}
    for text, why in wrong.items():
        file.write_text(text) if text is not None else file.unlink()
        status, out, err = command("defaultcheck", committed)
        assert (status, out) == (2, "") and why in err and err.count("\n") == 1
    status, _, err = command("defaultcheck", tmp_path / "none.yml")
    assert status == 2 and "no such params file" in err


def test_expectations_are_the_same_on_every_machine():
    text = "".join(expected.file_of(file).read_text() for file in expected.all_params_files())
    assert str(ROOT) not in text and "/home" not in text and "/usr" not in text


# What decides on an option.


def links(*pairs):
    return SimpleNamespace(links=[SimpleNamespace(a=a, b=b, kind=kind, nvlinks=n) for a, b, kind, n in pairs])


def test_custom_all_reduce_is_off_where_a_pipeline_cuts_groups_that_nvlink_does_not_join():
    box = serve.with_changes(GLM, [])
    pairs = links((0, 1, "NV8", 8), (2, 3, "NV8", 8), (4, 5, "NV8", 8), (6, 7, "NV8", 8), (0, 2, "SYS", 0))
    whole = links(*[(a, b, "NV18", 18) for a in range(8) for b in range(a + 1, 8)])

    def off(tp, pp, where, **engine):
        params_ = box.model_copy(update={"engine": box.engine.model_copy(update=engine)})
        return without_custom_all_reduce(params_, Parallel(tensor_parallel_size=tp, pipeline_parallel_size=pp), where)

    assert off(4, 2, pairs) and off(4, 2, None) and off(2, 2, None) and off(4, 2, links())
    assert not off(4, 2, whole) and not off(2, 4, pairs) and not off(2, 4, whole)
    # Without a pipeline vLLM decides by itself; with one rank there is nothing to reduce.
    assert not off(8, 1, pairs) and not off(1, 8, pairs)
    assert off(4, 2, whole, custom_all_reduce="off") and not off(4, 2, pairs, custom_all_reduce="on") and not off(4, 2, pairs, device="cpu")
    # A link that only nvidia-smi's word tells.
    assert not off(2, 4, links(*[(a, a + 1, "NV2", None) for a in (0, 2, 4, 6)]))


def test_ranks_of_a_tensor_parallel_group_lie_side_by_side():
    assert tensor_groups(Parallel(tensor_parallel_size=2, pipeline_parallel_size=2)) == [range(0, 2), range(2, 4)]
    assert Parallel(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=2).ranks == 12


def test_sizes_and_dtypes_reach_the_command_line():
    argv, env = options(GLM, "parallel.decode_context_parallel_size=2", "parallel.prefill_context_parallel_size=2", "engine.block_size_tokens=128", *LOOSE)
    assert value(argv, "--decode-context-parallel-size") == "2" and value(argv, "--prefill-context-parallel-size") == "2"
    assert value(argv, "--block-size") == "128"
    argv, _ = options(GLM, "engine.kv_cache_gib_per_rank=10", "engine.prefix_caching=false", *LOOSE)
    assert value(argv, "--kv-cache-memory-bytes") == str(10 * 2**30) and "--no-enable-prefix-caching" in argv
    argv, _ = options(QWEN, "engine.state_dtype=bfloat16")
    assert value(argv, "--mamba-ssm-cache-dtype") == "bfloat16"
    argv, _ = options(QWEN, "engine.draft_method=ngram", "engine.draft_options={prompt_lookup_max: 4}", "engine.vllm_release='0.32'")
    assert json.loads(value(argv, "--speculative-config")) == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    argv, _ = options(QWEN, "engine.draft_method=eagle", "engine.draft_model=/models/eagle")
    assert json.loads(value(argv, "--speculative-config"))["model"] == "/models/eagle"
    argv, _ = options(GLM, "server.extra_args=['--seed', '7']")
    assert argv[-2:] == ("--seed", "7")


def test_another_python_is_seen(committed):
    document = yaml.safe_load(committed.read_text())
    document["engine"]["python"] = "/opt/other/bin/python"
    committed.write_text(yaml.safe_dump(document))
    assert any("/opt/other/bin/python" in line for line in expected.drift(committed))


def test_an_option_and_its_value_in_one_word_are_not_the_same(committed):
    document = yaml.safe_load(committed.read_text())
    document["server"] = {"extra_args": ["--max-logprobs", "5"]}
    committed.write_text(yaml.safe_dump(document))
    expected.update(committed)
    assert expected.drift(committed) == []
    document["server"] = {"extra_args": ["--max-logprobs 5"]}
    committed.write_text(yaml.safe_dump(document))
    assert any("'--max-logprobs 5'" in line for line in expected.drift(committed))


@pytest.mark.parametrize(
    "text",
    ["- {layout: x, changes: [a], argv: [], env: {}}", "- {layout: x, changes: x, argv: [], env: {}}", "- {layout: x, changes: {}, argv: null, env: {}}",
     "- {layout: x, changes: {}, argv: [1], env: {}}", "- {layout: x, changes: {}, argv: [], env: null}",
     "- {layout: 2026-13-45, changes: {}, argv: [], env: {}}",
     "- {layout: x, changes: {1: 2}, argv: [], env: {}}", "[" * 2000, "- {layout: x, changes: {}, argv: [], env: {A: '1', A: '2'}}"],
)  # fmt: skip
def test_an_odd_expectation_is_one_line(command, committed, text):
    expected.file_of(committed).write_text(text)
    for words in ([], ["--update"]):
        status, out, err = command("defaultcheck", committed, *words)
        assert (status, out) == (2, "") and err.count("\n") == 1 and "box.yml" in err


def test_a_key_goes_by_the_environment_and_other_hosts_leave_the_loopback():
    box = serve.with_changes(GLM, ["server.host=10.0.0.5", "server.api_key=$K", "server.port=8000"])
    command = command_line(box, box.parallel, (41, 37), 8000)
    assert command.env["VLLM_API_KEY"] == "$K" and value(command.argv, "--host") == "10.0.0.5"
    # What the ranks say to each other has no key, and stays on the loopback.
    assert command.env["VLLM_HOST_IP"] == "127.0.0.1" and command.env["NCCL_SOCKET_IFNAME"] == command.env["GLOO_SOCKET_IFNAME"] == "lo"


# The table of releases: which method drafts where. '+' runs, '?' with a warning, '-' refused.
TABLE = """
method               0.29 0.30 0.31 0.32 0.33
mtp                  -    +    +    +    +
eagle                -    +    +    +    +
eagle3               -    ?    ?    ?    ?
dflash               -    ?    ?    ?    ?
ngram                -    -    -    +    +
draft_model          -    -    -    +    +
medusa               -    -    -    -    +
suffix               -    -    -    -    -
custom_class         -    -    -    -    -
"""


@pytest.mark.parametrize("line", TABLE.split("\n")[2:-1])
def test_drafting_in_a_pipeline_by_release(line):
    method, *marks = line.split()
    spec = memory.model_spec("glm-5.3")
    for release, mark in zip(("0.29", "0.30", "0.31", "0.32", "0.33"), marks, strict=True):
        engine = Engine(max_model_len=1, draft_tokens=2, draft_method=method, vllm_release=release, draft_model="/models/draft")
        found = drafts.judged(engine, Parallel(pipeline_parallel_size=2), spec)
        assert found.result == {"+": "pass", "?": "warn", "-": "refuse"}[mark], (release, found)
        assert found.result == "pass" or found.ways_out
        # suffix needs a package that vLLM does not bring.
        assert drafts.judged(engine, Parallel(), spec).result == ("warn" if method == "suffix" else "pass"), "one stage drafts with every runner"


def test_drafting_by_runner_device_and_family():
    glm = memory.model_spec("glm-5.3")
    two, engine = Parallel(pipeline_parallel_size=2), Engine(max_model_len=1, draft_tokens=2, draft_method="mtp")
    assert drafts.judged(engine.model_copy(update={"runner": "v1"}), two, glm).result == "refuse"
    assert drafts.judged(engine.model_copy(update={"device": "cpu"}), two, glm).result == "refuse"
    assert drafts.judged(engine.model_copy(update={"device": "cpu"}), Parallel(), glm).result == "pass"
    for family in drafts.NO_DRAFT_WITH_PP:
        other = SimpleNamespace(model_type=f"{family}_x", mtp_layers=(1,), name=family)
        assert drafts.judged(engine, two, other).result == "refuse" and drafts.judged(engine, Parallel(), other).result == "pass"
    # One stage and a method that the second runner lacks: vLLM falls back to the first one, and that works.
    assert drafts.runner_of(engine.model_copy(update={"draft_method": "suffix"}), Parallel())[0] == "v1"
    assert drafts.runner_of(engine, two) == ("v2", "pinned, since PP > 1")


def test_auto_is_lowered_to_none_and_keeps_saying_so_and_by_name_it_stays():
    old = serve.with_changes(GLM, ["engine.vllm_release='0.29'"])
    assert old.engine.draft_tokens == 0 and "3 tokens" in old.engine.draft_lowered and "0.29" in old.engine.draft_lowered
    # As papermill passes it on: resolved once, it is not resolved to something else.
    assert params.validate(old.model_dump(), "again") == old
    by_name = serve.with_changes(GLM, ["engine.vllm_release='0.29'", "engine.draft_method=mtp"])
    assert by_name.engine.draft_tokens == 3 and by_name.engine.draft_lowered == ""
    assert serve.with_changes(GLM, []).engine.draft_tokens == 3
    # Set by hand beside drafting, the note goes.
    assert serve.with_changes(GLM, ["engine.draft_lowered=because"]).engine.draft_lowered == ""


def test_what_does_not_draft_with_the_models_own_layers_does_not_hold_them():
    """Of ngram neither weights nor cache of the draft layer are counted: 78 main layers and 21 indexers instead of 79 and 22."""
    one = [*LOOSE, "parallel.tensor_parallel_size=8", "parallel.pipeline_parallel_size=1", "engine.vllm_release='0.32'"]
    spec = memory.model_spec("glm-5.3")
    for method, per_token in (("mtp", 79 * 656 + 22 * 132), ("ngram", 78 * 656 + 21 * 132)):
        box = serve.with_changes(GLM, [*one, f"engine.draft_method={method}", "engine.available_kv_gib=[17.26]", "engine.max_model_len=300000"])
        assert memory.pool(box, spec, (78,)).ranks[0].kv_bytes_per_token == per_token
