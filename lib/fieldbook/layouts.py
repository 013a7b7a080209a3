"""Everything the partition station finds out about one box and model, for the notebook and the command alike."""

from dataclasses import dataclass
from typing import Any

from . import kv, memory, partition, partition_tables, patches, strategy, strategy_tables
from .budget import Gpus
from .errors import BadInput
from .inventory import Inventory
from .params import Params
from .partition import Candidate, Plan, Treatment
from .spec import ModelSpec
from .station import Station
from .strategy import Fabric, Outcome, Strategy, strategy_of


@dataclass(frozen=True)
class Study:
    """plan and chosen are None where no memory of the cards is known (why_not says so). refused: why the chosen split must not be served, '' where it may."""

    params: Params
    spec: ModelSpec
    fabric: Fabric
    plan: Plan | None
    chosen: Candidate | None
    treatments: tuple[Treatment, ...]
    outcomes: tuple[Outcome, ...]
    why_not: str = ""
    refused: str = ""

    @property
    def index_sharing(self) -> str:
        """The way that plan and chosen follow."""
        return self.plan.table.index_sharing if self.plan else self.params.parallel.index_sharing


def sizes_of(box: Inventory) -> tuple[int | None, ...]:
    """Memory that CUDA reports of each GPU, in bytes."""
    return tuple(gpu.memory_usable_bytes or gpu.memory_total_bytes for gpu in box.gpus)


def study(
    params: Params,
    box: Inventory,
    *,
    gpus: Gpus | None = None,
    memory_read_bytes_s: float | None = None,
    index_sharing: str | None = None,
    workload: str | None = None,
) -> Study:
    """Split and strategies of a box. gpus: its cards with an earlier run's terms, where there was one; memory_read_bytes_s: of a machine without GPUs;
    index_sharing and workload: instead of the params' own.

    Raises BadInput where no split fits, with what would make one fit, and where the split asked for must not be used.
    """
    spec, own = memory.model_spec(params.model.name), params.parallel
    # The KV space that the params give was seen with their own way of sharing: only what is planned takes another one.
    asked = {"index_sharing": index_sharing or own.index_sharing, "workload": workload or own.workload}
    planned = params.model_copy(update={"parallel": own.model_copy(update=asked)})
    ranks, on_cpu = own.ranks, params.engine.device == "cpu"
    custom = params.engine.custom_all_reduce != "off"
    fabric = strategy.fabric_of(box, ranks, memory_read_bytes_s, on_cpu, params.server.extra_env, custom)
    outcomes = tuple(strategy.strategies(planned, spec, fabric, sizes_of(box)))
    cards = gpus
    by_hand = params.engine.kv_cache_gib_per_rank is not None and not on_cpu
    if cards is None and (by_hand or not memory.is_given(params, own.pipeline_parallel_size, None)):
        cards = Gpus(sizes_of(box))
    flippable = partition.indexer_evidence(params, spec).layers if asked["index_sharing"] == "flip" else None
    try:
        found = partition.plan(partition.stage_table(params, spec, cards, index_sharing=asked["index_sharing"], flippable=flippable))
    except BadInput as error:
        if cards is None or all(cards.total_bytes):
            raise
        _keep_rules(planned, spec)
        return Study(planned, spec, fabric, None, None, (), outcomes, str(error))
    if found.best is None:
        others = list(dict.fromkeys(o.strategy.name for o in outcomes if o.best))
        shown = f"; layouts of all {len(fabric.gpus)} GPUs that hold it: {', '.join(others[:6])}" if others else ""
        raise BadInput(partition.refusal(params, spec, cards, found, lambda *layout: _runs(spec, fabric.capability, *layout)) + shown)
    chosen = _chosen(params, spec, found, index_sharing)
    here = strategy_of(own)
    vetoes = strategy.vetoes_of(here, spec, planned, fabric.capability)
    refused = "; ".join(f"{veto.reason} ({veto.source})" for veto in vetoes) or partition.flip_refused(params, spec, chosen.flips)
    if not refused and not on_cpu and 0 < len(box.gpus) < ranks:
        refused = f"the layout takes {ranks} GPUs, and the box has {len(box.gpus)}"
    refused = refused or _unpatched(planned, here, spec, chosen)
    return Study(planned, spec, fabric, found, chosen, tuple(partition.treatments(params, spec, cards)), outcomes, "", refused)


