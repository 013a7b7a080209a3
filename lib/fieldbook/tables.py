"""Rows for the notebooks' tables: one function per table, a list of dictionaries each, nothing computed that is not in a station's module."""

import collections
import re
from typing import TYPE_CHECKING, Any

from .inventory import Finding, Gpu, Inventory, Measurement, cpu_ranges
from .inventory.links import nearness
from .inventory.values import some
from .memory import Pool
from .params import Baseline, Parallel
from .receipts import Figure
from .show import gib
from .splits import layout_name

if TYPE_CHECKING:
    # Its module loads libcst, which takes longer than a whole inventory.
    from .arms import Boot

Rows = list[dict[str, Any]]


def pairs(values: dict[str, Any], left: str = "quantity", right: str = "value") -> Rows:
    """A mapping as two columns."""
    return [{left: key, right: value} for key, value in values.items()]


def host(box: Inventory) -> Rows:
    """System, processor, cores, instruction sets, memory, shared memory, IOMMU."""
    h = box.host
    rows = pairs(
        {
            "system": h.system,
            "processor": h.cpu_model,
            "sockets": h.sockets,
            "cores": h.cores,
            "logical CPUs": h.logical_cpus,
            "instruction sets": ", ".join(h.isa) or None,
            "memory, GiB": gib(h.memory_total_bytes) if h.memory_total_bytes else None,
            "shared memory (/dev/shm), GiB": gib(h.shm_total_bytes) if h.shm_total_bytes is not None else None,
            "IOMMU groups": h.iommu_groups,
            "kernel options": ", ".join(h.kernel_options) or None,
            "GPU driver": box.driver,
            "CUDA of the driver": box.cuda,
        }
    )
    return rows if any(row["value"] is not None for row in rows) else [{"host": "nothing that is known of this box tells of it"}]


def numa(box: Inventory) -> Rows:
    """Memory and GPUs of each node, and what the host has beside its nodes."""
    nodes = box.numa.values()
    rows: Rows = [
        {
            "node": n.node,
            "CPUs": None if n.cpus is None else cpu_ranges(n.cpus) or "none",
            "GiB": gib(n.memory_total_bytes) if n.memory_total_bytes is not None else None,
            "GPUs": n.gpus or None,
        }
        for n in nodes
    ]
    total, known = box.host.memory_total_bytes, sum(n.memory_total_bytes or 0 for n in nodes)
    if total and known and total - known > 0.02 * total:
        rows.append({"node": "in no node", "CPUs": None, "GiB": gib(total - known), "GPUs": None})
    return [*rows, {"node": "whole host", "CPUs": box.host.logical_cpus, "GiB": gib(total) if total else None, "GPUs": len(box.gpus)}]


# What the table of the GPUs shows: title, and how it is found in a Gpu.
_GPU_ROWS = (
    ("name", "name"),
    ("architecture", "architecture"),
    ("compute capability", "compute_capability"),
    ("memory, MiB", "memory_total_bytes"),
    ("usable by CUDA, MiB", "memory_usable_bytes"),
    ("in use, MiB", "memory_used_bytes"),
    ("PCIe generation now", "pcie_generation"),
    ("PCIe generation at most", "pcie_generation_max"),
    ("PCIe lanes now", "pcie_width_lanes"),
    ("PCIe lanes at most", "pcie_width_max_lanes"),
    ("NUMA node", "numa_node"),
    ("CPU affinity", "cpu_affinity"),
    ("performance state", "pstate"),
    ("power limit, W", "power_limit_w"),
    ("SM clock now, MHz", "clock_sm_mhz"),
    ("SM clock at most, MHz", "clock_sm_max_mhz"),
    ("memory clock at most, MHz", "clock_memory_max_mhz"),
    ("ECC", "ecc"),
    ("persistence mode", "persistence"),
    ("MIG", "mig"),
    ("PCI address", "bus_id"),
)


