"""The report: offline, complete about failures, safe to inline.

`python tests/unit/test_publish.py FOLDER` writes three made-up runs and their pages there, to look at in a browser.
"""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from fieldbook import publish, site
from fieldbook.templates.headings import translations
from fieldbook.templates.offline import EVIDENCE, TEMPLATES, clean_html, clean_svg

ROOT = Path(__file__).resolve().parents[2]

SPLIT_CHART = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" class="marks" '
    'width="560" height="150" viewBox="0 0 560 150"><rect width="100%" height="100%" fill="white"/>'
    '<g fill="none" stroke-miterlimit="10"><g class="role-title-text"><text x="4" y="14" font-family="sans-serif" '
    'font-size="13px" font-weight="bold" fill="#24292f">KV pool by split</text></g>'
    '<line x1="60" x2="60" y1="24" y2="126" stroke="#24292f"/>'
    '<line x1="300" x2="300" y1="24" y2="126" stroke="#d0d7de"/>'
    '<line x1="540" x2="540" y1="24" y2="126" stroke="#d0d7de"/><g clip-path="url(#clip0)">'
    '<rect x="60" y="30" width="460" height="24" fill="#4c78a8"/>'
    '<rect x="60" y="64" width="340" height="24" fill="#4c78a8"/>'
    '<rect x="60" y="98" width="300" height="24" fill="url(#gradient_0)"/></g>'
    '<text x="52" y="46" text-anchor="end" font-family="sans-serif" font-size="11px" fill="#24292f">15+15</text>'
    '<text x="52" y="80" text-anchor="end" font-family="sans-serif" font-size="11px" fill="#24292f">20+10</text>'
    '<text x="52" y="114" text-anchor="end" font-family="sans-serif" font-size="11px" fill="#24292f">12+18</text>'
    '<text x="540" y="142" text-anchor="end" font-family="sans-serif" font-size="11px" fill="#24292f">tokens</text></g>'
    '<a xlink:href="https://elsewhere.example/"><text/></a><script>alert(1)</script>'
    '<defs><clipPath id="clip0"><rect width="560" height="150"/></clipPath><linearGradient id="gradient_0">'
    '<stop offset="0" stop-color="#4c78a8"/><stop offset="1" stop-color="#9ecae9"/></linearGradient></defs></svg>'
)
TABLE = """<div><style scoped>.dataframe tbody tr th { vertical-align: top; }</style>
<table border="1" class="dataframe"><thead><tr style="text-align: right;"><th>rank</th><th>layers</th>
<th>weights_gib</th><th>available_gib</th><th>kv_bytes_per_token</th><th>pool_tokens</th><th>evidence</th></tr></thead>
<tbody><tr><td>rank 0</td><td>15</td><td>0.1512</td><td>0.5000</td><td>11,520</td><td>46,592</td><td>computed</td></tr>
<tr><td>rank 1</td><td>15</td><td>0.1512</td><td>0.5000</td><td>11,520</td><td>46,608</td><td>measured</td></tr></tbody>
</table></div>"""
HOSTILE = """<link rel="stylesheet" href="https://elsewhere.example/a.css">
<script src="https://elsewhere.example/a.js"></script>
<style>@import "https://elsewhere.example/b.css"; body { background: url(https://elsewhere.example/c.png) }</style>
<p onclick="alert(1)" style="background: url('//elsewhere.example/d.png')">kept words</p>
<img src="https://elsewhere.example/e.png" alt="a logo"><iframe src="https://elsewhere.example/f"></iframe>
<a href="https://elsewhere.example/g">a link</a> <a href="javascript:alert(1)">another</a>
<a href="../up.html">up</a>"""
FIGURES = {
    "02_memory_accounting": {
        "pool_tokens": (46592, "tokens", "computed", "memory.pool_tokens: rank 0 binds", "KV pool, predicted", True),
        "weights": (538060032, "B", "computed", "the safetensors headers' byte counts", "Weights, both ranks", False),
    },
    "03_partition_selection": {
        "layer_partition": ([15, 15], "layers", "computed", "partition.best over 29 splits", "Best split", True),
    },
    "05_server_launch": {
        "load_s": (21.375, "s", "measured", "launch to the first answer of /health", "Start to ready", True),
        "pool_tokens": (46592, "tokens", "measured", "boot log: GPU KV cache size", "KV pool, boot log", True),
    },
    "06_benchmarks": {
        "prefill_tok_s": (1834.5, "tok/s", "measured", "512-token prompts, 5 repeats", "Prefill", True),
        "decode_tok_s": (23.4567, "tok/s", "measured", "one stream, 64 tokens, 5 repeats", "Decode", True),
        "p_value": (0.0000321, "", "estimated", "exact permutation test", "p of the difference", False),
    },
}
VERDICTS = {
    "01_hardware_inventory": "Two cores, one NUMA node, no GPU.",
    "02_memory_accounting": "Rank 0 binds: 46,592 tokens fit.",
    "03_partition_selection": "15+15 is the best of 29 splits.",
    "04_patch_application": "One defect (cpu-eager-pp) found, mended and proven.",
    "05_server_launch": "The boot log's pool equals the prediction to the token.",
    "06_benchmarks": "Prefill 1,835 tok/s, decode 23.5 tok/s.",
    "07_verdict": "PP2 doubles the KV pool of this box and costs 8 % of its decode speed.",
}


