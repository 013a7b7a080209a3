"""Why a strategy cannot be: one function for each reason, with where it comes from. And what a strategy needs, or does not bring.

Read off vLLM 0.29, 0.30, 0.32 and 0.33; 0.31 is taken as 0.30. A veto is what that release refuses, fails on or computes wrong, and no patch mends.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .. import kv, memory, weights
from ..drafts import NO_DRAFT_WITH_PP, minor
from ..params import Params
from ..spec import ModelSpec
from .layouts import Strategy


@dataclass(frozen=True)
class Veto:
    """One reason, where it stands, and for which release it was judged."""

    reason: str
    source: str


def is_mla(spec: ModelSpec) -> bool:
    """Latent attention on every attention layer."""
    kinds = {layer.attention.kind for layer in spec.layers} - {"none", "gdn", "kda", "mamba2"}
    return bool(kinds) and kinds <= {"mla", "sparse_mla"}


def is_dsa(spec: ModelSpec) -> bool:
    """Sparse latent attention (DeepSeek V3.2, GLM-5)."""
    return any(layer.attention.kind == "sparse_mla" for layer in spec.layers)


def heads(s: Strategy, spec: ModelSpec, params: Params) -> Veto | None:
    """TP divides the attention heads; KV heads are divided or repeated."""
    q, kv = memory.heads(spec)
    tp = s.tensor_parallel_size
    if q % tp:
        return Veto(f"TP{tp} does not divide {q} attention heads", "config/model.py:verify_with_parallel_config")
    if kv % tp and tp % kv:
        return Veto(f"{kv} KV heads are neither divided nor repeated by TP{tp}", "layers/linear.py:QKVParallelLinear")
    return None


def experts(s: Strategy, spec: ModelSpec, params: Params) -> Veto | None:
    """Experts are divided by width, in whole quantization groups, or whole with expert parallel."""
    moe = next((layer.mlp for layer in spec.layers if layer.mlp.experts), None)
    if moe is None:
        return None
    ranks = s.layout.expert_ranks
    if s.tensor_parallel_size > moe.experts:
        return Veto(f"TP{s.tensor_parallel_size} is more than the {moe.experts} experts", "models/qwen3_moe.py and others")
    if s.expert_parallel and ranks > 1 and params.engine.device == "cpu":
        # The router picks among all experts, the kernel has those of its rank, and the map from one to the other is not looked at.
        return Veto("EP on a CPU: every rank dies of its first request (segmentation fault)", "fused_moe/experts/cpu_moe.py, csrc/cpu/cpu_fused_moe.cpp, 0.30")
    if s.expert_parallel:
        return Veto(f"{moe.experts} experts on {ranks} ranks leave some without any", "fused_moe/expert_map_manager.py") if ranks > moe.experts else None
    if moe.expert_intermediate_size % ranks:
        width = moe.expert_intermediate_size
        return Veto(f"experts of width {width} are not divided by {ranks} ranks; EP keeps them whole", "fused_moe/config.py:FusedMoEConfig")
    # MXFP4 experts are cut in whole blocks of 32 and padded (models/gpt_oss.py, fused_moe/oracle/mxfp4.py).
    by_group = spec.quantization and spec.quantization.strategy == "group" and spec.quantization.method != "mxfp4"
    group = spec.quantization.group_size if spec.quantization and by_group else None
    if group and moe.expert_intermediate_size // ranks % group:
        width = moe.expert_intermediate_size // ranks
        text = f"{width} columns of an expert on each rank are no whole quantization groups of {group}; EP keeps experts whole"
        return Veto(text, "compressed_tensors_moe_wna16.py, distributed/utils.py:verify_group_size_divides_partition")
    return None


def quantized_layers(s: Strategy, spec: ModelSpec, params: Params) -> Veto | None:
    """TP cuts quantized linear layers between whole groups or blocks; experts have a rule of their own."""
    tp = s.tensor_parallel_size
    for held in weights.layer_kinds(spec)[0] if tp > 1 and spec.quantization else ():
        for one in held:
            scheme = one.scheme
            if scheme is None or one.sharding not in ("row", "column") or scheme.method == "mxfp4":
                continue
            rows, cols = scheme.block or (1, scheme.group_size if scheme.strategy == "group" and scheme.group_size else 1)
            if one.sharding == "row" and one.cols and one.cols % tp == 0 and one.cols // tp % max(cols, 1):
                reason = f"{one.name}: {one.cols // tp} input columns on each of {tp} ranks are no whole quantization groups of {cols}"
                return Veto(reason, "distributed/utils.py:verify_group_size_divides_partition, fp8_utils.py:validate_fp8_block_shape")
            if one.sharding == "column" and scheme.block and not one.grouped_rows and one.rows % tp == 0 and one.rows // tp % rows:
                reason = f"{one.name}: {one.rows // tp} output rows on each of {tp} ranks are no whole quantization blocks of {rows}"
                return Veto(reason, "fp8_utils.py:validate_fp8_block_shape")
    return None


def stages(s: Strategy, spec: ModelSpec, params: Params) -> Veto | None:
    """A pipeline has a layer for each stage, a draft model it can carry, and nothing that only the first stage knows."""
    pp, release = s.pipeline_parallel_size, minor(params.engine.vllm_release)
    if pp > spec.num_hidden_layers:
        return Veto(f"{pp} stages for {spec.num_hidden_layers} layers", "distributed/utils.py:get_pp_indices leaves stages empty")
    if pp == 1:
        return None
    if params.engine.mtp_tokens and spec.mtp_layers:
        if release <= 29:
            return Veto("drafted tokens never reach the other stages in 0.29; draft_tokens 0, or 0.30", "v1/worker/gpu/pp_utils.py:PPHandler")
        for family, why in NO_DRAFT_WITH_PP.items():
            if spec.model_type.startswith(family):
                return Veto(f"drafting with a pipeline: {why}", "vLLM 0.30 to 0.33")
    if spec.model_type.startswith("gemma4") and spec.boundary_values > spec.hidden_size:
        return Veto("per-layer embeddings are lost on later stages: wrong answers without an error", "models/gemma4.py:Gemma4Model.forward, 0.29 to 0.33")
    return None


def decode_context(s: Strategy, spec: ModelSpec, params: Params) -> Veto | None:
    """DCP needs an attention backend that returns the log-sum-exp of its softmax, repeated KV heads, and no window or state of its own kind."""
    dcp, tp = s.decode_context_parallel_size, s.tensor_parallel_size
    if dcp == 1:
        return None
    kinds = {layer.attention.kind for layer in spec.layers}
    if params.engine.device == "cpu":
        return Veto("DCP: attention on a CPU does not return the softmax's log-sum-exp", "v1/worker/cp_utils.py:check_attention_cp_compatibility")
    if kinds & {"sparse_gqa", "compressed"}:
        return Veto("DCP: this model's sparse attention does not support it", "models/qwen4_exp qsa, minimax_m3, deepseek_v4: supports_dcp is False")
    if "sliding" in kinds:
        return Veto("DCP does not support sliding-window layers", "v1/kv_cache_interface.py:SlidingWindowSpec.max_memory_usage_bytes")
    if is_dsa(spec) and not memory.cache_dtype(spec, params).startswith("fp8"):
        return Veto("DCP: FlashMLA's sparse kernel returns the log-sum-exp with fp8_ds_mla only", "attention/backends/mla/flashmla_sparse.py")
    if not is_mla(spec):
        q, kv = memory.heads(spec)
        if tp <= kv or dcp > tp // kv or q // kv % dcp:
            text = f"DCP{dcp}: only ranks that repeat a KV head can share its tokens (TP{tp}, {kv} KV heads)"
            return Veto(text, "config/model.py:verify_with_parallel_config")
    return None


def prefill_context(s: Strategy, spec: ModelSpec, params: Params) -> Veto | None:
    """PCP: prompts are divided, the KV cache is not; few models and settings have it."""
    if s.prefill_context_parallel_size == 1:
        return None
    release = minor(params.engine.vllm_release)
    source = "v1/worker/gpu: PCPManager.validate_config"
    dcp, pcp = s.decode_context_parallel_size, s.prefill_context_parallel_size
    if not is_mla(spec):
        return Veto("PCP supports models of latent attention (MLA) only", source)
    if any(layer.attention.kind in kv.STATE_KINDS for layer in spec.layers):
        return Veto("PCP supports no recurrent layers", "v1/core/single_type_kv_cache_manager.py, models/kimi_k3/nvidia/mla.py")
    if any("tower" in part for part in spec.not_counted):
        return Veto("PCP supports no models with image or audio inputs", source)
    if params.engine.device == "cpu":
        return Veto("PCP needs model runner V2, which needs Triton", "config/vllm.py:use_v2_model_runner")
    if release < 32 and s.pipeline_parallel_size > 1:
        return Veto(f"PCP with PP is refused before 0.32 (release {params.engine.vllm_release})", source)
    if release < 32 and s.data_parallel_size > 1:
        return Veto(f"PCP with DP is refused before 0.32 (release {params.engine.vllm_release})", "config/parallel.py, platforms/cuda.py")
    if release <= 29 and params.engine.draft_tokens:
        return Veto("PCP with drafting is refused in 0.29", source)
    if not params.engine.enforce_eager:
        # 0.29 refuses full graphs, which its defaults are; from 0.33 on sparse latent attention has graphs.
        if release <= 29:
            return Veto("PCP in 0.29 refuses full CUDA graphs, which are the default; engine.enforce_eager true", source)
        if is_dsa(spec) and dcp == 1 and release < 33:
            return Veto("PCP on sparse latent attention runs without CUDA graphs only; engine.enforce_eager true", source)
    if dcp not in (1, pcp, pcp * s.tensor_parallel_size):
        return Veto(f"DCP{dcp} does not go with PCP{pcp}: 1, {pcp} or {pcp * s.tensor_parallel_size} would", "config/parallel.py:_validate_parallel_config")
    if dcp > 1 and not is_dsa(spec) and release >= 30:
        return Veto("PCP with DCP supports sparse latent attention only", source)
    return None


VETOES: tuple[Callable[[Strategy, ModelSpec, Params], Veto | None], ...] = (heads, experts, quantized_layers, stages, decode_context, prefill_context)


def sparse_context(s: Strategy, spec: ModelSpec, capability: float | None) -> Veto | None:
    """DCP on sparse latent attention merges picks with kernels for sm_90 and later."""
    if s.decode_context_parallel_size == 1 or not is_dsa(spec) or capability is None or capability >= 9.0:
        return None
    source = "SparseAttnIndexer: _assert_cutedsl_dcp_merge_supported; FlashMLA's sparse kernels"
    return Veto(f"DCP on sparse latent attention needs kernels of sm_90, these GPUs are sm_{capability * 10:.0f}", source)


def vetoes_of(s: Strategy, spec: ModelSpec, params: Params, capability: float | None = None) -> list[Veto]:
    """All reasons against a strategy but memory, which needs the cards. capability: smallest compute capability of the GPUs, None: not told."""
    found = [check(s, spec, params) for check in VETOES] + [sparse_context(s, spec, capability)]
    return [one for one in found if one is not None]


@dataclass(frozen=True)
class Need:
    """A patch without which a strategy fails or answers wrong, or UNVERIFIED: seen to go wrong, and not shown right since. why: what happens else."""

    name: str
    why: str

    @property
    def patch(self) -> str:
        """Id of the patch in the catalogue, '' for a need that no patch meets."""
        return self.name.removeprefix("patch ") if self.name.startswith("patch ") else ""


UNVERIFIED = "unverified"
NO_WEIGHTS = "indexer weights"
# Needs that nothing at hand meets: such a layout is chosen only where no other is as good.
OPEN = (UNVERIFIED, NO_WEIGHTS)


def needs_of(s: Strategy, spec: ModelSpec, params: Params, relayed: bool = False, flipped: tuple[int, ...] = (), flips_allowed: bool = True) -> list[Need]:
    """What a strategy needs on this release. relayed: its best split relays top-k indices; flipped: layers that it lets compute their own, flips_allowed:
    with weights that the checkpoint is known to have."""
    found: list[Need] = []
    if s.pipeline_parallel_size == 1:
        return found
    if is_dsa(spec) and s.tensor_parallel_size > 1 and params.engine.device == "cuda":
        found.append(Need("patch tp-partial", "stock sends partial sums across the boundary and answers wrong without an error, whatever the partition"))
    if relayed:
        found.append(Need("patch index-relay", "the cut parts layers that share top-k indices: stock answers wrong without an error"))
    if flipped:
        found.append(Need("patch index-flip", "the cut parts layers that share top-k indices: stock answers wrong without an error"))
        if not flips_allowed:
            found.append(Need(NO_WEIGHTS, "flipped layers would compute indices with weights that the checkpoint is not known to have"))
    if is_dsa(spec) and s.pipeline_parallel_size >= 4:
        found.append(Need(UNVERIFIED, "field report 001 saw 20% (45% with drafting) degenerate answers at PP4, unpatched; nobody has shown it right since"))
    if spec.model_type.startswith("qwen4"):
        found.append(Need("patch ple-containment", "stock refuses n-gram embeddings with a pipeline; three patches that go together"))
    if params.engine.device == "cpu" and params.engine.enforce_eager:
        found.append(Need("patch cpu-eager-pp", "stock dies at the first request"))
    return found
