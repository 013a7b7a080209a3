"""Correctness first: which of two arms answers worse, whatever their speed (measuring protocol 1)."""

from dataclasses import asdict, dataclass
from typing import Any

from . import probes
from .params import Params
from .receipts import Receipt

DEGENERATION, BROKEN = "degeneration", "broken"
Counts = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Row:
    """One probe of both arms: failed and asked of each, and Fisher's one-sided p that the candidate (and that the baseline) fails more.

    worse: the arm that fails more by the rule of probes.against, '' for neither.
    """

    probe: str
    candidate: tuple[int, int]
    baseline: tuple[int, int]
    candidate_p: float | None
    baseline_p: float | None
    worse: str


@dataclass(frozen=True)
class Correctness:
    """What the probes say of two arms. loser: '', 'candidate' or 'baseline'; degenerate: whether it is degeneration that it loses by."""

    rows: tuple[Row, ...]
    loser: str
    degenerate: bool

    def document(self) -> dict[str, Any]:
        """As JSON: {"loser", "degenerate", "probes": [...]}, each probe with bounds and p-values."""
        return {"loser": self.loser, "degenerate": self.degenerate, "probes": [asdict(row) | _told(row) for row in self.rows]}


def _told(row: Row) -> dict[str, Any]:
    bounds = {f"{arm}_bounds": list(probes.bounds(*getattr(row, arm))) if getattr(row, arm)[1] else None for arm in ("candidate", "baseline")}
    return {"candidate": list(row.candidate), "baseline": list(row.baseline), **bounds}


def judge(counts: Counts, broken: dict[str, tuple[int, int]] | None = None) -> Correctness:
    """Which arm answers worse. counts: {arm: {stratum: [failed, asked]}}; broken: {arm: (answers that no server may give, answers)}.

    The arm that degenerates loses; else one whose answers are broken where the other's are not; else the candidate, where a probe fails it more often than
    the baseline; else the baseline by the same rule. One that was asked nothing loses nothing.
    """
    ours, theirs = ({"counts": counts[arm]} for arm in ("candidate", "baseline"))
    one_way = {row["probe"]: row for row in probes.against(ours, theirs)}
    other_way = {row["probe"]: row for row in probes.against(theirs, ours)}
    rows = []
    for probe, mine in one_way.items():
        if mine["base_asked"] is None:
            continue
        other = other_way[probe]
        worse = "candidate" if mine["worse"] else "baseline" if other["worse"] else ""
        rows.append(Row(probe, (mine["failed"], mine["asked"]), (mine["base_failed"], mine["base_asked"]), mine["p_value"], other["p_value"], worse))
    if broken and any(k for k, _ in broken.values()):
        (k, n), (base_k, base_n) = broken["candidate"], broken["baseline"]
        worse = "candidate" if k and not base_k else "baseline" if base_k and not k else ""
        p = (probes.more_p(k, n, base_k, base_n), probes.more_p(base_k, base_n, k, n)) if n and base_n else (None, None)
        rows.append(Row(BROKEN, (k, n), (base_k, base_n), *p, worse))
    by_probe = {row.probe: row.worse for row in rows}
    others = {row.worse for row in rows}
    loser = by_probe.get(DEGENERATION) or by_probe.get(BROKEN) or next((arm for arm in ("candidate", "baseline") if arm in others), "")
    return Correctness(tuple(rows), loser, bool(loser) and by_probe.get(DEGENERATION) == loser)


def broken(answers: list[probes.Answer]) -> dict[str, tuple[int, int]]:
    """{arm: (answers that no server may give, answers)}."""
    mine = {arm: [a for a in answers if a.arm.partition("-")[0] == arm] for arm in ("candidate", "baseline")}
    return {arm: (sum(bool(a.problems) for a in some), len(some)) for arm, some in mine.items()}


def together(one: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, list[int]]:
    """Counts of two askings of one arm, stratum by stratum."""
    return {key: [sum(pair) for pair in zip(one.get(key, [0, 0]), other.get(key, [0, 0]), strict=True)] for key in dict.fromkeys([*one, *other])}


def sentence(found: Correctness, names: dict[str, str]) -> str:
    """Why an arm loses, with counts, exact bounds and p; '' where none does."""
    if not found.loser:
        return ""
    other = "baseline" if found.loser == "candidate" else "candidate"
    reasons = []
    for row in (row for row in found.rows if row.worse == found.loser):
        p = getattr(row, f"{found.loser}_p")
        label = "broken answers" if row.probe == BROKEN else probes.LABELS[row.probe]
        told = f"{label} {probes.share_text(*getattr(row, found.loser))}, against {probes.share_text(*getattr(row, other))}"
        reasons.append(told + (f", p = {p:.2g} (Fisher, one-sided)" if p is not None else ""))
    what = f"{names[found.loser]} loses on correctness, whatever its speed" if found.loser == "candidate" else f"{names[other]} wins on correctness"
    return f"{what}: {names[found.loser]} {'degenerates' if found.degenerate else 'answers worse'}: {'; '.join(reasons)}"


def both(speed: str, found: Correctness, names: dict[str, str]) -> str:
    """The whole verdict in one line: correctness first where an arm loses by it, and the speed all the same."""
    why = sentence(found, names)
    return f"{why}. Speed: {speed}" if why else speed


def has_degenerated(receipt: Receipt | None, params: Params) -> bool:
    """Whether a station failed because its candidate degenerates: notebook 06 against the model's baseline, notebook 07 against the other arm."""
    if receipt is None or receipt.passed:
        return False
    if "degenerate" in receipt.data:
        return bool(receipt.data["degenerate"])
    counts = receipt.data.get("measured_probes")
    if not receipt.notebook.startswith("06") or not counts:
        return False
    base, _ = probes.read_baseline(params.model.name, params.probes)
    return any(row["probe"] == DEGENERATION and row["worse"] for row in probes.against({"counts": counts}, base))