def receipt(name, minute, kind="live", box="cpu-smollm2", day=29, passed=True, split=None, gpus=(), figures=None):
    """A receipt; `gpus` are (name, architecture) of its inventory, `figures` stand in for FIGURES by station."""
    inventory = {"inventory": {"gpus": [{"name": gpu, "architecture": architecture} for gpu, architecture in gpus]}}
    keys = ("value", "unit", "evidence", "source", "label", "headline", "disagrees")
    parallel = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "layer_partition": split}
    versions = {"fieldbook": "0.1.0", "vllm": "0.30.0", "torch": "2.13.0+cpu", "python": "3.11.7", "driver": None}
    return {
        "schema_version": 1,
        "notebook": name,
        "box": box,
        "kind": kind,
        "params_hash": "3f5a9c" + "0" * 58,
        "params": {"box": {"name": box}, "model": {"name": "SmolLM2-135M-Instruct"}, "parallel": parallel},
        "versions": versions,
        "started_at": f"2026-11-{day:02d}T13:{minute:02d}:02Z",
        "ended_at": f"2026-11-{day:02d}T13:{minute:02d}:49Z",
        "verdict": VERDICTS[name],
        "passed": passed,
        "figures": {key: dict(zip(keys, figure, strict=False)) for key, figure in (FIGURES if figures is None else figures).get(name, {}).items()},
        "data": inventory if name == publish.STATIONS[0] else {},
    }


