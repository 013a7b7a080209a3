"""Rows of the partition notebook: rules, splits, the three ways with shared indices, and their charts' data."""

import collections
from typing import Any

from . import memory, partition, strategy
from .params import Params
from .partition import Candidate, Plan, Treatment
from .partition.search import best_split, count
from .spec import ModelSpec
from .tables import Rows


def name(split: tuple[int, ...] | list[int]) -> str:
    """'41+37'; of more than four stages equal neighbours are counted: '5x10+8'."""
    if len(split) <= 4:
        return "+".join(map(str, split))
    runs: list[list[int]] = []
    for layers in split:
        if runs and runs[-1][0] == layers:
            runs[-1][1] += 1
        else:
            runs.append([layers, 1])
    return "+".join(f"{times}x{layers}" if times > 1 else str(layers) for layers, times in runs)


def picked(split: tuple[int, ...] | list[int], splits: int) -> str:
    """'41+37 of 77 splits'; of one stage there is nothing to pick."""
    return f"{'+'.join(map(str, split))} of {splits:,} splits" if len(split) > 1 else f"one stage with all {split[0]} layers"


def layers_text(layers: tuple[int, ...]) -> str | None:
    """'39, 40, 41', or None without any."""
    return ", ".join(map(str, layers)) or None


def rules(found: Plan) -> Rows:
    """Each hard constraint that the model turns on, why, and how many splits it rules out by itself."""
    table, empty = found.table, found.table.rules[0].forbidden
    fits = ~empty & (table.available > 0)
    holds = fits & (table.blocks > table.costs.request_blocks)
    longest = f"one request of {table.costs.max_model_len:,} tokens fits into the pool"
    kept = [
        *((rule.name, rule.reason, ~(rule.forbidden | empty)) for rule in table.rules[1:]),
        ("each rank's weights fit", "what is left of its memory is its KV cache", fits),
        (longest, "vLLM does not start without", holds),
    ]
    return [{"rule": rule, "why": why, "splits it rules out": found.looked_at - count(allowed)} for rule, why, allowed in kept]


def split_row(candidate: Candidate, found: Plan, params: Params, asked: tuple[int, ...] | None = None) -> dict[str, Any]:
    """One split: pool, what binds, load, what the heaviest stage reads for one token (with lm_head, which the load leaves out), flips, faults."""
    own = params.parallel
    here = strategy.Strategy(own.tensor_parallel_size, len(candidate.layers_per_stage))
    reads = strategy.stage_read_bytes(here, found.table.spec, params, candidate.layers_per_stage, 1)
    marks = [
        "best" if found.best and candidate.layers_per_stage == found.best.layers_per_stage else "",
        "chosen" if asked and candidate.layers_per_stage == asked else "",
        "vLLM's own" if candidate.is_default else "",
    ]
    row = {
        "split": name(candidate.layers_per_stage),
        "is": ", ".join(mark for mark in marks if mark) or None,
        "pool tokens": candidate.pool_tokens,
        "binding rank": candidate.binding_rank,
        "KV GiB on it": candidate.binding_gib,
        "load": "/".join(map(str, candidate.stage_load)) if len(candidate.stage_load) <= 8 else None,
        "heaviest": candidate.straggler_layers,
        "GiB read a token": max(reads) / memory.GIB,
    }
    if partition.sharing_layers(found.table.spec):
        row["flips" if found.table.index_sharing == "flip" else "layers cut off from their indices"] = layers_text(
            tuple(i for stage in candidate.cut_indices for i in stage)
        )
    return row | {"must not be used": "; ".join(candidate.wrong) or None}


def without_empty(rows: Rows, column: str) -> Rows:
    """The rows without a column in which none of them says anything."""
    return rows if any(row.get(column) is not None for row in rows) else [{k: v for k, v in row.items() if k != column} for row in rows]


def splits(found: Plan, chosen: Candidate | None, params: Params) -> Rows:
    """The best split, the chosen one, vLLM's own, and what lies around the best one."""
    centre = found.best or chosen
    if centre is None:
        return []
    asked = chosen.layers_per_stage if chosen else None
    around = {c.layers_per_stage: c for c in found.neighbours(centre.layers_per_stage)}
    if chosen:
        around[chosen.layers_per_stage] = chosen
    if len(around) > 24:
        # Many stages have many neighbours: the best of them say what there is to say.
        kept = sorted(around.values(), key=lambda c: (bool(c.wrong), -c.pool_tokens, c.straggler_layers))[:20]
        around = {c.layers_per_stage: c for c in [*kept, *(c for c in around.values() if c.is_default or c in (centre, chosen))]}
    return without_empty([split_row(around[split], found, params, asked) for split in sorted(around)], "must not be used")


def pool_by_first_stage(found: Plan, chosen: Candidate | None) -> Rows:
    """Best pool for each number of layers on the first stage, rules kept or not, for the chart."""
    table, rows = found.table, []
    own = chosen.layers_per_stage[0] if chosen else None
    for layers in range(1, table.spec.num_hidden_layers - table.stages + 2):
        blocks = {}
        for kind, allowed in (("allowed", table.allowed_blocks), ("ruled out", table.allowed_or_not)):
            first = allowed.copy()
            first[0, 0, :layers] = first[0, 0, layers + 1 :] = -1
            split = best_split(first, table.load, table.default)
            if split is not None:
                blocks[kind] = table.candidate(split).pool_tokens
        kind = next(iter(blocks), None)
        if kind is not None:
            shown = "chosen" if layers == own else kind
            rows.append({"layers on the first stage": layers, "tokens": blocks[kind], "split": shown})
    return rows


