"""Two finished runs, or the two arms of one, held against each other: `fieldbook compare`. Reads run folders and .zip files of them, unpacks nothing."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from . import bench, correctness, paths, probes, trial
from . import outcome as outcomes
from .bench import Sample
from .errors import BadInput
from .outcome import Outcome
from .params import metric_names
from .probes import Answer
from .receipts import Receipt
from .runfiles import RunFiles
from .schema import Params

FINISH = "finish it with `fieldbook run FILE --from 07 --run-dir RUN`"


@dataclass(frozen=True)
class Run:
    """One finished run: where, params, receipt of notebook 06, samples and answers of both arms, and names of the arms' layouts."""

    where: str
    params: Params
    measured: Receipt
    samples: list[Sample]
    answers: list[Answer]
    layouts: dict[str, str]

    def counts(self, arm: str) -> dict[str, list[int]]:
        """What its probes counted of an arm, all its boots together."""
        return probes.counts([a for a in self.answers if a.arm.partition("-")[0] == arm])

    def rounds(self, arm: str, metric: str) -> dict[tuple[int, int], list[float]]:
        """{(boot, round): sound values} of an arm in one metric."""
        places = sorted({(s.boot, s.round) for s in self.samples if s.arm == arm and s.metric == metric})
        return {place: bench.values(self.samples, arm, metric, *place) for place in places}


@dataclass(frozen=True)
class Compared:
    """The outcome, what the two runs differ in besides, and which runs they were."""

    outcome: Outcome
    differences: tuple[str, ...]
    runs: tuple[str, str]


def read(where: str) -> Run:
    """Read a finished run from its folder or a .zip of it. Raises BadInput for what is none, or is not finished."""
    with RunFiles(where) as found:
        measured, judged = _receipt(found, "06_benchmarks"), _receipt(found, "07_verdict")
        step = found.json("steps/verdict.json")
        if measured is None:
            raise BadInput(f"{where}: no run: it has no 06_benchmarks.json; give a folder reports/BOX/RUN, or a .zip of one")
        layout = _receipt(found, "03_partition_selection")
        if layout is None:
            raise BadInput(f"{where}: unfinished: it has no receipt of 03_partition_selection; {FINISH}")
        if not measured.passed and not correctness.has_degenerated(measured, _params(where, measured)):
            raise BadInput(f"{where}: unfinished: 06_benchmarks did not pass ({measured.verdict[:120]})")
        params = _params(where, measured)
        if not (step or {}).get("done") and (judged is None or "measured_answer" not in judged.data):
            raise BadInput(f"{where}: unfinished: nothing there says that its verdict was reached; {FINISH}")
        made = judged.params_hash if judged else step["params_hash"]
        if made != measured.params_hash:
            raise BadInput(f"{where}: its verdict was reached with other params than 06_benchmarks; {FINISH}")
        samples, answers = found.models("samples.jsonl", Sample), found.models("answers.jsonl", Answer)
    if measured.kind == "recorded" and not samples:
        kept = {name: paths.recorded_file(measured.box, name) for name in ("samples.jsonl", "answers.jsonl")}
        samples = bench.read_samples(kept["samples.jsonl"]) if kept["samples.jsonl"] else []
        answers = probes.read_answers(kept["answers.jsonl"]) if kept["answers.jsonl"] else []
    if not samples:
        raise BadInput(f"{where}: no samples.jsonl in it, so there is nothing to compare")
    best = tuple(layout.data["layers_per_stage"])
    return Run(where, params, measured, samples, answers, trial.layouts(params, best)[1])


def _receipt(found: RunFiles, name: str) -> Receipt | None:
    document = found.json(f"{name}.json")
    try:
        return None if document is None else Receipt.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{found.where}: {name}.json: not a receipt of schema version 1 ({error.errors()[0]['msg']})") from None


def _params(where: str, receipt: Receipt) -> Params:
    try:
        return Params.model_validate(receipt.params)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"{where}: its params are none of this release ({'.'.join(map(str, first['loc']))}: {first['msg']})") from None


def compare(run_a: str, run_b: str | None, metric: str | None = None, expect: str | None = None, any_box: bool = False) -> Compared:
    """The layout of run A as candidate against that of run B; with one run its own two arms. metric: the one that decides, instead of the params' own.

    Raises BadInput for runs that cannot be compared.
    """
    one = read(run_a)
    if run_b is None:
        found = _arms_of(one, metric, expect)
        return Compared(found, (), (f"{run_a} ({found.names['candidate']})", f"{run_a} ({found.names['baseline']})"))
    other = read(run_b)
    _check(one, other, any_box)
    return Compared(_of_two(one, other, metric, expect), tuple(_differences(one, other)), (run_a, run_b))


def _primary(run: Run, metric: str | None) -> str:
    known = metric_names(run.params)
    if metric and metric not in known:
        raise BadInput(f"--metric: got {metric!r}, which {run.where} does not measure; one of {', '.join(known)}")
    return metric or run.params.verdict.primary_metric


