"""The causal story in numbers: what the model of memory, links and arithmetic says of each arm, written down before anything is measured."""

from dataclasses import dataclass
from typing import Any

from . import ceilings, memory, strategy
from .command import without_custom_all_reduce
from .inventory import Inventory
from .memory import Pool
from .params import Params
from .schema import Baseline, Parallel


@dataclass(frozen=True)
class Predicted:
    """One metric of one arm. floor_us: microseconds that one token's traffic over the links takes at least, 0 where nothing is sent, None: a rate is not
    known. at_most_tok_s: upper estimate, None where nothing bounds it; bound: what sets it. expected_tok_s: the same with links at above_floor times
    their floor (fabric.Way), which gives the order of two layouts, not their rates."""

    floor_us: float | None
    at_most_tok_s: float | None
    bound: str
    expected_tok_s: float | None = None
    above_floor: float = strategy.LINKS_ABOVE_FLOOR


@dataclass(frozen=True)
class Headroom:
    """The rank with the least memory left, in bytes, and of what."""

    rank: int
    left_bytes: int
    of: str


def tokens_of(pool: Pool | None) -> int | None:
    """Tokens of a ledger, None without one."""
    return pool.pool_tokens if pool else None


def headroom(pool: Pool) -> Headroom:
    """The tightest rank, with the pool taken out.

    On a card that is what is left of its memory, outside vLLM's share included. Where the KV space was given (on CPUs always) nothing is known of the rest:
    what is left of that space is what the pool of the binding rank cannot use.
    """
    of_cards = all(r.budget for r in pool.ranks)
    left = {}
    for r in pool.ranks:
        held = pool.blocks * r.kv_bytes_per_block
        left[r.rank] = r.budget.total_bytes - r.weights_bytes - r.budget.other_bytes - held if of_cards else r.available_kv_bytes - held
    rank = min(left, key=left.get)
    return Headroom(rank, left[rank], "of the card" if of_cards else "of the reserved KV space")


def predict(
    params: Params,
    arm: Parallel | Baseline,
    layers: tuple[int, ...],
    box: Inventory,
    memory_read_bytes_s: float | None,
    ceilings_tok_s: dict[str, float],
    alone: bool = True,
) -> dict[str, Predicted]:
    """{metric: what the model says} of an arm, for every metric of the benchmarks.

    Sources: strategy.traffic (floor of a token's collectives and hops), strategy.table (decode_round, lone_prefill_s, prefill_at_most_tok_s), and the box's
    ceilings. memory_read_bytes_s: of a machine without GPUs; alone: whether prompts are timed one by one, as Fieldbook does, or kept the box full.
    """
    spec, bench = memory.model_spec(params.model.name), params.benchmarks
    here = strategy.strategy_of(arm)
    on_cpu, custom = params.engine.device == "cpu", not without_custom_all_reduce(params, arm, box)
    fabric = strategy.fabric_of(box, arm.ranks, memory_read_bytes_s, on_cpu, params.extra_env_of(arm), custom, params.server.extra_env)
    if len(fabric.gpus) < here.gpus:
        return {}
    placed = strategy.place(here, fabric)
    groups = [*(group for stage in (*placed.tensor_groups, *placed.data_groups) for group in stage)]
    ways = fabric.ways_taken([pair for hops in placed.hops for pair in hops], groups)
    above = max((way.above_floor for way in ways), default=strategy.LINKS_ABOVE_FLOOR)
    parts = [*strategy.stage_floors(here, spec, params, fabric, layers, 1), *strategy.hop_floors(here, spec, params, fabric, 1)]
    floor_us = None if any(each is None for each in parts) else 1e6 * sum(parts)
    found = {}
    # The links at their floor, and as far above it as is to expect.
    over, flops = (fabric, fabric.as_expected), ceilings.rank_flops(params, spec, box, arm.ranks)
    links, slower = (strategy.prefill_at_most_tok_s(here, spec, params, each, layers) for each in over)
    for tokens in bench.prefill_tokens:
        metric = f"prefill_{tokens}_tok_s"
        # What bounds a rank with links at their floor, then what to expect of both.
        pace = zip(flops, over, strict=True) if alone and flops else ()
        one = [strategy.lone_prefill_s(here, spec, params, each, layers, tokens, rate) for rate, each in pace]
        if one and None not in one:
            (least_s, of_links_s), (expected_s, _) = one
            bound = "links" if of_links_s > least_s / 2 else "arithmetic"
            found[metric] = Predicted(floor_us, tokens / least_s, bound, tokens / expected_s, above)
            continue
        limits = {"links": links, "arithmetic": ceilings_tok_s.get(metric)}
        expected = {**limits, "links": slower}
        found[metric] = _bounded(floor_us, limits, min((rate for rate in expected.values() if rate is not None), default=None), above)
    for streams in bench.decode_concurrency:
        metric = f"decode_c{streams}_tok_s"
        one = strategy.decode_round(here, spec, params, fabric, layers, streams)
        known = one is not None and all(rate is not None for rate in fabric.memory_gb_s)
        found[metric] = _bounded(floor_us, {"weights read, and links": one.at_most_tok_s if known else None}, one.expected_tok_s if known else None, above)
    return found


