"""What of a run may leave the machine: its files without paths of this machine, its name, its GPUs' UUIDs and without secrets.

A file in which there is nothing to take out keeps its bytes, and with them its SHA-256.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import paths, secrecy
from .inventory.capture import machine_secrets

_HOME = re.compile(r"(?<![\w.~-])/(?:(?:home|Users)/[^/\s\"'\\:;,<>]+|root)(?![\w.-])")
_GPU_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.I)
# Of papermill's metadata the times and the outcome stay; which files it read and wrote on that machine does not matter elsewhere.
_PAPERMILL_PATHS = ("input_path", "output_path", "environment_variables")


@dataclass(frozen=True)
class Rules:
    """What is replaced: `places` are paths with what stands for them, the longest first; `hosts` matches this machine's names, None without any."""

    places: tuple[tuple[re.Pattern, str], ...]
    hosts: re.Pattern | None
    secrets: tuple[str, ...]


def rules_of(run_dir: Path, box: str) -> Rules:
    """The rules for one run: places of this machine and of the one where its notebooks were executed, and absolute paths that its params give."""
    told = f"reports/{run_dir.parent.name}/{run_dir.name}"
    places = {str(run_dir): told, str(run_dir.resolve()): told, str(paths.reports_dir().resolve()): "reports", str(paths.root()): "fieldbook"}
    if sys.prefix != sys.base_prefix:
        places.setdefault(sys.prefix, "venv")
    places[str(Path.home())] = "~"
    for notebook in sorted(run_dir.glob("*.ipynb")):
        papermill = _papermill(notebook)
        where, source = (papermill.get("parameters") or {}).get("run_dir"), papermill.get("input_path")
        if where:
            places.setdefault(str(where), told)
        if source and Path(source).parent.name == "notebooks":
            places.setdefault(str(Path(source).parents[1]), "fieldbook")
    for value in _absolute_paths(run_dir / "params.yml"):
        places.setdefault(value, f".../{Path(value).name}")
    # A relative path or the root itself would match anywhere.
    usable = sorted((place for place in places if place.startswith("/") and len(place) > 1), key=lambda place: (-len(place), place))
    patterns = tuple((re.compile(rf"(?<![\w.~-]){re.escape(place)}(?![\w-])"), places[place]) for place in usable)
    names = machine_secrets(re.findall(r"[a-z0-9]+", box.lower()) + [box.lower()])
    hosts = sorted(names.hosts | names.domains, key=len, reverse=True)
    return Rules(
        patterns, re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, hosts))})(?![A-Za-z0-9])", re.I) if hosts else None, secrecy.secret_values()
    )


def clean_text(text: str, rules: Rules) -> str:
    """A text without this machine's paths, names and secrets; a GPU's UUID becomes zeros."""
    for pattern, instead in rules.places:
        text = pattern.sub(instead, text)
    text = _GPU_UUID.sub(r"\1-00000000-0000-0000-0000-000000000000", _HOME.sub("~", text))
    text = rules.hosts.sub("host", text) if rules.hosts else text
    return secrecy.scrubbed(text, rules.secrets)


def clean_value(value: Any, rules: Rules) -> Any:
    """A JSON value with all its strings clean; of processes that a GPU listed only the program's name is left."""
    if isinstance(value, str):
        return clean_text(value, rules)
    if isinstance(value, list):
        return [clean_value(item, rules) for item in value]
    if isinstance(value, dict):
        cleaned = {clean_text(key, rules): clean_value(item, rules) for key, item in value.items()}
        for process in cleaned.get("processes") or [] if isinstance(cleaned.get("processes"), list) else []:
            if isinstance(process, dict) and isinstance(process.get("name"), str):
                process["name"] = Path(process["name"].split(" ")[0]).name
        return cleaned
    return value


def clean_file(path: Path, rules: Rules) -> bytes:
    """The bytes of a file as they may be shared: JSON, JSON lines and notebooks by their strings, all else as text. Raises OSError where it cannot be read."""
    data = path.read_bytes()
    text = data.decode("utf-8", errors="surrogateescape")
    try:
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            cleaned = [clean_value(line, rules) for line in lines]
            return data if cleaned == lines else "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in cleaned).encode()
        if path.suffix in (".json", ".ipynb"):
            document = json.loads(text)
            cleaned = clean_value(_without_papermill_paths(document) if path.suffix == ".ipynb" else document, rules)
            return data if cleaned == document else (json.dumps(cleaned, indent=1, ensure_ascii=False) + "\n").encode()
    except ValueError:
        # A killed run leaves half a file: it goes along as text, and the report says that it cannot be read.
        pass
    return clean_text(text, rules).encode("utf-8", errors="surrogateescape")


def _without_papermill_paths(notebook: Any) -> Any:
    papermill = _papermill_of(notebook)
    if not papermill:
        return notebook
    kept = {key: value for key, value in papermill.items() if key not in _PAPERMILL_PATHS}
    kept["parameters"] = {key: value for key, value in (papermill.get("parameters") or {}).items() if key != "run_dir"}
    return {**notebook, "metadata": {**notebook["metadata"], "papermill": kept}}


def _papermill_of(notebook: Any) -> dict[str, Any]:
    metadata = notebook.get("metadata") if isinstance(notebook, dict) else None
    found = metadata.get("papermill") if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def _papermill(path: Path) -> dict[str, Any]:
    try:
        return _papermill_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _absolute_paths(params_file: Path) -> Iterator[str]:
    """Strings among the params that are absolute paths, of more than one part: "/" and "/health" tell nothing."""
    try:
        waiting = [yaml.safe_load(params_file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, yaml.YAMLError):
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and re.fullmatch(r"/[^/\s]+(/[^/\s]+)+/?", value):
            yield value.rstrip("/")
