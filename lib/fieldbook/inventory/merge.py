"""Readings of one box put together: the fullest output wins, contradictions are said."""

import collections
from typing import Any

from . import links as rates
from .findings import find
from .links import cuts, generation_of, islands, port_above, switches
from .model import Gpu, Host, Inventory, Link, Measurement, NumaNode, PciePort, Reading
from .values import MIB

# Which output to believe first where several tell the same; NVML is what all of nvidia-smi asks.
_ORDER = ("NVML", "nvidia-smi -q -x", "nvidia-smi --query-gpu", "nvidia-smi -q", "nvidia-smi topo", "nvidia-smi (table)", "nvidia-smi -L", "nvidia-smi")


# Outputs that list GPUs and nowhere say how many.
_COUNTLESS = ("nvidia-smi --query-gpu", "nvidia-smi -L", "nvidia-smi nvlink -s", "lspci -vv", "report quoting nvidia-smi")


def combine(readings: list[Reading], source: str, notes: list[str] | None = None, measured: list[Measurement] | None = None) -> Inventory:
    """One Inventory out of readings of one box."""
    notes, incomplete = list(notes or []), []
    ranked = sorted(readings, key=_rank)
    for reading in readings:
        where = reading.source or reading.command
        notes += [f"{where}: {note}" if reading.source else note for note in reading.notes]
        incomplete += [f"{where}: {text}" if reading.source else text for text in reading.incomplete]
    gpus = _gpus(ranked, incomplete, notes)
    ports = [port for reading in readings for port in reading.ports]
    gpus = [_with_port(gpu, ports) for gpu in gpus]
    pairs = _links(ranked, incomplete)
    unlisted = sorted({i for link in pairs for i in (link.a, link.b)} - {g.index for g in gpus})
    if unlisted:
        incomplete.append(f"a link names GPU {', '.join(map(str, unlisted))}, which no output lists")
        gpus = sorted([*gpus, *(Gpu(index=i) for i in unlisted)], key=lambda g: g.index or 0)
    found = rates.with_rates(pairs, gpus)
    host = Host()
    for reading in ranked:
        if reading.host:
            host = _fill(host, reading.host)
    numa = _numa(ranked, gpus)
    joined = islands(gpus, found)
    drivers = list(dict.fromkeys(r.driver for r in ranked if r.driver))
    if len(drivers) > 1:
        notes.append(f"the outputs name different drivers, as of different days or machines: {', '.join(drivers)}")
    box = Inventory(
        source=source,
        readings=[{"command": r.command, "file": r.source} for r in readings],
        host=host,
        numa=numa,
        driver=drivers[0] if drivers else None,
        cuda=next((r.cuda for r in ranked if r.cuda), None),
        gpus=gpus,
        links=found,
        nics=next((r.nics for r in ranked if r.nics), []),
        ports=ports,
        islands=joined,
        cuts=cuts(joined, found),
        switches=switches(gpus, found),
        incomplete=list(dict.fromkeys(incomplete)),
        notes=list(dict.fromkeys(notes)),
        findings=[],
        measured=measured or [],
    )
    return box.model_copy(update={"findings": find(box)})


def _rank(reading: Reading) -> int:
    return next((i for i, name in enumerate(_ORDER) if reading.command.startswith(name)), len(_ORDER))


def _gpus(readings: list[Reading], incomplete: list[str], notes: list[str]) -> list[Gpu]:
    """GPUs of all readings by index. Where an output has no index, bus id or uuid say which GPU it is, else its order does."""
    found: dict[int, Gpu] = {}
    driver_sees = any(r.gpus for r in readings if not r.command.startswith("lspci"))
    for reading in readings:
        if reading.command.startswith("lspci") and driver_sees:
            listed = {g.bus_id for g in found.values()}
            unseen = [g.bus_id for g in reading.gpus if g.bus_id not in listed] if None not in listed else []
            incomplete += [f"lspci shows an NVIDIA GPU at {address} that no other output lists" for address in unseen]
            continue
        numbered = _numbered(reading, found, notes)
        for index, gpu in numbered.items():
            if index in found:
                _contradictions(found[index], gpu, reading, notes)
            found[index] = _fill(found.get(index, Gpu(index=index)), gpu.model_copy(update={"index": index}))
    if found and all(r.command in _COUNTLESS for r in readings if r.gpus):
        notes.append("these outputs do not state how many GPUs there are: lines cut off at their end would not show")
    # One file may hold several outputs.
    counts = {(r.source, r.command): r.gpu_count for r in readings if r.gpu_count is not None}
    named = ", ".join(f"{f'{source} ({command})' if source else command} {count}" for (source, command), count in counts.items())
    if len(set(counts.values())) > 1:
        incomplete.append(f"the outputs disagree on the number of GPUs: {named}")
    elif counts and len(found) > max(counts.values()):
        incomplete.append(f"the outputs disagree on the number of GPUs: {named}, but {len(found)} are listed in all")
    return [found[index] for index in sorted(found)]


