"""Weights: the reports' figures line by line, real start-up logs, and parameter counts of transformers' own models as oracle."""

import time
from dataclasses import replace
from math import ceil

import pytest
from conftest import ROOT

from fieldbook import safetensors_headers, weights
from fieldbook.errors import BadInput
from fieldbook.spec import Attention, Indexer, Layer, Mlp, ModelSpec, Part, Quantization

MIB, GIB = 2**20, 2**30
W4A16_EXPERTS_ONLY = ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*", "lm_head")


def quantization(method, bits, kind, strategy, group=None, **more):
    return Quantization(method, bits, kind, strategy, group, **more)


def model(layers, hidden=64, vocab=128, model_type="llama", architecture="LlamaForCausalLM", tied=False, dtype="bfloat16", longest=64, **more):
    return ModelSpec("test", architecture, model_type, hidden, vocab, tied, longest, dtype, tuple(layers), **more)


def llama(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, width=96, experts=0, biases=False, **more):
    attention = Attention("full", heads, kv_heads, head_dim, head_dim, qkv_bias=biases)
    mlp = Mlp("moe", experts=experts, experts_per_token=2, expert_intermediate_size=width) if experts else Mlp("dense", width)
    return model([Layer(i, attention, mlp) for i in range(layers)], hidden, **more)


def glm_dsa(layers=78, hidden=6144, experts=256, expert_width=2048, width=12288, q_rank=2048, vocab=154880, drafts=1, all_own=False, **more):
    """GLM-5.x: three dense layers, an indexer where max(l - 3 + 1, 0) mod 4 = 0 and in the draft layer."""

    def layer(i):
        owns = all_own or i >= layers or max(i - 2, 0) % 4 == 0
        latent = {"q_lora_rank": q_rank, "kv_lora_rank": 512, "rope_head_dim": 64, "nope_head_dim": 192}
        attention = Attention("sparse_mla", 64, 1, 256, 256, indexer=Indexer(32, 128, more.get("topk", 2048), owns), **latent)
        moe = Mlp("moe", experts=experts, experts_per_token=8, expert_intermediate_size=expert_width, shared_experts=1, router_bias=True)
        return Layer(i, attention, Mlp("dense", width) if i < 3 else moe, 5 if i >= layers else 2)

    built = [layer(i) for i in range(layers + drafts)]
    names = {"model_type": "glm_moe_dsa", "architecture": "GlmMoeDsaForCausalLM", "longest": more.get("longest", 1_048_576)}
    return model(built[:layers], hidden, vocab, mtp_layers=tuple(built[layers:]), quantization=more.get("quantization"), **names)


@pytest.fixture(scope="module")
def glm():
    """GLM-5.3 of the second report: routed experts W4A16 in groups of 128 with 2-byte scales and 4-bit zero points, all else bf16."""
    scheme = quantization("compressed-tensors", 4, "int", "group", 128, zero_point_bits=4, ignored=W4A16_EXPERTS_ONLY)
    return glm_dsa(quantization=scheme)


def by_group(components):
    found = {}
    for one in components:
        found[one.group] = found.get(one.group, 0) + one.bytes
    return found


# --- the second report, component by component


def test_glm_moe_layer_line_by_line(glm):
    found = {group: size / MIB for group, size in by_group(weights.components(glm.layers[3], glm)).items()}
    assert found["attention"] == pytest.approx(314.75, abs=0.01)
    # 12 KiB more than the table: three weight_shape of 16 bytes for each expert, which it leaves out.
    assert found["experts"] == pytest.approx(4788.0, abs=0.02)
    assert found["shared_expert"] == 72.0
    assert found["router"] == pytest.approx(3.0, abs=0.001)
    assert found["norms"] == pytest.approx(0.03, abs=0.01)
    assert "indexer" not in found
    assert sum(found.values()) == pytest.approx(5177.8, rel=1e-4)


