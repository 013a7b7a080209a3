"""The command line: `python -m fieldbook ...` or `fieldbook ...`.

Text for people by default; --json prints one JSON document on stdout and nothing else. Exit status 0 done, 1 a gate or probe said no, 2 bad input.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import yaml

from . import __version__
from .errors import BadInput, FieldbookError


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        # argparse prints its usage first; a wrong call gets one line here.
        self.exit(2, f"fieldbook: {message}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = _Parser(prog="fieldbook", description="Field-report workbook for serving language models with vLLM on odd multi-GPU boxes.")
    parser.add_argument("--version", action="version", version=f"fieldbook {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(name: str, text: str, function, with_json: bool = True):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        if with_json:
            sub.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
        return sub

    sub = command("params", "validate a params file and print the resolved values", run_params)
    sub.add_argument("file", metavar="FILE", nargs="?")
    sub.add_argument("--describe", action="store_true", help="list every key with its default and meaning")
    sub = command("run", "run the walk; the last line of stdout is one JSON document", run_walk, with_json=False)
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--from", dest="first", metavar="NN", default="01", help="resume the latest run of the box at this station")
    sub.add_argument("--only", metavar="NN", help="run only this station")
    sub.add_argument("--run-dir", metavar="DIR", help="run folder to use instead of a new one (or, with --from, the latest)")
    sub.add_argument("--keep-server", action="store_true", help="leave the server of a single station up for the next one")
    sub = command("inventory", "what is in this box", run_inventory)
    sub.add_argument("--from", dest="source", metavar="DIR|FILE|-", help="read captured command outputs instead; -: standard input")
    sub.add_argument("--no-measure", action="store_true", help="of this machine: do not measure its links")
    sub = command("capture", "write this box's outputs for `inventory --from`, without serials, UUIDs and host names", run_capture)
    sub.add_argument("folder", metavar="DIR")
    sub.add_argument("--no-measure", action="store_true", help="do not measure the links")
    sub = command("memory", "what each rank holds and how many tokens of KV pool come out", run_memory)
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--partition", metavar="41,37", help="layers of each stage, instead of what the params ask for")
    sub.add_argument("--available-gib", metavar="19.35,18.16", help="KV space of each stage in GiB, instead of an estimate")
    sub.add_argument("--from", dest="source", metavar="DIR|FILE", help="box whose GPUs are counted, instead of the params' own")
    sub = command("partition", "the best layer split and parallel layout, what each costs and which would be wrong", run_partition)
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--index-sharing", choices=["clean", "relay", "flip"], help="how cuts through layers that share top-k indices are treated")
    sub.add_argument("--workload", choices=["interactive", "throughput", "long_context"], help="what the layouts are compared for")
    sub.add_argument("--from", dest="source", metavar="DIR|FILE", help="box whose GPUs are counted, instead of the params' own")
    sub = command("bootlog", "read a vLLM start-up log", run_bootlog)
    sub.add_argument("file", metavar="LOG", help="the log; -: standard input")
    sub = command("diagnose", "why a start or a run failed: cause, evidence, remedy, from its log", run_diagnose)
    sub.add_argument("file", metavar="LOG", help="the log, or what dmesg says; -: standard input")
    sub.add_argument("--exit-status", type=int, metavar="N", help="how the process ended, where that is known: -9 or 137 for SIGKILL")
    sub.add_argument("--oom-kills", type=int, metavar="N", default=0, help="processes that the kernel killed meanwhile for lack of memory")
    sub = command("serve", "gates, command line, launch: a server from a params file, until Ctrl-C", run_serve)
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--print", dest="preview", action="store_true", help="only show what would be started, and what the gates say")
    sub.add_argument("--set", dest="changes", metavar="KEY=VALUE", action="append", default=[], help="a value other than the file's, as section.key=value")
    sub.add_argument("--partition", metavar="41,37", help="layers of each stage, instead of what the params ask for")
    sub.add_argument("--stop-after", type=float, metavar="SECONDS", help="stop the server so long after its first token")
    sub = command("bench", "points and probes of a server: launched from a params file, or already up at --base-url", run_bench)
    sub.add_argument("file", metavar="FILE", nargs="?")
    sub.add_argument("--base-url", metavar="URL", help="a vLLM server that is already up, such as http://127.0.0.1:8000; it is not stopped")
    sub.add_argument("--model", metavar="NAME", help="which of the models served at --base-url")
    sub.add_argument("--api-key", metavar="$NAME", help="the variable of the environment that holds the key of --base-url")
    sub.add_argument(
        "--set", dest="changes", metavar="KEY=VALUE", action="append", default=[], help="another value, such as benchmarks.decode_concurrency=[1,8]"
    )
    sub.add_argument("--out", metavar="DIR", help="folder for samples, answers and figures; one of an interrupted measurement is gone on with")
    sub.add_argument("--no-probes", action="store_true", help="points only")
    sub.add_argument("--keep-baseline", action="store_true", help="keep what the probes say as this model's baseline: only of a layout that you trust")
    sub.add_argument("--detect", type=float, metavar="RATE", help="how many trials a fault of this rate needs to be seen, such as 0.05; measures nothing")
    sub = command("trial", "the verdict's steps by themselves: gates, baseline twice, candidate once more, table; what is done is not done again", run_trial)
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--step", choices=["preflight", "control", "boot", "verify", "verdict"], help="one step alone; without: those that are missing")
    sub.add_argument("--run-dir", metavar="DIR", help="run folder to use instead of the box's latest, or a new one where there is none")
    sub = command("compare", "two finished runs, or the two arms of one: the verdict", run_compare)
    sub.add_argument("run_a", metavar="RUN_A", help="run folder, or a .zip of one; its layout is the candidate")
    sub.add_argument("run_b", metavar="RUN_B", nargs="?", help="what it is held against: the layout of this run; without: the baseline of RUN_A")
    sub.add_argument("--metric", metavar="NAME", help="the one metric that decides, instead of the params' own, such as decode_c4_tok_s")
    sub.add_argument("--expect", choices=["faster", "slower", "same"], help="what RUN_A is expected to be")
    sub.add_argument("--any-box", action="store_true", help="compare runs of different boxes all the same")
    sub = command("degeneration", "whether one completion goes round or is no language any more", run_degeneration)
    sub.add_argument("file", metavar="TEXTFILE", help="the completion; -: standard input")
    sub = command("defaultcheck", "compare each params file's command line with the one committed in params/commands/", run_defaultcheck)
    sub.add_argument("files", metavar="FILE", nargs="*", help="params files; without: all")
    sub.add_argument("--update", action="store_true", help="write what would be started now")
    sub = command("model", "prepare the weights that a params file names", run_model)
    sub.add_argument("file", metavar="FILE")
    sub = command("patches", "known defects of the vLLM installed here", run_patches)
    sub.add_argument("action", nargs="?", choices=["status", "apply", "revert", "diff"], default="status")
    sub.add_argument("--id", metavar="ID", help="defects, with commas between; without: those --params meets, and for revert without either all there are")
    sub.add_argument("--tree", metavar="DIR", help="folder of a vllm package other than this environment's")
    sub.add_argument("--python", metavar="PY", help="Python of another environment, whose vllm package is meant")
    sub.add_argument("--params", metavar="FILE", help="box and model: say which defects they would meet")
    sub.add_argument("--overlay", metavar="DIR", help="apply: write the patched files and their diff there, and leave the package as it is")
    sub = command("stop", "stop the servers of a run folder", run_stop)
    sub.add_argument("run_dir", metavar="RUN")
    sub = command("publish", "write the HTML report of a run folder and the index over all runs", run_publish)
    sub.add_argument("run_dir", metavar="RUN")
    sub = command("check", "recompute every figure of a run that can be, without its machine, and name what differs", run_check)
    sub.add_argument("run", metavar="RUN|ZIP", help="a run folder, or a zip of one")
    sub = command("export", "a run to send to someone: one HTML file, and a .zip with receipts; without an option both, in the current folder", run_export)
    sub.add_argument("run_dir", metavar="RUN")
    sub.add_argument("--html", metavar="FILE", help="one page that stands alone, receipts and params in it as downloads")
    sub.add_argument("--zip", metavar="FILE", help="page, receipts, executed notebooks, params, samples; without paths and names of this machine")
    return parser


def _print(arguments, document, text: str) -> None:
    print(json.dumps(document, indent=1, ensure_ascii=False) if arguments.json else text)


def run_params(arguments) -> int:
    """`fieldbook params`."""
    from . import params

    if arguments.describe:
        rows = params.describe()
        text = "\n".join(f"{key:40} {default:24} {meaning}" for key, default, meaning in rows)
        _print(arguments, [{"key": k, "default": d, "meaning": m} for k, d, m in rows], text)
        return 0
    if not arguments.file:
        raise BadInput("params: give a params file such as params/cpu-smollm2.yml, or --describe")
    loaded = params.load(arguments.file)
    resolved = loaded.model_dump()
    _print(arguments, {**resolved, "params_hash": loaded.hash}, yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).rstrip())
    return 0


def run_walk(arguments) -> int:
    """`fieldbook run`."""
    from . import params, paths, walk

    loaded = params.load(arguments.file)
    first = int(paths.station_name(arguments.first)[:2])
    only = int(paths.station_name(arguments.only)[:2]) if arguments.only else None
    if arguments.keep_server and not only:
        raise BadInput("--keep-server: goes with --only; a whole walk stops its server")
    done = walk.run(loaded, first, only, arguments.run_dir, arguments.keep_server, arguments.file)
    print(walk.result_document(done))
    return done.status


def _box_here(measure: bool):
    """This machine's inventory, its links measured when asked."""
    from . import ceilings, inventory

    found = inventory.read_live()
    return inventory.measured(found, None if found.gpus else ceilings.measure_memory_read_bytes_s(found.host.logical_cpus)) if measure else found


