"""GPUs as NVML tells them, with NVML's functions replaced: what was told is there, what was refused is None with NVML's own words."""

from types import SimpleNamespace

import psutil
import pynvml
import pytest

from fieldbook import inventory
from fieldbook.inventory import merge, nvml

GIB = 2**30
HIDDEN = "FFFFFFFF:FF:FF.0"
SWITCH, GPU_END = 2, 0
BUS = ["00000000:3B:00.0", "00000000:AF:00.0"]


def refused(code=pynvml.NVML_ERROR_NOT_SUPPORTED):
    """A function that refuses every question."""

    def answer(*_):
        raise pynvml.NVMLError(code)

    return answer


def h200(ports=18, speed=26562):
    """What NVML told on a machine with two H200 joined through switches, as functions by name. A handle is the GPU's index."""
    return {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=BUS[handle]),
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(total=140 * GIB, used=GIB // 2 if version else GIB, reserved=GIB // 2),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetArchitecture": lambda handle: 9,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetPerformanceState": lambda handle: 0,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x1 | 0x40,
        "nvmlDeviceGetEccMode": lambda handle: [1, 1],
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: {(1, 0): 0}[kind, counter],
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=0, memory=0),
        # CPUs 0-1 and 64: a bit of the second word.
        "nvmlDeviceGetCpuAffinity": lambda handle, words: [0b11, 1],
        "nvmlDeviceGetMemoryAffinity": lambda handle, words, scope: [1 << handle, 0],
        "nvmlDeviceGetNumaNodeId": refused(),
        "nvmlDeviceGetPersistenceMode": lambda handle: 1,
        "nvmlDeviceGetComputeMode": lambda handle: 0,
        "nvmlDeviceGetMemoryBusWidth": lambda handle: 6016,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 30,
        "nvmlDeviceGetPowerUsage": lambda handle: 76_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda handle: 700_000,
        "nvmlDeviceGetClockInfo": lambda handle, clock: {1: 345, 2: 3201}[clock],
        "nvmlDeviceGetMaxClockInfo": lambda handle, clock: {1: 1980, 2: 3201}[clock],
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetNvLinkState": lambda handle, port: 1 if port < ports else refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)(),
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, port: SWITCH,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, port: SimpleNamespace(busId=HIDDEN),
        "nvmlDeviceGetFieldValues": lambda handle, asked: [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=speed)) for _ in asked],
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 30,
        "nvmlDeviceGetP2PStatus": lambda one, other, capability: 5 if capability == 4 else 0,
    }


@pytest.fixture
def machine(monkeypatch):
    """NVML of the two H200, with some functions changed; every function of NVML that is not given refuses."""

    def make(ports=18, speed=26562, **changes):
        given = {**h200(ports, speed), **changes}
        for name in dir(pynvml):
            if name.startswith("nvml") and callable(getattr(pynvml, name)) and not isinstance(getattr(pynvml, name), type):
                monkeypatch.setattr(pynvml, name, given.get(name, refused()))
        return nvml.read()

    return make


