"""The patches of one box, live or from a recorded report: what is the matter, what is mended, and whether the mend works in the workers that run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import arms, equality, patches, server
from .errors import GateFailed
from .params import Params
from .patches import evidence
from .schema import Parallel, Ranks
from .station import Station

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Proof:
    """answers: what a stock server and the mended one did with one request; live: what runs in each rank of the mended one."""

    answers: Rows
    live: Rows


# What a server is asked that may die of its first request.
PROMPT = "Name three primary colours."


def _recorded(station: Station) -> dict[str, Any]:
    return json.loads(arms.recorded_file(station, "patches.json").read_text())


def _tree(station: Station) -> Path:
    return patches.tree_of_box(station.params)


def states(station: Station) -> Rows:
    """States of the known defects in the vLLM that the box is served with; for a recorded box as they were before its patches.

    Of a report's box, those of the stock release that its params name: its own tree was not published.
    """
    if station.report:
        return patches.stock_rows(station.params)
    return patches.rows_of_box(station.params) if station.live else _recorded(station)["status"]


def states_after(station: Station) -> Rows:
    """The same after patching; for a report's box nothing was patched."""
    return states(station) if station.live or station.report else _recorded(station)["after"]


def to_mend(rows: Rows, station: Station) -> list[str]:
    """Defects that this box meets and that Fieldbook mends, where the params ask for it."""
    return patches.to_mend(rows) if station.params.engine.patches == "needed" else []


def diff(station: Station, wanted: list[str]) -> str:
    """Unified diff of these mends, '' where there is nothing to change."""
    if not wanted or station.report:
        return ""
    return patches.diff(_tree(station), *wanted) if station.live else _recorded(station)["diff"]


def _request(station: Station, name: str, arm: Parallel, layers_per_stage: tuple[int, ...], after=lambda started: None) -> tuple[dict[str, Any], Any]:
    """Boot, ask once, stop: (boots, answers and evidence, what `after` made of the server while it ran)."""
    most = station.params.probes.answer_tokens
    try:
        started = arms.boot(station, name, arm, layers_per_stage, first_token=False)
    except GateFailed as error:
        return {"boots": False, "answers": False, "evidence": str(error)}, None
    station.progress(f"{name}: first request")
    try:
        with station.clock("probes"):
            answer = server.complete(started.state, PROMPT, most)
        return {"boots": True, "answers": True, "evidence": answer["text"].strip()}, after(started)
    except GateFailed as error:
        up, cause = arms.died_of(started)
        if up and not cause:
            raise
        return {"boots": True, "answers": False, "evidence": cause or f"no exception in the log; {error}"}, None
    finally:
        server.stop(started.state_file)
        station.progress("")


def _live(tree: Path, wanted: list[str], state: dict[str, Any], arm: Ranks) -> Rows:
    """What each rank of a running server says of these patches. Raises GateFailed when one does not run a mend."""
    said = server.running_code(state, evidence.places(wanted), arm.ranks)
    live = evidence.rows(tree, wanted, said)
    if problems := evidence.problems(live):
        raise GateFailed(f"a mend is not live: {'; '.join(problems)}")
    return live


def live_in(params: Params, booted: arms.Boot, arm: Ranks, rows: Rows) -> Rows:
    """The patches that a box needs and status rows say are applied, asked of the ranks of its running server. Raises GateFailed as _live does, and then
    stops it."""
    wanted = [row["id"] for row in rows if row["met_by_this_box"] and row["state"] in ("patched", "edited")]
    try:
        return _live(patches.tree_of_box(params), wanted, booted.state, arm) if wanted else []
    except GateFailed:
        arms.stop_boot(booted)
        raise


def live_now(station: Station, booted: arms.Boot, arm: Ranks) -> Rows:
    """live_in for a notebook's server; of a recorded box what its mended server said then."""
    if station.report:
        return []
    return live_in(station.params, booted, arm, states_after(station)) if station.live else _recorded(station)["live"]


