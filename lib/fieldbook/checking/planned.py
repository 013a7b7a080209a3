"""Recomputations of notebooks 01 to 03: what follows from the params, the model's config.json and the box in the receipt of notebook 01."""

import json
from functools import lru_cache
from typing import Any

from .. import ceilings, gates, inventory, layouts, memory, memory_tables, partition, partition_tables, paths, tables
from ..memory import Pool
from ..schema import Baseline, Parallel
from ..splits import layout_name
from .compare import CannotTell, Found, plain, same
from .run import Run, said

_INVENTORY = "the inventory in the receipt of notebook 01"


def _from_box(read, what: str = _INVENTORY):
    return lambda run, key: Found(read(run.box), what)


def inventory_again(run: Run, key: str) -> Found | str:
    """The inventory of a recorded box, from its captured outputs."""
    if run.asked.box.kind == "live":
        return "read on the box"
    box = inventory.with_offload(inventory.read(run.asked), gates.host_weights_bytes(run.asked))
    return Found(plain(box.model_dump()), f"captured outputs in data/boxes/{run.asked.box.name}")


def memory_read(run: Run, key: str) -> Found | str:
    """Of a recorded box the rate in data/boxes; a live one's was measured there."""
    if run.asked.box.kind == "live":
        return "a bandwidth measured on the box"
    rate = ceilings.memory_read_bytes_s(run.asked, run.box)
    return Found(rate and rate / 1e9, f"data/boxes/{run.asked.box.name}/ceilings.json", decimals=1)


def peak_tflops(run: Run, key: str) -> Found:
    """ceilings.peak_flops of the processor in the inventory."""
    flops = ceilings.peak_flops(run.box)
    return Found(flops and flops / 1e12, f"ceilings.peak_flops of {_INVENTORY}", decimals=3)


def link(run: Run, key: str) -> Found:
    """A link's median with its spread, from the measurements in the inventory."""
    figure = tables.link_figures(run.box.measured).get(key)
    if figure is None:
        raise CannotTell("the inventory in its receipt has no such measurement")
    return Found(figure.value, f"the measurements in {_INVENTORY}", source=figure.source, label=figure.label)


def ceiling(run: Run, key: str) -> Found:
    """A metric's ceiling: from the cards' data sheets, or from the processor and the memory read rate beside it."""
    metric, params = key.rpartition("measured_")[2], run.asked
    reads = run.receipt(1).figures.get("memory_read_gb_s")
    rel, rate = 1e-9, reads.value * 1e9 if reads else None
    if rate and metric.startswith("decode") and params.engine.device == "cpu":
        exact = memory_rate_of_recorded(run)
        # A live box's rate is kept with one decimal.
        rate, rel = (exact, rel) if exact else (rate, 0.05e9 / rate)
    limits = ceilings.by_metric(params, run.spec, rate, ceilings.peak_flops(run.box), run.box)
    return Found(limits.get(metric), "ceilings.by_metric of the inventory and memory_read_gb_s", rel=rel)


def memory_rate_of_recorded(run: Run) -> float | None:
    """The unrounded rate of a recorded box, where this checkout has it."""
    file = paths.box_data_dir(run.asked.box.name) / "ceilings.json"
    return json.loads(file.read_text())["memory_read_bytes_s"] if run.asked.box.kind == "recorded" and file.is_file() else None


def _default(run: Run) -> tuple[tuple[int, ...], Pool]:
    split = partition.default_split(run.spec.num_hidden_layers, run.asked.parallel.pipeline_parallel_size)
    return split, memory.pool(run.asked, run.spec, split, gpus=run.gpus(2))


def _baseline(run: Run) -> tuple[tuple[int, ...], Pool | None]:
    """(split, ledger) of the other arm; no ledger where nothing tells the memory of its cards."""
    base = run.asked.verdict.baseline
    split = partition.resolve_split(base, run.spec)
    pool, why_none, unknown = gates.pool_of(run.asked, base, run.spec, split, run.gpus(2))
    if pool is None and not unknown:
        raise CannotTell(why_none)
    return split, pool


def on_cards(number: int, recompute):
    """A recomputation that rests on the cards' memory, and so perhaps on the log of an earlier run of the box.

    Where the receipt of that station does not keep what the earlier run told, another value than the receipt's says nothing.
    """

    def wrapped(run: Run, key: str) -> Found:
        found = recompute(run, key)
        if run.terms_untold(number) and not same(said(run.receipt(number), key), plain(found.value), found.decimals, found.rel):
            raise CannotTell("it may rest on the log of an earlier run of the box, whose terms its receipt does not keep")
        return found

    return wrapped


def checkpoint(run: Run, key: str) -> Found:
    """memory.checkpoint_bytes."""
    return Found(memory.checkpoint_bytes(run.spec, run.asked.engine.dtype), "memory.checkpoint_bytes of the model's config.json")


def default_pool(run: Run, key: str) -> Found:
    """The pool at vLLM's own split."""
    return Found(_default(run)[1].pool_tokens, "memory.pool of params and cards")


