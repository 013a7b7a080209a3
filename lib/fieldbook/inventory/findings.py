"""What is wrong with a box, or worth knowing before serving on it: in plain words, most serious first, each with its evidence and what to do."""

import re
from collections.abc import Iterator

from . import findings_links
from .findings_links import indexes, names
from .model import Finding, Gpu, GpuProcess, Inventory
from .values import MIB

GIB = 2**30
# NCCL and vLLM's own broadcast rings live in /dev/shm; a container's default of 64 MiB breaks the start of several ranks.
SHM_LEAST_BYTES = 2**30
# Contexts of the driver and of a display take less than this; more on an idle card is somebody's model.
USED_MEMORY_BYTES = 300 * MIB
_ORDER = {"serious": 0, "warning": 1, "note": 2}


def find(box: Inventory, offloaded_bytes: int | None = None) -> list[Finding]:
    """All findings of a box. offloaded_bytes: weights that are to lie in host memory, where the caller knows."""
    parts = (_broken(box), findings_links.find(box), _unequal(box), _memory(box, offloaded_bytes), _settings(box))
    return sorted(_together([finding for part in parts for finding in part]), key=lambda f: _ORDER[f.severity])


def _together(found: list[Finding]) -> list[Finding]:
    """Findings that say the same of several GPUs as one."""
    grouped: dict[tuple[str, ...], list[Finding]] = {}
    for f in found:
        said = re.sub(r"GPU \d+", "GPU", f.what, count=1) if len(f.gpus) == 1 else f.what
        grouped.setdefault((f.id, f.severity, said, f.evidence, f.advice), []).append(f)
    merged = []
    for same in grouped.values():
        gpus = sorted({i for f in same for i in f.gpus})
        what = re.sub(r"GPU \d+", f"GPU {', '.join(map(str, gpus))}", same[0].what, count=1) if len(same) > 1 else same[0].what
        merged.append(same[0].model_copy(update={"what": what, "gpus": gpus}))
    return merged


def _broken(box: Inventory) -> Iterator[Finding]:
    for gpu in (g for g in box.gpus if g.lost):
        yield Finding(
            id="gpu-lost",
            severity="serious",
            gpus=indexes([gpu]),
            what=f"GPU {gpu.index} does not answer",
            evidence=gpu.lost or "",
            advice="Look for Xid lines in `dmesg`, reseat the card and its power, then reboot; until then leave it out with CUDA_VISIBLE_DEVICES.",
        )
    for gpu in (g for g in box.gpus if g.ecc_uncorrected):
        yield Finding(
            id="ecc-uncorrected",
            severity="serious",
            gpus=indexes([gpu]),
            what=f"GPU {gpu.index} has had uncorrectable memory errors since its last reset",
            evidence=f"uncorrected volatile ECC errors: {gpu.ecc_uncorrected}",
            advice="Answers computed on it cannot be trusted: reset the GPU, and replace it when the count comes back.",
        )
    for gpu in box.gpus:
        reasons = [r for r in gpu.throttle_reasons or [] if r != "sw_power_cap"]
        if reasons:
            yield Finding(
                id="slowed-down",
                severity="warning",
                gpus=indexes([gpu]),
                what=f"GPU {gpu.index} is being slowed down",
                evidence=f"active: {', '.join(reasons)}",
                advice="Check cooling and power cables before measuring anything: the clocks are below what the card can do.",
            )


