"""`fieldbook bench` and `fieldbook degeneration`: what they do and print."""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import bench, bench_tables, ceilings, files, interrupts, load, memory, paths, probes, receipts, secrecy, serve, server, splits
from . import params as params_module
from .bench import Target
from .errors import BadInput, FieldbookError, GateFailed
from .schema import Benchmarks, Probes
from .terminal import text_table
from .walk import say

DEGENERATE = 2


@dataclass
class Plan:
    """What is to be measured, how, and where it is kept."""

    target: Target
    benchmarks: Benchmarks
    probes: Probes
    folder: Path
    model: str
    layout: str
    about: dict[str, Any]
    ceilings_tok_s: dict[str, float] = field(default_factory=dict)


def run_bench(arguments) -> int:
    """`fieldbook bench`. Exit status 1 for a point without a sound sample or answers worse than the baseline's, 2 for degenerate ones."""
    if arguments.detect is not None:
        return _detect(arguments)
    if bool(arguments.file) == bool(arguments.base_url):
        raise BadInput("bench: give a params file, which is launched, or --base-url of a server that is up; --set changes what is measured there")
    with interrupts.owning(False), interrupts.signals():
        try:
            return _of_url(arguments) if arguments.base_url else _of_file(arguments)
        except interrupts.Interrupted as interrupt:
            return 128 + interrupt.number


def _of_url(arguments) -> int:
    """Measure a server that is up; nothing of it is stopped."""
    sections = {"benchmarks": {}, "probes": {}}
    for change in arguments.changes:
        section, _, rest = change.partition(".")
        if section not in sections:
            raise BadInput(f"--set: {change.partition('=')[0][:60]}: with --base-url only benchmarks.KEY and probes.KEY can be set")
        sections[section].update(serve.changed(rest))
    asked = params_module.validate_measuring(sections, "--set")
    if arguments.api_key and not secrecy.is_reference(arguments.api_key):
        raise BadInput("--api-key: expected $NAME of the environment variable that holds the key; in a command line every user of the machine could read it")
    key = secrecy.resolved({"api_key": arguments.api_key}, os.environ, "--api-key")["api_key"] if arguments.api_key else ""
    target = bench.of_url(arguments.base_url, key, arguments.model or "")
    bench.check_lengths(asked.benchmarks, target.max_model_len)
    place = re.sub(r"[^A-Za-z0-9.]+", "-", target.url.partition("//")[2]).strip("-")
    folder = _folder(arguments, paths.reports_dir() / "bench" / f"{place}-{_stamp()}")
    about = {"url": target.url, "model": target.model, "benchmarks": asked.benchmarks.model_dump()}
    return _measured(arguments, Plan(target, asked.benchmarks, asked.probes, folder, target.model, f"server at {target.url}", about))


def _of_file(arguments) -> int:
    """Launch what a params file says, behind its gates, measure it and stop it."""
    params = serve.with_changes(arguments.file, arguments.changes)
    serve.prepare(params, say)
    folder = _folder(arguments, serve.new_run_dir(params).with_name(f"bench-{_stamp()}-{os.getpid()}"))
    found = serve.preview(params, folder)
    try:
        served = serve.start(found, folder, say)
        spec, launch = memory.model_spec(params.model.name), found.launch
        limits = ceilings.of_box(params, spec, launch.box)
        name = splits.layout_name(params.parallel, launch.layers)
        # The next start has another port, and is the same server for all that.
        about, target = {"params": params.hash}, bench.of_state(served.boot.state)
        plan = Plan(target, params.benchmarks, params.probes, folder, params.model.name, name, about, limits)
        # What a model with made-up weights answers means nothing.
        arguments.no_probes = arguments.no_probes or params.model.made_up
        return _measured(arguments, plan, params.engine.max_model_len)
    finally:
        interrupts.ignore_signals()
        server.stop_all(folder)


def _folder(arguments, otherwise: Path) -> Path:
    """Where the measurement is kept. Raises BadInput for a folder that holds a finished one."""
    folder = Path(arguments.out) if arguments.out else otherwise
    if (folder / "bench.json").is_file():
        raise BadInput(f"--out: {folder}: a finished measurement is kept there; give another folder")
    if folder.is_file():
        raise BadInput(f"--out: {folder}: is a file; give a folder")
    return folder


def _stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")  # noqa: UP017


def _measured(arguments, plan: Plan, max_model_len: int | None = None) -> int:
    target, folder, unfinished = plan.target, plan.folder, plan.folder / "samples.unfinished.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with load.client(folder / "load.log", target.api_key) as run:
            samples = bench.measure(target, run, plan.benchmarks, "candidate", 1, plan.benchmarks.rounds, plan.ceilings_tok_s, unfinished, plan.about, say)
        bench.write_samples(folder / "samples.jsonl", samples)
        answers, asked = [], None
        if not arguments.no_probes:
            longest = target.max_model_len or max_model_len or _longest(target)
            answers, read = probes.run(target, plan.probes, longest, max(plan.benchmarks.decode_concurrency), "candidate", say)
            asked = probes.summary(answers, read)
            probes.keep_answers(folder / "answers.jsonl", answers)
    except (interrupts.Interrupted, FieldbookError):
        say(f"bench: what was measured is kept; the same call with --out {paths.shown(folder)} goes on with it")
        raise
    status = _told(arguments, plan, samples, answers, asked)
    bench.forget(unfinished)
    return status


