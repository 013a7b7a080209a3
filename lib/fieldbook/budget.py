"""What is left for the KV cache on one rank: vLLM's share of the memory, less weights, less what is neither weight nor cache.

Only the sum of the terms can be known before a launch: what torch and NCCL hold, and how high a step's temporary tensors reach, are estimates here,
with their error beside them. After a launch the log's figures take their place.
"""

import math
from dataclasses import dataclass, replace

from .spec import ModelSpec

GIB = 2**30
# Held by a rank besides weights and torch's tensors: CUDA context, library workspaces, allocator slack. 0.55 GiB on an H200 alone with an eager server,
# 0.8 with compiled kernels and graphs, in each of five boots; each process group adds NCCL's buffers (second field report: 3.1 GiB at TP4 x PP2, which has
# three).
NON_TORCH_BYTES = round(0.55 * GIB)
COMPILED_BYTES = round(0.25 * GIB)
NON_TORCH_PER_GROUP_BYTES = round(0.75 * GIB)
# Graphs of all batch sizes, as vLLM estimates them before it captures (v1/worker/gpu/model_runner.py:profile_cudagraph_memory).
GRAPHS_BYTES = round(0.9 * GIB)
# How far an estimate may be off, as a share of it. Against three logs of an H200 and both ranks of the second field report the largest miss of a term was
# 0.19, of their sum 0.14 (tests/unit/test_budget.py); wider than that, since five ranks are few. The first boot of a layout, which finds no compiled
# kernels of an earlier one, peaked 0.23 GiB higher than the four after it.
ERROR = 0.5


@dataclass(frozen=True)
class Budget:
    """Terms of one rank in bytes; evidence says whether they are estimates or a log's figures. available = requested - the five others.

    buffers: tables that 'Model loading took' counts with the weights (weights.buffer_bytes).
    """

    total_bytes: int
    requested_bytes: int
    weights_bytes: int
    buffers_bytes: int
    non_torch_bytes: int
    activation_bytes: int
    graphs_bytes: int
    evidence: str
    error_bytes: int

    @property
    def other_bytes(self) -> int:
        """Neither weights nor cache."""
        return self.buffers_bytes + self.non_torch_bytes + self.activation_bytes + self.graphs_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes left for KV cache and state; negative when the weights alone are too much."""
        return self.requested_bytes - self.weights_bytes - self.other_bytes


@dataclass(frozen=True)
class LoggedTerms:
    """What the boot log of an earlier run told of one stage's rank, in GiB: what lies outside torch, and the activation peak (graphs in it)."""

    non_torch_gib: float
    peak_activation_gib: float


@dataclass(frozen=True)
class Gpus:
    """Memory that CUDA reports of each GPU, in the order of ranks (stage by stage, TP ranks within), and what an earlier run's log told of each stage."""

    total_bytes: tuple[int | None, ...]
    terms: tuple[LoggedTerms, ...] = ()


def requested_bytes(total_bytes: int, gpu_memory_utilization: float) -> int:
    """What vLLM takes of a GPU, rounded up (vLLM: v1/worker/utils.py:request_memory). total_bytes: what CUDA calls the total."""
    return math.ceil(total_bytes * gpu_memory_utilization)


def activation_bytes(spec: ModelSpec, layers: range, tokens: int, dtype_bytes: int, tensor_parallel_size: int, last: bool, sequences: int) -> int:
    """Highest temporary memory of a step of `tokens` tokens on one rank, estimated: the widest layer part, or the logits of the last stage.

    Dense: gate and up, their product, and two copies of the hidden state. Experts: each token is copied for each of its experts. Sparse latent
    attention works in the latent space in prefill too (mla_attention.py: forward_mqa): every head's query, its latent, both joined, and the latent output.
    """
    widest = 0
    for layer in (spec.layers[i] for i in layers):
        mlp = layer.mlp
        inner = 3 * (mlp.intermediate_size + mlp.shared_intermediate_size) // tensor_parallel_size
        routed = mlp.experts_per_token * (spec.hidden_size + 3 * mlp.expert_intermediate_size // tensor_parallel_size)
        attention = layer.attention
        head = attention.head_dim or attention.nope_head_dim + attention.rope_head_dim
        # Without the latent copies the estimate for the sparse model on an H200 was 0.3 GiB of 1.8.
        per_head = head + 3 * attention.kv_lora_rank + attention.rope_head_dim if attention.kind == "sparse_mla" else 3 * head
        widest = max(widest, inner, routed, attention.heads * per_head // tensor_parallel_size)
    # Every TP rank gathers the whole vocabulary (layers/logits_processor.py:_gather_logits), and the sampler works in float32.
    logits = sequences * spec.vocab_size * 4 if last else 0
    return max(tokens * (widest + 2 * spec.hidden_size) * dtype_bytes, logits)


def calibrated(terms: Budget, logged: LoggedTerms) -> Budget:
    """The budget with an earlier run's figures in place of the estimates. Its log printed two decimals of each of two terms."""
    outside, peak = round(logged.non_torch_gib * GIB), round(logged.peak_activation_gib * GIB)
    return replace(terms, non_torch_bytes=outside, activation_bytes=peak, graphs_bytes=0, evidence="an earlier run's log", error_bytes=round(0.05 * GIB))


def estimate(
    spec: ModelSpec,
    layers: range,
    *,
    total_bytes: int,
    gpu_memory_utilization: float,
    weights_bytes: int,
    buffers_bytes: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    dtype_bytes: int,
    enforce_eager: bool,
    last: bool,
    draft_tokens: int = 0,
) -> Budget:
    """The budget of one rank before a launch."""
    drafting = last and draft_tokens > 0
    groups = (tensor_parallel_size > 1) + (pipeline_parallel_size > 1) + (tensor_parallel_size > 1 and pipeline_parallel_size > 1)
    non_torch = NON_TORCH_BYTES + (0 if enforce_eager else COMPILED_BYTES) + groups * NON_TORCH_PER_GROUP_BYTES
    activation = activation_bytes(spec, layers, max_num_batched_tokens, dtype_bytes, tensor_parallel_size, last, max_num_seqs * (1 + draft_tokens))
    # The draft model captures graphs of its own: 0.76 GiB on the first stage and 1.49 on the last one (second field report).
    graphs = 0 if enforce_eager else GRAPHS_BYTES * (2 if drafting else 1)
    return Budget(
        total_bytes=total_bytes,
        requested_bytes=requested_bytes(total_bytes, gpu_memory_utilization),
        weights_bytes=weights_bytes,
        buffers_bytes=buffers_bytes,
        non_torch_bytes=non_torch,
        activation_bytes=activation,
        graphs_bytes=graphs,
        evidence="estimated",
        error_bytes=round(ERROR * (non_torch + activation + graphs)),
    )
