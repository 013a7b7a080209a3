"""The patch catalogue: which known pipeline-parallel defects a vLLM has, the mend, and the way back.

Files are read and edited in place in a vllm package, detected by structure and never by version. Before the first edit the original is kept beside the
package, so that a revert is byte for byte. Nothing here imports vLLM or torch.
"""

import contextlib
import difflib
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import files, memory
from ..errors import BadInput, GateFailed
from ..params import Params
from . import cpu_eager_pp, kv_ghost, mtp_stage, observed, ple_containment, site, store, tp_partial
from .site import Defect
from .tree import checked, release, tree_of_python, vllm_tree

__all__ = [
    "CATALOGUE", "MENDED", "OBSERVED", "Defect", "Status", "apply", "as_rows", "bundle_of", "checked", "diff", "overlay", "release", "revert", "state_of",
    "status", "tree_of_python", "vllm_tree",
]  # fmt: skip

# In the order in which edits of one file are made.
CATALOGUE: dict[str, Defect] = {
    one.DEFECT.id: one.DEFECT for one in (cpu_eager_pp, ple_containment, mtp_stage, kv_ghost, tp_partial)
}
OBSERVED: dict[str, Defect] = {one.id: one for one in observed.OBSERVED}
# States in which the defect does no harm.
MENDED = ("patched", "edited", "fixed", "does not apply")


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
    reports: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    mendable: bool = True
    blocks: bool = True
    sites: tuple[dict, ...] = ()


def _defect(defect_id: str) -> Defect:
    if defect_id not in CATALOGUE:
        raise BadInput(f"patch {defect_id!r} is not in the catalogue; it has {', '.join(CATALOGUE)}")
    return CATALOGUE[defect_id]


def bundle_of(defect_id: str) -> tuple[str, ...]:
    """A patch and those that go with it, in the catalogue's order: together or not at all."""
    defect = _defect(defect_id)
    return tuple(one for one in CATALOGUE if one == defect_id or one in defect.bundle)


def _read(tree: Path, path: str) -> bytes | None:
    return (tree / path).read_bytes() if (tree / path).is_file() else None


def _site_states(tree: Path, defect: Defect) -> list[str]:
    found = []
    for one in defect.sites:
        text = _read(tree, one.file)
        found.append(site.state(one, site.parse(text) if text is not None else None, there=text is not None))
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
        text = _read(tree, first.file)
        sites = tuple(
            {"file": one.file, "symbol": one.symbol, "state": its, "line": site.line_of(one.symbol, _read(tree, one.file) or b"")}
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
                met_by_this_box=params is not None and bool(defect.met_by(params, spec)),
                sha256=store.sha256(text) if text is not None else None,
                effect=defect.effect,
                reports=defect.reports,
                upstream=defect.upstream,
                sites=sites,
            )
        )
    return rows + [_observed(tree, defect, params, spec) for defect in OBSERVED.values()]


def _observed(tree: Path, defect: Defect, params: Params | None, spec) -> Status:
    def read(path: str) -> str | None:
        text = _read(tree, path)
        return None if text is None else text.decode(errors="replace")

    state, file, symbol = defect.look(read)
    text = read(file)
    line = site.line_of(symbol, text.encode()) if text is not None else None
    met = params is not None and bool(defect.met_by(params, spec))
    sha = store.sha256(text.encode()) if text is not None else None
    return Status(defect.id, defect.title, state, file, line, symbol, met, sha, defect.effect, defect.reports, defect.upstream, False, defect.blocks)


def state_of(tree: Path, defect_id: str) -> str:
    """State of one defect of the catalogue."""
    return _state(tree, _defect(defect_id), _settled(tree))[0]


def _settled(tree: Path) -> store.Manifest:
    """The manifest after a change that was cut off is finished. What cannot be finished here is told by the next apply or revert."""
    if store.load(tree).pending is not None:
        with contextlib.suppress(GateFailed), store.locked(tree):
            store.recover(tree)
    return store.load(tree)


def _not_recognised(defect_id: str, at: site.Site) -> GateFailed:
    return GateFailed(f"{defect_id}: {at.symbol} in {at.file} is not recognised; nothing was changed")


def _planned(tree: Path, active: tuple[str, ...], manifest: store.Manifest) -> dict[str, bytes]:
    """Content of every file that these patches touch, or that others touch now: edits on the stock bytes, in the catalogue's order.

    Raises GateFailed where a site is not recognised, or an edit would not show as mended.
    """
    ordered = [one for one in CATALOGUE if one in active]
    paths = dict.fromkeys([one.file for name in ordered for one in CATALOGUE[name].sites if (tree / one.file).is_file()])
    content = {path: store.original(tree, path, manifest) for path in [*paths, *(path for path in manifest.patched if path not in paths)]}
    for name in ordered:
        for one in CATALOGUE[name].sites:
            if one.file not in content:
                continue
            module = site.parse(content[one.file])
            before = site.state(one, module)
            if before in ("mended", "does not apply"):
                continue
            if before != "present":
                raise _not_recognised(name, one)
            changed = site.edited(one, module)
            if site.state(one, changed) != "mended":
                raise GateFailed(f"{name}: the edit of {one.file} did not take; nothing was changed")
            compile(changed.bytes, one.file, "exec")
            content[one.file] = changed.bytes
    return content


