"""The patch catalogue on a small made-up tree and, where vLLM is installed, on a copy of its file: detect, apply, revert, byte for byte."""

import ast
import difflib
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from fieldbook import patches
from fieldbook.errors import BadInput, GateFailed
from fieldbook.patches import cpu_eager_pp, store

DEFECT = cpu_eager_pp.DEFECT
ID, FILE = DEFECT.id, DEFECT.sites[0].file

# A runner in our own words with the defect in it, and traps around it: same assert elsewhere, odd spacing, a comment, a string.
STOCK = '''\
"""A small runner."""
import   os   # two spaces too many


class Carrier:
    intermediate_tensors = None

    def other(self):
        assert self.intermediate_tensors is not None
        return "assert self.intermediate_tensors is not None"


class GPUModelRunner(Carrier):
    def sync_and_gather_intermediate_tensors(
        self, count: int,   tensors,
        sync_self: bool,
    ):
        # What the stage before sent.
        assert self.intermediate_tensors is not None

        width = 4  # kept
        if sync_self:
            assert tensors is not None
        return {k: v[:count] for k, v in self.intermediate_tensors.items()}


x = {'a':1,
     'b' : 2}
'''
# The same made right by someone else: allocated where it is needed.
FIXED = STOCK.replace(
    "        # What the stage before sent.\n        assert self.intermediate_tensors is not None\n",
    "        if self.intermediate_tensors is None:\n            self.intermediate_tensors = self.make()\n",
)


def plant(folder, content=STOCK):
    """A tree `folder`/vllm with the runner in it."""
    tree = folder / "vllm"
    file = tree / FILE
    file.parent.mkdir(parents=True)
    (tree / "__init__.py").write_text("")
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tree


@pytest.fixture
def tree(tmp_path):
    return plant(tmp_path)


def content(tree):
    return (tree / FILE).read_bytes()


def row_of(tree, *box):
    return next(row for row in patches.status(tree, *box) if row.id == ID)


def everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_stock_code_shows_the_defect_where_it_is(tree):
    row = row_of(tree)
    assert (row.id, row.state, row.file, row.met_by_this_box) == (ID, "present", FILE, False)
    assert STOCK.splitlines()[row.line - 1].strip() == "def sync_and_gather_intermediate_tensors("
    assert row.sha256 == hashlib.sha256(STOCK.encode()).hexdigest()
    assert patches.as_rows([row])[0]["state"] == "present"


def test_looking_changes_nothing(tree, tmp_path):
    before = everything(tmp_path)
    patches.status(tree)
    patches.diff(tree, ID)
    assert everything(tmp_path) == before


def test_the_mend_changes_only_the_assert(tree):
    assert patches.apply(tree, ID) == "patched"
    before, after = STOCK.splitlines(), content(tree).decode().splitlines()
    at = before.index("        # What the stage before sent.") + 1
    assert after[:at] == before[:at] and after[-(len(before) - at - 1) :] == before[at + 1 :]
    new = after[at : len(after) - (len(before) - at - 1)]
    assert new[0] == "        if self.intermediate_tensors is None:" and all(line.startswith("            ") for line in new[1:])
    # The assert of the other method is not this defect.
    assert content(tree).decode().count("        assert self.intermediate_tensors is not None") == 1


def test_the_mended_runner_works_where_the_stock_one_dies(tree):
    class Model:
        def make_empty_intermediate_tensors(self, batch_size, dtype, device):
            return {"hidden": [dtype, device] * batch_size}

    def runner():
        names = {}
        exec(compile(content(tree), "runner", "exec"), names)
        made = names["GPUModelRunner"]()
        made.model, made.max_num_tokens, made.device = Model(), 3, "cpu"
        made.model_config = type("Config", (), {"dtype": "f4"})
        return made

    with pytest.raises(AssertionError):
        runner().sync_and_gather_intermediate_tensors(2, None, False)
    patches.apply(tree, ID)
    mended = runner()
    assert mended.sync_and_gather_intermediate_tensors(2, None, False) == {"hidden": ["f4", "cpu"]}
    assert len(mended.intermediate_tensors["hidden"]) == 6  # the whole batch is allocated, not the slice
    # A buffer that is there already is kept.
    mended.intermediate_tensors = {"hidden": [9, 8, 7]}
    assert mended.sync_and_gather_intermediate_tensors(1, None, False) == {"hidden": [9]}


