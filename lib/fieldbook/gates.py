"""Gates before a launch: reasons why a server would fail or answer wrong, found without starting it."""

from typing import Any

from . import memory, patches
from .schema import Params

# What a rank's process holds besides weights and KV cache: torch, vLLM and their libraries (0.9 GiB seen for 0.30 on CPU).
RANK_OVERHEAD_BYTES = 2**30


def check(params: Params, layers_per_stage: tuple[int, ...], inventory: dict[str, Any], defects: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Reasons for which this launch would fail or answer wrong: rows of gate, result (pass, refuse) and why.

    inventory and defects are what the receipts of notebooks 01 and 04 hold.
    """
    spec, engine = memory.model_spec(params.model.name), params.engine
    rows = []

    def gate(name: str, ok: bool, good: str, bad: str) -> None:
        rows.append({"gate": name, "result": "pass" if ok else "refuse", "why": good if ok else bad})

    total = sum(layers_per_stage)
    gate(
        "layer split",
        total == spec.num_hidden_layers,
        f"{'+'.join(map(str, layers_per_stage))} = {total} layers",
        f"{list(layers_per_stage)} has {total} of {spec.num_hidden_layers} layers",
    )
    unmended = [d["id"] for d in defects if d["met_by_this_box"] and d["state"] not in patches.MENDED]
    gate("known defects", not unmended, "none open that this box meets", f"{', '.join(unmended)} not mended; set engine.patches to needed")
    gate(
        "device",
        engine.device == "cpu" or bool(inventory["gpus"]),
        f"{engine.device} is there",
        "engine.device is cuda, but NVML shows no GPU; set cpu, or install the driver",
    )
    if engine.device == "cpu":
        dtype_bytes, last = memory.DTYPE_BYTES[engine.dtype], len(layers_per_stage) - 1
        tp = params.parallel.tensor_parallel_size
        weights = sum(memory.rank_weights_bytes(spec, n, r == 0, r == last, dtype_bytes, tp) for r, n in enumerate(layers_per_stage))
        needed = tp * weights + tp * len(layers_per_stage) * (engine.kv_cache_gib_per_rank * memory.GIB + RANK_OVERHEAD_BYTES)
        have = inventory["memory_available_bytes"] or inventory["memory_total_bytes"]
        text = f"{needed / memory.GIB:.1f} GiB for weights, KV space and ranks"
        gate("host memory", needed <= have, text + " fits", f"{text}, {have / memory.GIB:.1f} GiB available; lower engine.kv_cache_gib_per_rank")
    return rows
