"""What a params file may say of the server besides its own keys: no secret, and nothing that another key says."""

import json
import re

from . import secrecy
from .errors import BadInput
from .schema import Params

# What these options and variables say has a key of its own; given twice, the other one would decide in silence.
_OWN_OPTIONS = {
    "--config": "this file; what another one says could not be seen here",
    "--model": "model", "--served-model-name": "model.name", "--host": "server.host", "--port": "server.port", "--api-key": "server.api_key",
    "--dtype": "engine.dtype", "--max-model-len": "engine.max_model_len", "--max-num-seqs": "engine.max_num_seqs",
    "--max-num-batched-tokens": "engine.max_num_batched_tokens",
    "--tensor-parallel-size": "parallel.tensor_parallel_size", "-tp": "parallel.tensor_parallel_size",
    "--pipeline-parallel-size": "parallel.pipeline_parallel_size", "-pp": "parallel.pipeline_parallel_size",
    "--data-parallel-size": "parallel.data_parallel_size", "-dp": "parallel.data_parallel_size", "--enable-expert-parallel": "parallel.expert_parallel",
    "--decode-context-parallel-size": "parallel.decode_context_parallel_size", "-dcp": "parallel.decode_context_parallel_size",
    "--prefill-context-parallel-size": "parallel.prefill_context_parallel_size", "-pcp": "parallel.prefill_context_parallel_size",
    "--enforce-eager": "engine.enforce_eager", "--kv-cache-dtype": "engine.kv_cache_dtype", "--block-size": "engine.block_size_tokens",
    "--enable-prefix-caching": "engine.prefix_caching", "--no-enable-prefix-caching": "engine.prefix_caching",
    "--mamba-ssm-cache-dtype": "engine.state_dtype", "--speculative-config": "engine.draft_method", "-sc": "engine.draft_method",
    "--spec-method": "engine.draft_method", "--spec-model": "engine.draft_model", "--spec-tokens": "engine.draft_tokens", "-ep": "parallel.expert_parallel",
    "--disable-custom-all-reduce": "engine.custom_all_reduce", "--gpu-memory-utilization": "engine.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "engine.kv_cache_gib_per_rank",
}  # fmt: skip
_OWN_VARIABLES = {
    "VLLM_PP_LAYER_PARTITION": "parallel.layer_partition", "VLLM_USE_V2_MODEL_RUNNER": "engine.runner", "VLLM_API_KEY": "server.api_key",
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_cache_gib_per_rank",
    **dict.fromkeys(("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "the layout: the ranks of one machine keep to its loopback"),
}  # fmt: skip
# What holds a secret among vLLM's options; any beginning of one means it.
_SECRET_OPTIONS = ("--api-key", "--hf-token", "--ssl-keyfile-password")
# They are written from other keys.
_OWN_DRAFT_OPTIONS = {"method": "engine.draft_method", "num_speculative_tokens": "engine.draft_tokens", "model": "engine.draft_model"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check(params: Params, where: str) -> None:
    """A params file is copied into run folders and notebooks, so a secret must not stand in it; and nothing may be said in two places.

    Raises BadInput with one line, in which no secret stands.
    """
    served, engine = params.server, params.engine
    if served.api_key and not secrecy.is_reference(served.api_key):
        raise BadInput(f"{where}: server.api_key: expected $NAME of the environment variable that holds the key; a key must not stand in a params file")
    own = _OWN_VARIABLES | ({"OMP_NUM_THREADS": "engine.omp_threads_per_rank"} if engine.omp_threads_per_rank and engine.device == "cpu" else {})
    for section, one in (("server", served), ("verdict.baseline", params.verdict.baseline)):
        _check_environment(one.extra_env, own, f"{where}: {section}.extra_env")
        _check_arguments(one.extra_args, f"{where}: {section}.extra_args", section)
    _check_made_up(params, where)
    _check_drafts(engine.draft_options, f"{where}: engine.draft_options")
    for key, value in (("model.path", params.model.path), ("engine.draft_model", engine.draft_model), ("engine.python", engine.python)):
        if "://" in value:
            raise BadInput(f"{where}: {key}: expected a path on this machine, not an address")
        _writable(value, f"{where}: {key}")


def _check_made_up(params: Params, where: str) -> None:
    """Made-up weights have neither a folder nor a checkpoint to be compared with, and one way of loading."""
    if not params.model.made_up:
        return
    for key in ("path", "headers_sha256"):
        if getattr(params.model, key):
            raise BadInput(f"{where}: model.{key}: source dummy has no checkpoint; leave it out, or give source folder")
    if any(word.partition("=")[0] == "--load-format" for word in [*params.server.extra_args, *params.verdict.baseline.extra_args]):
        raise BadInput(f"{where}: server.extra_args: --load-format is set by model.source dummy; leave it out")


def _check_environment(values: dict[str, str], own: dict[str, str], where: str) -> None:
    for number, (key, value) in enumerate(values.items()):
        if not _VARIABLE.fullmatch(key):
            raise BadInput(f"{where}: key {number + 1} is no name of a variable; expected NAME: value")
        if key in own:
            raise BadInput(f"{where}.{key}: is set by {own[key]}; say it there")
        if (secrecy.is_secret(key) and not secrecy.is_reference(value)) or secrecy.has_form_of_secret(value):
            cure = "expected $NAME of the environment variable that holds it; a secret must not stand in a params file"
            raise BadInput(f"{where}.{key}: {cure}")
        _writable(value, f"{where}.{key}")


def _check_arguments(words: list[str], where: str, section: str) -> None:
    for i, word in enumerate(words):
        if told := _own_option(word):
            raise BadInput(f"{where}.{i}: {told[0]} is set by {told[1]}; say it there")
        if _is_secret_option(word) or secrecy.has_form_of_secret(word) or _names_secret(_json(word.partition("=")[2] or word)):
            raise BadInput(f"{where}.{i}: holds a secret, which every user of the machine could read; vLLM takes it from a variable, by {section}.extra_env")
        _writable(word, f"{where}.{i}")


def _check_drafts(options: dict, where: str) -> None:
    twice = next((key for key in options if key in _OWN_DRAFT_OPTIONS), None)
    if twice:
        raise BadInput(f"{where}.{twice}: is set by {_OWN_DRAFT_OPTIONS[twice]}; say it there")
    if _names_secret(options):
        raise BadInput(f"{where}: holds a secret, which every user of the machine could read; give it by server.extra_env")
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError):
        raise BadInput(f"{where}: cannot be written as JSON; expected texts, numbers, true and false, lists and mappings") from None


def _writable(text: str, where: str) -> None:
    """Raise BadInput for what no program can be given: a zero byte, half a surrogate pair."""
    try:
        if b"\0" not in text.encode():
            return
    except UnicodeEncodeError:
        pass
    raise BadInput(f"{where}: holds a character that cannot be passed to a program")


def _is_secret_option(word: str) -> bool:
    name = word.split()[0].partition("=")[0].replace("_", "-") if word.startswith("--") else ""
    # An option of its own, which names a file.
    return len(name) > 4 and name != "--ssl-keyfile" and any(option.startswith(name) for option in _SECRET_OPTIONS)


def _own_option(word: str) -> tuple[str, str] | None:
    """(own option, its key) that a word of the command line means: vLLM takes underscores, dotted keys, a leading no-, and any beginning of an option."""
    if not word.startswith("-"):
        return None
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    if name in _OWN_OPTIONS:
        return name, _OWN_OPTIONS[name]
    bare = f"--{name[5:]}" if name.startswith("--no-") else name
    if len(bare) < 4 or not bare.startswith("--"):
        return None
    return next(((own, key) for own, key in _OWN_OPTIONS.items() if own.startswith(bare)), None)


def _json(text: str):
    try:
        return json.loads(text) if text[:1] in "{[" else None
    except ValueError:
        return None


def _names_secret(value) -> bool:
    """Whether some key within names a secret that is given as a value, not as $NAME."""
    if isinstance(value, dict):
        own = any(secrecy.is_secret(str(key)) and isinstance(held, str) and held and not secrecy.is_reference(held) for key, held in value.items())
        return own or any(_names_secret(held) for held in value.values())
    if isinstance(value, list):
        return any(_names_secret(held) for held in value)
    return isinstance(value, str) and secrecy.has_form_of_secret(value)
