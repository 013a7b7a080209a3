"""What is wrong with the links of a box: PCIe, peer access, NVLink, and what isolates the GPUs from each other."""

import re
from collections.abc import Iterator

from . import links as rates
from .model import Finding, Gpu, Inventory, Link
from .topology import P2P_MEANING
from .values import MIB, some

# Gen3 x4. All-reduce of tensor parallelism over less costs more time than it saves.
SLOW_LINK_GB_S = 4.0
# Of a link's rate after line coding, packet headers and flow control leave about this much to a copy of pinned memory.
COPY_SHARE = 0.6


def find(box: Inventory) -> Iterator[Finding]:
    """Findings of the links, in no order of severity."""
    for part in (_pcie, _measured, _peers, _nvlink, _isolation):
        yield from part(box)


def names(gpus: list[Gpu]) -> str:
    """'GPU 0, 2'."""
    return "GPU " + ", ".join(str(g.index) for g in gpus)


def indexes(gpus: list[Gpu]) -> list[int]:
    """Indexes of the GPUs that have one."""
    return [g.index for g in gpus if g.index is not None]


def _pcie(box: Inventory) -> Iterator[Finding]:
    narrow = [g for g in box.gpus if 0 < (g.pcie_width_lanes or 0) < (g.pcie_width_max_lanes or 0)]
    for gpu in narrow:
        port = rates.port_above(gpu, box.ports)
        slot = f" The port above it has {port.width_cap_lanes} lanes: the slot is the limit." if port and port.width_cap_lanes == gpu.pcie_width_lanes else ""
        rate, full = (rates.pcie_gb_s(gpu.pcie_generation_max or gpu.pcie_generation, n) for n in (gpu.pcie_width_lanes, gpu.pcie_width_max_lanes))
        worth = f" ({rate:.1f} instead of {full:.1f} GB/s per direction)" if rate and full else ""
        yield Finding(
            id="pcie-width",
            severity="serious" if gpu.pcie_width_lanes <= 4 else "warning",
            gpus=indexes([gpu]),
            what=f"GPU {gpu.index}: {gpu.pcie_width_lanes} of its {gpu.pcie_width_max_lanes} PCIe lanes{worth}",
            evidence=f"PCIe width now x{gpu.pcie_width_lanes}, at most x{gpu.pcie_width_max_lanes}.{slot}",
            advice="Lanes do not come back under load: try another slot, a better riser or BIOS bifurcation. Where it stays so, prefer "
            "pipeline over tensor parallelism.",
        )
    slow = [(g, *rates.gpu_pcie_gb_s(g)) for g in box.gpus if g not in narrow]
    slow = [(g, rate, how) for g, rate, how in slow if rate and rate < SLOW_LINK_GB_S]
    if slow:
        yield Finding(
            id="pcie-slow",
            severity="warning",
            gpus=indexes([g for g, _, _ in slow]),
            what=f"{names([g for g, _, _ in slow])}: the PCIe link carries at most {min(rate for _, rate, _ in slow):.1f} GB/s per direction",
            evidence="; ".join(sorted({how for _, _, how in slow})),
            advice="Exchange little: pipeline over tensor or expert parallelism, and no offload to host memory.",
        )
    for gpu in box.gpus:
        now, most = gpu.pcie_generation, gpu.pcie_generation_max
        if not 0 < (now or 0) < (most or 0):
            continue
        resting, why = at_rest(gpu)
        said = f"PCIe generation now {now}, at most {most}; {why}"
        if resting:
            yield Finding(
                id="pcie-idle",
                severity="note",
                gpus=indexes([gpu]),
                what=f"GPU {gpu.index}'s link rests at Gen{now} because the card is idle: no fault",
                evidence=said,
                advice="Nothing. Under load it should come back to its maximum; the measured host-to-device rate shows it.",
            )
        else:
            yield Finding(
                id="pcie-generation",
                severity="serious" if resting is False else "warning",
                gpus=indexes([gpu]),
                what=f"GPU {gpu.index}'s link runs at Gen{now} of Gen{most}" + ("" if resting is False else ", perhaps only because it is idle"),
                evidence=said,
                advice="Read it again while a copy runs. If it stays low: reseat the card, shorten or replace the riser, set the slot's "
                "generation in the BIOS.",
            )
    for gpu in box.gpus:
        device, host = gpu.pcie_generation_device_max, gpu.pcie_generation_host_max or gpu.pcie_generation_max
        if device and host and host < device:
            yield Finding(
                id="slot-generation",
                severity="note",
                gpus=indexes([gpu]),
                what=f"GPU {gpu.index}: Gen{device} possible, the slot does Gen{host}",
                evidence=f"highest generation: device {device}, host {host}",
                advice="A slot or board of that generation would double the rate for each step.",
            )
    for port in box.ports:
        # A whole lspci lists every device; the ones named here are what somebody cut out to show.
        if port.is_bridge or port.is_gpu is False or not port.width_lanes or any(g.bus_id == port.address for g in box.gpus if port.address):
            continue
        cap = f" of {port.width_cap_lanes}" if port.width_cap_lanes else ", and what it could do is not in the paste"
        own = " It reaches its own limit, so lspci says ok: the port has no more." if port.width_cap_lanes == port.width_lanes and port.width_lanes < 16 else ""
        generation = rates.generation_of(port.speed_gt_s)
        speed = "speed not told" if port.speed_gt_s is None else f"Speed {port.speed_gt_s:g}GT/s"
        yield Finding(
            id="port-link",
            severity="warning" if port.width_lanes < 8 or "width" in port.downgraded else "note",
            what=f"{port.address or 'A PCIe link'} at {f'Gen{generation} ' if generation else ''}x{port.width_lanes}{cap}",
            evidence=f"LnkSta: {speed}, Width x{port.width_lanes}.{own}",
            advice="Give the whole `lspci -vv` (as root): the address tells which card it is, and LnkCap of the port above tells the slot's limit.",
        )