def notebook(name, chart=SPLIT_CHART, extra=(), start=None):
    """An executed notebook as papermill leaves it: prose, folded code, a table, two charts, streams."""
    title = name[3:].replace("_", " ").capitalize()
    table = new_output("display_data", data={"text/html": TABLE, "text/plain": "rank layers"})
    svg = new_output("display_data", data={"image/svg+xml": chart, "text/plain": "<chart>"})
    progress = new_output("stream", name="stdout", text="loading 10%\rloading 100%\nready\n")
    warning = new_output("stream", name="stderr", text="INFO kv cache: 46,592 tokens at http://127.0.0.1:8000\n")
    chip = 'data = {"model": "SmolLM2"}  # the model, by name'
    cells = [
        new_markdown_cell(
            f"# {name[:2]} {title}\n\nDoes the model fit, and **how many tokens** are left? The arithmetic\n"
            "is worked first, as in `memory.pool_tokens`, and set beside the boot log afterwards.\n\n"
            "## How it is worked out\n\nSee [the split](03_partition_selection.ipynb) and "
            "[the manual](https://docs.example/manual).\n\n"
            "| quantity | value | evidence |\n|---|---|---|\n"
            "| block size | 16 | stated |\n| KV space | 0.5 GiB | measured |"
        ),
        new_code_cell(chip, metadata={"tags": ["parameters"]}, execution_count=1),
        new_code_cell(chip, metadata={"tags": ["injected-parameters"]}, execution_count=2),
        new_code_cell(
            "ledger = memory.ledger(model, split)  # rank by rank\nfor rank in ledger:\n    display(rank, unit='GiB')",
            execution_count=3,
            outputs=[table],
        ),
        new_markdown_cell("### The splits side by side\n\nThe shorter the bar, the fewer tokens fit."),
        new_code_cell("charts.splits(candidates)", execution_count=4, outputs=[svg, svg]),
        new_code_cell("server.wait()", execution_count=5, outputs=[progress, warning]),
        *extra,
    ]
    return new_notebook(cells=cells, metadata={"papermill": {"start_time": start}} if start else {})


def fake_run(folder, stations=publish.STATIONS, fail=None, chart=SPLIT_CHART, hostile=False, **receipt_options):
    """Write a run folder: receipts and executed notebooks of `stations`; `fail` raised and left no receipt."""
    folder.mkdir(parents=True)
    for minute, name in enumerate(stations):
        extra = []
        if hostile:
            output = new_output("display_data", data={"text/html": HOSTILE})
            vega = new_output("display_data", data={"text/html": "<script>vegaEmbed()</script>"})
            extra.append(new_code_cell("display(HTML(page))", execution_count=6, outputs=[output, vega]))
        if name == fail:
            line = "GateFailed: partition [20, 11] sums to 31, the model has 30 layers"
            trace = ["\x1b[0;31mGateFailed\x1b[0m Traceback", line]
            error = new_output("error", ename="GateFailed", evalue=line.partition(": ")[2], traceback=trace)
            banner = {"tags": ["papermill-error-cell-tag"]}
            extra.append(new_markdown_cell("<span style='color:red'>Execution using papermill</span>", metadata=banner))
            extra.append(new_code_cell("gate.check()", execution_count=7, outputs=[error]))
            extra.append(new_code_cell("station.close(verdict)"))
        else:
            text = json.dumps(receipt(name, minute, **receipt_options))
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        nbformat.write(notebook(name, chart, extra), folder / f"{name}.ipynb")
    return folder


class Page(HTMLParser):
    """What a page consists of: its tags with attributes, its ids, its visible text."""

    def __init__(self, path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags, self.words, self.hidden = [], [], 0
        self.feed(self.html)
        self.text = " ".join(" ".join(self.words).split())
        self.ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.hidden += tag == "style"

    def handle_endtag(self, tag):
        self.hidden -= tag == "style"

    def handle_data(self, data):
        if not self.hidden:
            self.words.append(data)

    def section(self, number):
        """The HTML of one station, so that what it says is looked for in the right place."""
        return re.search(rf'<section class="station[^"]*" id="s{number}".*?</section>', self.html, re.S)[0]


def references(page):
    """Every place a browser could load from or go to."""
    keys = ("src", "href", "xlink:href")
    found = [value for _, attributes in page.tags for key, value in attributes.items() if key in keys]
    return found + re.findall(r"url\(\s*['\"]?([^)'\"]*)", page.html) + re.findall(r"@import\s*(\S+)", page.html)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("reports") / "cpu-smollm2" / "2026-11-29-1310", hostile=True)


@pytest.fixture(scope="module")
def full(full_run):
    return Page(publish.write_report(full_run))


@pytest.fixture
def stopped(tmp_path):
    names = publish.STATIONS[:3]
    return Page(publish.write_report(fake_run(tmp_path / "reports" / "cpu-smollm2" / "stopped", names, fail=names[-1])))


