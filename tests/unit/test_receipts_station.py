"""Receipts are whole or not there, say which params they belong to, and two honest runs can be compared; a station finds the earlier ones."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import until

import fieldbook
from fieldbook import files, inventory, paths, receipts, station
from fieldbook.errors import BadInput, GateFailed


@pytest.fixture
def opened(tmp_path, sections):
    """open_station on the default box in a run folder of its own."""
    return lambda name, **changes: station.open_station(name, str(tmp_path / "run"), **{**sections, **changes})


def test_a_closed_station_leaves_a_receipt(opened):
    st = opened("02_memory_accounting")
    st.figure("pool_tokens", 46_592, "tokens", "computed", "memory.predict_pool", "KV pool", headline=True)
    st.data["ranks"] = [1, 2]
    assert st.close("46,592 tokens") == "46,592 tokens"
    text = (st.run_dir / "02_memory_accounting.json").read_text()
    document = json.loads(text)
    assert text.endswith("\n") and document["schema_version"] == 1
    assert document["figures"]["pool_tokens"] == {
        "value": 46_592,
        "unit": "tokens",
        "evidence": "computed",
        "source": "memory.predict_pool",
        "label": "KV pool",
        "headline": True,
        "disagrees": "",
    }
    assert (document["box"], document["kind"], document["passed"], document["data"]) == ("cpu-smollm2", "live", True, {"ranks": [1, 2]})
    assert set(document["versions"]) == {"fieldbook", "python", "vllm", "torch", "driver"} and document["versions"]["python"] == sys.version.split()[0]
    # UTC, to the second, in this order.
    assert document["started_at"] <= document["ended_at"] and document["ended_at"].endswith("Z") and len(document["ended_at"]) == 20
    assert receipts.read(st.run_dir, "02_memory_accounting").model_dump() == document


def test_a_failed_gate_writes_its_receipt_and_then_raises(opened):
    st = opened("05_server_launch")
    with pytest.raises(GateFailed, match="^refused: memory$"):
        st.close("refused: memory", passed=False)
    receipt = receipts.read(st.run_dir, "05_server_launch")
    assert (receipt.passed, receipt.verdict) == (False, "refused: memory")
    assert not receipts.is_current(receipt, st.params)


def test_a_figure_needs_one_of_the_five_labels(opened):
    st = opened("02_memory_accounting")
    for label in ("measured", "recorded", "computed", "estimated", "stated"):
        st.figure("x", 1, "", label, "", "")
    with pytest.raises(ValueError, match="measured"):
        st.figure("x", 1, "", "guessed", "", "")
    # A value that nobody knows is no figure.
    assert st.figure("y", None, "", "measured", "", "") is None and set(st.figures) == {"x"}


def test_a_receipt_is_current_for_exactly_its_params(opened, changed):
    st = opened("01_hardware_inventory")
    st.close("ok")
    receipt = receipts.read(st.run_dir, "01_hardware_inventory")
    assert receipts.is_current(receipt, st.params) and receipts.is_current(receipt, changed())
    assert not receipts.is_current(receipt, changed({"engine.max_num_seqs": 4}))
    assert not receipts.is_current(None, st.params)


def test_earlier_takes_a_current_receipt_and_runs_the_station_otherwise(opened, monkeypatch):
    ran = []

    def pretend(st, name, verdict="fresh", passed=True):
        ran.append(name)
        other = opened(name)
        if passed:
            other.close(verdict)

    monkeypatch.setattr(station, "_run_station", pretend)
    st = opened("03_partition_selection")
    assert st.earlier(2).verdict == "fresh" and ran == ["02_memory_accounting"]
    assert st.earlier(2).verdict == "fresh" and ran == ["02_memory_accounting"]
    # Made with other params: it is run again.
    changed = opened("03_partition_selection", server={"port": 8000})
    with pytest.raises(GateFailed, match="03_partition_selection needs 02_memory_accounting, which did not pass: fresh"):
        changed.earlier(2)
    assert ran == ["02_memory_accounting"] * 2
    monkeypatch.setattr(station, "_run_station", lambda st, name: None)
    with pytest.raises(GateFailed, match="needs 01_hardware_inventory, which did not pass: no receipt"):
        st.earlier(1)


def test_a_missing_receipt_is_none_and_a_wrong_one_is_one_line(opened):
    st = opened("02_memory_accounting")
    assert receipts.read(st.run_dir, "02_memory_accounting") is None
    st.close("ok")
    file = st.run_dir / "02_memory_accounting.json"
    good = json.loads(file.read_text())
    for content in (
        "",
        "{",
        "[]",
        "null",
        json.dumps({**good, "schema_version": 2}),
        json.dumps({**good, "extra": 1}),
        json.dumps({k: v for k, v in good.items() if k != "params_hash"}),
        file.read_text()[:200],
    ):
        file.write_text(content)
        with pytest.raises(BadInput, match="not a receipt of schema version 1.*run 02_memory_accounting again") as caught:
            receipts.read(st.run_dir, "02_memory_accounting")
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not a receipt"):
        receipts.read(st.run_dir, "02_memory_accounting")


def test_a_writer_killed_in_the_middle_leaves_the_old_content(tmp_path):
    target = tmp_path / "receipt.json"
    files.write_json(target, {"state": "old"})
    code = """
