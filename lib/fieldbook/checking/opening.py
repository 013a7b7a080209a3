"""Opening what somebody gave: a run folder, or a zip of one, which is read as something written by a stranger."""

import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from .. import paths
from ..errors import BadInput, short

MANIFEST = "MANIFEST.json"
# A live run of hours has some thirty files and a few MiB. These bounds are for an archive that unpacks without end.
MOST_FILES = 5_000
MOST_BYTES = 512 * 2**20
# What is read of a folder; nothing else in it is opened.
READ = ("params.yml", "index.html", "samples.jsonl", "answers.jsonl", "readings.json", MANIFEST)
_FOLDERS = {"servers": "*.log", "steps": "*.json"}
_RIGHT = "give a run folder as `fieldbook run` leaves it, or a zip of one"


@contextmanager
def opened(given: str | Path) -> Iterator[Path]:
    """The run folder that was given, a zip unpacked into a temporary one. Raises BadInput for what is neither, or not safe to unpack."""
    path = Path(given)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise BadInput(f"{short(str(given))}: cannot be looked at ({getattr(error, 'strerror', None) or error}); {_RIGHT}") from None
    if is_folder:
        yield _checked(path.resolve(), str(given))
    elif is_file:
        with tempfile.TemporaryDirectory(prefix="fieldbook-check-") as scratch:
            yield _checked(_unpacked(path, Path(scratch)), str(given))
    else:
        raise BadInput(f"{given}: no such run folder or zip; {_RIGHT}")


def _checked(folder: Path, given: str) -> Path:
    """The folder, when it is a run's and holds its files itself."""
    receipts = [name for name in paths.STATIONS if (folder / f"{name}.json").exists()]
    if not receipts and not (folder / "params.yml").exists():
        raise BadInput(f"{given}: no run: neither params.yml nor a receipt such as {paths.STATIONS[0]}.json in it; {_RIGHT}")
    names = [*READ, *(f"{name}.{kind}" for name in paths.STATIONS for kind in ("json", "ipynb")), *_FOLDERS]
    within = [file for name, kind in _FOLDERS.items() if not (folder / name).is_symlink() for file in (folder / name).glob(kind)]
    for file in [*(folder / name for name in names), *within]:
        if file.is_symlink() or (file.exists() and not file.is_file() and file.name not in _FOLDERS):
            raise BadInput(f"{given}: {file.relative_to(folder)} is no plain file; {_RIGHT} that holds its files itself")
    return folder


def _unpacked(archive: Path, scratch: Path) -> Path:
    """Unpack an archive by hand, counting what really comes out; returns the folder that the run lies in."""
    try:
        with zipfile.ZipFile(archive) as whole:
            members = [member for member in whole.infolist() if not member.is_dir()]
            _refuse_unsafe(members, archive)
            left = MOST_BYTES
            for member in members:
                left -= _copy(whole, member, scratch / member.filename, left, archive)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BadInput(f"{archive}: no zip, or a damaged one ({error}); {_RIGHT}") from None
    except OSError as error:
        raise BadInput(f"{archive}: cannot be unpacked ({error.strerror or error}); {_RIGHT}") from None
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise BadInput(f"{archive}: cannot be unpacked ({error}); {_RIGHT}") from None
    tops = list(scratch.iterdir())
    return tops[0] if len(tops) == 1 and tops[0].is_dir() else scratch


def _refuse_unsafe(members: list[zipfile.ZipInfo], archive: Path) -> None:
    """Raises BadInput for names that leave the folder, links, encrypted or repeated members, too many, or too large ones."""
    if len(members) > MOST_FILES:
        raise BadInput(f"{archive}: {len(members):,} files, more than the {MOST_FILES:,} of any run; {_RIGHT}")
    if sum(member.file_size for member in members) > MOST_BYTES:
        raise BadInput(f"{archive}: unpacks to more than {MOST_BYTES // 2**20} MiB, more than any run; {_RIGHT}")
    seen = set()
    for member in members:
        name, kind = PurePosixPath(member.filename), stat.S_IFMT(member.external_attr >> 16)
        wrong = ""
        if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename or not member.filename.isprintable():
            wrong = "a name that leads out of the folder or cannot be one"
        elif kind not in (0, stat.S_IFREG):
            wrong = "no plain file (a link, perhaps)"
        elif member.flag_bits & 0x1:
            wrong = "encrypted"
        elif str(name).casefold() in seen:
            wrong = "there twice"
        if wrong:
            raise BadInput(f"{archive}: {short(member.filename)}: {wrong}; {_RIGHT}")
        seen.add(str(name).casefold())


def _copy(whole: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, most: int, archive: Path) -> int:
    """Unpack one member; its header may lie about its size."""
    target.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with whole.open(member) as source, target.open("xb") as file:
        while chunk := source.read(1 << 20):
            written += len(chunk)
            if written > most:
                raise BadInput(f"{archive}: unpacks to more than {MOST_BYTES // 2**20} MiB, more than any run; {_RIGHT}")
            file.write(chunk)
    return written
