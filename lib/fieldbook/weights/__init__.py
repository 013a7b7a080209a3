"""Weights from first principles: what each layer holds, in the checkpoint and on every rank, without weights and without torch."""

from .component import Component, pad_vocab, quantized_bytes, rank_bytes
from .model import checkpoint_bytes, checkpoint_components, checkpoint_parameters, components, layer_bytes, mtp_components
from .ranks import RankWeights, buffer_bytes, indexer_checkpoint_bytes, indexer_rank_bytes, layer_kinds, layer_rank_bytes, outside_rank_bytes, rank_weights

__all__ = [
    "Component",
    "RankWeights",
    "buffer_bytes",
    "checkpoint_bytes",
    "checkpoint_components",
    "checkpoint_parameters",
    "components",
    "indexer_checkpoint_bytes",
    "indexer_rank_bytes",
    "layer_bytes",
    "layer_kinds",
    "layer_rank_bytes",
    "mtp_components",
    "outside_rank_bytes",
    "pad_vocab",
    "quantized_bytes",
    "rank_bytes",
    "rank_weights",
]
