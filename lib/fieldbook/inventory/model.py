"""What an inventory consists of. Bytes, GB/s (10**9 bytes per second and direction), watts, MHz; a value nobody told is None, with the reason kept."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Severity = Literal["serious", "warning", "note"]


class Frozen(BaseModel):
    """A value: fields are fixed once it is made, an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Spread(Frozen):
    """Repeated measurements of one quantity: smallest, median, largest, and how many."""

    min: float
    median: float
    max: float
    samples: int


class GpuProcess(Frozen):
    """A process that a GPU lists. memory_bytes is None where the driver does not tell (WDDM, containers)."""

    pid: int | None = None
    name: str | None = None
    memory_bytes: int | None = None


class MigDevice(Frozen):
    """One MIG instance of a GPU."""

    instance: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None


class Gpu(Frozen):
    """One GPU, or what one output tells of it. Every field may be None; `unknown` says why for those that the output names but does not tell."""

    index: int | None = None
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None  # domain:bus:device.function as /sys writes it: 0000:3b:00.0
    architecture: str | None = None
    compute_capability: str | None = None  # '9.0'
    memory_total_bytes: int | None = None
    memory_usable_bytes: int | None = None  # total less what the driver reserves: what CUDA calls the total
    memory_used_bytes: int | None = None
    memory_bus_width_bits: int | None = None
    pcie_generation: int | None = None  # now; an idle link may rest at 1
    pcie_generation_max: int | None = None  # what GPU and slot together can do
    pcie_generation_device_max: int | None = None
    pcie_generation_host_max: int | None = None
    pcie_width_lanes: int | None = None
    pcie_width_max_lanes: int | None = None
    numa_node: int | None = None
    gpu_numa_id: int | None = None  # the node that the GPU's own memory forms (GH200 and later)
    cpu_affinity: str | None = None  # '0-47,96-143'
    pstate: str | None = None  # 'P0' busiest to 'P15'
    idle: bool | None = None  # the driver says the clocks are low because there is no work
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    clock_memory_mhz: int | None = None
    clock_memory_max_mhz: int | None = None
    throttle_reasons: list[str] | None = None  # active slowdowns besides idling and set limits
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    driver_model: str | None = None  # WDDM, TCC, MCDM on Windows
    mig: bool | None = None
    mig_devices: list[MigDevice] = []
    nvlink_gb_s: list[float | None] | None = None  # per link and direction; None in the list: link inactive
    processes: list[GpuProcess] | None = None  # None: not told; []: told that there are none
    lost: str | None = None  # the driver's own words when the GPU does not answer
    unknown: dict[str, str] = {}


class Link(Frozen):
    """The way between GPUs a < b. kind is nvidia-smi's word (NV2, PIX, PXB, PHB, NODE, SYS)."""

    a: int
    b: int
    kind: str | None = None
    kind_is_pcie_path: bool = False  # read from `topo -mp`: the PCIe path, whatever NVLink there is beside it
    nvlinks: int | None = None  # 0: known to have none
    p2p: dict[str, str] = {}  # capability (read, write, nvlink, atomics, pcie) -> status (OK, CNS, GNS, TNS, NS, DR, U)
    theoretical_gb_s: float | None = None
    theoretical_source: str | None = None
    measured_gb_s: dict[str, Spread] = {}  # as measure.attach names them: '0->1', '0<->1' (both at once, sum), '0->1 through NCCL', ...
    measured_latency_us: dict[str, Spread] = {}
    unknown: dict[str, str] = {}


class Nic(Frozen):
    """A network card of the topology matrix, and how each GPU reaches it (GPU index as text -> kind)."""

    name: str
    links: dict[str, str] = {}


class NumaNode(Frozen):
    """One NUMA node: CPUs, memory, and the GPUs nearest to it."""

    node: int
    cpus: list[int] | None = None
    memory_total_bytes: int | None = None
    gpus: list[int] = []


class PciePort(Frozen):
    """Link status of one PCI device as `lspci -vv` or /sys tells it. speed in GT/s, width in lanes; cap: what this end of the link can do."""

    address: str | None = None
    device: str | None = None
    speed_gt_s: float | None = None
    speed_cap_gt_s: float | None = None
    width_lanes: int | None = None
    width_cap_lanes: int | None = None
    downgraded: list[str] = []  # 'speed', 'width': what lspci itself calls downgraded
    acs_redirect: bool | None = None  # access control sends peer traffic up to the root complex
    is_bridge: bool | None = None
    secondary_bus: str | None = None  # of a bridge: the bus below it, '0000:3b'
    is_gpu: bool | None = None


class Host(Frozen):
    """The machine around the GPUs."""

    system: str | None = None
    cpu_model: str | None = None
    sockets: int | None = None
    cores: int | None = None
    logical_cpus: int | None = None
    isa: list[str] = []
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    kernel_options: list[str] = []  # those of /proc/cmdline that say something of IOMMU or PCI
    iommu_groups: int | None = None  # 0: no IOMMU at work
    unknown: dict[str, str] = {}


class Measurement(Frozen):
    """One measured rate or latency with its ceiling. what: 'host to device', 'device copy', 'send/recv between two processes', ..."""

    what: str
    where: str  # 'GPU 0', 'GPU 0 -> GPU 1', 'loopback, gloo'
    unit: Literal["GB/s", "TFLOP/s", "us"]
    size_bytes: int
    spread: Spread
    ceiling: float | None = None
    ceiling_source: str | None = None


class Finding(Frozen):
    """Something worth knowing about the box: what, how it is known (a line of the output), what to do."""

    id: str
    severity: Severity
    what: str
    evidence: str
    advice: str
    gpus: list[int] = []


class Reading(Frozen):
    """What one command output tells. `gpu_count` is the number of GPUs that the text itself speaks of, where it does."""

    command: str  # 'nvidia-smi -q -x', 'nvidia-smi topo -m', ...
    source: str = ""  # file it came from
    gpus: list[Gpu] = []
    gpu_count: int | None = None
    links: list[Link] = []
    nics: list[Nic] = []
    ports: list[PciePort] = []
    numa: list[NumaNode] = []
    host: Host | None = None
    driver: str | None = None
    cuda: str | None = None
    incomplete: list[str] = []  # what the text should hold and does not
    notes: list[str] = []


class Inventory(Frozen):
    """The whole box."""

    source: str  # 'live' or the folder or file that was read
    readings: list[dict[str, str]]  # command and file of each output that was read
    host: Host
    numa: dict[str, NumaNode]
    driver: str | None
    cuda: str | None
    gpus: list[Gpu]
    links: list[Link]
    nics: list[Nic]
    ports: list[PciePort]
    islands: list[list[int]] | None  # groups joined by NVLink, single GPUs included; None: NVLink unknown
    cuts: list[dict[str, Any]]  # between each two islands: best kind, GB/s of its best pair
    switches: list[list[int]] | None  # GPUs behind the same PCIe switch (PIX, PXB); None: unknown
    incomplete: list[str]
    notes: list[str]
    findings: list[Finding]
    measured: list[Measurement]
