"""Charts of the benchmark stations; `show.chart` draws them."""

from typing import Any

from .show import ACCENT, INK, QUIET, SECOND

Rows = list[dict[str, Any]]


def points(rows: Rows):
    """A bar to the median of each point, and on it every single value, rounds apart by colour and shape. None without a sound sample."""
    import altair as alt

    if not rows:
        return None
    y = alt.Y("point:N", sort=None, title=None)
    medians = list({row["point"]: {"point": row["point"], "median": row["median"], "shown": f"{row['median']:.1f}"} for row in rows}.values())
    base = alt.Chart(alt.Data(values=medians), width=520, height=alt.Step(34)).encode(y=y, x=alt.X("median:Q", title="tok/s: bar to the median, every value"))
    bars = base.mark_bar(height=20, color=QUIET, opacity=0.45)
    names = alt.Chart(alt.Data(values=rows)).encode(y=y)
    words = alt.Chart(alt.Data(values=[{**m, "end": max(r["tok/s"] for r in rows if r["point"] == m["point"])} for m in medians])).mark_text(
        align="left", dx=10, color=INK, fontSize=12
    )
    dots = names.mark_point(filled=True, size=60, opacity=0.85).encode(
        x="tok/s:Q", color=alt.Color("round:N", title=None, scale=alt.Scale(range=[ACCENT, SECOND])), shape=alt.Shape("round:N", title=None)
    )
    return bars + dots + words.encode(y=y, x="end:Q", text="shown:N")


def over_streams(rows: Rows):
    """Decode rate against the number of streams: every value, a line through the medians. None for fewer than two numbers of streams."""
    import altair as alt

    if len({row["streams"] for row in rows}) < 2:
        return None
    x = alt.X("streams:Q", title="streams at once", axis=alt.Axis(values=sorted({row["streams"] for row in rows}), format="d"))
    base = alt.Chart(alt.Data(values=rows), width=520, height=240).encode(x=x)
    line = base.mark_line(color=QUIET, strokeWidth=2).encode(y=alt.Y("median(tok/s):Q", title="decode, tok/s"))
    dots = base.mark_point(filled=True, size=60, opacity=0.85).encode(
        y=alt.Y("tok/s:Q", scale=alt.Scale(zero=True)),
        color=alt.Color("round:N", title=None, scale=alt.Scale(range=[ACCENT, SECOND])),
        shape=alt.Shape("round:N", title=None),
    )
    return line + dots


def forest(rows: Rows):
    """Share that failed with its bounds, this run beside the baseline. None without a probe."""
    import altair as alt

    if not rows:
        return None
    who = list(dict.fromkeys(row["who"] for row in rows))
    base = alt.Chart(alt.Data(values=rows), width=460, height=alt.Step(20)).encode(
        y=alt.Y("probe:N", sort=None, title=None, axis=alt.Axis(labelLimit=260)),
        yOffset=alt.YOffset("who:N", sort=who),
        color=alt.Color("who:N", title=None, sort=who, scale=alt.Scale(domain=who, range=[ACCENT, SECOND])),
    )
    x = {"scale": alt.Scale(domain=[0, 1]), "axis": alt.Axis(format="%", tickCount=5), "title": "share that failed, with one-sided 95% bounds"}
    spans = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", **x), x2="high:Q")
    shape = alt.Shape("who:N", title=None, sort=who, scale=alt.Scale(domain=who))
    return spans + base.mark_point(filled=True, size=70).encode(x=alt.X("share:Q", **x), shape=shape)
