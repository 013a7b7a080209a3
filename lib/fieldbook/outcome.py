"""What came out of comparing two arms: every metric, correctness first, one line and one document. Notebook 07, `trial` and `compare` end with it."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from . import correctness, repeating, verdict
from .bench import Sample
from .correctness import Correctness
from .errors import Degenerate, GateFailed, NoSamples
from .params import metric_label
from .verdict import Comparison

Rounds = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Outcome:
    """names: {arm: name}. compared: every metric with sound samples of both arms; missing: the others, with why. adjusted: Holm's p of the secondary ones.

    expectation is '' where none was written. interleaved: whether the arms were measured in turn, A B B A. told: what a published report says of the
    speeds, in place of a comparison of samples.
    """

    names: dict[str, str]
    primary_metric: str
    expectation: str
    compared: tuple[Comparison, ...]
    missing: dict[str, str]
    adjusted: dict[str, float]
    correctness: Correctness
    interleaved: bool = True
    told: str = ""

    @property
    def primary(self) -> Comparison | None:
        """The metric that decides; None where it has no sound samples."""
        return next((c for c in self.compared if c.metric == self.primary_metric), None)

    @property
    def line(self) -> str:
        """The verdict in one line, correctness first."""
        found = self.primary
        untold = self.told or f"nothing told: {self.missing.get(self.primary_metric)}"
        speed = verdict.sentence(found, self.expectation, self.names) if found else untold
        apart = "" if self.interleaved else "; the arms were not measured in turn, so what changed between the runs counts as theirs"
        return correctness.both(speed, self.correctness, self.names) + apart

    @property
    def failure(self) -> type[GateFailed] | None:
        """The error that a run of this candidate ends with; None where it may be served. A baseline that answers worse fails nothing."""
        if self.correctness.loser != "candidate":
            return None
        return Degenerate if self.correctness.degenerate else GateFailed

    def document(self) -> dict[str, Any]:
        """As JSON. repetitions_that_would_decide: None where it is decided, or no number would (why_cannot_tell says which)."""
        found = self.primary
        more = found.more if found else None
        return {
            "verdict": self.line,
            "candidate": self.names["candidate"],
            "baseline": self.names["baseline"],
            "metric": self.primary_metric,
            "expectation": self.expectation or None,
            "answer": found.answer if found else None,
            "ratio": found.ratio if found else None,
            "p_value": found.p_value if found else None,
            "noise_floor": found.spread if found else None,
            "aa_band": found.aa_band if found else None,
            "repetitions_that_would_decide": more.repetitions if more else None,
            "why_cannot_tell": more.words if more else None,
            "correctness": self.correctness.document(),
            "not_interleaved": not self.interleaved,
            "metrics": [asdict(c) | {"p_holm": self.adjusted.get(c.metric), "label": metric_label(c.metric)} for c in self.compared],
            "missing": self.missing,
        }


def compared(
    rounds: dict[str, Rounds], primary: str, max_p: float, repeated: dict[str, list[list[list[float]]]]
) -> tuple[tuple[Comparison, ...], dict[str, str], dict[str, float]]:
    """(comparisons, {metric: why it is missing}, Holm's p of the secondary metrics). rounds: {metric: {arm: one list of sound values per round}}.

    A secondary metric is called faster or slower only where it still is one after Holm's adjustment over all of them.
    """
    found, missing = [], {}
    for metric, arms in rounds.items():
        try:
            found.append(verdict.compare(metric, arms["candidate"], arms["baseline"], max_p, repeated.get(metric)))
        except NoSamples as error:
            missing[metric] = str(error)
    secondary = [c for c in found if c.metric != primary]
    adjusted = verdict.holm({c.metric: c.p_value for c in secondary})
    judged = [_after_holm(c, adjusted.get(c.metric, c.p_value), len(secondary), max_p, rounds[c.metric]) for c in found]
    return tuple(judged), missing, adjusted


def _after_holm(one: Comparison, adjusted_p: float, tests: int, max_p: float, rounds: Rounds) -> Comparison:
    if one.answer not in ("faster", "slower") or adjusted_p < max_p:
        return one
    # At worst the whole adjustment falls on this one.
    needed = repeating.to_differ(*verdict.both(rounds["candidate"], rounds["baseline"]), max_p / tests)
    words = f"p = {adjusted_p:.3f} once {tests} secondary metrics are counted together; {needed} repetitions per round and arm would decide"
    return replace(one, answer="cannot tell", more=repeating.More(needed, words))


def medians(samples: list[Sample], metrics: list[str]) -> dict[str, dict[str, float | None]]:
    """{arm: {metric: median of all its sound samples}}, for tables."""
    import statistics

    from .bench import values

    found = {arm: {metric: values(samples, arm, metric) for metric in metrics} for arm in ("candidate", "baseline")}
    return {arm: {metric: statistics.median(sound) if sound else None for metric, sound in one.items()} for arm, one in found.items()}