def _numbered(reading: Reading, known: dict[int, Gpu], notes: list[str]) -> dict[int, Gpu]:
    # A shared text often has all UUIDs replaced by the same one: what several GPUs share tells none of them apart.
    by_bus, by_uuid = (_one_each(known, reading, name) for name in ("bus_id", "uuid"))
    numbered: dict[int, Gpu] = {}
    twice = [i for i, n in collections.Counter(g.index for g in reading.gpus if g.index is not None).items() if n > 1]
    if twice:
        notes.append(f"{reading.source or reading.command} lists GPU {', '.join(map(str, twice))} more than once: what follows is numbered on from there")
    # Those that say their index take it, whatever stands before them.
    for place, gpu in sorted(enumerate(reading.gpus), key=lambda one: one[1].index is None):
        index = gpu.index
        if index is None:
            index = by_bus.get(gpu.bus_id, by_uuid.get(gpu.uuid, place))
            other = known.get(index)
            if other and _differ(other, gpu):
                index = max([*known, *numbered]) + 1
                where = f"at {gpu.bus_id}" if gpu.bus_id else f"with UUID {gpu.uuid}"
                notes.append(f"{reading.command} shows a GPU {where} that the other outputs do not: it is numbered {index} here")
        while index in numbered:
            index += 1
        numbered[index] = gpu
    if any(g.index is None for g in reading.gpus) and len(reading.gpus) > 1 and not known:
        notes.append(f"{reading.command} gives no index: GPUs are numbered in its order")
    return numbered


def _one_each(known: dict[int, Gpu], reading: Reading, name: str) -> dict[str, int]:
    """Value of a field -> index, for values that one GPU alone has, here and there."""
    often = collections.Counter(getattr(g, name) for g in known.values()), collections.Counter(getattr(g, name) for g in reading.gpus)
    return {value: i for i, g in known.items() if (value := getattr(g, name)) and max(count[value] for count in often) == 1}


def _differ(one: Gpu, other: Gpu) -> bool:
    """True when bus ids, or without them UUIDs, say that these are two GPUs."""
    if one.bus_id and other.bus_id:
        return one.bus_id != other.bus_id
    return bool(one.uuid and other.uuid and one.uuid != other.uuid)


def _contradictions(one: Gpu, other: Gpu, reading: Reading, notes: list[str]) -> None:
    a, b = one.memory_total_bytes, other.memory_total_bytes
    # Tables round to MiB.
    if a is not None and b is not None and abs(a - b) > MIB:
        notes.append(f"GPU {one.index}: memory is {a // MIB} MiB, but {reading.source or reading.command} says {b // MIB} MiB")
    for name, words in (("bus_id", "bus id"), ("uuid", "UUID"), ("compute_capability", "compute capability")):
        first, second = getattr(one, name), getattr(other, name)
        if first and second and first != second:
            notes.append(f"GPU {one.index}: {words} is {first}, but {reading.source or reading.command} says {second}")


def _fill(first: Any, second: Any) -> Any:
    """`first` with what only `second` tells. A reason for not knowing goes once the value is known."""
    values = {}
    for name in type(first).model_fields:
        have, other = getattr(first, name), getattr(second, name)
        # An empty list is an answer where nothing was known, and none beside a list that holds something.
        if other is not None and (have is None or (have in ([], {}) and other not in ([], {}))):
            values[name] = other
    # A name that a table cut gives way to a whole one.
    if isinstance(first, Gpu) and first.name and second.name and first.name.endswith("...") and not second.name.endswith("..."):
        values["name"] = second.name
    merged = first.model_copy(update=values)
    if not hasattr(first, "unknown"):
        return merged
    reasons = {**second.unknown, **first.unknown}
    kept = {name: why for name, why in reasons.items() if getattr(merged, name, None) is None}
    if isinstance(merged, Gpu) and (merged.name or "").endswith("...") and "name" in reasons:
        kept["name"] = reasons["name"]
    return merged.model_copy(update={"unknown": kept})


