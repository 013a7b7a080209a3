"""What went wrong on the way in the field reports, each put once more to the check that catches it now: a row says what the check answers, not what we hope."""

from pathlib import Path
from typing import Any

from .. import gates, kv, partition, patches, splits
from ..live import Answer
from ..memory_tables import with_engine
from ..patches import evidence
from ..schema import Baseline, Parallel
from ..strategy import fabric_of, strategies
from .source import Source

Rows = list[dict[str, Any]]


def rows(source: Source) -> Rows:
    """The wrong turns of a report; empty for a report without any that are known."""
    return {"cmp170hx-x3": _cmp170hx, "a100-x8-glm53": _glm53}.get(source.params.box.name, lambda s: [])(source)


def _row(turn: str, check: str, says: str, caught: bool) -> dict[str, Any]:
    return {"wrong turn": turn, "what is checked now": check, "asked with it, it says": says, "": "caught" if caught else "NOT CAUGHT"}


def _cmp170hx(s: Source) -> Rows:
    return [_file_that_is_not_used(), _block_size_by_hand(s), _ruled_out_by_assumption(s)]


def _file_that_is_not_used() -> dict[str, Any]:
    """A rank that imports the patched file and runs another one."""
    name = "ple-containment"
    file, symbol = evidence.places([name])[0]
    place = {"file": file, "symbol": symbol, "state": "unused", "sha256": "", "same": True, "path": ""}
    answer = Answer(pid=1, rank=0, pp_rank=0, tp_rank=0, places=(place,), runners=("GPUModelRunner",))
    said = evidence.problems(evidence.rows(Path("no-such-tree"), [name], [answer]))
    return _row(
        "a guard was mended in a file that the active path does not load", "each rank says which code it runs (notebooks 04, 05)", "; ".join(said), bool(said)
    )


def _block_size_by_hand(s: Source) -> dict[str, Any]:
    turned = with_engine(s.params, block_size_tokens=1600, state_dtype="bfloat16")
    split = splits.resolve_split(turned.parallel, s.spec)
    found = {row["gate"]: row for row in gates.check(gates.look(turned, turned.parallel, split, box=s.box))}
    told = [found[name] for name in ("state dtype", "block size") if found.get(name, {}).get("result") in ("refuse", "warn")]
    says = "; ".join(f"{row['gate']}: {row['result']}, {row['reason']}" for row in told)
    return _row(
        "blocks of 1,600 tokens were set by hand, which hid that stages disagreed on the type of their state (832 against 1,600)",
        "gates before the launch",
        says,
        [row["result"] for row in told] == ["refuse", "warn"],
    )


def _ruled_out_by_assumption(s: Source) -> dict[str, Any]:
    fabric = fabric_of(s.box, s.params.parallel.ranks)
    sizes = tuple(gpu.memory_total_bytes for gpu in s.box.gpus)
    every = {o.strategy.name: o for o in strategies(s.params, s.spec, fabric, sizes)}
    pipeline, experts = every["PP3"], every["DP3 + EP"]
    unfounded = [name for name, o in every.items() if any(not veto.source for veto in o.vetoes)]
    ratio = pipeline.prefill_at_most_tok_s / experts.prefill_at_most_tok_s
    says = f"PP3: {'ruled out' if pipeline.vetoes else 'can run'}, its links allow {ratio:.0f} times the prefill of DP3 + EP"
    says += f"; {', '.join(unfounded) or 'no layout'} is ruled out without a source"
    return _row(
        "a pipeline was taken for impossible with this model, and experts spread over slow links for the only way",
        "every layout, each veto with its place in vLLM (notebook 03)",
        says,
        not pipeline.vetoes and not unfounded and ratio > 1,
    )


def _glm53(s: Source) -> Rows:
    return [_even_rule(s), _linear_rule(s), _weights_that_are_not_there(s)]


def _even_rule(s: Source) -> dict[str, Any]:
    cut, even = 45, 39
    broken = [reason for rule in partition.rules_of(s.spec, 2, "clean") for reason in rule.broken_by(kv.stage_bounds(s.spec, (cut, 78 - cut)))]
    return _row(
        f"a guard took every split for an even one: it looked at layer {even}, and let 45+33 pass",
        "the cuts of the split itself",
        "; ".join(broken),
        any(str(cut) in reason for reason in broken),
    )


def _linear_rule(s: Source) -> dict[str, Any]:
    linear, logged = s.report.number("glm-pool-4137/linear"), s.report.number("glm-pool-4137")
    found = s.pool((41, 37), s.params.engine.available_kv_gib)
    ours, theirs = abs(found.pool_tokens / logged - 1), abs(linear / logged - 1)
    says = f"{found.pool_tokens:,} tokens, rank {found.binding_rank} binds ({ours:.2%} from the log; the rule is {theirs:.1%} off)"
    return _row("the pool of another split was scaled with the tightest GiB", "the ledger, rank by rank", says, ours < 0.0005 < theirs)


def _weights_that_are_not_there(s: Source) -> dict[str, Any]:
    own: Parallel | Baseline = s.params.parallel
    flips = kv.stage_flips(s.spec, [41, 37], "flip")
    refused = partition.flip_refused(s.params, s.spec, tuple(tuple(one) for one in flips))
    mend = patches.CATALOGUE["index-relay"]
    says = refused + (f"; {mend.id} needs no weights" if refused else "")
    return _row(
        "layers behind the cut were let compute indices of their own",
        f"weights of indexers in the checkpoint (index_sharing {own.index_sharing})",
        says,
        bool(refused),
    )
