"""Export: a run to send to someone, as one HTML file that stands alone and as a .zip with receipts and notebooks."""

import base64
import hashlib
import io
import json
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from . import files, publish, sharing
from .errors import BadInput
from .paths import STATIONS

_TYPES = {".json": "application/json", ".yml": "application/yaml"}
# The earliest time that a zip can tell: the bytes must depend on the folder's content alone.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def export(run_dir: Path, html: str | None = None, zipped: str | None = None) -> dict[str, Any]:
    """Write the HTML file, the zip, or without a name for either both, named by box and run in the current folder.

    Returns {"html", "zip": path or None, "files": names in the zip (or the page), "cleaned": files that something was taken out of}. The same folder
    gives the same bytes. Raises BadInput for a folder that holds no run, and for a target that is a folder or cannot be written.
    """
    run_dir = Path(run_dir).resolve()
    if not any((run_dir / f"{name}{suffix}").is_file() for name in STATIONS for suffix in (".json", ".ipynb")):
        raise BadInput(f"export: {run_dir}: is no run folder, it holds no receipt and no executed notebook; runs lie under reports/<box>/")
    run = publish.read_run(run_dir)
    name = re.sub(r"[^\w.-]+", "-", f"{run['box']}-{run['run']}")
    if html is None and zipped is None:
        html, zipped = f"{name}.html", f"{name}.zip"
    targets = {"html": html and _target("--html", html), "zip": zipped and _target("--zip", zipped)}
    members = read_members(run_dir, run["box"])
    cleaned = [member for member, data in members.items() if data != (run_dir / member).read_bytes()]
    with tempfile.TemporaryDirectory() as scratch:
        # The page is made from what is sent, so that it shows no more than that, and names the SHA-256 of the files beside it.
        copy = Path(scratch) / run_dir.parent.name / run_dir.name
        for member, data in members.items():
            files.write_whole(copy / member, data)
        if html:
            _write("--html", targets["html"], publish.report_html(copy, _embedded(members)).encode())
        if zipped:
            members["index.html"] = publish.report_html(copy).encode()
    if zipped:
        _write("--zip", targets["zip"], zip_bytes(name, members, {"box": run["box"], "run": run["run"], "cleaned": cleaned}))
    sent = sorted([*members, "MANIFEST.json"] if zipped else _embedded(members))
    return {"html": html and str(targets["html"]), "zip": zipped and str(targets["zip"]), "files": sent, "cleaned": cleaned}


def read_members(run_dir: Path, box: str) -> dict[str, bytes]:
    """The files of a run that are sent, clean, by their name in the folder: receipts, notebooks, params, samples, steps of the verdict, pictures.

    No servers' logs, no links.
    """
    rules = sharing.rules_of(run_dir, box)
    found = [path for path in run_dir.iterdir() if path.suffix in (".json", ".jsonl", ".yml", ".ipynb")]
    members = {path.name: sharing.clean_file(path, rules) for path in sorted(found) if _is_sent(path)}
    steps = [path for path in sorted((run_dir / "steps").glob("*.json")) if _is_sent(path) and not (run_dir / "steps").is_symlink()]
    members |= {f"steps/{path.name}": sharing.clean_file(path, rules) for path in steps}
    pictures = [path for path in sorted((run_dir / "screenshots").glob("*.png")) if _is_sent(path)]
    return members | {f"screenshots/{path.name}": path.read_bytes() for path in pictures}


def zip_bytes(name: str, members: dict[str, bytes], about: dict[str, Any]) -> bytes:
    """A zip of `members` under one folder `name`, with a MANIFEST.json of their SHA-256; the same bytes for the same members."""
    listed = {member: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for member, data in sorted(members.items())}
    manifest = json.dumps({"schema_version": 1, **about, "files": listed}, indent=1, ensure_ascii=False) + "\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for member, data in sorted({**members, "MANIFEST.json": manifest.encode()}.items()):
            entry = zipfile.ZipInfo(f"{name}/{member}", _NO_TIME)
            entry.compress_type, entry.external_attr, entry.create_system = zipfile.ZIP_DEFLATED, 0o100644 << 16, 3
            archive.writestr(entry, data)
    return buffer.getvalue()


def _is_sent(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not path.name.startswith(".") and path.name != "MANIFEST.json"


def _embedded(members: dict[str, bytes]) -> dict[str, str]:
    """Receipts and params as data: addresses by file name."""
    names = [name for name in members if name == "params.yml" or name.removesuffix(".json") in STATIONS]
    return {name: f"data:{_TYPES[Path(name).suffix]};base64,{base64.b64encode(members[name]).decode()}" for name in names}


def _target(option: str, name: str) -> Path:
    path = Path(name)
    if path.is_dir():
        raise BadInput(f"export {option}: {path}: is a folder; give the name of a file in it")
    return path.absolute()


def _write(option: str, path: Path, data: bytes) -> None:
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise BadInput(f"export {option}: {path}: cannot be written ({error.strerror}); give another file") from None
