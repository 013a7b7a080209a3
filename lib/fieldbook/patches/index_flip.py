"""index-flip: a layer that shares top-k indices cannot compute its own where its stage has none to share, though the checkpoint has weights for it.

The mend lets every layer that shares and stands before the first owner of its stage compute its own indices. Each needs indexer weights: GLM-5.2 and 5.3
ship none for such layers, and an indexer without weights picks arbitrary tokens, so the mended code asks the checkpoint's index and raises without them.
The models' loaders take weights of layers that go on sharing for unknown names; the mend drops those.
"""

import libcst as cst
import libcst.matchers as m

from .. import kv, splits
from ..spec import sharing_layers
from .site import MARK, Defect, Site, findall
from .topk_sharing import HY, HY_ATTENTION, RULE, SKIP, V2, V32, V32_ATTENTION, calls, marked, met, predicate, skips_hy

_OWN, _FIRST = "_computes_own_topk", "_shares_before_an_owner"
_BEFORE = f'''\
def {_FIRST}(config, layer):  # {MARK}
    """Whether a layer shares top-k indices and no layer before it on this pipeline stage computes any."""
    from vllm.distributed import get_pp_group
    from vllm.distributed.utils import get_pp_indices

    if layer >= config.num_hidden_layers or _topk_use(config, layer) != "shares":
        return False
    group = get_pp_group()
    start, end = get_pp_indices(config.num_hidden_layers, group.rank_in_group, group.world_size)
    return 0 < start <= layer < end and all(_topk_use(config, earlier) != "owns" for earlier in range(start, layer))
'''
_SOURCE = f'''\
def {_OWN}(config, layer):  # {MARK}
    """{_FIRST}, and the checkpoint has indexer weights for it. Raises RuntimeError where it is not known to have them."""
    if not {_FIRST}(config, layer):
        return False
    import json
    import os

    from huggingface_hub import try_to_load_from_cache
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    if vllm_config.load_config.load_format == "dummy":
        return True
    name, model = "model.safetensors.index.json", vllm_config.model_config.model
    file = os.path.join(model, name) if os.path.isdir(model) else try_to_load_from_cache(model, name, revision=vllm_config.model_config.revision)
    names = ()
    if isinstance(file, str) and os.path.isfile(file):
        with open(file, encoding="utf-8") as index:
            names = json.load(index)["weight_map"]
    if not any(f"layers.{{layer}}.self_attn.indexer." in one for one in names):
        raise RuntimeError(
            f"layer {{layer}} has to compute its own top-k indices on this pipeline stage, and the checkpoint is not known to have indexer weights for it: "
            "cut VLLM_PP_LAYER_PARTITION at a layer that computes its own, or apply Fieldbook's patch index-relay instead"
        )
    return True
'''


def _helper(file: str) -> str:
    return f"{predicate(file)}\n\n{_BEFORE}\n\n{_SOURCE}"


def _flipped(node: cst.If, function: cst.FunctionDef) -> cst.FlattenSentinel:
    """The name is the one that the rule sets."""
    name = next(one.target.value for one in findall(node.body, SKIP))
    return cst.FlattenSentinel([node, marked(f"{name} = {name} and not {_OWN}(config, layer_id)")])


def _by_rule(file: str, symbol: str) -> Site:
    return Site(
        file,
        symbol,
        stock=RULE,
        mended=m.SimpleStatementLine([m.Assign(targets=[SKIP], value=m.MatchIfTrue(lambda value: calls(value, _OWN)))]),
        edit=_flipped,
        helper=_helper(file),
        keeps=True,
        needed=file == V2,
        requires=(m.AssignTarget(m.Name("layer_id")),),
    )


def _flipped_hy(node: cst.SimpleStatementLine, function: cst.FunctionDef) -> cst.SimpleStatementLine:
    own = cst.parse_expression(f"not {_OWN}(config, self.layer_id)")
    both = cst.BooleanOperation(left=node.body[0].value, operator=cst.And(), right=own)
    return node.with_changes(body=[node.body[0].with_changes(value=both)])


_LOOP = m.For(target=m.Tuple([m.Element(m.Name("name")), m.Element()]), iter=m.Name("weights"))


