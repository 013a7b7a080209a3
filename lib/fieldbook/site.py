"""The index over all runs: by family of box, the best figures of each model, and any two runs side by side.

Like the reports it is one file without JavaScript: two groups of radio buttons and the style sheet choose what the comparison shows.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import files
from .pages import page
from .paths import STATIONS
from .publish import EPOCH, format_value, read_run

# Every compared run is in the page twice, every ratio once for each ordered pair: an index over hundreds of runs must still open.
COMPARED_RUNS, RUNS_WITH_RATIOS = 40, 20
# Figures of which the larger is the better: tokens per second, and the pool that the boot log told.
BEST = re.compile(r"(?P<what>prefill|decode)(?:_c?(?P<size>\d+))?(?:_\w+)?_tok_s|pool_tokens")
# A best figure has been seen on a box, by this run or by a named report; what was worked out or claimed is none.
SEEN = ("measured", "recorded")
UNKNOWN, NO_GPU = "unknown", "CPU"
# What a card's name says beyond the card: maker, form factor, memory.
_NOT_THE_CARD = re.compile(r"NVIDIA|SXM\d*|PCI-?E|NVL|HBM\w*|\d+\s?GI?B", re.I)
# By compute capability, for captures that do not name the architecture.
_ARCHITECTURES = {
    **{"7.0": "Volta", "7.5": "Turing", "8.0": "Ampere", "8.6": "Ampere", "8.9": "Ada Lovelace"},
    **{"9.0": "Hopper", "10.0": "Blackwell", "10.3": "Blackwell", "12.0": "Blackwell"},
}


def write_index(reports_dir: Path) -> Path:
    """Write `reports_dir/index.html` over all runs in `<box>/<run>/` and return its path.

    Raises FileNotFoundError when `reports_dir` is not a folder, OSError when it cannot be written.
    """
    reports_dir = Path(reports_dir)
    if not reports_dir.is_dir():
        raise FileNotFoundError(f"{reports_dir}: no such reports folder")
    found = reports_dir.glob("*/*/[0-9][0-9]_*.*")
    folders = {file.parent for file in found if file.stem in STATIONS and not file.parent.is_symlink()}
    runs = sorted(map(read_run, folders), key=lambda run: (run["started"] or EPOCH, run["run"], run["box"]), reverse=True)
    for run in runs:
        began = run["started"]
        run |= {"family": family(run), "began": f"{began.day} {began:%b %Y, %H:%M} UTC" if began else "", "outcome": f"{run['verdict']} {run['why']}".strip()}
    content = {"families": by_family(runs), "best": best_figures(runs), "comparison": comparison(runs)}
    return files.write_whole(reports_dir / "index.html", page("runs.html.j2", runs=runs, **content))


def family(run: dict[str, Any]) -> str:
    """The family of a run's box by its receipt 01: "Ampere: 8 x A100", "CPU" without GPUs, "unknown" without an inventory."""
    inventory = ((run["stations"][0].receipt or {}).get("data") or {}).get("inventory")
    if not isinstance(inventory, dict) or not isinstance(inventory.get("gpus"), list):
        return UNKNOWN
    groups: dict[str, Counter] = {}
    for gpu in inventory["gpus"]:
        architecture = gpu.get("architecture") or _ARCHITECTURES.get(str(gpu.get("compute_capability")), "")
        groups.setdefault(architecture, Counter())[card(gpu.get("name") or "")] += 1
    texts = []
    for architecture, cards in groups.items():
        listed = " + ".join(f"{count} x {name}" for name, count in sorted(cards.items()))
        texts.append(f"{architecture}: {listed}" if architecture else listed)
    return " + ".join(sorted(texts)) or NO_GPU


def card(name: str) -> str:
    """The card alone of a GPU's full name: "NVIDIA A100-SXM4-80GB" -> "A100", "NVIDIA CMP 170HX" -> "CMP 170HX"; a nameless one is a "GPU"."""
    return " ".join(part for part in re.split(r"[\s-]+", name) if part and not _NOT_THE_CARD.fullmatch(part)) or "GPU"


