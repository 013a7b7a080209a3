"""Memory accounting: every expected number is worked by hand in a comment, or adds up what is independent of the module under test."""

import dataclasses
import itertools
import json
import random
import struct
import time

import pytest
from conftest import ROOT

from fieldbook import kv, memory, paths, weights
from fieldbook.budget import Gpus
from fieldbook.errors import BadInput
from fieldbook.memory_tables import with_engine

GIB = 1_073_741_824
LAYER, EMBEDDING, NORM = 3_540_096, 28_311_552, 576  # parameters of SmolLM2-135M


@pytest.fixture
def smollm2():
    return memory.model_spec("smollm2-135m-instruct")


@pytest.fixture
def glm():
    return memory.model_spec("glm-5.3")


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """Put a config.json under data/models/<name>/ of a checkout of its own."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "params").mkdir()
    monkeypatch.setenv("FIELDBOOK_ROOT", str(tmp_path))
    memory.model_spec.cache_clear()

    def write(name, content):
        file = paths.model_config_dir(name) / "config.json"
        file.parent.mkdir(parents=True)
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return name

    yield write
    memory.model_spec.cache_clear()


@pytest.fixture
def on_gpus(changed):
    """Params of the default box's model on GPUs: nothing is given, the space is what is left of the cards."""

    def make(**engine):
        return with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=None, dtype="bfloat16", **engine)

    return make


def refused(call, *words):
    """The call is refused with one line that holds all of `words`, and no bare negative number."""
    with pytest.raises(BadInput) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line and len(line) < 500 and " -" not in line.replace(" - ", " ")
    assert [word for word in words if word not in line] == [], line
    return line


# --- shape and weights


def test_parameters_of_a_layer_tensor_by_tensor(smollm2):
    # q 576x576, k and v 192x576 (3 heads of 64), o 576x576, gate, up and down 1536x576 each, two norms of 576.
    by_hand = 576 * 576 + 2 * 192 * 576 + 576 * 576 + 3 * 1536 * 576 + 2 * 576
    assert by_hand == LAYER
    assert [weights.layer_bytes(layer, smollm2) for layer in smollm2.layers] == [4 * LAYER] * 30  # stored in float32
    assert memory.active_parameters(smollm2) == 30 * LAYER


def test_heads_that_tensor_parallelism_has_to_divide(smollm2, glm):
    assert memory.heads(smollm2) == (9, 3) and memory.heads(glm) == (64, 1)  # one latent for all heads
    assert memory.heads(memory.model_spec("qwen3.8-flash-next")) == (24, 2)
    assert memory.heads(dataclasses.replace(smollm2, layers=())) == (1, 1)


def test_checkpoint_of_smollm2_is_its_published_parameter_count(smollm2):
    # 30 x 3,540,096 + 28,311,552 + 576 = 134,515,008: the "135M" of its name, in float32 538,060,032 bytes.
    assert memory.checkpoint_bytes(smollm2, "float32") == 134_515_008 * 4 == 538_060_032
    assert memory.checkpoint_bytes(smollm2, "bfloat16") == 269_030_016 and memory.checkpoint_bytes(smollm2) == 538_060_032


def test_checkpoint_equals_the_converted_file_when_there_is_one(smollm2):
    file = ROOT / "data" / "models" / "cache" / "smollm2-135m-instruct" / "model.safetensors"
    if not file.is_file():
        pytest.skip("the model has not been converted on this machine")
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    tensors = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    assert memory.checkpoint_bytes(smollm2, "float32") == sum(end - start for start, end in tensors)


def test_weights_by_rank(smollm2, changed):
    def ranks(*split):
        return [stage.bytes for stage in memory.rank_weights_bytes(smollm2, changed(), split, 1)]

    # Tied: the embedding lies on the first stage and once more, as lm_head, on the last; alone on one rank it is held once.
    assert ranks(15, 15) == [(15 * LAYER + EMBEDDING) * 4, (15 * LAYER + EMBEDDING + NORM) * 4] == [325_651_968, 325_654_272]
    assert ranks(12, 10, 8)[1] == 10 * LAYER * 4
    assert ranks(30) == [(30 * LAYER + EMBEDDING + NORM) * 4] == [memory.checkpoint_bytes(smollm2, "float32")]