def at_rest(gpu: Gpu) -> tuple[bool | None, str]:
    """(True idle, False at work, None cannot tell; why). A performance state of rest first, then the driver's own word, then the load."""
    # P0 to P2 are the states of work; a resting card is at P8 or beyond, P5 with a display. Its clocks are low whatever the driver calls the cause.
    state = re.fullmatch(r"P(\d{1,2})", gpu.pstate or "")
    if state and int(state[1]) >= 5:
        return True, f"performance state {gpu.pstate} is one of rest"
    if gpu.idle is not None:
        return gpu.idle, "the driver says the clocks are low because it is idle" if gpu.idle else "the driver does not call it idle"
    if gpu.pstate:
        return (
            (False, f"performance state {gpu.pstate} with {gpu.utilization_percent}% load")
            if state and gpu.utilization_percent
            else (None, f"performance state {gpu.pstate}")
        )
    return None, "the output does not tell whether the card was idle"


def _measured(box: Inventory) -> Iterator[Finding]:
    for m in box.measured:
        if m.unit != "GB/s" or not m.ceiling:
            continue
        if m.what.startswith(("host to device", "device to host")) and m.spread.median < COPY_SHARE * m.ceiling:
            yield Finding(
                id="slow-link",
                severity="warning",
                what=f"{m.where}: {m.what} carries {m.spread.median:.1f} of {m.ceiling:.1f} GB/s",
                evidence=f"measured with {m.size_bytes // MIB} MiB of pinned memory; ceiling {m.ceiling_source or 'of unknown origin'}",
                advice="Under load the link is slower than it is trained: look for a riser with errors (`nvidia-smi -q`, replay counters), a "
                "shared switch, or a busy host.",
            )
        if m.spread.max > 1.05 * m.ceiling:
            yield Finding(
                id="above-ceiling",
                severity="warning",
                what=f"{m.where}: {m.what} measured above what the link can carry",
                evidence=f"{m.spread.max:.2f} GB/s against {m.ceiling:.2f} GB/s ({m.ceiling_source or 'of unknown origin'})",
                advice="Do not use this figure: either the measurement or what the box says of its link is wrong.",
            )


def _peers(box: Inventory) -> Iterator[Finding]:
    off: dict[tuple[str, str], list[Link]] = {}
    for link in box.links:
        for capability in ("read", "write", "unstated"):
            status = link.p2p.get(capability)
            if status and status != "OK":
                off.setdefault((status, capability), []).append(link)
                break
    # Reading and writing refused with one word are one finding, as the pairs do not overlap.
    by_word: dict[tuple[str, bool], list[Link]] = {}
    for (status, capability), pairs in off.items():
        by_word.setdefault((status, capability == "unstated"), []).extend(pairs)
    for (status, unstated), pairs in by_word.items():
        shown = some([f"{k.a}-{k.b}" for k in pairs], 6)
        gpus, among = sorted({i for k in pairs for i in (k.a, k.b)}), f"{len(pairs)} of {len(box.links)} pairs"
        evidence = f"{shown}: {status}" + (f" ({P2P_MEANING[status]})" if status in P2P_MEANING else "")
        if unstated or status == "U":
            # A matrix of NVLink or atomics looks the same and says nothing of peer access as such; U is the driver's own 'unknown'.
            yield Finding(
                id="p2p-unknown",
                severity="note",
                gpus=gpus,
                what=f"Whether there is peer access between {among} is not certain" + (": the matrix does not say what it is of" if unstated else ""),
                evidence=evidence,
                advice="Give `nvidia-smi topo -p2p r` and `-p2p w` with their command lines, or measure: `fieldbook inventory` on the box.",
            )
            continue
        fast = any(k.nvlinks for k in pairs)
        one_way = "OK" in status.split()
        yield Finding(
            id="p2p-off",
            severity="serious" if fast else "warning",
            gpus=gpus,
            what=f"Peer access between {among} works one way only" if one_way else f"No peer access between {among}: GPUs exchange data through host memory",
            evidence=evidence,
            advice="NCCL falls back to host memory and vLLM's custom all-reduce stays off. Prefer few, large transfers: pipeline over "
            "tensor or expert parallelism." + (" With a regkey: remove the driver option that disables it." if status == "DR" else ""),
        )


