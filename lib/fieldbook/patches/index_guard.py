"""index-guard: a stage that begins with a layer that shares top-k indices is not refused, and answers wrong without an error.

The mend refuses it at start-up, on the stage concerned, unless the indices are brought there (index-relay) or the layer computes its own (index-flip).
"""

from .site import MARK, Defect
from .topk_sharing import MODELS, beside, built, met, rules

_CALL = "_refuse_cut_topk_indices"
_SOURCE = f'''\
def {_CALL}(model):  # {MARK}
    """Raise RuntimeError where this stage would read top-k indices that only an earlier stage has."""
    config, start = model.config, model.start_layer
    if start == 0 or getattr(model, "fieldbook_takes_topk", None) is not None or not _reads_earlier_topk(config, start):
        return
    first = next(layer for layer in range(start, config.num_hidden_layers) if _topk_use(config, layer))
    own = first < model.end_layer and any(getattr(module, "indexer", None) is not None for module in model.layers[first].modules())
    if own:
        return
    clean = [layer for layer in range(1, config.num_hidden_layers) if not _reads_earlier_topk(config, layer)]
    near = [f"before layer {{one}}" for one in (*[c for c in clean if c < start][-1:], *[c for c in clean if c > start][:1])]
    raise RuntimeError(
        f"this pipeline stage begins with layer {{start}}, which reads top-k indices that an earlier layer computes, and they do not come with the hidden "
        f"states: answers would be wrong. Cut VLLM_PP_LAYER_PARTITION {{' or '.join(near) or 'nowhere'}} instead, "
        "or apply Fieldbook's patch index-relay"
    )
'''


def _site(file: str):
    return built(file, _CALL, beside(f"{_CALL}(self)"), _SOURCE)


DEFECT = Defect(
    id="index-guard",
    title="A cut through layers that share top-k indices is not refused",
    effect="wrong answers without an error where a stage begins with a layer that shares; with the guard such a server does not start",
    symptom="",
    drop_when="vLLM refuses such a cut, or top-k indices cross the boundary",
    met_by=met(),
    sites=(*map(_site, MODELS), *rules()),
    reports=("001-5",),
    upstream=("vllm-ascend#10232",),
    blocks=False,  # notebook 03 looks at the cut itself
)
