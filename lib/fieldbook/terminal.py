"""What the commands print for people: the notebooks' tables as plain text."""

import shutil
import textwrap
from typing import Any

from . import charts, memory_tables, tables
from .budget import Gpus
from .diagnosis import Diagnosis
from .inventory import Inventory
from .memory import Pool
from .params import Params
from .show import cell
from .spec import ModelSpec


def text_table(rows: list[dict[str, Any]], indent: str = "") -> str:
    """Rows as aligned columns with a title line; every row has the keys of the first."""
    if not rows:
        return f"{indent}(none)"
    titles = list(rows[0])
    body = [[cell(row.get(title)) for title in titles] for row in rows]
    widths = [max(len(title), *(len(line[i]) for line in body)) for i, title in enumerate(titles)]
    numeric = [all(isinstance(row.get(title), int | float | None) for row in rows) for title in titles]

    def line(words: list[str]) -> str:
        parts = (word.rjust(width) if right else word.ljust(width) for word, width, right in zip(words, widths, numeric, strict=True))
        return indent + "  ".join(parts).rstrip()

    return "\n".join([line(titles), line(["-" * width for width in widths]), *map(line, body)])


def inventory_text(box: Inventory) -> str:
    """The whole inventory: the same rows that notebook 01 shows."""
    parts = [f"Box: {box.source}", "Read: " + "; ".join(f"{r['command']}{' in ' + r['file'] if r['file'] else ''}" for r in box.readings)]

    def section(title: str, text: str) -> None:
        parts.append(f"\n{title}\n{text}")

    host = [row for row in tables.host(box) if row.get("value") is not None]
    if host:
        section("Host", "\n".join(f"  {row['quantity']}: {cell(row['value'])}" for row in host))
    if box.numa:
        section("NUMA nodes", text_table(tables.numa(box), "  "))
    told = _told(tables.gpus(box))
    section("GPUs", text_table(told, "  ") if told else f"  {len(box.gpus)} GPUs; the outputs tell nothing of them but how they are linked")
    unknown = tables.unknowns(box)
    if unknown:
        section("Unknown", text_table(unknown, "  "))
    if box.links:
        if len(box.gpus) <= 16:
            section("Link matrix", text_table(_matrix(box), "  "))
        section("Links", text_table(tables.links(box), "  "))
        section("Groups", text_table(tables.groups(box), "  "))
    if box.nics:
        # A card with fewer cells than the others must not hide their columns.
        named = sorted({i for n in box.nics for i in n.links}, key=lambda i: (len(i), i))
        section("Network cards", text_table([{"card": n.name, **{f"GPU {i}": n.links.get(i) for i in named}} for n in box.nics], "  "))
    if box.ports and not box.gpus:
        section("PCIe links", text_table([port.model_dump(exclude={"acs_redirect", "is_bridge", "is_gpu", "secondary_bus"}) for port in box.ports], "  "))
    if box.measured:
        section("Measured links", text_table(tables.measured_links(box.measured), "  "))
    section("Findings", "\n".join(_finding(row) for row in tables.findings(box.findings)))
    if box.incomplete or box.notes:
        section("Missing or odd", "\n".join(f"  - {text}" for text in [*box.incomplete, *box.notes]))
    return "\n".join(parts)


def _matrix(box: Inventory) -> list[dict[str, Any]]:
    """The matrix of `nvidia-smi topo -m`: a row and a column per GPU."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in charts.matrix_rows(box):
        rows.setdefault(entry["from"], {"": entry["from"]})[entry["to"]] = "X" if entry["from"] == entry["to"] else entry["word"]
    return list(rows.values())


def _finding(row: dict[str, Any]) -> str:
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 140))
    lines = [f"[{row['severity']}] {row['finding']}"]
    lines += [f"{key}: {row[key]}" for key in ("evidence", "what to do") if row[key]]
    wrapped = [textwrap.fill(lines[0], width, initial_indent="  ", subsequent_indent="      ")]
    return "\n".join(wrapped + [textwrap.fill(text, width, initial_indent="      ", subsequent_indent="        ") for text in lines[1:]])


def _told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the GPU table in which at least one GPU has something to say."""
    return [row for row in rows if any(value is not None for key, value in row.items() if key)]


def memory_text(params: Params, spec: ModelSpec, split: tuple[int, ...], pool: Pool, gpus: Gpus | None = None) -> str:
    """The ledger and how it comes about: the rows that notebook 02 shows."""
    layout = f"TP{params.parallel.tensor_parallel_size} x PP{len(split)}, layers {'+'.join(map(str, split))}"
    parts = [f"{spec.name} ({spec.architecture}), {layout}"]
    sections = [
        ("Model", memory_tables.shape(spec, params.engine.dtype)),
        ("In one layer of each kind, on one rank", memory_tables.token_bytes(spec, params)),
        ("Ledger", memory_tables.ledger(pool)),
        ("Requests that are resident at once", memory_tables.capacity(params, spec, split, gpus)),
        ("What if", memory_tables.what_if(params, spec, split, gpus)),
    ]
    parts += [f"\n{title}\n{text_table(rows, '  ')}" for title, rows in sections]
    each = " + ".join(f"{group.blocks_per_request:,} ({group.kind})" for group in pool.groups)
    line = f"KV pool {pool.pool_tokens:,} tokens: {pool.blocks:,} blocks of {pool.block_size_tokens} tokens, rank {pool.binding_rank} binds"
    parts.append(f"\n{line}; a request of {params.engine.max_model_len:,} tokens takes {each} blocks")
    return "\n".join(parts)


def diagnosis_text(found: Diagnosis) -> str:
    """Cause, evidence and way out, one in a line."""
    lines = [f"{found.cause} (confidence {found.confidence}): {found.what}"]
    # What is no line of the log has the number 0.
    lines += [f"  line {number}: {line[:160]}" if number else f"  {line}" for number, line in found.evidence]
    lines += [f"remedy: {found.remedy}"] if found.remedy else []
    lines += [f"also: {other}" for other in found.others]
    lines += [f"only follows from it: {', '.join(found.echoes)}"] if found.echoes else []
    return "\n".join(lines)


def bootlog_text(document: dict[str, Any]) -> str:
    """What a start-up log tells, as two columns, and its ranks as a table."""
    plain = {key: value for key, value in document.items() if not isinstance(value, (list, dict)) and value is not None}
    # As the log prints them: rounding once more would hide digits.
    rows = [{"what": key, "value": f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)} for key, value in plain.items()]
    parts = [text_table(rows)]
    ranks = document.get("ranks", [])
    told = [key for key in (ranks[0] if ranks else {}) if any(rank[key] is not None for rank in ranks)]
    if told:
        # One row for each quantity: a rank has more of them than a line has room for.
        columns = [(f"rank {rank['rank']}" if rank["rank"] is not None else f"rank ? ({i})", rank) for i, rank in enumerate(ranks)]
        body = [{"": key, **{name: "–" if rank[key] is None else str(rank[key]) for name, rank in columns}} for key in told]
        parts.append("\nRanks\n" + text_table(body, "  "))
    parts += [f"- {note}" for note in document.get("notes", [])]
    return "\n".join(parts)