def test_nothing_points_outside_the_run_folder(full):
    allowed = re.compile(r"#[\w.:-]+|0[1-7]_\w+\.(json|ipynb)|data:image/[a-z+]+;base64,.*")
    assert [r for r in references(full) if not allowed.fullmatch(r)] == []
    assert "elsewhere.example" not in re.sub(r"a link \(https://elsewhere.example/g\)", "", full.html)


def test_every_link_within_the_page_and_to_its_files_arrives(full, full_run):
    links = {r for r in references(full)}
    assert {r for r in links if r.startswith("#") and r[1:] not in full.ids} == set()
    assert {r for r in links if not r.startswith(("#", "data:")) and not (full_run / r).exists()} == set()
    assert {f"{name}.json" for name in publish.STATIONS} <= links
    assert {f"{name}.ipynb" for name in publish.STATIONS} <= links


def test_no_script_frame_or_handler_is_left(full):
    assert {"script", "iframe", "object", "embed", "link", "base"}.isdisjoint(tag for tag, _ in full.tags)
    assert [key for _, attributes in full.tags for key in attributes if key.startswith("on")] == []
    assert "javascript:" not in full.html
    assert "kept words" in full.text
    assert "[picture left out: a logo]" in full.text
    assert "a link (https://elsewhere.example/g)" in full.text
    assert "An interactive output is left out of this offline report." in full.text


def test_ids_are_unique_though_charts_repeat(full):
    assert len(full.ids) == len(set(full.ids))
    assert "s02-c0-clip0" in full.ids and "s02-c1-clip0" in full.ids and "s06-c1-gradient_0" in full.ids
    assert 'clip-path="url(#s02-c1-clip0)"' in full.html


def test_charts_take_the_colours_of_the_page_and_keep_the_case_of_svg(full):
    assert "#24292f" not in full.html.partition("</style>")[2] and "#d0d7de" not in full.html
    assert 'stroke="currentColor" stroke-opacity="0.2"' in full.html
    assert 'viewBox="0 0 560 150"' in full.html and "<clipPath" in full.html
    assert 'fill="white"' not in full.html
    assert full.html.count('aria-label="KV pool by split"') == 14


def test_first_screen_says_what_where_and_how_it_ended(full):
    cover = re.search(r'<header class="cover".*?</header>', full.html, re.S)[0]
    where = ("cpu-smollm2", "SmolLM2-135M-Instruct", "PP2 · TP1 · 15+15 layers", "0.30.0", "29 November 2026")
    assert [words for words in (*where, VERDICTS["07_verdict"]) if words not in cover] == []
    assert "Recorded box" not in cover
    card = r'<li class="card" title="([^"]*)">.*?>([^<]*)</a>.*?class="value[^"]*">(.*?)</p>.*?chip (\w+)'
    cards = re.findall(card, cover, re.S)
    plain = [(source, label, re.sub(r"<[^>]+>", "", value), chip) for source, label, value, chip in cards]
    assert plain == [
        ("memory.pool_tokens: rank 0 binds", "KV pool, predicted", "46\u202f592 tokens", "computed"),
        ("partition.best over 29 splits", "Best split", "15+15 layers", "computed"),
        ("launch to the first answer of /health", "Start to ready", "21.38 s", "measured"),
        ("boot log: GPU KV cache size", "KV pool, boot log", "46\u202f592 tokens", "measured"),
        ("512-token prompts, 5 repeats", "Prefill", "1\u202f834 tok/s", "measured"),
        ("one stream, 64 tokens, 5 repeats", "Decode", "23.46 tok/s", "measured"),
    ]


def test_code_is_folded_and_outputs_are_not(full):
    section = full.section("02")
    assert section.count('<details class="code">') == 6  # the hostile cell included
    assert "Parameters of this run" in section and "Parameters: defaults" in section
    unfolded = re.sub(r"<details.*?</details>", "", section, flags=re.S)
    assert "memory.ledger" not in unfolded
    assert "<table" in unfolded and "<svg" in unfolded and "loading 100%" in unfolded and "INFO kv cache" in unfolded
    assert "loading 10%" not in section
    assert section.count('<span class="en" lang="en">Memory accounting</span>') == 1 and "<h3" in section


