"""Keep what the arms said: `python tools/equality/keep.py PLAN.yml BOX MACHINE ARMS.json...` writes data/boxes/BOX/equality.json.

Several ARMS.json are put together, a later one over an earlier. Arms that ended for want of memory on a shared card, or of a model that vLLM does not
take, or that the plan no longer has, say nothing and are left out.
"""

import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lib"))

from fieldbook import equality, files  # noqa: E402

SAYS_NOTHING = ("out of memory", "validation error for ModelConfig")


def main(plan_file: Path, box: str, machine: str, *arms_files: str) -> None:
    plan = yaml.safe_load(plan_file.read_text())
    arms = {}
    for file in arms_files:
        arms |= json.loads(Path(file).read_text())
    arms = {name: arms[name] for name in plan["arms"] if name in arms and not any(words in arms[name].get("error", "") for words in SAYS_NOTHING)}
    releases = sorted({arm["vllm"] for arm in arms.values() if "vllm" in arm})
    if len(releases) != 1:
        sys.exit(f"arms of {', '.join(releases) or 'no release'}: one file is of one release")
    when = datetime.fromtimestamp(max(Path(file).stat().st_mtime for file in arms_files), timezone.utc)  # noqa: UP017
    told = {"machine": machine, "vllm": releases[0], "measured_at": f"{when:%Y-%m-%d}", "claims": plan["claims"], "costs": plan.get("costs", []), "arms": arms}
    # One line for each arm: hundreds of tokens one below the other help nobody.
    lines = [f"  {json.dumps(name)}: {json.dumps(arm)}" for name, arm in arms.items()]
    head = {key: value for key, value in told.items() if key != "arms"}
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + ',\n "arms": {\n' + ",\n".join(lines) + "\n }\n}\n"
    files.write_whole(ROOT / "data" / "boxes" / box / equality.FILE, text)
    for claim in equality.claims_of(box):
        print({True: "holds     ", False: "DOES NOT  ", None: "not run   "}[claim.holds], claim.says, "|", claim.measured)
    for cost in equality.costs_of(box):
        print("costs     ", cost.shown())


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__.splitlines()[0])
    main(Path(sys.argv[1]), *sys.argv[2:])
