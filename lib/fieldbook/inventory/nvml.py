"""The GPUs of this machine through NVML (nvidia-ml-py), without CUDA, torch or vLLM."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .host import cpu_ranges
from .model import Gpu, GpuProcess, Link, MigDevice, Reading
from .values import bus_id

_ARCHITECTURES = {2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace", 9: "Hopper", 10: "Blackwell"}
# nvmlGpuTopologyLevel_t in nvml.h: the nearest common ancestor of two GPUs.
_ANCESTORS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvmlGpuP2PStatus_t, as `nvidia-smi topo -p2p` shortens it.
_P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
_CAPABILITIES = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pcie": 4}
# nvmlClocksEventReasons: bits that mean the GPU runs slower than it could for a cause worth naming.
_SLOWDOWNS = {0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown"}
_IDLE = 0x1
_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}


def read() -> Reading:
    """GPUs, driver and links. A machine where NVML does not answer gives no GPU and a note with the reason."""
    try:
        import pynvml
    except ImportError:
        return Reading(command="NVML", notes=["no GPU can be seen: nvidia-ml-py is not installed"])
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Reading(command="NVML", gpu_count=0, notes=[f"no GPU: NVML does not answer ({error})"])
    try:
        reasons: dict[str, str] = {}
        count = _ask(reasons, "count", pynvml, pynvml.nvmlDeviceGetCount)
        if count is None:
            return Reading(command="NVML", notes=[f"no GPU can be seen: NVML does not say how many there are ({reasons['count']})"])
        handles = [_handle(pynvml, index) for index in range(count)]
        gpus = [_gpu(pynvml, index, handle) if why is None else _unanswered(index, why) for index, (handle, why) in enumerate(handles)]
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
        found = [_link(pynvml, a, b, handles[a][0], handles[b][0], gpus) for a, b in pairs]
        driver = _ask({}, "driver", pynvml, pynvml.nvmlSystemGetDriverVersion)
        cuda = _ask({}, "cuda", pynvml, pynvml.nvmlSystemGetCudaDriverVersion)
        return Reading(
            command="NVML",
            gpus=gpus,
            gpu_count=count,
            links=found,
            driver=_text(driver),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
    finally:
        pynvml.nvmlShutdown()


def speeds() -> list[dict[str, Any]]:
    """Clock, temperature, power, load and slowdowns of each GPU that answers, for looks in quick succession. Empty without NVML.

    Keys: index, sm_clock_mhz, temperature_c, power_w, power_limit_w, busy_percent, slowed (names as in _SLOWDOWNS), processes; None for what is not told.
    """
    found = []
    for pynvml, index, handle in _answering():

        def ask(name: str, *arguments: Any, library: Any = pynvml, of: Any = handle) -> Any:
            return _ask({}, name, library, getattr(library, name, None) or (lambda *_: None), of, *arguments)

        reasons, load = ask("nvmlDeviceGetCurrentClocksEventReasons"), ask("nvmlDeviceGetUtilizationRates")
        running = ask("nvmlDeviceGetComputeRunningProcesses")
        found.append(
            {
                "index": index,
                "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", 1),
                "temperature_c": ask("nvmlDeviceGetTemperature", 0),
                "power_w": _watts(ask("nvmlDeviceGetPowerUsage")),
                "power_limit_w": _watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
                "busy_percent": load.gpu if load else None,
                "slowed": [name for bit, name in _SLOWDOWNS.items() if reasons & bit] if reasons is not None else [],
                "processes": None if running is None else len(running),
            }
        )
    return found


def usage() -> list[Gpu]:
    """Index, memory in use and processes of each GPU that answers, and nothing else: cheap enough to be asked again and again. Empty without NVML."""
    found = []
    for pynvml, index, handle in _answering():
        used, running = _memory(pynvml, handle, {})[2], _ask({}, "processes", pynvml, pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        found.append(Gpu(index=index, memory_used_bytes=used, processes=_processes(running)))
    return found


def _answering() -> Iterator[tuple[Any, int, Any]]:
    """(pynvml, index, handle) of each GPU that answers; none without NVML, which is open as long as they are gone through."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        for index in range(_ask({}, "count", pynvml, pynvml.nvmlDeviceGetCount) or 0):
            handle, why = _handle(pynvml, index)
            if why is None:
                yield pynvml, index, handle
    finally:
        pynvml.nvmlShutdown()


