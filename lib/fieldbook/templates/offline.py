"""Make what notebooks carry fit for one self-contained page: no scripts, nothing pointing elsewhere, no clashing ids.

All functions return text; none raises on malformed input, since one broken notebook must not cost the whole report.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .headings import drop_unanswered, settle_headings

TEMPLATES = Path(__file__).parent
EVIDENCE = {
    "measured": "read or timed in this run, on this machine",
    "recorded": "taken from a named report or capture; not measured here",
    "computed": "worked out from first principles, exactly",
    "estimated": "worked out from a model with a stated error",
    "stated": "a claim that nobody has re-checked",
}
FLAGS = {"DISAGREES", "NOT CAUGHT"}  # what a reader must not miss in a table
PAPERMILL_BANNER = "papermill-error-cell-tag"  # papermill's red banners: the report has its own
MIME_TYPES = ["image/svg+xml", "text/html", "text/markdown", "image/png", "image/jpeg", "text/plain"]  # best first
DROPPED_TAGS = {"script", "noscript", "template", "iframe", "frame", "object", "embed", "applet", "link", "meta"}
DROPPED_TAGS |= {"base", "form", "foreignobject"}
DROPPED_ATTRIBUTES = {"srcset", "srcdoc", "poster", "action", "formaction", "background", "ping", "cite", "longdesc"}
DROPPED_ATTRIBUTES |= {"xlink:href", "data"}
ID_REFERENCES = {"for", "headers", "aria-labelledby", "aria-describedby", "aria-controls", "aria-owns"}
INK, FAINT, WHITE = {"#24292f", "#000", "#000000", "black"}, {"#d0d7de", "#ddd"}, {"white", "#fff", "#ffffff"}
FAINT_OPACITY = "0.2"
INK_ON_COLOUR = "#1c2024"  # of text that lies on a mark: the mark keeps its colour in a dark scheme, so its text does too
UNCOLOURED = WHITE | {"#f3f4f6", "none", ""}  # marks that the style sheet gives the page's own colours
CELL = re.compile(r"M(-?[\d.]+),(-?[\d.]+)h([\d.]+)v([\d.]+)h")
PLACE = re.compile(r"translate\((-?[\d.]+),(-?[\d.]+)\)")
SHORT_CHARS = 24  # a table cell up to this long stays on one line
LONG_CHARS = 80  # one longer than this needs some width, or it is a tower of words on a phone
URL_ELSEWHERE = re.compile(r"url\(\s*['\"]?(?!#)", re.I)
OWN_URL = re.compile(r"(?<=url\()#([\w.:-]+)")
NUMBER = re.compile(r"[-+−±~≈<>≤≥]?\s*\d[\d,.\s\u2009\u202f]*(e[-+]?\d+)?\s*(%|[KMGT]i?B)?", re.I)


def cells_html(path: Path, number: str) -> str:
    """The cells of an executed notebook as clean HTML, charts inline; ids begin with `s<number>-`."""
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    charts: list[str] = []
    try:
        notebook = nbformat.read(path, as_version=4)
        notebook.cells = [cell for cell in notebook.cells if PAPERMILL_BANNER not in cell.metadata.get("tags", [])]
        drop_unanswered(notebook)
        for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
            if "image/svg+xml" in output.get("data", {}):  # put in last: HTML parsers lower the case of svg's names
                charts.append(clean_svg(output.data["image/svg+xml"], f"s{number}-c{len(charts)}-"))
                output.data = {"image/svg+xml": f"\ue000{len(charts) - 1}\ue001"}
            elif output.output_type == "stream":
                output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)  # of a progress bar only its last state
        drop_title(notebook, path.stem[3:].replace("_", " "))
        exporter = HTMLExporter(
            config=Config({"NbConvertBase": {"display_data_priority": MIME_TYPES}}),
            template_name="basic",
            template_file="cells.html.j2",
            extra_template_paths=[str(TEMPLATES)],
            exclude_anchor_links=True,
        )
        html = clean_html(exporter.from_notebook_node(notebook)[0], f"s{number}-")
    except Exception as problem:
        what = escape(f"{type(problem).__name__}: {problem}"[:300])
        return f'<p class="note">This notebook cannot be shown. {what}</p>'
    return re.sub("\ue000(\\d+)\ue001", lambda match: charts[int(match[1])], html)


def drop_title(notebook: Any, title: str) -> None:
    """Take a first heading that only repeats the station's title off the first cell: the page has it already."""
    cell = notebook.cells[0] if notebook.cells else {}
    first, _, rest = cell.get("source", "").strip().partition("\n")
    if cell.get("cell_type") == "markdown" and re.sub(r"[\W\d_]+", " ", first).strip().lower() == title:
        cell.source = rest.strip()


