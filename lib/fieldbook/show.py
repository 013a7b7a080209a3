"""Tables, charts and sentences for the notebooks. Charts are SVG in the report and interactive in JupyterLab."""

from typing import Any

from . import reported
from .receipts import Figure

INK, GRID = "#24292f", "#d0d7de"
ACCENT, SECOND, QUIET, FAINT = "#b45309", "#0f766e", "#94a3b8", "#b9c4d2"
STACK = ("#0f766e", "#4c9f95", "#8ac4bb", "#64748b", "#94a3b8", "#cbd5e1", "#b45309", "#f0c078", "#9d4edd", "#c2255c", "#4c6ef5", "#2b8a3e")
# What every ledger ends with.
OF_PARTS = {"KV pool": "#b45309", "KV space left over": "#f0c078"}
VEGA_LITE_VERSION, VEGA_LITE_MIME = "5.20", "application/vnd.vegalite.v5+json"


def gib(count_bytes: float) -> float:
    """Bytes as GiB (2**30), only for showing."""
    return count_bytes / 2**30


def table(rows: list[dict[str, Any]], caption: str = "") -> None:
    """Show a table without index column; `cell` says how values look. Nothing in it differs from run to run but the values."""
    import pandas as pd
    from IPython.display import display

    frame = pd.DataFrame([{key: cell(value) for key, value in row.items()} for row in rows])
    styled = frame.style.hide(axis="index").set_caption(caption).set_uuid("t").set_table_attributes('class="dataframe"')
    # A Styler's own text form is its memory address.
    display({"text/html": styled.to_html(), "text/plain": frame.to_string(index=False)}, raw=True)


def cell(value: Any) -> str:
    """One value as a table shows it: thousands grouped, floats at four significant digits but never fewer than the integer part."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return str(value)


def figures(items: dict[str, Figure]) -> None:
    """Show figures with unit, evidence and source."""
    rows = [{"figure": f.label, "value": f.value, "unit": f.unit, "evidence": f.evidence, "source": f.source} for f in items.values()]
    table(rows or [{"figure": "none", "why": "nothing that is known of this box tells it"}])


def say(markdown: str) -> None:
    """Show a sentence whose numbers come from values; nothing for an empty one."""
    if not markdown.strip():
        return
    from IPython.display import Markdown, display

    display(Markdown(markdown))


def code(text: str, language: str = "text") -> None:
    """Show a command line, a diff or a log excerpt."""
    say(f"```{language}\n{text}\n```")


def banner(kind: str, box: str) -> None:
    """Say at the head of a recorded box's notebook that nothing was measured here, and of a report what it does not state."""
    report = reported.read(box) if kind == "recorded" else None
    if report and not report.published:
        say("> **Captured box.** Its outputs are read, and what follows from them is computed. No server of it is here: nothing is launched or measured.")
    elif report:
        say(
            f"> **{report.name[0].upper()}{report.name[1:]}.** {report.title}. Its figures are shown as it gives them, recomputed where they can be; nothing "
            f"was measured here. It does not state: {', '.join(report.not_stated)}."
        )
    elif kind == "recorded":
        say(
            f"> **Recorded box.** Figures of launch, benchmarks and verdict of `{box}` were recorded in an earlier run and are shown, not measured again. "
            "What can be computed is computed here."
        )


def chart(figure) -> None:
    """Show an Altair chart: SVG for the report and for nbval, Vega-Lite for JupyterLab. The SVG is rendered without network or browser."""
    import vl_convert
    from IPython.display import display

    text = {"labelColor": INK, "titleColor": INK}
    styled = (
        figure.configure(background="transparent", font="sans-serif")
        .configure_axis(gridColor=GRID, domainColor=GRID, tickColor=GRID, labelFontSize=12, titleFontSize=12, titleFontWeight="normal", titlePadding=16, **text)
        .configure_legend(labelFontSize=12, titleFontSize=12, titleFontWeight="normal", **text)
        .configure_header(labelFontSize=12, titleFontSize=12, **text)
        .configure_view(stroke=None)
    )
    spec = styled.to_dict()
    # The interactive form is left out of receipts and reports; only the SVG is compared and published.
    display({"image/svg+xml": vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE_VERSION), VEGA_LITE_MIME: spec}, raw=True)


