"""Gates before a launch: reasons why a server would fail or answer wrong, found without starting it."""

from typing import Any

from . import memory, patches
from .schema import Params

# What a rank's process holds besides weights and KV cache: torch, vLLM and their libraries (0.9 GiB seen for 0.30 on CPU).
RANK_OVERHEAD_BYTES = 2**30


def weights_bytes(params: Params, layers_per_stage: tuple[int, ...]) -> int:
    """Bytes of weights of all ranks together, on disk or in host memory."""
    spec, tp = memory.model_spec(params.model.name), params.parallel.tensor_parallel_size
    return tp * sum(stage.bytes for stage in memory.rank_weights_bytes(spec, params, layers_per_stage, tp))


def host_weights_bytes(params: Params) -> int:
    """Weights that will lie in host memory: all of them on a CPU; on GPUs what --cpu-offload-gb of server.extra_args says, per rank and in GiB (vLLM)."""
    if params.engine.device == "cpu":
        return memory.checkpoint_bytes(memory.model_spec(params.model.name), params.engine.dtype)
    words = [part for word in params.server.extra_args for part in word.split("=", 1)]
    ranks = params.parallel.tensor_parallel_size * params.parallel.pipeline_parallel_size
    asked = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--cpu-offload-gb", "--cpu_offload_gb")]
    return round(float(asked[-1]) * memory.GIB) * ranks if asked and asked[-1].replace(".", "", 1).isdigit() else 0


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
        total == spec.num_hidden_layers and min(layers_per_stage) > 0,
        f"{'+'.join(map(str, layers_per_stage))} = {total} layers",
        f"{list(layers_per_stage)} has {total} of {spec.num_hidden_layers} layers",
    )
    gate("known defects", not patches.unmended(defects), "none open that this box meets", patches.why_unmended(defects))
    gate(
        "device",
        engine.device == "cpu" or bool(inventory["gpus"]),
        f"{engine.device} is there",
        "engine.device is cuda, but NVML shows no GPU; set cpu, or install the driver",
    )
    # A split of another number of layers has no weights to count; its own gate refuses it.
    if engine.device == "cpu" and total == spec.num_hidden_layers and min(layers_per_stage) > 0:
        tp = params.parallel.tensor_parallel_size
        needed = weights_bytes(params, layers_per_stage) + tp * len(layers_per_stage) * (engine.kv_cache_gib_per_rank * memory.GIB + RANK_OVERHEAD_BYTES)
        told = [inventory["host"][name] for name in ("memory_available_bytes", "memory_total_bytes")]
        have = next((value for value in told if value is not None), None)
        text = f"{needed / memory.GIB:.1f} GiB for weights, KV space and ranks"
        if have is None:
            # Nothing is refused for what nobody told.
            gate("host memory", True, f"{text}; not checked: the outputs do not tell the host's memory", "")
        else:
            gate("host memory", needed <= have, text + " fits", f"{text}, {have / memory.GIB:.1f} GiB available; lower engine.kv_cache_gib_per_rank")
    return rows
