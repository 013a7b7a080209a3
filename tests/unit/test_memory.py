"""Memory accounting: every expected number is worked by hand in a comment, or adds up tensors one by one."""

import json
import struct

import pytest
from conftest import ROOT

from fieldbook import memory, paths
from fieldbook.errors import BadInput

GIB = 1_073_741_824


@pytest.fixture
def smollm2():
    return memory.model_spec("smollm2-135m-instruct")


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


def pool(spec, split, gib=1, dtype_bytes=4, tp=1, max_model_len=2048, block=128):
    spaces = gib if isinstance(gib, list) else [gib] * len(split)
    return memory.predict_pool(
        spec, list(split), [int(g * GIB) for g in spaces], dtype_bytes=dtype_bytes, tensor_parallel_size=tp, max_model_len=max_model_len, block_size=block
    )


def test_shape_of_smollm2(smollm2):
    assert (smollm2.num_hidden_layers, smollm2.hidden_size, smollm2.intermediate_size) == (30, 576, 1536)
    assert (smollm2.num_attention_heads, smollm2.num_key_value_heads, smollm2.head_dim) == (9, 3, 64)
    assert (smollm2.vocab_size, smollm2.tie_word_embeddings, smollm2.max_position_embeddings) == (49152, True, 8192)


def test_parameters_of_a_layer_tensor_by_tensor(smollm2):
    # q 576x576, k and v 192x576 (3 heads of 64), o 576x576, gate, up and down 1536x576 each, two norms of 576.
    by_hand = 576 * 576 + 2 * 192 * 576 + 576 * 576 + 3 * 1536 * 576 + 2 * 576
    assert by_hand == 3_540_096
    assert memory.layer_parameters(smollm2) == by_hand
    assert memory.embedding_parameters(smollm2) == 49_152 * 576 == 28_311_552


def test_a_head_size_that_is_not_hidden_size_over_heads(smollm2):
    import dataclasses

    # 4 heads of 32 on a hidden size of 64 (as some models have): q and o are 64x128, k and v 64x64.
    odd = dataclasses.replace(smollm2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=100)
    assert memory.layer_parameters(odd) == 64 * 128 + 2 * 64 * 64 + 128 * 64 + 3 * 64 * 100 + 2 * 64


def test_checkpoint_of_smollm2_is_its_published_parameter_count(smollm2):
    # 30 x 3,540,096 + 28,311,552 + 576 = 134,515,008: the "135M" of its name, in float32 538,060,032 bytes.
    assert memory.checkpoint_bytes(smollm2, 4) == 134_515_008 * 4 == 538_060_032
    assert memory.checkpoint_bytes(smollm2, 2) == 269_030_016


def test_checkpoint_equals_the_converted_file_when_there_is_one(smollm2):
    file = ROOT / "data" / "models" / "cache" / "smollm2-135m-instruct" / "model.safetensors"
    if not file.is_file():
        pytest.skip("the model has not been converted on this machine")
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    tensors = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    assert memory.checkpoint_bytes(smollm2, 4) == sum(end - start for start, end in tensors)


def test_weights_by_rank(smollm2):
    layer, embedding, norm = 3_540_096, 28_311_552, 576
    # Tied: the embedding lies on the first stage and once more, as lm_head, on the last; alone on one rank it is held once.
    assert memory.rank_weights_bytes(smollm2, 15, True, False, 4) == (15 * layer + embedding) * 4 == 325_651_968
    assert memory.rank_weights_bytes(smollm2, 15, False, True, 4) == (15 * layer + embedding + norm) * 4 == 325_654_272
    assert memory.rank_weights_bytes(smollm2, 10, False, False, 4) == 10 * layer * 4
    assert memory.rank_weights_bytes(smollm2, 30, True, True, 4) == (30 * layer + embedding + norm) * 4


def test_untied_embeddings_count_twice_on_one_rank(smollm2):
    import dataclasses

    untied = dataclasses.replace(smollm2, tie_word_embeddings=False)
    assert memory.checkpoint_bytes(untied, 2) - memory.checkpoint_bytes(smollm2, 2) == 2 * 28_311_552


@pytest.mark.parametrize(
    ("tp", "dtype_bytes", "expected"),
    # 2 (K and V) x heads of this rank x 64 x bytes: 3 heads, 1 head, and still 1 head where TP exceeds the KV heads.
    [(1, 4, 1536), (1, 2, 768), (3, 4, 512), (9, 4, 512)],
)
def test_kv_bytes_per_token_per_layer(smollm2, tp, dtype_bytes, expected):
    assert memory.kv_bytes_per_token_per_layer(smollm2, tp, dtype_bytes) == expected


