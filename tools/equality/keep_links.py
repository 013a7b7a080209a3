"""Keep what layouts did over links: `python tools/equality/keep_links.py PLAN.yml BOX MACHINE ARMS.json LINK=WAYS.json...` writes data/boxes/BOX/links.json.

WAYS.json is what tools/equality/ways.py printed under that link. Arms keep their times, and pipelines how far their answers are those of one rank.
"""

import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lib"))

from fieldbook import files, likeness, overlinks  # noqa: E402

KEPT = ("model", "tensor", "pipeline", "split", "engine", "outcome", "vllm", "times")


def main(plan_file: Path, box: str, machine: str, arms_file: str, *ways: str) -> None:
    plan, ran = yaml.safe_load(plan_file.read_text()), json.loads(Path(arms_file).read_text())
    alone = {arm["model"]: arm for arm in ran.values() if arm["tensor"] * arm["pipeline"] == 1}
    arms = {}
    for name, arm in ((name, ran[name]) for name in plan["arms"] if name in ran):
        if arm["outcome"] != "ran":
            sys.exit(f"{name}: {arm['outcome']}: {arm.get('error', '')}")
        arms[name] = {key: arm[key] for key in KEPT if key in arm} | {"link": plan["arms"][name]["link"]}
        # Ranks that TP divides a layer among hold other made-up weights than one rank does.
        if arm["pipeline"] > 1:
            arms[name]["as_one_rank"] = likeness.likeness(arm, alone[arm["model"]]).shown()
    releases = sorted({arm["vllm"] for arm in arms.values()})
    if len(releases) != 1:
        sys.exit(f"arms of {', '.join(releases) or 'no release'}: one file is of one release")
    when = datetime.fromtimestamp(Path(arms_file).stat().st_mtime, timezone.utc)  # noqa: UP017
    found = {name: json.loads(Path(file).read_text()) for name, _, file in (one.partition("=") for one in ways)}
    head = {"machine": machine, "vllm": releases[0], "measured_at": f"{when:%Y-%m-%d}"}
    parts = [
        f' "{key}": {{\n' + ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in each.items()) + "\n }"
        for key, each in (("ways", found), ("arms", arms))
    ]
    text = json.dumps(head, indent=1)[:-2] + ",\n" + ",\n".join(parts) + "\n}\n"
    files.write_whole(ROOT / "data" / "boxes" / box / overlinks.FILE, text)
    for row in overlinks.rows(box):
        print(f"{row.model} {row.strategy} {row.link} {row.what}: {row.predicted_s:.4g} s predicted, {row.measured_s:.4g} measured, x{row.ratio:.2f}")
    for one in overlinks.orders(box):
        print(f"{one.model} {one.link} {one.what}: {' / '.join(reversed(one.pair))} {one.expected:.2f} expected, {one.measured:.2f} measured, {one.right}")


if __name__ == "__main__":
    if len(sys.argv) < 6:
        sys.exit(__doc__.splitlines()[0])
    main(Path(sys.argv[1]), *sys.argv[2:])
