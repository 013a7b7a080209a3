"""Recomputations of notebooks 04 and 05: what follows from the rows of defects and from the boot log that their receipts keep."""

import json
from dataclasses import asdict
from typing import Any

from .. import arms, gates, memory, memory_tables, patches, proofs
from ..bootlog import BootLog, RankLog
from ..splits import layout_name
from .compare import Found, plain
from .planned import on_cards
from .run import Run

_DEFECTS = "the defects' rows in its receipt"
_LOG = "the boot log in its receipt"


def _met(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.receipt(4).data["before"] if row["met_by_this_box"]]


def _recorded_rows(name: str):
    def recompute(run: Run, key: str) -> Found | str:
        if run.asked.box.kind == "live":
            return "read from the vLLM installed on the box"
        return Found(json.loads(run.file("patches.json").read_text(encoding="utf-8"))[name], run.told("patches.json"))

    return recompute


def on_record(name: str, recompute):
    """A recomputation of a station that a recorded box replays from a file; a report without that file has no such station to judge. Raises CannotTell."""

    def wrapped(run: Run, key: str) -> Found:
        if run.asked.box.kind == "recorded":
            run.file(name)
        return recompute(run, key)

    return wrapped


def defects_met(run: Run, key: str) -> Found:
    """Rows before patching that this box meets."""
    return Found(len(_met(run)), _DEFECTS)


def defects_mended(run: Run, key: str) -> Found:
    """Those less the ones that stand after patching."""
    return Found(len(_met(run)) - len(patches.unmended(run.receipt(4).data["after"])), _DEFECTS)


def patch_verdict(run: Run, key: str) -> Found:
    """The line that notebook 04 ends with."""
    data = run.receipt(4).data
    wanted = patches.to_mend(data["before"]) if run.asked.engine.patches == "needed" else []
    line = proofs.proved_line(_met(run), wanted, proofs.Proof(data["measured_proof"], data["measured_live"]))
    return Found(patches.why_unmended(data["after"]) or line, _DEFECTS)


def patch_passed(run: Run, key: str) -> Found:
    """Whether every defect that must be mended is."""
    return Found(not patches.why_unmended(run.receipt(4).data["after"]), _DEFECTS)


def kept_log(run: Run) -> BootLog:
    """The boot log as the receipt of notebook 05 keeps it; stages are texts there."""
    told = dict(run.receipt(5).data["server"]["measured_log"])
    for name in ("available_kv_gib", "weights_load_s"):
        told[name] = {int(stage): value for stage, value in told[name].items()}
    return BootLog(**{**told, "ranks": tuple(RankLog(**row) for row in told["ranks"])})


# What no later line of a log changes: requests, shutdown and errors come after it.
_SETTLED = ("vllm_version", "runner", "pool_tokens", "max_concurrency", "max_model_len", "available_kv_gib", "block_size_tokens", "partition")


def boot_log(number: int):
    """What the log itself tells of the start that a receipt keeps, where the log is in the folder. A live one has gone on since, or begun again."""

    def recompute(run: Run, key: str) -> Found | str:
        kept = run.receipt(number).data["server"]
        arm, _, boot = kept["name"].rpartition("-")
        log, file = run.log(arm, int(boot))
        found = plain(asdict(log))
        if run.asked.box.kind == "recorded":
            return Found(found, f"bootlog.parse of {file}")
        settled = {name: found[name] for name in _SETTLED}
        later = run.receipts[6].data["server"]["measured_log"] if number == 5 and 6 in run.receipts else kept["measured_log"]
        if any(kept["measured_log"][name] != settled[name] for name in _SETTLED) and all(later[name] == settled[name] for name in _SETTLED):
            return f"the server was started again for notebook 06: {file} is of that start"
        return Found({**kept["measured_log"], **settled}, f"bootlog.parse of {file}")

    return recompute


def pool_tokens(run: Run, key: str) -> Found:
    """The pool that the log told."""
    return Found(kept_log(run).pool_tokens or 0, _LOG)


def max_concurrency(run: Run, key: str) -> Found:
    """The longest requests at once that the log told."""
    return Found(kept_log(run).max_concurrency or 0.0, _LOG)


def terms(run: Run, key: str) -> Found:
    """What the log tells a later run."""
    return Found(memory_tables.logged_terms(kept_log(run), len(run.layers)), _LOG)


def escaped(run: Run, key: str) -> Found:
    """Gates that were let through."""
    return Found(gates.escaped(run.receipt(5).data["measured_gates"]), "the gates' rows in its receipt")


def _served(run: Run) -> tuple[str, bool]:
    """(the line of the server, whether the memory accounting is wrong), as notebook 05 judges."""
    log = kept_log(run)
    pool, rounding = memory.pool_after(run.asked, run.spec, run.layers, log.available_kv_gib, run.gpus(5))
    return arms.served_line(layout_name(run.asked.parallel, run.layers), log.pool_tokens or 0, pool.pool_tokens, rounding)


def _refused(run: Run) -> str:
    return gates.refused(run.receipt(5).data["measured_gates"])


def launch_verdict(run: Run, key: str) -> Found:
    """The line that notebook 05 ends with."""
    if problem := _refused(run):
        return Found(f"refused: {problem}", "the gates' rows in its receipt")
    line, _ = _served(run)
    line += "".join(f"; LET THROUGH: {text}" for text in run.receipt(5).data["escaped"])
    return Found(line, f"memory.pool_after and {_LOG}")


def launch_passed(run: Run, key: str) -> Found:
    """Whether no gate refused and the pool is as predicted."""
    return Found(not _refused(run) and not _served(run)[1], f"memory.pool_after and {_LOG}")


RECOMPUTED: dict[str, dict[str, Any]] = {
    "04_patch_application": {
        "defects_met": defects_met,
        "defects_mended": defects_mended,
        "data.before": _recorded_rows("status"),
        "data.after": _recorded_rows("after"),
        "data.measured_proof": _recorded_rows("proof"),
        "receipt.verdict": on_record("patches.json", patch_verdict),
        "receipt.passed": on_record("patches.json", patch_passed),
    },
    "05_server_launch": {
        "pool_tokens": pool_tokens,
        "max_concurrency": max_concurrency,
        "ready_s": "a time measured on the box",
        "data.server.measured_log": boot_log(5),
        "data.measured_terms": terms,
        "data.escaped": escaped,
        "receipt.verdict": on_record("boot-candidate.log", on_cards(5, launch_verdict)),
        "receipt.passed": on_record("boot-candidate.log", launch_passed),
    },
}
