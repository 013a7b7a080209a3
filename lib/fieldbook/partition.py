"""Which layers go to which pipeline stage: every split is looked at, the one with the largest KV pool wins."""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from . import memory, weights
from .budget import Gpus
from .errors import BadInput
from .memory import Pool
from .params import Baseline, Parallel, Params
from .spec import ModelSpec

# Beyond this an enumeration takes more than a few seconds: a whole ledger of 30 layers takes 0.3 ms, one of 78 layers 1 ms.
MOST_SPLITS = 10_000


@dataclass(frozen=True)
class Candidate:
    """One split with its pool and the load of its slowest stage in layer-equivalents."""

    layers_per_stage: tuple[int, ...]
    pool: Pool
    straggler_layers: float
    is_default: bool


def default_split(layers: int, stages: int) -> tuple[int, ...]:
    """vLLM's own split: even, the remainder one layer each from the second-last stage backwards.

    The last stage stays short because it also holds norm and lm_head (vLLM: distributed/utils.py:get_pp_indices).
    """
    split = [layers // stages] * stages
    for extra in range(layers % stages):
        split[-(extra + 2)] += 1
    return tuple(split)


def all_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to cut `layers` into `stages` runs of at least one layer: C(layers - 1, stages - 1) of them.

    Raises BadInput when that is more than MOST_SPLITS.
    """
    count = math.comb(layers - 1, stages - 1)
    if count > MOST_SPLITS:
        raise BadInput(
            f"{layers} layers in {stages} stages can be split in {count:,} ways, more than the {MOST_SPLITS:,} "
            "this search looks through; give parallel.layer_partition"
        )
    splits = []
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *cuts, layers)
        splits.append(tuple(b - a for a, b in itertools.pairwise(edges)))
    return splits


def straggler_layers(spec: ModelSpec, layers_per_stage: tuple[int, ...]) -> float:
    """Load of the slowest stage in layer-equivalents: a decode step reads each stage's weights once, lm_head on the last stage.

    A pipeline with all its slots filled advances at the pace of its slowest stage.
    """
    sizes, head = _layer_equivalents(spec)
    edges = list(itertools.accumulate(layers_per_stage, initial=0))
    loads = [sum(sizes[a:b]) for a, b in itertools.pairwise(edges)]
    loads[-1] += head
    return max(loads)


@lru_cache
def _layer_equivalents(spec: ModelSpec) -> tuple[tuple[float, ...], float]:
    """(weight of each layer, weight of lm_head) in layers of the model's average size."""
    sizes = weights.layer_rank_bytes(spec, tensor_parallel_size=1)
    mean = sum(sizes) / len(sizes)
    # In the checkpoint's dtype, as the layers are.
    head = spec.vocab_size * spec.hidden_size * memory.DTYPE_BYTES.get(spec.dtype, 2)
    return tuple(size / mean for size in sizes), head / mean


def candidates(params: Params, spec: ModelSpec, gpus: Gpus | None = None) -> list[Candidate]:
    """Every split of the layout that holds at least one longest request, best first.

    Order: largest pool, then smallest straggler, then vLLM's default, then the split itself so that ties are always broken alike.
    Raises BadInput when no split fits.
    """
    stages = params.parallel.pipeline_parallel_size
    default = default_split(spec.num_hidden_layers, stages)
    found, refusal = [], None
    for split in all_splits(spec.num_hidden_layers, stages):
        try:
            pool = memory.pool(params, spec, split, gpus=gpus)
        except BadInput as error:
            refusal = error
            continue
        found.append(Candidate(split, pool, straggler_layers(spec, split), split == default))
    if not found:
        raise BadInput(f"no split of {spec.num_hidden_layers} layers in {stages} stages fits: {refusal}")
    return sorted(found, key=lambda c: (-c.pool.pool_tokens, c.straggler_layers, not c.is_default, c.layers_per_stage))


def choose(params: Params, spec: ModelSpec, found: list[Candidate]) -> Candidate:
    """The candidate that the params ask for: the best one, vLLM's default, or the split given by hand.

    Raises BadInput when the asked split does not fit.
    """
    asked = params.parallel.layer_partition
    if asked == "best":
        return found[0]
    split = resolve_split(params.parallel, spec)
    for candidate in found:
        if candidate.layers_per_stage == split:
            return candidate
    raise BadInput(f"parallel.layer_partition: {list(split)} does not hold one request of {params.engine.max_model_len} tokens")


def resolve_split(arm: Parallel | Baseline, spec: ModelSpec, best: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Layers per stage of an arm; `best` is what notebook 03 picked, used where the arm asks for it and has as many stages."""
    if isinstance(arm.layer_partition, list):
        return tuple(arm.layer_partition)
    if arm.layer_partition == "best" and best and len(best) == arm.pipeline_parallel_size:
        return best
    return default_split(spec.num_hidden_layers, arm.pipeline_parallel_size)
