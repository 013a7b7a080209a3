"""kv-ghost: a stage without a layer of some KV group is given that group's tensors of other stages, and dies allocating them.

The plan of one worker takes its layers out of the group's specs, which are those of all stages. The mend keeps to the layers that the group has here.
"""

import libcst as cst
import libcst.matchers as m

from .site import MARK, Defect, Site

_ITEMS = m.Call(func=m.Attribute(value=m.Attribute(attr=m.Name("kv_cache_specs")), attr=m.Name("items")), args=[])
_APPEND = m.SimpleStatementLine([m.Expr(m.Call(func=m.Attribute(attr=m.Name("append"))))])
_UNIFORM = m.Call(func=m.Name("isinstance"), args=[m.DoNotCare(), m.Arg(m.Name("UniformTypeKVCacheSpecs"))])
_PAIR = m.Tuple([m.Element(m.Name()), m.Element(m.Name())])


def _loop(body: m.BaseMatcherNode) -> m.For:
    return m.For(target=_PAIR, iter=_ITEMS, body=m.IndentedBlock([body]))


def _group_loop(inner: m.For) -> m.For:
    """The loop over groups that has, on its first level, the branch for uniform specs with this loop in it."""
    branch = m.If(test=_UNIFORM, body=m.IndentedBlock([inner]))
    return m.For(target=m.Name(), body=m.IndentedBlock([m.ZeroOrMore(), branch, m.ZeroOrMore()]))


_HELD = m.If(test=m.Comparison(m.Name(), [m.ComparisonTarget(m.In(), m.Attribute(attr=m.Name("layer_names")))]), body=m.IndentedBlock([_APPEND]))


class _Keep(cst.CSTTransformer):
    """Puts the append under a condition."""

    def __init__(self, group: str):
        self.group = group

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        if not m.matches(original_node, _loop(_APPEND)):
            return updated_node
        layer = original_node.target.elements[0].value.value
        held = cst.parse_statement(f"if {layer} in {self.group}.layer_names:  # {MARK}\n    pass\n")
        held = held.with_changes(body=held.body.with_changes(body=updated_node.body.body))
        return updated_node.with_changes(body=updated_node.body.with_changes(body=[held]))


def _filtered(node: cst.For, function: cst.FunctionDef) -> cst.For:
    return node.visit(_Keep(node.target.value))


def _site(file: str) -> Site:
    return Site(
        file,
        "get_kv_cache_config_from_groups",
        stock=_group_loop(_loop(_APPEND)),
        mended=_group_loop(_loop(_HELD)),
        edit=_filtered,
        needed=False,
        requires=(m.Attribute(attr=m.Name("layer_names")),),
    )


def met_by(params, spec) -> bool:
    """A pipeline where some stage lacks a layer of a packed group: Qwen4Exp with an n-gram layer's convolution, which only the first stage has."""
    packed = spec.model_type.startswith("qwen4") and any(layer.short_conv for layer in spec.layers)
    return packed and params.parallel.pipeline_parallel_size > 1


DEFECT = Defect(
    id="kv-ghost",
    title="KV tensors of layers that lie on other stages are planned on this one",
    effect="every stage but the first ends at start-up with a StopIteration that has no words, in models with packed KV layouts",
    symptom="StopIteration",
    drop_when="the projection of a group on a worker drops the specs of layers that are not there (#54793)",
    met_by=met_by,
    # 0.33 moved the function.
    sites=(_site("v1/core/kv_cache_planning.py"), _site("v1/core/kv_cache_utils.py")),
    upstream=("vllm#54711", "vllm#54793"),
    bundle=("ple-containment", "mtp-stage"),
)
