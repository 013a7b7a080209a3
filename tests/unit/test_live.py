"""What a server's processes say of the code that they run: asked of small processes with a small package in vLLM's place, and judged."""

import os
import sys
import textwrap

import pytest
from conftest import until

from fieldbook import live, patches
from fieldbook.errors import GateFailed
from fieldbook.patches import evidence, store

RUNNER = """
class GPUModelRunner:
    def sync_and_gather_intermediate_tensors(self):
        return "mended"
"""
# What every process of a server does first, as vLLM does it.
PROCESS = """
import sys, time
from importlib.metadata import entry_points
sys.path.insert(0, sys.argv[1])
import vllm
rank = int(sys.argv[2])
if rank >= 0:
    import types
    state = types.ModuleType("vllm.distributed.parallel_state")
    state._WORLD, state._PP, state._TP = types.SimpleNamespace(rank=rank), types.SimpleNamespace(rank_in_group=rank), types.SimpleNamespace(rank_in_group=0)
    sys.modules[state.__name__] = state
for plugin in entry_points(group="vllm.general_plugins", name="fieldbook_live"):
    plugin.load()()
"""
FILE, SYMBOL = "v1/worker/gpu_model_runner.py", "GPUModelRunner.sync_and_gather_intermediate_tensors"


@pytest.fixture
def package(tmp_path):
    """A vllm package with a runner in it, stock and patched alike in form."""
    root = tmp_path / "site" / "vllm"
    for folder in ("v1/worker", "v1/worker/gpu"):
        (root / folder).mkdir(parents=True)
    for folder in (root, root / "v1", root / "v1" / "worker", root / "v1" / "worker" / "gpu"):
        (folder / "__init__.py").write_text("")
    (root / FILE).write_text(RUNNER)
    (root / "v1/worker/gpu/model_runner.py").write_text(RUNNER)
    return root


@pytest.fixture
def server(tmp_path, package, spawned):
    """Start a 'server' of processes with these bodies, one a rank after the first, which stands for the engine; returns the folder to ask in."""

    def start(*bodies: str, environment=None):
        folder = tmp_path / "live"
        inherited = {**os.environ, **(environment or {})}
        planted = inherited | live.plant(folder, inherited)
        for rank, body in enumerate(bodies, start=-1):
            code = PROCESS + textwrap.dedent(body) + "\nprint('up', flush=True)\ntime.sleep(60)\n"
            process = spawned([sys.executable, "-c", code, package.parent, rank], env=planted, stdout=-1)
            assert process.stdout.readline() == b"up\n"
        return folder

    return start


USES = "from vllm.v1.worker.gpu_model_runner import GPUModelRunner\nrunner = GPUModelRunner()"


def judged(folder, package, ranks, answers=None):
    """Rows for cpu-eager-pp as if the package's file had been patched by Fieldbook."""
    manifest = store.Manifest(active=["cpu-eager-pp"], patched={FILE: store.sha256((package / FILE).read_bytes())})
    store.keep_dir(package).mkdir(exist_ok=True)
    store._write(package, manifest)
    return evidence.rows(package, ["cpu-eager-pp"], answers or live.ask(folder, evidence.places(["cpu-eager-pp"]), ranks, 20))


def test_every_rank_says_what_it_runs(server, package):
    folder = server("", USES, USES)
    rows = judged(folder, package, 2)
    assert [(row["rank"], row["file"], row["symbol"], row["wrong"]) for row in rows] == [(rank, FILE, SYMBOL, "") for rank in (0, 1)]
    assert {row["sha256"] for row in rows} == {store.sha256(RUNNER.encode())} and {row["path"] for row in rows} == {str(package / FILE)}
    assert [row["runners"] for row in rows] == [["vllm.v1.worker.gpu_model_runner.GPUModelRunner"]] * 2
    assert evidence.problems(rows) == []


def test_a_patch_in_a_file_that_the_active_path_never_uses_is_found(server, package):
    """The first field report's: one runner was patched, the other one was live. The patched module is imported here all the same."""
    body = "import vllm.v1.worker.gpu_model_runner\nfrom vllm.v1.worker.gpu.model_runner import GPUModelRunner\nrunner = GPUModelRunner()"
    (row,) = judged(server("", body), package, 1)
    assert "never reaches it: v1/worker/gpu_model_runner.py is imported and no object there uses it" in row["wrong"]
    assert "the model runner is vllm.v1.worker.gpu.model_runner.GPUModelRunner" in row["wrong"]
    assert evidence.problems([row])[0].startswith("cpu-eager-pp on rank 0: the active path never reaches it")


