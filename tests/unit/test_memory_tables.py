"""Rows of the memory notebook: what they say is what the accounting says, for every kind of model, and nothing that is not a number is shown as one."""

import json
import math

import pytest
from conftest import ROOT
from kv_builders import gqa, mamba2, mla, model, qsa, sliding

from fieldbook import bootlog, memory, memory_tables, params, weights
from fieldbook.budget import Gpus, LoggedTerms
from fieldbook.memory_tables import with_engine

GIB = 2**30
MODELS = ["smollm2-135m-instruct", "glm-5.3", "qwen3.8-flash-next"]
SPLITS = {"smollm2-135m-instruct": (15, 15), "glm-5.3": (41, 37), "qwen3.8-flash-next": (16, 16, 16)}


@pytest.fixture
def setup(changed):
    """(spec, params on GPUs with 20 GiB of KV space on each rank, split) of a model."""

    def make(name, **engine):
        base = with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=20, dtype="bfloat16", max_model_len=8192)
        return memory.model_spec(name), with_engine(base, **engine), SPLITS[name]

    return make


@pytest.fixture
def on_cards(setup):
    """SmolLM2 on two cards of 24 and 16 GiB: the pool with its budget."""
    spec, box, split = setup("smollm2-135m-instruct", kv_cache_gib_per_rank=None)
    return spec, box, split, Gpus((24 * GIB, 16 * GIB))


def numbers(rows):
    return [v for row in rows for v in row.values() if isinstance(v, int | float) and not isinstance(v, bool)]


def test_shape_names_layers_by_what_they_do():
    rows = {next(iter(row.values())): row["value"] for row in memory_tables.shape(memory.model_spec("glm-5.3"), "bfloat16")}
    text = json.dumps(rows)
    assert rows["layers"] == 78 and rows["layers with sparse latent attention (DSA)"] == 78 and rows["layers with an indexer of their own"] == 21
    assert rows["layers with experts"] == 75 and rows["layers with a dense MLP"] == 3 and rows["draft layers (MTP)"] == 1
    assert "compressed-tensors" in text and "4 bits" in text
    rows = {next(iter(row.values())): row["value"] for row in memory_tables.shape(memory.model_spec("qwen3.8-flash-next"), "bfloat16")}
    assert rows["layers with gated delta net (recurrent)"] == 36 and rows["layers with sparse grouped-query attention"] == 12
    # What is not counted is said.
    assert "n-gram table" in rows["not counted"]


@pytest.mark.parametrize("name", MODELS)
def test_one_layer_of_each_kind_adds_up_to_all_of_them(name):
    spec = memory.model_spec(name)
    kinds = memory_tables.kinds(spec)
    assert sum(count for _, count in kinds) == spec.num_hidden_layers
    sizes = weights.layer_rank_bytes(spec, tensor_parallel_size=1, dtype="bfloat16")
    rows = memory_tables.layer_weights(spec, "bfloat16")
    wholes = [row["bytes"] for row in rows if row["weight"] == "one layer"]
    assert len(wholes) == len(kinds) and sum(row["bytes"] for row in rows) == 2 * sum(wholes)
    assert sum(whole * count for whole, (_, count) in zip(wholes, kinds, strict=True)) == sum(sizes)


def test_layers_that_differ_only_beside_attention_and_mlp_are_kinds_of_their_own():
    # Qwen3.8's layer 1 has a projection, norms and a convolution of its own.
    spec = memory.model_spec("qwen3.8-flash-next")
    assert [(layer.index, count) for layer, count in memory_tables.kinds(spec)] == [(0, 35), (1, 1), (3, 12)]


@pytest.mark.parametrize("name", MODELS)
def test_worked_weights_end_with_the_checkpoint(name):
    spec = memory.model_spec(name)
    text = memory_tables.worked_weights(spec, "bfloat16")
    whole = memory.checkpoint_bytes(spec, "bfloat16")
    assert f"{whole:,} B" in text and f"**{whole / GIB:.4f} GiB**" in text and "-" not in text.replace("|---", "").replace("---|", "")