def test_two_gpus_behind_nvlink_switches(machine):
    reading = machine()
    assert (reading.gpu_count, reading.driver, reading.cuda, reading.notes) == (2, "580.95.05", "13.0", [])
    one, other = reading.gpus
    assert (one.index, one.name, one.uuid, one.bus_id, other.bus_id) == (0, "NVIDIA H200", "GPU-0", "0000:3b:00.0", "0000:af:00.0")
    assert (one.architecture, one.compute_capability, one.ecc, one.ecc_uncorrected, one.mig, one.persistence) == ("Hopper", "9.0", True, 0, False, True)
    # The second version of the call tells the driver's reserve apart from what is used.
    assert (one.memory_total_bytes, one.memory_usable_bytes, one.memory_used_bytes) == (140 * GIB, 139.5 * GIB, GIB // 2)
    assert (one.pcie_generation, one.pcie_generation_max, one.pcie_width_lanes, one.pcie_width_max_lanes) == (5, 5, 16, 16)
    assert (one.pstate, one.idle, one.throttle_reasons, one.compute_mode) == ("P0", True, ["hw_thermal_slowdown"], "Default")
    assert (one.numa_node, other.numa_node, one.cpu_affinity) == (0, 1, "0-1,64")
    # This machine does not answer what node the GPU's own memory forms.
    assert one.gpu_numa_id is None and one.unknown == {"gpu_numa_id": "Not Supported"}
    assert (one.power_draw_w, one.power_limit_w, one.clock_sm_mhz, one.clock_sm_max_mhz, one.clock_memory_max_mhz) == (76.5, 700.0, 345, 1980, 3201)
    assert one.nvlink_gb_s == [26.562] * 18 and one.processes == []
    (link,) = reading.links
    assert (link.a, link.b, link.kind, link.nvlinks, link.kind_is_pcie_path) == (0, 1, "NV18", 18, False)
    assert link.p2p == {"read": "OK", "write": "OK", "nvlink": "OK", "atomics": "OK", "pcie": "NS"}
    box = merge.combine([reading], "live")
    assert box.islands == [[0, 1]] and box.links[0].theoretical_gb_s == 478.116  # 18 x 26.562


def test_two_gpus_with_bridges_between_them(machine):
    far = {0: BUS[1], 1: BUS[0]}
    direct = {"nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, port: GPU_END}
    # Ports 0 and 1 lead to the other GPU, 2 to a third one that this machine does not show, 3 is down.
    direct["nvmlDeviceGetNvLinkRemotePciInfo"] = lambda handle, port: SimpleNamespace(busId=far[handle] if port < 2 else "00000000:D8:00.0")
    direct["nvmlDeviceGetNvLinkState"] = lambda handle, port: int(port < 3) if port < 4 else refused()()
    reading = machine(speed=25000, **direct)
    assert reading.gpus[0].nvlink_gb_s == [25.0, 25.0, 25.0, None]
    assert (reading.links[0].kind, reading.links[0].nvlinks) == ("NV2", 2)


def test_two_gpus_with_nvlink_elsewhere_and_with_none(machine):
    direct = {"nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, port: GPU_END}
    direct["nvmlDeviceGetNvLinkRemotePciInfo"] = lambda handle, port: SimpleNamespace(busId="00000000:D8:00.0")
    (link,) = machine(ports=4, **direct).links
    assert (link.kind, link.nvlinks) == ("PHB", 0)
    # No port answers, and peer traffic cannot take NVLink: there is none.
    (link,) = machine(nvmlDeviceGetNvLinkState=refused(), nvmlDeviceGetP2PStatus=lambda a, b, capability: 5 if capability == 2 else 0).links
    assert (link.kind, link.nvlinks, link.kind_is_pcie_path) == ("PHB", 0, False)
    (link,) = machine(nvmlDeviceGetNvLinkState=lambda handle, port: 0).links
    assert (link.kind, link.nvlinks) == ("PHB", 0)


@pytest.mark.parametrize("status", [0, 4, 6])
def test_nvlink_that_nobody_tells_is_unknown(machine, status):
    """No port answers, and peer access over NVLink works, is switched off in the driver (4) or unknown (6): there may be NVLinks."""
    (link,) = machine(nvmlDeviceGetNvLinkState=refused(), nvmlDeviceGetP2PStatus=lambda a, b, capability: status).links
    assert link.nvlinks is None and link.unknown["nvlinks"] == "Not Supported" and (link.kind, link.kind_is_pcie_path) == ("PHB", True)
    assert merge.combine([machine(nvmlDeviceGetNvLinkState=refused())], "live").islands is None


@pytest.mark.parametrize("far", [lambda handle, port: SimpleNamespace(busId=HIDDEN), refused(), lambda handle, port: SimpleNamespace(busId="")])
def test_a_hidden_far_end_is_no_proof_of_no_nvlink(machine, far):
    direct = {"nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, port: GPU_END, "nvmlDeviceGetNvLinkRemotePciInfo": far}
    (link,) = machine(ports=4, **direct).links
    assert link.nvlinks is None and link.unknown["nvlinks"] == "the far end of 4 NVLinks is not told"
    # Where peer traffic cannot take NVLink, those ports lead elsewhere.
    (link,) = machine(ports=4, nvmlDeviceGetP2PStatus=lambda a, b, capability: 5, **direct).links
    assert link.nvlinks == 0


def test_links_without_a_rate(machine):
    told = machine(nvmlDeviceGetFieldValues=lambda handle, asked: [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=0))])
    assert told.gpus[0].nvlink_gb_s is None and told.gpus[0].unknown["nvlink_gb_s"] == "NVML shows links but not their rate"
    assert told.links[0].nvlinks is None and machine(nvmlDeviceGetFieldValues=refused()).gpus[0].nvlink_gb_s is None


def test_one_gpu_of_a_virtual_machine(machine):
    reading = machine(nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetNvLinkState=refused())
    (gpu,) = reading.gpus
    assert gpu.nvlink_gb_s is None and gpu.unknown["nvlink_gb_s"] == "Not Supported" and reading.links == []
    assert merge.combine([reading], "live").islands == [[0]]


def test_a_gpu_that_refuses_every_question(machine):
    answers = h200()
    kept = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    reading = machine(**{name: refused() for name in answers if name not in kept})
    assert (reading.gpu_count, reading.driver, reading.cuda) == (2, None, None)
    for gpu in reading.gpus:
        told = {name: value for name, value in gpu.model_dump().items() if name not in ("index", "unknown") and value not in (None, [])}
        assert told == {} and set(gpu.unknown.values()) == {"Not Supported"} and {"name", "memory_total_bytes", "pcie_generation", "ecc"} <= set(gpu.unknown)
    (link,) = reading.links
    assert (link.kind, link.nvlinks, link.p2p) == (None, None, {}) and {"kind", "p2p read", "nvlinks"} <= set(link.unknown)
    assert merge.combine([reading], "live").findings == []


def test_an_older_driver_lacks_some_calls(machine):
    """Function Not Found is what a driver older than nvidia-ml-py answers."""
    old = refused(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def memory(handle, version=None):
        return old() if version else SimpleNamespace(total=140 * GIB, used=GIB)

    names = ("nvmlDeviceGetNumaNodeId", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetArchitecture")
    reading = machine(nvmlDeviceGetMemoryInfo=memory, **dict.fromkeys(names, old))
    gpu = reading.gpus[0]
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes, gpu.memory_usable_bytes) == (140 * GIB, GIB, None)
    assert (gpu.idle, gpu.throttle_reasons, gpu.architecture, gpu.numa_node) == (None, None, None, None)
    assert gpu.unknown["idle"] == gpu.unknown["memory_usable_bytes"] == "Function Not Found" and reading.links[0].kind == "NV18"


def test_a_library_without_a_call(machine, monkeypatch):
    machine()
    monkeypatch.delattr(pynvml, "nvmlDeviceGetMemoryAffinity")
    monkeypatch.delattr(pynvml, "NVML_FI_DEV_NVLINK_GET_SPEED")
    gpu = nvml.read().gpus[0]
    assert gpu.name == "NVIDIA H200" and gpu.numa_node is None and gpu.nvlink_gb_s is None


def test_a_gpu_that_is_lost(machine):
    lost = refused(pynvml.NVML_ERROR_GPU_IS_LOST)
    reading = machine(nvmlDeviceGetHandleByIndex=lambda index: index if index == 0 else lost())
    assert [g.lost for g in reading.gpus] == [None, "GPU is lost"] and reading.gpu_count == 2
    assert reading.links[0].kind is None and reading.links[0].unknown == {"kind": "one of the GPUs does not answer"}
    (finding,) = [f for f in merge.combine([reading], "live").findings if f.id == "gpu-lost"]
    assert (finding.gpus, finding.evidence, finding.severity) == ([1], "GPU is lost", "serious")


def test_a_gpu_that_keeps_its_handle_and_is_lost(machine):
    """So it is for a GPU that falls off the bus while the driver is loaded: every question is answered with the same words."""
    spared = ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    lost = refused(pynvml.NVML_ERROR_GPU_IS_LOST)

    def losing(answer):
        return lambda handle, *more: lost() if handle == 1 else answer(handle, *more)

    changes = {name: losing(answer) for name, answer in h200().items() if name.startswith("nvmlDevice") and name not in spared}
    reading = machine(**changes)
    assert [g.lost for g in reading.gpus] == [None, "GPU is lost"] and reading.gpus[0].name == "NVIDIA H200" and reading.gpus[1].name is None


def test_a_gpu_that_a_container_may_not_use_is_not_called_broken(machine):
    denied = refused(pynvml.NVML_ERROR_NO_PERMISSION)
    reading = machine(nvmlDeviceGetHandleByIndex=lambda index: index if index == 0 else denied())
    assert reading.gpus[1].lost is None and reading.gpus[1].unknown == {"name": "Insufficient Permissions"}
    assert not [f for f in merge.combine([reading], "live").findings if f.id == "gpu-lost"]


def test_processes(machine):
    mine, gone = psutil.Process(), 2**22 - 7
    running = [SimpleNamespace(pid=mine.pid, usedGpuMemory=GIB), SimpleNamespace(pid=gone, usedGpuMemory=None)]
    found = machine(nvmlDeviceGetComputeRunningProcesses=lambda handle: running).gpus[0].processes
    assert [(p.pid, p.name, p.memory_bytes) for p in found] == [(mine.pid, mine.name(), GIB), (gone, None, None)]
    # None listed is an answer, a refusal is none.
    assert machine().gpus[0].processes == [] and machine(nvmlDeviceGetComputeRunningProcesses=refused()).gpus[0].processes is None


def test_mig_instances(machine):
    mig = {"nvmlDeviceGetMigMode": lambda handle: [1, 1], "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7}
    mig["nvmlDeviceGetMigDeviceHandleByIndex"] = lambda handle, slot: f"mig{slot}" if slot in (0, 2) else refused()()
    gpu = machine(**mig).gpus[0]
    assert gpu.mig and [(d.instance, d.memory_total_bytes) for d in gpu.mig_devices] == [("0", 140 * GIB), ("2", 140 * GIB)]
    assert machine(nvmlDeviceGetMigMode=refused()).gpus[0].mig is None


@pytest.mark.parametrize(("ancestor", "kind"), [(10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (0, None), (99, None)])
def test_pcie_paths(machine, ancestor, kind):
    (link,) = machine(nvmlDeviceGetTopologyCommonAncestor=lambda a, b: ancestor, nvmlDeviceGetNvLinkState=lambda handle, port: 0).links
    assert link.kind == kind and (kind is not None or str(ancestor) in link.unknown["kind"])


@pytest.mark.parametrize(("code", "word"), list(enumerate(["OK", "CNS", "GNS", "TNS", "DR", "NS", "U", "U"])))
def test_peer_status_words(machine, code, word):
    (link,) = machine(nvmlDeviceGetP2PStatus=lambda a, b, capability: code).links
    assert link.p2p == dict.fromkeys(("read", "write", "nvlink", "atomics", "pcie"), word)


def test_a_state_that_is_none_and_an_address_that_is_none(machine):
    gpu = machine(nvmlDeviceGetPerformanceState=lambda handle: 32, nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId="?")).gpus[0]
    assert (gpu.pstate, gpu.bus_id) == (None, None) and "cannot be read" in gpu.unknown["bus_id"]
    assert machine(nvmlDeviceGetMemoryAffinity=lambda *_: [0b11], nvmlDeviceGetPciInfo=refused()).gpus[0].numa_node is None  # two nodes are not one


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH])
def test_nvml_that_does_not_answer(machine, code, monkeypatch):
    reading = machine(nvmlInit=refused(code))
    assert (reading.gpus, reading.gpu_count) == ([], 0) and reading.notes == [f"no GPU: NVML does not answer ({pynvml.NVMLError(code)})"]
    box = inventory.read_live()
    assert box.gpus == [] and box.links == [] and box.notes == reading.notes and box.host.memory_total_bytes


def test_nvml_that_starts_and_does_not_count(machine):
    closed = []
    reading = machine(nvmlDeviceGetCount=refused(pynvml.NVML_ERROR_UNKNOWN), nvmlShutdown=lambda: closed.append(1))
    assert reading.gpus == [] and reading.gpu_count is None and "does not say how many" in reading.notes[0] and closed == [1]


def test_without_nvidia_ml_py(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert nvml.read().notes == ["no GPU can be seen: nvidia-ml-py is not installed"]


def test_usage_is_what_the_whole_reading_says_and_asks_for_nothing_else(machine, monkeypatch):
    whole = [(gpu.index, gpu.memory_used_bytes, gpu.processes) for gpu in machine().gpus]
    for name in ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetPciInfo", "nvmlDeviceGetName"):
        monkeypatch.setattr(pynvml, name, None)
    assert [(gpu.index, gpu.memory_used_bytes, gpu.processes) for gpu in nvml.usage()] == whole and len(whole) == 2
    assert inventory.gpu_memory_used() == {0: GIB // 2, 1: GIB // 2} and inventory.gpu_memory_used(2) == {0: GIB // 2}


def test_speeds_for_quick_looks(machine):
    gpus = machine().gpus
    looks = nvml.speeds()
    assert [(look["index"], look["sm_clock_mhz"], look["temperature_c"], look["power_w"]) for look in looks] == [
        (gpu.index, gpu.clock_sm_mhz, gpu.temperature_c, gpu.power_draw_w) for gpu in gpus
    ]
    assert all(look["power_limit_w"] == gpu.power_limit_w and look["slowed"] == (gpu.throttle_reasons or []) for look, gpu in zip(looks, gpus, strict=True))
    # Power cap and heat at once: 0x4 and 0x20.
    machine(nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x24)
    assert nvml.speeds()[0]["slowed"] == ["sw_power_cap", "sw_thermal_slowdown"]
    machine(nvmlDeviceGetUtilizationRates=refused(), nvmlDeviceGetClockInfo=refused())
    assert nvml.speeds()[0]["busy_percent"] is None and nvml.speeds()[0]["sm_clock_mhz"] is None


def test_there_are_no_speeds_without_nvml(machine, monkeypatch):
    machine(nvmlInit=refused(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert nvml.speeds() == []
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert nvml.speeds() == []