def test_a_module_that_is_not_loaded_is_found(server, package):
    (row,) = judged(server("", ""), package, 1)
    assert "none of its files is loaded" in row["wrong"] and row["sha256"] is None


def test_a_file_patched_after_it_was_imported_is_found(server, package):
    folder = server("", USES)
    (package / FILE).write_text(RUNNER.replace('"mended"', '"mended later"'))
    (row,) = judged(folder, package, 1)
    assert "imported before it was patched" in row["wrong"]


def test_an_installation_that_is_not_the_patched_one_is_found(server, package):
    answers = live.ask(server("", USES), evidence.places(["cpu-eager-pp"]), 1, 20)
    (package / FILE).write_text(RUNNER + "# as Fieldbook left it elsewhere\n")
    (row,) = judged(None, package, 1, answers)
    assert "not the patched one" in row["wrong"]


@pytest.mark.parametrize(
    ("body", "same"),
    [
        # A subclass that inherits runs the mend, one that overrides does not.
        ("class Own(GPUModelRunner):\n    pass\nrunner = Own()", True),
        ("class Own(GPUModelRunner):\n    def sync_and_gather_intermediate_tensors(self):\n        return 'own'\nrunner = Own()", False),
        # Wrapped by a decorator, the function is still there; replaced, it is not.
        ("plain = GPUModelRunner.sync_and_gather_intermediate_tensors\ndef wrap(f):\n    return lambda self: f(self)\n"
         "GPUModelRunner.sync_and_gather_intermediate_tensors = wrap(plain)\nrunner = GPUModelRunner()", True),
        ("GPUModelRunner.sync_and_gather_intermediate_tensors = lambda self: 'replaced'\nrunner = GPUModelRunner()", False),
    ],
    ids=["inherited", "overridden", "wrapped", "replaced"],
)  # fmt: skip
def test_what_is_reached_through_the_object_counts(server, package, body, same):
    (row,) = judged(server("", f"from vllm.v1.worker.gpu_model_runner import GPUModelRunner\n{body}"), package, 1)
    assert (row["wrong"] == "") is same, row


def test_forked_workers_answer_too_and_plugins_may_be_limited(server, package, tmp_path):
    # The child is a copy of rank 0 until it has a rank of its own: it is asked after that.
    forked = tmp_path / "forked"
    body = f"import os\n{USES}\nif os.fork() == 0:\n    state._WORLD.rank = 1\n    open({str(forked)!r}, 'w')\n    time.sleep(60)\n"
    folder = server("", body, environment={"VLLM_PLUGINS": "another"})
    assert until(forked.exists)
    assert [row["rank"] for row in judged(folder, package, 2)] == [0, 1]
    environment = live.plant(folder, {"VLLM_PLUGINS": "another", "PYTHONPATH": "/elsewhere"})
    assert environment["VLLM_PLUGINS"] == "another,fieldbook_live" and environment["PYTHONPATH"] == f"{folder}{os.pathsep}/elsewhere"


def test_a_rank_that_does_not_answer_is_named(server):
    with pytest.raises(GateFailed, match="rank 1 did not say in 2 s which code it runs"):
        live.ask(server("", USES), evidence.places(["cpu-eager-pp"]), 2, 2)


def test_what_the_engine_alone_runs_is_looked_for_there(package):
    """A config hook has run before the workers start; here the engine has it and the rank has not."""
    name, file, symbol = "ple-containment", "model_executor/models/config.py", "Qwen4ExpForConditionalGenerationConfig.verify_and_update_config"
    store.keep_dir(package).mkdir()
    store._write(package, store.Manifest(active=[name], patched={file: "a" * 64}))

    def place(state):
        return {"file": file, "symbol": symbol, "path": "/x", "sha256": "a" * 64, "state": state, "same": True}

    engine, rank = live.Answer(1, None, None, None, (place("active"),), ()), live.Answer(2, 0, 0, 0, (place("not loaded"),), ())
    (row,) = evidence.rows(package, [name], [engine, rank])
    assert row["wrong"] == "" and row["file"] == file


def test_places_are_those_of_the_edits():
    assert evidence.places(["cpu-eager-pp"]) == [(FILE, SYMBOL)]
    relay = evidence.places(["index-relay"])
    assert ("v1/worker/gpu_worker.py", "Worker.execute_model") in relay and not [one for one in relay if one[0].endswith("attention.py")]
    assert set(patches.CATALOGUE) >= {"index-relay", "index-guard", "index-flip"}