def _longest(target: Target) -> int:
    found = target.post("/tokenize", {"model": target.model, "prompt": "a"}).get("max_model_len")
    if not isinstance(found, int):
        raise GateFailed(f"{target.url} does not tell its longest request; --no-probes measures without needle prompts")
    return found


def _told(arguments, plan: Plan, samples: list[bench.Sample], answers: list[probes.Answer], asked: dict[str, Any] | None) -> int:
    metrics = [point.metric for point in bench.points(plan.benchmarks)]
    summary = bench.summary_rows(samples, metrics)
    base, why_none = probes.read_baseline(plan.model, plan.probes) if asked else (None, "")
    rows = probes.against(asked, base) if asked else []
    missing = [row["metric"] for row in summary if not row["samples"]]
    problems = [f"no sound sample of {', '.join(missing)}"] if missing else []
    problems += probes.problems(answers, rows)
    document = {
        "server": plan.target.url, "model": plan.target.model, "layout": plan.layout, "versions": receipts.versions(), "measured_at": receipts.now(),
        "settings": {"benchmarks": plan.benchmarks.model_dump(), "probes": plan.probes.model_dump() if asked else None},
        "points": [{**row, "values": bench.values(samples, "candidate", row["metric"])} for row in summary],
        "latencies": bench_tables.latencies(samples, metrics),
        "void": bench_tables.void(samples), "integrity": bench_tables.integrity(samples), "probes": rows, "problems": problems,
        "signs": probes.signs(asked, base) if asked else [], "not_quoted_for": bench_tables.not_quoted_for(samples, plan.benchmarks.rounds, answers),
        "command": secrecy.scrubbed(" ".join(sys.argv[1:]), [*secrecy.secret_values(), *filter(None, [plan.target.api_key])]),
    }  # fmt: skip
    files.write_json(plan.folder / "bench.json", document)
    if arguments.keep_baseline and asked:
        kept = probes.keep_baseline(plan.model, plan.probes, asked, {"layout": plan.layout, "versions": receipts.versions()})
        say(f"bench: baseline of {plan.model} kept in {paths.shown(kept)}")
    print(json.dumps(document, indent=1, ensure_ascii=False) if arguments.json else _text(document, plan, samples, answers, why_none))
    for problem in problems:
        say(f"fieldbook: bench: {problem}")
    degenerate = any(row["probe"] == "degeneration" and row["worse"] for row in rows)
    return DEGENERATE if degenerate and not arguments.keep_baseline else 1 if problems and not arguments.keep_baseline else 0


def _text(document: dict[str, Any], plan: Plan, samples: list[bench.Sample], answers: list[probes.Answer], why_none: str) -> str:
    metrics = [row["metric"] for row in document["points"]]
    parts = [f"{document['model']}, {plan.layout}", "", "tok/s", text_table(bench_tables.speeds(document["points"], plan.ceilings_tok_s), "  ")]
    parts += ["", "Every value", text_table(bench_tables.all_values(samples, metrics), "  ")]
    parts += ["", "One stream", text_table(document["latencies"], "  ")] if document["latencies"] else []
    parts += ["", "Did the measurement work?", text_table(document["integrity"], "  ")]
    parts += ["", "Void samples", text_table(document["void"], "  ")] if document["void"] else []
    if document["probes"]:
        parts += ["", "Probes", text_table(bench_tables.probe_counts(document["probes"], answers), "  ")]
        parts += [f"  {why_none}"] if why_none else []
        failed = bench_tables.failed_answers(answers)
        parts += ["", "Failed answers", text_table(failed, "  ")] if failed else []
    parts += ["", *document["signs"], document["not_quoted_for"], f"kept in {paths.shown(plan.folder)}"]
    return "\n".join(parts)


def _detect(arguments) -> int:
    rate = arguments.detect
    if not 0 < rate < 1:
        raise BadInput(f"--detect: got {rate:g}, expected a rate between 0 and 1, such as 0.05")
    see = probes.trials_to_see(rate)
    tell = {n: probes.trials_to_tell(rate, 0, n) for n in (20, 100, 200)}
    document = {"rate": rate, "trials_to_see": see, "trials_to_tell": [{"baseline": f"0 of {n}", "trials": trials} for n, trials in tell.items()]}
    lines = [f"{see} trials show a fault of {rate:.1%} at least once with 95% probability; none in {see} bounds the rate below {probes.bounds(0, see)[1]:.1%}"]
    for n, trials in tell.items():
        many = f"{trials} trials" if trials else "no number of trials"
        lines.append(f"against a baseline of 0 of {n}, {many} tell it with 80% probability (Fisher's exact test, one-sided, p < 0.05)")
    print(json.dumps(document, indent=1) if arguments.json else "\n".join(lines))
    return 0


def run_degeneration(arguments) -> int:
    """`fieldbook degeneration`. Exit status 1 for a degenerate text."""
    if arguments.file == "-":
        text = sys.stdin.read()
    else:
        file = Path(arguments.file)
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise BadInput(f"degeneration: {file}: cannot be read ({error.strerror}); give a file that holds one completion, or - for standard input") from None
    if not text.strip():
        raise BadInput(f"degeneration: {arguments.file}: is empty; give one completion, as the model wrote it")
    found = probes.judge(text)
    document = asdict(found)
    lines = [f"{'degenerate: ' + found.reason if found.degenerate else 'not degenerate'}", *(f"  {key:30} {value}" for key, value in found.scores.items())]
    print(json.dumps(document, indent=1, ensure_ascii=False) if arguments.json else "\n".join(lines))
    return 1 if found.degenerate else 0