def _links(readings: list[Reading], incomplete: list[str]) -> list[Link]:
    found: dict[tuple[int, int], Link] = {}
    for reading in readings:
        for link in reading.links:
            have = found.get((link.a, link.b))
            found[link.a, link.b] = link if have is None else _join(have, link, incomplete)
    return [found[pair] for pair in sorted(found)]


def _join(one: Link, other: Link, incomplete: list[str]) -> Link:
    """One pair from two outputs. An NVLink kind beats a PCIe path, which NVML and `topo -mp` show also where there is NVLink."""
    if one.kind_is_pcie_path and other.kind and not other.kind_is_pcie_path:
        one, other = other, one
    # Beside an NVLink, a PCIe path is no contradiction; beside another PCIe path it is.
    if one.kind and other.kind and one.kind != other.kind and not (other.kind_is_pcie_path and one.kind.startswith("NV")):
        incomplete.append(f"GPU {one.a} and {one.b}: one output says {one.kind}, another {other.kind}")
    values: dict[str, Any] = {
        name: getattr(other, name) for name in ("kind", "nvlinks", "theoretical_gb_s", "theoretical_source") if getattr(one, name) is None
    }
    for name in sorted(one.p2p.keys() & other.p2p.keys()):
        if one.p2p[name] != other.p2p[name]:
            incomplete.append(f"GPU {one.a} and {one.b}: peer access ({name}) is {one.p2p[name]} in one output, {other.p2p[name]} in another")
    for name in ("p2p", "measured_gb_s", "measured_latency_us"):
        values[name] = {**getattr(other, name), **getattr(one, name)}
    if one.kind is None and other.kind is not None:
        values["kind_is_pcie_path"] = other.kind_is_pcie_path
    merged = one.model_copy(update=values)
    reasons = {**other.unknown, **one.unknown}
    known = {name for name in reasons if getattr(merged, name, None) is not None or name.removeprefix("p2p ") in merged.p2p}
    return merged.model_copy(update={"unknown": {name: why for name, why in reasons.items() if name not in known}})


def _with_port(gpu: Gpu, ports: list[PciePort]) -> Gpu:
    """PCIe facts of lspci or /sys for a GPU whose own tool does not tell them."""
    port = next((p for p in ports if gpu.bus_id and p.address == gpu.bus_id), None)
    if port is None:
        return gpu
    told = {
        "pcie_generation": generation_of(port.speed_gt_s),
        "pcie_generation_device_max": generation_of(port.speed_cap_gt_s),
        "pcie_width_lanes": port.width_lanes,
        "pcie_width_max_lanes": port.width_cap_lanes,
    }
    above = port_above(gpu, ports)
    slot = generation_of(above.speed_cap_gt_s) if above else None
    if slot and told["pcie_generation_device_max"]:
        # Both ends are known: the slower one is what they can do together.
        told |= {"pcie_generation_host_max": slot, "pcie_generation_max": min(slot, told["pcie_generation_device_max"])}
    return gpu.model_copy(update={name: value for name, value in told.items() if getattr(gpu, name) is None and value is not None})


def _numa(readings: list[Reading], gpus: list[Gpu]) -> dict[str, NumaNode]:
    nodes: dict[int, NumaNode] = {}
    for node in (n for reading in readings for n in reading.numa):
        nodes[node.node] = _fill(nodes[node.node], node) if node.node in nodes else node
    for gpu in gpus:
        if gpu.numa_node is not None:
            nodes.setdefault(gpu.numa_node, NumaNode(node=gpu.numa_node))
    for node in list(nodes):
        near = [g.index for g in gpus if g.numa_node == node and g.index is not None]
        nodes[node] = nodes[node].model_copy(update={"gpus": near})
    return {str(node): nodes[node] for node in sorted(nodes)}