def _arms_of(run: Run, metric: str | None, expect: str | None) -> Outcome:
    """Both arms of one run, measured in turn. The expectation is the params' own where their own metric decides."""
    primary, metrics = _primary(run, metric), metric_names(run.params)
    expectation = expect or (run.params.verdict.expectation if primary == run.params.verdict.primary_metric else "")
    again = {name: bench.repeated_rounds(run.samples, name) for name in metrics}
    found, missing, adjusted = outcomes.compared(bench.by_boot(run.samples, metrics), primary, run.params.verdict.max_p, again)
    judged = correctness.judge({arm: run.counts(arm) for arm in ("candidate", "baseline")}, correctness.broken(run.answers))
    return Outcome(trial.named(run.layouts), primary, expectation, found, missing, adjusted, judged)


def _of_two(one: Run, other: Run, metric: str | None, expect: str | None) -> Outcome:
    """The candidates of two runs. Labels are exchanged within the same boot and round of both; the noise floor is that of all boots and rounds of both."""
    primary, rounds, again = _primary(one, metric), {}, {}
    same_baseline = one.params.verdict.baseline == other.params.verdict.baseline and one.layouts["baseline"] == other.layouts["baseline"]
    for name in metric_names(one.params):
        ours, theirs = one.rounds("candidate", name), other.rounds("candidate", name)
        # One round of each boot, as the band is of boots; what the others differ by widens it.
        places = sorted(place for place in {*ours} & {*theirs} if place[1] == 1)
        rounds[name] = {"candidate": [ours[place] for place in places], "baseline": [theirs[place] for place in places]}
        of_arms = [list(run.rounds(arm, name).values()) for run in (one, other) for arm in ("candidate", "baseline")]
        # The same baseline in both runs is an A/A over the time between them.
        again[name] = of_arms + ([of_arms[1] + of_arms[3]] if same_baseline else [])
    max_p = min(one.params.verdict.max_p, other.params.verdict.max_p)
    found, missing, adjusted = outcomes.compared(rounds, primary, max_p, again)
    answers = [a for run, arm in ((one, "candidate"), (other, "baseline")) for a in _as_arm(run, arm)]
    judged = correctness.judge({"candidate": one.counts("candidate"), "baseline": other.counts("candidate")}, correctness.broken(answers))
    names = {"candidate": one.layouts["candidate"], "baseline": other.layouts["candidate"]}
    if names["candidate"] == names["baseline"]:
        names = {"candidate": f"{names['candidate']} (run A)", "baseline": f"{names['baseline']} (run B)"}
    return Outcome(names, primary, expect or "", found, missing, adjusted, judged, interleaved=False)


def _as_arm(run: Run, arm: str) -> list[Answer]:
    return [a.model_copy(update={"arm": arm}) for a in run.answers if a.arm.partition("-")[0] == "candidate"]


_SHAPES = ("prefill_tokens", "decode_concurrency", "decode_prompt_tokens", "decode_output_tokens")


def _check(one: Run, other: Run, any_box: bool) -> None:
    """Raise BadInput where a difference of the figures would say nothing about the arms."""
    if one.params.model.name != other.params.model.name:
        raise BadInput(f"compare: other models: {one.params.model.name} in {one.where}, {other.params.model.name} in {other.where}")
    shapes = [run.params.benchmarks.model_dump(include=set(_SHAPES)) for run in (one, other)]
    other_shapes = [f"benchmarks.{key} {shapes[0][key]} and {shapes[1][key]}" for key in _SHAPES if shapes[0][key] != shapes[1][key]]
    if other_shapes:
        raise BadInput(f"compare: other benchmark shapes: {'; '.join(other_shapes)}; run both with the same")
    if one.measured.box != other.measured.box and not any_box:
        raise BadInput(f"compare: other boxes: {one.measured.box} and {other.measured.box}; --any-box compares them all the same")


def _differences(one: Run, other: Run) -> list[str]:
    """What else is different between two runs: box, dates, versions, params."""
    found = [f"box: {one.measured.box}, {other.measured.box}"] if one.measured.box != other.measured.box else []
    found += [f"measured: {one.measured.started_at}, {other.measured.started_at}"] if one.measured.started_at != other.measured.started_at else []
    keys = dict.fromkeys([*one.measured.versions, *other.measured.versions])
    versions = [(key, one.measured.versions.get(key), other.measured.versions.get(key)) for key in keys]
    found += [f"{key}: {ours or 'none'}, {theirs or 'none'}" for key, ours, theirs in versions if ours != theirs]
    ours, theirs = _flat(one.measured.params), _flat(other.measured.params)
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key) and not key.startswith("box."):
            found.append(f"{key}: {json.dumps(ours.get(key))}, {json.dumps(theirs.get(key))}")
    return found


def _flat(sections: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in sections.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found
