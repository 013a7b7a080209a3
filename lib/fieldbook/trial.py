"""The steps of a verdict: preflight, control, boot, verify, verdict. Notebook 07 and `fieldbook trial` walk them; each leaves a file and can be resumed.

Boots alternate A B B A: notebook 06 was the first one of the candidate (A), `control` boots the baseline twice (B B), `boot` and `verify` are the
candidate once more (A). A finished step is not done again unless the params change, or what it follows on: notebook 06, for preflight 01 and 03.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from . import arms, bench, causal, correctness, gates, load, probes, proofs, receipts, server
from . import outcome as outcomes
from .arms import Boot
from .bench import Sample
from .errors import GateFailed
from .outcome import Outcome
from .station import Station
from .trial_steps import STEPS as STEPS
from .trial_steps import Trial, follows_on, keep, kept, kv_space_gib, need_samples, needs
from .trial_steps import has_samples as has_samples
from .trial_steps import layouts as layouts
from .trial_steps import missing as missing
from .trial_steps import named as named
from .trial_steps import plan as plan

# The candidate's second asking is kept beside that of notebook 06.
SECOND = "candidate-2"


# --- the steps


def preflight(trial: Trial) -> dict[str, Any]:
    """Gates of both arms, the expectation, predicted pools and traffic floors; starts nothing. A server that a station left up is stopped: its memory counts.

    Returns {"expectation", "primary_metric", "max_p", "names", "gates", "refused", "escaped", "pools", "predicted"}; a refusal is never kept as done.
    """
    if before := kept(trial, "preflight"):
        return before
    st, started = trial.station, receipts.now()
    first, defects = st.earlier(1), proofs.states_after(st)
    rows = {arm: gates.check(arms.look(st, layout, trial.layers[arm], defects)) for arm, layout in trial.arms.items()}
    # Nothing is started of a report's box: there a refusal is told, and stops nothing.
    refused = [] if st.report else [f"the {arm} is refused: {text}" for arm, one in rows.items() if (text := gates.refused(one))]
    data = {"expectation": st.params.verdict.expectation, "primary_metric": st.params.verdict.primary_metric, "max_p": st.params.verdict.max_p}
    data |= {"names": trial.names, "gates": rows, "refused": "; ".join(refused), "escaped": [t for one in rows.values() for t in gates.escaped(one)]}
    if not refused:
        reads, limits = causal.reads_bytes_s(first.figures, st.params), arms.ceilings_tok_s(first)
        found = {arm: arms.pool_of(st, one, trial.layers[arm]) for arm, one in trial.arms.items()}
        pools = {arm: causal.tokens_of(pool) for arm, (pool, _) in found.items()}
        said = {arm: causal.predict(st.params, one, trial.layers[arm], st.box(), reads, limits, st.report is None) for arm, one in trial.arms.items()}
        data |= {"pools": pools, "no_pool": {arm: why for arm, (_, why) in found.items() if why}}
        data |= {"predicted": {arm: {metric: asdict(p) for metric, p in one.items()} for arm, one in said.items()}}
    return keep(trial, "preflight", started, data, done=not refused)


def control(trial: Trial) -> dict[str, Any]:
    """The baseline, booted twice and measured on each boot, probed on the first. Returns {"boots": {name: ...}, "counts"}; resumed at the point of the
    sample where it stopped. Raises GateFailed for a server that does not start or dies, NoSamples for a recorded box without any."""
    if found := kept(trial, "control"):
        return found
    if trial.station.report:
        return judging().control(trial)
    st, started = _measuring(trial, "control"), receipts.now()
    data = kept(trial, "control", whole=False) or {"boots": {}, "counts": {}}
    with _client(trial) as run:
        for number in (1, 2):
            name = f"baseline-{number}"
            if name in data["boots"]:
                continue
            booted = arms.boot(st, name, trial.arms["baseline"], trial.layers["baseline"])
            arms.measure(st, booted, "baseline", 1, _limits(trial), run, follows_on(trial, "control"))
            if number == 1:
                _, told = arms.probe(st, booted, "baseline")
                data["counts"] = told["counts"]
            arms.stop_boot(booted)
            data["boots"][name] = boot_facts(booted)
            keep(trial, "control", started, data, done=number == 2)
            _forget(trial, name)
    return data


def boot(trial: Trial) -> dict[str, Any]:
    """The candidate, booted fresh and left up for `verify`; its log held against the prediction. Returns {"boot", "pool": predicted, logged, residual}."""
    found = kept(trial, "boot")
    if found:
        return found
    if trial.station.report:
        return judging().boot(trial, preflight(trial)["pools"]["candidate"])
    if trial.station.live:
        # Earlier, the boots would not alternate.
        needs(trial, "boot", "control")
    st, started = _measuring(trial, "boot"), receipts.now()
    booted = arms.boot(st, SECOND, trial.arms["candidate"], trial.layers["candidate"])
    facts = boot_facts(booted)
    return keep(trial, "boot", started, {"boot": facts, "pool": held(preflight(trial)["pools"]["candidate"], facts["pool_tokens"])})


def verify(trial: Trial) -> dict[str, Any]:
    """The fresh boot of the candidate measured and asked once more, needles aside, which notebook 06 asked; booted again where it is gone.

    Returns {"boot", "counts"}.
    """
    if found := kept(trial, "verify"):
        return found
    if trial.station.report:
        return judging().verify(trial)
    booting = needs(trial, "verify", "control", "boot")[1] if trial.station.live else boot(trial)
    st, started, candidate = _measuring(trial, "verify", stop=False), receipts.now(), trial.arms["candidate"]
    with _client(trial) as run:
        booted = _still_up(trial) or arms.boot(st, SECOND, candidate, trial.layers["candidate"])
        arms.measure(st, booted, "candidate", 1, _limits(trial), run, follows_on(trial, "verify"))
        if st.live:
            arms.probe(st, booted, SECOND, st.params.probes.model_copy(update={"needle_shares": []}))
    arms.stop_boot(booted)
    counts = probes.counts([a for a in _answers(trial) if a.arm == SECOND])
    facts = boot_facts(booted)
    # Found again, it does not tell how long it took; `boot` saw it.
    data = keep(trial, "verify", started, {"boot": facts if facts["ready_s"] else booting["boot"], "counts": counts})
    _forget(trial, SECOND)
    return data


@dataclass(frozen=True)
class Verdict:
    """What the last step shows: outcome, samples of all boots, facts of the boots by arm, counts of the probes, why the run fails ('' where not),
    and {arm: {metric: median in tok/s}}."""

    outcome: Outcome
    samples: list[Sample]
    boots: dict[str, list[dict[str, Any]]]
    counts: dict[str, dict[str, list[int]]]
    problem: str
    middle: dict[str, dict[str, float | None]]

    @property
    def line(self) -> str:
        return self.problem or self.outcome.line

    @property
    def degenerate(self) -> bool:
        return self.outcome.correctness.loser == "candidate" and self.outcome.correctness.degenerate

    @property
    def logged(self) -> dict[str, int | None]:
        """Pool of each arm by its boot log."""
        return {arm: boots[-1]["pool_tokens"] for arm, boots in self.boots.items()}


def verdict(trial: Trial) -> Verdict:
    """Judge what the other steps left; measures nothing. Raises GateFailed where one is missing."""
    st, asked = trial.station, trial.station.params.verdict
    if st.report:
        return judging().verdict(trial)
    need_samples(st)
    started, measured = receipts.now(), st.earlier(6)
    if st.live:
        before, of_baseline, fresh, of_candidate = needs(trial, "verdict", "preflight", "control", "boot", "verify")
    else:
        before, of_baseline, fresh, of_candidate = preflight(trial), control(trial), boot(trial), verify(trial)
    samples = [s for s in _samples(trial) if (s.arm, s.boot) in (("candidate", 1), ("candidate", 2), ("baseline", 1), ("baseline", 2))]
    again = {metric: bench.repeated_rounds(samples, metric) for metric in trial.metrics}
    found, missing_, adjusted = outcomes.compared(bench.by_boot(samples, trial.metrics), asked.primary_metric, asked.max_p, again)
    counts = {"candidate": correctness.together(measured.data["measured_probes"], of_candidate["counts"]), "baseline": of_baseline["counts"]}
    result = Outcome(
        trial.names, asked.primary_metric, asked.expectation, found, missing_, adjusted, correctness.judge(counts, correctness.broken(_answers(trial)))
    )
    boots = {"candidate": [fresh["boot"]], "baseline": list(of_baseline["boots"].values())}
    problem = "; ".join(missing_.values())
    wrong = [trial.names[arm] for arm, tokens in before["pools"].items() if _is_off(trial, arm, tokens, boots[arm][-1])]
    problem = f"pool not as predicted: {', '.join(wrong)}" if wrong else problem
    problem = result.line if result.failure else problem
    keep(trial, "verdict", started, result.document() | {"problem": problem, "samples": len(samples)})
    return Verdict(result, samples, boots, counts, problem, outcomes.medians(samples, trial.metrics))


# --- what they share


def judging():
    """The same steps for a published report's box, which has no samples. Loaded late: it is made of this module's parts."""
    from .reported import judging as of_report

    return of_report


def held(predicted: int | None, logged: int | None) -> dict[str, int | None]:
    """A pool's tokens as predicted and as logged, with the residual where both are known."""
    return {"predicted": predicted, "logged": logged, "residual": None if None in (logged, predicted) else logged - predicted}


