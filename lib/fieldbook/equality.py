"""Token for token: does a layout, stock or patched, compute what a reference computes? Arms that ran on hardware, and the claims that rest on them.

`tools/equality/prove.py` runs the arms; data/boxes/<box>/equality.json keeps what each answered or how it ended. Here the claims are worked out again from
that, so that no count is typed in anywhere.
"""

import statistics
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from . import files, kv, memory, partition, paths
from .likeness import likeness, nearest, repeats
from .params import Params, validate

Expected = Literal["same", "among", "other", "differs", "ends"]
FILE = "equality.json"
# A silent fault of a cut changes nearly every token; where kernels merely add up in another order, a greedy choice between equals flips now and then.
OTHER_SHARE = 0.5


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


def judged(claim: dict[str, Any], arms: dict[str, Any], box: str) -> Claim:
    """One claim of the file against its arms.

    expect: same (every token, and log-probabilities within `apart`, 0 by default), among (the same, of any answer that `like` gave to the prompt: for one
    that does not repeat itself), other (fewer than half of the tokens), differs (not every token), or ends (an exception with `words` in it), of the arm
    `arm` against `like`.
    """
    expect, name = claim["expect"], claim["arm"]
    told = {"box": box, "patch": claim.get("patch", ""), "says": claim["says"], "arm": name}
    if expect == "ends":
        told["predicted"] = f"ends with {claim['words']!r}"
    else:
        within = f"within {claim['apart']:g}" if claim.get("apart") else "identical"
        as_words = {
            "same": f"as {claim['like']}: every token, log-probabilities {within}",
            "among": f"each answer as one of {claim['like']}: every token, log-probabilities {within}",
            "other": f"other tokens than {claim['like']}",
        }
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
    found = (nearest if expect == "among" else likeness)(arm, arms[claim["like"]])
    whole = found.same == found.tokens
    equal = whole and found.logprob_difference <= claim.get("apart", 0.0)
    holds = {"same": equal, "among": equal, "other": found.same < OTHER_SHARE * found.tokens, "differs": not whole}
    itself = repeats(arms[claim["like"]]) if expect == "among" else None
    aside = f" ({claim['like']} repeats itself in {itself.same} of {itself.tokens})" if itself else ""
    return Claim(**told, measured=found.shown() + aside, holds=holds[expect])


@dataclass(frozen=True)
class Cost:
    """What a patch costs. step_s, prefill_s: (median with it, median without it) of a decode step of `streams` streams and of a prompt of `prefill_tokens`;
    the noise of each is the largest ratio between medians of equal arms, less one. added_bytes_per_token: what it adds to a boundary."""

    patch: str
    says: str
    streams: int
    prefill_tokens: int
    step_s: tuple[float, float]
    prefill_s: tuple[float, float]
    step_noise: float
    prefill_noise: float
    added_bytes_per_token: int

    def shown(self) -> str:
        """'a decode step of 8 streams takes 4.77 ms against 4.58 (+4.1%; equal arms differ by 3.5%), a prompt of ...'."""
        parts = []
        for what, (ours, theirs), noise in (
            (f"a decode step of {self.streams} streams", self.step_s, self.step_noise),
            (f"a prompt of {self.prefill_tokens:,} tokens", self.prefill_s, self.prefill_noise),
        ):
            parts.append(f"{what} takes {ours * 1e3:.3g} ms against {theirs * 1e3:.3g} ({ours / theirs - 1:+.1%}; equal arms differ by {noise:.1%})")
        return f"{self.says}: {', '.join(parts)}"


def cost(told: dict[str, Any], arms: dict[str, Any]) -> Cost:
    """One entry of `costs`: {"patch", "says", "with": arms, "without": arms}, all timed alike. Medians are of all samples of the arms together."""
    ours, theirs = ([arms[name]["times"] for name in told[key]] for key in ("with", "without"))

    def medians(key: str) -> tuple[float, float]:
        pooled = [statistics.median([sample for times in group for sample in times[key]]) for group in (ours, theirs)]
        return pooled[0], pooled[1]

    def noise(key: str) -> float:
        each = [[statistics.median(times[key]) for times in group] for group in (ours, theirs)]
        return max(max(group) / min(group) - 1 for group in each)

    # The relay alone sends more than stock does.
    added = partition.sharing.relay_bytes_per_token(memory.model_spec(arms[told["with"][0]]["model"])) if told["patch"] == "index-relay" else 0
    return Cost(
        told["patch"], told["says"], ours[0]["streams"], ours[0]["prefill_tokens"], medians("step_s"), medians("prefill_s"), noise("step_s"),
        noise("prefill_s"), added,
    )  # fmt: skip


def costs_of(box: str) -> list[Cost]:
    """What the patches cost on that box, as far as all arms of an entry have run."""
    found = read(box)
    return [cost(one, found["arms"]) for one in found["costs"] if all(name in found["arms"] for name in [*one["with"], *one["without"]])]


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
        "kv_cache_gib_per_rank": given // 2**30 if given else None, "gpu_memory_utilization": asked.get("gpu_memory_utilization", 0.9),
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
    """data/boxes/<box>/equality.json: {"machine", "vllm", "measured_at", "claims", "costs", "arms"}. Raises BadInput where it is missing or damaged."""
    return _read(paths.box_data_dir(box) / FILE)


def _read(file: Path) -> dict[str, Any]:
    return files.read_of_box(file, ("machine", "vllm", "measured_at", "claims", "costs", "arms"), "tools/equality/prove.py")


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
            costs = "".join(f"; {one.shown()}" for one in costs_of(box) if one.patch == defect_id)
            lines.append(f"{about['machine']}, vLLM {about['vllm']}: {sum(held)} of {len(held)} claims hold{costs}")
    return "; ".join(lines)