def _drops(body: cst.BaseSuite) -> bool:
    return calls(body, "_has_no_indexer")


def _dropped(node: cst.For, function: cst.FunctionDef) -> cst.For:
    skip = cst.parse_statement(f"if _has_no_indexer(name, params_dict):  # {MARK}\n    continue\n")
    return node.with_changes(body=node.body.with_changes(body=[skip, *node.body.body]))


_NO_INDEXER = f'''\
def _has_no_indexer(name, params):  # {MARK}
    """Whether a weight is of the indexer of a layer that shares top-k indices and so has none."""
    layer, found, _ = name.partition(".indexer.")
    return bool(found) and ".layers." in f".{{layer}}" and not any(one.startswith(f"{{layer}}.indexer.") for one in params)
'''


def _loader(file: str) -> Site:
    return Site(
        file,
        "DeepseekV32Model.load_weights",
        stock=m.For(target=_LOOP.target, iter=_LOOP.iter, body=m.MatchIfTrue(lambda body: not _drops(body))),
        mended=m.For(target=_LOOP.target, iter=_LOOP.iter, body=m.MatchIfTrue(_drops)),
        edit=_dropped,
        helper=_NO_INDEXER,
        needed=False,
        requires=(m.AssignTarget(m.Name("params_dict")),),
    )


_DROPPED_HY = m.AssignTarget(m.Name("skip_topk_layers"))


def _kept_hy(node: cst.Assign, function: cst.FunctionDef) -> cst.Assign:
    all_of_them = cst.Module([]).code_for_node(node.value)
    return node.with_changes(value=cst.parse_expression(f"{{layer for layer in {all_of_them} if not {_FIRST}(self.config, layer)}}"))


def _loader_hy(file: str) -> Site:
    return Site(
        file,
        "HYV4Model.load_weights",
        stock=m.Assign(targets=[_DROPPED_HY], value=m.Call(func=m.Name("compute_skip_topk_layers"))),
        mended=m.Assign(targets=[_DROPPED_HY], value=m.MatchIfTrue(lambda value: calls(value, _FIRST))),
        edit=_kept_hy,
        helper=f"{predicate(file)}\n\n{_BEFORE}",
        needed=False,
    )


def refused(params, spec) -> str:
    """Why a box must not be given this patch, '' where it may: no layer shares, or the layers that would compute their own have no weights for it."""
    from ..partition import indexer_evidence

    if not sharing_layers(spec):
        return f"the layers of {params.model.name} share no top-k indices"
    evidence, best = indexer_evidence(params, spec), params.parallel.layer_partition == "best"
    flips = () if best else tuple(i for stage in kv.flipped_layers(spec, splits.resolve_split(params.parallel, spec)) for i in stage)
    if not evidence.layers or not evidence.allows(flips):
        shown = f"layer {', '.join(map(str, flips))}" if flips else "the layers that share"
        return f"indexer weights for {shown} are not known to be in the checkpoint ({evidence.source}); use a clean partition, or index-relay"
    return ""


DEFECT = Defect(
    id="index-flip",
    title="Layers that share top-k indices cannot compute their own at the beginning of a stage",
    effect="wrong answers without an error where a stage begins with a layer that shares; only for checkpoints with indexer weights on those layers",
    symptom="",
    drop_when="top-k indices cross the boundary (index-relay), or vLLM computes them again itself",
    met_by=met("flip"),
    sites=(
        _by_rule(V32_ATTENTION, "DeepseekV32Attention.__init__"),
        *map(_loader, V32),
        _by_rule(V2, "DeepseekV2MLAAttention.__init__"),
        Site(
            HY_ATTENTION,
            "HYV4MLAAttention.__init__",
            stock=skips_hy(lambda value: not calls(value, _OWN)),
            mended=skips_hy(lambda value: calls(value, _OWN)),
            edit=_flipped_hy,
            helper=_helper(HY_ATTENTION),
            needed=False,
            requires=(m.Param(name=m.Name("config")),),
        ),
        *map(_loader_hy, HY),
    ),
    reports=("001-5",),
    upstream=("vllm-ascend#10232",),
    excludes=("index-relay",),
    refused=refused,
)
