"""From files to readings: which command printed this text, and what does it say."""

import re
from collections.abc import Callable
from pathlib import Path

from .. import paths
from ..errors import BadInput
from . import bandwidths, host, lspci, nvlink, smi_report, smi_table, stated, topology
from .model import Reading
from .values import clean

LARGEST_BYTES = 32 * 2**20
_ROCM = r"(?i)ROCm System Management|rocm-smi|amd-smi|(?:Hops|Weight|Link Type) between two GPUs|XGMI"
# What a text is when nothing in it can be read: a pattern, and the words for it. From special to general.
_LOOKS_LIKE = (
    (r"<system version=.*\n(?:.*\n){0,20}?[ \t]*<(?:cpu|pci|gpu)\b", "an NCCL topology file (NCCL_TOPO_DUMP_FILE)"),
    (_ROCM, "a table of AMD's rocm-smi"),
    (r"ppu-smi|\bPPU\d", "a table of Alibaba's ppu-smi"),
    (r"mthreads|MTLink|Moore Threads", "a table of Moore Threads"),
    (r"npu-smi|\bNPU\d|Ascend|HCCS", "a table of Ascend's npu-smi"),
    (r"hl-smi|HL-SMI|Gaudi", "a table of Habana's hl-smi"),
    (r"mx-smi|MetaX", "a table of MetaX's mx-smi"),
    (r"cnmon|MLU\d", "a table of Cambricon's cnmon"),
    (r"xpu-smi|Xe Link", "a table of Intel's xpu-smi"),
    (r"# nThread|busbw|algbw|Avg bus bandwidth", "a result of nccl-tests"),
    (r"nvbandwidth|memcpy CE", "a result of nvbandwidth"),
    (r"^# gpu\s+(?:pwr|pid)|^#Idx", "a log of nvidia-smi dmon or pmon"),
    (r"nvlink -(?:e|c|R)|(?:Replay|Recovery|CRC)\s+Error", "`nvidia-smi nvlink` with another option than -s"),
    (r"\bGR3D|tegrastats|lfb \d+x", "a line of tegrastats"),
    (r"^[ \t]*\d+, .*(?:NVIDIA|GPU-|MiB|[0-9A-Fa-f]{8}:)|^[^,\n]+(?:, [^,\n]+){6,}$", "rows of `nvidia-smi --query-gpu` without their header line"),
    (r"<topology|<object type=|Machine \(\d+", "a drawing of lstopo"),
    (r"^\[\d\] .*\| *\d+.C", "a list of gpustat"),
    (r"\b(?:PIX|PXB|PHB|NODE|SYS|NV\d+)\s+= Connection", "the legend of `nvidia-smi topo -m` without its matrix"),
    (r"\b(?:NV\d{1,2}|PIX|PXB|PHB)\b.*\b(?:PIX|PXB|PHB|NODE|SYS|NV\d{1,2})\b", "words about links, or a drawing of them, and no matrix"),
    (r"Traceback \(most recent call last\)|^(?:INFO|WARNING|ERROR) \d\d-\d\d", "a log"),
    (r"<html|<!DOCTYPE html", "a web page"),
)
EXPECTED = "give the output of nvidia-smi, nvidia-smi -q -x, nvidia-smi topo -m, lspci -vv, lscpu or numactl -H as it was printed"


def read_text(text: str, source: str = "") -> list[Reading]:
    """All outputs that a text holds, each read once. Raises BadInput with one line when it holds none, saying what it looks like instead."""
    text = clean(text)
    stem = Path(source).name
    readers: list[Callable[[], Reading | None | list[Reading]]] = [
        lambda: stated.read_stated(text),
        lambda: smi_report.read_xml(text),
        lambda: smi_report.read_query_text(text),
        lambda: smi_table.read_table(text),
        lambda: smi_table.read_csv(text),
        lambda: smi_table.read_list(text),
        lambda: smi_table.read_prose(text),
        lambda: nvlink.read_nvlink(text),
        lambda: topology.read_topology(text, stem),
        lambda: topology.read_p2p(text, stem),
        lambda: bandwidths.read_bandwidth_test(text),
        lambda: bandwidths.read_pair_list(text),
        lambda: lspci.read_lspci(text),
        lambda: host.read_lscpu(text),
        lambda: host.read_numactl(text),
        lambda: host.read_meminfo(text),
        lambda: host.read_free(text),
        lambda: host.read_df_shm(text),
        lambda: host.read_iommu(text),
        lambda: host.read_cmdline(text, stem),
    ]
    found: list[Reading] = []
    for reader in readers:
        result = reader()
        found += result if isinstance(result, list) else [result] if result else []
    if not found:
        raise BadInput(f"{looks_like(text)}; {EXPECTED}")
    return [reading.model_copy(update={"source": stem}) for reading in found]