def clean_svg(svg: str, prefix: str) -> str:
    """A chart for inlining: ids begin with `prefix`, ink follows the page's text colour, nothing points elsewhere.

    An SVG that cannot be parsed becomes one line of text that says so.
    """
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as problem:
        return f'<p class="note">A chart is left out: its SVG cannot be read ({escape(str(problem))}).</p>'
    for parent in list(root.iter()):
        for child in list(parent):
            sheet = parent is root and _local_name(child) == "rect" and child.get("fill") in WHITE
            if sheet or _local_name(child) in DROPPED_TAGS | {""}:  # a white sheet would stay white on a dark page
                parent.remove(child)
    _keep_ink_on_colour(root)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # inside HTML svg needs no namespace, and its URL stays out
        attributes = [(key.rpartition("}")[2], value) for key, value in element.attrib.items()]
        element.attrib.clear()
        for name, value in attributes:
            element.attrib.update(_svg_attribute(name, value, prefix))
    width_px = re.match(r"[\d.]+", root.get("width", ""))
    titles = [" ".join(e.itertext()).strip() for e in root.iter() if "role-title-text" in e.get("class", "")]
    natural_width = f"--natural: {width_px[0] if width_px else 600}px"
    root.attrib.update({"role": "graphics-document", "aria-label": (titles or ["Chart"])[0], "style": natural_width})
    return ElementTree.tostring(root, encoding="unicode")


def _keep_ink_on_colour(root: ElementTree.Element) -> None:
    """Text in ink that lies on a coloured cell (of a heat map) must not turn light in a dark scheme."""
    for group in root.iter():
        cells = [CELL.match(e.get("d", "")) for e in group.findall("./*/*") if _local_name(e) == "path" and e.get("fill", "") not in UNCOLOURED]
        corners = [tuple(float(number) for number in cell.groups()) for cell in cells if cell]
        for text in group.findall("./*/*") if corners else []:
            place = PLACE.match(text.get("transform", "")) if _local_name(text) == "text" and text.get("fill") in INK else None
            x, y = (float(place[1]), float(place[2])) if place else (None, None)
            if place and any(left < x < left + width and top < y < top + height for left, top, width, height in corners):
                text.set("fill", INK_ON_COLOUR)


def _local_name(element: ElementTree.Element) -> str:
    tag = element.tag  # comments and processing instructions have no name
    return tag.rpartition("}")[2].lower() if isinstance(tag, str) else ""


def _svg_attribute(name: str, value: str, prefix: str) -> dict[str, str]:
    colour = value.strip().lower() if name in ("fill", "stroke") else ""
    elsewhere = name == "href" and not value.startswith(("#", "data:image/"))
    if name.startswith("on") or URL_ELSEWHERE.search(value) or elsewhere:
        return {}
    if colour in INK:
        return {name: "currentColor"}
    if colour in FAINT:
        return {name: "currentColor", f"{name}-opacity": FAINT_OPACITY}
    if name == "id":
        return {name: prefix + value}
    if name == "href" and value.startswith("#"):
        return {name: f"#{prefix}{value[1:]}"}
    return {name: OWN_URL.sub(rf"#{prefix}\1", value)}