def _is_off(trial: Trial, arm: str, predicted: int | None, facts: dict[str, Any]) -> bool:
    st, logged = trial.station, (facts["pool_tokens"], kv_space_gib(facts))
    return arms.pool_is_off(st.params, trial.arms[arm], trial.layers[arm], predicted, *logged, st.gpus())


def boot_facts(booted: Boot) -> dict[str, Any]:
    """What the verdict tells of a boot."""
    told = {"name": booted.name, "pool_tokens": booted.log.pool_tokens, "vllm": booted.log.vllm_version, "available_kv_gib": booted.log.available_kv_gib}
    return told | {"ready_s": None if booted.ready_s is None else round(booted.ready_s, 1)}


def _measuring(trial: Trial, step: str, stop: bool = True) -> Station:
    """The station, once it is sure that the step may start a server: samples to be had, gates passed, notebook 06 done and its server stopped."""
    st = trial.station
    need_samples(st)
    st.earlier(6)
    if (before := preflight(trial))["refused"]:
        raise GateFailed(f"{step}: {before['refused']}")
    if st.live and stop:
        server.stop_all(st.run_dir)
    return st


def _forget(trial: Trial, name: str) -> None:
    """What an interrupted measurement of this boot would have gone on with: it is whole now."""
    bench.forget(trial.station.run_dir / "servers" / f"{trial.station.unfinished}{name}.jsonl")


