"""What makes a sample void: its own numbers, the server's and the machine's must agree before it is believed (measuring protocol 1).

Each reason begins with the name of its check, one of CHECKS, and a colon.
"""

from dataclasses import dataclass
from typing import Any

from .counters import Counters
from .rates import latency_s

CHECKS = {
    "error": "no request failed",
    "tokens": "tokens as asked, as usage tells them, as the server counted them, as the text holds them",
    "prefix cache": "nothing was answered out of the prefix cache",
    "preemptions": "no request was put back",
    "queue": "a prompt timed alone did not wait",
    "lag": "the client saw tokens when the server had them",
    "load client": "the client was not the bottleneck",
    "clocks": "no GPU was slowed down",
    "overlap": "all streams ran at the same time",
    "ceiling": "not above what the box can do",
}
# Queried tokens found in the prefix cache before a sample is void: measuring protocol 1, point 1.
MOST_CACHED_SHARE = 0.01
# How much later than the server has them the client may see tokens: the larger of a time and a share. A first token that is timed must not be late;
# for a decode rate its lateness counts less than how much it grows until the last one.
MOST_LAG_S, MOST_LAG_DECODE_S, MOST_LAG_SHARE = 0.05, 0.2, 0.05
# A prompt that is timed alone does not wait.
MOST_QUEUE_SHARE = 0.05
# Tokens of a text encoded again may differ from those it was made of, where a stretch of text has several spellings in tokens.
TEXT_TOKENS_SHARE, TEXT_TOKENS = 0.25, 4
# The client itself must not be what is measured.
MOST_CLIENT_CORES = 0.9
# A clock that falls by so much between before and after, or reasons of NVML for a slower one, are not the box at its speed.
CLOCK_DRIFT = 0.10
SLOWED = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}


@dataclass(frozen=True)
class Asked:
    """What one sample asks for: so many prompts at once, tokens of each prompt and of each answer."""

    metric: str
    prompt_tokens: int
    output_tokens: int
    streams: int

    @property
    def is_prefill(self) -> bool:
        """Whether the time to the first token is what counts."""
        return self.metric.startswith("prefill")


def void_reasons(
    asked: Asked, result: dict[str, Any], counted: Counters, text_tokens: list[int], conditions: dict[str, Any], value: float, ceiling_tok_s: float | None
) -> list[str]:
    """Why a sample must not count; empty when it is sound. result: the client's document; counted: what the server counted between before and after."""
    reasons = [f"error: {_last_line(text)}" for text in result["errors"] if text]
    reasons += _tokens(asked, result, counted, text_tokens) + _server(asked, counted) + ([] if reasons else _lag(asked, result, counted))
    client_cores = result["client_cpu_s"] / max(result["client_wall_s"], 1e-9)
    if client_cores > MOST_CLIENT_CORES:
        reasons.append(f"load client: busy on {client_cores:.2f} of a core; it, not the server, may be what was measured")
    reasons += _machine(conditions)
    if not value > 0:
        reasons.append("overlap: no first token" if asked.is_prefill else "overlap: the streams did not decode at the same time")
    elif ceiling_tok_s and value > ceiling_tok_s:
        reasons.append(f"ceiling: {value:.1f} tok/s is above the ceiling of {ceiling_tok_s:.1f}")
    return reasons


def _tokens(asked: Asked, result: dict[str, Any], counted: Counters, text_tokens: list[int]) -> list[str]:
    """Tokens: as asked, as told in usage, as the server counted them, as the text holds them, as events came."""
    streams, prompt, output = asked.streams, asked.prompt_tokens, asked.output_tokens
    reasons = []
    if result["output_lens"] != [output] * streams:
        reasons.append(f"tokens: output lengths {result['output_lens']}, expected {output} each")
    if result["input_lens"] != [prompt] * streams:
        reasons.append(f"tokens: prompt lengths {result['input_lens']}, expected {prompt} each")
    if counted.prompt_tokens != prompt * streams:
        reasons.append(f"tokens: the server counted {counted.prompt_tokens:.0f} prompt tokens, expected {prompt * streams}")
    if counted.generation_tokens != output * streams:
        reasons.append(f"tokens: the server counted {counted.generation_tokens:.0f} generated tokens, expected {output * streams}")
    if counted.finished_length != streams or counted.finished_otherwise:
        reasons.append(f"tokens: {counted.finished_length:.0f} requests ended by length, {counted.finished_otherwise:.0f} otherwise; expected {streams} and 0")
    for number, (text, told, gaps) in enumerate(zip(text_tokens, result["output_lens"], result["itls"], strict=False)):
        if abs(text - told) > max(TEXT_TOKENS, TEXT_TOKENS_SHARE * told):
            reasons.append(f"tokens: stream {number}: the text holds {text} tokens, usage says {told}")
        if told and len(gaps) + 1 > told:
            reasons.append(f"tokens: stream {number}: {len(gaps) + 1} events for {told} tokens")
    return reasons


def _server(asked: Asked, counted: Counters) -> list[str]:
    reasons = []
    if counted.cache_hits > MOST_CACHED_SHARE * counted.cache_queries:
        reasons.append(f"prefix cache: {counted.cache_hits:.0f} of {counted.cache_queries:.0f} queried tokens came out of it")
    if counted.preemptions:
        reasons.append(f"preemptions: {counted.preemptions:.0f}")
    if asked.is_prefill and counted.queue_s > MOST_QUEUE_SHARE * counted.ttft_s:
        reasons.append(f"queue: it waited {counted.queue_s:.3f} s of {counted.ttft_s:.3f} s there")
    return reasons


def _lag(asked: Asked, result: dict[str, Any], counted: Counters) -> list[str]:
    """What lies between the server and the client: a proxy, a slow network, a client that does not keep up."""
    streams, last_s = asked.streams, sum(latency_s(result["ttfts"], result["itls"]))
    first, last = (sum(result["ttfts"]) - counted.ttft_s) / streams, (last_s - counted.e2e_s) / streams
    first_s, whole_s = counted.ttft_s / streams, counted.e2e_s / streams
    reasons = []
    if abs(first) > max(MOST_LAG_S if asked.is_prefill else MOST_LAG_DECODE_S, MOST_LAG_SHARE * first_s):
        when = "after" if first > 0 else "before"
        reasons.append(f"lag: the client saw the first token {abs(first):.3f} s {when} the server had it")
    if abs(last - first) > max(MOST_LAG_S, MOST_LAG_SHARE * (whole_s - first_s)):
        reasons.append(f"lag: from first to last token the client saw {whole_s - first_s + last - first:.3f} s, the server {whole_s - first_s:.3f} s")
    return reasons


def _machine(conditions: dict[str, Any]) -> list[str]:
    reasons = []
    for gpu in conditions.get("gpus", []):
        slowed = sorted(SLOWED & set(gpu["slowed"]))
        if slowed:
            reasons.append(f"clocks: GPU {gpu['index']} was slowed down: {', '.join(slowed)}")
        first, last = gpu["sm_clock_mhz_start"], gpu["sm_clock_mhz_end"]
        if first and last and last < (1 - CLOCK_DRIFT) * first:
            reasons.append(f"clocks: GPU {gpu['index']}: its clock fell from {first} to {last} MHz")
    return reasons


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:120] if lines else "unknown"