def clean_html(html: str, prefix: str) -> str:
    """A notebook's HTML for inlining: no scripts, nothing that points elsewhere, every id begins with `prefix`.

    Headings go one level down. Links to a notebook of the walk become links within the page, other links become text.
    Each table gets a scrolling box of its own.
    """
    from bs4 import BeautifulSoup
    from bs4.element import PreformattedString

    soup = BeautifulSoup(html, "html.parser")
    for node in soup.find_all(string=lambda text: isinstance(text, PreformattedString)):
        node.extract()  # comments, doctypes, processing instructions
    for tag in soup.find_all(list(DROPPED_TAGS)):
        tag.decompose()
    ids = {tag["id"] for tag in soup.find_all(id=True)}

    def own(match: re.Match) -> str:
        return f"#{prefix}{match[1]}" if match[1] in ids else match[0]

    for style in soup.find_all("style"):  # kept where each rule dresses an element by id (a pandas Styler does)
        text = style.get_text()
        selectors = [s.strip() for rule in re.findall(r"([^{}]+)\{", text) for s in rule.split(",")]
        if selectors and all(s.startswith("#") for s in selectors) and not URL_ELSEWHERE.search(text):
            style.string = re.sub(r"#([A-Za-z][\w-]*)", own, text)
        else:
            style.decompose()
    for tag in soup.find_all(True):
        _settle_attributes(tag, prefix, ids, own)
        _settle_links(tag, own)
        if re.fullmatch(r"h[1-5]", tag.name):
            tag.name = f"h{int(tag.name[1]) + 1}"  # the page's own h1 is the box
    settle_headings(soup, prefix)
    for table in soup.find_all("table"):
        _dress_table(soup, table)
    for output in soup.select(".output_html"):
        if not output.get_text(strip=True) and not output.find(["img", "svg", "table"]):
            output.string = "An interactive output is left out of this offline report."
    return str(soup)


def _settle_attributes(tag: Any, prefix: str, ids: set[str], own: Callable[[re.Match], str]) -> None:
    for key, value in list(tag.attrs.items()):
        text = " ".join(value) if isinstance(value, list) else str(value)
        if key.startswith("on") or key in DROPPED_ATTRIBUTES or URL_ELSEWHERE.search(text):
            del tag[key]
        elif key == "id":
            tag[key] = prefix + text
        elif key in ID_REFERENCES:
            tag[key] = " ".join(prefix + part if part in ids else part for part in text.split())
        elif "url(#" in text:
            tag[key] = OWN_URL.sub(own, text)


def _settle_links(tag: Any, own: Callable[[re.Match], str]) -> None:
    href, src = tag.attrs.pop("href", None), tag.attrs.pop("src", None)
    if src is not None and src.startswith("data:image/"):
        tag["src"] = src
    elif tag.name == "img":
        tag.replace_with(f"[picture left out: {tag.get('alt') or 'it lies outside this report'}]")
    station = re.fullmatch(r"(?:\./)?(0[1-7])_\w+\.ipynb(?:#.*)?", href or "")
    if station and tag.name == "a":
        tag["href"] = f"#s{station[1]}"
    elif href and href.startswith("#"):
        tag["href"] = re.sub(r"^#(.+)", own, href)
    elif href and tag.name == "a":
        tag.name, tag.attrs = "span", {"class": "was-link"}
        if href.startswith(("http:", "https:")) and href.rstrip("/") not in tag.get_text():
            tag.append(f" ({href})")  # a reader on paper needs the address in words anyway


def _dress_table(soup: Any, table: Any) -> None:
    """Numbers to the right, evidence words as chips, and a box around the table that scrolls by itself."""
    rows = [row.find_all(["td", "th"], recursive=False) for row in table.find_all("tr")]
    table.attrs = {key: value for key, value in table.attrs.items() if key in ("id", "class", "aria-label")}
    for row in table.find_all("tr"):
        row.attrs.pop("style", None)  # pandas' "text-align: right" on its header row
    spans = table.select("[rowspan], [colspan]")  # with these the n-th cell of a row need not lie in column n
    for column in range(0 if spans else max(map(len, rows), default=0)):
        cells = [row[column] for row in rows if column < len(row)]
        texts = [cell.get_text(strip=True) for cell in cells if cell.name == "td"]
        filled = [text for text in texts if text not in ("", "–", "—", "-", "None", "NaN")]
        if filled and all(NUMBER.fullmatch(text) for text in filled):
            for cell in cells:
                cell["class"] = [*cell.get("class", []), "num"]
    for cell in table.find_all(["td", "th"]):
        word = cell.get_text(strip=True)
        size = "short" if len(word) <= SHORT_CHARS else "long" if len(word) > LONG_CHARS else ""
        if size:
            cell["class"] = [*cell.get("class", []), size]
        if word in FLAGS and cell.name == "td":
            cell["class"] = [*cell.get("class", []), "flag"]
        if word in EVIDENCE and cell.name == "td":
            chip = soup.new_tag("span", attrs={"class": f"chip {word}", "title": EVIDENCE[word]})
            chip.string = word
            cell.clear()
            cell.append(chip)
    caption = table.find("caption")
    label = caption.get_text(" ", strip=True) if caption else "Table"
    table.wrap(soup.new_tag("div", attrs={"class": "scroll", "tabindex": "0", "role": "group", "aria-label": label}))
