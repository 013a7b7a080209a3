"""Teacher-forced log-probabilities: how differently two servers read the same text, against how differently one reads it twice."""

import statistics
from typing import Any

from ..bench.target import Target
from ..errors import GateFailed
from .cases import sets


def read_texts(target: Target, languages: list[str]) -> dict[str, list[float]] | None:
    """Natural-log probabilities of each token after the first, for the text of each language; None where the server gives none."""
    found = {}
    for language in languages:
        body = {"model": target.model, "prompt": sets()["texts"][language], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        try:
            document = target.post("/v1/completions", body, 300)
            rows = document["choices"][0]["prompt_logprobs"]
            # The first entry of each row is the token that stands there.
            found[language] = [round(next(iter(row.values()))["logprob"], 6) for row in rows[1:]]
        except (GateFailed, KeyError, IndexError, TypeError, StopIteration):
            target.get("/health")
            return None
    return found


def distance(one: dict[str, list[float]] | None, other: dict[str, list[float]] | None) -> dict[str, Any] | None:
    """{"mean", "worst", "tokens"} of the absolute differences, token by token, over the languages both have; None where they cannot be compared."""
    if not one or not other:
        return None
    pairs = [(a, b) for language in one if language in other for a, b in zip(one[language], other[language], strict=False)]
    same_length = all(len(one[language]) == len(other[language]) for language in one if language in other)
    if not pairs or not same_length:
        return None
    differences = [abs(a - b) for a, b in pairs]
    return {"mean": statistics.fmean(differences), "worst": max(differences), "tokens": len(differences)}
