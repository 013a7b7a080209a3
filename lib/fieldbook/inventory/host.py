"""The machine around the GPUs: processor, memory, NUMA nodes, shared memory, IOMMU. From captured outputs or from /proc and /sys."""

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .model import Host, NumaNode, Reading
from .values import MIB, size_bytes

# Instruction sets that decide which CPU kernels vLLM can use.
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")
# Options of the kernel's command line that say something of peer traffic between PCIe devices.
KERNEL_OPTIONS = re.compile(
    r"(?:intel_iommu|amd_iommu|iommu(?:\.\w+)?|pci|pcie_\w+|pcie_acs_override|nvidia[.\w-]*|numa\w*|hugepages\w*|default_hugepagesz)(?:=.*)?"
)


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo as bytes per key ('kB' there means KiB)."""
    return {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d{1,15}) kB\s*$", text, re.M)}


def read_meminfo(text: str) -> Reading | None:
    """/proc/meminfo; memory_available_bytes is None before Linux 3.14."""
    values = parse_meminfo(text)
    if "MemTotal" not in values or not re.search(r"^MemFree:", text, re.M):
        return None
    return Reading(command="/proc/meminfo", host=Host(memory_total_bytes=values["MemTotal"], memory_available_bytes=values.get("MemAvailable")))


def read_free(text: str) -> Reading | None:
    """`free -b` (bytes); other units of `free` are rounded too far to be used."""
    found = re.search(r"^[ \t]+total[ \t]+used[ \t]+free.*\n[ \t]*Mem:\s+(\d+)((?:\s+\d+)*)", text, re.M)
    # Plain `free` counts KiB: 540000000 is a machine of 515 GiB and no 540 MB. Bytes come in whole pages, which KiB do once in a thousand times.
    if not found or len(found[1]) > 18 or int(found[1]) < 2**28 or (int(found[1]) < 2**36 and int(found[1]) % 4096):
        return None
    rest = found[2].split()
    return Reading(command="free -b", host=Host(memory_total_bytes=int(found[1]), memory_available_bytes=int(rest[4]) if len(rest) > 4 else None))


def parse_numactl(text: str) -> list[NumaNode]:
    """Nodes of `numactl -H`; its MB are MiB. A list of CPUs may be wrapped over several lines."""
    text = _unquoted(text)
    cpus = {int(n): listed for n, listed in re.findall(r"^[ \t]*node (\d{1,4}) cpus:([ \d]*(?:\n[ \t]*\d[ \d]*$)*)", text, re.M)}
    sizes = {int(n): int(size) * MIB for n, size in re.findall(r"^[ \t]*node (\d{1,4}) size: (\d{1,12}) MB\s*$", text, re.M)}
    return [
        NumaNode(node=n, cpus=[int(c) for c in cpus[n].split() if len(c) < 7] if n in cpus else None, memory_total_bytes=sizes.get(n))
        for n in sorted({*cpus, *sizes})
    ]


def _unquoted(text: str) -> str:
    """Lines without the marks of a quoted mail, a comment or a Markdown table."""
    return re.sub(r"(?<![ \t])[ \t]*\|[ \t]*$", "", re.sub(r"^(?:[ \t]*[>#|])+[ ]?", "", text, flags=re.M), flags=re.M)


def read_numactl(text: str) -> Reading | None:
    """`numactl -H`; says when fewer nodes are listed than it states."""
    nodes = parse_numactl(text)
    stated = re.search(r"^[ \t]*available: (\d{1,4}) nodes?", _unquoted(text), re.M)
    if re.search(r"^[^\w\n]*(?:numactl: )?No NUMA (?:support )?available", text, re.M | re.I) and not nodes:
        return Reading(command="numactl -H", notes=["numactl: no NUMA on this system: all memory is one domain"])
    if not nodes and not stated:
        return None
    named = re.findall(r"^[ \t]*node (\d{1,4}) cpus:", _unquoted(text), re.M)
    twice = sorted({n for n in named if named.count(n) > 1}, key=int)
    missing = [f"numactl -H states {stated[1]} NUMA nodes and lists {len(nodes)}"] if stated and int(stated[1]) != len(nodes) else []
    missing += [f"numactl -H lists node {', '.join(twice)} more than once: the last one is read"] if twice else []
    return Reading(command="numactl -H", numa=nodes, incomplete=missing)


def parse_cpu_list(text: str) -> list[int]:
    """'0-2,5' -> [0, 1, 2, 5], as /sys writes CPU sets. Parts that are no range of CPU numbers are left out."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        # Linux counts at most 8192 CPUs; a damaged list must not become millions of them.
        if found and int(found[2] or found[1]) < 2**13 and len(cpus) < 2**13:
            cpus.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cpus


