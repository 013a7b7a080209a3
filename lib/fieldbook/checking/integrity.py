"""Whether the files of a run belong together: hashes of the params, of the receipts and of a manifest, times in order, nothing missing."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import yaml

from .. import files, paths, publish
from .. import params as params_module
from ..errors import BadInput
from ..params import Params
from ..receipts import Receipt
from ..secrecy import STARS
from .opening import MANIFEST
from .run import Run, other_version


def problems(run: Run) -> tuple[list[str], list[str]]:
    """(what does not belong together, what is only to be told)."""
    found, notes = _params(run)
    more, told = _present(run)
    manifest, untold = _manifest(run.folder)
    return found + more + _times(run) + manifest, notes + told + untold


def hash_of(sections: Any) -> str:
    """The params' hash of sections with all values filled in, as `schema.Params.hash` has it. Raises ValueError for what is no JSON."""
    return hashlib.sha256(json.dumps(sections, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _hashes_of_file(file: Path) -> set[str]:
    """Hashes that params.yml may stand for: as written, and with this release's defaults filled in. Raises BadInput for one that cannot be read."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)):
            # Fieldbook writes none, and a few lines of them unfold into gigabytes.
            raise BadInput("params.yml: it refers to parts of itself; Fieldbook writes none that does")
        sections = params_module.read(file)
        found = {hash_of(sections)}
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"params.yml: cannot be read ({str(error).splitlines()[0]})") from None
    try:
        return found | {Params.model_validate(sections).hash}
    except ValueError:
        return found


def _params(run: Run) -> tuple[list[str], list[str]]:
    found, notes, file = [], [], run.folder / "params.yml"
    hashes: set[str] = set()
    if file.is_file():
        try:
            hashes = _hashes_of_file(file)
        except BadInput as error:
            found.append(str(error).replace(f"{file}", "params.yml"))
    else:
        notes.append("params.yml is missing: the receipts' own params are used")
    for number, receipt in run.receipts.items():
        name = f"{paths.station_name(number)}.json"
        if hashes and receipt.params_hash not in hashes:
            found.append(f"{name}: params_hash is {receipt.params_hash[:12]}, params.yml has {min(hashes)[:12]}")
        if STARS in json.dumps(receipt.params):
            notes.append(f"{name}: its params are starred in part, so their hash cannot be computed")
        elif hash_of(receipt.params) != receipt.params_hash:
            found.append(f"{name}: params_hash is {receipt.params_hash[:12]}, the params in it have {hash_of(receipt.params)[:12]}")
        stated = receipt.params.get("box")
        if not isinstance(stated, dict) or (receipt.box, receipt.kind) != (stated.get("name"), stated.get("kind")):
            found.append(f"{name}: box {receipt.box} ({receipt.kind}) is not the one of its params")
        if paths.STATIONS[number - 1] != receipt.notebook:
            found.append(f"{name}: it is the receipt of {receipt.notebook}")
    return found, notes


def _present(run: Run) -> tuple[list[str], list[str]]:
    """Receipts that are missing: before others, it is a gap; at the end, the walk stopped there."""
    last, found, notes = max(run.receipts, default=0), [], []
    for number, name in enumerate(paths.STATIONS, 1):
        if number not in run.receipts:
            (found if number < last else notes).append(f"{name}.json is missing" + (", though later ones are there" if number < last else ""))
    for number, receipt in run.receipts.items():
        if version := other_version(receipt):
            notes.append(f"{paths.station_name(number)}.json was written by {version}: what this release computes says nothing about it")
    if run.why_no_plan:
        notes.append(f"nothing of the model can be computed here: {run.why_no_plan}")
    return found, notes


def _times(run: Run) -> list[str]:
    found, ended = [], {}
    for number, receipt in run.receipts.items():
        name, start, end = f"{paths.station_name(number)}.json", publish.parse_time(receipt.started_at), publish.parse_time(receipt.ended_at)
        if not start or not end:
            found.append(f"{name}: started_at {receipt.started_at!r} or ended_at {receipt.ended_at!r} is no time")
            continue
        if start > end:
            found.append(f"{name}: it ended at {receipt.ended_at}, before it started at {receipt.started_at}")
        ended[number] = end
    for (one, before), (two, after) in itertools.pairwise(ended.items()):
        if before > after:
            names = paths.station_name(one), paths.station_name(two)
            found.append(f"{names[1]}.json ended at {_ended(run.receipts[two])}, before {names[0]}.json at {_ended(run.receipts[one])}")
    return found


def _ended(receipt: Receipt) -> str:
    return receipt.ended_at


def _listed(document: Any) -> dict[str, str]:
    """{path: sha256} of a manifest: a mapping of paths to hashes or to entries with one, or a list of entries, perhaps under "files"."""
    document = document.get("files", document) if isinstance(document, dict) else document
    if isinstance(document, list):
        named = ((entry.get("path") or entry.get("file") or entry.get("name"), entry) for entry in document if isinstance(entry, dict))
        document = {name: entry for name, entry in named if isinstance(name, str)}
    found = {}
    for name, entry in document.items() if isinstance(document, dict) else ():
        digest = entry.get("sha256") if isinstance(entry, dict) else entry
        if isinstance(digest, str) and len(digest.removeprefix("sha256:")) == 64:
            found[name] = digest.removeprefix("sha256:").lower()
    return found


def _manifest(folder: Path) -> tuple[list[str], list[str]]:
    file = folder / MANIFEST
    if not file.is_file():
        return [], []
    try:
        listed = _listed(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        return [f"{MANIFEST}: no JSON ({error})"], []
    if not listed:
        return [f"{MANIFEST}: it lists no file with its sha256"], []
    found, top = [], folder.name
    for name, digest in sorted(listed.items()):
        # A manifest may name the archive's top folder as well.
        place = next((p for p in (folder / name, folder / name.removeprefix(f"{top}/")) if p.is_file()), None)
        if ".." in Path(name).parts or Path(name).is_absolute():
            found.append(f"{MANIFEST}: {name!r} lies outside the run folder")
        elif place is None:
            found.append(f"{MANIFEST}: {name} is missing")
        elif place.is_symlink() or files.sha256_of(place) != digest:
            found.append(f"{MANIFEST}: {name} has another SHA-256 than listed")
    own = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
    extra = sorted(own - set(listed) - {name.removeprefix(f"{top}/") for name in listed})
    return found, [f"{MANIFEST} does not list {', '.join(extra[:5])}{' and more' if len(extra) > 5 else ''}"] if extra else []
