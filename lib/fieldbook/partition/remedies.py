"""What would make a box fit that does not: one change at a time, each tried with the same search, and only those named that work."""

from collections.abc import Callable
from dataclasses import replace

from .. import memory
from ..budget import Gpus
from ..errors import BadInput
from ..memory import Layout
from ..params import Params
from ..spec import ModelSpec
from .plan import Plan, plan, roomiest
from .table import stage_table

# (layout, stages, params) -> whether vLLM runs it, memory aside; strategy.vetoes knows.
Allowed = Callable[[Layout, int, Params], bool]


def _any(layout: Layout, stages: int, params: Params) -> bool:
    return True


def remedies(params: Params, spec: ModelSpec, gpus: Gpus | None, allowed: Allowed = _any) -> list[str]:
    """Changes that make some split fit, in words: fewer tokens, another cache type, no drafting, more of each card, one more card, more or larger ones.

    Only layouts that `allowed` lets pass are named. Empty when nothing helps.
    """
    layout, stages = memory.layout_of(params), params.parallel.pipeline_parallel_size
    engine = params.engine
    tries: list[tuple[str, Callable[[], Plan | None]]] = []

    def with_engine(**changes) -> Params:
        return params.model_copy(update={"engine": engine.model_copy(update=changes)})

    shorter = _longest(params, spec, gpus)
    found = [f"engine.max_model_len {shorter} or less (asked: {engine.max_model_len})"] if shorter else []
    cache = memory.cache_dtype(spec, params)
    narrow = "fp8_ds_mla" if any(layer.attention.kind == "sparse_mla" for layer in spec.layers) else "fp8"
    if engine.device != "cpu" and not cache.startswith(("fp8", "nvfp4")):
        tries.append((f"engine.kv_cache_dtype {narrow}", lambda: _try(with_engine(kv_cache_dtype=narrow), spec, gpus)))
    if engine.draft_tokens:
        tries.append(("engine.draft_tokens 0", lambda: _try(with_engine(draft_tokens=0), spec, gpus)))
    if engine.device != "cpu" and engine.gpu_memory_utilization < 0.95 and not memory.is_given(params, params.parallel.pipeline_parallel_size, gpus):
        tries.append(("engine.gpu_memory_utilization 0.95", lambda: _try(with_engine(gpu_memory_utilization=0.95), spec, gpus)))
    if engine.kv_cache_gib_per_rank is not None:
        tries += [_more_space(params, spec, engine.kv_cache_gib_per_rank)]
    if not allowed(layout, stages, params):
        # Nothing that keeps this layout is a remedy but what lifts the veto itself.
        found, tries = [], [(words, attempt) for words, attempt in tries if "draft_tokens" in words and allowed(layout, stages, with_engine(draft_tokens=0))]
    tries += _more_cards(params, spec, gpus, allowed)
    return found + [words for words, attempt in tries if words and (result := attempt()) is not None and result.best is not None]


def _try(params: Params, spec: ModelSpec, gpus: Gpus | None, **more) -> Plan | None:
    try:
        return plan(stage_table(params, spec, gpus, **more))
    except BadInput:
        return None


def _longest(params: Params, spec: ModelSpec, gpus: Gpus | None) -> int | None:
    """Longest request that some split holds, in tokens, a multiple of 16; None where it is too short for the params' own benchmarks and probes.

    A shorter request takes no more blocks, so what fits is found by halving.
    """
    bench = params.benchmarks
    least = max([*(n + 1 for n in bench.prefill_tokens), bench.decode_prompt_tokens + bench.decode_output_tokens, params.probes.trial_tokens + 1])
    low, high = 0, params.engine.max_model_len // 16
    while low < high:
        middle = (low + high + 1) // 2
        shorter = params.model_copy(update={"engine": params.engine.model_copy(update={"max_model_len": middle * 16})})
        found = _try(shorter, spec, gpus)
        low, high = (middle, high) if found is not None and found.best is not None else (low, middle - 1)
    return low * 16 if low * 16 >= least else None


