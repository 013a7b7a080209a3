"""KV space of every rank: what the params give, what boots of other splits tell, or what is left of the GPU's memory.

Bytes inside. `budget` has the terms of one rank; here they are put together for a layout, and for every run of layers that a stage could hold.
"""

from dataclasses import dataclass

from . import budget, kv, weights
from .budget import Budget, Gpus
from .errors import BadInput
from .schema import Params
from .spec import ModelSpec

GIB = 2**30
HIGHEST_GIB = 1_000_000_000  # no card has as much; the same limit as the command's options
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layout:
    """How the ranks of one pipeline stage share weights and cache. Sizes are vLLM's; all of them together make the GPUs of a stage.

    expert_parallel: whole experts on each rank, else each expert cut by width; data-parallel ranks share the experts either way.
    """

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the experts of a layer (vLLM: fused_moe/config.py:FusedMoEParallelConfig.make)."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size * self.data_parallel_size


def layout_of(params: Params) -> Layout:
    """The layout that the params ask for."""
    asked = params.parallel
    return Layout(
        asked.tensor_parallel_size,
        asked.decode_context_parallel_size,
        asked.prefill_context_parallel_size,
        asked.data_parallel_size,
        asked.expert_parallel,
    )


def rank_weights_bytes(
    spec: ModelSpec, params: Params, split: tuple[int, ...] | list[int], layout: Layout | int, index_sharing: str | None = None
) -> list[weights.RankWeights]:
    """Weights of one rank of every stage with these params: weights.rank_weights in the server's dtype, with the MTP layers when it drafts.

    layout: or just the tensor-parallel size; index_sharing: instead of the params' own.
    """
    engine, shape = params.engine, Layout(layout) if isinstance(layout, int) else layout
    sharing = index_sharing or params.parallel.index_sharing
    return weights.rank_weights(
        spec,
        split,
        tensor_parallel_size=shape.tensor_parallel_size,
        expert_parallel=shape.expert_parallel,
        expert_ranks=shape.expert_ranks,
        with_mtp=engine.mtp_tokens > 0,
        dtype=engine.dtype,
        flips=kv.stage_flips(spec, split, sharing),
    )


def with_space(params: Params, split: tuple[int, ...] | list[int], gib: list[float]) -> Params:
    """The params with the KV space of each stage given, in GiB, and the split at which it is that."""
    engine = params.engine.model_copy(update={"available_kv_gib": gib, "kv_cache_gib_per_rank": None, "other_boots": []})
    return params.model_copy(update={"engine": engine, "parallel": params.parallel.model_copy(update={"layer_partition": list(split)})})


def given_kv_gib(given: list[float], stages: int) -> list[float]:
    """engine.available_kv_gib for every stage. Raises BadInput where it has neither one value for all nor one for each."""
    if len(given) not in (1, stages):
        raise BadInput(f"engine.available_kv_gib: got {len(given)} values for {stages} stages; give one for each, or one for all")
    return given if len(given) == stages else given * stages


@dataclass(frozen=True)
class StageRoom:
    """KV space of one stage, as far as it depends on the layers it holds: base - weights_scale x weights - the most that one of its layers adds.

    given_bytes: KV space set by hand, which is all there is, and none where the GPU has not so much left (None: not set, or the GPU is not known).

    base_bytes: what vLLM takes of the GPU, or what was given; besides_bytes: per decoder layer, all that is neither weights nor cache (empty: in base);
    known_bases: by (first layer, one past the last), the base that a boot with exactly these layers tells.
    """

    base_bytes: int
    weights_scale: float = 0.0
    besides_bytes: tuple[int, ...] = ()
    known_bases: tuple[tuple[tuple[int, int], int], ...] = ()
    given_bytes: int | None = None

    def available_bytes(self, start: int, end: int, weights_bytes: int) -> int:
        """KV space with layers start to end - 1 that weigh so much; negative where they are too much."""
        base = dict(self.known_bases).get((start, end), self.base_bytes)
        left = base - round(self.weights_scale * weights_bytes) - max(self.besides_bytes[start:end], default=0)
        if self.given_bytes is None:
            return left
        return self.given_bytes if left >= self.given_bytes else left - self.given_bytes


def is_given(params: Params, stages: int, gpus: Gpus | None) -> bool:
    """Whether the params give the KV space of a layout of so many stages.

    Given for one layout, the space says nothing of another with more or fewer stages: that one is estimated where the GPUs are known.
    """
    given = params.engine.available_kv_gib
    return params.engine.kv_cache_gib_per_rank is not None or bool(given and (len(given) in (1, stages) or gpus is None))


