"""Gates of the engine's settings: drafting, model runner, state, block size, context length, release."""

from .. import drafts, patches
from ..command import is_hybrid
from ..strategy.vetoes import is_dsa
from .ruling import Launch, Ruling, needs

HOPPER = 9.0
# The kernels of sparse latent attention take pages of so many tokens (v1/attention/backends/mla/flashmla_sparse.py: get_supported_kernel_block_sizes).
SPARSE_BLOCK_TOKENS = 64
CPU_BLOCK_TOKENS, CUDA_BLOCK_TOKENS = 32, 16


def drafting(launch: Launch) -> Ruling | None:
    """The way of drafting runs on this release, with this runner and pipeline; `auto` that came to nothing is told."""
    engine = launch.params.engine
    if engine.draft_lowered:
        return Ruling("warn", engine.draft_lowered, "engine.draft_method auto", ("engine.draft_tokens 0, which says the same", "engine.draft_method by name"))
    if drafts.method_of(engine) == "none":
        return None
    found = drafts.judged(engine, launch.arm, launch.spec)
    reason = found.why
    if found.result == "pass" and not engine.mtp_tokens:
        reason += "; weights and cache of the draft model are not counted"
    return Ruling(found.result, reason, found.source, found.ways_out)


def model_runner(launch: Launch) -> Ruling:
    """A pipeline on GPUs runs on the second model runner, or says that it does not."""
    engine = launch.params.engine
    runner, why = drafts.runner_of(engine, launch.arm)
    if any(layer.short_conv for layer in launch.spec.layers) and runner == "v1":
        ways = ("engine.runner auto", "another draft_method") if engine.device == "cuda" else ("engine.device cuda",)
        return Ruling("refuse", f"n-gram embeddings are in runner v2 only, and this is v1 ({why})", "v1/worker/gpu_model_runner.py has no code for them", ways)
    if runner == "v1" and launch.arm.prefill_context_parallel_size > 1:
        return Ruling("refuse", f"prefill context parallelism is in runner v2 only, and this is v1 ({why})", "config/vllm.py", ("engine.runner auto",))
    if engine.runner == "v1" and engine.device == "cuda" and launch.stages > 1:
        return Ruling("warn", "a pipeline on runner v1, which releases from 0.30 on no longer look after", "config/vllm.py", ("engine.runner auto",))
    if engine.runner == "v2" and engine.device == "cpu":
        ways = ("engine.runner auto",)
        return Ruling("refuse", "runner v2 on a CPU needs a Triton with a CPU backend, which vLLM's wheels come without", "config/vllm.py: HAS_TRITON", ways)
    pinned = launch.command.env.get("VLLM_USE_V2_MODEL_RUNNER")
    return Ruling("pass", f"runner {runner} ({why})", f"VLLM_USE_V2_MODEL_RUNNER={pinned}" if pinned else "vLLM chooses")


def state_dtype(launch: Launch) -> Ruling | None:
    """The state of recurrent layers has the type that the model declares, on every stage alike."""
    if not is_hybrid(launch.spec):
        return None
    declared, asked = launch.spec.state_dtype, launch.params.engine.state_dtype
    if declared == "auto":
        return Ruling("pass", f"the model declares none; {asked if asked != 'auto' else launch.params.engine.dtype} on every stage", "config.json of the model")
    if asked not in ("auto", declared):
        reason = f"engine.state_dtype {asked}, and the model declares {declared}: other pages, and states that it was not trained with"
        return Ruling("refuse", reason, "config.json: mamba_ssm_dtype", ("engine.state_dtype auto", f"engine.state_dtype {declared}"), "state_dtype")
    said = "--mamba-ssm-cache-dtype" in launch.command.argv
    return Ruling("pass", f"{declared}, as the model declares" + (", said to every stage" if said else ""), "config.json: mamba_ssm_dtype")


