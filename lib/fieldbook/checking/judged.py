"""Recomputations of notebooks 06 and 07: medians, counts, ratios, p-values and the verdict, from samples.jsonl, answers.jsonl and the boot logs."""

from functools import lru_cache
from typing import Any

from .. import arms, bench, bench_tables, correctness, params, probes, trial_steps
from .. import outcome as outcomes
from ..bench import Sample
from ..outcome import Outcome
from ..probes import Answer
from ..verdict import Comparison
from .compare import CannotTell, Found, plain
from .launched import boot_log
from .planned import both_layouts, predicted_pools
from .run import Run, said


def measured(run: Run) -> list[Sample]:
    """The samples of notebook 06: the candidate's first boot, so many rounds as the params ask for."""
    rounds = run.asked.benchmarks.rounds
    return [s for s in run.samples if (s.arm, s.boot) == ("candidate", 1) and s.round <= rounds]


def compared_samples(run: Run) -> list[Sample]:
    """The samples of notebook 07: those of 06, then a round of both baseline boots and of the candidate's second one."""
    later = [s for arm, boot in (("baseline", 1), ("baseline", 2), ("candidate", 2)) for s in run.samples if (s.arm, s.boot) == (arm, boot) and s.round <= 1]
    return [s for s in run.samples if (s.arm, s.boot) == ("candidate", 1)] + later


def _answers(run: Run, arm: str) -> list[Answer]:
    return [answer for answer in run.answers if answer.arm == arm]


def median(run: Run, key: str) -> Found:
    """A point's median over the sound samples of notebook 06."""
    row = next((row for row in bench.summary_rows(measured(run), run.metrics) if row["metric"] == key), None)
    if row is None:
        raise CannotTell(f"the params measure {', '.join(run.metrics)}, or there is no sample")
    source = f"median of {row['samples']} samples of {run.asked.benchmarks.rounds} rounds in samples.jsonl"
    return Found(row["median"], run.told("samples.jsonl"), decimals=2, source=source)


def probe(run: Run, key: str) -> Found:
    """A probe's failed of asked, with bounds."""
    count = probes.by_probe(probes.counts(_answers(run, "candidate"))).get(key.removeprefix("probe_"))
    return Found(probes.share_text(*count) if count else None, run.told("answers.jsonl"))


def probe_counts(run: Run, key: str) -> Found:
    """Failed and asked of every stratum in notebook 06."""
    return Found(probes.counts(_answers(run, "candidate")), run.told("answers.jsonl"))


def void_rows(run: Run, key: str) -> Found:
    """The void samples that notebook 06 lists."""
    return Found(bench_tables.void(measured(run)), run.told("samples.jsonl"))


def signs(run: Run, key: str) -> Found:
    """What notebook 06 tells of lengths and log-probabilities."""
    asked = probes.summary(_answers(run, "candidate"), run.readings["candidate"])
    return Found(probes.signs(asked, run.base_counts(6)), f"{run.told('readings.json')}, answers.jsonl and the model's baseline")


def not_quoted_for(run: Run, key: str) -> Found:
    """What notebook 06 must not be quoted for."""
    text = bench_tables.not_quoted_for(measured(run), run.asked.benchmarks.rounds, _answers(run, "candidate"))
    return Found(text, f"{run.told('samples.jsonl')} and answers.jsonl")


def on_baseline(recompute):
    """A recomputation that compares with the model's baseline. The run's box may have had another than this checkout, and no receipt keeps it."""

    def wrapped(run: Run, key: str) -> Found:
        found, says = recompute(run, key), said(run.receipt(6), key)
        by_probes = bool(_unsound(run)) or any(label in str(run.receipt(6).verdict) for label in probes.LABELS.values())
        if says != found.value and (key == "data.signs" or by_probes):
            raise CannotTell("the model's baseline in this checkout may be another than the one it was compared with")
        return found

    return wrapped


