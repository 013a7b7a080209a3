"""Speculative decoding by release, model runner and pipeline: which method runs where, and what `auto` comes to.

Read off vLLM 0.29, 0.30, 0.32 and 0.33; 0.31 is taken as 0.30. Sources: config/vllm.py:VllmConfig.use_v2_model_runner and
_get_v2_model_runner_unsupported_features, v1/worker/gpu/pp_utils.py:PPHandler, config/speculative.py.
"""

from dataclasses import dataclass
from typing import Literal

from .schema import Engine, Ranks
from .spec import ModelSpec

# What the second model runner drafts with; anything else goes to the first one, whose pipeline cannot pass drafted tokens.
_V2_29 = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark", "extract_hidden_states"})
_V2_32 = _V2_29 | {"ngram", "ngram_gpu", "draft_model"}
V2_METHODS = {29: _V2_29, 30: _V2_29, 31: _V2_29, 32: _V2_32, 33: _V2_32 | {"medusa", "mlp_speculator"}}
# These have a model of their own, which has to be named; ngram, suffix and mtp have none.
NEEDS_MODEL = frozenset({"eagle", "eagle3", "dflash", "dspark", "draft_model", "medusa", "mlp_speculator", "custom_class"})
V2_ONLY = frozenset({"dspark"})
# These read hidden states of layers in between, which cross a pipeline boundary only for model classes that say so.
AUXILIARY = frozenset({"eagle3", "dflash", "dspark", "extract_hidden_states"})
# Draft classes that a pipeline cannot have, by family. Sources: v1/worker/gpu/spec_decode/gemma4/speculator.py (verifies the draft with the target's PP),
# models/qwen3_next_mtp.py, exaone_moe_mtp.py, exaone4_5_mtp.py (ask for intermediate tensors that a draft on the last rank does not get),
# bailing_moe_mtp.py and bailing_moe_v3_mtp.py (no token embedding on the last rank, and none is shared with PP > 1).
NO_DRAFT_WITH_PP = {
    "gemma4": "its draft model is checked with the target's pipeline and refused",
    "qwen3_next": "its draft model asserts on the last stage",
    "exaone_moe": "its draft model asserts on the last stage",
    "exaone4_5": "its draft model asserts on the last stage",
    "bailing_moe": "its draft model has no token embedding on the last stage",
}


@dataclass(frozen=True)
class Judgement:
    """Whether a way of drafting runs with a layout: pass, warn or refuse, why, where it stands in vLLM, and what would be right."""

    result: Literal["pass", "warn", "refuse"]
    why: str
    source: str = ""
    ways_out: tuple[str, ...] = ()


def minor(release: str) -> int:
    """30 of '0.30' or '0.30.1'."""
    return int(release.split(".")[1])


def method_of(engine: Engine) -> str:
    """Who drafts: 'none' where nothing is drafted, 'mtp' for auto."""
    if not engine.draft_tokens or engine.draft_method == "none":
        return "none"
    return "mtp" if engine.draft_method == "auto" else engine.draft_method


def runner_of(engine: Engine, arm: Ranks) -> tuple[str, str]:
    """(model runner that vLLM will take, 'v1' or 'v2'; why), for vLLM on CUDA or a CPU."""
    if engine.runner != "auto":
        return engine.runner, f"engine.runner {engine.runner}"
    if engine.device == "cpu":
        # The second runner has CPU kernels in Triton, which vLLM's CPU wheels come without.
        return "v1", "no Triton on this CPU build"
    if arm.pipeline_parallel_size > 1:
        return "v2", "pinned, since PP > 1"
    method = method_of(engine)
    if method != "none" and method not in _v2_methods(engine):
        return "v1", f"runner v2 of {engine.vllm_release} does not draft with {method}"
    return "v2", "vLLM's default"


def _v2_methods(engine: Engine) -> frozenset[str]:
    return V2_METHODS[min(max(minor(engine.vllm_release), 29), 33)]


