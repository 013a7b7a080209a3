"""The KV pool of each engine in a log."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from . import ranks, wording
from .lines import Said

# The only default on GPUs and on CPU while a log told blocks instead of tokens (V0, and V1 of 0.7); the others could be asked for.
_BLOCK_SIZES = (16, 8, 32, 64, 128)


@dataclass(frozen=True)
class EngineLog:
    """The pool of one engine (a data parallel rank); None where the log does not say. max_model_len is that of the concurrency line.

    gpu_blocks: what V0 and V1 of 0.7 print instead of tokens; cpu_blocks: V0's swap space. init_engine_s: profiling, KV allocation and warm-up.
    """

    dp_rank: int
    pid: int | None = None
    pool_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None
    gpu_blocks: int | None = None
    cpu_blocks: int | None = None
    gpu_blocks_override: int | None = None
    init_engine_s: float | None = None


def pool_tokens_from_blocks(gpu_blocks: int | None, block_size_tokens: int | None, max_concurrency: float | None, max_model_len: int | None) -> int | None:
    """Tokens of a pool that was told in blocks: computed, not read. None without blocks.

    Where the log does not tell the block size it is 16, unless the concurrency (blocks x size / max_model_len, to two digits) says another one;
    None when no usual size gives that concurrency. Source: vLLM 0.6 executor/gpu_executor.py:initialize_cache.
    """
    if gpu_blocks is None:
        return None
    sizes = [block_size_tokens] if block_size_tokens else list(_BLOCK_SIZES)
    if max_concurrency is None or not max_model_len:
        return gpu_blocks * sizes[0]
    return next((gpu_blocks * size for size in sizes if abs(gpu_blocks * size / max_model_len - max_concurrency) < 0.006), None)


def read(messages: list[Said], first: dict[int, int], beside: bool) -> tuple[list[EngineLog], list[str]]:
    """The engines that told of a pool, and notes on what was chosen. `beside`: unsigned pool lines are of engines beside each other.

    V1 up to 0.10 prints a pool for each rank and then uses the smallest, so of several pools of one engine that one is taken.
    """
    said: dict[tuple[int, int | None], list[dict[str, Any]]] = defaultdict(list)
    for message in messages:
        key = ranks.engine_of(message)
        if message.number < first.get(key[0], 0):
            continue
        for _, found in wording.read(message, wording.ENGINE):
            figures = wording.values(found)
            pools = said[key]
            fits = [row for row in pools[-1:] if not row.keys() & (figures.keys() - {"loose"})]
            if fits and not (figures.keys() & {"pool_tokens", "gpu_blocks"} and "max_model_len" in fits[0]):
                fits[0].update(figures)
            else:
                pools.append(figures)
    notes, out = [], []
    for (dp_rank, pid), rows in said.items():
        pools = [_concurrency(row) for row in rows if row.keys() & {"pool_tokens", "max_model_len", "gpu_blocks"}]
        rest = {key: row[key] for row in rows for key in ("gpu_blocks_override", "init_engine_s") if key in row}
        if beside and pid is None and len(pools) > 1:
            out += [EngineLog(dp_rank, pid, **(rest | row)) for row in pools]
            continue
        sizes = list(dict.fromkeys(row.get("pool_tokens", row.get("gpu_blocks")) for row in pools if row.keys() & {"pool_tokens", "gpu_blocks"}))
        if len(sizes) > 1:
            notes.append(f"{len(sizes)} pools of one engine: {', '.join(f'{size:,}' for size in sizes)}; vLLM uses the smallest")
        chosen = min(pools, key=lambda row: row.get("pool_tokens", row.get("gpu_blocks", float("inf"))), default={})
        out.append(EngineLog(dp_rank, pid, **(rest | chosen)))
    out = [engine for engine in out if engine != EngineLog(engine.dp_rank, engine.pid)]
    # A line repeated without its prefix, under the log or in a summary, is no engine of its own.
    signed = {_pool(engine) for engine in out if engine.pid is not None}
    out = [engine for engine in out if engine.pid is not None or beside or not signed or _pool(engine) not in signed]
    return sorted(_merged(out), key=lambda engine: engine.dp_rank), notes


def _pool(engine: EngineLog) -> tuple:
    return (engine.pool_tokens, engine.max_concurrency, engine.max_model_len, engine.gpu_blocks)


def _merged(engines: list[EngineLog]) -> list[EngineLog]:
    """Two records that fill each other's gaps are one engine: a start time told without a prefix beside a pool told with one."""
    if len(engines) == 2 and engines[0].dp_rank == engines[1].dp_rank and None in (engines[0].pid, engines[1].pid):
        a, b = engines
        fields = [name for name in EngineLog.__dataclass_fields__ if name != "dp_rank"]
        if all(getattr(a, name) is None or getattr(b, name) is None for name in fields):
            return [EngineLog(a.dp_rank, **{name: getattr(a, name) if getattr(a, name) is not None else getattr(b, name) for name in fields})]
    return engines


def _concurrency(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a concurrency that has lost its x taken only where the pool confirms it: else it may be a number cut short."""
    loose = row.pop("loose", None)
    if loose is not None and row.get("max_model_len") and abs(row.get("pool_tokens", 0) / row["max_model_len"] - loose) < 0.006:
        return row | {"max_concurrency": loose}
    return row