def test_tables_scroll_by_themselves_and_carry_evidence_chips(full):
    section = full.section("02")
    assert section.count("<table") == section.count('class="scroll"')
    assert '<td class="num short">46,592</td>' in section and "border=" not in section
    assert re.search(r'<td class="short"><span class="chip measured" title="[^"]+">measured</span></td>', section)
    assert "vertical-align: top; }" not in section  # pandas' scoped style


def test_every_figure_is_listed_with_its_source_and_bytes_are_shown_as_gib(full):
    row = re.search(r'<tr id="s02-figure-weights">.*?</tr>', full.html, re.S)[0]
    assert 'title="538\u202f060\u202f032 B">0.5011</td>' in row and ">GiB</td>" in row and "chip computed" in row
    assert "the safetensors headers&#39; byte counts" in row


def test_a_figure_that_its_own_inputs_contradict_is_flagged_in_its_card_and_its_row(tmp_path):
    figure = (46592, "tokens", "recorded", "the report", "KV pool", True, "47 104 tokens from its own blocks <b>")
    page = Page(publish.write_report(fake_run(tmp_path / "box" / "run", figures={"05_server_launch": {"pool_tokens": figure}})))
    flag = '<span class="flag"><span aria-hidden="true">⚠</span> <strong>DISAGREES:</strong> 47 104 tokens from its own blocks &lt;b&gt;</span>'
    card = re.search(r'<li class="card".*?</li>', page.html, re.S)[0]
    row = re.search(r'<tr id="s05-figure-pool-tokens">.*?</tr>', page.html, re.S)[0]
    assert flag in card and flag in row and page.html.count("<strong>DISAGREES:</strong> 47") == 2


def test_nothing_is_flagged_where_nothing_disagrees(full):
    assert full.html.count("DISAGREES") == 1  # the legend says what it means


def field_report_cells(*outputs):
    tags = {"tags": ["field-report"]}
    cells = [new_markdown_cell("## Beside the field report\n\nDo they agree?", metadata=tags)]
    return [
        *cells,
        *(new_code_cell(f"beside({n})", metadata=tags, execution_count=9, outputs=given) for n, given in enumerate(outputs)),
        new_markdown_cell("## After it"),
    ]


@pytest.mark.parametrize(("outputs", "shown"), [(([], []), False), (([],), False), ((), False), (([], [new_output("stream", text="they do")]), True)])
def test_the_question_of_a_field_report_stands_only_where_it_is_answered(tmp_path, outputs, shown):
    run = fake_run(tmp_path / "box" / "run", publish.STATIONS[:1])
    nbformat.write(notebook("01_hardware_inventory", extra=field_report_cells(*outputs)), run / "01_hardware_inventory.ipynb")
    page = Page(publish.write_report(run))
    words = ("Beside the field report", "Do they agree?", "beside(0)")
    assert [word in page.text for word in words] == [shown] * 3
    assert "After it" in page.text and ("they do" in page.text) is shown


def test_sections_have_stable_ids_and_the_contents_lead_to_them(full):
    ids = [i for i in full.ids if i.startswith("s02-h-")]
    assert ids == ["s02-h-how-it-is-worked-out", "s02-h-the-splits-side-by-side"]
    contents = re.findall(r'<ol class="stations">.*?</ol>\n<ul', full.html, re.S)
    assert len(contents) == 2 and all(one.count('<li><a href="#s02-h-how-it-is-worked-out">How it is worked out</a></li>') == 1 for one in contents)
    assert "s02-h-the-splits-side-by-side" not in contents[0]  # a heading further down


