"""Booting and measuring one arm of the comparison, live or from a recorded report, with the same results either way."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import bench, bootlog, ceilings, files, gates, memory, models, paths, probes, server, starting
from .bench import Sample
from .bootlog import BootLog
from .budget import Gpus
from .errors import BadInput, GateFailed
from .inventory import Inventory
from .params import Baseline, Parallel, Params, metric_label
from .probes import Answer
from .receipts import Receipt
from .reported import arms as reported_arms
from .schema import Probes
from .splits import layout_name as layout_name  # the notebooks ask for it here
from .station import Station
from .strategy import strategy_of

# Of a model whose weights are made up.
NOT_ASKED = "Not asked: the weights are made up, so what the model answers means nothing."


@dataclass(frozen=True)
class Boot:
    """One start of one arm: what its log says, and for a live server how to find it."""

    name: str
    log: BootLog
    ready_s: float | None
    phases: list[tuple[str, float]]
    state_file: Path | None

    @property
    def state(self) -> dict[str, Any]:
        """State of the live server."""
        return server.read_state(self.state_file)


def evidence(station: Station) -> str:
    """Label of what is launched and measured at this box: measured here, or recorded elsewhere."""
    return "measured" if station.live else "recorded"


def recorded_file(station: Station, name: str) -> Path:
    """A file of the recorded report. Raises BadInput when it is missing."""
    file = paths.recorded_file(station.params.box.name, name)
    if file is None:
        raise BadInput(f"data/reports/{station.params.box.name}/{name}: missing; a recorded box needs it")
    return file


def look(station: Station, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...], defects: list[dict[str, Any]]) -> gates.Launch:
    """What the gates look at before this arm is launched. defects: status of the known ones after patching.

    A server that an earlier try of this notebook left is stopped first: it would be taken for somebody else's.
    """
    if station.live:
        server.stop_all(station.run_dir)
    return gates.look(station.params, arm, layers_per_stage, box=station.box(), defects=defects, gpus=station.gpus(), run_dir=station.run_dir)


def start(
    params: Params,
    arm: Parallel | Baseline,
    layers_per_stage: tuple[int, ...],
    run_dir: Path,
    name: str,
    box: Inventory,
    progress: Callable[[str], None],
    first_token: bool = True,
) -> Boot:
    """Launch a server and wait for its first token, or until it is healthy. Raises GateFailed with the root error when it does not start."""
    state_file = server.launch(params, arm, layers_per_stage, run_dir, name, box)
    ready_s, phases = starting.wait_ready(state_file, params.server.ready_timeout_s, progress, first_token)
    return Boot(name, bootlog.parse(server.log_text(server.read_state(state_file))), ready_s, phases, state_file)


def boot(station: Station, name: str, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...], first_token: bool = True) -> Boot:
    """Start an arm and wait until it has produced a token (without first_token: until it is healthy); for a recorded box read the log of then.

    Raises GateFailed with the root error when it does not start.
    """
    if station.report:
        return Boot(name, reported_arms.boot_log(station.report, name.partition("-")[0]), None, [], None)
    if not station.live:
        text = recorded_file(station, f"boot-{name.partition('-')[0]}.log").read_text()
        return Boot(name, bootlog.parse(text), None, [], None)
    models.ensure(station.params, station.progress)
    with station.clock("server start"):
        booted = start(station.params, arm, layers_per_stage, station.run_dir, name, station.box(), station.progress, first_token)
    station.progress("")
    return booted


def find_or_boot(station: Station, launch: Receipt, name: str, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...]) -> tuple[Boot, bool]:
    """The server of notebook 05 found by its receipt, or the same arm booted again when it is gone. Returns (boot, found)."""
    state_file = _state_file(station, launch)
    if state_file and server.find(state_file, station.params.model.name):
        return Boot(name, bootlog.parse(server.log_text(server.read_state(state_file))), None, [], state_file), True
    return boot(station, name, arm, layers_per_stage), False


def stop(station: Station, receipt: Receipt) -> None:
    """Stop the server that a receipt names, if it is still up."""
    state_file = _state_file(station, receipt)
    if state_file and state_file.is_file():
        server.stop(state_file)


def api_key(station: Station) -> str:
    """What the servers of this box ask their clients for, '' for none or where nothing is served."""
    return server.api_key_of(station.params) if station.live else ""


def stop_boot(booted: Boot) -> None:
    """Stop a live server; nothing to do for a recorded boot."""
    if booted.state_file:
        server.stop(booted.state_file)


def _state_file(station: Station, receipt: Receipt) -> Path | None:
    relative = receipt.data["server"]["state_file"]
    return station.run_dir / relative if relative else None


def measure(
    station: Station, booted: Boot, arm: str, rounds: int, ceilings_tok_s: dict[str, float], run: Callable | None, after: str = ""
) -> list[Sample]:
    """All points in full rounds on one boot; for a recorded box the recorded samples of that arm and boot, none of a report.

    after: what this measurement follows on (a digest); one that was interrupted is gone on with only where that is still the same.
    """
    if station.report:
        return []
    number = int(booted.name.rpartition("-")[2])
    if not station.live:
        recorded = bench.read_samples(recorded_file(station, "samples.jsonl"))
        return [s for s in recorded if (s.arm, s.boot) == (arm, number) and s.round <= rounds]
    # The station removes it when it closes: until then a rerun goes on with it.
    unfinished = station.run_dir / "servers" / f"{station.unfinished}{booted.name}.jsonl"
    about = {"params": station.params.hash} | ({"after": after} if after else {})
    with _measured(booted), station.clock("load"):
        target = bench.of_state(booted.state)
        fresh = bench.measure(target, run, station.params.benchmarks, arm, number, rounds, ceilings_tok_s, unfinished, about, station.progress)
    bench.keep_samples(station.run_dir / "samples.jsonl", fresh)
    station.progress("")
    return fresh


def died_of(booted: Boot) -> tuple[bool, str | None]:
    """(whether a server that did not answer is up, what its log says that it died of).

    A dying server shows first as a client that cannot connect, or as an error in the answer, while its process still shuts down and, on a busy machine,
    before its log is written: that is waited for some seconds.
    """
    for _ in range(10):
        up, cause = server.is_up(booted.state), bootlog.root_error(server.log_text(booted.state))
        if cause or not up:
            break
        time.sleep(0.5)
    return up, cause


@contextmanager
def _measured(booted: Boot) -> Iterator[None]:
    """What is asked of a live server: one that dies meanwhile is named by its log. Raises GateFailed."""
    try:
        yield
    except GateFailed:
        up, cause = died_of(booted)
        if up and not cause:
            raise
        ended = server.stop(booted.state_file)
        raise GateFailed(f"server {booted.name} failed while it was measured: {cause or ended['reason']}") from None


def probe(station: Station, booted: Boot, arm: str, asked: Probes | None = None) -> tuple[list[Answer], dict[str, Any]]:
    """Ask all probes, or those `asked`; for a recorded box the recorded answers. Returns (answers, what probes.summary tells of them)."""
    if station.report:
        return [], reported_arms.told(station.report, arm)
    if not station.live:
        answers = [a for a in probes.read_answers(recorded_file(station, "answers.jsonl")) if a.arm == arm]
        return answers, probes.summary(answers, json.loads(recorded_file(station, "readings.json").read_text())[arm])
    params, file = station.params, station.run_dir / "readings.json"
    with _measured(booted), station.clock("probes"):
        streams = max(params.benchmarks.decode_concurrency)
        ask = probes.ask_nothing if params.model.made_up else probes.run
        answers, read = ask(bench.of_state(booted.state), asked or params.probes, params.engine.max_model_len, streams, arm, station.progress)
    probes.keep_answers(station.run_dir / "answers.jsonl", answers)
    files.write_json(file, (json.loads(file.read_text()) if file.is_file() else {}) | {arm: read})
    station.progress("")
    return answers, probes.summary(answers, read)


def pool_of(station: Station, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...]) -> tuple[memory.Pool | None, str]:
    """(ledger of an arm of the box, why there is none: nothing tells the memory of its cards). Raises BadInput where it is known and does not fit."""
    spec = memory.model_spec(station.params.model.name)
    found, why_none, unknown = gates.pool_of(station.params, arm, spec, layers_per_stage, station.gpus())
    if found is None and not unknown:
        raise BadInput(why_none)
    return found, "its pool is not computed, since nothing tells the memory of the cards" if unknown else ""


def pool_text(booted: Boot) -> str:
    """'KV pool 46,592 tokens', as the log tells it."""
    return "KV pool not told" if booted.log.pool_tokens is None else f"KV pool {booted.log.pool_tokens:,} tokens"


def launch_line(station: Station, name: str, logged: int | None, pool: memory.Pool, rounding: int | None) -> tuple[str, bool]:
    """(the line that the launch ends with, whether the memory accounting is wrong). rounding: as memory.pool_after gives it."""
    if logged is None and station.report:
        return f"{name} is planned with a KV pool of {pool.pool_tokens:,} tokens; {station.report.name} has no boot log to hold it against", False
    line, wrong = served_line(name, logged or 0, pool.pool_tokens, rounding)
    return line + (f"; {station.report.about_pool}" if station.report and station.report.about_pool else ""), wrong


def served_line(name: str, logged: int, predicted: int, rounding: int | None) -> tuple[str, bool]:
    """(the line of a server that came up, whether its pool is not the predicted one). Tokens; rounding: as memory.pool_after gives it."""
    residual, wrong = logged - predicted, _is_beyond(logged, predicted, rounding)
    line = f"{name} serves: KV pool {logged:,} tokens, predicted {predicted:,}, residual {residual:,}"
    return line + ("; the memory accounting is wrong here" if wrong else ""), wrong


def _is_beyond(logged: int, predicted: int, rounding: int | None) -> bool:
    return rounding is not None and abs(logged - predicted) > rounding


def speeds_line(station: Station, name: str, metrics: list[str], sound: int, samples: int) -> str:
    """The line that the benchmarks end with."""
    rates = {metric: station.figures[metric].value for metric in metrics if metric in station.figures}
    return rates_line(name, rates, station.report.measured if station.report else f"{sound} of {samples} samples sound")


def rates_line(name: str, rates_tok_s: dict[str, float], how: str) -> str:
    """Rates by metric in one line, and how they were measured."""
    told = "; ".join(f"{metric_label(metric)}: {rate:.1f}" for metric, rate in rates_tok_s.items())
    return f"{name}, tok/s: {told} ({how})" if told else f"{name}: no rate is told ({how})"


def without_samples(station: Station) -> str:
    """What to say where no single sample is there to be shown."""
    return f"{station.report.name} gives no single values" if station.report else "no sample is sound"


def pool_is_off(
    params: Params,
    arm: Parallel | Baseline,
    layers: tuple[int, ...],
    predicted: int | None,
    logged: int | None,
    logged_gib: dict[int, float],
    gpus: Gpus | None,
) -> bool:
    """Whether a logged pool is not what it has to be. Tokens; logged_gib: KV space of each stage by the log.

    An estimate before the launch need not be met. The space that the log tells leaves no freedom but its own rounding; nothing that is unknown is off.
    """
    if None in (predicted, logged) or logged == predicted:
        return False
    found, rounding = memory.pool_after(params, memory.model_spec(params.model.name), layers, logged_gib, gpus, strategy_of(arm).layout)
    return _is_beyond(logged, found.pool_tokens, rounding)


def pool_label(station: Station) -> str:
    """What the predicted pool is called: of a report whose KV space had to be solved from its log, no prediction."""
    return "KV pool, from the space that its log implies" if station.report and station.report.about_pool else "KV pool, predicted"


def what_was_asked(station: Station) -> str:
    """Where the counts of the probes are from."""
    return f"{station.report.name if station.report else 'answers.jsonl'}, bounds by Clopper and Pearson"


def without_signs(station: Station) -> str:
    """What to say where lengths and log-probabilities of the answers show nothing."""
    known = "Lengths and log-probabilities are as the baseline's, as far as there is one."
    known = NOT_ASKED if station.params.model.made_up else known
    return f"{station.report.name} gives neither answers nor log-probabilities." if station.report else known


def probe_baseline(station: Station) -> tuple[dict[str, Any] | None, str]:
    """(what the probes are compared with, words about it): the model's own baseline, of a report what it says of its other arm."""
    if station.report:
        told = reported_arms.told(station.report, "baseline")
        return (told, f"Baseline: {station.report.name}'s other arm.") if told["counts"] else (None, f"{station.report.name} gives no count of answers.")
    if station.params.model.made_up:
        return None, NOT_ASKED
    found, why_none = probes.read_baseline(station.params.model.name, station.params.probes)
    return found, (f"Baseline: {found['layout']}, {found['made_at'][:10]}. " if found else "") + why_none