def test_untied_embeddings_count_twice_on_one_rank(smollm2):
    untied = dataclasses.replace(smollm2, tie_word_embeddings=False)
    assert memory.checkpoint_bytes(untied, "bfloat16") - memory.checkpoint_bytes(smollm2, "bfloat16") == 2 * EMBEDDING


def test_weights_of_a_rank_shrink_with_tensor_parallelism(smollm2, changed):
    # TP divides q, k, v, o, gate, up, down and the embedding; norms are replicated. At TP 3 all of them divide evenly.
    norms = 30 * 2 * 576 + 576
    ledger = memory.pool(changed(), smollm2, [30], tensor_parallel_size=3).ranks[0]
    assert ledger.weights_bytes == ((134_515_008 - norms) // 3 + norms) * 4


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "glm-5.3", "qwen3.8-flash-next"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_stages_add_up_to_the_checkpoint_and_what_is_held_twice(name, drafts, changed):
    spec, params = memory.model_spec(name), with_engine(changed({"engine.dtype": "bfloat16"}), draft_tokens=drafts)
    whole = memory.checkpoint_bytes(spec, "bfloat16")
    embedding = spec.vocab_size * spec.hidden_size * 2
    mtp = sum(weights.rank_bytes(one, spec, 1) for one in weights.mtp_components(spec)) if drafts else 0
    rng = random.Random(name)
    for stages in (1, 2, 3, 5):
        cuts = sorted(rng.sample(range(1, spec.num_hidden_layers), stages - 1))
        split = [b - a for a, b in itertools.pairwise([0, *cuts, spec.num_hidden_layers])]
        found = memory.rank_weights_bytes(spec, params, split, 1)
        # Qwen4Exp builds embedding and head on every stage; tied ones lie on both ends; a draft model cannot reach the first stage's embedding.
        copies = 2 * (stages - 1) if spec.embeddings_on_every_stage else int(stages > 1 and spec.tie_word_embeddings)
        copies += bool(mtp and stages > 1)
        assert sum(stage.bytes for stage in found) == whole + mtp + copies * embedding, (split, copies)
        assert all(sum(stage.by_component.values()) == stage.bytes for stage in found)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "glm-5.3", "qwen3.8-flash-next"])
def test_sums_kept_for_the_search_are_those_of_the_weights_module(name, changed):
    spec = memory.model_spec(name)
    n = spec.num_hidden_layers
    for tp, drafts, dtype, split in itertools.product((1, 2), (0, 1), ("bfloat16", "float32"), ((n,), (n - 7, 7), (1, n - 3, 2))):
        if memory.heads(spec)[0] % tp:
            continue
        params = with_engine(changed(), dtype=dtype, draft_tokens=drafts)
        expected = weights.rank_weights(spec, split, tensor_parallel_size=tp, with_mtp=drafts > 0, dtype=dtype)
        assert memory.rank_weights_bytes(spec, params, split, tp) == expected


def test_a_decode_step_reads_the_experts_of_one_token(smollm2, glm):
    # Dense: everything is read, the tied head once.
    assert memory.step_bytes(smollm2, "float32") == memory.checkpoint_bytes(smollm2, "float32")
    # GLM: 75 x 256 experts, of which 8 are read; the rest of the layers whole; lm_head and final norm.
    expert = 3 * 6144 * 2048 * (0.5 + 2 / 128 + 0.5 / 128)
    layers = sum(weights.layer_rank_bytes(glm, tensor_parallel_size=1))
    assert memory.step_bytes(glm) == pytest.approx(layers - 75 * 248 * expert + 154_880 * 6144 * 2 + 6144 * 2, rel=1e-6)
    parameters = sum(one.parameters for layer in glm.layers for one in weights.components(layer, glm))
    assert memory.active_parameters(glm) == parameters - 75 * 248 * 3 * 6144 * 2048


