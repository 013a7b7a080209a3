"""Every patch on a copy of the installed vLLM's files: found, edited, edited once only, taken out byte for byte, whatever was done to the files before."""

import ast
import collections
import difflib
import importlib.util
import random
import shutil
import sys
import types
from pathlib import Path

import libcst as cst
import pytest
from conftest import ROOT

from fieldbook import params, patches
from fieldbook.errors import GateFailed
from fieldbook.patches import site, store

SITES = [(name, one) for name, defect in patches.CATALOGUE.items() for one in defect.sites]


def installed() -> Path:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no vLLM in this environment")
    return Path(next(iter(found.submodule_search_locations)))


@pytest.fixture(scope="module")
def stock():
    """Stock text of every file that a patch touches, by path, as far as this release has it."""
    tree = installed()
    manifest = store.load(tree)
    return {one.file: store.original(tree, one.file, manifest) for _, one in SITES if (tree / one.file).is_file()}


@pytest.fixture
def tree(tmp_path, stock):
    """A package with these files and nothing else."""
    root = tmp_path / "vllm"
    for path, text in stock.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text)
    (root / "__init__.py").write_text("")
    return root


def texts(tree, stock):
    return {path: (tree / path).read_bytes() for path in stock}


def test_the_installed_release_has_them_all(tree):
    states = {row.id: row.state for row in patches.status(tree)}
    # What ../shared/defects.md says of 0.29 to 0.33: none of these was mended upstream.
    assert {name: states[name] for name in patches.CATALOGUE} == dict.fromkeys(patches.CATALOGUE, "present")
    for row in patches.status(tree):
        if row.id in patches.CATALOGUE:
            assert f"def {row.symbol.rpartition('.')[2]}(" in (tree / row.file).read_text().splitlines()[row.line - 1]


