"""Export: one page that stands alone, one zip with a manifest, and nothing of the machine in either."""

import base64
import hashlib
import io
import json
import re
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_output
from test_publish import Page, fake_run, notebook, references

from fieldbook import export, paths, publish, sharing
from fieldbook.inventory.anonymize import Secrets

HOST, TOKEN = "rig-7f", "hf_" + "a1B2" * 6
UUID = "GPU-1a2b3c4d-0000-1111-2222-333344445555"


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def run(tmp_path_factory, monkeypatch_module):
    """A run folder as a live walk leaves it on a machine named rig-7f, full of what must not leave it."""
    tmp_path, monkeypatch = tmp_path_factory.mktemp("machine"), monkeypatch_module
    monkeypatch.setattr(sharing, "machine_secrets", lambda technical: Secrets(hosts=frozenset({HOST, f"{HOST}.lab.example"})))
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "ann"))
    monkeypatch.setenv("LAB_API_KEY", "correct-horse-battery")
    folder = fake_run(tmp_path / "reports" / "cpu-smollm2" / "2026-11-29-1310")
    home, root = Path.home(), paths.root()
    lines = (
        f"loaded {root}/data/models from {home}/cache on {HOST}, key correct-horse-battery, {TOKEN}; see /home/bob/x, /root/y, {folder}/servers and {UUID}\n"
    )
    said = new_code_cell("serve()", execution_count=6, outputs=[new_output("stream", text=lines)])
    told = notebook("05_server_launch", extra=[said])
    told.metadata["papermill"] = {
        "start_time": "2026-11-29T13:04:02+00:00",
        "input_path": "/srv/elsewhere/notebooks/05_server_launch.ipynb",
        "output_path": f"{folder}/05_server_launch.ipynb",
        "parameters": {"run_dir": str(folder), "box": {"name": "cpu-smollm2"}},
    }
    told.cells[2].source = f'run_dir = "{folder}"\nfrom_there = "/srv/elsewhere/lib/fieldbook"'
    nbformat.write(told, folder / "05_server_launch.ipynb")
    receipt = json.loads((folder / "05_server_launch.json").read_text())
    receipt["data"] = {"argv": ["vllm", "serve", "/data/weights/small"], "gpus": [{"uuid": UUID, "processes": [{"pid": 7, "name": "/opt/ann/python3 -m x"}]}]}
    (folder / "05_server_launch.json").write_text(json.dumps(receipt))
    (folder / "params.yml").write_text("model:\n  path: /data/weights/small\n  name: small\n")
    (folder / "samples.jsonl").write_text('{"url": "http://rig-7f.lab.example:8000", "tok_s": 1.5}\n{"tok_s": 2}\n')
    (folder / "answers.jsonl").write_text('{"text": "内存", "n": 1}\n')
    (folder / "readings.json").write_text('{"torn": "' + str(home))
    (folder / ".unseen.json").write_text("{}")
    (folder / "notes.txt").write_text("not of the run")
    (folder / "linked.json").symlink_to("/etc/hostname")
    (folder / "servers").mkdir()
    (folder / "servers" / "log.json").write_text("{}")
    (folder / "screenshots").mkdir()
    (folder / "screenshots" / "phone-light.png").write_bytes(b"\x89PNG")
    publish.write_report(folder)
    return folder


