"""The patch catalogue: which known pipeline-parallel defects the installed vLLM has, the mend, and the way back.

Files are read and edited in place in the vLLM package of an environment, detected by structure and never by version. Before the first edit the
original is kept beside the package, so that a revert is byte for byte. Nothing here imports vLLM or torch.
"""

import difflib
import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import libcst as cst

from .. import files
from ..errors import BadInput, GateFailed
from ..params import Params
from . import cpu_eager_pp

CATALOGUE = {cpu_eager_pp.ID: cpu_eager_pp}
# States in which the defect does no harm.
MENDED = ("patched", "edited", "fixed")


@dataclass(frozen=True)
class Status:
    """One defect in one vLLM tree. state: present, patched (by Fieldbook), edited (patched, and changed by someone since), fixed (upstream),
    not recognised."""

    id: str
    title: str
    state: str
    file: str
    line: int | None
    symbol: str
    met_by_this_box: bool
    sha256: str | None


def vllm_tree() -> Path:
    """Folder of the vLLM package in this environment, found without importing it. Raises BadInput when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise BadInput("no vLLM in this environment; `make report` sets one up")
    return Path(spec.submodule_search_locations[0])


def _keep_dir(tree: Path) -> Path:
    return tree.parent / f"{tree.name}.fieldbook-originals"


def _manifest(tree: Path) -> dict[str, dict]:
    file = _keep_dir(tree) / "manifest.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _defect(defect_id: str):
    if defect_id not in CATALOGUE:
        raise BadInput(f"patch {defect_id!r} is not in the catalogue; it has {', '.join(CATALOGUE)}")
    return CATALOGUE[defect_id]


def status(tree: Path, params: Params | None = None) -> list[Status]:
    """Every defect of the catalogue in this tree; with params, whether that box would meet it."""
    rows = []
    manifest = _manifest(tree)
    for defect in CATALOGUE.values():
        file = tree / defect.FILE
        text = file.read_bytes() if file.is_file() else None
        state = _state(defect, text, manifest.get(defect.ID))
        name = defect.SYMBOL.rpartition(".")[2]
        line = next((n for n, row in enumerate(text.decode().splitlines(), 1) if f"def {name}(" in row), None) if text else None
        met = params is not None and defect.met_by(params.engine.device, params.engine.enforce_eager, params.parallel.pipeline_parallel_size)
        rows.append(Status(defect.ID, defect.TITLE, state, defect.FILE, line, defect.SYMBOL, met, files.sha256_of(file) if text is not None else None))
    return rows


@lru_cache(maxsize=8)
def _parse(text: bytes) -> cst.Module | None:
    """Parsed source, kept because one file is asked about many times; None when it is no Python."""
    try:
        return cst.parse_module(text)
    except (cst.ParserSyntaxError, UnicodeDecodeError):
        return None


def _state(defect, text: bytes | None, entry: dict | None) -> str:
    module = _parse(text) if text is not None else None
    found = defect.detect(module) if module else "not recognised"
    if found != "mended":
        return found
    if entry and entry["patched_sha256"] == hashlib.sha256(text).hexdigest():
        return "patched"
    # With Fieldbook's own wording in it, it is Fieldbook's file with something else changed; in other words it is vLLM's own mend.
    return "edited" if entry and defect.is_ours(module) else "fixed"


def state_of(tree: Path, defect_id: str) -> str:
    """State of one defect."""
    _defect(defect_id)
    return next(s.state for s in status(tree) if s.id == defect_id)


def apply(tree: Path, defect_id: str) -> str:
    """Mend one defect in place; a tree that is already mended is left alone. Returns the state after.

    Raises GateFailed when the code is not recognised, or when the edited file would not show the defect as mended.
    """
    defect = _defect(defect_id)
    before = state_of(tree, defect_id)
    if before in MENDED:
        return before
    if before != "present":
        raise GateFailed(f"{defect_id}: {defect.SYMBOL} in {defect.FILE} is not recognised; nothing was changed")
    file = tree / defect.FILE
    original = file.read_bytes()
    edited = defect.edit(_parse(original))
    if defect.detect(edited) != "mended":
        raise GateFailed(f"{defect_id}: the edit of {defect.FILE} did not take; nothing was changed")
    compile(edited.bytes, defect.FILE, "exec")
    sums = {"original_sha256": hashlib.sha256(original).hexdigest(), "patched_sha256": hashlib.sha256(edited.bytes).hexdigest()}
    try:
        files.write_whole(_keep_dir(tree) / f"{defect_id}.orig", original)
        # The manifest is written before the file: a crash in between leaves stock code and a manifest that matches nothing.
        files.write_json(_keep_dir(tree) / "manifest.json", {**_manifest(tree), defect_id: {"file": defect.FILE, **sums}})
        files.write_whole(file, edited.bytes, mode=file.stat().st_mode & 0o777)
    except OSError as error:
        raise GateFailed(f"{defect_id}: {tree} cannot be written ({error.strerror}); use an environment of your own") from None
    return state_of(tree, defect_id)


def revert(tree: Path, defect_id: str) -> str:
    """Put the kept original back, byte for byte. Returns the state after; stock code is left alone.

    Raises GateFailed when someone else changed the file since, because then the original would undo their work too.
    """
    defect = _defect(defect_id)
    if state_of(tree, defect_id) in ("present", "fixed"):
        return state_of(tree, defect_id)
    entry, file = _manifest(tree).get(defect_id), tree / defect.FILE
    if entry is None or files.sha256_of(file) != entry["patched_sha256"]:
        raise GateFailed(f"{defect_id}: {defect.FILE} is not as Fieldbook left it; reinstall vLLM to get the stock file")
    original = (_keep_dir(tree) / f"{defect_id}.orig").read_bytes()
    if hashlib.sha256(original).hexdigest() != entry["original_sha256"]:
        raise GateFailed(f"{defect_id}: the kept original of {defect.FILE} is damaged; reinstall vLLM to get the stock file")
    files.write_whole(file, original, mode=file.stat().st_mode & 0o777)
    return state_of(tree, defect_id)


def diff(tree: Path, defect_id: str) -> str:
    """Unified diff of the mend: of what was applied, or of what would be."""
    defect = _defect(defect_id)
    state = state_of(tree, defect_id)
    if state not in ("present", "patched"):
        return ""
    now = (tree / defect.FILE).read_text(encoding="utf-8")
    if state == "patched":
        before, after = (_keep_dir(tree) / f"{defect_id}.orig").read_text(encoding="utf-8"), now
    else:
        before, after = now, defect.edit(_parse(now.encode())).code
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{defect.FILE}", f"b/{defect.FILE}", lineterm="", n=3)
    return "\n".join(lines)


def as_rows(rows: list[Status]) -> list[dict]:
    """Status rows as plain dictionaries, for receipts and JSON."""
    return [asdict(row) for row in rows]