def _bounded(floor_us: float | None, limits: dict[str, float | None], expected_tok_s: float | None, above_floor: float) -> Predicted:
    known = {what: rate for what, rate in limits.items() if rate is not None}
    bound = min(known, key=known.get, default="")
    return Predicted(floor_us, known.get(bound), bound, expected_tok_s, above_floor)


def links_at(predicted: dict[str, dict[str, Predicted]]) -> str:
    """'3', or '1.3 and 3': how many times their floor links were taken at, over both arms."""
    factors = sorted({one.above_floor for said in predicted.values() for one in said.values()}) or [strategy.LINKS_ABOVE_FLOOR]
    return " and ".join(f"{factor:g}" for factor in factors)


def rows(
    predicted: dict[str, dict[str, Predicted]],
    pools: dict[str, int | None],
    measured: dict[str, dict[str, float | None]],
    logged: dict[str, int | None],
    names: dict[str, str],
) -> list[dict[str, Any]]:
    """What the model said beside what was measured, for each arm and metric, and the ratio of the two. predicted and measured: {arm: {metric: ...}}."""
    expected = f"with links at {links_at(predicted)} x their floor"
    found = [_row("KV pool, tokens", names[arm], None, pools[arm], "memory" if pools[arm] else "", logged[arm]) for arm in names]
    for metric in predicted["candidate"]:
        for arm in names:
            one = predicted[arm].get(metric, Predicted(None, None, ""))
            row = _row(metric, names[arm], one.floor_us, one.at_most_tok_s, one.bound, measured[arm].get(metric))
            found.append(row | {expected: one.expected_tok_s})
    titles = ["what", "arm", "traffic floor, µs a token", "model says", "set by", "measured", "measured / model", expected]
    return [{title: row.get(title) for title in titles} for row in found]


def _row(what: str, arm: str, floor_us: float | None, said: float | None, bound: str, seen: float | None) -> dict[str, Any]:
    ratio = seen / said if seen is not None and said else None
    told = {"what": what, "arm": arm, "traffic floor, µs a token": floor_us, "model says": said, "set by": bound or None}
    return told | {"measured": seen, "measured / model": ratio}


def order(predicted: dict[str, dict[str, Predicted]], measured: dict[str, dict[str, float | None]], told: dict[str, str]) -> list[dict[str, Any]]:
    """Whether the model puts the two arms in the order that was measured, metric by metric: the ratio it expects beside the one that was found.

    told: {metric: answer of the test}; where it is 'same' or 'cannot tell', there is no order that a model could miss.
    """
    found = []
    for metric, ours in predicted["candidate"].items():
        theirs, seen = predicted["baseline"].get(metric), [measured[arm].get(metric) for arm in ("candidate", "baseline")]
        if theirs and ours.expected_tok_s and theirs.expected_tok_s and all(seen):
            expected, ratio = ours.expected_tok_s / theirs.expected_tok_s, seen[0] / seen[1]
            undecided = told.get(metric) in ("same", "cannot tell")
            tie = abs(expected - 1) <= strategy.TIE["throughput"]
            right = "nothing measured to order" if undecided else "a tie expected" if tie else "right" if (expected > 1) == (ratio > 1) else "WRONG"
            found.append({"metric": metric, "expected ratio": expected, "measured ratio": ratio, "order": right})
    return found


def reads_bytes_s(figures: dict[str, Any], params: Params) -> float | None:
    """Memory read rate of a machine without GPUs, from the figures of notebook 01."""
    told = figures.get("memory_read_gb_s")
    return told.value * 1e9 if told is not None and params.engine.device == "cpu" else None
