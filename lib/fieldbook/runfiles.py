"""Files of a finished run, out of its folder or a .zip of it. Members are read as they are asked for; nothing is written to disk."""

import json
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import BaseModel

from .errors import BadInput

Row = TypeVar("Row", bound=BaseModel)
# Samples and answers of a long run are some megabytes; a member that says more is none of ours (or a bomb).
MOST_BYTES = 512 << 20


class RunFiles:
    """A run's files by their names in its folder; a context manager, since a .zip stays open meanwhile. Raises BadInput for what is neither."""

    def __init__(self, where: str):
        self.where, self._zip, self._members = where, None, {}
        path = Path(where)
        if path.is_dir():
            self._folder = path
            return
        self._folder = None
        if not path.is_file():
            raise BadInput(f"{where}: no such run; give a folder reports/BOX/RUN, or a .zip of one")
        try:
            self._zip = zipfile.ZipFile(path)
            self._members = _members(self._zip, where)
        except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
            raise BadInput(f"{where}: neither a run folder nor a .zip of one ({error})") from None

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *_: object) -> None:
        if self._zip:
            self._zip.close()

    def text(self, name: str) -> str | None:
        """Text of a file of the run, None where it is not there. Raises BadInput for one that cannot be read."""
        try:
            if self._folder:
                file = self._folder / name
                return file.read_text(encoding="utf-8") if file.is_file() else None
            info = self._members.get(name)
            if info is None:
                return None
            if info.file_size > MOST_BYTES:
                raise BadInput(f"{self.where}: {name}: {info.file_size:,} bytes, more than a run has")
            return self._zip.read(info).decode("utf-8")
        except (OSError, UnicodeDecodeError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise BadInput(f"{self.where}: {name}: cannot be read ({error})") from None

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the run, None where there is no such file. Raises BadInput for a damaged one."""
        text = self.text(name)
        if text is None:
            return None
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise BadInput(f"{self.where}: {name}: damaged: no JSON object")
        return document

    def models(self, name: str, model: type[Row]) -> list[Row]:
        """Rows of a JSON-lines file of the run; none where there is no file. Raises BadInput for a damaged one."""
        try:
            return [model.model_validate(json.loads(line)) for line in (self.text(name) or "").splitlines() if line.strip()]
        except ValueError as error:
            raise BadInput(f"{self.where}: {name}: not of this release ({str(error).splitlines()[0]})") from None


def _members(archive: zipfile.ZipFile, where: str) -> dict[str, zipfile.ZipInfo]:
    """Members by their names below the one top folder. Raises BadInput for names that lead out of it, and for more than one top folder."""
    found, tops, twice = {}, set(), ""
    for info in archive.infolist():
        name = PurePosixPath(info.filename)
        unsafe = name.is_absolute() or ".." in name.parts or "\\" in info.filename or ":" in info.filename or "\0" in info.filename
        if unsafe:
            raise BadInput(f"{where}: unsafe name in it: {info.filename[:80]!r}")
        if info.is_dir() or not name.parts:
            tops |= set(name.parts[:1])
            continue
        tops.add(name.parts[0] if len(name.parts) > 1 else "")
        below = "/".join(name.parts[1:]) if len(name.parts) > 1 else name.name
        twice = info.filename if below in found else twice
        found[below] = info
    if len(tops) != 1 or "" in tops:
        raise BadInput(f"{where}: expected one folder in it, the run's, and nothing beside; got {', '.join(sorted(filter(None, tops))[:4]) or 'files alone'}")
    if twice:
        raise BadInput(f"{where}: {twice[:80]!r} is in it twice")
    return found
