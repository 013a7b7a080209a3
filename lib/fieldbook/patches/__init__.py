"""The patch catalogue: which known pipeline-parallel defects a vLLM has, the mend, and the way back.

Files are read and edited in place in a vllm package, detected by structure and never by version. Before the first edit the original is kept beside the
package, so that a revert is byte for byte. Nothing here imports vLLM or torch.
"""

from .catalogue import CATALOGUE, MENDED, OBSERVED, bundle_of
from .editing import NotRecognised, apply, diff, overlay, revert
from .releases import fates, stock_rows
from .site import Defect
from .states import Status, as_rows, rows_of_box, state_of, status, to_mend, unmended, why_unmended
from .tree import checked, release, tree_of_box, tree_of_python, vllm_tree

__all__ = [
    "CATALOGUE", "MENDED", "OBSERVED", "Defect", "NotRecognised", "Status", "apply", "as_rows", "bundle_of", "checked", "diff", "fates", "overlay",
    "release", "revert", "rows_of_box", "state_of", "status", "stock_rows", "to_mend", "tree_of_box", "tree_of_python", "unmended", "vllm_tree", "why_unmended",
]  # fmt: skip
