"""Decoders that mix attention with recurrent layers: Qwen3-Next, Qwen3.5, Kimi Linear and K3, Nemotron-H."""

from ..errors import BadInput
from ..spec import Attention, Layer, Mlp, Part
from .dense import dense_mlp, gqa
from .mla import latent
from .moe import DRAFT_NORMS, experts_per_token, qwen_experts, sparse_layers
from .source import Decoder, Source

STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")


def state_dtype(source: Source, key: str, default: str) -> str:
    """dtype of the recurrent state as the config names it; 'auto' is that of the convolution state (vLLM: MambaStateDtypeCalculator)."""
    found = (source.text_value(key) or default).removeprefix("torch.")
    if found not in STATE_DTYPES:
        raise source.bad(key, "one of " + ", ".join(STATE_DTYPES))
    return found


def layer_kinds(source: Source, names: dict[str, str]) -> list[str]:
    """layer_types in our words; absent, every full_attention_interval-th layer (4) is full (vLLM: transformers_utils/configs/qwen3_next.py, qwen3_5.py)."""
    layers = source.layers
    types = source.strings("layer_types", layers)
    if types is None:
        interval = source.count("full_attention_interval", 4)
        return ["gdn" if (i + 1) % interval else "full" for i in range(layers)]
    unknown = sorted(set(types) - set(names))
    if unknown:
        raise BadInput(f"{source.where}: layer_types: {unknown[0]!r} is not known for {source.architecture}; known: {', '.join(names)}")
    return [names[kind] for kind in types]


def gated_delta_net(source: Source) -> Attention:
    """Gated delta net (vLLM: layers/mamba/gdn/qwen_gdn_linear_attn.py:QwenGatedDeltaNetAttention). Value heads are a multiple of key heads."""
    keys, values = source.count("linear_num_key_heads"), source.count("linear_num_value_heads")
    if values % keys:
        raise BadInput(f"{source.where}: linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    return Attention(
        kind="gdn",
        state_key_heads=keys,
        state_value_heads=values,
        state_key_dim=source.count("linear_key_head_dim"),
        state_value_dim=source.count("linear_value_head_dim"),
        conv_kernel=source.count("linear_conv_kernel_dim"),
    )


def _qwen_hybrid(source: Source, mlps: list[Mlp], draft: Mlp, drafts: int, **more) -> Decoder:
    # vLLM: models/qwen3_next.py:Qwen3NextAttention, shared by Qwen3.5. Draft layers are full attention (qwen3_next_mtp.py, qwen3_5_mtp.py).
    full = gqa(source, output_gate=source.flag("attn_output_gate", True), qkv_bias=source.flag("qkv_bias"), qk_norm=True)
    kinds = layer_kinds(source, {"linear_attention": "gdn", "full_attention": "full"})
    linear = gated_delta_net(source) if "gdn" in kinds else full
    # layer_scale adds two vectors of hidden_size to every layer.
    norms = 4 if source.flag("layer_scale") else 2
    return Decoder(
        tuple(Layer(i, full if kind == "full" else linear, mlp, norms) for i, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True))),
        tuple(Layer(source.layers + i, full, draft, DRAFT_NORMS) for i in range(drafts)),
        state_dtype=state_dtype(source, "mamba_ssm_dtype", "auto"),
        embeddings_on_every_stage=True,
        **more,
    )


def qwen3_next(source: Source) -> Decoder:
    """Qwen3-Next. Its configs name no draft layers; vLLM builds one (models/qwen3_next_mtp.py: num_nextn_predict_layers, 1) and checkpoints have it."""
    moe = qwen_experts(source, source.count("shared_expert_intermediate_size", least=0))
    mlps = [moe if sparse else dense_mlp(source) for sparse in sparse_layers(source)]
    told = () if source.value("num_nextn_predict_layers") is not None else ("num_nextn_predict_layers = 1 (vLLM Qwen3NextMultiTokenPredictor)",)
    return _qwen_hybrid(source, mlps, moe, source.draft_layers("num_nextn_predict_layers", default=1), defaulted=told)


