"""What keep.py and keep_links.py share: of which release and day arms are, and how a file of data/boxes is written."""

import json
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lib"))

from fieldbook import files  # noqa: E402


def head(machine: str, arms: Iterable[dict[str, Any]], arms_files: Iterable[str]) -> dict[str, str]:
    """{"machine", "vllm", "measured_at"}; exits for arms of several releases, or of none."""
    releases = sorted({arm["vllm"] for arm in arms if "vllm" in arm})
    if len(releases) != 1:
        sys.exit(f"arms of {', '.join(releases) or 'no release'}: one file is of one release")
    when = datetime.fromtimestamp(max(Path(file).stat().st_mtime for file in arms_files), timezone.utc)  # noqa: UP017
    return {"machine": machine, "vllm": releases[0], "measured_at": f"{when:%Y-%m-%d}"}


def write(box: str, name: str, told: dict[str, Any], tables: dict[str, dict[str, Any]]) -> None:
    """data/boxes/<box>/<name>: what is told, then the tables with one line for each entry. Hundreds of tokens one below the other help nobody."""
    parts = [json.dumps(told, indent=1, ensure_ascii=False)[2:-2]]
    for key, entries in tables.items():
        lines = ",\n".join(f"  {json.dumps(entry)}: {json.dumps(value)}" for entry, value in entries.items())
        parts.append(f' "{key}": {{\n{lines}\n }}')
    files.write_whole(ROOT / "data" / "boxes" / box / name, "{\n" + ",\n".join(parts) + "\n}\n")
