"""Hard constraints on a split: each a function that says for which models it is on, which runs of layers it forbids, and why.

A rule returns None where the model does not have what it is about. Runs are [start, end) of decoder layers, counted from 0.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from .. import kv
from ..kv.costs import shared_index_runs
from ..spec import ModelSpec, sharing_layers

RECURRENT = kv.STATE_KINDS


@dataclass(frozen=True)
class Rule:
    """One constraint. forbidden: bool [P, L + 1, L + 1], True where a stage must not hold the run; why: words for one forbidden run."""

    name: str
    reason: str
    source: str
    forbidden: np.ndarray
    why: Callable[[int, int, int], str]

    def broken_by(self, bounds: Iterable[tuple[int, int]]) -> list[str]:
        """What a split with these stage bounds does wrong, empty where it keeps the rule."""
        return [self.why(stage, start, end) for stage, (start, end) in enumerate(bounds) if self.forbidden[stage, start, end]]


def rules_of(spec: ModelSpec, stages: int, index_sharing: str, flippable: tuple[int, ...] | None = None) -> list[Rule]:
    """All rules that this model turns on, for pipelines of so many stages. flippable: as in table.stage_table."""
    found = [not_empty(spec, stages), *(make(spec, stages) for make in (ple_first, kv_sharing_whole, both_kinds, deepstack_first))]
    found.append(own_indices(spec, stages) if index_sharing == "clean" else None)
    found.append(flips_have_weights(spec, stages, flippable) if index_sharing == "flip" and flippable else None)
    return [rule for rule in found if rule is not None]


def _grid(spec: ModelSpec, stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(stage, start, end) of every cell, to broadcast."""
    edges = np.arange(spec.num_hidden_layers + 1)
    return np.arange(stages)[:, None, None], edges[None, :, None], edges[None, None, :]


def not_empty(spec: ModelSpec, stages: int) -> Rule:
    """Every stage holds a layer: vLLM refuses an empty one, since a rank without a cache cannot be planned (kv_cache_utils.py:get_kv_cache_configs)."""
    stage, start, end = _grid(spec, stages)
    return Rule(
        "no empty stage",
        "each stage needs at least one layer",
        "vLLM: distributed/utils.py:get_pp_indices",
        (start >= end) & (stage >= 0),
        lambda stage, start, end: f"stage {stage} is empty",
    )


def ple_contained(ple_layer_ids: Iterable[int], first_end: int) -> bool:
    """Whether every n-gram (PLE) layer lies in the first stage, which holds layers 0 to first_end - 1. The ids count from 1.

    Only the first stage has the token ids that the n-gram table is read with.
    """
    return all(0 <= number - 1 < first_end for number in ple_layer_ids)


