"""What one layer keeps on one rank: bytes per token of its KV cache, bytes of its recurrent state, and the page that a block of it is."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from ..errors import BadInput
from ..spec import Attention, Layer, ModelSpec
from .releases import rules

PageKind = Literal["attention", "index", "sliding", "state", "ring"]
STATE_KINDS = ("gdn", "kda", "mamba2")

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

# Opaque rows of sparse MLA: latent, scales and rope in one blob (mla_attention.py:MLAAttention.get_kv_cache_spec, flashmla_sparse.py).
PACKED_MLA_BYTES_PER_TOKEN = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
# Keys of a DSA indexer are fp8 with one float32 scale per 128 values (deepseek_v2.py:DeepseekV32IndexerCache).
INDEX_QUANT_BLOCK = 128
QSA_KEY_BYTES = 2  # qwen4_exp/nvidia/indexer_qsa.py: raw keys and compressed keys are bfloat16


@dataclass(frozen=True)
class Page:
    """One block of one layer's cache (vLLM: a KVCacheSpec). Equal pages may share a group. shape tells layouts of equal size apart."""

    kind: PageKind
    block_size_tokens: int
    content_bytes: int
    padded_bytes: int | None = None
    shape: tuple = ()
    window_tokens: int = 0
    replicated: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of the page in the pool, padding included."""
        return self.padded_bytes or self.content_bytes


@dataclass(frozen=True)
class Cache:
    """One cache of one layer and the pipeline stage that holds it."""

    stage: int
    layer: int
    page: Page
    draft: bool = False


@dataclass(frozen=True)
class Setup:
    """How the engine runs, as far as pages depend on it. Dtypes are resolved: no "auto" is left. block_size_tokens: of attention, aligned."""

    tensor_parallel_size: int
    cache_dtype: str
    model_dtype: str
    state_dtype: str
    draft_tokens: int
    device: str
    release: str
    block_size_tokens: int = 16
    state_page_bytes: int | None = None  # the page that every state is padded to, None where it needs no padding
    state_block_tokens: int = 16


def dtype_bytes(dtype: str, what: str = "cache_dtype") -> int:
    """Bytes of one value. Raises BadInput for a dtype whose layout is not covered (per-token-head, turboquant, nvfp4)."""
    if dtype not in DTYPE_BYTES:
        known = ", ".join(["auto", *DTYPE_BYTES, *PACKED_MLA_BYTES_PER_TOKEN])
        raise BadInput(f"{what}: {dtype!r} is not covered by KV accounting, which knows {known}")
    return DTYPE_BYTES[dtype]


def resolved_cache_dtype(spec: ModelSpec, cache_dtype: str, device: str, release: str) -> str:
    """Cache dtype after vLLM's own replacements (torch_utils.py:resolve_kv_cache_dtype_string, mla_attention.py:_canonicalize_sparse_mla_kv_cache_dtype).

    "auto" is the checkpoint's cache scheme, else the model's dtype; on CUDA sparse MLA (FlashMLA) stores every fp8 as fp8_ds_mla.
    """
    if cache_dtype == "auto":
        scheme = spec.quantization.kv_cache_scheme if spec.quantization else None
        cache_dtype = scheme.lower() if scheme else spec.dtype
    kinds = {layer.attention.kind for layer in spec.layers}
    if "sparse_mla" in kinds and device == "cuda" and cache_dtype.startswith("fp8"):
        cache_dtype = "fp8_ds_mla"
    if cache_dtype in PACKED_MLA_BYTES_PER_TOKEN:
        if "sparse_mla" not in kinds:
            raise BadInput(f"cache_dtype: {cache_dtype} is a layout of sparse MLA, and {spec.name} has no such layer")
        if cache_dtype == "nvfp4_ds_mla" and not rules(release).nvfp4_ds_mla:
            raise BadInput(f"cache_dtype: vLLM {release} has no nvfp4_ds_mla; it came with 0.30")
    else:
        dtype_bytes(cache_dtype)
    return cache_dtype


def setup_of(spec: ModelSpec, *, tensor_parallel_size: int, cache_dtype: str, state_dtype: str, draft_tokens: int, device: str, release: str) -> Setup:
    """Setup with dtypes resolved. state_dtype "auto": what the model's config declares, else the dtype of the convolution (float32 for KDA)."""
    model_dtype = "float32" if spec.dtype == "float" else spec.dtype
    dtype_bytes(model_dtype, "dtype")
    declared = spec.state_dtype if state_dtype == "auto" else state_dtype
    is_kda = any(layer.attention.kind == "kda" for layer in spec.layers)
    if is_kda and (declared == "auto" or rules(release).kda_state_always_float32):
        declared = "float32"
    declared = model_dtype if declared == "auto" else declared
    dtype_bytes(declared, "state_dtype")
    cache_dtype = resolved_cache_dtype(spec, cache_dtype, device, release)
    return Setup(tensor_parallel_size, cache_dtype, model_dtype, declared, draft_tokens, device, release)


