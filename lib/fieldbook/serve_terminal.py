"""`fieldbook serve` and `fieldbook defaultcheck`: what they print, and how long a server stays."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from . import expected, gates, interrupts, memory_tables, paths, serve, server, tables
from .errors import BadInput, FieldbookError, GateFailed
from .serve import Preview, Served
from .terminal import text_table
from .walk import say

_MARKS = {"pass": "pass", "warn": "WARN", "refuse": "REFUSE", "not checked": "not checked"}


def gates_text(rows: list[dict[str, Any]], width: int = 120) -> str:
    """Every gate with its reason; evidence and ways out where it does not pass."""
    lines = []
    for row in rows:
        head = f"  [{_MARKS[row['result']]}] {row['gate']}: {row['reason']}"
        lines += textwrap.wrap(head, width, subsequent_indent="      ", break_long_words=False)
        if row["result"] == "pass":
            continue
        told = [("evidence", row["evidence"])] if row["evidence"] else []
        told += [(f"way out {number}", way) for number, way in enumerate(row["ways_out"], 1)]
        if row["result"] == "refuse" and row["escape"] and not any("server.allow" in way for way in row["ways_out"]):
            told.append(("escape", f"server.allow [{row['escape']}] lets it through, with a warning and a mark in the report"))
        for name, text in told:
            lines += textwrap.wrap(f"      {name}: {text}", width, subsequent_indent="        ", break_long_words=False)
    return "\n".join(lines)


def preview_text(found: Preview) -> str:
    """The command line, the gates, and one line that says what follows from them."""
    rows = found.rows
    count = {result: sum(row["result"] == result for row in rows) for result in _MARKS}
    counted = ", ".join(f"{n} {name}" for name, n in (("pass", count["pass"]), ("warn", count["warn"]), ("not checked", count["not checked"])) if n)
    verdict = f"refused by {count['refuse']} of {len(rows)} gates" if found.refused else f"may start: {counted}"
    note = [f"\n{found.note}"] if found.note else []
    ends = [f"LET THROUGH: {text}" for text in gates.escaped(rows)]
    return "\n".join([found.launch.command.shown(), *note, "", "Gates", gates_text(rows), "", verdict, *ends])


def served_text(found: Preview, served: Served) -> str:
    """Phases, the ledger beside the boot log, and where the server is."""
    boot = served.boot
    phases = [{"phase": name, "after, s": seconds} for name, seconds in boot.phases]
    parts = ["Start-up", text_table(phases, "  ")]
    if found.launch.pool is not None:
        parts += ["", "Predicted and logged", text_table(memory_tables.after_launch(found.launch.pool, boot.log, {}), "  ")]
    if served.live_code:
        parts += ["", "Code that the ranks run", text_table(tables.live_code(served.live_code), "  ")]
    state, log = boot.state, paths.shown(boot.state_file.with_suffix(".log"))
    parts += ["", f"{state['model']} serves at {server.url(state)} after {boot.ready_s:.0f} s; its log is {log}"]
    return "\n".join(parts)


def run_serve(arguments) -> int:
    """`fieldbook serve`. Exit status 1 when a gate refuses, the server does not start, or it ends by itself."""
    params = serve.with_changes(arguments.file, arguments.changes, arguments.partition)
    if arguments.stop_after is not None and arguments.preview:
        raise BadInput("serve: --stop-after goes with a launch, --print launches nothing")
    if not arguments.preview:
        serve.prepare(params, say)
    run_dir = serve.new_run_dir(params)
    found = serve.preview(params, run_dir)
    if arguments.preview or found.refused:
        print(json.dumps(found.document(), indent=1, ensure_ascii=False) if arguments.json else preview_text(found))
        if found.refused:
            raise GateFailed(f"serve: {found.refused}")
        return 0
    if not arguments.json:
        print(preview_text(found) + "\n", flush=True)
    return _serve(arguments, found, run_dir)


def _serve(arguments, found: Preview, run_dir: Path) -> int:
    status, served = 0, None
    with interrupts.owning(False), interrupts.signals():
        try:
            served = serve.start(found, run_dir, say)
            document = {**found.document(), **served.document()}
            serve.write_receipt(run_dir, document)
            print(json.dumps(document, indent=1, ensure_ascii=False) if arguments.json else served_text(found, served), flush=True)
            if arguments.stop_after is None:
                say("Ctrl-C stops it")
            ended = serve.watch(served.boot.state_file, arguments.stop_after)
            if ended:
                raise GateFailed(f"serve: the server ended: {ended}; its log is {paths.shown(served.boot.state_file.with_suffix('.log'))}")
        except interrupts.Interrupted as interrupt:
            # To be stopped is how a server that serves ends; a start that is given up has not done what was asked.
            status = 0 if served is not None else 128 + interrupt.number
        except FieldbookError as error:
            status = error.exit_status
            print(f"fieldbook: {error}", file=sys.stderr)
        finally:
            interrupts.ignore_signals()
            for name in server.stop_all(run_dir):
                say(f"stopped {name}")
            for text in gates.escaped(found.rows):
                say(f"LET THROUGH: {text}")
    return status


def run_defaultcheck(arguments) -> int:
    """`fieldbook defaultcheck`. Exit status 2 where a command line is not the one that is committed."""
    files = arguments.files or [str(file) for file in expected.all_params_files()]
    if arguments.update:
        written = [paths.shown(expected.update(file)) for file in files]
        print(json.dumps({"written": written}, indent=1) if arguments.json else "\n".join(written))
        return 0
    found = expected.check(files)
    differs = {file: lines for file, lines in found.items() if lines}
    if arguments.json:
        print(json.dumps({"differs": differs, "same": [file for file in found if file not in differs]}, indent=1, ensure_ascii=False))
    else:
        for file, lines in found.items():
            print("\n".join([f"{file}: {'differs' if lines else 'as committed'}", *(f"  {line}" for line in lines)]))
    if differs:
        more = "`fieldbook defaultcheck --update FILE` writes what is started now, if that is meant"
        raise BadInput(f"defaultcheck: {', '.join(differs)}: not the command line that is committed; {more}")
    return 0
