"""The schedule: every point, a warm-up of the same shape before each, repetitions in full rounds; what an interrupt leaves is kept and gone on with."""

import itertools
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import files, receipts
from ..errors import BadInput
from ..schema import Benchmarks
from . import checks, counters, prompts
from .checks import Asked
from .conditions import Conditions
from .rates import decode_tok_s, in_microseconds
from .samples import Sample, read_samples, write_samples
from .target import Target, count_tokens

# A void sample is shown, and measured once more; not for ever, where something is wrong throughout.
MORE_TRIES = 2
Run = Callable[[list[str], list[str]], dict[str, Any]]


def points(bench: Benchmarks) -> list[Asked]:
    """Every point, prefill first: prompts timed alone, then streams decoding at once."""
    prefill = [Asked(f"prefill_{n}_tok_s", n, 1, 1) for n in bench.prefill_tokens]
    return prefill + [Asked(f"decode_c{n}_tok_s", bench.decode_prompt_tokens, bench.decode_output_tokens, n) for n in bench.decode_concurrency]


def check_lengths(bench: Benchmarks, max_model_len: int | None) -> None:
    """Raises BadInput for a point that is longer than a request may be."""
    for point in points(bench):
        if max_model_len and point.prompt_tokens + point.output_tokens > max_model_len:
            raise BadInput(
                f"benchmarks: {point.metric} needs {point.prompt_tokens} + {point.output_tokens} tokens, and the server takes {max_model_len} at most"
            )


def arguments(target: Target, asked: Asked) -> list[str]:
    """Arguments of `vllm bench serve` for one sample: prompts as given, a fixed output length, greedy."""
    # Without a tokenizer the client asks for one token each, so the length goes with the request; special tokens are left in, so that the text can be counted.
    body = {"max_tokens": asked.output_tokens, "skip_special_tokens": False}
    return [
        *("--backend", "openai", "--base-url", target.url, "--endpoint", "/v1/completions", "--model", target.model, "--skip-tokenizer-init"),
        *("--dataset-name", "custom", "--disable-shuffle", "--skip-chat-template", "--no-oversample", "--custom-output-len", str(asked.output_tokens)),
        *("--num-prompts", str(asked.streams), "--max-concurrency", str(asked.streams), "--ignore-eos", "--temperature", "0"),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-detailed", "--extra-body", json.dumps(body)),
    ]


def seed_of(salt: str, arm: str, boot: int, round_number: int, metric: str, repetition: int, stream: int) -> str:
    """A seed that no other prompt has, of this run or another. Warm-ups are repetition 0."""
    return f"{salt}/{arm}/{boot}/{round_number}/{metric}/{repetition}/{stream}"


def value_tok_s(asked: Asked, start_s: list[float], ttft_s: list[float], itl_s: list[list[float]], output_tokens: list[int]) -> float:
    """The rate that a point's raw times give; 0.0 where they give none."""
    if asked.is_prefill:
        return asked.prompt_tokens / ttft_s[0] if ttft_s[0] > 0 else 0.0
    return decode_tok_s(start_s, ttft_s, itl_s, output_tokens)


