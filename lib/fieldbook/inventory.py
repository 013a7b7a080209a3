"""What is in the box: host, cores, memory, NUMA nodes, and GPUs when NVML answers. Live, or from captured command outputs.

A value that the machine does not tell is None with the reason in `notes`, never 0.
"""

import json
import os
import platform
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from . import paths
from .errors import BadInput
from .params import Params

# Instruction sets that decide which CPU kernels vLLM can use.
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")


class Numa(BaseModel):
    """One NUMA node: its CPUs and memory in bytes."""

    model_config = ConfigDict(frozen=True)
    node: int
    cpus: list[int]
    memory_total_bytes: int | None


class Gpu(BaseModel):
    """One GPU as NVML sees it. Memory in bytes; PCIe width in lanes."""

    model_config = ConfigDict(frozen=True)
    index: int
    name: str
    uuid: str | None
    compute_capability: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    pcie_generation: int | None
    pcie_width_lanes: int | None


class Inventory(BaseModel):
    """The whole box."""

    model_config = ConfigDict(frozen=True)
    system: str
    cpu_model: str
    sockets: int
    cores: int
    logical_cpus: int
    isa: list[str]
    memory_total_bytes: int
    memory_available_bytes: int | None
    numa: list[Numa]
    gpus: list[Gpu]
    driver: str | None
    notes: list[str]


def read(params: Params) -> Inventory:
    """The live machine, or the captured outputs of a recorded box."""
    return read_live() if params.box.kind == "live" else read_captured(paths.box_data_dir(params.box.name))


def read_live() -> Inventory:
    """Read /proc, /sys and NVML on this machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    meminfo = parse_meminfo(Path("/proc/meminfo").read_text())
    fields = [dict(re.findall(r"^(.+?)\s*: (.*)$", part, re.M)) for part in cpuinfo.strip().split("\n\n")]
    sockets = {f.get("physical id", "0") for f in fields}
    cores = {(f.get("physical id", "0"), f.get("core id", str(i))) for i, f in enumerate(fields)}
    gpus, driver, note = read_nvml()
    return Inventory(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=fields[0].get("model name", "unknown"),
        sockets=len(sockets),
        cores=len(cores),
        logical_cpus=len(os.sched_getaffinity(0)),
        isa=[flag for flag in ISA_FLAGS if flag in fields[0].get("flags", "").split()],
        memory_total_bytes=meminfo["MemTotal"],
        memory_available_bytes=meminfo.get("MemAvailable"),
        numa=_read_numa_nodes(),
        gpus=gpus,
        driver=driver,
        notes=[note] if note else [],
    )


def read_captured(folder: Path) -> Inventory:
    """Read lscpu.json (`lscpu -J`), meminfo.txt (/proc/meminfo) and numactl-H.txt (`numactl -H`) of another machine.

    Raises BadInput naming the file that is missing or unreadable. GPU captures are not read yet; a note says so.
    """
    texts = {}
    for name in ("lscpu.json", "meminfo.txt", "numactl-H.txt"):
        if not (folder / name).is_file():
            raise BadInput(f"{paths.shown(folder / name)}: missing; a recorded box needs the captured output under that name")
        try:
            texts[name] = (folder / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise BadInput(f"{paths.shown(folder / name)}: not text in UTF-8; expected the output of the command as it was printed") from None
    try:
        lscpu = _flatten_lscpu(json.loads(texts["lscpu.json"])["lscpu"])
        logical_cpus = int(lscpu["CPU(s)"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{paths.shown(folder)}/lscpu.json: not the output of `lscpu -J`, or no CPU(s) in it") from None
    meminfo = parse_meminfo(texts["meminfo.txt"])
    if "MemTotal" not in meminfo:
        raise BadInput(f"{paths.shown(folder)}/meminfo.txt: no MemTotal line; expected the text of /proc/meminfo")
    # A virtual machine may answer '-': then there is one of them.
    sockets, cores_per_socket = (int(lscpu[key]) if lscpu.get(key, "").isdigit() else 1 for key in ("Socket(s)", "Core(s) per socket"))
    captured_gpus = sorted(p.name for p in folder.glob("nvidia-smi*")) + sorted(p.name for p in folder.glob("topo-*"))
    return Inventory(
        system=f"captured, {lscpu.get('Architecture', 'unknown')}",
        cpu_model=lscpu.get("Model name", "unknown"),
        sockets=sockets,
        cores=sockets * cores_per_socket,
        logical_cpus=logical_cpus,
        isa=[flag for flag in ISA_FLAGS if flag in lscpu.get("Flags", "").split()],
        memory_total_bytes=meminfo["MemTotal"],
        memory_available_bytes=meminfo.get("MemAvailable"),
        numa=parse_numactl(texts["numactl-H.txt"]),
        gpus=[],
        driver=None,
        notes=[f"GPU captures are not read yet: {', '.join(captured_gpus)}"] if captured_gpus else ["no GPU outputs were captured"],
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes per key ('kB' there means KiB)."""
    return {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}


def parse_numactl(text: str) -> list[Numa]:
    """Nodes of `numactl -H`; its MB are MiB."""
    nodes = []
    for node, cpus in re.findall(r"^node (\d+) cpus:(.*)$", text, re.M):
        size = re.search(rf"^node {node} size: (\d+) MB$", text, re.M)
        nodes.append(Numa(node=int(node), cpus=[int(c) for c in cpus.split()], memory_total_bytes=int(size[1]) * 2**20 if size else None))
    return nodes


def parse_cpu_list(text: str) -> list[int]:
    """'0-2,5' -> [0, 1, 2, 5], as /sys writes CPU sets."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def _read_numa_nodes() -> list[Numa]:
    nodes = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        found = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
        cpus = parse_cpu_list((folder / "cpulist").read_text())
        nodes.append(Numa(node=int(folder.name[4:]), cpus=cpus, memory_total_bytes=int(found[1]) * 1024 if found else None))
    return nodes


def _flatten_lscpu(entries: list[dict]) -> dict[str, str]:
    # Newer lscpu nests its fields in sections with children; older ones give one flat list.
    flat: dict[str, str] = {}
    for entry in entries:
        flat[entry["field"].rstrip(":")] = entry.get("data") or ""
        flat.update(_flatten_lscpu(entry.get("children", [])))
    return flat


def read_nvml() -> tuple[list[Gpu], str | None, str | None]:
    """(GPUs, driver version, note): NVML through nvidia-ml-py; no GPUs and the reason when it does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], None, f"no GPU: NVML does not answer ({error})"
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())], driver, None
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(pynvml, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(call, *arguments):
        try:
            return call(handle, *arguments)
        except pynvml.NVMLError:
            return None

    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    capability = ask(pynvml.nvmlDeviceGetCudaComputeCapability)
    return Gpu(
        index=index,
        name=str(ask(pynvml.nvmlDeviceGetName)),
        uuid=ask(pynvml.nvmlDeviceGetUUID),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_total_bytes=memory.total if memory else None,
        memory_used_bytes=memory.used if memory else None,
        pcie_generation=ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_width_lanes=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    )
