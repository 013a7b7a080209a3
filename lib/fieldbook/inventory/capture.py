"""Write the outputs that the readers of an inventory take, without serial numbers, names, addresses and UUIDs, so that a folder of them can be published.

What a command prints is kept; only what identifies this machine, its owner or its network is replaced. PCI addresses stay, since readers join on them.
"""

import contextlib
import getpass
import json
import os
import platform
import pwd
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..errors import BadInput
from .anonymize import VOCABULARY, Secrets, anonymize, technical_words
from .host import parse_cpu_list

TIMEOUT_S = 20.0
QUERY_FIELDS = (
    "index,name,uuid,pci.bus_id,memory.total,memory.reserved,memory.used,memory.free,compute_cap,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.gen.gpumax,pcie.link.gen.hostmax,pcie.link.width.current,pcie.link.width.max,driver_version,power.limit,clocks.max.sm,"
    "clocks.max.memory,persistence_mode,ecc.mode.current,mig.mode.current,pstate"
)
COMMANDS = {
    "nvidia-smi.txt": "nvidia-smi",
    "nvidia-smi-q.xml": "nvidia-smi -q -x",
    "nvidia-smi-L.txt": "nvidia-smi -L",
    "query-gpu.csv": f"nvidia-smi --query-gpu={QUERY_FIELDS} --format=csv",
    "topo-m.txt": "nvidia-smi topo -m",
    "topo-p2p-r.txt": "nvidia-smi topo -p2p r",
    "topo-p2p-w.txt": "nvidia-smi topo -p2p w",
    "topo-p2p-n.txt": "nvidia-smi topo -p2p n",
    "nvlink-s.txt": "nvidia-smi nvlink -s",
    "lspci-vv.txt": "lspci -D -vv",
    "lscpu.json": "lscpu -J",
    "numactl-H.txt": "numactl -H",
    "meminfo.txt": "/proc/meminfo",
    "cmdline.txt": "/proc/cmdline",
    "df-shm.txt": "df -B1 /dev/shm",
    "iommu.txt": "/sys/kernel/iommu_groups",
}
# These list the GPUs by index, so UUIDs met there first are numbered as the GPUs are.
NUMBERED_FIRST = ("query-gpu.csv", "nvidia-smi-L.txt", "nvidia-smi-q.xml")

CMDLINE_NAMES = re.compile(r"(?<![a-z])(?:iommu|pcie?|acs|hugepages?z?|hugetlb|numa|nvidia)(?![a-z])", re.I)


