"""A published field report as data: its figures (data/reports/<report>/figures.csv) and what stands for its arms' logs (report.yml)."""

import csv
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .. import paths
from ..errors import BadInput
from ..receipts import Evidence

# How the report came by a figure, and the label that it carries here. rule: by a rule of the report's own; here: not in the report, but belongs to it.
KINDS: dict[str, Evidence] = {
    "stated": "stated",
    "measured": "recorded",
    "computed": "recorded",
    "derived": "recorded",
    "rule": "recorded",
    "here": "computed",
}
COLUMNS = ["id", "station", "what", "of", "value", "unit", "kind", "tolerance", "note"]


@dataclass(frozen=True)
class Reported:
    """One figure of a report. value: a number where it is one, else the text; decimals: how many the report gives; tolerance: as a share, 0 for exact.

    station: the notebook that it belongs to; of: the layout or the part of the box that it is of.
    """

    id: str
    station: int
    what: str
    of: str
    value: int | float | str
    unit: str
    kind: str
    tolerance: float
    note: str
    decimals: int

    @property
    def evidence(self) -> Evidence:
        """Its label."""
        return KINDS[self.kind]

    @property
    def label(self) -> str:
        """What it is, of what."""
        return f"{self.what}, {self.of}"


@dataclass(frozen=True)
class Report:
    """A report: its name, what it is about, how it measured, what it does not state, its figures by id, its two arms, and the layouts it recommends.

    about_pool: what a reader of its predicted pool has to know.
    """

    name: str
    title: str
    measured: str
    not_stated: tuple[str, ...]
    figures: dict[str, Reported]
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    choices: tuple[dict[str, Any], ...] = ()
    about_pool: str = ""

    @property
    def published(self) -> bool:
        """Whether somebody published figures; else only the box's outputs were captured, and everything that is known of it is computed."""
        return bool(self.figures)

    def number(self, figure_id: str) -> float:
        """A figure that is a number. Raises KeyError for an unknown id, TypeError for a text."""
        value = self.figures[figure_id].value
        if isinstance(value, str):
            raise TypeError(f"{figure_id} is a text: {value}")
        return value

    def counted(self, figure_id: str) -> tuple[int, int]:
        """A figure such as 21/100 as (21, 100)."""
        k, n = str(self.figures[figure_id].value).split("/")
        return int(k), int(n)

    def at(self, station: int) -> list[Reported]:
        """The figures of one notebook, in the order of the file."""
        return [one for one in self.figures.values() if one.station == station]


def is_report(box_name: str) -> bool:
    """Whether a recorded box is a published report: figures, and nothing of the run itself."""
    return (paths.recorded_dir(box_name) / paths.REPORTED_FIGURES).is_file()


@functools.lru_cache
def read(box_name: str) -> Report | None:
    """The report of a box, an empty one for a box of which only outputs were captured, None for a recorded run and for a box that is not here.

    Raises BadInput for a damaged file, naming line and column.
    """
    folder = paths.recorded_dir(box_name)
    if not folder.is_dir() and paths.box_data_dir(box_name).is_dir():
        return Report("the capture", "captured outputs of this box", "nothing was measured", (), {})
    if not is_report(box_name):
        return None
    figures = _figures(folder / paths.REPORTED_FIGURES)
    about = folder / "report.yml"
    where = paths.shown(about)
    if not about.is_file():
        raise BadInput(f"{where}: missing; it says which report the figures beside it are from")
    try:
        document = yaml.safe_load(about.read_text(encoding="utf-8"))
        found = Report(
            document["report"],
            document["title"],
            document["measured"],
            tuple(document["not_stated"]),
            figures,
            document.get("arms", {}),
            tuple(document.get("choices", [])), document.get("about_pool", ""),
        )
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise BadInput(
            f"{where}: not the description of a report ({type(error).__name__}: {error}); expected report, title, measured, not_stated, arms"
        ) from None
    for arm, told in found.arms.items():
        named = [
            told.get("pool_tokens"),
            *told.get("available_kv_gib", []),
            told.get("degenerate"),
            *(i for ids in told.get("metrics", {}).values() for i in ids),
        ]
        unknown = [one for one in named if one and one not in figures]
        if unknown:
            raise BadInput(f"{where}: arms.{arm} names {unknown[0]!r}, which is no id of figures.csv")
    return found


def _figures(file: Path) -> dict[str, Reported]:
    found: dict[str, Reported] = {}
    with file.open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream)
        if rows.fieldnames != COLUMNS:
            raise BadInput(f"{paths.shown(file)}: its first line is {rows.fieldnames}, expected {','.join(COLUMNS)}")
        for row in rows:
            one = _figure(row, f"{paths.shown(file)}: line {rows.line_num}")
            if one.id in found:
                raise BadInput(f"{paths.shown(file)}: line {rows.line_num}: {one.id} stands there twice")
            found[one.id] = one
    return found


def _figure(row: dict[str, str], where: str) -> Reported:
    if None in row or None in row.values():
        raise BadInput(f"{where}: {len(COLUMNS)} columns are expected; a value with a comma stands in quotes")
    if row["kind"] not in KINDS:
        raise BadInput(f"{where}: kind is {row['kind']!r}, expected one of {', '.join(KINDS)}")
    try:
        station, tolerance = int(row["station"]), float(row["tolerance"])
    except ValueError:
        raise BadInput(f"{where}: station is a notebook's number and tolerance a share, got {row['station']!r} and {row['tolerance']!r}") from None
    text = row["value"]
    value: int | float | str = text
    if re.fullmatch(r"-?\d+", text):
        value = int(text)
    elif re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", text):
        value = float(text)
    decimals = len(text.partition(".")[2]) if isinstance(value, float) and "e" not in text else 0
    return Reported(row["id"], station, row["what"], row["of"], value, row["unit"], row["kind"], tolerance, row["note"], decimals)
