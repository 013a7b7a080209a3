"""Memory accounting from first principles: what each pipeline rank holds and how many tokens of KV pool come out.

Bytes inside; GiB is 2**30 bytes and appears only when shown. Needs the model's config.json, no weights and no torch. The parts: `configs` reads the
shape, `weights` counts weights, `kv` pages, groups and blocks, `budget` and `space` what is left for them; here they make one ledger.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from . import configs, kv, paths, weights
from .budget import Budget, Gpus
from .errors import BadInput
from .schema import Params
from .space import (
    DTYPE_BYTES,
    GIB,
    Layout,
    StageRoom,
    available_kv_bytes,
    given_kv_gib,
    is_given,
    layout_of,
    rank_weights_bytes,
    stage_rooms,
    with_space,
)
from .spec import Layer, ModelSpec

__all__ = [
    "DTYPE_BYTES", "GIB", "Layout", "Pool", "RankLedger", "StageRoom", "active_parameters", "available_kv_bytes", "cache_dtype", "checkpoint_bytes",
    "given_kv_gib", "heads", "is_given", "kv_engine", "layout_of", "model_spec", "pool", "pool_after", "rank_weights_bytes", "server_spec", "stage_rooms",
    "step_bytes", "with_space",
]  # fmt: skip



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
    return round(parameters_per_rank(spec, range(spec.num_hidden_layers), 1, 1))


def parameters_per_rank(spec: ModelSpec, layers: range, ranks: int, expert_ranks: int) -> float:
    """Parameters of these layers that one token passes on each of `ranks` ranks that share them; experts may be shared by more ranks than the rest."""
    total = 0.0
    for layer in (spec.layers[i] for i in layers):
        for one in weights.components(layer, spec):
            total += one.parameters * _share(one, layer) / (max(ranks, expert_ranks) if one.sharding == "experts" else ranks)
    return total


def pool_after(
    params: Params, spec: ModelSpec, split: tuple[int, ...] | list[int], logged_gib: dict[int, float], gpus: Gpus | None, layout: Layout | None = None
) -> tuple[Pool, int | None]:
    """(pool, tokens that the log's rounding can make) once the boot log has told each stage's KV space. layout: another one than the params'.

    Where the space was set by hand there is nothing to round. None: the log does not tell the space of every stage, so the pool rests on estimates.
    """
    by_hand, given = params.engine.kv_cache_gib_per_rank is not None, bool(params.engine.available_kv_gib)
    untold = any(stage not in logged_gib for stage in range(len(split)))
    if by_hand or (untold and not given):
        return pool(params, spec, split, gpus=gpus, layout=layout), 0 if by_hand else None
    told = params if given else with_space(params, split, [logged_gib[s] for s in range(len(split))])
    found = pool(told, spec, split, gpus=gpus if given else None, layout=layout)
    tight = found.ranks[found.binding_rank]
    # A log prints two decimals, and what the params give is a log's: the true value lies up to 0.005 GiB away.
    return found, round(0.005 * GIB / tight.kv_bytes_per_block * found.block_size_tokens) + found.block_size_tokens


def cache_dtype(spec: ModelSpec, params: Params) -> str:
    """The KV cache's type: as asked, else what the checkpoint names ('auto' then), else the dtype that the server was told to use."""
    scheme = spec.quantization.kv_cache_scheme if spec.quantization else None
    return params.engine.dtype if params.engine.kv_cache_dtype == "auto" and not scheme else params.engine.kv_cache_dtype


def kv_engine(params: Params, spec: ModelSpec, stages: int, layout: Layout) -> dict:
    """The engine settings that KV pages and blocks depend on, as kv.pool and kv.block_costs take them."""
    engine = params.engine
    return {
        "max_model_len": engine.max_model_len,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "cache_dtype": cache_dtype(spec, params),
        "block_size": engine.block_size_tokens,
        "release": engine.vllm_release,
        "draft_tokens": engine.draft_tokens,
        "state_dtype": engine.state_dtype,
        "state_mode": "align" if engine.prefix_caching else "none",
        "dcp": layout.decode_context_parallel_size,
        "device": engine.device,
        "in_flight_tokens": kv.in_flight_tokens(engine.max_num_batched_tokens, stages, async_scheduling=engine.device != "cpu"),
    }


def server_spec(params: Params, spec: ModelSpec) -> ModelSpec:
    """The model as the server holds it: convolution states lie in the server's dtype, which need not be the checkpoint's, and draft layers are there
    only where they draft."""
    drafts = spec.mtp_layers if params.engine.mtp_tokens else ()
    return replace(spec, dtype=params.engine.dtype, mtp_layers=drafts)


def pool(
    params: Params,
    spec: ModelSpec,
    split: tuple[int, ...] | list[int],
    *,
    tensor_parallel_size: int | None = None,
    layout: Layout | None = None,
    gpus: Gpus | None = None,
    must_fit: bool = True,
    index_sharing: str | None = None,
) -> Pool:
    """Ledger of every stage and the pool that the smallest one leaves to all, for one split with these params.

    layout, or tensor_parallel_size alone: another one than the params'; that has no context parallelism of its own unless it says so. index_sharing:
    instead of the params' own. Raises BadInput when not even one request of max_model_len fits, as vLLM does, unless must_fit is False.
    """
    shape = layout or (layout_of(params) if tensor_parallel_size is None else Layout(tensor_parallel_size))
    held = rank_weights_bytes(spec, params, split, shape, index_sharing)
    space = available_kv_bytes(spec, params, split, held, shape, gpus)
    found = kv.pool(
        server_spec(params, spec),
        list(split),
        [available for available, _ in space],
        index_sharing=index_sharing or params.parallel.index_sharing,
        must_fit=must_fit,
        **kv_engine(params, spec, len(split), shape),
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