import os, sys
from pathlib import Path
from fieldbook import files
os.fsync = lambda handle: (print("half", flush=True), __import__("time").sleep(60))
files.write_whole(Path(sys.argv[1]), "new" * 100_000)
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"half\n"
    assert json.loads(target.read_text()) == {"state": "old"}
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    assert json.loads(target.read_text()) == {"state": "old"}
    # What the dead writer left does not look like a receipt, and the next write works.
    assert [p.name for p in tmp_path.glob("*.json")] == ["receipt.json"]
    files.write_json(target, {"state": "new"})
    assert json.loads(target.read_text()) == {"state": "new"}


def test_a_reader_never_sees_half_a_file(tmp_path):
    target = tmp_path / "receipt.json"
    files.write_json(target, {"n": 0, "pad": "x" * 200_000})
    code = "import sys, pathlib; from fieldbook import files\nfor n in range(200): files.write_json(pathlib.Path(sys.argv[1]), {'n': n, 'pad': 'x' * 200_000})"
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
    seen = set()
    while writer.poll() is None:
        seen.add(json.loads(target.read_text())["n"])
    assert writer.returncode == 0 and len(seen) > 3
    assert [p.name for p in tmp_path.iterdir()] == ["receipt.json"]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    target = tmp_path / "receipt.json"
    files.write_whole(target, "old")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_whole(target, "new")
    assert target.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["receipt.json"]


def test_written_files_can_be_read_by_others_and_carry_any_character(tmp_path):
    file = files.write_json(tmp_path / "deep" / "er" / "x.json", {"text": "größer \u2014 15+15"})
    assert json.loads(file.read_text(encoding="utf-8")) == {"text": "größer \u2014 15+15"}
    assert file.stat().st_mode & 0o777 == 0o644
    assert files.write_whole(tmp_path / "y", b"\x00\xff", mode=0o755).stat().st_mode & 0o777 == 0o755


def test_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def closed(opened, name, **data):
    st = opened(name)
    st.figure("pool_tokens", data.pop("predicted", 46_592), "tokens", "computed", "memory", "predicted")
    st.figure("decode", data.pop("speed", 20.0), "tok/s", "measured", data.pop("source", "median of 3 samples"), "decode")
    st.data.update(data)
    st.close(data.pop("verdict", "ok"))
    return receipts.read(st.run_dir, name)


def test_two_honest_runs_compare_equal_and_a_wrong_prediction_does_not(opened):
    name = "05_server_launch"
    gates = [{"gate": "layers", "result": "pass"}]
    one = closed(opened, name, speed=20.0, server={"state_file": "a"}, measured_void=["one"], gates=gates)
    time.sleep(1.1)
    two = closed(opened, name, speed=21.5, source="median of 2 samples", server={"state_file": "b"}, measured_void=[], gates=gates)
    assert one.ended_at != two.ended_at and receipts.comparable(one) == receipts.comparable(two)
    kept = receipts.comparable(one)
    assert kept["params_hash"] == one.params_hash and kept["figures"]["decode"]["unit"] == "tok/s" and "value" not in kept["figures"]["decode"]
    assert kept["figures"]["pool_tokens"]["value"] == 46_592 and kept["data"] == {"gates": gates}
    assert receipts.comparable(closed(opened, name, predicted=46_591, gates=gates)) != kept
    assert receipts.comparable(closed(opened, name, gates=[{"gate": "layers", "result": "refuse"}])) != kept


