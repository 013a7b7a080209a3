"""Charts of the box (link matrix, GPUs as a graph) and of the partition. Rows come from the stations' modules; `show.chart` draws them."""

import math
from typing import Any

from .inventory import Inventory, Link
from .inventory.links import nearness
from .show import ACCENT, INK, SECOND

QUIET = "#64748b"

# Near to far, then unknown: dark green to red, readable in grey too.
_STEPS = ("#0f766e", "#5eaaa0", "#a7c957", "#e9c46a", "#ef9f5a", "#c2513b")
PCIE_UNKNOWN, PCIE_COLOUR = "PCIe, kind unknown", "#cdb99c"
UNKNOWN_COLOUR, SELF_COLOUR = "#d8dee4", "#f3f4f6"
_KIND_NAMES = ("NVLink", "PIX", "PXB", "PHB", "NODE", "SYS")
_ISLAND_COLOURS = ("#b45309", "#0f766e", "#4c6ef5", "#9d4edd", "#2b8a3e", "#c2255c", "#e8590c")


def kind_name(link: Link) -> str:
    """NVLink, PIX, PXB, PHB, NODE, SYS, or unknown."""
    if not link.kind:
        return PCIE_UNKNOWN if link.nvlinks == 0 else "unknown"
    return _KIND_NAMES[nearness(link.kind)] if nearness(link.kind) < len(_KIND_NAMES) else "unknown"


def matrix_rows(box: Inventory) -> list[dict[str, Any]]:
    """One row per cell of the link matrix: from, to, kind, the word in the cell, and GB/s per direction where it is known."""
    links = {(k.a, k.b): k for k in box.links}
    rows = []
    for a in (g.index for g in box.gpus):
        for b in (g.index for g in box.gpus):
            link = links.get((min(a, b), max(a, b)))
            measured = link.measured_gb_s.get(f"{a}->{b}") or link.measured_gb_s.get(f"{a}->{b} through host") if link else None
            rate = measured.median if measured else link.theoretical_gb_s if link else None
            rows.append(
                {
                    "from": f"GPU {a}",
                    "to": f"GPU {b}",
                    "kind": "self" if a == b else kind_name(link) if link else "unknown",
                    "word": "–" if a == b else (link.kind or ("?" if link.nvlinks is None else "PCIe ?")) if link else "?",
                    "rate": "" if rate is None or a == b else f"{rate:.1f} GB/s",
                }
            )
    return rows


def link_matrix(box: Inventory):
    """Heat map of the ways between GPUs: colour is the kind, the text the kind and GB/s per direction (measured where it was, else the
    ceiling). None with fewer than two GPUs."""
    import altair as alt

    if len(box.gpus) < 2:
        return None
    rows = matrix_rows(box)
    order = [f"GPU {g.index}" for g in box.gpus]
    domain = [*_KIND_NAMES, PCIE_UNKNOWN, "unknown", "self"]
    colours = [*_STEPS, PCIE_COLOUR, UNKNOWN_COLOUR, SELF_COLOUR]
    present = [k for k in domain if k in {r["kind"] for r in rows} and k != "self"]
    step = 74 if len(order) <= 8 else 56
    base = alt.Chart(alt.Data(values=rows), width=alt.Step(step), height=alt.Step(46)).encode(
        x=alt.X("to:N", sort=order, title=None, axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False)),
        y=alt.Y("from:N", sort=order, title=None, axis=alt.Axis(domain=False, ticks=False)),
    )
    legend = alt.Legend(title=None, values=present, orient="bottom")
    cells = base.mark_rect(stroke="#ffffff", strokeWidth=2).encode(color=alt.Color("kind:N", scale=alt.Scale(domain=domain, range=colours), legend=legend))
    dark = "datum.kind == 'NVLink' || datum.kind == 'SYS'"
    tint = alt.condition(dark, alt.value("#ffffff"), alt.value(INK))
    words = base.mark_text(fontSize=12, fontWeight="bold", dy=-7).encode(text="word:N", color=tint)
    rates = base.mark_text(fontSize=10, dy=9).encode(text="rate:N", color=tint)
    return cells + words + rates


