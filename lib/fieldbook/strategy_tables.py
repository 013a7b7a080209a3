"""Rows of the strategy part of notebook 03: what can run, what cannot and why, traffic, floors against recorded rates, and the choice by workload."""

from typing import Any

import yaml

from . import partition, paths
from .errors import BadInput
from .params import Params
from .partition_tables import name
from .spec import ModelSpec
from .strategy import (
    WORKLOADS,
    Choice,
    Fabric,
    Outcome,
    Strategy,
    choose,
    decode_round,
    hop_floors,
    judged_by,
    place,
    prefill_at_most_tok_s,
    stage_floors,
    strategy_of,
)
from .tables import Rows

SHOWN = 16


def folded(outcomes: list[Outcome]) -> list[tuple[Outcome, str]]:
    """Outcomes with their names, those with EP joined to the same without where nothing differs: 'TP8 (EP alike)'."""

    def key(o: Outcome) -> tuple:
        plain = Strategy(**{**vars(o.strategy), "expert_parallel": False})
        figures = (o.pool_tokens, o.prefill_at_most_tok_s, tuple(o.decode_at_most_tok_s.items()), tuple(v.reason for v in o.vetoes))
        return plain, figures

    found: dict[tuple, tuple[Outcome, str]] = {}
    for o in outcomes:
        at = key(o)
        found[at] = (found[at][0], f"{found[at][0].strategy.name} (EP alike)") if at in found else (o, o.strategy.name)
    return list(found.values())


def feasible(outcomes: list[Outcome], params: Params) -> Rows:
    """Strategies that can run, best first for the workload that the params name, at most SHOWN: weights of the heaviest rank, pool of each replica,
    upper estimates of decode."""
    seqs = params.engine.max_num_seqs
    able = [(o, words) for o, words in folded(outcomes) if not o.vetoes]

    def order(pair: tuple[Outcome, str]) -> tuple:
        o = pair[0]
        by = judged_by(o, params.parallel.workload, params)
        return (by is None, -(by or 0), -(o.pool_tokens or 0), o.strategy)

    return [
        {
            "layout": words,
            "best split": name(o.best.layers_per_stage) if o.best else None,
            "weights, GiB": o.weights_gib,
            "pool tokens": _pools(o),
            "1 stream": o.decode_expected_tok_s.get(1),
            f"{seqs} streams": o.decode_expected_tok_s.get(seqs),
            "needs": needs_text(o),
        }
        for o, words in sorted(able, key=order)[:SHOWN]
    ] or [{"layout": "none can run", "why": "each is vetoed below"}]


def _pools(o: Outcome) -> str | None:
    """'745,792', or '2 x 577,728' of replicas that share nothing of it."""
    if o.best is None:
        return None
    replicas = o.strategy.data_parallel_size
    return (f"{replicas} x " if replicas > 1 else "") + f"{o.best.pool_tokens:,}"


def needs_text(o: Outcome) -> str | None:
    """'tp-partial, unverified': names of what a strategy needs."""
    return ", ".join(need.name.removeprefix("patch ") for need in o.needs) or None


def needs(outcomes: list[Outcome]) -> Rows:
    """What the layouts that can run need, and what happens without."""
    found: dict[str, str] = {need.name: need.why for o in outcomes for need in o.needs}
    return [{"need": name_, "else": why} for name_, why in found.items()]


def needs_list(outcomes: list[Outcome]) -> str:
    """The same as a list in Markdown, '' where stock vLLM runs all layouts as they are."""
    rows = [f"- *{row['need']}*: without it, {row['else']}" for row in needs(outcomes)]
    return "What they need besides:\n\n" + "\n".join(rows) if rows else ""


def slowest(s: Strategy, fabric: Fabric) -> str | None:
    """The slowest link that a strategy sends over, with its rate."""
    placed = place(s, fabric)
    found = [fabric.worst(group) for stage in (*placed.tensor_groups, *placed.data_groups) for group in stage if len(group) > 1]
    found += [fabric.way(a, b) for stage in placed.hops for a, b in stage]
    least = min(found, key=lambda way: (way.gb_s is not None, way.gb_s or 0.0), default=None)
    if least is None:
        return None
    return f"{least.kind} {least.gb_s:.3g} GB/s" if least.gb_s else f"{least.kind}, rate not known"


