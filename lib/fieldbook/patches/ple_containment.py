"""ple-containment: Qwen4Exp refuses every pipeline, where it need only refuse one whose later stages hold an n-gram embedding.

Only the first stage has the token ids that the n-gram table is read with. A pipeline is right as long as every n-gram layer lies there; ple_layer_ids
count from 1. Three guards say the same: one in the config hook, which engine and draft run, and one in each vendor's model state.
"""

import libcst as cst
import libcst.matchers as m

from .site import MARK, Defect, Site, findall

_PP = m.Comparison(m.Attribute(attr=m.Name("pipeline_parallel_size")), [m.ComparisonTarget(m.GreaterThan(), m.Integer("1"))])
_HELPER = "_ple_in_first_stage"
_CALL = m.UnaryOperation(m.Not(), m.Call(func=m.Name(_HELPER)))
# The predicate imports where it is called: the config module is loaded before vllm.distributed in some entry points.
_SOURCE = f'''\
def {_HELPER}(text_config, pipeline_parallel_size):  # {MARK}
    """Whether the first pipeline stage holds every n-gram layer; ple_layer_ids count from 1."""
    from vllm.distributed.utils import get_pp_indices

    first_end = get_pp_indices(text_config.num_hidden_layers, 0, pipeline_parallel_size)[1]
    return all(0 <= int(number) - 1 < first_end for number in text_config.ple_layer_ids)
'''


def _raises_ple(body: cst.BaseSuite) -> bool:
    """Whether a block raises the refusal: its words are the only thing that tells this guard from others that are right."""
    raised = findall(body, m.Raise())
    return any("N-gram PLE embedding" in cst.Module([]).code_for_node(one) for one in raised)


def _contains(test: cst.BaseExpression) -> bool:
    return bool(findall(test, _CALL))


def _is_plain(test: cst.BaseExpression) -> bool:
    return m.matches(test, m.OneOf(_PP, m.BooleanOperation(operator=m.And(), right=_PP)))


_GUARD = m.MatchIfTrue(_raises_ple)


_MORE = '" A pipeline whose first stage holds all of ple_layer_ids is fine: give it more layers with VLLM_PP_LAYER_PARTITION."'


def _with_more(words: cst.BaseString) -> cst.ConcatenatedString:
    """Words in several literals have the next one on their right."""
    if isinstance(words, cst.ConcatenatedString):
        return words.with_changes(right=_with_more(words.right))
    return cst.ConcatenatedString(words, cst.SimpleString(_MORE), whitespace_between=cst.SimpleWhitespace(" "))


class _SayMore(cst.CSTTransformer):
    """Adds to the refusal what would be right now. The stock words come first, since they are what people search for."""

    def leave_Raise(self, original_node: cst.Raise, updated_node: cst.Raise) -> cst.Raise:
        if not m.matches(updated_node.exc, m.Call(args=[m.Arg(m.SimpleString() | m.ConcatenatedString())])):
            return updated_node
        words = updated_node.exc.args[0]
        return updated_node.with_changes(exc=updated_node.exc.with_changes(args=[words.with_changes(value=_with_more(words.value))]))


def _site(file: str, symbol: str, config: str, requires: m.BaseMatcherNode) -> Site:
    def contained(node: cst.If, function: cst.FunctionDef) -> cst.If:
        sizes = findall(node.test, m.Attribute(attr=m.Name("pipeline_parallel_size")))
        called = cst.parse_expression(f"not {_HELPER}({config}, {cst.Module([]).code_for_node(sizes[0])})")
        return node.with_changes(test=cst.BooleanOperation(left=node.test, operator=cst.And(), right=called), body=node.body.visit(_SayMore()))

    return Site(
        file,
        symbol,
        stock=m.If(test=m.MatchIfTrue(_is_plain), body=_GUARD),
        mended=m.If(test=m.MatchIfTrue(_contains), body=_GUARD),
        edit=contained,
        helper=_SOURCE,
        trace=m.If(body=_GUARD),
        gone="mended",
        needed=False,
        requires=(requires,),
    )


# The predicate is asked with these names, which hold the text model's config.
_TEXT = m.Attribute(value=m.Name("text_config"), attr=m.Name("ple_layer_ids"))
_CONFIG = m.Assign(targets=[m.AssignTarget(m.Name("config"))], value=m.Attribute(attr=m.Name("hf_text_config")))


def met_by(params, spec) -> bool:
    """A pipeline of a model with n-gram embeddings."""
    return spec.model_type.startswith("qwen4") and any(layer.short_conv for layer in spec.layers) and params.parallel.pipeline_parallel_size > 1


DEFECT = Defect(
    id="ple-containment",
    title="Qwen4Exp refuses pipelines whose first stage holds all n-gram embeddings",
    effect="the server does not start with a pipeline, though it could",
    symptom="requires pipeline_parallel_size=1",
    drop_when="the guards look at which stage holds the n-gram layers, or token ids cross the boundary (#56444)",
    met_by=met_by,
    sites=(
        _site("model_executor/models/config.py", "Qwen4ExpForConditionalGenerationConfig.verify_and_update_config", "text_config", _TEXT),
        _site("models/qwen4_exp/nvidia/model_state.py", "Qwen4ExpModelState.__init__", "config", _CONFIG),
        _site("models/qwen4_exp/amd/model_state.py", "Qwen4ExpModelState.__init__", "config", _CONFIG),
    ),
    reports=("000-3",),
    upstream=("vllm#56444",),
    bundle=("mtp-stage", "kv-ghost"),
)
