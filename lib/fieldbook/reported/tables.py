"""Rows for the notebooks: every figure of a report with its label, beside what comes out here."""

from typing import TYPE_CHECKING, Any

from .. import patches
from ..inventory import Inventory
from ..probes.counting import share_text
from . import story
from . import wrong_turns as turns
from .recompute import Checked, checked, source_of
from .source import Source

if TYPE_CHECKING:
    from ..station import Station

Rows = list[dict[str, Any]]


def of_station(station: "Station") -> Rows:
    """Keep all figures of the report that belong to this notebook in its receipt, flagged where they disagree, and give the rows that show them."""
    report = station.report
    found = checked(_source(station), int(station.notebook[:2]))
    for one in found:
        r = one.reported
        station.figure(r.id, r.value, r.unit, r.evidence, f"{report.name}, {r.id}" + (f"; {r.note}" if r.note else ""), r.label)
        if one.flag:
            station.figures[r.id] = station.figures[r.id].model_copy(update={"disagrees": one.flag})
        if one.value is not None and r.kind != "here":
            station.figure(f"{r.id}.recomputed", one.shown, r.unit, "computed", one.how, f"{r.label}: recomputed")
    return [row(one) for one in found] or [{"figure": "none", "of": "the report has none that belongs here"}]


def _source(station: "Station") -> Source:
    # Notebook 01 is still finding the inventory that the others read.
    box = Inventory.model_validate(station.data["inventory"]) if "inventory" in station.data else station.box()
    return source_of(station.report, station.params, box)


def fates(station: "Station") -> Rows:
    """What became of each of the report's defects in vLLM's releases."""
    return patches.fates(station.report.name.rpartition(" ")[2])


def wrong_turns(station: "Station") -> Rows:
    """The report's wrong turns, each put to its check once more; kept in the receipt."""
    station.data["wrong_turns"] = turns.rows(_source(station))
    return station.data["wrong_turns"]


def pool_story(station: "Station") -> str:
    """Why the report's pool is what it is, in Markdown."""
    return story.pool(_source(station))


def resident(station: "Station") -> str:
    """How many long requests are resident at once, in Markdown."""
    return story.resident(_source(station))


def choices(station: "Station") -> Rows:
    """The layouts that the report recommends by workload; empty where it recommends none."""
    return story.choices(_source(station))


def row(one: Checked) -> dict[str, Any]:
    """One figure as a row."""
    r = one.reported
    counted = "/" in str(r.value) and r.unit.endswith("/asked")
    how = share_text(*(int(part) for part in str(r.value).split("/"))) if counted else one.how
    return {
        "figure": r.what,
        "of": r.of,
        "reported": r.value,
        "unit": r.unit,
        "label": r.evidence,
        "recomputed": one.shown if r.kind != "here" else None,
        "": {True: "agrees", False: "DISAGREES", None: ""}[one.agrees if r.kind != "here" else None],
        "from, and what to know": "; ".join(filter(None, [how, r.note])) or None,
    }


def caption(station: "Station") -> str:
    """What the table is of, and how many of its figures disagree."""
    flagged = [key for key, figure in station.figures.items() if figure.disagrees]
    told = f"{station.report.name}: {station.report.title}"
    return f"{told}. DISAGREES: {', '.join(flagged)}" if flagged else told
