"""`fieldbook trial` and `fieldbook compare`: what they do and print."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml

from . import causal, comparing, files, interrupts, models, onewalk, outcome, server, station, trial, verdict_tables, walk
from . import params as params_module
from .errors import Degenerate, GateFailed
from .outcome import Outcome
from .params import Params
from .terminal import text_table
from .trial import Trial, Verdict


def run_trial(arguments) -> int:
    """`fieldbook trial`. Exit status 1 where a gate refuses or the candidate answers worse, 2 where it degenerates."""
    params = params_module.load(arguments.file)
    live = params.box.kind == "live"
    with onewalk.alone(walk.say) if live else nullcontext(), interrupts.owning(False), interrupts.signals():
        folder = walk.choose_run_dir(params, 1, 7, arguments.run_dir)
        try:
            return _steps(arguments, params, folder)
        except interrupts.Interrupted as interrupt:
            walk.say(f"fieldbook: trial: interrupted by {interrupt}; the same call with --run-dir {folder} goes on with it")
            return 128 + interrupt.number
        finally:
            interrupts.ignore_signals()
            if live:
                server.stop_all(folder)


def _steps(arguments, params: Params, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    sections = params.model_dump()
    files.write_whole(folder / "params.yml", yaml.safe_dump(sections, sort_keys=False))
    if params.box.kind == "live":
        models.ensure(params, walk.say)
    st = station.open_station("07_verdict", str(folder), **sections)
    walk.say(f"{params.box.name}: run folder {folder}")
    told: dict[str, Any] = {}
    planned = trial.plan(st)
    # A notebook shows where it is; so does a command, on stderr.
    with walk.shown_progress(folder):
        for step in [arguments.step] if arguments.step else trial.STEPS:
            done = step not in ("verdict",) and step not in trial.missing(planned)
            walk.say(f"{step}: {'done before' if done else '...'}")
            told[step] = trial.FUNCTIONS[step](planned)
            if step == "preflight" and told[step]["refused"]:
                break
    (folder / ".progress").unlink(missing_ok=True)
    print(json.dumps(_document(told, folder), indent=1, ensure_ascii=False) if arguments.json else _text(told, planned))
    if refused := told.get("preflight", {}).get("refused"):
        raise GateFailed(refused)
    found = told.get("verdict")
    if found and found.problem:
        raise (Degenerate if found.degenerate else GateFailed)(found.problem)
    return 0


def _document(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    steps = {step: data for step, data in told.items() if step != "verdict"}
    found = told.get("verdict")
    judged = found.outcome.document() | {"problem": found.problem} if found else {"verdict": None}
    return {"run_dir": str(folder), "steps": steps, **judged}


def _text(told: dict[str, Any], planned: Trial) -> str:
    parts: list[str] = []
    if "preflight" in told:
        data = told["preflight"]
        parts += ["Preflight", text_table(verdict_tables.preflight(data), "  ")]
        parts += ["", text_table(verdict_tables.warnings(data), "  ")] if verdict_tables.warnings(data) else []
    if "control" in told:
        parts += ["", "Control", text_table(verdict_tables.boots(list(told["control"]["boots"].values())), "  ")]
    if "boot" in told:
        parts += ["", "Boot", text_table(verdict_tables.held(told["boot"]["pool"], planned.names["candidate"]), "  ")]
    if "verify" in told:
        parts += ["", "Verify", text_table(verdict_tables.boots([told["verify"]["boot"]]), "  ")]
    if "verdict" in told:
        parts += ["", "Verdict", _verdict_text(told["verdict"], planned)]
    return "\n".join(parts).strip("\n")


def _verdict_text(found: Verdict, planned: Trial) -> str:
    st = planned.station
    pools = {arm: causal.pool_if_known(st.params, one, planned.layers[arm], st.gpus())[0] for arm, one in planned.arms.items()}
    tables = [verdict_tables.arms(found, planned, pools), verdict_tables.story(found, planned, trial.preflight(planned))]
    return "\n\n".join([outcome_text(found.outcome), *(text_table(rows, "  ") for rows in tables), found.line])


def outcome_text(found: Outcome) -> str:
    """Every metric and every probe of a comparison as two tables."""
    rows = verdict_tables.comparisons(found.compared, found.adjusted, found.primary_metric, found.names)
    missing = [f"  {why}" for why in found.missing.values()]
    return "\n".join([text_table(rows, "  "), *missing, "", text_table(verdict_tables.answers(found.correctness, found.names), "  ")])


def run_compare(arguments) -> int:
    """`fieldbook compare`. Exit status 1 where the candidate answers worse, 2 where it degenerates or the runs cannot be compared."""
    found = comparing.compare(arguments.run_a, arguments.run_b, arguments.metric, arguments.expect, arguments.any_box)
    document = found.outcome.document() | {"differences": list(found.differences), "runs": list(found.runs)}
    told = [f"  differs: {text}" for text in found.differences]
    text = "\n".join([f"candidate {found.runs[0]}, baseline {found.runs[1]}", *told, "", outcome_text(found.outcome), "", found.outcome.line])
    print(json.dumps(document, indent=1, ensure_ascii=False) if arguments.json else text)
    kind = found.outcome.failure
    if kind:
        walk.say(f"fieldbook: compare: {outcome.correctness.sentence(found.outcome.correctness, found.outcome.names)}")
    return kind.exit_status if kind else 0
