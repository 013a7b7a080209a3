"""The index: runs by family of box, the best figures of each model, two runs side by side."""

import json
import re
import shutil

import pytest
from test_publish import VERDICTS, Page, fake_run, references

from fieldbook import publish, site

STATIONS = publish.STATIONS
A100 = [("NVIDIA A100-SXM4-80GB", "Ampere")] * 8


def speeds(prefill, decode, pool, evidence="measured", disagrees=""):
    return {
        "02_memory_accounting": {"pool_tokens": (9999999, "tokens", "computed", "memory.pool", "KV pool, predicted", True)},
        "05_server_launch": {"pool_tokens": (pool, "tokens", evidence, "boot log", "KV pool, boot log", True, disagrees)},
        "06_benchmarks": {
            "decode_c4_tok_s": (decode, "tok/s", evidence, "median of 6", "decode, 4 streams", True),
            "prefill_512_tok_s": (prefill, "tok/s", evidence, "median of 6", "prefill, 512 tokens", True),
            "prefill_512_tok_s_ratio": (99.0, "x", evidence, "ratio", "prefill, 512 tokens against PP1: faster", False),
        },
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Five runs on four boxes: three that passed, one that stopped although it was the fastest, and one without an inventory."""
    folder = tmp_path_factory.mktemp("site") / "reports"
    for run in (
        fake_run(folder / "cpu-smollm2" / "a-old", day=20, figures=speeds(400.0, 80.0, 46592)),
        fake_run(folder / "cpu-smollm2" / "b-new", day=28, figures=speeds(350.0, 90.0, 46592, disagrees="46 608 tokens")),
        fake_run(folder / "a100-x8" / "recorded", day=10, box="a100-x8", kind="recorded", gpus=A100, figures=speeds(9000.0, 60.0, 900000, "recorded")),
        fake_run(folder / "a100-x8" / "stopped", STATIONS[:6], fail="06_benchmarks", day=29, box="a100-x8", gpus=A100, figures=speeds(1e6, 1e6, 10**9)),
        fake_run(folder / "elsewhere" / "torn", day=1, box="elsewhere", figures=speeds(1.0, 1.0, 1)),
    ):
        publish.write_report(run)
    (folder / "elsewhere" / "torn" / "01_hardware_inventory.json").unlink()
    (folder / "cpu-smollm2" / "not-a-run").mkdir()
    return folder


@pytest.fixture(scope="module")
def index(reports):
    return Page(site.write_index(reports))


def plain(html):
    """The words of a piece of HTML, one space between any two; the thin spaces within numbers stay."""
    return re.sub(r"[ \n]+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def part(page, start, end="</section>"):
    return page.html[page.html.index(start) :].partition(end)[0]


def test_runs_are_grouped_by_family_and_box_newest_first(index):
    heads = re.findall(r"<(h[234])[^>]*>(?:<a [^>]*>)?(?:<span [^>]*>)?([^<]+)", index.html.partition('id="best"')[0])
    assert heads == [
        ("h2", "Contents"),
        ("h2", "Ampere: 8 x A100"), ("h3", "a100-x8"), ("h4", "stopped"), ("h4", "recorded"),
        ("h2", "CPU"), ("h3", "cpu-smollm2"), ("h4", "b-new"), ("h4", "a-old"),
        ("h2", "unknown"), ("h3", "elsewhere"), ("h4", "torn"),
    ]  # fmt: skip
    assert "5 runs on 4 boxes" not in index.text and "5 runs on 3 boxes, by family, newest first." in index.text
    assert "Stopped at 06 Benchmarks." in index.text and VERDICTS["07_verdict"] in index.text
    assert "<script" not in index.html and len(index.ids) == len(set(index.ids))


def test_every_link_of_the_index_arrives(index, reports):
    links = references(index)
    assert {r for r in links if r.startswith("#") and r[1:] not in index.ids} == set()
    files = {r.partition("#")[0] for r in links if not r.startswith("#")}
    assert files == {f"{run}/index.html" for run in ("a100-x8/recorded", "a100-x8/stopped", "cpu-smollm2/a-old", "cpu-smollm2/b-new", "elsewhere/torn")}
    for link in (r for r in links if "index.html#" in r):
        file, _, anchor = link.partition("#")
        assert f'id="{anchor}"' in (reports / file).read_text(encoding="utf-8")
    contents = part(index, '<nav class="contents"', "</nav>")
    assert re.findall(r'href="(#[^"]+)"', contents) == ["#family-1", "#box-1", "#family-2", "#box-2", "#family-3", "#box-3", "#best", "#compare", "#evidence"]


def test_the_best_figures_come_from_sound_runs_and_say_where(index):
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", part(index, 'id="best"'), re.S)
    assert [plain(row) for row in rows] == [
        "KV pool, boot log 900\u202f000 tokens recorded a100-x8 PP2 · TP1 recorded",
        "prefill, 512 tokens 9\u202f000 tok/s recorded a100-x8 PP2 · TP1 recorded",
        "decode, 4 streams 90 tok/s measured cpu-smollm2 PP2 · TP1 b-new",
    ]
    assert 'href="cpu-smollm2/b-new/index.html#s06-figure-decode-c4-tok-s"' in rows[2]


def test_signs_of_unsound_answers_take_a_run_out_of_the_best(reports, tmp_path):
    reports = shutil.copytree(reports, tmp_path / "reports")
    file = reports / "cpu-smollm2" / "b-new" / "06_benchmarks.json"
    receipt = json.loads(file.read_text()) | {"data": {"signs": ["answers are longer than the baseline's"]}}
    file.write_text(json.dumps(receipt))
    index = Page(site.write_index(reports))
    best = part(index, 'id="best"')
    assert "b-new" not in best and '<td class="num">80</td>' in best


def test_a_best_figure_that_disagrees_with_its_inputs_says_so(tmp_path):
    folder = tmp_path / "reports"
    fake_run(folder / "box" / "run", figures=speeds(1.0, 2.0, 46592, disagrees="46 608 tokens"))
    index = Page(site.write_index(folder))
    assert "DISAGREES:</strong> 46 608 tokens" in part(index, 'id="best"') and index.html.count("46 608 tokens") == 2  # and the headline


def test_the_comparison_offers_each_run_twice_and_chooses_the_two_newest(index):
    radios = [a for tag, a in index.tags if tag == "input" and a["name"] in ("left", "right")]
    assert len(radios) == 10 and [a["id"] for a in radios if "checked" in a] == ["left-0", "right-1"]
    names = [re.sub(r"<[^>]+>", "", text) for text in re.findall(r'id="left-\d+"[^>]*> <span>(<b>.*?)(?: <span|</span>)', index.html)]
    assert names == ["a100-x8 stopped", "cpu-smollm2 b-new", "cpu-smollm2 a-old", "a100-x8 recorded", "elsewhere torn"]
    assert ":root:has(#left-4:checked) .l4, :root:has(#right-4:checked) .r4 { display: block; }" in index.html
    assert "@supports not selector(:has(a))" in index.html


def cell(index, label, side, place):
    row = next(row for row in re.findall(r'<tr class="of.*?</tr>', index.html, re.S) if f'<th scope="row">{label}</th>' in row)
    return plain(re.search(rf'<span class="{side} {side}{place}">(.*?)</span>(?=<span class="{side} |</td>)', row, re.S)[1])


def test_the_comparison_aligns_the_figures_of_all_runs(index):
    assert cell(index, "decode, 4 streams", "l", 1) == "cpu-smollm2 b-new: 90 tok/s measured"
    assert cell(index, "decode, 4 streams", "r", 3) == "a100-x8 recorded: 60 tok/s recorded"
    assert cell(index, "decode, 4 streams", "l", 0) == "a100-x8 stopped: –"
    assert cell(index, "KV pool, boot log", "l", 1) == "cpu-smollm2 b-new: 46\u202f592 tokens measured ⚠ DISAGREES: 46 608 tokens"
    row = next(row for row in re.findall(r'<tr class="of.*?</tr>', index.html, re.S) if "decode, 4 streams" in row)
    assert 'class="of has1 has2 has3 has4"' in row
    ratios = re.search(r'<td class="num ratio">(.*?)</td>', row, re.S)[1]
    assert '<span class="l l1"><span class="r r2">x1.125</span><span class="r r3">x1.5</span><span class="r r4">x90</span></span>' in ratios
    for title, told in (("Family of box", "Ampere: 8 x A100"), ("Layout", "PP2 · TP1"), ("vLLM", "0.30.0"), ("Verdict", VERDICTS["07_verdict"])):
        row = re.search(rf'<tr><th scope="row">(?:<span[^>]*>)?{title}.*?</tr>', index.html, re.S)[0]
        assert told in row


def test_one_run_is_compared_with_none_and_none_at_all_says_how_to_make_one(tmp_path):
    empty = Page(site.write_index(tmp_path))
    assert "No run has left a receipt yet" in empty.text and "Compare two runs" not in empty.text
    fake_run(tmp_path / "box" / "run")
    one = Page(site.write_index(tmp_path))
    assert "There is one run so far" in one.text and 'name="left"' not in one.html
    with pytest.raises(FileNotFoundError, match="no such reports folder"):
        site.write_index(tmp_path / "nowhere")


def test_more_runs_than_ratios_leave_them_out_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "RUNS_WITH_RATIOS", 2)
    monkeypatch.setattr(site, "COMPARED_RUNS", 3)
    for name in "abcd":
        fake_run(tmp_path / "box" / name, STATIONS[:2])
    page = Page(site.write_index(tmp_path))
    assert "the ratios are left out" in page.text and "only the newest 3 are offered" in page.text
    assert page.html.count('name="left"') == 3 and "x1<" not in page.html


@pytest.mark.parametrize(
    ("gpus", "family"),
    [
        ([], "CPU"),
        ([("NVIDIA A100-SXM4-80GB", "Ampere")] * 8, "Ampere: 8 x A100"),
        ([("A100", None)], "1 x A100"),
        ([("NVIDIA H200", "Hopper"), ("NVIDIA H200 NVL", "Hopper")], "Hopper: 2 x H200"),
        ([("NVIDIA CMP 170HX", "Ampere")] * 2 + [("NVIDIA GeForce RTX 3090", "Ampere")], "Ampere: 2 x CMP 170HX + 1 x GeForce RTX 3090"),
        ([("Tesla V100-PCIE-32GB", "Volta"), ("NVIDIA H100 80GB HBM3", "Hopper")], "Hopper: 1 x H100 + Volta: 1 x Tesla V100"),
        ([(None, None)] * 2, "2 x GPU"),
    ],
)
def test_family_of_a_box(tmp_path, gpus, family):
    run = publish.read_run(fake_run(tmp_path / "box" / "run", STATIONS[:1], gpus=gpus))
    assert site.family(run) == family


def test_a_label_that_ends_in_what_was_found_is_cut_where_runs_differ():
    assert site.common_label("k", ["decode against PP1: slower", "decode against PP1: faster"]) == "decode against PP1"
    assert site.common_label("k", ["decode: slower"] * 2) == "decode: slower"
    assert site.common_label("k", ["decode", "prefill"]) == "k"


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ((3, "x"), (2, "x"), "x1.5"),
        ((3, "s"), (2, "x"), ""),
        ((0, "x"), (2, "x"), ""),
        ((2, "x"), (0, "x"), ""),
        ((True, "x"), (2, "x"), ""),
        (("a", "x"), (2, "x"), ""),
        (([1], "x"), ([2], "x"), ""),
        ((float("nan"), "x"), (2, "x"), ""),
    ],
)
def test_ratio_of_two_figures(left, right, text):
    assert site.ratio(*({"value": value, "unit": unit} for value, unit in (left, right))) == text


def test_ratio_of_a_missing_figure_is_none():
    assert site.ratio(None, {"value": 1, "unit": "s"}) == ""
