"""Token for token: does a layout, stock or patched, compute what a reference computes? Arms that ran on hardware, and the claims that rest on them.

`tools/equality/prove.py` runs the arms; data/boxes/<box>/equality.json keeps what each answered or how it ended. Here the claims are worked out again from
that, so that no count is typed in anywhere.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from . import kv, memory, partition, paths
from .errors import BadInput
from .params import Params, validate

Expected = Literal["same", "other", "differs", "ends"]
FILE = "equality.json"
# A silent fault of a cut changes nearly every token; where kernels merely add up in another order, a greedy choice between equals flips now and then.
OTHER_SHARE = 0.5


@dataclass(frozen=True)
class Likeness:
    """Two arms that answered the same prompts: tokens that agree, tokens in all, and the largest difference of a token's log-probability."""

    same: int
    tokens: int
    logprob_difference: float

    def shown(self) -> str:
        """'144 of 144 tokens, log-probabilities identical'."""
        apart = "identical" if self.logprob_difference == 0 else f"at most {self.logprob_difference:.3g} apart"
        return f"{self.same} of {self.tokens} tokens, log-probabilities {apart}"


@dataclass(frozen=True)
class Claim:
    """One claim and what became of it. patch: the defect of the catalogue that it is about, '' for none; predicted and measured are words; holds None: an
    arm has not run."""

    box: str
    patch: str
    says: str
    arm: str
    predicted: str
    measured: str
    holds: bool | None

    def row(self) -> dict[str, Any]:
        """For a table."""
        return {"claim": self.says, "predicted": self.predicted, "measured": self.measured, "holds": self.holds}


def likeness(ours: dict[str, Any], theirs: dict[str, Any]) -> Likeness:
    """How far two arms agree. Raises BadInput for arms that were asked different things."""
    pairs = list(zip(ours["runs"], theirs["runs"], strict=False))
    alike = all(a["prompt_tokens"] == b["prompt_tokens"] and len(a["tokens"]) == len(b["tokens"]) for a, b in pairs)
    if len(ours["runs"]) != len(theirs["runs"]) or not alike:
        raise BadInput("equality: the two arms were asked different prompts")
    same = sum(x == y for a, b in pairs for x, y in zip(a["tokens"], b["tokens"], strict=True))
    apart = max((abs(x - y) for a, b in pairs for x, y in zip(a["logprobs"], b["logprobs"], strict=True)), default=0.0)
    return Likeness(same, sum(len(a["tokens"]) for a, _ in pairs), round(apart, 5))


def judged(claim: dict[str, Any], arms: dict[str, Any], box: str) -> Claim:
    """One claim of the file against its arms.

    expect: same (every token, and log-probabilities within `apart`, 0 by default), other (fewer than half of the tokens), differs (not every token), or ends
    (an exception with `words` in it), of the arm `arm` against `like`.
    """
    expect, name = claim["expect"], claim["arm"]
    told = {"box": box, "patch": claim.get("patch", ""), "says": claim["says"], "arm": name}
    if expect == "ends":
        told["predicted"] = f"ends with {claim['words']!r}"
    else:
        within = f"within {claim['apart']:g}" if claim.get("apart") else "identical"
        as_words = {"same": f"as {claim['like']}: every token, log-probabilities {within}", "other": f"other tokens than {claim['like']}"}
        told["predicted"] = as_words.get(expect, f"not every token of {claim['like']}")
    lacking = [one for one in (name, claim.get("like")) if one and one not in arms]
    if lacking:
        return Claim(**told, measured=f"not run: {', '.join(lacking)}", holds=None)
    arm = arms[name]
    if expect == "ends":
        error = arm.get("error", "")
        return Claim(**told, measured=error or "it ran", holds=arm["outcome"] != "ran" and claim["words"] in error)
    failed = next((one for one in (name, claim["like"]) if arms[one]["outcome"] != "ran"), None)
    if failed:
        return Claim(**told, measured=f"{failed} {arms[failed]['outcome']}: {arms[failed].get('error', '')[:200]}", holds=False)
    found = likeness(arm, arms[claim["like"]])
    whole = found.same == found.tokens
    holds = {"same": whole and found.logprob_difference <= claim.get("apart", 0.0), "other": found.same < OTHER_SHARE * found.tokens, "differs": not whole}
    return Claim(**told, measured=found.shown(), holds=holds[expect])


