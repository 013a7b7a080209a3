"""The shape of a model, layer by layer, as its config.json tells it. Counts, not bytes; no weights and no torch are needed.

Field names follow vLLM and Hugging Face configs. A layer says what it computes with (attention or a recurrent mixer) and what feed-forward part it
has; everything that memory accounting needs follows from that.
"""

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["full", "sliding", "mla", "sparse_mla", "sparse_gqa", "compressed", "gdn", "kda", "mamba2", "none"]
MlpKind = Literal["dense", "moe", "none"]


@dataclass(frozen=True)
class Indexer:
    """The part of sparse attention that picks top-k tokens.

    owns: this layer has indexer weights and an indexer key cache; else it uses those of a layer before.
    """

    heads: int
    head_dim: int
    topk: int  # tokens
    owns: bool
    compress_ratio: int = 1  # tokens that share one entry of the indexer's key cache (Qwen4Exp QSA)
    kv_heads: int = 1  # key heads of the indexer: one in DSA and MiniMax M3, indexer_kv_heads in Qwen4Exp


@dataclass(frozen=True)
class ShortConv:
    """A dilated convolution that keeps the last state_tokens inputs of every channel as a cache of its own, whole on each TP rank.

    Qwen4Exp's n-gram layers: channels = hidden_size x hc_count, state_tokens = (ple_conv_kernel_size - 1) x ngram_size.
    """

    channels: int
    state_tokens: int


@dataclass(frozen=True)
class Part:
    """Weights that no other field describes (hyper-connections, attention sinks, per-layer embeddings): whoever adds up weights adds these as they are.

    name: module name below its layer, or the full name outside the layers. sharded: TP divides it. dtype: None is the model's own. linear: a linear layer,
    which the quantization covers unless it ignores the name.
    """

    name: str
    parameters: int
    sharded: bool = False
    dtype: str | None = None
    linear: bool = False


@dataclass(frozen=True)
class Attention:
    """What mixes tokens in a layer.

    full and sliding: grouped-query attention. mla: latent attention; sparse_mla: with an indexer (DSA). sparse_gqa: grouped-query attention over
    picked blocks or tokens. gdn, kda, mamba2: recurrent state of a fixed size per request, in the fields that begin with state_ and conv_.
    compressed: DeepSeek V4; its weights are all in the layer's parts and its cache is not counted.
    """

    kind: AttentionKind
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None  # sliding: tokens kept
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    nope_head_dim: int = 0
    indexer: Indexer | None = None
    output_gate: bool = False  # full, sparse_gqa: q projection twice as wide; mla: g_proj of heads x v_head_dim; kda: gate of full rank, else by head_dim
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = False  # these norms span all heads (MiniMax M2, OLMo 2), else one head_dim that all heads share
    k_is_v: bool = False  # Gemma 4's global layers: one projection for both, cached twice
    kv_shared: bool = False  # uses the KV cache of a layer before it and has none of its own
    state_key_heads: int = 0
    state_value_heads: int = 0
    state_key_dim: int = 0
    state_value_dim: int = 0
    conv_kernel: int = 0
    state_groups: int = 0  # mamba2: B and C groups
    compress_ratio: int = 0  # compressed: tokens for one cache entry; 1 is the sliding window alone
    conv_bias: bool = True  # mamba2 only


@dataclass(frozen=True)
class Mlp:
    """Feed-forward part. gated: gate, up and down (three matrices), else up and down.

    shared_intermediate_size: width of all shared experts together (vLLM builds them as one MLP). A shared expert may be the dense MLP that runs beside
    the routed experts in the same layer (Gemma 4).
    """

    kind: MlpKind
    intermediate_size: int = 0
    gated: bool = True
    bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_hidden_size: int | None = None  # latent experts: narrower than the model
    shared_experts: int = 0
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False  # one per expert, float32 (e_score_correction_bias)
    router_dtype: str | None = None  # None is the model's own


@dataclass(frozen=True)
class Layer:
    """One decoder layer. norms: how many vectors of hidden_size it holds besides those of its attention. A draft layer also has one projection of
    2 x hidden_size to hidden_size (eh_proj, fc), which is in no field."""

    index: int
    attention: Attention
    mlp: Mlp
    norms: int = 2
    parts: tuple[Part, ...] = ()
    short_conv: ShortConv | None = None  # its state is a KV cache group of its own, so the pool depends on it


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores weights. ignored: patterns of module names that stay in the model's dtype."""

    method: str  # fp8, compressed-tensors, awq, gptq, modelopt, mxfp4, auto-round, ...
    weight_bits: int
    kind: Literal["int", "float"]
    strategy: Literal["tensor", "channel", "group", "block"]
    group_size: int | None = None
    block: tuple[int, int] | None = None
    scale_bytes: int = 2
    zero_point_bits: int = 0
    activation_scales: bool = False  # one static input scale per linear layer
    global_scales: int = 0  # NVFP4: float32 scales per tensor
    ignored: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # patterns of the modules that are quantized, where the config names them
    kv_cache_scheme: str | None = None
    others: tuple["Quantization", ...] = ()  # further schemes of a mixed checkpoint, each for the modules in its `only`; looked at first


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: its layers in order, the draft layers of multi-token prediction behind them, and what lies outside the layers."""

    name: str
    architecture: str
    model_type: str
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    layers: tuple[Layer, ...]
    mtp_layers: tuple[Layer, ...] = ()
    quantization: Quantization | None = None
    state_dtype: str = "auto"  # of recurrent state: mamba_ssm_dtype of the config
    embeddings_on_every_stage: bool = False  # the embedding and, unless lm_head_on_last_stage, lm_head
    lm_head_on_last_stage: bool = False  # Qwen3.5: the embedding is on every stage, lm_head is not
    parts_with_embedding: tuple[Part, ...] = ()  # on the stages that hold the embedding
    parts_last_stage: tuple[Part, ...] = ()
    defaulted: tuple[str, ...] = ()  # keys that the config leaves out, with the value taken and who sets it
    not_counted: tuple[str, ...] = ()  # parts of the model whose memory is not known, named
    boundary_values: int = 0  # values per token that cross a pipeline boundary; 0: hidden state and residual
    deepstack_layers: int = 0  # first decoder layers to which features of the image encoder are added
    mtp_own_embeddings: bool = False  # the checkpoint stores token embedding and head once more in its draft layer (DeepSeek V3, GLM-4.5)

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers, draft layers not counted."""
        return len(self.layers)


def sharing_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Layers that use the top-k indices of a layer before them."""
    return tuple(layer.index for layer in spec.layers if layer.attention.indexer is not None and not layer.attention.indexer.owns)