def run_inventory(arguments) -> int:
    """`fieldbook inventory`."""
    from . import inventory, terminal

    if arguments.source == "-":
        found = inventory.read_pasted(sys.stdin.read())
    else:
        found = inventory.read_captured(Path(arguments.source)) if arguments.source else _box_here(not arguments.no_measure)
    _print(arguments, found.model_dump(), terminal.inventory_text(found))
    return 0


def run_capture(arguments) -> int:
    """`fieldbook capture`."""
    from . import inventory, terminal
    from .inventory import capture

    folder = Path(arguments.folder)
    capture.check(folder, [*capture.COMMANDS, inventory.MEASURED_FILE])
    measured = {} if arguments.no_measure else {inventory.MEASURED_FILE: inventory.measured_json(_box_here(True))}
    rows = capture.capture(folder, measured)
    shown = [{"file": row["file"], "result": row["result"], "why": row["why"]} for row in rows]
    written = sum(row["result"] == "written" for row in rows)
    text = f"{terminal.text_table(shown)}\n{written} files in {folder}, without serials, UUIDs and host names; look at them before you share them"
    _print(arguments, {"folder": str(folder), "files": rows}, text)
    return 0


def _numbers(text: str, option: str, kind: type) -> list:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 < number < 1e9 for number in found):
        raise BadInput(f"{option}: got {text!r}, expected numbers above 0 with commas between, one for each stage")
    return found


