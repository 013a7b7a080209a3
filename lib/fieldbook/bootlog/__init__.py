"""What vLLM's start-up log says: KV pool, memory of each rank, runner, backend, phases, and the line a failure dies on.

Reads logs of vLLM 0.6 to 0.33 as people paste them. What a log does not tell is None, never 0; nothing is added up over ranks or engines.
Format strings: wording.py names the vLLM file of each.
"""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from . import engines, lines, ranks, setup, wording
from .engines import EngineLog, pool_tokens_from_blocks
from .errors import PHASES, phases, root_error
from .lines import clean
from .ranks import RankLog

__all__ = [
    "PHASES", "BootLog", "EngineLog", "RankLog", "bootlog_document", "clean", "is_log", "is_read", "parse", "phases", "pool_tokens_from_blocks", "root_error",
]  # fmt: skip

_ASSIGNED = re.compile(r"rank (\d{1,9}) in world size (\d{1,9}) is assigned as DP rank (\d{1,9}), PP rank (\d{1,9}),(?: PCP rank \d+,)? TP rank (\d{1,9})\b")
_UNREAD = re.compile(r"(?i)(?:available|free) KV cache\b.*\d (?:GiB|GB)|KV cache (?:size|pool)\W.*\d (?:tokens|GiB|GB)")
_HAND_MADE = re.compile(r"(?m)^.*(?:Maximum concurrency @|tokens/request|^ *\|[ *`]*(?:\w+ KV cache size|Available KV cache memory|Maximum concurrency)).*$")
# Lines that setup.py reads, besides those with a figure.
_OF_THE_SET_UP = re.compile(
    r"LLM engine \(?|[█▀▄] +version|API server version|non-default args|attention backend|backend on V1 engine|KV cache layout|padding layers|Checkpoint size"
    r"|unevenly partitioned|Speculative decoding \(method|V1 model runner|V2 Model Runner|is assigned as DP rank|Using max model len"
)


@dataclass(frozen=True)
class BootLog:
    """Figures of one start-up log; None or empty where the log does not say. GiB are 2^30 B, also where an old release writes GB.

    vllm_version; runner: model runner 'V1' or 'V2'; pool_tokens, max_concurrency, max_model_len: of the pool message, None when engines beside each
    other (data parallel) told different ones, see `engines`. available_kv_gib, weights_load_s: by pipeline stage, over its TP ranks the smallest and the
    longest. error: see root_error.

    ranks: each rank's own figures; engines: each engine's pool. engine: 'V0' or 'V1'. gpu_blocks and the block size it was computed with give
    pool_tokens_from_blocks, which is never mixed into pool_tokens. block_size_tokens: told by all ranks alike (hybrid models set it by stage), else asked for.
    attention_backend: the first in use, attention_backends all of them. tp_size, pp_size, dp_size: asked for, else as the prefixes show.
    max_seq_len: the context length asked for. utilization: of the budget. notes: what was chosen or left out while reading.
    """

    vllm_version: str | None
    runner: str | None
    pool_tokens: int | None
    max_concurrency: float | None
    max_model_len: int | None
    available_kv_gib: dict[int, float]
    weights_load_s: dict[int, float]
    phases: list[str]
    error: str | None
    ranks: tuple[RankLog, ...] = ()
    engines: tuple[EngineLog, ...] = ()
    engine: str | None = None
    gpu_blocks: int | None = None
    cpu_blocks: int | None = None
    pool_tokens_from_blocks: int | None = None
    block_size_tokens: int | None = None
    attention_backend: str | None = None
    attention_backends: tuple[str, ...] = ()
    kv_cache_layout: str | None = None
    kv_cache_dtype: str | None = None
    padding_layers: int | None = None
    partition: tuple[int, ...] | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    checkpoint_gib: float | None = None
    spec_method: str | None = None
    spec_tokens: int | None = None
    utilization: float | None = None
    max_seq_len: int | None = None
    init_engine_s: float | None = None
    notes: tuple[str, ...] = ()


def is_read(line: str) -> bool:
    """Whether parse() may take something from a line; what else is in a log is about the machine."""
    return bool(_OF_THE_SET_UP.search(line) or any(needle in line for needle, _ in PHASES)) or any(
        said.pattern.search(line) for said in (*wording.RANK, *wording.ENGINE)
    )


def is_log(text: str) -> bool:
    """Whether anything in it is a line of a server's log: one with a level and a time, with a process in front, of a request, or one that is read here."""
    return any(lines.is_of_a_log(line) for line in clean(text).splitlines()) or parse(text) != parse("")


