"""Rows of the memory notebook: shape, weights with their formulas, bytes of a token, ledger, capacity, what-if."""

import collections
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from . import kv, memory, safetensors_headers, splits, weights
from .bootlog import BootLog
from .budget import Gpus
from .errors import BadInput
from .memory import Pool
from .params import Params
from .show import gib
from .spec import Attention, Layer, ModelSpec
from .tables import Rows, pairs

_NAMES = {
    "full": "grouped-query attention",
    "sliding": "sliding-window attention",
    "mla": "latent attention (MLA)",
    "sparse_mla": "sparse latent attention (DSA)",
    "sparse_gqa": "sparse grouped-query attention",
    "gdn": "gated delta net (recurrent)",
    "kda": "Kimi delta attention (recurrent)",
    "mamba2": "Mamba 2 (recurrent)",
    "none": "none",
}


def shape(spec: ModelSpec, dtype: str) -> Rows:
    """What of the model's config the arithmetic uses."""
    mixers = collections.Counter(layer.attention.kind for layer in spec.layers if layer.attention.kind != "none")
    parts = collections.Counter(layer.mlp.kind for layer in spec.layers if layer.mlp.kind != "none")
    owners = sum(bool(layer.attention.indexer and layer.attention.indexer.owns) for layer in spec.layers)
    rows: dict[str, Any] = {
        "architecture": spec.architecture,
        "layers": spec.num_hidden_layers,
        "draft layers (MTP)": len(spec.mtp_layers) or None,
        "hidden size h": spec.hidden_size,
        "vocabulary v": spec.vocab_size,
        "embeddings tied": spec.tie_word_embeddings,
        **{f"layers with {_NAMES.get(kind, kind)}": count for kind, count in mixers.items()},
        "layers with an indexer of their own": owners or None,
        **{f"layers with {'experts' if kind == 'moe' else 'a dense MLP'}": count for kind, count in parts.items()},
        "longest context it was made for": spec.max_position_embeddings,
        "weights stored as": f"{spec.quantization.method}, {spec.quantization.weight_bits} bits" if spec.quantization else spec.dtype,
        "weights and activations on the server": dtype,
    }
    rows |= {"not counted": ", ".join(spec.not_counted) or None}
    return [row for row in pairs(rows) if row["value"] is not None]


# Lines of the bars: weights that belong together.
_PARTS = {
    "attention": "attention",
    "indexer": "attention",
    "mixer": "attention",
    "experts": "experts",
    "mlp": "MLP",
    "shared_expert": "MLP",
    "embedding": "embedding and head",
    "lm_head": "embedding and head",
    "mtp": "draft layers",
}


def kinds(spec: ModelSpec) -> list[tuple[Layer, int]]:
    """One layer of each kind with how many of them there are, in order of appearance."""
    found: dict[tuple, tuple[Layer, int]] = {}
    for layer in spec.layers:
        # Parts too: one layer of Qwen3.8 has an n-gram projection that the others lack, and the sum over kinds has to be the model's.
        key = (layer.attention, layer.mlp, layer.norms, layer.parts, layer.short_conv)
        found[key] = (found.get(key, (layer, 0))[0], found.get(key, (layer, 0))[1] + 1)
    return list(found.values())


def layer_weights(spec: ModelSpec, dtype: str) -> Rows:
    """Every weight of one layer of each kind: rows x columns, how it is stored, bytes when loaded on one rank."""
    rows: Rows = []
    for layer, count in kinds(spec):
        whole = 0
        for one in weights.components(layer, spec):
            size = weights.rank_bytes(one, spec, 1, False, dtype)
            whole += size
            shape_text = f"{one.rows:,}" if one.cols is None else f"{one.rows:,} x {one.cols:,}"
            rows.append(
                {
                    "layers": f"{count} like layer {layer.index}",
                    "weight": one.name,
                    "rows x columns": f"{one.count:,} x ({shape_text})" if one.count > 1 else shape_text,
                    "stored as": f"{one.scheme.weight_bits} bits" if one.scheme else dtype,
                    "TP": one.sharding,
                    "bytes": size,
                }
            )
        rows.append(
            {"layers": f"{count} like layer {layer.index}", "weight": "one layer", "rows x columns": None, "stored as": None, "TP": None, "bytes": whole}
        )
    return rows


