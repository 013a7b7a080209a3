"""The KV pool of a layout: ledger of every rank, the rank that binds, and the token count that vLLM logs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import BadInput
from ..spec import ModelSpec
from .blocks import default_block_size_tokens, hybrid_page, is_hybrid
from .groups import FULL_KINDS, Group, Request, blocks_per_request, form_groups
from .pages import Cache, Setup, setup_of
from .releases import rules
from .stages import model_caches, stage_bounds, stage_flips

STATE_MODES = ("align", "none")


@dataclass(frozen=True)
class GroupLedger:
    """One group of the model: what it holds, its layers on every stage, the page of its first layer and the blocks that one longest request takes."""

    kind: str
    layers_per_stage: tuple[int, ...]
    block_size_tokens: int
    page_bytes: int
    blocks_per_request: int
    padding_layers: int


@dataclass(frozen=True)
class RankLedger:
    """One pipeline stage, each of its TP ranks alike. kv_bytes_per_token: attention and indices, which grow with every token; sliding_bytes_per_token:
    those of window layers; state_bytes: one recurrent state of all its layers. layers counts decoder layers, draft_layers those of MTP."""

    rank: int
    layers: int
    draft_layers: int
    indexers: int
    flipped: tuple[int, ...]
    kv_bytes_per_token: int
    sliding_bytes_per_token: int
    state_bytes: int
    bytes_per_block: int
    available_kv_bytes: int
    blocks: int


@dataclass(frozen=True)
class Pool:
    """Pool of all ranks: each gets the binding rank's block count (kv_cache_utils.py:get_kv_cache_configs). pool_tokens: as vLLM logs it."""

    ranks: tuple[RankLedger, ...]
    groups: tuple[GroupLedger, ...]
    block_size_tokens: int
    state_page_bytes: int | None
    binding_rank: int
    blocks: int
    blocks_per_request: int
    pool_tokens: int
    max_concurrency: float
    longest_request_tokens: int

    def allocated_kv_bytes(self, rank: int) -> int:
        """Bytes of KV cache that vLLM allocates on a rank; the rest of its available memory stays unused."""
        return self.blocks * self.ranks[rank].bytes_per_block


def pool_tokens(blocks: int, request_blocks: int, max_model_len: int) -> int:
    """Tokens as logged: int(concurrency x max_model_len), concurrency = blocks / blocks of one longest request (get_kv_cache_capacity).

    For one group this is blocks x block size where max_model_len is a multiple of the block; in hybrid models it depends on max_model_len.
    """
    return int(blocks / request_blocks * max_model_len)


def fits(blocks: int, needed: int) -> bool:
    """Whether a request of so many blocks fits: one block of the pool is the null block, which never holds tokens (get_kv_cache_configs: check_memory)."""
    return needed < blocks


def request_blocks(groups: Sequence[Group], request: Request) -> int:
    """Blocks of one longest request over all groups, which draw from one pool (get_max_concurrency_for_kv_cache_config)."""
    return sum(blocks_per_request(group.page, request) for group in groups)


def longest_request_tokens(groups: Sequence[Group], request: Request, blocks: int) -> int:
    """Longest max_model_len, up to the request's own, that blocks and the null block serve; 0 if none (_estimate_max_model_len_from_groups)."""
    low, high = 0, request.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(blocks, request_blocks(groups, replace(request, max_model_len=middle))) else (low, middle - 1)
    return low


