"""The strategy table: every way to spread the model over the box, feasible or vetoed, with memory, traffic and the rates that the links allow at most."""

import math
from dataclasses import dataclass
from functools import lru_cache

from .. import kv, memory, partition, weights
from ..budget import Gpus
from ..errors import BadInput
from ..params import Params
from ..partition import Candidate
from ..spec import ModelSpec
from ..weights.component import rank_bytes
from ..weights.model import lm_head
from .fabric import Fabric
from .layouts import Strategy, every_strategy, place
from .traffic import Traffic, hop_floors, stage_floors, traffic_of
from .vetoes import Need, Veto, needs_of, vetoes_of


@dataclass(frozen=True)
class Outcome:
    """One strategy. vetoes: reasons against it, empty where it can run; short_of_memory: the only reason is that it does not fit.

    best: its best split; pool_tokens: of all replicas together, None: not known. Rates are upper bounds in tokens per second from links and memory alone,
    None where a rate is not known: prefill_at_most of prompts in chunks of max_num_batched_tokens, decode_at_most[n] of n streams in sum, every drafted
    token accepted. decode_expected: the same with links as far above their floor as is to expect, estimated; decode_links_s[n]: seconds of a round that go to
    the links at least. memory_known: the read rate of every GPU's memory is; without it no decode rate is given.
    """

    strategy: Strategy
    vetoes: tuple[Veto, ...]
    needs: tuple[Need, ...]
    best: Candidate | None
    pool_tokens: int | None
    weights_gib: float | None
    traffic: Traffic
    prefill_at_most_tok_s: float | None
    decode_at_most_tok_s: dict[int, float | None]
    decode_expected_tok_s: dict[int, float | None]
    decode_links_s: dict[int, float | None]
    memory_known: bool
    short_of_memory: bool = False
    unknown: str = ""


def strategies(params: Params, spec: ModelSpec, fabric: Fabric, sizes: tuple[int | None, ...]) -> list[Outcome]:
    """All strategies of as many GPUs as the fabric has. sizes: memory that CUDA reports of each GPU, in the fabric's numbering.

    Every pool is estimated from the cards alike, also where the params give the KV space of one layout: so they can be compared.
    """
    loose, evidence = _without_given_space(params), partition.indexer_evidence(params, spec) if params.parallel.index_sharing == "flip" else None
    plans: dict[tuple, tuple[partition.Plan | None, str]] = {}
    return [_outcome(one, loose, spec, fabric, sizes, plans, evidence) for one in every_strategy(len(fabric.gpus), spec)]


def _without_given_space(params: Params) -> Params:
    engine = params.engine.model_copy(update={"available_kv_gib": [], "other_boots": []})
    return params.model_copy(update={"engine": engine})


def _outcome(
    s: Strategy,
    params: Params,
    spec: ModelSpec,
    fabric: Fabric,
    sizes: tuple[int | None, ...],
    plans: dict,
    evidence: partition.IndexerEvidence | None,
) -> Outcome:
    vetoes = tuple(vetoes_of(s, spec, params, fabric.capability))
    if not vetoes:
        try:
            return _judged(s, params, spec, fabric, sizes, plans, evidence)
        except BadInput as error:
            # Some part of the model cannot be divided so; that is a reason against this layout and no other.
            vetoes = (Veto(str(error), "weights and KV accounting"),)
    return Outcome(s, vetoes, (), None, None, None, traffic_of(s, spec, params), None, {}, {}, {}, False)


