"""What `fieldbook partition` prints for people: notebook 03's tables as plain text."""

from typing import Any

from . import partition_tables, strategy_tables
from .layouts import Study
from .terminal import text_table


def partition_text(found: Study) -> str:
    """The best split and what it is chosen against, strategies, and the choice by workload: the rows that notebook 03 shows."""
    p, spec, outcomes = found.params, found.spec, list(found.outcomes)
    parts = [f"{spec.name} ({spec.architecture})"]

    def section(title: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            parts.append(f"\n{title}\n{text_table(rows, '  ')}")

    if found.plan and found.chosen:
        c = found.chosen
        held = f"{found.plan.looked_at:,} splits of {spec.num_hidden_layers} layers in {found.plan.table.stages} stages, {found.plan.allowed:,} allowed"
        parts.append(f"{held} ({found.index_sharing})" if found.treatments else held)
        section("Rules", partition_tables.rules(found.plan))
        section("Splits", partition_tables.splits(found.plan, c))
        front = [partition_tables.split_row(one, found.plan) for one in found.plan.front]
        section("Front of pool against heaviest stage", partition_tables.without_empty(front, "must not be used"))
        section("Layers that share top-k indices: three ways", partition_tables.treatments(list(found.treatments), p))
        if found.treatments:
            parts.append("\n" + partition_tables.treatments_text(p, spec, c, list(found.treatments)).replace("\n\n", "\n"))
    else:
        parts.append(f"splits cannot be compared: {found.why_not}")
    section("Layouts that can run: pool of all replicas; tok/s that links let pass in prefill, and to expect in decode", strategy_tables.feasible(outcomes, p))
    section("What they need", strategy_tables.needs(outcomes))
    section("Layouts that cannot", strategy_tables.vetoed(outcomes))
    section("Traffic of one forward pass", strategy_tables.traffic(outcomes, p, spec, found.fabric))
    section("Recorded rates against the least that the links allow", strategy_tables.recorded(p, spec, found.fabric, outcomes))
    section("Choice by workload", strategy_tables.choices(outcomes, p))
    if found.chosen:
        c = found.chosen
        parts.append(
            f"\nVLLM_PP_LAYER_PARTITION={','.join(map(str, c.layers_per_stage))}: KV pool {c.pool_tokens:,} tokens, rank {c.binding_rank} binds "
            f"with {c.binding_gib:.2f} GiB, heaviest stage {c.straggler_layers} layer-equivalents"
        )
    if found.refused:
        parts.append(f"must not be served: {found.refused}")
    return "\n".join(parts)
