"""Re-make the golden notebooks that nbval compares: `python tools/golden.py [PARAMS ...]`, and say cell by cell what changed.

Each notebook is run by plain papermill from its params file, in order, in a reports folder of its own, and stored without times and paths.
A live box keeps the outputs of the cells tagged nbval-check-output only: the others are measured and differ from run to run.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat

from fieldbook import params, paths

RECORDED = ["params/cpu-smollm2-replay.yml", "params/cmp170hx-x3.yml", "params/a100-x8-glm53.yml"]
DEFAULT = [*RECORDED, "tests/params/quick.yml"]
# Lines of a changed output that are shown; the diff of the files has the rest.
SHOWN_LINES = 12


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


def told(output: nbformat.NotebookNode) -> str:
    """An output as people compare it: its text, of a chart the words and numbers in it."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return "chart: " + " | ".join(re.findall(r"<text[^>]*>([^<]*)</text>", data["image/svg+xml"]))
    return str(data.get("text/plain") or data.get("text/markdown") or output.get("text") or output.get("evalue") or "")


def changes(before: str, after: nbformat.NotebookNode) -> list[str]:
    """What is different in a notebook that was stored before: source and output of each cell, a few lines each."""
    old = {cell.id: cell for cell in nbformat.reads(before, as_version=4).cells}
    new = {cell.id: cell for cell in after.cells}
    found = [f"  cell {name}: gone" for name in old if name not in new]
    for name, cell in new.items():
        if name not in old:
            found.append(f"  cell {name}: new")
            continue
        for what, ours, theirs in [
            ("source", old[name].source, cell.source),
            ("output", *("\n".join(told(output) for output in one.get("outputs", [])) for one in (old[name], cell))),
        ]:
            lines = [line for line in difflib.ndiff(ours.splitlines(), theirs.splitlines()) if line[:2] in ("- ", "+ ")]
            if lines:
                more = [f"      ... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
                found += [f"  cell {name}: {what}", *(f"      {line[:200]}" for line in lines[:SHOWN_LINES]), *more]
    return found


def make(params_file: str) -> None:
    """Run and store the notebooks of one params file."""
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
            notebook = strip(nbformat.read(made, as_version=4), box.kind == "live")
            text = nbformat.writes(notebook) + "\n"
            target = folder / f"{name}.ipynb"
            before = target.read_text() if target.is_file() else ""
            target.write_text(text)
            print(f"{box.name}/{name}: {'unchanged' if text == before else 'changed' if before else 'new'}", flush=True)
            print(*(changes(before, notebook) if before and text != before else []), sep="\n", end="\n" if before and text != before else "", flush=True)


if __name__ == "__main__":
    for given in sys.argv[1:] or DEFAULT:
        make(given)