def test_glm_indexer_draft_and_dense_layer(glm):
    dense = by_group(weights.components(glm.layers[0], glm))
    assert dense["indexer"] / MIB == pytest.approx(17.875, rel=1e-4)
    assert dense["mlp"] / MIB == 432.0
    assert sum(dense.values()) / MIB == pytest.approx(764.65, rel=1e-4)
    draft = weights.mtp_components(glm)
    assert sum(one.bytes for one in draft) / MIB == pytest.approx(5339.7, rel=1e-4)
    assert next(one.bytes for one in draft if one.name == "mtp.join.eh_proj") / MIB == 144


def test_glm_checkpoint_and_its_indexers(glm):
    assert weights.checkpoint_bytes(glm) / GIB == pytest.approx(390.58, rel=5e-4)
    owners = {one.module.split(".indexer")[0] for one in weights.checkpoint_components(glm) if ".indexer." in one.module}
    assert len(owners) == 22
    assert weights.checkpoint_bytes(replace(glm_dsa(all_own=True), quantization=glm.quantization)) / GIB == pytest.approx(391.5, abs=0.05)


def test_glm_figures_per_gpu_at_tp4(glm):
    assert weights.layer_bytes(glm.layers[0], glm) / 4 / MIB == pytest.approx(191, rel=0.005)
    first, last = weights.rank_weights(glm, [39, 39], tensor_parallel_size=4)
    assert first.by_component["embedding"] / MIB == pytest.approx(454, rel=0.005)
    assert last.by_component["lm_head"] == first.by_component["embedding"]
    assert first.bytes / MIB == pytest.approx(49_000, rel=0.01)


def test_glm_first_rank_equals_the_log_with_the_tables_that_loading_counts(glm):
    # The report's log: 47.85 GiB. 64 MiB of top-k buffer for 8192 tokens, 128 MiB of rotary table for 1M positions.
    first = weights.rank_weights(glm, [39, 39], tensor_parallel_size=4)[0]
    assert weights.buffer_bytes(glm, 8192) == 192 * MIB
    assert round((first.bytes + weights.buffer_bytes(glm, 8192)) / GIB, 2) == 47.85


def test_tp_replicates_latent_projections_router_indexer_and_norms(glm):
    moe, dense = (weights.layer_rank_bytes(glm, tensor_parallel_size=4)[i] / MIB for i in (3, 0))
    # q_a 24 and kv_a 6.75 MiB stay whole, 284 of attention, 4788 of experts and 72 are cut in four, router 3 and norms stay.
    assert moe == pytest.approx(30.75 + 284 / 4 + 4788 / 4 + 72 / 4 + 3 + 0.03, abs=0.02)
    assert dense == pytest.approx(30.75 + 284 / 4 + 432 / 4 + 17.875 + 0.03, abs=0.02)


def test_draft_layers_lie_on_the_last_stage_with_an_embedding_of_their_own(glm):
    def last(partition, **more):
        return weights.rank_weights(glm, partition, tensor_parallel_size=4, **more)[-1]

    assert "mtp" not in last([39, 39], with_mtp=False).by_component
    embedding = weights.pad_vocab(154880) * 6144 * 2 // 4
    # Without pipeline parallelism the draft uses the target's embedding (eagle/utils.py:maybe_share_target_embed).
    assert last([39, 39]).by_component["mtp"] - last([78]).by_component["mtp"] == embedding


# --- start-up logs of one H200 (../shared/captures/h200-boot), shapes of gpu-kit/kit/models


def test_dense_8b_log():
    spec = llama(32, 4096, 32, 8, 128, 14336, vocab=128256, longest=131072)
    rank = weights.rank_weights(spec, [32], tensor_parallel_size=1)[0]
    assert rank.bytes / GIB == pytest.approx(15.0, rel=0.01)
    assert rank.bytes == weights.checkpoint_bytes(spec)


