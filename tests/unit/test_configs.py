"""From config.json to ModelSpec: minimal configs of every family, the public ones beside the checkout, and 5,000 damaged ones."""

import copy
import json
import random
import time
from collections import Counter

import pytest
from conftest import ROOT

from fieldbook import configs, quantization
from fieldbook.errors import BadInput

CASES = ROOT.parent / "shared" / "cases" / "E"

BASE = {"hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 512, "max_position_embeddings": 4096, "num_attention_heads": 4, "intermediate_size": 128}
GQA = BASE | {"num_key_value_heads": 2, "head_dim": 16}
MOE = GQA | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = BASE | {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
}
DSA = MLA | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 64}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
}
NEMOTRON = GQA | {
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "MEM*-E",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 32,
    "num_nextn_predict_layers": 1,
}
KIMI = MLA | {
    "num_experts": 16,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "num_nextn_predict_layers": 0,
    "routed_expert_hidden_size": 32,
    "mla_use_output_gate": True,
    "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
}
V4 = GQA | {
    "num_key_value_heads": 1,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hc_mult": 4,
    "qk_rope_head_dim": 8,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 4, 0],
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hash_layers": 1,
    "sliding_window": 128,
}
M3 = GQA | {
    "dense_intermediate_size": 256,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_layer_freq": [0] * 2 + [1] * 6,
    "num_mtp_modules": 3,
    "sparse_attention_config": {
        "sparse_attention_freq": [0] * 2 + [1] * 6,
        "sparse_topk_blocks": 4,
        "sparse_block_size": 128,
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 16,
    },
}
GEMMA4 = GQA | {
    "sliding_window": 1024,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
# Architecture: its keys, and the kinds of attention and feed-forward part that come out, draft layers apart.
FAMILIES = {
    "LlamaForCausalLM": (GQA, {"full": 8}, {"dense": 8}, 0),
    "MistralForCausalLM": (GQA, {"sliding": 8}, {"dense": 8}, 0),
    "MixtralForCausalLM": (GQA, {"full": 8}, {"moe": 8}, 0),
    "Qwen2ForCausalLM": (GQA, {"full": 8}, {"dense": 8}, 0),
    "Qwen2MoeForCausalLM": (MOE | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0]}, {"full": 8}, {"dense": 1, "moe": 7}, 0),
    "Qwen3ForCausalLM": (GQA, {"full": 8}, {"dense": 8}, 0),
    "Qwen3MoeForCausalLM": (MOE | {"decoder_sparse_step": 2}, {"full": 8}, {"dense": 4, "moe": 4}, 0),
    "Qwen3NextForCausalLM": (MOE | GDN, {"gdn": 6, "full": 2}, {"moe": 8}, 1),
    "Qwen3_5ForCausalLM": (GQA | GDN | {"mtp_num_hidden_layers": 1}, {"gdn": 6, "full": 2}, {"dense": 8}, 1),
    "Qwen3_5MoeForCausalLM": (MOE | GDN, {"gdn": 6, "full": 2}, {"moe": 8}, 0),
    "Qwen4ExpForCausalLM": (MOE | GDN | {"ple_layer_ids": [2], "mtp_num_hidden_layers": 1}, {"gdn": 6, "full": 2}, {"moe": 8}, 1),
    "DeepseekV2ForCausalLM": (MLA, {"mla": 8}, {"dense": 2, "moe": 6}, 1),
    "DeepseekV3ForCausalLM": (MLA, {"mla": 8}, {"dense": 2, "moe": 6}, 1),
    "DeepseekV32ForCausalLM": (DSA, {"sparse_mla": 8}, {"dense": 2, "moe": 6}, 1),
    "DeepseekV4ForCausalLM": (V4, {"compressed": 8}, {"moe": 8}, 0),
    "GlmMoeDsaForCausalLM": (DSA, {"sparse_mla": 8}, {"dense": 2, "moe": 6}, 1),
    "Glm4MoeLiteForCausalLM": (MLA, {"mla": 8}, {"dense": 2, "moe": 6}, 1),
    "Glm4MoeForCausalLM": (MLA | GQA, {"full": 8}, {"dense": 2, "moe": 6}, 1),
    "KimiLinearForCausalLM": (KIMI, {"kda": 6, "mla": 2}, {"dense": 2, "moe": 6}, 0),
    "MiniMaxM2ForCausalLM": (GQA | {"num_local_experts": 8, "num_experts_per_tok": 2, "num_mtp_modules": 3}, {"full": 8}, {"moe": 8}, 0),
    "MiniMaxM3SparseForCausalLM": (M3, {"full": 2, "sparse_gqa": 6}, {"dense": 2, "moe": 6}, 3),
    "GptOssForCausalLM": (GQA | {"num_local_experts": 8, "sliding_window": 128}, {"sliding": 4, "full": 4}, {"moe": 8}, 0),
    "GemmaForCausalLM": (GQA, {"full": 8}, {"dense": 8}, 0),
    "Gemma2ForCausalLM": (GQA, {"sliding": 4, "full": 4}, {"dense": 8}, 0),
    "Gemma3ForCausalLM": (GQA, {"sliding": 7, "full": 1}, {"dense": 8}, 0),
    "Gemma4ForCausalLM": (GEMMA4, {"sliding": 6, "full": 2}, {"moe": 8}, 0),
    "Phi3ForCausalLM": (GQA | {"sliding_window": 2047}, {"sliding": 8}, {"dense": 8}, 0),
    "GraniteForCausalLM": (GQA | {"sliding_window": 128}, {"full": 8}, {"dense": 8}, 0),
    "NemotronHForCausalLM": (NEMOTRON, {"mamba2": 2, "full": 1, "none": 3}, {"none": 3, "moe": 2, "dense": 1}, 1),
    "Olmo2ForCausalLM": (GQA, {"full": 8}, {"dense": 8}, 0),
    "Olmo3ForCausalLM": (GQA, {"sliding": 6, "full": 2}, {"dense": 8}, 0),
}


