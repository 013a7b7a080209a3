"""Recomputations for the first field report: Qwen3.8-Flash-Next on three cards. Each is (value, from what)."""

from .. import kv
from ..memory import GIB
from ..strategy import Strategy, traffic_of
from .source import Recomputed, Source, against

# Room enough that nothing binds: of these figures only the page is asked.
_ROOM = [20 * GIB] * 3


def _experts(s: Source) -> Recomputed:
    return max(layer.mlp.experts or 0 for layer in s.spec.layers), "config.json of the model"


def _full_attention(s: Source) -> Recomputed:
    layers = [layer.index for layer in s.spec.layers if layer.attention.kind not in kv.STATE_KINDS and layer.attention.kind != "none"]
    return f"{layers[0]},{layers[1]},...,{layers[-1]}", "config.json of the model"


def _pool(s: Source, state_dtype: str, draft_tokens: int):
    return kv.pool(
        s.spec, [16, 16, 16], _ROOM, max_model_len=s.params.engine.max_model_len, draft_tokens=draft_tokens, state_dtype=state_dtype, state_mode="align"
    )


def _block(state_dtype: str, draft_tokens: int):
    def compute(s: Source) -> Recomputed:
        return _pool(
            s, state_dtype, draft_tokens
        ).block_size_tokens, f"state page over 2,048 B a token, in steps of 16; {state_dtype} state, {draft_tokens} drafts"

    return compute


def _page(state_dtype: str, draft_tokens: int):
    def compute(s: Source) -> Recomputed:
        return _pool(s, state_dtype, draft_tokens).state_page_bytes, "the block times 2,048 B a token, to which each state is padded"

    return compute


def _round_trips(s: Source) -> Recomputed:
    return traffic_of(Strategy(1, 1, 3, expert_parallel=True), s.spec, s.params).collectives.dispatches, "one dispatch and combine for each layer with experts"


def _hops(s: Source) -> Recomputed:
    return traffic_of(Strategy(1, 3), s.spec, s.params).hops, "stages - 1"


def _pool_at(max_model_len: int):
    def compute(s: Source) -> Recomputed:
        found = s.pool([16, 16, 16], s.params.engine.available_kv_gib, max_model_len=max_model_len)
        return found.pool_tokens, f"{found.blocks} blocks of {found.block_size_tokens} tokens, requests of up to {max_model_len:,}"

    return compute


OF_CMP170HX = {
    "cmp-gpus": lambda s: (s.gpu_count, "inventory of the box"),
    "cmp-model-experts": _experts,
    "cmp-fullattn-layers": _full_attention,
    "cmp-page-bf16": _block("bfloat16", 2),
    "cmp-page-bf16/page": _page("bfloat16", 2),
    "cmp-page-fp32": _block("float32", 3),
    "cmp-page-fp32/page": _page("float32", 3),
    "cmp-dep-trips": _round_trips,
    "cmp-pp-hops": _hops,
    # One KV space, solved from the first pool and rounded to two decimals; the second pool is then a prediction, to the token.
    "cmp-kv200k-pp": _pool_at(200_000),
    "cmp-kv262k-pp": _pool_at(262_144),
    "cmp-ratio-kv": against("cmp-kv200k-pp", "cmp-kv200k-dep"),
    "cmp-ratio-kv262k": against("cmp-kv262k-pp", "cmp-kv200k-dep"),
    "cmp-ratio-prefill32k": against("cmp-prefill32k-pp", "cmp-prefill32k-dep"),
    "cmp-ratio-prefill8k": against("cmp-prefill8k-pp", "cmp-prefill8k-dep"),
    "cmp-ratio-decode8": against("cmp-decode8-pp", "cmp-decode8-dep"),
    "cmp-ratio-decode1": against("cmp-decode1-pp", "cmp-decode1-dep"),
}