def test_looking_at_an_installation_takes_two_seconds_and_neither_torch_nor_vllm():
    import subprocess

    code = (
        "import sys, time\nfrom fieldbook import patches\nfrom pathlib import Path\nbefore = time.process_time()\n"
        "rows = patches.status(Path(sys.argv[1]))\nprint(time.process_time() - before, {'torch', 'vllm'} & set(sys.modules), len(rows))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(installed())], capture_output=True, text=True, check=True)
    seconds, rest = done.stdout.split(" ", 1)
    assert rest.strip() == f"set() {len(patches.CATALOGUE) + len(patches.OBSERVED)}" and float(seconds) < 4, done.stdout


@pytest.mark.parametrize("defect_id", patches.CATALOGUE)
def test_apply_again_and_revert(tree, stock, defect_id):
    assert patches.apply(tree, defect_id) == "patched"
    once = texts(tree, stock)
    touched = {one.file for name in patches.bundle_of(defect_id) for one in patches.CATALOGUE[name].sites}
    assert {path for path in stock if once[path] != stock[path]} == touched & set(stock)
    for text in once.values():
        compile(text, "patched", "exec")
    assert [patches.state_of(tree, name) for name in patches.bundle_of(defect_id)] == ["patched"] * len(patches.bundle_of(defect_id))
    assert patches.apply(tree, defect_id) == "patched" and texts(tree, stock) == once
    # Only lines of the edit differ.
    for path in touched & set(stock):
        changes = [line for line in difflib.ndiff(stock[path].decode().splitlines(), once[path].decode().splitlines()) if line[:2] in ("- ", "+ ")]
        assert 0 < len(changes) < 20, changes
    assert patches.revert(tree, defect_id) == "present" and texts(tree, stock) == stock


def test_patches_come_and_go_in_any_order(tree, stock):
    rng = random.Random(4)
    names, inside = list(patches.CATALOGUE), set()
    for _ in range(8):
        name = rng.choice(names)
        action = rng.choice([patches.apply, patches.revert])
        action(tree, name)
        inside = inside | set(patches.bundle_of(name)) if action is patches.apply else inside - set(patches.bundle_of(name))
        assert {one for one in names if patches.state_of(tree, one) == "patched"} == inside
    for name in names:
        patches.revert(tree, name)
    assert texts(tree, stock) == stock and store.load(tree).originals == {}


@pytest.mark.parametrize(
    ("path", "old", "new", "name"),
    [
        # What an edit relies on under another name: it would be written to no effect, or fail when it runs.
        ("models/deepseek_v32/nvidia/model.py", '{"hidden_states": hidden_states, "residual"', '{"hidden_states": out, "residual"', "tp-partial"),
        ("models/qwen4_exp/nvidia/model_state.py", "config = self.model_config.hf_text", "cfg = self.model_config.hf_text", "ple-containment"),
        ("models/qwen4_exp/nvidia/mtp.py", "intermediate_tensors: IntermediateTensors | None", "tensors: IntermediateTensors | None", "mtp-stage"),
    ],
)
def test_a_name_that_an_edit_relies_on_is_not_taken_for_granted(tree, path, old, new, name):
    file = tree / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    before = file.read_bytes()
    with pytest.raises(GateFailed, match="not recognised"):
        patches.apply(tree, name)
    assert file.read_bytes() == before


def test_a_bundle_is_written_whole_or_not_at_all(tree, stock):
    file = tree / "models/qwen4_exp/nvidia/mtp.py"
    broken = file.read_text().replace("get_pp_group().is_first_rank", "get_pp_group().rank_in_group == 0")
    file.write_text(broken)
    before = texts(tree, stock)
    for name in ("ple-containment", "mtp-stage", "kv-ghost"):
        with pytest.raises(GateFailed, match="mtp-stage: .* is not recognised; nothing was changed"):
            patches.apply(tree, name)
    assert texts(tree, stock) == before and not store.load(tree).active


# --- whatever was done to the files


def small(one, text: bytes) -> str:
    """The module without what the site does not need: imports, and of the class the one function. Parsing 7,000 lines 500 times takes long."""
    module = cst.parse_module(text)
    owner, _, name = one.symbol.rpartition(".")
    kept = []
    for node in module.body:
        if isinstance(node, cst.ClassDef) and node.name.value == owner:
            own = [member for member in node.body.body if isinstance(member, cst.FunctionDef) and member.name.value == name]
            kept.append(node.with_changes(body=node.body.with_changes(body=own)))
        elif isinstance(node, cst.FunctionDef) and not owner and node.name.value == name:
            kept.append(node)
    wanted = "def build(kind):\n    return kind(reduce_results=False)\n\n\n" if one.wants is not None else ""
    return wanted + module.with_changes(body=kept, header=[]).code


def benign(rng, lines, near):
    """A comment, an empty line or a trailing comment somewhere; nothing that Python sees."""
    at = rng.randrange(1, len(lines))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    inside = lines[at - 1].rstrip().endswith((",", "(", "[", "{", ":")) or lines[at].strip()[:1] in (")", "]", "}", "")
    kind = rng.choice(["comment", "blank"]) if inside else rng.choice(["comment", "blank", "comment"])
    return [*lines[:at], f"{indent}# {rng.choice(['see below', 'TODO', 'if x > 1:'])}" if kind == "comment" else "", *lines[at:]]


def harmful(rng, lines, near):
    """A line deleted, doubled or swapped, or a name changed, half of the time near the site."""
    at = rng.randrange(1, len(lines) - 1) if rng.random() < 0.5 else min(max(1, near + rng.randint(-1, 2)), len(lines) - 2)
    kind = rng.choice(["delete", "double", "swap", "rename"])
    if kind == "delete":
        return [*lines[:at], *lines[at + 1 :]]
    if kind == "double":
        return [*lines[: at + 1], *lines[at:]]
    if kind == "swap":
        return [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
    words = [word for word in lines[at].replace("(", " ").replace(".", " ").replace(")", " ").split() if word.isidentifier()]
    return [*lines[:at], lines[at].replace(rng.choice(words), "renamed", 1), *lines[at + 1 :]] if words else lines


def changes(before: str, after: str) -> tuple[int, int]:
    """How many lines an edit took and brought, as Python sees it: without comments and layout."""
    old, new = (collections.Counter(ast.unparse(ast.parse(text)).splitlines()) for text in (before, after))
    return (old - new).total(), (new - old).total()


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, defect in patches.CATALOGUE.items() for i in range(len(defect.sites))])
def test_five_hundred_edits_by_others(stock, name, number):
    """Never a wrong write: a file is refused, or edited in exactly the way that the stock file is; comments and empty lines never matter."""
    one = patches.CATALOGUE[name].sites[number]
    if one.file not in stock or site.state(one, site.parse(stock[one.file])) == "does not apply":
        pytest.skip("this release has no such code")
    plain = small(one, stock[one.file])
    mended = site.edited(one, cst.parse_module(plain)).code
    size = changes(plain, mended)
    near = next(i for i, (old, new) in enumerate(zip(plain.splitlines(), mended.splitlines(), strict=False)) if old != new)
    rng = random.Random(f"{name} {number}")
    refused = edited = 0
    for turn in range(500):
        lines = plain.splitlines()
        for _ in range(rng.randint(1, 3)):
            lines = (benign if turn % 2 else harmful)(rng, lines, near)
        text = "\n".join(lines) + "\n"
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            assert turn % 2 == 0
            continue
        module = site.parse(text.encode())
        state = site.state(one, module)
        if turn % 2:
            assert state == "present", text
            if turn % 10 != 1:
                continue  # found again; that the edit is the same is looked at in one of five
        if state != "present":
            refused += 1
            continue
        after = site.edited(one, module)
        assert site.state(one, after) == "mended"
        assert changes(text, after.code) == size, text
        edited += 1
    assert edited > 60 and refused > 2


