"""What each family calls its modules in a checkpoint. Quantization ignore lists and safetensors headers speak these names."""

from dataclasses import dataclass, replace
from functools import lru_cache

from ..spec import ModelSpec


@dataclass(frozen=True)
class Names:
    """Module names of one family, relative to a layer unless they begin with model, backbone or language_model."""

    layers: str = "model.layers"
    mtp_layers: str = "model.layers"
    mtp: str = ""  # prefix of what belongs to no draft layer
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    attention: str = "self_attn"
    state: str = "linear_attn"
    mlp: str = "mlp"
    moe: str = "mlp"
    router: str = "gate"
    router_bias: str = "gate.e_score_correction_bias"
    expert_matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    draft_norms: tuple[str, ...] = ("enorm", "hnorm", "shared_head.norm")
    norms: tuple[str, ...] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    )


PLAIN = Names()
QWEN_MTP = replace(
    PLAIN,
    mtp_layers="mtp.layers",
    mtp="mtp.",
    shared="shared_expert",
    draft_norms=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
)
W123 = replace(PLAIN, moe="block_sparse_moe", expert_matrices=("w1", "w3", "w2"))

# By the beginning of model_type, the longest one that fits.
FAMILIES = {
    "qwen2_moe": replace(PLAIN, shared="shared_expert"),
    "qwen3_next": QWEN_MTP,
    "qwen3_5": QWEN_MTP,
    "qwen4_exp": QWEN_MTP,
    "mixtral": W123,
    "minimax": replace(W123, router_bias="e_score_correction_bias"),
    "kimi_linear": replace(W123, state="self_attn", latent=("routed_expert_down_proj", "routed_expert_up_proj")),
    "kimi_k3": replace(W123, state="self_attn", latent=("routed_expert_down_proj", "routed_expert_up_proj")),
    "gpt_oss": replace(PLAIN, router="router", router_bias="router"),
    "gemma4": replace(PLAIN, moe="", router="router.proj", shared="mlp"),
    "nemotron_h": replace(
        PLAIN,
        layers="backbone.layers",
        mtp_layers="mtp.layers",
        embedding="backbone.embeddings",
        final_norm="backbone.norm_f",
        attention="mixer",
        state="mixer",
        mlp="mixer",
        moe="mixer",
        norms=("norm",),
        draft_norms=("enorm", "hnorm", "final_layernorm"),
    ),
}


def names_of(spec: ModelSpec) -> Names:
    """Names for a model."""
    return _names_of(spec.model_type, spec.architecture)


# By the two strings: to hash a spec is to hash all its layers.
@lru_cache
def _names_of(model_type: str, architecture: str) -> Names:
    """Those of Llama where the family has no entry. Multimodal checkpoints put the decoder one level deeper."""
    fitting = [key for key in FAMILIES if model_type.startswith(key)]
    names = FAMILIES[max(fitting, key=len)] if fitting else PLAIN
    if not architecture.endswith("ForConditionalGeneration"):
        return names
    inner = "model.language_model" if model_type.startswith(("qwen3", "qwen4", "gemma4")) else "language_model.model"
    deeper = {key: f"{inner}.{getattr(names, key).partition('.')[2]}" for key in ("layers", "embedding", "final_norm")}
    mtp_layers = deeper["layers"] if names.mtp_layers == names.layers else names.mtp_layers
    return replace(names, mtp_layers=mtp_layers, lm_head="lm_head" if inner.startswith("model.") else "language_model.lm_head", **deeper)
