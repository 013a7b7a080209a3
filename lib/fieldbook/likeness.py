"""How far two arms agree that answered the same prompts greedily: token by token, and in each token's log-probability.

An arm here is what tools/equality/arm.py wrote: {"runs": [{"repetition", "prompt_tokens", "tokens", "logprobs"}]}.
"""

from dataclasses import dataclass
from typing import Any

from .errors import BadInput

Runs = list[dict[str, Any]]


@dataclass(frozen=True)
class Likeness:
    """Two arms that answered the same prompts: tokens that agree, tokens in all, and the largest difference of a token's log-probability."""

    same: int
    tokens: int
    logprob_difference: float

    def shown(self) -> str:
        """'144 of 144 tokens, log-probabilities identical'."""
        apart = "identical" if self.logprob_difference == 0 else f"at most {self.logprob_difference:.3g} apart"
        return f"{self.same} of {self.tokens} tokens, log-probabilities {apart}"


def likeness(ours: dict[str, Any], theirs: dict[str, Any]) -> Likeness:
    """How far two arms agree. Raises BadInput for arms that were asked different things."""
    return _alike(ours["runs"], theirs["runs"])


def _alike(ours: Runs, theirs: Runs) -> Likeness:
    pairs = list(zip(ours, theirs, strict=False))
    alike = all(a["prompt_tokens"] == b["prompt_tokens"] and len(a["tokens"]) == len(b["tokens"]) for a, b in pairs)
    if len(ours) != len(theirs) or not alike:
        raise BadInput("equality: the two arms were asked different prompts")
    same = sum(x == y for a, b in pairs for x, y in zip(a["tokens"], b["tokens"], strict=True))
    apart = max((abs(x - y) for a, b in pairs for x, y in zip(a["logprobs"], b["logprobs"], strict=True)), default=0.0)
    return Likeness(same, sum(len(a["tokens"]) for a, _ in pairs), round(apart, 5))


def nearest(ours: dict[str, Any], theirs: dict[str, Any]) -> Likeness:
    """How far each answer agrees with the nearest of the other arm's answers to that prompt, which may not repeat themselves. Raises BadInput where that
    arm was never asked a prompt."""
    found = []
    for run in ours["runs"]:
        each = [_alike([run], [one]) for one in theirs["runs"] if one["prompt_tokens"] == run["prompt_tokens"]]
        if not each:
            raise BadInput("equality: the two arms were asked different prompts")
        found.append(max(each, key=lambda one: (one.same, -one.logprob_difference)))
    return _sum(found)


def repeats(arm: dict[str, Any]) -> Likeness:
    """How far an arm's later repetitions agree with its first."""
    by_repetition: dict[int, Runs] = {}
    for run in arm["runs"]:
        by_repetition.setdefault(run["repetition"], []).append(run)
    first, *later = by_repetition.values()
    return _sum([_alike(one, first) for one in later])


def _sum(found: list[Likeness]) -> Likeness:
    return Likeness(sum(one.same for one in found), sum(one.tokens for one in found), max((one.logprob_difference for one in found), default=0.0))