def test_worked_weights_of_smollm2_line_by_line():
    text = memory_tables.worked_weights(memory.model_spec("smollm2-135m-instruct"), "float32")
    # 30 layers of 3,540,096 parameters; 49,152 x 576; one norm of 576.
    for part in ("30 · 14,160,384", "424,811,520 B", "1 · 49,152 · 576 · 4", "113,246,208 B", "2,304 B", "538,060,032 B", "**0.5011 GiB**"):
        assert part in text, part


def test_worked_pool_says_how_the_log_line_comes_about(setup):
    spec, box, split = setup("smollm2-135m-instruct", device="cpu", dtype="float32", kv_cache_gib_per_rank=1, max_model_len=2000)
    text = memory_tables.worked_pool(memory.pool(box, spec, split), 2000)
    for part in ("1,073,741,824 B / 2,949,120 B", "364 blocks of 128 tokens", "2,000 tokens takes 16 (attention) = 16 blocks", "22.75", "**45,500 tokens**"):
        assert part in text, part


def test_worked_pool_of_a_hybrid_model_has_every_group(setup):
    spec, box, split = setup("qwen3.8-flash-next")
    pool = memory.pool(box, spec, split)
    text = memory_tables.worked_pool(pool, 8192)
    assert len(pool.groups) > 1 and all(f"({group.kind})" in text for group in pool.groups) and f"**{pool.pool_tokens:,} tokens**" in text


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_bytes_of_a_token_add_up_to_the_ledgers(name, draft_tokens, setup):
    spec, box, split = setup(name, draft_tokens=draft_tokens, kv_cache_dtype="auto")
    rows = memory_tables.token_bytes(spec, box)
    ledger = memory.pool(with_engine(box, draft_tokens=0), spec, split).ranks
    per_token = sum(row["layers"] * row["B per token"] for row in rows if row["B per token"] is not None)
    # Keys that several tokens share: the ledger cuts them to whole bytes.
    assert per_token == sum(rank.kv_bytes_per_token for rank in ledger)
    states = sum(row["layers"] * row["B per state"] for row in rows if row["B per state"] is not None)
    if draft_tokens == 0:
        conv = sum(layer.short_conv.channels * layer.short_conv.state_tokens * 2 for layer in spec.layers if layer.short_conv)
        # The short convolution of layer 1 is a state too; it is the layer's, not its attention's.
        assert states in (sum(rank.state_bytes for rank in ledger), sum(rank.state_bytes for rank in ledger) - conv)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (gqa(32, 8, 128), ["2 (K and V) x 8 KV heads x 128", "grouped-query"]),
        (sliding(1024), ["at most 1,024 tokens are kept"]),
        (mla(), ["latent 512 + rope 64", "the same on every TP rank"]),
        (qsa(), ["indexer's keys", "bfloat16, one key for 4 tokens"]),
        (mamba2(), ["Mamba 2", "one state for each request"]),
    ],
)
def test_token_bytes_say_the_formula_of_every_kind(setup, attention, words):
    _, box, _ = setup("smollm2-135m-instruct")
    text = json.dumps(memory_tables.token_bytes(model([attention] * 3), box))
    assert [word for word in words if word not in text] == []


def test_ledger_has_one_row_for_each_rank_and_one_that_binds(setup, on_cards):
    spec, box, split = setup("glm-5.3", draft_tokens=3)
    rows = memory_tables.ledger(memory.pool(box, spec, split, tensor_parallel_size=4))
    assert [row["binds"] for row in rows] == [True, False] and [row["layers"] for row in rows] == [41, "37 + 1 draft"]
    assert "other GiB" not in rows[0] and "B of state" not in rows[0]
    assert "B of state" in memory_tables.ledger(memory.pool(*setup("qwen3.8-flash-next")[1::-1], (16, 16, 16)))[0]
    spec, box, split, gpus = on_cards
    pool = memory.pool(box, spec, split, gpus=gpus)
    for rank, row in zip(pool.ranks, memory_tables.ledger(pool), strict=True):
        other, error = (float(part) for part in row["other GiB"].split(" ± "))
        # What a reader adds up: weights, other and KV space are the share of the card.
        assert row["weights GiB"] + other + row["KV space GiB"] == pytest.approx(rank.budget.requested_bytes / GIB, abs=0.012)
        assert 0 < error < other