def _unequal(box: Inventory) -> Iterator[Finding]:
    sizes: dict[int, list[Gpu]] = {}
    # The whole memory of one card and the usable one of another are no two sizes of a card.
    field = "memory_total_bytes" if any(g.memory_total_bytes is not None for g in box.gpus) else "memory_usable_bytes"
    for gpu in box.gpus:
        if getattr(gpu, field) is not None:
            sizes.setdefault(getattr(gpu, field) // MIB, []).append(gpu)
    if len(sizes) > 1:
        same_name = len({g.name for group in sizes.values() for g in group} | {None}) == 2 and all(g.name for group in sizes.values() for g in group)
        yield Finding(
            id="unequal-memory",
            severity="warning",
            gpus=indexes(min(sizes.items())[1]),
            what="The GPUs have different memory sizes" + (", though they share one name" if same_name else ""),
            evidence="; ".join(f"{names(group)}: {mib} MiB" for mib, group in sorted(sizes.items())),
            advice="An even split is bound by the smallest card. Give it fewer layers (notebook 03), and never infer memory from the name.",
        )
    # 8.0 and Ampere are no two architectures: like is compared with like.
    told = [[(g, getattr(g, field)) for g in box.gpus if getattr(g, field)] for field in ("compute_capability", "architecture")]
    known = next((one for one in told if len({value for _, value in one}) > 1), [])
    if known:
        yield Finding(
            id="unequal-architecture",
            severity="warning",
            what=f"The GPUs are of different architectures: {', '.join(sorted({value for _, value in known}))}",
            evidence="; ".join(f"GPU {g.index}{f' {g.name}' if g.name else ''}: {value}" for g, value in known),
            advice="Kernels, dtypes and attention backends must exist on the oldest one; tensor parallelism between them runs at the slower card's pace.",
        )
    nodes = {g.numa_node for g in box.gpus if g.numa_node is not None}
    if len(nodes) > 1:
        yield Finding(
            id="numa-split",
            severity="note",
            what=f"The GPUs hang on {len(nodes)} NUMA nodes",
            evidence="; ".join(f"node {node}: GPU {', '.join(str(g.index) for g in box.gpus if g.numa_node == node)}" for node in sorted(nodes)),
            advice="Put the cut of the pipeline between the nodes and bind each rank's CPU memory to its node; tensor parallelism across "
            "nodes crosses the processors' link.",
        )


def _holder(process: GpuProcess) -> str:
    pid = "pid not told" if process.pid is None else f"pid {process.pid}"
    return f"{process.name or 'a process'} ({pid}{f', {process.memory_bytes // MIB} MiB' if process.memory_bytes else ''})"


def _memory(box: Inventory, offloaded_bytes: int | None) -> Iterator[Finding]:
    for gpu in box.gpus:
        holders = [p for p in gpu.processes or [] if p.memory_bytes is None or p.memory_bytes > 0]
        # What the processes hold stands in where the whole is not told.
        used = gpu.memory_used_bytes if gpu.memory_used_bytes is not None else sum(p.memory_bytes or 0 for p in holders)
        grave = "serious" if gpu.memory_total_bytes and used > gpu.memory_total_bytes / 10 else "warning"
        if holders and used > USED_MEMORY_BYTES:
            listed = ", ".join(_holder(p) for p in holders[:4])
            yield Finding(
                id="memory-held",
                severity=grave,
                gpus=indexes([gpu]),
                what=f"GPU {gpu.index}: {used / GIB:.2f} GiB are held by other processes",
                evidence=listed,
                advice="vLLM budgets gpu_memory_utilization of the whole card: end those processes, or lower it by what they hold.",
            )
        elif used > USED_MEMORY_BYTES and not gpu.lost:
            untold = "the output lists no process" if gpu.processes == [] else "processes are not told"
            yield Finding(
                id="memory-held",
                severity="warning",
                gpus=indexes([gpu]),
                what=f"GPU {gpu.index}: {used / GIB:.2f} GiB are in use",
                evidence=f"memory used {used // MIB} MiB; {untold}" + (", which a process of another container looks like" if gpu.processes == [] else ""),
                advice="Find out who holds it (`nvidia-smi` on the host, other containers, a display) before giving vLLM the whole card.",
            )
    available = box.host.memory_available_bytes if box.host.memory_available_bytes is not None else box.host.memory_total_bytes
    if offloaded_bytes and available is not None and offloaded_bytes > available:
        yield Finding(
            id="host-memory",
            severity="serious",
            what="Host memory is smaller than the weights it should hold",
            evidence=f"{offloaded_bytes / GIB:.1f} GiB of weights, {available / GIB:.1f} GiB available",
            advice="Offload less, use a smaller dtype or more ranks, or add memory.",
        )
    shm = box.host.shm_total_bytes
    if shm is not None and shm < SHM_LEAST_BYTES:
        yield Finding(
            id="shm",
            severity="warning",
            what=f"/dev/shm has only {shm / MIB:.0f} MiB",
            evidence=f"/dev/shm: {shm} bytes in all",
            advice="Ranks and NCCL exchange data there: start the container with --ipc=host or --shm-size=8g.",
        )


def _settings(box: Inventory) -> Iterator[Finding]:
    mig = [g for g in box.gpus if g.mig]
    if mig:
        yield Finding(
            id="mig",
            severity="warning",
            gpus=indexes(mig),
            what=f"{names(mig)}: MIG is on, the card is divided",
            evidence="; ".join(f"GPU {g.index}: {len(g.mig_devices) or 'no'} instances listed" for g in mig),
            advice="Instances have no NVLink and no peer access, and vLLM sees one instance per process: turn MIG off to serve over several cards.",
        )
    for mode in ("Prohibited", "Exclusive_Process", "Exclusive_Thread"):
        held = [g for g in box.gpus if (g.compute_mode or "").lower() == mode.lower()]
        if held:
            yield Finding(
                id="compute-mode",
                severity="serious" if mode == "Prohibited" else "note",
                gpus=indexes(held),
                what=f"{names(held)}: compute mode {mode}",
                evidence=f"compute mode {mode}",
                advice="nvidia-smi -c DEFAULT gives several processes access again.",
            )
    off = [g for g in box.gpus if g.persistence is False]
    if off:
        yield Finding(
            id="persistence",
            severity="note",
            gpus=indexes(off),
            what=f"{names(off)}: persistence mode is off",
            evidence="persistence mode Disabled",
            advice="The driver unloads between runs, which adds seconds to every start and resets clocks and limits: nvidia-smi -pm 1.",
        )
    capped = [g for g in box.gpus if g.power_limit_w and g.power_limit_default_w and g.power_limit_w < g.power_limit_default_w]
    if capped:
        yield Finding(
            id="power-limit",
            severity="note",
            gpus=indexes(capped),
            what=f"{names(capped)}: power limit below the default",
            evidence="; ".join(f"GPU {g.index}: {g.power_limit_w:g} of {g.power_limit_default_w:g} W" for g in capped),
            advice="Costs prefill speed first. Write it down with every measurement, or set it back with nvidia-smi -pl.",
        )
    if any(g.driver_model == "WDDM" for g in box.gpus):
        yield Finding(
            id="wddm",
            severity="note",
            what="Windows' display driver model (WDDM) manages the memory",
            evidence="driver model WDDM",
            advice="Processes' memory is not told and Windows may move it to the host: serve from Linux or WSL2, or use TCC where the card can.",
        )
