"""Link status of PCI devices: `lspci -vv`, and the same facts from /sys on a live machine."""

import re
import subprocess
from pathlib import Path

from .model import Gpu, PciePort, Reading
from .smi_text import BUS_ID
from .values import bus_id

# 'GPU' in lspci's class names, and the bridges above them.
_GPU_CLASS = re.compile(r"(VGA compatible controller|3D controller|Display controller|Processing accelerators)")
_ADDRESS = re.compile(rf"^\s*(?:\w+:\s+)?({BUS_ID})(?:\s+(\S.*)|\s*)$")
_COMMAND = re.compile(rf"\blspci\b.*\s-\w*s\s+({BUS_ID})\b")
_LINK = re.compile(r"Speed\s+(\d{1,2}(?:\.\d)?)\s*GT/s(?:\s*\((\w+)\))?,\s*Width\s+x(\d{1,2})(?:\s*\((\w+)\))?")


def read_lspci(text: str) -> Reading | None:
    """Devices with a link status or with access control switched on. Bare LnkCap and LnkSta lines, as grep leaves them, are devices without address."""
    text = re.sub(r"^(?:[ \t]*[>#])+[ ]?", "", text, flags=re.M)
    if not re.search(r"^[^\w\n]*(?:\S{2,20}\.\d[ \t]+)?(?:LnkSta|LnkCap|ACSCtl):", text, re.M):
        return None
    blocks: list[tuple[str | None, str, list[str]]] = [(None, "", [])]
    for line in text.split("\n"):
        head, asked = _ADDRESS.match(line), _COMMAND.search(line[:1000])
        key = re.match(r"\W*(LnkCap:|LnkSta:)", line)
        if asked:
            blocks.append((bus_id(asked[1]), "", []))
        elif head:
            title = (head[2] or "").strip()
            blocks.append((bus_id(head[1]), "" if title.startswith("Lnk") else title, [title]))
        elif key and _begins_another(key[1], blocks[-1][2]):
            blocks.append((None, "", [line]))
        else:
            blocks[-1][2].append(line)
    ports = [port for address, title, lines in blocks if (port := _port(address, title, lines))]
    privileged = any("<access denied>" in line for _, _, lines in blocks for line in lines)
    notes = ["lspci ran without root: access control (ACS) and some link facts are hidden; run it with sudo"] if privileged else []
    return Reading(command="lspci -vv", gpus=[_gpu(p) for p in ports if p.is_gpu], ports=ports, notes=notes) if ports else None


def _gpu(port: PciePort) -> Gpu:
    """An NVIDIA display controller that lspci shows; the driver need not see it."""
    return Gpu(bus_id=port.address, name=(port.device or "").split(": ", 1)[-1] or None)


def _begins_another(key: str, before: list[str]) -> bool:
    """lspci prints LnkCap before LnkSta, once each: a key that comes again, or LnkCap behind LnkSta, is of the next device."""
    seen = [found[1] for line in before if (found := re.match(r"\W*(LnkCap:|LnkSta:)", line))]
    return key in seen or (key == "LnkCap:" and "LnkSta:" in seen)


def _port(address: str | None, title: str, lines: list[str]) -> PciePort | None:
    caps, states, control = (_after(lines, key) for key in ("LnkCap:", "LnkSta:", "ACSCtl:"))
    cap, state = (_LINK.search(text) if text else None for text in (caps, states))
    if not cap and not state and not control:
        return None
    secondary = re.search(r"Bus:.*secondary=([0-9a-fA-F]{2})", "\n".join(lines))
    downgraded = [name for name, word in (("speed", state[2]), ("width", state[4])) if word and word.lower() == "downgraded"] if state else []
    return PciePort(
        address=address,
        device=re.sub(r"\s*\(rev \w+\).*$", "", title) or None,
        speed_gt_s=float(state[1]) if state else None,
        speed_cap_gt_s=float(cap[1]) if cap else None,
        width_lanes=int(state[3]) or None if state else None,
        width_cap_lanes=int(cap[3]) or None if cap else None,
        downgraded=downgraded,
        acs_redirect="ReqRedir+" in control or "CmpltRedir+" in control if control else None,
        is_bridge="PCI bridge" in title or bool(secondary) if title else None,
        is_gpu=bool(_GPU_CLASS.search(title)) and "NVIDIA" in title if title else None,
        secondary_bus=f"{address.split(':')[0]}:{secondary[1].lower()}" if secondary and address else None,
    )


def _after(lines: list[str], key: str) -> str:
    """The text behind a key with the lines that continue it (lspci wraps after 'LnkSta:' in newer releases)."""
    for i, line in enumerate(lines):
        if re.match(rf"\W*{key}", line):
            behind = line.split(key, 1)[1]
            following = lines[i + 1] if i + 1 < len(lines) else ""
            return behind if re.search(r"Width|[+-]", behind) or re.match(r"\s*\w+:", following) else f"{behind} {following}"
    return ""


def live(addresses: list[str]) -> list[PciePort]:
    """The PCI devices at `addresses` and the bridges above them, from /sys; access control from lspci where it is installed and may read it."""
    found: dict[str, PciePort] = {}
    for address in addresses:
        folder = Path("/sys/bus/pci/devices") / address
        while folder.exists() and re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", folder.resolve().name):
            folder = folder.resolve()
            found.setdefault(folder.name, _live_port(folder, is_gpu=folder.name == address))
            folder = folder.parent
    redirect = _live_redirect() if found else {}
    return [port.model_copy(update={"acs_redirect": redirect.get(address)}) for address, port in sorted(found.items())]


def _live_port(folder: Path, is_gpu: bool) -> PciePort:
    def read(name: str) -> str:
        try:
            return (folder / name).read_text()
        except OSError:
            return ""

    def of(name: str, pattern: str) -> float | None:
        found = re.match(pattern, read(name))
        # The kernel says 0 or 255 lanes for a link it knows nothing of.
        return float(found[1]) if found and 0 < float(found[1]) < 255 else None

    current, most = of("current_link_width", r"(\d+)"), of("max_link_width", r"(\d+)")
    below = re.match(r"(\d+)", read("secondary_bus_number"))
    return PciePort(
        address=folder.name,
        device=f"{read('vendor').strip()}:{read('device').strip()}",
        speed_gt_s=of("current_link_speed", r"([\d.]+) GT/s"),
        speed_cap_gt_s=of("max_link_speed", r"([\d.]+) GT/s"),
        width_lanes=int(current) if current else None,
        width_cap_lanes=int(most) if most else None,
        is_bridge=read("class").startswith("0x0604"),
        is_gpu=is_gpu,
        secondary_bus=f"{folder.name[:4]}:{int(below[1]):02x}" if below else None,
    )


def _live_redirect() -> dict[str, bool | None]:
    try:
        text = subprocess.run(
            ["lspci", "-D", "-vv"], capture_output=True, text=True, errors="replace", timeout=20, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = read_lspci(text)
    return {port.address: port.acs_redirect for port in found.ports if port.address} if found else {}
