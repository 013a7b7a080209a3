"""Rows of the benchmark stations: speeds, latencies, what was void, whether the measurement worked, what the probes said. `bench_charts` draws them."""

import statistics
from typing import Any

from . import probes
from .bench import Sample
from .bench.checks import CHECKS
from .bench.rates import percentile, stream_tok_s
from .params import metric_label
from .probes import NO_TOOLS, Answer

Rows = list[dict[str, Any]]
SHOWN_CHARS = 90


def speeds(summary: Rows, ceilings_tok_s: dict[str, float], reachable_tok_s: dict[str, float] | None = None) -> Rows:
    """Minimum, median and maximum of each point with its ceiling, and its share of what the measured rates of memory and arithmetic would give."""
    rows = []
    for row in summary:
        ceiling = ceilings_tok_s.get(row["metric"])
        told = {key: row[key] for key in ("metric", "samples", "void", "min", "median", "max")}
        told |= {"ceiling": ceiling, "of ceiling": _share(row["median"], ceiling)}
        told |= {"of measured rates": _share(row["median"], reachable_tok_s.get(row["metric"]))} if reachable_tok_s else {}
        rows.append(told)
    return rows


def _share(rate: float | None, most: float | None) -> str | None:
    return f"{rate / most:.0%}" if rate and most else None


def latencies(samples: list[Sample], metrics: list[str]) -> Rows:
    """What one stream sees at each point, over all sound samples: first token, gaps between tokens, rate of a stream, time in the server's queue."""
    rows = []
    for metric in metrics:
        sound = [s for s in samples if s.metric == metric and not s.void]
        if not sound:
            continue
        first = [t for s in sound for t in s.ttft_s]
        gaps = [gap for s in sound for stream in s.itl_s for gap in stream]
        streams = [rate for s in sound for rate in stream_tok_s(s.itl_s, s.output_tokens)]
        accepted = [s.acceptance_length for s in sound if s.acceptance_length is not None]
        rows.append(
            {
                "metric": metric,
                "TTFT, s": statistics.median(first),
                "p95, s": percentile(first, 0.95),
                "ITL, ms": 1000 * statistics.median(gaps) if gaps else None,
                "p95, ms": 1000 * percentile(gaps, 0.95) if gaps else None,
                "p99, ms": 1000 * percentile(gaps, 0.99) if gaps else None,
                "stream, tok/s": statistics.median(streams) if streams else None,
                "queue, ms": 1000 * sum(s.queue_s for s in sound) / sum(len(s.ttft_s) for s in sound),
                **({"acceptance length": statistics.fmean(accepted)} if accepted else {}),
            }
        )
    return rows


def all_values(samples: list[Sample], metrics: list[str]) -> Rows:
    """Every value of every round, void ones marked, for those who want to redo the statistics by hand."""
    rows = []
    for metric in metrics:
        for boot, number in sorted({(s.boot, s.round) for s in samples}):
            mine = [s for s in samples if (s.metric, s.boot, s.round) == (metric, boot, number)]
            if mine:
                told = ", ".join(f"{s.value_tok_s:.1f}{' (void)' if s.void else ''}" for s in mine)
                rows.append({"metric": metric, "boot": boot, "round": number, "values, tok/s": told})
    return rows


def sample_dots(samples: list[Sample], names: dict[str, str] | None = None) -> Rows:
    """Every sound sample for the chart; with names the arms are told apart, without them each is just a sample."""
    return [{"metric": s.metric, "tok/s": round(s.value_tok_s, 2), "arm": (names or {}).get(s.arm, s.arm)} for s in samples if not s.void]


def void(samples: list[Sample]) -> Rows:
    """Void samples with the reasons."""
    return [
        {"metric": s.metric, "round": s.round, "repetition": s.repetition, "tok/s": s.value_tok_s, "why": "; ".join(s.void)} for s in samples if s.void
    ]  # fmt: skip


def integrity(samples: list[Sample]) -> Rows:
    """Did the measurement work? One row per check, with what was seen over all samples and whether it was sound in each."""
    if not samples:
        return [{"check": "samples", "seen": "none", "sound": "no"}]

    lag = [(sum(s.ttft_s) - s.server_ttft_s) / len(s.ttft_s) for s in samples if s.ttft_s and not s.void]
    gpus = [gpu for s in samples for gpu in s.conditions.get("gpus", [])]
    loads = [load for s in samples for load in s.conditions.get("load_average", [])]
    ceilings = [s.value_tok_s / s.ceiling_tok_s for s in samples if s.ceiling_tok_s]
    temperatures = [degrees for gpu in gpus for degrees in gpu["temperature_c"] or []]
    clocks = [clock for gpu in gpus for clock in (gpu["sm_clock_mhz_start"], gpu["sm_clock_mhz_end"]) if clock]
    seen = {
        "error": f"{len(samples)} samples",
        "tokens": f"{sum(sum(s.output_tokens) for s in samples):,} generated",
        "prefix cache": f"at most {max(s.cached_share for s in samples):.1%} of the queried tokens",
        "preemptions": f"{sum(s.preemptions for s in samples)}",
        "queue": f"at most {1000 * max(s.queue_s / max(len(s.ttft_s), 1) for s in samples):.1f} ms a request",
        "lag": f"first tokens at most {1000 * max(lag, default=0):.0f} ms later in a sound sample",
        "load client": f"at most {max(s.client_cores for s in samples):.1%} of a core",
        "clocks": f"{_span(clocks)} MHz, {_span(temperatures)} C" if clocks and temperatures else "not told by this box",
        "overlap": f"up to {max(len(s.ttft_s) for s in samples)} streams",
        "ceiling": f"at most {max(ceilings):.0%} of it" if ceilings else "none is known of this box",
    }
    rows = []
    for name, check in CHECKS.items():
        bad = sum(any(reason.startswith(f"{name}:") for reason in s.void) for s in samples)
        rows.append({"check": check, "seen": seen[name], "sound": f"no, in {bad} of {len(samples)}" if bad else "yes"})
    starts, boots = {s.server_started_at_s for s in samples if s.server_started_at_s}, {(s.arm, s.boot) for s in samples}
    told = f"{len(starts)} of {len(boots)} boot{'' if len(boots) == 1 else 's'}" if starts else "not told"
    rows.append({"check": "one start of the server for each boot", "seen": told, "sound": "yes" if len(starts) <= len(boots) else "no: interrupted between"})
    rows.append({"check": "load average, told only", "seen": f"{min(loads):.1f} to {max(loads):.1f}" if loads else "another machine's", "sound": None})
    return rows


