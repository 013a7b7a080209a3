"""What a params file may say of the server besides its own keys: no secret, and nothing that another key says."""

from . import secrecy
from .errors import BadInput
from .schema import Params

# What these options and variables say has a key of its own; given twice, the other one would decide in silence.
_OWN_OPTIONS = {
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
    "--mamba-ssm-cache-dtype": "engine.state_dtype", "--speculative-config": "engine.draft_method", "--spec-method": "engine.draft_method",
    "--disable-custom-all-reduce": "engine.custom_all_reduce", "--gpu-memory-utilization": "engine.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "engine.kv_cache_gib_per_rank",
}  # fmt: skip
_OWN_VARIABLES = {
    "VLLM_PP_LAYER_PARTITION": "parallel.layer_partition", "VLLM_USE_V2_MODEL_RUNNER": "engine.runner", "VLLM_API_KEY": "server.api_key",
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_cache_gib_per_rank",
}  # fmt: skip


def check(params: Params, where: str) -> None:
    """A params file is copied into run folders and notebooks, so a secret must not stand in it; and nothing may be said in two places.

    Raises BadInput with one line, in which no secret stands.
    """
    served = params.server
    if served.api_key and not secrecy.is_reference(served.api_key):
        raise BadInput(f"{where}: server.api_key: expected $NAME of the environment variable that holds the key; a key must not stand in a params file")
    for key, value in served.extra_env.items():
        if key in _OWN_VARIABLES:
            raise BadInput(f"{where}: server.extra_env.{key}: is set by {_OWN_VARIABLES[key]}; say it there")
        if (secrecy.is_secret(key) and not secrecy.is_reference(value)) or secrecy.has_form_of_secret(value):
            cure = "expected $NAME of the environment variable that holds it; a secret must not stand in a params file"
            raise BadInput(f"{where}: server.extra_env.{key}: {cure}")
    for i, word in enumerate(served.extra_args):
        option = word.partition("=")[0].replace("_", "-")
        if option in _OWN_OPTIONS:
            raise BadInput(f"{where}: server.extra_args: {option} is set by {_OWN_OPTIONS[option]}; say it there")
        if secrecy.has_form_of_secret(word) or (word.startswith("--") and secrecy.is_secret(option)):
            raise BadInput(f"{where}: server.extra_args.{i}: {option} holds a secret, which every user of the machine could read; give it by server.extra_env")
