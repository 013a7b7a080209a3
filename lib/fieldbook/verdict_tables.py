"""Rows of the verdict: gates and expectation, both arms side by side, every metric, the causal story, correctness. Notebook 07 and the commands show them."""

from typing import Any

from . import bench_tables, causal, probes
from .bench_tables import Rows
from .causal import Predicted
from .correctness import BROKEN, Correctness
from .memory import Pool
from .params import metric_label
from .receipts import Evidence
from .show import gib
from .trial import Trial, Verdict, judging
from .verdict import Comparison


def preflight(data: dict[str, Any]) -> Rows:
    """Both arms before anything starts: what the gates say, the predicted pool, the floor of the traffic, the upper estimate of the metric that decides."""
    rows, primary = [], data["primary_metric"]
    for arm, name in data["names"].items():
        results = [row["result"] for row in data["gates"][arm]]
        said = data.get("predicted", {}).get(arm, {}).get(primary) or {}
        gates = ", ".join(f"{results.count(kind)} {kind}" for kind in ("pass", "warn", "refuse", "not checked") if kind in results)
        row = {"arm": arm, "layout": name, "gates": gates, "pool predicted, tokens": data.get("pools", {}).get(arm)}
        rows.append(row | {"traffic floor, µs a token": said.get("floor_us"), f"{metric_label(primary)}: at most, tok/s": said.get("at_most_tok_s")})
    return rows


def warnings(data: dict[str, Any]) -> Rows:
    """What the gates of either arm warn of or refuse."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for arm, rows in data["gates"].items():
        for row in (row for row in rows if row["result"] in ("warn", "refuse")):
            found.setdefault((row["gate"], row["result"], row["reason"]), []).append(arm)
    return [{"gate": gate, "result": result, "arms": ", ".join(arms), "reason": reason} for (gate, result, reason), arms in found.items()]


def boots(facts: list[dict[str, Any]]) -> Rows:
    """Each boot: pool of its log, vLLM's release, seconds to the first token where they were measured."""
    return [{"boot": f["name"], "KV pool, boot log": f["pool_tokens"], "vLLM": f["vllm"], "first token after, s": f["ready_s"]} for f in facts]


def held(pool: dict[str, Any], name: str) -> Rows:
    """Pool of the fresh boot: predicted, logged, residual."""
    return [{"layout": name, "predicted": pool["predicted"], "boot log": pool["logged"], "residual": pool["residual"]}]


def arms(found: Verdict, trial: Trial, pools: dict[str, Pool | None]) -> Rows:
    """Both arms in columns: memory of each rank, tightest headroom, pool predicted and logged, speeds, degeneration, other probes failed, ready time."""
    columns = {arm: _column(found, pools[arm], arm, found.middle[arm]) for arm in trial.names}
    titles = list(dict.fromkeys([title for column in columns.values() for title in column]))
    return [{"quantity": title, **{trial.names[arm]: column.get(title) for arm, column in columns.items()}} for title in titles]


def _column(found: Verdict, pool: Pool | None, arm: str, middle: dict[str, float | None]) -> dict[str, Any]:
    counted = probes.by_probe(found.counts[arm])
    ready = [one["ready_s"] for one in found.boots[arm] if one["ready_s"] is not None]
    rows: dict[str, Any] = {}
    for r in pool.ranks if pool else ():
        rows[f"rank {r.rank}: weights, GiB"] = gib(r.weights_bytes)
        rows[f"rank {r.rank}: KV space, GiB"] = gib(r.available_kv_bytes)
    tight = causal.headroom(pool) if pool else None
    rows["tightest headroom"] = f"rank {tight.rank}: {_size(tight.left_bytes)} {tight.of}" if tight else "memory of the cards unknown"
    rows |= {"KV pool predicted, tokens": causal.tokens_of(pool), "KV pool logged, tokens": found.logged[arm]}
    rows |= {f"{metric_label(metric)}: tok/s, median": value for metric, value in middle.items()}
    degenerate = counted.pop("degeneration", (0, 0))
    rows["degenerate samples"] = probes.share_text(*degenerate)
    rows["other probes failed"] = ", ".join(f"{probe} {k} of {n}" for probe, (k, n) in counted.items()) or "none asked"
    return rows | {"first token after, s": ", ".join(f"{s:.0f}" for s in ready) or None}


def _size(count_bytes: int) -> str:
    return f"{gib(count_bytes):.2f} GiB" if abs(count_bytes) >= 2**27 else f"{count_bytes / 2**20:.2f} MiB"


def _predicted(before: dict[str, Any]) -> dict[str, dict[str, Predicted]]:
    """{arm: {metric: ...}} as preflight left it."""
    return {arm: {metric: Predicted(**one) for metric, one in said.items()} for arm, said in before["predicted"].items()}


