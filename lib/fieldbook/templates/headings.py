"""Headings of the pages: in English and Chinese at once (style sheets show one), with stable ids, and the sections they begin."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

TRANSLATIONS = Path(__file__).with_name("headings.zh.yml")
FIELD_REPORT = "field-report"  # tag of cells that concern only boxes with a field report
SECTION = re.compile(r'<h3 class="section" id="([^"]+)">(.*?)</h3>', re.S)


@dataclass(frozen=True)
class Section:
    """One section of a notebook: the id of its heading in the page, and the heading's HTML in both languages."""

    id: str
    html: str


@functools.cache
def translations() -> dict[str, str]:
    """Chinese by English heading, as headings.zh.yml has them."""
    import yaml

    return {str(english): str(chinese) for english, chinese in yaml.safe_load(TRANSLATIONS.read_text(encoding="utf-8")).items()}


def both(text: str) -> Any:
    """A heading as safe HTML: one span for each language, or the text alone where no Chinese is known or it is the same."""
    from markupsafe import Markup

    chinese = translations().get(text, text)
    return Markup(escape(text) if chinese == text else _spans(escape(text), chinese))


def _spans(english_html: str, chinese: str) -> str:
    return f'<span class="en" lang="en">{english_html}</span><span class="zh" lang="zh-Hans">{escape(chinese)}</span>'


def settle_headings(soup: Any, prefix: str) -> None:
    """Give the headings of a notebook's prose their ids and their Chinese; those of outputs are left as they are.

    An id comes from the English words, so that a link to a section survives other sections being added; the second of one name ends in -2.
    """
    from bs4 import BeautifulSoup

    seen: dict[str, int] = {}
    for heading in soup.find_all(re.compile(r"^h[3-6]$")):
        if heading.find_parent(class_=["output_area", "output_subarea"]):
            continue
        text = " ".join(heading.get_text().split())
        slug = re.sub(r"[^0-9A-Za-z]+", "-", text).strip("-").lower() or "section"
        seen[slug] = seen.get(slug, 0) + 1
        heading.attrs = {"class": "section"} if heading.name == "h3" else {}
        heading["id"] = f"{prefix}h-{slug}" + (f"-{seen[slug]}" if seen[slug] > 1 else "")
        if translations().get(text, text) != text:
            inner = BeautifulSoup(_spans(heading.decode_contents(), translations()[text]), "html.parser")
            heading.clear()
            heading.append(inner)


def sections(cells_html: str) -> list[Section]:
    """The sections of a notebook's clean HTML, in order; a link in a heading is no link in the list of contents."""
    return [Section(match[1], re.sub(r"</?a\b[^>]*>", "", match[2])) for match in SECTION.finditer(cells_html)]


def drop_unanswered(notebook: Any) -> None:
    """Take out each `field-report` prose cell with the code below it, up to the next prose, where none of that code has put out anything.

    Those cells set a box beside its field report: on a box without one they show nothing, and their question would stand there alone.
    """
    kept: list[Any] = []
    cells, at = notebook.cells, 0
    while at < len(cells):
        end = at + 1
        while end < len(cells) and cells[end].cell_type == "code":
            end += 1
        asks = cells[at].cell_type == "markdown" and FIELD_REPORT in cells[at].metadata.get("tags", [])
        if not asks or any(cell.get("outputs") for cell in cells[at + 1 : end]):
            kept += cells[at:end]
        at = end
    notebook.cells = kept