def _span(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def not_quoted_for(samples: list[Sample], rounds: int, answers: list[Answer]) -> str:
    """What a run must not be quoted for, in one sentence."""
    lengths = sorted({n for s in samples for n in s.prompt_tokens})
    streams = max((len(s.ttft_s) for s in samples), default=0)
    trials = sum(a.probe == "degeneration" for a in answers)
    parts = [f"prompts longer than {max(lengths):,} tokens or more than {streams} streams at once"] if lengths else []
    parts += ["prompts that share a beginning (the prefix cache was kept out)"]
    parts += ["acceptance lengths of real texts (the prompts are random words)"] if any(s.acceptance_length for s in samples) else []
    parts += ["differences between boots (one was measured)"] if len({(s.arm, s.boot) for s in samples}) == 1 else []
    parts += ["spread between rounds (one was measured)"] if rounds < 2 else []
    if trials:
        parts += [f"degeneration rarer than {probes.bounds(0, trials)[1]:.0%} ({trials} samples)"]
    return "Not to be quoted for: " + "; ".join(parts) + "."


def probe_counts(rows: Rows, answers: list[Answer]) -> Rows:
    """Each probe: failed of asked with bounds, the baseline's count, the test; and what could not be asked."""
    found = [
        {
            "probe": probes.LABELS[row["probe"]],
            "failed": probes.share_text(row["failed"], row["asked"]),
            "baseline": f"{row['base_failed']} of {row['base_asked']}" if row["base_asked"] else None,
            "p": row["p_value"],
            "worse": row["worse"],
        }
        for row in rows
    ]
    refused = [a for a in answers if a.failed == NO_TOOLS]
    return found + ([{"probe": "tool calls", "failed": f"not asked: {NO_TOOLS}", "baseline": None, "p": None, "worse": None}] if refused else [])


def failed_answers(answers: list[Answer], most: int = 12) -> Rows:
    """Answers that fail their probe, the beginning of each; what is left out is counted."""
    failed = [a for a in answers if a.failed and a.failed != NO_TOOLS]
    rows = [{"case": a.case, "at": a.concurrency, "why": a.failed, "answer": shown(a.text)} for a in failed[:most]]
    return rows + ([{"case": f"and {len(failed) - most} more", "at": None, "why": "in answers.jsonl", "answer": None}] if len(failed) > most else [])


def shown(text: str) -> str:
    """The beginning of an answer on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_CHARS else flat[:SHOWN_CHARS] + "…"


def forest(rows: Rows, name: str) -> Rows:
    """Rows for the forest plot: share failed with its bounds, of this run and of the baseline."""
    found = []
    for row in rows:
        found.append({"probe": probes.LABELS[row["probe"]], "who": name, "share": row["failed"] / row["asked"], "low": row["low"], "high": row["high"]})
        if row["base_asked"]:
            low, high = probes.bounds(row["base_failed"], row["base_asked"])
            share = row["base_failed"] / row["base_asked"]
            found.append({"probe": probes.LABELS[row["probe"]], "who": "baseline", "share": share, "low": low, "high": high})
    return found


def by_concurrency(samples: list[Sample]) -> Rows:
    """Decode samples for the chart over the number of streams."""
    return [
        {"streams": len(s.ttft_s), "tok/s": round(s.value_tok_s, 2), "round": f"round {s.round}"}
        for s in samples
        if s.metric.startswith("decode") and not s.void
    ]


def points(samples: list[Sample], metrics: list[str]) -> Rows:
    """Every sound value beside the median of its point, for the bars."""
    rows = []
    for metric in metrics:
        sound = [s for s in samples if s.metric == metric and not s.void]
        middle = statistics.median(s.value_tok_s for s in sound) if sound else None
        rows += [{"point": metric_label(metric), "tok/s": round(s.value_tok_s, 2), "median": round(middle, 2), "round": f"round {s.round}"} for s in sound]
    return rows