def test_apply_and_revert_come_back_byte_for_byte(tree):
    assert [patches.apply(tree, ID), patches.state_of(tree, ID)] == ["patched", "patched"]
    assert content(tree) != STOCK.encode()
    assert [patches.revert(tree, ID), patches.state_of(tree, ID)] == ["present", "present"]
    assert content(tree) == STOCK.encode()


def test_twice_is_like_once(tree, tmp_path):
    patches.apply(tree, ID)
    once = everything(tmp_path)
    assert patches.apply(tree, ID) == "patched" and everything(tmp_path) == once
    patches.revert(tree, ID)
    assert patches.revert(tree, ID) == "present" and content(tree) == STOCK.encode()
    assert patches.apply(tree, ID) == "patched" and everything(tmp_path) == once


@pytest.mark.parametrize(
    "stock",
    [STOCK.replace("\n", "\r\n"), STOCK.rstrip("\n"), "\ufeff" + STOCK, STOCK.replace("# kept", "# gr\u00f6\u00dfer"), STOCK.replace("    ", "\t")],
    ids=["CRLF", "no last newline", "BOM", "umlauts", "tabs"],
)
def test_bytes_of_every_kind_come_back(tmp_path, stock):
    tree = plant(tmp_path, stock)
    assert patches.apply(tree, ID) == "patched"
    ast.parse(content(tree))
    untouched = stock.encode().splitlines(keepends=True)
    assert content(tree).splitlines(keepends=True)[:12] == untouched[:12] and content(tree).splitlines(keepends=True)[-4:] == untouched[-4:]
    patches.revert(tree, ID)
    assert content(tree) == stock.encode()


def test_mode_of_the_file_is_kept(tree):
    (tree / FILE).chmod(0o664)
    patches.apply(tree, ID)
    assert (tree / FILE).stat().st_mode & 0o777 == 0o664
    patches.revert(tree, ID)
    assert (tree / FILE).stat().st_mode & 0o777 == 0o664


def test_code_that_is_right_already_is_left_alone(tmp_path):
    tree = plant(tmp_path, FIXED)
    before = everything(tmp_path)
    assert [patches.state_of(tree, ID), patches.apply(tree, ID), patches.revert(tree, ID)] == ["fixed"] * 3
    assert patches.diff(tree, ID) == "" and everything(tmp_path) == before


@pytest.mark.parametrize(
    "stock",
    [
        STOCK.replace("sync_and_gather_intermediate_tensors", "sync_and_gather"),
        STOCK.replace("        # What the stage before sent.\n        assert self.intermediate_tensors is not None\n", ""),
        STOCK + STOCK.replace('"""A small runner."""', ""),
        "",
    ],
    ids=["renamed", "assert gone", "twice", "empty"],
)
def test_code_that_is_not_known_is_refused_and_untouched(tmp_path, stock, command):
    tree = plant(tmp_path, stock)
    before = everything(tmp_path)
    assert patches.state_of(tree, ID) == "not recognised"
    for change in (patches.apply, patches.revert):
        with pytest.raises(patches.NotRecognised, match=ID):
            change(tree, ID)
    status, out, err = command("patches", "apply", "--tree", tree, "--id", ID)
    assert (status, out) == (2, "") and "is not recognised; nothing was changed" in err and len(err.splitlines()) == 1
    assert everything(tmp_path) == before


def test_a_file_that_does_not_parse_is_not_recognised(tmp_path):
    tree = plant(tmp_path, STOCK + "def broken(:\n")
    assert patches.state_of(tree, ID) == "not recognised"


