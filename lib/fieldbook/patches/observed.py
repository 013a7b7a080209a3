"""Defects that are only looked for: what became of those of the field reports that need no edit here, or have none.

Each look takes read(path), which gives a file's source or None, and returns (state, file, symbol).
"""

import re

from .site import Defect

_QWEN4 = ("models/qwen4_exp/nvidia/model.py", "models/qwen4_exp/amd/model.py")
_RUNNERS = ("v1/worker/gpu_worker.py", "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py")


def _never(params, spec) -> bool:
    return False


def _qwen4_pipeline(params, spec) -> bool:
    return spec.model_type.startswith("qwen4") and params.parallel.pipeline_parallel_size > 1


def _drafted_pipeline(params, spec) -> bool:
    return params.parallel.pipeline_parallel_size > 1 and params.engine.draft_tokens > 0


def _absent(words: str, files: tuple[str, ...], symbol: str):
    """A defect of code that only forks have: it does not apply where the words are nowhere in these files."""

    def look(read):
        found = next((file for file in files if re.search(words, read(file) or "")), None)
        return ("present", found, symbol) if found else ("does not apply", files[0], symbol)

    return look


def _mixer(read):
    texts = [(file, read(file)) for file in _QWEN4]
    there = [(file, text) for file, text in texts if text is not None]
    if not there:
        return "does not apply", _QWEN4[0], "Qwen4ExpModel.load_weights"
    wrong = next((file for file, text in there if '"hyper_connection_mixer."' not in text), None)
    return ("present" if wrong else "fixed", wrong or there[0][0], "Qwen4ExpModel.load_weights")


def _state_dtype(read):
    file = "model_executor/models/config.py"
    text = read(file) or ""
    hooks = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP")
    if "Qwen4Exp" not in text:
        return "does not apply", file, "MODELS_CONFIG_MAP"
    return ("fixed" if all(f'"{name}":' in text for name in hooks) else "present", file, "MODELS_CONFIG_MAP")


def _draft_broadcast(read):
    file = "v1/worker/gpu/pp_utils.py"
    text = read(file)
    if text is None or "class PPHandler" not in text:
        return "not recognised", file, "PPHandler"
    return ("fixed" if re.search(r"^    def broadcast_drafts\(", text, re.M) else "present", file, "PPHandler.broadcast_drafts")


def _eagle_flag(read):
    for file in ("v1/core/kv_cache_planning.py", "v1/core/kv_cache_utils.py"):
        text = read(file) or ""
        if (found := re.search(r"is_eagle_group=\(?\s*group\.is_eagle_group( and bool\()?", text)) is not None:
            return ("present" if found[1] else "fixed", file, "_project_kv_cache_groups_to_worker")
    return "not recognised", "v1/core/kv_cache_utils.py", "_project_kv_cache_groups_to_worker"


OBSERVED = (
    Defect(
        "ple-offload-worker", "The worker refuses a pipeline with the n-gram table offloaded", "no start with a pipeline", "", "the fork's offload is gone",
        _never, reports=("000-1",), look=_absent(r"ple_offload|PleOffload", _RUNNERS, "Worker"),
    ),
    Defect(
        "mixer-missing", "A stage without the final mixer cannot load it", "later stages end while they load weights", "", "the loader ignores that prefix",
        _qwen4_pipeline, reports=("000-2",), look=_mixer,
    ),
    Defect(
        "second-runner-guard", "The other runner has the n-gram guard too", "no start with a pipeline", "", "that runner has no n-gram code",
        _never, reports=("000-4",), look=_absent(r"N-gram PLE", ("v1/worker/gpu_model_runner.py",), "GPUModelRunner"),
    ),
    Defect(
        "offload-process", "The offload process takes all layers for its own", "wrong rows of the n-gram table", "", "there is no offload process",
        _never, reports=("000-5",), look=_absent(r"PleOffload", _RUNNERS, "offload process"),
    ),
    Defect(
        "offload-connector", "The connector wants an offload layer on every rank", "later stages end at start-up", "", "there is no connector",
        _never, reports=("000-6",), look=_absent(r"PleOffloadLayer", _RUNNERS, "connector"),
    ),
    Defect(
        "state-dtype", "Stages disagree on the type of the recurrent state", "block sizes differ by two between stages, and the start fails", "",
        "every Qwen4Exp class runs the config hook", _qwen4_pipeline, reports=("000-7",), look=_state_dtype,
    ),
    Defect(
        "draft-broadcast", "Drafted tokens never reach the other stages", "hangs, or stale drafts are embedded without an error", "",
        "PPHandler broadcasts drafts (0.30)", _drafted_pipeline, reports=("000-8",), upstream=("vllm#50514", "vllm#46994", "vllm#55745"), look=_draft_broadcast,
    ),
    Defect(
        "eagle-flag", "The draft group loses its flag on stages without draft layers", "prefix hits keep a block too many: fewer drafts accepted", "",
        "the projection keeps the flag", _drafted_pipeline, look=_eagle_flag, blocks=False,
    ),
)  # fmt: skip
