"""Decoders of grouped-query attention and one gated MLP per layer: Llama and its kin, and Gemma."""

from dataclasses import replace

from ..errors import BadInput
from ..spec import Attention, Layer, Mlp, Part
from .source import Decoder, Source


def gqa(source: Source, window: int | None = None, **more) -> Attention:
    """Grouped-query attention from the usual keys. num_key_value_heads absent: as many as heads; head_dim absent: hidden_size // heads (as LlamaConfig)."""
    heads = source.count("num_attention_heads")
    kv_heads = source.count("num_key_value_heads", heads)
    if kv_heads > heads:
        raise BadInput(f"{source.where}: num_key_value_heads {kv_heads} is more than num_attention_heads {heads}")
    head_dim = source.count("head_dim", None) or source.count("hidden_size") // heads
    if not head_dim:
        raise BadInput(f"{source.where}: hidden_size is smaller than num_attention_heads {heads}, and head_dim is not given")
    return Attention(
        kind="sliding" if window else "full",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window=window,
        **more,
    )


def stack(attentions: list[Attention], mlps: list[Mlp], norms: int = 2, parts: tuple[Part, ...] = ()) -> tuple[Layer, ...]:
    """Layers in order, all with the same norms and parts."""
    return tuple(Layer(i, attention, mlp, norms, parts) for i, (attention, mlp) in enumerate(zip(attentions, mlps, strict=True)))


def dense_mlp(source: Source, key: str = "intermediate_size", bias: bool = False) -> Mlp:
    """gate, up and down."""
    return Mlp("dense", source.count(key), bias=bias)


def windows(source: Source, per_layer: bool) -> list[int | None]:
    """Sliding window of each layer, None for full attention.

    vLLM: engine/arg_utils.py:create_engine_config gives sliding_window to the cache config, and so to all layers, only when layer_types is absent or all of
    it is sliding_attention. A mixed layer_types counts where the model class hands it to its layers (per_layer: llama.py, granite.py, gemma*.py), else
    every layer keeps the whole context. A window of 0 means none (config/model.py:ModelConfig.__post_init__).
    """
    layers = source.layers
    window = source.window
    types = source.strings("layer_types", layers)
    if types is None or all(kind == "sliding_attention" for kind in types):
        return [window] * layers
    if not per_layer or window is None:
        return [None] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def llama(source: Source) -> Decoder:
    """Llama, Mistral and Phi-3 (vLLM: models/llama.py; models/mistral.py and phi3.py build on it)."""
    bias = source.flag("attention_bias") or source.flag("bias")
    qkv = source.flag("qkv_bias", bias)
    attentions = [gqa(source, window, qkv_bias=qkv, o_bias=bias) for window in windows(source, per_layer=True)]
    return Decoder(stack(attentions, [dense_mlp(source, bias=source.flag("mlp_bias"))] * source.layers))


def granite(source: Source) -> Decoder:
    """Granite (vLLM: models/granite.py). sliding_window counts only with layer_types, and such layers have one attention sink per head."""
    types = source.strings("layer_types", source.layers)
    bias = source.flag("attention_bias") or source.flag("bias")
    found = windows(source, per_layer=True) if types is not None else [None] * source.layers
    attentions = [gqa(source, window, qkv_bias=bias, o_bias=bias) for window in found]
    sinks = (Part("self_attn.sinks", attentions[0].heads, sharded=True),) if source.flag("attention_sinks", types is not None) else ()
    return Decoder(stack(attentions, [dense_mlp(source, bias=source.flag("mlp_bias"))] * source.layers, parts=sinks))


def qwen_windows(source: Source) -> list[int | None]:
    """Windows of Qwen2 and Qwen3: none unless use_sliding_window (transformers Qwen2Config.__post_init__: layers from max_window_layers on slide).

    vLLM (models/qwen2.py:Qwen2Model) refuses a window for some layers only, unless max_window_layers equals the number of layers; then none slides.
    """
    layers = source.layers
    if not source.flag("use_sliding_window"):
        return [None] * layers
    window = source.window
    first = source.count("max_window_layers", 28, least=0)
    types = source.strings("layer_types", layers)
    slides = [kind == "sliding_attention" for kind in types] if types is not None else [window is not None and i >= first for i in range(layers)]
    if any(slides) and not all(slides) and first != layers:
        raise BadInput(
            f"{source.where}: max_window_layers {first}: a sliding window for some of the {layers} layers only is refused by vLLM for {source.architecture}"
        )
    return [window if all(slides) else None] * layers


def qwen2(source: Source) -> Decoder:
    """Qwen2 and 2.5 (vLLM: models/qwen2.py): bias on q, k and v only; q and k norms where the config says qk_norm."""
    attentions = [gqa(source, window, qkv_bias=True, qk_norm=source.flag("qk_norm")) for window in qwen_windows(source)]
    return Decoder(stack(attentions, [dense_mlp(source)] * source.layers))


def qwen3(source: Source) -> Decoder:
    """Qwen3 (vLLM: models/qwen3.py): q and k norms of one head_dim, no bias on o."""
    attentions = [gqa(source, window, qkv_bias=source.flag("attention_bias"), qk_norm=True) for window in qwen_windows(source)]
    return Decoder(stack(attentions, [dense_mlp(source)] * source.layers))


