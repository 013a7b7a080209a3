"""Weights of a layer's feed-forward part: dense, or experts with their router, shared expert and latent projections."""

from ..spec import Mlp, ModelSpec
from .component import Component, build, dtype_bytes, linear
from .names import Names

# Families whose router is built and stored in float32 (vLLM: minimax_m2.py, minimax_m3: GateLinear(params_dtype=torch.float32)).
FLOAT32_ROUTER = ("minimax",)
# Family whose router is stored in the model's dtype and held in float32 (vLLM: glm4_moe.py:Glm4MoE.gate).
FLOAT32_ROUTER_WHEN_LOADED = ("glm4_moe", "glm4v_moe")


def mlp_components(mlp: Mlp, spec: ModelSpec, prefix: str, names: Names) -> list[Component]:
    """Weights of one layer's feed-forward part; prefix is the layer's module path."""
    if mlp.kind == "none":
        return []
    if mlp.kind == "dense":
        return _dense(spec, "mlp", f"{prefix}.{names.mlp}", mlp.intermediate_size, mlp)
    at = f"{prefix}.{names.moe}" if names.moe else prefix
    return _router(mlp, spec, at, names) + _routed(mlp, spec, at, names) + _shared(mlp, spec, at, names) + _latent(mlp, spec, at, names)


def _dense(spec: ModelSpec, name: str, at: str, size: int, mlp: Mlp) -> list[Component]:
    """gate and up by columns, down by rows (vLLM: models/llama.py:LlamaMLP; nemotron_h.py:NemotronHMLP has no gate)."""
    found = linear(spec, f"{name}.gate_proj", f"{at}.gate_proj", size, spec.hidden_size, "column", bias=mlp.bias) if mlp.gated else []
    found += linear(spec, f"{name}.up_proj", f"{at}.up_proj", size, spec.hidden_size, "column", bias=mlp.bias)
    return found + linear(spec, f"{name}.down_proj", f"{at}.down_proj", spec.hidden_size, size, "row", bias=mlp.bias)


def _router(mlp: Mlp, spec: ModelSpec, at: str, names: Names) -> list[Component]:
    """Replicated and never quantized; its balancing bias is float32 (vLLM: deepseek_v2.py:DeepseekV2MoE). gpt-oss: an ordinary bias of the layer."""
    width = dtype_bytes(mlp.router_dtype) if mlp.router_dtype else 4 if spec.model_type.startswith(FLOAT32_ROUTER) else None
    lite = spec.model_type.startswith("glm4_moe_lite")
    loaded = 4 if spec.model_type.startswith(FLOAT32_ROUTER_WHEN_LOADED) and not lite else None
    found = [build(spec, "router.gate", f"{at}.{names.router}", mlp.experts, spec.hidden_size, width_bytes=width, loaded_width_bytes=loaded)]
    ordinary = names.router_bias == names.router
    if mlp.router_bias or (ordinary and mlp.bias):
        found.append(build(spec, "router.bias", f"{at}.{names.router_bias}", mlp.experts, width_bytes=None if ordinary else 4))
    return found


def _routed(mlp: Mlp, spec: ModelSpec, at: str, names: Names) -> list[Component]:
    """Routed experts, each matrix counted once for all experts (vLLM: layers/fused_moe: TP cuts the intermediate size, expert parallel the experts)."""
    size, hidden = mlp.expert_intermediate_size, mlp.expert_hidden_size or spec.hidden_size
    gate, up, down = names.expert_matrices
    shapes = [("gate_proj", gate, size, hidden, "column"), ("up_proj", up, size, hidden, "column"), ("down_proj", down, hidden, size, "row")]
    found = []
    for name, stored_name, rows, cols, within in shapes if mlp.gated else shapes[1:]:
        module, more = f"{at}.experts.*.{stored_name}", {"count": mlp.experts, "within": within}
        found.append(build(spec, f"experts.{name}", module, rows, cols, "experts", quantizable=True, **more))
        if mlp.bias:
            more["within"] = "column" if within == "column" else "replicated"
            found.append(build(spec, f"experts.{name}.bias", module, rows, None, "experts", **more))
    return found


def _shared(mlp: Mlp, spec: ModelSpec, at: str, names: Names) -> list[Component]:
    """Shared expert, sharded like a dense MLP, and its gate (vLLM: deepseek_v2.py:DeepseekV2MoE, qwen3_next.py:Qwen3NextSparseMoeBlock).

    In Gemma 4 it is the dense MLP beside the experts (gemma4.py:Gemma4DecoderLayer). shared_intermediate_size is the width of all shared experts
    together; without it each has the width of a routed one.
    """
    size = mlp.shared_intermediate_size or mlp.shared_experts * mlp.expert_intermediate_size
    if not size:
        return []
    found = _dense(spec, "shared_expert", f"{at}.{names.shared}", size, mlp)
    if mlp.shared_gate:
        found.append(build(spec, "shared_expert.gate", f"{at}.shared_expert_gate", 1, spec.hidden_size))
    return found


def _latent(mlp: Mlp, spec: ModelSpec, at: str, names: Names) -> list[Component]:
    """Projections into and out of narrower experts, replicated (vLLM: nemotron_h.py:NemotronHMoE; kimi_k3 keeps them unquantized)."""
    latent = mlp.expert_hidden_size
    if latent is None or latent == spec.hidden_size:
        return []
    kimi = spec.model_type.startswith("kimi")
    into, out = names.latent
    found = linear(spec, "experts.latent_in", f"{at}.{into}", latent, spec.hidden_size, "replicated", quantizable=not kimi)
    return found + linear(spec, "experts.latent_out", f"{at}.{out}", spec.hidden_size, latent, "replicated", quantizable=not kimi)