# --- what the edited functions do


def predicate(partition, monkeypatch):
    """The helper that the containment patch adds, with the installed release's get_pp_indices under a partition of the environment."""
    source = (installed() / "distributed" / "utils.py").read_text()
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "get_pp_indices")
    names = {
        "envs": types.SimpleNamespace(VLLM_PP_LAYER_PARTITION=partition),
        "logger": types.SimpleNamespace(info=lambda *a: None, warning=lambda *a: None),
    }
    exec(compile(ast.Module([function], []), "get_pp_indices", "exec"), names)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.distributed.utils"].get_pp_indices = names["get_pp_indices"]
    mine: dict = {}
    exec(patches.CATALOGUE["ple-containment"].sites[0].helper, mine)
    return mine["_ple_in_first_stage"]


# 48 layers on three stages end at 16: the first report's cases. An id counts from 1, so 0 is no layer and 16 is the last one of the stage.
@pytest.mark.parametrize(
    ("ids", "partition", "contained"),
    [([0], None, False), ([1], None, True), ([16], None, True), ([17], None, False), ([], None, True), ([2], "1,23,24", False), ([2], "2,22,24", True)],
)
def test_the_predicate_with_the_installed_releases_own_split(ids, partition, contained, monkeypatch):
    config = types.SimpleNamespace(num_hidden_layers=48, ple_layer_ids=ids)
    assert predicate(partition, monkeypatch)(config, 3) is contained


def test_which_boxes_meet_which():
    glm, flash = (params.load(ROOT / "params" / f"{name}.yml") for name in ("a100-x8-glm53", "cmp170hx-x3"))
    tree = installed()
    met = {box.box.name: {row.id for row in patches.status(tree, box) if row.met_by_this_box} for box in (glm, flash)}
    assert met["a100-x8-glm53"] == {"tp-partial", "draft-broadcast", "eagle-flag", "index-sharing"}
    assert met["cmp170hx-x3"] == {"ple-containment", "mtp-stage", "kv-ghost", "mixer-missing", "state-dtype", "draft-broadcast", "eagle-flag"}


def test_status_of_another_python_and_of_a_copied_package(command, tree, tmp_path):
    import json

    status, out, err = command("patches", "--python", sys.executable, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and found["vllm"].startswith("0.") and len(found["defects"]) == len(patches.CATALOGUE) + len(patches.OBSERVED)
    status, out, err = command("patches", "--python", tmp_path / "nothing")
    assert (status, out) == (2, "") and "does not run" in err and len(err.splitlines()) == 1
    shutil.rmtree(tree / "models")
    rows = {row.id: row.state for row in patches.status(tree)}
    assert rows["tp-partial"] == rows["mtp-stage"] == "does not apply" and rows["kv-ghost"] == "present"
