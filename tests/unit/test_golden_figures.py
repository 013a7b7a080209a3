"""The published figures of both field reports, recomputed. Expected values stand here; report_figures.csv is compared when it lies beside the checkout."""

import csv
import functools

import pytest
from conftest import ROOT
from scipy import stats

from fieldbook import budget, kv, memory, params, partition, weights
from fieldbook.budget import Gpus
from fieldbook.errors import BadInput
from fieldbook.memory_tables import with_engine

GIB, MIB = 2**30, 2**20
CARD = 85_094_039_552  # 79.25 GiB


@functools.cache
def glm():
    return memory.model_spec("glm-5.3")


@functools.cache
def flash():
    return memory.model_spec("qwen3.8-flash-next")


@functools.cache
def box():
    return params.load(ROOT / "params" / "a100-x8-glm53.yml")


def pool(split, given, tp=4, index_sharing=None, **engine):
    # The stated space is that of the split itself.
    return memory.pool(with_engine(memory.with_space(box(), split, given), **engine), glm(), split, tensor_parallel_size=tp, index_sharing=index_sharing)


def attention_block(state_dtype, draft_tokens):
    return kv.pool(
        flash(), [16, 16, 16], [20 * GIB] * 3, max_model_len=200_000, draft_tokens=draft_tokens, state_dtype=state_dtype, state_mode="align"
    ).block_size_tokens


def stage_load(split):
    """Layer-equivalents of both stages: a step drafts with the MTP layer three times."""
    return list(partition.stage_table(box(), glm()).candidate(split).stage_load)


def tp8(**engine):
    return pool([78], [17.26], tp=8, max_model_len=131_072, **engine)


def glm_layers(kind):
    return next(layer for layer in glm().layers if (layer.mlp.kind, bool(layer.attention.indexer.owns)) == kind)


# id: (value in the report, tolerance as a share, how it is computed). A tolerance of 0 is exact.
COMPUTED = {
    "cmp-page-bf16": (832, 0, lambda: attention_block("bfloat16", 2)),
    "cmp-page-fp32": (1600, 0, lambda: attention_block("float32", 3)),
    "cmp-fullattn-layers": (
        list(range(3, 48, 4)), 0, lambda: [layer.index for layer in flash().layers if layer.attention.kind not in ("gdn", "kda", "mamba2", "none")],
    ),
    "glm-ckpt": (390.58, 0.0005, lambda: weights.checkpoint_bytes(glm()) / GIB),
    "glm-moe-layer": (5177.8, 0.0001, lambda: weights.layer_bytes(glm_layers(("moe", False)), glm()) / MIB),
    "glm-mtp-layer": (5339.7, 0.0001, lambda: sum(one.bytes for one in weights.mtp_components(glm())) / MIB),
    "glm-dense-layer-tp4": (191, 0.005, lambda: weights.layer_bytes(glm().layers[0], glm()) / 4 / MIB),
    "glm-embed-tp4": (454, 0.005, lambda: memory.rank_weights_bytes(glm(), box(), [39, 39], 4)[0].by_component["embedding"] / MIB),
    "glm-pp0-weights": (49_000, 0.01, lambda: memory.rank_weights_bytes(glm(), box(), [39, 39], 4)[0].bytes / MIB),
    "glm-budget": (75.29, 0.0005, lambda: budget.requested_bytes(CARD, 0.95) / GIB),
    "glm-kv-main": (656, 0, lambda: kv.kv_bytes_per_token(glm().layers[0].attention, 4, "fp8_ds_mla")),
    "glm-kv-indexer": (132, 0, lambda: kv.indexer_bytes_per_token(glm().layers[0].attention)),
    "glm-full-layers": (21, 0, lambda: sum(layer.attention.indexer.owns for layer in glm().layers)),
    "glm-kv-token-tp8": (54_728, 0, lambda: tp8().ranks[0].kv_bytes_per_token),
    "glm-split-compute": (
        [[39, 42], [40, 41], [41, 40], [42, 39]], 0, lambda: [stage_load(split) for split in ([39, 39], [40, 38], [41, 37], [42, 36])],
    ),
    "glm-split-gates": (
        [(39, 40, 41), (40, 41), (41,), ()], 0, lambda: [kv.flipped_layers(glm(), split)[1] for split in ([39, 39], [40, 38], [41, 37], [42, 36])],
    ),
    "glm-128k": (5.55, 0.001, lambda: 729_280 / (131_072 + 256)),
    "glm-allreduce": (156, 0, lambda: 2 * glm().num_hidden_layers),
    "glm-format-ratio": (1.71, 0.005, lambda: tp8(kv_cache_dtype="bfloat16").ranks[0].kv_bytes_per_token / tp8().ranks[0].kv_bytes_per_token),
    "glm-tokens-per-gib": (19_668, 0.003, lambda: GIB / tp8().ranks[0].kv_bytes_per_token),
    # From 39+39, three layers of 1.30 GiB moved to rank 0; every cut of these lies before a layer with indices of its own.
    "glm-clean-4236": (665_152, 0.001, lambda: pool([42, 36], [21.95 - 3 * 1.30, 15.56 + 3 * 1.30], index_sharing="clean").pool_tokens),
    "glm-relay-4137": (729_472, 0.001, lambda: pool([41, 37], [19.35, 18.16], index_sharing="relay").pool_tokens),
    "glm-indexer-owners": (22, 0, lambda: sum(layer.attention.indexer.owns for layer in (*glm().layers, *glm().mtp_layers))),
}  # fmt: skip