def _unsound(run: Run) -> list[str]:
    answers = _answers(run, "candidate")
    return probes.problems(answers, probes.against({"counts": probes.counts(answers)}, run.base_counts(6)))


def _bench_problem(run: Run) -> str:
    sound = {row["metric"] for row in bench.summary_rows(measured(run), run.metrics) if row["median"] is not None}
    missing = [metric for metric in run.metrics if metric not in sound]
    return "; ".join([*([f"no sound sample of {', '.join(missing)}"] if missing else []), *_unsound(run)])


def bench_verdict(run: Run, key: str) -> Found:
    """The line that notebook 06 ends with."""
    samples = measured(run)
    rows = [row for row in bench.summary_rows(samples, run.metrics) if row["median"] is not None]
    void = sum(bool(s.void) for s in samples)
    rates = {row["metric"]: round(row["median"], 2) for row in rows}
    line = arms.rates_line(run.names["candidate"], rates, f"{len(samples) - void} of {len(samples)} samples sound")
    return Found(_bench_problem(run) or line, f"{run.told('samples.jsonl')} and answers.jsonl")


def bench_passed(run: Run, key: str) -> Found:
    """Whether every point has a sound sample and the probes are no worse."""
    return Found(not _bench_problem(run), f"{run.told('samples.jsonl')} and answers.jsonl")


@lru_cache(maxsize=1)
def outcome_of(run: Run) -> Outcome:
    """What notebook 07 finds, by the same functions, from samples and answers alone."""
    asked, samples = run.asked.verdict, compared_samples(run)
    rounds = bench.by_boot(samples, run.metrics)
    for values in rounds.values():
        run.feasible(values["candidate"], values["baseline"])
    again = {metric: bench.repeated_rounds(samples, metric) for metric in run.metrics}
    found, missing, adjusted = outcomes.compared(rounds, asked.primary_metric, asked.max_p, again)
    try:
        names = trial_steps.named(run.names)
    except CannotTell:
        # Layouts are named with the model's shape; the statistics need none.
        names = {"candidate": "candidate", "baseline": "baseline"}
    judged = correctness.judge(counts_of(run), correctness.broken(run.answers))
    return Outcome(names, asked.primary_metric, asked.expectation, found, missing, adjusted, judged)


def counts_of(run: Run) -> dict[str, dict[str, list[int]]]:
    """Failed and asked of every stratum, of both arms; the candidate's second asking goes with its first."""
    ours, again = (probes.counts(_answers(run, arm)) for arm in ("candidate", "candidate-2"))
    return {"candidate": correctness.together(ours, again), "baseline": probes.counts(_answers(run, "baseline"))}


def _comparison(run: Run, metric: str) -> Comparison:
    found = next((one for one in outcome_of(run).compared if one.metric == metric), None)
    if found is None:
        raise CannotTell(f"there are no sound samples of {metric} in both rounds of both arms")
    return found


def expectation(run: Run, key: str) -> Found:
    """What the params expect."""
    return Found(run.asked.verdict.expectation, "params")


def candidate_median(run: Run, key: str) -> Found:
    """The candidate's median over both rounds."""
    return Found(_comparison(run, key).candidate_median, run.told("samples.jsonl"), decimals=2)


def ratio(run: Run, key: str) -> Found:
    """Ratio of medians; p, band and answer stand in the figure's texts."""
    one = _comparison(run, key.removesuffix("_ratio"))
    source = f"ratio of medians; exact p = {one.p_value:.4f}, A/A band up to x{1 + (one.aa_band or 0):.3f}"
    try:
        label = f"{params.metric_label(one.metric)} against {trial_steps.named(run.names)['baseline']}: {one.answer}"
    except CannotTell:
        label = None
    return Found(one.ratio, run.told("samples.jsonl"), decimals=3, source=source, label=label)


