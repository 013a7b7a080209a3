"""The params file: right ones resolve, and every wrong one gets one line with file, key, what it got and what would be right, and exit status 2."""

import json
import re
import subprocess

import pytest
import yaml
from conftest import DEFAULT_BOX, ROOT, python

from fieldbook import params
from fieldbook.errors import BadInput


def written(folder, sections):
    file = folder / "box.yml"
    file.write_text(sections if isinstance(sections, str) else yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")
    return file


def one_line(command, file, *words, key=None):
    """The command refuses the file with exit status 2 and exactly one line on stderr that holds all of `words`."""
    status, out, err = command("params", file)
    assert (status, out) == (2, "")
    assert err.endswith("\n") and len(err.splitlines()) == 1, err
    assert "Traceback" not in err and err.startswith("fieldbook: ")
    assert str(file) in err, f"the line does not name the file: {err}"
    for word in ([f"{key}:"] if key else []) + list(words):
        assert word in err, f"{word!r} is not in {err!r}"
    return err


def test_the_default_box_resolves_with_its_defaults():
    loaded = params.load(ROOT / "params" / "cpu-smollm2.yml")
    assert loaded.engine.model_dump() == {
        "device": "cpu", "dtype": "float32", "kv_cache_dtype": "auto", "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 2048,
        "enforce_eager": True, "kv_cache_gib_per_rank": 1, "gpu_memory_utilization": 0.9, "omp_threads_per_rank": 1, "patches": "needed", "python": "",
        "block_size_tokens": None, "available_kv_gib": [], "prefix_caching": True, "draft_tokens": 0, "other_boots": [], "vllm_release": "0.30",
        "draft_method": "auto", "draft_model": "", "draft_options": {}, "draft_lowered": "", "state_dtype": "auto", "runner": "auto",
        "custom_all_reduce": "auto",
    }  # fmt: skip
    assert loaded.parallel.model_dump() == {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "layer_partition": "best", "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1, "data_parallel_size": 1, "expert_parallel": False,
        "index_sharing": "clean", "workload": "throughput",
    }  # fmt: skip
    assert loaded.verdict.baseline.pipeline_parallel_size == 1 and loaded.verdict.max_p == 0.05
    assert params.metric_names(loaded) == ["prefill_128_tok_s", "prefill_512_tok_s", "decode_c1_tok_s", "decode_c4_tok_s"]


@pytest.mark.parametrize("file", sorted((ROOT / "params").glob("*.yml")), ids=lambda f: f.name)
def test_every_params_file_that_ships_is_valid_and_named_like_its_box(file):
    assert params.load(file).box.name == file.stem


def test_all_sections_exist_and_every_field_says_what_it_is():
    assert list(params.Params.model_fields) == ["box", "model", "engine", "parallel", "server", "benchmarks", "probes", "verdict"]
    rows = {key: (default, meaning) for key, default, meaning in params.describe()}
    assert all(len(meaning) > 5 and "\n" not in meaning for _, meaning in rows.values())
    assert rows["engine.max_model_len"][0] == "required" and rows["verdict.max_p"][0] == "0.05"
    assert rows["verdict.baseline.layer_partition"][0] == '"default"'


SECRET = "SECRETXYZ123"


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("server.api_key", 123456789012), ("server.api_key", [SECRET]), ("server.extra_env", {"HF_TOKEN": 123456789012}), ("server.extra_env", [f"A={SECRET}"]),
        ("server.extra_env", {f"A={SECRET}": "x"}), ("server.extra_env", {"HF_TOKEN": [SECRET]}), ("server.extra_args", f"--api-key {SECRET}"),
        ("server.extra_args", [f"--api-key {SECRET}"]), ("server.extra_args", ["--x", f"http://user:{SECRET}@host"]), ("server.extra_args", [[SECRET]]),
        ("server.extra_args", ["--x", f'{{"token": "{SECRET}"}}']), ("server.extra_env", {"PROXY": f"http://a:{SECRET}/b@c"}),
        ("server.extra_env", {"PROXY": f"http://{SECRET}@c"}), ("server.extra_env", {"X": f"api-key={SECRET}"}), ("server.extra_env", {"PGPASS": SECRET}),
        ("server.extra_env", {"MY_AUTH_TOKENS": SECRET}), ("server.extra_env", {"DB_PWD": SECRET}), ("engine.draft_options", {"hf_token": SECRET}),
        ("model.path", f"https://u:{SECRET}@h/x"), (f"api_key={SECRET}", "x"),
    ],
)  # fmt: skip
def test_a_refusal_does_not_repeat_the_secret(command, tmp_path, sections, dotted, value):
    *way, last = dotted.split(".")
    place = sections
    for part in way:
        place = place.setdefault(part, {})
    place[last] = value
    status, out, err = command("params", written(tmp_path, sections))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert SECRET not in err and "123456789012" not in err