def worked_weights(spec: ModelSpec, dtype: str) -> str:
    """The checkpoint as a sum, in Markdown: formula, substitution, bytes, GiB."""
    terms, plain = [], memory.DTYPE_BYTES[dtype]
    sizes = weights.layer_rank_bytes(spec, tensor_parallel_size=1, dtype=dtype)
    for layer, count in kinds(spec):
        terms.append(f"{count} · {sizes[layer.index]:,}")
    copies = 1 if spec.tie_word_embeddings else 2
    whole = memory.checkpoint_bytes(spec, dtype)
    both, tied = copies * spec.vocab_size * spec.hidden_size * plain, " (tied, held once)" if copies == 1 else " and lm_head"
    rest = whole - sum(sizes) - both
    return f"""
| step | formula | substitution | result |
|---|---|---|---|
| layers | count · bytes of one, for each kind | {" + ".join(terms)} | {sum(sizes):,} B |
| embedding{tied} | {copies} · v · h · b | {copies} · {spec.vocab_size:,} · {spec.hidden_size:,} · {plain} | {both:,} B |
| outside the layers | final norm and what the model has besides | | {rest:,} B |
| on one rank | sum | | {whole:,} B |
| in GiB | bytes / 2³⁰ | {whole:,} / 1,073,741,824 | **{gib(whole):.4f} GiB** |
"""


def worked_pool(pool: Pool, max_model_len: int) -> str:
    """From the binding rank's blocks to the token count that vLLM logs, in Markdown."""
    tight = pool.ranks[pool.binding_rank]
    each = " + ".join(f"{group.blocks_per_request:,} ({group.kind})" for group in pool.groups)
    return f"""
Rank {tight.rank} binds: ⌊{tight.available_kv_bytes:,} B / {tight.kv_bytes_per_block:,} B⌋ = {pool.blocks:,} blocks of {pool.block_size_tokens} tokens.
A request of {max_model_len:,} tokens takes {each} = {pool.blocks_per_request:,} blocks, so {pool.max_concurrency:.2f} of them fit at once:
⌊{pool.blocks:,} / {pool.blocks_per_request:,} · {max_model_len:,}⌋ = **{pool.pool_tokens:,} tokens**.
"""


def document(pool: Pool) -> list[dict[str, Any]]:
    """The ranks as `fieldbook memory --json` prints them: GiB beside the bytes that everything was computed with."""
    rows = []
    for r in pool.ranks:
        row = {"rank": r.rank, "layers": r.layers, "draft_layers": r.draft_layers, "indexers": r.indexers, "weights_gib": gib(r.weights_bytes)}
        row |= {"weights_bytes": r.weights_bytes, "weights_by_component_bytes": r.weights_by_component, "kv_bytes_per_token": r.kv_bytes_per_token}
        row |= {"state_bytes": r.state_bytes, "kv_bytes_per_block": r.kv_bytes_per_block, "available_gib": gib(r.available_kv_bytes)}
        row |= {
            "available_kv_bytes": r.available_kv_bytes,
            "blocks": r.blocks,
            "pool_tokens": r.blocks * pool.block_size_tokens if len(pool.groups) == 1 else None,
        }
        rows.append(row | {"budget": asdict(r.budget) if r.budget else None})
    return rows


def ranks(pool: Pool) -> list[dict[str, Any]]:
    """The ledger as receipts hold it."""
    return [asdict(r) for r in pool.ranks]


def on_disk(spec: ModelSpec, folder: Path) -> Rows:
    """Formula and safetensors headers side by side, component by component; no weights are loaded. Empty when there is no checkpoint in the folder."""
    if not any(folder.glob("*.safetensors")):
        return []
    found = safetensors_headers.compare(spec, safetensors_headers.read_folder(folder))
    rows = [
        {"weight": r.component, "modules": r.modules, "formula, B": r.formula_bytes, "headers, B": r.header_bytes, "residual, B": r.residual_bytes}
        for r in found
    ]
    total = {"weight": "all", "modules": sum(r.modules for r in found), "formula, B": sum(r.formula_bytes for r in found)}
    total |= {"headers, B": sum(r.header_bytes for r in found), "residual, B": sum(r.residual_bytes for r in found)}
    return [*rows, total]


