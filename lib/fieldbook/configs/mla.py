"""Decoders of latent attention: DeepSeek V2 to V4, GLM-5.x, Kimi K2."""

from dataclasses import replace

from ..errors import BadInput
from ..spec import Attention, Indexer, Layer, Part
from .dense import dense_mlp, gqa
from .moe import DRAFT_NORMS, deepseek_experts
from .source import Decoder, Source


def latent(source: Source, **more) -> Attention:
    """Latent attention from the usual keys (vLLM: models/deepseek_v2.py:DeepseekV2MLAAttention). q_lora_rank absent or null: one q projection."""
    return Attention(
        kind="mla",
        heads=source.count("num_attention_heads"),
        kv_heads=1,
        head_dim=source.count("qk_nope_head_dim", least=0) + source.count("qk_rope_head_dim", least=0),
        v_head_dim=source.count("v_head_dim"),
        q_lora_rank=source.count("q_lora_rank", None),
        kv_lora_rank=source.count("kv_lora_rank"),
        rope_head_dim=source.count("qk_rope_head_dim", least=0),
        nope_head_dim=source.count("qk_nope_head_dim", least=0),
        **more,
    )


def owns_indexer(source: Source, layer: int) -> bool:
    """Whether a decoder layer computes its own top-k indices; else it uses those of a layer before and has no indexer.

    vLLM: models/deepseek_v2.py and models/deepseek_v32/attention.py, skip_topk from index_topk_pattern ("S" shares), else index_topk_freq (1) and
    index_skip_topk_offset (2). indexer_types, which transformers reads first, is ignored there. A freq of null is a TypeError in both, so it is refused.
    """
    pattern = source.value("index_topk_pattern")
    if pattern is not None:
        if not (isinstance(pattern, str) or (isinstance(pattern, list) and all(isinstance(p, str) for p in pattern))):
            raise source.bad("index_topk_pattern", "a string or list of F and S")
        return not (layer < len(pattern) and pattern[layer] == "S")
    if "index_topk_freq" in source.text and source.value("index_topk_freq") is None:
        raise source.bad("index_topk_freq", "a whole number (leave the key out for an indexer on every layer)")
    freq = source.count("index_topk_freq", 1)
    offset = source.count("index_skip_topk_offset", 2, least=-source.layers)
    return max(layer - offset + 1, 0) % freq == 0


def _moe_layers(source: Source) -> list[bool]:
    # vLLM: models/deepseek_v2.py:DeepseekV2DecoderLayer. mlp_layer_types (transformers 5) says the same as first_k_dense_replace and is checked, not used.
    layers = source.layers
    if source.any_count(("n_routed_experts", "num_experts"), None) is None:
        return [False] * layers
    first, freq = source.count("first_k_dense_replace", least=0), source.count("moe_layer_freq", 1)
    found = [i >= first and i % freq == 0 for i in range(layers)]
    types = source.strings("mlp_layer_types", layers)
    if types is not None and [kind == "sparse" for kind in types] != found:
        raise BadInput(f"{source.where}: mlp_layer_types disagrees with first_k_dense_replace {first}, which vLLM reads")
    return found