def judged(engine: Engine, arm: Ranks, spec: ModelSpec) -> Judgement:
    """Whether the asked way of drafting runs on this release with this layout."""
    method, release = method_of(engine), engine.vllm_release
    if method == "none":
        return Judgement("pass", "nothing is drafted")
    off = "engine.draft_tokens 0"
    if method == "mtp" and not spec.mtp_layers:
        return Judgement("refuse", f"{spec.name} has no layers of multi-token prediction", "config.json of the model", (off, "another engine.draft_method"))
    if method in NEEDS_MODEL and not engine.draft_model and "model" not in engine.draft_options:
        return Judgement("refuse", f"{method} needs a draft model", "config/speculative.py", ("engine.draft_model with its folder", off))
    if method == "extract_hidden_states" and engine.draft_tokens != 1:
        return Judgement("refuse", f"{method} takes 1 token, not {engine.draft_tokens}", "v1/spec_decode/extract_hidden_states.py", ("engine.draft_tokens 1",))
    runner, why = runner_of(engine, arm)
    if runner == "v2" and method not in _v2_methods(engine) and arm.pipeline_parallel_size == 1:
        reason = f"runner v2 of {release} does not draft with {method}"
        return Judgement("refuse", reason, "config/vllm.py:_get_v2_model_runner_unsupported_features", ("engine.runner auto, which takes v1", off))
    if runner == "v2" and method not in _v2_methods(engine):
        newer = next((f"vLLM 0.{n}" for n in sorted(V2_METHODS) if n > minor(release) and method in V2_METHODS[n]), "")
        return Judgement(
            "refuse",
            f"runner v2 of {release} does not draft with {method}, and runner v1 loses drafted tokens in a pipeline",
            "config/vllm.py:_get_v2_model_runner_unsupported_features",
            tuple(filter(None, (off, "engine.draft_method mtp" if spec.mtp_layers and minor(release) > 29 else "", newer, "pipeline_parallel_size 1"))),
        )
    if runner == "v1" and method in V2_ONLY:
        return Judgement("refuse", f"{method} is in runner v2 only, and this is v1 ({why})", "config/vllm.py", ("engine.runner auto", off))
    if method == "suffix":
        reason = f"suffix on runner {runner}: needs the package arctic-inference, which vLLM does not bring"
        return Judgement("warn", reason, "config/speculative.py", (off,)) if arm.pipeline_parallel_size == 1 else _lost_in_pipeline(engine, why, off)
    if arm.pipeline_parallel_size == 1:
        return Judgement("pass", f"{method} on runner {runner} ({why})")
    if runner == "v1":
        return _lost_in_pipeline(engine, why, off)
    if minor(release) <= 29:
        return Judgement(
            "refuse",
            "drafted tokens never reach the other stages in 0.29",
            "v1/worker/gpu/pp_utils.py:PPHandler, without broadcast_drafts",
            (off, "vLLM 0.30 or later", "pipeline_parallel_size 1"),
        )
    family = next((why for name, why in NO_DRAFT_WITH_PP.items() if method == "mtp" and spec.model_type.startswith(name)), "")
    if family:
        return Judgement("refuse", f"drafting with a pipeline: {family}", "vLLM 0.30 to 0.33", (off, "pipeline_parallel_size 1"))
    if method in AUXILIARY:
        return Judgement(
            "warn",
            f"{method} reads hidden states of inner layers, which cross a pipeline only for model classes with supports_aux_hidden_states_over_pp",
            "config/speculative.py; vLLM refuses the others at the start",
            (off,),
        )
    return Judgement("pass", f"{method} on runner v2, whose stages pass drafted tokens on ({release})")


def _lost_in_pipeline(engine: Engine, why: str, off: str) -> Judgement:
    return Judgement(
        "refuse",
        f"drafting in a pipeline needs runner v2, and this is v1 ({why}): its stages never see the drafted tokens",
        "v1/worker/gpu_model_runner.py:_pp_broadcast_prev_sampled_token_ids (vllm#57755)",
        (off, "pipeline_parallel_size 1") + (("engine.runner auto",) if engine.device == "cuda" else ()),
    )


def why_lowered(engine: Engine, arm: Ranks, spec: ModelSpec) -> str:
    """Why draft_method auto comes to nothing here, '' where it drafts or nothing is to be drafted. A method asked for by name is refused instead."""
    if engine.draft_method != "auto" or not engine.draft_tokens:
        return ""
    found = judged(engine, arm, spec)
    return f"{engine.draft_tokens} tokens of multi-token prediction lowered to none: {found.why}" if found.result == "refuse" else ""
