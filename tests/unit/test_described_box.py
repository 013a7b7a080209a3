"""A box that is only described walks the planning notebooks: no server, no measurement, no GPU."""

import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT

from fieldbook import memory, receipts

PLANNING = ("01_hardware_inventory", "02_memory_accounting", "03_partition_selection")


def test_the_second_field_reports_box_is_planned_without_having_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FIELDBOOK_REPORTS", str(tmp_path))
    for name in PLANNING:
        made = tmp_path / f"{name}.ipynb"
        words = [ROOT / "notebooks" / f"{name}.ipynb", made, "-f", ROOT / "params" / "a100-x8-glm53.yml", "--no-progress-bar"]
        done = subprocess.run([sys.executable, "-m", "papermill", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-1000:]
        assert nbformat.read(made, as_version=4).cells
    hardware, ledger, chosen = (receipts.read(tmp_path / "a100-x8-glm53" / "by-hand", name) for name in PLANNING)
    assert hardware.verdict.startswith("8 x A100 (79.2 GiB), NVLink 0-1, 2-3, 4-5, 6-7")
    # 8 x 2,039 GB/s with a quarter's margin, four tokens a step with three drafted; the report measured 69.2 tok/s with one stream.
    assert hardware.data["ceilings_tok_s"]["measured_decode_c1_tok_s"] == pytest.approx(4 * 1.25 * 8 * 2039e9 / memory.step_bytes(memory.model_spec("glm-5.3")))
    assert "memory_read_gb_s" not in hardware.figures and hardware.versions["vllm"] is None
    # TP8 could not start with the longest request of the pipeline: the report ran it with 352,000 tokens.
    assert "376,064 at TP8 PP1, too few for one request of 524,288 tokens" in ledger.verdict
    # The report: 597,760 tokens at vLLM's own split, 729,280 at 41+37, +22%.
    assert abs(ledger.figures["pool_tokens_predicted"].value / 597_760 - 1) < 0.002
    assert chosen.verdict.startswith("Must not be served: flip needs indexer weights for layer 41")
    assert chosen.verdict.endswith("41+37 of 77 splits: 729,472 tokens, +22.1% pool against vLLM's own split")
