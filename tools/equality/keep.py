"""Keep what the arms said: `python tools/equality/keep.py PLAN.yml BOX MACHINE ARMS.json...` writes data/boxes/BOX/equality.json.

Several ARMS.json are put together, a later one over an earlier. Arms that ended for want of memory on a shared card, or of a model that vLLM does not
take, or that the plan no longer has, say nothing and are left out.
"""

import json
import sys
from pathlib import Path

import kept
import yaml

from fieldbook import equality

SAYS_NOTHING = ("out of memory", "validation error for ModelConfig")


def main(plan_file: Path, box: str, machine: str, *arms_files: str) -> None:
    plan = yaml.safe_load(plan_file.read_text())
    arms = {}
    for file in arms_files:
        arms |= json.loads(Path(file).read_text())
    arms = {name: arms[name] for name in plan["arms"] if name in arms and not any(words in arms[name].get("error", "") for words in SAYS_NOTHING)}
    told = kept.head(machine, arms.values(), arms_files) | {"claims": plan["claims"], "costs": plan.get("costs", [])}
    kept.write(box, equality.FILE, told, {"arms": arms})
    for claim in equality.claims_of(box):
        print({True: "holds     ", False: "DOES NOT  ", None: "not run   "}[claim.holds], claim.says, "|", claim.measured)
    for cost in equality.costs_of(box):
        print("costs     ", cost.shown())


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__.splitlines()[0])
    main(Path(sys.argv[1]), *sys.argv[2:])