def _memory(pynvml: Any, handle: Any, unknown: dict[str, str]) -> tuple[Any, Any, int | None]:
    """(memory as the first version of the question tells it, as the second does, bytes in use)."""
    first = _ask(unknown, "memory_total_bytes", pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    # Version 2 tells the driver's reserve apart from what is used.
    asks = hasattr(pynvml, "nvmlMemory_v2")
    second = _ask(unknown, "memory_usable_bytes", pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2) if asks else None
    return first, second, second.used if second else first.used if first else None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _handle(pynvml: Any, index: int) -> tuple[Any, str | None]:
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index), None
    except pynvml.NVMLError as error:
        return None, str(error)


def _unanswered(index: int, why: str) -> Gpu:
    # A container that may not use a GPU is told so; the GPU itself may be sound.
    return Gpu(index=index, unknown={"name": why}) if "permission" in why.lower() else Gpu(index=index, lost=why)


def _ask(unknown: dict[str, str], field: str, pynvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None with the reason in `unknown`. Old libraries lack some calls, which counts as not supported."""
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        unknown[field] = str(error)
    except (AttributeError, TypeError) as error:
        unknown[field] = f"this nvidia-ml-py cannot ask: {error}"
    return None


def _gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    unknown: dict[str, str] = {}

    def ask(field: str, name: str, *arguments: Any) -> Any:
        call = getattr(pynvml, name, None)
        return _ask(unknown, field, pynvml, call, handle, *arguments) if call else None

    memory, second, used = _memory(pynvml, handle, unknown)
    capability = ask("compute_capability", "nvmlDeviceGetCudaComputeCapability")
    architecture = ask("architecture", "nvmlDeviceGetArchitecture")
    pci = ask("bus_id", "nvmlDeviceGetPciInfo")
    pstate = ask("pstate", "nvmlDeviceGetPerformanceState")
    reasons = ask("idle", "nvmlDeviceGetCurrentClocksEventReasons")
    ecc = ask("ecc", "nvmlDeviceGetEccMode")
    errors = ask("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", 1, 0) if ecc and ecc[0] else None
    mig = ask("mig", "nvmlDeviceGetMigMode")
    utilization = ask("utilization_percent", "nvmlDeviceGetUtilizationRates")
    affinity = ask("cpu_affinity", "nvmlDeviceGetCpuAffinity", 64)
    own_node = ask("gpu_numa_id", "nvmlDeviceGetNumaNodeId")
    near = ask("numa_node", "nvmlDeviceGetMemoryAffinity", 16, 0)
    persistence = ask("persistence", "nvmlDeviceGetPersistenceMode")
    mode = ask("compute_mode", "nvmlDeviceGetComputeMode")
    address = _address(pci, unknown)
    nvlinks = _nvlinks(pynvml, handle, unknown)
    return Gpu(
        index=index,
        name=_text(ask("name", "nvmlDeviceGetName")),
        uuid=_text(ask("uuid", "nvmlDeviceGetUUID")),
        bus_id=address,
        architecture=_ARCHITECTURES.get(architecture),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_total_bytes=memory.total if memory else None,
        memory_usable_bytes=_usable(second),
        memory_used_bytes=used,
        memory_bus_width_bits=ask("memory_bus_width_bits", "nvmlDeviceGetMemoryBusWidth"),
        pcie_generation=ask("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_generation_device_max=ask("pcie_generation_device_max", "nvmlDeviceGetGpuMaxPcieLinkGeneration"),
        pcie_width_lanes=ask("pcie_width_lanes", "nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max_lanes=ask("pcie_width_max_lanes", "nvmlDeviceGetMaxPcieLinkWidth"),
        numa_node=_near_node(near, address),
        gpu_numa_id=own_node,
        cpu_affinity=cpu_ranges(_bits(affinity or [])) or None,
        pstate=f"P{pstate}" if isinstance(pstate, int) and pstate < 16 else None,
        idle=bool(reasons & _IDLE) if reasons is not None else None,
        throttle_reasons=[name for bit, name in _SLOWDOWNS.items() if reasons & bit] if reasons is not None else None,
        utilization_percent=utilization.gpu if utilization else None,
        temperature_c=ask("temperature_c", "nvmlDeviceGetTemperature", 0),
        power_draw_w=_watts(ask("power_draw_w", "nvmlDeviceGetPowerUsage")),
        power_limit_w=_watts(ask("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit")),
        power_limit_default_w=_watts(ask("power_limit_default_w", "nvmlDeviceGetPowerManagementDefaultLimit")),
        clock_sm_mhz=ask("clock_sm_mhz", "nvmlDeviceGetClockInfo", 1),
        clock_sm_max_mhz=ask("clock_sm_max_mhz", "nvmlDeviceGetMaxClockInfo", 1),
        clock_memory_mhz=ask("clock_memory_mhz", "nvmlDeviceGetClockInfo", 2),
        clock_memory_max_mhz=ask("clock_memory_max_mhz", "nvmlDeviceGetMaxClockInfo", 2),
        ecc=bool(ecc[0]) if ecc else None,
        ecc_uncorrected=errors,
        persistence=bool(persistence) if persistence is not None else None,
        compute_mode=_COMPUTE_MODES.get(mode),
        mig=bool(mig[0]) if mig else None,
        mig_devices=_mig_devices(pynvml, handle) if mig and mig[0] else [],
        nvlink_gb_s=nvlinks,
        processes=_processes(ask("processes", "nvmlDeviceGetComputeRunningProcesses")),
        # A GPU that fell off the bus keeps its handle and answers every question so.
        lost=next((why for why in unknown.values() if "is lost" in why.lower()), None),
        unknown=unknown,
    )


def _address(pci: Any, unknown: dict[str, str]) -> str | None:
    if pci is None:
        return None
    try:
        return bus_id(_text(pci.busId))
    except (ValueError, TypeError) as error:
        unknown["bus_id"] = f"cannot be read: {error}"
        return None


def _usable(second: Any) -> int | None:
    if second and getattr(second, "reserved", 0):
        return second.total - second.reserved
    # Without a reserve of its own the first version counts it as used; an unused card then has free = usable.
    return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _near_node(masks: Any, address: str | None) -> int | None:
    """The one NUMA node that NVML or /sys names; None where they name several or none (/sys says -1 where the firmware is silent)."""
    named = _bits(masks or [])
    if len(named) == 1:
        return named[0]
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _bits(words: Any) -> list[int]:
    """Numbers of the bits that are set in masks of 64 each."""
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1]


def _mig_devices(pynvml: Any, handle: Any) -> list[MigDevice]:
    found = []
    for slot in range(_ask({}, "mig", pynvml, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = _ask({}, "mig", pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
        memory = _ask({}, "mig", pynvml, pynvml.nvmlDeviceGetMemoryInfo, device) if device else None
        if memory:
            found.append(MigDevice(instance=str(slot), memory_total_bytes=memory.total, memory_used_bytes=memory.used))
    return found


def _processes(running: list[Any] | None) -> list[GpuProcess] | None:
    if running is None:
        return None
    import psutil

    found = []
    for process in running:
        try:
            name = psutil.Process(process.pid).name()
        except psutil.Error:
            name = None  # a process of another container or user
        found.append(GpuProcess(pid=process.pid, name=name, memory_bytes=process.usedGpuMemory))
    return found


def _nvlinks(pynvml: Any, handle: Any, unknown: dict[str, str]) -> list[float | None] | None:
    """GB/s of every NVLink port, None for one that is down. None at all, with the reason, where NVML does not tell."""
    states: list[float | None] = []
    speeds: dict[int, float] = {}
    for port in range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18)):
        reasons: dict[str, str] = {}
        state = _ask(reasons, "nvlink", pynvml, pynvml.nvmlDeviceGetNvLinkState, handle, port)
        if state is None:
            if port == 0:
                unknown["nvlink_gb_s"] = reasons.get("nvlink", "not told")
                return None
            break
        speeds[port] = _link_speed(pynvml, handle, port)
        states.append(speeds[port] if state else None)
    if any(s == 0.0 for s in states):
        unknown["nvlink_gb_s"] = "NVML shows links but not their rate"
        return None
    return states


def _link_speed(pynvml: Any, handle: Any, port: int) -> float:
    """GB/s of one port from NVML's field values (MB/s per link); 0.0 where it is not told."""
    field = getattr(pynvml, "NVML_FI_DEV_NVLINK_GET_SPEED", None)
    if field is None:
        return 0.0
    values = _ask({}, "speed", pynvml, pynvml.nvmlDeviceGetFieldValues, handle, [(field, port)])
    return values[0].value.uiVal / 1000 if values and values[0].nvmlReturn == 0 else 0.0


def _link(pynvml: Any, a: int, b: int, one: Any, other: Any, gpus: list[Gpu]) -> Link:
    unknown: dict[str, str] = {}
    if one is None or other is None:
        return Link(a=a, b=b, unknown={"kind": "one of the GPUs does not answer"})
    ancestor = _ask(unknown, "kind", pynvml, pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    p2p = {}
    for name, index in _CAPABILITIES.items():
        status = _ask(unknown, f"p2p {name}", pynvml, pynvml.nvmlDeviceGetP2PStatus, one, other, index)
        if status is not None:
            p2p[name] = _P2P.get(status, "U")
    count = _shared_nvlinks(pynvml, one, gpus[a], gpus[b], p2p, unknown)
    kind = f"NV{count}" if count else _ANCESTORS.get(ancestor)
    if kind is None:
        unknown.setdefault("kind", f"NVML calls the nearest common ancestor {ancestor}")
    return Link(a=a, b=b, kind=kind, kind_is_pcie_path=count is None and kind is not None, nvlinks=count, p2p=p2p, unknown=unknown)


def _shared_nvlinks(pynvml: Any, one: Any, a: Gpu, b: Gpu, p2p: dict[str, str], unknown: dict[str, str]) -> int | None:
    """NVLinks between two GPUs: ports whose far end is the other GPU, or, through a switch, all ports that are up."""
    if a.nvlink_gb_s is None:
        # NVML names no port; it still tells whether peer traffic can take NVLink.
        if p2p.get("nvlink") not in (None, "OK", "U", "DR"):  # DR: switched off in the driver, whatever is wired
            return 0
        unknown["nvlinks"] = a.unknown.get("nvlink_gb_s", "not told")
        return None
    count = hidden = 0
    for port, rate in enumerate(a.nvlink_gb_s):
        if not rate:
            continue
        kind = _ask({}, "far", pynvml, pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, one, port)
        far = _ask({}, "far", pynvml, pynvml.nvmlDeviceGetNvLinkRemotePciInfo, one, port)
        # nvmlIntNvLinkDeviceType_t: 0 GPU, 1 IBMNPU, 2 switch. A virtual machine hides the switches' addresses.
        switched = kind == 2 or (kind is None and p2p.get("nvlink") == "OK" and len([r for r in a.nvlink_gb_s if r]) > 6)
        if switched:
            count += p2p.get("nvlink", "OK") == "OK"
        else:
            address = _address(far, {})
            if address is None or b.bus_id is None or address.startswith("ffff"):
                hidden += 1
            count += address is not None and address == b.bus_id
    # Ports whose far end is hidden may be this pair's, unless peer traffic cannot take NVLink at all.
    if hidden and not count and p2p.get("nvlink") in (None, "OK", "U", "DR"):
        unknown["nvlinks"] = f"the far end of {hidden} NVLinks is not told"
        return None
    return count
