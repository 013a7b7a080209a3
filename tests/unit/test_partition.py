"""Layer splits: vLLM's own split against vLLM, the search against a brute force that shares nothing with it."""

import importlib.util
import itertools
import subprocess
import sys

import pytest
from conftest import least_seconds

from fieldbook import memory, params, partition, weights
from fieldbook.budget import Gpus
from fieldbook.errors import BadInput
from fieldbook.memory_tables import with_engine

GIB = 1_073_741_824

# Worked by hand from the rule in vLLM's get_pp_indices: even, then one more from the second-last stage backwards.
DEFAULT_SPLITS = {
    (30, 1): (30,), (30, 2): (15, 15), (31, 2): (16, 15), (30, 3): (10, 10, 10), (31, 3): (10, 11, 10), (32, 3): (11, 11, 10), (30, 4): (7, 8, 8, 7),
    (31, 4): (8, 8, 8, 7),
    (29, 4): (7, 7, 8, 7), (78, 4): (19, 20, 20, 19), (61, 8): (7, 7, 8, 8, 8, 8, 8, 7), (2, 2): (1, 1),
    (3, 2): (2, 1), (5, 4): (1, 1, 2, 1), (7, 4): (2, 2, 2, 1),
}  # fmt: skip


@pytest.fixture
def spec():
    return memory.model_spec("smollm2-135m-instruct")


def compositions(layers, stages):
    """Every split, found the slow way: all tuples of sizes, those that sum."""
    return [sizes for sizes in itertools.product(range(1, layers + 1), repeat=stages) if sum(sizes) == layers]


@pytest.mark.parametrize(("layers", "stages"), DEFAULT_SPLITS)
def test_default_split_by_hand(layers, stages):
    assert partition.default_split(layers, stages) == DEFAULT_SPLITS[layers, stages]


def test_default_split_is_vllms_own_for_every_size():
    """Against the function in the installed vLLM: its text is run alone, since importing it loads torch for ten seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("no vLLM in this environment")
    code = """
import ast, json, pathlib, sys, types
source = (pathlib.Path(sys.argv[1]) / "distributed" / "utils.py").read_text()
function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "get_pp_indices")
names = {"envs": types.SimpleNamespace(VLLM_PP_LAYER_PARTITION=None), "logger": types.SimpleNamespace(info=lambda *a: None)}
exec(compile(ast.Module([function], []), "get_pp_indices", "exec"), names)
splits = {}
for layers in range(1, 100):
    for stages in range(1, min(layers, 16) + 1):
        edges = [names["get_pp_indices"](layers, rank, stages) for rank in range(stages)]
        splits[f"{layers},{stages}"] = [end - start for start, end in edges]
