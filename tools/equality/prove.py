"""Token for token: does a layout compute what one rank computes? `python tools/equality/prove.py PLAN.yml OUT [--only A,B] [--seconds 500]`.

PLAN lists arms of a vLLM installation: a model of data/models with made-up weights, a layout, patches of the catalogue, engine arguments. Each runs in a
process of its own (arm.py), over a copy of the package in which Fieldbook has made just these edits. OUT/arms.json gets what each arm answered, or how it
ended, in its own words. What follows from them is said by `fieldbook.equality`, which needs no GPU.

PLAN: {python, tree (paths from the repository on), work, ranks (processes at once), common: {...}, arms: {NAME: {model, tensor, pipeline, split, patches,
alone, engine, env, lengths, tokens, repetitions, together, timed, exclusive, equality, under, link}}}. `alone` takes the patches without those that the
catalogue bundles with them; `exclusive` runs with nothing else on the machine; `timed`, false, true, or what to take instead of TIMED, measures times as
well; `under` are words to put before its command, such as ip netns exec NAME, and `link` is a name for what its ranks have between them.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lib"))

from fieldbook import bootlog, files, live, patches  # noqa: E402
from fieldbook.patches import editing, store  # noqa: E402

HERE = Path(__file__).resolve().parent
DEFAULTS = {
    "tensor": 1, "pipeline": 1, "split": [], "patches": [], "alone": False, "engine": {}, "env": {}, "lengths": [200], "tokens": 24, "repetitions": 1,
    "together": False, "timed": False, "exclusive": False, "equality": "weights", "under": [], "link": "",
}  # fmt: skip
# Streams that decode at once and the steps of each, the length of a prompt, how many such prompts are sent at once as well, and how often all that.
TIMED = {"streams": 8, "steps": 128, "prefill_tokens": 4096, "prompts": 4, "repeats": 5}
LONGEST_S = 280


def arms_of(plan: dict, only: list[str]) -> dict[str, dict]:
    """Every arm with the defaults and what is common filled in; engine arguments and environment are added up."""
    common, found = {**DEFAULTS, **plan.get("common", {})}, {}
    for name, own in plan["arms"].items():
        if unknown := own.keys() - common.keys() - {"model"}:
            sys.exit(f"{name}: unknown {', '.join(sorted(unknown))}; an arm has model, {', '.join(DEFAULTS)}")
        arm = {**common, **own}
        arm["engine"], arm["env"] = ({**plan.get("common", {}).get(key, {}), **own.get(key, {})} for key in ("engine", "env"))
        wanted = arm["timed"] or {}
        arm["timed"] = {**TIMED, **({} if wanted is True else wanted)} if wanted else {}
        if not only or name in only:
            found[name] = arm
    return found


def copy_with(tree: Path, wanted: tuple[str, ...], alone: bool, work: Path) -> tuple[Path, dict[str, str]]:
    """(folder that holds a vllm package with these edits, {file: sha256} of what was edited). Files that are not edited are links to the same bytes."""
    name = "-".join(wanted) + ("-alone" if alone else "") if wanted else "stock"
    root = work / "trees" / name
    if not root.exists():
        root.mkdir(parents=True)
        subprocess.run(["cp", "-al", str(tree), str(root / "vllm")], check=True)
        for told in tree.parent.glob("vllm*.dist-info"):
            subprocess.run(["cp", "-al", str(told), str(root / told.name)], check=True)
        asked = wanted if alone else patches.catalogue.bundles_of(wanted)
        for path, content in editing._planned(tree, tuple(asked), store.Manifest()).items():
            # A new file in place of the link, so that the tree itself stays as it is.
            if content != (tree / path).read_bytes():
                files.write_whole(root / "vllm" / path, content)
    edited = {str(p.relative_to(root / "vllm")): p for p in (root / "vllm").rglob("*.py") if p.stat().st_nlink == 1}
    return root, {path: hashlib.sha256(p.read_bytes()).hexdigest() for path, p in sorted(edited.items())}


def start(name: str, arm: dict, plan: dict, work: Path, plugin: Path, out: Path) -> dict:
    """Start one arm. Returns what `ended` needs."""
    root, edited = copy_with(ROOT / plan["tree"], tuple(arm["patches"]), arm["alone"], work)
    config = ROOT / "data" / "models" / arm["model"]
    engine = {"model": str(config), "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0, "disable_log_stats": True, **arm["engine"]}
    if arm["tensor"] * arm["pipeline"] > 1:
        engine |= {"tensor_parallel_size": arm["tensor"], "pipeline_parallel_size": arm["pipeline"], "distributed_executor_backend": "mp"}
    asked = {key: arm[key] for key in ("lengths", "tokens", "repetitions", "together", "timed")}
    files.write_json(work / f"{name}.asked.json", asked | {"engine": engine, "vocabulary": json.loads((config / "config.json").read_text())["vocab_size"]})
    environment = {**os.environ, **{key: str(value) for key, value in arm["env"].items()}, "EQUALITY": arm["equality"]}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(plugin), str(root), environment.get("PYTHONPATH", "")]))
    if arm["split"]:
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, arm["split"]))
    answer, log = work / f"{name}.answer.json", out / f"{name}.log"
    answer.unlink(missing_ok=True)
    command = [*arm["under"], str(ROOT / plan.get("python", sys.executable)), str(HERE / "arm.py"), str(work / f"{name}.asked.json"), str(answer)]
    with open(log, "w") as told:
        process = subprocess.Popen(command, env=environment, stdout=told, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, cwd=work)
    return {"process": process, "answer": answer, "log": log, "since": time.monotonic(), "edited": edited, "arm": arm}


def ended(running: dict) -> dict | None:
    """What came of an arm, None while it runs. One that hangs is ended."""
    process, arm = running["process"], running["arm"]
    late = time.monotonic() - running["since"] > LONGEST_S
    if process.poll() is None and not late:
        return None
    stop(process)
    log = running["log"].read_text(errors="replace")
    told = ("model", "tensor", "pipeline", "split", "patches", "alone", "engine", "lengths", "tokens", "together", "equality", "link")
    found = {key: arm[key] for key in told}
    found |= {"edited": running["edited"], "took_s": round(time.monotonic() - running["since"], 1), "space_bytes": space_of(log)}
    if running["answer"].is_file():
        return found | {"outcome": "ran", **json.loads(running["answer"].read_text())}
    return found | {"outcome": f"no end in {LONGEST_S} s" if late else f"ended with status {process.returncode}", "error": last_words(log)}


def stop(process: subprocess.Popen) -> None:
    """End the process and all that it started, which share its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def space_of(log: str) -> dict[str, int]:
    """{rank: bytes for the KV cache}, as the plugin printed them."""
    return dict(re.findall(r"equality: rank (\d+) has (\d+) bytes", log))


