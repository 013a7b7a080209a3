"""Writing files whole: a reader sees the old content or the new, never half of either."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
