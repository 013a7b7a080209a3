"""Decoders of grouped-query attention with routed experts."""

from dataclasses import replace

from ..errors import BadInput
from ..spec import Indexer, Layer, Mlp, Part
from .dense import dense_mlp, gqa, stack, windows
from .source import Decoder, Source

DRAFT_NORMS = 5  # two of the layer, enorm, hnorm and that of the shared head (vLLM: models/deepseek_mtp.py, glm4_moe_mtp.py)


def experts_per_token(source: Source, *keys: str, experts: int) -> int:
    """How many experts a token is sent to; more than there are is refused."""
    found = source.any_count(keys)
    if found > experts:
        raise BadInput(f"{source.where}: {keys[0]} {found} is more than the {experts} experts there are")
    return found


def mixtral(source: Source) -> Decoder:
    """Mixtral (vLLM: models/mixtral.py); embedding and lm_head are built on every stage."""
    experts = source.count("num_local_experts")
    mlp = Mlp(
        "moe",
        experts=experts,
        experts_per_token=experts_per_token(source, "num_experts_per_tok", experts=experts),
        expert_intermediate_size=source.count("intermediate_size"),
    )
    attentions = [gqa(source, window) for window in windows(source, per_layer=False)]
    return Decoder(stack(attentions, [mlp] * source.layers), embeddings_on_every_stage=True)


def sparse_layers(source: Source) -> list[bool]:
    """Which layers have experts: each decoder_sparse_step-th one that mlp_only_layers does not name (vLLM: models/qwen3_moe.py:Qwen3MoeDecoderLayer)."""
    step = source.count("decoder_sparse_step", 1)
    dense = set(source.counts("mlp_only_layers") or [])
    return [i not in dense and (i + 1) % step == 0 for i in range(source.layers)]


def qwen_experts(source: Source, shared_width: int) -> Mlp:
    """Routed experts of the Qwen families, with one gated shared expert where it has a width."""
    experts = source.any_count(("num_experts", "num_local_experts"))
    return Mlp(
        "moe",
        experts=experts,
        experts_per_token=experts_per_token(source, "num_experts_per_tok", experts=experts),
        expert_intermediate_size=source.count("moe_intermediate_size"),
        shared_experts=1 if shared_width else 0,
        shared_intermediate_size=shared_width,
        shared_gate=shared_width > 0,
    )


def qwen2_moe(source: Source) -> Decoder:
    """Qwen2-MoE (vLLM: models/qwen2_moe.py): bias on q, k, v; its layers take no window of their own, so a mixed pattern leaves all of them full."""
    mlp = qwen_experts(source, source.count("shared_expert_intermediate_size", least=0))
    mlps = [mlp if sparse else dense_mlp(source) for sparse in sparse_layers(source)]
    types = source.strings("layer_types", source.layers)
    all_slide = source.flag("use_sliding_window") and types is not None and set(types) == {"sliding_attention"}
    attention = gqa(source, source.window if all_slide else None, qkv_bias=source.flag("qkv_bias", True))
    return Decoder(stack([attention] * source.layers, mlps), embeddings_on_every_stage=True)


def qwen3_moe(source: Source) -> Decoder:
    """Qwen3-MoE (vLLM: models/qwen3_moe.py); the shared expert only where shared_expert_intermediate_size is above 0."""
    mlp = qwen_experts(source, source.count("shared_expert_intermediate_size", 0, least=0))
    mlps = [mlp if sparse else dense_mlp(source) for sparse in sparse_layers(source)]
    window = source.window if source.flag("use_sliding_window") else None
    attention = gqa(source, window, qkv_bias=source.flag("attention_bias"), qk_norm=True)
    return Decoder(stack([attention] * source.layers, mlps), embeddings_on_every_stage=True)


def deepseek_experts(source: Source, router_bias: bool) -> Mlp:
    """Routed and shared experts as DeepSeek names them; all shared experts are one MLP (vLLM: models/deepseek_v2.py:DeepseekV2MoE)."""
    experts, width = source.any_count(("n_routed_experts", "num_experts", "num_local_experts")), source.count("moe_intermediate_size")
    shared = source.count("n_shared_experts", 0, least=0)
    return Mlp(
        "moe",
        experts=experts,
        experts_per_token=experts_per_token(source, "num_experts_per_tok", experts=experts),
        expert_intermediate_size=width,
        shared_experts=shared,
        shared_intermediate_size=shared * width,
        router_bias=router_bias,
    )