def links_text(outcomes: list[Outcome], fabric: Fabric) -> str:
    """Where the rates of the links come from, one sentence."""
    used = {way for o in outcomes for stage in place(o.strategy, fabric).hops for a, b in stage for way in [fabric.way(a, b)]}
    used |= {fabric.way(a, b) for members in fabric.islands for a in members for b in members if a < b}
    told = [f"{way.kind} {way.gb_s:.3g} GB/s one way ({way.evidence}: {way.source})" for way in used if way.gb_s]
    told += [f"{way.kind}, rate not known ({way.source})" for way in used if not way.gb_s]
    order = fabric.gpus
    moved = f" TP groups lie within islands with CUDA_VISIBLE_DEVICES={','.join(map(str, order))}." if list(order) != sorted(order) else ""
    return "Links: " + "; ".join(sorted(told)) + "." + moved if told else moved.strip()


def why_text(outcomes: list[Outcome], params: Params, fabric: Fabric) -> str:
    """What the two arms of the comparison send for a token and the least time that takes, in Markdown: why one of them should win on these links.

    '' where an arm takes other GPUs than the table's, or the rate of a link is not known.
    """
    by_strategy = {o.strategy: o for o in outcomes}
    pair = [by_strategy.get(strategy_of(arm)) for arm in (params.parallel, params.verdict.baseline)]
    if None in pair or pair[0] is pair[1] or not all(o.prefill_at_most_tok_s for o in pair):
        return ""
    ours, theirs = pair
    least_ms = [1e6 / o.prefill_at_most_tok_s for o in pair]
    rounds = {n: [o.decode_links_s.get(n) for o in pair] for n in sorted({1, params.engine.max_num_seqs})}
    told = "; ".join(
        f"of a decode step of {n} stream{'s' if n > 1 else ''} {1e3 * a:.2g} against {1e3 * b:.2g} ms" for n, (a, b) in rounds.items() if a and b
    )
    ratio = least_ms[1] / least_ms[0]
    who, times = (ours, ratio) if ratio >= 1 else (theirs, 1 / ratio)
    return f"""
**What speaks for {who.strategy.name}?** In one forward pass {_sends(ours)}; {_sends(theirs)}. The slowest links carry
{slowest(ours.strategy, fabric)} and {slowest(theirs.strategy, fabric)}. So links take at least {least_ms[0]:.3g} ms of 1,000 prompt tokens with
{ours.strategy.name} and {least_ms[1]:.3g} ms with {theirs.strategy.name} (estimated): **links allow {who.strategy.name} {times:.3g} times the prefill**;
{told or "of decode no rate is known"}. A layout gains so much only as far as links are what it waits for.
"""


def _sends(o: Outcome) -> str:
    """'PP3 hands each token over 2 times, 24,576 B in all': what a token costs one rank to receive."""
    c = o.traffic.collectives
    parts = [f"{c.all_reduces} all-reduces" if c.all_reduces else "", f"{c.dispatches} dispatches with their combines" if c.dispatches else ""]
    parts += [f"{c.gathers} gathers" if c.gathers else "", f"{o.traffic.hops} stage boundar{'y' if o.traffic.hops == 1 else 'ies'}" if o.traffic.hops else ""]
    return f"{o.strategy.name} takes a token through {', '.join(filter(None, parts)) or 'no link'}, {o.traffic.bytes_per_token:,.0f} B on each rank"