def box_graph(box: Inventory):
    """The GPUs on a circle, islands side by side; lines are links, the nearer the thicker. A GPU's colour is its island; below it NUMA node and memory."""
    import altair as alt

    if len(box.gpus) < 2:
        return None
    island = {i: n for n, members in enumerate(box.islands or []) for i in members}
    gpus = sorted(box.gpus, key=lambda g: (g.numa_node if g.numa_node is not None else -1, island.get(g.index, -1), g.index))
    places = {}
    for n, gpu in enumerate(gpus):
        # Two GPUs lie side by side, more start at the upper left.
        angle = math.pi - 2 * math.pi * (n + (0.0 if len(gpus) == 2 else 0.5)) / len(gpus)
        places[gpu.index] = (round(math.cos(angle), 4), round(math.sin(angle), 4))
    nodes = [
        {
            "x": places[g.index][0],
            "y": places[g.index][1],
            "gpu": f"GPU {g.index}",
            "about": ", ".join(filter(None, (f"node {g.numa_node}" if g.numa_node is not None else None, _memory(g)))),
            "island": _island(box, island, g.index),
            "side": "left" if places[g.index][0] < -0.2 else "right" if places[g.index][0] > 0.2 else "above" if places[g.index][1] > 0 else "below",
        }
        for g in gpus
    ]
    edges = [
        {
            "x": places[k.a][0],
            "y": places[k.a][1],
            "x2": places[k.b][0],
            "y2": places[k.b][1],
            "kind": kind_name(k),
            "width": _WIDTHS.get(kind_name(k), 1) / (3 if len(gpus) > 8 else 1),
        }
        for k in sorted((k for k in box.links if k.a in places and k.b in places), key=lambda link: -nearness(link.kind or "?"))
    ]
    kinds = [*_KIND_NAMES, PCIE_UNKNOWN, "unknown"]
    present = [k for k in kinds if k in {e["kind"] for e in edges}]
    scale_x = alt.Scale(domain=[-1.9, 1.9])
    scale_y = alt.Scale(domain=[-1.35, 1.35])
    crowded = len(gpus) > 8
    kind_scale = alt.Scale(domain=kinds, range=[*_STEPS, PCIE_COLOUR, UNKNOWN_COLOUR])
    lines = (
        alt.Chart(alt.Data(values=edges), width=560, height=120 if len(gpus) == 2 else 380)
        .mark_rule()
        .encode(
            x=alt.X("x:Q", axis=None, scale=scale_x), y=alt.Y("y:Q", axis=None, scale=scale_y), x2="x2:Q", y2="y2:Q",
            color=alt.Color("kind:N", scale=kind_scale, legend=alt.Legend(title="link", values=present)),
            strokeWidth=alt.StrokeWidth("width:Q", scale=None, legend=None),
        )
    )  # fmt: skip
    names = list(dict.fromkeys(n["island"] for n in nodes))
    points = alt.Chart(alt.Data(values=nodes)).encode(x=alt.X("x:Q", axis=None, scale=scale_x), y=alt.Y("y:Q", axis=None, scale=scale_y))
    tint = alt.Color(
        "island:N",
        sort=None,
        scale=alt.Scale(domain=names, range=[QUIET if n in ("none", "unknown") else _ISLAND_COLOURS[i % 7] for i, n in enumerate(names)]),
        legend=alt.Legend(title="NVLink island"),
    )
    discs = points.mark_circle(size=900 if crowded else 1500, opacity=1).encode(color=tint)
    labels = points.mark_text(color="#ffffff", fontSize=8 if crowded else 11, fontWeight="bold").encode(text="gpu:N")
    # Beside the disc, away from the middle, where no line runs.
    offsets = {"left": ("right", -26, 0), "right": ("left", 26, 0), "above": ("center", 0, -30), "below": ("center", 0, 30)}
    about = [
        points.transform_filter(f"datum.side == '{side}'").mark_text(color=INK, fontSize=11, align=align, dx=dx, dy=dy).encode(text="about:N")
        for side, (align, dx, dy) in offsets.items()
    ]
    return alt.layer(lines, discs, labels, *about).resolve_scale(color="independent")


def _island(box: Inventory, island: dict[int, int], index: int) -> str:
    if index not in island:
        return "unknown"
    members = box.islands[island[index]]
    return "-".join(map(str, members)) if len(members) > 1 else "none"


_WIDTHS = {"NVLink": 6, "PIX": 4, "PXB": 3, "PHB": 2.5, "NODE": 2, "SYS": 1.5}


def _memory(gpu) -> str:
    size = gpu.memory_total_bytes or gpu.memory_usable_bytes
    return f"{size / 2**30:.1f} GiB" if size else "memory unknown"


def partition_front(rows: list[dict[str, Any]]):
    """Pool against the heaviest stage: the Pareto front as a line, every other allowed split where there are few, and the chosen one by name."""
    import altair as alt

    kinds = ["chosen", "front", "other split"]
    colour = alt.Color("kind:N", title=None, scale=alt.Scale(domain=kinds, range=[ACCENT, SECOND, QUIET]), sort=kinds)
    loads = [row["heaviest"] for row in rows]
    base = alt.Chart(alt.Data(values=rows), width=560, height=260).encode(
        x=alt.X(
            "heaviest:Q",
            title="heaviest stage, layer-equivalents",
            scale=alt.Scale(domain=[min(loads) - 1, max(loads) + 1], nice=False),
            axis=alt.Axis(tickMinStep=1, format="d"),
        ),
        y=alt.Y("tokens:Q", title="KV pool, tokens (computed)", scale=alt.Scale(zero=False, padding=18), axis=alt.Axis(tickCount=5)),
    )
    front = base.transform_filter("datum.kind == 'front'")
    shape = alt.Shape("kind:N", title=None, scale=alt.Scale(domain=kinds), sort=kinds)
    points = base.transform_filter("!datum.covered").mark_point(filled=True, size=90, opacity=0.9).encode(color=colour, shape=shape)
    names = base.transform_filter("datum.kind == 'chosen'").mark_text(align="left", dx=9, dy=-9, color=INK, fontSize=12).encode(text="split:N")
    return front.mark_line(color=SECOND, strokeWidth=1.5) + points + names
