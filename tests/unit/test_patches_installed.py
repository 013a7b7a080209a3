"""Every patch on a copy of the installed vLLM's files: found, edited, edited once only, taken out byte for byte, whatever was done to the files before."""

import ast
import collections
import difflib
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import textwrap
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import libcst as cst
import pytest
from conftest import ROOT

from fieldbook import files, kv, memory, params, patches
from fieldbook.errors import GateFailed
from fieldbook.patches import editing, site, store

SITES = [(name, one) for name, defect in patches.CATALOGUE.items() for one in defect.sites]


@functools.cache
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


@pytest.fixture(scope="module")
def flipped_box(tmp_path_factory):
    """GLM-5.3's box with a checkpoint whose index names indexer weights on every layer, so that index-flip may be applied."""
    folder = tmp_path_factory.mktemp("checkpoint")
    weights = {f"model.layers.{layer}.self_attn.indexer.wk.weight": "model-00001-of-00001.safetensors" for layer in range(79)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    box = params.load(ROOT / "params" / "a100-x8-glm53.yml")
    return box.model_copy(update={"model": box.model.model_copy(update={"path": str(folder)})})


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
    assert rest.strip() == f"set() {len(patches.CATALOGUE) + len(patches.OBSERVED)}" and float(seconds) < 2, done.stdout


@pytest.mark.parametrize("defect_id", patches.CATALOGUE)
def test_apply_again_and_revert(tree, stock, defect_id, flipped_box):
    assert patches.apply(tree, defect_id, flipped_box) == "patched"
    assert store.load(tree).params_hash == flipped_box.hash
    once = texts(tree, stock)
    touched = {one.file for name in patches.bundle_of(defect_id) for one in patches.CATALOGUE[name].sites if one.edit}
    assert {path for path in stock if once[path] != stock[path]} == touched & set(stock)
    for text in once.values():
        compile(text, "patched", "exec")
    assert [patches.state_of(tree, name) for name in patches.bundle_of(defect_id)] == ["patched"] * len(patches.bundle_of(defect_id))
    assert patches.apply(tree, defect_id, flipped_box) == "patched" and texts(tree, stock) == once
    # Only lines of the edit differ.
    for path in touched & set(stock):
        changes = [line for line in difflib.ndiff(stock[path].decode().splitlines(), once[path].decode().splitlines()) if line[:2] in ("- ", "+ ")]
        # No line is taken away but the one that an edit rewrites, and all that come but calls of a helper stand at the end.
        assert len([line for line in changes if line.startswith("- ")]) <= 3 and 0 < len(changes) < 100, changes
    assert patches.revert(tree, defect_id) == "present" and texts(tree, stock) == stock


def test_patches_come_and_go_in_any_order(tree, stock, flipped_box):
    rng = random.Random(4)
    names, inside = list(patches.CATALOGUE), set()
    for _ in range(12):
        name = rng.choice(names)
        if rng.random() < 0.5:
            patches.revert(tree, name)
            inside -= set(patches.bundle_of(name))
        elif set(patches.CATALOGUE[name].excludes) & inside:
            with pytest.raises(GateFailed, match="treats the same thing another way; revert it first"):
                patches.apply(tree, name, flipped_box)
        else:
            patches.apply(tree, name, flipped_box)
            inside |= set(patches.bundle_of(name))
        assert {one for one in names if patches.state_of(tree, one) == "patched"} == inside
        for text in texts(tree, stock).values():
            compile(text, "patched", "exec")
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


def cut_off(steps: int, action, *arguments) -> bool:
    """Run an action in a fork that kills itself before the given write, or before the rename of it; whether it came through."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    left, replace, mkstemp = steps, os.replace, files.tempfile.mkstemp

    def step(real):
        def counted(*given, **more):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*given, **more)

        return counted

    os.replace, files.tempfile.mkstemp = step(replace), step(mkstemp)
    action(*arguments)
    os._exit(0)


def test_a_bundle_killed_at_every_write_ends_whole(tmp_path, tree, stock, monkeypatch):
    """All its files or none, after a kill before any write and between any temporary file and its rename, both ways."""
    defect_id, writes = "kv-ghost", 20
    # The stock files are the same in every turn, so what is to be written is worked out once.
    planned, known = editing._planned, {}

    def once(tree, active, manifest):
        if active not in known:
            known[active] = planned(tree, active, manifest)
        return known[active]

    monkeypatch.setattr(editing, "_planned", once)
    shutil.copytree(tree, tmp_path / "mended" / "vllm")
    patches.apply(tmp_path / "mended" / "vllm", defect_id)
    mended = texts(tmp_path / "mended" / "vllm", stock)
    for action, start, ends in ((patches.apply, tree, "patched"), (patches.revert, tmp_path / "mended" / "vllm", "present")):
        for steps in itertools.count():
            copy = tmp_path / f"{action.__name__}-{steps}" / "vllm"
            shutil.copytree(start, copy)
            if action is patches.revert:
                shutil.copytree(store.keep_dir(start), store.keep_dir(copy))
            through = cut_off(steps, action, copy, defect_id)
            state, found = patches.state_of(copy, defect_id), texts(copy, stock)
            assert (state, found) in (("present", stock), ("patched", mended)), steps
            assert not through or state == ends
            assert store.load(copy).pending is None and not list(copy.rglob(".*.py.*"))
            # The next call goes on from there.
            assert action(copy, defect_id) == ends and texts(copy, stock) == (mended if ends == "patched" else stock)
            shutil.rmtree(copy.parent)
            if through:
                break
        # Originals, staged files, the manifest, the files themselves and the manifest again; two steps each.
        assert steps == 2 * writes


# --- whatever was done to the files


def short(function: cst.FunctionDef, sites) -> cst.FunctionDef:
    """The function with the statements that its sites are in or rely on, and two on either side of each."""
    asked = [matcher for one in sites for matcher in (one.stock, one.trace, *one.requires) if matcher is not None]
    body = function.body.body
    held = [i for i, statement in enumerate(body) if any(site.findall(statement, matcher) for matcher in asked)]
    near = [statement for i, statement in enumerate(body) if any(abs(i - at) <= 2 for at in held)]
    return function.with_changes(body=function.body.with_changes(body=near))


def small(sites, text: bytes) -> str:
    """The module without what its sites do not need: imports, and of each class the functions they are in. Parsing 7,000 lines 500 times takes long."""
    module = cst.parse_module(text)
    kept = []
    for node in module.body:
        if isinstance(node, cst.ClassDef):
            members = [member for member in node.body.body if isinstance(member, cst.FunctionDef)]
            own = [(member, [one for one in sites if one.symbol == f"{node.name.value}.{member.name.value}"]) for member in members]
            functions = [short(member, its) for member, its in own if its]
            if functions:
                kept.append(node.with_changes(body=node.body.with_changes(body=functions)))
        elif isinstance(node, cst.FunctionDef) and (its := [one for one in sites if one.symbol == node.name.value]):
            kept.append(short(node, its))
    said = "def build(kind):\n    return kind(reduce_results=False)\n\n\n" if any(one.wants is not None for one in sites) else ""
    return said + module.with_changes(body=kept, header=[]).code


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
    """How many lines an edit took and brought."""
    old, new = (collections.Counter(text.splitlines()) for text in (before, after))
    return (old - new).total(), (new - old).total()


FILES = sorted({one.file for _, one in SITES})


@pytest.mark.parametrize("turns", [100, pytest.param(500, marks=pytest.mark.bar)])
def test_hundreds_of_edits_of_each_file_by_others(stock, turns):
    """Never a wrong write: a site is refused, or edited in exactly the way that the stock file's is; comments and empty lines never matter."""
    there = [path for path in FILES if path in stock]
    assert len(there) > 10
    # The largest first, so that two processes end together.
    there.sort(key=lambda path: -len([one for _, one in SITES if one.file == path]))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        done = dict(zip(there, pool.map(many_edits, there, [stock[path] for path in there], [turns] * len(there)), strict=True))
    assert all(edited > 0.12 * turns for _, edited in done.values()), done
    assert sum(refused for refused, _ in done.values()) > 0.004 * turns * len(done), done
    assert turns < 500 or all(refused > 2 for refused, _ in done.values()), done


def many_edits(path: str, text_of_stock: bytes, turns: int) -> tuple[int, int]:
    """How many of the harmful edits of one file were refused, and how many files were edited all the same; raises where one was edited wrongly."""
    own = [one for _, one in SITES if one.file == path]
    # What is only relied on is looked at where it is edited as well.
    own = [one for one in own if one.edit or not any(other.edit and other.symbol == one.symbol for other in own)]
    plain = small(own, text_of_stock)
    module = cst.parse_module(plain)
    stock_states = [site.state(one, module) for one in own]
    assert stock_states == ["present" if one.edit else "does not apply" for one in own]
    mends = [site.edited(one, module).code if one.edit else plain for one in own]
    sizes = [changes(plain, mend) for mend in mends]
    nears = [next((i for i, (old, new) in enumerate(zip(plain.splitlines(), mend.splitlines(), strict=False)) if old != new), 0) for mend in mends]
    rng = random.Random(path)
    refused, edited = [0] * len(own), [0] * len(own)
    for turn in range(turns):
        lines = plain.splitlines()
        at = turn // 2 % len(own)
        for _ in range(rng.randint(1, 3)):
            lines = (benign if turn % 2 else harmful)(rng, lines, nears[at] - rng.choice([0, 0, 3]))
        text = "\n".join(lines) + "\n"
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            assert turn % 2 == 0
            continue
        module = site.parse(text.encode())
        if turn % 2:
            # Found again, all of them; that the edit is the same is looked at in one of five.
            assert [site.state(one, module) for one in own] == stock_states, text
            if turn % 10 != 1:
                continue
        one = own[at]
        # Parsed in part or as a whole, it is the same.
        assert turn % 10 > 1 or site.state_in(one, text.encode()) == site.state(one, module), text
        if site.state(one, module) != "present":
            refused[at] += site.state(one, module) == "not recognised"
            continue
        after = site.edited(one, module)
        assert site.state(one, after) == "mended"
        (took, brought), (taken, added) = changes(text, after.code), sizes[at]
        # A way out of the function that someone doubled is edited twice.
        assert brought - took == added - taken and took <= taken + 3, text
        ast.parse(after.code)
        edited[at] += 1
    # A file has up to a dozen sites: few turns do not come to all of them.
    assert turns < 500 or all(count > 2 for one, count in zip(own, edited, strict=True) if one.edit), (path, refused, edited)
    return sum(refused), sum(edited)


# --- what the edited functions do


def with_vllm(monkeypatch, partition=None, rank=0, stages=1, **more):
    """Modules that the helpers import: the installed release's own get_pp_indices under a partition of the environment, and this stage of a pipeline."""
    source = (installed() / "distributed" / "utils.py").read_text()
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "get_pp_indices")
    names = {
        "envs": types.SimpleNamespace(VLLM_PP_LAYER_PARTITION=partition),
        "logger": types.SimpleNamespace(info=lambda *a: None, warning=lambda *a: None),
    }
    exec(compile(ast.Module([function], []), "get_pp_indices", "exec"), names)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.utils", "vllm.config"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.distributed.utils"].get_pp_indices = names["get_pp_indices"]
    sys.modules["vllm.distributed"].get_pp_group = lambda: types.SimpleNamespace(rank_in_group=rank, world_size=stages)
    sys.modules["vllm.config"].get_current_vllm_config = lambda: types.SimpleNamespace(**more)
    return names["get_pp_indices"]


