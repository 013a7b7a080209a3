"""Asking a running server which code its processes run. The question is a file in a folder that the server was started with; so are the answers."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..errors import GateFailed
from . import plugin

NAME = "fieldbook_live"


@dataclass(frozen=True)
class Answer:
    """What one process of the server says. rank is None in the engine and the API server; places as plugin._place gives them; runners: classes of vLLM's
    model runner that have an object there."""

    pid: int
    rank: int | None
    pp_rank: int | None
    tp_rank: int | None
    places: tuple[dict, ...]
    runners: tuple[str, ...]


def write_plugin(folder: Path, name: str, source: Path) -> None:
    """Put a module with a `register` into a folder as an installed distribution, whose entry point vLLM calls in each of its processes."""
    files.write_whole(folder / f"{name}.py", source.read_bytes())
    files.write_whole(folder / f"{name}-1.dist-info" / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    files.write_whole(folder / f"{name}-1.dist-info" / "entry_points.txt", f"[vllm.general_plugins]\n{name} = {name}:register\n")


def plant(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Put the plugin where a server that is started with the returned environment finds it, whichever Python it runs in."""
    write_plugin(folder, NAME, Path(plugin.__file__))
    search = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
    planted = {"PYTHONPATH": os.pathsep.join(search), plugin.FOLDER: str(folder)}
    if "VLLM_PLUGINS" in environment:
        # Set, it names all plugins that may be loaded.
        planted["VLLM_PLUGINS"] = ",".join(filter(None, [environment["VLLM_PLUGINS"], NAME]))
    return planted


def ask(folder: Path, places: Iterable[tuple[str, str]], ranks: int, timeout_s: float = 60) -> list[Answer]:
    """Answers of all ranks of a server that has come up, and of its engine, about these (file, symbol) of vLLM; by rank, those without one first.

    A server is asked once. Raises GateFailed where not all ranks answer in time, or one cannot.
    """
    files.write_json(folder / plugin.QUESTION, {"places": [{"file": file, "symbol": symbol} for file, symbol in places]})
    deadline, seen = time.monotonic() + timeout_s, []
    while time.monotonic() < deadline:
        seen = [json.loads(file.read_text()) for file in sorted(folder.glob("answer-*.json"))]
        # Workers first see the question together with the engine, which has no rank.
        if len([one for one in seen if one["rank"] is not None]) >= ranks and any(one["rank"] is None for one in seen):
            break
        time.sleep(plugin.POLL_S)
    else:
        there = sorted(one["rank"] for one in seen if one["rank"] is not None)
        raise GateFailed(f"rank {', '.join(str(r) for r in range(ranks) if r not in there) or 'none'} did not say in {timeout_s:.0f} s which code it runs")
    wrong = next((one["error"] for one in seen if "error" in one), None)
    if wrong:
        raise GateFailed(f"a process of the server cannot say which code it runs: {wrong}")
    answers = [Answer(one["pid"], one["rank"], one["pp_rank"], one["tp_rank"], tuple(one["places"]), tuple(one["runners"])) for one in seen]
    return sorted(answers, key=lambda one: (one.rank is not None, one.rank or 0, one.pid))