# --- the pool


@pytest.mark.parametrize(("tp", "dtype", "expected"), [(1, "float32", 1536), (1, "bfloat16", 768), (3, "float32", 512)])
def test_kv_bytes_per_token_per_layer(smollm2, changed, tp, dtype, expected):
    # 2 (K and V) x heads of this rank x 64 x bytes: 3 heads, then 1 head; still 1 where TP exceeds the KV heads (vLLM refuses 9 ranks for the MLP's 1536).
    assert kv.kv_bytes_per_token(smollm2.layers[0].attention, 9, "float32") == 512
    refused(lambda: memory.pool(changed(), smollm2, [30], tensor_parallel_size=9), "mlp.gate_proj: 1536 cannot be divided over 9")
    found = memory.pool(changed({"engine.dtype": dtype}), smollm2, [10, 20], tensor_parallel_size=tp)
    assert [rank.kv_bytes_per_token for rank in found.ranks] == [10 * expected, 20 * expected]
    assert [rank.kv_bytes_per_block for rank in found.ranks] == [10 * expected * 128, 20 * expected * 128]


@pytest.mark.parametrize(
    ("split", "blocks", "tokens", "binding"),
    [
        # A block is 128 tokens. 30 layers x 1536 B x 128 = 5,898,240 B: 1 GiB holds 182.04, so 182 blocks of 128 = 23,296 tokens.
        ((30,), 182, 23_296, 0),
        # 15 x 1536 x 128 = 2,949,120 B: 364.08 -> 364 x 128 = 46,592. Both ranks alike: the first one is named.
        ((15, 15), 364, 46_592, 0),
        # 20 x 1536 x 128 = 3,932,160 B: 273.07 -> 273 x 128 = 34,944; the ten layers of rank 1 would hold 546 blocks.
        ((20, 10), 273, 34_944, 0),
        # 18 x 1536 x 128 = 3,538,944 B: 303.4 -> 303 x 128 = 38,784, and rank 1 is the one that binds.
        ((12, 18), 303, 38_784, 1),
        # 10 x 1536 x 128 = 1,966,080 B: 546.13 -> 546 x 128 = 69,888.
        ((10, 10, 10), 546, 69_888, 0),
        ((5, 11, 14), 390, 49_920, 2),  # 14 x 196,608 = 2,752,512 B: 390.1
        ((14, 2, 14), 390, 49_920, 0),  # a tie of the outer two
    ],
)
def test_pool_of_smollm2_with_one_gib_per_rank(smollm2, changed, split, blocks, tokens, binding):
    found = memory.pool(changed(), smollm2, split)
    assert (found.blocks, found.pool_tokens, found.binding_rank, found.block_size_tokens) == (blocks, tokens, binding, 128)
    # 2048 tokens are 16 blocks.
    assert found.blocks_per_request == 16 and found.max_concurrency == blocks / 16
    assert [r.layers for r in found.ranks] == list(split) and [r.rank for r in found.ranks] == list(range(len(split)))
    assert all(r.kv_bytes_per_token == r.layers * 1536 and r.kv_bytes_per_block == r.layers * 196_608 for r in found.ranks)
    assert all(r.available_kv_bytes == GIB and r.budget is None and r.blocks == GIB // r.kv_bytes_per_block for r in found.ranks)


def test_unequal_spaces_the_smallest_block_count_binds(smollm2, changed):
    # Rank 0: 3 GiB / (20 x 196,608) = 819.2; rank 1: 1 GiB / (10 x 196,608) = 546.1, although it has fewer bytes per token.
    found = memory.pool(with_engine(changed(), kv_cache_gib_per_rank=None, available_kv_gib=[3.0, 1.0]), smollm2, (20, 10))
    assert [r.blocks for r in found.ranks] == [819, 546]
    assert (found.binding_rank, found.pool_tokens) == (1, 546 * 128)


def test_space_is_cut_to_whole_blocks_of_each_rank(smollm2, changed):
    one = 30 * 1536 * 128
    for space, blocks in ((20 * one, 20), (20 * one - 1, 19), (21 * one - 1, 20)):
        params = with_engine(changed(), kv_cache_gib_per_rank=None, available_kv_gib=[space / GIB], max_model_len=128)
        assert memory.pool(params, smollm2, [30]).blocks == blocks


@pytest.mark.parametrize(
    ("blocks", "block", "max_model_len", "expected"),
    [
        (182, 128, 2048, 23_296),  # 182 x 128
        # 2000 tokens take ceil(15.625) = 16 blocks: 182 / 16 = 11.375 requests x 2000 = 22,750, not 23,296.
        (182, 128, 2000, 22_750),
        (364, 128, 2000, 45_500),
        # 100 tokens take one whole block: 182 requests x 100.
        (182, 128, 100, 18_200),
        # 129 tokens take two: 91 x 129 = 11,739.
        (182, 128, 129, 11_739),
        # 1000 tokens at 16 are 63 blocks: 1381 / 63 = 21.9206... x 1000 = 21,920.6, cut to 21,920.
        (1381, 16, 1000, 21_920),
        (1381, 16, 2048, 22_096),  # a published boot log: 1381 blocks of 16
    ],
)
def test_tokens_as_vllm_counts_them(smollm2, changed, blocks, block, max_model_len, expected):
    # One layer of 1536 B a token; the space is exactly that many blocks.
    spec = dataclasses.replace(smollm2, layers=smollm2.layers[:1])
    space = {"kv_cache_gib_per_rank": None, "available_kv_gib": [blocks * block * 1536 / GIB]}
    found = memory.pool(with_engine(changed(), block_size_tokens=block, max_model_len=max_model_len, **space), spec, [1])
    assert (found.blocks, found.pool_tokens) == (blocks, expected)
    assert kv.pool_tokens(blocks, -(-max_model_len // block), max_model_len) == expected


def test_pool_with_a_longest_request_that_is_no_multiple_of_the_block(smollm2, changed):
    found = memory.pool(changed({"engine.max_model_len": 2000}), smollm2, (15, 15))
    assert (found.blocks, found.pool_tokens, found.max_concurrency) == (364, 45_500, 22.75)


def test_one_request_and_the_null_block_have_to_fit(smollm2, changed):
    one = 30 * 1536 * 128

    def pool(space, **more):
        return memory.pool(with_engine(changed(), kv_cache_gib_per_rank=None, available_kv_gib=[space / GIB]), smollm2, [30], **more)

    # A request of 2048 tokens takes 16 blocks, and one more never holds tokens.
    assert pool(17 * one).blocks == 17
    words = ("rank 0 has room for 16 KV blocks of 128 tokens", "2048 tokens needs 16 and the null block", "engine.max_model_len to 1920")
    refused(lambda: pool(17 * one - 1), *words)
    refused(lambda: pool(1), "rank 0 has room for 0 KV blocks", "free memory on it")
    assert pool(17 * one - 1, must_fit=False).blocks == 16 and pool(1, must_fit=False).pool_tokens == 0


def test_block_size_by_device_kind_and_params(smollm2, glm, changed):
    assert memory.pool(changed(), smollm2, [30]).block_size_tokens == 128
    assert memory.pool(changed({"engine.device": "cuda"}), smollm2, [30]).block_size_tokens == 16
    assert memory.pool(changed({"engine.device": "cuda", "engine.block_size_tokens": 48}), smollm2, [30]).block_size_tokens == 48
    assert memory.pool(with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=9), glm, [78]).block_size_tokens == 64
    with pytest.raises(BadInput, match="0.99"):
        memory.pool(changed({"engine.vllm_release": "0.99"}), smollm2, [30])


def test_cache_dtype_follows_server_then_checkpoint(smollm2, changed):
    scheme = dataclasses.replace(memory.model_spec("glm-5.3").quantization, kv_cache_scheme="fp8")
    quantized = dataclasses.replace(smollm2, quantization=scheme)
    assert memory.cache_dtype(smollm2, changed()) == "float32" and memory.cache_dtype(quantized, changed()) == "auto"
    fp8 = changed({"engine.kv_cache_dtype": "fp8"})
    assert memory.cache_dtype(smollm2, fp8) == memory.cache_dtype(quantized, fp8) == "fp8"
    # 30 x 2 x 3 x 64 x 1 B.
    assert memory.pool(fp8, smollm2, [30]).ranks[0].kv_bytes_per_token == memory.pool(changed(), quantized, [30]).ranks[0].kv_bytes_per_token == 11_520


def test_recurrent_state_lies_in_the_servers_dtype(changed):
    """The convolution's part of it; the config names float32 for the rest, whatever the server uses."""
    spec = memory.model_spec("qwen3.8-flash-next")
    params = with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=40)
    # 36 layers: 48 x 128 x 128 in float32 and 3 x 10,240 channels in the dtype; layer 1 has a short convolution besides: 9 x 10,240.
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        rank = memory.pool(with_engine(params, dtype=dtype), spec, [48], must_fit=False).ranks[0]
        assert rank.state_bytes == 36 * (48 * 128 * 128 * 4 + 3 * 10_240 * width) + 9 * 10_240 * width


def test_more_space_never_gives_fewer_tokens(glm, smollm2, changed):
    rng = random.Random(4)
    flash = memory.model_spec("qwen3.8-flash-next")
    base = with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=None, dtype="bfloat16")
    for spec, split in ((smollm2, (11, 19)), (glm, (41, 37)), (flash, (16, 16, 16))):
        last, space = -1, [0.01] * len(split)
        for _ in range(25):
            space[rng.randrange(len(split))] += rng.uniform(0.001, 3)
            found = memory.pool(with_engine(base, available_kv_gib=list(space)), spec, split, must_fit=False)
            assert found.pool_tokens >= last and found.blocks == min(rank.blocks for rank in found.ranks)
            assert found.ranks[found.binding_rank].blocks == found.blocks
            assert all(found.blocks * rank.kv_bytes_per_block <= rank.available_kv_bytes for rank in found.ranks)
            last = found.pool_tokens
        assert last > 0


