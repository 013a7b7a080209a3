"""What is the matter in one vLLM tree: the state of every defect, found by structure."""

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import files, memory
from ..errors import GateFailed
from ..params import Params
from ..schema import Ranks
from . import site, store
from .catalogue import CATALOGUE, MENDED, OBSERVED, defect_of
from .site import Defect
from .tree import tree_of_box


@dataclass(frozen=True)
class Status:
    """One defect in one vLLM tree. state: present, patched (by Fieldbook), edited (patched, and changed by someone since), fixed (upstream),
    does not apply (the code is not in this release), not recognised. file, line, symbol: the first site that is not mended, else the first there is."""

    id: str
    title: str
    state: str
    file: str
    line: int | None
    symbol: str
    met_by_this_box: bool
    sha256: str | None
    effect: str = ""
    drop_when: str = ""
    reports: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    mendable: bool = True
    blocks: bool = True
    sites: tuple[dict, ...] = ()


def read(tree: Path, path: str) -> bytes | None:
    return (tree / path).read_bytes() if (tree / path).is_file() else None


def _site_states(tree: Path, defect: Defect) -> list[str]:
    """State of each site. Sites of one file belong together: where only some of them are mended, someone else has begun to, and none is recognised."""
    found = [site.state_in(one, read(tree, one.file)) for one in defect.sites]
    for path in {one.file for one in defect.sites}:
        own = [i for i, one in enumerate(defect.sites) if one.file == path]
        if {"present", "mended"} <= {found[i] for i in own}:
            found = ["not recognised" if i in own else state for i, state in enumerate(found)]
    return found


def _combined(states: list[str]) -> str:
    """State of a defect from those of its sites: one that is present makes it so, one that is not recognised makes it unknown."""
    for worst in ("not recognised", "present", "mended"):
        if worst in states:
            return worst
    return "does not apply"


def _state(tree: Path, defect: Defect, manifest: store.Manifest) -> tuple[str, list[str]]:
    states = _site_states(tree, defect)
    found = _combined(states)
    if found != "mended":
        return found, states
    own = [one.file for one, state in zip(defect.sites, states, strict=True) if state == "mended" and one.file in manifest.patched]
    if defect.id not in manifest.active or not own:
        return "fixed", states
    changed = [path for path in own if files.sha256_of(tree / path) != manifest.patched[path]]
    return ("edited" if changed else "patched"), states


def status(tree: Path, params: Params | None = None) -> list[Status]:
    """Every defect of the catalogue in this tree, then those that are only looked for; with params, whether that box and model would meet it."""
    manifest = _settled(tree)
    spec = memory.model_spec(params.model.name) if params is not None else None
    rows = []
    for defect in CATALOGUE.values():
        state, states = _state(tree, defect, manifest)
        told = [(one, its) for one, its in zip(defect.sites, states, strict=True) if its != "does not apply"] or [(defect.sites[0], "does not apply")]
        first = next((one for one, its in told if its != "mended"), told[0][0])
        text = read(tree, first.file)
        sites = tuple(
            {"file": one.file, "symbol": one.symbol, "state": its, "line": site.line_of(one.symbol, read(tree, one.file) or b"")}
            for one, its in zip(defect.sites, states, strict=True)
        )
        rows.append(
            Status(
                id=defect.id,
                title=defect.title,
                state=state,
                file=first.file,
                line=site.line_of(first.symbol, text) if text is not None else None,
                symbol=first.symbol,
                met_by_this_box=params is not None and is_met(defect, params, spec),
                sha256=store.sha256(text) if text is not None else None,
                effect=defect.effect,
                drop_when=defect.drop_when,
                reports=defect.reports,
                upstream=defect.upstream,
                blocks=defect.blocks,
                sites=sites,
            )
        )
    return rows + [_observed(tree, defect, params, spec) for defect in OBSERVED.values()]


def _observed(tree: Path, defect: Defect, params: Params | None, spec) -> Status:
    def read_text(path: str) -> str | None:
        text = read(tree, path)
        return None if text is None else text.decode(errors="replace")

    state, file, symbol = defect.look(read_text)
    text = read_text(file)
    line = site.line_of(symbol, text.encode()) if text is not None else None
    met = params is not None and is_met(defect, params, spec)
    sha = store.sha256(text.encode()) if text is not None else None
    told = {"effect": defect.effect, "drop_when": defect.drop_when, "reports": defect.reports, "upstream": defect.upstream, "blocks": defect.blocks}
    return Status(defect.id, defect.title, state, file, line, symbol, met, sha, mendable=False, **told)


def is_met(defect: Defect, params: Params, spec) -> bool:
    """Whether either arm of a box would meet a defect: its own layout, or the one that it is compared with."""
    own, other = params.parallel, params.verdict.baseline
    sizes = {name: getattr(other, name) for name in Ranks.model_fields} | {"layer_partition": other.layer_partition}
    return any(bool(defect.met_by(params.model_copy(update={"parallel": arm}), spec)) for arm in (own, own.model_copy(update=sizes)))


def state_of(tree: Path, defect_id: str) -> str:
    """State of one defect of the catalogue."""
    return _state(tree, defect_of(defect_id), _settled(tree))[0]


def _settled(tree: Path) -> store.Manifest:
    """The manifest after a change that was cut off is finished. What cannot be finished here is told by the next apply or revert."""
    if store.load(tree).pending is not None:
        with contextlib.suppress(GateFailed), store.locked(tree):
            store.recover(tree)
    return store.load(tree)


def as_rows(rows: list[Status]) -> list[dict]:
    """Status rows as plain dictionaries, for receipts and JSON."""
    return [asdict(row) for row in rows]


def rows_of_box(params: Params) -> list[dict]:
    """Every defect in the vLLM that a box is served with, as plain dictionaries."""
    return as_rows(status(tree_of_box(params), params))


def unmended(rows: list[dict]) -> list[str]:
    """Ids of the defects among status rows that the box meets, that are not mended, and that it must not be served with."""
    return [row["id"] for row in rows if _stands_against(row)]


def why_unmended(rows: list[dict]) -> str:
    """What stands against serving a box with these status rows, and the way out of each; '' where nothing does."""
    return "; ".join(_why(row) for row in rows if _stands_against(row))


def _stands_against(row: dict) -> bool:
    return row["met_by_this_box"] and row.get("blocks", True) and row["state"] not in MENDED


def _why(row: dict) -> str:
    if row["state"] == "not recognised":
        return f"{row['id']} is not recognised in {row['file']}, so it cannot be mended: serve with a vLLM of 0.29 to 0.33 as released"
    if row["mendable"]:
        return f"{row['id']} is not mended ({row['effect']}): set engine.patches to needed"
    return f"{row['id']} has no patch ({row['effect']}): take a release of which it is true that {row['drop_when']}"


def to_mend(rows: list[dict]) -> list[str]:
    """Ids of the defects among status rows that the box meets and that can be mended, or are."""
    return [row["id"] for row in rows if row["met_by_this_box"] and row.get("mendable", True) and row["state"] in ("present", "patched")]
