"""Which layers a pipeline stage holds, which of them a patched server lets compute their own indices, and all caches of the model in vLLM's order."""

from collections.abc import Sequence

from ..errors import BadInput
from ..spec import ModelSpec
from .pages import Cache, Setup, layer_pages

# clean: every cut falls on a layer that computes its own indices; relay: indices cross the boundary; stock: vLLM as released, wrong where a stage
# starts on sharing layers, with the same memory; flip: those leading layers compute their own, and cache 132 B per token for it.
INDEX_SHARING = ("stock", "clean", "relay", "flip")


def stage_bounds(spec: ModelSpec, partition: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First and one past last layer of every stage (distributed/utils.py:get_pp_indices). Raises BadInput when the counts do not make up the model."""
    shown = ",".join(map(str, partition))
    if not partition or any(count < 1 for count in partition):
        raise BadInput(f"partition: every stage needs at least one layer; got {shown or 'none'}")
    if sum(partition) != spec.num_hidden_layers:
        raise BadInput(f"partition: {shown} sums to {sum(partition)}, but {spec.name} has {spec.num_hidden_layers} layers")
    ends = [sum(partition[: i + 1]) for i in range(len(partition))]
    return tuple((end - count, end) for end, count in zip(ends, partition, strict=True))


def flipped_layers(spec: ModelSpec, partition: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per stage, the layers that come before the stage's first layer with indices of its own, and would use those of another stage.

    All of them, not only the first: each flipped layer owns its indexer. Layers without an indexer do not count.
    """
    flipped = []
    for start, end in stage_bounds(spec, partition):
        leading = []
        for layer in spec.layers[start:end]:
            indexer = layer.attention.indexer
            if indexer is not None and indexer.owns:
                break
            if indexer is not None:
                leading.append(layer.index)
        flipped.append(tuple(leading))
    return tuple(flipped)


def stage_flips(spec: ModelSpec, partition: Sequence[int], index_sharing: str) -> tuple[tuple[int, ...], ...]:
    """Per stage, the layers that compute their own indices instead of sharing: none unless index_sharing is flip."""
    if index_sharing not in INDEX_SHARING:
        raise BadInput(f"index_sharing: got {index_sharing!r}; one of {', '.join(INDEX_SHARING)}")
    return flipped_layers(spec, partition) if index_sharing == "flip" else ((),) * len(partition)


def model_caches(spec: ModelSpec, partition: Sequence[int], setup: Setup, flips: Sequence[tuple[int, ...]]) -> tuple[Cache, ...]:
    """All caches, stage by stage in layer order, as get_kv_cache_configs merges them. Draft layers lie on the last stage, and only when drafting."""
    caches = []
    for stage, (start, end) in enumerate(stage_bounds(spec, partition)):
        for layer in spec.layers[start:end]:
            caches += [Cache(stage, layer.index, page) for page in layer_pages(layer, setup, layer.index in flips[stage])]
    last = len(partition) - 1
    for layer in spec.mtp_layers if setup.draft_tokens else ():
        caches += [Cache(last, layer.index, page, draft=True) for page in layer_pages(layer, setup)]
    return tuple(caches)