def prove(station: Station, wanted: list[str], arm: Parallel, layers_per_stage: tuple[int, ...]) -> Proof:
    """Every mend against stock code: a server without it is booted and asked, where its defect ends in an error; then one with all, whose ranks are asked
    which code they run.

    The tree is mended when this returns. Raises GateFailed when the mended server does not answer, when a stock one dies of something else, or when a rank
    does not run a mend: then it lies in a file that the active path never loads.
    """
    if station.report:
        return Proof([], [])
    if not station.live:
        recorded = _recorded(station)
        return Proof(recorded["proof"], recorded["live"])
    if not wanted:
        return Proof([], [])
    tree, answers = _tree(station), []
    for name in wanted:
        patches.apply(tree, name, station.params)
    for bundle in dict.fromkeys(patches.bundle_of(name) for name in wanted):
        symptoms = [patches.CATALOGUE[name].symptom for name in bundle if patches.CATALOGUE[name].symptom]
        shown = {"defect": ", ".join(name for name in bundle if name in wanted), "code": "stock"}
        if not symptoms:
            answers.append({**shown, "boots": None, "answers": None, "evidence": "not run: it answers wrong without an error, which one request does not show"})
            continue
        patches.revert(tree, bundle[0])
        row, _ = _request(station, f"stock-{bundle[0]}", arm, layers_per_stage)
        if not row["answers"] and not any(symptom in row["evidence"] for symptom in symptoms):
            raise GateFailed(f"{shown['defect']}: the stock server died of something else ({row['evidence']}), which proves nothing; run 04 again")
        answers.append({**shown, **row})
        patches.apply(tree, bundle[0], station.params)
    row, live = _request(station, "mended", arm, layers_per_stage, lambda started: _live(tree, wanted, started.state, arm))
    if not row["answers"]:
        raise GateFailed(f"{', '.join(wanted)}: the mended server still fails: {row['evidence']}")
    return Proof([*answers, {"defect": ", ".join(wanted), "code": "mended", **row}], live)


def on_hardware(wanted: list[str]) -> Rows:
    """What GPUs said of these patches, claim by claim; one line where none was asked."""
    rows = [{"patch": claim.patch, **claim.row()} for name in wanted for claim in equality.of_patch(name)]
    return rows or [{"hardware": "no GPU was asked about these" if wanted else "nothing is mended here"}]


def hardware(wanted: list[str]) -> str:
    """On which machine, with which vLLM, and how many claims held."""
    return "; ".join(f"{name}: {line}" for name in wanted if (line := equality.proof_line(name)))


def nothing_to_prove(station: Station) -> str:
    """Why no server was asked."""
    return f"{station.report.name} has no server that could be asked" if station.report else "nothing to prove: no known defect concerns this box"


def no_change(station: Station, wanted: list[str]) -> str:
    """What to show in place of a diff."""
    return f"nothing is changed here; `fieldbook patches diff --id {','.join(wanted)}` shows it" if station.report and wanted else "nothing to change"


def why_not(station: Station, rows: Rows) -> str:
    """What stands against serving with these states, '' where nothing does, or where the box is a report's: nothing is served there."""
    return "" if station.report else patches.why_unmended(rows)


def found_line(station: Station, met: Rows, wanted: list[str], proof: Proof) -> str:
    """The verdict of the patch station in one line: what was met, what is mended, and what proves it."""
    if not station.report:
        return proved_line(met, wanted, proof)
    there = [row["id"] for row in met if row["state"] == "present"]
    left = [name for name in there if name not in wanted]
    line = f"stock vLLM {station.params.engine.vllm_release} has {len(there)} of the {len(met)} known defects that concern this box"
    return f"{line}: Fieldbook mends {', '.join(wanted) or 'none'}" + (f", not {', '.join(left)}" if left else "")


def proved_line(met: Rows, wanted: list[str], proof: Proof) -> str:
    """The same of a box whose servers were asked."""
    died = any(row["code"] == "stock" and row["answers"] is False for row in proof.answers)
    alive = [row["defect"] for row in proof.answers if row["code"] == "stock" and row["answers"]]
    line = f"{len(met)} known defect(s) met: {', '.join(wanted) or 'none to mend'}"
    line += "; stock dies on the first request, mended answers" if died else ""
    line += f"; stock did not fail with {', '.join(alive)}" if alive else ""
    return line + (f"; live in all {len({row['rank'] for row in proof.live})} ranks" if proof.live else "")