def run_memory(arguments) -> int:
    """`fieldbook memory`."""
    from . import layouts, memory, memory_tables, params, splits, terminal
    from .budget import Gpus

    loaded = params.load(arguments.file)
    spec = memory.model_spec(loaded.model.name)
    split = splits.resolve_split(loaded.parallel, spec)
    if arguments.partition:
        split = tuple(_numbers(arguments.partition, "--partition", int))
    if arguments.available_gib:
        loaded = memory.with_space(loaded, split, _numbers(arguments.available_gib, "--available-gib", float))
    gpus, given = None, bool(loaded.engine.available_kv_gib)
    if loaded.engine.kv_cache_gib_per_rank is None:
        sizes = layouts.sizes_of(_box_of(arguments, loaded))
        # Where the space is given, the cards are only for other layouts to compare with.
        gpus = Gpus(sizes) if any(sizes) or not given else None
    pool = memory.pool(loaded, spec, split, gpus=None if given else gpus)
    document = {
        "model": spec.name, "partition": list(split), "tensor_parallel_size": loaded.parallel.tensor_parallel_size,
        "ranks": memory_tables.document(pool), "binding_rank": pool.binding_rank, "pool_tokens": pool.pool_tokens, "blocks": pool.blocks,
        "block_size_tokens": pool.block_size_tokens, "max_concurrency": round(pool.max_concurrency, 4), "not_counted": list(spec.not_counted),
    }  # fmt: skip
    _print(arguments, document, terminal.memory_text(loaded, spec, split, pool, gpus))
    return 0