@pytest.mark.parametrize(
    ("split", "blocks", "tokens", "binding"),
    [
        # A block is 128 tokens. 30 layers x 1536 B x 128 = 5,898,240 B: 1 GiB holds 182.04, so 182 blocks of 128 = 23,296 tokens.
        ((30,), 182, 23_296, 0),
        # 15 x 1536 x 128 = 2,949,120 B: 364.08 -> 364 x 128 = 46,592.
        ((15, 15), 364, 46_592, 0),
        # 20 x 1536 x 128 = 3,932,160 B: 273.07 -> 273 x 128 = 34,944; the ten layers of rank 1 would hold 546 blocks.
        ((20, 10), 273, 34_944, 0),
        # 18 x 1536 x 128 = 3,538,944 B: 303.4 -> 303 x 128 = 38,784, and rank 1 is the one that binds.
        ((12, 18), 303, 38_784, 1),
        # 10 x 1536 x 128 = 1,966,080 B: 546.13 -> 546 x 128 = 69,888.
        ((10, 10, 10), 546, 69_888, 0),
        ((5, 11, 14), 390, 49_920, 2),  # 14 x 196,608 = 2,752,512 B: 390.1
    ],
)
def test_pool_of_smollm2_with_one_gib_per_rank(smollm2, split, blocks, tokens, binding):
    found = pool(smollm2, split)
    assert (found.blocks, found.pool_tokens, found.binding_rank) == (blocks, tokens, binding)
    # 2048 tokens are 16 blocks.
    assert found.max_concurrency == blocks / 16
    assert [r.layers for r in found.ranks] == list(split) and [r.rank for r in found.ranks] == list(range(len(split)))
    assert all(r.kv_bytes_per_token == r.layers * 1536 and r.kv_bytes_per_block == r.layers * 196_608 for r in found.ranks)


def test_unequal_spaces_the_smallest_block_count_binds(smollm2):
    # Rank 0: 3 GiB / (20 x 196,608) = 819.2; rank 1: 1 GiB / (10 x 196,608) = 546.1, although it has fewer bytes per token.
    found = pool(smollm2, (20, 10), gib=[3, 1])
    assert [r.blocks for r in found.ranks] == [819, 546]
    assert (found.binding_rank, found.pool_tokens) == (1, 546 * 128)


def test_space_is_cut_to_whole_blocks_of_each_rank(smollm2):
    one = 30 * 1536 * 128
    for space, blocks in ((20 * one, 20), (20 * one - 1, 19), (21 * one - 1, 20)):
        found = memory.predict_pool(smollm2, [30], [space], dtype_bytes=4, tensor_parallel_size=1, max_model_len=128, block_size=128)
        assert found.blocks == blocks


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
def test_tokens_as_vllm_counts_them(blocks, block, max_model_len, expected):
    assert memory.pool_tokens(blocks, block, max_model_len) == expected


def test_pool_with_a_longest_request_that_is_no_multiple_of_the_block(smollm2):
    found = pool(smollm2, (15, 15), max_model_len=2000)
    assert (found.blocks, found.pool_tokens, found.max_concurrency) == (364, 45_500, 22.75)


def test_one_request_and_the_null_block_have_to_fit(smollm2):
    one = 30 * 1536 * 128
    space = {"dtype_bytes": 4, "tensor_parallel_size": 1, "max_model_len": 2048, "block_size": 128}
    # A request of 2048 tokens takes 16 blocks, and one more never holds tokens.
    assert memory.predict_pool(smollm2, [30], [17 * one], **space).blocks == 17
    with pytest.raises(BadInput, match="rank 0 has room for 16 KV blocks of 128 tokens.*2048 tokens needs 16 and the null block.*max_model_len"):
        memory.predict_pool(smollm2, [30], [17 * one - 1], **space)


def test_spaces_and_stages_have_to_be_equally_many(smollm2):
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pool(smollm2, (15, 15), gib=[1])


def test_block_size_by_device_and_release():
    assert memory.block_size_tokens("cpu") == 128 and memory.block_size_tokens("cuda") == 16
    with pytest.raises(BadInput, match="0.99"):
        memory.block_size_tokens("cpu", "0.99")


def test_weights_of_a_rank_shrink_with_tensor_parallelism(smollm2):
    # TP divides q, k, v, o, gate, up, down and the embedding; norms are replicated. At TP 3 all of them divide evenly.
    norms = 30 * 2 * 576 + 576
    sharded = 134_515_008 - norms
    ledger = pool(smollm2, (30,), tp=3).ranks[0]
    assert ledger.weights_bytes == (sharded // 3 + norms) * 4


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
    assert (spec.num_key_value_heads, spec.head_dim, spec.tie_word_embeddings) == (4, 16, False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not"),
        ({**MINIMAL, "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not covered"),
        ({**MINIMAL, "quantization_config": {"bits": 4}}, "quantized"),
        ({k: v for k, v in MINIMAL.items() if k != "vocab_size"}, "vocab_size"),
        ({}, "architecture"),
    ],
)
def test_a_wrong_config_gets_one_line_that_names_the_file(config_of, content, words):
    config_of("odd", content)
    with pytest.raises(BadInput, match=words) as caught:
        memory.model_spec("odd")
    assert str(caught.value).startswith("data/models/odd/config.json: ") and "\n" not in str(caught.value)


def test_an_unknown_model_names_those_there_are(config_of):
    config_of("tiny", MINIMAL)
    with pytest.raises(BadInput, match="got 'other'.*known models: tiny"):
        memory.model_spec("other")
