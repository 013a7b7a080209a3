"""Which strategy suits a workload: the best of those that can run, and what is as good as it."""

from dataclasses import dataclass

from ..params import Params
from .table import Outcome
from .vetoes import OPEN

WORKLOADS = {
    "interactive": "one stream, tok/s",
    "throughput": "max_num_seqs streams in sum, tok/s",
    "long_context": "KV pool of one replica, tokens",
}
# Rates to expect leave out computing and rest on one factor for all links, so a tenth between two of them decides nothing: field report 001's single stream,
# 5% apart here, was 68 against 71.3. Pools are estimated from the same cards by the same rules, and their differences are surer.
TIE = {"interactive": 0.10, "throughput": 0.10, "long_context": 0.03}


@dataclass(frozen=True)
class Choice:
    """What a workload is best served by. value: what it is judged by (WORKLOADS); ties: within TIE of it, best first; None: nothing can run or be judged.

    unknown: layouts that can run and cannot be judged, since the rate of a link or the memory of a card is not known.
    """

    workload: str
    chosen: Outcome | None
    value: float | None
    ties: tuple[Outcome, ...]
    next_best: Outcome | None
    next_value: float | None
    unknown: tuple[Outcome, ...] = ()


def judged_by(outcome: Outcome, workload: str, params: Params) -> float | None:
    """The figure that decides for a workload; None where it is vetoed or the figure is not known."""
    if outcome.vetoes:
        return None
    if workload == "long_context":
        return None if outcome.best is None else float(outcome.best.pool_tokens)
    return outcome.decode_expected_tok_s.get(1 if workload == "interactive" else params.engine.max_num_seqs)


def choose(outcomes: list[Outcome], workload: str, params: Params) -> Choice:
    """The best outcome for a workload, and all within TIE of it. Of those one with an open need comes last, then the better figure decides."""
    unknown = tuple(o for o in outcomes if not o.vetoes and judged_by(o, workload, params) is None)
    known = [(value, outcome) for outcome in outcomes if (value := judged_by(outcome, workload, params)) is not None]
    if not known:
        return Choice(workload, None, None, (), None, None, unknown)
    best = max(value for value, _ in known)

    def order(pair: tuple[float, Outcome]) -> tuple:
        value, outcome = pair
        return any(need.name in OPEN for need in outcome.needs), -value, outcome.strategy

    level = sorted((pair for pair in known if pair[0] >= best * (1 - TIE[workload])), key=order)
    beaten = sorted((pair for pair in known if pair[0] < best * (1 - TIE[workload])), key=lambda pair: (-pair[0], pair[1].strategy))
    value, chosen = level[0]
    after = beaten[0] if beaten else (None, None)
    return Choice(workload, chosen, value, tuple(o for _, o in level[1:]), after[1], after[0], unknown)
