"""Layer splits: vLLM's own split against vLLM, the search against a brute force that shares nothing with it, the second field report's table."""

import functools
import importlib.util
import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace

import kv_builders
import numpy as np
import pytest
from conftest import ROOT, least_seconds

from fieldbook import kv, memory, params, partition
from fieldbook.budget import Gpus
from fieldbook.errors import BadInput
from fieldbook.kv.costs import block_costs, shared_index_runs
from fieldbook.memory_tables import with_engine
from fieldbook.partition import search

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
    theirs = {tuple(map(int, key.split(","))): tuple(split) for key, split in json.loads(done.stdout).items()}
    assert len(theirs) == sum(min(layers, 16) for layers in range(1, 100))
    assert [key for key, split in theirs.items() if partition.default_split(*key) != split] == []


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (5, 1), (5, 2), (5, 5), (6, 3), (9, 4), (12, 3)])
def test_all_splits_are_all_and_each_once(layers, stages):
    found = list(partition.all_splits(layers, stages))
    assert sorted(found) == sorted(compositions(layers, stages)) and len(set(found)) == len(found)


# --- the search alone


def random_tables(rng):
    """Blocks and loads of every run, from random layers, cards and constraints, filled in run by run."""
    stages = rng.randint(1, 5)
    layers = rng.randint(stages, 24)
    weight = [rng.choice([3, 5, 5, 8]) for _ in range(layers)]
    cache = [rng.choice([0, 1, 2, 2, 4]) for _ in range(layers)]
    room = [rng.randint(20, 40 * layers // stages + 60) for _ in range(stages)]
    draft = rng.choice([0, 0, 1, 3])
    starts = {i for i in range(layers) if rng.random() < 0.6} if rng.random() < 0.4 else set(range(layers))
    first_end = rng.randint(1, layers) if rng.random() < 0.3 else 0
    kind = [rng.random() < 0.4 for _ in range(layers)]
    both = rng.random() < 0.3
    blocks = np.full((stages, layers + 1, layers + 1), -1, dtype=np.int64)
    load = np.zeros((stages, layers + 1, layers + 1), dtype=np.int64)
    for stage, a, b in itertools.product(range(stages), range(layers + 1), range(layers + 1)):
        if a >= b:
            continue
        load[stage, a, b] = b - a + (draft if stage == stages - 1 else 0)
        per_block = sum(cache[a:b]) + (2 if draft and stage == stages - 1 else 0)
        left = 4 * room[stage] - sum(weight[a:b])
        wrong = per_block == 0 or left <= 0 or (stage and a not in starts) or (not stage and b < first_end)
        if wrong or (both and len(set(kind[a:b])) < 2):
            continue
        blocks[stage, a, b] = left // per_block
    return blocks, load, rng.choice([1, 1, 3])


def of_splits(blocks, load, layers, stages):
    """(split, poorest blocks, heaviest load) of every allowed split, one by one."""
    for split in partition.all_splits(layers, stages):
        edges = list(itertools.accumulate(split, initial=0))
        runs = [(stage, edges[stage], edges[stage + 1]) for stage in range(stages)]
        if min(blocks[run] for run in runs) >= 0:
            yield split, int(min(blocks[run] for run in runs)), int(max(load[run] for run in runs))


def test_the_optimum_is_that_of_brute_force_on_500_random_instances():
    rng = random.Random(20261129)
    several = none = 0
    for number in range(500):
        blocks, load, worth = random_tables(rng)
        stages, layers = blocks.shape[0], blocks.shape[1] - 1
        default = partition.default_split(layers, stages)
        every = list(of_splits(blocks, load, layers, stages))
        # worth: so many blocks are one unit of pool, as where tokens are rounded down.
        keys = [(-(most // worth), heavy, sum(abs(a - b) for a, b in zip(split, default, strict=True)), split) for split, most, heavy in every]
        found = search.best_split(blocks, load, default, lambda n, worth=worth: n // worth * worth)
        assert found == (min(keys)[3] if keys else None), f"instance {number}"
        assert search.count(blocks >= 0) == len(every)
        none += not keys
        several += len({key[0] for key in keys}) > 1
    assert several > 250 and 10 < none < 250


def test_the_front_is_that_of_brute_force():
    rng = random.Random(7)
    longer = 0
    for _ in range(150):
        blocks, load, _ = random_tables(rng)
        stages, layers = blocks.shape[0], blocks.shape[1] - 1
        every = list(of_splits(blocks, load, layers, stages))
        points = {(most, heavy) for _, most, heavy in every}
        best = sorted((p for p in points if not any(q[0] >= p[0] and q[1] <= p[1] and q != p for q in points)), reverse=True)
        told = {split: (most, heavy) for split, most, heavy in every}
        found = [told[split] for split in search.pareto_front(blocks, load, partition.default_split(layers, stages))]
        assert found == best
        longer += len(best) > 1
    assert longer > 20


# --- the tables it searches


def test_block_costs_are_those_of_the_ledger_for_every_family():
    """Every figure of the search's table against the ledger that is checked against vLLM's own planner."""
    rng = random.Random(5)
    compared = 0
    while compared < 250:
        family = rng.choice(kv_builders.FAMILIES)
        spec, case = kv_builders.random_case(rng, family)
        engine = {key: case[key] for key in ("max_model_len", "tensor_parallel_size", "cache_dtype", "block_size", "draft_tokens", "dcp", "state_mode")}
        engine["in_flight_tokens"] = case["in_flight_tokens"]
        try:
            whole = kv.pool(spec, case["partition"], case["available"], index_sharing=case["index_sharing"], must_fit=False, **engine)
        except BadInput:
            continue
        found = block_costs(spec, index_sharing=case["index_sharing"], **engine)
        last = len(case["partition"]) - 1
        for stage, (start, end) in enumerate(kv.stage_bounds(spec, case["partition"])):
            assert (found.last if stage == last else found.inner)[start, end] == whole.ranks[stage].bytes_per_block, (family, case)
        assert found.request_blocks == whole.blocks_per_request and found.tokens(whole.blocks) == whole.pool_tokens
        assert found.tokens(found.least_blocks(whole.pool_tokens)) == whole.pool_tokens
        assert found.least_blocks(whole.pool_tokens) == 0 or found.tokens(found.least_blocks(whole.pool_tokens) - 1) < whole.pool_tokens
        compared += 1


@functools.cache
def glm():
    return memory.model_spec("glm-5.3")


@functools.cache
def report():
    return params.load(ROOT / "params" / "a100-x8-glm53.yml")


def cards(*gib):
    return Gpus(tuple(round(size * GIB) for size in gib))


@pytest.mark.parametrize("mode", ["clean", "relay", "flip"])
@pytest.mark.parametrize("given", [True, False])
def test_every_split_of_the_report_has_the_pool_of_the_ledger(mode, given):
    box, gpus = (report(), None) if given else (with_engine(report(), available_kv_gib=[], other_boots=[]), cards(*[79.25, 70] * 4))
    table, compared = partition.stage_table(box, glm(), gpus, index_sharing=mode), 0
    for split in partition.all_splits(78, 2):
        found = table.candidate(split)
        try:
            whole = memory.pool(box, glm(), split, gpus=gpus, must_fit=False, index_sharing=mode)
        except BadInput as error:
            assert "rank" in str(error) and any("leave no room" in reason for reason in found.wrong)
            continue
        compared += 1
        assert (found.pool_tokens, found.binding_rank) == (whole.pool_tokens, whole.binding_rank)
        assert list(found.rank_blocks) == [rank.blocks for rank in whole.ranks]
        assert found.binding_gib * GIB == pytest.approx(whole.ranks[whole.binding_rank].available_kv_bytes, abs=1)
    assert compared > 12


def random_box(rng, changed):
    """A small model of GLM's layers with random sharing, on random cards; and what it is asked for."""
    layers, stages = rng.randint(3, 11), rng.randint(1, 3)
    stages = min(stages, layers)
    kinds = [glm().layers[0], glm().layers[6], glm().layers[7]]  # dense with an indexer, experts with one, experts without
    made = [kinds[0], *(rng.choice(kinds[1:]) for _ in range(layers - 1))]
    spec = replace(glm(), layers=tuple(replace(layer, index=i) for i, layer in enumerate(made)), mtp_layers=glm().mtp_layers if rng.random() < 0.5 else ())
    box = changed({"engine.device": "cuda", "parallel.pipeline_parallel_size": stages})
    longest, drafts, eager = rng.choice([4096, 65_536, 400_000]), rng.choice([0, 2]), rng.random() < 0.5
    box = with_engine(box, kv_cache_gib_per_rank=None, dtype="bfloat16", max_model_len=longest, draft_tokens=drafts, enforce_eager=eager)
    return spec, box, cards(*[rng.choice([16, 24, 32, 48, 80]) for _ in range(stages)]), rng.choice(["clean", "relay", "flip"])


def stranded(spec, start, end):
    """Layers of a stage that would use indices of another stage, walked one by one."""
    found = []
    for layer in spec.layers[start:end]:
        if layer.attention.indexer.owns:
            return found
        found.append(layer.index)
    return found


def test_the_plan_of_random_boxes_is_the_best_of_all_ledgers(changed):
    rng = random.Random(11)
    solved = 0
    for _ in range(120):
        spec, box, gpus, mode = random_box(rng, changed)
        stages = box.parallel.pipeline_parallel_size
        best = None
        for split in partition.all_splits(spec.num_hidden_layers, stages):
            edges = list(itertools.accumulate(split, initial=0))
            if mode == "clean" and any(stranded(spec, edges[i], edges[i + 1]) for i in range(stages)):
                continue
            try:
                pool = memory.pool(box, spec, split, gpus=gpus, index_sharing=mode)
            except BadInput:
                continue
            load = list(split)
            load[-1] += box.engine.draft_tokens if spec.mtp_layers else 0
            default = partition.default_split(spec.num_hidden_layers, stages)
            key = (-pool.pool_tokens, max(load), sum(abs(a - b) for a, b in zip(split, default, strict=True)), split)
            best = min(best, key) if best else key
        found = partition.plan(partition.stage_table(box, spec, gpus, index_sharing=mode)).best
        assert (found.layers_per_stage if found else None) == (best[3] if best else None)
        solved += best is not None
        if found:
            assert (found.pool_tokens, found.straggler_layers) == (-best[0], best[1])
    assert 40 < solved < 120


# --- how long it takes


def test_128_layers_in_16_stages_take_less_than_a_tenth_of_a_second():
    layers = tuple(replace(glm().layers[3 + i % 60], index=i) for i in range(128))
    spec = replace(glm(), layers=layers)
    box = with_engine(report(), available_kv_gib=[], other_boots=[], max_model_len=65_536)
    gpus = cards(*[79.25, 64, 79.25, 48] * 16)

    def solve():
        return partition.plan(partition.stage_table(box, spec, gpus, stages=16))

    assert solve().best is not None
    assert least_seconds(solve, 0.1) < 0.1


# --- what params ask for


def plan_of(box, spec, gpus=None, **more):
    return partition.plan(partition.stage_table(box, spec, gpus, **more))


def test_straggler_counts_layers_and_the_draft_layer_once_for_each_step(changed, spec):
    assert plan_of(changed(), spec).table.candidate((20, 10)).stage_load == (20, 10)
    table = partition.stage_table(report(), glm())
    loads = [table.candidate(split).stage_load for split in ((39, 39), (40, 38), (41, 37), (42, 36))]
    assert loads == [(39, 42), (40, 41), (41, 40), (42, 39)]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("max_model_len", [2048, 2000])
def test_the_small_model_against_arithmetic_by_hand(changed, spec, stages, max_model_len):
    box = changed({"parallel.pipeline_parallel_size": stages, "engine.max_model_len": max_model_len})
    found = plan_of(box, spec)
    for split in partition.all_splits(30, stages):
        blocks = min(GIB // (layers * 1536 * 128) for layers in split)
        # 2000 and 2048 tokens both take 16 blocks.
        assert found.table.candidate(split).pool_tokens == blocks * max_model_len // 16
    assert found.best.layers_per_stage == DEFAULT_SPLITS[30, stages] and found.best.is_default
    assert found.looked_at == found.allowed == len(list(partition.all_splits(30, stages)))


def test_of_equal_pools_and_loads_vllms_own_split_is_taken(changed, spec):
    # Four stages: some stage has 8 layers at least, so all splits of eights and less are equal; 7+8+8+7 is vLLM's.
    found = plan_of(changed({"parallel.pipeline_parallel_size": 4}), spec)
    assert found.best.layers_per_stage == (7, 8, 8, 7) and found.best.straggler_layers == 8
    # Eight stages, 1,560,780 splits: 30 = 6 x 4 + 2 x 3, and vLLM's own is one of them.
    found = plan_of(changed({"parallel.pipeline_parallel_size": 8}), spec)
    assert found.best.layers_per_stage == partition.default_split(30, 8) == (3, 4, 4, 4, 4, 4, 4, 3)
    assert found.looked_at == 1_560_780


def test_choose_takes_what_the_params_ask(changed, spec):
    for asked, expected in (("best", (15, 15)), ("default", (15, 15)), ([20, 10], (20, 10)), ([12, 18], (12, 18))):
        box = changed({"parallel.layer_partition": asked})
        assert partition.choose(box, spec, plan_of(box, spec)).layers_per_stage == expected


def test_asked_split_that_must_not_be_used_says_why_and_what_is_best():
    box = report().model_copy(update={"parallel": report().parallel.model_copy(update={"index_sharing": "clean"})})
    with pytest.raises(BadInput, match=r"parallel.layer_partition: 41\+37 must not be used: stage 1 starts on layer 41, which shares .*; best is 42\+36"):
        partition.choose(box, glm(), plan_of(box, glm()))


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
    with pytest.raises(BadInput, match="engine.available_kv_gib: missing, and the box has 0 GPUs whose memory is known for 2 ranks"):
        partition.stage_table(box, spec)


# --- boxes with GPUs


def on_gpus(changed, **engine):
    return with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=None, dtype="bfloat16", **engine)


def test_unequal_cards_get_unequal_layers(changed, spec):
    # Eager: about 9.1 GiB of the card of 12 are left for the cache, 19.8 of the one of 24; layers in that ratio are 9.4 to 20.6.
    found = plan_of(on_gpus(changed), spec, cards(12, 24))
    assert found.best.layers_per_stage == (9, 21) and found.allowed == 29
    # The other way round, the layers follow the cards.
    assert plan_of(on_gpus(changed), spec, cards(24, 12)).best.layers_per_stage == (21, 9)


def test_more_memory_is_never_worse_for_the_best_split(changed, spec):
    last = 0
    for second in (4, 6, 8, 12, 16, 24):
        pool = plan_of(on_gpus(changed), spec, cards(12, second)).best.pool_tokens
        assert pool >= last
        last = pool


# --- the second field report


def test_the_reports_four_splits_and_the_best_of_all_77():
    table = partition.stage_table(report(), glm())
    rows = {first: table.candidate((first, 78 - first)) for first in (39, 40, 41, 42)}
    for first, tokens in {39: 597_632, 40: 666_304, 41: 729_472, 42: 665_152}.items():
        assert rows[first].pool_tokens == pytest.approx(tokens, rel=0.001)
    assert rows[41].pool_tokens == 729_472 and rows[39].pool_tokens == 597_632
    assert {first: row.binding_rank for first, row in rows.items()} == {39: 1, 40: 1, 41: 0, 42: 0}
    assert [rows[first].flips[1] for first in rows] == [(39, 40, 41), (40, 41), (41,), ()]
    assert all(table.candidate((first, 78 - first)).binding_rank == (first >= 41) ^ 1 for first in range(30, 50))


def test_the_best_split_of_each_way_with_shared_indices():
    found = {one.mode: one for one in partition.treatments(report(), glm())}
    assert {mode: one.plan.best.layers_per_stage for mode, one in found.items()} == {"clean": (42, 36), "relay": (41, 37), "flip": (41, 37)}
    assert found["clean"].plan.best.pool_tokens == pytest.approx(665_152, rel=0.001)
    assert found["relay"].plan.best.pool_tokens == found["flip"].plan.best.pool_tokens == 729_472
    assert found["clean"].plan.table.candidate((38, 40)).pool_tokens == pytest.approx(540_000, rel=0.005)
    assert {mode: one.usable for mode, one in found.items()} == {"clean": True, "relay": True, "flip": False}
    assert found["relay"].needs == ("index-relay",) and found["relay"].relay_bytes_per_token == 8_192
    # Rank 1 of the relay caches one index less than flipped layer 41 would.
    assert found["clean"].needs == () and found["clean"].relay_bytes_per_token == 0
    assert found["flip"].plan.allowed == found["relay"].plan.allowed == 7 and found["clean"].plan.allowed == 2


def test_a_flipped_layer_costs_its_rank_an_indexer_besides_its_cache():
    flip, relay = (memory.rank_weights_bytes(glm(), report(), (39, 39), 4, mode) for mode in ("flip", "relay"))
    # 17.875 MiB for each of layers 39, 40 and 41, whole on every TP rank; k_norm adds 512 B.
    assert flip[1].bytes - relay[1].bytes == 3 * 18_743_808 and flip[0].bytes == relay[0].bytes
    assert flip[1].by_component["indexer"] - relay[1].by_component["indexer"] == 3 * 18_743_808


def test_a_second_boot_tells_what_a_moved_layer_costs():
    """1.30 GiB a layer by the report's two boots, 1.289 by weights alone: at 39+39 exactly its 15.56 GiB, and between them what lies between."""
    table, alone = partition.stage_table(report(), glm()), partition.stage_table(with_engine(report(), other_boots=[]), glm())
    assert table.candidate((39, 39)).binding_gib == pytest.approx(15.56, abs=1e-6)
    assert alone.candidate((39, 39)).binding_gib == pytest.approx(15.54, abs=0.01)
    assert 15.56 < table.candidate((40, 38)).binding_gib < 18.16
    doubled = with_engine(report(), other_boots=[params.load(ROOT / "params" / "a100-x8-glm53.yml").engine.other_boots[0].model_copy(
        update={"available_kv_gib": [24.55, 12.96]})])  # fmt: skip
    with pytest.raises(BadInput, match=r"engine.other_boots: from split to split the KV space changes by 2.0\d times the weights that move, expected about 1"):
        partition.stage_table(doubled, glm())


# --- shared indices


def test_no_accepted_split_starts_on_a_sharing_layer_without_naming_the_flip(changed):
    rng = random.Random(3)
    accepted = 0
    for _ in range(60):
        spec, box, gpus, _ = random_box(rng, changed)
        stages = box.parallel.pipeline_parallel_size
        for mode in ("clean", "relay", "flip"):
            table = partition.stage_table(box, spec, gpus, index_sharing=mode)
            for split in partition.all_splits(spec.num_hidden_layers, stages):
                found = table.candidate(split)
                cut = tuple(tuple(stranded(spec, *at)) for at in table.bounds(split))
                assert found.cut_indices == cut
                if found.wrong:
                    continue
                accepted += 1
                assert not any(cut) if mode == "clean" else found.flips == (cut if mode == "flip" else ((),) * stages)
    assert accepted > 300


def test_45_33_is_caught_where_a_rule_of_even_stages_misses_it():
    table = partition.stage_table(report(), glm(), index_sharing="clean")
    found = table.candidate((45, 33))
    assert found.cut_indices[1] == (45,) and any("stage 1 starts on layer 45, which shares" in reason for reason in found.wrong)
    # The even rule looks at layer 39 whatever the partition, and never at 45.
    assert partition.even_split_flips(glm(), 2) == (39, 40, 41)
    assert partition.even_split_flips(glm(), 3) == (52, 53)
    assert partition.even_split_flips(kv_builders.glm_5_1(), 2) == ()


@pytest.mark.parametrize(
    ("split", "flips"),
    [
        ((26, 26, 26), [(), (), (52, 53)]),
        ((19, 20, 20, 19), [(), (19, 20, 21), (39, 40, 41), (59, 60, 61)]),
        ((20, 20, 20, 18), [(), (20, 21), (40, 41), (60, 61)]),
    ],
)
def test_flips_of_longer_pipelines(split, flips):
    assert list(kv.flipped_layers(glm(), split)) == flips


def test_a_run_without_any_owner_is_stranded_whole():
    spec = kv_builders.model([kv_builders.dsa(), *[kv_builders.dsa(owns=False)] * 5, kv_builders.dsa()])
    runs = shared_index_runs(spec)
    assert runs[1, 6] == 5 and runs[1, 7] == 5 and runs[3, 5] == 2 and runs[0, 6] == 0 and runs[6, 7] == 0 and runs[4, 4] == 0


def evidence(tmp_path, names=None, stated=None):
    box = report().model_copy(update={"model": report().model.model_copy(update={"path": str(tmp_path), "checkpoint_gib": stated})})
    if names is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    return box


def key(layer):
    return f"model.layers.{layer}.self_attn.indexer.wk.weight"


def test_flipping_is_judged_by_tensor_names_where_there_is_an_index(tmp_path):
    owners = [0, 1, 2, *range(6, 75, 4), 78]
    box = evidence(tmp_path, map(key, owners))
    found = partition.indexer_evidence(box, glm())
    assert found.layers == () and found.source == "tensor names of the checkpoint: 0 of 57 sharing layers have indexer weights"
    refused = partition.flip_refused(box, glm(), ((), (41,)))
    assert refused.startswith("flip needs indexer weights for layer 41") and refused.endswith("use clean or relay")
    box = evidence(tmp_path, map(key, [*owners, 41]))
    assert partition.flip_refused(box, glm(), ((), (41,))) == "" and partition.flip_refused(box, glm(), ((), (40, 41))) != ""
    assert {one.mode: one.usable for one in partition.treatments(box, glm())}["flip"] is True
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadInput, match="model.safetensors.index.json: not an index"):
        partition.indexer_evidence(box, glm())


def test_flipping_is_judged_by_the_checkpoints_size_where_nothing_else_is_here(tmp_path):
    # 390.547 GiB with 22 indexers, 57 x 17.875 MiB more with all 79.
    assert partition.indexer_evidence(evidence(tmp_path, stated=390.58), glm()).layers == ()
    assert len(partition.indexer_evidence(evidence(tmp_path, stated=391.52), glm()).layers) == 57
    for unclear in (391.05, None):
        found = partition.indexer_evidence(evidence(tmp_path, stated=unclear), glm())
        assert found.layers is None and not found.allows((41,)) and found.allows(())


def test_where_only_some_layers_have_weights_only_those_are_flipped(tmp_path):
    box = evidence(tmp_path, map(key, [0, 1, 2, *range(6, 75, 4), 40, 78, *range(43, 74)]))
    found = {one.mode: one for one in partition.treatments(box, glm())}["flip"]
    # 41 has none, which 41+37, 40+38 and 39+39 would flip; 43, 44 and 45 have them, and 42 computes its own.
    assert found.usable and found.plan.best.layers_per_stage == (42, 36)
    table = found.plan.table
    assert table.candidate((41, 37)).wrong and table.candidate((40, 38)).wrong and not table.candidate((43, 35)).wrong
    assert not table.candidate((44, 34)).wrong


def test_a_model_that_shares_nothing_has_no_ways_to_choose_from(spec, changed):
    assert partition.treatments(changed(), spec) == []
    assert partition.treatments(report(), kv_builders.glm_5_1()) == []


# --- hard constraints


# The six cases of the first report's offline test: id 0 is no layer, 1 the first one, the last one of the stage, one past it, none, and a partition by hand.
@pytest.mark.parametrize(
    ("ids", "first_end", "contained"), [([0], 16, False), ([1], 16, True), ([16], 16, True), ([17], 16, False), ([], 16, True), ([2], 1, False), ([2], 2, True)]
)
def test_ple_containment(ids, first_end, contained):
    assert partition.ple_contained(ids, first_end) is contained


def test_ngram_layers_lie_on_the_first_stage():
    spec = memory.model_spec("qwen3.8-flash-next")
    # ple_layer_ids [2] is layer 1.
    assert partition.ple_layers(spec) == (1,)
    rule = next(rule for rule in partition.rules_of(spec, 2, "clean") if rule.name.startswith("n-gram"))
    assert rule.broken_by([(0, 1), (1, 48)]) == ["n-gram layer 1 is not on the first stage, which ends before layer 1"]
    assert rule.broken_by([(0, 2), (2, 48)]) == [] == rule.broken_by([(0, 47), (47, 48)])


def test_every_stage_of_a_hybrid_model_has_both_kinds():
    spec = memory.model_spec("qwen3.8-flash-next")  # attention at 3, 7, ..., 47
    rule = next(rule for rule in partition.rules_of(spec, 3, "clean") if rule.name.startswith("both"))
    assert rule.broken_by([(0, 16), (16, 32), (32, 48)]) == []
    assert rule.broken_by([(0, 3), (3, 47), (47, 48)]) == ["stage 0 (layers 0 to 2) has no attention layer", "stage 2 (layers 47 to 47) has no recurrent layer"]


def test_a_shared_kv_cache_is_not_cut():
    own, window = kv_builders.gqa(), kv_builders.sliding(512)
    shared = [replace(one, kv_shared=True) for one in (window, own)]
    spec = kv_builders.model([window, own, window, own, *shared, *shared])
    rule = next(rule for rule in partition.rules_of(spec, 2, "clean") if rule.name.startswith("shared"))
    # The last four layers use the caches of 2 (window) and 3 (whole): a cut must lie before both.
    allowed = [cut for cut in range(1, 8) if not rule.broken_by([(0, cut), (cut, 8)])]
    assert allowed == [1, 2]
    assert rule.broken_by([(0, 3), (3, 8)]) == ["layer 4 uses the KV cache of layer 2, which is on a stage before"]


def test_image_features_stay_on_the_first_stage():
    spec = replace(kv_builders.smollm2(), deepstack_layers=3)
    rule = next(rule for rule in partition.rules_of(spec, 2, "clean") if rule.name.startswith("visual"))
    assert [bool(rule.broken_by([(0, cut), (cut, 30)])) for cut in (2, 3, 4)] == [True, False, False]


def test_models_without_such_parts_have_only_the_plain_rule(spec):
    assert [rule.name for rule in partition.rules_of(spec, 4, "clean")] == ["no empty stage"]
    assert [rule.name for rule in partition.rules_of(glm(), 2, "relay")] == ["no empty stage"]


# --- boxes on which nothing fits


def free(**engine):
    return with_engine(report(), available_kv_gib=[], other_boots=[], **engine)


def refusal(box, gpus):
    return partition.refusal(box, glm(), gpus, plan_of(box, glm(), gpus))


def test_a_box_that_is_too_small_says_what_would_fit():
    said = refusal(free(kv_cache_dtype="bfloat16", gpu_memory_utilization=0.9), cards(*[60] * 8))
    assert said.startswith("no split of 78 layers in 2 stages fits; nearest is ") and "\n" not in said
    for words in ("8 more cards like the smallest (60.0 GiB): pipeline_parallel_size 4", "cards of 96 GiB"):
        assert words in said, said
    # One stage more is not enough, and of cards the size below is not.
    box = free(kv_cache_dtype="bfloat16", gpu_memory_utilization=0.9)
    assert plan_of(box, glm(), cards(*[60] * 12), stages=3).best is None and plan_of(box, glm(), cards(*[60] * 16), stages=4).best is not None
    assert plan_of(box, glm(), cards(*[80] * 8)).best is None and plan_of(box, glm(), cards(*[96] * 8)).best is not None
    said = refusal(free(), cards(*[40] * 8))
    assert "GiB of weights, and what a step takes besides, leave no room for the KV cache" in said and "max_model_len" not in said


def test_the_longest_request_that_is_offered_fits_and_a_longer_one_does_not():
    gpus = cards(*[60] * 8)
    said = refusal(free(), gpus)
    longest = int(said.split("engine.max_model_len ")[1].split()[0])
    assert plan_of(free(max_model_len=longest), glm(), gpus).best is not None
    assert plan_of(free(max_model_len=longest + 64), glm(), gpus).best is None


def test_every_remedy_that_is_named_works():
    gpus = cards(*[70.5] * 8)
    box = free(kv_cache_dtype="bfloat16", gpu_memory_utilization=0.9)
    named = partition.remedies(box, glm(), gpus)
    assert any("fp8_ds_mla" in words for words in named) is (plan_of(with_engine(box, kv_cache_dtype="fp8_ds_mla"), glm(), gpus).best is not None)
    assert any("draft_tokens 0" in words for words in named) is (plan_of(with_engine(box, draft_tokens=0), glm(), gpus).best is not None)
    assert any("utilization 0.95" in words for words in named) is (plan_of(with_engine(box, gpu_memory_utilization=0.95), glm(), gpus).best is not None)


def test_a_machine_whose_space_is_set_by_hand_is_told_how_much_it_takes(changed):
    # 1,000,000 tokens of GLM in bfloat16 take 15,625 blocks; no stage of 39 layers has them in 1 GiB.
    box = with_engine(report(), available_kv_gib=[], other_boots=[], kv_cache_gib_per_rank=1)
    said = partition.refusal(box, glm(), None, plan_of(box, glm()))
    gib = int(said.split("engine.kv_cache_gib_per_rank ")[1].split(";")[0])
    assert plan_of(with_engine(box, kv_cache_gib_per_rank=gib), glm()).best is not None and gib < 20


def test_space_set_by_hand_has_to_fit_on_the_cards_beside_the_weights():
    by_hand = with_engine(report(), available_kv_gib=[], other_boots=[], kv_cache_gib_per_rank=12, max_model_len=65_536)
    fits, none = (plan_of(by_hand, glm(), cards(*[size] * 8)) for size in (79.25, 60))
    assert fits.best is not None and fits.best.binding_gib == 12 and none.best is None
    assert "leave no room" in partition.roomiest(none.table).wrong[0]
    assert memory.pool(by_hand, glm(), (39, 39), gpus=cards(*[79.25] * 8)).ranks[0].available_kv_bytes == 12 * GIB
    with pytest.raises(BadInput, match="rank 0: engine.kv_cache_gib_per_rank 12, .* are more than the GPU has"):
        memory.pool(by_hand, glm(), (39, 39), gpus=cards(*[60] * 8))


def test_no_remedy_is_named_that_vllm_refuses():
    gpus = cards(*[60] * 8)
    plain = partition.remedies(free(), glm(), gpus)
    assert any("pipeline_parallel_size" in words for words in plain) and any("max_model_len" in words for words in plain)
    none = partition.remedies(free(), glm(), gpus, lambda layout, stages, box: False)
    assert none == []
    # A layout that only drafting keeps from running is saved by leaving it.
    undrafted = partition.remedies(free(), glm(), cards(*[79.25] * 8), lambda layout, stages, box: not box.engine.draft_tokens)
    assert undrafted == ["engine.draft_tokens 0"]


def test_rules_that_leave_no_split_are_named():
    spec = kv_builders.model([kv_builders.dsa(), *[kv_builders.dsa(owns=False)] * 7])
    table = partition.stage_table(free(max_model_len=4096), spec, cards(80, 80, 80, 80, 80, 80, 80, 80), index_sharing="clean")
    assert partition.plan(table).best is None
    with pytest.raises(BadInput, match="no split of 8 layers in 2 stages keeps all rules: stages start on layers with indices of their own"):
        partition.roomiest(table)


def test_cards_that_hold_nothing_are_one_line(changed, spec):
    box = on_gpus(changed)
    said = partition.refusal(box, spec, cards(1, 1), plan_of(box, spec, cards(1, 1)))
    assert said.startswith("no split of 30 layers in 2 stages fits") and "leave no room" in said and "\n" not in said
