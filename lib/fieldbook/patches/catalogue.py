"""The catalogue: every defect with a mend, in the order in which edits of one file are made, and those that are only looked for."""

from collections.abc import Iterable

from ..errors import BadInput
from . import cpu_eager_pp, index_flip, index_guard, index_relay, kv_ghost, mtp_stage, observed, ple_containment, tp_partial
from .site import Defect

_MENDABLE = (cpu_eager_pp, ple_containment, mtp_stage, kv_ghost, tp_partial, index_guard, index_flip, index_relay)
CATALOGUE: dict[str, Defect] = {one.DEFECT.id: one.DEFECT for one in _MENDABLE}
OBSERVED: dict[str, Defect] = {one.id: one for one in observed.OBSERVED}
# States in which the defect does no harm.
MENDED = ("patched", "edited", "fixed", "does not apply")


def defect_of(defect_id: str) -> Defect:
    """The defect of an id. Raises BadInput, with the ids there are, for one that is not in the catalogue."""
    if defect_id not in CATALOGUE:
        raise BadInput(f"patch {defect_id!r} is not in the catalogue; it has {', '.join(CATALOGUE)}")
    return CATALOGUE[defect_id]


def bundles_of(defect_ids: Iterable[str]) -> tuple[str, ...]:
    """These patches with all that go with them, each once."""
    return tuple(dict.fromkeys(name for one in defect_ids for name in bundle_of(one)))


def bundle_of(defect_id: str) -> tuple[str, ...]:
    """A patch and those that go with it, in the catalogue's order: together or not at all."""
    defect = defect_of(defect_id)
    return tuple(one for one in CATALOGUE if one == defect_id or one in defect.bundle)
