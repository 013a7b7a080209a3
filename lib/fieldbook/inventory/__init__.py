"""What is in the box: host, NUMA nodes, GPUs, links, and what is wrong with it. Live, or from captured command outputs.

A value that nobody told is None with the reason kept in `unknown`, never 0. Nothing here imports torch or vLLM; links are measured in a
process of their own (`measure`).
"""

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

from pydantic import TypeAdapter

from .. import paths
from ..errors import BadInput
from ..params import Params
from . import captured, findings, host, lspci, merge, nvlink, nvml, topology, values
from . import measure as measuring
from .host import cpu_ranges, parse_cpu_list
from .model import Finding, Gpu, Host, Inventory, Link, Measurement, NumaNode, Reading, Spread

__all__ = [
    "Finding", "Gpu", "Host", "Inventory", "Link", "Measurement", "NumaNode", "Reading", "Spread",
    "cpu_ranges", "gpu_memory_used", "measured", "parse_cpu_list",
    "read", "read_captured", "read_live", "read_pasted", "with_offload",
]  # fmt: skip

MEASURED_FILE = "measured-links.json"


def read(params: Params) -> Inventory:
    """The live machine, or the captured outputs of a recorded box in data/boxes/<box>."""
    return read_live() if params.box.kind == "live" else read_captured(paths.box_data_dir(params.box.name))


def read_live() -> Inventory:
    """This machine, from NVML, /proc and /sys. What NVML does not tell of NVLink is asked of nvidia-smi where that is installed. Measures nothing."""
    here, nodes = host.live()
    gpus = nvml.read()
    ports = lspci.live([g.bus_id for g in gpus.gpus if g.bus_id])
    readings = [gpus, Reading(command="/proc and /sys", host=here, numa=nodes, ports=ports)]
    if any(link.nvlinks is None for link in gpus.links):
        readings += _ask_nvidia_smi()
    return merge.combine(readings, "live")


def _ask_nvidia_smi() -> list[Reading]:
    found: list[Reading] = []
    for words, reader in ((["topo", "-m"], topology.read_topology), (["nvlink", "-s"], nvlink.read_nvlink)):
        if not shutil.which("nvidia-smi"):
            break
        try:
            text = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, errors="replace", timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        # Words that no reader knows tell nothing; they must not end the reading of this machine.
        with contextlib.suppress(BadInput):
            reading = reader(values.clean(text))
            found += [reading] if reading else []
    return found


def gpu_memory_used(tensor_parallel_size: int = 1) -> dict[int, int]:
    """Memory in use by NVML in bytes, of the fullest GPU of each pipeline stage (rank order: stage by stage); empty without GPUs."""
    found: dict[int, int] = {}
    for gpu in nvml.usage():
        if gpu.memory_used_bytes is not None:
            stage = gpu.index // tensor_parallel_size
            found[stage] = max(found.get(stage, 0), gpu.memory_used_bytes)
    return found


def read_captured(path: Path) -> Inventory:
    """Outputs of another machine: one file, or a folder as `fieldbook capture` writes it.

    Raises BadInput with one line naming the file and what it looks like when it is none of the outputs that are read.
    """
    path = Path(path)
    readings, notes = captured.read_path(path)
    recorded: list[Measurement] = []
    file = path / MEASURED_FILE
    if file.is_file():
        try:
            recorded = TypeAdapter(list[Measurement]).validate_python(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(f"{paths.shown(file)}: not the measured links that fieldbook writes ({str(error).splitlines()[0]})") from None
    box = merge.combine(readings, paths.shown(path), notes, recorded)
    return box.model_copy(update={"links": measuring.attach(box.links, recorded)}) if recorded else box


def read_pasted(text: str) -> Inventory:
    """Outputs that somebody pasted. Raises BadInput as `read_captured` does."""
    try:
        return merge.combine(captured.read_text(text), "standard input")
    except BadInput as error:
        raise BadInput(f"standard input: {error}") from None


def measured(box: Inventory, memory_read_bytes_s: float | None = None, environment: dict[str, str] | None = None) -> Inventory:
    """The same box with its links measured here and now, ceilings beside them, and findings that the measurement brings.

    memory_read_bytes_s is the ceiling of a link through host memory (`ceilings.measure_memory_read_bytes_s`). environment: the servers' own, with whose
    NCCL settings pairs of ranks are measured as well; None leaves NCCL out.
    """
    settings = None if environment is None else {key: value for key, value in environment.items() if key.startswith("NCCL_")}
    answering = [g for g in box.gpus if not g.lost and not g.mig]
    pairs = representative_pairs(box.links) if len(answering) > 4 else None
    found, notes = measuring.measure(len(answering), pairs, nccl_env=settings)
    found = measuring.with_ceilings(found, box.gpus, box.links, memory_read_bytes_s)
    changed = box.model_copy(update={"measured": found, "links": measuring.attach(box.links, found), "notes": [*box.notes, *notes]})
    return changed.model_copy(update={"findings": findings.find(changed)})


def measured_json(box: Inventory) -> str:
    """The measured links as the file that `read_captured` takes."""
    return json.dumps([m.model_dump() for m in box.measured], indent=1) + "\n"


def representative_pairs(links: list[Link]) -> list[tuple[int, int]]:
    """One pair of each kind of link and peer access."""
    first: dict[tuple[str | None, str | None], tuple[int, int]] = {}
    for link in links:
        first.setdefault((link.kind, link.p2p.get("read")), (link.a, link.b))
    return list(first.values())


def with_offload(box: Inventory, offloaded_bytes: int) -> Inventory:
    """The same box with the findings that weights in host memory bring."""
    return box.model_copy(update={"findings": findings.find(box, offloaded_bytes)})
