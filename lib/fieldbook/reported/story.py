"""What the reports' numbers mean, told with what is recomputed here: why a pool came out better, what is resident at once, and the layouts by workload."""

from typing import Any

from .. import gates, memory, patches, splits
from ..budget import Gpus
from ..errors import BadInput
from ..layouts import sizes_of
from ..memory_tables import with_engine
from ..params import Params
from ..strategy import strategy_of
from .source import Source

Rows = list[dict[str, Any]]


def pool(source: Source) -> str:
    """Why the pool is what it is, in Markdown; '' for a report without such a question."""
    return {"a100-x8-glm53": _better_than_predicted, "cmp170hx-x3": _solved_space}.get(source.params.box.name, lambda s: "")(source)


def _better_than_predicted(s: Source) -> str:
    before, after = s.pool((39, 39), (21.95, 15.56)), s.pool((41, 37), (19.35, 18.16))
    tight, alone = after.ranks
    held = alone.available_kv_bytes // alone.kv_bytes_per_block * after.block_size_tokens
    linear, logged = s.report.number("glm-pool-4137/linear"), s.report.number("glm-pool-4137")
    fell = f"{before.ranks[1].kv_bytes_per_token:,} B per token became {alone.kv_bytes_per_token:,} B"
    binds = f"with {tight.available_kv_bytes / memory.GIB:.2f} GiB at {tight.kv_bytes_per_token:,} B per token"
    return f"""
**Why the pool came out better than the report predicted.** It scaled the pool of 39+39 with the GiB of rank 1, the tightest, and expected
{linear:,} tokens at 41+37. But the two layers that rank 1 gave away took their bytes of every token along: {fell}, and its
{alone.available_kv_bytes / memory.GIB:.2f} GiB hold {held:,} tokens. So rank 1 no longer binds. Rank {after.binding_rank} does, {binds}:
**{after.pool_tokens:,} tokens**; logged were {logged:,}.
"""


def _solved_space(s: Source) -> str:
    first, second = s.report.number("cmp-kv200k-pp"), s.report.number("cmp-kv262k-pp")
    found, longer = (s.pool([16, 16, 16], s.params.engine.available_kv_gib, max_model_len=n) for n in (200_000, 262_144))
    space_gib = found.ranks[-1].available_kv_bytes / memory.GIB
    return f"""
**What the two pools tell.** The cards' memory is not stated, so the KV space is solved from the first pool: {found.blocks} blocks of
{found.block_size_tokens:,} tokens, {space_gib:.2f} GiB of rank 2, give {found.pool_tokens:,} tokens with requests of up to 200,000
({first:,} logged). That checks nothing. The second does: the same {longer.blocks} blocks give **{longer.pool_tokens:,} tokens** with requests of
up to 262,144, and {second:,} were logged. It comes out only with three drafted tokens and a float32 state, of which the report says neither.
A hybrid's pool depends on the longest request, because each request takes its states first.
"""


def resident(source: Source) -> str:
    """How many requests of 128K tokens are resident at once, worked, in Markdown; '' for a report that does not ask."""
    if "glm-128k" not in source.report.figures:
        return ""
    tokens, request = source.report.number("glm-pool-4137"), 131_072 + 256
    found = source.pool((41, 37), source.params.engine.available_kv_gib, max_model_len=request)
    whole = (found.blocks - 1) // found.blocks_per_request
    return f"""
**How many requests of 128K at once?** A prompt of 131,072 tokens and 256 of an answer are {request:,} tokens: {tokens:,} / {request:,} =
**{tokens / request:.2f}**. In blocks of {found.block_size_tokens} tokens, {found.blocks_per_request:,} for each:
({found.blocks:,} - 1) / {found.blocks_per_request:,}, so **{whole} are resident**. A sixth is accepted and waits until one of them is done.
"""


def choices(source: Source) -> Rows:
    """The layouts that a report recommends by workload, with its figures and what the gates say of each on stock vLLM; pools here are from the cards alone."""
    rows = []
    for one in source.report.choices:
        params = _with(source.params, one)
        split = splits.resolve_split(params.parallel, source.spec)
        launch = gates.look(params, params.parallel, split, box=source.box, defects=patches.stock_rows(params))
        found = gates.check(launch)
        told = {key: source.report.figures[f"{one['id']}/{key}"].value for key in ("pool", "single", "context")}
        many = [
            source.report.figures[key].value
            for key in (f"{one['id']}/conc16", f"{one['id']}/conc16-low", f"{one['id']}/conc16-high")
            if key in source.report.figures
        ]
        rows.append(
            {
                "workload": one["workload"],
                "layout": splits.layout_name(params.parallel, split),
                "KV pool": told["pool"],
                "pool here, estimated": _estimated(source, params, split),
                "1 stream, tok/s": told["single"],
                "16 streams, tok/s": " to ".join(map(str, many)),
                "longest request": told["context"],
                "stock vLLM is refused by": ", ".join(gates.refusing(found)) or None,
                "and warned of": ", ".join(row["gate"] for row in found if row["result"] == "warn") or None,
            }
        )
    return rows


def _with(params: Params, choice: dict[str, Any]) -> Params:
    parallel = params.parallel.model_copy(update=choice["parallel"])
    # What the params give of KV space is another layout's.
    return with_engine(params.model_copy(update={"parallel": parallel}), available_kv_gib=[], other_boots=[], **choice.get("engine", {}))


def _estimated(source: Source, params: Params, split: tuple[int, ...]) -> int | None:
    try:
        layout = strategy_of(params.parallel).layout
        return memory.pool(params, source.spec, split, layout=layout, gpus=Gpus(sizes_of(source.box)), must_fit=False).pool_tokens
    except BadInput:
        return None