def gpus(box: Inventory) -> Rows:
    """One column per GPU. Without GPUs, the reason for that. Why a value is unknown stands in `unknowns` where it is long."""
    if not box.gpus:
        return [{"GPUs": "none", "why": "; ".join(box.notes) or "no output tells of one"}]
    rows = [{"": title, **{f"GPU {g.index}": _gpu_cell(g, field) for g in box.gpus}} for title, field in _GPU_ROWS]
    rows.append({"": "NVLinks", **{f"GPU {g.index}": _nvlinks(g) for g in box.gpus}})
    # What no output tells of any GPU stands in the caption.
    rows = [row for row in rows if any(value is not None for key, value in row.items() if key)]
    if any(g.mig_devices for g in box.gpus):
        sizes = {f"GPU {g.index}": [str((d.memory_total_bytes or 0) // 2**20) for d in g.mig_devices] for g in box.gpus}
        rows.append({"": "MIG instances, MiB", **sizes})
    if any(g.processes is not None for g in box.gpus):
        rows.append({"": "processes", **{f"GPU {g.index}": None if g.processes is None else len(g.processes) for g in box.gpus}})
    return rows


def gpus_caption(box: Inventory) -> str:
    """What the table of the GPUs is of, and what of them no output tells."""
    untold = [title for title, field in _GPU_ROWS if box.gpus and all(_gpu_cell(g, field) is None for g in box.gpus)]
    return f"GPUs; not told of any of them: {'; '.join(untold)}" if untold else "GPUs"


def _nvlinks(gpu: Gpu) -> str | None:
    if gpu.nvlink_gb_s is None:
        return _gpu_cell(gpu, "nvlink_gb_s")
    up = [rate for rate in gpu.nvlink_gb_s if rate]
    down = f", {len(gpu.nvlink_gb_s) - len(up)} down" if len(up) < len(gpu.nvlink_gb_s) else ""
    return (f"{len(up)} x {max(up):g} GB/s" if up else "none up") + down


def _gpu_cell(gpu: Gpu, field: str) -> Any:
    value = getattr(gpu, field)
    if value is None:
        why = gpu.unknown.get(field)
        return ("unknown" if len(why) > 12 else f"unknown ({why})") if why else "lost" if gpu.lost else None
    # A column of years or clocks reads better without a thousands' separator.
    return str(value // 2**20) if field.endswith("_bytes") else str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def unknowns(box: Inventory) -> Rows:
    """Values that the outputs name and do not tell, with their own words."""
    found: dict[tuple[str, str], list[str]] = {}
    for gpu in box.gpus:
        for field, why in gpu.unknown.items():
            found.setdefault((field, why), []).append(f"GPU {gpu.index}")
    for link in box.links:
        for field, why in link.unknown.items():
            found.setdefault((field, why), []).append(f"{link.a}-{link.b}")
    return [{"value": field.replace("_", " "), "of": some(who), "why unknown": why} for (field, why), who in found.items()]


def links(box: Inventory) -> Rows:
    """Pairs of one kind, peer access and rate on one row each, near ones first."""
    found: dict[tuple, list[str]] = {}
    for link in sorted(box.links, key=lambda k: (nearness(k.kind or "?"), k.a, k.b)):
        kind = link.kind or ("no NVLink, else unknown" if link.nvlinks == 0 else f"unknown: {link.unknown.get('kind', 'not told')}")
        if link.kind_is_pcie_path:
            kind += " (PCIe path; NVLink unknown)"
        peer = ", ".join(f"{name} {status}" for name, status in link.p2p.items()) or "not told"
        found.setdefault((kind, peer, link.theoretical_gb_s, link.theoretical_source or link.unknown.get("theoretical_gb_s")), []).append(f"{link.a}-{link.b}")
    return [
        {"pairs": some(pairs_, 16), "link": kind, "peer access": peer, "GB/s per direction, at most": rate, "from": source}
        for (kind, peer, rate, source), pairs_ in found.items()
    ]


def groups(box: Inventory) -> Rows:
    """How links and nodes group the GPUs."""

    def shown(found: list[list[int]] | None) -> str | None:
        return None if found is None else ", ".join("-".join(map(str, members)) for members in found) or "none"

    rows = [
        {"grouped by": "NVLink (islands)", "groups of GPUs": shown(box.islands) or "unknown"},
        {"grouped by": "one PCIe switch (PIX, PXB)", "groups of GPUs": shown(box.switches) or "unknown"},
        {
            "grouped by": "NUMA node",
            "groups of GPUs": shown([n.gpus for n in box.numa.values() if n.gpus]) if any(g.numa_node is not None for g in box.gpus) else "unknown",
        },
    ]
    for cut in box.cuts:
        one, other = ("-".join(map(str, members)) for members in cut["between"])
        rate = f", at most {cut['best_pair_gb_s']:.1f} GB/s a pair" if cut["best_pair_gb_s"] else ""
        rows.append(
            {
                "grouped by": f"cut between {one} and {other}",
                "groups of GPUs": f"{cut['pairs']} {'pair' if cut['pairs'] == 1 else 'pairs'}: {', '.join(cut['kinds']) or 'kind unknown'}{rate}",
            }
        )
    return rows


def measured_links(found: list[Measurement]) -> Rows:
    """Each measured rate or latency with its ceiling."""
    return [
        {
            "what": f"{m.what} ({f'{m.size_bytes // 2**20} MiB' if m.size_bytes >= 2**20 else f'{m.size_bytes} B'})",
            "where": m.where,
            "min": m.spread.min,
            "median": m.spread.median,
            "max": m.spread.max,
            "unit": m.unit,
            "ceiling": m.ceiling,
            "of it": f"{m.spread.median / m.ceiling:.0%}" if m.ceiling and m.unit == "GB/s" else None,
            "ceiling from": m.ceiling_source,
        }
        for m in found
    ] or [{"measured": "nothing"}]


def link_figures(found: list[Measurement]) -> dict[str, Figure]:
    """A figure per measured rate or latency (the median), for the receipt."""
    figures = {}
    for m in found:
        words = re.sub(r"[^a-z0-9]+", "_", f"{m.what.split(',')[0]} {m.where}".lower()).strip("_")
        source = f"median of {m.spread.samples}, {m.spread.min:.4g} to {m.spread.max:.4g}, {m.size_bytes} bytes each"
        figures[f"link_{words}"] = Figure(value=m.spread.median, unit=m.unit, evidence="measured", source=source, label=f"{m.what}: {m.where}")
    return figures


def box_line(box: Inventory) -> str:
    """The box in one line: GPUs with memory and islands, processor, host memory, findings."""
    sizes = collections.Counter((g.name or "GPU", g.memory_total_bytes or g.memory_usable_bytes) for g in box.gpus)
    cards = [f"{count} x {name} ({gib(size):.1f} GiB)" if size else f"{count} x {name} (memory unknown)" for (name, size), count in sizes.items()]
    joined = ["-".join(map(str, island)) for island in box.islands or [] if len(island) > 1]
    parts = [", ".join(cards) or "no GPU", f"NVLink {', '.join(joined)}" if joined else None]
    parts += [f"{box.host.logical_cpus} CPUs ({box.host.cpu_model or 'unknown'})" if box.host.logical_cpus else None]
    parts += [f"{gib(box.host.memory_total_bytes):.1f} GiB" if box.host.memory_total_bytes else None]
    grave = collections.Counter(f.severity for f in box.findings if f.severity != "note")
    parts += [f"{count} {severity} finding{'s' if count > 1 else ''}" for severity, count in grave.items()]
    return ", ".join(part for part in parts if part)


def findings(found: list[Finding]) -> Rows:
    """Findings, most serious first; one line says so when there is none."""
    rows = [{"severity": f.severity, "finding": f.what, "evidence": f.evidence, "what to do": f.advice} for f in found]
    return rows or [{"severity": "none", "finding": "nothing wrong was found in what could be read", "evidence": None, "what to do": None}]


def gaps(box: Inventory) -> Rows:
    """What the outputs leave open: cut pastes, contradictions, notes, and the values they name without telling."""
    silent = [f"{row['value']} of {row['of']}: {row['why unknown']}" for row in unknowns(box)]
    return [{"what is missing or odd": text} for text in [*box.incomplete, *box.notes, *silent]] or [{"what is missing or odd": "nothing"}]


def layouts(arms: list[tuple[Parallel | Baseline, tuple[int, ...], Pool | None]]) -> Rows:
    """Pool of each layout, for the chart; without those whose pool is not known."""
    return [{"layout": layout_name(arm, split), "tokens": pool.pool_tokens} for arm, split, pool in arms if pool]


def defects(rows: Rows) -> Rows:
    """State of each known defect, with its number in the field reports where it has one."""
    return [
        {
            "defect": r["id"],
            "report": ", ".join(r["reports"]) or None,
            "state": r["state"],
            "what it does to you": r["effect"],
            "where": f"{r['file']}:{r['line']}" if r["line"] else r["file"],
            "met": r["met_by_this_box"],
        }
        for r in rows
    ]


def defects_narrow(rows: Rows, with_box: bool) -> Rows:
    """The same for a terminal: the place by file, line and function; what a defect does stands below the table."""
    places = {r["id"]: r["symbol"] for r in rows}
    left_out = ("what it does to you", "met")
    told = [({key: value for key, value in row.items() if key not in left_out}, row["met"]) for row in defects(rows)]
    return [{**row, "function": places[row["defect"]], **({"met by this box": met} if with_box else {})} for row, met in told]


def defects_met(rows: Rows) -> Rows:
    """What each of these defects is, in which function, what there is against it, and until when."""
    return [
        {
            "defect": r["id"],
            "what it is": r["title"],
            "function": r["symbol"],
            "upstream": ", ".join(r["upstream"]) or None,
            "against it": "nothing needed" if r["state"] in ("fixed", "does not apply") else "a patch" if r["mendable"] else "a release in which it is fixed",
            "until": r["drop_when"],
        }
        for r in rows
    ]


def live_code(rows: Rows) -> Rows:
    """Which file each rank imported a patched function from; hashes cut for reading, whole in the receipt with stage and function."""
    return [
        {
            "patch": r["id"],
            "rank": r["rank"],
            "file": r["file"],
            "sha256": (r["sha256"] or "")[:12] or None,
            "runner": ", ".join(name.rpartition(".")[2] for name in r["runners"]) or None,
            "runs": r["wrong"] or "the mend",
        }
        for r in rows
    ]


def gates(rows: Rows) -> Rows:
    """Each gate with its result and reason; a way out where it does not pass. Hashes are cut for reading, whole in the receipt."""
    return [
        {
            "gate": r["gate"],
            "result": r["result"],
            "reason": r["reason"],
            "evidence": re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1...", r["evidence"]) or None,
            "ways out": None if r["result"] == "pass" else "; ".join(r["ways_out"]) or None,
        }
        for r in rows
    ]


def startup(booted: "Boot") -> Rows:
    """Start-up phases; with times for a live server."""
    return [{"phase": phase, "s after the launch": seconds} for phase, seconds in booted.phases] or [{"phase": phase} for phase in booted.log.phases]


def server_facts(name: str, booted: "Boot") -> Rows:
    """Layout, version, runner and load times."""
    loads = ", ".join(f"rank {rank}: {seconds}" for rank, seconds in sorted(booted.log.weights_load_s.items()))
    return pairs({"layout": name, "vLLM": booted.log.vllm_version, "model runner": booted.log.runner, "weights loaded, s": loads or None}, "", "boot log")


def ceilings(limits: dict[str, float], reachable: dict[str, float]) -> Rows:
    """Ceiling of each metric, and what it would be at the measured rates, where there are any; where there is no ceiling, what that means."""
    rows = pairs(limits, "metric", "ceiling, tok/s")
    if reachable:
        rows = [row | {"at the measured rates, tok/s": reachable.get(row["metric"])} for row in rows]
    return rows or [{"metric": "none", "why": "the rates of this box's processor or GPUs are not known"}]
