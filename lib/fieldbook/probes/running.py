"""A run of all probes on one server, its counts, and what they say against a baseline."""

import json
import secrets
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import files, paths, receipts
from ..bench.target import Target
from ..errors import BadInput, GateFailed
from ..schema import Probes
from . import cases as cases_of
from . import likelihood
from .answers import NO_TOOLS, Answer, ask_all
from .cases import PROBES
from .counting import bounds, more_p

# A median completion so much longer or shorter than the baseline's is the early sign of one that does not end.
LENGTH_RATIO = 1.5
# A run asks anew each time, and one in twenty must not fail by chance.
MAX_P = 0.01
# What a sound server of a weak model may fail throughout.
ABILITIES = ("needle", "tools")


def run(target: Target, probes: Probes, max_model_len: int, concurrency: int, arm: str, progress: Callable[[str], None]) -> tuple[list[Answer], dict[str, Any]]:
    """Ask everything: short ones alone and at the highest concurrency, samples at the highest, needles and tools alone.

    Returns the answers and {"logprobs", "logprobs_again"}: each token's of the fixed texts, read twice on this server.
    """
    salt = secrets.token_hex(3)
    first = likelihood.read_texts(target, probes.languages)
    answers = ask_all(target, cases_of.short(probes), probes, arm, 1, progress)
    if concurrency > 1:
        answers += ask_all(target, cases_of.short(probes), probes, arm, concurrency, progress)
    answers += ask_all(target, cases_of.degeneration(probes, salt), probes, arm, concurrency, progress)
    answers += ask_all(target, cases_of.needles(probes, target, max_model_len, salt), probes, arm, 1, progress)
    answers += ask_all(target, cases_of.tools(probes), probes, arm, 1, progress)
    return answers, {"logprobs": first, "logprobs_again": likelihood.read_texts(target, probes.languages)}


def ask_nothing(*_) -> tuple[list[Answer], dict[str, Any]]:
    """What `run` returns where no answer would mean anything: of a model whose weights are made up."""
    return [], {"logprobs": None, "logprobs_again": None}


def stratum(answer: Answer) -> str:
    """What an answer is counted under: its probe and language, a needle by the length of its prompt as well."""
    length = answer.case.rpartition("-at-")[0].rpartition("-")[2]
    return "/".join([answer.probe, answer.language or "own", *([length] if answer.probe == "needle" else [])])


def counts(answers: list[Answer]) -> dict[str, list[int]]:
    """{stratum: [failed, asked]}; a server without tools is not asked for them."""
    found: dict[str, list[int]] = {}
    for answer in answers:
        if answer.failed != NO_TOOLS:
            count = found.setdefault(stratum(answer), [0, 0])
            count[0] += bool(answer.failed)
            count[1] += 1
    return found


def by_probe(counted: dict[str, list[int]]) -> dict[str, tuple[int, int]]:
    """{probe: (failed, asked)} over its strata."""
    strata = {probe: [count for key, count in counted.items() if key.partition("/")[0] == probe] for probe in PROBES}
    return {probe: (sum(k for k, _ in found), sum(n for _, n in found)) for probe, found in strata.items() if found}


def median_tokens(answers: list[Answer]) -> float | None:
    """Median length of the sampled answers in tokens; None without any."""
    lengths = [answer.completion_tokens for answer in answers if answer.probe == "degeneration"]
    return statistics.median(lengths) if lengths else None


def summary(answers: list[Answer], read: dict[str, Any]) -> dict[str, Any]:
    """What receipts and baselines keep of a run: {"counts", "median_tokens", "logprobs", "distance_again"}."""
    again = likelihood.distance(read["logprobs"], read["logprobs_again"])
    return {"counts": counts(answers), "median_tokens": median_tokens(answers), "logprobs": read["logprobs"], "distance_again": again}


def against(ours: dict[str, Any], base: dict[str, Any] | None) -> list[dict[str, Any]]:
    """One row per probe: failed, asked, bounds, the baseline's count and the p-value of Fisher's one-sided test, and whether it is worse.

    Degenerate samples are worse when the test says so, or when there are any and no baseline excuses them; of the other probes Holm's adjustment
    counts all together, and without a baseline only a probe that nothing passes is one, unless the model may be too weak for it.
    """
    from ..verdict import holm

    rows, theirs = [], (base or {}).get("counts", {})
    for probe, (k, n) in by_probe(ours["counts"]).items():
        mine = [key for key in ours["counts"] if key.partition("/")[0] == probe and not key.endswith("/own")]
        # Languages and lengths that this run did not ask are not counted of the baseline either.
        same = by_probe({key: theirs[key] for key in mine}) if mine and all(key in theirs for key in mine) else {}
        base_k, base_n = same.get(probe, (None, None))
        p = more_p(k, n, base_k, base_n) if base_n else None
        low, high = bounds(k, n)
        rows.append({"probe": probe, "failed": k, "asked": n, "low": low, "high": high, "base_failed": base_k, "base_asked": base_n, "p_value": p})
    adjusted = holm({row["probe"]: row["p_value"] for row in rows if row["p_value"] is not None and row["probe"] != "degeneration"})
    for row in rows:
        if row["p_value"] is None:
            nothing = row["failed"] == row["asked"] and row["probe"] not in ABILITIES
            row["worse"] = row["failed"] > 0 if row["probe"] == "degeneration" else nothing
        else:
            row["worse"] = adjusted.get(row["probe"], row["p_value"]) < MAX_P
        row["p_value"] = adjusted.get(row["probe"], row["p_value"])
    return rows


