"""What a link can carry at most, and how links group the GPUs. Rates in GB/s: 10**9 bytes per second, one direction."""

import re
from collections.abc import Iterable
from typing import Any

from .model import Gpu, Link, PciePort

# GT/s per lane and share of the bits that are payload: 8b/10b up to generation 2, 128b/130b from 3 on, flits of 242 in 256 bytes in 6.
# Source: PCI Express Base Specification 6.0.
PCIE_GT_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
PCIE_PAYLOAD = {1: 0.8, 2: 0.8, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}
# One NVLink, one direction, by compute capability, as `nvidia-smi nvlink -s` prints it: lanes x signalling rate.
NVLINK_GB_S = {"6.0": 20.0, "7.0": 25.781, "7.5": 25.781, "8.0": 25.0, "8.6": 14.062, "9.0": 26.562, "10.0": 53.125, "10.3": 53.125}
# From near to far.
NEARNESS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


def generation_of(speed_gt_s: float | None) -> int | None:
    """PCIe generation of a lane speed in GT/s; None for a speed that is none."""
    return next((generation for generation, speed in PCIE_GT_S.items() if speed == speed_gt_s), None)


def pcie_gb_s(generation: int | None, lanes: int | None) -> float | None:
    """GB/s of one direction after line coding: 5 GT/s x 0.8 x 4 lanes / 8 = 2.0 for Gen2 x4. Packet headers take another tenth or so of it."""
    if generation not in PCIE_GT_S or not lanes:
        return None
    return PCIE_GT_S[generation] * PCIE_PAYLOAD[generation] * lanes / 8


def gpu_pcie_gb_s(gpu: Gpu) -> tuple[float | None, str]:
    """(GB/s, how it was found) of a GPU's own PCIe link at work: highest generation of GPU and slot, lanes as they are trained now.

    An idle link rests at a low generation and comes back under load, so the present generation counts only where no other is told. Lanes do
    not come back.
    """
    most = gpu.pcie_generation_max or min((g for g in (gpu.pcie_generation_device_max, gpu.pcie_generation_host_max) if g), default=None)
    # Gen1 is where idle links rest: alone, without load, it says nothing of the link at work.
    if not most and gpu.pcie_generation == 1 and not gpu.utilization_percent:
        return None, ""
    generation = most or gpu.pcie_generation
    lanes = gpu.pcie_width_lanes or gpu.pcie_width_max_lanes
    rate = pcie_gb_s(generation, lanes)
    return rate, f"PCIe Gen{generation} x{lanes}" if rate else ""


def port_above(gpu: Gpu, ports: Iterable[PciePort]) -> PciePort | None:
    """The bridge whose secondary bus is the GPU's."""
    return next((p for p in ports if p.is_bridge and gpu.bus_id and p.secondary_bus == gpu.bus_id.rpartition(":")[0]), None)


def with_rates(links: list[Link], gpus: list[Gpu]) -> list[Link]:
    """The same links with theoretical_gb_s where the parts tell it: NVLinks x rate of one, else the slower of the two PCIe links."""
    by_index = {g.index: g for g in gpus}
    return [_with_rate(link, by_index.get(link.a, Gpu()), by_index.get(link.b, Gpu())) for link in links]