def measure_point(target: Target, run: Run, asked: Asked, seeds: list[str], ceiling_tok_s: float | None, place: dict[str, Any]) -> Sample:
    """One sample. place: arm, boot, round and repetition. Raises GateFailed when server or client is gone; everything else makes it void."""
    count = prompts.counter(target)
    texts = [prompts.exact(count, asked.prompt_tokens, seed) for seed in seeds]
    started_at, metrics = receipts.now(), target.get("/metrics")
    before = counters.parse(metrics)
    with Conditions(target.local) as watch:
        result = run(arguments(target, asked), texts)
    counted = counters.read_after(target, before, asked.streams).since(before)
    spoken = [count_tokens(target, prompt=text, add_special_tokens=False) if text else 0 for text in result["generated_texts"]]
    starts, ttfts, gaps = in_microseconds(result["start_times"], result["ttfts"], result["itls"])
    value = value_tok_s(asked, starts, ttfts, gaps, result["output_lens"])
    conditions = watch.document()
    return Sample(
        **place,
        metric=asked.metric,
        seed=seeds[0].rpartition("/")[0],
        started_at=started_at,
        server_started_at_s=counters.started_at_s(metrics),
        value_tok_s=value,
        ttft_s=ttfts,
        itl_s=gaps,
        start_s=starts,
        output_tokens=result["output_lens"],
        prompt_tokens=result["input_lens"],
        text_tokens=spoken,
        queue_s=counted.queue_s,
        server_ttft_s=counted.ttft_s,
        server_e2e_s=counted.e2e_s,
        cached_share=counted.cache_hits / counted.cache_queries if counted.cache_queries else 0.0,
        preemptions=int(counted.preemptions),
        acceptance_length=counted.acceptance_length,
        client_cores=result["client_cpu_s"] / max(result["client_wall_s"], 1e-9),
        conditions=conditions,
        ceiling_tok_s=ceiling_tok_s,
        void=checks.void_reasons(asked, result, counted, spoken, conditions, value, ceiling_tok_s),
    )  # fmt: skip


def measure(
    target: Target,
    run: Run,
    bench: Benchmarks,
    arm: str,
    boot: int,
    rounds: int,
    ceilings_tok_s: dict[str, float],
    unfinished: Path,
    about: dict[str, Any],
    progress: Callable[[str], None],
) -> list[Sample]:
    """All points in full rounds, each with an uncounted warm-up of the same shape.

    unfinished: file that holds every sample as soon as it is measured. Left by an interrupted measurement of the same things (`about`: params, server
    and so on), its whole points are kept and only the rest is measured. `forget` it once all is done: the next measurement is a new one.
    """
    check_lengths(bench, target.max_model_len)
    salt = secrets.token_hex(4)
    done, mark = [], _mark(unfinished)
    if mark.is_file() and unfinished.is_file() and json.loads(mark.read_text()) == about:
        done = read_samples(unfinished)
    files.write_json(mark, about)
    for number, asked in itertools.product(range(1, rounds + 1), points(bench)):
        place = {"arm": arm, "boot": boot, "round": number}
        mine = [s for s in done if (s.arm, s.boot, s.round, s.metric) == (arm, boot, number, asked.metric)]
        if _enough(mine, bench.repetitions):
            progress(f"{arm}, round {number}: {asked.metric} was measured before the interrupt")
            continue
        done, mine = [s for s in done if s not in mine], []
        for repetition in range(bench.repetitions + MORE_TRIES + 1):
            if _enough(mine, bench.repetitions):
                break
            progress(f"{arm}, round {number} of {rounds}: {asked.metric} " + (f"repetition {repetition}" if repetition else "warm-up"))
            seeds = [seed_of(salt, arm, boot, number, asked.metric, repetition, stream) for stream in range(asked.streams)]
            sample = measure_point(target, run, asked, seeds, ceilings_tok_s.get(asked.metric), {**place, "repetition": repetition})
            if repetition:
                mine.append(sample)
                write_samples(unfinished, done + mine)
        done += mine
    return [s for s in done if (s.arm, s.boot) == (arm, boot)]


def _enough(samples: list[Sample], repetitions: int) -> bool:
    """Whether a point of a round has its repetitions, as many of them sound as may be had."""
    return len(samples) >= repetitions and (sum(not s.void for s in samples) >= repetitions or len(samples) >= repetitions + MORE_TRIES)


def forget(unfinished: Path) -> None:
    """Remove what an interrupted measurement would have gone on with."""
    unfinished.unlink(missing_ok=True)
    _mark(unfinished).unlink(missing_ok=True)


def _mark(unfinished: Path) -> Path:
    # Not .json: what ends so in a servers/ folder is the state of one.
    return unfinished.with_suffix(".about")