def helpers(defect_id, file=None):
    """The functions that a patch adds to a file, its first by default."""
    mine: dict = {}
    exec(next(one.helper for one in patches.CATALOGUE[defect_id].sites if one.helper and file in (None, one.file)), mine)
    return mine


def predicate(partition, monkeypatch):
    """The helper that the containment patch adds."""
    with_vllm(monkeypatch, partition)
    return helpers("ple-containment")["_ple_in_first_stage"]


# 48 layers on three stages end at 16: the first report's cases. An id counts from 1, so 0 is no layer and 16 is the last one of the stage.
@pytest.mark.parametrize(
    ("ids", "partition", "contained"),
    [([0], None, False), ([1], None, True), ([16], None, True), ([17], None, False), ([], None, True), ([2], "1,23,24", False), ([2], "2,22,24", True)],
)
def test_the_predicate_with_the_installed_releases_own_split(ids, partition, contained, monkeypatch):
    config = types.SimpleNamespace(num_hidden_layers=48, ple_layer_ids=ids)
    assert predicate(partition, monkeypatch)(config, 3) is contained


# GLM-5.2 and 5.3: 78 layers, of which 0, 1, 2 and every fourth from 6 on compute their own indices.
GLM = types.SimpleNamespace(num_hidden_layers=78, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3)
FLIPS = {
    "39,39": ([39, 40, 41],), "41,37": ([41],), "40,38": ([40, 41],), "42,36": ([],), "45,33": ([45],), "26,26,26": ([], [52, 53]),
    "19,20,20,19": ([19, 20, 21], [39, 40, 41], [59, 60, 61]), "20,20,20,18": ([20, 21], [40, 41], [60, 61]),
}  # fmt: skip


