"""index-relay: the top-k indices that layers share do not cross the pipeline boundary.

The mend sends the indices along with the hidden states over the boundaries where the next stage begins with a layer that shares, and only there, and puts
them into that stage's buffer before its first layer. They are positions in a request, so they hold on every stage. They are not cut into shares over the
tensor-parallel ranks: ranks that break ties differently hold different indices, and shares of both would be neither's.
"""

import libcst as cst
import libcst.matchers as m

from .site import MARK, Defect, Site, findall
from .topk_sharing import MODELS, V2, beside, built, calls, met, rules
from .tp_partial import NOT_LAST

_RELAY, _TAKE, _SENT = "_relay_topk_indices", "_take_topk_indices", "_sent_topk_indices"
# Zeros for a stage that nothing has reached yet: the first position, which every request has.
_SOURCE = f'''\
def {_RELAY}(model, buffer):  # {MARK}
    """Find out over which ends of this stage top-k indices cross, and name them among the tensors that come in."""
    config, last = model.config, model.config.num_hidden_layers
    model.fieldbook_takes_topk = buffer if model.start_layer > 0 and _reads_earlier_topk(config, model.start_layer) else None
    model.fieldbook_sends_topk = buffer if model.end_layer < last and _reads_earlier_topk(config, model.end_layer) else None
    if model.fieldbook_takes_topk is None:
        return
    others = model.make_empty_intermediate_tensors

    def with_topk_indices(batch_size, dtype, device):
        made = others(batch_size, dtype, device)
        made.tensors["topk_indices"] = torch.zeros((batch_size, buffer.shape[1]), dtype=buffer.dtype, device=device)
        return made

    model.make_empty_intermediate_tensors = with_topk_indices


def {_TAKE}(model, intermediate_tensors):  # {MARK}
    """Put the indices that came from the stage before where the first layers read them."""
    buffer = getattr(model, "fieldbook_takes_topk", None)
    if buffer is not None:
        came = intermediate_tensors["topk_indices"]
        buffer[: came.shape[0]].copy_(came)


def {_SENT}(model, num_tokens):  # {MARK}
    """The indices for the stage after, by name; a copy, since the next step writes the buffer."""
    buffer = getattr(model, "fieldbook_sends_topk", None)
    return {{}} if buffer is None else {{"topk_indices": buffer[:num_tokens].clone()}}
'''


def _relayed(node: cst.BaseStatement, function: cst.FunctionDef) -> cst.FlattenSentinel:
    """The buffer is the model's own or a local, by release."""
    own = findall(function, m.AssignTarget(m.Attribute(m.Name("self"), m.Name("topk_indices_buffer"))))
    return beside(f"{_RELAY}(self, {'self.' if own else ''}topk_indices_buffer)")(node, function)


_CAME = m.Subscript(value=m.Name("intermediate_tensors"), slice=[m.SubscriptElement(m.Index(m.SimpleString('"residual"')))])
_RESIDUAL = m.Assign(targets=[m.AssignTarget(m.Name("residual"))], value=m.OneOf(_CAME, m.IfExp(orelse=_CAME)))


def _takes(file: str) -> Site:
    return Site(
        file,
        f"{MODELS[file]}.forward",
        stock=m.SimpleStatementLine([_RESIDUAL]),
        mended=m.SimpleStatementLine([m.Expr(m.Call(func=m.Name(_TAKE)))]),
        edit=beside(f"{_TAKE}(self, intermediate_tensors)"),
        keeps=True,
        needed=file == V2,
        requires=(m.Param(name=m.Name("intermediate_tensors")),),
    )


_SENDS = m.Return(m.Call(func=m.Name("IntermediateTensors"), args=[m.Arg(m.Dict())]))


def _sends(body: cst.BaseSuite) -> bool:
    """Every way out of a block hands a dictionary of tensors to the next stage."""
    ways = findall(body, m.Return())
    return bool(ways) and all(m.matches(one, _SENDS) for one in ways)


class _With(cst.CSTTransformer):
    """Adds the indices to each dictionary that is sent."""

    def leave_Return(self, original_node: cst.Return, updated_node: cst.Return) -> cst.Return:
        sent = updated_node.value.args[0].value
        added = cst.StarredDictElement(cst.parse_expression(f"{_SENT}(self, positions.shape[0])"), comma=sent.elements[-1].comma)
        before = sent.elements[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        return updated_node.with_deep_changes(sent, elements=[*sent.elements[:-1], before, added])


def _with_indices(node: cst.If, function: cst.FunctionDef) -> cst.If:
    return node.with_changes(body=node.body.visit(_With()))


def _hands_over(file: str) -> Site:
    return Site(
        file,
        f"{MODELS[file]}.forward",
        stock=m.If(test=NOT_LAST, body=m.MatchIfTrue(lambda body: _sends(body) and "topk" not in cst.Module([]).code_for_node(body))),
        mended=m.If(test=NOT_LAST, body=m.MatchIfTrue(lambda body: _sends(body) and calls(body, _SENT))),
        edit=_with_indices,
        needed=file == V2,
        requires=(m.Param(name=m.Name("positions")),),
    )


def _build(file: str) -> Site:
    return built(file, _RELAY, _relayed, _SOURCE)


_KEYWORD = m.Arg(keyword=m.Name("all_gather_tensors"))
_GROUP = m.Arg(keyword=m.Name("all_gather_group"))


def _whole(args: list[cst.Arg]) -> bool:
    """Whether the call already says how the indices cross."""
    return any(m.matches(arg, _KEYWORD) and "topk_indices" in cst.Module([]).code_for_node(arg) for arg in args)


def _uncut(node: cst.Call, function: cst.FunctionDef) -> cst.Call:
    """The call with the word that the indices are not cut into shares; what it says of other tensors stays."""
    at = next((i for i, arg in enumerate(node.args) if m.matches(arg, _KEYWORD)), None)
    if at is not None:
        others = cst.Module([]).code_for_node(node.args[at].value)
        value = cst.parse_expression(f'{{**{others}, "topk_indices": False}}')
        return node.with_changes(args=[*node.args[:at], node.args[at].with_changes(value=value), *node.args[at + 1 :]])
    last = node.args[-1]
    added = cst.Arg(
        cst.parse_expression('{"topk_indices": False}'), cst.Name("all_gather_tensors"), cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        comma=last.comma,
    )  # fmt: skip
    before = last.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return node.with_changes(args=[*node.args[:-1], before, added])


def _transport(method: str) -> Site:
    def call(whole: bool) -> m.Call:
        grouped = m.MatchIfTrue(lambda args: _whole(args) is whole and any(m.matches(arg, _GROUP) for arg in args))
        return m.Call(func=m.Attribute(attr=m.Name(method)), args=grouped)

    return Site("v1/worker/gpu_worker.py", "Worker.execute_model", stock=call(False), mended=call(True), edit=_uncut)


DEFECT = Defect(
    id="index-relay",
    title="Top-k indices that layers share do not cross the pipeline boundary",
    effect="wrong answers without an error where a stage begins with a layer that shares (GLM-5.2 and 5.3 by default)",
    symptom="",
    drop_when="vLLM sends the indices itself",
    met_by=met("relay"),
    sites=(
        *(site for file in MODELS for site in (_build(file), _takes(file), _hands_over(file))),
        _transport("irecv_tensor_dict"),
        _transport("isend_tensor_dict"),
        *rules(),
    ),
    reports=("001-5",),
    upstream=("vllm-ascend#15614", "sglang#28532"),
    excludes=("index-flip",),
)