def spec_of(architecture, **changes):
    keys = {key: value for key, value in (FAMILIES[architecture][0] | changes).items() if value is not ...}
    return configs.read({"architectures": [architecture]} | keys)


def public(file):
    """A public config; a line that says where it is from stands before the JSON."""
    return json.loads("\n".join(line for line in file.read_text().splitlines() if not line.startswith("# source")))


def public_configs():
    return [] if not CASES.is_dir() else sorted(f for f in CASES.glob("*-config*.json") if "hf_quant" not in f.name)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_kinds_of_every_family(architecture):
    _, attentions, mlps, drafts = FAMILIES[architecture]
    spec = spec_of(architecture)
    assert Counter(layer.attention.kind for layer in spec.layers) == attentions
    assert Counter(layer.mlp.kind for layer in spec.layers) == mlps
    assert len(spec.mtp_layers) == drafts
    assert [layer.index for layer in spec.layers + spec.mtp_layers] == list(range(len(spec.layers) + drafts))
    hash(spec)


@pytest.mark.skipif(not CASES.is_dir(), reason="no cases beside this checkout")
@pytest.mark.parametrize("file", public_configs(), ids=lambda file: file.name[:40])
def test_public_configs_as_expected(file):
    config = public(file)
    text = config.get("text_config", config)
    spec = configs.read(config, file.stem)
    expected = dict(line.split(" = ", 1) for line in file.with_suffix("").with_suffix(".expect.txt").read_text().splitlines() if " = " in line)
    expected |= {k: str(v) for k, v in {"num_hidden_layers": text["num_hidden_layers"], "hidden_size": text["hidden_size"]}.items()}
    assert len(spec.layers) == int(expected["num_hidden_layers"])
    assert spec.hidden_size == int(expected["hidden_size"])
    if "vocab_size" in expected:
        assert spec.vocab_size == int(expected["vocab_size"])
        assert spec.max_position_embeddings == int(expected["max_position_embeddings"])
        assert spec.tie_word_embeddings == (expected["tie_word_embeddings"] == "True")
        assert spec.dtype == expected.get("dtype", expected.get("torch_dtype", "bfloat16"))
        assert len(spec.mtp_layers) == int(expected.get("num_nextn_predict_layers", expected.get("mtp_num_hidden_layers", 0)))
    experts = next((expected[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in expected), None)
    assert {layer.mlp.experts for layer in spec.layers if layer.mlp.kind == "moe"} == ({int(experts)} if experts else set()) or "vocab_size" not in expected
    if "first_k_dense_replace" in expected:
        assert sum(layer.mlp.kind == "dense" for layer in spec.layers) == int(expected["first_k_dense_replace"])
    if "index_topk" in expected:
        assert {x.attention.indexer.topk for x in spec.layers if x.attention.indexer} == {int(expected["index_topk"])}


@pytest.mark.skipif(not CASES.is_dir(), reason="no cases beside this checkout")
def test_public_configs_have_the_kinds_named():
    def kinds(number, field="attention"):
        return Counter(getattr(layer, field).kind for layer in configs.read(public(next(CASES.glob(f"{number}-*config*.json")))).layers)

    assert kinds("10") == {"gdn": 48, "full": 16}
    assert kinds("15") == {"kda": 69, "mla": 24}
    assert kinds("17") == {"full": 3, "sparse_gqa": 57}
    assert kinds("20") == {"sliding": 25, "full": 5}
    assert kinds("21") == {"sliding": 50, "full": 10}
    assert kinds("22") == {"mamba2": 40, "none": 40, "full": 8}
    assert kinds("22", "mlp") == {"none": 48, "moe": 40}
    assert kinds("27") == {"gdn": 30, "sparse_gqa": 10}
    assert any("indexer" in part for part in configs.read(public(next(CASES.glob("27-*.json")))).not_counted)


def test_a_parse_takes_milliseconds():
    timed = []
    for config in [{"architectures": [name]} | keys[0] for name, keys in FAMILIES.items()] + [public(file) for file in public_configs()]:
        config = copy.deepcopy(config)
        best = min(_seconds(config) for _ in range(3))
        timed.append(best)
    assert max(timed) < 0.005


def _seconds(config):
    started = time.perf_counter()
    configs.read(config)
    return time.perf_counter() - started


def test_glm_5_3_indexer_owners():
    # max(l - 3 + 1, 0) mod 4 = 0: layers 0, 1, 2, then every fourth from 6 to 74, and the draft layer.
    spec = configs.load(ROOT / "data" / "models" / "glm-5.3")
    owners = [layer.index for layer in spec.layers + spec.mtp_layers if layer.attention.indexer.owns]
    assert owners == [0, 1, 2, *range(6, 75, 4), 78]
    assert quantization.is_quantized(spec.quantization, "model.layers.5.mlp.experts.7.up_proj")
    for module in ("mlp.shared_experts.up_proj", "self_attn.q_b_proj", "self_attn.indexer.wq_b", "mlp.gate", "eh_proj"):
        assert not quantization.is_quantized(spec.quantization, f"model.layers.5.{module}")
    assert spec.quantization.zero_point_bits == 4


def test_indexer_pattern_comes_before_frequency():
    spec = spec_of("GlmMoeDsaForCausalLM", index_topk_pattern="FSSFSS", index_topk_freq=1)
    # Beyond the pattern's end every layer owns one.
    assert [layer.attention.indexer.owns for layer in spec.layers] == [True, False, False, True, False, False, True, True]
    assert all(layer.attention.indexer.owns for layer in spec_of("DeepseekV32ForCausalLM").layers)
    # Two layers after offset 2 (the default) with frequency 2: l = 0 and 1 give 0, l = 2 gives 1, l = 3 gives 2.
    owns = [layer.attention.indexer.owns for layer in spec_of("GlmMoeDsaForCausalLM", index_topk_freq=2).layers]
    assert owns == [True, True, False, True, False, True, False, True]


def test_indexer_types_alone_are_not_read_but_named():
    spec = spec_of("GlmMoeDsaForCausalLM", indexer_types=["full", "shared"] * 4)
    assert all(layer.attention.indexer.owns for layer in spec.layers)
    assert "indexer_types" in spec.not_counted[0]
    with pytest.raises(BadInput, match="index_topk_freq: got None"):
        spec_of("GlmMoeDsaForCausalLM", index_topk_freq=None)


def test_flash_next():
    spec = configs.load(ROOT / "data" / "models" / "qwen3.8-flash-next")
    assert [layer.index for layer in spec.layers if layer.attention.kind == "sparse_gqa"] == list(range(3, 48, 4))
    assert [layer.index for layer in spec.layers if layer.short_conv] == [1]
    # 2560 x 4 streams; kernel 4, so 3 tokens, 3 apart.
    assert (spec.layers[1].short_conv.channels, spec.layers[1].short_conv.state_tokens) == (10240, 9)
    assert "n-gram table of layer 1" in spec.not_counted[0]
    assert spec.state_dtype == "float32" and spec.embeddings_on_every_stage
    assert quantization.is_quantized(spec.quantization, "model.language_model.layers.3.mlp.experts.0.down_proj")
    assert not quantization.is_quantized(spec.quantization, "mtp.layers.0.mlp.experts.0.down_proj")
    assert not quantization.is_quantized(spec.quantization, "model.language_model.layers.3.mlp.shared_expert.down_proj")
    # norm 4 x 64; down (320 + 4 streams, padded to 336) and up 320, both over 256 wide: 256 + 256 x 336 + 320 x 256.
    assert spec_of("Qwen4ExpForCausalLM").layers[0].parts[0].parameters == 256 + 256 * 336 + 320 * 256


def test_gemma_4_layers():
    spec = spec_of("Gemma4ForCausalLM")
    sliding, full = spec.layers[0].attention, spec.layers[5].attention
    assert (sliding.head_dim, sliding.kv_heads, sliding.k_is_v, sliding.window) == (16, 2, False, 1024)
    assert (full.head_dim, full.kv_heads, full.k_is_v, full.window) == (32, 1, True, None)
    # Five sliding layers, a full one, a sliding one, and the last is always full; the last two share.
    assert [layer.attention.kv_shared for layer in spec.layers] == [False] * 6 + [True] * 2
    assert spec.layers[7].attention.kind == "full" and spec.layers[0].norms == 8
    assert spec.layers[0].mlp.shared_intermediate_size == 128
    assert spec.parts_with_embedding[0].parameters == 512 * 8 * 8 and spec.tie_word_embeddings


def test_windows_only_where_vllm_uses_them():
    assert spec_of("Qwen2ForCausalLM", sliding_window=4096).layers[0].attention.window is None
    assert spec_of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4096, max_window_layers=0).layers[0].attention.window == 4096
    with pytest.raises(BadInput, match="max_window_layers 4"):
        spec_of("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=4096, max_window_layers=4)
    assert spec_of("MistralForCausalLM", sliding_window=None).layers[0].attention.kind == "full"
    assert "sliding_window = 4096 (MistralConfig)" in spec_of("MistralForCausalLM").defaulted
    mixed = spec_of("LlamaForCausalLM", sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 4)
    assert [layer.attention.window for layer in mixed.layers] == [64, None] * 4
    assert spec_of("MixtralForCausalLM", sliding_window=0).layers[0].attention.window is None


def test_nested_text_model_and_its_tower():
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "float16", "vision_config": {"depth": 2}}
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "sliding_window": 32}
    spec = configs.read(outer | {"text_config": text})
    assert (spec.model_type, spec.dtype, spec.vocab_size, spec.layers[0].attention.heads) == ("gemma3_text", "float16", 262208, 8)
    assert spec.not_counted == ("vision tower (vision_config)",) and spec.tie_word_embeddings
    assert "head_dim = 256 (Gemma3TextConfig)" in spec.defaulted
    with pytest.raises(BadInput, match="model_type 'siglip'"):
        configs.read(outer | {"text_config": text | {"model_type": "siglip"}})