@pytest.mark.parametrize("partition", FLIPS)
def test_which_layers_have_to_compute_their_own_at_each_stage(partition, monkeypatch):
    """What vLLM's own split and rule make of the second report's partitions, and of others; the planner counts the same."""
    split = [int(part) for part in partition.split(",")]
    found = []
    for rank in range(len(split)):
        with_vllm(monkeypatch, partition, rank, len(split))
        first = helpers("index-flip")["_shares_before_an_owner"]
        found.append([layer for layer in range(79) if first(GLM, layer)])
    assert found == [[], *FLIPS[partition]]
    spec = memory.model_spec("glm-5.3")
    assert [list(stage) for stage in kv.flipped_layers(spec, split)] == found
    # A relay is needed over just those boundaries.
    starts = [sum(split[:rank]) for rank in range(1, len(split))]
    reads = helpers("index-relay")["_reads_earlier_topk"]
    assert [reads(GLM, start) for start in starts] == [bool(stage) for stage in FLIPS[partition]]


def test_the_rule_that_the_helpers_hold_is_the_installed_one(stock):
    """Layer by layer against the statements of the installed attention code, for frequencies, offsets and patterns."""
    module = site.parse(stock["models/deepseek_v32/attention.py"])
    function = site.function_of(module, "DeepseekV32Attention.__init__")
    rule = next(node for node in function.body.body if cst.Module([]).code_for_node(node).lstrip().startswith("if index_topk_pattern is None"))
    code = compile(textwrap.dedent(cst.Module([]).code_for_node(rule)), "rule", "exec")
    use = helpers("index-relay")["_topk_use"]
    for freq, offset, pattern in [(1, 2, None), (4, 3, None), (4, 2, None), (3, 0, None), (2, 5, None), (4, 3, "FFSSFS"), (1, 2, "SSF")]:
        config = types.SimpleNamespace(index_topk=8, index_topk_freq=freq, index_skip_topk_offset=offset, index_topk_pattern=pattern)
        for layer in range(12):
            names = {"layer_id": layer, "index_topk_freq": freq, "index_skip_topk_offset": offset, "index_topk_pattern": pattern}
            exec(code, names)
            assert use(config, layer) == ("shares" if names["skip_topk"] else "owns")
    # What the config leaves out, and a model without such layers.
    assert [use(types.SimpleNamespace(index_topk=8), layer) for layer in range(9)] == ["owns"] * 9 and use(types.SimpleNamespace(), 5) == ""


