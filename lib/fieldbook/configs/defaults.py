"""Keys that public configs leave out, with the value their transformers config class gives them (transformers 5.x, models/<family>/configuration_*.py).

Only what is left out in practice: every other shape is required and named when it is missing. Each default that was taken is listed in ModelSpec.defaulted.
"""

from .source import Source

DEFAULTS: dict[str, tuple[str, dict]] = {
    "mistral": ("MistralConfig", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral3": ("Ministral3Config", {"num_key_value_heads": 8, "head_dim": 128}),
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 8}),
    "qwen2": ("Qwen2Config", {"sliding_window": 4096, "max_window_layers": 28}),
    "qwen2_moe": ("Qwen2MoeConfig", {"decoder_sparse_step": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_key_value_heads": 4, "decoder_sparse_step": 1, "sliding_window": 4096}),
    "qwen3_next": ("Qwen3NextConfig (vLLM)", {"head_dim": 256, "num_key_value_heads": 2, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 512}),
    "qwen3_5": ("Qwen3_5TextConfig (vLLM)", {"head_dim": 256, "num_key_value_heads": 4}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig (vLLM)", {"head_dim": 256, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512}),
    "qwen4_exp": (
        "Qwen4ExpTextConfig (vLLM)",
        {"head_dim": 256, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "hc_count": 4, "hc_lowrank": 320},
    ),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 16, "head_dim": 256}),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}),
    # The published Gemma 3 configs of 4B and more leave out all of these.
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "hidden_size_per_layer_input": 256},
    ),
    "gpt_oss": ("GptOssConfig", {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "num_experts_per_tok": 4}),
    "nemotron_h": (
        "NemotronHConfig",
        {"head_dim": 128, "num_key_value_heads": 8, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_ssm_cache_dtype": "float32"},
    ),
    "olmo3": ("Olmo3Config", {"sliding_window": 4096}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {"first_k_dense_replace": 3}),
    "glm4_moe": ("Glm4MoeConfig", {"first_k_dense_replace": 1, "num_key_value_heads": 8}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {"first_k_dense_replace": 1}),
}
# Counts that say how the model is built, not how wide it is: taken without a word in `defaulted`, since almost no config has them.
QUIET = {"decoder_sparse_step", "max_window_layers", "hidden_size_per_layer_input"}


def with_defaults(source: Source, family: str) -> Source:
    """The same keys with those of DEFAULTS added that are absent. A key that is there as null stays null."""
    name, table = DEFAULTS.get(family, ("", {}))
    added = {key: value for key, value in table.items() if key not in source.text}
    if not added:
        return source
    told = tuple(f"{key} = {value} ({name})" for key, value in added.items() if key not in QUIET and (key != "sliding_window" or _window_matters(source)))
    return Source({**source.text, **added}, source.outer, source.where, source.architecture, told)


def _window_matters(source: Source) -> bool:
    return source.text.get("use_sliding_window") is not False and "qwen" not in source.architecture.lower()
