"""Writing files whole: a reader sees the old content or the new, never half of either."""

import hashlib
import json
import lzma
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from .errors import BadInput

Row = TypeVar("Row", bound=BaseModel)


def write_whole(path: Path, content: bytes | str, mode: int = 0o644) -> Path:
    """Write through a temporary file in the same folder, fsync, rename. Returns the path."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write a JSON document whole, keys in the order given."""
    return write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


@lru_cache
def read_of_box(path: Path, keys: tuple[str, ...], made_by: str) -> dict[str, Any]:
    """These keys of a JSON document of data/boxes/<box>/, read once. Raises BadInput, naming the tool that makes it, where it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: found[key] for key in keys}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"data/boxes/{path.parent.name}/{path.name}: cannot be read ({error}); {made_by} makes it") from None


def read_models(path: Path, model: type[Row], what: str) -> list[Row]:
    """The rows of a JSON-lines file, .xz or plain; none where there is no file.

    Raises BadInput, naming `what` they are, for one that is damaged or of another release.
    """
    if not path.is_file():
        return []
    try:
        text = (lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode("utf-8")
        return [model.model_validate(json.loads(line)) for line in text.splitlines() if line.strip()]
    except (ValueError, lzma.LZMAError) as error:
        raise BadInput(f"{path}: no {what} of this release ({str(error).splitlines()[0]}); measure again") from None


def write_models(path: Path, rows: list[Row]) -> Path:
    """Write rows as JSON lines, whole; compressed where the name ends in .xz."""
    text = "".join(row.model_dump_json() + "\n" for row in rows)
    return write_whole(path, lzma.compress(text.encode()) if path.suffix == ".xz" else text)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