def stage(start, end, relayed=False, indexer_at=()):
    """A model of GLM-5.3's config as its stage is built, with indexers where it says."""
    layers = [types.SimpleNamespace(modules=lambda at=at: [types.SimpleNamespace(indexer=object() if at in indexer_at else None)]) for at in range(78)]
    model = types.SimpleNamespace(config=GLM, start_layer=start, end_layer=end, layers=layers)
    if relayed:
        model.fieldbook_takes_topk = object()
    return model


def test_the_guard_refuses_only_what_answers_wrong():
    guard = helpers("index-guard")["_refuse_cut_topk_indices"]
    for start, end, more in [(0, 39, {}), (42, 78, {}), (38, 78, {}), (39, 78, {"relayed": True}), (41, 78, {"indexer_at": [41]})]:
        guard(stage(start, end, **more))
    between = "before layer 38 or before layer 42"
    for start, end, near in [(39, 78, between), (41, 78, between), (75, 78, "before layer 74 instead")]:
        with pytest.raises(RuntimeError, match=f"begins with layer {start}, which reads.*{near}"):
            guard(stage(start, end, indexer_at=[42, 74]))


def test_a_flip_without_weights_is_refused_by_the_patched_code_itself(monkeypatch, tmp_path):
    named = tmp_path / "model.safetensors.index.json"
    for layers, load_format, allowed in [((41,), "auto", True), ((42, 4), "auto", False), (None, "auto", False), (None, "dummy", True)]:
        named.unlink(missing_ok=True)
        if layers is not None:
            named.write_text(json.dumps({"weight_map": {f"model.layers.{layer}.self_attn.indexer.wk.weight": "a" for layer in layers}}))
        model = types.SimpleNamespace(model=str(tmp_path), revision=None)
        with_vllm(monkeypatch, "41,37", 1, 2, model_config=model, load_config=types.SimpleNamespace(load_format=load_format))
        own = helpers("index-flip")["_computes_own_topk"]
        assert own(GLM, 42) is False and own(GLM, 43) is False and own(GLM, 78) is False
        if allowed:
            assert own(GLM, 41) is True
        else:
            with pytest.raises(RuntimeError, match="layer 41 has to compute its own .* not known to have indexer weights"):
                own(GLM, 41)