def parse(text: str) -> BootLog:
    """Read a start-up log; works on a log that is still growing or broke off, and on any other text."""
    text = clean(text)
    messages, seen = _placed(text)
    setting = setup.read(messages)
    beside = (setting.dp_size or 1) > 1
    first, earlier = ranks.counted_from(messages, beside)
    pools, notes = engines.read(messages, first, beside)
    if earlier:
        notes.insert(0, f"{earlier + 1} starts in one log: the figures are those of the last")
    tp_size, pp_size = setting.tp_size or seen.get("tp"), setting.pp_size or seen.get("pp")
    found = ranks.read(messages, first, tp_size, pp_size)
    pool = _common(pools, notes)
    block_size = _block_size(found, setting.block_size_tokens, notes)
    notes += [f"hand-made, not a line of a log: {found[0].strip()[:100]}" for found in _HAND_MADE.finditer(text)][:10] + _unread(messages)
    utilizations = list(dict.fromkeys(r.utilization for r in found if r.utilization is not None))
    return BootLog(
        vllm_version=setting.vllm_version,
        runner=setting.runner,
        pool_tokens=pool.pool_tokens,
        max_concurrency=pool.max_concurrency,
        max_model_len=pool.max_model_len,
        available_kv_gib=_by_stage(found, "available_kv_gib", pp_size, min),
        weights_load_s=_by_stage(found, "weights_load_s", pp_size, max),
        phases=phases("\n".join([text, *(message.joined() for message in messages if len(message.parts) > 1)])),
        error=root_error(text),
        ranks=tuple(r for r in found if any(getattr(r, name) is not None for name in ranks.FIGURES)),
        engines=tuple(pools),
        engine=setting.engine,
        gpu_blocks=pool.gpu_blocks,
        cpu_blocks=pool.cpu_blocks,
        pool_tokens_from_blocks=pool_tokens_from_blocks(pool.gpu_blocks, block_size, pool.max_concurrency, pool.max_model_len),
        block_size_tokens=block_size,
        attention_backend=next(iter(setting.attention_backends), None),
        attention_backends=setting.attention_backends,
        kv_cache_layout=setting.kv_cache_layout,
        kv_cache_dtype=setting.kv_cache_dtype,
        padding_layers=setting.padding_layers,
        partition=setting.partition,
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=setting.dp_size or seen.get("dp"),
        checkpoint_gib=setting.checkpoint_gib,
        spec_method=setting.spec_method,
        spec_tokens=setting.spec_tokens,
        utilization=utilizations[0] if len(utilizations) == 1 else setting.utilization if not utilizations else None,
        max_seq_len=setting.max_seq_len,
        init_engine_s=pool.init_engine_s,
        notes=tuple(notes),
    )


def bootlog_document(log: BootLog) -> dict[str, Any]:
    """The log as one JSON document, for the command line: {"ranks": [{...}], "pool_tokens", "available_kv_gib", "block_size", "runner", ...}.

    available_kv_gib and weights_gib are over the ranks: the smallest, and the one that all tell. Each rank's own stand under "ranks".
    """
    told = {name: [getattr(r, name) for r in log.ranks if getattr(r, name) is not None] for name in ("available_kv_gib", "weights_gib")}
    flat = {name: value for name, value in asdict(log).items() if name not in ("ranks", "engines", "available_kv_gib", "weights_load_s", "block_size_tokens")}
    return {
        "ranks": [asdict(r) for r in log.ranks],
        "engines": [asdict(e) for e in log.engines],
        "available_kv_gib": min(told["available_kv_gib"], default=None),
        "weights_gib": told["weights_gib"][0] if len(set(told["weights_gib"])) == 1 else None,
        "block_size": log.block_size_tokens,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()},
    }


def _placed(text: str) -> tuple[list[lines.Said], dict[str, int]]:
    """The messages, each process with its rank as far as its prefixes or its own words tell it, and the sizes that these show."""
    messages, placed = list(lines.said(text)), {}
    for message in messages:
        for found in _ASSIGNED.finditer(message.joined()) if len(message.speakers) == 1 else ():
            rank, _, dp, pp, tp = map(int, found.groups())
            placed[message.speakers[0].pid, message.speakers[0].ip] = (rank, dp, pp, tp)
    messages = ranks.place_processes(messages, placed)
    seen = {}
    for message in messages:
        for who in message.speakers:
            for name, at in (("tp", who.tp), ("pp", who.pp), ("dp", who.dp)):
                if at is not None:
                    seen[name] = max(seen.get(name, 0), at + 1)
    return messages, seen


def _common(pools: list[EngineLog], notes: list[str]) -> EngineLog:
    """The pool of the only engine, or what all engines say alike. A sum over engines would be no pool: a request lives in one of them."""
    if not pools:
        return EngineLog(0)
    if len(pools) == 1:
        return pools[0]
    told = [str(engine.pool_tokens or engine.gpu_blocks) for engine in pools]
    notes.append(f"{len(pools)} engines beside each other, with {', '.join(told)}: each has its own pool")
    return EngineLog(
        **{name: getattr(pools[0], name) if len({getattr(engine, name) for engine in pools}) == 1 else None for name in EngineLog.__dataclass_fields__}
    )


def _block_size(found: list[RankLog], asked_for: int | None, notes: list[str]) -> int | None:
    sizes = {r.rank: r.block_size_tokens for r in found if r.block_size_tokens is not None}
    if len(set(sizes.values())) > 1:
        notes.append(f"ranks disagree on the block size: {', '.join(f'rank {rank}: {size}' for rank, size in sizes.items())}")
        return None
    return next(iter(sizes.values()), asked_for)


def _by_stage(found: list[RankLog], name: str, pp_size: int | None, choose: Any) -> dict[int, float]:
    """A figure by pipeline stage, over all engines; a rank that does not tell its stage counts as stage 0 as long as nothing speaks of several stages."""
    values: dict[int, list[float]] = {}
    for r in found:
        stage = r.pp_rank if r.pp_rank is not None else 0 if (pp_size or 1) == 1 else None
        if stage is not None and getattr(r, name) is not None:
            values.setdefault(stage, []).append(getattr(r, name))
    return {stage: choose(told) for stage, told in sorted(values.items())}


def _unread(messages: list[lines.Said]) -> list[str]:
    """Notes on lines that speak of a KV pool or of KV space with a figure and in words that vLLM does not use."""
    notes = []
    for message in messages:
        for part in message.parts:
            whole = replace(message, parts=[part])
            if _UNREAD.search(part) and "Error: " not in part and not any(True for _ in wording.read(whole, (*wording.RANK, *wording.ENGINE))):
                notes.append(f"not read, since vLLM does not write it: {part.strip()[:100]}")
    return list(dict.fromkeys(notes))[:10]