def _judged(
    s: Strategy,
    params: Params,
    spec: ModelSpec,
    fabric: Fabric,
    sizes: tuple[int | None, ...],
    plans: dict,
    evidence: partition.IndexerEvidence | None,
) -> Outcome:
    order = place(s, fabric).order
    plan, unknown = _plan(s, params, spec, tuple(sizes[gpu] if gpu < len(sizes) else None for gpu in order), plans)
    best = plan.best if plan else None
    nearest = best or (partition.roomiest(plan.table) if plan else None)
    split = nearest.layers_per_stage if nearest else partition.default_split(spec.num_hidden_layers, s.pipeline_parallel_size)
    short = plan is not None and best is None
    relayed = best is not None and params.parallel.index_sharing == "relay" and any(best.cut_indices[1:])
    flipped = tuple(i for stage in best.flips for i in stage) if best else ()
    counts = sorted({1, params.engine.max_num_seqs})
    rounds = {streams: decode_round(s, spec, params, fabric, split, streams, relayed) for streams in counts}
    # Links alone would say thousands of tokens a second: without the memory's rate nothing is said.
    memory_known = all(rate is not None for rate in fabric.memory_gb_s)
    return Outcome(
        strategy=s,
        vetoes=(Veto(f"no split fits: {'; '.join(nearest.wrong)}", "memory accounting"),) if short else (),
        needs=tuple(needs_of(s, spec, params, relayed, flipped, evidence is None or evidence.allows(flipped))),
        best=best,
        pool_tokens=best.pool_tokens * s.data_parallel_size if best else None,
        weights_gib=max(int(plan.table.weights[i, a, b]) for i, (a, b) in enumerate(plan.table.bounds(split))) / memory.GIB if plan else None,
        traffic=traffic_of(s, spec, params, relayed),
        prefill_at_most_tok_s=prefill_at_most_tok_s(s, spec, params, fabric, split, relayed),
        decode_at_most_tok_s={streams: one.at_most_tok_s if one and memory_known else None for streams, one in rounds.items()},
        decode_expected_tok_s={streams: one.expected_tok_s if one and memory_known else None for streams, one in rounds.items()},
        decode_links_s={streams: one.links_s if one else None for streams, one in rounds.items()},
        memory_known=memory_known,
        short_of_memory=short,
        unknown=unknown,
    )


def _plan(s: Strategy, params: Params, spec: ModelSpec, sizes: tuple[int | None, ...], plans: dict) -> tuple[partition.Plan | None, str]:
    """(plan of this strategy's layout, or None and why its memory is not known)."""
    layout = s.layout
    key = (layout, s.pipeline_parallel_size)
    if key not in plans:
        try:
            table = partition.stage_table(params, spec, Gpus(sizes), stages=s.pipeline_parallel_size, layout=layout)
            plans[key] = (partition.plan(table), "")
        except BadInput as error:
            plans[key] = (None, str(error))
    return plans[key]


# --- rates


@lru_cache(maxsize=4096)
def _layer_reads(spec: ModelSpec, tensor_parallel_size: int, expert_parallel: bool, expert_ranks: int, dtype: str) -> tuple[tuple[int, int, float], ...]:
    """(bytes that every step reads, bytes of experts, share of the experts that one token picks) of each decoder layer on one rank."""
    kinds, numbers = weights.layer_kinds(spec)
    first = {number: spec.layers[numbers.index(number)] for number in set(numbers)}
    found = []
    for number, held in enumerate(kinds):
        moe = first[number].mlp
        each = [(one.sharding == "experts", rank_bytes(one, spec, tensor_parallel_size, expert_parallel, dtype, expert_ranks)) for one in held]
        plain, experts = sum(size for is_expert, size in each if not is_expert), sum(size for is_expert, size in each if is_expert)
        found.append((plain, experts, moe.experts_per_token / moe.experts if moe.experts else 0.0))
    return tuple(found[number] for number in numbers)


def stage_read_bytes(s: Strategy, spec: ModelSpec, params: Params, split: tuple[int, ...], tokens: int) -> list[float]:
    """Bytes of weights that one rank of every stage reads in a step of so many tokens of all replicas together; lm_head on the last stage.

    Experts: as many as that many tokens reach when each picks its experts at random, E (1 - (1 - k / E)^n). Cache and activations are not counted.
    """
    each = _layer_reads(spec, s.tensor_parallel_size, s.expert_parallel, s.layout.expert_ranks, params.engine.dtype)
    found, start = [], 0
    for count in split:
        found.append(sum(plain + experts * (1 - (1 - share) ** tokens) for plain, experts, share in each[start : start + count]))
        start += count
    found[-1] += rank_bytes(lm_head(spec), spec, s.tensor_parallel_size, dtype=params.engine.dtype) or (
        spec.vocab_size * spec.hidden_size * memory.DTYPE_BYTES[params.engine.dtype] / s.tensor_parallel_size
    )
    return found


