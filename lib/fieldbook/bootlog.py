"""What vLLM's start-up log says: KV pool, per-rank KV space, runner, phases, and the line a failure dies on.

Format strings: vLLM 0.30 v1/core/kv_cache_utils.py:update_kv_cache_capacity, v1/worker/cpu_worker.py:determine_available_memory.
"""

import re
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_POOL = re.compile(r"(\w+) KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_CPU_KV = re.compile(r"(?:Explicitly|Auto) set \(([\d.]+)/[\d.]+\) GiB for KV cache on node \d+")
_RANK = re.compile(r"\(Worker(?:_PP(\d+))?\S* pid=\d+\)")
_WEIGHTS = re.compile(r"Worker(?:_PP(\d+))?\S*? pid=\d+\).*?Loading weights took ([\d.]+) seconds")
_KILLED = re.compile(r"((?:Worker|Engine core) proc \S+ died unexpectedly)")
# Packages print their exceptions with the module in front.
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt))(?:: (.*))?$")
_WHO = re.compile(r"^(?:\(\S+ pid=\d+\) |\[rank\d+\]: )+")
_LEVEL = re.compile(r"^(\w+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ")

# Shown while a server starts: (what the log says, what that means), in order.
PHASES = (
    ("non-default args", "arguments read"),
    ("Initializing a V1 LLM engine", "engine starting"),
    ("Starting to load model", "ranks up, loading weights"),
    ("Loading weights took", "weights loaded"),
    ("KV cache size", "KV pool allocated"),
    ("Application startup complete", "serving"),
)


@dataclass(frozen=True)
class BootLog:
    """Figures of one start-up log; None where the log does not say."""

    vllm_version: str | None
    runner: str | None
    pool_tokens: int | None
    max_concurrency: float | None
    max_model_len: int | None
    available_kv_gib: dict[int, float]
    weights_load_s: dict[int, float]
    phases: list[str]
    error: str | None


def clean(text: str) -> str:
    """The log without terminal colours and without the ' characters' of progress bars."""
    return _ANSI.sub("", text).replace("\r", "\n")


def phases(text: str) -> list[str]:
    """Start-up phases passed so far, in words."""
    return [words for needle, words in PHASES if needle in text]


def parse(text: str) -> BootLog:
    """Read a start-up log; works on a log that is still growing or broke off."""
    text = clean(text)
    pool = _POOL.search(text)
    version = re.search(r"LLM engine \(v([^)]+)\)", text) or re.search(r"[█▀▄] +version (\S+)", text)
    runner = "V1" if "using the V1 model runner" in text else "V2" if "Using V2 Model Runner" in text else None
    return BootLog(
        vllm_version=version[1] if version else None,
        runner=runner,
        pool_tokens=int(pool[2].replace(",", "")) if pool else None,
        max_concurrency=float(pool[4]) if pool else None,
        max_model_len=int(pool[3].replace(",", "")) if pool else None,
        available_kv_gib=_available_kv_gib(text),
        weights_load_s={int(rank or 0): float(s) for rank, s in _WEIGHTS.findall(text)},
        phases=phases(text),
        error=root_error(text),
    )


def _available_kv_gib(text: str) -> dict[int, float]:
    """KV space by rank. Ranks write their name and their line separately, so that two names may share a line and leave the next without one.

    Then it is not known which line is whose, which does not matter as long as all say the same; else those ranks are left out.
    """
    found, unclear, values = {}, set(), set()
    for line in text.splitlines():
        gib = [float(value) for value in _CPU_KV.findall(line)]
        ranks = [int(rank or 0) for rank in _RANK.findall(line)] if gib else []
        values.update(gib)
        if len(gib) == len(ranks) == 1:
            found[ranks[0]] = gib[0]
        else:
            unclear.update(ranks)
    if len(values) == 1:
        found |= dict.fromkeys(unclear, values.pop())
    return found


def root_error(text: str) -> str | None:
    """The first exception a worker or the engine died of, with the function it was raised in; None when none is in the log.

    The first is the cause: what follows (EngineDeadError, RuntimeError of the API server) is its echo.
    """
    lines = clean(text).splitlines()
    for number, line in enumerate(lines):
        if killed := _KILLED.search(line):
            return killed[1]
        bare = _WHO.sub("", line)
        level = _LEVEL.match(bare)
        if level and level[1] not in ("ERROR", "CRITICAL"):
            # Told below ERROR: it was caught, and vLLM went on.
            continue
        found = _ERROR.match(bare[level.end() :] if level else bare)
        if found:
            frames = [f for f in (re.search(r"in (\w+)$", earlier) for earlier in lines[max(0, number - 12) : number]) if f]
            where = f" in {frames[-1][1]}" if frames else ""
            return f"{found[1]}{where}" + (f": {found[2]}" if found[2] else "")
    return None
