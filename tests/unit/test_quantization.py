"""Quantization configs of every method, and which modules a pattern of an ignore list means."""

import pytest

from fieldbook import quantization

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(weights, targets=("Linear",), **more):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": list(targets), "weights": WEIGHTS | weights}}} | more


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, ("fp8", 8, "float", "tensor", None, None, 4, 0, 0)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", 8, "float", "block", None, (128, 128), 4, 0, 0)),
        ({"quant_method": "fbgemm_fp8"}, ("fbgemm_fp8", 8, "float", "channel", None, None, 4, 0, 0)),
        (compressed({}), ("compressed-tensors", 4, "int", "group", 128, None, 2, 0, 0)),
        (compressed({"symmetric": False}), ("compressed-tensors", 4, "int", "group", 128, None, 2, 4, 0)),
        (compressed({"num_bits": 8, "strategy": "channel"}), ("compressed-tensors", 8, "int", "channel", None, None, 4, 0, 0)),
        (
            compressed({"num_bits": 8, "type": "float", "strategy": "tensor", "group_size": None}),
            ("compressed-tensors", 8, "float", "tensor", None, None, 4, 0, 0),
        ),
        (
            compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
            ("compressed-tensors", 8, "float", "block", None, (128, 128), 4, 0, 0),
        ),
        (compressed({"type": "float", "group_size": 32}), ("compressed-tensors", 4, "float", "group", 32, None, 1, 0, 0)),
        (compressed({"type": "float", "strategy": "tensor_group", "group_size": 16}), ("compressed-tensors", 4, "float", "group", 16, None, 1, 0, 1)),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, ("awq", 4, "int", "group", 128, None, 2, 4, 0)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, ("gptq", 8, "int", "channel", None, None, 2, 8, 0)),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, ("auto-round", 4, "int", "group", 128, None, 2, 4, 0)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("modelopt", 8, "float", "tensor", None, None, 4, 0, 0)),
        ({"quantization": {"quant_algo": "NVFP4"}}, ("modelopt", 4, "float", "group", 16, None, 1, 0, 1)),
        ({"quant_method": "mxfp4"}, ("mxfp4", 4, "float", "group", 32, None, 1, 0, 0)),
    ],
)
def test_methods(config, expected):
    q = quantization.read(config)
    assert (q.method, q.weight_bits, q.kind, q.strategy, q.group_size, q.block, q.scale_bytes, q.zero_point_bits, q.global_scales) == expected


def test_nothing_quantized():
    assert quantization.read({"quant_method": "none"}) is None
    assert quantization.read({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}) is None
    assert not quantization.is_quantized(None, "model.layers.0.self_attn.q_proj")


def test_mixed_schemes():
    groups = {
        "a": {"targets": ["re:.*experts.*"], "weights": WEIGHTS},
        "b": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    }
    q = quantization.read({"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head", "re:.*self_attn.*"]})
    bits = {
        name: s and s.weight_bits
        for name in ("mlp.experts.0.up_proj", "mlp.up_proj", "self_attn.o_proj")
        for s in [quantization.scheme_of(q, f"model.layers.0.{name}")]
    }
    assert bits == {"mlp.experts.0.up_proj": 4, "mlp.up_proj": 8, "self_attn.o_proj": None}
    layers = {f"model.layers.0.mlp.experts.{i}.{m}": {"quant_algo": "NVFP4", "group_size": 16} for i in range(4) for m in ("up_proj", "down_proj")}
    layers["model.layers.0.self_attn.o_proj"] = {"quant_algo": "FP8"}
    q = quantization.read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert q.only == ("model.layers.0.mlp.experts",)
    assert quantization.scheme_of(q, "model.layers.0.self_attn.o_proj").weight_bits == 8
    assert not quantization.is_quantized(q, "model.layers.0.mlp.shared_experts.up_proj")
    v4 = quantization.read({"quant_method": "fp8", "weight_block_size": [128, 128]}, expert_dtype="fp4")
    assert quantization.scheme_of(v4, "layers.3.ffn.experts.0.w1").method == "mxfp4" and v4.scale_bytes == 1
    dynamic = {"-:.*attn.*": {}, "+:.*down.*": {"bits": 8}}
    gptq = quantization.read({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic})
    found = [quantization.scheme_of(gptq, f"model.layers.0.{m}") for m in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj")]
    assert [scheme and scheme.weight_bits for scheme in found] == [None, 8, 4]


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("model.layers.1.", "model.layers.1.mlp.up_proj", True),
        ("gate", "model.layers.3.block_sparse_moe.gate", True),
        ("gate", "model.layers.3.mlp.gate_proj", False),
        ("self_attn", "model.layers.3.self_attn.q_proj", True),
        ("model.language_model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn*", "language_model.model.layers.0.self_attn.q_proj", True),
        ("*.mlp.shared_expert.*", "model.layers.0.mlp.shared_expert.up_proj", True),
        ("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.up_proj", True),
        ("re:^language_model\\.model\\.layers\\.0\\.", "model.layers.0.mlp.up_proj", True),
        ("re:(", "model.layers.0.mlp.up_proj", False),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.k_proj", True),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.up_proj", True),
        ("backbone.layers.4.mixer.in_proj", "backbone.layers.4.mixer.in_proj", True),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.3.up_proj", True),
        ("", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_patterns(pattern, name, matched):
    assert quantization.matches((pattern,), name) is matched


def test_what_no_format_quantizes():
    q = quantization.read({"quant_method": "fp8"})
    for name in (
        "lm_head",
        "model.embed_tokens",
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.mlp.gate",
        "model.layers.0.linear_attn.conv1d",
    ):
        assert not quantization.is_quantized(q, name)
    assert quantization.is_quantized(q, "model.layers.0.mlp.gate_proj")
    assert quantization.is_quantized(quantization.read({"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}), "lm_head")