def _with_rate(link: Link, a: Gpu, b: Gpu) -> Link:
    if link.theoretical_gb_s is not None or (link.kind is None and link.nvlinks != 0):
        return link
    if link.nvlinks:
        told = [max(rates) for g in (a, b) if (rates := [r for r in g.nvlink_gb_s or [] if r])]
        known = [NVLINK_GB_S[g.compute_capability] for g in (a, b) if g.compute_capability in NVLINK_GB_S]
        # The slower end sets the rate of a link.
        rate = min(told or known, default=None)
        if rate is None:
            return link.model_copy(update={"unknown": {**link.unknown, "theoretical_gb_s": "the rate of one NVLink is not told"}})
        how = "told by the driver" if told else "sm_" + (a.compute_capability or b.compute_capability or "").replace(".", "")
        return link.model_copy(
            update={"theoretical_gb_s": round(link.nvlinks * rate, 3), "theoretical_source": f"{link.nvlinks} NVLinks x {rate:g} GB/s ({how})"}
        )
    ends = [gpu_pcie_gb_s(g) for g in (a, b)]
    if any(rate is None for rate, _ in ends) or link.kind_is_pcie_path:
        why = "topo -mp hides NVLink" if link.kind_is_pcie_path else "PCIe generation or lanes of an end are not told"
        return link.model_copy(update={"unknown": {**link.unknown, "theoretical_gb_s": why}})
    rate, how = min(ends, key=lambda end: end[0])
    return link.model_copy(update={"theoretical_gb_s": round(rate, 3), "theoretical_source": f"{how}, the slower end"})


def groups(indexes: Iterable[int], joined: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected groups of the indexes, single ones included, each sorted, in the order of their smallest member."""
    group = {i: {i} for i in indexes}
    for a, b in ((a, b) for a, b in joined if a in group and b in group):
        merged = group[a] | group[b]
        for member in merged:
            group[member] = merged
    return [list(g) for g in sorted({tuple(sorted(g)) for g in group.values()})]


def islands(gpus: list[Gpu], links: list[Link]) -> list[list[int]] | None:
    """Groups of GPUs joined by NVLink. None when a pair's NVLinks are unknown and would join two groups."""
    indexes = [g.index for g in gpus if g.index is not None]
    if len(indexes) > 1 and not links:
        return None
    found = groups(indexes, [(k.a, k.b) for k in links if k.nvlinks])
    place = {i: n for n, members in enumerate(found) for i in members}
    known = {(k.a, k.b) for k in links if k.nvlinks is not None}
    unsure = any(place[a] != place[b] and (a, b) not in known for a in indexes for b in indexes if a < b)
    return None if unsure else found


def switches(gpus: list[Gpu], links: list[Link]) -> list[list[int]] | None:
    """Groups of two or more GPUs behind one PCIe switch or one tree of them (PIX, PXB). None: no group is known, and some PCIe path is unknown.

    A pair joined by NVLink hides its PCIe path.
    """
    indexes = [g.index for g in gpus if g.index is not None]
    found = [g for g in groups(indexes, [(k.a, k.b) for k in links if k.kind in ("PIX", "PXB")]) if len(g) > 1]
    told = len(links) * 2 == len(indexes) * (len(indexes) - 1) and all(k.kind and not k.nvlinks for k in links)
    return found if found or told else None


def cuts(found: list[list[int]] | None, links: list[Link]) -> list[dict[str, Any]]:
    """Between each two islands: the nearest kind of a pair across, how many pairs, and the GB/s of the best pair (they may share one bus)."""
    rows = []
    for i, one in enumerate(found or []):
        for other in (found or [])[i + 1 :]:
            across = [k for k in links if {k.a, k.b} & set(one) and {k.a, k.b} & set(other)]
            kinds = sorted({k.kind for k in across if k.kind}, key=nearness)
            rates = [k.theoretical_gb_s for k in across if k.theoretical_gb_s is not None]
            rows.append({"between": [one, other], "pairs": len(across), "kinds": kinds, "best_pair_gb_s": max(rates, default=None)})
    return rows


def nearness(kind: str) -> int:
    """0 for NVLink to 5 for SYS."""
    return NEARNESS.index(re.sub(r"^NV\d+$", "NV", kind)) if re.sub(r"^NV\d+$", "NV", kind) in NEARNESS else len(NEARNESS)


def unjoined(members: list[int], links: list[Link]) -> list[tuple[int, int]]:
    """Pairs of an island that are known to have no NVLink of their own; a pair nobody told of is not among them."""
    return [(k.a, k.b) for k in links if k.nvlinks == 0 and k.a in members and k.b in members]
