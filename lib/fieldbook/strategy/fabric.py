"""Which way data takes between two ranks, how fast it is at most, and which GPUs form a tensor-parallel group: the box as the strategies see it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..inventory import Gpu, Inventory, Link, Measurement
from .datasheets import memory_gb_s, pcie_at_most_gb_s

# NCCL's own model of a small message (src/graph/tuning.cc, ring with the LL protocol): 6.6 us once, and for each step 0.6 us over NVLink, 1.0 over PCIe,
# 5.0 over a network. A floor: what a copy takes by itself (notebook 01) includes a launch that captured graphs do not pay.
STEP_US = {"NVLink": 0.6, "PCIe": 1.0, "network": 5.0}
COLLECTIVE_US = 6.6
# vLLM's own all-reduce over NVLink (device_communicators/custom_all_reduce.py) has no such base; it works for these sizes within one node.
CUSTOM_ALL_REDUCE_RANKS = (2, 4, 6, 8)
# NCCL's settings that take NVLink and PCIe peer access away, and then host memory: what is left are sockets.
NO_PEERS = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}
NO_HOST_MEMORY = {"NCCL_SHM_DISABLE": ("1",)}
# What links take above their floor: 3.0 for the 191 us that field report 001 measured for an all-reduce of TP8 (64 us at 16 streams drafting 3), 3.1 for the
# prefill of field report 000's expert parallelism, which its links bound. Two reports, one box each: an estimate, good for an order and not for a rate.
LINKS_ABOVE_FLOOR = 3.0
# Where two ranks measured the way by the means that the server's ranks have: the median of 24 cases of two CPU ranks over four links (overlinks), from 1.0
# on the slowest to 4.4 on one that brings numbers faster than the ranks add them up.
MEASURED_ABOVE_FLOOR = 1.3


@dataclass(frozen=True)
class Way:
    """Between two ranks: GB/s (10**9) one way, latency of a step in microseconds, evidence as figures carry it, and where both come from.

    of_ranks: measured by two ranks with the means and settings of the server's own, not read off the link.
    """

    kind: str  # NVLink, PCIe, network, loopback, unknown
    gb_s: float | None
    step_us: float
    base_us: float
    evidence: str
    source: str
    of_ranks: bool = False

    @property
    def above_floor(self) -> float:
        """How many times its floor to expect of what goes this way."""
        return MEASURED_ABOVE_FLOOR if self.of_ranks else LINKS_ABOVE_FLOOR

    def as_expected(self) -> "Way":
        """The same way with everything on it above_floor times as long."""
        above = self.above_floor
        return replace(self, gb_s=self.gb_s and self.gb_s / above, step_us=above * self.step_us, base_us=above * self.base_us)


UNKNOWN = Way("unknown", None, STEP_US["PCIe"], COLLECTIVE_US, "estimated", "no output tells this link")


@dataclass(frozen=True)
class Fabric:
    """All ranks' places. nodes: the GPUs of each machine; islands: joined by NVLink; memory_gb_s: read rate of each GPU's own memory.

    ways: what two ranks have for a hop, through NCCL; group_ways: for a collective, where that is another; direct_ways: the links themselves, over which
    vLLM's own all-reduce works, which knows nothing of NCCL's settings. custom_all_reduce: whether it is on.
    """

    nodes: tuple[tuple[int, ...], ...]
    islands: tuple[tuple[int, ...], ...]
    memory_gb_s: tuple[float | None, ...]
    ways: dict[tuple[int, int], Way] = field(repr=False)
    network: Way | None = None
    memory_source: str = ""
    capability: float | None = None  # smallest compute capability of the GPUs
    group_ways: dict[tuple[int, int], Way] = field(default_factory=dict, repr=False)
    direct_ways: dict[tuple[int, int], Way] = field(default_factory=dict, repr=False)
    custom_all_reduce: bool = True

    @property
    def gpus(self) -> tuple[int, ...]:
        """Indices in an order that keeps islands, then nodes, together: consecutive ones make tensor-parallel groups."""
        island = {gpu: n for n, members in enumerate(self.islands) for gpu in members}
        node = {gpu: n for n, members in enumerate(self.nodes) for gpu in members}
        return tuple(sorted(node, key=lambda gpu: (node[gpu], island.get(gpu, len(self.islands) + gpu), gpu)))

    def way(self, a: int, b: int) -> Way:
        """The way between two GPUs; of different nodes the network."""
        found = self.ways.get((min(a, b), max(a, b)))
        return found or (self.network if self.network and not any({a, b} <= set(node) for node in self.nodes) else None) or UNKNOWN

    @cached_property
    def as_expected(self) -> "Fabric":
        """The same with every way as far above its floor as is to expect: a floor over this fabric is an expectation over the first."""
        slow = {name: {pair: way.as_expected() for pair, way in getattr(self, name).items()} for name in ("ways", "group_ways", "direct_ways")}
        return replace(self, **slow, network=self.network and self.network.as_expected())

    def ways_taken(self, pairs: Sequence[tuple[int, int]], groups: Sequence[Sequence[int]]) -> list[Way]:
        """All ways of these hops, and the slowest of each of these groups."""
        return [*(self.way(a, b) for a, b in pairs), *(self.worst(group) for group in groups if len(group) > 1)]

    def worst(self, group: Sequence[int]) -> Way:
        """The slowest way that a ring through the group must take: its members in order, which `gpus` arranges so that near ones are neighbours."""
        if len(group) < 2:
            return Way("none", None, 0.0, 0.0, "computed", "one rank: nothing is sent")
        pairs = [(min(pair), max(pair)) for pair in [*itertools.pairwise(group), (group[-1], group[0])]]
        direct = [self.direct_ways.get(pair) or self.way(*pair) for pair in pairs]
        within_nvlink = self.custom_all_reduce and all(way.kind == "NVLink" for way in direct) and len(group) in CUSTOM_ALL_REDUCE_RANKS
        ways = direct if within_nvlink else [self.group_ways.get(pair) or self.way(*pair) for pair in pairs]
        slowest = min(ways, key=lambda way: (way.gb_s is not None, way.gb_s or 0.0, -way.step_us))
        base = 0.0 if within_nvlink else max(way.base_us for way in ways)
        return replace(slowest, step_us=max(way.step_us for way in ways), base_us=base)


def fabric_of(
    box: Inventory,
    ranks: int,
    memory_read_bytes_s: float | None = None,
    on_cpu: bool = False,
    environment: Mapping[str, str] | None = None,
    custom_all_reduce: bool = True,
    measured_with: Mapping[str, str] | None = None,
) -> Fabric:
    """The fabric of an inventory's GPUs; of a machine without GPUs, or on_cpu, that of so many processes on its CPUs, which share its memory's read rate.

    environment: the servers' own, whose NCCL settings may close the links; custom_all_reduce: whether vLLM's own all-reduce is on; measured_with: the
    environment that NCCL was measured with, where it is another one: its rates say nothing of this one then.
    """
    if on_cpu or not box.gpus:
        return _cpu_fabric(box, ranks, memory_read_bytes_s)
    order = [gpu.index for gpu in box.gpus]
    rates = [memory_gb_s(gpu) for gpu in box.gpus]
    by_index = {gpu.index: gpu for gpu in box.gpus}
    told = [float(gpu.compute_capability) for gpu in box.gpus if gpu.compute_capability]
    direct = {(link.a, link.b): _way_of(link, (by_index[link.a], by_index[link.b])) for link in box.links}
    settings = environment or {}
    other = measured_with is not None and _of_nccl(measured_with) != _of_nccl(settings)
    through = {
        (link.a, link.b): _through_nccl(
            link.model_copy(update={"measured_gb_s": {}}) if other else link, direct[link.a, link.b], (by_index[link.a], by_index[link.b]), settings
        )
        for link in box.links
    }
    return Fabric(
        nodes=(tuple(order),),
        islands=tuple(tuple(members) for members in box.islands or [[i] for i in order]),
        memory_gb_s=tuple(rate for rate, _ in rates),
        ways={pair: hop for pair, (hop, _) in through.items()},
        group_ways={pair: group for pair, (_, group) in through.items() if group},
        direct_ways=direct,
        custom_all_reduce=custom_all_reduce,
        capability=min(told) if len(told) == len(order) else None,
        memory_source="; ".join(dict.fromkeys(source for _, source in rates if source)),
    )


def _of_nccl(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("NCCL_")}


def _is_set(environment: Mapping[str, str], settings: Mapping[str, tuple[str, ...]]) -> bool:
    return any(environment.get(name) in values for name, values in settings.items())


def _through_nccl(link: Link, direct: Way, ends: tuple[Gpu, Gpu], environment: Mapping[str, str]) -> tuple[Way, Way | None]:
    """(way of a hop, way of a collective where it is another) through NCCL with these settings: measured with them, else the link, else what they leave."""
    kind = direct.kind
    if _is_set(environment, NO_PEERS):
        kind = "network" if _is_set(environment, NO_HOST_MEMORY) else "PCIe"
    step = STEP_US.get(kind, STEP_US["PCIe"])
    hop, group = (
        Way(kind, link.measured_gb_s[key].median, step, COLLECTIVE_US, "measured", f"measured {key}", of_ranks=True) if key in link.measured_gb_s else None
        for key in (f"{link.a}->{link.b} through NCCL", f"{link.a}<->{link.b} all-reduce through NCCL")
    )
    if hop or kind == direct.kind:
        return hop or direct, group
    if kind == "network":
        return Way(kind, None, step, COLLECTIVE_US, "estimated", "NCCL's settings leave sockets, whose rate was not measured"), None
    rate, source = min((pcie_at_most_gb_s(gpu) for gpu in ends), key=lambda found: found[0] or 0.0)
    return replace(direct, kind=kind, gb_s=rate, step_us=step, evidence="estimated", source=f"NCCL's settings leave host memory: {source}"), None


def _way_of(link: Link, ends: tuple[Gpu, Gpu]) -> Way:
    """The measured rate of the slower direction where there is one, else what the link can carry at most, else what GPUs of this kind can."""
    kind = "NVLink" if link.nvlinks else "PCIe"
    ways = {key: spread for key, spread in link.measured_gb_s.items() if "->" in key and not key.endswith("through NCCL")}
    step = STEP_US[kind]
    if ways:
        key, spread = min(ways.items(), key=lambda item: item[1].median)
        return Way(kind, spread.median, step, COLLECTIVE_US, "measured", f"measured {key}")
    told = link.theoretical_source or link.unknown.get("theoretical_gb_s", "")
    host = ", through host memory" if link.p2p.get("read") not in (None, "OK") and kind == "PCIe" else ""
    if link.theoretical_gb_s is None:
        rate, source = min((pcie_at_most_gb_s(gpu) for gpu in ends), key=lambda found: found[0] or 0.0)
        if rate and link.nvlinks == 0:
            return Way(kind, rate, step, COLLECTIVE_US, "estimated", source + host)
        return Way(kind if link.kind or link.nvlinks == 0 else "unknown", None, step, COLLECTIVE_US, "estimated", told or "rate not told")
    return Way(kind, link.theoretical_gb_s, step, COLLECTIVE_US, "computed", told + host)


def _cpu_fabric(box: Inventory, ranks: int, memory_read_bytes_s: float | None) -> Fabric:
    """Processes of one machine, which talk through its memory (gloo)."""
    rate = _loopback(box.measured, "GB/s")
    latency = _loopback(box.measured, "us")
    evidence = "measured" if rate is not None else "estimated"
    source = "two processes through gloo" if rate is not None else "the loopback of this machine was not measured"
    way = Way("loopback", rate, latency or 0.0, 0.0, evidence, source)
    pairs = {pair: way for pair in itertools.combinations(range(ranks), 2)}
    each = memory_read_bytes_s / ranks / 1e9 if memory_read_bytes_s else None
    return Fabric((tuple(range(ranks)),), tuple((i,) for i in range(ranks)), (each,) * ranks, pairs, memory_source="this machine's memory, shared by all ranks")


def _loopback(measured: Sequence[Measurement], unit: str) -> float | None:
    """Best sample between two processes: a ceiling of what a run can have, or None where it was not measured."""
    found = [m.spread.max if unit == "GB/s" else m.spread.min for m in measured if "two processes" in m.what and m.unit == unit]
    return found[0] if found else None
