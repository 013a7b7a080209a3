"""Rows for the notebooks' tables: one function per table, a list of dictionaries each, nothing computed that is not in a station's module."""

from typing import Any

from .arms import Boot, layout_name
from .bench import Sample
from .inventory import Inventory
from .memory import ModelSpec, Pool
from .params import Baseline, Parallel
from .partition import Candidate
from .show import gib
from .verdict import Comparison

Rows = list[dict[str, Any]]


def pairs(values: dict[str, Any], left: str = "quantity", right: str = "value") -> Rows:
    """A mapping as two columns."""
    return [{left: key, right: value} for key, value in values.items()]


def host(box: Inventory) -> Rows:
    """System, processor, cores, instruction sets."""
    return pairs(
        {
            "system": box.system,
            "processor": box.cpu_model,
            "sockets": box.sockets,
            "cores": box.cores,
            "logical CPUs": box.logical_cpus,
            "instruction sets": ", ".join(box.isa) or None,
        }
    )


def numa(box: Inventory) -> Rows:
    """Memory of each node, and what the host has beside its nodes."""
    rows: Rows = [{"node": n.node, "CPUs": n.cpus, "GiB": gib(n.memory_total_bytes) if n.memory_total_bytes else None} for n in box.numa]
    outside = box.memory_total_bytes - sum(n.memory_total_bytes or 0 for n in box.numa)
    if outside > 0.02 * box.memory_total_bytes:
        rows.append({"node": "in no node", "CPUs": None, "GiB": gib(outside)})
    return [*rows, {"node": "whole host", "CPUs": box.logical_cpus, "GiB": gib(box.memory_total_bytes)}]


def gpus(box: Inventory) -> Rows:
    """One row per GPU; where there is none, the reason."""
    rows: Rows = [
        {
            "index": g.index,
            "name": g.name,
            "GiB": gib(g.memory_total_bytes) if g.memory_total_bytes else None,
            "sm": g.compute_capability,
            "PCIe": g.pcie_generation,
            "lanes": g.pcie_width_lanes,
        }
        for g in box.gpus
    ]
    return rows or [{"GPUs": "none", "why": "; ".join(box.notes)}]


def shape(spec: ModelSpec, dtype_bytes: int) -> Rows:
    """What of the model's config the arithmetic uses."""
    return pairs(
        {
            "layers": spec.num_hidden_layers,
            "hidden size h": spec.hidden_size,
            "MLP width f": spec.intermediate_size,
            "attention heads": spec.num_attention_heads,
            "KV heads": spec.num_key_value_heads,
            "head size": spec.head_dim,
            "query width q": spec.num_attention_heads * spec.head_dim,
            "KV width k": spec.num_key_value_heads * spec.head_dim,
            "vocabulary v": spec.vocab_size,
            "embeddings tied": spec.tie_word_embeddings,
            "bytes per element b": dtype_bytes,
        }
    )


def ledger(pool: Pool) -> Rows:
    """Every rank's weights, KV space, bytes and blocks."""
    return [
        {
            "rank": r.rank,
            "layers": r.layers,
            "weights GiB": gib(r.weights_bytes),
            "KV space GiB": gib(r.available_kv_bytes),
            "B per token": r.kv_bytes_per_token,
            "B per block": r.kv_bytes_per_block,
            "blocks": r.blocks,
            "binds": r.rank == pool.binding_rank,
        }
        for r in pool.ranks
    ]


def layouts(arms: list[tuple[Parallel | Baseline, tuple[int, ...], Pool]]) -> Rows:
    """Pool of each layout, for the chart."""
    return [{"layout": layout_name(arm, split), "tokens": pool.pool_tokens} for arm, split, pool in arms]


def splits(found: list[Candidate], chosen: Candidate, best: int = 5) -> Rows:
    """The best splits, the chosen one and the worst."""
    shown = found[:best]
    shown += [c for c in (chosen, found[-1]) if c not in shown]
    return [
        {
            "split": "+".join(map(str, c.layers_per_stage)),
            "pool tokens": c.pool.pool_tokens,
            "binding rank": c.pool.binding_rank,
            "straggler, layers": c.straggler_layers,
            "vLLM's default": c.is_default,
            "chosen": c == chosen,
        }
        for c in shown
    ]


def pool_by_first_stage(found: list[Candidate], chosen: Candidate) -> Rows:
    """Best pool for each number of layers on the first stage, for the chart."""
    best: dict[int, int] = {}
    for candidate in found:
        first = candidate.layers_per_stage[0]
        best[first] = max(best.get(first, 0), candidate.pool.pool_tokens)
    mark = chosen.layers_per_stage[0]
    return [{"layers on the first stage": n, "tokens": tokens, "split": "chosen" if n == mark else "other"} for n, tokens in sorted(best.items())]


