"""Gates before a launch: reasons why a server would fail or answer wrong, found without starting it.

Each gate is a function that looks at a `Launch` and says pass, warn or refuse, with reason, evidence and a way out; None where it does not concern the
launch. `server.allow` lets one through by the escape that its refusal names: it then warns, at the start, at the end and in the report.
"""

from collections.abc import Callable
from typing import Any, get_args

from ..schema import Escape
from . import engine, layout, machine, room
from .looking import look, pool_of
from .room import host_weights_bytes
from .ruling import Facts, Launch, Ruling

__all__ = ["ESCAPES", "GATES", "Facts", "Launch", "Ruling", "check", "escaped", "host_weights_bytes", "look", "pool_of", "refused", "refusing"]

Gate = Callable[[Launch], Ruling | None]
GATES: dict[str, Gate] = {
    "partition": layout.partition_form,
    "parallel sizes": layout.parallel_sizes,
    "devices": layout.devices,
    "index sharing": layout.index_sharing,
    "boundary sums": layout.boundary_sums,
    "unverified stages": layout.unverified_stages,
    "n-gram layers": layout.ngram_layers,
    "layer kinds": layout.both_layer_kinds,
    "shared caches": layout.shared_caches,
    "visual features": layout.visual_features,
    "drafting": engine.drafting,
    "model runner": engine.model_runner,
    "state dtype": engine.state_dtype,
    "block size": engine.block_size,
    "context length": engine.context_length,
    "step size": engine.step_size,
    "kernels": engine.kernels,
    "release": engine.release,
    "known defects": engine.known_defects,
    "memory": room.fit,
    "device memory": room.device_memory,
    "host memory": room.host_memory,
    "disk": room.disk,
    "shared memory": room.shared_memory,
    "port": machine.port,
    "exposure": machine.exposure,
    "foreign processes": machine.foreign_processes,
    "environment": machine.environment,
    "checkpoint": machine.checkpoint,
    "served model": machine.served_model,
}
ESCAPES: tuple[str, ...] = get_args(Escape)


def check(launch: Launch) -> list[dict[str, Any]]:
    """Every gate that concerns this launch: rows of gate, result, reason, evidence, ways_out, escape and escaped."""
    wanted, rows = launch.params.server.allow, []
    for name, gate in GATES.items():
        found = gate(launch)
        if found is None:
            continue
        through = found.result == "refuse" and bool(found.escape) and found.escape in wanted
        rows.append(
            {
                "gate": name,
                "result": "warn" if through else found.result,
                "reason": f"let through by server.allow [{found.escape}] although: {found.reason}" if through else found.reason,
                "evidence": found.evidence,
                "ways_out": list(found.ways_out),
                "escape": found.escape,
                "escaped": through,
            }
        )
    idle = [name for name in wanted if name not in {row["escape"] for row in rows if row["escaped"]}]
    told = {"evidence": "params", "ways_out": ["take it out of server.allow"], "escape": "", "escaped": False}
    return rows + [{"gate": "escapes", "result": "warn", "reason": f"server.allow names {name}, and nothing refuses for that", **told} for name in idle]


def refused(rows: list[dict[str, Any]]) -> str:
    """All refusals in one line with their ways out, '' where the launch may go on."""
    return "; ".join(f"{row['gate']}: {row['reason']}{_ways(row)}" for row in rows if row["result"] == "refuse")


def refusing(rows: list[dict[str, Any]]) -> list[str]:
    """Names of the gates that refuse."""
    return [row["gate"] for row in rows if row["result"] == "refuse"]


def _ways(row: dict[str, Any]) -> str:
    ways = [*row["ways_out"], *([f"server.allow [{row['escape']}]"] if row["escape"] and not any("server.allow" in way for way in row["ways_out"]) else [])]
    return f" (ways out: {' | '.join(ways)})" if ways else ""


def escaped(rows: list[dict[str, Any]]) -> list[str]:
    """Gates that were let through, as the end of a run and its report say once more."""
    return [f"{row['gate']}: {row['reason']}" for row in rows if row["escaped"]]