def divided(count: int, tensor_parallel_size: int, what: str) -> int:
    """count over TP ranks (vllm.distributed.utils.divide). Raises BadInput where it does not divide."""
    if count % tensor_parallel_size:
        raise BadInput(f"tensor_parallel_size: {tensor_parallel_size} does not divide {count} {what}")
    return count // tensor_parallel_size


def local_kv_heads(kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads on one TP rank: divided until one is left, then repeated (config/model.py:ModelConfig.get_num_kv_heads)."""
    if kv_heads >= tensor_parallel_size:
        return divided(kv_heads, tensor_parallel_size, "KV heads")
    if tensor_parallel_size % kv_heads:
        raise BadInput(f"tensor_parallel_size: {tensor_parallel_size} is not a multiple of {kv_heads} KV heads")
    return 1


def kv_bytes_per_token(attention: Attention, tensor_parallel_size: int, cache_dtype: str) -> int:
    """Bytes of one token in one layer's KV cache on one rank, indexer not counted; cache_dtype resolved.

    Grouped-query: K and V of the local heads (kv_cache_interface.py:AttentionSpec.state_content_size_bytes), also where both come from one
    projection. MLA: one latent and its rope part, the same on every TP rank (MLAAttentionSpec). 0 for layers without a cache of their own.
    """
    if attention.kv_shared or attention.kind in (*STATE_KINDS, "none"):
        return 0
    if attention.heads:
        divided(attention.heads, tensor_parallel_size, "attention heads")
    if attention.kind in ("mla", "sparse_mla"):
        packed = PACKED_MLA_BYTES_PER_TOKEN.get(cache_dtype)
        return packed or (attention.kv_lora_rank + attention.rope_head_dim) * dtype_bytes(cache_dtype)
    width = attention.head_dim + (attention.v_head_dim or attention.head_dim)
    return local_kv_heads(attention.kv_heads, tensor_parallel_size) * width * dtype_bytes(cache_dtype)


def indexer_bytes_per_token(attention: Attention, *, flipped: bool = False) -> float:
    """Bytes of one token in the index cache of a layer; 0 where it uses another layer's indices. flipped: a patched server lets it compute its own.

    DSA: fp8 key and its scales, 132 B for 128 values. QSA: a bfloat16 key for every compress_ratio tokens, MiniMax-M3 one for each.
    """
    indexer = attention.indexer
    if indexer is None or not (indexer.owns or flipped):
        return 0
    if attention.kind == "sparse_mla":
        return indexer.head_dim + indexer.head_dim // INDEX_QUANT_BLOCK * 4
    return indexer.head_dim * QSA_KEY_BYTES / indexer.compress_ratio


def state_shapes(attention: Attention, tensor_parallel_size: int, draft_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of convolution and recurrent state of one block on one rank, in values (mamba_utils.py:MambaStateShapeCalculator).

    The convolution keeps kernel - 1 tokens and one for each draft token.
    """
    tp = tensor_parallel_size
    keys = attention.state_key_heads * attention.state_key_dim
    values = attention.state_value_heads * attention.state_value_dim
    recurrent = (divided(attention.state_value_heads, tp, "state heads"), attention.state_value_dim, attention.state_key_dim)
    if attention.kind == "mamba2":
        # Groups that TP does not divide are repeated, so that each rank has the groups of its heads (extra_groups_for_head_shards).
        groups = attention.state_groups if attention.state_groups % tp == 0 else tp
        keys = groups * attention.state_key_dim
    if attention.kind == "kda":
        recurrent = (recurrent[0], attention.state_value_dim, attention.state_value_dim)
    channels = divided(values + 2 * keys, tp, "convolution channels")
    return (attention.conv_kernel - 1 + draft_tokens, channels), recurrent


def state_bytes(attention: Attention, tensor_parallel_size: int, *, model_dtype: str, state_dtype: str, draft_tokens: int = 0) -> int:
    """Bytes of one block of recurrent state on one rank: convolution in the model's dtype, state in its own (kv_cache_interface.py:MambaSpec)."""
    convolution, recurrent = state_shapes(attention, tensor_parallel_size, draft_tokens)
    return prod(convolution) * dtype_bytes(model_dtype, "dtype") + prod(recurrent) * dtype_bytes(state_dtype, "state_dtype")


def short_conv_bytes(layer: Layer, setup: Setup) -> int:
    """Bytes of the short convolution's state, whole on every TP rank (qwen4_exp: get_ple_mamba_state_shape_from_config)."""
    conv = layer.short_conv
    return conv.channels * (conv.state_tokens + setup.draft_tokens) * dtype_bytes(setup.model_dtype) if conv else 0


def layer_state_bytes(layer: Layer, setup: Setup) -> int:
    """Bytes of the largest state that a layer keeps per block; 0 without one."""
    own = 0
    if layer.attention.kind in STATE_KINDS:
        tp, drafts = setup.tensor_parallel_size, setup.draft_tokens
        own = state_bytes(layer.attention, tp, model_dtype=setup.model_dtype, state_dtype=setup.state_dtype, draft_tokens=drafts)
    return max(own, short_conv_bytes(layer, setup))


def ring_page(attention: Attention, draft_tokens: int) -> Page:
    """Raw keys of the group that is still being compressed: one block per request (qwen4_exp/common/qsa_cache.py:QSAKeyStateCache)."""
    ratio = attention.indexer.compress_ratio
    capacity = ratio * -(-(ratio + draft_tokens) // ratio)
    return Page("ring", capacity, capacity * attention.indexer.head_dim * QSA_KEY_BYTES)


def kernel_block_tokens(device: str) -> int:
    """Smallest block of the attention kernels: 16 on CUDA (flash_attn.py), 32 on CPU (cpu_attn.py)."""
    return 32 if device == "cpu" else 16


def _attention_pages(attention: Attention, setup: Setup, flipped: bool) -> list[Page]:
    if attention.kind == "compressed":
        raise BadInput("attention: the KV cache of compressed attention (DeepSeek V4) is not covered by KV accounting")
    per_token = kv_bytes_per_token(attention, setup.tensor_parallel_size, setup.cache_dtype)
    block = setup.block_size_tokens
    is_mla = attention.kind in ("mla", "sparse_mla")
    local = 0 if is_mla else local_kv_heads(attention.kv_heads, setup.tensor_parallel_size)
    shape = ("mla", setup.cache_dtype) if is_mla else (local, attention.head_dim, attention.v_head_dim or attention.head_dim)
    if attention.kind == "sliding":
        kernel = kernel_block_tokens(setup.device)
        if not attention.window:
            raise BadInput("window: a sliding layer needs its window in tokens")
        own = max(kernel, block // kernel * kernel) if rules(setup.release).sliding_takes_main_block else kernel
        return [Page("sliding", own, own * per_token, shape=shape, window_tokens=attention.window)]
    found = [Page("attention", block, block * per_token, shape=shape)]
    index = indexer_bytes_per_token(attention, flipped=flipped)
    if index:
        if is_mla and attention.indexer.compress_ratio > 1:
            raise BadInput("indexer: pooled keys beside MLA (GLM-5-Next) are not covered by KV accounting")
        if block % attention.indexer.compress_ratio:
            raise BadInput(f"block_size: {block} is not a multiple of the {attention.indexer.compress_ratio} tokens that share an index key")
        found.append(Page("index", block, int(block * index), shape=("index", attention.indexer.head_dim)))
        if attention.indexer.compress_ratio > 1:
            ring = ring_page(attention, setup.draft_tokens)
            if block % ring.block_size_tokens:
                raise BadInput(f"draft_tokens: QSA ring capacity {ring.block_size_tokens} must divide the attention block size {block}")
            found.append(ring)
    return found


@lru_cache(maxsize=4096)
def layer_pages(layer: Layer, setup: Setup, flipped: bool = False) -> tuple[Page, ...]:
    """Pages of all caches that one layer has on one rank, none where it shares another layer's cache."""
    attention, found = layer.attention, []
    if layer.short_conv:
        shape = ("short_conv", layer.short_conv.channels)
        page = Page("state", setup.state_block_tokens, short_conv_bytes(layer, setup), setup.state_page_bytes, shape, replicated=True)
        found.append(page)
    if attention.kind in STATE_KINDS:
        shapes = (attention.kind, *state_shapes(attention, setup.tensor_parallel_size, setup.draft_tokens))
        content = layer_state_bytes(replace(layer, short_conv=None), setup)
        found.append(Page("state", setup.state_block_tokens, content, setup.state_page_bytes, shapes))
    elif attention.kind != "none" and not attention.kv_shared:
        found += _attention_pages(attention, setup, flipped)
    return tuple(found)