# Pools that servers logged.
MEASURED = {
    "glm-pool-tp8-v028": (338_688, 0.0005, lambda: tp8().pool_tokens),
    "glm-pool-3939": (597_760, 0.0005, lambda: pool([39, 39], [21.95, 15.56]).pool_tokens),
    "glm-pool-4137": (729_280, 0.0005, lambda: pool([41, 37], [19.35, 18.16]).pool_tokens),
}

# What the report says, and what comes out: both are printed, neither is corrected in silence.
FLAGGED = {
    "cmp-ratio-kv": ("4.52", lambda: 904_109 / 232_000, 3.897, 0.001),
    # The report's closing sum: 15.56 GiB of KV on rank 0 too. By pages it holds 9340 blocks x 1,738,752 B = 15.12 GiB.
    "glm-3939-closure": ("0.2", lambda: closure_residual_gib(), 0.55, 0.06),
    "glm-degen-p": ("7.4e-9", lambda: stats.fisher_exact([[21, 79], [0, 120]], alternative="greater").pvalue, 1.8e-8, 0.03),
}

# Predictions of the report, by its linear rule, with what rank by rank accounting gives.
PREDICTED = {
    "glm-pred-4038": (647_700, 666_304, lambda: pool([40, 38], [21.95 - 1.30, 15.56 + 1.30]).pool_tokens),
    "glm-pred-4236": (693_300, 665_152, lambda: pool([42, 36], [21.95 - 3 * 1.30, 15.56 + 3 * 1.30]).pool_tokens),
}


def closure_residual_gib():
    """Rank 0 of 39+39: nvidia-smi less CUDA context, weights and non-torch, activation, graphs, and the pages of 9340 blocks."""
    pages = 9340 * pool([39, 39], [21.95, 15.56]).ranks[0].kv_bytes_per_block / GIB
    return 72_430 / 1024 - 0.93 - (50.98 + 2.36 + 0.76) - pages


def close(value, expected, tolerance):
    return value == expected if tolerance == 0 else value == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("row", COMPUTED)
def test_computed_figures(row):
    expected, tolerance, compute = COMPUTED[row]
    assert close(compute(), expected, tolerance), (compute(), expected)


@pytest.mark.parametrize("row", MEASURED)
def test_measured_pools(row):
    expected, tolerance, compute = MEASURED[row]
    assert compute() == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("row", FLAGGED)
def test_figures_that_disagree_with_their_own_recomputation(row):
    stated, compute, expected, tolerance = FLAGGED[row]
    assert compute() == pytest.approx(expected, rel=tolerance)
    assert abs(compute() / float(stated) - 1) > 0.1, f"{row}: report says {stated}, recomputed {compute()}; it agrees after all"


