"""cpu-eager-pp: with --enforce-eager on a CPU, every pipeline stage but the first dies at the first request.

The V1 runner allocates its buffer for what the previous stage sends only in the dummy run. A CPU worker with an explicit KV size
and no compilation skips that run, so the buffer is still None and an assert stops the worker. The mend allocates it where it is
first needed, with the expression the dummy run uses, so a later dummy run finds it coherent.
"""

import libcst as cst
import libcst.matchers as m

ID = "cpu-eager-pp"
TITLE = "CPU pipeline in eager mode dies at the first request"
FILE = "v1/worker/gpu_model_runner.py"
SYMBOL = "GPUModelRunner.sync_and_gather_intermediate_tensors"
SYMPTOM = "AssertionError in sync_and_gather_intermediate_tensors"
DROP_WHEN = "vLLM allocates the buffer outside the dummy run"

_BUFFER = m.Attribute(m.Name("self"), m.Name("intermediate_tensors"))
_IS = m.Comparison(_BUFFER, [m.ComparisonTarget(m.Is(), m.Name("None"))])
_IS_NOT = m.Comparison(_BUFFER, [m.ComparisonTarget(m.IsNot(), m.Name("None"))])
_ASSERT = m.SimpleStatementLine([m.Assert(test=_IS_NOT)])
_LAZY = m.If(test=_IS, body=m.IndentedBlock([m.SimpleStatementLine([m.Assign(targets=[m.AssignTarget(_BUFFER)])])]))
_CLASS, _FUNCTION = SYMBOL.split(".")

_MEND = """\
if self.intermediate_tensors is None:
    self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
        batch_size=self.max_num_tokens,
        dtype=self.model_config.dtype,
        device=self.device,
    )
"""


def met_by(device: str, enforce_eager: bool, pipeline_parallel_size: int) -> bool:
    """Would this box run into it? Only a CPU pipeline in eager mode skips the dummy run."""
    return device == "cpu" and enforce_eager and pipeline_parallel_size > 1


def _place(module: cst.Module) -> tuple[int, int] | None:
    """Index of the class in the module and of the function in the class; None when there is not exactly one such function.

    Looked up level by level: a search through the whole tree of this file takes half a second.
    """
    found = []
    for at, node in enumerate(module.body):
        if isinstance(node, cst.ClassDef) and node.name.value == _CLASS:
            members = enumerate(node.body.body)
            found += [(at, inner) for inner, member in members if isinstance(member, cst.FunctionDef) and member.name.value == _FUNCTION]
    return found[0] if len(found) == 1 else None


def _statements(module: cst.Module) -> list[cst.BaseStatement]:
    place = _place(module)
    return list(module.body[place[0]].body.body[place[1]].body.body) if place else []


def detect(module: cst.Module) -> str:
    """'present', 'mended' (the buffer is allocated lazily, by us or upstream) or 'not recognised'."""
    statements = _statements(module)
    if any(m.matches(s, _ASSERT) for s in statements):
        return "present"
    if any(m.matches(s, _LAZY) for s in statements):
        return "mended"
    return "not recognised"


def is_ours(module: cst.Module) -> bool:
    """True when the mend in this module is word for word the one that `edit` makes."""
    mend = cst.parse_statement(_MEND)
    return any(m.matches(s, _LAZY) and s.body.deep_equals(mend.body) for s in _statements(module))


def edit(module: cst.Module) -> cst.Module:
    """The module with the assert replaced by the lazy allocation; everything else byte for byte as it was."""
    mend = cst.parse_statement(_MEND, config=module.config_for_parsing)
    at, inner = _place(module)
    owner = module.body[at]
    function = owner.body.body[inner]
    statements = [mend.with_changes(leading_lines=s.leading_lines) if m.matches(s, _ASSERT) else s for s in function.body.body]
    function = function.with_changes(body=function.body.with_changes(body=statements))
    members = [function if index == inner else member for index, member in enumerate(owner.body.body)]
    owner = owner.with_changes(body=owner.body.with_changes(body=members))
    return module.with_changes(body=[owner if index == at else node for index, node in enumerate(module.body)])
