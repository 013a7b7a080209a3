"""Samples, each by itself: whether its value follows from its raw times and its void reasons from its own fields; and whether all that were due are there."""

import collections
import itertools

from .. import bench
from ..bench import Sample
from ..bench.checks import Asked, void_reasons
from ..bench.counters import Counters
from ..bench.measuring import MORE_TRIES, value_tok_s
from .compare import Row, same
from .run import Run

# Start times are kept from the first stream on, so sums of them end in other bits than they did while measuring.
VALUE_REL = 1e-6
_FILE = "samples.jsonl"


def name_of(sample: Sample) -> str:
    """A sample in words."""
    return f"{sample.arm}, boot {sample.boot}, round {sample.round}, {sample.metric}, repetition {sample.repetition}"


def value_of(sample: Sample, asked: Asked) -> float:
    """Tokens per second out of the raw times."""
    return value_tok_s(asked, sample.start_s, sample.ttft_s, sample.itl_s, sample.output_tokens)


def cannot_be_applied_again(reason: str) -> bool:
    """Whether a void reason rests on what samples do not keep: the client's errors, and the server's own counts of tokens and requests."""
    return reason.startswith(("error:", "tokens: the server counted")) or (reason.startswith("tokens:") and "requests ended by length" in reason)


def reasons_again(sample: Sample, asked: Asked) -> list[str]:
    """Void reasons out of the sample's own fields; what it does not keep is taken to have been sound."""
    streams = asked.streams
    result = {
        "errors": [],
        "output_lens": sample.output_tokens,
        "input_lens": sample.prompt_tokens,
        "ttfts": sample.ttft_s,
        "itls": sample.itl_s,
        "client_cpu_s": sample.client_cores,
        "client_wall_s": 1.0,
    }
    counted = Counters(
        prompt_tokens=asked.prompt_tokens * streams,
        generation_tokens=asked.output_tokens * streams,
        cache_queries=1.0,
        cache_hits=sample.cached_share,
        preemptions=sample.preemptions,
        finished_length=streams,
        finished_otherwise=0,
        queue_s=sample.queue_s,
        ttft_s=sample.server_ttft_s,
        e2e_s=sample.server_e2e_s,
        drafts=0,
        accepted_tokens=0,
    )
    found = void_reasons(asked, result, counted, sample.text_tokens, sample.conditions, sample.value_tok_s, sample.ceiling_tok_s)
    # Where something was wrong before, the lag was not looked at.
    untold = any(cannot_be_applied_again(reason) for reason in sample.void)
    return [reason for reason in found if not (untold and reason.startswith("lag:"))]


def _comparable(reasons: list[str]) -> list[str]:
    """Reasons as far as they can be compared: of the prefix cache only the share is kept, not what it is a share of."""
    return sorted("prefix cache" if reason.startswith("prefix cache:") else reason for reason in reasons)


def differences(run: Run) -> list[Row]:
    """One row for each sample whose value or void reasons do not follow from its own fields."""
    points, rows = {point.metric: point for point in bench.points(run.asked.benchmarks)}, []
    for sample in run.samples:
        asked = points.get(sample.metric)
        if asked is None:
            rows.append(Row(_FILE, name_of(sample), "differs", sample.metric, None, "the params measure no such point"))
            continue
        try:
            value, again = value_of(sample, asked), reasons_again(sample, asked)
        except (LookupError, ValueError, TypeError, ArithmeticError) as error:
            if not sample.void:
                rows.append(Row(_FILE, name_of(sample), "differs", "sound", None, f"its raw times are no sample's ({type(error).__name__})"))
            continue
        if not same(sample.value_tok_s, value, rel=VALUE_REL):
            rows.append(Row(_FILE, f"{name_of(sample)}: value_tok_s", "differs", sample.value_tok_s, value, "its raw times"))
        kept = [reason for reason in sample.void if not cannot_be_applied_again(reason)]
        if _comparable(kept) != _comparable(again):
            told, found = "; ".join(sample.void) or "sound", "; ".join(again) or "sound"
            rows.append(Row(_FILE, f"{name_of(sample)}: void", "differs", told, found, "bench.checks applied to its own fields"))
    return rows


def missing(run: Run) -> tuple[list[str], list[str]]:
    """(samples that were due and are not there, or are there twice; points that were not tried again as this release would).

    Due is every point of every round that the receipts rest on, its repetitions without a gap.
    """
    run.metrics  # noqa: B018 (raises for params that nobody ran)
    asked, counted = run.asked.benchmarks, collections.Counter(name_of(sample) for sample in run.samples)
    found, notes = [f"{_FILE}: {name}: there {count} times" for name, count in counted.items() if count > 1], []
    boots = [("candidate", 1, number) for number in range(1, asked.rounds + 1)] if 6 in run.receipts else []
    boots += [("baseline", 1, 1), ("baseline", 2, 1), ("candidate", 2, 1)] if 7 in run.receipts and "measured_answer" in run.receipts[7].data else []
    for (arm, boot, number), point in itertools.product(boots, bench.points(asked)):
        mine = [s for s in run.samples if (s.arm, s.boot, s.round, s.metric) == (arm, boot, number, point.metric)]
        where, numbers = f"{_FILE}: {arm}, boot {boot}, round {number}, {point.metric}", {s.repetition for s in mine}
        # No schedule tries a point more often than this: a larger number is no repetition.
        last = min(max([asked.repetitions, *numbers]), asked.repetitions + MORE_TRIES)
        gaps, sound = [n for n in range(1, last + 1) if n not in numbers], sum(not s.void for s in mine)
        if gaps or max(numbers, default=0) > last:
            found.append(f"{where}: repetition {', '.join(map(str, gaps or [max(numbers)]))} {'is missing' if gaps else 'is more than are tried'}")
        elif sound < asked.repetitions and len(mine) < asked.repetitions + MORE_TRIES:
            # Recorded reports may be older than this rule.
            (notes if run.asked.box.kind == "recorded" else found).append(f"{where}: {sound} of {len(mine)} sound, and not tried again")
    return found, notes
