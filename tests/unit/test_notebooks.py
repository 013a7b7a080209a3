"""The source notebooks keep the rules of the design, and their defaults are the live default box."""

import ast
import json
import re

import nbformat
import pytest
from conftest import DEFAULT_BOX, ROOT

from fieldbook import params, paths

SECTIONS = ["box", "model", "engine", "parallel", "server", "benchmarks", "probes", "verdict"]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=FILES, ids=lambda f: f.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def test_the_seven_stations_are_there():
    assert [f.stem for f in FILES] == list(paths.STATIONS)


def test_valid_and_without_anything_of_a_run(notebook):
    nbformat.validate(notebook)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(notebook))
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)


def test_kernel(notebook):
    assert notebook.metadata.kernelspec.name == "fieldbook"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"} and set(notebook.metadata.language_info) == {"name"}


def test_small_cells(notebook):
    cells = code_cells(notebook)
    assert len(cells) <= 15
    assert [len(cell.source.splitlines()) for cell in cells if len(cell.source.splitlines()) > 20] == []
    assert all(cell.source.strip() for cell in notebook.cells)


def test_lines_can_be_read_without_scrolling(notebook):
    # The parameters cell has one line for each section, whatever its length.
    long = [line for cell in code_cells(notebook)[1:] for line in cell.source.splitlines() if len(line) > 160]
    assert long == []


def test_no_definitions_and_no_magic(notebook):
    for cell in code_cells(notebook):
        tree = ast.parse(cell.source)  # a magic or a shell escape does not parse
        assert [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))] == [], cell.source


def test_one_table_or_chart_per_cell(notebook):
    for cell in code_cells(notebook):
        shown = [n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("show.table", "show.chart", "show.figures")]
        assert len(shown) <= 1, cell.source


def test_prose_says_what_is_asked_before_each_group_of_cells(notebook):
    cells = notebook.cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    # Parameters and their validation stand together; after them at most three code cells in a row without a word.
    first = next(i for i, cell in enumerate(cells) if cell.cell_type == "code")
    run = 0
    for cell in cells[first + 2 :]:
        run = run + 1 if cell.cell_type == "code" else 0
        assert run <= 2, f"no prose before: {cell.source[:80]}"
    assert cells[first + 2].cell_type == "markdown"
    assert all(cell.source.startswith("#") or len(cell.source.split()) >= 2 for cell in cells if cell.cell_type == "markdown")


def test_parameters_cell(notebook):
    (cell,) = tagged(notebook, "parameters")
    assert cell is code_cells(notebook)[0]
    names = []
    for line in cell.source.splitlines():
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.AnnAssign), line
        names.append(statement.target.id)
        assert ast.unparse(statement.annotation) == ("str" if statement.target.id == "run_dir" else "dict")
        ast.literal_eval(statement.value)  # nothing derived
        assert re.search(r"  # \S.{7,}$", line), f"no comment: {line}"
    assert names == [*SECTIONS, "run_dir"]


def test_the_next_cell_validates_and_opens_this_notebooks_station(notebook, request):
    cell = code_cells(notebook)[1]
    assert cell.metadata.tags == ["validate"]
    (call,) = [n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "station.open_station"]
    name = request.node.callspec.params["notebook"].stem
    assert ast.literal_eval(call.args[0]) == name and ast.unparse(call.args[1]) == "run_dir"
    passed = re.findall(r"(\w+)=(\w+)", cell.source)
    assert [(a, b) for a, b in passed if a in SECTIONS] == [(s, s) for s in SECTIONS]


def test_the_defaults_are_the_live_default_box(notebook):
    (cell,) = tagged(notebook, "parameters")
    values = {statement.target.id: ast.literal_eval(statement.value) for statement in ast.parse(cell.source).body}
    assert values.pop("run_dir") == ""
    assert params.validate(values, "defaults") == params.load(ROOT / "params" / "cpu-smollm2.yml") == params.validate(DEFAULT_BOX, "yaml")


def test_all_parameters_cells_are_the_same():
    cells = {tagged(nbformat.read(f, as_version=4), "parameters")[0].source for f in FILES}
    assert len(cells) == 1


def test_papermill_sees_every_section_as_a_parameter(notebook, request):
    from papermill.inspection import inspect_notebook

    found = inspect_notebook(str(request.node.callspec.params["notebook"]))
    assert list(found) == [*SECTIONS, "run_dir"] and all(p["help"] for p in found.values())
    assert found["run_dir"]["inferred_type_name"] == "str" and found["engine"]["inferred_type_name"] == "dict"


def test_ends_with_a_verdict(notebook):
    cells = notebook.cells
    last = next(cell for cell in reversed(cells) if cell.cell_type == "code")
    assert last is cells[-1] or cells[-1].cell_type == "markdown"
    statement = ast.parse(last.source).body[-1]
    assert re.match(r"(print\()?st\.close\(", ast.unparse(statement))


def test_only_earlier_stations_are_asked(notebook, request):
    number = int(request.node.callspec.params["notebook"].stem[:2])
    asked = [int(n) for cell in code_cells(notebook) for n in re.findall(r"st\.earlier\((\d+)\)", cell.source)]
    assert all(n < number for n in asked)


def test_source_is_kept_in_one_form():
    for file in FILES:
        document = json.loads(file.read_text(encoding="utf-8"))
        assert (document["nbformat"], file.read_text(encoding="utf-8")[-1]) == (4, "\n")
        ids = [cell.get("id") for cell in document["cells"]]
        assert len(set(ids)) == len(ids)
