"""README, guides and examples say what is true of the code: commands parse, keys and files exist, messages are those of the source, examples run."""

import ast
import json
import os
import py_compile
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

from fieldbook import params
from fieldbook.__main__ import build_parser
from fieldbook.schema import Params

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = ROOT / "docs" / "examples"
FOLDERS = ("data", "docs", "lib", "notebooks", "params", "tests", "tools")
# Names that stand for the reader's own.
MADE_UP = re.compile(r"name\.yml|mybox|mine|nothere|a100-[ab]\.yml|llama-70b|mymodel|<|\.\.\.|NAME|\*")
KEYS = {key for key, _, _ in params.describe()}
SECTION = re.compile(rf"(?<![\w/.-])(?:{'|'.join(Params.model_fields)})(?:\.[a-z_0-9]+)+")


def code_of(page):
    """(blocks, spans): the lines of indented and fenced code with their continuations joined, and inline code."""
    text, blocks, spans, fenced = page.read_text(encoding="utf-8").replace("\\\n", " "), [], [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if fenced or re.match(r"(?: {4}|\t)", line):
            blocks.append(line.strip())
        else:
            spans += re.findall(r"`([^`]+)`", line)
    return blocks, spans


def commands(line):
    """The simple commands of a shell line, as lists of words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return []
    found = [[]]
    for word in words:
        if set(word) <= set("();<>|&"):
            found.append([])
        else:
            found[-1].append(word)
    return found


def told_commands():
    for page in PAGES:
        blocks, spans = code_of(page)
        for line in [*blocks, *spans]:
            for words in commands(line):
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if len(words) > 1 and words[0].rpartition("/")[2] == "fieldbook" and re.fullmatch(r"[a-z]+", words[1]):
                    yield pytest.param(words[1:], id=f"{page.name}: {' '.join(words[1:])}")


@pytest.mark.parametrize("words", list(told_commands()))
def test_every_command_parses(words, capsys):
    if len(words) == 1:
        # Spoken of, not called.
        words = [*words, "--help"]
    try:
        build_parser().parse_args(words)
    except SystemExit as error:
        assert error.code == 0, capsys.readouterr().err


def test_every_subcommand_is_told_in_the_readme():
    choices = next(action.choices for action in build_parser()._actions if action.choices)
    readme = PAGES[0].read_text(encoding="utf-8")
    assert [name for name in choices if f"`fieldbook {name}" not in readme] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_is_in_the_schema(page):
    blocks, spans = code_of(page)
    unknown = []
    for line in [*blocks, *spans]:
        if "unknown key" in line:
            continue
        for key in SECTION.findall(line):
            key = re.sub(r"\.\d+$", "", key)
            if not key.endswith((".py", ".yml")) and key not in KEYS and not any(one.startswith(f"{key}.") for one in KEYS):
                unknown.append(key)
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_in_yaml_blocks_are_in_the_schema(page):
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", page.read_text(encoding="utf-8"), re.M):
        for part in re.split(r"\n\s*\n", block):
            try:
                document = yaml.safe_load("\n".join(line for line in part.splitlines() if line.strip()))
            except yaml.YAMLError:
                continue
            if isinstance(document, dict) and document and set(document) <= set(Params.model_fields):
                keys = {f"{section}.{key}" for section, inner in document.items() if isinstance(inner, dict) for key in inner}
                assert {key for key in keys if key not in KEYS and not any(one.startswith(f"{key}.") for one in KEYS)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_file_is_there(page):
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*<>-]+\.(?:py|yml|yaml|md|sh|sbatch|ipynb|csv|txt|json)\b", text)
    assert [file for file in files if not MADE_UP.search(file) and not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *(file for file in EXAMPLES.rglob("*") if file.is_file())], ids=lambda page: page.name)
def test_no_paths_of_a_machine_and_no_hosts(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.$}/])/(?:home|root|tmp|opt|mnt|work|Users|usr/local|srv|data|scratch)/[\w./-]*", text) == []
    assert {host for host in re.findall(r"https?://([\w.-]+)", text)} <= {"github.com", "127.0.0.1", "HEAD"}


def source_strings():
    """Every literal piece of text in the source that is long enough to be told by."""
    pieces = set()
    for file in [*(ROOT / "lib" / "fieldbook").rglob("*.py"), ROOT / "tools" / "setup_env.py", *(ROOT / "notebooks").glob("*.ipynb")]:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.update(part.replace("`", "").strip() for part in re.split(r"\{[^}]*\}|\n", node.value))
    return {piece for piece in pieces if len(piece) >= 7 and re.search(r"[a-z] [a-z]|[a-z]{7}", piece)}


def test_messages_are_those_of_the_source():
    pieces = source_strings()
    rows = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 60
    assert [row for row in rows if not any(piece in row for piece in pieces)] == []


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yml")), ids=lambda file: file.name)
def test_example_params_are_valid(file, command):
    assert command("params", file)[0] == 0


def test_the_examples_plan_as_the_guide_says(command):
    boxes = EXAMPLES / "boxes"
    status, text, _ = command("partition", EXAMPLES / "two-unequal.yml", "--from", boxes / "two-unequal", "--json")
    assert status == 0 and json.loads(text)["best"]["partition"] == [21, 9]
    status, text, _ = command("partition", EXAMPLES / "nvlink-pairs.yml", "--from", boxes / "nvlink-pairs")
    assert status == 0 and "must not be served" not in text
    status, text, _ = command("partition", ROOT / "params" / "a100-x8-glm53.yml", "--index-sharing", "clean", "--json")
    assert status == 0 and json.loads(text)["best"]["partition"] == [42, 36]


def test_scripts_are_sound(tmp_path):
    scripts = [*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")]
    assert len(scripts) >= 3
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    for script in EXAMPLES.glob("*.py"):
        py_compile.compile(str(script), cfile=str(tmp_path / "made.pyc"), doraise=True)


@pytest.fixture
def stub(tmp_path):
    """An executable in fieldbook's place: it fails for bad.yml, has nothing to say of none.yml, and else prints its call as the last line."""
    file = tmp_path / "fieldbook"
    file.write_text(
        f"#!{sys.executable}\nimport json, sys\nname = sys.argv[2]\nif name == 'none.yml':\n    sys.exit(2)\n"
        "print('a line before')\nprint(json.dumps({'words': sys.argv[1:], 'status': int(name == 'bad.yml')}))\nsys.exit(name == 'bad.yml')\n"
    )
    file.chmod(0o755)
    return file


def test_the_loop_goes_on_and_tells_the_status(tmp_path, stub):
    env = {**os.environ, "FIELDBOOK": str(stub), "FIELDBOOK_REPORTS": str(tmp_path / "reports")}
    done = subprocess.run([EXAMPLES / "loop.sh", "bad.yml", "none.yml", "good.yml"], env=env, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in (tmp_path / "reports" / "walks.jsonl").read_text().splitlines()]
    assert done.returncode == 2 and [line["words"] for line in lines] == [["run", "bad.yml"], ["run", "good.yml"]]
    assert subprocess.run([EXAMPLES / "loop.sh", "good.yml"], env=env, capture_output=True, check=False).returncode == 0


def test_an_array_task_walks_its_line(tmp_path, stub):
    boxes = tmp_path / "boxes.txt"
    boxes.write_text("one.yml\ntwo.yml\n")
    env = {**os.environ, "FIELDBOOK": str(stub), "BOXES": str(boxes), "SLURM_SUBMIT_DIR": str(tmp_path)}

    def task(number):
        return subprocess.run(
            ["bash", EXAMPLES / "slurm_array.sbatch"], env={**env, "SLURM_ARRAY_TASK_ID": str(number)}, capture_output=True, text=True, check=False
        )

    assert json.loads(task(2).stdout.splitlines()[-1])["words"] == ["run", "two.yml"]
    assert task(3).returncode == 2 and "no line 3" in task(3).stderr
