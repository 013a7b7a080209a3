"""The golden notebooks are a check that can fail: with one formula changed, nbval says no."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from fieldbook import params, paths

# (module, what it says, what a slip would make of it, the notebook that has to notice)
MUTATIONS = [
    ("kv/pages.py", "width = attention.head_dim + (attention", "width = 2 * attention.head_dim + (attention", "02_memory_accounting"),
    pytest.param("verdict.py", "as_extreme = differences >= observed", "as_extreme = differences > 2 * observed", "07_verdict", marks=pytest.mark.bar),
]


def nbval(notebook: str, lib, reports) -> subprocess.CompletedProcess:
    """Strict nbval of one golden notebook with the library in `lib`."""
    env = {**os.environ, "PYTHONPATH": str(lib), "FIELDBOOK_ROOT": str(paths.root()), "FIELDBOOK_REPORTS": str(reports)}
    golden = paths.root() / "tests" / "golden" / "cpu-smollm2-replay" / f"{notebook}.ipynb"
    command = [sys.executable, "-m", "pytest", "--nbval", str(golden), "-q", "-p", "no:cacheprovider", "--rootdir", str(reports)]
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=reports, check=False)


@pytest.mark.parametrize(("module", "right", "wrong", "notebook"), MUTATIONS)
def test_a_changed_formula_makes_nbval_fail(tmp_path, module, right, wrong, notebook):
    lib = tmp_path / "lib"
    shutil.copytree(paths.root() / "lib" / "fieldbook", lib / "fieldbook")
    file = lib / "fieldbook" / module
    assert right in file.read_text()
    file.write_text(file.read_text().replace(right, wrong))
    done = nbval(notebook, lib, tmp_path)
    assert done.returncode == 1 and " failed" in done.stdout


@pytest.mark.parametrize("box", ["cpu-smollm2-replay", "cpu-smollm2-quick"])
@pytest.mark.parametrize("name", paths.STATIONS)
def test_golden_notebooks_are_made_from_the_present_sources(box, name):
    source = nbformat.read(paths.root() / "notebooks" / f"{name}.ipynb", as_version=4)
    golden = nbformat.read(paths.root() / "tests" / "golden" / box / f"{name}.ipynb", as_version=4)
    ours = [cell for cell in golden.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    assert len(golden.cells) == len(ours) + 1
    assert [(c.cell_type, c.source) for c in ours] == [(c.cell_type, c.source) for c in source.cells], "python tools/golden.py makes them anew"


def test_metric_labels():
    labels = [params.metric_label(m) for m in ("prefill_512_tok_s", "decode_c1_tok_s", "decode_c16_tok_s")]
    assert labels == ["prefill, 512 tokens", "decode, 1 stream", "decode, 16 streams"]
