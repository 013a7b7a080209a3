"""Blocks, load and forbidden runs of every stage for every run of layers: what the search looks at, and what it says of one split."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import kv, memory, weights
from ..budget import Gpus
from ..errors import BadInput
from ..kv.costs import BlockCosts, block_costs, shared_index_runs
from ..memory import Layout
from ..params import Params
from ..spec import ModelSpec, sharing_layers
from ..splits import Split, default_split
from .rules import Rule, rules_of


@dataclass(frozen=True)
class Candidate:
    """One split and what comes of it. stage_load: layer-equivalents; flips: layers that compute their own indices where they would share.

    rank_blocks: KV blocks that each rank has room for; the poorest rank binds, and has binding_gib for its cache. wrong: reasons why this split must not
    be used, empty where it may. pool_tokens is what the blocks are worth even then.
    """

    layers_per_stage: Split
    pool_tokens: int
    binding_rank: int
    binding_gib: float
    rank_blocks: Split
    stage_load: Split
    flips: tuple[Split, ...]
    cut_indices: tuple[Split, ...]
    is_default: bool
    wrong: tuple[str, ...]

    @property
    def straggler_layers(self) -> int:
        """Load of the heaviest stage in layer-equivalents: a full pipeline advances at its pace."""
        return max(self.stage_load)


@dataclass(frozen=True)
class StageTable:
    """Arrays are int64 [P, L + 1, L + 1]: stage, first layer, one past the last. available: bytes for KV cache; blocks: what fits in it, before any rule."""

    spec: ModelSpec
    stages: int
    index_sharing: str
    default: Split
    costs: BlockCosts
    weights: np.ndarray
    available: np.ndarray
    blocks: np.ndarray
    load: np.ndarray
    rules: tuple[Rule, ...]

    @property
    def allowed_blocks(self) -> np.ndarray:
        """Blocks, and -1 where a rule forbids the run, its weights leave no room, or no longest request fits."""
        enough = self.costs.request_blocks
        return np.where(self.forbidden | (self.available <= 0) | (self.blocks <= enough), -1, self.blocks)

    @property
    def forbidden(self) -> np.ndarray:
        """Runs that some rule forbids."""
        return np.logical_or.reduce([rule.forbidden for rule in self.rules])

    @property
    def allowed_or_not(self) -> np.ndarray:
        """Blocks of every run that holds layers and fits, whatever the rules say, and -1 elsewhere."""
        return np.where(self.rules[0].forbidden | (self.available <= 0), -1, self.blocks)

    def least_equal(self, blocks: int) -> int:
        """Fewest blocks that are worth as many tokens as these: what the search takes for a tie."""
        return self.costs.least_blocks(self.costs.tokens(blocks))

    def bounds(self, split: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """First layer and one past the last of every stage."""
        return tuple(itertools.pairwise((0, *itertools.accumulate(split))))

    def candidate(self, split: Sequence[int]) -> Candidate:
        """What comes of a split, allowed or not. Raises BadInput where it does not make up the model."""
        kv.stage_bounds(self.spec, split)
        at = self.bounds(split)
        blocks = tuple(int(self.blocks[stage, a, b]) for stage, (a, b) in enumerate(at))
        binding = min(range(self.stages), key=lambda stage: blocks[stage])
        leading = kv.flipped_layers(self.spec, split)
        return Candidate(
            layers_per_stage=tuple(split),
            pool_tokens=self.costs.tokens(blocks[binding]),
            binding_rank=binding,
            binding_gib=int(self.available[(binding, *at[binding])]) / memory.GIB,
            rank_blocks=blocks,
            stage_load=tuple(int(self.load[stage, a, b]) for stage, (a, b) in enumerate(at)),
            flips=leading if self.index_sharing == "flip" else ((),) * self.stages,
            cut_indices=leading,
            is_default=tuple(split) == self.default,
            wrong=tuple(self._wrong(at, blocks)),
        )

    def _wrong(self, at: Sequence[tuple[int, int]], blocks: Sequence[int]) -> list[str]:
        found = [reason for rule in self.rules for reason in rule.broken_by(at)]
        for stage, (a, b) in enumerate(at):
            if self.available[stage, a, b] <= 0:
                heavy = int(self.weights[stage, a, b]) / memory.GIB
                found.append(f"rank {stage}: {heavy:.1f} GiB of weights, and what a step takes besides, leave no room for the KV cache")
        short = min(range(self.stages), key=lambda stage: blocks[stage])
        if not self.costs.fits(blocks[short]) and self.available[(short, *at[short])] > 0:
            needs = f"one request of {self.costs.max_model_len:,} tokens needs {self.costs.request_blocks:,} and the null block"
            found.append(f"rank {short} has room for {blocks[short]:,} blocks of {self.costs.block_size_tokens} tokens, {needs}")
        return found


def stage_table(
    params: Params,
    spec: ModelSpec,
    gpus: Gpus | None = None,
    *,
    stages: int | None = None,
    layout: Layout | None = None,
    index_sharing: str | None = None,
    flippable: tuple[int, ...] | None = None,
) -> StageTable:
    """The table of these params; stages, layout and index_sharing may be others than the params'. flippable: layers that share indices and have indexer
    weights, where some are known to; with flip, no split then flips another one.

    Raises BadInput where the KV space is not known, or the layout cannot be (more stages than layers, heads that do not divide).
    """
    count, shape = stages or params.parallel.pipeline_parallel_size, layout or memory.layout_of(params)
    sharing = index_sharing or params.parallel.index_sharing
    layers = spec.num_hidden_layers
    if count > layers:
        raise BadInput(f"pipeline_parallel_size: {count} stages for the {layers} layers of {spec.name}; at most one stage per layer")
    costs = block_costs(memory.server_spec(params, spec), index_sharing=sharing, **memory.kv_engine(params, spec, count, shape))
    held = run_weights(params, spec, count, shape, sharing)
    room = memory.stage_rooms(spec, params, count, shape, gpus)
    available = np.stack([_available(one, held[stage]) for stage, one in enumerate(room)])
    per_block = np.stack([costs.last if stage == count - 1 else costs.inner for stage in range(count)])
    blocks = np.where(per_block > 0, np.maximum(available, 0) // np.maximum(per_block, 1), 0)
    return StageTable(
        spec=spec,
        stages=count,
        index_sharing=sharing,
        default=default_split(layers, count),
        costs=costs,
        weights=held,
        available=available,
        blocks=blocks,
        load=stage_loads(layers, count, params.engine.mtp_tokens if spec.mtp_layers else 0),
        rules=tuple(rules_of(spec, count, sharing, flippable)),
    )


def run_weights(params: Params, spec: ModelSpec, stages: int, layout: Layout, index_sharing: str) -> np.ndarray:
    """Bytes of weights on one rank of every stage for every run of layers: memory.rank_weights_bytes for all splits at once."""
    cut = {
        "tensor_parallel_size": layout.tensor_parallel_size,
        "expert_parallel": layout.expert_parallel,
        "expert_ranks": layout.expert_ranks,
        "dtype": params.engine.dtype,
    }
    sums = np.concatenate([[0], np.cumsum(np.array(weights.layer_rank_bytes(spec, **cut), dtype=np.int64))])
    runs = np.maximum(sums[None, :] - sums[:, None], 0)
    if index_sharing == "flip" and sharing_layers(spec):
        runs = runs + shared_index_runs(spec) * weights.indexer_rank_bytes(spec, layout.tensor_parallel_size, params.engine.dtype)
    drafting = params.engine.mtp_tokens > 0
    ends = [weights.outside_rank_bytes(spec, first=stage == 0, last=stage == stages - 1, with_mtp=drafting, **cut) for stage in range(stages)]
    return runs[None] + np.array(ends, dtype=np.int64)[:, None, None]


def _available(room: memory.StageRoom, held: np.ndarray) -> np.ndarray:
    """StageRoom.available_bytes of every run: [L + 1, L + 1]."""
    size = len(held)
    base = np.full((size, size), room.base_bytes, dtype=np.int64)
    for (start, end), known in room.known_bases:
        base[start, end] = known
    if room.besides_bytes:
        # The most that one layer of the run adds: a running maximum from each start.
        each = np.tile(np.concatenate([[0], room.besides_bytes]).astype(np.int64), (size, 1))
        each[np.arange(size)[None, :] <= np.arange(size)[:, None]] = 0
        base -= np.maximum.accumulate(each, axis=1)
    left = base - np.rint(room.weights_scale * held).astype(np.int64)
    if room.given_bytes is None:
        return left
    return np.where(left >= room.given_bytes, room.given_bytes, left - room.given_bytes)


def stage_loads(layers: int, stages: int, draft_steps: int) -> np.ndarray:
    """Layer-equivalents of every run: its layers, and on the last stage the draft layer once for each draft step."""
    edges = np.arange(layers + 1, dtype=np.int64)
    runs = np.maximum(edges[None, :] - edges[:, None], 0)
    return np.stack([runs + (draft_steps if stage == stages - 1 else 0) for stage in range(stages)])