def params_of(arm: dict[str, Any], vllm_release: str = "0.30") -> Params:
    """The arm as a params file would ask for it, for the ledger."""
    asked = arm["engine"]
    drafts, given = asked.get("speculative_config") or {}, asked.get("kv_cache_memory_bytes")
    # The arms with an 8-bit cache are of sparse latent attention, where vLLM takes fp8 for this layout.
    cache = {"fp8": "fp8_ds_mla"}.get(asked.get("kv_cache_dtype"), "auto")
    sizes = {"tensor_parallel_size": arm["tensor"], "pipeline_parallel_size": arm["pipeline"]}
    engine = {
        "device": "cuda", "dtype": asked["dtype"], "kv_cache_dtype": cache, "max_model_len": asked["max_model_len"], "max_num_seqs": asked["max_num_seqs"],
        "max_num_batched_tokens": asked["max_num_batched_tokens"], "enforce_eager": asked["enforce_eager"], "prefix_caching": asked["enable_prefix_caching"],
        "draft_tokens": drafts.get("num_speculative_tokens", 0), "state_dtype": asked.get("mamba_ssm_cache_dtype", "auto"), "vllm_release": vllm_release,
        "kv_cache_gib_per_rank": given // 2**30 if given else None, "gpu_memory_utilization": asked["gpu_memory_utilization"],
    }  # fmt: skip
    split = {"layer_partition": arm["split"] or "default", "index_sharing": "relay"}
    lengths = {"benchmarks": {"prefill_tokens": [32], "decode_output_tokens": 32}}
    box = {"box": {"name": "arm"}, "model": {"name": arm["model"], "source": "dummy"}}
    return validate({**box, "engine": engine, "parallel": sizes | split, **lengths}, f"arm of {arm['model']}")


def blocks(arm: dict[str, Any]) -> dict[str, int] | None:
    """{"blocks", "block_size_tokens"} that the ledger gives an arm whose KV space was set by hand, or told in bytes; None for one that tells no cache."""
    if arm["outcome"] != "ran" or "state=" in arm["equality"]:
        return None
    params = params_of(arm)
    spec = memory.model_spec(arm["model"])
    split = partition.resolve_split(params.parallel, spec)
    if arm["space_bytes"]:
        told = kv.pool(
            memory.server_spec(params, spec), list(split), [int(arm["space_bytes"][rank]) for rank in sorted(arm["space_bytes"])], index_sharing="relay",
            **memory.kv_engine(params, spec, len(split), memory.layout_of(params)),
        )  # fmt: skip
    else:
        told = memory.pool(params, spec, split)
    return {"blocks": told.blocks, "block_size_tokens": told.block_size_tokens}


def read(box: str) -> dict[str, Any]:
    """data/boxes/<box>/equality.json: {"machine", "vllm", "measured_at", "claims", "arms"}. Raises BadInput where it is missing or damaged."""
    return _read(paths.box_data_dir(box) / FILE)


@lru_cache
def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {key: found[key] for key in ("machine", "vllm", "measured_at", "claims", "arms")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"data/boxes/{file.parent.name}/{FILE}: cannot be read ({error}); tools/equality/prove.py makes it") from None


def claims_of(box: str) -> list[Claim]:
    """Every claim of a box, in the order of the file."""
    return _claims(paths.box_data_dir(box) / FILE)


@lru_cache
def _claims(file: Path) -> list[Claim]:
    # Each patch asks for its own, and they are all judged by the same arms.
    found = _read(file)
    return [judged(claim, found["arms"], file.parent.name) for claim in found["claims"]]


def boxes() -> list[str]:
    """Boxes with an equality file."""
    return sorted(file.parent.name for file in (paths.root() / "data" / "boxes").glob(f"*/{FILE}"))


def of_patch(defect_id: str) -> list[Claim]:
    """What hardware says of one defect of the catalogue, over all boxes."""
    return [claim for box in boxes() for claim in claims_of(box) if claim.patch == defect_id]


def proof_line(defect_id: str) -> str:
    """'NVIDIA H200, vLLM 0.30.0: 9 of 9 claims hold', '' where no hardware was asked."""
    lines = []
    for box in boxes():
        held = [claim.holds for claim in claims_of(box) if claim.patch == defect_id and claim.holds is not None]
        if held:
            about = read(box)
            lines.append(f"{about['machine']}, vLLM {about['vllm']}: {sum(held)} of {len(held)} claims hold")
    return "; ".join(lines)