def _nvlink(box: Inventory) -> Iterator[Finding]:
    for gpu in box.gpus:
        down = [i for i, rate in enumerate(gpu.nvlink_gb_s or []) if rate is None]
        # Only cards of one name are compared: others have other numbers of ports. A card without any link up counts where its like has some.
        like = [len([r for r in g.nvlink_gb_s if r is not None]) for g in box.gpus if g.nvlink_gb_s and g.name == gpu.name]
        own, most = len(gpu.nvlink_gb_s or []) - len(down), max(like, default=0)
        if down and most:
            fewer = own < most
            yield Finding(
                id="nvlink-down",
                severity="warning" if fewer else "note",
                gpus=indexes([gpu]),
                what=f"GPU {gpu.index}: {len(down)} of {len(gpu.nvlink_gb_s or [])} NVLinks are down",
                evidence=f"inactive links {', '.join(map(str, down))}" + (f"; another GPU has {most} up, this one {own}" if fewer else ""),
                advice="Reseat its bridge where it has one, then compare the cards again."
                if fewer
                else "No fault where the card has fewer neighbours or bridges than ports: an H100 PCIe with three bridges uses 12 of 18.",
            )
    joined = [island for island in box.islands or [] if len(island) > 1]
    if joined and len(box.islands or []) > 1:
        across = sorted({kind for cut in box.cuts for kind in cut["kinds"]}, key=rates.nearness)
        best = max((cut["best_pair_gb_s"] for cut in box.cuts if cut["best_pair_gb_s"]), default=None)
        yield Finding(
            id="nvlink-islands",
            severity="warning",
            gpus=sorted(i for island in joined for i in island),
            what=f"NVLink joins only groups: {', '.join('-'.join(map(str, island)) for island in joined)}",
            evidence=f"between the groups: {', '.join(across) or 'unknown'}" + (f", at most {best:.1f} GB/s a pair" if best else ""),
            advice="Keep tensor parallelism inside a group and cut the pipeline between groups. vLLM's custom all-reduce needs NVLink "
            "between all ranks of a TP group and stays off across groups.",
        )
    for island in joined:
        apart = rates.unjoined(island, box.links)
        if apart:
            yield Finding(
                id="nvlink-mesh",
                severity="note",
                gpus=island,
                what=f"Within {'-'.join(map(str, island))} not every pair has an NVLink of its own",
                evidence=f"no NVLink between {some([f'{a}-{b}' for a, b in apart])}",
                advice="All-reduce among all of them crosses a slower way: vLLM's custom all-reduce stays off for a TP group that is not fully joined.",
            )
    widths = {k.nvlinks for k in box.links if k.nvlinks}
    if len(widths) > 1:
        yield Finding(
            id="nvlink-unequal",
            severity="note",
            what=f"Pairs have different numbers of NVLinks: {', '.join(map(str, sorted(widths)))}",
            evidence="NV# of the matrix",
            advice="The pair with the fewest sets the pace of a ring; give neighbouring pipeline stages the wider ones.",
        )


def _isolation(box: Inventory) -> Iterator[Finding]:
    redirecting = [p for p in box.ports if p.acs_redirect and p.is_bridge]
    # A single GPU has no peer; lspci alone may show bridges and no GPU.
    if redirecting and len(box.gpus) != 1:
        yield Finding(
            id="acs",
            severity="warning",
            what="Access control (ACS) sends traffic between GPUs up to the processor",
            evidence=f"ACSCtl with ReqRedir+ or CmpltRedir+ at {', '.join(p.address or '?' for p in redirecting[:6])}",
            advice="Peer traffic behind a switch is slow or hangs NCCL so. Turn ACS off in the BIOS or with setpci, unless virtual machines need it.",
        )
    if len(box.gpus) < 2:
        return
    # Words that switch it on; igfx_off, soft and the like do not. Without a group none is at work, whatever the options ask for.
    words = {(name, word) for o in box.host.kernel_options for name, _, value in [o.lower().partition("=")] if "iommu" in name for word in value.split(",")}
    asked = {word for _, word in words} & {"on", "force", "force_enable", "force_isolation"}
    groups = box.host.iommu_groups
    if groups or (asked and groups is None):
        through = ("iommu", "pt") in words or any(name == "iommu.passthrough" and word in ("1", "y", "on") for name, word in words)
        yield Finding(
            id="iommu",
            severity="note" if through else "warning",
            what=("An IOMMU is at work" if groups else "The kernel is told to use an IOMMU") + (", in pass-through" if through else ""),
            evidence="; ".join(
                [*(f"kernel option {o}" for o in box.host.kernel_options if "iommu" in o.lower()), *([f"{groups} IOMMU groups"] if groups else [])]
            ),
            advice="On bare metal it slows or breaks peer-to-peer copies; boot with iommu=pt or off if P2P is slow, gives wrong data or "
            "hangs. In a virtual machine it is the host's matter.",
        )
