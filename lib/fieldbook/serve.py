"""One server from a params file: plan, gates, command line, launch, and what it turned out to be. Notebook 05 does the same within a walk."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from . import arms, bootlog, files, gates, inventory, layouts, memory, models, patches, paths, proofs, server, splits
from . import params as params_module
from .arms import Boot
from .errors import BadInput, GateFailed, short
from .gates import Launch
from .params import Params
from .watching import lost_text


@dataclass(frozen=True)
class Preview:
    """What would be started, and what the gates say of it."""

    launch: Launch
    rows: list[dict[str, Any]]
    note: str = ""

    @property
    def refused(self) -> str:
        return gates.refused(self.rows)

    def document(self) -> dict[str, Any]:
        """As JSON: {"argv", "env", "gates", "layers_per_stage", "refused", "escaped"}."""
        command = self.launch.command.document()
        told = {"layers_per_stage": list(self.launch.layers), "refused": self.refused, "escaped": gates.escaped(self.rows)}
        return {"box": self.launch.params.box.name, **command, "gates": self.rows, **told}


def with_changes(file: str, changes: list[str], partition: str | None = None) -> Params:
    """A params file with KEY=VALUE changes on top (values in YAML) and a partition such as '41,37'. Raises BadInput as params.load does."""
    if not changes and partition is None:
        return params_module.load(file)
    sections = params_module.read(file)
    if not isinstance(sections, dict) or not all(isinstance(one, dict) for one in sections.values()):
        # What is wrong with it is told as for any other params file.
        return params_module.validate(sections, str(file))
    for change in changes:
        for key, value in changed(change).items():
            place, (*way, last) = sections, key.split(".")
            if not way:
                raise BadInput(f"--set: got {key[:60]!r}, expected SECTION.KEY=VALUE such as parallel.pipeline_parallel_size=2")
            for part in way:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    raise BadInput(f"--set: {key}: {part} is not a section")
            place[last] = value
    if partition is not None:
        words = partition.split(",")
        if not all(word.strip().isascii() and word.strip().isdigit() and len(word) < 10 and int(word) > 0 for word in words):
            raise BadInput(f"--partition: got {short(partition)}, expected a positive number of layers for each stage with commas between, such as 41,37")
        sections.setdefault("parallel", {})["layer_partition"] = [int(word) for word in words]
    return params_module.validate(sections, str(file))


def changed(change: str) -> dict[str, Any]:
    """{KEY: value} of one KEY=VALUE, the value in YAML. Raises BadInput where it is none."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        # What stands behind the equals sign may be a secret.
        raise BadInput(f"--set: got {key[:60]!r}{' and a value' if equals else ''}, expected SECTION.KEY=VALUE such as parallel.pipeline_parallel_size=2")
    try:
        return {key: yaml.safe_load(text)}
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"--set: {key}: what is given is not a value in YAML") from None


def preview(params: Params, run_dir: Path | None = None) -> Preview:
    """Plan the split, put the command line together and ask every gate. Starts and changes nothing. Raises BadInput where there is no plan."""
    box = inventory.read(params)
    spec, note, own = memory.model_spec(params.model.name), "", params.parallel
    layers = splits.resolve_split(own, spec)
    if own.layer_partition == "best" and own.pipeline_parallel_size > 1:
        study = layouts.study(params, box)
        if study.chosen is None:
            note = f"vLLM's own split, since no best one can be told: {study.why_not}"
        else:
            layers = tuple(study.chosen.layers_per_stage)
    launch = gates.look(params, own, layers, box=box, defects=defects_of(params), run_dir=run_dir)
    return Preview(launch, gates.check(launch), note)


def defects_of(params: Params) -> list[dict[str, Any]] | None:
    """Known defects in the vLLM that serves: of the installed one, or as recorded after its patches; None where a recorded box does not tell."""
    if params.box.kind == "live":
        return patches.rows_of_box(params)
    recorded = paths.recorded_dir(params.box.name) / "patches.json"
    return json.loads(recorded.read_text())["after"] if recorded.is_file() else None


def new_run_dir(params: Params) -> Path:
    """A folder for one server's state and log, beside the box's walks."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")  # noqa: UP017
    return paths.reports_dir() / params.box.name / f"serve-{stamp}-{os.getpid()}"


@dataclass(frozen=True)
class Served:
    """A server that produced a token, and what its ranks say of the patches that they need."""

    boot: Boot
    live_code: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """As JSON: where it is, how it came up, and what its log tells."""
        boot = self.boot
        told = {"url": server.url(boot.state), "state_file": str(boot.state_file), "ready_s": round(boot.ready_s, 1), "phases": [list(p) for p in boot.phases]}
        return {**told, "live_code": self.live_code, "bootlog": bootlog.bootlog_document(boot.log)}


def start(found: Preview, run_dir: Path, progress: Callable[[str], None]) -> Served:
    """Launch what was previewed and wait for its first token; then ask each rank for the patches that it needs.

    Raises GateFailed when a gate refuses, when it does not start, or when a patch is not live in some rank; no server is left then.
    """
    if found.refused:
        raise GateFailed(found.refused)
    launch = found.launch
    booted = arms.start(launch.params, launch.arm, launch.layers, run_dir, "server", launch.box, progress)
    return Served(booted, proofs.live_in(launch.params, booted, launch.arm, launch.defects or []))


def prepare(params: Params, progress: Callable[[str], None]) -> None:
    """The weights, where they have to be made first. Raises BadInput for a recorded box, which has no server here."""
    if params.box.kind != "live":
        raise BadInput(f"serve: {params.box.name} is a recorded box, which nothing is launched of; --print shows its command and gates")
    models.ensure(params, progress)


def watch(state_file: Path, seconds: float | None) -> str:
    """Stay until the server has ended by itself (why), or for so many seconds ('')."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        state = server.read_state(state_file)
        if not server.is_up(state):
            return state.get("reason") or "it died"
        if lost := state.get("lost"):
            return lost_text(lost[0])
        time.sleep(0.5)
    return ""


def write_receipt(run_dir: Path, document: dict[str, Any]) -> None:
    """Keep what was started beside its log."""
    files.write_json(run_dir / "serve.json", document)
