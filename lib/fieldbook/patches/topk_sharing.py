"""What the three patches for a cut through layers that share top-k indices have in common: where the models are, and which of their layers share.

A layer that shares reads the indices that an earlier layer of the same stage has left in a buffer. At the beginning of a stage nobody has, and the layer
reads what an earlier step left there, or memory that was never written.
"""

import libcst as cst
import libcst.matchers as m

from ..spec import sharing_layers
from .site import MARK, Site, findall

# Files, and in each the class of the model, its predicate below, and what the file has instead of one assignment of the factory.
V32 = ("models/deepseek_v32/nvidia/model.py", "models/deepseek_v32/amd/model.py")
V2 = "model_executor/models/deepseek_v2.py"
HY = ("models/hy_v4/nvidia/model.py", "models/hy_v4/amd/model.py")
V32_ATTENTION = "models/deepseek_v32/attention.py"
HY_ATTENTION = "models/hy_v4/nvidia/attention.py"
MODELS = {**dict.fromkeys(V32, "DeepseekV32Model"), V2: "DeepseekV2Model", **dict.fromkeys(HY, "HYV4Model")}

# vLLM's own rule (models/deepseek_v32/attention.py, model_executor/models/deepseek_v2.py), which indexer_types has no part in.
_RULE = f'''\
def _topk_use(config, layer):  # {MARK}
    """'shares' for a decoder layer that reads the top-k indices of an earlier one, 'owns' for one that computes its own, '' for one without."""
    if not hasattr(config, "index_topk"):
        return ""
    pattern = getattr(config, "index_topk_pattern", None)
    if pattern is not None:
        return "shares" if layer < len(pattern) and pattern[layer] == "S" else "owns"
    offset = getattr(config, "index_skip_topk_offset", 2)
    return "shares" if max(layer - offset + 1, 0) % getattr(config, "index_topk_freq", 1) else "owns"
'''
_RULE_HY = f'''\
def _topk_use(config, layer):  # {MARK}
    """'shares' for a decoder layer that reads the top-k indices of an earlier one, 'owns' for one that computes its own, '' for one without."""
    types = getattr(config, "layer_types", None) or ()
    if not hasattr(config, "index_topk") or layer >= len(types) or types[layer] not in _SPARSE_LAYER_TYPES:
        return ""
    return "shares" if layer in compute_skip_topk_layers(config) else "owns"
'''
_RULE_HY_ELSEWHERE = _RULE_HY.replace(
    "    types = getattr", "    from vllm.models.hy_v4.nvidia.attention import _SPARSE_LAYER_TYPES\n\n    types = getattr"
)
_CUT = f'''\
def _reads_earlier_topk(config, start):  # {MARK}
    """Whether a pipeline stage that begins with this layer has to be given top-k indices: the first layer from there on that uses any shares them."""
    uses = (_topk_use(config, layer) for layer in range(start, config.num_hidden_layers))
    return next((use for use in uses if use), "owns") == "shares"
'''


def predicate(file: str) -> str:
    """Source of the functions that tell which layers of a model share, for this file."""
    rule = _RULE_HY if file == HY_ATTENTION else _RULE_HY_ELSEWHERE if file in HY else _RULE
    return f"{rule}\n\n{_CUT}"


def calls(node: cst.CSTNode, name: str) -> bool:
    """Whether a function of this name is called anywhere in a piece of source."""
    return bool(findall(node, m.Call(func=m.Name(name))))


def marked(statement: str) -> cst.BaseStatement:
    """A statement with Fieldbook's mark on it."""
    return cst.parse_statement(f"{statement}  # {MARK}\n")


def beside(statement: str):
    """An edit: the statement comes right after the one that was found, which stays."""

    def added(node: cst.BaseStatement, function: cst.FunctionDef) -> cst.FlattenSentinel:
        return cst.FlattenSentinel([node, marked(statement)])

    return added


