"""The two published field reports: every figure there with its label, recomputed where it can be, three of them flagged, and the wrong turns caught."""

import csv
import re

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT

from fieldbook import causal, gates, inventory, kv, memory, params, patches, reported, show
from fieldbook.errors import BadInput
from fieldbook.reported import arms as reported_arms
from fieldbook.reported import figures, recompute, story, wrong_turns

GIB = 2**30
BOXES = ("cmp170hx-x3", "a100-x8-glm53")
# The report's figure, what comes out, and how far apart: these three and no others.
FLAGGED = {"cmp-ratio-kv": (4.52, 3.897), "glm-3939-closure": (0.2, 0.578), "glm-degen-p": (7.4e-9, 1.8e-8)}


def source(box):
    loaded = params.load(ROOT / "params" / f"{box}.yml")
    return recompute.source_of(reported.read(box), loaded, inventory.read(loaded))


@pytest.fixture(scope="module")
def checked():
    return {one.reported.id: one for box in BOXES for one in recompute.checked(source(box))}


def test_three_figures_disagree_with_their_own_inputs(checked):
    assert {name: (one.reported.value, one.shown) for name, one in checked.items() if one.agrees is False} == FLAGGED
    assert checked["cmp-ratio-kv"].flag == "recomputed 3.897 x: 904,109 / 232,000"
    assert all(one.flag == "" for name, one in checked.items() if name not in FLAGGED)


def test_what_is_recomputed(checked):
    # 22% more pool, of which the report's rule explained 17: from other formulas than the ones that are tested.
    assert checked["glm-pool-4137/gain"].value == pytest.approx(22.0, abs=0.01)
    assert checked["glm-3939-r1/total"].value == pytest.approx(76.78) and checked["glm-4137-smi/after"].value == 2479
    assert checked["cmp-kv262k-pp"].value == 935_216 and checked["cmp-dep-trips"].value == 48 and checked["cmp-pp-hops"].value == 2
    assert checked["glm-pred-4038"].value == pytest.approx(597_760 * 16.86 / 15.56)
    # Nothing that is measured is made up from itself.
    assert {name for name, one in checked.items() if one.value is None} >= {"cmp-kv200k-dep", "cmp-host-free", "glm-degen-pp4", "glm-allreduce/us"}


def test_both_pools_of_the_first_report_need_three_drafts_and_a_float32_state():
    """660 blocks: 904,109 tokens with requests of up to 200,000, 935,216 with 262,144. No other depth or type gives both, whatever the space."""
    spec, found = memory.model_spec("qwen3.8-flash-next"), []
    for dtype in ("bfloat16", "float32"):
        for drafts in range(6):
            for mode in ("align", "none"):

                def pool(space, length, made=(dtype, drafts, mode)):
                    said = {"state_dtype": made[0], "draft_tokens": made[1], "state_mode": made[2]}
                    return kv.pool(spec, [16, 16, 16], [space] * 3, max_model_len=length, must_fit=False, **said)

                try:
                    pool(20 * GIB, 200_000)
                except BadInput as refused:
                    # A ring of draft states that the block is no multiple of: vLLM would not start with it.
                    assert "ring capacity" in str(refused)
                    continue
                low, high = 5 * GIB, 20 * GIB
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (low, middle) if pool(middle, 200_000).pool_tokens >= 904_109 else (middle, high)
                if (pool(high, 200_000).pool_tokens, pool(high, 262_144).pool_tokens) == (904_109, 935_216):
                    found.append((dtype, drafts, mode, pool(high, 200_000).blocks, round(high / GIB, 2)))
    assert found == [("float32", 3, "align", 660, 10.39)]
    assert "**935,216 tokens**" in story.pool(source("cmp170hx-x3"))


def test_labels():
    of = {name: one.evidence for box in BOXES for name, one in reported.read(box).figures.items()}
    assert of["cmp-gpus"] == "stated" and of["cmp-prefill32k-pp"] == "recorded" and of["glm-clean-4236"] == "computed" and of["glm-pred-4038"] == "recorded"
    assert set(of.values()) == {"stated", "recorded", "computed"}


def test_wrong_turns_are_caught(monkeypatch):
    for box, turns in (("cmp170hx-x3", 3), ("a100-x8-glm53", 3)):
        rows = wrong_turns.rows(source(box))
        assert len(rows) == turns and all(row[""] == "caught" and row["asked with it, it says"] for row in rows)
    # A check that lets its wrong turn through is told, not painted over.
    monkeypatch.setitem(gates.GATES, "state dtype", lambda launch: None)
    assert [row[""] for row in wrong_turns.rows(source("cmp170hx-x3"))] == ["caught", "NOT CAUGHT", "caught"]