def test_other_shapes():
    assert spec_of("LlamaForCausalLM", num_key_value_heads=..., head_dim=...).layers[0].attention.kv_heads == 4
    assert configs.read({"model_type": "llama"} | GQA).architecture == "LlamaForCausalLM"
    nemotron = spec_of("NemotronHForCausalLM")
    assert (nemotron.layers[1].mlp.expert_hidden_size, nemotron.layers[1].mlp.shared_intermediate_size, nemotron.layers[1].mlp.gated) == (32, 48, False)
    listed = spec_of("NemotronHForCausalLM", hybrid_override_pattern=..., layers_block_type=["mamba", "moe", "mamba", "attention", "mlp", "moe"])
    assert listed.layers == nemotron.layers and nemotron.state_dtype == "float32"
    assert nemotron.mtp_layers[0].attention.kind == "full" and nemotron.mtp_layers[0].mlp.kind == "moe"
    v4 = spec_of("DeepseekV4ForCausalLM")
    assert [bool(layer.attention.indexer) for layer in v4.layers] == [False, True] * 4 and "layers by ratio 1: 1, 4: 4, 128: 3" in v4.not_counted[0]
    assert spec_of("DeepseekV3ForCausalLM").layers[5].mlp.shared_intermediate_size == 64
    more = spec_of("MiniMaxM3SparseForCausalLM", num_nextn_predict_layers=1)
    assert len(more.mtp_layers) == 1 and "2 more draft layers" in more.not_counted[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": ...}, "key 'hidden_size' is missing"),
        ({"vocab_size": ...}, "key 'vocab_size' is missing"),
        ({"max_position_embeddings": ...}, "key 'max_position_embeddings' is missing"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers: got '8'"),
        ({"num_hidden_layers": 10**9}, "from 1 to 2048"),
        ({"num_attention_heads": True}, "num_attention_heads: got True"),
        ({"num_key_value_heads": 8}, "more than num_attention_heads"),
        ({"attention_bias": "no"}, "true or false"),
        ({"layer_types": ["full_attention"]}, "1 entries for 8 layers"),
        ({"torch_dtype": "int3"}, "torch_dtype: got 'int3'"),
        ({"architectures": "LlamaForCausalLM"}, "list of names"),
        ({"architectures": ["FancyForCausalLM"]}, "architecture FancyForCausalLM is not covered"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not covered"),
        ({"quantization_config": {"bits": 4}}, "'quant_method' is missing"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'group_size' is missing"),
    ],
)
def test_what_is_wrong_is_one_line(changes, said):
    with pytest.raises(BadInput) as caught:
        spec_of("LlamaForCausalLM", **changes)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_load_reads_the_quantization_beside(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"]} | GQA
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert configs.load(tmp_path).quantization is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}))
    found = configs.load(tmp_path)
    assert (found.name, found.quantization.weight_bits, found.quantization.kv_cache_scheme) == (tmp_path.name, 4, "fp8")
    # What config.json itself says comes first, as in vLLM.
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}))
    assert configs.load(tmp_path / "config.json").quantization.activation_scales
    for content in ("[1]", "{", "\udce9"):
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(BadInput):
            configs.load(tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        configs.load(tmp_path / "absent")


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}},
}
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    7,
    10**20,
    -(10**20),
    0.5,
    float("nan"),
    "",
    "x",
    "re:(",
    [],
    [1],
    ["x"],
    [None],
    [[1]],
    {},
    {"a": 1},
    {1: 2},
    [True],
    2**31,
]


