"""The server's command line: data in, argv and environment out, and nothing else decides."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from . import drafts, memory, paths
from .inventory import Inventory
from .kv import STATE_KINDS
from .params import Params
from .schema import Baseline, Parallel
from .secrecy import STARS, is_reference, is_secret, scrubbed, without_secrets
from .spec import ModelSpec

LOCAL = "127.0.0.1"
# Set for every server: no network look-ups, no usage statistics, and every socket between the ranks of one machine on its loopback.
QUIET_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
LOOPBACK_ENV = {"VLLM_HOST_IP": LOCAL, "GLOO_SOCKET_IFNAME": "lo"}
# Where NCCL's sockets are, not how it sends: without it they listen on the first network card (seen on two H200s).
LOOPBACK_NCCL_ENV = {"NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class CommandLine:
    """What starts a server. `env` holds only what Fieldbook sets, not the inherited environment; a secret in it is the $NAME of where it is."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def shown(self) -> str:
        """As a person would type it, one option per line, without machine paths and secrets."""
        words = ["python", *map(shlex.quote, self._words()[1:])]
        lines = [f"{key}={_shown(key, value)} \\" for key, value in self.env.items()] + [" ".join(words[:3])]
        for word in words[3:]:
            if word.startswith("--"):
                lines[-1] += " \\"
                lines.append(f"    {word}")
            else:
                lines[-1] += f" {word}"
        return "\n".join(lines)

    def document(self) -> dict:
        """argv and env as JSON has them: the same on every machine, without secrets."""
        words = self._words()
        env = {key: value if is_reference(value) else STARS if is_secret(key) else scrubbed(value, ()) for key, value in self.env.items()}
        python = "python" if self.argv[0] == sys.executable else words[0]
        return {"argv": [python, *words[1:]], "env": env}

    def _words(self) -> list[str]:
        """argv without machine paths and secrets."""
        # A cache that was moved is told as where it would be.
        places = {str(paths.models_cache_dir()): str(paths.models_cache_dir(moved=False)), str(paths.root()) + "/": ""}
        words = without_secrets(list(self.argv))
        for place, told in places.items():
            words = [word.replace(place, told) for word in words]
        return words


def _shown(key: str, value: str) -> str:
    # A reference is typed as it is, so that the shell puts the value in.
    return f'"{value}"' if is_reference(value) else STARS if is_secret(key) else shlex.quote(scrubbed(value, ()))


def weights_dir(params: Params) -> Path:
    """Folder of the weights that the params name."""
    return Path(params.model.path) if params.model.path else paths.model_weights_dir(params.model.name)


def is_hybrid(spec: ModelSpec) -> bool:
    """Whether some layers keep a recurrent state."""
    return any(layer.attention.kind in STATE_KINDS for layer in spec.layers)


def state_dtype(params: Params, arm: Parallel | Baseline, spec: ModelSpec) -> str:
    """What --mamba-ssm-cache-dtype is told, '' where it is left out.

    In a pipeline the declared dtype is said aloud: a hook of the draft model, which only the last stage has, must not change it there alone.
    """
    if not is_hybrid(spec):
        return ""
    if params.engine.state_dtype != "auto":
        return params.engine.state_dtype
    return spec.state_dtype if arm.pipeline_parallel_size > 1 and spec.state_dtype != "auto" else ""


def speculative(params: Params) -> dict | None:
    """The value of --speculative-config; None where nothing is drafted."""
    method = drafts.method_of(params.engine)
    if method == "none":
        return None
    model = {"model": params.engine.draft_model} if params.engine.draft_model else {}
    return {"method": method, "num_speculative_tokens": params.engine.draft_tokens, **model, **params.engine.draft_options}


def tensor_groups(arm: Parallel | Baseline) -> list[range]:
    """Ranks of each tensor-parallel group; on one machine rank r has GPU r (vLLM: parallel_state.py:initialize_model_parallel)."""
    tp = arm.tensor_parallel_size
    return [range(first, first + tp) for first in range(0, arm.ranks, tp)]


