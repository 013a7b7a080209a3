"""Whether the running workers run the mends: their own answers against what was written.

A patch is live on a rank when a function of its is reached there through the objects that serve, runs the code of its file, and that file is as
Fieldbook left it. A patch in a file that the active path never loads is not: the first field report lost days to one.
"""

from collections.abc import Iterable
from pathlib import Path

from ..live import Answer
from . import store
from .catalogue import CATALOGUE


def places(defect_ids: Iterable[str]) -> list[tuple[str, str]]:
    """(file, symbol) of everything that these patches edit."""
    return list(dict.fromkeys((one.file, one.symbol) for name in defect_ids for one in CATALOGUE[name].sites if one.edit))


def _of(answer: Answer, defect_id: str) -> list[dict]:
    own = set(places([defect_id]))
    return [place for place in answer.places if (place["file"], place["symbol"]) in own]


def _wrong(place: dict, patched: dict[str, str]) -> str:
    """Why a place that is active does not run the mend, '' where it does."""
    if place["sha256"] != patched.get(place["file"]):
        return "imported from a file that is not the patched one"
    return "" if place["same"] else "in memory is other code than in the file: it was imported before it was patched, or is replaced at run time"


def rows(tree: Path, defect_ids: Iterable[str], answers: list[Answer]) -> list[dict]:
    """For every patch and rank: what is live there, with the hash of the file that was imported, and what is wrong. '' in wrong where nothing is.

    Code that only the engine runs is looked for there; such a row has no rank of its own but stands for all.
    """
    patched, found = store.load(tree).patched, []
    engine = [one for one in answers if one.rank is None]
    for name in defect_ids:
        for answer in (one for one in answers if one.rank is not None):
            told = _of(answer, name)
            active = [place for place in told if place["state"] == "active"] or [
                place for one in engine for place in _of(one, name) if place["state"] == "active"
            ]
            wrong = next((text for place in active if (text := _wrong(place, patched))), "")
            if not active:
                unused = [place["file"] for place in told if place["state"] == "unused"]
                path = f"{unused[0]} is imported and no object there uses it" if unused else "none of its files is loaded"
                wrong = f"the active path never reaches it: {path}; the model runner is {', '.join(answer.runners) or 'not known'}"
            shown = active[0] if active else {"file": None, "symbol": None, "sha256": None, "path": None}
            found.append(
                {
                    "id": name,
                    "rank": answer.rank,
                    "pp_rank": answer.pp_rank,
                    "tp_rank": answer.tp_rank,
                    **{key: shown[key] for key in ("file", "symbol", "sha256", "path")},
                    "files": {place["file"]: place["sha256"] for place in active},
                    "runners": list(answer.runners),
                    "wrong": wrong,
                }
            )
    return found


def problems(found: list[dict]) -> list[str]:
    """What is wrong among rows, one text each."""
    return [f"{row['id']} on rank {row['rank']}: {row['wrong']}" for row in found if row["wrong"]]