def glm4_moe(source: Source) -> Decoder:
    """GLM-4.5 to 4.7 (vLLM: models/glm4_moe.py, glm4_moe_mtp.py). The first first_k_dense_replace layers are dense; draft layers have experts."""
    layers = source.layers
    first = source.count("first_k_dense_replace", least=0)
    mlp = deepseek_experts(source, router_bias=True)
    dense = dense_mlp(source) if first else mlp
    attention = gqa(source, qkv_bias=source.flag("attention_bias"), qk_norm=source.flag("use_qk_norm"))
    drafts = source.draft_layers("num_nextn_predict_layers", "num_mtp_layers")
    return Decoder(
        stack([attention] * layers, [dense if i < first else mlp for i in range(layers)]),
        tuple(Layer(layers + i, attention, mlp, DRAFT_NORMS) for i in range(drafts)),
        mtp_own_embeddings=True,
    )


def gpt_oss(source: Source) -> Decoder:
    """gpt-oss (vLLM: models/gpt_oss.py): biases everywhere, even layers slide whatever layer_types says, one sink per head, no draft."""
    experts = source.any_count(("num_local_experts", "num_experts"))
    mlp = Mlp(
        "moe",
        bias=True,
        experts=experts,
        experts_per_token=experts_per_token(source, "num_experts_per_tok", "experts_per_token", experts=experts),
        expert_intermediate_size=source.count("intermediate_size"),
        router_bias=True,
    )
    window = source.window
    attentions = [gqa(source, window if i % 2 == 0 else None, qkv_bias=True, o_bias=True) for i in range(source.layers)]
    sinks = (Part("self_attn.sinks", attentions[0].heads, sharded=True),)
    return Decoder(stack(attentions, [mlp] * source.layers, parts=sinks), embeddings_on_every_stage=True)


def minimax_m2(source: Source) -> Decoder:
    """MiniMax M2 (vLLM: models/minimax_m2.py): q and k norms over all heads; its MTP modules are skipped when weights are loaded, so there are none here."""
    experts = source.any_count(("num_local_experts", "num_experts"))
    mlp = Mlp(
        "moe",
        experts=experts,
        experts_per_token=experts_per_token(source, "num_experts_per_tok", experts=experts),
        expert_intermediate_size=source.any_count(("intermediate_size", "moe_intermediate_size")),
        router_bias=source.flag("use_routing_bias"),
        router_dtype="float32",
    )
    attention = gqa(source, qkv_bias=source.flag("attention_bias"), qk_norm=True, qk_norm_all_heads=True)
    return Decoder(stack([attention] * source.layers, [mlp] * source.layers))


def minimax_m3(source: Source) -> Decoder:
    """MiniMax M3 (vLLM: models/minimax_m3/nvidia/model.py, mtp.py): dense first layers, then block-sparse attention whose indexer picks topk_blocks.

    The experts' width is intermediate_size, the dense layers' dense_intermediate_size. vLLM builds num_mtp_modules draft layers; where
    num_nextn_predict_layers says fewer, those are taken and the rest named. Draft layers are always sparse, with experts.
    """
    layers = source.layers
    experts, width = source.count("num_local_experts"), source.count("intermediate_size")
    shared = source.count("n_shared_experts", 0, least=0)
    mlp = Mlp(
        "moe",
        experts=experts,
        experts_per_token=experts_per_token(source, "num_experts_per_tok", experts=experts),
        expert_intermediate_size=width,
        shared_experts=shared,
        shared_intermediate_size=shared * width,
        router_bias=source.flag("use_routing_bias"),
        router_dtype="float32",
    )
    freq = source.counts("moe_layer_freq", layers) or [1] * layers
    full = gqa(source, qk_norm=True)
    sparse, which = full, [0] * layers
    if source.value("sparse_attention_config"):
        inner = source.inner("sparse_attention_config")
        which = inner.counts("sparse_attention_freq", layers) or which
        topk = inner.count("sparse_topk_blocks") * inner.count("sparse_block_size")
        indexer = Indexer(inner.count("sparse_num_index_heads"), inner.count("sparse_index_dim"), topk, owns=True)
        sparse = replace(full, kind="sparse_gqa", indexer=indexer)
    dense = dense_mlp(source, "dense_intermediate_size") if 0 in freq else mlp
    drafts = source.draft_layers("num_nextn_predict_layers", "num_mtp_modules")
    modules = source.draft_layers("num_mtp_modules", default=drafts)
    left = (f"{modules - drafts} more draft layers (num_mtp_modules {modules}, num_nextn_predict_layers {drafts})",) if modules > drafts else ()
    return Decoder(
        stack([sparse if s else full for s in which], [mlp if m else dense for m in freq]),
        tuple(Layer(layers + i, sparse, mlp, DRAFT_NORMS) for i in range(drafts)),
        not_counted=left,
    )
