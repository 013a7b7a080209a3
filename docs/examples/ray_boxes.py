"""Walk several boxes as Ray tasks, one node each: `python docs/examples/ray_boxes.py PARAMS.yml ...` (Ray's own environment; it needs Ray and nothing else).

Every node needs a checkout with its .venv at the same path. The last line of stdout is one JSON document: params file -> result of its walk.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[2]
FIELDBOOK = os.environ.get("FIELDBOOK", str(ROOT / ".venv" / "bin" / "fieldbook"))


@ray.remote(max_retries=0)
def walk(params_file: str, environment: dict[str, str]) -> dict:
    """`fieldbook run` of one params file: the document that it prints last, or what it said instead. A walk is not a thing to retry unseen."""
    done = subprocess.run([FIELDBOOK, "run", params_file], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.stdout.strip():
        return json.loads(done.stdout.strip().splitlines()[-1])
    return {"status": done.returncode, "verdict": (done.stderr.strip().splitlines() or ["no word"])[-1]}


def main() -> int:
    """Submit all, wait for all, print what came back. Returns 0 where every walk came through, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("params", nargs="+")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs that a walk takes of its node")
    parser.add_argument("--resource", default="", help="custom resource of the nodes that are meant, such as a100x8; each walk takes one of it")
    parser.add_argument("--reports", default=str(ROOT / "reports"), help="shared folder of all runs")
    arguments = parser.parse_args()
    ray.init(log_to_driver=False)
    options = {"num_cpus": 1, "num_gpus": arguments.gpus, "resources": {arguments.resource: 1} if arguments.resource else {}}
    environment = {"FIELDBOOK_REPORTS": str(Path(arguments.reports).resolve())}
    waiting = {walk.options(**options).remote(file, environment): file for file in arguments.params}
    results = {}
    while waiting:
        (ready,), _ = ray.wait(list(waiting), num_returns=1)
        file = waiting.pop(ready)
        try:
            results[file] = ray.get(ready)
        except ray.exceptions.RayError as error:
            results[file] = {"status": 1, "verdict": f"its task was lost: {type(error).__name__}"}
        print(f"{file}: {results[file]['status']}: {results[file]['verdict']}", file=sys.stderr, flush=True)
    print(json.dumps(results))
    return 0 if all(result["status"] == 0 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
