"""Writing patched files so that the tree is never in between: originals kept, a journal, and the next call finishes what a kill cut off.

Beside the package lies `<package>.fieldbook-originals/` with the stock bytes of every patched file (originals/), the bytes that a change in progress is
about to write (staged/) and manifest.json. A change writes in this order: originals, staged files, the manifest with the change as pending, the files
themselves, the manifest without it. Up to the third step nothing has happened; from there on everything that is needed to finish is on disk.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import __version__, files
from ..errors import GateFailed

SCHEMA_VERSION = 2


@dataclass
class Manifest:
    """active: ids whose edits are in the tree; originals and patched: sha256 by path, of patched files only; pending: a change that is being written."""

    schema_version: int = SCHEMA_VERSION
    fieldbook: str = __version__
    params_hash: str = ""
    active: list[str] = field(default_factory=list)
    originals: dict[str, str] = field(default_factory=dict)
    patched: dict[str, str] = field(default_factory=dict)
    pending: dict | None = None


def sha256(content: bytes) -> str:
    """In hex."""
    return hashlib.sha256(content).hexdigest()


def keep_dir(tree: Path) -> Path:
    """Folder beside the package for originals and manifest."""
    return tree.parent / f"{tree.name}.fieldbook-originals"


def load(tree: Path) -> Manifest:
    """The manifest of a tree, empty where nothing was patched. One of an earlier Fieldbook, which knew one file for each patch, is read too."""
    file = keep_dir(tree) / "manifest.json"
    if not file.is_file():
        return Manifest()
    document = json.loads(file.read_text())
    if "schema_version" in document:
        return Manifest(**document)
    entries = {name: entry for name, entry in document.items() if (tree / entry["file"]).is_file()}
    own = {name: entry for name, entry in entries.items() if files.sha256_of(tree / entry["file"]) == entry["patched_sha256"]}
    return Manifest(
        active=list(own),
        originals={entry["file"]: entry["original_sha256"] for entry in own.values()},
        patched={entry["file"]: entry["patched_sha256"] for entry in own.values()},
    )


def original(tree: Path, path: str, manifest: Manifest) -> bytes:
    """Stock bytes of a file: what is kept, where Fieldbook patched it, else what is there. Raises GateFailed where the kept ones are damaged."""
    if path not in manifest.originals:
        return (tree / path).read_bytes()
    kept = keep_dir(tree) / "originals" / path
    if not kept.is_file():
        # Where an earlier Fieldbook kept it.
        kept = next((one for one in keep_dir(tree).glob("*.orig") if files.sha256_of(one) == manifest.originals[path]), kept)
    content = kept.read_bytes() if kept.is_file() else b""
    if sha256(content) != manifest.originals[path]:
        raise GateFailed(f"{path}: the kept original is damaged; reinstall vLLM to get the stock file")
    return content


@contextlib.contextmanager
def locked(tree: Path) -> Iterator[None]:
    """One change at a time on a tree. Raises GateFailed where its folder cannot be written."""
    try:
        keep_dir(tree).mkdir(exist_ok=True)
        with open(keep_dir(tree) / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise GateFailed(f"{tree} cannot be written ({error.strerror}); write the patched files elsewhere with --overlay DIR") from None


def change(tree: Path, active: list[str], content: dict[str, bytes], params_hash: str, manifest: Manifest) -> None:
    """Give the files this content, whole or not at all, and note which patches are in the tree then.

    content: by path, of every file that changes; one that gets its stock bytes back is forgotten. manifest: what is in the tree now. Call it under
    `locked` and after `recover`.
    """
    keep = keep_dir(tree)
    before = {path: (tree / path).read_bytes() for path in content}
    stock = {path: original(tree, path, manifest) for path in content}
    for path in content:
        files.write_whole(keep / "originals" / path, stock[path])
    for path, data in content.items():
        files.write_whole(keep / "staged" / path, data)
    manifest.pending = {
        "active": active,
        "files": {path: {"before": sha256(before[path]), "after": sha256(data), "stock": sha256(stock[path])} for path, data in content.items()},
        "params_hash": params_hash,
    }
    _write(tree, manifest)
    _finish(tree, manifest)


def recover(tree: Path) -> bool:
    """Finish a change that was cut off. True when there was one. Raises GateFailed where someone else changed a file of it since."""
    manifest = load(tree)
    if manifest.pending is None:
        return False
    for path in manifest.pending["files"]:
        # A kill in the middle of a write leaves its temporary file.
        for left in (tree / path).parent.glob(f".{Path(path).name}.*"):
            left.unlink(missing_ok=True)
    _finish(tree, manifest)
    return True


def _finish(tree: Path, manifest: Manifest) -> None:
    keep, pending = keep_dir(tree), manifest.pending
    for path, sums in pending["files"].items():
        target = tree / path
        now = files.sha256_of(target)
        if now == sums["after"]:
            continue
        staged = keep / "staged" / path
        if now != sums["before"] or not staged.is_file() or files.sha256_of(staged) != sums["after"]:
            raise GateFailed(f"{path}: changed while Fieldbook's own change was cut off; reinstall vLLM to get the stock file")
        files.write_whole(target, staged.read_bytes(), mode=target.stat().st_mode & 0o777)
    for path, sums in pending["files"].items():
        if sums["after"] == sums["stock"]:
            manifest.originals.pop(path, None)
            manifest.patched.pop(path, None)
        else:
            manifest.originals[path], manifest.patched[path] = sums["stock"], sums["after"]
    manifest.active, manifest.params_hash, manifest.pending = pending["active"], pending["params_hash"], None
    _write(tree, manifest)


def _write(tree: Path, manifest: Manifest) -> None:
    manifest.schema_version, manifest.fieldbook = SCHEMA_VERSION, __version__
    files.write_json(keep_dir(tree) / "manifest.json", asdict(manifest))
