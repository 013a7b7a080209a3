"""cpu-eager-pp: with --enforce-eager on a CPU, every pipeline stage but the first dies at the first request.

The V1 runner allocates its buffer for what the previous stage sends only in the dummy run. A CPU worker with an explicit KV size
and no compilation skips that run, so the buffer is still None and an assert stops the worker. The mend allocates it where it is
first needed, with the expression the dummy run uses, so a later dummy run finds it coherent.
"""

import libcst as cst
import libcst.matchers as m

from .site import Defect, Site

_BUFFER = m.Attribute(m.Name("self"), m.Name("intermediate_tensors"))
_IS = m.Comparison(_BUFFER, [m.ComparisonTarget(m.Is(), m.Name("None"))])
_IS_NOT = m.Comparison(_BUFFER, [m.ComparisonTarget(m.IsNot(), m.Name("None"))])

_MEND = """\
if self.intermediate_tensors is None:
    self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
        batch_size=self.max_num_tokens,
        dtype=self.model_config.dtype,
        device=self.device,
    )
"""


def _allocated(node: cst.SimpleStatementLine, function: cst.FunctionDef) -> cst.BaseStatement:
    return cst.parse_statement(_MEND).with_changes(leading_lines=node.leading_lines)


DEFECT = Defect(
    id="cpu-eager-pp",
    title="CPU pipeline in eager mode dies at the first request",
    effect="the second stage asserts at the first request, and the server ends",
    symptom="AssertionError in sync_and_gather_intermediate_tensors",
    drop_when="vLLM allocates the buffer outside the dummy run",
    met_by=lambda params, spec: params.engine.device == "cpu" and params.engine.enforce_eager and params.parallel.pipeline_parallel_size > 1,
    sites=(
        Site(
            "v1/worker/gpu_model_runner.py",
            "GPUModelRunner.sync_and_gather_intermediate_tensors",
            stock=m.SimpleStatementLine([m.Assert(test=_IS_NOT)]),
            mended=m.If(test=_IS, body=m.IndentedBlock([m.SimpleStatementLine([m.Assign(targets=[m.AssignTarget(_BUFFER)])])])),
            edit=_allocated,
        ),
    ),
)