def _logged_pools(run: Run) -> tuple[dict[str, tuple[int | None, dict[int, float]]], str]:
    """{arm: (pool in tokens, KV space of each stage in GiB)} of the second boot of each arm, from their logs, else from what the steps kept."""
    try:
        logs = {arm: run.log(arm, 2) for arm in ("candidate", "baseline")}
        return {arm: (log.pool_tokens, log.available_kv_gib) for arm, (log, _) in logs.items()}, " and ".join(file for _, file in logs.values())
    except CannotTell:
        steps = {name: run.step(name) for name in ("control", "boot")}
        boots = {"candidate": steps["boot"]["boot"], "baseline": list(steps["control"]["boots"].values())[-1]}
        return {arm: (boot["pool_tokens"], trial_steps.kv_space_gib(boot)) for arm, boot in boots.items()}, "steps/*.json"


def pool_ratio(run: Run, key: str) -> Found:
    """The candidate's logged pool against the baseline's."""
    pools, files = _logged_pools(run)
    return Found(pools["candidate"][0] / pools["baseline"][0], files, decimals=3)


def arms_counts(run: Run, key: str) -> Found:
    """Failed and asked of every stratum, of both arms."""
    return Found(counts_of(run), run.told("answers.jsonl"))


def _problem(run: Run) -> str:
    """What fails notebook 07, '' where nothing does. Where the boot logs are not there, the pools are taken to be as predicted."""
    found = outcome_of(run)
    if found.failure:
        return found.line
    try:
        pools, _ = _logged_pools(run)
        predicted, layouts = predicted_pools(run), both_layouts(run)
        wrong = [found.names[arm] for arm, one in layouts.items() if arms.pool_is_off(run.asked, *one, predicted[arm], *pools[arm], run.gpus(7))]
    except CannotTell:
        if run.receipt(7).verdict.startswith("pool not as predicted"):
            raise
        wrong = []
    return f"pool not as predicted: {', '.join(wrong)}" if wrong else "; ".join(found.missing.values())


def marks(run: Run) -> str:
    """What a verdict ends with where gates were let through. Raises CannotTell without the receipts of 05 and 07."""
    return "".join(f"; LET THROUGH: {text}" for text in [*run.receipt(5).data["escaped"], *run.receipt(7).data["escaped"]])


def sentence(run: Run, key: str) -> Found:
    """The verdict."""
    run.names  # noqa: B018 (raises where the layouts cannot be named)
    return Found((_problem(run) or outcome_of(run).line) + marks(run), f"{run.told('samples.jsonl')}, answers.jsonl and boot logs")


def passed(run: Run, key: str) -> Found:
    """Whether the comparison counts."""
    return Found(not _problem(run), f"{run.told('samples.jsonl')}, answers.jsonl and boot logs")


def answer(run: Run, key: str) -> Found:
    """The answer in the primary metric."""
    primary = outcome_of(run).primary
    return Found(primary.answer if primary else None, run.told("samples.jsonl"))


def document(run: Run, key: str) -> Found:
    """Everything that the outcome says."""
    run.names  # noqa: B018 (raises where the layouts cannot be named)
    return Found(plain(outcome_of(run).document()), f"{run.told('samples.jsonl')} and answers.jsonl", decimals=None)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "06_benchmarks": {
        "probe_*": probe,
        "prefill_*_tok_s": median,
        "decode_c*_tok_s": median,
        "data.server.measured_log": boot_log(6),
        "data.measured_void": void_rows,
        "data.measured_probes": probe_counts,
        "data.signs": on_baseline(signs),
        "data.not_quoted_for": not_quoted_for,
        "receipt.verdict": on_baseline(bench_verdict),
        "receipt.passed": on_baseline(bench_passed),
    },
    "07_verdict": {
        "expectation": expectation,
        "pool_ratio": pool_ratio,
        "*_tok_s": candidate_median,
        "*_tok_s_ratio": ratio,
        "data.measured_probes": arms_counts,
        "data.measured_answer": answer,
        "data.measured_outcome": document,
        "receipt.verdict": sentence,
        "receipt.passed": passed,
    },
}
