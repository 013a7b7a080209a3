"""What a block costs a stage for every run of layers at once: the figures of `pool`, for a search that looks at all splits.

Which caches share a group does not depend on where the pipeline is cut (get_kv_cache_groups merges the layers of all workers first), so a stage's
bytes per block are differences of prefix sums over the layers.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import BadInput
from ..spec import ModelSpec
from .groups import Group
from .pages import Cache, Setup, layer_pages
from .pool import fits, grouped, pool_tokens, prepared, request_blocks
from .stages import INDEX_SHARING, model_caches


@dataclass(frozen=True)
class BlockCosts:
    """Bytes per block of stages, and what a number of blocks is worth. L: decoder layers.

    inner, last: int64 [L + 1, L + 1], bytes of one block of a stage that holds layers start to end - 1, of a stage before the last one and of the last
    one, which also holds the draft layers; 0 where start >= end or no layer of it has a cache.
    """

    inner: np.ndarray
    last: np.ndarray
    request_blocks: int
    max_model_len: int
    block_size_tokens: int

    def tokens(self, blocks: int) -> int:
        """Pool in tokens as vLLM logs it."""
        return pool_tokens(blocks, self.request_blocks, self.max_model_len)

    def fits(self, blocks: int) -> bool:
        """Whether one longest request fits into so many blocks."""
        return fits(blocks, self.request_blocks)

    def least_blocks(self, tokens: int) -> int:
        """Fewest blocks that are worth at least so many tokens."""
        blocks = max(0, tokens * self.request_blocks // self.max_model_len)
        while self.tokens(blocks) < tokens:
            blocks += 1
        while blocks and self.tokens(blocks - 1) >= tokens:
            blocks -= 1
        return blocks


def shared_index_runs(spec: ModelSpec) -> np.ndarray:
    """Layers that a stage of layers start to end - 1 holds before its first one with indices of its own: int64 [L + 1, L + 1], 0 where it is empty.

    These use the indices of another stage, or are flipped. Layers without an indexer do not count (stages.flipped_layers says which they are).
    """
    layers = spec.num_hidden_layers
    indexers = [layer.attention.indexer for layer in spec.layers]
    shared = np.concatenate([[0], np.cumsum([one is not None and not one.owns for one in indexers])]).astype(np.int64)
    next_owner = np.full(layers + 1, layers, dtype=np.int64)
    for i in range(layers - 1, -1, -1):
        next_owner[i] = i if indexers[i] is not None and indexers[i].owns else next_owner[i + 1]
    ends = np.minimum(np.arange(layers + 1)[None, :], next_owner[:, None])
    starts = np.arange(layers + 1)[:, None]
    return np.where(ends > starts, shared[np.maximum(ends, starts)] - shared[starts], 0)


def block_costs(spec: ModelSpec, *, index_sharing: str = "stock", **engine) -> BlockCosts:
    """Costs of all runs of layers. engine: what `prepared` takes. Raises BadInput as `pool` does for what cannot be right.

    One group's flipped indices are known (DSA, whose caches all share one group); a model whose layers share indices and form several is refused with flip.
    """
    if index_sharing not in INDEX_SHARING:
        raise BadInput(f"index_sharing: got {index_sharing!r}; one of {', '.join(INDEX_SHARING)}")
    setup, request = prepared(spec, **engine)
    layers = spec.num_hidden_layers
    groups = grouped(model_caches(spec, [layers], setup, [()]), setup)
    flips = shared_index_runs(spec) if index_sharing == "flip" else np.zeros((layers + 1, layers + 1), dtype=np.int64)
    if flips.any() and len(groups) > 1:
        raise BadInput(f"index_sharing: flip is known for models whose caches form one group; those of {spec.name} form {len(groups)}")
    flipped = flips * _index_bytes(spec, setup) if flips.any() else flips
    empty = np.arange(layers + 1)[:, None] >= np.arange(layers + 1)[None, :]

    def widest(with_drafts: bool) -> np.ndarray:
        found = [_run_bytes(group.caches, layers, with_drafts) + flipped for group in groups]
        return np.where(empty, 0, np.maximum.reduce(found) if found else 0)

    return BlockCosts(widest(False), widest(True), _request_blocks(groups, request), request.max_model_len, setup.block_size_tokens)


def _request_blocks(groups: tuple[Group, ...], request) -> int:
    found = request_blocks(groups, request)
    if not found:
        raise BadInput("model: no layer has a KV cache, so there is no pool to divide")
    return found


def _run_bytes(caches: tuple[Cache, ...], layers: int, with_drafts: bool) -> np.ndarray:
    """Bytes per block of one group for every run of layers: [L + 1, L + 1], rows are starts."""
    sizes = np.zeros(layers + 1, dtype=np.int64)
    for cache in caches:
        if not cache.draft:
            sizes[cache.layer + 1] += cache.page.page_bytes
    sums = np.cumsum(sizes)
    drafts = sum(cache.page.page_bytes for cache in caches if cache.draft) if with_drafts else 0
    return sums[None, :] - sums[:, None] + drafts


def _index_bytes(spec: ModelSpec, setup: Setup) -> int:
    """Bytes per block of one index cache: what a flipped layer adds. All sharing layers of a model have the same."""
    shared = next(layer for layer in spec.layers if layer.attention.indexer is not None and not layer.attention.indexer.owns)
    plain, flipped = (sum(page.page_bytes for page in layer_pages(shared, setup, flip)) for flip in (False, True))
    return flipped - plain