_TARGET = m.AssignTarget(m.Attribute(m.Name("self"), m.Name("make_empty_intermediate_tensors")))
_FACTORY = m.SimpleStatementLine([m.Assign(targets=[_TARGET], value=m.Call(func=m.Name("make_empty_intermediate_tensors_factory")))])
# HYV4 has one of two, by the form of its hidden states.
_FACTORIES = m.If(
    test=m.Attribute(m.Name("self"), m.Name("enable_ihc")),
    body=m.IndentedBlock([m.ZeroOrMore(), _FACTORY, m.ZeroOrMore()]),
    orelse=m.Else(m.IndentedBlock([m.ZeroOrMore(), _FACTORY, m.ZeroOrMore()])),
)
# What the helpers ask the model for.
_SPLIT = m.AssignTarget(m.Tuple([m.Element(m.Attribute(m.Name("self"), m.Name(name))) for name in ("start_layer", "end_layer", "layers")]))
_MADE = (m.AssignTarget(m.Attribute(m.Name("self"), m.Name("config"))), _SPLIT)
_BUFFER = m.AssignTarget(m.OneOf(m.Name("topk_indices_buffer"), m.Attribute(m.Name("self"), m.Name("topk_indices_buffer"))))


def built(file: str, call: str, edit, source: str) -> Site:
    """The place in a model's __init__ where layers and buffer are there and the tensors that cross the boundary are named; `call` comes after it.

    source: the functions that the edits of this file call, beside the predicate.
    """
    return Site(
        file,
        f"{MODELS[file]}.__init__",
        stock=_FACTORIES if file in HY else _FACTORY,
        mended=m.SimpleStatementLine([m.Expr(m.Call(func=m.Name(call)))]),
        edit=edit,
        helper=f"{predicate(file)}\n\n{source}",
        keeps=True,
        needed=file == V2,
        requires=(_BUFFER, *_MADE),
    )


_PATTERN = m.Comparison(m.Name(), [m.ComparisonTarget(m.Is(), m.Name("None"))])


# By release and file.
SKIP = m.AssignTarget(m.Name("skip_topk") | m.Name("_skip_topk"))


def _sets_skip(node: cst.BaseSuite) -> bool:
    return bool(findall(node, m.Assign(targets=[SKIP])))


def _takes_s(node: cst.CSTNode) -> bool:
    """Whether the other branch takes a layer for one that shares where the pattern says S, and no other letter."""
    return isinstance(node, cst.If) and bool(findall(node, m.Comparison(comparisons=[m.ComparisonTarget(m.Equal(), m.SimpleString('"S"'))])))


# max(layer - offset + 1, 0) % freq != 0, else by the pattern.
_FORMULA = m.Comparison(
    m.BinaryOperation(
        left=m.Call(
            func=m.Name("max"),
            args=[m.Arg(m.BinaryOperation(m.BinaryOperation(m.Name(), m.Subtract(), m.Name()), m.Add(), m.Integer("1"))), m.Arg(m.Integer("0"))],
        ),
        operator=m.Modulo(),
    ),
    [m.ComparisonTarget(m.NotEqual(), m.Integer("0"))],
)
RULE = m.If(
    test=_PATTERN,
    body=m.MatchIfTrue(lambda body: _sets_skip(body) and bool(findall(body, _FORMULA))),
    orelse=m.MatchIfTrue(lambda node: node is not None and _takes_s(node)),
)
_NEVER = m.Name("")
_SKIPS_HY = m.AssignTarget(m.Attribute(m.Name("self"), m.Name("skip_topk")))


def skips_hy(wanted) -> m.SimpleStatementLine:
    """The statement of HYV4's attention that says whether a layer shares: a sparse one that compute_skip_topk_layers names. wanted(value): more to ask."""
    named = m.MatchIfTrue(lambda value: calls(value, "compute_skip_topk_layers") and wanted(value))
    return m.SimpleStatementLine([m.Assign(targets=[_SKIPS_HY], value=named)])


def rules() -> tuple[Site, ...]:
    """What the predicate relies on and nobody edits: vLLM's rule of which layers share still has the form that was read."""
    return (
        Site(V32_ATTENTION, "DeepseekV32Attention.__init__", stock=RULE, mended=_NEVER, edit=None, needed=False),
        Site(V2, "DeepseekV2MLAAttention.__init__", stock=RULE, mended=_NEVER, edit=None),
        Site(HY_ATTENTION, "HYV4MLAAttention.__init__", stock=skips_hy(lambda value: True), mended=_NEVER, edit=None, needed=False),
    )


def met(mode: str | None = None):
    """Whether a box cuts such a model into stages, in this way of treating the cuts; None: in whichever."""

    def met_by(params, spec) -> bool:
        parallel = params.parallel
        return bool(sharing_layers(spec)) and parallel.pipeline_parallel_size > 1 and mode in (None, parallel.index_sharing)

    return met_by
