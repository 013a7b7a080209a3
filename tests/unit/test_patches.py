"""The patch catalogue on a small made-up tree and, where vLLM is installed, on a copy of its file: detect, apply, revert, byte for byte."""

import ast
import difflib
import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from fieldbook import files, patches
from fieldbook.errors import BadInput, GateFailed
from fieldbook.patches import cpu_eager_pp

ID, FILE = cpu_eager_pp.ID, cpu_eager_pp.FILE

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


def everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_stock_code_shows_the_defect_where_it_is(tree):
    (row,) = patches.status(tree)
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
def test_code_that_is_not_known_is_refused_and_untouched(tmp_path, stock):
    tree = plant(tmp_path, stock)
    before = everything(tmp_path)
    assert patches.state_of(tree, ID) == "not recognised"
    for change in (patches.apply, patches.revert):
        with pytest.raises(GateFailed, match=ID):
            change(tree, ID)
    assert everything(tmp_path) == before


def test_a_file_that_does_not_parse_is_not_recognised(tmp_path):
    tree = plant(tmp_path, STOCK + "def broken(:\n")
    assert patches.state_of(tree, ID) == "not recognised"


def test_a_tree_without_the_file_is_not_recognised(tree):
    (tree / FILE).unlink()
    (row,) = patches.status(tree)
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
    (kept,) = tree.parent.glob("*/*.orig")
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


class Crash(BaseException):
    """The process was killed here."""


@pytest.mark.parametrize("survived", [0, 1, 2])
def test_a_crash_between_the_files_leaves_a_tree_that_can_go_on(tree, monkeypatch, survived):
    """apply writes the kept original, the manifest and the file, in this order; it is killed before one of them."""
    written, real = [], files.write_whole

    def dying(path, data, mode=0o644):
        if len(written) == survived:
            raise Crash
        written.append(Path(path).name)
        return real(path, data, mode)

    monkeypatch.setattr(files, "write_whole", dying)
    with pytest.raises(Crash):
        patches.apply(tree, ID)
    monkeypatch.setattr(files, "write_whole", real)
    assert written == [f"{ID}.orig", "manifest.json"][:survived]
    assert content(tree) == STOCK.encode() and patches.state_of(tree, ID) == "present" and patches.revert(tree, ID) == "present"
    assert patches.apply(tree, ID) == "patched" and patches.revert(tree, ID) == "present" and content(tree) == STOCK.encode()


def test_a_crash_in_revert_leaves_the_mend(tree, monkeypatch):
    patches.apply(tree, ID)
    mended = content(tree)

    def dying(*_args, **_options):
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_whole", dying)
        with pytest.raises(Crash):
            patches.revert(tree, ID)
    assert content(tree) == mended and patches.state_of(tree, ID) == "patched" and patches.revert(tree, ID) == "present"


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
    assert [row.met_by_this_box for row in patches.status(tree, box)] == [met]


def test_an_unknown_id_names_the_catalogue(tree):
    with pytest.raises(BadInput, match="'nothing' is not in the catalogue; it has cpu-eager-pp"):
        patches.apply(tree, "nothing")


def test_every_entry_of_the_catalogue_is_complete():
    for defect_id, defect in patches.CATALOGUE.items():
        assert defect_id == defect.ID
        for name in ("TITLE", "FILE", "SYMBOL", "SYMPTOM", "DROP_WHEN"):
            assert len(getattr(defect, name)) > 5


def test_command_line(command, tree):
    def state():
        return json.loads(command("patches", "--tree", tree, "--json")[1])["defects"][0]["state"]

    assert state() == "present"
    assert command("patches", "apply", "--tree", tree) == (0, f"{ID}: patched\n", "") and state() == "patched"
    assert "+        if self.intermediate_tensors is None:" in command("patches", "diff", "--tree", tree)[1]
    assert json.loads(command("patches", "revert", "--tree", tree, "--json")[1]) == {"id": ID, "state": "present"} and content(tree) == STOCK.encode()
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
    manifest, stock = tree.parent / "vllm.fieldbook-originals" / "manifest.json", tree / FILE
    if manifest.is_file() and json.loads(manifest.read_text()).get(ID, {}).get("patched_sha256") == files.sha256_of(stock):
        stock = manifest.parent / f"{ID}.orig"
    return plant(tmp_path, stock.read_bytes())


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