def without_custom_all_reduce(params: Params, arm: Parallel | Baseline, box: Inventory | None) -> bool:
    """Whether vLLM's own all-reduce is switched off.

    auto: in a pipeline with tensor-parallel groups in it, unless each group is known to be joined by NVLink throughout. Over PCIe its registration of
    buffers between the processes of such a group fails (vllm#49101, 'invalid argument' in custom_all_reduce.cuh), at best it is slower than NCCL.
    """
    if params.engine.device == "cpu":
        return False
    if params.engine.custom_all_reduce != "auto":
        return params.engine.custom_all_reduce == "off"
    if arm.tensor_parallel_size == 1 or arm.pipeline_parallel_size == 1:
        return False
    joined = {frozenset((link.a, link.b)) for link in (box.links if box else ()) if link.nvlinks or str(link.kind or "").startswith("NV")}
    return not all(frozenset((a, b)) in joined for group in tensor_groups(arm) for a in group for b in group if a < b)


def command_line(params: Params, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...], port: int, box: Inventory | None = None) -> CommandLine:
    """argv and environment of one arm. box: whose links decide on the custom all-reduce.

    The `vllm` script is not used because it looks its version up under the distribution name vllm, which the CPU build does not have.
    NCCL keeps its own settings but for where it listens: the second field report measured every one of its knobs as a loss.
    """
    engine, spec = params.engine, memory.model_spec(params.model.name)
    argv = [engine.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(weights_dir(params)), "--served-model-name", params.model.name]
    argv += ["--load-format", "dummy"] if params.model.made_up else []
    argv += ["--host", params.server.host, "--port", str(port)]
    argv += ["--dtype", engine.dtype, "--max-model-len", str(engine.max_model_len)]
    argv += ["--max-num-seqs", str(engine.max_num_seqs), "--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    argv += ["--tensor-parallel-size", str(arm.tensor_parallel_size), "--pipeline-parallel-size", str(arm.pipeline_parallel_size)]
    for option, size in (
        ("--data-parallel-size", arm.data_parallel_size),
        ("--decode-context-parallel-size", arm.decode_context_parallel_size),
        ("--prefill-context-parallel-size", arm.prefill_context_parallel_size),
    ):
        argv += [option, str(size)] if size > 1 else []
    argv += ["--enable-expert-parallel"] if arm.expert_parallel else []
    argv += ["--enforce-eager"] if engine.enforce_eager else []
    argv += ["--kv-cache-dtype", engine.kv_cache_dtype] if engine.kv_cache_dtype != "auto" else []
    argv += ["--block-size", str(engine.block_size_tokens)] if engine.block_size_tokens else []
    argv += [] if engine.prefix_caching else ["--no-enable-prefix-caching"]
    state = state_dtype(params, arm, spec)
    argv += ["--mamba-ssm-cache-dtype", state] if state else []
    drafting = speculative(params)
    argv += ["--speculative-config", json.dumps(drafting)] if drafting else []
    argv += ["--disable-custom-all-reduce"] if without_custom_all_reduce(params, arm, box) else []
    if engine.device == "cuda":
        argv += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
        argv += ["--kv-cache-memory-bytes", str(engine.kv_cache_gib_per_rank * 2**30)] if engine.kv_cache_gib_per_rank else []
    return CommandLine(tuple(argv + params.extra_args_of(arm)), {**_environment(params, arm, layers_per_stage), **params.extra_env_of(arm)})


def _environment(params: Params, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...]) -> dict[str, str]:
    engine, env = params.engine, dict(QUIET_ENV)
    if arm.ranks > 1:
        # Whoever the server itself is for: what its ranks say to each other has no key.
        env |= LOOPBACK_ENV | (LOOPBACK_NCCL_ENV if engine.device == "cuda" else {})
    if engine.device == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(engine.kv_cache_gib_per_rank)
        # Binding threads to cores needs as many free cores as ranks have threads; a shared machine has not.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if engine.omp_threads_per_rank:
            env["OMP_NUM_THREADS"] = str(engine.omp_threads_per_rank)
    if arm.pipeline_parallel_size > 1:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layers_per_stage))
    pinned = engine.runner if engine.runner != "auto" else "v2" if arm.pipeline_parallel_size > 1 and engine.device == "cuda" else ""
    if pinned:
        # Unpinned, a feature that v2 lacks makes vLLM take v1, whose pipeline is the broken one, with no more than a warning.
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1" if pinned == "v2" else "0"
    if params.server.api_key:
        env["VLLM_API_KEY"] = params.server.api_key
    return env
