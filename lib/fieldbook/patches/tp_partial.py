"""tp-partial: DeepSeek V3.2 and GLM-5 send sums over a pipeline boundary that are still to be added up over the tensor-parallel ranks.

Their layers leave the all-reduce behind the MLP to the norm of the next layer. Over a boundary there is no next norm: the transport takes the tensor for
one that all ranks hold alike, cuts it into shares and joins the shares of different partial sums. Answers are wrong without an error, whatever the
partition. The mend adds up on the sending side and puts the sum into the residual, which the next norm adds anyway.
"""

import libcst as cst
import libcst.matchers as m

from .site import MARK, Defect, Site, findall

# How vLLM's models ask whether they have to hand over to a next stage.
NOT_LAST = m.UnaryOperation(m.Not(), m.Attribute(value=m.Call(func=m.Name("get_pp_group"), args=[]), attr=m.Name("is_last_rank")))
# Exactly these two under their own names: the mend changes what they are bound to.
_BOTH = [m.DictElement(m.SimpleString(f'"{name}"'), m.Name(name)) for name in ("hidden_states", "residual")]
# What index-relay adds to them does not matter here.
_DICT = m.Dict([*_BOTH, m.ZeroOrMore(m.StarredDictElement())])
_RETURN = m.SimpleStatementLine([m.Return(m.Call(func=m.Name("IntermediateTensors"), args=[m.Arg(_DICT)]))])
_HELPER = "_summed_over_tp"
_SUMMED = m.SimpleStatementLine([m.Assign(value=m.Call(func=m.Name(_HELPER)))])
_SOURCE = f'''\
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce  # {MARK}


def {_HELPER}(hidden_states, residual):  # {MARK}
    """(zeros, residual with the hidden states of all tensor-parallel ranks added): what may cross a pipeline boundary."""
    if get_tensor_model_parallel_world_size() == 1:
        return hidden_states, residual
    return torch.zeros_like(hidden_states), residual + tensor_model_parallel_all_reduce(hidden_states)
'''


def _reduces(body: cst.BaseSuite) -> bool:
    return bool(findall(body, m.Name(_HELPER) | m.Name("tensor_model_parallel_all_reduce")))


def _sends(body: cst.BaseSuite) -> bool:
    return m.matches(body, m.IndentedBlock([m.ZeroOrMore(), _RETURN]))


def _summed(node: cst.If, function: cst.FunctionDef) -> cst.If:
    mend = cst.parse_statement(f"hidden_states, residual = {_HELPER}(hidden_states, residual)  # {MARK}\n")
    return node.with_changes(body=node.body.with_changes(body=[*node.body.body[:-1], mend, node.body.body[-1]]))


def _site(vendor: str) -> Site:
    return Site(
        f"models/deepseek_v32/{vendor}/model.py",
        "DeepseekV32Model.forward",
        stock=m.If(test=NOT_LAST, body=m.MatchIfTrue(lambda body: _sends(body) and not _reduces(body))),
        mended=m.If(test=NOT_LAST, body=m.MatchIfTrue(lambda body: _sends(body) and _reduces(body))),
        edit=_summed,
        helper=_SOURCE,
        trace=m.Return(m.Call(func=m.Name("IntermediateTensors"))),
        needed=False,
        wants=m.Arg(keyword=m.Name("reduce_results"), value=m.Name("False")),
    )


def met_by(params, spec) -> bool:
    """TP and PP together on such a model; on a CPU the generic model runs, which adds up."""
    sparse = any(layer.attention.kind == "sparse_mla" for layer in spec.layers)
    return sparse and params.engine.device == "cuda" and params.parallel.tensor_parallel_size > 1 and params.parallel.pipeline_parallel_size > 1


DEFECT = Defect(
    id="tp-partial",
    title="Sums that are not yet added up over tensor-parallel ranks cross the pipeline boundary",
    effect="wrong answers without an error whenever TP > 1 and PP > 1 (DeepSeek V3.2, GLM-5)",
    symptom="",
    drop_when="the model adds up before it returns IntermediateTensors, or its layers reduce their own results",
    met_by=met_by,
    sites=(_site("nvidia"), _site("amd")),
    upstream=(),
)
