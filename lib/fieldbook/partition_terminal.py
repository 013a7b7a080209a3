"""What `fieldbook partition` prints for people: notebook 03's tables as plain text."""

from typing import Any

from . import partition_tables, strategy_tables
from .layouts import Study
from .terminal import text_table


def partition_text(found: Study, recorded: bool = True) -> str:
    """The best split and what it is chosen against, strategies, and the choice by workload: the rows that notebook 03 shows.

    recorded: with the rates recorded of the params' own box, which say nothing of another one.
    """
    p, spec, outcomes = found.params, found.spec, list(found.outcomes)
    parts = [f"{spec.name} ({spec.architecture})"]

    def section(title: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            parts.append(f"\n{title}\n{text_table(rows, '  ')}")

    if found.plan and found.chosen:
        c = found.chosen
        held = f"{found.plan.looked_at:,} splits of {spec.num_hidden_layers} layers in {found.plan.table.stages} stages, {found.plan.allowed:,} allowed"
        parts.append(f"{held} ({found.index_sharing})" if found.treatments else held)
        section("Rules, each by itself", partition_tables.rules(found.plan))
        loads = "Splits: what binds, load in layer-equivalents (layers and draft steps), what the heaviest stage reads for one token"
        section(loads, partition_tables.splits(found.plan, c, p))
        front = [partition_tables.split_row(one, found.plan, p) for one in found.plan.front]
        section("Splits that no other beats in both pool and heaviest stage", partition_tables.without_empty(front, "must not be used"))
        section("Layers that share top-k indices: three ways", partition_tables.treatments(list(found.treatments), p))
        if found.treatments:
            parts.append("\n" + partition_tables.treatments_text(p, spec, c, list(found.treatments)).replace("\n\n", "\n"))
    else:
        parts.append(f"splits cannot be compared: {found.why_not}")
    able = "Layouts that can run (estimated from the cards alike; tok/s are upper estimates, every drafted token accepted)"
    section(able, strategy_tables.feasible(outcomes, p))
    section("What they need", strategy_tables.needs(outcomes))
    section("Layouts that cannot", strategy_tables.vetoed(outcomes))
    section("Traffic of one forward pass: collectives x bytes of each for one token, the least time, and the prefill that links alone allow", _traffic(found))
    parts.append("  " + strategy_tables.links_text(outcomes, found.fabric))
    if recorded:
        title = "Recorded rates (tok/s) beside what links, and links and weights, allow at most, and the estimate"
        section(title, strategy_tables.recorded(p, spec, found.fabric, outcomes))
    section("Choice by workload (within a tenth, of pools 3%, is a tie)", strategy_tables.choices(outcomes, p))
    if any(o.strategy.expert_parallel or o.strategy.data_parallel_size > 1 for o in outcomes):
        parts.append("  each size is a key of `parallel`: data_parallel_size, expert_parallel, prefill_context_parallel_size and so on")
    if found.chosen:
        c = found.chosen
        parts.append(
            f"\nVLLM_PP_LAYER_PARTITION={','.join(map(str, c.layers_per_stage))}: KV pool {c.pool_tokens:,} tokens, rank {c.binding_rank} binds "
            f"with {c.binding_gib:.2f} GiB, heaviest stage {c.straggler_layers} layer-equivalents"
        )
    if found.refused:
        parts.append(f"must not be served: {found.refused}")
    return "\n".join(parts)


def _traffic(found: Study) -> list[dict[str, Any]]:
    return strategy_tables.traffic(list(found.outcomes), found.params, found.spec, found.fabric)