def test_a_heading_said_twice_has_two_ids():
    html = clean_html("<h2>Verdict</h2><h2>Verdict</h2><div class='output_area'><h2>Verdict</h2></div>", "s01-")
    assert re.findall(r'id="([^"]+)"', html) == ["s01-h-verdict", "s01-h-verdict-2"]
    assert html.count('<span class="zh" lang="zh-Hans">结论</span>') == 2 and "<h3>Verdict</h3>" in html


def test_every_heading_of_the_notebooks_is_translated():
    sources = [nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4) for name in publish.STATIONS]
    prose = "\n".join(cell.source for source in sources for cell in source.cells if cell.cell_type == "markdown")
    headings = {line.lstrip("# ").strip() for line in prose.splitlines() if re.match(r"#{1,6} ", line)}
    pages = "".join(file.read_text(encoding="utf-8") for file in TEMPLATES.glob("*.j2"))
    own = set(re.findall(r"'([^'{}]+)'(?= \| both)", pages))
    titles = {publish.PublishedStation(name, "passed").title for name in publish.STATIONS}
    assert len(headings) > 40 and {"Contents", "Receipts", "Compare two runs"} <= own
    assert (headings | own | titles | set(EVIDENCE) | set(EVIDENCE.values())) - set(translations()) == set()
    assert {text for text in translations().values() if not re.search(r"[\u4e00-\u9fff]", text)} == set()


def test_both_languages_are_there_and_the_style_sheet_shows_one(full):
    radios = [attributes for tag, attributes in full.tags if tag == "input"]
    assert {(r["type"], r["name"]) for r in radios} == {("radio", "language")}
    assert [(r["id"], "checked" in r) for r in radios] == [("lang-en", True), ("lang-zh", False)]
    assert '<h2 id="s02-title"><span class="en" lang="en">Memory accounting</span><span class="zh" lang="zh-Hans">内存核算</span></h2>' in full.html
    assert ".zh { display: none; }" in full.html and ":root:has(#lang-zh:checked) .en { display: none; }" in full.html
    assert '<dt><span class="chip measured"' in full.html and "本次运行在本机上读取或计时所得" in full.html


def test_receipts_are_listed_with_their_sha256(full, full_run):
    for name in publish.STATIONS:
        digest = subprocess.run(["sha256sum", full_run / f"{name}.json"], capture_output=True, text=True, check=True)
        assert digest.stdout.split()[0] in full.text
    assert all(meaning in full.text for meaning in EVIDENCE.values())


def test_a_gate_that_failed_is_shown_with_its_line_and_the_rest_as_not_run(stopped):
    line = "GateFailed: partition [20, 11] sums to 31, the model has 30 layers"
    cover = re.search(r'<header class="cover".*?</header>', stopped.html, re.S)[0]
    assert "Stopped at 03 Partition selection." in cover and line in cover
    assert "Not run:" in cover and "07 Verdict" in cover
    assert line in stopped.section("03") and "No receipt" in stopped.section("03")
    assert "This notebook did not run" in stopped.section("04")
    assert 'class="passed"' in stopped.html and 'class="failed"' in stopped.html and 'class="not-run"' in stopped.html
    assert "Execution using papermill" not in stopped.html
    assert "<script" not in stopped.html and "\x1b" not in stopped.html


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"nbformat": 4, "cells"', "02_memory_accounting.ipynb cannot be read: "),
        ("[]", "02_memory_accounting.ipynb holds no JSON object."),
        ("{}", "It ended without writing its receipt."),
    ],
)
def test_a_broken_notebook_costs_neither_the_report_nor_the_others(tmp_path, text, reason):
    run = fake_run(tmp_path / "box" / "run", publish.STATIONS[:1])
    (run / "02_memory_accounting.ipynb").write_text(text)
    page = Page(publish.write_report(run))
    assert reason in page.section("02")
    assert VERDICTS["01_hardware_inventory"] in page.section("01")