def qwen3_5(source: Source) -> Decoder:
    """Qwen3.5, dense or with experts on every layer (vLLM: models/qwen3_5.py:Qwen3_5DecoderLayer). The embedding is on every stage, lm_head on the last."""
    if source.any_count(("num_experts",), None, least=0):
        mlp = qwen_experts(source, source.count("shared_expert_intermediate_size", 0, least=0))
    else:
        mlp = dense_mlp(source)
    drafts = source.draft_layers("mtp_num_hidden_layers", "num_nextn_predict_layers")
    return _qwen_hybrid(source, [mlp] * source.layers, mlp, drafts, lm_head_on_last_stage=True)


def kimi_linear(source: Source) -> Decoder:
    """Kimi Linear and the text model of Kimi K3 (vLLM: models/kimi_k3/nvidia/model.py:KimiDecoderLayer, kda.py, mla.py).

    linear_attn_config numbers layers from 1. With attn_res_block_size each layer has four more vectors of hidden_size, two norms and two projections to one
    value. routed_expert_hidden_size: the routed experts work in a narrower space, between a down and an up projection.
    """
    layers, hidden = source.layers, source.count("hidden_size")
    linear = source.inner("linear_attn_config")
    kda_layers = set(linear.counts("kda_layers") or ())
    heads, dim = linear.count("num_heads"), linear.count("head_dim")
    kda = Attention(
        kind="kda",
        output_gate=linear.flag("use_full_rank_gate"),
        state_key_heads=heads,
        state_value_heads=heads,
        state_key_dim=dim,
        state_value_dim=dim,
        conv_kernel=linear.count("short_conv_kernel_size"),
    )
    mla = latent(source, output_gate=source.flag("mla_use_output_gate"))
    dense, mlp = dense_mlp(source), None
    latent_width = source.count("routed_expert_hidden_size", None)
    if source.value("num_experts") is not None:
        experts, width = source.count("num_experts"), source.count("moe_intermediate_size")
        shared = source.count("num_shared_experts", 0, least=0)
        mlp = Mlp(
            "moe",
            experts=experts,
            experts_per_token=experts_per_token(source, "num_experts_per_token", "num_experts_per_tok", experts=experts),
            expert_intermediate_size=width,
            expert_hidden_size=latent_width,
            shared_experts=shared,
            shared_intermediate_size=shared * width,
            router_bias=True,
        )
    first, freq = source.count("first_k_dense_replace", 0, least=0), source.count("moe_layer_freq", 1)
    residual = source.count("attn_res_block_size", None) is not None
    latent_norm = (Part("block_sparse_moe.routed_expert_norm", latent_width),) if latent_width and source.flag("latent_moe_use_norm") else ()

    def layer(i: int) -> Layer:
        sparse = mlp is not None and i >= first and i % freq == 0
        return Layer(i, kda if i + 1 in kda_layers else mla, mlp if sparse else dense, 6 if residual else 2, latent_norm if sparse else ())

    drafts = source.draft_layers("num_nextn_predict_layers")
    return Decoder(
        tuple(layer(i) for i in range(layers)),
        tuple(Layer(layers + i, mla, mlp or dense, DRAFT_NORMS, latent_norm if mlp else ()) for i in range(drafts)),
        state_dtype=state_dtype(source, "mamba_ssm_dtype", "float32"),
        parts_last_stage=(Part("output_attn_res", 2 * hidden),) if residual else (),
    )