def defects(rows: Rows) -> Rows:
    """State of each known defect."""
    return [
        {
            "defect": r["id"],
            "what it does": r["title"],
            "state": r["state"],
            "where": f"{r['file']}:{r['line']}",
            "met by this box": r["met_by_this_box"],
        }
        for r in rows
    ]


def startup(booted: Boot) -> Rows:
    """Start-up phases; with times for a live server."""
    return [{"phase": phase, "s after the launch": seconds} for phase, seconds in booted.phases] or [{"phase": phase} for phase in booted.log.phases]


def predicted_and_logged(pool: Pool, booted: Boot) -> Rows:
    """Pool, concurrency and each rank's KV space: predicted, from the boot log, and the residual."""
    log = booted.log
    values = [("KV pool, tokens", pool.pool_tokens, log.pool_tokens), ("longest requests at once", round(pool.max_concurrency, 2), log.max_concurrency)]
    values += [(f"rank {r.rank}: KV space, GiB", gib(r.available_kv_bytes), log.available_kv_gib.get(r.rank)) for r in pool.ranks]
    return [{"quantity": name, "predicted": ours, "boot log": seen, "residual": None if seen is None else round(seen - ours, 3)} for name, ours, seen in values]


def server_facts(name: str, booted: Boot) -> Rows:
    """Layout, version, runner and load times."""
    loads = ", ".join(f"rank {rank}: {seconds}" for rank, seconds in sorted(booted.log.weights_load_s.items()))
    return pairs({"layout": name, "vLLM": booted.log.vllm_version, "model runner": booted.log.runner, "weights loaded, s": loads or None}, "", "boot log")


def probes(answers: Rows) -> Rows:
    """Each probe with its answer."""
    return [
        {
            "prompt": a["prompt"],
            "answer": a["text"].strip(),
            "finish": a["finish_reason"],
            "tokens": a["completion_tokens"],
            "problems": ", ".join(a["problems"]) or None,
        }
        for a in answers
    ]


def speeds(summary: Rows, ceilings_tok_s: dict[str, float]) -> Rows:
    """Minimum, median and maximum of each point with its ceiling."""
    rows = []
    for row in summary:
        ceiling = ceilings_tok_s.get(row["metric"])
        share = f"{row['median'] / ceiling:.0%}" if row["median"] and ceiling else None
        rows.append({key: row[key] for key in ("metric", "samples", "void", "min", "median", "max")} | {"ceiling": ceiling, "of ceiling": share})
    return rows


def sample_dots(samples: list[Sample], names: dict[str, str] | None = None) -> Rows:
    """Every sound sample for the chart; with names the arms are told apart, without them each is just a sample."""
    return [{"metric": s.metric, "tok/s": round(s.value_tok_s, 2), "arm": (names or {}).get(s.arm, s.arm)} for s in samples if not s.void]


def void(samples: list[Sample]) -> Rows:
    """Void samples with the reasons."""
    return [{"metric": s.metric, "repetition": s.repetition, "tok/s": s.value_tok_s, "why": "; ".join(s.void)} for s in samples if s.void]


def arms(logs: dict[str, Any], answers: dict[str, Rows], names: dict[str, str]) -> Rows:
    """Both arms: layout, pool, sound answers."""
    return [
        {
            "arm": arm,
            "layout": names[arm],
            "KV pool, boot log": logs[arm].pool_tokens,
            "vLLM": logs[arm].vllm_version,
            "sound answers": f"{sum(not a['problems'] for a in answers[arm])} of {len(answers[arm])}",
        }
        for arm in names
    ]


def comparisons(found: list[Comparison], adjusted: dict[str, float], primary: str, names: dict[str, str]) -> Rows:
    """One row per metric: medians, ratio, p, band, interval, answer."""
    return [
        {
            "metric": c.metric + (" (primary)" if c.metric == primary else ""),
            names["candidate"]: c.candidate_median,
            names["baseline"]: c.baseline_median,
            "ratio": c.ratio,
            "p": c.p_value,
            "p, Holm": adjusted.get(c.metric),
            "A/A band": f"±{c.aa_band:.1%}",
            "90% interval": f"{c.interval[0]:.3f} to {c.interval[1]:.3f}",
            "answer": c.answer,
        }
        for c in found
    ]


def pools(predicted: dict[str, Pool], logs: dict[str, Any], names: dict[str, str]) -> Rows:
    """Pool of both arms: predicted, logged, residual."""
    rows = []
    for arm in names:
        ours, seen = predicted[arm].pool_tokens, logs[arm].pool_tokens
        rows.append({"layout": names[arm], "predicted": ours, "boot log": seen, "residual": None if seen is None else seen - ours})
    return rows