def _forgotten(tree: Path, manifest: store.Manifest) -> store.Manifest:
    """The manifest without files that a new installation replaced: what is there is stock again, and what was kept of the old one must not come back."""
    for path in list(manifest.patched):
        now = _read(tree, path)
        if now is None or store.sha256(now) in (manifest.patched[path], manifest.originals[path]):
            continue
        sites = [(name, one) for name in manifest.active for one in CATALOGUE[name].sites if one.file == path]
        if all(site.state(one, site.parse(now)) == "present" for _, one in sites):
            del manifest.patched[path], manifest.originals[path]
            manifest.active = [name for name in manifest.active if name not in {own for own, _ in sites}]
    return manifest


def _untouched(tree: Path, manifest: store.Manifest, defect_id: str) -> None:
    """Raise GateFailed where someone else changed a patched file since: their work would be undone."""
    for path, expected in manifest.patched.items():
        now = _read(tree, path)
        if now is None or store.sha256(now) != expected:
            raise GateFailed(f"{defect_id}: {path} is not as Fieldbook left it; reinstall vLLM to get the stock file")


def apply(tree: Path, defect_id: str, params_hash: str = "") -> str:
    """Mend one defect and those of its bundle in place; a tree that is mended already is left alone. Returns the state after.

    Raises GateFailed when the code is not recognised, or the tree cannot be written.
    """
    wanted = bundle_of(defect_id)
    before = {name: state_of(tree, name) for name in wanted}
    unknown = next((name for name, state in before.items() if state == "not recognised"), None)
    if unknown is not None:
        raise _not_recognised(unknown, CATALOGUE[unknown].sites[0])
    if all(state in MENDED for state in before.values()):
        return before[defect_id]
    with store.locked(tree):
        store.recover(tree)
        manifest = _forgotten(tree, store.load(tree))
        _untouched(tree, manifest, defect_id)
        active = tuple(one for one in CATALOGUE if one in manifest.active or (one in wanted and before[one] == "present"))
        _change(tree, active, manifest, params_hash)
    return state_of(tree, defect_id)


def revert(tree: Path, defect_id: str) -> str:
    """Take one defect's mend, and those of its bundle, out again, byte for byte. Returns the state after; stock code is left alone.

    Raises GateFailed when someone else changed a file since, because then the original would undo their work too.
    """
    taken = bundle_of(defect_id)
    before = state_of(tree, defect_id)
    if before == "not recognised":
        raise _not_recognised(defect_id, CATALOGUE[defect_id].sites[0])
    if before in ("present", "fixed", "does not apply"):
        return before
    with store.locked(tree):
        store.recover(tree)
        manifest = _forgotten(tree, store.load(tree))
        _untouched(tree, manifest, defect_id)
        active = tuple(one for one in CATALOGUE if one in manifest.active and one not in taken)
        _change(tree, active, manifest, manifest.params_hash)
    return state_of(tree, defect_id)


def _change(tree: Path, active: tuple[str, ...], manifest: store.Manifest, params_hash: str) -> None:
    content = {path: data for path, data in _planned(tree, active, manifest).items() if data != (tree / path).read_bytes()}
    if content or list(active) != manifest.active:
        store.change(tree, list(active), content, params_hash, manifest)


def diff(tree: Path, defect_id: str) -> str:
    """Unified diff of the mend and its bundle: of what was applied, or of what would be. Empty where there is nothing to mend."""
    wanted = bundle_of(defect_id)
    states = {name: state_of(tree, name) for name in wanted}
    if "not recognised" in states.values() or not any(state in ("present", "patched") for state in states.values()):
        return ""
    manifest = store.load(tree)
    others = tuple(name for name in manifest.active if name not in wanted)
    without, applied = (_planned(tree, active, manifest) for active in (others, (*others, *wanted)))
    return _unified({path: (without.get(path, store.original(tree, path, manifest)), data) for path, data in applied.items()})


def _unified(pairs: dict[str, tuple[bytes, bytes]]) -> str:
    lines: list[str] = []
    for path, (before, after) in pairs.items():
        old, new = (text.decode("utf-8").splitlines() for text in (before, after))
        lines += difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", lineterm="", n=3)
    return "\n".join(lines)


def overlay(tree: Path, defect_ids: list[str], folder: Path) -> list[Path]:
    """Write the patched files below `folder`/vllm and their diff as fieldbook.patch, for a container; the tree stays as it is.

    Raises GateFailed as `apply` does; BadInput for a folder that has other files in it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"patches --overlay: {folder} is not empty; give a folder that is new or empty")
    wanted = tuple(dict.fromkeys(name for one in defect_ids for name in bundle_of(one)))
    manifest = store.load(tree)
    stock = _planned(tree, (), manifest)
    planned = _planned(tree, tuple(dict.fromkeys((*manifest.active, *wanted))), manifest)
    changed = {path: data for path, data in planned.items() if data != stock.get(path, store.original(tree, path, manifest))}
    written = [files.write_whole(folder / "vllm" / path, data) for path, data in changed.items()]
    text = _unified({path: (store.original(tree, path, manifest), data) for path, data in changed.items()})
    return [*written, files.write_whole(folder / "fieldbook.patch", text + "\n" if text else "")]


def as_rows(rows: list[Status]) -> list[dict]:
    """Status rows as plain dictionaries, for receipts and JSON."""
    return [asdict(row) for row in rows]
