"""What the server itself counts (/metrics): the other side of every figure that the client reports."""

import re
import time
from dataclasses import dataclass, fields

from ..errors import GateFailed
from .target import Target

# A request is counted a moment after its last token has been sent.
COUNTED_WITHIN_S = 3.0


@dataclass(frozen=True)
class Counters:
    """Sums over all requests since the server started, of vLLM's Prometheus metrics; differences of two are what happened between."""

    prompt_tokens: float
    generation_tokens: float
    cache_queries: float
    cache_hits: float
    preemptions: float
    finished_length: float
    finished_otherwise: float
    queue_s: float
    ttft_s: float
    e2e_s: float
    drafts: float
    accepted_tokens: float

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`."""
        return Counters(**{field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)})

    @property
    def finished(self) -> float:
        """Requests that ended, however."""
        return self.finished_length + self.finished_otherwise

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step that drafts: the accepted ones and the one the model gives anyway; None where nothing is drafted."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


_NAMES = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "cache_queries": "vllm:prefix_cache_queries_total",
    "cache_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "queue_s": "vllm:request_queue_time_seconds_sum",
    "ttft_s": "vllm:time_to_first_token_seconds_sum",
    "e2e_s": "vllm:e2e_request_latency_seconds_sum",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
_LINE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? ([-+.eE\d]+)$", re.MULTILINE)


def parse(metrics: str) -> Counters:
    """Counters from the text of /metrics, summed over label sets; what is not exported is 0. Raises GateFailed where it is no text of vLLM's."""
    sums: dict[str, float] = {}
    for name, labels, value in _LINE.findall(metrics):
        reason = re.search(r'finished_reason="(\w+)"', labels)
        key = f"{name}:{reason.group(1)}" if reason else name
        sums[key] = sums.get(key, 0.0) + float(value)
    if _NAMES["prompt_tokens"] not in sums:
        raise GateFailed("/metrics has no vllm:prompt_tokens_total: nothing that a client measures there can be checked (--disable-log-stats?)")
    finished = {key.rsplit(":", 1)[1]: value for key, value in sums.items() if key.startswith("vllm:request_success_total:")}
    return Counters(
        finished_length=finished.pop("length", 0.0), finished_otherwise=sum(finished.values()), **{key: sums.get(name, 0.0) for key, name in _NAMES.items()}
    )


def read(target: Target) -> Counters:
    """The server's counters now. Raises GateFailed where it has none."""
    return parse(target.get("/metrics"))


def read_after(target: Target, before: Counters, requests: int) -> Counters:
    """The counters once so many requests more have been counted, or when that does not come."""
    deadline = time.monotonic() + COUNTED_WITHIN_S
    while (now := read(target)).finished - before.finished < requests and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def started_at_s(metrics: str) -> float | None:
    """When the server's process started, by the text of /metrics (Unix time); tells one boot from another. None where it does not say."""
    found = re.search(r"^process_start_time_seconds ([-+.eE\d]+)$", metrics, re.MULTILINE)
    return float(found.group(1)) if found else None