def cpu_ranges(cpus: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5', the inverse of parse_cpu_list."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in ranges)


# Keys that only lscpu prints this way; two of them make a text its output.
_LSCPU_KEYS = {"Architecture", "CPU(s)", "Thread(s) per core", "Core(s) per socket", "Socket(s)", "NUMA node(s)", "On-line CPU(s) list", "Model name"}


def read_lscpu(text: str) -> Reading | None:
    """`lscpu -J` or plain `lscpu`, whole or a piece of it. Raises BadInput for JSON of lscpu from which not even the number of CPUs can be read."""
    incomplete: list[str] = []
    start = re.search(r'\{\s*"lscpu"\s*:', text)
    if start:
        try:
            fields = _flatten(json.JSONDecoder().raw_decode(text[start.start() :])[0]["lscpu"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pairs = re.findall(r'"field"\s*:\s*"([^"\n]{1,60}):?"\s*,\s*"data"\s*:\s*"([^"\n]*)"', text)
            fields = {key.rstrip(":"): value for key, value in pairs}
            if "CPU(s)" not in fields:
                raise BadInput("not the whole output of `lscpu -J`: its JSON breaks off or has no fields") from None
            incomplete = ["the JSON of lscpu breaks off: what stands before the break was read"]
        if not re.fullmatch(r"\d{1,6}", fields.get("CPU(s)", "")):
            raise BadInput("lscpu without a count under CPU(s); give the output of `lscpu -J` as it was printed")
    else:
        fields = {}
        for key, value in re.findall(r"^[ \t]*([A-Z][^:\n|]{2,40}):[ \t|]+(\S.*)$", _unquoted(text), re.M):
            fields.setdefault(key.strip(), value.strip())
        if len(_LSCPU_KEYS & set(fields)) < 2:
            return None

    def count(key: str) -> int | None:
        return int(fields[key]) if re.fullmatch(r"\d{1,6}", fields.get(key, "")) else None

    nodes = []
    for key, value in fields.items():
        named = re.fullmatch(r"NUMA node(\d{1,4}) CPU\(s\)", key)
        if named and re.fullmatch(r"[\d,-]*", value):
            # A list that cannot be read is not the empty list of a node without CPUs.
            nodes.append(NumaNode(node=int(named[1]), cpus=parse_cpu_list(value) or ([] if not value else None)))
    sockets, per_socket = count("Socket(s)"), count("Core(s) per socket")
    by_lists = sum(len(n.cpus or []) for n in nodes) if len(nodes) == count("NUMA node(s)") else None
    # A virtual machine may answer '-': then it is not told.
    unknown = {name: fields[key] for key, name in (("Socket(s)", "sockets"), ("Core(s) per socket", "cores")) if key in fields and count(key) is None}
    host = Host(
        system=f"captured, {fields['Architecture']}" if "Architecture" in fields else None,
        cpu_model=fields.get("Model name"),
        sockets=sockets,
        cores=sockets * per_socket if sockets and per_socket else None,
        logical_cpus=count("CPU(s)") or by_lists,
        isa=[flag for flag in ISA_FLAGS if flag in fields.get("Flags", "").split()],
        unknown=unknown,
    )
    return Reading(command="lscpu", host=host, numa=nodes, incomplete=incomplete)


def _flatten(entries: list[dict[str, Any]]) -> dict[str, str]:
    # Newer lscpu nests its fields in sections with children; older ones give one flat list.
    flat: dict[str, str] = {}
    for entry in entries:
        data = entry.get("data")
        flat[entry["field"].rstrip(":")] = data if isinstance(data, str) else ""
        flat.update(_flatten(entry.get("children", [])))
    return flat


def read_df_shm(text: str) -> Reading | None:
    """`df -B1 /dev/shm` (or plain df, in KiB)."""
    found = re.search(
        r"^Filesystem\s+(1B-blocks|1-blocks|1K-blocks|1024-blocks)\b.*\n\S+\s+(\d{1,19})\s+(\d{1,19})\s+(\d{1,19})\s+\d*%?-?\s*/dev/shm\s*$", text, re.M
    )
    if not found:
        return None
    unit = "B" if found[1].startswith("1B") or found[1] == "1-blocks" else "KiB"
    return Reading(command="df /dev/shm", host=Host(shm_total_bytes=size_bytes(found[2], unit), shm_free_bytes=size_bytes(found[4], unit)))


def read_iommu(text: str) -> Reading | None:
    """The one line `iommu groups: N` that `fieldbook capture` writes."""
    found = re.search(r"^iommu groups: (\d{1,6})\s*$", text, re.M)
    return Reading(command="/sys/kernel/iommu_groups", host=Host(iommu_groups=int(found[1]))) if found else None


def read_cmdline(text: str, source: str = "") -> Reading | None:
    """/proc/cmdline; only the options about IOMMU, PCI and NUMA are kept. Recognised by its usual words or by the name of the file."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 or not (re.search(r"\bBOOT_IMAGE=|\broot=\S|\biommu=\S", text) or "cmdline" in source):
        return None
    return Reading(command="/proc/cmdline", host=Host(kernel_options=[word for word in text.split() if KERNEL_OPTIONS.fullmatch(word)]))


def live() -> tuple[Host, list[NumaNode]]:
    """This machine, from /proc, /sys and /dev/shm."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    meminfo = parse_meminfo(Path("/proc/meminfo").read_text())
    parts = [dict(re.findall(r"^(.+?)\s*: (.*)$", part, re.M)) for part in cpuinfo.strip().split("\n\n")]
    cores = {(p.get("physical id", "0"), p.get("core id", str(i))) for i, p in enumerate(parts)}
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    groups = Path("/sys/kernel/iommu_groups")
    options = Path("/proc/cmdline").read_text().split() if os.access("/proc/cmdline", os.R_OK) else []
    host = Host(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=parts[0].get("model name"),
        sockets=len({p.get("physical id", "0") for p in parts}),
        cores=len(cores),
        logical_cpus=len(os.sched_getaffinity(0)),
        isa=[flag for flag in ISA_FLAGS if flag in parts[0].get("flags", "").split()],
        memory_total_bytes=meminfo["MemTotal"],
        memory_available_bytes=meminfo.get("MemAvailable"),
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
        kernel_options=[word for word in options if KERNEL_OPTIONS.fullmatch(word)],
        iommu_groups=len(list(groups.iterdir())) if groups.is_dir() else None,
    )
    return host, _live_numa()


def _live_numa() -> list[NumaNode]:
    nodes = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        found = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
        cpus = parse_cpu_list((folder / "cpulist").read_text())
        nodes.append(NumaNode(node=int(folder.name[4:]), cpus=cpus, memory_total_bytes=int(found[1]) * 1024 if found else None))
    return nodes
