"""The HTML report beside the receipts: its verdict, its figures, its table of receipts, and the tables of its notebooks."""

import collections
import json
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from .. import publish
from ..templates.offline import MIME_TYPES

_VOID_TAGS = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
MOST_NESTED = 1_000
_READ_TAGS = {"td", "th", "p", "a", "code"}


@dataclass(frozen=True)
class Text:
    """The text of one element: its tag, class, title and link, ids and classes of what it lies in, and the number of its table row."""

    tag: str
    text: str
    own_class: str
    title: str
    link: str
    within: tuple[str, ...]
    row: int

    def lies_in(self, *names: str) -> bool:
        """Whether it lies in elements of all these ids or classes."""
        return all(name in self.within for name in names)


class _Reader(HTMLParser):
    """Collects the texts of cells, lines and links with where they lie. Scripts are text to it: nothing runs."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[Text] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self._row = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len(self._open) > MOST_NESTED:
            raise ValueError("nested too deeply")
        if tag not in _VOID_TAGS:
            self._row += tag == "tr"
            self._open.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A drawing's element without content."""

    def handle_endtag(self, tag: str) -> None:
        if not any(open_[0] == tag for open_ in self._open[-40:]):
            return
        while self._open:
            name, attrs, texts = self._open.pop()
            if name in _READ_TAGS:
                within = [part for _, one, _ in self._open for part in [one.get("id", ""), *one.get("class", "").split()] if part]
                text, own = " ".join("".join(texts).split()), [attrs.get(one, "") for one in ("class", "title", "href")]
                self.found.append(Text(name, text, *own, tuple(within), self._row))
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        for name, _, texts in self._open[-12:]:
            if name in _READ_TAGS:
                texts.append(data)


def texts_of(html: str) -> list[Text]:
    """The texts of a page's cells, lines and links, in their order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.found


def problems(folder: Path) -> tuple[list[str], list[str]]:
    """(what the report shows otherwise than the receipts and notebooks beside it, what cannot be compared)."""
    file = folder / "index.html"
    if not file.is_file():
        return [], ["index.html is missing: no report to compare with the receipts"]
    texts = texts_of(file.read_text(encoding="utf-8", errors="replace"))
    run = publish.read_run(folder)
    found = _receipts(texts, folder, run) + _verdict(texts, run) + _cards(texts, run)
    for station in run["stations"]:
        found += _figures(texts, station, run["figures"][station.name]) + _cells(texts, folder, station)
    return [f"index.html: {text}" for text in found], []


def _receipts(texts: list[Text], folder: Path, run: dict[str, Any]) -> list[str]:
    """The table of receipts: each file with its params hash and its SHA-256."""
    rows: dict[int, list[Text]] = {}
    for text in texts:
        if text.lies_in("receipts"):
            rows.setdefault(text.row, []).append(text)
    listed = {}
    for row in rows.values():
        name, hashes = next((t.text for t in row if t.tag == "a"), ""), [t.text for t in row if t.tag == "code"]
        passed = next((t.text for t in row if t.tag == "td"), "")
        if name and len(hashes) == 2:
            listed[name.removesuffix(".json")] = (passed, *hashes)
    found = []
    for station in run["stations"]:
        told = listed.pop(station.name, None)
        if station.receipt is None or told is None:
            if told or station.receipt:
                listing = "lists {}, which is not in the folder" if told else "does not list {}, which is in the folder"
                found.append(f"its table of receipts {listing.format(f'{station.name}.json')}")
            continue
        passed = "yes" if station.receipt.get("passed") else "no"
        for what, shown, own in zip(
            ("passed", "params hash", "SHA-256"), told, (passed, station.receipt.get("params_hash"), station.receipt_sha256), strict=True
        ):
            if shown != own:
                found.append(f"its table of receipts has {what} {shown} of {station.name}.json, the file {own}")
    return found + [f"its table of receipts lists {name}.json, which is no receipt" for name in listed]


def _verdict(texts: list[Text], run: dict[str, Any]) -> list[str]:
    """The verdict on the first screen, and the line of each station."""
    shown = next((t.text for t in texts if t.own_class == "line" and t.lies_in("verdict")), None)
    expected = _flat(run["verdict"])
    found = [] if shown == expected else [f"its verdict reads {shown!r}, the receipts' {expected!r}"]
    for station in run["stations"]:
        if station.state != "passed" or not (station.receipt or {}).get("verdict"):
            continue
        line = next((t.text for t in texts if t.own_class == "finding" and t.lies_in(f"s{station.number}")), None)
        if line != _flat(station.receipt["verdict"]):
            found.append(f"{station.number}: its line reads {line!r}, the receipt's {_flat(station.receipt['verdict'])!r}")
    return found


def _flat(text: Any) -> str:
    return " ".join(str(text).split())


def _begins(text: str, shown: str) -> bool:
    """Whether a cell's text is a value, or a value with a remark behind it."""
    return text == shown or text.startswith(f"{shown} ")


