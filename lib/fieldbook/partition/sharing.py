"""The three ways to treat a cut through layers that share top-k indices, side by side: what each allows, needs and costs."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from .. import paths, safetensors_headers, weights
from ..budget import Gpus
from ..errors import BadInput
from ..memory import GIB
from ..params import Params
from ..spec import ModelSpec, sharing_layers
from .plan import Plan, plan
from .table import stage_table

MODES = ("clean", "relay", "flip")
# One index is an int32 (vLLM: models/deepseek_v32/nvidia/model.py, topk_indices_buffer).
INDEX_BYTES = 4
# A stated checkpoint size speaks for one of two counts when it is this many times nearer to it.
CLEARLY_NEARER = 3


@dataclass(frozen=True)
class IndexerEvidence:
    """Layers that share indices and still have indexer weights in the checkpoint; None: nothing tells. source: what says so."""

    layers: tuple[int, ...] | None
    source: str

    def allows(self, flipped: tuple[int, ...]) -> bool:
        """Whether all these layers could compute their own indices."""
        return not flipped or (self.layers is not None and set(flipped) <= set(self.layers))


@dataclass(frozen=True)
class Treatment:
    """One way with its best split. usable: it may be used with what is known of the checkpoint; needs: patches, and weights that must be there;
    relay_bytes_per_token: what the way adds to one boundary."""

    mode: str
    plan: Plan
    usable: bool
    needs: tuple[str, ...]
    relay_bytes_per_token: int


def indexer_evidence(params: Params, spec: ModelSpec) -> IndexerEvidence:
    """Whether layers that share indices have indexer weights: by tensor names where the checkpoint or its index is here, else by its stated size."""
    shared = sharing_layers(spec)
    for folder in (Path(params.model.path) if params.model.path else paths.model_weights_dir(params.model.name), paths.model_config_dir(params.model.name)):
        names = _tensor_names(folder)
        if names is not None:
            found = {int(m[1]) for name in names if (m := re.search(r"\blayers\.(\d+)\.self_attn\.indexer\.", name))}
            held = tuple(i for i in shared if i in found)
            return IndexerEvidence(held, f"tensor names of the checkpoint: {len(held)} of {len(shared)} sharing layers have indexer weights")
    if params.model.checkpoint_gib is None:
        return IndexerEvidence(None, "neither the checkpoint, nor its index, nor model.checkpoint_gib is here")
    return _by_size(spec, params.model.checkpoint_gib, shared)


def _by_size(spec: ModelSpec, stated_gib: float, shared: tuple[int, ...]) -> IndexerEvidence:
    without = weights.checkpoint_bytes(spec) / GIB
    each = weights.indexer_checkpoint_bytes(spec) / GIB
    every = without + len(shared) * each
    text = f"checkpoint of {stated_gib:g} GiB as stated: {without:.3f} GiB with indexers on owning layers only, {every:.3f} with all"
    near, far = sorted((abs(stated_gib - without), abs(stated_gib - every)))
    if near * CLEARLY_NEARER > far:
        return IndexerEvidence(None, f"{text}; it speaks for neither")
    return IndexerEvidence(() if near == abs(stated_gib - without) else shared, text)


def _tensor_names(folder: Path) -> list[str] | None:
    """Names of all tensors, by the index alone where there is one; None where the folder holds neither."""
    index = folder / safetensors_headers.INDEX
    if index.is_file():
        try:
            return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError):
            raise BadInput(f"{paths.shown(index)}: not an index of safetensors files with a weight_map") from None
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        return [tensor.name for tensor in safetensors_headers.read_folder(folder)]
    return None


def relay_bytes_per_token(spec: ModelSpec) -> int:
    """What relayed top-k indices add to a boundary for each token, on every TP rank; 0 for a model without an indexer."""
    return max((layer.attention.indexer.topk for layer in spec.layers if layer.attention.indexer), default=0) * INDEX_BYTES


def treatments(params: Params, spec: ModelSpec, gpus: Gpus | None = None) -> list[Treatment]:
    """All three with the best split of each, in the order of MODES; empty for a model whose layers share no indices.

    flip is judged by the layers that its best split flips. Raises BadInput as stage_table does.
    """
    if not sharing_layers(spec):
        return []
    evidence = indexer_evidence(params, spec)
    found = []
    for mode in MODES:
        best = plan(stage_table(params, spec, gpus, index_sharing=mode, flippable=evidence.layers if mode == "flip" else None))
        flipped = tuple(i for stage in (best.best.flips if best.best else ()) for i in stage)
        crossing = mode == "relay" and best.best is not None and any(best.best.cut_indices[1:])
        needs = {"clean": (), "relay": ("index-relay",) if crossing else (), "flip": ("index-flip", "indexer weights") if flipped else ()}[mode]
        usable = best.best is not None and (mode != "flip" or evidence.allows(flipped))
        found.append(Treatment(mode, best, usable, needs, relay_bytes_per_token(spec) if crossing else 0))
    return found


def flip_refused(params: Params, spec: ModelSpec, flips: tuple[tuple[int, ...], ...]) -> str:
    """Why a split with these flips must not be served, '' where it may: flipped layers without indexer weights compute with uninitialised memory."""
    flipped = tuple(i for stage in flips for i in stage)
    evidence = indexer_evidence(params, spec)
    if evidence.allows(flipped):
        return ""
    shown = ", ".join(map(str, flipped))
    return f"flip needs indexer weights for layer {shown}, which this checkpoint is not known to have ({evidence.source}); use clean or relay"