def test_free_memory_of_the_moment_does_not_tell_two_runs_apart(opened):
    found = inventory.read_live().model_dump()
    later = {**found, "host": {**found["host"], "memory_available_bytes": found["host"]["memory_available_bytes"] - 4096}}
    name = "01_hardware_inventory"
    assert receipts.comparable(closed(opened, name, inventory=found)) == receipts.comparable(closed(opened, name, inventory=later))
    other = {**found, "host": {**found["host"], "memory_total_bytes": found["host"]["memory_total_bytes"] * 2}}
    assert receipts.comparable(closed(opened, name, inventory=found)) != receipts.comparable(closed(opened, name, inventory=other))


def test_the_walk_before_does_not_tell_two_runs_apart(opened):
    # A first walk finds the defect present and mends it; the next finds it patched. Both end with the same code.
    row = {"id": "cpu-eager-pp", "state": "present", "sha256": "a"}
    one = closed(opened, "04_patch_application", before=[row], after=[{**row, "state": "patched", "sha256": "b"}])
    two = closed(opened, "04_patch_application", before=[{**row, "state": "patched", "sha256": "b"}], after=[{**row, "state": "patched", "sha256": "b"}])
    assert receipts.comparable(one) == receipts.comparable(two)


def test_the_params_are_compared_whole(opened, changed):
    one = closed(opened, "02_memory_accounting")
    assert receipts.comparable(one)["params"] == changed().model_dump()


def test_by_hand_all_notebooks_share_one_folder(sections, tmp_path, monkeypatch):
    monkeypatch.setenv("FIELDBOOK_REPORTS", str(tmp_path))
    folders = {station.open_station(name, "", **sections).run_dir for name in paths.STATIONS}
    assert folders == {tmp_path / "cpu-smollm2" / "by-hand"}


def test_progress_is_one_line_outside_the_notebook(opened):
    st = opened("05_server_launch")
    st.progress("candidate: weights loaded")
    st.progress("candidate: serving")
    assert (st.run_dir / ".progress").read_text() == "candidate: serving\n"


def test_versions_of_a_box_of_which_only_outputs_were_captured_are_unknown(opened, sections):
    st = opened("02_memory_accounting", box={**sections["box"], "kind": "recorded", "name": "nobody"})
    st.close("ok")
    versions = receipts.read(st.run_dir, "02_memory_accounting").versions
    assert versions.pop("fieldbook") == fieldbook.__version__ and set(versions.values()) == {None}


def test_a_recorded_run_has_to_say_its_versions(opened, sections, monkeypatch):
    monkeypatch.setattr(paths, "only_captured", lambda name: False)
    box = {**sections["box"], "kind": "recorded", "name": "nobody"}
    with pytest.raises(BadInput, match="data/boxes/nobody/versions.yml: missing"):
        opened("02_memory_accounting", box=box).close("ok")


def test_station_names():
    assert [paths.station_name(n) for n in range(1, 8)] == list(paths.STATIONS)
    assert paths.station_name("03") == paths.station_name("3") == "03_partition_selection"
    for wrong in ("0", "8", "10", "", "x", "-1"):
        with pytest.raises(BadInput, match="01, 02, 03, 04, 05, 06, 07"):
            paths.station_name(wrong)


def test_no_checkout_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FIELDBOOK_ROOT", str(tmp_path))
    with pytest.raises(BadInput, match="no Fieldbook checkout found.*FIELDBOOK_ROOT"):
        paths.root()


def test_versions_without_vllm_and_driver(monkeypatch):
    import importlib.metadata

    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    found = receipts.versions()
    assert found["vllm"] is None and found["torch"] is None and found["fieldbook"] and until(lambda: "driver" in found)


def test_what_an_interrupted_station_had_measured_goes_when_it_closes(opened):
    station = opened("06_benchmarks")
    folder = station.run_dir / "servers"
    folder.mkdir(exist_ok=True)
    for name in (f"{station.unfinished}candidate-1.jsonl", f"{station.unfinished}candidate-1.about", "unfinished-99-candidate-1.jsonl"):
        (folder / name).write_text("")
    station.close("done")
    assert [file.name for file in folder.iterdir()] == ["unfinished-99-candidate-1.jsonl"]