def test_damaged_configs_give_a_spec_or_one_line():
    chosen = random.Random(4)
    quantized = [
        COMPRESSED,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
    ]
    quantized += [{"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"a": {"bits": 16}}, "block_name_to_quantize": "model.layers"}]
    quantized += [{"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:a": {}, "+:b": {"bits": 8}}}]
    quantized += [{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.experts.0.b": {"quant_algo": "FP8"}}}]
    sources = [{"architectures": [name]} | keys[0] for name, keys in FAMILIES.items()] + [public(file) for file in public_configs()]
    outcomes = Counter()
    for _ in range(5000):
        config = copy.deepcopy(chosen.choice(sources))
        if chosen.random() < 0.5:
            config["quantization_config"] = copy.deepcopy(chosen.choice(quantized))
        for _ in range(chosen.randint(1, 3)):
            damage(config, chosen)
        try:
            hash(configs.read(config, "fuzz"))
            outcomes["spec"] += 1
        except BadInput as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert outcomes["spec"] > 500 and outcomes["refused"] > 500


def damage(config, chosen):
    """Change, remove or add one key at a random depth."""
    place = config
    while chosen.random() < 0.5 and (inner := [v for v in place.values() if isinstance(v, dict) and v]):
        place = chosen.choice(inner)
    key = chosen.choice(sorted(place, key=str)) if place else "new"
    action = chosen.random()
    if action < 0.25:
        place.pop(key, None)
    elif action < 0.85 or not isinstance(place.get(key), (int, list)) or isinstance(place[key], bool):
        place[key] = copy.deepcopy(chosen.choice(VALUES))
    elif isinstance(place[key], list):
        place[key] = place[key] * chosen.choice([0, 2]) if chosen.random() < 0.5 else [*place[key][:-1], chosen.choice(VALUES)]
    else:
        place[key] = chosen.choice([place[key] * 2, place[key] // 2, -place[key], place[key] + 1])