def _runs(spec: ModelSpec, capability: float | None, layout: memory.Layout, stages: int, params: Params) -> bool:
    """Whether vLLM runs a layout, memory aside."""
    asked = strategy.Strategy(
        layout.tensor_parallel_size,
        stages,
        layout.data_parallel_size,
        layout.prefill_context_parallel_size,
        layout.decode_context_parallel_size,
        layout.expert_parallel,
    )
    return not strategy.vetoes_of(asked, spec, params, capability)


def _keep_rules(params: Params, spec: ModelSpec) -> None:
    """Raise BadInput where the split asked for breaks a rule: that needs no memory to be seen."""
    own = params.parallel
    split = partition.resolve_split(own, spec)
    if isinstance(own.layer_partition, list):
        rules = partition.rules_of(spec, own.pipeline_parallel_size, own.index_sharing)
        wrong = [reason for rule in rules for reason in rule.broken_by(kv.stage_bounds(spec, split))]
        if wrong:
            raise BadInput(f"parallel.layer_partition: {'+'.join(map(str, split))} must not be used: {'; '.join(wrong)}")


def _unpatched(params: Params, here: Strategy, spec: ModelSpec, chosen: Candidate) -> str:
    """Patches that a live server of this layout needs and the catalogue has not, '' without any: it would fail, or answer wrong without an error."""
    relayed = params.parallel.index_sharing == "relay" and any(chosen.cut_indices[1:])
    absent = [need for need in strategy.needs_of(here, spec, params, relayed) if need.patch and need.patch not in patches.CATALOGUE]
    if params.box.kind != "live" or not absent:
        return ""
    return "; ".join(f"it needs the patch {need.patch}, which is not in the catalogue: {need.why}" for need in absent)


def of_station(station: Station) -> Study:
    """The study of a notebook's box: inventory and memory read rate from notebook 01, cards with an earlier run's terms where there was one.

    Raises BadInput as `study` does, and where no memory of the cards is known.
    """
    first = station.earlier(1)
    reads = first.figures.get("memory_read_gb_s")
    rate = reads.value * 1e9 if reads is not None and station.params.engine.device == "cpu" else None
    found = study(station.params, station.box(), gpus=station.gpus(), memory_read_bytes_s=rate)
    if found.plan is None:
        raise BadInput(found.why_not)
    return found


def _chosen(params: Params, spec: ModelSpec, found: Plan, index_sharing: str | None) -> Candidate:
    """The split asked for; where another way of sharing is tried than the params', its best one."""
    if index_sharing and index_sharing != params.parallel.index_sharing:
        return found.best
    return partition.choose(params, spec, found)


def _treatment(one: Treatment) -> dict[str, Any]:
    best = partition_tables.document(one.plan.best)
    return {"mode": one.mode, "best": best, "usable": one.usable, "needs": list(one.needs), "relay_bytes_per_token": one.relay_bytes_per_token}


def document(found: Study, recorded: bool = True) -> dict[str, Any]:
    """The study as the command's JSON; recorded: with the rates recorded of the params' own box."""
    plan = found.plan
    return {
        "model": found.spec.name,
        "index_sharing": found.index_sharing,
        "best": partition_tables.document(plan.best) if plan else None,
        "chosen": partition_tables.document(found.chosen),
        "why_not": found.why_not,
        "refused": found.refused,
        "splits": plan.looked_at if plan else None,
        "splits_allowed": plan.allowed if plan else None,
        "front": [partition_tables.document(c) for c in plan.front] if plan else [],
        "candidates": [partition_tables.document(c) for c in partition_tables.candidates(plan)] if plan else [],
        "treatments": [_treatment(one) for one in found.treatments],
        "strategies": [strategy_tables.outcome_document(o) for o in found.outcomes],
        "choices": [strategy_tables.choice_document(strategy.choose(list(found.outcomes), w, found.params)) for w in strategy.WORKLOADS],
        "recorded": strategy_tables.recorded(found.params, found.spec, found.fabric, list(found.outcomes)) if recorded else [],
    }
