"""Weights on each pipeline stage, for one tensor-parallel rank of it, as vLLM holds them after loading."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import BadInput
from ..spec import ModelSpec
from .component import Component, dtype_bytes, rank_bytes
from .model import components, embedding, last_stage, lm_head, mtp_components, parts_with_embedding


@dataclass(frozen=True)
class RankWeights:
    """Weights of one tensor-parallel rank of a stage, in bytes; by_component has them by group (attention, experts, embedding, mtp, ...)."""

    stage: int
    first_layer: int
    layers: int
    bytes: int
    by_component: dict[str, int]


def rank_weights(
    spec: ModelSpec,
    partition: Sequence[int],
    *,
    tensor_parallel_size: int,
    expert_parallel: bool = False,
    expert_ranks: int | None = None,
    with_mtp: bool = True,
    dtype: str | None = None,
    flips: Sequence[Sequence[int]] = (),
) -> list[RankWeights]:
    """Weights per stage; partition has the layers of each, with_mtp says that the server drafts with the MTP layers (else vLLM does not load them).

    dtype: what the server was told to use, else the checkpoint's. expert_ranks: how many ranks share the experts (component.local_shape). flips: per stage,
    the layers that a patched server gives an indexer of their own. What 'Model loading took' counts besides weights is in buffer_bytes.
    Raises BadInput for a layout that vLLM refuses.
    """
    if tensor_parallel_size < 1 or any(count < 0 for count in partition) or sum(partition) != len(spec.layers):
        raise BadInput(f"partition {list(partition)} at tensor_parallel_size {tensor_parallel_size}: expected stages that add up to {len(spec.layers)} layers")
    cut = (tensor_parallel_size, expert_parallel, dtype, expert_ranks)
    layers = _layers_by_group(spec, *cut)
    stages, first = [], 0
    for stage, count in enumerate(partition):
        grouped: Counter[str] = Counter()
        for one in layers[first : first + count]:
            grouped.update(one)
        is_first, is_last = stage == 0, stage == len(partition) - 1
        grouped.update(_outside_by_group(spec, is_first, is_last, with_mtp, *cut))
        if flips and flips[stage]:
            grouped["indexer"] += len(flips[stage]) * indexer_rank_bytes(spec, tensor_parallel_size, dtype)
        stages.append(RankWeights(stage, first, count, sum(grouped.values()), dict(grouped)))
        first += count
    return stages


def _outside(spec: ModelSpec, first: bool, last: bool, with_mtp: bool) -> list[Component]:
    """Weights of a stage besides its layers: embedding on the first, final norm, head and draft layers on the last, tied embeddings on both.

    Sources: models/llama.py:LlamaModel and LlamaForCausalLM for the common case, qwen4_exp/nvidia/model.py for both on every stage. A draft model
    shares the head; it shares the embedding only without pipeline parallelism (v1/worker/gpu/spec_decode/eagle/utils.py:maybe_share_target_embed).
    """
    held: list[Component] = []
    if first or spec.embeddings_on_every_stage or (last and spec.tie_word_embeddings):
        held += [embedding(spec), *parts_with_embedding(spec)]
    head_everywhere = spec.embeddings_on_every_stage and not spec.lm_head_on_last_stage
    if not spec.tie_word_embeddings and (last or head_everywhere):
        held.append(lm_head(spec))
    if last:
        held += last_stage(spec)
        if with_mtp and spec.mtp_layers:
            held += mtp_components(spec)
            held += [replace(embedding(spec), name="mtp.embed_tokens")] if not first else []
    return held


def layer_rank_bytes(
    spec: ModelSpec, *, tensor_parallel_size: int, expert_parallel: bool = False, dtype: str | None = None, expert_ranks: int | None = None
) -> list[int]:
    """Bytes of every decoder layer on one tensor-parallel rank: what a search over partitions adds up."""
    return [sum(groups.values()) for groups in _layers_by_group(spec, tensor_parallel_size, expert_parallel, dtype, expert_ranks)]


def outside_rank_bytes(
    spec: ModelSpec,
    *,
    first: bool,
    last: bool,
    with_mtp: bool,
    tensor_parallel_size: int,
    expert_parallel: bool = False,
    dtype: str | None = None,
    expert_ranks: int | None = None,
) -> int:
    """Bytes of what a stage holds besides its layers (embedding, head, draft layers) on one tensor-parallel rank."""
    return sum(_outside_by_group(spec, first, last, with_mtp, tensor_parallel_size, expert_parallel, dtype, expert_ranks).values())


def indexer_rank_bytes(spec: ModelSpec, tensor_parallel_size: int, dtype: str | None = None) -> int:
    """Bytes of one layer's indexer on one rank, 0 in a model that shares no indices: what a layer gains that computes its own instead."""
    owners = [groups for groups in _layers_by_group(spec, tensor_parallel_size, False, dtype, None) if "indexer" in groups]
    return owners[0]["indexer"] if owners else 0