def problems(answers: list[Answer], rows: list[dict[str, Any]]) -> list[str]:
    """Why a run's probes fail it, in words; empty where they do not."""
    broken = [answer for answer in answers if answer.problems]
    found = [f"{len(broken)} of {len(answers)} answers broken ({broken[0].case}: {broken[0].problems[0]})"] if broken else []
    for row in (row for row in rows if row["worse"]):
        base = f", baseline {row['base_failed']} of {row['base_asked']}, p = {row['p_value']:.2g}" if row["base_asked"] else ", no baseline"
        found.append(f"{cases_of.LABELS[row['probe']]}: {row['failed']} of {row['asked']}{base}")
    return found


def signs(ours: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    """What does not fail a run, but is told: other lengths of answers than the baseline's, other log-probabilities than a second reading explains."""
    if not base:
        return []
    found = []
    mine, theirs = ours["median_tokens"], base.get("median_tokens")
    if mine and theirs and not 1 / LENGTH_RATIO < mine / theirs < LENGTH_RATIO:
        found.append(f"sampled answers have a median of {mine:g} tokens, the baseline's {theirs:g}")
    apart, again = likelihood.distance(ours["logprobs"], base.get("logprobs")), ours["distance_again"]
    if apart and again and apart["mean"] > max(3 * again["mean"], 0.05):
        found.append(f"the fixed texts' log-probabilities differ by {apart['mean']:.3f} per token from the baseline's, by {again['mean']:.3f} from their own")
    return found


def baseline_file(model: str) -> Path:
    """Where a model's baseline is kept."""
    return paths.root() / "data" / "models" / model / "baseline.json"


# What two runs must have in common for their counts to be compared.
_SETTINGS = {
    "degeneration": ("trial_tokens", "temperature", "top_p"),
    "needle": ("answer_tokens", "needle_depths"),
    "tools": ("answer_tokens",),
    "identity": ("answer_tokens",),
    "short": ("answer_tokens",),
    "questions": ("answer_tokens",),
}


def read_baseline(model: str, probes: Probes) -> tuple[dict[str, Any] | None, str]:
    """(the model's baseline, as far as it was asked as these probes ask, and what of it was asked otherwise); (None, why) where there is none.

    Raises BadInput for a damaged file.
    """
    file = baseline_file(model)
    if not file.is_file():
        return None, f"data/models/{model}/baseline.json: there is none yet; `fieldbook bench FILE --keep-baseline` on a layout that you trust makes it"
    try:
        found = json.loads(file.read_text())
        kept, counted = found["settings"], {key: [int(k), int(n)] for key, (k, n) in found["counts"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"data/models/{model}/baseline.json: damaged ({type(error).__name__}); `fieldbook bench FILE --keep-baseline` makes it") from None
    asked = probes.model_dump()
    other = {probe: keys for probe, names in _SETTINGS.items() if (keys := [name for name in names if kept.get(name) != asked[name]])}
    counted = {key: count for key, count in counted.items() if key.partition("/")[0] not in other}
    words = [f"{probe} ({', '.join(f'probes.{name}' for name in names)})" for probe, names in other.items()]
    return {**found, "counts": counted}, f"asked otherwise of the baseline, and not compared: {'; '.join(words)}" if words else ""


def keep_baseline(model: str, probes: Probes, ours: dict[str, Any], about: dict[str, Any]) -> Path:
    """Write a model's baseline: counts, lengths and log-probabilities of a run, with its layout and versions."""
    if not baseline_file(model).parent.is_dir():
        raise BadInput(f"--keep-baseline: data/models/{model}: no such folder; a baseline is kept beside its model's config.json")
    if not ours["counts"]:
        raise GateFailed("--keep-baseline: nothing was asked")
    document = {"model": model, "made_at": receipts.now(), **about, "settings": probes.model_dump(), **ours}
    files.write_json(baseline_file(model), document)
    return baseline_file(model)
