"""Weights of what mixes tokens in a layer: grouped-query, latent and sparse attention, and the recurrent mixers."""

from ..spec import Attention, Indexer, ModelSpec
from .component import Component, build, linear
from .names import Names

# Formats under which vLLM replicates in_proj_ba of Qwen3.5 (qwen_gdn_linear_attn.py:maybe_disable_tp): Marlin needs 64 output columns a rank.
MARLIN_REPLICATES_BA = ("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "auto-round", "inc")


def attention_components(attention: Attention, spec: ModelSpec, prefix: str, names: Names) -> list[Component]:
    """Weights of one layer's attention or recurrent mixer; prefix is the layer's module path."""
    # Compressed attention (DeepSeek V4) stands in the layer's parts, whole.
    if attention.kind in ("none", "compressed"):
        return []
    if attention.kind in ("mla", "sparse_mla"):
        return _mla(attention, spec, f"{prefix}.{names.attention}")
    if attention.kind == "gdn":
        return _gdn(attention, spec, f"{prefix}.{names.state}")
    if attention.kind == "kda":
        return _kda(attention, spec, f"{prefix}.{names.state}")
    if attention.kind == "mamba2":
        return _mamba2(attention, spec, f"{prefix}.{names.state}")
    return _gqa(attention, spec, f"{prefix}.{names.attention}")


def _gqa(a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """q, k, v, o and norms (vLLM: models/llama.py, qwen3_next.py:Qwen3NextAttention, gemma4.py, gpt_oss.py, minimax_m2.py).

    A layer that uses another's KV cache has no k and v. Where K serves as V, vLLM loads the same matrix twice (gemma4.py:Gemma4Attention).
    """
    hidden, value_dim = spec.hidden_size, a.v_head_dim or a.head_dim
    kv = {"bias": a.qkv_bias, "groups": a.kv_heads or 1}
    k_rows, v_rows = a.kv_heads * a.head_dim, a.kv_heads * value_dim
    found = linear(spec, "attention.q_proj", f"{at}.q_proj", a.heads * a.head_dim * (1 + a.output_gate), hidden, "column", bias=a.qkv_bias)
    if not a.kv_shared:
        found += linear(spec, "attention.k_proj", f"{at}.k_proj", k_rows, hidden, "column", grouped_rows=k_rows, **kv)
        found += linear(spec, "attention.v_proj", f"{at}.v_proj", v_rows, hidden, "column", grouped_rows=v_rows, stored=not a.k_is_v, **kv)
    found += linear(spec, "attention.o_proj", f"{at}.o_proj", hidden, a.heads * value_dim, "row", bias=a.o_bias)
    if a.qk_norm:
        found += _qk_norms(a, spec, at)
    if a.kind == "sparse_gqa" and a.indexer and a.indexer.owns:
        found += _gqa_indexer(a.indexer, a, spec, at)
    return found


def _qk_norms(a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """One weight of head_dim for all heads, replicated; or one for every head, sharded like the heads (minimax_m2.py)."""
    if not a.qk_norm_all_heads:
        sides = ("q_norm",) if a.kv_shared else ("q_norm", "k_norm")
        return [build(spec, f"attention.{side}", f"{at}.{side}", a.head_dim) for side in sides]
    k_rows = a.kv_heads * a.head_dim
    return [
        build(spec, "attention.q_norm", f"{at}.q_norm", a.heads * a.head_dim, None, "column"),
        build(spec, "attention.k_norm", f"{at}.k_norm", k_rows, None, "column", grouped_rows=k_rows, groups=a.kv_heads),
    ]


def _gqa_indexer(x: Indexer, a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """Block picker of Qwen4Exp (replicated; indexer_qsa.py:QSAIndexer) and of MiniMax M3 (queries follow the KV heads; minimax_m3/nvidia/model.py)."""
    rows, keys = x.heads * x.head_dim, x.kv_heads * x.head_dim
    if spec.model_type.startswith("minimax"):
        found = linear(spec, "indexer.q_proj", f"{at}.index_q_proj", rows, spec.hidden_size, "column", grouped_rows=rows, groups=a.kv_heads)
        found += linear(spec, "indexer.k_proj", f"{at}.index_k_proj", keys, spec.hidden_size, "replicated")
        return found + [build(spec, f"indexer.{side}", f"{at}.index_{side}", x.head_dim) for side in ("q_norm", "k_norm")]
    found = linear(spec, "indexer.qk_proj", f"{at}.indexer.index_qk_proj", rows + keys, spec.hidden_size, "replicated")
    return found + [build(spec, f"indexer.{side}", f"{at}.indexer.{side}", x.head_dim) for side in ("q_layernorm", "k_layernorm")]


def _mla(a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """Latent attention (vLLM: models/deepseek_v2.py:DeepseekV2MLAAttention, deepseek_v32/attention.py).

    The projections into the latents are fused and replicated (DeepSeekV2FusedQkvAProjLinear, disable_tp), those out of them sharded by heads.
    """
    hidden, query_dim = spec.hidden_size, a.nope_head_dim + a.rope_head_dim
    kv_b_rows = a.heads * (a.nope_head_dim + a.v_head_dim)
    if a.q_lora_rank:
        found = linear(spec, "attention.q_a_proj", f"{at}.q_a_proj", a.q_lora_rank, hidden, "replicated", bias=a.qkv_bias)
        found.append(build(spec, "attention.q_a_layernorm", f"{at}.q_a_layernorm", a.q_lora_rank))
        found += linear(spec, "attention.q_b_proj", f"{at}.q_b_proj", a.heads * query_dim, a.q_lora_rank, "column")
    else:
        found = linear(spec, "attention.q_proj", f"{at}.q_proj", a.heads * query_dim, hidden, "column")
    latent = a.kv_lora_rank + a.rope_head_dim
    found += linear(spec, "attention.kv_a_proj", f"{at}.kv_a_proj_with_mqa", latent, hidden, "replicated", bias=a.qkv_bias)
    found.append(build(spec, "attention.kv_a_layernorm", f"{at}.kv_a_layernorm", a.kv_lora_rank))
    kv_b = linear(spec, "attention.kv_b_proj", f"{at}.kv_b_proj", kv_b_rows, a.kv_lora_rank, "column")
    found += kv_b
    if kv_b[0].quantized:
        # The absorbed products have no quantized kernel: W_UK and W_UV are kept besides kv_b_proj in the model's dtype; unquantized they are views
        # (mla_attention.py:process_weights_after_loading).
        module = f"{at}.kv_b_proj"
        found.append(build(spec, "attention.kv_b_unpacked", module, kv_b_rows, a.kv_lora_rank, "column", stored=False))
    found += linear(spec, "attention.o_proj", f"{at}.o_proj", hidden, a.heads * a.v_head_dim, "row", bias=a.o_bias)
    if a.output_gate:
        found += linear(spec, "attention.g_proj", f"{at}.g_proj", a.heads * a.v_head_dim, hidden, "column")
    if a.kind == "sparse_mla" and a.indexer and a.indexer.owns:
        found += _dsa_indexer(a.indexer, a, spec, f"{at}.indexer")
    return found


def _dsa_indexer(x: Indexer, a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """The lightning indexer: replicated. wk and weights_proj are fused in the model's dtype, an FP8 wk is unpacked (deepseek_v2.py:Indexer)."""
    return [
        *linear(spec, "indexer.wq_b", f"{at}.wq_b", x.heads * x.head_dim, a.q_lora_rank or spec.hidden_size, "replicated"),
        *linear(spec, "indexer.wk", f"{at}.wk", x.head_dim, spec.hidden_size, "replicated", plain_when_loaded=True),
        build(spec, "indexer.weights_proj", f"{at}.weights_proj", x.heads, spec.hidden_size),
        build(spec, "indexer.k_norm", f"{at}.k_norm", x.head_dim),
        build(spec, "indexer.k_norm.bias", f"{at}.k_norm", x.head_dim),
    ]


def _gdn(a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """Gated delta net (vLLM: layers/mamba/gdn/qwen_gdn_linear_attn.py:QwenGatedDeltaNetAttention). Qwen3-Next stores two fused projections, later ones four."""
    hidden, heads = spec.hidden_size, a.state_value_heads
    keys, values = a.state_key_heads * a.state_key_dim, heads * a.state_value_dim
    if spec.model_type.startswith("qwen3_next"):
        found = linear(spec, "attention.in_proj_qkvz", f"{at}.in_proj_qkvz", 2 * keys + 2 * values, hidden, "column")
        found += linear(spec, "attention.in_proj_ba", f"{at}.in_proj_ba", 2 * heads, hidden, "column")
    else:
        repeated = spec.quantization is not None and spec.quantization.method in MARLIN_REPLICATES_BA
        found = linear(spec, "attention.in_proj_qkv", f"{at}.in_proj_qkv", 2 * keys + values, hidden, "column")
        found += linear(spec, "attention.in_proj_z", f"{at}.in_proj_z", values, hidden, "column")
        for side in ("in_proj_b", "in_proj_a"):
            found += linear(spec, f"attention.{side}", f"{at}.{side}", heads, hidden, "replicated" if repeated else "column")
    return found + [
        build(spec, "attention.conv1d", f"{at}.conv1d", 2 * keys + values, a.conv_kernel, "column"),
        build(spec, "attention.A_log", f"{at}.A_log", heads, None, "column", width_bytes=4),
        build(spec, "attention.dt_bias", f"{at}.dt_bias", heads, None, "column"),
        build(spec, "attention.norm", f"{at}.norm", a.state_value_dim),
        *linear(spec, "attention.out_proj", f"{at}.out_proj", hidden, values, "row"),
    ]


def _kda(a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """Kimi delta attention (vLLM: models/kimi_k3/nvidia/kda.py:KimiK3DeltaAttention; kimi_gdn_linear_attn.py for the gate of low rank)."""
    hidden, heads, rank = spec.hidden_size, a.state_value_heads, a.state_key_dim
    width = heads * a.state_value_dim
    found = []
    for side in ("q_proj", "k_proj", "v_proj"):
        found += linear(spec, f"attention.{side}", f"{at}.{side}", width, hidden, "column")
    found += linear(spec, "attention.f_a_proj", f"{at}.f_a_proj", rank, hidden, "replicated")
    found += linear(spec, "attention.f_b_proj", f"{at}.f_b_proj", width, rank, "column")
    found += linear(spec, "attention.b_proj", f"{at}.b_proj", heads, hidden, "column")
    if a.output_gate:
        found += linear(spec, "attention.g_proj", f"{at}.g_proj", width, hidden, "column")
    else:
        found += linear(spec, "attention.g_a_proj", f"{at}.g_a_proj", rank, hidden, "replicated")
        found += linear(spec, "attention.g_b_proj", f"{at}.g_b_proj", width, rank, "column")
    found += [build(spec, f"attention.{s}_conv1d", f"{at}.{s}_conv1d", width, a.conv_kernel, "column", width_bytes=4) for s in ("q", "k", "v")]
    return found + [
        build(spec, "attention.A_log", f"{at}.A_log", heads, None, "column", width_bytes=4),
        build(spec, "attention.dt_bias", f"{at}.dt_bias", width, None, "column", width_bytes=4),
        build(spec, "attention.o_norm", f"{at}.o_norm", a.state_value_dim),
        *linear(spec, "attention.o_proj", f"{at}.o_proj", hidden, width, "row"),
    ]


def _mamba2(a: Attention, spec: ModelSpec, at: str) -> list[Component]:
    """Mamba 2 (vLLM: layers/mamba/mamba_mixer2.py:MambaMixer2). A single group of B and C repeats on every rank."""
    hidden, heads = spec.hidden_size, a.state_value_heads
    inner, grouped = heads * a.state_value_dim, 2 * a.state_groups * a.state_key_dim
    shared = {"grouped_rows": grouped, "groups": a.state_groups}
    found = linear(spec, "attention.in_proj", f"{at}.in_proj", 2 * inner + grouped + heads, hidden, "column", bias=a.qkv_bias, **shared)
    found.append(build(spec, "attention.conv1d", f"{at}.conv1d", inner + grouped, a.conv_kernel, "column", **shared))
    if a.conv_bias:
        found.append(build(spec, "attention.conv1d.bias", f"{at}.conv1d", inner + grouped, None, "column", **shared))
    return found + [
        build(spec, "attention.A_log", f"{at}.A_log", heads, None, "column", width_bytes=4),
        build(spec, "attention.D", f"{at}.D", heads, None, "column"),
        build(spec, "attention.dt_bias", f"{at}.dt_bias", heads, None, "column"),
        build(spec, "attention.norm", f"{at}.norm", inner, None, "column"),
        *linear(spec, "attention.out_proj", f"{at}.out_proj", hidden, inner, "row", bias=a.o_bias),
    ]
