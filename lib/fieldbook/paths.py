"""Where things lie in a Fieldbook checkout. The only place that knows folder names."""

import os
from pathlib import Path

from .errors import BadInput

STATIONS = (
    "01_hardware_inventory",
    "02_memory_accounting",
    "03_partition_selection",
    "04_patch_application",
    "05_server_launch",
    "06_benchmarks",
    "07_verdict",
)

# What a published field report states, in its folder under data/reports.
REPORTED_FIGURES = "figures.csv"


def root() -> Path:
    """The checkout: FIELDBOOK_ROOT, else the one this package was installed from, else the first parent that looks like one.

    Raises BadInput when there is none (the package was copied away from its notebooks).
    """
    candidates = [Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents]
    if os.environ.get("FIELDBOOK_ROOT"):
        candidates = [Path(os.environ["FIELDBOOK_ROOT"])]
    for folder in candidates:
        if (folder / "notebooks").is_dir() and (folder / "params").is_dir():
            return folder
    raise BadInput("no Fieldbook checkout found: run inside one, or set FIELDBOOK_ROOT to the folder that holds notebooks/ and params/")


def station_name(number: int | str) -> str:
    """'03' or 3 -> '03_partition_selection'. Raises BadInput for a number that is no station."""
    for name in STATIONS:
        if name.startswith(f"{number}".zfill(2)):
            return name
    raise BadInput(f"station {number!r} does not exist: give one of {', '.join(n[:2] for n in STATIONS)}")


def shown(path: Path) -> str:
    """A path as messages show it: relative to the checkout when it lies inside."""
    try:
        return str(path.resolve().relative_to(root()))
    except ValueError:
        return str(path)


def reports_dir() -> Path:
    """Folder of all run folders; FIELDBOOK_REPORTS moves it (tests do)."""
    return Path(os.environ.get("FIELDBOOK_REPORTS") or root() / "reports")


def box_data_dir(box_name: str) -> Path:
    """Captured command outputs of a recorded box."""
    return root() / "data" / "boxes" / box_name


def recorded_dir(report_name: str) -> Path:
    """Recorded figures of a report."""
    return root() / "data" / "reports" / report_name


def recorded_file(report_name: str, name: str) -> Path | None:
    """A file of a report, or its .xz where only that is kept (`files.read_models` reads both); None where neither is there."""
    plain = recorded_dir(report_name) / name
    return next((file for file in (plain, Path(f"{plain}.xz")) if file.is_file()), None)


def only_captured(box_name: str) -> bool:
    """Whether nothing of a run on a recorded box is here to show or to check: only its outputs were captured, or a report states what it is."""
    return not recorded_dir(box_name).is_dir() or (recorded_dir(box_name) / REPORTED_FIGURES).is_file()


def model_config_dir(model_name: str) -> Path:
    """The model's config.json, kept in the repository: planning needs no weights."""
    return root() / "data" / "models" / model_name


def models_cache_dir(moved: bool = True) -> Path:
    """Where weights are made, a folder that git ignores; FIELDBOOK_MODEL_CACHE moves it."""
    return Path((os.environ.get("FIELDBOOK_MODEL_CACHE") if moved else "") or root() / "data" / "models" / "cache")


def model_weights_dir(model_name: str) -> Path:
    """Weights of one model in the cache."""
    return models_cache_dir() / model_name
