"""Memory accounting from first principles: what each pipeline rank holds and how many tokens of KV pool come out.

Bytes inside; GiB is 2**30 bytes and appears only when shown. Needs the model's config.json, no weights and no torch. The parts: `configs` reads the
shape, `weights` counts weights, `kv` pages, groups and blocks, `budget` what is left for them; here they make one ledger.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from . import budget, configs, kv, paths, weights
from .budget import Budget, Gpus
from .errors import BadInput
from .schema import Params
from .spec import Layer, ModelSpec

GIB = 2**30
HIGHEST_GIB = 1_000_000_000  # no card has as much; the same limit as the command's options
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RankLedger:
    """One pipeline stage (each of its TP ranks alike): layers, weights, KV bytes per token and the blocks its space holds. Bytes throughout."""

    rank: int
    layers: int
    draft_layers: int
    indexers: int
    weights_bytes: int
    weights_by_component: dict[str, int]
    kv_bytes_per_token: int
    sliding_bytes_per_token: int
    state_bytes: int
    kv_bytes_per_block: int
    available_kv_bytes: int
    blocks: int
    budget: Budget | None


@dataclass(frozen=True)
class Pool:
    """KV pool of a layout: every rank gets the smallest rank's block count (vLLM: kv_cache_utils.get_kv_cache_configs)."""

    ranks: tuple[RankLedger, ...]
    groups: tuple[kv.GroupLedger, ...]
    block_size_tokens: int
    blocks: int
    blocks_per_request: int
    binding_rank: int
    pool_tokens: int
    max_concurrency: float

    @property
    def holds_longest_request(self) -> bool:
        """Whether one request of max_model_len fits; without that vLLM does not start."""
        return kv.fits(self.blocks, self.blocks_per_request)


@lru_cache
def model_spec(name: str) -> ModelSpec:
    """Read data/models/<name>/config.json. Raises BadInput for a missing file, a missing key or an architecture not covered."""
    folder = paths.model_config_dir(name)
    if not (folder / "config.json").is_file():
        have = sorted(p.parent.name for p in paths.model_config_dir("").glob("*/config.json"))
        raise BadInput(f"model.name: got {name!r}, but there is no data/models/{name}/config.json; known models: {', '.join(have) or 'none'}")
    return configs.load(folder, name)


def heads(spec: ModelSpec) -> tuple[int, int]:
    """(attention heads, KV heads) that tensor parallelism has to divide: the most heads of a layer, the fewest KV heads. (1, 1) without attention."""
    own = [layer.attention for layer in spec.layers if layer.attention.heads]
    return (max(a.heads for a in own), min(a.kv_heads or a.heads for a in own)) if own else (1, 1)


def rank_weights_bytes(spec: ModelSpec, params: Params, split: tuple[int, ...] | list[int], tensor_parallel_size: int) -> list[weights.RankWeights]:
    """Weights of one TP rank of every stage with these params: weights.rank_weights in the server's dtype, with the MTP layers when it drafts."""
    engine = params.engine
    return weights.rank_weights(spec, split, tensor_parallel_size=tensor_parallel_size, with_mtp=engine.draft_tokens > 0, dtype=engine.dtype)