# One letter of hybrid_override_pattern, and the names that transformers 5 writes instead.
NEMOTRON_KINDS = {"M": "M", "*": "*", "-": "-", "E": "E"} | {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def _nemotron_pattern(source: Source, letters: str, names: tuple[str, ...]) -> list[str] | None:
    text = source.text_value(letters)
    key, found = (letters, list(text)) if text is not None else next(((n, source.strings(n)) for n in names if source.value(n) is not None), (letters, None))
    unknown = sorted(set(found or ()) - set(NEMOTRON_KINDS))
    if unknown:
        raise BadInput(f"{source.where}: {key}: {unknown[0]!r} is no kind of layer; known: M (Mamba 2), * (attention), - (MLP), E (experts)")
    return None if found is None else [NEMOTRON_KINDS[kind] for kind in found]


def nemotron_h(source: Source) -> Decoder:
    """Nemotron-H and Nemotron 3 (vLLM: models/nemotron_h.py, nemotron_h_mtp.py): a layer is one mixer, one attention, one MLP or one set of experts.

    MLPs are up and down (relu2). Experts may work in a narrower space (moe_latent_size). The draft pattern '*E' becomes one draft layer with both.
    """
    pattern = _nemotron_pattern(source, "hybrid_override_pattern", ("layers_block_type", "layer_types"))
    if pattern is None:
        raise source.absent("hybrid_override_pattern")
    if source.value("num_hidden_layers") is not None and source.layers != len(pattern):
        raise BadInput(f"{source.where}: hybrid_override_pattern has {len(pattern)} layers, but num_hidden_layers is {source.layers}")
    bias, none, no_mlp = source.flag("mlp_bias"), Attention("none"), Mlp("none")
    groups = source.any_count(("n_groups", "mamba_n_groups"), 8)
    mamba = attention = none
    if "M" in pattern:
        mamba = Attention(
            kind="mamba2",
            state_value_heads=source.count("mamba_num_heads"),
            state_value_dim=source.count("mamba_head_dim"),
            state_key_heads=groups,
            state_key_dim=source.count("ssm_state_size"),
            conv_kernel=source.any_count(("conv_kernel", "mamba_d_conv"), 4),
            state_groups=groups,
            conv_bias=source.flag("use_conv_bias", source.flag("mamba_conv_bias", True)),
            qkv_bias=source.flag("use_bias"),
            o_bias=source.flag("use_bias"),
        )
    drafts = source.draft_layers("num_nextn_predict_layers")
    draft_pattern = (_nemotron_pattern(source, "mtp_hybrid_override_pattern", ("mtp_layers_block_type",)) or ["*", "E"]) if drafts else []
    if "*" in pattern + draft_pattern:
        attention = gqa(source, source.window)
    moe = _nemotron_experts(source, bias) if "E" in pattern + draft_pattern else no_mlp
    widths = source.counts("intermediate_size") if isinstance(source.value("intermediate_size"), list) else None

    def mlp(at: int) -> Mlp:
        # A list gives each MLP layer its own width, one entry stands for all (NemotronHMLPDecoderLayer).
        if widths is None:
            return Mlp("dense", source.count("intermediate_size"), gated=False, bias=bias)
        number = 0 if len(widths) == 1 else pattern[:at].count("-")
        if number >= len(widths):
            raise BadInput(f"{source.where}: intermediate_size has {len(widths)} entries for {pattern.count('-')} MLP layers")
        return Mlp("dense", widths[number], gated=False, bias=bias)

    built = []
    for i, kind in enumerate(pattern):
        feed_forward = mlp(i) if kind == "-" else moe if kind == "E" else no_mlp
        built.append(Layer(i, {"M": mamba, "*": attention}.get(kind, none), feed_forward, norms=1))
    if "M" in draft_pattern or "-" in draft_pattern:
        raise BadInput(f"{source.where}: mtp_hybrid_override_pattern: vLLM builds drafts of * and E only")
    last = len(pattern)
    if draft_pattern == ["*", "E"]:
        mtp = tuple(Layer(last + i, attention, moe, DRAFT_NORMS) for i in range(drafts))
    else:
        mtp = tuple(Layer(last + i, attention if k == "*" else none, moe if k == "E" else no_mlp, norms=1) for i, k in enumerate(draft_pattern * drafts))
    return Decoder(
        tuple(built),
        mtp,
        state_dtype=state_dtype(source, "mamba_ssm_cache_dtype", "float32"),
        embeddings_on_every_stage=True,
    )


def _nemotron_experts(source: Source, bias: bool) -> Mlp:
    experts, shared = source.count("n_routed_experts"), source.count("n_shared_experts", 0, least=0)
    return Mlp(
        "moe",
        gated=False,
        bias=bias,
        experts=experts,
        experts_per_token=experts_per_token(source, "num_experts_per_tok", experts=experts),
        expert_intermediate_size=source.count("moe_intermediate_size"),
        expert_hidden_size=source.count("moe_latent_size", None),
        shared_experts=shared,
        shared_intermediate_size=shared * source.count("moe_shared_expert_intermediate_size") if shared else 0,
        router_bias=True,
    )