def _limits(trial: Trial) -> dict[str, float]:
    return arms.ceilings_tok_s(trial.station.earlier(1))


@contextmanager
def _client(trial: Trial):
    st = trial.station
    with load.client_if(st.live, st.run_dir / "servers" / "load-verdict.log", arms.api_key(st)) as run:
        yield run


def _still_up(trial: Trial) -> Boot | None:
    """The server that `boot` left, where it is still there."""
    st = trial.station
    if not st.live:
        return None
    state_file = st.run_dir / "servers" / f"{SECOND}.json"
    if not server.find(state_file, st.params.model.name):
        return None
    return Boot(SECOND, arms.bootlog.parse(server.log_text(server.read_state(state_file))), None, [], state_file)


def _samples(trial: Trial) -> list[Sample]:
    st = trial.station
    return bench.read_samples(st.run_dir / "samples.jsonl" if st.live else arms.recorded_file(st, "samples.jsonl"))


def _answers(trial: Trial) -> list[probes.Answer]:
    st = trial.station
    return probes.read_answers(st.run_dir / "answers.jsonl" if st.live else arms.recorded_file(st, "answers.jsonl"))


FUNCTIONS: dict[str, Callable[[Trial], Any]] = {"preflight": preflight, "control": control, "boot": boot, "verify": verify, "verdict": verdict}
