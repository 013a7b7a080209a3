"""A report's figures beside what comes out here: agreed, flagged, or not to be recomputed. Nothing is corrected in silence."""

from dataclasses import dataclass

from .. import memory
from ..inventory import Inventory
from ..params import Params
from .figures import Report, Reported
from .of_cmp170hx import OF_CMP170HX
from .of_glm53 import OF_GLM53
from .source import Recompute, Source

RECOMPUTE: dict[str, Recompute] = OF_CMP170HX | OF_GLM53


@dataclass(frozen=True)
class Checked:
    """A reported figure with its recomputation: value and from what it follows, None where nothing that is published lets it be recomputed."""

    reported: Reported
    value: int | float | str | None
    how: str

    @property
    def agrees(self) -> bool | None:
        """Whether both are the same to the figure's tolerance, without one to the decimals that are given; None without a recomputation."""
        one, ours = self.reported, self.value
        if ours is None:
            return None
        if isinstance(one.value, str) or isinstance(ours, str):
            return one.value == ours
        if one.tolerance:
            return abs(ours - one.value) <= one.tolerance * abs(one.value)
        if isinstance(one.value, int):
            return round(ours) == one.value
        # 7.4e-9 has two digits, 4.52 two decimals.
        return float(f"{ours:.1e}") == one.value if abs(one.value) < 1e-3 else round(ours, one.decimals) == one.value

    @property
    def shown(self) -> int | float | str | None:
        """The recomputed value as it is told: a whole number where the report gives one, else two digits more than the report."""
        if isinstance(self.value, float) and isinstance(self.reported.value, int) and self.reported.tolerance == 0:
            return round(self.value)
        if isinstance(self.value, float):
            return float(f"{self.value:.3g}") if abs(self.value) < 1e-3 else round(self.value, self.reported.decimals + 2)
        return self.value

    @property
    def flag(self) -> str:
        """What its own inputs give, where that is another figure; '' else."""
        return (
            "" if self.agrees is not False else f"recomputed {self.shown:,} {self.reported.unit}: {self.how}" if not isinstance(self.shown, str) else self.shown
        )


def source_of(report: Report, params: Params, box: Inventory) -> Source:
    """What the recomputations look at."""
    return Source(report, params, memory.model_spec(params.model.name), box)


def checked(source: Source, station: int | None = None) -> list[Checked]:
    """All figures of one notebook, or of all, each with its recomputation."""
    return [check(source, one) for one in (source.report.figures.values() if station is None else source.report.at(station))]


def check(source: Source, one: Reported) -> Checked:
    """One figure with its recomputation."""
    return Checked(one, *(RECOMPUTE[one.id](source) if one.id in RECOMPUTE else (None, "")))