def summary(station: Station, samples: list[Sample], metrics: list[str]) -> list[dict[str, Any]]:
    """One row per metric of the candidate: what the samples say, or a report."""
    return reported_arms.summary(station.report, "candidate", metrics) if station.report else bench.summary_rows(samples, metrics)


def record_speeds(station: Station, rows: list[dict[str, Any]], rounds: int) -> list[str]:
    """Keep the speed of each metric as a figure; returns the metrics that should have one and do not: a report need not tell all."""
    for row in rows:
        metric = row["metric"]
        if station.report:
            found = reported_arms.speed(station.report, "candidate", metric)
        else:
            found = (round(row["median"], 2), f"median of {row['samples']} samples of {rounds} rounds in samples.jsonl") if row["median"] is not None else None
        if found:
            station.figure(metric, found[0], "tok/s", evidence(station), found[1], metric_label(metric))
    return [] if station.report else [row["metric"] for row in rows if row["metric"] not in station.figures]


def ceilings_tok_s(inventory_receipt: Receipt) -> dict[str, float]:
    """Ceilings of every metric, from the receipt of notebook 01."""
    return {key.removeprefix("measured_"): value for key, value in inventory_receipt.data["ceilings_tok_s"].items()}


def at_measured(station: Station) -> dict[str, float]:
    """ceilings.at_measured of the box in the receipt of notebook 01."""
    return ceilings.at_measured(station.params, memory.model_spec(station.params.model.name), station.box())


def boot_data(booted: Boot) -> dict[str, Any]:
    """A boot as receipts keep it."""
    return {
        "name": booted.name,
        "measured_log": asdict(booted.log),
        "phases": booted.phases,
        "ready_s": booted.ready_s,
        "state_file": f"servers/{booted.state_file.name}" if booted.state_file else None,
    }
