"""Groups of layers that share a block table, formed the way vLLM forms them (v1/core/kv_cache_utils.py:get_kv_cache_groups)."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from ..errors import BadInput
from .pages import Cache, Page

FULL_KINDS = ("attention", "index")  # one slot per token of the whole request


@dataclass(frozen=True)
class Group:
    """Caches with one block table. padding_layers: slots left empty so that groups of one kind are equally long (vLLM logs them)."""

    caches: tuple[Cache, ...]
    padding_layers: int = 0

    @property
    def page(self) -> Page:
        """Page of the first cache; all of a group need the same number of blocks per request."""
        return self.caches[0].page

    def bytes_per_block(self, stage: int) -> int:
        """Bytes of one block of this group on the ranks of a stage."""
        return sum(cache.page.page_bytes for cache in self.caches if cache.stage == stage)


@dataclass(frozen=True)
class Request:
    """One longest request: what its blocks are counted from. For sliding windows: in_flight_tokens (releases.in_flight_tokens), and retained_tokens,
    which drafting with several MTP layers keeps beside the window (kv_cache_utils.py:get_kv_cache_configs)."""

    max_model_len: int
    draft_tokens: int = 0
    dcp: int = 1
    state_mode: str = "align"
    in_flight_tokens: int | None = None
    retained_tokens: int = 0


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def blocks_per_request(page: Page, request: Request) -> int:
    """Blocks that one request of max_model_len takes in a group (kv_cache_interface.py: max_memory_usage_bytes / page_size_bytes of each spec).

    Attention: all tokens, over the DCP ranks. Sliding: the window and what is in flight, and one more because a window seldom starts on a block.
    State: one block and one per draft token; with prefix caching ("align") one more. Ring: one.
    """
    if page.kind == "ring":
        return 1
    if page.kind == "state":
        return (2 if request.state_mode == "align" else 1) + request.draft_tokens
    if page.kind == "sliding":
        if request.dcp > 1:
            raise BadInput("dcp: decode context parallel does not support sliding-window layers")
        if request.in_flight_tokens is None:
            raise BadInput("in_flight_tokens: sliding-window layers also keep tokens in flight; give kv.in_flight_tokens(max_num_batched_tokens, stages)")
        kept = min(page.window_tokens - 1 + request.retained_tokens + request.in_flight_tokens, request.max_model_len)
        return ceil_div(kept, page.block_size_tokens) + 1
    return ceil_div(ceil_div(request.max_model_len, request.dcp), page.block_size_tokens)


def _same_type(a: Page, b: Page) -> bool:
    """Whether two pages always need the same number of slots (UniformTypeKVCacheSpecs.is_uniform_type)."""
    if a.block_size_tokens != b.block_size_tokens:
        return False
    if a.kind in FULL_KINDS:
        return b.kind in FULL_KINDS
    if a.kind == "state":
        return b.kind == "state" and a.page_bytes == b.page_bytes and a.replicated == b.replicated
    return a.kind == b.kind and a.window_tokens == b.window_tokens


def unified_pages(caches: tuple[Cache, ...]) -> tuple[Cache, ...] | None:
    """Caches with one page size (unify_kv_cache_spec_page_size): states are padded; attention gets a larger block where its page divides the largest,
    else padding. None where that fails: rows of MLA and of indices cannot be padded."""
    largest = max(cache.page.page_bytes for cache in caches)
    unified = []
    for cache in caches:
        page = cache.page
        if page.page_bytes == largest:
            pass
        elif page.kind == "state":
            page = replace(page, padded_bytes=largest)
        elif largest % page.page_bytes == 0:
            ratio = largest // page.page_bytes
            page = replace(page, block_size_tokens=page.block_size_tokens * ratio, content_bytes=page.content_bytes * ratio)
        elif page.kind == "index" or "mla" in page.shape:
            return None
        else:
            page = replace(page, padded_bytes=largest)
        unified.append(replace(cache, page=page))
    return tuple(unified)


def _equal_groups(caches: tuple[Cache, ...]) -> tuple[Group, ...]:
    """Groups of equally many layers (_get_kv_cache_groups_uniform_page_size): as long as the rarest kind of page, or as the commonest when
    that is less than 1.5 times as common. Layers are dealt out in turn, layers[i::n], so that every stage gets its share of each group."""
    kinds: dict[Page, list[Cache]] = defaultdict(list)
    for cache in caches:
        kinds[cache.page].append(cache)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for members in kinds.values():
        count = ceil_div(len(members), size)
        padding = count * size - len(members)
        groups += [Group(tuple(members[i::count]), padding if i == count - 1 else 0) for i in range(count)]
    return tuple(groups)


def approximate_gcd(values: list[int], lower_bound: int) -> int:
    """The divisor from lower_bound up that pads the values least, the larger one of two equals (kv_cache_utils.py:_approximate_gcd)."""
    return min(range(lower_bound, max(max(values), lower_bound) + 1), key=lambda d: (sum(-v % d for v in values), -d))


def packed_groups(caches: tuple[Cache, ...], ring_is_state: bool) -> tuple[Group, ...]:
    """Groups where pages of several sizes lie side by side in a block (_get_packed_kv_cache_groups; QSA's layouts BLNHC and BLHNC).

    A kind that mixes page sizes stays whole and sets the width of a block; larger kinds are split towards it, states down to what a block holds.
    """
    kinds: list[list[Cache]] = []
    for cache in caches:
        home = next((members for members in kinds if _same_type(members[0].page, cache.page)), None)
        if home is None:
            kinds.append([cache])
        else:
            home.append(cache)
    sizes = [Counter(cache.page.page_bytes for cache in members) for members in kinds]
    balanced = [len(set(size.values())) == 1 for size in sizes]
    repeats = [max(size.values()) for size in sizes]
    floor = max((r for r, size, even in zip(repeats, sizes, balanced, strict=True) if even and len(size) > 1), default=0)
    per_group = approximate_gcd([r for r, even in zip(repeats, balanced, strict=True) if even], floor) if floor else None
    splits = [ceil_div(r, per_group) if even and per_group else 1 for r, even in zip(repeats, balanced, strict=True)]

    def is_state(page: Page) -> bool:
        return page.kind == "state" or ring_is_state and (page.kind == "ring" or per_group is None and page.kind == "sliding")

    anchor = max(
        sum(ceil_div(n, len(members) if is_state(members[0].page) else split) * page for page, n in size.items())
        for members, size, split in zip(kinds, sizes, splits, strict=True)
    )
    groups: list[Group] = []
    for members, size, split in zip(kinds, sizes, splits, strict=True):
        if is_state(members[0].page):
            split = max(split, ceil_div(len(members), max(anchor // members[0].page.page_bytes, 1)))
        if split == 1:
            groups.append(Group(tuple(members)))
            continue
        by_size = [[cache for cache in members if cache.page.page_bytes == page] for page in size]
        rows = list(zip(*by_size, strict=True))
        groups += [Group(tuple(cache for row in rows[i::split] for cache in row)) for i in range(split)]
    return tuple(groups)


def _promoted(caches: tuple[Cache, ...]) -> tuple[Group, ...]:
    """One group with sliding layers kept in full (_try_get_full_allocation_fallback_groups), for MLA beside sliding layers it does not fit with."""
    block = next((cache.page.block_size_tokens for cache in caches if cache.page.kind in FULL_KINDS), 0)
    full = []
    for cache in caches:
        page = cache.page
        if page.kind == "sliding":
            content = page.content_bytes // page.block_size_tokens * block
            page = replace(page, kind="attention", block_size_tokens=block, content_bytes=content, window_tokens=0)
        full.append(replace(cache, page=page))
    if any(not _same_type(full[0].page, cache.page) for cache in full):
        raise BadInput("KV pages of this model's layers cannot be brought to one size; vLLM refuses it too (unify_kv_cache_spec_page_size)")
    return (Group(tuple(full)),)


def form_groups(caches: tuple[Cache, ...], *, packed: bool = False, ring_is_state: bool = True) -> tuple[Group, ...]:
    """Groups of the whole model, over all stages (get_kv_cache_groups). packed: the backend asks for a block-outermost layout."""
    if not caches:
        return ()
    first = caches[0].page
    if all(_same_type(first, cache.page) for cache in caches):
        return (Group(caches),)  # pages of all layers just add: uniform models, and sparse MLA with its indices
    if packed and len({cache.page.page_bytes for cache in caches}) > 1:
        return packed_groups(caches, ring_is_state)
    unified = unified_pages(caches)
    return _promoted(caches) if unified is None else _equal_groups(unified)
