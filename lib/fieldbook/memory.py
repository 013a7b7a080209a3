"""Memory accounting from first principles: what each pipeline rank holds and how many tokens of KV pool come out.

Bytes inside; GiB is 2**30 bytes and appears only when shown. Needs the model's config.json, no weights and no torch.
"""

import json
from dataclasses import dataclass
from functools import lru_cache

from . import paths
from .errors import BadInput

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Tokens of one KV block, by device, for vLLM 0.30: platforms/cpu.py sets 128 when the user gave none (one block then fills
# the tile of the CPU attention kernel); on CUDA config/cache.py defaults to 16 for dense attention.
BLOCK_SIZE_TOKENS = {"0.30": {"cpu": 128, "cuda": 16}}


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a dense decoder with grouped-query attention (LlamaForCausalLM). Counts, not bytes."""

    name: str
    architecture: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int


@dataclass(frozen=True)
class RankLedger:
    """One pipeline stage: its layers, weights, KV bytes per token and the blocks its space holds."""

    rank: int
    layers: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    available_kv_bytes: int
    blocks: int


@dataclass(frozen=True)
class Pool:
    """KV pool of a layout: every rank gets the smallest rank's block count (vLLM: kv_cache_utils.get_kv_cache_configs)."""

    ranks: tuple[RankLedger, ...]
    block_size_tokens: int
    blocks: int
    binding_rank: int
    pool_tokens: int
    max_concurrency: float


@lru_cache
def model_spec(name: str) -> ModelSpec:
    """Read data/models/<name>/config.json. Raises BadInput for a missing file, a missing key or an architecture not covered."""
    file = paths.model_config_dir(name) / "config.json"
    shown = f"data/models/{name}/config.json"
    if not file.is_file():
        have = sorted(p.parent.name for p in paths.model_config_dir("").glob("*/config.json"))
        raise BadInput(f"model.name: got {name!r}, but there is no {shown}; known models: {', '.join(have) or 'none'}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{shown}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"{shown}: not a model config, which is a mapping of keys to values")
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture != "LlamaForCausalLM":
        raise BadInput(f"{shown}: architecture {architecture} is not covered yet; memory accounting knows LlamaForCausalLM")
    if config.get("quantization_config"):
        raise BadInput(f"{shown}: quantized weights are not covered yet; memory accounting knows float32, bfloat16 and float16")
    try:
        heads = config["num_attention_heads"]
        return ModelSpec(
            name=name,
            architecture=architecture,
            num_hidden_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            max_position_embeddings=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise BadInput(f"{shown}: key {error} is missing") from None


def layer_parameters(spec: ModelSpec) -> int:
    """Parameters of one decoder layer: q, k, v, o, gate, up, down and two norms (vLLM: models/llama.py:LlamaDecoderLayer)."""
    return layer_parameters_of_rank(spec, 1)


def layer_parameters_of_rank(spec: ModelSpec, tensor_parallel_size: int) -> int:
    """Parameters of one decoder layer on one TP rank: heads and MLP width are divided, KV heads until one is left, norms are replicated."""
    query_width = spec.num_attention_heads * spec.head_dim // tensor_parallel_size
    kv_width = max(1, spec.num_key_value_heads // tensor_parallel_size) * spec.head_dim
    attention = spec.hidden_size * (query_width + 2 * kv_width) + query_width * spec.hidden_size
    return attention + 3 * spec.hidden_size * spec.intermediate_size // tensor_parallel_size + 2 * spec.hidden_size


def embedding_parameters(spec: ModelSpec) -> int:
    """Parameters of the token embedding, and of lm_head."""
    return spec.vocab_size * spec.hidden_size


def rank_weights_bytes(spec: ModelSpec, layers: int, first: bool, last: bool, dtype_bytes: int, tensor_parallel_size: int = 1) -> int:
    """Bytes of weights on one rank of a pipeline stage.

    The embedding lies on the first stage, final norm and lm_head on the last. Tied embeddings are held by both ends when these
    are different ranks, once when they are the same (vLLM: models/llama.py:LlamaModel.__init__, LlamaForCausalLM.__init__).
    """
    embedding = embedding_parameters(spec) // tensor_parallel_size
    parameters = layers * layer_parameters_of_rank(spec, tensor_parallel_size)
    if first:
        parameters += embedding
    if last:
        parameters += spec.hidden_size
        if not (first and spec.tie_word_embeddings):
            parameters += embedding
    return parameters * dtype_bytes


def checkpoint_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    """Bytes of all weights in a checkpoint, tied embeddings stored once."""
    return rank_weights_bytes(spec, spec.num_hidden_layers, True, True, dtype_bytes)


def kv_bytes_per_token_per_layer(spec: ModelSpec, tensor_parallel_size: int, dtype_bytes: int) -> int:
    """K and V of one token in one layer on one rank (vLLM: v1/kv_cache_interface.py:FullAttentionSpec).

    TP divides the KV heads until one is left on each rank.
    """
    local_heads = max(1, spec.num_key_value_heads // tensor_parallel_size)
    return 2 * local_heads * spec.head_dim * dtype_bytes


def blocks_that_fit(available_kv_bytes: int, kv_bytes_per_block: int) -> int:
    """Whole blocks in the space of one rank (vLLM: kv_cache_utils.get_num_blocks)."""
    return available_kv_bytes // kv_bytes_per_block


def pool_tokens(blocks: int, block_size_tokens: int, max_model_len: int) -> int:
    """The figure vLLM logs: int(concurrency x max_model_len), concurrency = blocks / blocks of one longest request.

    It equals blocks x block size only when max_model_len is a multiple of the block size, because the last block of a request
    is counted whole (vLLM: kv_cache_utils.get_kv_cache_capacity).
    """
    blocks_per_request = -(-max_model_len // block_size_tokens)
    return int(blocks / blocks_per_request * max_model_len)


def block_size_tokens(device: str, vllm_release: str = "0.30") -> int:
    """vLLM's default block size for dense attention. Raises BadInput for a release the table does not know."""
    try:
        return BLOCK_SIZE_TOKENS[vllm_release][device]
    except KeyError:
        raise BadInput(f"block size of vLLM {vllm_release} on {device} is not known; known releases: {', '.join(BLOCK_SIZE_TOKENS)}") from None


def predict_pool(
    spec: ModelSpec,
    layers_per_stage: list[int],
    available_kv_bytes: list[int],
    *,
    dtype_bytes: int,
    tensor_parallel_size: int,
    max_model_len: int,
    block_size: int,
) -> Pool:
    """Ledger of every stage and the pool that the smallest one leaves to all.

    layers_per_stage and available_kv_bytes have one entry per stage; bytes and tokens as named.
    Raises BadInput when not even one request of max_model_len fits, as vLLM does.
    """
    last = len(layers_per_stage) - 1
    per_layer = kv_bytes_per_token_per_layer(spec, tensor_parallel_size, dtype_bytes)
    ranks = []
    for rank, (layers, available) in enumerate(zip(layers_per_stage, available_kv_bytes, strict=True)):
        per_token = layers * per_layer
        ranks.append(
            RankLedger(
                rank=rank,
                layers=layers,
                weights_bytes=rank_weights_bytes(spec, layers, rank == 0, rank == last, dtype_bytes, tensor_parallel_size),
                kv_bytes_per_token=per_token,
                kv_bytes_per_block=per_token * block_size,
                available_kv_bytes=available,
                blocks=blocks_that_fit(available, per_token * block_size),
            )
        )
    binding = min(ranks, key=lambda r: r.blocks)
    blocks_per_request = -(-max_model_len // block_size)
    # One block of the pool is vLLM's null block and never holds tokens (kv_cache_utils: admission check).
    if binding.blocks - 1 < blocks_per_request:
        raise BadInput(
            f"rank {binding.rank} has room for {binding.blocks} KV blocks of {block_size} tokens, but one request of {max_model_len} tokens needs "
            f"{blocks_per_request} and the null block; give it more KV space or shorten engine.max_model_len"
        )
    return Pool(
        ranks=tuple(ranks),
        block_size_tokens=block_size,
        blocks=binding.blocks,
        binding_rank=binding.rank,
        pool_tokens=pool_tokens(binding.blocks, block_size, max_model_len),
        max_concurrency=binding.blocks / blocks_per_request,
    )