def block_size(launch: Launch) -> Ruling | None:
    """Blocks fit the kernels of attention; for a hybrid, a block size set by hand hides what is wrong."""
    asked, cpu = launch.params.engine.block_size_tokens, launch.params.engine.device == "cpu"
    if asked is None:
        return None
    needed, who, source = (
        (SPARSE_BLOCK_TOKENS, "sparse latent attention", "flashmla_sparse.py")
        if is_dsa(launch.spec)
        else (CPU_BLOCK_TOKENS, "attention on a CPU", "v1/attention/backends/cpu_attn.py")
        if cpu
        else (CUDA_BLOCK_TOKENS, "every attention backend on CUDA", "v1/attention/backends: get_supported_kernel_block_sizes")
    )
    if asked % needed:
        nearest = max(asked // needed, 1) * needed
        reason = f"engine.block_size_tokens {asked} is no multiple of {needed}, which {who} needs"
        return Ruling("refuse", reason, source, (f"engine.block_size_tokens {nearest}", "leave it out: vLLM chooses"))
    if is_hybrid(launch.spec):
        reason = f"engine.block_size_tokens {asked}: vLLM raises a hybrid's block to its state page by itself; a larger one hides stages whose states differ"
        return Ruling("warn", reason, "platforms/interface.py:update_block_size_for_backend", ("leave it out",))
    return Ruling("pass", f"blocks of {asked} tokens")


def context_length(launch: Launch) -> Ruling:
    """The longest request is not longer than the model was made for."""
    asked, made_for = launch.params.engine.max_model_len, launch.spec.max_position_embeddings
    if asked > made_for:
        reason = f"engine.max_model_len {asked:,} is more than the {made_for:,} positions of the model"
        return Ruling("refuse", reason, "config.json", (f"engine.max_model_len {made_for}",))
    return Ruling("pass", f"{asked:,} of {made_for:,} positions", "config.json")


def step_size(launch: Launch) -> Ruling:
    """A step has a token for each request that it may hold."""
    tokens, requests = launch.params.engine.max_num_batched_tokens, launch.params.engine.max_num_seqs
    if tokens < requests:
        reason = f"engine.max_num_batched_tokens {tokens} is less than engine.max_num_seqs {requests}: a step has no token for each request"
        return Ruling("refuse", reason, "config/scheduler.py", (f"engine.max_num_batched_tokens {requests} or more", f"engine.max_num_seqs {tokens}"))
    return Ruling("pass", f"{tokens:,} tokens and {requests} requests a step", "config/scheduler.py")


def kernels(launch: Launch) -> Ruling | None:
    """Stock vLLM has kernels of sparse latent attention for these cards and types: Hopper and later, bfloat16."""
    engine = launch.params.engine
    if not is_dsa(launch.spec) or engine.device == "cpu":
        return None
    if engine.dtype == "float16":
        return Ruling("refuse", "sparse latent attention computes in bfloat16 only", "attention/backends/mla", ("engine.dtype bfloat16",))
    if engine.kv_cache_dtype == "fp8_e5m2":
        ways = ("engine.kv_cache_dtype fp8_ds_mla", "engine.kv_cache_dtype auto")
        return Ruling("refuse", "no kernel of sparse latent attention reads a cache of fp8_e5m2", "attention/backends/mla", ways)
    told = [float(gpu.compute_capability) for gpu in (launch.box.gpus if launch.box else []) if gpu.compute_capability]
    if not told:
        return Ruling("not checked", "nothing tells the cards' compute capability")
    if min(told) < HOPPER:
        reason = f"stock vLLM has no kernels of sparse latent attention for sm_{min(told) * 10:.0f}: its backends want sm_90 and later"
        ways = ("a vLLM with kernels for these cards, and server.allow [kernels]", "cards of sm_90 and later")
        # A recorded box was served with some vLLM of its own.
        return Ruling(
            "refuse" if launch.live else "warn", reason, "attention/backends/mla: supports_compute_capability", ways, "kernels" if launch.live else ""
        )
    return Ruling("pass", f"sm_{min(told) * 10:.0f} has kernels of sparse latent attention", "attention/backends/mla")


def release(launch: Launch) -> Ruling | None:
    """The arithmetic is that of the vLLM that serves."""
    if launch.facts is None or launch.facts.release is None:
        return None
    wanted, have = launch.params.engine.vllm_release, launch.facts.release
    if have.split("+")[0].split(".")[:2] == wanted.split(".")[:2]:
        return Ruling("pass", f"vLLM {have}", "_version.py of the installed package")
    ways = (f'engine.vllm_release "{".".join(have.split(".")[:2])}"', f"a vLLM {wanted}.x")
    reason = f"vLLM {have} serves, and pages, pools and defects are counted for engine.vllm_release {wanted}"
    return Ruling("refuse", reason, "_version.py of the installed package", ways, "release")


def known_defects(launch: Launch) -> Ruling:
    """No defect of the catalogue that this box meets is left open in the vLLM that serves."""
    if launch.defects is None:
        need = ", ".join(dict.fromkeys(n.patch for n in _patches_needed(launch)))
        reason = f"the vLLM of this box is not here{f'; it needs {need}' if need else ''}"
        return Ruling("not checked", reason, ways_out=("`fieldbook patches --python PY` there",))
    why = patches.why_unmended(launch.defects)
    if not why:
        return Ruling("pass", "none open that this box meets", "structure of the installed files")
    ways = ("`fieldbook patches apply --params FILE` (engine.patches needed, in a walk)", "a release that has it fixed (`fieldbook patches status` says which)")
    return Ruling("refuse", why, "structure of the installed files", ways, "known_defects")


def _patches_needed(launch: Launch):
    mode = launch.index_sharing
    cut = bool(launch.bounds) and launch.stages > 1 and mode in ("relay", "flip")
    flipped = (0,) if cut and mode == "flip" else ()
    return [need for need in needs(launch, cut and mode == "relay", flipped) if need.patch]