def test_a_killed_kernel_is_named_by_the_cell_it_stopped_at(tmp_path):
    run = fake_run(tmp_path / "box" / "run", publish.STATIONS[:1])
    killed = notebook("05_server_launch", extra=[new_code_cell("server.launch()")])
    nbformat.write(killed, run / "05_server_launch.ipynb")
    page = Page(publish.write_report(run))
    assert "It stopped at code cell 6 of 6 with no error" in page.section("05")
    assert "Stopped at 05 Server launch." in page.text


def test_a_receipt_of_an_earlier_attempt_does_not_pass_the_station(tmp_path):
    run = fake_run(tmp_path / "box" / "run", publish.STATIONS[:2])
    unfinished = [new_code_cell("memory.ledger()")]
    later = notebook("02_memory_accounting", extra=unfinished, start="2026-11-29T15:00:00.5+00:00")
    nbformat.write(later, run / "02_memory_accounting.ipynb")
    page = Page(publish.write_report(run))
    assert "of an earlier attempt" in page.section("02") and "KV pool, predicted" not in page.html


def test_receipts_older_than_a_station_run_again_are_flagged(tmp_path):
    run = fake_run(tmp_path / "box" / "run")
    again = receipt("03_partition_selection", 30) | {"params_hash": "b" * 64}
    (run / "03_partition_selection.json").write_text(json.dumps(again))
    page = Page(publish.write_report(run))
    assert "Older than 03, run again since" in page.section("04")
    assert "Made with other params than 01, 02." in page.section("03")
    assert 'class="note"' not in page.section("02")


def test_an_empty_folder_and_receipts_alone_still_make_a_report(tmp_path):
    empty = tmp_path / "box" / "empty"
    empty.mkdir(parents=True)
    assert "Unfinished: 01 Hardware inventory has not run." in Page(publish.write_report(empty)).text
    run = fake_run(tmp_path / "box" / "by-hand")
    for file in run.glob("*.ipynb"):
        file.unlink()
    page = Page(publish.write_report(run))
    assert VERDICTS["07_verdict"] in page.text and "No executed notebook lies in the folder" in page.section("02")
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        publish.write_report(tmp_path / "box" / "nowhere")


def test_a_recorded_box_says_so_on_its_first_screen(tmp_path):
    page = Page(publish.write_report(fake_run(tmp_path / "cmp170hx-x3" / "run", kind="recorded", box="cmp170hx-x3")))
    assert "launch, benchmark and verdict figures below are recorded, not measured here" in page.text


def test_a_verdict_that_says_no_is_the_headline(tmp_path):
    run = fake_run(tmp_path / "box" / "run")
    no = receipt("07_verdict", 6, passed=False) | {"verdict": "No: PP2 is slower and no larger."}
    (run / "07_verdict.json").write_text(json.dumps(no))
    assert '<p class="line">No: PP2 is slower and no larger.</p>' in Page(publish.write_report(run)).html


def test_pages_are_written_whole(tmp_path, monkeypatch):
    run = fake_run(tmp_path / "box" / "run", publish.STATIONS[:1])
    page = publish.write_report(run)
    before = page.read_bytes()
    assert page == run / "index.html" and page.stat().st_mode & 0o777 == 0o644

    def crash(source, target):
        raise OSError("disk gone")

    monkeypatch.setattr("os.replace", crash)
    (run / "01_hardware_inventory.json").unlink()
    with pytest.raises(OSError, match="disk gone"):
        publish.write_report(run)
    assert page.read_bytes() == before
    assert sorted(p.name for p in run.iterdir()) == ["01_hardware_inventory.ipynb", "index.html"]


def test_the_same_folder_gives_the_same_page(tmp_path):
    run = fake_run(tmp_path / "box" / "run", publish.STATIONS[:2])
    assert publish.write_report(run).read_bytes() == publish.write_report(run).read_bytes()


