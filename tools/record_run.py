"""Turn a finished live run into a recorded box: `python tools/record_run.py RUN NEWBOX`.

Writes data/boxes/NEWBOX (inventory, ceilings, versions), data/reports/NEWBOX (boot logs, samples, answers, readings, patch states) and params/NEWBOX.yml.
Boot logs keep only the lines that Fieldbook reads, so that no path, address or host name of the machine goes along.
"""

import json
import re
import sys
from pathlib import Path

import yaml

from fieldbook import bench, bootlog, files, inventory, patches, paths, probes, receipts
from fieldbook.inventory import capture


def trim_log(text: str) -> str:
    """The lines of a boot log that are read later, cut where they name the machine."""
    kept = []
    for line in bootlog.clean(text).splitlines():
        if bootlog.is_read(line):
            line = re.sub(
                r" with config: .*| non-default args: .*|(?<=Starting to load model) .*", lambda m: " non-default args" if "args" in m[0] else "", line
            )
            kept.append(line)
    return "\n".join(kept) + "\n"


def main(run_dir: Path, new_box: str) -> None:
    """Read the run's receipts and files, write the recorded box."""
    found = {name: receipts.read(run_dir, name) for name in paths.STATIONS}
    missing = [name for name, receipt in found.items() if receipt is None or not receipt.passed]
    if missing:
        sys.exit(f"{run_dir}: no passed receipt of {', '.join(missing)}; record a run that came through")
    box_dir, report_dir = paths.root() / "data" / "boxes" / new_box, paths.root() / "data" / "reports" / new_box
    first, fourth = found["01_hardware_inventory"], found["04_patch_application"]

    # What the machine is, from its own commands now; what its links carried, from the run.
    capture.capture(box_dir, {inventory.MEASURED_FILE: json.dumps(first.data["inventory"]["measured"], indent=1) + "\n"})
    files.write_json(box_dir / "ceilings.json", {"memory_read_bytes_s": first.figures["memory_read_gb_s"].value * 1e9})
    versions = {key: value for key, value in first.versions.items() if key != "fieldbook"}
    files.write_whole(box_dir / "versions.yml", yaml.safe_dump(versions, sort_keys=False))

    for arm in ("candidate", "baseline"):
        files.write_whole(report_dir / f"boot-{arm}.log", trim_log((run_dir / "servers" / f"{arm}-1.log").read_text()))
    samples = bench.read_samples(run_dir / "samples.jsonl")
    # Hundreds of streams make megabytes of times.
    many = sum(len(s.itl_s) * s.output_tokens[0] for s in samples if s.output_tokens) > 100_000
    bench.write_samples(report_dir / ("samples.jsonl.xz" if many else "samples.jsonl"), samples)
    probes.keep_answers(report_dir / "answers.jsonl", probes.read_answers(run_dir / "answers.jsonl"))
    files.write_json(report_dir / "readings.json", json.loads((run_dir / "readings.json").read_text()))
    # The diff is that of the tree which was patched; where the modules lay is the machine's own affair.
    mended = patches.to_mend(fourth.data["before"])
    live = [{key: value for key, value in row.items() if key != "path"} for row in fourth.data["measured_live"]]
    states = {"status": fourth.data["before"], "diff": patches.diff(patches.vllm_tree(), *mended), "proof": fourth.data["measured_proof"]}
    files.write_json(report_dir / "patches.json", {**states, "live": live, "after": fourth.data["after"]})

    params = first.params
    params["box"] = {"name": new_box, "kind": "recorded", "note": f"a run of {first.box} on {first.started_at[:10]}, replayed without a server"}
    header = f"# A recorded run of {first.box}: everything that can be computed is computed again, the rest is shown as recorded.\n"
    files.write_whole(paths.root() / "params" / f"{new_box}.yml", header + yaml.safe_dump(params, sort_keys=False))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.splitlines()[0])
    main(Path(sys.argv[1]), sys.argv[2])
