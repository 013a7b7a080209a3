"""The committed expectation of every params file's command line: what a change of a default, a params file or this code does to it is seen, not slipped in.

params/commands/<file>.yml holds one entry for each layout: its name, the changes on top of the params file (none for the file itself), argv and env.
"""

import difflib
from pathlib import Path
from typing import Any

import yaml

from . import files, paths, serve
from . import params as params_module
from .command import CommandLine, command_line
from .errors import BadInput
from .inventory import read
from .memory import model_spec
from .params import Params
from .splits import resolve_split


def file_of(params_file: str | Path) -> Path:
    """Where the expectation of a params file lies: in commands/ beside it."""
    params_file = Path(params_file)
    return params_file.parent / "commands" / params_file.name


def all_params_files() -> list[Path]:
    """Every params file of this checkout."""
    return sorted((paths.root() / "params").glob("*.yml"))


def command_of(params: Params) -> CommandLine:
    """The command line of a box without asking the machine: its own links where they are recorded, and vLLM's split where the best one is asked for."""
    box = read(params) if params.box.kind == "recorded" else None
    layers = resolve_split(params.parallel, model_spec(params.model.name))
    return command_line(params, params.parallel, layers, params.server.port, box)


def entries(params_file: str | Path) -> list[dict[str, Any]]:
    """The committed entries. Raises BadInput for a file that is missing or none."""
    file = file_of(params_file)
    if not file.exists():
        raise BadInput(f"{paths.shown(file)}: missing; `fieldbook defaultcheck --update {paths.shown(Path(params_file))}` writes it")
    document = params_module.read(file)
    if not isinstance(document, list) or not document:
        raise BadInput(f"{paths.shown(file)}: expected a list of layouts with {', '.join(_FORM)}")
    for number, entry in enumerate(document, 1):
        wrong = [name for name, right in _FORM.items() if not right(entry.get(name))] if isinstance(entry, dict) else list(_FORM)
        if wrong or set(entry) != set(_FORM):
            raise BadInput(
                f"{paths.shown(file)}: layout {number}: expected {', '.join(_FORM)}; wrong or missing: {', '.join(wrong) or 'none, but there is more'}"
            )
    return document


# What each part of an entry has to be.
_FORM = {
    "layout": lambda value: isinstance(value, str) and bool(value),
    "changes": lambda value: isinstance(value, dict) and all(isinstance(key, str) and "." in key for key in value),
    "argv": lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value),
    "env": lambda value: isinstance(value, dict) and all(isinstance(word, str) for pair in value.items() for word in pair),
}


def params_of(params_file: str | Path, entry: dict[str, Any]) -> Params:
    """The params file with an entry's changes on top."""
    changes = [f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in entry["changes"].items()]
    return serve.with_changes(str(params_file), [change.removesuffix("\n...") for change in changes])


def drift(params_file: str | Path) -> list[str]:
    """Differences between what is committed and what would be started now, as lines; empty without any. Order counts."""
    found = []
    for entry in entries(params_file):
        now = command_of(params_of(params_file, entry)).document()
        for what in ("argv", "env"):
            if what == "argv" and entry[what] == now[what] or what == "env" and list(entry[what].items()) == list(now[what].items()):
                continue
            before, after = _lines(entry[what]), _lines(now[what])
            if before == after:
                # The same to read, and other words: an option and its value given as one.
                before, after = [repr(word) for word in entry[what]], [repr(word) for word in now[what]]
            if before != after:
                # The first two lines name the files; what follows may begin with dashes of its own.
                changed = [line for line in list(difflib.unified_diff(before, after, lineterm="", n=0))[2:] if not line.startswith("@@")]
                found += [f"{entry['layout']}, {what}: {line[0]} {line[1:]}" for line in changed]
    return found


def _lines(entries_: list[str] | dict[str, str]) -> list[str]:
    """argv with an option and its value in one line, env as NAME=value: what a person compares."""
    if isinstance(entries_, dict):
        return [f"{key}={value}" for key, value in entries_.items()]
    joined: list[str] = []
    for word in entries_:
        if joined and joined[-1].startswith("--") and " " not in joined[-1] and not word.startswith("--"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def update(params_file: str | Path) -> Path:
    """Write what would be started now, for the layouts that the file names, or for the params file alone."""
    file = file_of(params_file)
    before = entries(params_file) if file.is_file() else [{"layout": "as the params say", "changes": {}, "argv": [], "env": {}}]
    now = []
    for entry in before:
        document = command_of(params_of(params_file, entry)).document()
        now.append({"layout": entry["layout"], "changes": entry["changes"] or {}, **document})
    head = "# What `fieldbook serve` starts for this box, layout by layout: `fieldbook defaultcheck` compares, with --update it writes.\n"
    return files.write_whole(file, head + yaml.safe_dump(now, sort_keys=False, allow_unicode=True, width=200))


def check(params_files: list[str]) -> dict[str, list[str]]:
    """Drift of each of these params files, of all in the checkout without any named. Raises BadInput for one that cannot be read."""
    for file in params_files:
        params_module.load(file)
    found = {paths.shown(Path(file)): drift(file) for file in (params_files or all_params_files())}
    if not params_files:
        known = {file_of(file) for file in all_params_files()}
        for file in sorted((paths.root() / "params" / "commands").glob("*.yml")):
            if file not in known:
                found[paths.shown(file)] = [f"no params file {file.name} beside its folder"]
    return found