def _cards(texts: list[Text], run: dict[str, Any]) -> list[str]:
    """Headline figures on the first screen."""
    own = [t for t in texts if t.lies_in("card") and (t.own_class == "label" or "value" in t.own_class.split())]
    cards = {label.link.removeprefix("#"): value.text for label, value in zip(own[::2], own[1::2], strict=False)}
    found = []
    for figure in run["headline"]:
        text, name = cards.pop(figure["anchor"], None), figure["label"] or figure["key"]
        if text is None or not _begins(text, _flat(figure["shown"])):
            shown = "is not there" if text is None else f"reads {text}"
            found.append(f"its headline figure {name} {shown}, the receipt's {_flat(figure['shown'])} {figure['unit']}")
    missing = [s.number for s in run["stations"] if not s.receipt]
    return found + [f"its headline figure {anchor} is in no receipt" for anchor in cards if anchor[1:3] not in missing]


def _figures(texts: list[Text], station: publish.PublishedStation, figures: list[dict[str, Any]]) -> list[str]:
    """The table of a station's figures, column by column as its head names them."""
    if not station.receipt:
        # The table of receipts tells it once.
        return []
    head = [t.text.casefold() for t in texts if t.tag == "th" and t.lies_in("figures", f"s{station.number}") and not _anchor(t)]
    rows: dict[str, dict[str, Text]] = {}
    for text in texts:
        if text.tag in ("td", "th") and text.lies_in("figures", f"s{station.number}") and (anchor := _anchor(text)):
            row = rows.setdefault(anchor, {})
            row[head[len(row)] if len(row) < len(head) else str(len(row))] = text
    found = []
    for figure in figures:
        row, name = rows.pop(figure["anchor"], None), f"{station.number}, figure {figure['key']}"
        if row is None:
            found.append(f"{name}: not in its table of figures")
            continue
        value = row.get("value")
        if value is None or not _begins(value.text, _flat(figure["shown"])) or (value.title and _flat(value.title) != _flat(figure["exact"])):
            told = f"{value.text} ({_flat(value.title)})" if value else "nothing"
            found.append(f"{name}: it shows {told}, the receipt has {_flat(figure['shown'])} ({_flat(figure['exact'])})")
        for column, key in (("unit", "unit"), ("evidence", "evidence"), ("source", "source"), ("figure", "label")):
            expected = _flat(figure[key] or (figure["key"] if key == "label" else ""))
            if column in row and not _begins(row[column].text, expected):
                found.append(f"{name}: its {key} reads {row[column].text!r}, the receipt's {expected!r}")
    return found + [f"{station.number}: it shows a figure that no receipt has: {anchor.partition('-figure-')[2]}" for anchor in rows]


def _anchor(text: Text) -> str:
    return next((name for name in text.within if "-figure-" in name), "")


def _cells(texts: list[Text], folder: Path, station: publish.PublishedStation) -> list[str]:
    """Tables that the executed notebook holds: each of their cells has to be in the page as well."""
    file = folder / f"{station.name}.ipynb"
    if not station.has_notebook or not file.is_file():
        return []
    page = collections.Counter(t.text for t in texts if t.tag in ("td", "th") and t.lies_in("cells", f"s{station.number}"))
    lacking = collections.Counter(_notebook_cells(json.loads(file.read_text(encoding="utf-8")))) - page
    shown = [f"{text!r}" for text in lacking if text][:5]
    return [f"{station.number}: its tables lack what the executed notebook has: {', '.join(shown)}"] if shown else []


def _notebook_cells(notebook: dict[str, Any]) -> list[str]:
    """Texts of all table cells in a notebook's outputs, as far as the report shows them as tables."""
    found = []
    for cell in notebook.get("cells", []):
        for output in cell.get("outputs", []):
            data = output.get("data") or {}
            if next((kind for kind in MIME_TYPES if kind in data), None) == "text/html":
                found += [t.text for t in texts_of("".join(data["text/html"])) if t.tag in ("td", "th")]
    return found