def _box_of(arguments, loaded):
    """The box that --from names, else the params' own."""
    from . import inventory

    return inventory.read_captured(Path(arguments.source)) if arguments.source else inventory.read(loaded)


def run_partition(arguments) -> int:
    """`fieldbook partition`. Exit status 1 where the chosen split must not be served on the live machine, 2 where none fits."""
    from . import ceilings, layouts, params
    from .partition_terminal import partition_text

    loaded = params.load(arguments.file)
    box = _box_of(arguments, loaded)
    reads = ceilings.memory_read_bytes_s(loaded, box) if loaded.engine.device == "cpu" and not arguments.source else None
    found = layouts.study(loaded, box, memory_read_bytes_s=reads, index_sharing=arguments.index_sharing, workload=arguments.workload)
    _print(arguments, layouts.document(found, not arguments.source), partition_text(found, not arguments.source))
    return 1 if found.refused and loaded.box.kind == "live" else 0


def _read_log(command: str, name: str, what: str) -> str:
    """Text of a log that a command was given, - for standard input."""
    if name == "-":
        return sys.stdin.read()
    file = Path(name)
    if not file.is_file():
        raise BadInput(f"{command}: {file}: no such file; give {what}, or - for standard input")
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInput(f"{command}: {file}: cannot be read ({error.strerror}); give {what}") from None


def run_bootlog(arguments) -> int:
    """`fieldbook bootlog`."""
    from . import bootlog, terminal

    log = bootlog.parse(_read_log("bootlog", arguments.file, "vLLM's start-up log"))
    if log == bootlog.parse(""):
        raise BadInput(f"bootlog: {arguments.file}: no line of a vLLM start-up log in it; give what the server printed while it started")
    document = bootlog.bootlog_document(log)
    _print(arguments, document, terminal.bootlog_text(document))
    return 0


def run_diagnose(arguments) -> int:
    """`fieldbook diagnose`."""
    from . import bootlog, diagnosis, terminal

    text = _read_log("diagnose", arguments.file, "the log of a server that failed")
    if not text.strip() and not arguments.exit_status:
        raise BadInput(f"diagnose: {arguments.file}: is empty; give what the server printed before it ended")
    found = diagnosis.diagnose_end(text, arguments.exit_status, arguments.oom_kills)
    if found.cause == diagnosis.NONE and not found.evidence and not bootlog.is_log(text):
        raise BadInput(f"diagnose: {arguments.file}: no line of a server's log in it; give what the server printed before it ended")
    _print(arguments, found.document(), terminal.diagnosis_text(found))
    return 0


def run_serve(arguments) -> int:
    """`fieldbook serve`."""
    from . import serve_terminal

    return serve_terminal.run_serve(arguments)


def run_bench(arguments) -> int:
    """`fieldbook bench`."""
    from . import bench_terminal

    return bench_terminal.run_bench(arguments)


def run_trial(arguments) -> int:
    """`fieldbook trial`."""
    from . import trial_terminal

    return trial_terminal.run_trial(arguments)


def run_compare(arguments) -> int:
    """`fieldbook compare`."""
    from . import trial_terminal

    return trial_terminal.run_compare(arguments)


def run_degeneration(arguments) -> int:
    """`fieldbook degeneration`."""
    from . import bench_terminal

    return bench_terminal.run_degeneration(arguments)


def run_defaultcheck(arguments) -> int:
    """`fieldbook defaultcheck`."""
    from . import serve_terminal

    return serve_terminal.run_defaultcheck(arguments)


def run_model(arguments) -> int:
    """`fieldbook model`."""
    from . import models, params

    folder = models.ensure(params.load(arguments.file), lambda text: print(text, file=sys.stderr))
    _print(arguments, {"folder": str(folder)}, str(folder))
    return 0


