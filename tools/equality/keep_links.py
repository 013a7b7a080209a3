"""Keep what layouts did over links: `python tools/equality/keep_links.py PLAN.yml BOX MACHINE ARMS.json LINK=WAYS.json...` writes data/boxes/BOX/links.json.

WAYS.json is what tools/equality/ways.py printed under that link. Arms keep their times, and pipelines how far their answers are those of one rank.
"""

import json
import sys
from pathlib import Path

import kept
import yaml

from fieldbook import likeness, overlinks

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
    found = {name: json.loads(Path(file).read_text()) for name, _, file in (one.partition("=") for one in ways)}
    kept.write(box, overlinks.FILE, kept.head(machine, arms.values(), [arms_file]), {"ways": found, "arms": arms})
    for row in overlinks.rows(box):
        print(f"{row.model} {row.strategy} {row.link} {row.what}: {row.predicted_s:.4g} s predicted, {row.measured_s:.4g} measured, x{row.ratio:.2f}")
    for one in overlinks.orders(box):
        print(f"{one.model} {one.link} {one.what}: {' / '.join(reversed(one.pair))} {one.expected:.2f} expected, {one.measured:.2f} measured, {one.right}")


if __name__ == "__main__":
    if len(sys.argv) < 6:
        sys.exit(__doc__.splitlines()[0])
    main(Path(sys.argv[1]), *sys.argv[2:])
