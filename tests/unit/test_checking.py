"""A run is recomputed from its folder or a zip of it; whatever was changed by hand is named, and nothing of it is believed or executed."""

import json
import re
import shutil
import stat
import types
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from conftest import ROOT, walk_in_process
from nbformat.v4 import new_code_cell, new_notebook, new_output

from fieldbook import __version__, budget, checking, files, memory, paths, probes, publish, receipts, station
from fieldbook import params as params_module
from fieldbook.checking import compare, opening, run, samples
from fieldbook.errors import BadInput

REPLAY = "cpu-smollm2-replay"
TABLE = "<table><tr><th>rank</th><th>tokens</th></tr><tr><td>rank 0</td><td>46,592</td></tr></table>"


@pytest.fixture(scope="session")
def walked(tmp_path_factory):
    """A run folder of the recorded box, with one executed notebook for the report."""
    box = params_module.load(ROOT / "params" / f"{REPLAY}.yml")
    folder = walk_in_process(box, tmp_path_factory.mktemp("walked") / REPLAY / "20261130-000000")
    shown = new_code_cell("show", execution_count=1, outputs=[new_output("display_data", {"text/html": TABLE, "text/plain": "table"})])
    nbformat.write(new_notebook(cells=[shown]), folder / "02_memory_accounting.ipynb")
    publish.write_report(folder)
    return folder


@pytest.fixture
def copied(walked, tmp_path):
    """The walked run to change, its raw files in it as a live run has them."""
    folder = tmp_path / "copied" / REPLAY / walked.name
    shutil.copytree(walked, folder)
    for name in ("samples.jsonl", "answers.jsonl", "readings.json"):
        shutil.copy(ROOT / "data" / "reports" / REPLAY / name, folder / name)
    return folder