def test_the_stories_numbers():
    told = story.pool(source("a100-x8-glm53"))
    assert all(number in told for number in ("697,600", "27,956", "26,380", "739,136", "28,480", "**729,472 tokens**", "729,280"))
    told = story.resident(source("a100-x8-glm53"))
    assert "**5.55**" in told and "so **5 are resident**" in told and story.resident(source("cmp170hx-x3")) == ""
    rows = {row["workload"]: row for row in story.choices(source("a100-x8-glm53"))}
    assert rows["1M context"]["stock vLLM is refused by"] == "boundary sums, unverified stages, known defects"
    assert rows["one stream"]["stock vLLM is refused by"] is None and rows["one stream"]["KV pool"] == 386_943
    # From the cards alone: within the error that is told of such an estimate.
    assert rows["default"]["pool here, estimated"] == pytest.approx(729_280, rel=0.025)


def test_fates_of_the_first_reports_eight_defects():
    rows = patches.fates("000")
    assert {row["number"] for row in rows} == set(range(1, 9))
    by_number = {row["number"]: row for row in rows}
    assert by_number[8]["0.29"] == "present" and by_number[8]["0.30"] == "fixed" and by_number[1]["0.33"] == "does not apply"
    assert {row["defect"] for row in patches.fates("001")} == {"index-guard", "index-flip", "index-relay"}


def test_states_of_a_stock_release():
    loaded = params.load(ROOT / "params" / "cmp170hx-x3.yml")
    rows = {row["id"]: row for row in patches.stock_rows(loaded)}
    assert set(rows) == {*patches.CATALOGUE, *patches.OBSERVED} and rows["ple-containment"]["met_by_this_box"] and rows["ple-containment"]["state"] == "present"
    with pytest.raises(BadInput, match=r"engine.vllm_release: got 0.12; the known defects were looked for in 0.29, 0.30"):
        patches.stock_rows(loaded.model_copy(update={"engine": loaded.engine.model_copy(update={"vllm_release": "0.12"})}))


def test_what_stands_for_the_runs():
    report = reported.read("a100-x8-glm53")
    log = reported_arms.boot_log(report, "candidate")
    assert (log.pool_tokens, log.available_kv_gib, log.vllm_version) == (729_280, {0: 19.35, 1: 18.16}, "0.30")
    assert reported_arms.speed(report, "candidate", "decode_c16_tok_s") == (
        297,
        "field report 001, glm-choice-default/conc16-low, lowest of 297 and 310",
    )
    assert reported_arms.speed(report, "candidate", "prefill_32768_tok_s") is None
    assert reported_arms.told(report, "candidate")["counts"] == {"degeneration/report": [0, 200]}
    assert reported.read("cpu-smollm2-replay") is None and reported.read("no-such-box") is None


HEADER = ",".join(figures.COLUMNS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,value\na,1\n", "its first line is"),
        (f"{HEADER}\na,1,x,y,3,GPUs,guessed,0,\n", "line 2: kind is 'guessed', expected one of stated, measured"),
        (f"{HEADER}\na,one,x,y,3,GPUs,stated,0,\n", "line 2: station is a notebook's number"),
        (f"{HEADER}\na,1,x,y,3,GPUs,stated,0\n", "line 2: 9 columns are expected"),
        (f"{HEADER}\na,1,x,y,3,GPUs,stated,0,\na,1,x,y,4,GPUs,stated,0,\n", "line 3: a stands there twice"),
    ],
)
def test_a_damaged_table_gets_one_line(tmp_path, text, said):
    (tmp_path / "figures.csv").write_text(text)
    with pytest.raises(BadInput, match=re.escape(said)) as caught:
        figures._figures(tmp_path / "figures.csv")
    assert "\n" not in str(caught.value)


# --- against the table of all published figures, where it lies beside the checkout


