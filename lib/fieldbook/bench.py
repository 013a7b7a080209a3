"""Benchmarks: prefill at each length, decode at each concurrency, each sample checked before it counts (protocol 1).

Load comes from vLLM's own client (`load`); here are the schedule, the arithmetic on raw times, and the reasons that void a sample.
"""

import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from . import server
from .params import Params

# Queried tokens found in the prefix cache before a sample is void: measuring protocol 1, point 1.
MOST_CACHED_SHARE = 0.01


class Sample(BaseModel):
    """One measured repetition of one point. `void` lists the reasons it does not count; raw times in seconds."""

    model_config = ConfigDict(frozen=True)
    arm: str
    round: int
    metric: str
    repetition: int
    value_tok_s: float
    ttft_s: list[float]
    itl_s: list[list[float]]
    start_s: list[float]
    output_tokens: list[int]
    prompt_tokens: list[int]
    load_average: float
    void: list[str]


def arguments(params: Params, state: dict, prompt_tokens: int, output_tokens: int, streams: int, seed: int) -> list[str]:
    """Arguments of `vllm bench serve` for one sample: random prompts of an exact length, a fixed output length, greedy."""
    return [
        *("--backend", "openai", "--base-url", server.url(state), "--endpoint", "/v1/completions"),
        *("--model", params.model.name, "--tokenizer", str(server.weights_dir(params)), "--dataset-name", "random"),
        *("--random-input-len", str(prompt_tokens), "--random-output-len", str(output_tokens), "--ignore-eos"),
        *("--num-prompts", str(streams), "--max-concurrency", str(streams), "--seed", str(seed)),
        *("--temperature", "0", "--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-detailed"),
    ]


def decode_tok_s(start_s: list[float], ttft_s: list[float], itl_s: list[list[float]], output_tokens: list[int]) -> float:
    """Tokens per second of all streams together while every stream is decoding.

    The window opens when the last stream has its first token and closes when the first stream has its last one. Events are weighted so that
    each stream's sum is the server's token count, because one event may carry several tokens. 0.0 when the streams never overlapped.
    """
    times = [list(itertools.accumulate(gaps, initial=start + ttft)) for start, ttft, gaps in zip(start_s, ttft_s, itl_s, strict=True)]
    if any(len(stream) < 2 for stream in times):
        return 0.0
    opens, closes = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    if closes <= opens:
        return 0.0
    tokens = 0.0
    for stream, count in zip(times, output_tokens, strict=True):
        tokens_per_event = (count - 1) / (len(stream) - 1)
        tokens += tokens_per_event * sum(opens < moment <= closes for moment in stream)
    # A stream whose events lie before the window's edge has the rest of an interval inside it: on average that evens out over streams.
    return tokens / (closes - opens)


def void_reasons(
    result: dict,
    prompt_tokens: int,
    output_tokens: int,
    streams: int,
    before: dict[str, float],
    after: dict[str, float],
    value: float,
    ceiling_tok_s: float | None,
) -> list[str]:
    """Why a sample must not count; empty when it is sound. before and after are the server's counters (`counters`)."""
    reasons = [f"error: {text[:80]}" for text in result["errors"] if text]
    if result["output_lens"] != [output_tokens] * streams:
        reasons.append(f"output lengths {result['output_lens']}, expected {output_tokens} each")
    delta = {key: after[key] - before[key] for key in before}
    if delta["prompt"] != prompt_tokens * streams:
        reasons.append(f"the server counted {delta['prompt']:.0f} prompt tokens, expected {prompt_tokens * streams}")
    if delta["generation"] != output_tokens * streams:
        reasons.append(f"the server counted {delta['generation']:.0f} generated tokens, expected {output_tokens * streams}")
    if delta["cache_hits"] > MOST_CACHED_SHARE * delta["cache_queries"]:
        reasons.append(f"{delta['cache_hits']:.0f} of {delta['cache_queries']:.0f} queried tokens came from the prefix cache")
    if delta["preemptions"]:
        reasons.append(f"{delta['preemptions']:.0f} preemptions")
    if not value > 0:
        reasons.append("the streams did not decode at the same time")
    elif ceiling_tok_s and value > ceiling_tok_s:
        reasons.append(f"{value:.1f} tok/s is above the ceiling of {ceiling_tok_s:.1f}")
    return reasons


