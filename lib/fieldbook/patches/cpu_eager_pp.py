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
_FUNCTION = m.FunctionDef(name=m.Name("sync_and_gather_intermediate_tensors"))

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


def detect(module: cst.Module) -> str:
    """'present', 'mended' (the buffer is allocated lazily, by us or upstream) or 'not recognised'."""
    functions = m.findall(module, _FUNCTION)
    if len(functions) != 1:
        return "not recognised"
    statements = functions[0].body.body
    if any(m.matches(s, _ASSERT) for s in statements):
        return "present"
    if any(m.matches(s, _LAZY) for s in statements):
        return "mended"
    return "not recognised"


def edit(module: cst.Module) -> cst.Module:
    """The module with the assert replaced by the lazy allocation; everything else byte for byte as it was."""
    mend = cst.parse_statement(_MEND, config=module.config_for_parsing)

    class Replace(m.MatcherDecoratableTransformer):
        @m.call_if_inside(_FUNCTION)
        @m.leave(_ASSERT)
        def replace(self, original_node, updated_node):
            return mend.with_changes(leading_lines=updated_node.leading_lines)

    return module.visit(Replace())