print(json.dumps(splits))
"""
    done = subprocess.run([sys.executable, "-c", code, found.submodule_search_locations[0]], capture_output=True, text=True, check=True)
    import json

    theirs = {tuple(map(int, key.split(","))): tuple(split) for key, split in json.loads(done.stdout).items()}
    assert len(theirs) == sum(min(layers, 16) for layers in range(1, 100))
    assert [key for key, split in theirs.items() if partition.default_split(*key) != split] == []


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (5, 1), (5, 2), (5, 5), (6, 3), (9, 4), (12, 3)])
def test_all_splits_are_all_and_each_once(layers, stages):
    found = partition.all_splits(layers, stages)
    assert sorted(found) == sorted(compositions(layers, stages)) and len(set(found)) == len(found)


def test_a_search_that_would_take_hours_is_refused():
    # C(29, 3) = 3,654 and C(77, 2) = 2,926 are looked through, C(29, 4) = 23,751 and C(29, 7) = 1,560,780 are not.
    assert len(partition.all_splits(30, 4)) == 3654 and len(partition.all_splits(78, 3)) == 2926
    with pytest.raises(BadInput, match="23,751 ways.*parallel.layer_partition"):
        partition.all_splits(30, 5)
    with pytest.raises(BadInput, match="1,560,780 ways.*parallel.layer_partition"):
        partition.all_splits(30, 8)


def test_straggler_counts_lm_head_on_the_last_stage(spec):
    # lm_head 28,311,552 parameters are 7.9974 layers of 3,540,096.
    lm_head = 28_311_552 / 3_540_096
    assert partition.straggler_layers(spec, (15, 15)) == pytest.approx(15 + lm_head)
    assert partition.straggler_layers(spec, (20, 10)) == pytest.approx(20)
    assert partition.straggler_layers(spec, (19, 11)) == pytest.approx(19)
    assert partition.straggler_layers(spec, (18, 12)) == pytest.approx(12 + lm_head)
    assert partition.straggler_layers(spec, (30,)) == pytest.approx(30 + lm_head)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("max_model_len", [2048, 2000])
def test_candidates_against_brute_force(changed, spec, stages, max_model_len):
    box = changed({"parallel.pipeline_parallel_size": stages, "engine.max_model_len": max_model_len})
    expected = {}
    for cut in itertools.combinations(range(1, 30), stages - 1):
        split = tuple(b - a for a, b in zip((0, *cut), (*cut, 30), strict=True))
        blocks = min(GIB // (layers * 1536 * 128) for layers in split)
        expected[split] = blocks * max_model_len // 16  # 2000 and 2048 tokens both take 16 blocks
    found = partition.candidates(box, spec)
    assert {c.layers_per_stage: c.pool.pool_tokens for c in found} == expected
    assert found[0].pool.pool_tokens == max(expected.values())
    order = [(-c.pool.pool_tokens, c.straggler_layers, not c.is_default, c.layers_per_stage) for c in found]
    assert order == sorted(order)
    assert [c.layers_per_stage for c in found if c.is_default] == [DEFAULT_SPLITS[30, stages]]


def test_best_split_of_the_default_box(changed, spec):
    box = changed()
    best = partition.choose(box, spec, partition.candidates(box, spec))
    assert (best.layers_per_stage, best.pool.pool_tokens, best.is_default) == ((15, 15), 46_592, True)


def test_among_equal_pools_the_smaller_straggler_wins_then_vllms_default(changed, spec):
    # Four stages: 30 needs a stage of 8 at least, so every split of eights and less has the same pool. lm_head weighs 8 layers on the last.
    found = partition.candidates(changed({"parallel.pipeline_parallel_size": 4}), spec)
    top = [c for c in found if c.pool.pool_tokens == found[0].pool.pool_tokens]
    assert {c.layers_per_stage for c in top} == {split for split in compositions_up_to(30, 4, 8)} and len(top) > 4
    # The last stage of 6 is the lightest that leaves 24 = 3 x 8 to the others.
    assert found[0].layers_per_stage == (8, 8, 8, 6)
    assert found[0].straggler_layers == pytest.approx(6 + 28_311_552 / 3_540_096)


def compositions_up_to(layers, stages, most):
    return [sizes for sizes in itertools.product(range(1, most + 1), repeat=stages) if sum(sizes) == layers]


def test_the_largest_search_that_is_allowed_ends_soon(changed, spec):
    """MOST_SPLITS stands for 'a few seconds'; here a sample of the candidates is timed and scaled up."""
    four = changed({"parallel.pipeline_parallel_size": 4})
    looked_at = len(partition.candidates(four, spec))
    scale = partition.MOST_SPLITS / looked_at
    seconds = least_seconds(lambda: partition.candidates(four, spec), 7 / scale) * scale
    assert looked_at == 3654 and seconds < 7, f"{partition.MOST_SPLITS:,} splits would take {seconds:.0f} s"


def test_choose_takes_what_the_params_ask(changed, spec):
    for asked, expected in (("default", (15, 15)), ([20, 10], (20, 10)), ([12, 18], (12, 18))):
        box = changed({"parallel.layer_partition": asked})
        assert partition.choose(box, spec, partition.candidates(box, spec)).layers_per_stage == expected


def test_choose_default_of_an_uneven_model_is_not_the_best_one(changed, spec):
    # Four stages: vLLM's own is 7+8+8+7; every split with a largest stage of 8 has the same pool, the lighter last stage wins.
    box = changed({"parallel.pipeline_parallel_size": 4, "parallel.layer_partition": "default"})
    found = partition.candidates(box, spec)
    assert partition.choose(box, spec, found).layers_per_stage == (7, 8, 8, 7)
    assert found[0].layers_per_stage == (8, 8, 8, 6)


def test_splits_that_do_not_hold_one_request_are_left_out(changed, spec):
    # 8192 tokens are 64 blocks and the null block: 65 x n x 196,608 B <= 1 GiB, at most n = 84 layers: all fit in float32, so all 29 do.
    assert len(partition.candidates(changed({"engine.max_model_len": 8192}), spec)) == 29


def test_no_split_fits_is_one_line(changed, spec, monkeypatch):
    monkeypatch.setattr(memory, "GIB", 2**20)
    with pytest.raises(BadInput, match="no split of 30 layers in 2 stages fits: rank ."):
        partition.candidates(changed(), spec)


def test_asked_split_that_does_not_fit_is_refused(changed, spec):
    box = changed({"parallel.layer_partition": [1, 29]})
    found = [c for c in partition.candidates(box, spec) if c.layers_per_stage != (1, 29)]
    with pytest.raises(BadInput, match=r"parallel.layer_partition: \[1, 29\] does not hold one request of 2048 tokens"):
        partition.choose(box, spec, found)


def test_resolve_split(spec):
    baseline = params.Baseline
    assert partition.resolve_split(baseline(pipeline_parallel_size=2, layer_partition=[20, 10]), spec) == (20, 10)
    assert partition.resolve_split(baseline(pipeline_parallel_size=2, layer_partition="best"), spec, (12, 18)) == (12, 18)
    assert partition.resolve_split(baseline(pipeline_parallel_size=3, layer_partition="best"), spec, (12, 18)) == (10, 10, 10)
    assert partition.resolve_split(baseline(pipeline_parallel_size=2, layer_partition="default"), spec, (12, 18)) == (15, 15)


def test_pool_of_another_arm_uses_that_arms_tensor_parallel_size(changed, spec):
    # TP 3 leaves one KV head a rank: 512 B per layer, 30 x 512 x 128 = 1,966,080 B -> 546 blocks.
    assert memory.pool(changed(), spec, (30,)).pool_tokens == 23_296
    assert memory.pool(changed(), spec, (30,), tensor_parallel_size=3).pool_tokens == 546 * 128


def test_a_gpu_box_without_kv_space_is_one_line(changed, spec):
    box = changed({"engine.device": "cuda", "engine.kv_cache_gib_per_rank": None})
    with pytest.raises(BadInput, match="engine.available_kv_gib: missing, and the box has 0 GPUs whose memory is known for 2 ranks"):
        memory.pool(box, spec, (15, 15))


# --- boxes with GPUs


def cards(*gib):
    return Gpus(tuple(size * GIB for size in gib))


def on_gpus(changed, **engine):
    return with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=None, dtype="bfloat16", **engine)


def test_unequal_cards_get_unequal_layers(changed, spec):
    """Where every split can be looked at: the best one gives the larger card more layers, and no split has more."""
    # Eager: about 9.1 GiB of the card of 12 are left for the cache, 19.8 of the one of 24; layers in that ratio are 9.4 to 20.6.
    found = partition.candidates(on_gpus(changed), spec, cards(12, 24))
    best = found[0]
    assert best.pool.pool_tokens == max(c.pool.pool_tokens for c in found) and len(found) == 29
    assert best.layers_per_stage == (9, 21)
    # The other way round, the layers follow the cards.
    assert partition.candidates(on_gpus(changed), spec, cards(24, 12))[0].layers_per_stage == (21, 9)


def test_more_memory_is_never_worse_for_the_best_split(changed, spec):
    last = 0
    for second in (4, 6, 8, 12, 16, 24):
        pool = partition.candidates(on_gpus(changed), spec, cards(12, second))[0].pool
        assert pool.pool_tokens >= last
        last = pool.pool_tokens


def test_cards_that_hold_nothing_are_one_line(changed, spec):
    with pytest.raises(BadInput, match="no split of 30 layers in 2 stages fits: rank 0: no KV space is left") as caught:
        partition.candidates(on_gpus(changed), spec, cards(1, 1))
    assert "\n" not in str(caught.value)


def test_splits_whose_weights_overfill_a_card_are_left_out(changed):
    """GLM on eight cards of 80 GB, TP4: a stage of 60 layers weighs 74 GiB; what is left are cuts around the middle."""
    glm = memory.model_spec("glm-5.3")
    box = with_engine(changed({"engine.device": "cuda", "parallel.tensor_parallel_size": 1}), kv_cache_gib_per_rank=None, dtype="bfloat16")
    box = box.model_copy(update={"parallel": box.parallel.model_copy(update={"tensor_parallel_size": 4})})
    found = partition.candidates(box, glm, cards(*[79.25] * 8))
    firsts = sorted(c.layers_per_stage[0] for c in found)
    assert firsts == list(range(firsts[0], firsts[-1] + 1)) and 20 < firsts[0] < 39 < firsts[-1] < 60
    assert all(rank.available_kv_bytes > 0 for c in found for rank in c.pool.ranks)


def test_straggler_of_a_model_whose_layers_differ(changed):
    """GLM: three dense layers weigh about a seventh of the others, so a stage that has them is lighter than its count says."""
    glm = memory.model_spec("glm-5.3")
    sizes = [weights.layer_bytes(layer, glm) for layer in glm.layers]
    mean = sum(sizes) / 78
    loads = [sum(sizes[:39]) / mean, (sum(sizes[39:]) + 154_880 * 6144 * 2) / mean]
    assert partition.straggler_layers(glm, (39, 39)) == pytest.approx(max(loads), rel=1e-4)
    assert loads[0] < 39 < loads[1]