def test_what_comes_from_a_receipt_is_escaped(tmp_path):
    run = fake_run(tmp_path / "box" / "run", publish.STATIONS[:1])
    text = receipt("01_hardware_inventory", 0) | {"verdict": "<img src=x onerror=alert(1)> & more"}
    (run / "01_hardware_inventory.json").write_text(json.dumps(text))
    assert "&lt;img src=x onerror=alert(1)&gt; &amp; more" in Page(publish.write_report(run)).html


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (46592, "tokens", "46\u202f592"),
        (-1234567, "", "−1\u202f234\u202f567"),
        (512, "", "512"),
        (True, "", "yes"),
        (0.30241, "GiB", "0.3024"),
        (21.375, "s", "21.38"),
        (12345.67, "tok/s", "12\u202f346"),
        (0.0000321, "", "3.21\u202f×\u202f10^-5".replace("-", "−")),
        ([15, 15], "layers", "15+15"),
        ([19.35, 18.16], "GiB", "19.35, 18.16"),
        ("better", "", "better"),
        (None, "", "–"),
    ],
)
def test_values_read_well(value, unit, shown):
    assert publish.format_value(value, unit) == shown


def test_the_layout_comes_from_the_params_else_from_the_chosen_split():
    parallel = {"pipeline_parallel_size": 3, "tensor_parallel_size": 1, "layer_partition": "41, 37"}
    assert publish.layout_text({"parallel": parallel}) == "PP3 · TP1 · 41+37 layers"
    chosen = [{"unit": "layers", "value": [20, 10]}, {"unit": "layers", "value": 30}]
    best = {"pipeline_parallel_size": 2, "layer_partition": "best"}
    assert publish.layout_text({"parallel": best}, chosen) == "PP2 · 20+10 layers"
    assert publish.layout_text({"parallel": best}) == "PP2"
    assert publish.layout_text({}) == ""


def test_ink_on_a_coloured_cell_stays_dark_and_beside_it_follows_the_page():
    def text(x, y):
        return f'<text transform="translate({x},{y})" fill="#24292f">{x}</text>'

    cells = '<g><path d="M0,0h74v46h-74Z" fill="#cdb99c"/><path d="M74,0h74v46h-74Z" fill="#f3f4f6"/></g>'
    svg = clean_svg(f'<svg xmlns="http://www.w3.org/2000/svg"><g>{cells}<g>{text(37, 20)}{text(110, 20)}{text(200, 20)}</g></g></svg>', "p-")
    inks = dict(re.findall(r'<text transform="translate\((\d+),20\)" fill="([^"]+)"', svg))
    assert inks == {"37": "#1c2024", "110": "currentColor", "200": "currentColor"}


def test_an_unreadable_chart_leaves_a_line_and_a_styler_keeps_its_own_rules():
    assert clean_svg("<svg><g></svg>", "p-").startswith('<p class="note">A chart is left out')
    styled = clean_html('<style>#T_1 td { color: red }</style><table id="T_1"><tr><td>1</td></tr></table>', "s02-")
    assert "<style>#s02-T_1 td { color: red }</style>" in styled and '<table id="s02-T_1">' in styled


def test_planning_does_not_pay_for_publishing():
    heavy = ("nbconvert", "jinja2", "bs4", "torch")
    command = [sys.executable, "-c", f"import sys, fieldbook.publish; print([m for m in {heavy} if m in sys.modules])"]
    lib = Path(publish.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(lib)})
    assert done.stdout.strip() == "[]"


if __name__ == "__main__":
    reports_dir = Path(sys.argv[1])
    runs = [
        fake_run(reports_dir / "cpu-smollm2" / "2026-11-29-1310"),
        fake_run(reports_dir / "cpu-smollm2" / "2026-11-28-0900", publish.STATIONS[:3], fail="03_partition_selection", day=28),
        fake_run(reports_dir / "cmp170hx-x3" / "recorded", box="cmp170hx-x3", kind="recorded", split=[12, 18], day=20),
    ]
    print(*(publish.write_report(run) for run in runs), site.write_index(reports_dir), sep="\n")