def run_patches(arguments) -> int:
    """`fieldbook patches`."""
    from . import equality, params, patches, tables, terminal

    if arguments.tree and arguments.python:
        raise BadInput("patches: --tree and --python both name a package; give one of them")
    given = patches.checked(Path(arguments.tree)) if arguments.tree else patches.tree_of_python(arguments.python) if arguments.python else None
    tree = given or patches.vllm_tree()
    if arguments.overlay and arguments.action != "apply":
        raise BadInput("patches --overlay: goes with apply")
    box = params.load(arguments.params) if arguments.params else None
    if arguments.action == "status":
        rows = patches.as_rows(patches.status(tree, box))
        text = terminal.text_table(tables.defects_narrow(rows, with_box=box is not None))
        harm = "\n".join(f"{row['id']}: {row['effect']}" for row in rows if row["state"] not in patches.MENDED and (row["met_by_this_box"] or box is None))
        seen = {name: line for name in patches.CATALOGUE if (line := equality.proof_line(name))}
        told = f"vLLM {patches.release(tree) or 'of unknown release'}\n{text}\n\n{harm or 'this box meets none that is open'}"
        told += "".join(f"\n{name}, on hardware: {line}" for name, line in seen.items())
        _print(arguments, {"vllm": patches.release(tree), "defects": rows, "hardware": seen}, told)
        return 0
    if not arguments.id and box is None and arguments.action != "revert":
        raise BadInput(f"patches {arguments.action}: name a patch with --id, or a box with --params; the catalogue has {', '.join(patches.CATALOGUE)}")
    if arguments.id:
        wanted = arguments.id.split(",")
    else:
        rows = patches.as_rows(patches.status(tree, box))
        wanted = patches.to_mend(rows) if box else [row["id"] for row in rows if row["state"] in ("patched", "edited")]
    if arguments.action == "diff":
        text = patches.diff(tree, *wanted)
        _print(arguments, {"id": wanted, "diff": text}, text)
    elif arguments.overlay:
        written = patches.overlay(tree, wanted, Path(arguments.overlay), box)
        _print(arguments, {"id": wanted, "written": [str(file) for file in written]}, "\n".join(map(str, written)))
    else:
        states = {name: patches.apply(tree, name, box) if arguments.action == "apply" else patches.revert(tree, name) for name in wanted}
        _print(arguments, states, "\n".join(f"{name}: {state}" for name, state in states.items()) or "nothing to do")
    return 0


def _run_folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such run folder; runs lie under reports/<box>/")
    return folder.resolve()


def run_stop(arguments) -> int:
    """`fieldbook stop`."""
    from . import server

    stopped = server.stop_all(_run_folder(arguments.run_dir))
    _print(arguments, {"stopped": stopped}, f"stopped: {', '.join(stopped) or 'none was running'}")
    return 0


def run_publish(arguments) -> int:
    """`fieldbook publish`."""
    from . import paths, publish, site

    report = publish.write_report(_run_folder(arguments.run_dir))
    index = site.write_index(paths.reports_dir())
    _print(arguments, {"report": str(report), "index": str(index)}, str(report))
    return 0


def run_check(arguments) -> int:
    """`fieldbook check`. Exit status 1 where something differs or does not belong together."""
    from . import checking

    found = checking.check(arguments.run)
    _print(arguments, found.document(), found.text())
    return 0 if found.sound else 1


def run_export(arguments) -> int:
    """`fieldbook export`."""
    from . import export

    written = export.export(_run_folder(arguments.run_dir), arguments.html, arguments.zip)
    _print(arguments, written, "\n".join(written[kind] for kind in ("html", "zip") if written[kind]))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status; errors a person can act on are one line on stderr."""
    try:
        parser = build_parser()
        arguments, left_over = parser.parse_known_args(argv)
        if left_over:
            parser.exit(2, f"fieldbook: {arguments.command}: unrecognized arguments: {' '.join(left_over)}; see `fieldbook {arguments.command} --help`\n")
        return arguments.function(arguments)
    except FieldbookError as error:
        print(f"fieldbook: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("fieldbook: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`); stdout must not complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


if __name__ == "__main__":
    sys.exit(main())