def token_bytes(spec: ModelSpec, params: Params) -> Rows:
    """Bytes that a token (or a request's state) takes in one layer of each kind on one rank, with the substitution."""
    tp, rows = params.parallel.tensor_parallel_size, []
    cache = memory.cache_dtype(spec, params)
    setup = kv.setup_of(
        replace(spec, dtype=params.engine.dtype),
        tensor_parallel_size=tp,
        cache_dtype=cache,
        state_dtype=params.engine.state_dtype,
        draft_tokens=params.engine.draft_tokens,
        device=params.engine.device,
        release=params.engine.vllm_release,
    )
    seen = collections.Counter(layer.attention for layer in spec.layers)
    for attention, count in seen.items():
        rows += _token_rows(attention, count, setup, tp)
    return rows


def _token_rows(attention: Attention, count: int, setup: kv.Setup, tp: int) -> Rows:
    name, rows = _NAMES.get(attention.kind, attention.kind), []
    if attention.kind in kv.STATE_KINDS:
        dtypes = {"model_dtype": setup.model_dtype, "state_dtype": setup.state_dtype}
        size = kv.state_bytes(attention, tp, draft_tokens=setup.draft_tokens, **dtypes)
        return [
            {"layers": count, "what": f"{name}: state", "formula": "one state for each request, whatever its length", "B per token": None, "B per state": size}
        ]
    if attention.kind == "none" or attention.kv_shared:
        return []
    size = kv.kv_bytes_per_token(attention, tp, setup.cache_dtype)
    if attention.kv_lora_rank:
        formula = f"latent {attention.kv_lora_rank} + rope {attention.rope_head_dim}, as {setup.cache_dtype}; the same on every TP rank"
    else:
        heads = max(1, attention.kv_heads // tp)
        formula = f"2 (K and V) x {heads} KV heads x {attention.head_dim}, as {setup.cache_dtype}"
    if attention.window:
        formula += f"; at most {attention.window:,} tokens are kept"
    rows.append({"layers": count, "what": name, "formula": formula, "B per token": size, "B per state": None})
    if attention.indexer and attention.indexer.owns:
        index, ratio = kv.indexer_bytes_per_token(attention), attention.indexer.compress_ratio
        keys = "8 bits + scale" if attention.kind == "sparse_mla" else "bfloat16" + (f", one key for {ratio} tokens" if ratio > 1 else "")
        rows.append(
            {"layers": count, "what": "indexer's keys", "formula": f"{attention.indexer.head_dim} in {keys}", "B per token": index, "B per state": None}
        )
    return rows


def ledger(pool: Pool) -> Rows:
    """Every rank's weights, KV space, bytes and blocks; with the terms of the budget where they were needed."""
    rows = []
    for r in pool.ranks:
        row: dict[str, Any] = {
            "rank": r.rank,
            "layers": f"{r.layers} + {r.draft_layers} draft" if r.draft_layers else r.layers,
            "weights GiB": gib(r.weights_bytes),
        }
        if r.budget:
            row |= {"other GiB": f"{gib(r.budget.other_bytes):.2f} ± {gib(r.budget.error_bytes):.2f}"}
        row |= {"KV space GiB": gib(r.available_kv_bytes), "B per token": r.kv_bytes_per_token}
        if any(one.state_bytes for one in pool.ranks):
            row |= {"B of state": r.state_bytes}
        rows.append(row | {"B per block": r.kv_bytes_per_block, "blocks": r.blocks, "binds": r.rank == pool.binding_rank})
    return rows


def after_launch(pool: Pool, log: BootLog, gpu_used_bytes: dict[int, int] | None = None) -> Rows:
    """The ledger beside the boot log and NVML, quantity by quantity, with the residual; what the log does not tell is empty."""
    rows = [("KV pool, tokens", pool.pool_tokens, log.pool_tokens), ("longest requests at once", round(pool.max_concurrency, 2), log.max_concurrency)]
    for r in pool.ranks:
        told = [one for one in log.ranks if (one.pp_rank or 0) == r.rank]

        def most(name: str, told=told) -> float | None:
            return max((value for one in told if (value := getattr(one, name)) is not None), default=None)

        rows.append((f"rank {r.rank}: KV space, GiB", gib(r.available_kv_bytes), log.available_kv_gib.get(r.rank)))
        # The log counts rotary and top-k tables among the weights.
        loaded = r.weights_bytes + (r.budget.buffers_bytes if r.budget else 0)
        if most("weights_gib") is not None:
            rows.append((f"rank {r.rank}: weights, GiB", gib(loaded), most("weights_gib")))
        if r.budget and most("consumed_gib") is not None:
            rows.append((f"rank {r.rank}: weights and outside torch, GiB", gib(loaded + r.budget.non_torch_bytes), most("consumed_gib")))
        if r.budget and most("peak_activation_gib") is not None:
            # Release 0.30 counts the estimate of the graphs in.
            rows.append((f"rank {r.rank}: activations and graphs, GiB", gib(r.budget.activation_bytes + r.budget.graphs_bytes), most("peak_activation_gib")))
        if gpu_used_bytes and r.rank in gpu_used_bytes:
            other = r.budget.other_bytes if r.budget else 0
            held = r.weights_bytes + other + pool.blocks * r.kv_bytes_per_block
            rows.append((f"rank {r.rank}: all of it, GiB (NVML beside it)", gib(held), gib(gpu_used_bytes[r.rank])))
    return [{"quantity": name, "predicted": ours, "boot log": seen, "residual": None if seen is None else round(seen - ours, 3)} for name, ours, seen in rows]


def logged_terms(log: BootLog, stages: int) -> list[dict[str, float]]:
    """What a boot log tells of each stage besides weights and cache, for the estimate of a later run; empty unless it tells it of all."""
    rows = []
    for stage in range(stages):
        told = [r for r in log.ranks if (r.pp_rank or 0) == stage and None not in (r.consumed_gib, r.weights_gib, r.peak_activation_gib)]
        if not told:
            return []
        outside = max(r.consumed_gib - r.weights_gib for r in told)
        rows.append({"non_torch_gib": round(max(0.0, outside), 2), "peak_activation_gib": max(r.peak_activation_gib for r in told)})
    return rows


def limits(pool: Pool) -> Rows:
    """What vLLM may take of each rank's GPU, as lines across the stacked bars; none where the KV space was given."""
    return [{"rank": f"rank {r.rank}", "GiB": gib(r.budget.requested_bytes)} for r in pool.ranks if r.budget]


def parts(pool: Pool) -> Rows:
    """Weights by component and KV space of each rank in GiB, for the stacked bars."""
    rows = []
    for r in pool.ranks:
        grouped: collections.Counter[str] = collections.Counter()
        for name, size in r.weights_by_component.items():
            grouped[_PARTS.get(name, "other weights")] += size
        for name in dict.fromkeys(_PARTS.values()):
            if grouped[name]:
                rows.append({"rank": f"rank {r.rank}", "part": name, "GiB": gib(grouped[name])})
        if grouped["other weights"]:
            rows.append({"rank": f"rank {r.rank}", "part": "other weights", "GiB": gib(grouped["other weights"])})
        if r.budget:
            rows.append({"rank": f"rank {r.rank}", "part": "tables", "GiB": gib(r.budget.buffers_bytes)})
            for name, size in (("outside torch", r.budget.non_torch_bytes), ("activations", r.budget.activation_bytes), ("graphs", r.budget.graphs_bytes)):
                rows.append({"rank": f"rank {r.rank}", "part": f"{name} (estimated)", "GiB": gib(size)})
        used = pool.blocks * r.kv_bytes_per_block
        rows.append({"rank": f"rank {r.rank}", "part": "KV pool", "GiB": gib(used)})
        rows.append({"rank": f"rank {r.rank}", "part": "KV space left over", "GiB": gib(max(0, r.available_kv_bytes - used))})
    return rows


def capacity(params: Params, spec: ModelSpec, split: tuple[int, ...] | list[int], gpus: Gpus | None = None) -> Rows:
    """How many requests of a length are resident at once, from 1K to the model's own limit, at otherwise these params."""
    rows, length = [], 1024
    lengths = []
    while length < params.engine.max_model_len:
        lengths.append(length)
        length *= 2  # 128K is among them: that is what people ask for
    for tokens in [*lengths, params.engine.max_model_len]:
        found = memory.pool(with_engine(params, max_model_len=tokens), spec, split, gpus=gpus, must_fit=False)
        resident = (found.blocks - 1) // found.blocks_per_request
        rows.append(
            {
                "request, tokens": tokens,
                "blocks": found.blocks_per_request,
                "resident at once": max(0, resident),
                "as vLLM logs it": round(found.max_concurrency, 2),
            }
        )
    return rows


def what_if(params: Params, spec: ModelSpec, split: tuple[int, ...] | list[int], gpus: Gpus | None = None) -> Rows:
    """The pool when one thing changes: the cache's type, drafting, or the layout where the KV space of another layout can be told."""
    engine = params.engine
    changes: list[tuple[str, dict[str, Any], tuple[int, ...], int | None]] = [("as it is", {}, tuple(split), None)]
    sparse = any(layer.attention.kind == "sparse_mla" for layer in spec.layers)
    for dtype in ("bfloat16", "fp8_ds_mla" if sparse else "fp8"):
        if engine.device != "cpu" and dtype != memory.cache_dtype(spec, params):
            changes.append((f"KV cache as {dtype}", {"kv_cache_dtype": dtype}, tuple(split), None))
    if spec.mtp_layers:
        change = ("without drafting", {"draft_tokens": 0}) if engine.draft_tokens else ("with MTP drafting 1 token", {"draft_tokens": 1})
        changes.append((*change, tuple(split), None))
    if any(layer.attention.kind in kv.STATE_KINDS for layer in spec.layers):
        turned = ("without prefix caching", {"prefix_caching": False}) if engine.prefix_caching else ("with prefix caching", {"prefix_caching": True})
        changes.append((*turned, tuple(split), None))
    # The space that was given is this layout's; another's is estimated from its cards.
    told = bool(engine.available_kv_gib) and engine.kv_cache_gib_per_rank is None
    other, how = ({"available_kv_gib": []}, ", space estimated") if told else ({}, "")
    changes += [
        (f"TP{t} x PP{p}, vLLM's split{how}", other, splits.default_split(spec.num_hidden_layers, p), t) for t, p in _layouts(params, spec, len(split), gpus)
    ]
    rows = []
    for name, change, layers, ranks in changes:
        row: dict[str, Any] = {"change": name, "pool tokens": None, "binding rank": None, "B per token there": None}
        try:
            found = memory.pool(with_engine(params, **change), spec, layers, tensor_parallel_size=ranks, gpus=gpus, must_fit=False)
            tight = found.ranks[found.binding_rank]
            row |= {"pool tokens": found.pool_tokens, "binding rank": found.binding_rank, "B per token there": tight.kv_bytes_per_token}
        except BadInput as error:
            row["B per token there"] = f"refused: {error}"
        rows.append(row)
    return rows


def beside(pool: memory.Pool | None, name: str, params: Params) -> str:
    """The pool of the other arm for the verdict line, with what is wrong with it."""
    if pool is None:
        return f"that of {name} is not computed: memory unknown"
    return f"{pool.pool_tokens:,} at {name}{shortfall(pool, params)}"


def shortfall(pool: memory.Pool, params: Params) -> str:
    """What to say behind a pool that is too small for the longest request; empty where it is not."""
    if pool.holds_longest_request:
        return ""
    return f", too few for one request of {params.engine.max_model_len:,} tokens: vLLM would not start it"


def _layouts(params: Params, spec: ModelSpec, stages: int, gpus: Gpus | None) -> list[tuple[int, int]]:
    """Other layouts (TP, PP): over as many GPUs where their memory is known, or fewer and more stages where each is given its KV space."""
    tp, heads = params.parallel.tensor_parallel_size, memory.heads(spec)[0]
    if params.engine.kv_cache_gib_per_rank is not None:
        found = [(tp, n) for n in (1, 2, 4) if n <= spec.num_hidden_layers]
    elif gpus is not None and any(gpus.total_bytes):
        ranks = tp * stages
        found = [(n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0 and heads % n == 0 and ranks // n <= spec.num_hidden_layers]
    else:
        found = []
    return [layout for layout in found if layout != (tp, stages)]


def with_engine(params: Params, **changes: Any) -> Params:
    """The same params with some keys of the engine section changed."""
    return params.model_copy(update={"engine": params.engine.model_copy(update=changes)})