def drawing(figure, otherwise: str) -> None:
    """Show a chart, or the sentence when there is nothing to draw (None)."""
    if figure is None:
        say(otherwise)
    else:
        chart(figure)


def bars(rows: list[dict[str, Any]], category: str, value: str, title: str, colour: str | None = None, width: int = 560):
    """Horizontal bars with the value written at each bar's end."""
    import altair as alt

    base = alt.Chart(alt.Data(values=[{**row, "shown": cell(row[value])} for row in rows]), width=width, height=alt.Step(28)).encode(
        y=alt.Y(f"{category}:N", sort=None, title=None), x=alt.X(f"{value}:Q", title=title, axis=alt.Axis(tickCount=5))
    )
    tint = alt.Color(f"{colour}:N", title=None, sort=None, scale=alt.Scale(range=[ACCENT, SECOND, QUIET])) if colour else alt.value(ACCENT)
    marks = base.mark_bar(height=16).encode(color=tint)
    labels = base.mark_text(align="left", dx=4, color=INK, fontSize=12).encode(text=alt.Text("shown:N"))
    return marks + labels


def stacked(rows: list[dict[str, Any]], category: str, value: str, part: str, title: str, limits: list[dict[str, Any]] | None = None, width: int = 560):
    """Horizontal bars made of parts, in the order of the rows; limits are upright lines across a bar, one row each with the same category and value."""
    import altair as alt

    parts = list(dict.fromkeys(row[part] for row in rows))
    order = [{**row, "order": parts.index(row[part])} for row in rows]
    # A part keeps its colour from chart to chart where it is one of those that every ledger has.
    others = [tint for tint in STACK if tint not in OF_PARTS.values()]
    colours = [OF_PARTS.get(name) or others[sum(earlier not in OF_PARTS for earlier in parts[:i]) % len(others)] for i, name in enumerate(parts)]
    y = alt.Y(f"{category}:N", sort=None, title=None)
    bars_ = (
        alt.Chart(alt.Data(values=order), width=width, height=alt.Step(34))
        .mark_bar(height=22)
        .encode(
            y=y,
            x=alt.X(f"sum({value}):Q", title=title, axis=alt.Axis(tickCount=6)),
            color=alt.Color(f"{part}:N", title=None, sort=None, scale=alt.Scale(domain=parts, range=colours), legend=alt.Legend(orient="bottom", columns=3)),
            order=alt.Order("order:Q"),
        )
    )
    if not limits:
        return bars_
    return bars_ + alt.Chart(alt.Data(values=limits)).mark_tick(color=INK, thickness=2, size=30).encode(y=y, x=alt.X(f"{value}:Q"))


def dots(rows: list[dict[str, Any]], category: str, value: str, colour: str, title: str, width: int = 560):
    """Every single value as a dot, arms by colour: shows spread instead of hiding it in a mean."""
    import altair as alt

    return (
        alt.Chart(alt.Data(values=rows), width=width, height=alt.Step(22))
        .mark_point(filled=True, size=70, opacity=0.8)
        .encode(
            y=alt.Y(f"{category}:N", sort=None, title=None),
            yOffset=alt.YOffset(f"{colour}:N", sort=None),
            x=alt.X(f"{value}:Q", title=title, scale=alt.Scale(zero=True)),
            color=alt.Color(f"{colour}:N", title=None, sort=None, scale=alt.Scale(range=[ACCENT, SECOND])),
            shape=alt.Shape(f"{colour}:N", title=None, sort=None),
        )
    )


def columns(rows: list[dict[str, Any]], category: str, value: str, title: str, colour: str, kinds: list[str], width: int = 560):
    """Upright bars over an ordered category, coloured by kind; the first of the kinds stands out, the last one steps back."""
    import altair as alt

    tints = {kind: tint for kind, tint in zip(kinds, [ACCENT, SECOND, *[FAINT] * len(kinds)], strict=False)}
    present = [kind for kind in kinds if kind in {row[colour] for row in rows}]

    return (
        alt.Chart(alt.Data(values=rows), width=width, height=220)
        .mark_bar()
        .encode(
            x=alt.X(f"{category}:O", title=category, axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y(f"{value}:Q", title=title, axis=alt.Axis(tickCount=5)),
            color=alt.Color(f"{colour}:N", title=None, sort=present, scale=alt.Scale(domain=present, range=[tints[kind] for kind in present])),
        )
    )