@dataclass(frozen=True)
class Taken:
    """What a command gave. text is None where there is nothing to write; result and why as in the rows of `capture`."""

    text: str | None
    result: str = "written"
    why: str = ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run_command(argv: list[str], timeout_s: float = TIMEOUT_S) -> Taken:
    """Run in the C locale and in a process group of its own, which is killed after timeout_s seconds and on an interrupt. Its own troubles are no exception."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"}, start_new_session=True
        )
    except FileNotFoundError:
        return Taken(None, "not there", f"{argv[0]} is not on this machine's PATH")
    except OSError as error:
        return Taken(None, "failed", f"{argv[0]} does not start: {error.strerror}")
    try:
        out, err = (data.decode(errors="replace") for data in process.communicate(timeout=timeout_s))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process stuck in the driver does not even die of SIGKILL; it must not hold this one.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        if isinstance(error, subprocess.TimeoutExpired):
            return Taken(None, "failed", f"no end after {timeout_s:g} s, killed")
        raise
    complaint = next((line.strip() for line in (err + "\n" + out).splitlines() if line.strip()), "it printed nothing")
    if process.returncode and not out.strip():
        return Taken(None, "failed", f"exit status {process.returncode}: {complaint}")
    return Taken(out, why=f"exit status {process.returncode}: {complaint}" if process.returncode else "" if out.strip() else complaint)


def _query_gpu() -> Taken:
    fields, refused = QUERY_FIELDS.split(","), []
    while True:
        taken = run_command(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv"])
        found = re.search(r'Field "([^"]+)" is not a valid field to query', f"{taken.text} {taken.why}")
        if not found:
            known = f"this driver does not know {', '.join(refused)}" if refused else ""
            return Taken(taken.text, taken.result, "; ".join(filter(None, (known, taken.why))))
        if found[1] not in fields or len(fields) == 1:
            return Taken(None, "failed", found[0])
        fields.remove(found[1])
        refused.append(found[1])


def cut_lspci(text: str) -> str:
    """Of `lspci -D -vv`: display and 3D controllers, processing accelerators, bridges above them, PCIe switches and NVSwitches."""
    blocks = [block.strip("\n") + "\n" for block in re.split(r"\n[ \t]*\n", text) if re.match(r"\s*[0-9a-f]{4,8}:[0-9a-f]{2}:", block)]
    display = r"\S+ (?:VGA compatible|XGA compatible|3D|Display) controller|\S+ Processing accelerators?|\S+ Class (?:03|12)\w\w"
    buses = [(b.split(":")[0], int(b.split(":")[1], 16)) for b in blocks if re.match(display, b)]

    def wanted(block: str) -> bool:
        if re.match(display, block) or "NVSwitch" in block.split("\n")[0]:
            return True
        below = re.search(r"Bus: primary=\w+, secondary=(\w+), subordinate=(\w+)", block)
        leads = below and any(d == block.split(":")[0] and int(below[1], 16) <= bus <= int(below[2], 16) for d, bus in buses)
        return bool(leads or re.search(r"Express \(v\d+\) (?:Up|Down)stream Port", block))

    return "\n".join(filter(wanted, blocks))


def _lspci() -> Taken:
    taken = run_command(["lspci", "-D", "-vv"])
    if taken.text is None:
        return taken
    text = cut_lspci(taken.text)
    reasons = [taken.why, "" if text else "no display controller and no switch in it"]
    if "<access denied>" in text:
        reasons.append("link status and ACS are readable by root only: capture with sudo to have them")
    return Taken(text, why="; ".join(filter(None, reasons)))


def _numa_from_sys() -> str:
    # The form of `numactl -H`: its MB are MiB.
    base, lines, distances = "/sys/devices/system/node", [], []
    nodes = sorted(int(p.name[4:]) for p in Path(base).glob("node[0-9]*"))
    for node in nodes:
        memory = dict(re.findall(r"Mem(Total|Free):\s+(\d+) kB", _read(f"{base}/node{node}/meminfo")))
        cpus = parse_cpu_list(_read(f"{base}/node{node}/cpulist"))
        lines.append(f"node {node} cpus: {' '.join(map(str, cpus))}".rstrip())
        lines += [f"node {node} {word}: {int(memory[key]) // 1024} MB" for word, key in (("size", "Total"), ("free", "Free")) if key in memory]
        row = _read(f"{base}/node{node}/distance").split()
        distances += [f"{node:3}: {' '.join(f'{d:>3}' for d in row)}"] if len(row) == len(nodes) else []
    if len(distances) == len(nodes) > 0:
        lines += ["node distances:", "node " + " ".join(f"{n:3}" for n in nodes), *distances]
    listed = _read(f"{base}/online").strip() or ",".join(map(str, nodes))
    return "\n".join([f"available: {len(nodes)} nodes ({listed})", *lines]) + "\n" if nodes else ""


def _lscpu_from_proc() -> str:
    # The form of `lscpu -J`. ARM's cpuinfo tells no topology and names its flags Features.
    found = [dict(re.findall(r"^(.+?)\s*: (.*)$", part, re.M)) for part in _read("/proc/cpuinfo").split("\n\n")]
    cpus = [cpu for cpu in found if "processor" in cpu]
    if not cpus:
        return ""
    sockets = len({cpu.get("physical id", "0") for cpu in cpus})
    cores = len({(cpu.get("physical id", "0"), cpu.get("core id", str(i))) for i, cpu in enumerate(cpus)})
    values = {
        "Architecture": platform.machine(),
        "CPU(s)": len(cpus),
        "Model name": cpus[0].get("model name"),
        "Thread(s) per core": len(cpus) // cores,
        "Core(s) per socket": cores // sockets,
        "Socket(s)": sockets,
        "Flags": cpus[0].get("flags") or cpus[0].get("Features"),
    }
    return json.dumps({"lscpu": [{"field": f"{key}:", "data": str(value)} for key, value in values.items() if value is not None]}, indent=3) + "\n"


def _or_else(taken: Taken, text: str, source: str) -> Taken:
    # A command that is missing, fails or says nothing leaves the kernel's own files to read.
    if (taken.result == "written" and not taken.why) or not text:
        return taken
    return Taken(text, why=f"read from {source}: {taken.why}")


def cmdline_options(text: str) -> str:
    """Those options of /proc/cmdline whose name speaks of IOMMU, PCI, ACS, huge pages, NUMA or nvidia. What follows `--` is for init, not for the kernel."""
    words = re.findall(r'(?:[^\s"]|"[^"]*")+', re.split(r"\s--(?=\s|$)", text)[0])
    return " ".join(word for word in words if CMDLINE_NAMES.search(word.partition("=")[0]))


def take(name: str) -> Taken:
    """What belongs into the file `name` of COMMANDS, as it was printed."""
    command = COMMANDS[name]
    if name == "query-gpu.csv":
        return _query_gpu()
    if name == "lspci-vv.txt":
        return _lspci()
    if name == "iommu.txt":
        known = Path(command).is_dir()
        return Taken(f"iommu groups: {len(os.listdir(command))}\n") if known else Taken(None, "not there", f"{command} is missing")
    if command.startswith("/proc"):
        text = _read(command)
        kept = cmdline_options(text) + "\n" if name == "cmdline.txt" else text
        return Taken(kept) if text else Taken(None, "not there", f"{command} cannot be read")
    taken = run_command(command.split())
    if taken.why and re.search(r"Invalid (?:combination|argument|option)", taken.text or ""):
        return Taken(None, "failed", taken.why)  # an older nvidia-smi that does not know the subcommand: no output of it
    if name == "numactl-H.txt":
        return _or_else(taken, _numa_from_sys(), "/sys/devices/system/node")
    return _or_else(taken, _lscpu_from_proc(), "/proc/cpuinfo") if name == "lscpu.json" else taken


def machine_secrets(technical: Iterable[str] = ()) -> Secrets:
    """Names of this machine, its domains and its people. Names of less than three characters, VOCABULARY and `technical` words are left out."""
    own = {socket.gethostname(), os.uname().nodename, _read("/etc/hostname").strip(), (run_command(["hostname", "-f"], 5).text or "").strip()} - {""}
    short = {name.partition(".")[0].lower() for name in own}
    for line in _read("/etc/hosts").splitlines():
        names = line.partition("#")[0].split()[1:]
        if any(name.partition(".")[0].lower() in short for name in names):
            own.update(names)
    domains = {name.partition(".")[2] for name in own} | {_read("/proc/sys/kernel/domainname").strip()}
    domains.update(name for found in re.findall(r"^(?:search|domain)\s+(.*)$", _read("/etc/resolv.conf"), re.M) for name in found.split())
    domains = {".".join(labels[i:]) for name in domains for labels in [name.strip(".").split(".")] for i in range(len(labels) - 1)}
    users = {os.environ.get(key, "") for key in ("LOGNAME", "USER", "USERNAME", "SUDO_USER")} | {Path(os.environ.get("HOME", "/")).name}
    with contextlib.suppress(KeyError, OSError):
        entry = pwd.getpwuid(os.getuid())
        users |= {getpass.getuser(), entry.pw_name, Path(entry.pw_dir).name, entry.pw_gecos.partition(",")[0]}
    with contextlib.suppress(OSError):
        users |= {path.name for path in Path("/home").iterdir() if path.is_dir()}
    users |= {part for name in users for part in re.split(r"[\\@+]", name)}
    spared = {*VOCABULARY.split(), *technical}

    def usable(names: Iterable[str]) -> frozenset[str]:
        return frozenset(n for n in names if len(n) >= 3 and re.search(r"[A-Za-z]", n) and n.lower() not in spared)

    return Secrets(usable(own | {name.partition(".")[0] for name in own}), usable(domains), usable(users))


def check(folder: Path, names: Iterable[str] = COMMANDS) -> None:
    """Raises BadInput when `folder` is a file or holds one of the files already."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise BadInput(f"capture: {folder} is no folder; give a new or an empty one")
    held = [name for name in names if os.path.lexists(folder / name)]
    if held:
        raise BadInput(f"capture: {folder} holds {held[0]} already, and nothing is overwritten; give a new or an empty folder")