def test_a_tree_without_the_file_is_not_recognised(tree):
    (tree / FILE).unlink()
    row = row_of(tree)
    assert (row.state, row.line, row.sha256) == ("not recognised", None, None)
    assert patches.diff(tree, ID) == ""
    with pytest.raises(GateFailed):
        patches.apply(tree, ID)


def test_an_edit_by_someone_else_is_never_undone(tree):
    patches.apply(tree, ID)
    edited = content(tree) + b"# a line of someone else's\n"
    (tree / FILE).write_bytes(edited)
    # Putting the original back would undo their work too.
    with pytest.raises(GateFailed, match="not as Fieldbook left it"):
        patches.revert(tree, ID)
    assert content(tree) == edited


def test_an_edit_by_someone_else_is_not_called_fixed_upstream(tree):
    patches.apply(tree, ID)
    (tree / FILE).write_bytes(content(tree) + b"# a line of someone else's\n")
    assert patches.state_of(tree, ID) != "fixed"


def test_a_damaged_original_is_never_put_back(tree):
    patches.apply(tree, ID)
    mended = content(tree)
    (kept,) = (store.keep_dir(tree) / "originals").rglob("*.py")
    kept.write_bytes(kept.read_bytes() + b"#")
    with pytest.raises(GateFailed, match="kept original.*damaged"):
        patches.revert(tree, ID)
    assert content(tree) == mended


def test_the_installed_package_came_new_in_between(tree):
    # pip put another stock file there; what is kept of the old one must not come back over it.
    patches.apply(tree, ID)
    newer = STOCK.replace("width = 4", "width = 5").encode()
    (tree / FILE).write_bytes(newer)
    assert patches.state_of(tree, ID) == "present" and patches.revert(tree, ID) == "present" and content(tree) == newer
    assert patches.apply(tree, ID) == "patched" and patches.revert(tree, ID) == "present" and content(tree) == newer


KILLED = """
import os, signal, sys
from pathlib import Path
from fieldbook import files, patches
left, real_replace, real_mkstemp = int(sys.argv[3]), os.replace, files.tempfile.mkstemp

def step():
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1

def replace(*args):
    step()  # with the temporary file written
    return real_replace(*args)

def mkstemp(*args, **more):
    step()  # before anything of this write
    return real_mkstemp(*args, **more)

os.replace, files.tempfile.mkstemp = replace, mkstemp
getattr(patches, sys.argv[1])(Path(sys.argv[2]), "cpu-eager-pp")
"""


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_killed_at_every_write_the_next_call_finds_stock_or_mended(tmp_path, action):
    """Before each write and between its temporary file and its rename, until the change gets through."""
    reference = plant(tmp_path / "reference")
    patches.apply(reference, ID)
    mended, steps = content(reference), 0
    while True:
        tree = plant(tmp_path / f"{action}-{steps}")
        if action == "revert":
            patches.apply(tree, ID)
        done = subprocess.run([sys.executable, "-c", KILLED, action, str(tree), str(steps)], check=False)
        assert done.returncode in (0, -9)
        state = patches.state_of(tree, ID)
        assert (state, content(tree)) in (("present", STOCK.encode()), ("patched", mended))
        assert store.load(tree).pending is None and not list(tree.rglob(".*.py.*"))
        # And it goes on from there, both ways.
        assert patches.apply(tree, ID) == "patched" and content(tree) == mended
        assert patches.revert(tree, ID) == "present" and content(tree) == STOCK.encode()
        if done.returncode == 0:
            break
        steps += 1
    # Original, staged file, manifest, the file itself and the manifest again; two steps each. Reverting writes as many.
    assert steps == 10


def test_a_change_cut_off_is_not_finished_over_someone_elses(tree):
    patches.apply(tree, ID)
    manifest = store.load(tree)
    sums = {"before": "0" * 64, "after": "1" * 64, "stock": "2" * 64}
    manifest.pending = {"active": [], "files": {FILE: sums}, "params_hash": ""}
    store._write(tree, manifest)
    before = content(tree)
    with pytest.raises(GateFailed, match="changed while Fieldbook's own change was cut off"):
        patches.revert(tree, ID)
    assert content(tree) == before