def baseline_pool(run: Run, key: str) -> Found:
    """The pool of the arm compared against."""
    pool = _baseline(run)[1]
    return Found(pool.pool_tokens if pool else None, "memory.pool of params and cards")


def ranks(run: Run, key: str) -> Found:
    """The ledger of every rank."""
    return Found(memory_tables.ranks(_default(run)[1]), "memory.pool of params and cards")


def memory_verdict(run: Run, key: str) -> Found:
    """The line that notebook 02 ends with."""
    params = run.asked
    (split, pool), (base_split, base_pool), base = _default(run), _baseline(run), params.verdict.baseline
    line = f"predicted KV pool {pool.pool_tokens:,} tokens at {layout_name(params.parallel, split)}, rank {pool.binding_rank} binds"
    line = f"{line}; {memory_tables.beside(base_pool, layout_name(base, base_split), params)}"
    return Found(line, "memory.pool of params and cards")


@lru_cache(maxsize=1)
def study(run: Run) -> layouts.Study:
    """What notebook 03 studied. Raises CannotTell where no memory of the cards is known."""
    reads = run.receipt(1).figures.get("memory_read_gb_s")
    rate = reads.value * 1e9 if reads is not None and run.asked.engine.device == "cpu" else None
    run.spec  # noqa: B018 (raises where the model is not known here)
    found = layouts.study(run.asked, run.box, gpus=run.gpus(3), memory_read_bytes_s=rate)
    if found.plan is None:
        raise CannotTell(found.why_not)
    return found


def _studied(read, what: str):
    return on_cards(3, lambda run, key: Found(read(study(run)), what))


def partition_verdict(run: Run, key: str) -> Found:
    """The line that notebook 03 ends with."""
    found, ledger = study(run), run.receipt(2)
    plan, chosen = found.plan, found.chosen
    gain = chosen.pool_tokens / ledger.figures["pool_tokens_predicted"].value - 1
    versus = "vLLM's own split" if chosen.is_default else f"{gain:+.1%} pool against vLLM's own split"
    line = f"{partition_tables.picked(chosen.layers_per_stage, plan.looked_at)}: {chosen.pool_tokens:,} tokens, {versus}"
    line += f"; best is {partition_tables.name(plan.best.layers_per_stage)}" if chosen != plan.best else ""
    return Found(f"Must not be served: {found.refused}. {line}" if found.refused else line, "layouts.study of params and inventory")


def both_layouts(run: Run) -> dict[str, tuple[Parallel | Baseline, tuple[int, ...]]]:
    """{arm: (its sizes, layers of each stage)}."""
    base = run.asked.verdict.baseline
    return {"candidate": (run.asked.parallel, run.layers), "baseline": (base, partition.resolve_split(base, run.spec, run.layers))}


def predicted_pools(run: Run) -> dict[str, int]:
    """Tokens of both arms' pools, as notebook 07 predicts them."""
    if run.terms_untold(7):
        raise CannotTell("they may rest on the log of an earlier run of the box, whose terms its receipt does not keep")
    found = {}
    for arm, (layout, split) in both_layouts(run).items():
        pool, why_none, _ = gates.pool_of(run.asked, layout, run.spec, split, run.gpus(7))
        if pool is None:
            raise CannotTell(why_none)
        found[arm] = pool.pool_tokens
    return found


_SPLIT = _studied(lambda found: list(found.chosen.layers_per_stage), "partition.choose of params and cards")

RECOMPUTED: dict[str, dict[str, Any]] = {
    "01_hardware_inventory": {
        "logical_cpus": _from_box(lambda box: box.host.logical_cpus),
        "memory_total_bytes": _from_box(lambda box: box.host.memory_total_bytes),
        "gpu_count": _from_box(lambda box: len(box.gpus)),
        "memory_read_gb_s": memory_read,
        "peak_tflops": peak_tflops,
        "link_*": link,
        "data.ceilings_tok_s.*": ceiling,
        "data.inventory": inventory_again,
        "receipt.verdict": _from_box(tables.box_line),
    },
    "02_memory_accounting": {
        "checkpoint_bytes": checkpoint,
        "checkpoint_residual_bytes": "the checkpoint's headers are not in the run folder",
        "pool_tokens_predicted": on_cards(2, default_pool),
        "baseline_pool_tokens_predicted": on_cards(2, baseline_pool),
        "data.ranks": on_cards(2, ranks),
        "receipt.verdict": on_cards(2, memory_verdict),
    },
    "03_partition_selection": {
        "splits": _studied(lambda found: found.plan.looked_at, "C(layers - 1, stages - 1)"),
        "splits_that_fit": _studied(lambda found: found.plan.allowed, "partition.plan of params and cards"),
        "layers_per_stage": _SPLIT,
        "pool_tokens_predicted": _studied(lambda found: found.chosen.pool_tokens, "partition.stage_table of params and cards"),
        "straggler_layers": _studied(lambda found: found.chosen.straggler_layers, "partition.stage_loads of the model's config.json"),
        "data.layers_per_stage": _SPLIT,
        "receipt.verdict": on_cards(3, partition_verdict),
    },
}