@dataclass(frozen=True)
class Round:
    """One round of decoding, in which every stream gets its next token: least seconds, those of them that go to links, seconds to expect, and tokens
    it brings at most."""

    seconds: float
    links_s: float
    expected_s: float
    tokens: int

    @property
    def at_most_tok_s(self) -> float | None:
        """Tokens per second of all streams in sum; None where nothing bounds it."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def expected_tok_s(self) -> float | None:
        """The same with links as far above their floor as is to expect."""
        return self.tokens / self.expected_s if self.expected_s else None


def decode_round(
    s: Strategy, spec: ModelSpec, params: Params, fabric: Fabric, split: tuple[int, ...], streams: int, relayed: bool = False
) -> Round | None:
    """The least that links and memory allow a round of so many streams, with every drafted token accepted. None where the rate of a link is not known.

    A replica's streams go round in as many batches as it has stages: a round takes the way through all stages, or as long as the heaviest stage needs for
    all batches, whichever is longer.
    """
    pp, own = s.pipeline_parallel_size, math.ceil(streams / s.data_parallel_size)
    batches = min(pp, own)
    steps = 1 + (params.engine.mtp_tokens if spec.mtp_layers else 0)
    tokens = math.ceil(own / batches) * steps
    floors, expected = (_links(s, spec, params, over, split, tokens, relayed) for over in (fabric, fabric.as_expected))
    if floors is None or expected is None:
        return None
    reads = [0.0] * pp
    if all(rate is not None for rate in fabric.memory_gb_s):
        slowest = min(fabric.memory_gb_s) * 1e9
        reads = [size / slowest for size in stage_read_bytes(s, spec, params, split, tokens * min(s.data_parallel_size, streams))]

    def round_s(of_reads: float, links: list[float], hops: list[float]) -> float:
        stages = [of_reads * read + link for read, link in zip(reads, links, strict=True)]
        return max(sum(stages) + sum(hops), batches * max(stages))

    return Round(round_s(1, *floors), round_s(0, *floors), round_s(1, *expected), streams * steps)


def _links(
    s: Strategy, spec: ModelSpec, params: Params, fabric: Fabric, split: tuple[int, ...], tokens: int, relayed: bool = False
) -> tuple[list[float], list[float]] | None:
    """(least seconds inside each stage, of each boundary); None where a link's rate is not known."""
    links, hops = stage_floors(s, spec, params, fabric, split, tokens), hop_floors(s, spec, params, fabric, tokens, relayed)
    return None if any(each is None for each in [*links, *hops]) else (links, hops)


def lone_prefill_s(
    s: Strategy, spec: ModelSpec, params: Params, fabric: Fabric, split: tuple[int, ...], tokens: int, rank_flops: float
) -> tuple[float, float] | None:
    """(least seconds of one prompt that has the box to itself, those that go to links). None where a link is not known.

    The prompt passes in pieces of max_num_batched_tokens through one stage after the other: a stage works on the next piece while the one behind it works on
    this one, and a prompt of one piece never has two stages at work. Ranks of a stage share its arithmetic; rank_flops: operations per second of each.
    """
    piece = min(tokens, params.engine.max_num_batched_tokens)
    found = _links(s, spec, params, fabric, split, piece)
    if found is None:
        return None
    links, hops = found
    widths = s.tensor_parallel_size * s.prefill_context_parallel_size
    bounds = kv.stage_bounds(spec, split)
    work = [2 * piece * memory.parameters_per_rank(spec, range(*one), widths, s.layout.expert_ranks) / rank_flops for one in bounds]
    stages = [done + link for done, link in zip(work, links, strict=True)]
    more = (tokens / piece - 1) * max([*stages, *hops])
    whole = sum(stages) + sum(hops) + more
    return whole, whole - (sum(work) + (tokens / piece - 1) * max(work))


def prefill_at_most_tok_s(s: Strategy, spec: ModelSpec, params: Params, fabric: Fabric, split: tuple[int, ...], relayed: bool = False) -> float | None:
    """Prompt tokens per second that the links allow at most, in chunks of max_num_batched_tokens on every replica; computing is not counted.

    Chunks follow each other through the pipeline, so its busiest stage or boundary sets the pace. None where a rate is not known or nothing is sent.
    """
    tokens = params.engine.max_num_batched_tokens
    found = _links(s, spec, params, fabric, split, tokens, relayed)
    slowest = max([*found[0], *found[1]]) if found else 0.0
    return tokens * s.data_parallel_size / slowest if slowest else None
