"""Layer splits as such: vLLM's own, all there are, and the one that an arm asks for. `partition` says which is best."""

import itertools
from collections.abc import Iterator

from .schema import Baseline, Parallel
from .spec import ModelSpec

Split = tuple[int, ...]


def default_split(layers: int, stages: int) -> Split:
    """vLLM's own split: even, the remainder one layer each from the second-last stage backwards.

    The last stage stays short because it also holds norm and lm_head (vLLM: distributed/utils.py:get_pp_indices). More stages than layers leave empty ones.
    """
    split = [layers // stages] * stages
    for extra in range(layers % stages):
        split[-(extra + 2)] += 1
    return tuple(split)


def all_splits(layers: int, stages: int) -> Iterator[Split]:
    """Every way to cut `layers` into `stages` runs of at least one layer: C(layers - 1, stages - 1) of them."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))


def is_split(layers_per_stage: tuple[int, ...], stages: int, spec: ModelSpec) -> bool:
    """Whether these layers are a split of the model into so many stages, each with at least one layer."""
    return len(layers_per_stage) == stages and sum(layers_per_stage) == spec.num_hidden_layers and all(count > 0 for count in layers_per_stage)


def resolve_split(arm: Parallel | Baseline, spec: ModelSpec, best: Split | None = None) -> Split:
    """Layers per stage of an arm; `best` is what notebook 03 picked, used where the arm asks for it and has as many stages."""
    if arm.pipeline_parallel_size == 1:
        return (spec.num_hidden_layers,)
    if isinstance(arm.layer_partition, list):
        return tuple(arm.layer_partition)
    if arm.layer_partition == "best" and best and len(best) == arm.pipeline_parallel_size:
        return best
    return default_split(spec.num_hidden_layers, arm.pipeline_parallel_size)


def layout_name(arm: Parallel | Baseline, layers_per_stage: tuple[int, ...] | list[int]) -> str:
    """'PP2 15+15', 'TP2 PP1', 'DP3 EP PP1', ... as people call a layout."""
    data = f"DP{arm.data_parallel_size} " if arm.data_parallel_size > 1 else ""
    tensor = f"TP{arm.tensor_parallel_size} " if arm.tensor_parallel_size > 1 else ""
    experts = "EP " if arm.expert_parallel else ""
    split = f" {'+'.join(map(str, layers_per_stage))}" if arm.pipeline_parallel_size > 1 else ""
    return f"{data}{tensor}{experts}PP{arm.pipeline_parallel_size}{split}"
