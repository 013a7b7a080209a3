"""Re-make the golden notebooks that nbval compares: `python tools/golden.py [PARAMS ...]`, and say what changed.

Each notebook is run by plain papermill from its params file, in order, in a reports folder of its own, and stored without times and paths.
A live box keeps the outputs of the cells tagged nbval-check-output only: the others are measured and differ from run to run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

from fieldbook import params, paths

DEFAULT = ["params/cpu-smollm2-replay.yml", "tests/params/quick.yml"]


def strip(notebook: nbformat.NotebookNode, live: bool) -> nbformat.NotebookNode:
    """Drop what differs from run to run: papermill's times and paths, execution times, measured outputs."""
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", []):
            # papermill draws a new one each time.
            cell.id = "injected"
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if live and cell.cell_type == "code" and "nbval-check-output" not in cell.metadata.get("tags", []):
            cell.outputs = []
    return notebook


def main(params_files: list[str]) -> None:
    """Run and store the notebooks of these params files."""
    for params_file in params_files:
        box = params.load(paths.root() / params_file).box
        folder = paths.root() / "tests" / "golden" / box.name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            env = {**os.environ, "FIELDBOOK_REPORTS": scratch}
            for name in paths.STATIONS:
                made = Path(scratch) / f"{name}.ipynb"
                source = paths.root() / "notebooks" / f"{name}.ipynb"
                command = [sys.executable, "-m", "papermill", str(source), str(made), "-f", str(paths.root() / params_file), "--no-progress-bar"]
                done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{box.name} {name}: {done.stderr.strip().splitlines()[-1]}")
                text = nbformat.writes(strip(nbformat.read(made, as_version=4), box.kind == "live")) + "\n"
                target = folder / f"{name}.ipynb"
                before = target.read_text() if target.is_file() else ""
                target.write_text(text)
                print(f"{box.name}/{name}: {'unchanged' if text == before else 'changed' if before else 'new'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or DEFAULT)