def olmo(source: Source) -> Decoder:
    """OLMo 2 and 3, which vLLM 0.30 runs through transformers (models/registry.py: TransformersForCausalLM): q and k norms over all heads.

    OLMo 3 without layer_types: three sliding layers, then a full one (transformers Olmo3Config.__post_init__).
    """
    found = windows(source, per_layer=True)
    if source.value("layer_types") is None:
        sliding = source.architecture.startswith("Olmo3")
        found = [window if sliding and (i + 1) % 4 else None for i, window in enumerate(found)]
    bias = source.flag("attention_bias")
    attentions = [gqa(source, window, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_all_heads=True) for window in found]
    return Decoder(stack(attentions, [dense_mlp(source)] * source.layers))


def _gemma_windows(source: Source, pattern: int) -> list[int | None]:
    # Without layer_types every pattern-th layer is full (transformers Gemma2Config, Gemma3TextConfig.__post_init__).
    if source.value("layer_types") is None:
        window = source.window
        return [window if (i + 1) % pattern else None for i in range(source.layers)]
    return windows(source, per_layer=True)


def gemma(source: Source) -> Decoder:
    """Gemma 1 (vLLM: models/gemma.py); its class, like those after it, builds the embedding on every stage."""
    attentions = [gqa(source)] * source.layers
    return Decoder(stack(attentions, [dense_mlp(source)] * source.layers), tied=True, embeddings_on_every_stage=True)


def gemma2(source: Source) -> Decoder:
    """Gemma 2 (vLLM: models/gemma2.py): every other layer slides, four norms a layer."""
    bias = source.flag("attention_bias")
    attentions = [gqa(source, window, qkv_bias=bias, o_bias=bias) for window in _gemma_windows(source, 2)]
    return Decoder(stack(attentions, [dense_mlp(source)] * source.layers, norms=4), tied=True, embeddings_on_every_stage=True)


def gemma3(source: Source) -> Decoder:
    """Gemma 3 (vLLM: models/gemma3.py): five sliding layers, then a full one; q and k norms."""
    bias = source.flag("attention_bias")
    found = _gemma_windows(source, source.count("sliding_window_pattern", 6))
    if source.value("use_bidirectional_attention") is True:
        # transformers Gemma3TextConfig.__post_init__ halves it; embedding models only.
        found = [window and window // 2 + 1 for window in found]
    attentions = [gqa(source, window, qkv_bias=bias, o_bias=bias, qk_norm=True) for window in found]
    return Decoder(stack(attentions, [dense_mlp(source)] * source.layers, norms=4), tied=True, embeddings_on_every_stage=True)


def gemma4(source: Source) -> Decoder:
    """Gemma 4 (vLLM: models/gemma4.py, transformers_utils/configs/gemma4.py:gemma4_layer_config).

    Full layers have heads of global_head_dim and, with attention_k_eq_v, num_global_key_value_heads; the last num_kv_shared_layers project no k and v and
    cache nothing. With a MoE block the dense MLP runs beside the routed experts: it is the shared expert here. Per-layer embeddings are parts.
    """
    layers, hidden = source.layers, source.count("hidden_size")
    found = _gemma_windows(source, 6)
    found[-1] = None  # Gemma4TextConfig forces the last layer to full attention
    first_shared = layers - source.count("num_kv_shared_layers", 0, least=0, most=layers)
    k_is_v, bias = source.flag("attention_k_eq_v"), source.flag("attention_bias")
    base = gqa(source, None, qkv_bias=bias, o_bias=bias, qk_norm=True)
    global_dim = source.count("global_head_dim", None) or base.head_dim
    global_kv = (source.count("num_global_key_value_heads", None) if k_is_v else None) or base.kv_heads
    moe = source.flag("enable_moe_block") or source.flag("use_second_mlp_block")
    per_layer = source.count("hidden_size_per_layer_input", 0, least=0)
    built = []
    for i, window in enumerate(found):
        shared = i >= first_shared
        wide = 2 if source.flag("use_double_wide_mlp") and shared and first_shared > 0 else 1
        dim, kv = (base.head_dim, base.kv_heads) if window else (global_dim, global_kv)
        kind, same = "sliding" if window else "full", k_is_v and not window
        attention = replace(base, kind=kind, kv_heads=kv, head_dim=dim, v_head_dim=dim, window=window, k_is_v=same, kv_shared=shared)
        mlp, parts = Mlp("dense", source.count("intermediate_size") * wide), ()
        if moe:
            mlp = Mlp(
                "moe",
                experts=source.count("num_experts"),
                experts_per_token=source.count("top_k_experts"),
                expert_intermediate_size=source.any_count(("moe_intermediate_size", "expert_intermediate_size")),
                shared_experts=1,
                shared_intermediate_size=mlp.intermediate_size,
            )
            parts = (Part("router.scale", hidden), Part("moe.per_expert_scale", mlp.experts))
        if per_layer:
            parts += (Part("per_layer_input_gate", hidden * per_layer, linear=True), Part("per_layer_projection", hidden * per_layer, linear=True))
        built.append(Layer(i, attention, mlp, 4 + 3 * moe + (per_layer > 0), parts))
    around: tuple[Part, ...] = ()
    if per_layer:
        rows = source.count("vocab_size_per_layer_input", source.count("vocab_size"))
        around = (
            Part("embed_tokens_per_layer", rows * per_layer * layers, sharded=True),
            Part("per_layer_model_projection", hidden * per_layer * layers, sharded=True, linear=True),
            Part("per_layer_projection_norm", per_layer),
        )
    return Decoder(tuple(built), tied=True, embeddings_on_every_stage=True, parts_with_embedding=around)