def stage_rooms(spec: ModelSpec, params: Params, stages: int, layout: Layout, gpus: Gpus | None) -> list[StageRoom]:
    """Room of every stage: given by the params, or the share of the GPU's memory that is left. Raises BadInput when nothing tells it."""
    given = None
    if params.engine.kv_cache_gib_per_rank is not None:
        given = params.engine.kv_cache_gib_per_rank * GIB
        ranks = stages * layout.tensor_parallel_size * layout.prefill_context_parallel_size * layout.data_parallel_size
        told = gpus is not None and len(gpus.total_bytes) >= ranks and all(gpus.total_bytes[:ranks])
        if params.engine.device == "cpu" or not told:
            return [StageRoom(given)] * stages
        # --kv-cache-memory-bytes leaves out vLLM's share of the GPU; the GPU itself is what it has to fit on.
        params = params.model_copy(update={"engine": params.engine.model_copy(update={"gpu_memory_utilization": 1.0})})
    elif is_given(params, stages, gpus):
        return _given_rooms(spec, params, stages, layout)
    kinds: dict[tuple, int] = {}
    rooms = []
    for stage in range(stages):
        kinds.clear()
        for layer in spec.layers:
            # The temporary memory of a step depends on what a layer computes with; layers of one kind need the same.
            key = (layer.attention, layer.mlp)
            if key not in kinds:
                terms = _estimate(spec, params, range(layer.index, layer.index + 1), stage, stages, layout, 0, gpus)
                kinds[key] = terms.other_bytes
        besides = tuple(kinds[layer.attention, layer.mlp] for layer in spec.layers)
        rooms.append(StageRoom(terms.requested_bytes, 1.0, besides, given_bytes=given))
    return rooms


def _given_rooms(spec: ModelSpec, params: Params, stages: int, layout: Layout) -> list[StageRoom]:
    """Rooms where engine.available_kv_gib tells the space at the params' own split: a layer that moves takes its weights along, all else on a rank stays."""
    engine = params.engine
    others = {f"other_boots.{i}": one.available_kv_gib for i, one in enumerate(engine.other_boots)}
    for key, stated in {"available_kv_gib": engine.available_kv_gib, **others}.items():
        if any(not 0 < gib < HIGHEST_GIB for gib in stated):
            # YAML's .inf passes for a number above 0.
            raise BadInput(f"engine.{key}: got {list(stated)}, expected GiB of each stage, above 0 and below {HIGHEST_GIB:,}")
    given = [int(gib * GIB) for gib in given_kv_gib(engine.available_kv_gib, stages)]
    own = params.parallel.layer_partition
    if not isinstance(own, list) or len(own) != stages or layout != layout_of(params):
        return [StageRoom(space) for space in given]
    boots = [(own, given)] + [(one.layer_partition, [int(gib * GIB) for gib in one.available_kv_gib]) for one in engine.other_boots]
    held = [[one.bytes for one in rank_weights_bytes(spec, params, split, layout)] for split, _ in boots]
    scale = moved_scale([(weights_bytes, space) for weights_bytes, (_, space) in zip(held, boots, strict=True)])
    rooms = []
    for stage in range(stages):
        bases = {
            kv.stage_bounds(spec, split)[stage]: space[stage] + round(scale * weights_bytes[stage])
            for weights_bytes, (split, space) in zip(reversed(held), reversed(boots), strict=True)
        }
        rooms.append(StageRoom(bases[kv.stage_bounds(spec, own)[stage]], scale, (), tuple(bases.items())))
    return rooms


def moved_scale(boots: list[tuple[list[int], list[int]]]) -> float:
    """KV space that a byte of weights costs when it moves to a rank, from boots as (weights, space) of each stage in bytes; 1 with one boot.

    Allocators round up, so it is a little more than 1: least squares over the ranks. Raises BadInput where it is nowhere near 1.
    """
    (weights_bytes, space), *others = boots
    moves = [(new_w - w, s - new_s) for others_w, others_s in others for w, s, new_w, new_s in zip(weights_bytes, space, others_w, others_s, strict=True)]
    total = sum(moved * moved for moved, _ in moves)
    if not total:
        return 1.0
    scale = sum(moved * lost for moved, lost in moves) / total
    if not 0.8 < scale < 1.25:
        raise BadInput(
            f"engine.other_boots: from split to split the KV space changes by {scale:.2f} times the weights that move, expected about 1; "
            "give boots of the same layout and engine settings"
        )
    return scale