def test_dsa_12_layer_logs():
    spec = glm_dsa(12, 2048, 16, 512, 4096, 1024, 4096, drafts=0, topk=512, longest=32768)
    rank = weights.rank_weights(spec, [12], tensor_parallel_size=1)[0]
    assert rank.bytes / GIB == pytest.approx(2.66, rel=0.01)
    assert round((rank.bytes + weights.buffer_bytes(spec, 8192)) / GIB, 2) == 2.66
    # PP2: both ranks logged 32 MiB more than weights and tables; where from is not known (within 0.005 GiB of rounding).
    for stage, logged in zip(weights.rank_weights(spec, [4, 8], tensor_parallel_size=1), (0.84, 1.90), strict=True):
        assert (stage.bytes + weights.buffer_bytes(spec, 8192) + 32 * MIB) / GIB == pytest.approx(logged, abs=0.006)


def test_qwen4_exp_log_with_embeddings_on_every_stage_and_a_draft():
    def mixer(rows):
        return 4096 + rows * 4096 + 4096 * 64

    streams = (Part("attn_hyper_connection", mixer(80)), Part("mlp_hyper_connection", mixer(80)))
    ple = (Part("ple.kv_proj", 1024 * 5 * 1024, linear=True), Part("ple.norms", 3 * 4096), Part("ple.conv1d", 4 * 4096))
    gdn = Attention("gdn", state_key_heads=8, state_value_heads=16, state_key_dim=128, state_value_dim=128, conv_kernel=4)
    full = Attention("full", 8, 2, 256, 256, output_gate=True, qk_norm=True)
    mlp = Mlp("moe", experts=8, experts_per_token=2, expert_intermediate_size=256, shared_experts=1, shared_intermediate_size=256, shared_gate=True)
    last = Part("hyper_connection_mixer", mixer(64))
    layers = [Layer(i, full if i % 4 == 3 else gdn, mlp, 0, streams + (ple if i == 1 else ())) for i in range(8)]
    names = {"model_type": "qwen4_exp_text", "architecture": "Qwen4ExpForCausalLM", "longest": 32768}
    outside = {"embeddings_on_every_stage": True, "parts_last_stage": (last,), "mtp_layers": (Layer(8, full, mlp, 5, (*streams, last)),)}
    spec = model(layers, 1024, 4096, **names, **outside)
    first, second = weights.rank_weights(spec, [4, 4], tensor_parallel_size=1)
    assert first.by_component["lm_head"] == second.by_component["lm_head"] == 4096 * 1024 * 2
    # Tables: 4 MiB rotary (a quarter rotates, 64 of 256), first stage 8 MiB of PLE staging, last stage 32 MiB of hidden states for the draft.
    assert (first.bytes + 12 * MIB) / GIB == pytest.approx(0.16, abs=0.006)
    assert (second.bytes + 36 * MIB) / GIB == pytest.approx(0.22, abs=0.006)