def last_words(log: str) -> str:
    """What the arm died of, as a server's log would be read."""
    text = bootlog.clean(log)
    return (bootlog.root_error(text) or (text.strip().splitlines() or [""])[-1])[:500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=3600, help="no arm is started after so long, and none runs on")
    asked = parser.parse_args()
    plan = yaml.safe_load(asked.plan.read_text())
    arms = arms_of(plan, [word for word in asked.only.split(",") if word])
    work, out = Path(plan["work"]), asked.out
    (work / "trees").mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    plugin, began, waiting, running = work / "plugin", time.monotonic(), dict(arms), {}
    live.write_plugin(plugin, "fieldbook_equality", HERE / "plugin.py")
    results = json.loads((out / "arms.json").read_text()) if (out / "arms.json").is_file() else {}
    while waiting or running:
        late = time.monotonic() - began > asked.seconds
        if late:
            for name, one in running.items():
                stop(one["process"])
                print(f"{name}: stopped, the time is up", flush=True)
            print(f"not run: {', '.join([*running, *waiting]) or 'none'}", flush=True)
            break
        busy = sum(one["arm"]["tensor"] * one["arm"]["pipeline"] for one in running.values())
        for name, arm in list(waiting.items()):
            ranks = arm["tensor"] * arm["pipeline"]
            alone = arm["exclusive"] or any(one["arm"]["exclusive"] for one in running.values())
            if (alone and running) or busy + ranks > max(plan["ranks"], ranks):
                break
            running[name] = start(name, waiting.pop(name), plan, work, plugin, out)
            busy += ranks
        for name, one in list(running.items()):
            if (found := ended(one)) is not None:
                results[name] = found
                del running[name]
                files.write_json(out / "arms.json", results)
                print(f"{time.monotonic() - began:4.0f} s  {name}: {found['outcome']} {found.get('error', '')[:160]}", flush=True)
        time.sleep(0.3)
    shutil.rmtree(plugin, ignore_errors=True)


if __name__ == "__main__":
    main()