def test_weights_of_indexers_that_are_not_there_are_dropped():
    drops = helpers("index-flip", "models/deepseek_v32/nvidia/model.py")["_has_no_indexer"]
    there = {"layers.6.self_attn.indexer.wk_weights_proj.weight": 0, "layers.7.self_attn.o_proj.weight": 0}
    asked = ["layers.6.self_attn.indexer.wk.weight", "layers.7.self_attn.indexer.wk.weight", "layers.7.self_attn.o_proj.weight"]
    assert [drops(name, there) for name in asked] == [False, True, False]


def test_a_flip_is_only_applied_for_a_box_whose_checkpoint_has_the_weights(tree, stock, flipped_box, command):
    glm = ROOT / "params" / "a100-x8-glm53.yml"
    status, out, err = command("patches", "apply", "--tree", tree, "--id", "index-flip")
    assert (status, out) == (1, "") and "give --params FILE" in err and len(err.splitlines()) == 1
    status, out, err = command("patches", "apply", "--tree", tree, "--id", "index-flip", "--params", glm)
    assert (status, out) == (1, "") and "indexer weights for layer 41 are not known to be in the checkpoint" in err and len(err.splitlines()) == 1
    status, out, err = command("patches", "apply", "--tree", tree, "--id", "index-flip", "--params", ROOT / "params" / "cmp170hx-x3.yml")
    assert (status, out) == (1, "") and "share no top-k indices" in err
    assert texts(tree, stock) == stock
    assert patches.apply(tree, "index-flip", flipped_box) == "patched"


def test_a_mend_that_someone_else_began_is_not_recognised(tree):
    """The indices are sent already, by a key of other code, and nothing takes them."""
    file = tree / "models/deepseek_v32/nvidia/model.py"
    sent = '{"hidden_states": hidden_states, "residual": residual}'
    assert sent in file.read_text()
    file.write_text(file.read_text().replace(sent, sent.replace("}", ', "topk": self.topk_indices_buffer}')))
    before = file.read_bytes()
    with pytest.raises(patches.NotRecognised, match="index-relay"):
        patches.apply(tree, "index-relay")
    assert file.read_bytes() == before


def test_which_boxes_meet_which():
    glm, flash = (params.load(ROOT / "params" / f"{name}.yml") for name in ("a100-x8-glm53", "cmp170hx-x3"))
    tree = installed()
    met = {box.box.name: {row.id for row in patches.status(tree, box) if row.met_by_this_box} for box in (glm, flash)}
    assert met["a100-x8-glm53"] == {"tp-partial", "index-guard", "index-flip", "draft-broadcast", "eagle-flag"}
    assert met["cmp170hx-x3"] == {"ple-containment", "mtp-stage", "kv-ghost", "mixer-missing", "state-dtype", "draft-broadcast", "eagle-flag"}


def test_status_of_another_python_and_of_a_copied_package(command, tree, tmp_path):
    status, out, err = command("patches", "--python", sys.executable, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and found["vllm"].startswith("0.") and len(found["defects"]) == len(patches.CATALOGUE) + len(patches.OBSERVED)
    status, out, err = command("patches", "--python", tmp_path / "nothing")
    assert (status, out) == (2, "") and "does not run" in err and len(err.splitlines()) == 1
    shutil.rmtree(tree / "models")
    rows = {row.id: row.state for row in patches.status(tree)}
    assert rows["tp-partial"] == rows["mtp-stage"] == "does not apply" and rows["kv-ghost"] == "present"