def indexer_checkpoint_bytes(spec: ModelSpec) -> int:
    """Bytes of one layer's indexer in the checkpoint, 0 in a model without."""
    owner = next((layer for layer in spec.layers if layer.attention.indexer and layer.attention.indexer.owns), None)
    return sum(one.bytes for one in components(owner, spec) if one.group == "indexer") if owner else 0


def buffer_bytes(spec: ModelSpec, max_num_batched_tokens: int, dtype: str | None = None) -> int:
    """Tables that 'Model loading took' counts besides weights, the same on every rank: the rotary table (layers/rotary_embedding/base.py) and, with
    sparse latent attention, the top-k buffer in int32 (models/deepseek_v32/nvidia/model.py:DeepseekV32Model). One rotary table for the whole model;
    partial rotation, which the spec does not tell, makes it smaller."""
    attentions = [layer.attention for layer in spec.layers]
    rotated = max((a.rope_head_dim or a.head_dim for a in attentions), default=0)
    topk = max((a.indexer.topk for a in attentions if a.kind == "sparse_mla" and a.indexer), default=0)
    return spec.max_position_embeddings * rotated * dtype_bytes(dtype or spec.dtype) + max_num_batched_tokens * topk * 4


@lru_cache(maxsize=8)
def layer_kinds(spec: ModelSpec) -> tuple[tuple[tuple[Component, ...], ...], tuple[int, ...]]:
    """(weights of each kind of layer, kind of each layer): layers whose weights differ in nothing but their names are one kind.

    A format that leaves out one layer by its number makes that layer a kind of its own.
    """
    kinds: dict[tuple, int] = {}
    firsts, numbers = [], []
    for layer in spec.layers:
        held = tuple(components(layer, spec))
        key = tuple(replace(one, module="") for one in held)
        if key not in kinds:
            kinds[key] = len(firsts)
            firsts.append(held)
        numbers.append(kinds[key])
    return tuple(firsts), tuple(numbers)


# A search over partitions asks for the same layers and the same ends again and again, one over strategies for many ways to divide them.
@lru_cache(maxsize=512)
def _layers_by_group(spec: ModelSpec, ranks: int, expert_parallel: bool, dtype: str | None, expert_ranks: int | None) -> tuple[dict[str, int], ...]:
    kinds, numbers = layer_kinds(spec)
    each = [_grouped(held, spec, ranks, expert_parallel, dtype, expert_ranks) for held in kinds]
    return tuple(each[number] for number in numbers)


@lru_cache(maxsize=512)
def _outside_by_group(
    spec: ModelSpec, first: bool, last: bool, with_mtp: bool, ranks: int, expert_parallel: bool, dtype: str | None, expert_ranks: int | None
) -> dict[str, int]:
    return _grouped(_outside(spec, first, last, with_mtp), spec, ranks, expert_parallel, dtype, expert_ranks)


def _grouped(held: Iterable[Component], spec: ModelSpec, ranks: int, expert_parallel: bool, dtype: str | None, expert_ranks: int | None) -> dict[str, int]:
    grouped: Counter[str] = Counter()
    for one in held:
        grouped[one.group] += rank_bytes(one, spec, ranks, expert_parallel, dtype, expert_ranks)
    return dict(grouped)