def test_an_earlier_fieldbooks_manifest_is_understood(tree):
    """It kept one original for each patch and no journal."""
    patches.apply(tree, ID)
    keep, mended = store.keep_dir(tree), content(tree)
    shutil.rmtree(keep)
    keep.mkdir()
    (keep / f"{ID}.orig").write_bytes(STOCK.encode())
    sums = {"original_sha256": store.sha256(STOCK.encode()), "patched_sha256": store.sha256(mended)}
    (keep / "manifest.json").write_text(json.dumps({ID: {"file": FILE, **sums}}))
    assert patches.state_of(tree, ID) == "patched" and patches.apply(tree, ID) == "patched"
    assert patches.revert(tree, ID) == "present" and content(tree) == STOCK.encode()


def test_a_read_only_installation_is_one_line(tree, monkeypatch):
    def refuse(*_args, **_more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(GateFailed, match="cannot be written .Permission denied.; write the patched files elsewhere with --overlay DIR"):
        patches.apply(tree, ID)
    assert content(tree) == STOCK.encode()


def test_an_overlay_leaves_the_package_as_it_is(tree, tmp_path, command):
    before = everything(tree)
    status, out, err = command("patches", "apply", "--tree", tree, "--overlay", tmp_path / "over", "--id", ID)
    assert (status, err) == (0, "") and everything(tree) == before and not store.keep_dir(tree).exists()
    assert out.split() == [str(tmp_path / "over" / "vllm" / FILE), str(tmp_path / "over" / "fieldbook.patch")]
    made = (tmp_path / "over" / "vllm" / FILE).read_bytes()
    # Their own `patch` makes the same of the stock file.
    shutil.copytree(tree, tmp_path / "by-hand")
    subprocess.run(["patch", "-s", "-p1", "-i", tmp_path / "over" / "fieldbook.patch"], cwd=tmp_path / "by-hand", check=True)
    patches.apply(tree, ID)
    assert made == content(tree) == (tmp_path / "by-hand" / FILE).read_bytes()
    status, out, err = command("patches", "apply", "--tree", tree, "--overlay", tmp_path / "over", "--id", ID)
    assert (status, out) == (2, "") and "is not empty" in err and len(err.splitlines()) == 1


def test_two_trees_side_by_side_do_not_mix(tmp_path):
    one = plant(tmp_path)
    other = tmp_path / "vllm-other"
    shutil.copytree(one, other)
    newer = STOCK.replace("width = 4", "width = 5").encode()
    (other / FILE).write_bytes(newer)
    assert [patches.apply(one, ID), patches.apply(other, ID)] == ["patched", "patched"]
    assert [patches.state_of(one, ID), patches.state_of(other, ID)] == ["patched", "patched"]
    assert [patches.revert(one, ID), patches.revert(other, ID)] == ["present", "present"]
    assert (content(one), content(other)) == (STOCK.encode(), newer)


def test_diff_is_the_same_before_and_after(tree):
    planned = patches.diff(tree, ID)
    patches.apply(tree, ID)
    assert patches.diff(tree, ID) == planned
    removed = [line for line in planned.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert removed == ["-        assert self.intermediate_tensors is not None"]
    assert planned.startswith(f"--- a/{FILE}\n+++ b/{FILE}\n@@ ")


@pytest.mark.parametrize(
    ("device", "eager", "stages", "met"), [("cpu", True, 2, True), ("cpu", True, 1, False), ("cpu", False, 2, False), ("cuda", True, 2, False)]
)
def test_which_box_meets_it(changed, tree, device, eager, stages, met):
    box = changed({"engine.device": device, "engine.enforce_eager": eager, "parallel.pipeline_parallel_size": stages})
    assert row_of(tree, box).met_by_this_box is met


def test_an_unknown_id_names_the_catalogue(tree):
    with pytest.raises(BadInput, match="'nothing' is not in the catalogue; it has cpu-eager-pp"):
        patches.apply(tree, "nothing")


def test_every_entry_of_the_catalogue_is_complete():
    assert not set(patches.CATALOGUE) & set(patches.OBSERVED)
    for defect_id, defect in {**patches.CATALOGUE, **patches.OBSERVED}.items():
        assert defect_id == defect.id and len(defect.title) > 10 and len(defect.effect) > 10 and len(defect.drop_when) > 10
        assert bool(defect.sites) is (defect_id in patches.CATALOGUE) and (defect.look is None) is bool(defect.sites)
        # A bundle is one from whichever of its patches it is looked at.
        for other in defect.bundle:
            assert set(patches.bundle_of(other)) == set(patches.bundle_of(defect_id))
    # All eight of the first report and the second report's.
    assert {number for one in (*patches.CATALOGUE.values(), *patches.OBSERVED.values()) for number in one.reports} == {
        *(f"000-{n}" for n in range(1, 9)), "001-5",
    }  # fmt: skip


def test_command_line(command, tree):
    def state():
        return json.loads(command("patches", "--tree", tree, "--json")[1])["defects"][0]["state"]

    assert state() == "present"
    assert command("patches", "apply", "--tree", tree, "--id", ID) == (0, f"{ID}: patched\n", "") and state() == "patched"
    assert "+        if self.intermediate_tensors is None:" in command("patches", "diff", "--tree", tree, "--id", ID)[1]
    assert json.loads(command("patches", "revert", "--tree", tree, "--id", ID, "--json")[1]) == {ID: "present"} and content(tree) == STOCK.encode()
    # What a box meets needs no id; with neither there is nothing to do, and that is said.
    assert command("patches", "apply", "--tree", tree, "--params", ROOT / "params" / "cpu-smollm2.yml") == (0, f"{ID}: patched\n", "")
    assert command("patches", "revert", "--tree", tree, "--params", ROOT / "params" / "cpu-smollm2.yml") == (0, f"{ID}: present\n", "")
    # Everything that is applied comes out without a name.
    assert command("patches", "apply", "--tree", tree, "--id", ID)[0] == 0
    assert command("patches", "revert", "--tree", tree) == (0, f"{ID}: present\n", "") and content(tree) == STOCK.encode()
    assert command("patches", "revert", "--tree", tree) == (0, "nothing to do\n", "")
    status, out, err = command("patches", "apply", "--tree", tree)
    assert (status, out) == (2, "") and "name a patch with --id, or a box with --params" in err and len(err.splitlines()) == 1
    status, out, err = command("patches", "apply", "--tree", tree, "--id", "nothing")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    status, out, err = command("patches", "--tree", tree.parent)
    assert (status, out) == (2, "") and "no vllm package" in err and len(err.splitlines()) == 1


@pytest.fixture
def installed(tmp_path):
    """A copy of the installed vLLM's file, stock: where the walk has mended it, the kept original."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no vLLM in this environment")
    tree = Path(found.submodule_search_locations[0])
    return plant(tmp_path, store.original(tree, FILE, store.load(tree)))


def test_the_installed_vllm_is_recognised_mended_and_restored(installed):
    # Each look at this file of 7,000 lines takes about a second, so there are few.
    stock = content(installed)
    assert patches.apply(installed, ID) == "patched"
    mended = content(installed)
    # One statement has gone and one has come: all other lines are as they were.
    changes = [line for line in difflib.ndiff(stock.decode().splitlines(), mended.decode().splitlines()) if line[:2] in ("- ", "+ ")]
    assert changes[0] == "-         assert self.intermediate_tensors is not None" and [line[:2] for line in changes] == ["- "] + ["+ "] * 6
    # The expression is the one that the dummy run of the same file uses.
    calls = [
        ast.dump(node)
        for node in ast.walk(ast.parse(mended))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.model.make_empty_intermediate_tensors"
    ]
    assert len(calls) == 2 and calls[0] == calls[1]
    assert patches.revert(installed, ID) == "present" and content(installed) == stock