def _estimate(spec: ModelSpec, params: Params, layers: range, stage: int, stages: int, layout: Layout, weights_bytes: int, gpus: Gpus | None) -> Budget:
    """The budget of one rank of a stage, from the smallest of its GPUs, or an earlier run's terms when it had as many stages."""
    engine, tp = params.engine, layout.tensor_parallel_size
    # One replica's GPUs of a stage; data-parallel replicas come behind it, and are counted like the first.
    width = tp * layout.prefill_context_parallel_size
    replicas = layout.data_parallel_size
    cards = (gpus.total_bytes if gpus else ())[: stages * width * replicas]
    known = [size for size in cards if size and size > 0]
    if len(known) < stages * width * replicas:
        # A card of unknown size keeps its place: leaving it out would give its rank the memory of the next one.
        seen = f"{len(known)} GPUs whose memory is known"
        ranks = stages * width * replicas
        cure = "give the KV space of each stage in GiB, or a box (--from) whose GPUs' memory is told"
        raise BadInput(f"engine.available_kv_gib: missing, and the box has {seen} for {ranks} ranks; {cure}")
    own = [size for replica in range(replicas) for size in cards[(replica * stages + stage) * width : (replica * stages + stage + 1) * width]]
    terms = budget.estimate(
        spec,
        layers,
        total_bytes=min(own),
        gpu_memory_utilization=engine.gpu_memory_utilization,
        weights_bytes=weights_bytes,
        buffers_bytes=weights.buffer_bytes(spec, engine.max_num_batched_tokens, engine.dtype),
        tensor_parallel_size=tp,
        pipeline_parallel_size=stages,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        dtype_bytes=DTYPE_BYTES[engine.dtype],
        enforce_eager=engine.enforce_eager,
        last=stage == stages - 1,
        draft_tokens=engine.draft_tokens,
    )
    return budget.calibrated(terms, gpus.terms[stage]) if gpus and len(gpus.terms) == stages else terms


def available_kv_bytes(
    spec: ModelSpec,
    params: Params,
    split: tuple[int, ...] | list[int],
    held: list[weights.RankWeights],
    layout: Layout,
    gpus: Gpus | None,
) -> list[tuple[int, Budget | None]]:
    """(KV space, budget) of every stage: what the params give, or the share of the GPU's memory that is left.

    Raises BadInput when nothing tells the space, and where nothing of it is left.
    """
    stages, bounds = len(split), kv.stage_bounds(spec, split)
    if is_given(params, stages, gpus):
        rooms = stage_rooms(spec, params, stages, layout, gpus)
        found = [room.available_bytes(*at, one.bytes) for room, at, one in zip(rooms, bounds, held, strict=True)]
        for stage, space in enumerate(found):
            if space <= 0:
                raise BadInput(_too_much_by_hand(params, stage, held) if params.engine.kv_cache_gib_per_rank else _outweighed(params, split, stage, held))
        return [(space, None) for space in found]
    estimates: list[tuple[int, Budget | None]] = []
    for stage, at in enumerate(bounds):
        terms = _estimate(spec, params, range(*at), stage, stages, layout, held[stage].bytes, gpus)
        if terms.available_bytes <= 0:
            # Before any block is counted: a negative space would show as an empty pool, and nothing would say what fills the card.
            raise BadInput(f"rank {stage}: {_overfull(terms, params.engine.gpu_memory_utilization)}")
        estimates.append((terms.available_bytes, terms))
    return estimates


def _too_much_by_hand(params: Params, stage: int, held: list[weights.RankWeights]) -> str:
    """Why a KV space that was set by hand does not fit on the GPU."""
    return (
        f"rank {stage}: engine.kv_cache_gib_per_rank {params.engine.kv_cache_gib_per_rank}, {held[stage].bytes / GIB:.2f} GiB of weights and what a step takes "
        "besides are more than the GPU has; lower it, or give the rank fewer layers"
    )


def _outweighed(params: Params, split: tuple[int, ...] | list[int], stage: int, held: list[weights.RankWeights]) -> str:
    """Why nothing is left where the space was given for another split."""
    own, given = params.parallel.layer_partition, given_kv_gib(params.engine.available_kv_gib, len(split))
    return (
        f"rank {stage}: {given[stage]:.2f} GiB of KV space at {'+'.join(map(str, own))} are less than what the layers add that "
        f"{'+'.join(map(str, split))} puts there ({held[stage].bytes / GIB:.2f} GiB of weights in all); give it fewer layers"
    )


def _overfull(terms: Budget, utilization: float) -> str:
    """Why nothing is left for a cache: what the rank holds, and what would be right."""
    share, held = terms.requested_bytes / GIB, (terms.weights_bytes + terms.buffers_bytes) / GIB
    besides = (terms.other_bytes - terms.buffers_bytes) / GIB
    return (
        f"no KV space is left: {held:.2f} GiB of weights and {besides:.2f} GiB besides ({terms.evidence}) fill the {share:.2f} GiB that "
        f"engine.gpu_memory_utilization {utilization:g} takes of {terms.total_bytes / GIB:.2f} GiB; give it fewer layers or more ranks, "
        "or raise engine.gpu_memory_utilization"
    )