def looks_like(text: str) -> str:
    """One phrase for a text that no reader knows."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" `") and not line.startswith(("# source:", "```"))]
    if not lines:
        return "empty: no output in it"
    nccl = _nccl_gpu(text)
    if nccl:
        return nccl
    numbers = topology.number_matrix(text)
    if numbers and not re.search(_ROCM, text):
        return f"not a topology matrix: it looks like {numbers}"
    device = topology.other_devices(text)
    for pattern, words in _LOOKS_LIKE:
        if re.search(pattern, text, re.M):
            return f"not an output this reads: it looks like {words}"
    if device:
        return f"not an output this reads: it looks like a matrix of {device} devices of another vendor"
    return f"no output of a known command in it; it begins with {lines[0][:60]!r}"


def _nccl_gpu(text: str) -> str | None:
    """What an NCCL topology file says of its first GPU, for the line that refuses it."""
    if not re.search(r"<nvlink target=|<gpu dev=", text) or "<system" not in text:
        return None
    gpu = re.search(r'<pci busid="([0-9a-fA-F:.]+)"[^>]*>\s*<gpu dev="(\d+)"', text)
    links = re.findall(r'<nvlink target="([0-9a-fA-F:.]+)" count="(\d+)"', text)
    said = f": GPU {gpu[2]} at {gpu[1]}" if gpu else ""
    if gpu and links:
        said += f" with NVLinks {', '.join(f'{count} to {target}' for target, count in links[:8])}"
    return f"not a topology matrix: it looks like an NCCL topology file (NCCL_TOPO_DUMP_FILE){said}"


def read_path(path: Path) -> tuple[list[Reading], list[str]]:
    """(readings, notes) of a file, or of the files of a folder. Raises BadInput naming the file that is no text, too large or unreadable.

    In a folder, a file that holds no known output is named in the notes, unless it bears the name of one that `fieldbook capture` writes.
    """
    if path.is_file():
        return _read_file(path), []
    if not path.is_dir():
        raise BadInput(f"{path}: no such file or folder; give one output, or the folder with the captured outputs")
    readings: list[Reading] = []
    notes: list[str] = []
    try:
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    except OSError as error:
        raise BadInput(f"{paths.shown(path)}: cannot be read ({error.strerror})") from None
    for file in files:
        known = re.match(r"(nvidia-smi|topo|query|nvlink-s|lspci|lscpu|numactl|meminfo|iommu|df-shm|box\.)", file.name)
        if file.stat().st_size == 0:
            notes.append(f"{file.name}: empty, the command printed nothing")
            continue
        if file.suffix in (".json", ".yml", ".md") and not known:
            continue
        try:
            readings += _read_file(file)
        except BadInput as error:
            if known:
                raise
            notes.append(f"not read: {str(error).removesuffix(f'; {EXPECTED}').removeprefix(f'{paths.shown(path)}/')}")
    if not readings:
        raise BadInput(f"{paths.shown(path)}: no captured output in this folder; `fieldbook capture DIR` writes one")
    return readings, notes


def _read_file(file: Path) -> list[Reading]:
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise BadInput(f"{paths.shown(file)}: {file.stat().st_size / 2**20:.0f} MiB, larger than any output this reads; {EXPECTED}")
        data = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{paths.shown(file)}: cannot be read ({error.strerror})") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        # PowerShell's `>` writes UTF-16.
        text = data.decode("utf-16", errors="replace")
    elif b"\0" in data[:4096]:
        raise BadInput(f"{paths.shown(file)}: not a text file; {EXPECTED}")
    else:
        text = data.decode("utf-8", errors="replace")
    try:
        return read_text(text, file.name)
    except BadInput as error:
        raise BadInput(f"{paths.shown(file)}: {error}") from None