def read_zip(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def sent(run, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("sent")
    told = export.export(run, str(tmp_path / "out" / "one.html"), str(tmp_path / "out" / "one.zip"))
    return told, read_zip(told["zip"]), Path(told["html"])


def test_the_zip_holds_the_run_under_one_folder_with_its_manifest(sent, run):
    told, members, _ = sent
    top = "cpu-smollm2-2026-11-29-1310/"
    names = [f"{name}{suffix}" for name in publish.STATIONS for suffix in (".ipynb", ".json")]
    names += ["MANIFEST.json", "answers.jsonl", "index.html", "params.yml", "readings.json", "samples.jsonl", "screenshots/phone-light.png"]
    assert [name.removeprefix(top) for name in members] == names == told["files"]
    manifest = json.loads(members[f"{top}MANIFEST.json"])
    sums = {name.removeprefix(top): hashlib.sha256(data).hexdigest() for name, data in members.items() if not name.endswith("MANIFEST.json")}
    assert {name: row["sha256"] for name, row in manifest["files"].items()} == sums
    assert (manifest["schema_version"], manifest["box"], manifest["run"]) == (1, "cpu-smollm2", "2026-11-29-1310")
    assert manifest["cleaned"] == told["cleaned"] == ["05_server_launch.ipynb", "05_server_launch.json", "params.yml", "readings.json", "samples.jsonl"]
    for name in ("02_memory_accounting.json", "02_memory_accounting.ipynb", "answers.jsonl"):
        assert members[top + name] == (run / name).read_bytes()


def test_nothing_of_the_machine_is_in_any_member_or_in_the_page(sent, run):
    _, members, html = sent
    embedded = [base64.b64decode(data) for data in re.findall(rb"data:application/\w+;base64,([\w+/=]+)", html.read_bytes())]
    assert len(embedded) == 8
    secret = [
        str(Path.home()),
        str(paths.root()),
        str(run),
        HOST,
        "/srv/elsewhere",
        "/home/bob",
        "/root/",
        "/data/weights",
        "/opt/ann",
        "correct-horse",
        TOKEN,
        UUID,
    ]
    for data in (*members.values(), html.read_bytes(), *embedded):
        assert [word for word in secret if word.encode() in data] == []
    notebook_text = members["cpu-smollm2-2026-11-29-1310/05_server_launch.ipynb"].decode()
    told = "loaded fieldbook/data/models from ~/cache on host, key ***, ***; see ~/x, ~/y, reports/cpu-smollm2/2026-11-29-1310/servers and GPU-00000000-0000"
    assert told in notebook_text and 'from_there = \\"fieldbook/lib/fieldbook\\"' in notebook_text
    papermill = json.loads(notebook_text)["metadata"]["papermill"]
    assert papermill == {"start_time": "2026-11-29T13:04:02+00:00", "parameters": {"box": {"name": "cpu-smollm2"}}}
    receipt = json.loads(members["cpu-smollm2-2026-11-29-1310/05_server_launch.json"])
    assert receipt["data"]["argv"][2] == ".../small" and receipt["data"]["gpus"][0]["processes"] == [{"pid": 7, "name": "python3"}]
    assert members["cpu-smollm2-2026-11-29-1310/samples.jsonl"].decode().splitlines()[0] == '{"url": "http://host:8000", "tok_s": 1.5}'


def test_the_page_in_the_zip_links_to_its_members_and_names_their_hashes(sent, tmp_path):
    _, members, _ = sent
    top = "cpu-smollm2-2026-11-29-1310/"
    (tmp_path / "page.html").write_bytes(members[f"{top}index.html"])
    page = Page(tmp_path / "page.html")
    files = {r for r in references(page) if not r.startswith(("#", "data:"))}
    assert files and {name for name in files if top + name not in members} == set()
    assert hashlib.sha256(members[f"{top}05_server_launch.json"]).hexdigest() in page.text


def test_the_single_page_refers_to_nothing_outside_itself(sent):
    _, _, html = sent
    page = Page(html)
    outside = [r for r in references(page) if not re.fullmatch(r"#[\w.:-]+|data:(image/[a-z+]+|application/(json|yaml));base64,[\w+/=]+", r)]
    assert outside == [] and {r for r in references(page) if r.startswith("#") and r[1:] not in page.ids} == set()
    downloads = {a["download"]: a["href"] for tag, a in page.tags if tag == "a" and "download" in a}
    assert sorted(downloads) == [f"{name}.json" for name in publish.STATIONS] + ["params.yml"]
    assert json.loads(base64.b64decode(downloads["02_memory_accounting.json"].partition(",")[2]))["notebook"] == "02_memory_accounting"
    assert [a for tag, a in page.tags if tag == "a" and a.get("href", "").startswith("data:") and "download" not in a] == []
    assert "Executed notebook 02_memory_accounting.ipynb: left out of this single file" in page.text


def test_the_same_folder_gives_the_same_bytes(run, sent, tmp_path):
    first, second = sent[0], export.export(run, str(tmp_path / "b.html"), str(tmp_path / "b.zip"))
    assert Path(first["zip"]).read_bytes() == Path(second["zip"]).read_bytes()
    assert Path(first["html"]).read_bytes() == Path(second["html"]).read_bytes()
    with zipfile.ZipFile(io.BytesIO(Path(first["zip"]).read_bytes())) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_without_an_option_both_lie_in_the_current_folder(run, tmp_path, monkeypatch, command):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    status, out, err = command("export", run)
    assert (status, err) == (0, "")
    assert sorted(file.name for file in Path().iterdir()) == ["cpu-smollm2-2026-11-29-1310.html", "cpu-smollm2-2026-11-29-1310.zip"]
    assert out.splitlines() == [str(Path(f"cpu-smollm2-2026-11-29-1310.{kind}").absolute()) for kind in ("html", "zip")]
    status, out, _ = command("export", run, "--zip", "only.zip", "--json")
    assert status == 0 and json.loads(out)["html"] is None and Path("only.zip").is_file() and not Path("only.html").exists()


def test_a_name_that_this_machine_shares_with_the_box_is_left(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sharing, "machine_secrets", lambda technical: asked.append(technical) or Secrets())
    rules = sharing.rules_of(tmp_path, "H200-x1")
    assert {"h200-x1", "h200", "x1"} <= set(asked[0]) and sharing.clean_text("h200-x1 on GPU", rules) == "h200-x1 on GPU"


@pytest.mark.parametrize("text", ["see /rootfs/x and 17/root", "http://a.example/home/x", "v1/worker/gpu", "C(29, 1) = 29 at 3/home/"])
def test_what_only_looks_like_a_path_of_the_machine_stays(tmp_path, text):
    assert sharing.clean_text(text, sharing.rules_of(tmp_path, "box")) == text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/nowhere"], "no such run folder"),
        ([str(Path(__file__).parent)], "is no run folder, it holds no receipt"),
        (["RUN", "--html", "."], "is a folder; give the name of a file"),
        (["RUN", "--zip", "/proc/x.zip"], "cannot be written"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_status_2(run, command, words, says):
    status, out, err = command("export", *(run if word == "RUN" else word for word in words))
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and err.startswith("fieldbook: ") and says in err
