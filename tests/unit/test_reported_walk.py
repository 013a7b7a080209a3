"""Walks without a run behind them: both published reports and a box of which only outputs were captured go through all seven notebooks, and are checked."""

import json
import shutil

import pytest
from conftest import ROOT, walk_in_process

from fieldbook import checking, params, paths, receipts
from fieldbook.errors import BadInput

REPORTS = {"cmp170hx-x3": {"cmp-ratio-kv"}, "a100-x8-glm53": {"glm-3939-closure", "glm-degen-p"}}


@pytest.fixture(scope="module", params=REPORTS)
def reported(request, tmp_path_factory):
    """(box, its run folder)."""
    loaded = params.load(ROOT / "params" / f"{request.param}.yml")
    return request.param, walk_in_process(loaded, tmp_path_factory.mktemp("walked") / request.param / "20261130-000000")


def test_a_report_is_walked_to_its_verdict_and_checked(reported):
    box, folder = reported
    found = {name: receipts.read(folder, name) for name in paths.STATIONS}
    assert all(receipt.passed and receipt.kind == "recorded" for receipt in found.values())
    assert {key for receipt in found.values() for key, figure in receipt.figures.items() if figure.disagrees} == REPORTS[box]
    assert found["07_verdict"].verdict.endswith("Not tested: it gives no single values")
    checked = checking.check(folder)
    assert checked.sound and not checked.of("not_recomputed") and len(checked.of("agrees")) > 80


def test_what_was_changed_in_a_report_is_named(reported, tmp_path):
    box, folder = reported
    first = sorted(REPORTS[box])[0]
    station = next(name for name in paths.STATIONS if first in receipts.read(folder, name).figures)
    file = folder / f"{station}.json"
    before = file.read_text()
    for change in ({"value": 9.99}, {"disagrees": ""}, {"disagrees": "recomputed 4.5 x: somehow"}):
        document = json.loads(before)
        document["figures"][first] |= change
        file.write_text(json.dumps(document))
        named = [row.figure for row in checking.check(folder).of("differs")]
        assert named == [first if "value" in change else f"{first}, its disagrees"], change
    document = json.loads(before)
    document["figures"][f"{first}.recomputed"]["value"] *= 2
    file.write_text(json.dumps(document))
    assert [row.figure for row in checking.check(folder).of("differs")] == [f"{first}.recomputed"]
    file.write_text(before)


def test_a_receipt_that_a_report_lacks_is_told_and_costs_no_other(reported, tmp_path):
    _, folder = reported
    for gone in ("03_partition_selection", "05_server_launch", "06_benchmarks"):
        copy = shutil.copytree(folder, tmp_path / gone)
        (copy / f"{gone}.json").unlink()
        checked = checking.check(copy)
        told = [*checked.integrity, *checked.notes]
        assert any(gone in text for text in told) and not checked.of("differs") and len(checked.of("agrees")) > 40


def test_a_link_among_the_steps_is_refused(reported, tmp_path):
    _, folder = reported
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "steps").mkdir(exist_ok=True)
    (copy / "steps" / "control.json").symlink_to(copy / "params.yml")
    with pytest.raises(BadInput, match=r"steps/control.json is no plain file"):
        checking.check(copy)


def test_a_box_of_captured_outputs_is_walked_to_its_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "box_data_dir", lambda name: ROOT / "docs" / "examples" / "boxes" / name)
    loaded = params.load(ROOT / "docs" / "examples" / "two-unequal.yml")
    folder = walk_in_process(loaded, tmp_path / "two-unequal" / "20261130-000000")
    found = {name: receipts.read(folder, name) for name in paths.STATIONS}
    assert all(receipt.passed and receipt.data["only_captured"] for receipt in found.values())
    # 24 and 12 GiB: the larger card takes 21 of 30 layers.
    assert found["03_partition_selection"].data["layers_per_stage"] == [21, 9]
    launch = found["05_server_launch"]
    assert launch.verdict.endswith("the capture has no boot log to hold it against") and "pool_tokens" not in launch.figures
    assert found["07_verdict"].verdict.startswith("Planned, not measured. KV pool by the ledger: PP2 21+9 1,260,672 tokens, PP1 ")
    assert checking.check(folder).sound


def test_a_recorded_box_without_a_folder_is_refused_before_anything_is_walked(command, tmp_path, monkeypatch):
    monkeypatch.setenv("FIELDBOOK_REPORTS", str(tmp_path / "reports"))
    text = (ROOT / "docs" / "examples" / "two-unequal.yml").read_text().replace("name: two-unequal", "name: nobox")
    (tmp_path / "nobox.yml").write_text(text)
    status, _, err = command("run", tmp_path / "nobox.yml")
    assert status == 2 and err.strip().endswith("`fieldbook capture data/boxes/nobox` on the box writes it, or set box.kind to live")
    assert not (tmp_path / "reports").exists()
