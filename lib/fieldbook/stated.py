"""A stated figure beside what its own inputs give: shown both, and flagged where they disagree, never corrected in silence."""

from dataclasses import dataclass

from .probes.counting import more_p


@dataclass(frozen=True)
class Stated:
    """What was stated of a quantity, and what is recomputed from the figures it was derived from."""

    what: str
    stated: float
    recomputed: float
    tolerance: float = 0.05

    @property
    def agrees(self) -> bool:
        """Whether the stated figure is the recomputed one, to within a relative tolerance."""
        return abs(self.stated - self.recomputed) <= self.tolerance * abs(self.recomputed)

    @property
    def text(self) -> str:
        """Both figures in one line, and a flag where they disagree."""
        both = f"{self.what}: stated {self.stated:.3g}, recomputed {self.recomputed:.3g}"
        return both if self.agrees else f"{both} - DISAGREES"


def ratio(what: str, stated: float, ours: float, theirs: float, tolerance: float = 0.05) -> Stated:
    """A stated ratio of two measured figures. Raises ZeroDivisionError for a baseline of nothing."""
    return Stated(what, stated, ours / theirs, tolerance)


def fisher(what: str, stated: float, ours: tuple[int, int], theirs: tuple[int, int], tolerance: float = 0.05) -> Stated:
    """A stated one-sided p-value of Fisher's exact test on two counts, each (k, n)."""
    return Stated(what, stated, more_p(*ours, *theirs), tolerance)
