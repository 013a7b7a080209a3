"""How many tokens a block has: the default of device and attention kind, and the growth of the attention block in hybrid models."""

from ..errors import BadInput
from ..spec import ModelSpec
from .pages import STATE_KINDS, Setup, kernel_block_tokens, kv_bytes_per_token, layer_state_bytes

# Tokens of a block when the user gave none, the same in 0.29 to 0.33. CUDA: 16 unless the kernel knows only larger blocks: FlashMLA and its sparse
# form 64 (mla/flashmla.py, mla/flashmla_sparse.py, mla/indexer.py). CPU: 128, one tile of the attention kernel; its reference MLA 16 (platforms/cpu.py).
# Dense MLA differs by backend: FlashMLA (sm_90) 64, Cutlass 128, Triton 16: say which by block_size where it is not FlashMLA.
DEFAULT_BLOCK_SIZE_TOKENS = {
    "cuda": {"gqa": 16, "mla": 64, "sparse_mla": 64},
    "cpu": {"gqa": 128, "mla": 16, "sparse_mla": 16},
}
# Hybrid models with MLA: the block is a multiple of 128, for decode kernels that split it (platforms/interface.py:_align_hybrid_block_size).
MLA_HYBRID_ALIGNMENT_TOKENS = 128


def default_block_size_tokens(spec: ModelSpec, device: str) -> int:
    """Block size before alignment. Raises BadInput for a device that the table does not know."""
    if device not in DEFAULT_BLOCK_SIZE_TOKENS:
        raise BadInput(f"device: got {device!r}, but block sizes are known for {', '.join(DEFAULT_BLOCK_SIZE_TOKENS)}")
    kinds = {layer.attention.kind for layer in spec.layers}
    kind = next((k for k in ("sparse_mla", "mla") if k in kinds), "gqa")
    return DEFAULT_BLOCK_SIZE_TOKENS[device][kind]


def is_hybrid(spec: ModelSpec) -> bool:
    """Recurrent state and attention in one model."""
    return any(layer.attention.kind in STATE_KINDS or layer.short_conv for layer in spec.layers)


def hybrid_block_size_tokens(state_page_bytes: int, attention_bytes_per_token: int, block_size_tokens: int, kernel_tokens: int = 16) -> int:
    """Smallest attention block whose page holds the state page, a multiple of block_size_tokens and of kernel_tokens' own size.

    Source: platforms/interface.py:_align_hybrid_block_size, modes "none" and "align" (0.30 :930; 0.32 rounds up to the backends' kernel blocks too).
    """
    step = max(kernel_tokens, block_size_tokens)
    return max(block_size_tokens, step * -(-state_page_bytes // (step * attention_bytes_per_token)))


def hybrid_page(spec: ModelSpec, setup: Setup, block_size_tokens: int) -> tuple[int, int | None]:
    """Attention block in tokens, and the bytes that state pages are padded to; None where the largest state fills its page exactly.

    A user's --block-size is only the step of the rounding: vLLM raises it too. Every state is padded to the attention page, so that groups alias.
    """
    state_page = max((layer_state_bytes(layer, setup) for layer in spec.layers), default=0)
    per_token = next((n for layer in spec.layers if (n := kv_bytes_per_token(layer.attention, setup.tensor_parallel_size, setup.cache_dtype))), 0)
    if not state_page or not per_token:
        return block_size_tokens, None
    kernel = kernel_block_tokens(setup.device)
    if any(layer.attention.kind in ("mla", "sparse_mla") for layer in spec.layers):
        kernel = MLA_HYBRID_ALIGNMENT_TOKENS
    block = hybrid_block_size_tokens(state_page, per_token, block_size_tokens, kernel)
    page = block * per_token
    return block, None if page == state_page else page
