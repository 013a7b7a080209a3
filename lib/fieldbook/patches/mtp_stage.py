"""mtp-stage: Qwen4Exp's draft model asks whether its process is the first pipeline stage, and it lives on the last one.

The drafter is a model of one stage, so what tells whether it starts from embeddings is whether tensors of a stage before it came in.
"""

import libcst as cst
import libcst.matchers as m

from .site import Defect, Site, findall

_FIRST = m.Attribute(value=m.Call(func=m.Name("get_pp_group"), args=[]), attr=m.Name("is_first_rank"))
_NONE_CAME = m.Comparison(m.Name("intermediate_tensors"), [m.ComparisonTarget(m.Is(), m.Name("None"))])
_CAME = m.Assert(test=m.Comparison(m.Name("intermediate_tensors"), [m.ComparisonTarget(m.IsNot(), m.Name("None"))]))


def _asserts(orelse: cst.CSTNode) -> bool:
    return isinstance(orelse, cst.Else) and bool(findall(orelse, _CAME))


_ELSE = m.MatchIfTrue(_asserts)


def _by_tensors(node: cst.If, function: cst.FunctionDef) -> cst.If:
    return node.with_changes(test=cst.parse_expression("intermediate_tensors is None"))


def _site(vendor: str) -> Site:
    return Site(
        f"models/qwen4_exp/{vendor}/mtp.py",
        "Qwen4ExpMultiTokenPredictor.forward",
        stock=m.If(test=_FIRST, orelse=_ELSE),
        mended=m.If(test=_NONE_CAME, orelse=_ELSE),
        edit=_by_tensors,
        needed=False,
        requires=(m.Param(name=m.Name("intermediate_tensors")),),
    )


DEFECT = Defect(
    id="mtp-stage",
    title="Qwen4Exp's draft model takes the last stage for one that needs the tensors of a stage before",
    effect="the last stage asserts as soon as it drafts",
    symptom="AssertionError in Qwen4ExpMultiTokenPredictor.forward",
    drop_when="the draft model looks at intermediate_tensors, as qwen3_5_mtp.py does",
    met_by=lambda params, spec: spec.model_type.startswith("qwen4") and params.parallel.pipeline_parallel_size > 1 and params.engine.mtp_tokens > 0,
    sites=(_site("nvidia"), _site("amd")),
    upstream=("vllm#54709",),
    bundle=("ple-containment", "kv-ghost"),
)