def story(found: Verdict, trial: Trial, before: dict[str, Any]) -> Rows:
    """The causal story: what the model said of each arm and metric, what was measured, and the ratio. before: what preflight left."""
    return causal.rows(_predicted(before), before["pools"], found.middle, found.logged, trial.names)


def order(found: Verdict, before: dict[str, Any]) -> str:
    """Whether the model puts the arms in the order that was measured, one sentence; '' where it expects no rate of both."""
    predicted = _predicted(before)
    rows = causal.order(predicted, found.middle, {c.metric: c.answer for c in found.outcome.compared})
    said = [f"{metric_label(r['metric'])} x{r['expected ratio']:.3g} expected, x{r['measured ratio']:.3g} found ({r['order']})" for r in rows]
    return f"Candidate against baseline, by the model with links at {causal.links_at(predicted)} times their floor: {'; '.join(said)}." if said else ""


def dots(found: Verdict, trial: Trial) -> Rows:
    """Every sound sample of both arms for the chart; of a report every value that it gives."""
    return judging().dots(trial) if trial.station.report else bench_tables.sample_dots(found.samples, trial.names)


def metrics(found: Verdict, trial: Trial) -> Rows:
    """One row per metric: medians, ratio and what the test says; of a report medians and ratio."""
    if trial.station.report:
        return judging().comparisons(trial) or [{"metric": "none", "why": f"{trial.station.report.name} gives none of both arms"}]
    return comparisons(found.outcome.compared, found.outcome.adjusted, found.outcome.primary_metric, trial.names)


def record(found: Verdict, trial: Trial, seen: Evidence) -> None:
    """Keep the figures of the verdict in the receipt: pools, medians and ratios with what the test says of them."""
    st, asked, names = trial.station, trial.station.params.verdict, trial.names
    ours, theirs = found.logged["candidate"], found.logged["baseline"]
    where = st.report.name if st.report else "boot logs of both arms"
    st.figure("pool_ratio", round(ours / theirs, 3) if ours and theirs else None, "x", seen, where, f"KV pool against {names['baseline']}", headline=True)
    for c in found.outcome.compared:
        short, primary = metric_label(c.metric), c.metric == asked.primary_metric
        source, top = "median of both rounds in samples.jsonl", primary or c.metric.startswith("prefill")
        st.figure(c.metric, round(c.candidate_median, 2), "tok/s", seen, source, short, headline=top)
        source = f"ratio of medians; exact p = {c.p_value:.4f}, A/A band up to x{1 + (c.aa_band or 0):.3f}"
        st.figure(f"{c.metric}_ratio", round(c.ratio, 3), "x", seen, source, f"{short} against {names['baseline']}: {c.answer}", headline=primary)
    for metric, (ratio, source) in (judging().ratios(trial) if st.report else {}).items():
        short, primary = metric_label(metric), metric == asked.primary_metric
        value, told = found.middle["candidate"][metric], f"{st.report.name}, its median"
        st.figure(metric, value, "tok/s", seen, told, short, headline=primary or metric.startswith("prefill"))
        st.figure(f"{metric}_ratio", round(ratio, 3), "x", "computed", source, f"{short} against {names['baseline']}", headline=primary)


def comparisons(found: tuple[Comparison, ...], adjusted: dict[str, float], primary: str, names: dict[str, str]) -> Rows:
    """One row per metric: medians, ratio, p, noise floor and band, interval, answer."""
    return [
        {
            "metric": c.metric + (" (primary)" if c.metric == primary else ""),
            names["candidate"]: c.candidate_median,
            names["baseline"]: c.baseline_median,
            "ratio": c.ratio,
            "p": c.p_value,
            "p, Holm": adjusted.get(c.metric),
            "noise floor": None if c.spread is None else f"±{c.spread:.1%}",
            "A/A band": None if c.aa_band is None else f"{1 / (1 + c.aa_band):.3f} to {1 + c.aa_band:.3f}",
            "90% interval": f"{c.interval[0]:.3f} to {c.interval[1]:.3f}",
            "answer": c.answer,
            "would decide": (c.more.repetitions or "no number") if c.more else None,
        }
        for c in found
    ]


def answers(found: Correctness, names: dict[str, str]) -> Rows:
    """What the probes say of the arms, with bounds and Fisher's p each way."""
    return [
        {
            "probe": "broken answers" if row.probe == BROKEN else probes.LABELS[row.probe],
            names["candidate"]: probes.share_text(*row.candidate),
            names["baseline"]: probes.share_text(*row.baseline),
            "p, candidate fails more": row.candidate_p,
            "p, baseline fails more": row.baseline_p,
            "worse": names.get(row.worse),
        }
        for row in found.rows
    ] or [{"probe": "none", "why": "no probe was asked of both arms"}]
