"""A trial: two arms of one box, and what its steps leave in the run folder (`trial` has the steps)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import files, memory, paths, receipts, splits
from .errors import GateFailed, NoSamples
from .params import Params, metric_names
from .schema import Baseline, Parallel
from .station import Station

STEPS = ("preflight", "control", "boot", "verify", "verdict")


@dataclass(frozen=True)
class Trial:
    """Two arms of one box: {arm: ...} each, candidate first."""

    station: Station
    arms: dict[str, Parallel | Baseline]
    layers: dict[str, tuple[int, ...]]
    names: dict[str, str]

    @property
    def metrics(self) -> list[str]:
        return metric_names(self.station.params)


def plan(station: Station) -> Trial:
    """Both arms with their splits; needs notebook 03, which is run where it is missing."""
    params = station.params
    layers, found = layouts(params, tuple(station.earlier(3).data["layers_per_stage"]))
    return Trial(station, {"candidate": params.parallel, "baseline": params.verdict.baseline}, layers, named(found))


def layouts(params: Params, best: tuple[int, ...]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """({arm: layers of each stage}, {arm: name of its layout}). best: the split that notebook 03 chose for the candidate."""
    base = params.verdict.baseline
    layers = {"candidate": best, "baseline": splits.resolve_split(base, memory.model_spec(params.model.name), best)}
    return layers, {"candidate": splits.layout_name(params.parallel, best), "baseline": splits.layout_name(base, layers["baseline"])}


def named(layouts: dict[str, str]) -> dict[str, str]:
    """Names that tell the arms apart also where their layouts are the same: an A/A, or one knob."""
    same = layouts["candidate"] == layouts["baseline"]
    return {arm: f"{name} ({arm})" if same else name for arm, name in layouts.items()}


def kv_space_gib(facts: dict[str, Any]) -> dict[int, float]:
    """KV space of each stage in GiB in what a step's file tells of a boot; keys of JSON are words. Empty in files of before it was told."""
    return {int(stage): gib for stage, gib in facts.get("available_kv_gib", {}).items()}


def has_samples(station: Station) -> bool:
    """Whether there is anything to compare: a live box measures, of a recorded one there must be samples."""
    return station.live or paths.recorded_file(station.params.box.name, "samples.jsonl") is not None


def need_samples(station: Station) -> None:
    if not has_samples(station):
        raise NoSamples(f"data/reports/{station.params.box.name}/samples.jsonl: no samples were recorded of this box, so there is nothing to compare")


def step_file(trial: Trial, step: str) -> Path:
    """Where a step's file lies in the run folder."""
    return trial.station.run_dir / "steps" / f"{step}.json"


def follows_on(trial: Trial, step: str) -> str:
    """Digest of the receipts that a step rests on: when one of these stations has been run again, the step is not current any more."""
    numbers = (1, 3) if step == "preflight" else (6,)
    found = [receipts.path_of(trial.station.run_dir, paths.station_name(number)) for number in numbers]
    return "-".join(files.sha256_of(file)[:16] if file.is_file() else "none" for file in found)


def kept(trial: Trial, step: str, whole: bool = True) -> dict[str, Any] | None:
    """What a step left, where it is current (and done, unless whole is False); None else. A damaged file counts as none. Recorded boxes keep nothing."""
    file = step_file(trial, step)
    if not trial.station.live or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        current = (found["step"], found["params_hash"], found["follows_on"]) == (step, trial.station.params.hash, follows_on(trial, step))
        return found["data"] if current and (found["done"] or not whole) else None
    except (ValueError, KeyError, TypeError):
        return None


def keep(trial: Trial, step: str, started_at: str, data: dict[str, Any], done: bool = True) -> dict[str, Any]:
    """Write a step's file whole and return its data."""
    told = {"schema_version": 1, "step": step, "params_hash": trial.station.params.hash, "follows_on": follows_on(trial, step)}
    files.write_json(step_file(trial, step), {**told, "started_at": started_at, "ended_at": receipts.now(), "done": done, "data": data})
    return data


def missing(trial: Trial) -> list[str]:
    """Steps that are still to be done, in order."""
    return [step for step in STEPS if kept(trial, step) is None]


def needs(trial: Trial, step: str, *earlier: str) -> list[dict[str, Any]]:
    found = {name: kept(trial, name) for name in earlier}
    lacking = [name for name, data in found.items() if data is None]
    if lacking:
        raise GateFailed(f"{step}: needs {' and '.join(lacking)} first: `fieldbook trial FILE --step {lacking[0]}`, or without --step all that is missing")
    return list(found.values())