def edit(folder, number, change):
    """Change a receipt's document by hand."""
    file = folder / f"{paths.station_name(number)}.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def edit_rows(folder, change):
    """Change the rows of samples.jsonl by hand."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


def as_live(folder):
    """Make a copied run one that a live box left: kind, raw files, logs of every boot, and a report of that."""
    for boot, name in (("candidate-1", "candidate"), ("candidate-2", "candidate"), ("baseline-2", "baseline")):
        (folder / "servers").mkdir(exist_ok=True)
        shutil.copy(ROOT / "data" / "reports" / REPLAY / f"boot-{name}.log", folder / "servers" / f"{boot}.log")
    sections = yaml.safe_load((folder / "params.yml").read_text())
    sections["box"]["kind"] = "live"
    (folder / "params.yml").write_text(yaml.safe_dump(sections, sort_keys=False))
    digest = params_module.validate(sections, "test").hash
    for number in range(1, 8):
        edit(folder, number, lambda one: one.update(kind="live", params=sections, params_hash=digest))

    def tried_again(rows):
        # The recorded run is older than the rule that a void sample is tried again.
        void = [row for row in rows if row["void"]]
        return [*rows, *({**row, "repetition": n} for row in void for n in (4, 5))]

    edit_rows(folder, tried_again)
    publish.write_report(folder)
    return folder


def zipped(folder, archive, top="run"):
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as whole:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            whole.write(file, f"{top}/{file.relative_to(folder)}")
    return archive


def told(found):
    """Everything a check complains of, as one text."""
    return "\n".join([*(f"{row.station}, {row.figure}: {row.says} | {row.recomputed}" for row in found.of("differs")), *found.integrity])


# A run as it was left.


def test_a_walked_run_agrees_throughout_and_every_figure_is_accounted_for(command, walked):
    status, out, err = command("check", walked, "--json")
    document = json.loads(out)
    assert (status, err) == (0, "") and (document["differs"], document["integrity"], document["not_recomputed"]) == ([], [], [])
    found = checking.check(walked)
    of_receipts = {(name, key) for name in paths.STATIONS for key in receipts.read(walked, name).figures}
    rows = [(row.station, row.figure) for row in found.rows]
    assert of_receipts <= set(rows) and len(rows) == len(set(rows)) and document["agrees"] + len(document["taken"]) == len(rows)
    status, out, err = command("check", walked)
    assert (status, err) == (0, "") and out.splitlines()[-1] == f"{document['agrees']} agree, 0 differ, 0 taken as they are, 0 not recomputed, " + (
        "0 integrity problems, 60 samples checked"
    )


def test_a_live_run_in_a_zip_is_checked_without_its_machine_and_without_the_data_here(copied, tmp_path, command):
    as_live(copied)
    hashes = {str(p.relative_to(copied)): files.sha256_of(p) for p in copied.rglob("*") if p.is_file()}
    (copied / "MANIFEST.json").write_text(json.dumps({"files": hashes}))
    status, out, _ = command("check", zipped(copied, tmp_path / "run.zip"), "--json")
    document = json.loads(out)
    assert status == 0 and (document["differs"], document["integrity"], document["not_recomputed"], document["notes"]) == ([], [], [], [])
    assert {row["figure"]: row["why"] for row in document["taken"]} == {
        "memory_read_gb_s": "a bandwidth measured on the box",
        "data.inventory": "read on the box",
        "data.before": "read from the vLLM installed on the box",
        "data.after": "read from the vLLM installed on the box",
        "data.measured_proof": "read from the vLLM installed on the box",
    }


def test_a_live_log_goes_on_and_may_be_of_a_later_start(copied):
    log = as_live(copied) / "servers" / "candidate-1.log"
    text = log.read_text()
    log.write_text(f"{text}INFO 11-30 09:00:00 [x.py:1] Application shutdown complete.\nValueError: much later\n")
    assert checking.check(copied).sound
    log.write_text(text.replace("46,592", "46,608"))
    assert "05_server_launch, data.server.measured_log: " in told(checking.check(copied))
    edit(copied, 6, lambda one: one["data"]["server"]["measured_log"].update(pool_tokens=46_608))
    publish.write_report(copied)
    found = checking.check(copied)
    assert found.sound and any("started again for notebook 06" in row.why for row in found.of("taken"))


def test_another_baseline_of_the_model_is_not_held_against_a_run(copied, monkeypatch):
    monkeypatch.setattr(probes, "read_baseline", lambda *_: ({"counts": {"questions/en": [0, 100], "questions/zh": [0, 100]}, "made_at": ""}, ""))
    found = checking.check(copied)
    assert not found.of("differs") and {row.figure for row in found.of("not_recomputed")} == {"receipt.verdict", "receipt.passed"}


def test_what_a_folder_lacks_is_told_and_not_held_against_it(copied, command):
    as_live(copied)
    for name in ("samples.jsonl", "servers/baseline-2.log", "readings.json"):
        (copied / name).unlink()
    shutil.rmtree(copied / "steps")
    found = checking.check(copied)
    why = {(row.station[:2], row.figure): row.why for row in found.of("not_recomputed")}
    assert found.sound and why["06", "decode_c4_tok_s"] == "samples.jsonl is missing" and why["07", "pool_ratio"] == "steps/control.json is missing"
    assert why["06", "data.signs"] == "readings.json is missing" and "samples cannot be checked: samples.jsonl is missing" in found.notes
    lines = command("check", copied)[1].splitlines()
    assert any(
        line.startswith("not recomputed: 06_benchmarks, ") and "decode_c4_tok_s" in line and line.endswith(": samples.jsonl is missing") for line in lines
    )


def test_a_report_without_raw_data_is_taken_and_not_judged(copied, monkeypatch):
    """A field report of figures alone: no samples, answers, logs or patches anywhere."""
    for name in ("samples.jsonl", "answers.jsonl", "readings.json"):
        (copied / name).unlink()
    shutil.rmtree(copied / "steps")
    monkeypatch.setattr(paths, "recorded_dir", lambda name: copied / "nowhere")
    for number, verdict in ((4, "as the report has it"), (5, "as the report has it")):
        edit(copied, number, lambda one, verdict=verdict: one.update(verdict=verdict))
    publish.write_report(copied)
    found = checking.check(copied)
    why = {(row.station[:2], row.figure): row.why for row in found.of("not_recomputed")}
    assert found.sound and why["04", "receipt.verdict"].startswith("patches.json is missing, and this checkout has no data/reports/")
    assert why["05", "receipt.verdict"].startswith("boot-candidate.log is missing") and why["07", "pool_ratio"].startswith("steps/control.json is missing")


# Changed by hand.


def test_every_figure_that_is_changed_is_named(copied):
    changed = set()

    def change(document):
        for key, figure in document["figures"].items():
            value = figure["value"]
            figure["value"] = f"{value}!" if isinstance(value, str) else [*value[:-1], value[-1] + 1] if isinstance(value, list) else value + 1
            changed.add((document["notebook"], key))

    for number in range(1, 8):
        edit(copied, number, change)
    found = checking.check(copied)
    assert changed <= {(row.station, row.figure) for row in found.of("differs")} and len(changed) > 30
    text = told(found)
    for number, name in enumerate(paths.STATIONS, 1):
        assert f"of {name}.json, the file {files.sha256_of(copied / f'{name}.json')}" in text and f"index.html: {number:02}, figure " in text


CHANGED_RECEIPTS = {
    "a verdict reworded": (7, lambda d: d.update(verdict=d["verdict"].replace("cannot tell", "faster")), "07_verdict, receipt.verdict: "),
    "a verdict reworded on the page only": (7, None, 'index.html: its verdict reads "PP2 15+15 against PP1: same'),
    "p in a source": (
        7,
        lambda d: d["figures"]["decode_c4_tok_s_ratio"].update(source=d["figures"]["decode_c4_tok_s_ratio"]["source"].replace("0.0050", "0.0010")),
        "07_verdict, decode_c4_tok_s_ratio, its source: ",
    ),
    "the answer in a label": (
        7,
        lambda d: d["figures"]["decode_c4_tok_s_ratio"].update(label="decode, 4 streams against PP1: faster"),
        "07_verdict, decode_c4_tok_s_ratio, its label: ",
    ),
    "a digit more than is stored": (6, lambda d: d["figures"]["decode_c4_tok_s"].update(value=76.844), "06_benchmarks, decode_c4_tok_s: 76.844 | 76.84"),
    "the boot log": (5, lambda d: d["data"]["server"]["measured_log"].update(pool_tokens=50_000), "05_server_launch, data.server.measured_log: "),
    "a ceiling": (1, lambda d: d["data"]["ceilings_tok_s"].update(measured_decode_c4_tok_s=400.0), "data.ceilings_tok_s.measured_decode_c4_tok_s: 400.0"),
    "a defect": (4, lambda d: d["data"]["before"][0].update(met_by_this_box=False), "04_patch_application, defects_met: 1 | 0"),
    "a rank": (2, lambda d: d["data"]["ranks"][0].update(blocks=1), "02_memory_accounting, data.ranks: "),
    "passed": (6, lambda d: d.update(passed=False), "06_benchmarks, receipt.passed: False | True"),
    "its params": (3, lambda d: d["params"]["engine"].update(max_num_seqs=4), "03_partition_selection.json: params_hash is "),
    "its times": (3, lambda d: d.update(started_at="2020-01-01T00:00:00Z", ended_at="2020-01-01T00:00:01Z"), "03_partition_selection.json ended at 2020-01-01"),
}


@pytest.mark.parametrize("what", CHANGED_RECEIPTS)
def test_a_receipt_changed_by_hand_is_named(copied, what):
    number, change, says = CHANGED_RECEIPTS[what]
    if change:
        edit(copied, number, change)
    else:
        page = copied / "index.html"
        page.write_text(page.read_text().replace("against PP1: cannot tell in", "against PP1: same in"))
    assert says in told(checking.check(copied))


def first(row, metric="decode_c4_tok_s"):
    return (row["arm"], row["boot"], row["round"], row["metric"], row["repetition"]) == ("candidate", 1, 1, metric, 1)


CHANGED_SAMPLES = {
    "a value": (
        lambda rows: [{**row, "value_tok_s": row["value_tok_s"] + 1} if first(row) else row for row in rows],
        ["candidate, boot 1, round 1, decode_c4_tok_s, repetition 1: value_tok_s"],
    ),
    "a raw time": (
        lambda rows: [{**row, "ttft_s": [row["ttft_s"][0] * 0.9]} if first(row, "prefill_512_tok_s") else row for row in rows],
        ["candidate, boot 1, round 1, prefill_512_tok_s, repetition 1: value_tok_s", "repetition 1: void: sound | lag: "],
    ),
    "made void": (
        lambda rows: [{**row, "void": ["queue: it waited 1 s of 2 s there"]} if first(row) else row for row in rows],
        ["repetition 1: void: queue: it waited 1 s of 2 s there | sound", "06_benchmarks, decode_c4_tok_s", "data.measured_void"],
    ),
    "made sound": (lambda rows: [{**row, "void": []} for row in rows], ["candidate, boot 2, round 1, decode_c1_tok_s"]),
    "should be void": (
        lambda rows: [{**row, "preemptions": 2, "client_cores": 0.95} if first(row) else row for row in rows],
        ["void: sound | preemptions: 2; load client: busy on 0.95 of a core"],
    ),
    "a line removed": (
        lambda rows: [row for row in rows if not first(row)],
        ["samples.jsonl: candidate, boot 1, round 1, decode_c4_tok_s: repetition 1 is missing", "06_benchmarks, decode_c4_tok_s, its source: median of 6"],
    ),
    "a line twice": (lambda rows: [*rows, rows[0]], [", repetition 1: there 2 times"]),
    "another point": (lambda rows: [*rows, {**rows[0], "metric": "decode_c64_tok_s"}], ["decode_c64_tok_s, repetition 1: decode_c64_tok_s | None"]),
}


@pytest.mark.parametrize("what", CHANGED_SAMPLES)
def test_a_sample_changed_by_hand_is_named(copied, what):
    change, says = CHANGED_SAMPLES[what]
    edit_rows(copied, change)
    text = told(checking.check(copied))
    assert all(one in text for one in says), text


def test_what_a_sample_does_not_keep_cannot_be_held_against_it(copied):
    def change(rows):
        reasons = ["error: the connection was reset", "tokens: the server counted 33 prompt tokens, expected 32"]
        return [{**row, "void": reasons} if first(row) else row for row in rows]

    edit_rows(copied, change)
    assert not [row for row in checking.check(copied).of("differs") if row.station == "samples.jsonl"]


CHANGED_PAGES = {
    "a figure": (
        r'(<tr id="s03-figure-pool-tokens-predicted">.*?tokens">)46 592',
        r"\g<1>46 593",
        "index.html: 03, figure pool_tokens_predicted: it shows 46 593",
    ),
    "its title": (
        r'(<tr id="s03-figure-pool-tokens-predicted">.*?title=")46 592',
        r"\g<1>47 592",
        "03, figure pool_tokens_predicted: it shows 46 592 (47 592",
    ),
    "a source": (r"median of 6 samples", "median of 9 samples", "06, figure prefill_128_tok_s: its source reads 'median of 9"),
    "a headline": (r'(<p class="value">\s*)46 592', r"\g<1>66 592", "index.html: its headline figure KV pool, predicted reads 66 592 tokens"),
    "a hash": (r"(<code>)[0-9a-f]{64}(</code></td></tr>)", r"\g<1>" + "0" * 64 + r"\g<2>", f"has SHA-256 {'0' * 64} of 01_hardware_inventory.json"),
    "a station's line": (r'(<p class="finding">predicted KV pool) 46,592', r"\g<1> 56,592", "02: its line reads 'predicted KV pool 56,592 tokens"),
    "a notebook's table": (r"46,592</td>", "46,692</td>", "index.html: 02: its tables lack what the executed notebook has: '46,592'"),
    "a figure too many": ('s03-figure-splits"', 's03-figure-slits"', "03: it shows a figure that no receipt has: slits"),
    "nested without end": ("</body>", "<div>" * 2_000, "has a form that Fieldbook does not write"),
}


@pytest.mark.parametrize("what", CHANGED_PAGES)
def test_a_report_changed_by_hand_is_named(copied, what):
    before, after, says = CHANGED_PAGES[what]
    page = copied / "index.html"
    changed = re.sub(before, after, page.read_text(), count=1, flags=re.DOTALL)
    assert changed != page.read_text()
    page.write_text(changed)
    assert says in told(checking.check(copied)).replace("\u202f", " ")


def test_params_manifest_and_missing_receipts_are_looked_at(copied, command):
    hashes = {p.name: files.sha256_of(p) for p in copied.iterdir() if p.is_file()} | {"gone.log": "0" * 64, "../outside": "0" * 64}
    (copied / "MANIFEST.json").write_text(json.dumps(hashes))
    (copied / "answers.jsonl").write_text((copied / "answers.jsonl").read_text().replace("baseline", "baseline", 1) + "\n")
    (copied / "03_partition_selection.json").unlink()
    text = (copied / "params.yml").read_text()
    (copied / "params.yml").write_text(text.replace("max_num_seqs: 8", "max_num_seqs: 9"))
    status, out, _ = command("check", copied)
    assert status == 1
    for says in (
        "integrity: 01_hardware_inventory.json: params_hash is ",
        "integrity: 03_partition_selection.json is missing, though later ones are there",
        "integrity: MANIFEST.json: answers.jsonl has another SHA-256 than listed",
        "integrity: MANIFEST.json: gone.log is missing",
        "integrity: MANIFEST.json: '../outside' lies outside the run folder",
        "index.html: its table of receipts lists 03_partition_selection.json, which is not in the folder",
        "not recomputed: 05_server_launch, data.measured_terms, receipt.verdict, receipt.passed: 03_partition_selection.json is missing",
    ):
        assert says in out, out
    (copied / "params.yml").write_text("a: &a [1, 1]\nb: [*a, *a]\n")
    assert "params.yml: it refers to parts of itself" in told(checking.check(copied))


def test_a_walk_that_stopped_is_no_fault(copied):
    for number in (4, 5, 6, 7):
        (copied / f"{paths.station_name(number)}.json").unlink()
    publish.write_report(copied)
    found = checking.check(copied)
    assert found.sound and "07_verdict.json is missing" in found.notes


# Another release, another model, another machine.


def test_another_release_and_an_unknown_model_are_told_in_a_line(copied):
    for number in range(1, 8):
        edit(copied, number, lambda one: one["versions"].update(fieldbook="9.9"))
    found = checking.check(copied)
    why = {(row.station[:2], row.figure): row.why for row in found.of("not_recomputed")}
    assert not found.of("differs") and why["03", "pool_tokens_predicted"] == why["07", "receipt.verdict"] == "written by Fieldbook 9.9"
    assert ("06", "decode_c4_tok_s") not in why and any("was written by Fieldbook 9.9" in note for note in found.notes)
    sections = yaml.safe_load((copied / "params.yml").read_text())
    sections["model"]["name"] = "nobody-has-it"
    (copied / "params.yml").write_text(yaml.safe_dump(sections))
    for number in range(1, 8):
        edit(copied, number, lambda one: (one["versions"].update(fieldbook=__version__), one.update(params=sections)))
    found = checking.check(copied)
    why = {(row.station[:2], row.figure): row.why for row in found.of("not_recomputed")}
    assert "no data/models/nobody-has-it/config.json" in why["02", "checkpoint_bytes"] and why["03", "splits"] == why["02", "checkpoint_bytes"]
    assert not found.of("differs") and ("07", "decode_c4_tok_s_ratio") not in why
    assert any(note.startswith("nothing of the model can be computed here") for note in found.notes)


def test_pools_that_rest_on_an_earlier_run_are_recomputed_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FIELDBOOK_REPORTS", str(tmp_path / "there"))
    sections = params_module.load(ROOT / "params" / "a100-x8-glm53.yml").model_dump()
    sections["engine"] |= {"available_kv_gib": [], "other_boots": []}
    terms = [{"non_torch_gib": 3.13, "peak_activation_gib": 2.36}, {"non_torch_gib": 3.2, "peak_activation_gib": 5.0}]
    here = tmp_path / "there" / "a100-x8-glm53"
    earlier = station.open_station("05_server_launch", str(here / "20260101-000000"), **sections)
    earlier.data["measured_terms"] = terms
    earlier.close("fine")
    folder = here / "20260102-000000"
    first_station = station.open_station("01_hardware_inventory", str(folder), **sections)
    first_station.data["inventory"] = {"gpus": [{"memory_usable_bytes": round(79.25 * budget.GIB), "memory_total_bytes": None}] * 8}
    first_station.close("fine")
    st = station.open_station("02_memory_accounting", str(folder), **sections)
    pool = memory.pool(st.params, memory.model_spec("glm-5.3"), (39, 39), gpus=st.gpus())
    st.figure("pool_tokens_predicted", pool.pool_tokens, "tokens", "computed", "memory.pool", "KV pool")
    st.close("fine")
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    monkeypatch.delenv("FIELDBOOK_REPORTS")

    def outcome():
        return next((row.outcome, row.why) for row in checking.check(moved).rows if row.figure == "pool_tokens_predicted")

    assert outcome()[0] == "agrees"
    edit(moved, 2, lambda one: one["data"]["earlier_terms"][1].update(peak_activation_gib=1.0))
    assert outcome()[0] == "differs"
    edit(moved, 2, lambda one: one["data"].pop("earlier_terms"))
    assert outcome() == ("not_recomputed", "it may rest on the log of an earlier run of the box, whose terms its receipt does not keep")


def test_a_module_can_bring_recomputations_of_its_own(copied, monkeypatch):
    def add(document):
        base = document["figures"]["splits"]
        document["figures"] |= {
            "glm-pool-4137": {**base, "value": 4137, "evidence": "stated", "disagrees": "its inputs give 29"},
            "glm-pool-wrong": {**base, "value": 4137, "evidence": "stated", "disagrees": "its inputs give 30"},
            "glm-other": {**base, "value": 1, "evidence": "recorded", "source": "field report 001"},
            "new-sum": {**base, "value": 1, "evidence": "computed"},
            "ratio": {**base, "value": 5.0, "evidence": "stated", "disagrees": "its inputs give 2.5"},
        }

    edit(copied, 3, add)
    known = {"glm-pool-*": lambda run, key: checking.Found(4137, "n - 1", disagrees="its inputs give 29"), "ratio": lambda run, key: checking.Found(2.5, "x")}
    monkeypatch.setattr(checking, "MODULES", (*checking.MODULES, types.SimpleNamespace(RECOMPUTED={"03_partition_selection": known})))
    rows = {row.figure: row for row in checking.check(copied).rows if row.station.startswith("03")}
    assert (rows["glm-pool-4137"].outcome, rows["glm-pool-wrong, its disagrees"].outcome) == ("agrees", "differs")
    assert (rows["glm-other"].outcome, rows["glm-other"].why) == ("taken", "recorded, and nothing here gives it again")
    assert (rows["new-sum"].outcome, rows["ratio"].outcome) == ("not_recomputed", "taken") and "its inputs give 2.5" in rows["ratio"].why


def test_values_are_compared_to_the_rounding_they_were_stored_with():
    assert compare.same(2.0, 1.99951, decimals=3) and not compare.same(2.0, 1.96, decimals=3) and not compare.same(2.0004, 2.0, decimals=3)
    assert compare.same([15, 15], [15, 15]) and not compare.same([15, 15], [15, 16]) and not compare.same(True, 1) and not compare.same(1, "1")
    assert (
        compare.same(15.0, 15)
        and compare.same({"a": [0.1 + 0.2]}, {"a": [0.3]})
        and not compare.same({"a": 1}, {"b": 1})
        and not compare.same(float("nan"), 1.0)
    )


def test_a_reason_that_samples_do_not_keep_is_known_as_such():
    assert samples.cannot_be_applied_again("tokens: 3 requests ended by length, 1 otherwise; expected 4 and 0")
    assert not samples.cannot_be_applied_again("tokens: output lengths [3], expected 4 each")


def test_an_exact_test_without_end_is_not_begun():
    with pytest.raises(checking.CannotTell, match="relabellings are too many"):
        run.Run(Path("."), {}, None).feasible([[1.0] * 30], [[2.0] * 30])


# What is no run.


def bad(given):
    with pytest.raises(BadInput) as caught:
        checking.check(given)
    assert "\n" not in str(caught.value) and "/fieldbook-check-" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_run_is_one_line_and_exit_status_2(command, copied, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("no zip")
    whole = zipped(copied, tmp_path / "run.zip").read_bytes()
    cut = tmp_path / "cut.zip"
    cut.write_bytes(whole[: len(whole) // 2])
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(whole[:2000] + b"\xff" * 400 + whole[2400:])
    (tmp_path / "empty").mkdir()
    for given, says in (
        (tmp_path / "nowhere", "no such run folder or zip"),
        (text, "no zip"),
        (cut, "no zip, or a damaged one"),
        (tmp_path / "empty", "no run"),
    ):
        status, out, err = command("check", given)
        assert (status, out) == (2, "") and len(err.splitlines()) == 1 and says in err
    assert "damaged" in bad(damaged) or "cannot be unpacked" in bad(damaged)
    edit(copied, 4, lambda one: one.update(schema_version=2))
    assert "04_patch_application.json: not a receipt of schema version 1 (" in bad(copied)
    (copied / "04_patch_application.json").write_text("{")
    assert "not a receipt" in bad(zipped(copied, tmp_path / "other.zip"))


def test_a_zip_is_unpacked_as_a_strangers(tmp_path, monkeypatch, copied):
    def archive(*members, name="bad.zip"):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as whole:
            for member, content in members:
                whole.writestr(member, content)
        return tmp_path / name

    link = zipfile.ZipInfo("run/params.yml")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for member in ("../out.txt", "/etc/out.txt", "run/../../out.txt", "run\\..\\out.txt", "C:out.txt", "run/a\nb"):
        assert "leads out of the folder" in bad(archive((member, "x")))
    assert "no plain file (a link, perhaps)" in bad(archive((link, "/etc/passwd")))
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = archive(("run/params.yml", "a"), ("run/params.yml", "b"))
    assert "there twice" in bad(twice) and "cannot be unpacked" in bad(archive(("run", "x"), ("run/params.yml", "x")))
    assert not (tmp_path / "out.txt").exists() and not Path("/etc/out.txt").exists()
    monkeypatch.setattr(opening, "MOST_BYTES", 1_000_000)
    bomb = archive(("run/params.yml", b"0" * 2_000_000))
    assert "unpacks to more than" in bad(bomb)
    # A header that lies: the sizes of the directory say 10 bytes.
    lying = bytearray(bomb.read_bytes())
    place = lying.rindex(b"PK\x01\x02")
    lying[place + 24 : place + 28] = (10).to_bytes(4, "little")
    bomb.write_bytes(lying)
    bad(bomb)
    monkeypatch.setattr(opening, "MOST_FILES", 2)
    assert "3 files, more than" in bad(archive(*((f"run/{n}", "x") for n in range(3))))


def test_a_folder_with_links_is_not_followed(copied, tmp_path):
    (copied / "samples.jsonl").unlink()
    (copied / "samples.jsonl").symlink_to("/etc/passwd")
    assert "samples.jsonl is no plain file" in bad(copied)


def test_receipts_of_a_stranger_end_in_lines(copied):
    """Data of any form: told as what cannot be recomputed."""
    for number in range(1, 8):
        edit(copied, number, lambda one: one.update(data={key: 7 for key in one["data"]}))
    (copied / "02_memory_accounting.ipynb").write_text('{"cells": 7, "metadata": [7]}')
    (copied / "answers.jsonl").write_text("[7]\n")
    (copied / "readings.json").write_text("[")
    (copied / "params.yml").write_text("7")
    found = checking.check(copied)
    assert not found.sound and any("do not give it" in row.why or "7" in row.why for row in found.of("not_recomputed"))