def test_smollm2_equals_its_checkpoint_to_the_byte():
    folder = ROOT / "data" / "models" / "cache" / "smollm2-135m-instruct"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("the small model is not converted here")
    spec = llama(30, 576, 9, 3, 64, 1536, vocab=49152, tied=True, dtype="float32")
    tensors = safetensors_headers.read_folder(folder)
    stored = {t.dtype for t in tensors}
    spec = replace(spec, dtype={"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[stored.pop()])
    rows = safetensors_headers.compare(spec, tensors)
    assert not stored and all(row.residual_bytes == 0 for row in rows)
    assert weights.checkpoint_bytes(spec) == sum(t.bytes for t in tensors)
    assert weights.checkpoint_parameters(spec) == 134_515_008


# --- checkpoints as published: total_size of their model.safetensors.index.json, parameters by dtype of the hub's safetensors metadata


def test_qwen3_30b_a3b_to_the_byte():
    attention = Attention("full", 32, 4, 128, 128, qk_norm=True)
    mlp = Mlp("moe", experts=128, experts_per_token=8, expert_intermediate_size=768)
    spec = model([Layer(i, attention, mlp) for i in range(48)], 2048, 151936, model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM")
    assert weights.checkpoint_bytes(spec) == 61_064_245_248


def test_gpt_oss_20b_to_the_byte():
    attention = Attention("full", 64, 8, 64, 64, qkv_bias=True, o_bias=True)
    mlp = Mlp("moe", bias=True, experts=32, experts_per_token=4, expert_intermediate_size=2880, router_bias=True)
    scheme = quantization("mxfp4", 4, "float", "group", 32, scale_bytes=1, only=(r"re:.*\.experts\..*",))
    layers = [Layer(i, attention, mlp, 2, (Part("self_attn.sinks", 64, sharded=True),)) for i in range(24)]
    spec = model(layers, 2880, 201088, model_type="gpt_oss", architecture="GptOssForCausalLM", quantization=scheme)
    assert weights.checkpoint_bytes(spec) == 13_761_264_768


def test_deepseek_v3_by_dtype_to_the_parameter():
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "rope_head_dim": 64, "nope_head_dim": 128}
    attention = Attention("mla", 128, 1, 192, 128, **latent)
    mlp = Mlp("moe", experts=256, experts_per_token=8, expert_intermediate_size=2048, shared_experts=1, router_bias=True)
    layers = [Layer(i, attention, Mlp("dense", 18432) if i < 3 else mlp, 5 if i == 61 else 2) for i in range(62)]
    scheme = quantization("fp8", 8, "float", "block", block=(128, 128), scale_bytes=4)
    names = {"model_type": "deepseek_v3", "architecture": "DeepseekV3ForCausalLM", "mtp_own_embeddings": True}
    spec = model(layers[:61], 7168, 129280, mtp_layers=(layers[61],), quantization=scheme, **names)
    found = weights.checkpoint_components(spec)
    fp8 = [one for one in found if one.quantized]
    assert sum(one.parameters for one in fp8) == 680_571_043_840
    assert sum(one.parameters for one in found if not one.quantized and one.width_bytes is None) == 3_918_786_560
    scales = sum(one.bytes - one.parameters for one in fp8) // 4
    assert scales + sum(one.parameters for one in found if one.width_bytes == 4) == 41_555_600


# --- quantization formats: 256 x 512, worked by hand


FORMATS = [
    (quantization("fp8", 8, "float", "tensor", scale_bytes=4), 131072 + 4),
    (quantization("fp8", 8, "float", "tensor", scale_bytes=4, activation_scales=True), 131072 + 8),
    (quantization("compressed-tensors", 8, "float", "channel", scale_bytes=4), 131072 + 256 * 4),
    (quantization("fp8", 8, "float", "block", block=(128, 128), scale_bytes=4), 131072 + 2 * 4 * 4),
    (quantization("compressed-tensors", 4, "int", "group", 128), 65536 + 256 * 4 * 2 + 16),
    (quantization("compressed-tensors", 4, "int", "group", 128, zero_point_bits=4), 65536 + 2048 + 32 * 4 * 4 + 16),
    (quantization("compressed-tensors", 4, "int", "channel"), 65536 + 512 + 16),
    (quantization("awq", 4, "int", "group", 128, zero_point_bits=4), 65536 + 2048 + 512),
    (quantization("gptq", 4, "int", "group", 128), 65536 + 2048 + 512 + 512 * 4),
    (quantization("auto-round", 4, "int", "group", -1), 65536 + 512 + 128 + 512 * 4),
    (quantization("compressed-tensors", 8, "int", "channel", scale_bytes=2), 131072 + 512),
    (quantization("modelopt", 4, "float", "group", 16, scale_bytes=1, global_scales=2), 65536 + 8192 + 8),
    (quantization("mxfp4", 4, "float", "group", 32, scale_bytes=1), 65536 + 4096),
]


@pytest.mark.parametrize("scheme, expected", FORMATS)
def test_bytes_of_a_quantized_matrix(scheme, expected):
    assert weights.quantized_bytes(256, 512, scheme) == expected


def test_edges_count_whole_blocks_and_groups():
    assert weights.quantized_bytes(130, 300, FORMATS[3][0]) == 130 * 300 + 2 * 3 * 4
    assert weights.quantized_bytes(8, 200, FORMATS[4][0]) == 8 * 25 * 4 + 8 * 2 * 2 + 16


def test_loading_drops_what_no_kernel_needs():
    gptq, packed = FORMATS[8][0], FORMATS[5][0]
    assert weights.quantized_bytes(256, 512, gptq, loaded=True) == 65536 + 2048
    assert weights.quantized_bytes(256, 512, packed, loaded=True) == FORMATS[5][1] - 16


def test_row_parallel_scales_of_a_row_repeat_and_blocks_round_up_on_every_rank():
    channel = llama(1, 64, quantization=FORMATS[2][0])
    o_proj = next(one for one in weights.components(channel.layers[0], channel) if one.name == "attention.o_proj")
    assert weights.rank_bytes(o_proj, channel, 2) == 64 * 32 + 64 * 4
    block = llama(1, 1024, 8, 8, 72, quantization=FORMATS[3][0])
    q_proj = next(one for one in weights.components(block.layers[0], block) if one.name == "attention.q_proj")
    assert weights.rank_bytes(q_proj, block, 4) == 144 * 1024 + ceil(144 / 128) * 8 * 4


def test_ignored_modules_norms_router_and_embeddings_stay_plain():
    scheme = quantization("fp8", 8, "float", "tensor", scale_bytes=4, ignored=("lm_head", "re:.*o_proj"))
    spec = llama(1, experts=4, biases=True, quantization=scheme)
    covered = {one.name for one in weights.checkpoint_components(spec) if one.quantized}
    assert covered == {"attention.q_proj", "attention.k_proj", "attention.v_proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj"}
    fp16 = llama(1, experts=4, biases=True)
    assert weights.checkpoint_parameters(spec) == weights.checkpoint_parameters(fp16)


def test_a_mixed_checkpoint_takes_the_scheme_that_names_the_module():
    inner = quantization("modelopt", 4, "float", "group", 16, scale_bytes=1, global_scales=1, only=("re:.*mlp.*",))
    spec = llama(1, quantization=replace(FORMATS[0][0], others=(inner,)))
    bits = {one.name: one.scheme.weight_bits for one in weights.components(spec.layers[0], spec) if one.scheme}
    assert bits["mlp.up_proj"] == 4 and bits["attention.q_proj"] == 8


def test_a_quantized_kv_b_is_unpacked_besides_and_an_fp8_indexer_key_too():
    spec = glm_dsa(1, quantization=FORMATS[3][0], drafts=0)
    found = {one.name: one for one in weights.components(spec.layers[0], spec)}
    assert found["attention.kv_b_unpacked"].bytes == 0
    assert weights.rank_bytes(found["attention.kv_b_unpacked"], spec, 4) == 512 * 64 * 448 * 2 // 4
    assert found["indexer.wk"].quantized and weights.rank_bytes(found["indexer.wk"], spec, 4) == 128 * 6144 * 2
    assert "attention.kv_b_unpacked" not in {one.name for one in weights.components(glm_dsa(1).layers[0], glm_dsa(1))}


def test_parts_with_a_linear_layer_are_quantized_too():
    spec = llama(1, quantization=FORMATS[3][0])
    layer = replace(spec.layers[0], parts=(Part("extra", 2**20, sharded=True, linear=True), Part("plain", 10, dtype="float32")))
    found = {one.name: one for one in weights.components(layer, spec)}
    assert found["parts.extra"].bytes == 2**20 + 64 * 4 and found["parts.plain"].bytes == 40
    assert weights.rank_bytes(found["parts.extra"], spec, 2) == 2**19 + 32 * 4


# --- what tensor and pipeline parallelism hold


def test_kv_heads_repeat_when_there_are_fewer_than_ranks():
    spec = llama(1, heads=8, kv_heads=2, biases=True)
    sizes = {one.name: [weights.rank_bytes(one, spec, tp) for tp in (1, 2, 4, 8)] for one in weights.components(spec.layers[0], spec)}
    assert sizes["attention.k_proj"] == [2 * 16 * 64 * 2, 16 * 64 * 2, 16 * 64 * 2, 16 * 64 * 2]
    assert sizes["attention.k_proj.bias"] == [64, 32, 32, 32]
    assert sizes["attention.q_proj"] == [16384, 8192, 4096, 2048]


def test_vocabulary_is_padded_to_64_and_then_divided():
    spec = llama(1, vocab=100)
    assert weights.rank_weights(spec, [1], tensor_parallel_size=2)[0].by_component["embedding"] == 128 // 2 * 64 * 2
    assert weights.checkpoint_components(spec)[0].bytes == 100 * 64 * 2


@pytest.mark.parametrize(
    "spec, tp, what",
    [
        (llama(1, heads=6, kv_heads=6, head_dim=16), 4, "k_proj heads: 6 cannot be divided over 4"),
        (llama(1, heads=9, kv_heads=3, width=90), 2, "cannot be divided over 2"),
        (llama(1, vocab=128, heads=3, kv_heads=3, width=96, hidden=48), 3, "padded vocabulary: 128 cannot be divided over 3"),
        (llama(1, width=97), 2, "97 cannot be divided"),
        (llama(1, dtype="bf17"), 1, "expected one of"),
    ],
)
def test_layouts_that_vllm_refuses_are_one_line(spec, tp, what):
    with pytest.raises(BadInput, match=what):
        weights.rank_weights(spec, [1], tensor_parallel_size=tp)


@pytest.mark.parametrize("partition, tp", [([1], 1), ([2, 1], 1), ([3, -1], 1), ([2], 0)])
def test_a_partition_that_does_not_fit_is_refused(partition, tp):
    with pytest.raises(BadInput, match="expected stages that add up to 2 layers"):
        weights.rank_weights(llama(2), partition, tensor_parallel_size=tp)


def test_experts_go_by_tp_or_whole():
    spec = llama(1, experts=6)
    whole = 6 * 3 * 96 * 64 * 2

    def experts(tp, parallel):
        return weights.rank_weights(spec, [1], tensor_parallel_size=tp, expert_parallel=parallel)[0].by_component["experts"]

    assert experts(2, False) == experts(2, True) == whole // 2
    assert experts(4, False) == whole // 4
    assert experts(4, True) == whole // 3  # two of six on the fullest rank


def test_tied_embeddings_lie_on_both_ends_once_when_these_are_one():
    spec = llama(4, tied=True)
    one = weights.rank_weights(spec, [4], tensor_parallel_size=1)[0]
    assert one.bytes == weights.checkpoint_bytes(spec)
    ends = weights.rank_weights(spec, [1, 2, 1], tensor_parallel_size=1)
    assert [rank.by_component.get("embedding", 0) for rank in ends] == [16384, 0, 16384]
    assert [(rank.stage, rank.first_layer, rank.layers) for rank in ends] == [(0, 0, 1), (1, 1, 2), (2, 3, 1)]


def test_models_that_build_embedding_and_head_on_every_stage():
    spec = replace(llama(4), embeddings_on_every_stage=True)
    held = [(r.by_component.get("embedding", 0), r.by_component.get("lm_head", 0)) for r in weights.rank_weights(spec, [2, 1, 1], tensor_parallel_size=1)]
    assert held == [(16384, 16384)] * 3
    spec = replace(spec, lm_head_on_last_stage=True)
    assert [r.by_component.get("lm_head", 0) for r in weights.rank_weights(spec, [2, 2], tensor_parallel_size=1)] == [0, 16384]


def test_stages_add_up_to_the_checkpoint_and_the_servers_dtype_counts():
    spec = llama(5, biases=True)
    assert sum(rank.bytes for rank in weights.rank_weights(spec, [2, 2, 1], tensor_parallel_size=1)) == weights.checkpoint_bytes(spec)
    doubled = weights.rank_weights(spec, [5], tensor_parallel_size=1, dtype="float32")[0].bytes
    assert doubled == 2 * weights.checkpoint_bytes(spec)


def test_mamba_groups_repeat_only_when_there_is_one():
    def in_proj(groups, tp):
        mamba = Attention("mamba2", state_value_heads=8, state_value_dim=16, state_key_dim=32, state_groups=groups, conv_kernel=4)
        spec = model([Layer(0, mamba, Mlp("none"), 1)], model_type="nemotron_h", architecture="NemotronHForCausalLM")
        return next(weights.rank_bytes(one, spec, tp) for one in weights.components(spec.layers[0], spec) if one.name == "attention.in_proj")

    assert in_proj(8, 4) == in_proj(8, 1) // 4
    assert in_proj(1, 4) == ((2 * 128 + 8) // 4 + 2 * 32) * 64 * 2
    with pytest.raises(BadInput):
        in_proj(3, 2)


def test_glm4_router_is_wider_in_memory_than_in_the_checkpoint():
    moe = model([Layer(0, GQA, MOE)], model_type="glm4_moe", architecture="Glm4MoeForCausalLM")
    gate = next(one for one in weights.components(moe.layers[0], moe) if one.name == "router.gate")
    assert (gate.bytes, weights.rank_bytes(gate, moe, 4)) == (4 * 64 * 2, 4 * 64 * 4)


def test_a_draft_with_embeddings_of_its_own_in_the_checkpoint(glm):
    stored = weights.checkpoint_bytes(replace(glm, mtp_own_embeddings=True)) - weights.checkpoint_bytes(glm)
    assert stored == 2 * 154880 * 6144 * 2


def test_80_layers_take_less_than_50_ms(glm):
    spec = replace(glm, layers=glm.layers + tuple(replace(glm.layers[3], index=i) for i in (78, 79)))
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        weights.rank_weights(spec, [20] * 4, tensor_parallel_size=4)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.05


# --- transformers builds the same model on the meta device, and counts


def counted(model_type, **config):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    # Biases of routers and Gemma 4's scalars are buffers there; rotary tables are in no checkpoint.
    kept = set(built.state_dict())
    return sum(p.numel() for p in built.parameters()) + sum(b.numel() for name, b in built.named_buffers() if name in kept)


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
PLAIN = {**SMALL, "intermediate_size": 96, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MIXED = {"layer_types": ["linear_attention", "full_attention"], **LINEAR}

GQA = Attention("full", 4, 2, 16, 16)
MLA = Attention("mla", 4, 1, 24, 16, q_lora_rank=24, kv_lora_rank=16, rope_head_dim=8, nope_head_dim=16)
GDN = Attention("gdn", state_key_heads=2, state_value_heads=4, state_key_dim=16, state_value_dim=16, conv_kernel=4)
DENSE = Mlp("dense", 96)
MOE = Mlp("moe", experts=4, experts_per_token=2, expert_intermediate_size=32)
DSA = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 16}


def two(first, second, mlp, other=None, **more):
    norms = more.pop("norms", 2)
    return model([Layer(0, first, mlp, norms), Layer(1, second, other or mlp, norms)], **more)


MODELS = {
    "llama": (PLAIN, two(GQA, GQA, DENSE)),
    "mistral": (PLAIN, two(GQA, GQA, DENSE)),
    "qwen2": ({**SMALL, "intermediate_size": 96}, two(replace(GQA, qkv_bias=True), replace(GQA, qkv_bias=True), DENSE)),
    "qwen3": (PLAIN, two(replace(GQA, qk_norm=True), replace(GQA, qk_norm=True), DENSE)),
    "qwen3_moe": ({**PLAIN, **EXPERTS, "num_experts": 4}, two(replace(GQA, qk_norm=True), replace(GQA, qk_norm=True), MOE)),
    "mixtral": ({**PLAIN, "num_local_experts": 4}, two(GQA, GQA, replace(MOE, expert_intermediate_size=96), model_type="mixtral")),
    "deepseek_v3": (
        {**SMALL, **EXPERTS, **LATENT, "intermediate_size": 96, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
        two(MLA, MLA, DENSE, replace(MOE, shared_experts=1, router_bias=True), model_type="deepseek_v3"),
    ),
    "glm_moe_dsa": (
        {**SMALL, **EXPERTS, **LATENT, **DSA, "intermediate_size": 96, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
        two(
            *[replace(MLA, kind="sparse_mla", indexer=Indexer(2, 16, 16, True))] * 2,
            DENSE,
            replace(MOE, shared_experts=1, router_bias=True),
            model_type="glm_moe_dsa",
        ),
    ),
    "glm4_moe": (
        {**PLAIN, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
        two(*[replace(GQA, qk_norm=True, qkv_bias=True)] * 2, DENSE, replace(MOE, shared_experts=1, router_bias=True)),
    ),
    "gpt_oss": (
        {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
        model(
            [
                Layer(i, replace(GQA, qkv_bias=True, o_bias=True), replace(MOE, expert_intermediate_size=96, bias=True), 2, (Part("self_attn.sinks", 4, True),))
                for i in range(2)
            ],
            model_type="gpt_oss",
        ),
    ),
    "gemma3_text": (PLAIN, two(*[replace(GQA, qk_norm=True)] * 2, DENSE, norms=4, tied=True, model_type="gemma3_text")),
    "gemma4_text": (
        {
            **PLAIN,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        model(
            [
                Layer(i, attention, replace(MOE, shared_experts=1, shared_intermediate_size=96), 7, (Part("router.scale", 64), Part("per_expert_scale", 4)))
                for i, attention in enumerate((replace(GQA, qk_norm=True), Attention("full", 4, 1, 32, 32, qk_norm=True, k_is_v=True)))
            ],
            tied=True,
            model_type="gemma4_text",
        ),
    ),
    "qwen3_next": (
        {**PLAIN, **EXPERTS, **MIXED, "num_experts": 4, "shared_expert_intermediate_size": 48},
        two(
            GDN,
            replace(GQA, output_gate=True, qk_norm=True),
            replace(MOE, shared_experts=1, shared_intermediate_size=48, shared_gate=True),
            model_type="qwen3_next",
        ),
    ),
    "qwen3_5_text": ({**PLAIN, **MIXED}, two(GDN, replace(GQA, output_gate=True, qk_norm=True), DENSE, model_type="qwen3_5_text")),
    "minimax_m2": (
        {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
        two(*[replace(GQA, qk_norm=True, qk_norm_all_heads=True)] * 2, replace(MOE, expert_intermediate_size=96, router_bias=True), model_type="minimax_m2"),
    ),
    "nemotron_h": (
        {
            **SMALL,
            "intermediate_size": 96,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "mlp", "attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
            "num_experts_per_tok": 2,
        },
        model(
            [
                Layer(0, Attention("mamba2", state_value_heads=4, state_value_dim=16, state_key_dim=8, state_groups=2, conv_kernel=4), Mlp("none"), 1),
                Layer(1, Attention("none"), replace(DENSE, gated=False), 1),
                Layer(2, GQA, Mlp("none"), 1),
                Layer(
                    3,
                    Attention("none"),
                    replace(MOE, gated=False, router_bias=True, expert_hidden_size=32, shared_experts=1, shared_intermediate_size=48),
                    1,
                ),
            ],
            model_type="nemotron_h",
            architecture="NemotronHForCausalLM",
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_those_that_transformers_builds(name):
    config, spec = MODELS[name]
    assert weights.checkpoint_parameters(spec) == counted(name, **config)


def test_kimi_delta_attention_against_transformers():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if "kimi_linear" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no kimi_linear")
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("kimi_linear", hidden_size=64, num_hidden_layers=1))
    expected = sum(p.numel() for name, p in built.named_parameters() if "layers.0.self_attn" in name)
    kda = Attention("kda", state_key_heads=32, state_value_heads=32, state_key_dim=128, state_value_dim=128, conv_kernel=4)
    spec = model([Layer(0, kda, DENSE)], model_type="kimi_linear")
    assert sum(one.parameters for one in weights.components(spec.layers[0], spec) if one.group == "attention") == expected
