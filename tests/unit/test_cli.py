"""The command line: exit statuses, one line for a mistake, JSON and nothing else, and what the server's command looks like."""

import json
import shlex
import subprocess
import sys

import pytest
from conftest import DEFAULT_BOX, ROOT

from fieldbook import __version__, params, receipts, station, walk
from fieldbook.command import command_line
from fieldbook.errors import BadInput

FILE = ROOT / "params" / "cpu-smollm2.yml"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "command"),
        (["frobnicate"], "frobnicate"),
        (["params", "--frobnicate"], "--frobnicate"),
        (["run"], "FILE"),
        (["run", "nowhere.yml"], "no such params file"),
        (["run", str(FILE), "--from", "9"], "'9' does not exist: give one of 01, 02"),
        (["run", str(FILE), "--only", "x"], "'x' does not exist"),
        (["run", str(FILE), "--keep-server"], "--only"),
        (["inventory", "--from", "/nowhere"], "no such file or folder"),
        (["patches", "mend"], "mend"),
        (["patches", "--tree", "/nowhere"], "no vllm package"),
        (["stop", "/nowhere"], "no such run folder"),
        (["publish", "/nowhere"], "no such run folder"),
        (["export", "/nowhere"], "no such run folder"),
        (["model", "/nowhere.yml"], "no such params file"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_status_2(command, words, says):
    status, out, err = command(*words)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and err.startswith("fieldbook: ") and says in err


def test_help_lists_the_commands_and_version_is_told(command):
    status, out, err = command("--help")
    assert (status, err) == (0, "") and all(name in out for name in ("params", "run", "inventory", "model", "patches", "stop", "publish", "export"))
    assert command("--version") == (0, f"fieldbook {__version__}\n", "")


def test_describe_lists_every_key(command):
    status, out, _ = command("params", "--describe", "--json")
    keys = [row["key"] for row in json.loads(out)]
    assert status == 0 and "engine.max_model_len" in keys and "verdict.baseline.layer_partition" in keys and len(set(keys)) == len(keys)
    assert len(command("params", "--describe")[1].splitlines()) == len(keys)


@pytest.mark.parametrize("words", [["params", str(FILE), "--json"], ["inventory", "--json"], ["params", "--describe", "--json"]])
def test_json_is_one_document_and_nothing_else(command, words):
    status, out, err = command(*words)
    assert (status, err) == (0, "")
    json.loads(out)


def test_as_a_module_and_into_a_closed_pipe():
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m fieldbook params {shlex.quote(str(FILE))} | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout == "box:\n" and done.stderr == ""
    done = subprocess.run([sys.executable, "-m", "fieldbook", "params", "nowhere.yml"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_a_mistake_under_json_keeps_stdout_empty(command):
    status, out, err = command("params", "nowhere.yml", "--json")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1


def test_stop_and_inventory_as_text(command, tmp_path):
    assert command("stop", tmp_path) == (0, "stopped: none was running\n", "")
    assert json.loads(command("stop", tmp_path, "--json")[1]) == {"stopped": []}
    status, out, _ = command("inventory")
    assert status == 0 and "memory, GiB: " in out and "\nFindings\n" in out


# The run folder a walk takes.


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setenv("FIELDBOOK_REPORTS", str(tmp_path))
    return tmp_path / "cpu-smollm2"


def earlier_run(folder, names=(), **changes):
    folder.mkdir(parents=True)
    (folder / "params.yml").write_text("")
    for name in names:
        station.open_station(name, str(folder), **{**DEFAULT_BOX, **changes}).close("ok")


def test_a_new_walk_gets_a_new_folder(reports, changed):
    first = walk.choose_run_dir(changed(), 1, None, None)
    first.mkdir(parents=True)
    second = walk.choose_run_dir(changed(), 1, None, None)
    assert first.parent == second.parent == reports and first != second


def test_a_resumed_walk_takes_the_latest_run_by_the_runner(reports, changed):
    names = ["01_hardware_inventory", "02_memory_accounting"]
    for name in ("20260101-000000", "20260102-000000", "by-hand"):
        earlier_run(reports / name, names)
    assert walk.choose_run_dir(changed(), 3, None, None) == reports / "20260102-000000"
    assert walk.choose_run_dir(changed(), 3, None, str(reports / "20260101-000000")) == reports / "20260101-000000"


def test_a_walk_cannot_be_resumed_over_a_gap_or_with_other_params(reports, changed):
    with pytest.raises(BadInput, match="no run to resume; start without --from"):
        walk.choose_run_dir(changed(), 3, None, None)
    earlier_run(reports / "20260101-000000", ["01_hardware_inventory"])
    with pytest.raises(BadInput, match="no passed receipt of 02_memory_accounting; give --from 02"):
        walk.choose_run_dir(changed(), 3, None, None)
    with pytest.raises(BadInput, match="01_hardware_inventory .*was made with other params .*start again from 01"):
        walk.choose_run_dir(changed({"engine.max_num_seqs": 4}), 2, None, None)


def test_a_single_station_takes_the_latest_run_or_a_new_folder(reports, changed):
    assert walk.choose_run_dir(changed(), 1, 3, None).parent == reports
    earlier_run(reports / "20260101-000000")
    assert walk.choose_run_dir(changed(), 1, 3, None) == reports / "20260101-000000"


def test_result_is_one_line_of_json(tmp_path):
    text = walk.result_document(walk.Walk(tmp_path, 1, ["01_hardware_inventory"], 'said "no"\nand more', None))
    document = json.loads(text)
    assert "\n" not in text and document["verdict"] == 'said "no"\nand more' and document["report"] is None and document["status"] == 1


# The server's command line.


def test_command_line_of_the_default_box(changed):
    box = changed()
    line = command_line(box, box.parallel, (15, 15), 4711)
    options = dict(zip(line.argv, line.argv[1:], strict=False))
    assert line.argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server") and options["--port"] == "4711" and options["--host"] == "127.0.0.1"
    assert (options["--dtype"], options["--max-model-len"], options["--max-num-seqs"], options["--max-num-batched-tokens"]) == ("float32", "2048", "8", "2048")
    assert (options["--tensor-parallel-size"], options["--pipeline-parallel-size"]) == ("1", "2") and "--enforce-eager" in line.argv
    assert options["--served-model-name"] == "smollm2-135m-instruct" and "--gpu-memory-utilization" not in line.argv
    assert line.env == {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1", "VLLM_PP_LAYER_PARTITION": "15,15", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def test_command_line_of_one_rank_has_no_partition_and_of_a_gpu_no_cpu_space(changed):
    box = changed({"engine.device": "cuda", "engine.enforce_eager": False, "server.extra_args": ["--seed", "7"], "server.extra_env": {"OMP_NUM_THREADS": "3"}})
    line = command_line(box, box.verdict.baseline, (30,), 1)
    assert "VLLM_PP_LAYER_PARTITION" not in line.env and "VLLM_CPU_KVCACHE_SPACE" not in line.env and line.env["OMP_NUM_THREADS"] == "3"
    assert line.argv[-2:] == ("--seed", "7") and "--enforce-eager" not in line.argv and line.argv[line.argv.index("--gpu-memory-utilization") + 1] == "0.9"


def test_the_shown_command_can_be_typed(changed):
    box = changed({"server.extra_args": ["--override-generation-config", '{"top_p": 0.9}'], "server.extra_env": {"NOTE": "two words"}})
    shown = command_line(box, box.parallel, (15, 15), 0).shown()
    assert str(ROOT) not in shown and sys.executable not in shown
    words = shlex.split(shown.replace("\\\n", " "))
    assert "NOTE=two words" in words and words[words.index("--override-generation-config") + 1] == '{"top_p": 0.9}'
    assert words[words.index("python") + 1 :][:2] == ["-m", "vllm.entrypoints.openai.api_server"]


def test_receipts_of_a_box_say_what_params_said(tmp_path):
    st = station.open_station("01_hardware_inventory", str(tmp_path), **DEFAULT_BOX)
    st.close("ok")
    assert params.validate(receipts.read(tmp_path, "01_hardware_inventory").params, "receipt").hash == st.params.hash