def front(found: Plan, chosen: Candidate | None) -> Rows:
    """Pareto front for the chart: pool against the heaviest stage, with every other split where there are few."""
    on = {c.layers_per_stage for c in found.front}
    every = [c for c in found.all() or () if c.layers_per_stage not in on and not c.wrong]
    rows = [_point(c, "other split") for c in every] + [_point(c, "front") for c in found.front]
    for row in rows:
        # The chosen split is drawn once, above the line of the front that it may be part of.
        row["covered"] = chosen is not None and row["split"] == name(chosen.layers_per_stage)
    return rows + ([_point(chosen, "chosen")] if chosen else [])


def _point(candidate: Candidate, kind: str) -> dict[str, Any]:
    return {"split": name(candidate.layers_per_stage), "heaviest": candidate.straggler_layers, "tokens": candidate.pool_tokens, "kind": kind}


def treatments(found: list[Treatment], params: Params) -> Rows:
    """The three ways side by side: best split of each, what it holds, needs and costs."""
    best = max((t.plan.best.pool_tokens for t in found if t.plan.best), default=0)
    both = params.parallel.tensor_parallel_size > 1 and params.parallel.pipeline_parallel_size > 1
    rows = []
    for one in found:
        c = one.plan.best
        rows.append(
            {
                "way": one.mode + (" (asked for)" if one.mode == params.parallel.index_sharing else ""),
                "best split": name(c.layers_per_stage) if c else "none fits",
                "pool tokens": c.pool_tokens if c else None,
                "less": f"{1 - c.pool_tokens / best:.1%}" if c and c.pool_tokens < best else None,
                "flips": layers_text(tuple(i for stage in c.flips for i in stage)) if c else None,
                "B a token more": one.relay_bytes_per_token or None,
                "allowed": one.usable,
                "needs": ", ".join([*one.needs, *(["tp-partial"] if both else [])]) or None,
            }
        )
    return rows


def treatments_text(params: Params, spec: ModelSpec, chosen: Candidate, found: list[Treatment]) -> str:
    """What the evidence says of flipping, which way remains, and what a rule of even stages would have made of the chosen split."""
    evidence = partition.indexer_evidence(params, spec)
    stages = len(chosen.layers_per_stage)
    told = {None: "nothing tells whether", (): "no"}.get(evidence.layers, f"{len(evidence.layers or ())}")
    weights = "layer that shares indices has indexer weights" if told == "no" else "layers that share indices have indexer weights"
    cut = tuple(i for stage in chosen.cut_indices for i in stage)
    even = partition.even_split_flips(spec, stages)
    text = f"Evidence on flipping: {told} {weights} ({evidence.source}).\n\n"
    usable = [one for one in found if one.usable and one.plan.best]
    if usable:
        most = max(usable, key=lambda one: one.plan.best.pool_tokens)
        clean = next((one for one in usable if one.mode == "clean"), None)
        best = most.plan.best
        text += f"Of the ways that the checkpoint allows, {most.mode} holds most: {name(best.layers_per_stage)}, {best.pool_tokens:,} tokens."
        if clean and clean is not most:
            best = clean.plan.best
            text += f" A clean cut needs no patch of its own and holds {best.pool_tokens:,} tokens at {name(best.layers_per_stage)}."
        if chosen.layers_per_stage not in {one.plan.best.layers_per_stage for one in usable}:
            text += f" The params ask for {name(chosen.layers_per_stage)}."
        text += "\n\n"
    if params.parallel.tensor_parallel_size > 1 and stages > 1:
        text += "TP > 1 with PP > 1 needs the tp-partial patch whatever the cut.\n\n"
    if cut != even:
        left = f"layer {layers_text(cut)}" if cut else "no layer"
        text += (
            f"{name(chosen.layers_per_stage)} leaves {left} without indices. A check that assumes even stages (stage r begins at layer "
            f"r x {spec.num_hidden_layers} // {stages}) would name {layers_text(even) or 'none'}, whatever the partition: it has to look at the real cut."
        )
    return text


def document(candidate: Candidate | None) -> dict[str, Any] | None:
    """One split for the command's JSON."""
    if candidate is None:
        return None
    return {
        "partition": list(candidate.layers_per_stage),
        "pool_tokens": candidate.pool_tokens,
        "binding_rank": candidate.binding_rank,
        "binding_gib": round(candidate.binding_gib, 4),
        "rank_blocks": list(candidate.rank_blocks),
        "stage_load": list(candidate.stage_load),
        "straggler_layers": candidate.straggler_layers,
        "flips": [i for stage in candidate.flips for i in stage],
        "cut_from_indices": [i for stage in candidate.cut_indices for i in stage],
        "is_default": candidate.is_default,
        "wrong": list(candidate.wrong),
    }


def candidates(found: Plan) -> list[Candidate]:
    """Splits to list: all where there are few, else the front and what lies around the best split."""
    every = found.all()
    if every is not None:
        return list(every)
    around = found.neighbours(found.best.layers_per_stage) if found.best else ()
    return list(collections.OrderedDict((c.layers_per_stage, c) for c in [*found.front, *around]).values())