def deepseek(source: Source) -> Decoder:
    """DeepSeek V2, V3, V3.2, GLM-4.7-Flash, GLM-5.x, Kimi K2 (vLLM: models/deepseek_v2.py, deepseek_mtp.py, models/deepseek_v32).

    Sparse where index_topk is given. Draft layers always own an indexer and have experts. Without latent keys the attention is plain (use_mha).
    """
    layers = source.layers
    plain = all(source.count(key, 0, least=0) == 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    attention = gqa(source) if plain else latent(source)
    sparse = source.value("index_topk") is not None
    indexer, noted = None, []
    if sparse:
        if attention.kind != "mla" or attention.q_lora_rank is None:
            raise BadInput(f"{source.where}: index_topk is given, but not q_lora_rank, from which the indexer projects")
        indexer = Indexer(source.count("index_n_heads"), source.count("index_head_dim"), source.count("index_topk"), owns=True)
        attention = replace(attention, kind="sparse_mla", indexer=indexer)
        types = source.strings("indexer_types") or ()
        if "shared" in types and source.value("index_topk_freq") is None and source.value("index_topk_pattern") is None:
            noted.append("indexer_types: vLLM does not read it and builds an indexer on every layer, for some of which the checkpoint has no weights")
    experts = _moe_layers(source)
    routed = source.any_count(("n_routed_experts", "num_experts"), None) is not None
    # topk_method noaux_tc is what gives the router its bias; GLM's configs may leave it out, their routers always have it.
    bias = source.text_value("topk_method", "noaux_tc" if source.architecture.startswith("Glm") else "") == "noaux_tc"
    mlp = deepseek_experts(source, bias) if routed else dense_mlp(source)
    dense = mlp if all(experts) else dense_mlp(source)
    shared = replace(attention, indexer=replace(indexer, owns=False)) if indexer else attention
    built = [Layer(i, attention if not sparse or owns_indexer(source, i) else shared, mlp if experts[i] else dense) for i in range(layers)]
    drafts = source.draft_layers("num_nextn_predict_layers")
    # DeepSeek V3 and GLM-4.7-Flash store embedding and head once more in the draft layer, GLM-5.x does not: its published size leaves no room for them.
    own = not source.architecture.startswith("GlmMoeDsa")
    mtp = tuple(Layer(layers + i, attention, mlp, DRAFT_NORMS) for i in range(drafts))
    return Decoder(tuple(built), mtp, not_counted=tuple(noted), mtp_own_embeddings=own)


def _compressor(hidden: int, head_dim: int, ratio: int, prefix: str) -> tuple[Part, ...]:
    # vLLM: models/deepseek_v4/compressor.py:DeepseekCompressor; ratio 4 overlaps two windows and so is twice as wide. None of it is quantized.
    width = head_dim * (2 if ratio == 4 else 1)
    return (
        Part(f"{prefix}compressor.ape", ratio * width, dtype="float32"),
        Part(f"{prefix}compressor.fused_wkv_wgate", hidden * 2 * width),
        Part(f"{prefix}compressor.norm", head_dim),
    )


def deepseek_v4(source: Source) -> Decoder:
    """DeepSeek V4 (vLLM: models/deepseek_v4/nvidia/model.py, attention.py, compressor.py, mtp.py): weights counted as parts, the cache named.

    compress_ratios: 0 keeps the sliding window only, 4 compresses and has an indexer, 128 compresses. Each layer caches the window besides, in a page
    layout that depends on the kernel; that is what is not counted. Hyper-connections are float32. Layers before num_hash_layers route by token id.
    """
    layers, hidden, heads, dim = source.layers, source.count("hidden_size"), source.count("num_attention_heads"), source.count("head_dim")
    q_rank, o_rank, groups = source.count("q_lora_rank"), source.count("o_lora_rank"), source.count("o_groups")
    hc, rope = source.count("hc_mult"), source.count("qk_rope_head_dim", least=0)
    ratios = [max(1, r) for r in source.counts("compress_ratios", layers) or []]
    if not ratios:
        raise source.absent("compress_ratios")
    if rope > dim or heads * dim % groups:
        raise BadInput(f"{source.where}: qk_rope_head_dim {rope}, head_dim {dim} and o_groups {groups} do not fit together")
    mlp, hashed, window = deepseek_experts(source, True), source.count("num_hash_layers", 0, least=0), source.count("sliding_window")
    mixes = (2 + hc) * hc
    connections = (Part("hyper_connections", 2 * (mixes * hc * hidden + mixes + 3), dtype="float32"),)
    projections = (
        Part("attn.attn_sink", heads, sharded=True, dtype="float32"),
        Part("attn.fused_wqa_wkv", hidden * (q_rank + dim), linear=True),
        Part("attn.wq_b", q_rank * heads * dim, sharded=True, linear=True),
        Part("attn.wo_a", heads * dim * o_rank, sharded=True, linear=True),
        Part("attn.wo_b", groups * o_rank * hidden, sharded=True, linear=True),
        Part("attn.norms", q_rank + dim),
    )

    def layer(i: int, ratio: int, norms: int = 2) -> Layer:
        parts, indexer, here = projections + connections, None, mlp
        if ratio > 1:
            parts += _compressor(hidden, dim, ratio, "attn.")
        if ratio == 4:
            indexer = Indexer(source.count("index_n_heads"), source.count("index_head_dim"), source.count("index_topk"), owns=True, compress_ratio=4)
            parts += (
                Part("attn.indexer.wq_b", q_rank * indexer.heads * indexer.head_dim, linear=True),
                Part("attn.indexer.weights_proj", hidden * indexer.heads),
                *_compressor(hidden, indexer.head_dim, 4, "attn.indexer."),
            )
        if i < hashed:
            parts += (Part("ffn.gate.tid2eid", source.count("vocab_size") * mlp.experts_per_token, dtype="int32"),)
            here = replace(mlp, router_bias=False)
        attention = Attention(
            "compressed", heads, 1, dim, dim, window, q_rank, rope_head_dim=rope, nope_head_dim=dim - rope, indexer=indexer, compress_ratio=ratio
        )
        return Layer(i, attention, here, norms, parts)

    drafts = source.draft_layers("num_nextn_predict_layers")
    counted = {ratio: ratios.count(ratio) for ratio in sorted(set(ratios))}
    return Decoder(
        tuple(layer(i, ratio) for i, ratio in enumerate(ratios)),
        # models/deepseek_v4/nvidia/mtp.py: window only, and h_proj and e_proj in place of eh_proj, of the same size together.
        tuple(layer(layers + i, 1, DRAFT_NORMS) for i in range(drafts)),
        parts_last_stage=(Part("hc_head", hc * hc * hidden + hc + 1, dtype="float32"),),
        not_counted=(
            "KV cache of compressed attention: window, compressor state and compressed entries; layers by ratio " + str(counted).strip("{}"),
            *((f"vision tower ({source.count('vision_n_layers')} layers)",) if source.count("vision_n_layers", 0, least=0) else ()),
        ),
    )