def test_parts_of_the_bars_fill_the_share_of_the_card(on_cards):
    spec, box, split, gpus = on_cards
    pool = memory.pool(box, spec, split, gpus=gpus)
    rows = memory_tables.parts(pool)
    assert min(row["GiB"] for row in rows) >= 0
    for rank in pool.ranks:
        own = [row for row in rows if row["rank"] == f"rank {rank.rank}"]
        assert sum(row["GiB"] for row in own) == pytest.approx(rank.budget.requested_bytes / GIB, abs=0.02)
        assert len({row["part"] for row in own}) == len(own)
    # The bigger card's space that the smaller one does not let it use.
    left = {row["rank"]: row["GiB"] for row in rows if row["part"] == "KV space left over"}
    assert left["rank 0"] > 6 and left["rank 1"] < 0.01


def test_capacity_counts_whole_requests_besides_the_null_block():
    box = params.load(ROOT / "params" / "a100-x8-glm53.yml")
    rows = {row["request, tokens"]: row for row in memory_tables.capacity(box, memory.model_spec("glm-5.3"), (41, 37))}
    # 11,398 blocks of 64, one of them null: 128K take 2048 blocks, five are resident; 512K take 8192, one is.
    assert rows[131_072]["blocks"] == 2048 and rows[131_072]["resident at once"] == 5 and rows[131_072]["as vLLM logs it"] == 5.57
    assert rows[524_288]["resident at once"] == 1 and rows[1024]["resident at once"] == 11_397 // 16 and max(rows) == 524_288
    assert [row["resident at once"] for row in rows.values()] == sorted((row["resident at once"] for row in rows.values()), reverse=True)


@pytest.mark.parametrize("longest", [1, 5, 1023, 1024, 1025, 2048, 8192])
def test_capacity_ends_with_the_longest_request(setup, longest):
    spec, box, split = setup("smollm2-135m-instruct", max_model_len=longest)
    lengths = [row["request, tokens"] for row in memory_tables.capacity(box, spec, split)]
    assert lengths[-1] == longest and lengths == sorted(set(lengths))


def test_capacity_and_what_if_take_the_cards_memory(on_cards):
    spec, box, split, gpus = on_cards
    whole = memory.pool(box, spec, split, gpus=gpus)
    assert memory_tables.capacity(box, spec, split, gpus)[-1]["as vLLM logs it"] == round(whole.max_concurrency, 2)
    rows = memory_tables.what_if(box, spec, split, gpus)
    assert rows[0]["pool tokens"] == whole.pool_tokens and rows[0]["change"] == "as it is"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_what_if_changes_one_thing_a_row(name, draft_tokens, setup):
    spec, box, split = setup(name, draft_tokens=draft_tokens)
    rows = memory_tables.what_if(box, spec, split)
    names = [row["change"] for row in rows]
    assert names[0] == "as it is" and len(set(names)) == len(names)
    assert ("without drafting" in names) == bool(spec.mtp_layers and draft_tokens)
    by_name = {row["change"]: row["pool tokens"] for row in rows}
    if "without drafting" in names:
        # The draft layer lies on the last stage; where another one binds, nothing is gained.
        assert by_name["without drafting"] > by_name["as it is"] if rows[0]["binding rank"] == len(split) - 1 else by_name["without drafting"] > 0
    fp8 = [tokens for change, tokens in by_name.items() if "fp8" in change]
    assert len(fp8) == 1 and fp8[0] > by_name["as it is"]
    assert all(value >= 0 for value in numbers(rows))


def test_what_if_shows_a_refusal_in_its_row_and_goes_on(setup):
    # Another layout over three cards that are too small for it is a row, not the end of the table.
    spec, box, _ = setup("smollm2-135m-instruct", kv_cache_gib_per_rank=None)
    rows = memory_tables.what_if(box, spec, (10, 10, 10), Gpus((4 * GIB,) * 3))
    assert rows[0]["pool tokens"] and all(row["pool tokens"] is not None or "refused: " in str(row["B per token there"]) for row in rows)


def test_document_holds_what_the_command_prints(on_cards):
    spec, box, split, gpus = on_cards
    found = json.loads(json.dumps(memory_tables.document(memory.pool(box, spec, split, gpus=gpus))))
    assert [row["rank"] for row in found] == [0, 1]
    for row in found:
        assert row["available_gib"] == pytest.approx(row["available_kv_bytes"] / GIB, abs=0.01) and row["blocks"] > 0
        assert row["budget"]["evidence"] == "estimated" and sum(row["weights_by_component_bytes"].values()) == row["weights_bytes"]