@pytest.mark.parametrize(
    "words",
    [["--ssl-keyfile", "/etc/ssl/key.pem"], ["--long-prefill-token-threshold", "2048"], ["--allow-credentials"], ["--max-logprobs", "5"], ["--seed", "7"]],
)
def test_ordinary_options_are_not_taken_for_secrets(changed, words):
    assert changed({"server.extra_args": words, "server.extra_env": {"VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "512"}}).server.extra_args == words


def test_command_prints_the_resolved_values_as_yaml_and_as_json(command):
    status, out, err = command("params", ROOT / "params" / "cpu-smollm2.yml")
    assert (status, err) == (0, "")
    resolved = yaml.safe_load(out)
    assert resolved["verdict"]["max_p"] == 0.05 and resolved["parallel"]["layer_partition"] == "best"
    status, out, err = command("params", ROOT / "params" / "cpu-smollm2.yml", "--json")
    document = json.loads(out)
    assert re.fullmatch(r"[0-9a-f]{64}", document.pop("params_hash")) and document == resolved


def test_printed_values_are_themselves_a_params_file_with_the_same_hash(command, tmp_path):
    out = command("params", ROOT / "params" / "cpu-smollm2.yml")[1]
    assert params.load(written(tmp_path, out)).hash == params.load(ROOT / "params" / "cpu-smollm2.yml").hash


def test_hash_follows_the_values_and_nothing_else(sections, tmp_path):
    first = params.validate(sections, "test").hash
    backwards = {name: dict(reversed(list(section.items()))) for name, section in reversed(list(sections.items()))}
    assert params.validate(backwards, "test").hash == first
    one_way, other_way = ({**sections, "server": {"extra_env": dict(pairs)}} for pairs in ([("A", "1"), ("B", "2")], [("B", "2"), ("A", "1")]))
    assert params.validate(one_way, "test").hash == params.validate(other_way, "test").hash
    spelt_out = {**sections, "server": {"port": 0}}
    assert params.validate(spelt_out, "test").hash == first
    assert params.validate({**sections, "server": {"port": 8000}}, "test").hash != first


# (dotted key to change, value, key the line must name, words it must hold)
WRONG = [
    ("engine.max_modell_len", 3, "engine.max_modell_len", ["unknown key", "did you mean 'max_model_len'?"]),
    ("engin", {}, "engin", ["unknown key", "did you mean 'engine'?"]),
    ("verdict.baseline.pipeline_paralel_size", 2, "verdict.baseline.pipeline_paralel_size", ["did you mean 'pipeline_parallel_size'?"]),
    ("server.zzz", 1, "server.zzz", ["unknown key", "known keys: host, port, api_key, allow, ready_timeout_s"]),
    ("engine.max_model_len", "long", "engine.max_model_len", ["got 'long'", "integer"]),
    ("engine.max_num_seqs", 8.5, "engine.max_num_seqs", ["got 8.5", "integer"]),
    ("engine.max_num_seqs", 0, "engine.max_num_seqs", ["got 0", "greater than 0"]),
    ("engine.enforce_eager", "perhaps", "engine.enforce_eager", ["got 'perhaps'", "boolean"]),
    ("engine.dtype", "fp8", "engine.dtype", ["got 'fp8'", "'float32', 'bfloat16' or 'float16'"]),
    ("engine", None, "engine", ["got None", "a section with the keys device, dtype"]),
    ("engine", [1], "engine", ["got [1]", "a section with the keys device, dtype"]),
    ("engine", "fast", "engine", ["got 'fast'", "a section"]),
    ("engine.gpu_memory_utilization", 1.5, "engine.gpu_memory_utilization", ["got 1.5", "less than or equal to 1"]),
    ("engine.max_model_len", 8193, "engine.max_model_len", ["got 8193", "8192"]),
    ("engine.kv_cache_gib_per_rank", None, "engine.kv_cache_gib_per_rank", ["missing", "GiB"]),
    ("parallel.tensor_parallel_size", 2, "parallel.tensor_parallel_size", ["got 2", "9 attention heads", "1, 3, 9"]),
    ("verdict.baseline.tensor_parallel_size", 4, "verdict.baseline.tensor_parallel_size", ["got 4", "1, 3, 9"]),
    ("parallel.pipeline_parallel_size", 31, "parallel.pipeline_parallel_size", ["got 31", "30 layers"]),
    ("parallel.layer_partition", [15, 14], "parallel.layer_partition", ["got [15, 14]", "29", "2 numbers that sum to the 30 layers"]),
    ("engine.available_kv_gib", [1.0, 2.0, 3.0], "engine.available_kv_gib", ["got 3 values for 2 stages", "one for each, or one for all"]),
    ("parallel.decode_context_parallel_size", 2, "parallel.decode_context_parallel_size", ["got 2", "does not divide tensor_parallel_size 1"]),
    ("parallel.layer_partition", [10, 10, 10], "parallel.layer_partition", ["got [10, 10, 10]", "3 stages", "2 numbers that sum to the 30 layers"]),
    ("parallel.layer_partition", [31, -1], "parallel.layer_partition", ["-1", "list of layers per stage"]),
    ("parallel.layer_partition", [], "parallel.layer_partition", ["got []", "2 numbers that sum to the 30 layers"]),
    ("parallel.layer_partition", "even", "parallel.layer_partition", ["got 'even'", "'best', 'default' or a list"]),
    ("verdict.baseline", {"pipeline_parallel_size": 2, "layer_partition": [15, 14]}, "verdict.baseline.layer_partition", ["got [15, 14]", "2 numbers"]),
    ("server.allow", ["unverified"], "server.allow.0", ["got 'unverified'", "'unverified_pp'"]),
    ("server.api_key", "abcdefgh", "server.api_key", ["expected $NAME"]),
    ("server.extra_env", {"HF_TOKEN": "abcdefgh"}, "server.extra_env.HF_TOKEN", ["expected $NAME"]),
    ("server.extra_env", {"PROXY": "http://me:pass@there"}, "server.extra_env.PROXY", ["expected $NAME"]),
    ("server.extra_env", {"VLLM_PP_LAYER_PARTITION": "15,15"}, "server.extra_env.VLLM_PP_LAYER_PARTITION", ["is set by parallel.layer_partition"]),
    ("server.extra_args", ["--api-key", "abcdefgh"], "server.extra_args.0", ["is set by server.api_key"]),
    ("server.extra_args", ["--host=0.0.0.0"], "server.extra_args.0", ["--host is set by server.host"]),
    ("server.extra_args", ["--max_num_seqs", "4"], "server.extra_args.0", ["--max-num-seqs is set by engine.max_num_seqs"]),
    ("server.extra_args", ["--seed", "7", "--hf-tok", "abcdefgh"], "server.extra_args.2", ["holds a secret"]),
    # vLLM takes any beginning of an option, dotted keys, underscores and a leading no-.
    ("server.extra_args", ["--ho", "0.0.0.0"], "server.extra_args.0", ["--host is set by server.host"]),
    ("server.extra_args", ["--pipeline-par", "8"], "server.extra_args.0", ["parallel.pipeline_parallel_size"]),
    ("server.extra_args", ["--speculative-config.method", "ngram"], "server.extra_args.0", ["engine.draft_method"]),
    ("server.extra_args", ["-sc", "{}"], "server.extra_args.0", ["engine.draft_method"]),
    ("server.extra_args", ["--no-disable-custom-all-reduce"], "server.extra_args.0", ["engine.custom_all_reduce"]),
    ("server.extra_args", ["--config", "x.yml"], "server.extra_args.0", ["--config is set by this file"]),
    ("server.extra_args", ['--x={"a": [{"password": "abcdefgh"}]}'], "server.extra_args.0", ["holds a secret"]),
    ("server.extra_args", ["a\0b"], "server.extra_args.0", ["cannot be passed to a program"]),
    ("server.extra_env", {"A=B": "x"}, "server.extra_env", ["key 1 is no name of a variable"]),
    ("server.extra_env", {"OMP_NUM_THREADS": "7"}, "server.extra_env.OMP_NUM_THREADS", ["is set by engine.omp_threads_per_rank"]),
    ("server.extra_env", {"VLLM_HOST_IP": "10.0.0.1"}, "server.extra_env.VLLM_HOST_IP", ["loopback"]),
    ("server.extra_env", {"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}, "server.extra_env.OTEL_EXPORTER_OTLP_HEADERS", ["expected $NAME"]),
    ("engine.draft_options", {"method": "mtp"}, "engine.draft_options.method", ["is set by engine.draft_method"]),
    ("engine.draft_options", {"hf_token": "abcdefgh"}, "engine.draft_options", ["holds a secret"]),
    ("engine.draft_options", {"a": float("nan")}, "engine.draft_options", ["JSON"]),
    ("model.path", "https://me:pass@there/x", "model.path", ["expected a path"]),
    ("server.port", 70000, "server.port", ["got 70000", "65535"]),
    ("server.extra_env", {"OMP": 1}, "server.extra_env.OMP", ["got 1", "string"]),
    ("benchmarks.prefill_tokens", [128, "x"], "benchmarks.prefill_tokens.1", ["got 'x'", "integer"]),
    ("benchmarks.prefill_tokens", [], "benchmarks.prefill_tokens", ["got []", "at least 1 item"]),
    ("benchmarks.prefill_tokens", [2048], "benchmarks", ["2049", "max_model_len 2048"]),
    ("benchmarks.decode_concurrency", [16], "benchmarks.decode_concurrency", ["got 16", "max_num_seqs 8"]),
    ("verdict.primary_metric", "decode_c8_tok_s", "verdict.primary_metric", ["got 'decode_c8_tok_s'", "decode_c1_tok_s, decode_c4_tok_s"]),
    ("verdict.expectation", "better", "verdict.expectation", ["got 'better'", "'faster', 'slower' or 'same'"]),
    ("box.name", "../../etc", "box.name", ["got '../../etc'"]),
    ("model.name", "gpt-9", "model.name", ["got 'gpt-9'", "known models", "smollm2-135m-instruct"]),
]  # fmt: skip


@pytest.mark.parametrize(("dotted", "value", "key", "words"), WRONG, ids=lambda v: str(v)[:40] if isinstance(v, str) else None)
def test_a_wrong_value_gets_one_line(command, tmp_path, sections, dotted, value, key, words):
    *way, last = dotted.split(".")
    place = sections
    for part in way:
        place = place.setdefault(part, {})
    place[last] = value
    one_line(command, written(tmp_path, sections), *words, key=key)


@pytest.mark.parametrize("section", ["box", "model", "engine"])
def test_a_missing_section_is_named(command, tmp_path, sections, section):
    del sections[section]
    one_line(command, written(tmp_path, sections), "missing", key=section)


@pytest.mark.parametrize(
    ("dotted", "value"),
    [
        ("engine.kv_cache_gib_per_rank", True),
        ("server.port", True),
        ("engine.max_model_len", "2048"),
        ("engine.enforce_eager", 1),
        ("engine.enforce_eager", "yes"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_not_converted(command, tmp_path, sections, dotted, value):
    # YAML knows the types, so 'true' where a number belongs is a mistake (`kv_cache_gib_per_rank: yes` must not mean 1 GiB).
    section, key = dotted.split(".")
    sections.setdefault(section, {})[key] = value
    one_line(command, written(tmp_path, sections), f"got {value!r}", key=dotted)


def test_one_mistake_is_counted_once(command, tmp_path, sections):
    sections["parallel"]["layer_partition"] = "even"
    assert "more)" not in one_line(command, written(tmp_path, sections))


def test_several_mistakes_are_counted(command, tmp_path, sections):
    sections["engine"].update(max_num_seqs=0, dtype="fp8")
    assert "(and 1 more)" in one_line(command, written(tmp_path, sections))


def test_a_key_with_a_bracket_in_it_is_the_one_that_is_named(command, tmp_path, sections):
    sections["engine"]["dtype[0]"] = "float32"
    one_line(command, written(tmp_path, sections), "unknown key", key="engine.dtype[0]")


def test_a_line_break_in_a_key_does_not_break_the_line(command, tmp_path, sections):
    sections["engine"]["a\nb"] = 1
    one_line(command, written(tmp_path, sections), "unknown key", "engine.")


def test_a_request_that_exactly_fills_max_model_len_is_allowed(changed):
    # 2047 prompt tokens and 1 token out, and 2016 + 32, are 2048 each: vLLM serves both at max_model_len 2048.
    assert changed({"benchmarks.prefill_tokens": [2047]}).benchmarks.prefill_tokens == [2047]
    assert changed({"benchmarks.decode_prompt_tokens": 2016}).benchmarks.decode_prompt_tokens == 2016


def test_a_probe_longer_than_the_longest_request_is_refused(changed):
    with pytest.raises(BadInput, match="probes.answer_tokens.*100000.*2048"):
        changed({"probes.answer_tokens": 100_000})


# What is wrong with the file itself. (name, content, words)
FILES = [
    ("empty", b"", ["got None", "expected the sections box, model, engine"]),
    ("only a comment", b"# nothing yet\n", ["expected the sections box, model, engine"]),
    ("list at the top", b"- a\n- b\n", ["got ['a', 'b']", "expected the sections box, model, engine"]),
    ("text at the top", b"hello\n", ["got 'hello'", "expected the sections"]),
    ("open bracket", b"box: [1,\n", ["line 2", "expected"]),
    ("tab", b"box:\n\tname: x\n", ["line 2"]),
    ("duplicate key", b"box: {name: a}\nmodel:\n  name: b\n  name: c\n", ["line 4", "key 'name' is given twice"]),
    ("duplicate section", b"box: {name: a}\nbox: {name: b}\n", ["line 2", "key 'box' is given twice"]),
    ("two documents", b"a: 1\n---\nb: 2\n", ["line 2", "another document"]),
    ("unknown alias", b"box: *b\n", ["line 1", "undefined alias 'b'"]),
    ("Python object", b"box: !!python/object:os.system x\n", ["line 1", "python/object"]),
    ("not UTF-8", b"box: {note: caf\xe9}\n", ["UTF-8"]),
    ("zero byte", b"box: \x00\n", ["not a YAML file"]),
    ("picture", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", ["UTF-8"]),
    ("list as key", b"? [a]\n: 1\n", ["line 1"]),
    ("impossible date", b"box: {name: 2024-13-45}\n", ["2024-13-45"]),
    ("tag that lies", b"box: {name: !!int abc}\n", ["abc"]),
    ("scalar tagged as map", b"box: !!map x\n", []),
    ("endless nesting", b"[" * 3000, []),
]


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_a_file_that_is_no_params_file_gets_one_line(command, tmp_path, content, words):
    file = tmp_path / "box.yml"
    file.write_bytes(content)
    one_line(command, file, *words)


def test_missing_file_and_folder_get_one_line_with_what_there_is(command, tmp_path):
    one_line(command, tmp_path / "nowhere.yml", "no such params file", "cpu-smollm2")
    one_line(command, tmp_path, "no such params file")


def test_a_byte_order_mark_is_no_mistake(tmp_path, sections):
    file = tmp_path / "box.yml"
    file.write_text("\ufeff" + yaml.safe_dump(sections), encoding="utf-8")
    assert params.load(file).hash == params.validate(sections, "test").hash


def test_without_a_file_the_command_says_what_to_give(command):
    status, out, err = command("params")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and "params/cpu-smollm2.yml" in err


def test_the_same_line_when_a_notebook_gets_a_wrong_parameter(sections):
    from fieldbook import station

    sections["engine"]["max_modell_len"] = 3
    with pytest.raises(BadInput, match="^02_memory_accounting parameters: engine.max_modell_len: unknown key; did you mean 'max_model_len'") as caught:
        station.open_station("02_memory_accounting", "", **sections)
    # IPython asks the error for its own rendering: one line, no traceback.
    assert caught.value._render_traceback_() == [f"BadInput: {caught.value}"]


def test_params_are_frozen(sections):
    loaded = params.validate(sections, "test")
    with pytest.raises(Exception, match="frozen"):
        loaded.engine.max_num_seqs = 4


PLANNING = "params memory splits inventory bootlog patches server bench verdict receipts station models processes"


def test_planning_imports_nothing_heavy():
    heavy = "torch vllm pandas altair scipy numpy transformers papermill nbconvert IPython httpx"
    code = (
        f"import sys, importlib\nfor name in {PLANNING.split()!r}: importlib.import_module('fieldbook.' + name)\n"
        f"print([m for m in {heavy.split()!r} if m in sys.modules])"
    )
    assert subprocess.run(python(code), capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_planning_is_ready_in_under_a_second():
    # Processor time, so that a busy machine does not count; two attempts, so that a cold disk does not either.
    code = "import time, fieldbook.params, fieldbook.memory, fieldbook.partition, fieldbook.inventory, fieldbook.verdict; print(time.process_time())"
    seconds = [float(subprocess.run(python(code), capture_output=True, text=True, check=True).stdout) for _ in range(2)]
    assert min(seconds) < 1.0, seconds


def test_the_yaml_and_the_injected_cell_are_checked_by_the_same_code(tmp_path):
    assert params.load(written(tmp_path, DEFAULT_BOX)) == params.validate(DEFAULT_BOX, "injected")