def ple_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Indices from 0 of the layers with an n-gram embedding (ple_layer_ids count from 1)."""
    return tuple(layer.index for layer in spec.layers if layer.short_conv is not None)


def ple_first(spec: ModelSpec, stages: int) -> Rule | None:
    """Every n-gram embedding layer lies in the first stage."""
    layers = ple_layers(spec)
    if not layers:
        return None
    stage, start, end = _grid(spec, stages)
    held = [int(end_) for end_ in range(spec.num_hidden_layers + 1) if ple_contained((i + 1 for i in layers), end_)]
    shown = ", ".join(map(str, layers))
    return Rule(
        "n-gram embedding on the first stage",
        f"layer {shown} (counted from 0) reads an n-gram table with token ids, which only the first stage has",
        "vLLM: models/qwen4_exp/nvidia/model_state.py:Qwen4ExpModelState",
        (stage == 0) & ~np.isin(end, held) & (start < end),
        lambda stage, start, end: f"n-gram layer {shown} is not on the first stage, which ends before layer {end}",
    )


def kv_shared_groups(spec: ModelSpec) -> list[tuple[int, int]]:
    """(target, user) of every layer that uses the KV cache of a layer before it: the last one of its kind that has a cache of its own.

    Source: vLLM models/gemma4.py and gemma3n.py, kv_sharing_target_layer_name.
    """
    last: dict[str, int] = {}
    pairs = []
    for layer in spec.layers:
        kind = layer.attention.kind
        if layer.attention.kv_shared:
            if kind in last:
                pairs.append((last[kind], layer.index))
        else:
            last[kind] = layer.index
    return pairs


def kv_sharing_whole(spec: ModelSpec, stages: int) -> Rule | None:
    """Layers that share one KV cache lie on one stage: a cache is not sent along the pipeline."""
    pairs = kv_shared_groups(spec)
    if not pairs:
        return None
    stage, start, end = _grid(spec, stages)
    forbidden = np.zeros(np.broadcast_shapes(stage.shape, start.shape, end.shape), dtype=bool)
    for target, user in pairs:
        forbidden |= (target < start) & (start <= user) & (user < end)
    return Rule(
        "shared KV cache not cut",
        "a layer that uses another layer's KV cache has to lie on its stage",
        "vLLM: v1/worker/utils.py:add_kv_sharing_layers_to_kv_cache_groups",
        forbidden,
        lambda stage, start, end: _cut_pair(pairs, start, end),
    )


def _cut_pair(pairs: list[tuple[int, int]], start: int, end: int) -> str:
    target, user = next((t, u) for t, u in pairs if t < start <= u < end)
    return f"layer {user} uses the KV cache of layer {target}, which is on a stage before"


def both_kinds(spec: ModelSpec, stages: int) -> Rule | None:
    """Every stage of a hybrid model holds an attention layer and a recurrent one: without, block size or state groups fail or differ between ranks."""
    recurrent = [layer.index for layer in spec.layers if layer.attention.kind in RECURRENT]
    attention = [layer.index for layer in spec.layers if layer.attention.kind not in (*RECURRENT, "none") and not layer.attention.kv_shared]
    if not recurrent or not attention:
        return None
    stage, start, end = _grid(spec, stages)
    of_one, of_other = _held(recurrent, spec.num_hidden_layers), _held(attention, spec.num_hidden_layers)

    def why(stage: int, start: int, end: int) -> str:
        lacks = "recurrent" if not of_one[start, end] else "attention"
        return f"stage {stage} (layers {start} to {end - 1}) has no {lacks} layer"

    return Rule(
        "both layer kinds on every stage",
        "a stage of a hybrid model without an attention layer, or without a recurrent one, chooses another block size or fails",
        "vLLM: platforms/interface.py:update_block_size_for_backend; v1/worker/gpu/model_states (align mode)",
        ((of_one == 0) | (of_other == 0))[None] & (start < end) & (stage >= 0),
        why,
    )


def _held(layers: list[int], count: int) -> np.ndarray:
    """How many of these layers lie in each run: [L + 1, L + 1]."""
    sums = np.concatenate([[0], np.cumsum(np.isin(np.arange(count), layers))])
    return sums[None, :] - sums[:, None]


def deepstack_first(spec: ModelSpec, stages: int) -> Rule | None:
    """Visual features that are added to the first layers (deepstack) are added on the first stage only."""
    count = spec.deepstack_layers
    if not count:
        return None
    stage, start, end = _grid(spec, stages)
    return Rule(
        "visual features on the first stage",
        f"features of the image encoder are added to layers 0 to {count - 1}, and the encoder runs on the first stage",
        "vLLM: models/qwen3_vl.py, the assertion that start_layer is not below the number of deepstack indexes",
        (stage == 0) & (end < count) & (start < end),
        lambda stage, start, end: f"the first stage ends before layer {end}, and image features are added up to layer {count - 1}",
    )


def own_indices(spec: ModelSpec, stages: int) -> Rule | None:
    """A stage starts on a layer that computes its own top-k indices; else its first layers read what the step before left in the buffer."""
    if not sharing_layers(spec):
        return None
    stage, start, end = _grid(spec, stages)
    forbidden = (shared_index_runs(spec) > 0)[None] & (start < end) & (stage >= 0)
    return Rule(
        "stages start on layers with indices of their own",
        "top-k indices do not cross a pipeline boundary, so layers that share those of a layer before the cut answer wrong without an error",
        "vLLM: models/deepseek_v32/attention.py (skip_topk), models/deepseek_v32/nvidia/model.py (make_empty_intermediate_tensors_factory)",
        forbidden,
        lambda stage, start, end: f"stage {stage} starts on layer {start}, which shares the top-k indices of a layer before the cut",
    )


def flips_have_weights(spec: ModelSpec, stages: int, flippable: tuple[int, ...]) -> Rule:
    """Only layers with indexer weights are flipped, where the checkpoint has them for some."""
    stage, start, end = _grid(spec, stages)
    runs, count = shared_index_runs(spec), spec.num_hidden_layers
    sharing = np.array(sharing_layers(spec), dtype=np.int64)
    lacking = np.concatenate([[0], np.cumsum([i in set(sharing.tolist()) - set(flippable) for i in range(count)])])
    # A run's flipped layers are its first sharing ones, from `first` to before `past`: none of them may be lacking.
    first = np.searchsorted(sharing, np.arange(count + 1))[:, None]
    past = np.where(runs > 0, sharing[np.minimum(first + runs - 1, len(sharing) - 1)] + 1, np.arange(count + 1)[:, None])
    forbidden = (lacking[past] - lacking[np.arange(count + 1)][:, None] > 0)[None] & (start < end) & (stage >= 0)
    return Rule(
        "flipped layers have indexer weights",
        "a flipped layer without weights of its own computes its indices with uninitialised memory",
        "tensor names of the checkpoint",
        forbidden,
        lambda stage, start, end: f"stage {stage} starts on layer {start}, and not every layer that it would flip has indexer weights",
    )


def even_split_flips(spec: ModelSpec, stages: int) -> tuple[int, ...]:
    """Layers that a rule of even stages (first layer of rank r is r x layers // stages) would flip, whatever the real partition: shown beside the real ones."""
    starts = [rank * spec.num_hidden_layers // stages for rank in range(stages)]
    runs = shared_index_runs(spec)
    found = []
    for start, end in zip(starts, [*starts[1:], spec.num_hidden_layers], strict=True):
        leading = int(runs[start, end]) if start < end else 0
        found += [i for i in sharing_layers(spec) if i >= start][:leading]
    return tuple(found)