COUNTERS = {
    "prompt": "vllm:prompt_tokens_total",
    "generation": "vllm:generation_tokens_total",
    "cache_queries": "vllm:prefix_cache_queries_total",
    "cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


def parse_counters(metrics: str) -> dict[str, float]:
    """The five counters of COUNTERS from the text of /metrics, summed over label sets; 0 where a counter is not exported."""
    return {key: sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", metrics, re.M)) for key, name in COUNTERS.items()}


def counters(state: dict) -> dict[str, float]:
    """The server's counters now."""
    return parse_counters(server.asked(state, "/metrics", 30).text)


def points(params: Params) -> list[tuple[str, int, int, int]]:
    """(metric, prompt tokens, output tokens, streams) of every point, prefill first."""
    bench = params.benchmarks
    prefill = [(f"prefill_{n}_tok_s", n, 1, 1) for n in bench.prefill_tokens]
    return prefill + [(f"decode_c{n}_tok_s", bench.decode_prompt_tokens, bench.decode_output_tokens, n) for n in bench.decode_concurrency]


def seed_of(arm: str, round_number: int, point: int, repetition: int) -> int:
    """A seed that no other sample of a run has, so that no prompt is used twice. Warm-ups are repetition 0."""
    arms = {"candidate": 1, "baseline": 2}
    return ((arms[arm] * 10 + round_number) * 100 + point) * 1000 + repetition


def measure_round(
    params: Params,
    state: dict,
    run: Callable[[list[str]], dict],
    arm: str,
    round_number: int,
    ceilings_tok_s: dict[str, float],
    progress: Callable[[str], None],
) -> list[Sample]:
    """All points of one round on a running server, one uncounted warm-up of the same shape before each point."""
    samples = []
    for index, (metric, prompt_tokens, output_tokens, streams) in enumerate(points(params)):
        for repetition in range(params.benchmarks.repetitions + 1):
            progress(f"{arm}, round {round_number}: {metric} " + (f"repetition {repetition}" if repetition else "warm-up"))
            seed = seed_of(arm, round_number, index, repetition)
            before = counters(state)
            result = run(arguments(params, state, prompt_tokens, output_tokens, streams, seed))
            after = counters(state)
            if repetition == 0:
                continue
            if metric.startswith("prefill"):
                value = prompt_tokens / result["ttfts"][0] if result["ttfts"][0] > 0 else 0.0
            else:
                value = decode_tok_s(result["start_times"], result["ttfts"], result["itls"], result["output_lens"])
            void = void_reasons(result, prompt_tokens, output_tokens, streams, before, after, value, ceilings_tok_s.get(metric))
            samples.append(
                Sample(
                    arm=arm,
                    round=round_number,
                    metric=metric,
                    repetition=repetition,
                    value_tok_s=value,
                    ttft_s=result["ttfts"],
                    itl_s=result["itls"],
                    start_s=[moment - min(result["start_times"]) for moment in result["start_times"]],
                    output_tokens=result["output_lens"],
                    prompt_tokens=result["input_lens"],
                    load_average=float(Path("/proc/loadavg").read_text().split()[0]),
                    void=void,
                )
            )
    return samples


def values(samples: list[Sample], arm: str, metric: str, round_number: int | None = None) -> list[float]:
    """Sound values of one arm and metric, in the order measured; void samples are never averaged in."""
    return [s.value_tok_s for s in samples if s.arm == arm and s.metric == metric and not s.void and round_number in (None, s.round)]


def by_round(samples: list[Sample], metrics: list[str]) -> dict[str, dict[str, list[list[float]]]]:
    """Sound values as {metric: {arm: [values of round 1, values of round 2]}}, as the verdict compares them."""
    return {metric: {arm: [values(samples, arm, metric, number) for number in (1, 2)] for arm in ("candidate", "baseline")} for metric in metrics}


def summary_rows(samples: list[Sample], metrics: list[str]) -> list[dict]:
    """One row per arm and metric: every value, median, minimum, maximum and the void ones, for tables."""
    rows = []
    for arm in sorted({s.arm for s in samples}, reverse=True):
        for metric in metrics:
            sound = values(samples, arm, metric)
            row = {"arm": arm, "metric": metric, "samples": len(sound), "void": sum(s.arm == arm and s.metric == metric and bool(s.void) for s in samples)}
            row |= {"min": min(sound), "median": statistics.median(sound), "max": max(sound)} if sound else {"min": None, "median": None, "max": None}
            rows.append(row)
    return rows


def read_samples(file: Path) -> list[Sample]:
    """Samples of a JSON-lines file; empty when there is none."""
    return [Sample.model_validate(json.loads(line)) for line in file.read_text().splitlines() if line.strip()] if file.is_file() else []


def keep_samples(file: Path, fresh: list[Sample]) -> list[Sample]:
    """Add fresh samples to a JSON-lines file, replacing those of the same arm and round, and return all. Written whole."""
    from . import files

    redone = {(s.arm, s.round) for s in fresh}
    together = [s for s in read_samples(file) if (s.arm, s.round) not in redone] + fresh
    files.write_whole(file, "".join(s.model_dump_json() + "\n" for s in together))
    return together