def vetoed(outcomes: list[Outcome]) -> Rows:
    """Reasons against the others, each with the layouts it hits. A layout with several reasons stands under its first one."""
    found: dict[tuple[str, str], list[str]] = {}
    for o, words in folded(outcomes):
        if o.vetoes:
            found.setdefault((o.vetoes[0].reason, o.vetoes[0].source), []).append(words)
    rows = [
        {"layouts": "; ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else ""), "why not": reason, "source": source}
        for (reason, source), words in found.items()
    ]
    return rows or [{"layouts": "none", "why not": "every layout can run"}]


def traffic(outcomes: list[Outcome], params: Params, spec: ModelSpec, fabric: Fabric) -> Rows:
    """What one forward pass sends: pure tensor, pipeline and data parallelism, the params' layout and what each workload chose."""
    chosen = [found.strategy for workload in WORKLOADS if (found := choose(outcomes, workload, params).chosen)]
    own = (params.parallel.tensor_parallel_size, params.parallel.pipeline_parallel_size)
    rows: Rows = []
    for o, words in folded(outcomes):
        s = o.strategy
        pure = s.expert_parallel is (s.data_parallel_size > 1 and bool(o.traffic.collectives.dispatches)) and s.gpus in (
            s.tensor_parallel_size,
            s.pipeline_parallel_size,
            s.data_parallel_size,
        )
        asked = (s.tensor_parallel_size, s.pipeline_parallel_size) == own and s.data_parallel_size == s.prefill_context_parallel_size == 1
        if s.decode_context_parallel_size > 1 or not (pure or asked or s in chosen):
            continue
        split = o.best.layers_per_stage if o.best else partition.default_split(spec.num_hidden_layers, s.pipeline_parallel_size)
        links = stage_floors(s, spec, params, fabric, split, 1)
        hops = hop_floors(s, spec, params, fabric, 1, bool(o.traffic.relay_bytes))
        known = all(each is not None for each in [*links, *hops])
        c = o.traffic.collectives
        rows.append(
            {
                "layout": words + (", cannot run" if o.vetoes else ""),
                "all-reduces": f"{c.all_reduces} x {o.traffic.all_reduce_bytes:,.0f} B" if c.all_reduces else None,
                "dispatch, combine": f"{c.dispatches} x 2 x {o.traffic.dispatch_bytes:,.0f} B" if c.dispatches else None,
                "hops": f"{o.traffic.hops} x {o.traffic.hop_bytes + o.traffic.relay_bytes:,} B" if o.traffic.hops else None,
                "slowest link": slowest(s, fabric) if o.traffic.bytes_per_token else None,
                "B a token": round(o.traffic.bytes_per_token),
                "floor, ms": 1e3 * (sum(links) + sum(hops)) if known else None,
                "prefill, tok/s": o.prefill_at_most_tok_s,
            }
        )
    return rows


def choices(outcomes: list[Outcome], params: Params) -> Rows:
    """The best layout for each workload, ties named as ties."""
    return [_choice(choose(outcomes, workload, params), params) for workload in WORKLOADS]


def _choice(found: Choice, params: Params) -> dict[str, Any]:
    named = found.workload == params.parallel.workload
    ties = list(dict.fromkeys(o.strategy.name for o in found.ties))
    return {
        "workload": found.workload + (" (asked for)" if named else ""),
        "judged by": WORKLOADS[found.workload],
        "choice": found.chosen.strategy.name if found.chosen else "cannot be judged",
        "split": name(found.chosen.best.layers_per_stage) if found.chosen and found.chosen.best else None,
        "is": found.value,
        "a tie with": ", ".join(ties[:4]) + (f" and {len(ties) - 4} more" if len(ties) > 4 else "") if ties else None,
        "next": f"{found.next_best.strategy.name}: {found.next_value / found.value - 1:+.0%}" if found.next_best and found.value and found.next_value else None,
        "not judged": _not_judged(found.unknown, found.workload),
        "needs": needs_text(found.chosen) if found.chosen else None,
    }


def _not_judged(unknown: tuple[Outcome, ...], workload: str) -> str | None:
    """Layouts that can run and of which a figure is missing."""
    if not unknown:
        return None
    names = list(dict.fromkeys(o.strategy.name for o in unknown))
    why = "memory of a card not known" if workload == "long_context" else "rate of a link, or of a GPU's memory, not known"
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {why}"


def recorded(params: Params, spec: ModelSpec, fabric: Fabric, outcomes: list[Outcome]) -> Rows:
    """Recorded rates of the box's layouts beside what links, and links and memory, allow at most. Empty without data/boxes/<box>/layouts.yml.

    Raises BadInput for a file that cannot be read or names a layout that the box does not have.
    """
    file = paths.box_data_dir(params.box.name) / "layouts.yml"
    if not file.is_file():
        return []
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    by_name = {o.strategy.name: o for o in outcomes}
    rows = []
    for row in document["layouts"]:
        if row["layout"] not in by_name:
            raise BadInput(f"{paths.shown(file)}: layout {row['layout']!r} is none of {len(fabric.gpus)} GPUs; one of {', '.join(list(by_name)[:8])}, ...")
        rows.append(_recorded_row(row, params, spec, fabric, by_name[row["layout"]]))
    return rows


def _recorded_row(row: dict[str, Any], params: Params, spec: ModelSpec, fabric: Fabric, outcome: Outcome) -> dict[str, Any]:
    drafting = params.model_copy(update={"engine": params.engine.model_copy(update={"draft_tokens": row["draft_tokens"]})})
    s = outcome.strategy
    split = outcome.best.layers_per_stage if outcome.best else partition.default_split(spec.num_hidden_layers, s.pipeline_parallel_size)
    if "prompt_tokens" in row:
        what, measured = f"prefill of {row['prompt_tokens']:,} tokens", row["prefill_tok_s"]
        links, most, expected = prefill_at_most_tok_s(s, spec, drafting, fabric, split), None, None
    else:
        what, measured = f"decode, {row['streams']} stream{'s' if row['streams'] > 1 else ''}", row["decode_tok_s"]
        found = decode_round(s, spec, drafting, fabric, split, row["streams"])
        links = found.tokens / found.links_s if found and found.links_s else None
        most, expected = (found.at_most_tok_s, found.expected_tok_s) if found else (None, None)
    return {
        "layout": row["layout"],
        "what": what,
        "recorded": float(measured),
        "links allow": links,
        "above floor": f"{links / measured:.3g} x" if links else None,
        "and weights": most,
        "estimate": expected,
        "of it": f"{measured / expected:.0%}" if expected else None,
        "how": ", ".join(filter(None, [f"drafts {row['draft_tokens']}" if row["draft_tokens"] else "no drafts", row.get("note")])),
    }


def outcome_document(o: Outcome) -> dict[str, Any]:
    """One strategy for the command's JSON."""
    s, c = o.strategy, o.traffic.collectives
    return {
        "name": s.name,
        **vars(s),
        "vetoes": [{"reason": v.reason, "source": v.source} for v in o.vetoes],
        "needs": [{"name": need.name, "why": need.why} for need in o.needs],
        "partition": list(o.best.layers_per_stage) if o.best else None,
        "pool_tokens": o.pool_tokens,
        "weights_gib": o.weights_gib,
        "collectives": {"all_reduces": c.all_reduces, "dispatches": c.dispatches, "gathers": c.gathers, "hops": o.traffic.hops},
        "bytes_per_token": round(o.traffic.bytes_per_token),
        "hop_bytes_per_token": o.traffic.hop_bytes + o.traffic.relay_bytes if o.traffic.hops else 0,
        "prefill_at_most_tok_s": o.prefill_at_most_tok_s,
        "decode_expected_tok_s": {str(n): rate for n, rate in o.decode_expected_tok_s.items()},
        "decode_at_most_tok_s": {str(n): rate for n, rate in o.decode_at_most_tok_s.items()},
        "memory_known": o.memory_known,
        "unknown": o.unknown,
    }


def choice_document(found: Choice) -> dict[str, Any]:
    """One choice for the command's JSON."""
    return {
        "workload": found.workload,
        "judged_by": WORKLOADS[found.workload],
        "choice": found.chosen.strategy.name if found.chosen else None,
        "figure": found.value,
        "ties": [o.strategy.name for o in found.ties],
        "next": found.next_best.strategy.name if found.next_best else None,
        "next_figure": found.next_value,
    }