def test_every_published_figure_is_there():
    place = ROOT.parent / "shared" / "golden" / "report_figures.csv"
    if not place.is_file():
        pytest.skip("golden/report_figures.csv is not beside this checkout")
    ours = {name: one for box in BOXES for name, one in reported.read(box).figures.items()}
    with place.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        mine = [one for name, one in ours.items() if name.partition("/")[0] == row["id"]]
        assert mine, row["id"]
        said = " ".join(f"{one.value} {one.what} {one.of} {one.note}" for one in mine)
        if row["id"] in ours and isinstance(ours[row["id"]].value, int | float) and re.fullmatch(r"[\d.e-]+", row["value"]):
            # The value itself, to the digit, where it is one value.
            assert ours[row["id"]].value == float(row["value"]), row["id"]
            continue
        for number in re.findall(r"\d+(?:\.\d+)?", row["value"].replace("x", " ")):
            assert re.search(rf"(?<![\d.]){re.escape(number.rstrip('0').rstrip('.') if '.' in number else number)}0*(?![\d])", said), (row["id"], number)
    assert len(rows) > 70


# --- what the walks show: the golden notebooks, which nbval holds against new ones


def rows_of(box, station):
    """Rows of the table that notebook `station` shows of the report, as its cells read."""
    (file,) = (ROOT / "tests" / "golden" / box).glob(f"{station:02d}_*.ipynb")
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "code" and "field_report.of_station(st)" in cell.source:
            soup = BeautifulSoup(cell.outputs[0]["data"]["text/html"], "html.parser")
            titles = [th.get_text() for th in soup.select("thead th")]
            caption = soup.caption.get_text()
            return [dict(zip(titles, [td.get_text() for td in tr.select("td")], strict=True)) for tr in soup.select("tbody tr")], caption
    raise AssertionError(f"{file.name} shows no figure of its report")


@pytest.mark.parametrize("box", BOXES)
def test_every_figure_stands_in_its_notebook_with_its_label(box):
    flagged = []
    for station in (1, 2, 3, 5, 6, 7):
        rows, caption = rows_of(box, station)
        figures_here = reported.read(box).at(station)
        assert [(row["figure"], row["of"]) for row in rows] == [(one.what, one.of) for one in figures_here]
        for row, one in zip(rows, figures_here, strict=True):
            assert (row["reported"], row["unit"], row["label"]) == (show.cell(one.value), one.unit, one.evidence)
            flagged += [one.id] if row[""] == "DISAGREES" else []
            assert one.id in caption if row[""] == "DISAGREES" else one.id not in caption.partition("DISAGREES")[2].split(", ")
    assert set(flagged) == {name for name in FLAGGED if name in reported.read(box).figures}


def test_the_model_puts_both_reports_arms_in_the_order_that_was_measured():
    """Links at three times their floor: expert parallelism's prefill comes out within 5%, and no order is wrong."""
    found = {}
    for box in BOXES:
        s = source(box)
        layers = {"candidate": (16, 16, 16) if box.startswith("cmp") else (41, 37), "baseline": (s.spec.num_hidden_layers,)}
        arms = {"candidate": s.params.parallel, "baseline": s.params.verdict.baseline}
        predicted = {arm: causal.predict(s.params, one, layers[arm], s.box, None, {}, alone=False) for arm, one in arms.items()}
        metrics = [*params.metric_names(s.params)]
        speeds = {arm: {m: (reported_arms.speed(s.report, arm, m) or (None,))[0] for m in metrics} for arm in arms}
        found |= {(box, row["metric"]): row["order"] for row in causal.order(predicted, speeds, {})}
        if box.startswith("cmp"):
            assert predicted["baseline"]["prefill_32768_tok_s"].expected_tok_s == pytest.approx(1950, rel=0.05)
    assert found == {
        ("cmp170hx-x3", "prefill_8192_tok_s"): "right",
        ("cmp170hx-x3", "prefill_32768_tok_s"): "right",
        ("cmp170hx-x3", "decode_c1_tok_s"): "right",
        ("cmp170hx-x3", "decode_c8_tok_s"): "right",
        ("a100-x8-glm53", "decode_c1_tok_s"): "a tie expected",
        # 5% expected, 21% found: the right way round, but less than what decides a choice.
        ("a100-x8-glm53", "decode_c16_tok_s"): "a tie expected",
    }
    said = {"candidate": {"m": causal.Predicted(1, 9, "links", 5.0)}, "baseline": {"m": causal.Predicted(1, 9, "links", 10.0)}}
    assert [causal.order(said, {"candidate": {"m": 3.0}, "baseline": {"m": 2.0}}, told)[0]["order"] for told in ({}, {"m": "same"})] == [
        "WRONG",
        "nothing measured to order",
    ]