def checkpoint_bytes(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of all weights as they are loaded on one rank: in the server's dtype where they are not quantized, tied embeddings once."""
    return weights.rank_weights(spec, [spec.num_hidden_layers], tensor_parallel_size=1, with_mtp=False, dtype=dtype)[0].bytes


def step_bytes(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of weights that a decode step of one token reads at least: layers with the experts of one token, final norm and lm_head."""
    plain = DTYPE_BYTES[dtype or spec.dtype]
    total = (spec.vocab_size + 1) * spec.hidden_size * plain
    for layer in spec.layers:
        for one in weights.components(layer, spec):
            total += round(weights.rank_bytes(one, spec, 1, False, dtype) * _share(one, layer))
    return total


def _share(one: weights.Component, layer: Layer) -> float:
    """Part of a weight that one token passes."""
    return layer.mlp.experts_per_token / layer.mlp.experts if one.sharding == "experts" and layer.mlp.experts else 1.0


def active_parameters(spec: ModelSpec) -> int:
    """Parameters of the layers that one token passes: everything but the experts it is not sent to. Embedding and lm_head are not counted."""
    total = 0
    for layer in spec.layers:
        for one in weights.components(layer, spec):
            total += round(one.parameters * _share(one, layer))
    return total


def with_space(params: Params, split: tuple[int, ...] | list[int], gib: list[float]) -> Params:
    """The params with the KV space of each stage given, in GiB, and the split at which it is that."""
    engine = params.engine.model_copy(update={"available_kv_gib": gib, "kv_cache_gib_per_rank": None})
    return params.model_copy(update={"engine": engine, "parallel": params.parallel.model_copy(update={"layer_partition": list(split)})})


def given_kv_gib(given: list[float], stages: int) -> list[float]:
    """engine.available_kv_gib for every stage. Raises BadInput where it has neither one value for all nor one for each."""
    if len(given) not in (1, stages):
        raise BadInput(f"engine.available_kv_gib: got {len(given)} values for {stages} stages; give one for each, or one for all")
    return given if len(given) == stages else given * stages


def available_kv_bytes(
    spec: ModelSpec, params: Params, split: tuple[int, ...] | list[int], held: list[weights.RankWeights], tp: int, gpus: Gpus | None
) -> list[tuple[int, Budget | None]]:
    """(KV space, budget) of every stage: what the params give, or the share of the GPU's memory that is left.

    An earlier run's terms are used when it had as many stages. Raises BadInput when nothing tells the space.
    """
    engine, stages = params.engine, len(split)
    if engine.kv_cache_gib_per_rank is not None:
        return [(engine.kv_cache_gib_per_rank * GIB, None)] * stages
    # Given for one layout, the space says nothing of another with more or fewer stages: that one is estimated where the GPUs are known.
    if engine.available_kv_gib and (len(engine.available_kv_gib) in (1, stages) or gpus is None):
        given = given_kv_gib(engine.available_kv_gib, stages)
        if any(not 0 < gib < HIGHEST_GIB for gib in given):
            # YAML's .inf passes for a number above 0.
            raise BadInput(f"engine.available_kv_gib: got {list(given)}, expected GiB of each stage, above 0 and below {HIGHEST_GIB:,}")
        return [(each, None) for each in _moved(spec, params, split, held, tp, [int(gib * GIB) for gib in given])]
    cards = (gpus.total_bytes if gpus else ())[: stages * tp]
    known = [size for size in cards if size and size > 0]
    if len(known) < stages * tp:
        # A card of unknown size keeps its place: leaving it out would give its rank the memory of the next one.
        seen = f"{len(known)} GPUs whose memory is known"
        raise BadInput(f"engine.available_kv_gib: missing, and the box has {seen} for {stages * tp} ranks; give the KV space of each stage in GiB")
    found, first = [], 0
    for stage, count in enumerate(split):
        total = min(cards[stage * tp : (stage + 1) * tp])
        terms = budget.estimate(
            spec,
            range(first, first + count),
            total_bytes=total,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            weights_bytes=held[stage].bytes,
            buffers_bytes=weights.buffer_bytes(spec, engine.max_num_batched_tokens, engine.dtype) if count else 0,
            tensor_parallel_size=tp,
            pipeline_parallel_size=stages,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            dtype_bytes=DTYPE_BYTES[engine.dtype],
            enforce_eager=engine.enforce_eager,
            last=stage == stages - 1,
            draft_tokens=engine.draft_tokens,
        )
        if gpus and len(gpus.terms) == stages:
            terms = budget.calibrated(terms, gpus.terms[stage])
        if terms.available_bytes <= 0:
            # Before any block is counted: a negative space would show as an empty pool, and nothing would say what fills the card.
            raise BadInput(f"rank {stage}: {_overfull(terms, engine.gpu_memory_utilization)}")
        found.append((terms.available_bytes, terms))
        first += count
    return found


def _moved(spec: ModelSpec, params: Params, split: tuple[int, ...] | list[int], held: list[weights.RankWeights], tp: int, given_bytes: list[int]) -> list[int]:
    """KV space of `split` where the params give that of their own split: a layer that moves takes its weights along, all else on a rank stays.

    Raises BadInput where the weights that came leave nothing.
    """
    own = params.parallel.layer_partition
    if not isinstance(own, list) or len(own) != len(split) or tp != params.parallel.tensor_parallel_size or list(own) == list(split):
        return given_bytes
    before = rank_weights_bytes(spec, params, own, tp)
    found = [space + old.bytes - new.bytes for space, old, new in zip(given_bytes, before, held, strict=True)]
    for stage, space in enumerate(found):
        if space <= 0:
            raise BadInput(
                f"rank {stage}: {given_bytes[stage] / GIB:.2f} GiB of KV space at {'+'.join(map(str, own))} are less than the "
                f"{(held[stage].bytes - before[stage].bytes) / GIB:.2f} GiB of weights that {'+'.join(map(str, split))} adds; give it fewer layers"
            )
    return found


def _overfull(terms: Budget, utilization: float) -> str:
    """Why nothing is left for a cache: what the rank holds, and what would be right."""
    share, held = terms.requested_bytes / GIB, (terms.weights_bytes + terms.buffers_bytes) / GIB
    besides = (terms.other_bytes - terms.buffers_bytes) / GIB
    return (
        f"no KV space is left: {held:.2f} GiB of weights and {besides:.2f} GiB besides ({terms.evidence}) fill the {share:.2f} GiB that "
        f"engine.gpu_memory_utilization {utilization:g} takes of {terms.total_bytes / GIB:.2f} GiB; give it fewer layers or more ranks, "
        "or raise engine.gpu_memory_utilization"
    )


def pool_after(params: Params, spec: ModelSpec, split: tuple[int, ...] | list[int], logged_gib: dict[int, float], gpus: Gpus | None) -> tuple[Pool, int | None]:
    """(pool, tokens that the log's rounding can make) once the boot log has told each stage's KV space.

    Where the params gave the space there is nothing to round. None: the log does not tell the space of every stage, so the pool rests on estimates.
    """
    given = params.engine.kv_cache_gib_per_rank is not None or bool(params.engine.available_kv_gib)
    if given or any(stage not in logged_gib for stage in range(len(split))):
        return pool(params, spec, split, gpus=gpus), 0 if given else None
    found = pool(with_space(params, split, [logged_gib[stage] for stage in range(len(split))]), spec, split)
    tight = found.ranks[found.binding_rank]
    # The log prints two decimals, so the true value lies up to 0.005 GiB away.
    return found, round(0.005 * GIB / tight.kv_bytes_per_block * found.block_size_tokens) + found.block_size_tokens


def cache_dtype(spec: ModelSpec, params: Params) -> str:
    """The KV cache's type: as asked, else what the checkpoint names ('auto' then), else the dtype that the server was told to use."""
    scheme = spec.quantization.kv_cache_scheme if spec.quantization else None
    return params.engine.dtype if params.engine.kv_cache_dtype == "auto" and not scheme else params.engine.kv_cache_dtype


def pool(
    params: Params,
    spec: ModelSpec,
    split: tuple[int, ...] | list[int],
    *,
    tensor_parallel_size: int | None = None,
    gpus: Gpus | None = None,
    must_fit: bool = True,
) -> Pool:
    """Ledger of every stage and the pool that the smallest one leaves to all, for one split with these params.

    Raises BadInput when not even one request of max_model_len fits, as vLLM does, unless must_fit is False.
    """
    engine, tp = params.engine, tensor_parallel_size or params.parallel.tensor_parallel_size
    held = rank_weights_bytes(spec, params, split, tp)
    space = available_kv_bytes(spec, params, split, held, tp, gpus)
    found = kv.pool(
        # Convolution states lie in the server's dtype, which need not be the checkpoint's.
        replace(spec, dtype=engine.dtype),
        list(split),
        [available for available, _ in space],
        max_model_len=engine.max_model_len,
        tensor_parallel_size=tp,
        cache_dtype=cache_dtype(spec, params),
        block_size=engine.block_size_tokens,
        release=engine.vllm_release,
        draft_tokens=engine.draft_tokens,
        index_sharing=engine.index_sharing,
        state_mode="align" if engine.prefix_caching else "none",
        # A layout that is only compared with has no context parallelism of its own.
        dcp=params.parallel.decode_context_parallel_size if tensor_parallel_size is None else 1,
        device=engine.device,
        in_flight_tokens=kv.in_flight_tokens(engine.max_num_batched_tokens, len(split), async_scheduling=engine.device != "cpu"),
        must_fit=must_fit,
    )
    ranks = tuple(
        RankLedger(
            rank=one.rank,
            layers=one.layers,
            draft_layers=one.draft_layers,
            indexers=one.indexers,
            weights_bytes=held[one.rank].bytes,
            weights_by_component=held[one.rank].by_component,
            kv_bytes_per_token=one.kv_bytes_per_token,
            sliding_bytes_per_token=one.sliding_bytes_per_token,
            state_bytes=one.state_bytes,
            kv_bytes_per_block=one.bytes_per_block,
            available_kv_bytes=one.available_kv_bytes,
            blocks=one.blocks,
            budget=space[one.rank][1],
        )
        for one in found.ranks
    )
    return Pool(
        ranks=ranks,
        groups=found.groups,
        block_size_tokens=found.block_size_tokens,
        blocks=found.blocks,
        blocks_per_request=found.blocks_per_request,
        binding_rank=found.binding_rank,
        pool_tokens=found.pool_tokens,
        max_concurrency=found.max_concurrency,
    )
