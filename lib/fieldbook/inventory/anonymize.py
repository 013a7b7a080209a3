"""Take out of a command's output what identifies a machine, its owner or its network, and leave everything else as it was printed."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# Words that outputs are made of: leaving them tells no machine and no person, replacing them would spoil the outputs. See also technical_words.
VOCABULARY = (
    "root nobody localhost localdomain local internal host user home users data nvidia intel amd arm linux gpu cpu node numa link nvlink nic sys bus dev "
    "device shm tmpfs mem memory mib gib max min off none yes not active enabled disabled default current pending total used free available size cpus "
    "distances name uuid index mode state status version driver cuda bridge controller port kernel module modules control capabilities region latency "
    "width speed power clock process processes python python3 vllm worker mon tue wed thu fri sat sun jan feb mar apr may jun jul aug sep oct nov dec "
    "self legend connection usage type card slot system board product part number serial pci pcie iommu express interrupt cache flags model family "
    "filesystem mounted access denied supported unknown error group groups count server compute graphics display lost "
    "affinity field found lscpu running page physical row pix pxb phb x86 xml"
)
NOTHING = re.compile(
    r"\s*\[?(?:|(?:0x)?0{12,}\d{0,3}|n/?a|none|no|-+|not \w+|insufficient permissions?|no permissions?|unknown(?: error)?|err!?|gpu is lost|"
    r"requested functionality has been deprecated)\]?\s*",
    re.I,
)
_SERIAL = r"\b(?:serial(?:[ _-]?(?:number|no\.?))?|s/n|guid|pdi|host ?id|vm ?(?:name|id)|ecid|asset tag)[ \t]*"
# What stands before a serial number, and the number: an XML element, a line of `nvidia-smi -q`, a pair, lspci's vital product data and capability.
SERIALS = (
    re.compile(r"(<\w*(?:serial|guid|pdi|host_?id|vm_?name|vm_?id|ecid|asset)\w*>)([^<]+)", re.I),
    re.compile(rf"({_SERIAL}:[ \t]*)([^\s,;][^,;\n]*)", re.I),
    re.compile(rf"({_SERIAL}=)([^\s,;]+)", re.I),
    re.compile(r"(\[(?:SN|[VY][0-9A-Z])\][^:\n]*:[ \t]*)(\S.*)"),
    re.compile(r"(\bDevice Serial Number[ \t]+)([\w-]+)"),
)
SERIAL_COLUMN = re.compile(r"serial|pdi|guid|host_?id|vm_?name", re.I)
UUID = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Fa-f])|\b[0-9A-Fa-f]{32}\b")
TABLE_ROW = re.compile(
    r"^(\|[ \t]+\d+[ \t]+(?:\S+[ \t]+\S+[ \t]+)?(?:\d+|N/A|-)[ \t]+(?:[CGM+]+|N/A|-)[ \t]+)(\S.*?)([ \t]+(?:\d+ ?[KMG]iB|N/A|-)?[ \t]*\|)[ \t]*$", re.M
)
NAME_TAG, NAME_LINE = re.compile(r"(<process_name>)([^<]*)()"), re.compile(r"^([ \t]+Name[ \t]+: )(.*)()$", re.M)
HOME = re.compile(r"((?:/home|/Users|\b[A-Za-z]:\\Users)[/\\]+)[^/\\\s:;,\"'<>|]+")
EMAIL = re.compile(r"[\w.+-]+@[A-Za-z][\w.-]*\w")
# MAC and InfiniBand hardware addresses and PCI serials by twos, GUIDs by fours or after 0x, interfaces named by their MAC, shortened GPU UUIDs.
HEX = re.compile(
    r"(?<![\w:-])[0-9a-f]{2}([:-])(?:[0-9a-f]{2}\1){4,18}[0-9a-f]{2}(?![\w:-])|(?<![\w:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![\w:])"
    r"|\b0x(?!0{12})[0-9a-f]{16}\b|(?<=\benx)[0-9a-f]{12}\b|(?<=\bGPU-|\bMIG-)[0-9a-f]{6,}(?![0-9a-f-])",
    re.I,
)
OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
IPV4 = re.compile(rf"(?<![\w.])(?:{OCTET}\.){{3}}{OCTET}(?!\.?\w)|(?<![\w-])ip(?:-{OCTET}){{4}}(?![\w-])")
IPV6 = re.compile(r"(?<![\w:])(?:[0-9A-Fa-f]{0,4}:){2,8}[0-9A-Fa-f]{0,4}(?![\w:])")
VERSION_BEFORE = re.compile(r"(?:version|firmware|bios|_fw|driver)\w*\W*$", re.I)


@dataclass
class Secrets:
    """What to replace, and the numbers given so far: one for all files of a capture, so that a GPU has the same UUID in each of them."""

    hosts: frozenset[str] = frozenset()
    domains: frozenset[str] = frozenset()
    users: frozenset[str] = frozenset()
    uuids: dict[str, int] = field(default_factory=dict)
    serials: set[str] = field(default_factory=set)


def technical_words(texts: dict[str, str]) -> frozenset[str]:
    """Lower-case words by which outputs are read (XML tags, GPU and CPU names, CPU flags, device classes): never taken for the name of a person or machine."""
    xml, lscpu = texts.get("nvidia-smi-q.xml", ""), texts.get("lscpu.json", "")
    words = re.findall(r"</?(\w+)", xml) + re.findall(r"<product_\w+>([^<]*)", xml) + re.findall(r"\b(?:GPU|NIC)\d+\b", texts.get("topo-m.txt", ""))
    words += re.findall(r'"field": *"([^"]*)"', lscpu) + re.findall(r'"(?:Model name|Flags):",\s*"data": *"([^"]*)"', lscpu)
    words += re.findall(r"^\d+, ([^,]*)", texts.get("query-gpu.csv", ""), re.M) + re.findall(r"^GPU \d+: (.*?) \(UUID", texts.get("nvidia-smi-L.txt", ""), re.M)
    words += re.findall(r"^[0-9a-f:.]{7,} (.*)", texts.get("lspci-vv.txt", ""), re.M) + re.findall(r"^(\w+)", texts.get("meminfo.txt", ""), re.M)
    return frozenset(re.findall(r"[a-z0-9]+", " ".join(words).lower()))


def _program(name: str) -> str:
    # The last path part of a command line's program; '...' where a table cut the program's own name off.
    if NOTHING.fullmatch(name):
        return name
    windows = re.search(r"\\([^\\/]*?\.exe)\b", name, re.I)
    words = [windows[1].split()[-1]] if windows else name.split()
    first = words[0]
    if first.startswith("--") or (first.startswith("...") and (len(words) > 1 or "/" not in first or first[3:4] == "-" or "=" in first)):
        return "..."
    # '/home/Ann Lee/bin/x': a name with a space in it would leave half of itself.
    return "user" if re.fullmatch(r"/(?:home|Users)/[^/]*", first) else re.split(r"[/\\]", first)[-1] or "process"


def _names(text: str, secrets: Secrets) -> str:
    def words(names: Iterable[str], before: str = "") -> str:
        listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        return rf"(?<![A-Za-z0-9]){before}(?:{listed})(?![A-Za-z0-9])"

    text = HOME.sub(r"\1user", EMAIL.sub("user@host", text))
    # Whole names before their parts: a domain with what stands before it, then host names, then people.
    for names, before, new in ((secrets.domains, r"(?:[A-Za-z0-9_-]+\.)*", "host"), (secrets.hosts, "", "host"), (secrets.users, "", "user")):
        text = re.sub(words(names, before), new, text, flags=re.I) if names else text
    return text


def _csv(text: str, secrets: Secrets) -> str:
    header, *lines = text.split("\n")
    convert = [_program if "process_name" in cell else (lambda v: _zeros(v, secrets)) if SERIAL_COLUMN.search(cell) else str for cell in header.split(",")]
    if len(convert) < 2 or set(convert) == {str}:
        return text
    # What stands beyond the header's columns came out of a comma in a process name.
    rows = [", ".join(change(cell) for change, cell in zip(convert, line.split(", "), strict=False)) for line in lines]
    return "\n".join([header, *rows])


def _zeros(value: str, secrets: Secrets) -> str:
    if NOTHING.fullmatch(value):
        return value
    if len(value.strip()) >= 8 and re.fullmatch(r"[\w-]*[1-9][\w-]*", value.strip()):
        secrets.serials.add(value.strip())  # the same number may stand elsewhere without a word that says what it is
    prefix = "0x" if value.startswith("0x") else ""
    return prefix + re.sub(r"[^\W_]", "0", value[len(prefix) :])


def _addresses(text: str) -> str:
    def ipv4(found: re.Match) -> str:
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        kept = found[0].startswith(("127.", "0.0.0.0")) or VERSION_BEFORE.search(line)
        return found[0] if kept else "host" if found[0].startswith("ip") else "0.0.0.0"

    def ipv6(found: re.Match) -> str:
        try:
            address = ipaddress.IPv6Address(found[0])
        except ValueError:
            return found[0]  # a time, or a PCI address
        return found[0] if address.is_loopback else "::"

    text = HEX.sub(lambda found: re.sub(r"[0-9a-f]", "0", found[0], flags=re.I), text)
    text = IPV4.sub(ipv4, text)  # first, for ::ffff:10.0.0.1
    return IPV6.sub(ipv6, text)


def anonymize(text: str, secrets: Secrets) -> str:
    """Text of an output with what identifies machine, people and network replaced; lengths are kept where a table needs them. Doing it again changes nothing.

    UUIDs become 00000000-0000-0000-0000-<number by first appearance>, serials and hardware addresses zeros, IP addresses 0.0.0.0 and ::, names of
    `secrets` 'host' and 'user', a process its program's name without folder and arguments. Model and part numbers, VBIOS, PCI addresses, PIDs and times stay.
    `secrets` takes up the UUIDs and serials that are met.
    """

    def uuid(found: re.Match) -> str:
        key = found[0].replace("-", "").lower()
        if key.startswith("0" * 20):
            return found[0]
        number = f"{secrets.uuids.setdefault(key, len(secrets.uuids)):032d}"
        return f"{number[:8]}-{number[8:12]}-{number[12:16]}-{number[16:20]}-{number[20:]}" if "-" in found[0] else number

    def process(found: re.Match) -> str:
        # Filled up to the old length: the columns to the right stay where they were.
        new = _names(_addresses(_program(found[2])), secrets)
        return found[1] + (new.ljust(len(found[2])) if found[3] else new) + found[3]

    text = UUID.sub(uuid, text)
    for pattern in SERIALS:
        text = pattern.sub(lambda found: found[1] + _zeros(found[2], secrets), text)
    text = _csv(text, secrets)
    for pattern in (TABLE_ROW, NAME_TAG, NAME_LINE):
        text = pattern.sub(process, text)
    text = _names(_addresses(text), secrets)
    for serial in secrets.serials:
        text = re.sub(rf"(?<!\w){re.escape(serial)}(?!\w)", lambda found: re.sub(r"[^\W_]", "0", found[0]), text)
    return text