def _prepare(folder: Path, names: Iterable[str]) -> list[Path]:
    # Folders made for the capture, outermost first. Raises BadInput when nothing can or may be written there.
    check(folder, names)
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _remove([], missing)
        raise BadInput(f"capture: {folder} cannot be written to ({error.strerror}); give a folder of your own") from None
    return missing


def _remove(written: Iterable[Path], made: list[Path]) -> None:
    for path in written:
        path.unlink(missing_ok=True)
    for path in reversed(made):
        with contextlib.suppress(OSError):
            path.rmdir()


def capture(folder: Path, more: dict[str, str] | None = None) -> list[dict]:
    """Write the files of COMMANDS into `folder`, anonymized, and tell of each {"file", "command", "result": "written" | "not there" | "failed", "why"}.

    `more` are files of the caller, by name: written as they are and with the rest.
    Raises BadInput when `folder` is a file, cannot be written to or holds one of the files already. Interrupted, it leaves nothing behind.
    """
    more = more or {}
    made, written = _prepare(folder, [*COMMANDS, *more]), []
    try:
        taken = {name: take(name) for name in COMMANDS}
        raw = {name: one.text for name, one in taken.items() if one.text is not None}
        secrets = machine_secrets(technical_words(raw))
        safe: dict[str, str] = {}
        for name in dict.fromkeys((*NUMBERED_FIRST, *raw)):
            if name in raw:
                safe[name] = anonymize(raw[name], secrets)
        for name, text in safe.items():
            if os.path.lexists(folder / name):
                raise BadInput(f"capture: {folder} got a {name} from elsewhere meanwhile; give a folder of your own")
            written.append(folder / name)
            # Once more: only now all serials are known.
            files.write_whole(folder / name, anonymize(text, secrets))
        for name, text in more.items():
            written.append(folder / name)
            files.write_whole(folder / name, text)
    except BaseException as error:
        _remove(written, made)
        if isinstance(error, OSError):
            raise BadInput(f"capture: {folder} cannot be written to ({error.strerror}); nothing was left there") from None
        raise
    return [{"file": name, "command": COMMANDS[name], "result": one.result, "why": anonymize(one.why, secrets)} for name, one in taken.items()] + [
        {"file": name, "command": "fieldbook", "result": "written", "why": ""} for name in more
    ]