def _more_space(params: Params, spec: ModelSpec, asked_gib: int) -> tuple[str, Callable[[], Plan | None]]:
    """The least whole GiB per rank that hold one request, where the KV space is set by hand."""

    def with_gib(gib: int) -> Plan | None:
        return _try(params.model_copy(update={"engine": params.engine.model_copy(update={"kv_cache_gib_per_rank": gib})}), spec, None)

    short, enough = asked_gib, asked_gib
    while enough < 1024 and ((found := with_gib(enough)) is None or found.best is None):
        short, enough = enough, enough * 2
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if (found := with_gib(middle)) is not None and found.best is not None else (middle, enough)
    return f"engine.kv_cache_gib_per_rank {enough}", lambda: with_gib(enough)


def _more_cards(params: Params, spec: ModelSpec, gpus: Gpus | None, allowed: Allowed) -> list[tuple[str, Callable[[], Plan | None]]]:
    """The fewest more stages, twice the TP ranks, and the size that equal cards would need, where the cards' memory is known."""
    layout, stages = memory.layout_of(params), params.parallel.pipeline_parallel_size
    if gpus is None or memory.is_given(params, stages, gpus):
        return []
    tp = layout.tensor_parallel_size
    here = gpus.total_bytes[: stages * tp]
    sizes = [size for size in here if size]
    if not sizes:
        return []
    wider = replace(layout, tensor_parallel_size=2 * tp)
    found = [_longer_pipeline(params, spec, gpus.total_bytes, stages, tp, min(sizes), allowed)]
    if allowed(wider, stages, params):
        found.append((f"twice as many cards: tensor_parallel_size {2 * tp}", lambda: _try(params, spec, Gpus(here * 2), layout=wider)))
    return [*found, _larger_cards(params, spec, layout, stages)] if allowed(layout, stages, params) else found


def _longer_pipeline(
    params: Params, spec: ModelSpec, box: tuple[int | None, ...], stages: int, tp: int, size: int, allowed: Allowed
) -> tuple[str, Callable[[], Plan | None]]:
    """As few more stages as make it fit: of cards that the box has besides, then of cards like the smallest one."""

    def with_stages(count: int) -> Plan | None:
        if not allowed(memory.layout_of(params), count, params):
            return None
        return _try(params, spec, Gpus(box + (size,) * max(0, tp * count - len(box))), stages=count)

    longest = min(spec.num_hidden_layers, 4 * stages + 4)
    enough = next((n for n in range(stages + 1, longest + 1) if (found := with_stages(n)) is not None and found.best is not None), None)
    if enough is None:
        return "", lambda: None
    bought = max(0, enough * tp - len(box))
    own = (enough - stages) * tp - bought
    cards = [f"{own} of the box's other cards"] if own else []
    cards += [f"{bought} more card{'s' if bought > 1 else ''} like the smallest ({size / memory.GIB:.1f} GiB)"] if bought else []
    words = f"{' and '.join(cards)}: pipeline_parallel_size {enough}"
    return words, lambda: with_stages(enough)


def _larger_cards(params: Params, spec: ModelSpec, layout: Layout, stages: int) -> tuple[str, Callable[[], Plan | None]]:
    ranks = stages * layout.tensor_parallel_size
    sizes = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)

    def with_gib(gib: int) -> Plan | None:
        return _try(params, spec, Gpus((gib * memory.GIB,) * ranks))

    enough = next((gib for gib in sizes if (found := with_gib(gib)) is not None and found.best is not None), None)
    return (f"cards of {enough} GiB each", lambda: with_gib(enough)) if enough else ("", lambda: None)


def refusal(params: Params, spec: ModelSpec, gpus: Gpus | None, found: Plan, allowed: Allowed = _any) -> str:
    """One line for a box on which no split fits: what is missing at the split that comes nearest, and what would make it fit."""
    nearest = roomiest(found.table)
    changes = remedies(params, spec, gpus, allowed)
    cure = f"what would fit: {'; or '.join(changes)}" if changes else "no single change of tokens, cache type or cards makes it fit; use a smaller model"
    shown = "+".join(map(str, nearest.layers_per_stage))
    stages = found.table.stages
    asked = f"{spec.num_hidden_layers} layers in {stages} stage{'s' if stages > 1 else ''}"
    return f"no split of {asked} fits; nearest is {shown}: {'; '.join(nearest.wrong)}; {cure}"