def test_eighty_layers_take_less_than_fifty_milliseconds_a_layout(glm, changed):
    params = with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=40)
    start = time.process_time()
    for first in range(20, 60):
        memory.pool(params, glm, [first, 78 - first])
    assert (time.process_time() - start) / 40 < 0.05


# --- GPUs


def test_terms_of_the_budget_add_up_on_every_rank(smollm2, on_gpus):
    found = memory.pool(on_gpus(), smollm2, (12, 18), gpus=Gpus((24 * GIB, 24 * GIB)))
    for rank, ledger in enumerate(found.ranks):
        b = ledger.budget
        assert b.total_bytes == 24 * GIB and b.requested_bytes == -(-24 * GIB * 9 // 10) and b.weights_bytes == ledger.weights_bytes
        assert b.requested_bytes == b.weights_bytes + b.buffers_bytes + b.non_torch_bytes + b.activation_bytes + b.graphs_bytes + ledger.available_kv_bytes
        # Rotary table: 8192 positions x 64 x 2 B.
        assert b.buffers_bytes == 8192 * 64 * 2 and b.evidence == "estimated", rank


def test_the_smaller_of_two_unequal_cards_binds(smollm2, on_gpus):
    for sizes, binding in (((24, 16), 1), ((16, 24), 0), ((24, 24.1), 0)):
        found = memory.pool(on_gpus(), smollm2, (15, 15), gpus=Gpus(tuple(int(size * GIB) for size in sizes)))
        assert found.binding_rank == binding
        assert found.ranks[binding].available_kv_bytes < found.ranks[1 - binding].available_kv_bytes


def test_tensor_parallel_ranks_take_the_smallest_of_their_cards(glm, changed):
    params = with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=None, dtype="bfloat16")
    cards = [80, 80, 72, 80, 80, 80, 80, 96]
    found = memory.pool(params, glm, (39, 39), tensor_parallel_size=4, gpus=Gpus(tuple(size * GIB for size in cards)))
    assert [rank.budget.total_bytes // GIB for rank in found.ranks] == [72, 80]
    # Cards beyond the layout's ranks are not looked at.
    more = memory.pool(params, glm, (39, 39), tensor_parallel_size=4, gpus=Gpus((*(size * GIB for size in cards), 2 * GIB)))
    assert more == found


def test_cards_whose_memory_is_unknown_are_one_line(smollm2, on_gpus):
    for gpus in (None, Gpus(()), Gpus((24 * GIB,)), Gpus((24 * GIB, None)), Gpus((None, 24 * GIB)), Gpus((24 * GIB, 0)), Gpus((24 * GIB, -1))):
        known = len([size for size in gpus.total_bytes if size and size > 0]) if gpus else 0
        line = refused(lambda gpus=gpus: memory.pool(on_gpus(), smollm2, (15, 15), gpus=gpus), "engine.available_kv_gib: missing", "for 2 ranks")
        assert f"{known} GPUs whose memory is known" in line
    # The first one is unknown: the third is not taken in its place.
    refused(lambda: memory.pool(on_gpus(), smollm2, (15, 15), gpus=Gpus((None, 24 * GIB, 24 * GIB))), "1 GPUs whose memory is known")


@pytest.mark.parametrize("must_fit", [True, False])
def test_weights_larger_than_the_card_name_rank_and_contents(glm, changed, must_fit):
    params = with_engine(changed({"engine.device": "cuda"}), kv_cache_gib_per_rank=None, dtype="bfloat16")
    # 39 layers at TP4: 47.7 GiB on rank 0; 52.8 with lm_head and without drafting 50.6 on rank 1. 40 x 0.9 = 36 GiB.
    line = refused(
        lambda: memory.pool(params, glm, (39, 39), tensor_parallel_size=4, gpus=Gpus((40 * GIB,) * 8), must_fit=must_fit),
        "rank 0: no KV space is left: 47.", "GiB of weights", "36.00 GiB", "engine.gpu_memory_utilization 0.9", "40.00 GiB", "fewer layers or more ranks",
    )  # fmt: skip
    assert "estimated" in line
    # Only the second card is too small: that rank is named.
    refused(
        lambda: memory.pool(params, glm, (39, 39), tensor_parallel_size=4, gpus=Gpus((80 * GIB,) * 4 + (40 * GIB,) * 4), must_fit=must_fit),
        "rank 1: no KV space is left",
    )


def test_space_that_nearly_reaches_is_no_negative_number(smollm2, on_gpus):
    """From a card of 1 MiB to one that suffices: either one line or a pool that holds a request."""
    outcomes = set()
    for mib in range(1, 3000, 7):
        try:
            found = memory.pool(on_gpus(), smollm2, (15, 15), gpus=Gpus((mib * 2**20,) * 2))
        except BadInput as error:
            outcomes.add(str(error)[:14])  # "rank 0: no KV " or "rank 0 has roo"
            assert "rank 0" in str(error) and "\n" not in str(error) and "-" not in str(error)
            continue
        assert found.pool_tokens >= 2048 and min(rank.available_kv_bytes for rank in found.ranks) > 0
        outcomes.add("fits")
    assert "fits" in outcomes and len(outcomes) == 3  # and: no space at all; room for too few blocks


def test_all_of_the_card_may_be_asked_for(smollm2, on_gpus):
    whole = memory.pool(on_gpus(gpu_memory_utilization=1.0), smollm2, (30,), gpus=Gpus((24 * GIB,))).ranks[0]
    assert whole.budget.requested_bytes == 24 * GIB and whole.available_kv_bytes < 24 * GIB
    refused(lambda: memory.pool(on_gpus(gpu_memory_utilization=1e-9), smollm2, (30,), gpus=Gpus((24 * GIB,))), "rank 0: no KV space", "1e-09")


@pytest.mark.parametrize("split", [(0, 30), (30, 0), (15, 14), (31,), (), (-1, 31), (15, 15, 0)])
def test_splits_that_cannot_be_are_one_line(smollm2, changed, on_gpus, split):
    refused(lambda: memory.pool(changed(), smollm2, split), "partition") if split != (-1, 31) else None
    with pytest.raises(BadInput, match="partition"):
        memory.pool(on_gpus(), smollm2, split, gpus=Gpus((24 * GIB,) * 3))


def test_given_spaces_are_one_for_each_stage_or_one_for_all(smollm2, changed):
    def pool(given, split):
        return memory.pool(with_engine(changed(), kv_cache_gib_per_rank=None, available_kv_gib=given), smollm2, split)

    assert [rank.available_kv_bytes for rank in pool([1.5], (10, 10, 10)).ranks] == [1.5 * GIB] * 3
    assert [rank.available_kv_bytes for rank in pool([1.5, 2.0], (10, 20)).ranks] == [1.5 * GIB, 2 * GIB]
    for given, split in (([1.5, 2.0], (30,)), ([1.5, 2.0], (10, 10, 10)), ([1.0] * 3, (15, 15)), ([1.5, 2.0], (10, 10, 5, 5))):
        refused(lambda given=given, split=split: pool(given, split), f"got {len(given)} values for {len(split)} stages")


@pytest.mark.parametrize("space", [float("inf"), float("nan"), 0.0, 1e300])
def test_given_spaces_that_are_no_amount_are_one_line(smollm2, changed, space):
    params = with_engine(changed(), kv_cache_gib_per_rank=None, available_kv_gib=[1.0, space])
    for must_fit in (True, False):
        refused(lambda must_fit=must_fit: memory.pool(params, smollm2, (15, 15), must_fit=must_fit), "engine.available_kv_gib: got [1.0,", "expected GiB")


@pytest.mark.parametrize(
    "engine",
    [
        {"max_model_len": 10**12}, {"max_num_batched_tokens": 10**15}, {"max_num_seqs": 10**12}, {"block_size_tokens": 10**9},
        {"vllm_release": "0.1"}, {"kv_cache_dtype": "fp8_ds_mla"}, {"kv_cache_dtype": "nvfp4_ds_mla"},
    ],
)  # fmt: skip
def test_absurd_engines_are_one_line(smollm2, on_gpus, engine):
    refused(lambda: memory.pool(on_gpus(**engine), smollm2, (15, 15), gpus=Gpus((24 * GIB,) * 2)))


@pytest.mark.parametrize("tp", [0, -1, 2, 4, 7, 10**6])
def test_tensor_parallel_sizes_that_do_not_divide_are_one_line(smollm2, changed, on_gpus, tp):
    with pytest.raises(BadInput) as caught:
        memory.pool(with_engine(changed(), kv_cache_gib_per_rank=1), smollm2, (15, 15), tensor_parallel_size=tp) if tp else memory.rank_weights_bytes(
            smollm2, changed(), (15, 15), 0
        )
    assert "\n" not in str(caught.value)


# --- reading configs


MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def test_defaults_of_a_sparse_config(config_of):
    spec = memory.model_spec(config_of("tiny", MINIMAL))
    # Without num_key_value_heads every head has its own; without head_dim it is hidden size over heads; embeddings are not tied.
    assert (spec.layers[0].attention.kv_heads, spec.layers[0].attention.head_dim, spec.tie_word_embeddings) == (4, 16, False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not"),
        ({**MINIMAL, "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not covered"),
        ({**MINIMAL, "quantization_config": {"bits": 4}}, "quant"),
        ({k: v for k, v in MINIMAL.items() if k != "vocab_size"}, "vocab_size"),
        ({}, "architecture"),
    ],
)
def test_a_wrong_config_gets_one_line_that_names_the_file(config_of, content, words):
    config_of("odd", content)
    with pytest.raises(BadInput, match=words) as caught:
        memory.model_spec("odd")
    assert "odd" in str(caught.value) and "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_model_names_those_there_are(config_of):
    config_of("tiny", MINIMAL)
    with pytest.raises(BadInput, match="got 'other'.*known models: tiny"):
        memory.model_spec("other")
