"""What moved between vLLM releases and changes the KV arithmetic, keyed by release, with the reason beside it.

Read off the released packages 0.29.0 to 0.32.0; 0.33 moved the code (kv_cache_planning.py) and kept the arithmetic.
"""

from dataclasses import dataclass

from ..errors import BadInput


@dataclass(frozen=True)
class Rules:
    """How one release counts, where releases differ."""

    # 0.30 gives a sliding layer the largest kernel block that fits the full layers' page; before, the smallest one, which unification scales up
    # (model_executor/layers/attention/attention.py:Attention.get_kv_cache_spec).
    sliding_takes_main_block: bool
    # 0.30 caps ring and unsplit sliding buckets like state buckets when pages are packed (kv_cache_utils.py:_get_packed_kv_cache_groups).
    ring_is_state: bool
    # Before 0.30 the KDA state is float32 whatever --mamba-ssm-cache-dtype says (mamba_utils.py:MambaStateDtypeCalculator.kda_state_dtype).
    kda_state_always_float32: bool
    # The 352-byte layout came with 0.30 (mla_attention.py:MLAAttention.get_kv_cache_spec).
    nvfp4_ds_mla: bool


_BEFORE = Rules(sliding_takes_main_block=False, ring_is_state=False, kda_state_always_float32=True, nvfp4_ds_mla=False)
_SINCE_030 = Rules(sliding_takes_main_block=True, ring_is_state=True, kda_state_always_float32=False, nvfp4_ds_mla=True)
RELEASES = {"0.29": _BEFORE, "0.30": _SINCE_030, "0.31": _SINCE_030, "0.32": _SINCE_030, "0.33": _SINCE_030}


def rules(release: str) -> Rules:
    """Rules of "0.30" or "0.30.1". Raises BadInput for a release whose source was not read."""
    minor = ".".join(release.split(".")[:2])
    if minor not in RELEASES:
        raise BadInput(f"release: KV accounting knows vLLM {', '.join(RELEASES)}; got {release!r}")
    return RELEASES[minor]


def in_flight_tokens(max_num_batched_tokens: int, pipeline_parallel_size: int = 1, *, async_scheduling: bool = True, v2_runner: bool = True) -> int:
    """Tokens scheduled and not yet settled, which sliding-window layers keep beside their window (config/vllm.py:VllmConfig.max_in_flight_tokens).

    async_scheduling is off on the CPU backend; the V1 runner overlaps steps without pipeline parallelism only.
    """
    batches = pipeline_parallel_size
    if async_scheduling and v2_runner:
        batches = pipeline_parallel_size + 1
    elif async_scheduling and pipeline_parallel_size <= 1:
        batches = 2
    return batches * max_num_batched_tokens