# --- beside a boot log


def log_of(name):
    places = [ROOT.parent / "shared" / "captures" / "h200-boot"]
    file = next((place / name for place in places if (place / name).is_file()), None)
    if file is None:
        pytest.skip(f"{name} is not beside this checkout")
    return bootlog.parse(file.read_text(encoding="utf-8", errors="replace"))


def test_the_dense_models_ledger_beside_its_log(changed):
    from test_budget import DENSE_8B

    from fieldbook import configs

    spec, log = configs.read(DENSE_8B, "dense"), log_of("dense-8b-shape-tp1.log")
    box = with_engine(
        changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=None, dtype="bfloat16", max_model_len=32_768, max_num_seqs=1024,
        max_num_batched_tokens=8192, gpu_memory_utilization=0.92, enforce_eager=False,
    )  # fmt: skip
    pool = memory.pool(box, spec, (32,), gpus=Gpus((round(139.80 * GIB),)))
    rows = {row["quantity"]: row for row in memory_tables.after_launch(pool, log)}
    assert abs(rows["rank 0: weights, GiB"]["residual"]) <= 0.015  # tables among them
    # 32 layers x 2 x 8 x 128 x 2 B x 16 = 2 MiB a block: what the log's 111.05 GiB make is the log's pool, to its rounding.
    told = log.available_kv_gib[0]
    given = memory.pool(with_engine(box, available_kv_gib=[told]), spec, (32,))
    assert given.pool_tokens == pytest.approx(log.pool_tokens, rel=0.0001)
    assert rows["KV pool, tokens"]["predicted"] == pytest.approx(log.pool_tokens, rel=0.005)
    # The next run of this box starts from what this log told, and comes to its space but for two decimals.
    terms = tuple(LoggedTerms(**row) for row in memory_tables.logged_terms(log, 1))
    again = memory.pool(box, spec, (32,), gpus=Gpus((round(139.80 * GIB),), terms))
    assert again.ranks[0].available_kv_bytes / GIB == pytest.approx(told, abs=0.05) and again.ranks[0].budget.evidence != "estimated"


def test_two_stages_sharing_a_card_beside_their_log(changed):
    """2 GiB given to each of two stages of 4 and 8 sparse layers, whatever the card has: 226,496 tokens."""
    from test_budget import DSA_12

    from fieldbook import configs

    spec, log = configs.read(DSA_12, "dsa"), log_of("dsa-pp2-4-8-stock.log")
    box = with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=2, dtype="bfloat16", max_model_len=8192)
    pool = memory.pool(box, spec, (4, 8))
    rows = {row["quantity"]: row for row in memory_tables.after_launch(pool, log)}
    assert (pool.pool_tokens, pool.blocks, pool.binding_rank) == (226_496, 3539, 1) and rows["KV pool, tokens"]["residual"] == 0
    # Loading took 0.84 and 1.90 GiB. Rotary table and top-k buffer are 0.02 of the residual; the other 0.03 are not explained, the same on both.
    assert [rows[f"rank {rank}: weights, GiB"]["boot log"] for rank in (0, 1)] == [0.84, 1.9]
    assert all(0 <= rows[f"rank {rank}: weights, GiB"]["residual"] <= 0.06 for rank in (0, 1))


def test_what_the_log_does_not_tell_is_empty(on_cards):
    spec, box, split, gpus = on_cards
    pool = memory.pool(box, spec, split, gpus=gpus)
    rows = memory_tables.after_launch(pool, bootlog.parse(""), {0: 20 * GIB})
    assert rows[0]["boot log"] is None and rows[0]["residual"] is None and rows[0]["predicted"] == pool.pool_tokens
    nvml = [row for row in rows if "NVML" in row["quantity"]]
    assert len(nvml) == 1 and nvml[0]["boot log"] == 20.0 and math.isfinite(nvml[0]["residual"])
    assert memory_tables.logged_terms(bootlog.parse(""), 2) == []


def test_with_engine_changes_only_what_it_is_told(changed):
    box = changed()
    other = with_engine(box, max_model_len=7)
    assert other.engine.max_model_len == 7 and box.engine.max_model_len == 2048 and other.model == box.model