@pytest.mark.parametrize("row", PREDICTED)
def test_the_reports_predictions_beside_the_accounting(row):
    stated, expected, compute = PREDICTED[row]
    assert compute() == expected and abs(stated / expected - 1) > 0.02


def test_the_gain_of_the_final_split_comes_out_of_its_own_space_alone():
    """The report logged 597,760 tokens at 39+39 and 729,280 at 41+37, 22% more. A layer that moves takes its weights along."""
    alone = with_engine(box(), other_boots=[])
    even, final = (memory.pool(alone, glm(), split) for split in ((39, 39), (41, 37)))
    assert even.pool_tokens == pytest.approx(597_760, rel=0.002) and even.binding_rank == 1
    # It logged 21.95 and 15.56 GiB; a buffer or two that do not move lie between.
    assert [rank.available_kv_bytes / GIB for rank in even.ranks] == pytest.approx([21.95, 15.56], abs=0.1)
    assert final.pool_tokens / even.pool_tokens - 1 == pytest.approx(0.22, abs=0.002)
    with pytest.raises(BadInput, match=r"rank 0: 19.35 GiB of KV space at 41\+37 are less than what the layers add that 60\+18 puts there"):
        memory.pool(alone, glm(), (60, 18))


def test_pools_as_they_come_out_of_the_stated_space():
    """To the token: the stated space has two decimals, which is all that lies between these and the logs."""
    found = pool([39, 39], [21.95, 15.56])
    assert (found.pool_tokens, found.binding_rank, [rank.indexers for rank in found.ranks]) == (597_632, 1, [12, 13])
    assert [rank.kv_bytes_per_token for rank in found.ranks] == [39 * 656 + 12 * 132, 40 * 656 + 13 * 132] == [27_168, 27_956]
    assert found.ranks[0].kv_bytes_per_block == 1_738_752 and found.ranks[1].draft_layers == 1
    found = pool([41, 37], [19.35, 18.16])
    assert (found.pool_tokens, found.binding_rank, [rank.kv_bytes_per_token for rank in found.ranks]) == (729_472, 0, [28_480, 26_380])
    # With the layers that a cut strands computing their own; a relay spares rank 1 of one of them.
    assert pool([41, 37], [19.35, 18.16], index_sharing="relay").ranks[1].kv_bytes_per_token == 26_248
    # 38+40, cut clean, is worse than 42+36: 540,096.
    assert pool([38, 40], [21.95 + 1.30, 15.56 - 1.30], index_sharing="clean").pool_tokens == 540_096
    assert tp8().pool_tokens == 338_624 and tp8().ranks[0].indexers == 22