def _bytes_per_token(caches: Sequence[Cache], kinds: tuple[str, ...]) -> int:
    return sum(cache.page.content_bytes // cache.page.block_size_tokens for cache in caches if cache.page.kind in kinds)


def _rank_ledger(rank: int, layers: int, flipped: tuple[int, ...], caches: Sequence[Cache], groups: Sequence[Group], available: int) -> RankLedger:
    own = [cache for cache in caches if cache.stage == rank]
    widest = max((group.bytes_per_block(rank) for group in groups), default=0)
    if not widest:
        raise BadInput(f"partition: no layer of stage {rank} has a KV cache; vLLM needs one on every stage")
    return RankLedger(
        rank=rank,
        layers=layers,
        draft_layers=len({cache.layer for cache in own if cache.draft}),
        indexers=sum(cache.page.kind == "index" for cache in own),
        flipped=flipped,
        kv_bytes_per_token=_bytes_per_token(own, FULL_KINDS),
        sliding_bytes_per_token=_bytes_per_token(own, ("sliding",)),
        state_bytes=sum(cache.page.content_bytes for cache in own if cache.page.kind == "state"),
        bytes_per_block=widest,  # groups alias one buffer, so the widest one sets the size (_get_kv_cache_bytes_per_block)
        available_kv_bytes=available,
        blocks=max(0, available) // widest,
    )


def _check(spec: ModelSpec, tensor_parallel_size: int, block_size: int | None, request: Request) -> None:
    """Raise BadInput for arguments that cannot be right whatever the model."""
    for name, value in (("tensor_parallel_size", tensor_parallel_size), ("block_size", block_size or 1), ("max_model_len", request.max_model_len)):
        if value < 1:
            raise BadInput(f"{name}: must be at least 1, got {value}")
    if request.draft_tokens < 0:
        raise BadInput(f"draft_tokens: must not be negative, got {request.draft_tokens}")
    if request.state_mode not in STATE_MODES:
        raise BadInput(f"state_mode: got {request.state_mode!r}; align (with prefix caching) or none")
    if request.dcp < 1 or tensor_parallel_size % request.dcp:
        raise BadInput(f"dcp: {request.dcp} does not divide tensor_parallel_size {tensor_parallel_size}")
    heads = max((layer.attention.kv_heads for layer in spec.layers), default=0)
    if request.dcp > 1 and heads and request.dcp * heads > tensor_parallel_size:
        raise BadInput(f"dcp: {request.dcp} x {heads} KV heads is more than tensor_parallel_size {tensor_parallel_size}; DCP splits only repeated heads")


def _does_not_fit(result: Pool, request: Request) -> BadInput:
    binding = result.ranks[result.binding_rank]
    longest = f"shorten engine.max_model_len to {result.longest_request_tokens}" if result.longest_request_tokens else "free memory on it"
    return BadInput(
        f"rank {binding.rank} has room for {binding.blocks} KV blocks of {result.block_size_tokens} tokens, but one request of "
        f"{request.max_model_len} tokens needs {result.blocks_per_request} and the null block; give it more KV space or {longest}"
    )


def _aligned(spec: ModelSpec, setup: Setup, block_size: int | None, request: Request) -> Setup:
    block = block_size or default_block_size_tokens(spec, setup.device)
    if not is_hybrid(spec):
        return replace(setup, block_size_tokens=block)
    block, padded = hybrid_page(spec, setup, block)
    state_block = block if request.state_mode == "align" else request.max_model_len
    return replace(setup, block_size_tokens=block, state_page_bytes=padded, state_block_tokens=state_block)


def prepared(
    spec: ModelSpec,
    *,
    max_model_len: int,
    tensor_parallel_size: int = 1,
    cache_dtype: str = "auto",
    block_size: int | None = None,
    release: str = "0.30",
    draft_tokens: int = 0,
    dcp: int = 1,
    device: str = "cuda",
    state_dtype: str = "auto",
    state_mode: str = "align",
    in_flight_tokens: int | None = None,
) -> tuple[Setup, Request]:
    """How pages are cut and what one longest request takes: what does not depend on the partition.

    block_size None is vLLM's default for device and attention; hybrid models raise either. draft_tokens 0: no speculative decoding, and MTP layers are
    not loaded. state_mode "align": prefix caching is on (the default), "none": off. in_flight_tokens: needed with sliding-window layers
    (releases.in_flight_tokens). Raises BadInput for what cannot be right.
    """
    several_drafts = min(len(spec.mtp_layers), draft_tokens) > 1
    request = Request(max_model_len, draft_tokens, dcp, state_mode, in_flight_tokens, draft_tokens - 1 if several_drafts else 0)
    _check(spec, tensor_parallel_size, block_size, request)
    setup = setup_of(
        spec,
        tensor_parallel_size=tensor_parallel_size,
        cache_dtype=cache_dtype,
        state_dtype=state_dtype,
        draft_tokens=draft_tokens,
        device=device,
        release=release,
    )
    return _aligned(spec, setup, block_size, request), request


def grouped(caches: Sequence[Cache], setup: Setup) -> tuple[Group, ...]:
    """Groups of the whole model's caches, in vLLM's order. QSA's backend asks for a block-outermost layout (QSAStateBackend)."""
    return form_groups(tuple(caches), packed=any(cache.page.kind == "ring" for cache in caches), ring_is_state=rules(setup.release).ring_is_state)


def pool(
    spec: ModelSpec,
    partition: Sequence[int],
    available_kv_bytes: Sequence[int],
    *,
    index_sharing: str = "stock",
    must_fit: bool = True,
    **engine,
) -> Pool:
    """Ledger of every stage and the pool that the smallest one leaves to all (kv_cache_utils.py:get_kv_cache_configs).

    partition: layers of each stage; available_kv_bytes: of one rank of each stage; engine: max_model_len and what else `prepared` takes.
    Raises BadInput when a longest request does not fit, as vLLM does, unless must_fit is False; and for what cannot be right.
    """
    bounds = stage_bounds(spec, partition)
    if len(available_kv_bytes) != len(bounds):
        raise BadInput(f"available_kv_bytes: {len(available_kv_bytes)} values for {len(bounds)} stages")
    setup, request = prepared(spec, **engine)
    flips = stage_flips(spec, partition, index_sharing)
    caches = model_caches(spec, partition, setup, flips)
    groups = grouped(caches, setup)
    ranks = tuple(_rank_ledger(stage, end - start, flips[stage], caches, groups, available_kv_bytes[stage]) for stage, (start, end) in enumerate(bounds))
    binding = min(ranks, key=lambda rank: rank.blocks)
    needed = request_blocks(groups, request)
    result = Pool(
        ranks=ranks,
        groups=tuple(_group_ledger(group, len(bounds), request) for group in groups),
        block_size_tokens=setup.block_size_tokens,
        state_page_bytes=setup.state_page_bytes,
        binding_rank=binding.rank,
        blocks=binding.blocks,
        blocks_per_request=needed,
        pool_tokens=pool_tokens(binding.blocks, needed, request.max_model_len),
        max_concurrency=binding.blocks / needed,
        longest_request_tokens=longest_request_tokens(groups, request, binding.blocks),
    )
    if must_fit and not fits(binding.blocks, needed):
        raise _does_not_fit(result, request)
    return result


def _group_ledger(group: Group, stages: int, request: Request) -> GroupLedger:
    per_stage = tuple(sum(cache.stage == stage for cache in group.caches) for stage in range(stages))
    page = group.page
    return GroupLedger(page.kind, per_stage, page.block_size_tokens, page.page_bytes, blocks_per_request(page, request), group.padding_layers)
