"""Mending and going back: edits on the stock bytes, in the catalogue's order, written whole or not at all."""

import difflib
from pathlib import Path

from .. import files, memory
from ..errors import BadInput, GateFailed
from ..params import Params
from . import site, store
from .catalogue import CATALOGUE, MENDED, bundle_of, bundles_of, defect_of
from .states import read, state_of


class NotRecognised(GateFailed):
    """The code is not in a form that was read, so nothing is written. Exit status 2: another release than the catalogue knows."""

    exit_status = 2


def _not_recognised(defect_id: str, at: site.Site) -> NotRecognised:
    return NotRecognised(f"{defect_id}: {at.symbol} in {at.file} is not recognised; nothing was changed")


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
        now = read(tree, path)
        if now is None or store.sha256(now) in (manifest.patched[path], manifest.originals[path]):
            continue
        sites = [(name, one) for name in manifest.active for one in CATALOGUE[name].sites if one.file == path and one.edit]
        if all(site.state(one, site.parse(now)) == "present" for _, one in sites):
            del manifest.patched[path], manifest.originals[path]
            manifest.active = [name for name in manifest.active if name not in {own for own, _ in sites}]
    return manifest


def _untouched(tree: Path, manifest: store.Manifest, defect_id: str) -> None:
    """Raise GateFailed where someone else changed a patched file since: their work would be undone."""
    for path, expected in manifest.patched.items():
        now = read(tree, path)
        if now is None or store.sha256(now) != expected:
            raise GateFailed(f"{defect_id}: {path} is not as Fieldbook left it; reinstall vLLM to get the stock file")


def _allowed(defect_id: str, active: list[str], params: Params | None) -> None:
    """Raise GateFailed where a patch must not be applied: beside one that treats the same another way, or for a box that it would harm."""
    defect = defect_of(defect_id)
    other = next((name for name in defect.excludes if name in active), None)
    if other:
        raise GateFailed(f"{defect_id}: {other} is applied, which treats the same thing another way; revert it first")
    if defect.refused is None:
        return
    if params is None:
        raise GateFailed(f"{defect_id}: whether it may be applied depends on the box and the checkpoint; give --params FILE")
    if why := defect.refused(params, memory.model_spec(params.model.name)):
        raise GateFailed(f"{defect_id}: {why}")


def apply(tree: Path, defect_id: str, params: Params | None = None) -> str:
    """Mend one defect and those of its bundle in place; a tree that is mended already is left alone. Returns the state after.

    params: the box that it is for, which the manifest names by its hash. Raises GateFailed when the code is not recognised, the tree cannot be written, or
    the patch must not be applied.
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
        _allowed(defect_id, manifest.active, params)
        _untouched(tree, manifest, defect_id)
        active = tuple(one for one in CATALOGUE if one in manifest.active or (one in wanted and before[one] == "present"))
        _change(tree, active, manifest, params.hash if params is not None else "")
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


def diff(tree: Path, *defect_ids: str) -> str:
    """Unified diff of these mends and their bundles: of what was applied, or of what would be. Empty where there is nothing to mend."""
    wanted = bundles_of(defect_ids)
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


def overlay(tree: Path, defect_ids: list[str], folder: Path, params: Params | None = None) -> list[Path]:
    """Write the patched files below `folder`/vllm and their diff as fieldbook.patch, for a container; the tree stays as it is.

    Raises GateFailed as `apply` does; BadInput for a folder that has other files in it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"patches --overlay: {folder} is not empty; give a folder that is new or empty")
    wanted = bundles_of(defect_ids)
    manifest = store.load(tree)
    for one in wanted:
        _allowed(one, [*manifest.active, *wanted], params)
    stock = _planned(tree, (), manifest)
    planned = _planned(tree, tuple(dict.fromkeys((*manifest.active, *wanted))), manifest)
    changed = {path: data for path, data in planned.items() if data != stock.get(path, store.original(tree, path, manifest))}
    written = [files.write_whole(folder / "vllm" / path, data) for path, data in changed.items()]
    text = _unified({path: (store.original(tree, path, manifest), data) for path, data in changed.items()})
    return [*written, files.write_whole(folder / "fieldbook.patch", text + "\n" if text else "")]