def by_family(runs: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Runs (newest first) by family and box: GPUs by name, then CPU, then unknown; boxes by their newest run."""
    families: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        families.setdefault(run["family"], {}).setdefault(run["box"], []).append(run)
    return dict(sorted(families.items(), key=lambda item: (item[0] == UNKNOWN, item[0] == NO_GPU, item[0])))


def best_figures(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By model: the best value of each metric over the sound runs, each as its figure with its `run`. Of two equal ones the newer run's counts.

    Sound is a run that passed whole, whose answers showed no sign of another model than its own (receipt 06).
    """
    models: dict[str, dict[str, dict[str, Any]]] = {}
    for run in filter(is_sound, runs):
        for figure in (figure for name in STATIONS for figure in run["figures"][name]):
            if figure["evidence"] not in SEEN or not BEST.fullmatch(figure["key"]) or not is_number(figure["value"]):
                continue
            rows = models.setdefault(run["model"] or "model not told", {})
            if figure["key"] not in rows or figure["value"] > rows[figure["key"]]["value"]:
                rows[figure["key"]] = {**figure, "run": run}
    return {model: sorted(rows.values(), key=_metric_order) for model, rows in sorted(models.items())}


def is_sound(run: dict[str, Any]) -> bool:
    """Whether a run's figures may be quoted: every station passed, and the probes saw no sign that the answers are not the model's."""
    signs = ((run["stations"][5].receipt or {}).get("data") or {}).get("signs")
    return run["state"] == "passed" and not signs


def is_number(value: Any) -> bool:
    """Whether a figure's value can be compared: an integer or a float, no bool and no NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def comparison(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the style sheet chooses from: `runs`, and by station `groups` of rows, each with one figure or None for every run, in their order.

    `runs` are the newest COMPARED_RUNS of `all`. `has` are the places of the runs that have anything there. A row's `ratios[i][j]` is run i's value
    over run j's as text, or ""; for more than RUNS_WITH_RATIOS runs there are none.
    """
    groups: list[dict[str, Any]] = []
    count, runs = len(runs), runs[:COMPARED_RUNS]
    for name in STATIONS:
        by_run = [{figure["key"]: figure for figure in run["figures"][name]} for run in runs]
        keys = dict.fromkeys(key for figures in by_run for key in figures)
        rows = [_row(key, [figures.get(key) for figures in by_run]) for key in keys]
        if rows:
            has = sorted({i for row in rows for i in row["has"]})
            groups.append({"station": runs[0]["stations"][STATIONS.index(name)], "rows": rows, "has": has})
    return {"runs": runs, "all": count, "groups": groups, "has_ratios": 1 < len(runs) <= RUNS_WITH_RATIOS}


def _row(key: str, figures: list[dict[str, Any] | None]) -> dict[str, Any]:
    present = [figure for figure in figures if figure]
    label = common_label(key, [figure["label"] or key for figure in present])
    told = [figure | {"own": figure["label"] if figure["label"] != label else ""} if figure else None for figure in figures]
    few = figures if len(figures) <= RUNS_WITH_RATIOS else []
    ratios = [[ratio(a, b) if a is not b else "" for b in few] for a in few]
    return {"label": label, "figures": told, "ratios": ratios, "has": [i for i, figure in enumerate(figures) if figure]}


def common_label(key: str, labels: Iterable[str]) -> str:
    """One label for a row: the one that all share, else what they share before ": " (a label may end in what was found), else the key."""
    labels = set(labels)
    heads = {label.rpartition(": ")[0] or label for label in labels}
    return next(iter(labels)) if len(labels) == 1 else next(iter(heads)) if len(heads) == 1 else key


def ratio(left: dict[str, Any] | None, right: dict[str, Any] | None) -> str:
    """Left over right as text such as "x1.25"; "" where either is missing, no number or zero, or their units differ."""
    if not left or not right or left["unit"] != right["unit"] or not all(is_number(f["value"]) and f["value"] for f in (left, right)):
        return ""
    return f"x{format_value(float(left['value'] / right['value']))}"


def _metric_order(figure: dict[str, Any]) -> tuple[int, int, str]:
    """Pool, prefill by prompt length, decode by streams."""
    match = BEST.fullmatch(figure["key"])
    what = match["what"] if match else None
    return ([None, "prefill", "decode"].index(what), int(match["size"] or 0) if match else 0, figure["key"])