def test_the_block_of_the_first_report_at_every_draft_depth():
    # State 48 x 128 x 128 values and 10,240 channels x (3 + drafts) in bfloat16, over 2048 B a token, in steps of 16.
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        for drafts in range(5):
            state = 48 * 128 * 128 * width + (3 + drafts) * 10_240 * 2
            assert attention_block(dtype, drafts) == -(-state // (2048 * 16)) * 16
    assert [attention_block("bfloat16", n) for n in (2, 3)] == [832] * 2 and [attention_block("float32", n) for n in (2, 3)] == [1600] * 2
    assert attention_block("float32", 4) == 1616
    # The page that every state is padded to: 1600 x 2048 and 832 x 2048 B.
    assert (1600 * 2048, 832 * 2048) == (3_276_800, 1_703_936)
    found = kv.pool(flash(), [16, 16, 16], [20 * GIB] * 3, max_model_len=200_000, draft_tokens=3)
    assert found.state_page_bytes == 3_276_800


def test_weights_of_a_rank_are_the_logs_to_the_last_digit():
    """47.85 GiB after loading: weights, rotary table of 2^20 positions and a top-k buffer of 8192 tokens."""
    held = memory.rank_weights_bytes(glm(), box(), [39, 39], 4)[0].bytes
    assert round((held + weights.buffer_bytes(glm(), box().engine.max_num_batched_tokens)) / GIB, 2) == 47.85
    # The report's 191 MiB of a dense layer is a quarter; on a rank it is more, since q_a, kv_a and the indexer are not divided.
    assert weights.layer_rank_bytes(glm(), tensor_parallel_size=4)[0] / MIB == pytest.approx(227.65, abs=0.01)


def test_without_given_space_the_estimate_binds_the_same_rank():
    """The whole way from the cards' memory: within the stated error of what the report measured, on both ranks."""
    found = memory.pool(with_engine(box(), available_kv_gib=[]), glm(), [39, 39], gpus=Gpus((CARD,) * 8))
    assert found.binding_rank == 1
    for rank, measured in zip(found.ranks, (21.95, 15.56), strict=True):
        assert abs(rank.available_kv_bytes / GIB - measured) * GIB <= rank.budget.error_bytes


def test_from_the_cards_alone_the_reports_own_split_is_the_best():
    """Nothing given but eight cards of 79.25 GiB: 41+37 wins, its pool within 2.5% of the one measured (745,792 against 729,280)."""
    best = partition.plan(partition.stage_table(with_engine(box(), available_kv_gib=[]), glm(), Gpus((CARD,) * 8))).best
    assert best.layers_per_stage == (41, 37) and best.binding_rank == 0
    assert best.pool_tokens == pytest.approx(729_280, rel=0.025)


def test_the_box_of_the_second_report_ships(command):
    status, out, err = command("params", ROOT / "params" / "a100-x8-glm53.yml")
    assert (status, err) == (0, "") and "fp8_ds_mla" in out
    found = memory.pool(box(), glm(), box().parallel.layer_partition)
    assert found.pool_tokens == pytest.approx(729_280, rel=0.0005) and found.binding_rank == 0 and found.block_size_tokens == 64
    assert partition.resolve_split(box().parallel, glm()) == (41, 37) and partition.resolve_split(box().verdict.baseline, glm()) == (78,)


# --- against the table itself


def table():
    places = [ROOT.parent / "shared" / "golden" / "report_figures.csv"]
    found = next((file for file in places if file.is_file()), None)
    if found is None:
        pytest.skip("golden/report_figures.csv is not beside this checkout")
    with found.open(newline="", encoding="utf-8") as stream:
        return {row["id"]: row for row in csv.DictReader(stream)}


def test_every_row_that_can_be_computed_is_computed():
    rows = table()
    assert {name for name, row in rows.items() if row["kind"] == "computed"} == set(COMPUTED)
    assert {name for name, row in rows.items() if row["kind"] == "measured" and row["quantity"] == "kv_pool" and float(row["tolerance"])} == set(MEASURED)
    assert {name for name, row in rows.items() if row["kind"] in ("INCONSISTENT", "DISPUTED", "NOT-REPRODUCED")} == set(FLAGGED)
    assert {name for name, row in rows.items() if row["kind"] == "reported-prediction"} == set(PREDICTED)


def test_expected_values_and_tolerances_are_the_tables():
    rows = table()
    for name, (expected, tolerance, _) in (COMPUTED | MEASURED).items():
        assert float(rows[name]["tolerance"]) == tolerance, name
        if isinstance(expected, int | float):
            assert float(rows[name]["value"]) == expected, name
    for name, (stated, *_) in FLAGGED.items():
        assert float(rows[name]["value"]) == float(stated), name
    for name, (stated, *_) in PREDICTED.items():
        assert float(rows[name]["value"]) == stated, name
    assert rows["cmp-fullattn-layers"]["value"] == "3,7,...,47"
    assert rows["glm-split-compute"]["value"] == "; ".join(f"{a} vs {b}" for a, b in COMPUTED["glm-split-compute"][0])
    shown = [",".join(map(str, layers)) or "none" for layers in COMPUTED["glm-split-gates"][0]]
    cuts = ("39+39", "40+38", "41+37", "42+36")
    assert rows["glm-split-gates"]["value"] == "; ".join(f"{cut}: {layers}" for cut, layers in zip(cuts, shown, strict=True))
