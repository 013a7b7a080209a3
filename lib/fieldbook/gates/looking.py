"""Putting together what the gates look at: the ledger, other layouts that would be right, and facts of this machine at this moment."""

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from .. import files, kv, memory, models, onewalk, partition, patches, paths, safetensors_headers, secrecy
from ..budget import Gpus
from ..command import command_line, weights_dir
from ..errors import BadInput, GateFailed
from ..inventory import Inventory, nvml
from ..layouts import sizes_of
from ..params import Params
from ..schema import Baseline, Parallel
from ..server import cards_of, free_port
from ..spec import ModelSpec
from ..splits import is_split
from ..strategy import strategy_of
from ..supervisor import DECIDED
from .ruling import Facts, Launch

# What vLLM, torch, NCCL and their libraries read from the environment.
_READ = ("VLLM_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "TRITON_", "OMP_", "MKL_", "KMP_", "FLASHINFER_", "TP_SOCKET_IFNAME", "LD_PRELOAD")
# Long enough for a share of a core to be told from a tick of the clock, short enough for a preview.
BUSY_S, BUSY_CORES = 0.3, 0.2
# What `make` and the walk set themselves, and what only says where things lie.
_HARMLESS = ("VLLM_NO_USAGE_STATS", "VLLM_LOGGING_", "CUDA_HOME", "CUDA_PATH", "CUDA_VERSION", "NCCL_VERSION", "TORCH_HOME")


def look(
    params: Params,
    arm: Parallel | Baseline,
    layers: tuple[int, ...],
    *,
    box: Inventory | None = None,
    defects: list[dict[str, Any]] | None = None,
    gpus: Gpus | None = None,
    run_dir: Path | None = None,
) -> Launch:
    """What the gates look at before this arm is launched. gpus: the cards with an earlier run's terms, instead of the box's sizes alone.

    On a live box this asks the machine; it starts nothing and changes nothing.
    """
    spec = memory.model_spec(params.model.name)
    if gpus is None and box is not None and any(sizes_of(box)) and params.engine.device == "cuda":
        gpus = Gpus(sizes_of(box))
    pool, no_pool, unknown = pool_of(params, arm, spec, layers, gpus)
    return Launch(
        params=params,
        arm=arm,
        spec=spec,
        layers=layers,
        command=command_line(params, arm, layers, params.server.port, box),
        box=box,
        defects=defects,
        facts=facts_of(params, arm, run_dir or paths.reports_dir()) if params.box.kind == "live" else None,
        pool=pool,
        no_pool=no_pool,
        unknown=unknown,
        alternatives=alternatives(params, arm, spec, gpus),
    )


def pool_of(params: Params, arm: Parallel | Baseline, spec: ModelSpec, layers: tuple[int, ...], gpus: Gpus | None) -> tuple[memory.Pool | None, str, bool]:
    """(ledger of an arm, why there is none, whether only because nothing tells the cards' memory). It need not hold one request of max_model_len."""
    if not is_split(layers, arm.pipeline_parallel_size, spec):
        return None, "the split is none of this model", False
    known = gpus is not None and any(gpus.total_bytes)
    given = memory.is_given(params, len(layers), gpus)
    if not given and not known:
        return None, "nothing tells the memory of the cards", True
    try:
        return memory.pool(params, spec, layers, layout=strategy_of(arm).layout, gpus=gpus, must_fit=False), "", False
    except BadInput as error:
        missing = str(error).startswith("engine.available_kv_gib: missing")
        return None, str(error), missing


def alternatives(params: Params, arm: Parallel | Baseline, spec: ModelSpec, gpus: Gpus | None) -> tuple[str, ...]:
    """Layouts of as many cards whose cuts are clean: with as many stages where these may be, else with two, by the ledger where it can be made."""
    tp, pp = arm.tensor_parallel_size, arm.pipeline_parallel_size
    if pp == 1 or not partition.sharing_layers(spec):
        return ()
    stages = pp if pp < 4 else 2
    wide = tp * pp // stages
    heads, _ = memory.heads(spec)
    if wide * stages != tp * pp or heads % wide:
        return ()
    sizes = {"tensor_parallel_size": wide, "pipeline_parallel_size": stages, "index_sharing": "clean", "layer_partition": "best"}
    same = stages == pp and isinstance(params.parallel.layer_partition, list)
    # The KV space that is given was seen at the params' own split and sizes, and says nothing of others.
    split = {"layer_partition": params.parallel.layer_partition} if same else {}
    engine = params.engine if same else params.engine.model_copy(update={"available_kv_gib": [], "other_boots": []})
    other = params.model_copy(update={"engine": engine, "parallel": params.parallel.model_copy(update={**sizes, **split})})
    name = f"TP{wide} x PP{stages}" if wide > 1 else f"PP{stages}"
    try:
        best = partition.plan(partition.stage_table(other, spec, gpus, index_sharing="clean")).best
    except BadInput:
        best = None
    if best is not None:
        return (f"{name} with {'+'.join(map(str, best.layers_per_stage))}, whose cuts are clean ({best.pool_tokens:,} tokens)",)
    rule = partition.rules_of(spec, stages, "clean")
    even = partition.default_split(spec.num_hidden_layers, stages)
    clean = [s for s in partition.all_splits(spec.num_hidden_layers, stages) if not any(r.broken_by(kv.stage_bounds(spec, s)) for r in rule)]
    if not clean:
        return ()
    nearest = min(clean, key=lambda s: sum(abs(a - b) for a, b in zip(s, even, strict=True)))
    return (f"{name} with {'+'.join(map(str, nearest))}, whose cuts are clean (memory not counted)",)


def facts_of(params: Params, arm: Parallel | Baseline, run_dir: Path) -> Facts:
    """This machine, now."""
    seen = checkpoint_facts(weights_dir(params))
    if params.model.made_up:
        seen = {"checkpoint_pending": "vLLM makes the weights up (--load-format dummy): speed and memory are the model's, answers mean nothing"}
    elif params.model.source != "folder" and not models.is_complete(weights_dir(params)):
        seen = {"checkpoint_pending": f"the weights of {params.model.name} are made at the first start"}
    extra = params.extra_env_of(arm)
    free, not_writable = _disk(run_dir, extra)
    processes, used = _gpus() if params.engine.device == "cuda" else ({}, {})
    busy, cores = _busy() if params.engine.device == "cpu" else ((), None)
    return Facts(
        cards=tuple(cards_of(params, arm)),
        release=_release(params),
        port_taken=_port_taken(params),
        disk_free_bytes=free,
        not_writable=not_writable,
        shm_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        memory_available_bytes=psutil.virtual_memory().available,
        # A walk's own notebooks are told their owner.
        walk=None if os.environ.get("FIELDBOOK_OWNER") else onewalk.running(),
        gpu_processes=processes,
        gpu_used_bytes=used,
        busy=busy,
        busy_cores=cores,
        inherited=inherited(os.environ, params, arm),
        unset=tuple(value for value in extra.values() if secrecy.is_reference(value) and not os.environ.get(value[1:])),
        api_key_set=not params.server.api_key or bool(os.environ.get(params.server.api_key[1:])),
        other_model=other_model(params),
        **seen,
    )


def inherited(environment, params: Params, arm: Parallel | Baseline) -> tuple[str, ...]:
    """Variables that the arm's server would inherit, that change it, and that neither the params nor Fieldbook set; their values may be secrets."""
    decided = {*DECIDED, *params.extra_env_of(arm), *(["OMP_NUM_THREADS"] if params.engine.omp_threads_per_rank else [])}
    return tuple(sorted(name for name in environment if name.startswith(_READ) and not name.startswith(_HARMLESS) and name not in decided))


def _release(params: Params) -> str | None:
    try:
        return patches.release(patches.tree_of_box(params))
    except BadInput:
        return None


def _port_taken(params: Params) -> str:
    try:
        free_port(params.server.port, params.server.host)
    except GateFailed as error:
        return str(error)
    return ""


def _disk(run_dir: Path, extra_env: dict[str, str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """(free bytes, what cannot be written) of the run folder and vLLM's cache, by what of them is there already."""
    environment = {**os.environ, **extra_env}
    # As vllm/envs.py has it.
    cache = environment.get("VLLM_CACHE_ROOT") or os.path.join(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm")
    wanted = {"the run folder": Path(run_dir), "vLLM's cache": Path(cache), "temporary files": Path(tempfile.gettempdir())}
    free, closed = {}, []
    for name, folder in wanted.items():
        try:
            there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
            free[name] = shutil.disk_usage(there).free
            if not os.access(there, os.W_OK | os.X_OK):
                closed.append(name)
        except PermissionError:
            closed.append(name)
    return free, tuple(closed)


def _busy() -> tuple[tuple[str, ...], float]:
    """(foreign processes that compute now, cores that they take), over BUSY_S. This process and those that called it are not foreign."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}

    def spent() -> dict[tuple[int, float], tuple[float, str]]:
        found = {}
        for process in psutil.process_iter(["pid", "name", "cpu_times", "create_time"]):
            times = process.info["cpu_times"]
            if times is not None and process.info["pid"] not in own:
                found[process.info["pid"], process.info["create_time"]] = (times.user + times.system, process.info["name"] or "process")
        return found

    before, start = spent(), time.monotonic()
    time.sleep(BUSY_S)
    after, seconds = spent(), time.monotonic() - start
    cores = {key: ((used - before[key][0]) / seconds, name) for key, (used, name) in after.items() if key in before}
    shown = sorted(((share, name, pid) for (pid, _), (share, name) in cores.items() if share >= BUSY_CORES), reverse=True)
    return tuple(f"{name} ({pid}, {share:.1f} cores)" for share, name, pid in shown[:3]), sum(share for share, _ in cores.values())


def _gpus() -> tuple[dict[int, tuple[str, ...]], dict[int, int]]:
    """(foreign processes, memory in use) of each GPU."""
    gpus = nvml.usage()
    names = {gpu.index: tuple(f"{p.name or 'process'} ({p.pid})" for p in gpu.processes or []) for gpu in gpus}
    return names, {gpu.index: gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None}


def checkpoint_facts(folder: Path) -> dict[str, str]:
    """What Facts says of a checkpoint folder: what was found or is wrong, and SHA-256 over all headers in the order of the files' names."""
    if not (folder / "config.json").is_file():
        return {"checkpoint": f"no config.json in {paths.shown(folder)}"}
    broken = [f.name for f in folder.glob("*.safetensors") if not f.is_file()]
    if broken:
        return {"checkpoint": f"{broken[0]} is a link to a file that is not there"}
    pointers = [f.name for f in folder.glob("*.safetensors") if f.stat().st_size < 1024 and f.read_bytes().startswith(b"version https://git-lfs")]
    if pointers:
        return {"checkpoint": f"{pointers[0]} is a Git LFS pointer, not the file ({len(pointers)} such files): `git lfs pull`"}
    unfinished = [f.name for pattern in ("*.incomplete", "*.part", "*.aria2") for f in folder.glob(pattern)]
    if unfinished:
        return {"checkpoint": f"{unfinished[0]} is the beginning of a download"}
    if not list(folder.glob("*.safetensors")) and not (folder / safetensors_headers.INDEX).is_file():
        return {}
    try:
        tensors = safetensors_headers.read_folder(folder)
        total, shards = sum(tensor.bytes for tensor in tensors), sorted({tensor.file for tensor in tensors})
        stated = safetensors_headers.stated_bytes(folder)
    except BadInput as error:
        return {"checkpoint": str(error).replace(f"{folder}/", "")}
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(safetensors_headers.header_bytes(folder / shard))
    found = {"checkpoint_told": f"{len(tensors)} tensors in {len(shards)} files, {total / 2**30:.2f} GiB", "checkpoint_sha256": digest.hexdigest()}
    if stated is not None and stated != total:
        found["checkpoint_doubt"] = f"its index says {stated:,} bytes of tensors, the headers say {total:,}"
    return found


def other_model(params: Params) -> str:
    """How the config of the weights differs from the one that memory was counted with, '' where it does not."""
    planned, served = paths.model_config_dir(params.model.name) / "config.json", weights_dir(params) / "config.json"
    if not served.is_file() or files.sha256_of(planned) == files.sha256_of(served):
        return ""
    return models.config_difference(planned, served)
