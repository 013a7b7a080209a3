"""Pipeline against tensor parallelism over a measured link: the model's arithmetic by hand, and what two CPU ranks did as their link slowed."""

import json
import statistics

import pytest
from conftest import ROOT, guide

from fieldbook import files, overlinks, paths, strategy
from fieldbook.errors import BadInput

BOX = "cpu-two-ranks"
PIECE, PROMPTS, STREAMS, LAYERS, WIDTH = 512, 4, 8, 12, 768


def way(hop_gb_s, hop_us, all_reduce_gb_s, all_reduce_us):
    told = {"hop_gb_s": hop_gb_s, "hop_us": hop_us, "all_reduce_gb_s": all_reduce_gb_s, "all_reduce_us": all_reduce_us}
    return {key: {"median": value, "samples": [value]} for key, value in told.items()}


def arm(tensor, pipeline, link, prefill_s, prompts_s, step_s):
    engine = {
        "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": PIECE, "enforce_eager": True, "enable_prefix_caching": False,
    }  # fmt: skip
    times = {"streams": STREAMS, "prefill_tokens": PIECE, "prompts": PROMPTS, "prefill_s": prefill_s, "prompts_s": prompts_s, "step_s": step_s}
    return {"model": "dense-12-layers", "tensor": tensor, "pipeline": pipeline, "split": [], "engine": engine, "link": link, "times": times}


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A box of which the test says what was measured."""
    monkeypatch.setattr(paths, "box_data_dir", lambda box: tmp_path / box)
    files.read_of_box.cache_clear()

    def write(ways, arms):
        (tmp_path / "box").mkdir(exist_ok=True)
        document = {"machine": "m", "vllm": "0.30.0", "measured_at": "2026-11-30", "ways": ways, "arms": arms}
        (tmp_path / "box" / overlinks.FILE).write_text(json.dumps(document))
        return "box"

    yield write
    files.read_of_box.cache_clear()


def test_rows_by_hand(made_up):
    box = made_up(
        {"slow": way(0.2, 100, 0.1, 1000)},
        {
            "one": arm(1, 1, "slow", [0.8], [3.2], [0.03]),
            "pp": arm(1, 2, "slow", [0.9, 0.8, 1.0], [2.1], [0.04]),
            "tp": arm(2, 1, "slow", [1.0], [4.0], [0.05]),
        },
    )
    found = {(row.strategy, row.what.split()[0]): row for row in overlinks.rows(box)}
    # A boundary carries hidden states and residuals of float32; two all-reduces a layer carry the hidden states.
    hop_s, reduce_s = PIECE * 2 * WIDTH * 4 / 0.2e9 + 100e-6, PIECE * WIDTH * 4 / 0.1e9 + 1000e-6
    lone = found["PP2", "one"]
    assert lone.alone_s == pytest.approx(0.8, rel=1e-3) and lone.floor_s == pytest.approx(hop_s)
    assert (lone.measured_s, lone.low_s, lone.high_s) == (0.9, 0.8, 1.0) and lone.ratio == pytest.approx(0.9 / (0.8 + hop_s), rel=1e-3)
    # Four prompts of a step each pass two stages of 0.4 s in five turns; one of the hops is not hidden behind a stage.
    assert found["PP2", "4"].predicted_s == pytest.approx(5 * 0.4 + hop_s, rel=1e-3)
    assert found["TP2", "one"].alone_s == pytest.approx(0.4, rel=2e-3) and found["TP2", "one"].floor_s == pytest.approx(2 * LAYERS * reduce_s)
    assert found["TP2", "4"].predicted_s == pytest.approx(4 * found["TP2", "one"].predicted_s)
    # Eight streams decode in two batches of four, at the pace of the heavier stage: six layers and lm_head, which is as large as a layer here.
    assert found["PP2", "decode"].alone_s == pytest.approx(0.03 * 2 * 7 / 13, rel=1e-3)
    assert found["TP2", "decode"].floor_s == pytest.approx(2 * LAYERS * (STREAMS * WIDTH * 4 / 0.1e9 + 1000e-6))


def test_an_order_can_be_wrong_and_a_tie_has_none(made_up):
    def pair(pp, tp, link):
        arms = {"one": arm(1, 1, "x", [0.8], [3.2], [0.03]), "pp": arm(1, 2, "x", pp, [2.1], [0.04]), "tp": arm(2, 1, "x", tp, [4.0], [0.05])}
        files.read_of_box.cache_clear()
        return next(one for one in overlinks.orders(made_up({"x": link}, arms)) if one.what.startswith("one prompt"))

    # 24 all-reduces of 4.0 ms, 1.3 times that to be expected, beside 0.4 s; one rank after the other 0.82 s with the hop.
    fast = way(0.2, 100, 0.4, 100)
    assert pair([0.9], [0.85], fast).pair == ("PP2", "TP2") and pair([0.9], [0.85], fast).expected == pytest.approx(0.526 / 0.8206, rel=0.01)
    assert [pair([0.9], [0.85], fast).right, pair([0.9], [0.95], fast).right, pair([0.9, 0.84], [0.85, 0.86], fast).right] == [True, False, None]
    # 24 of 14.1 ms make 0.84 s: two layouts that close are no order that could be wrong.
    assert pair([0.9], [0.95], way(0.2, 100, 0.12, 1000)).right is None


def test_two_cpu_ranks_as_their_link_slows():
    """What vLLM 0.30.0 did: the model has every order right, and PP2 overtakes TP2 where the first report says it would, on a link that is slow enough."""
    told = overlinks.orders(BOX)
    assert len(told) == 24 and [one for one in told if one.right is False] == [] and sum(one.right is True for one in told) >= 20
    lone = {(one.model, one.link): one.measured for one in told if one.what.startswith("one prompt")}
    for model in ("dense-12-layers", "moe-12-layers"):
        assert [lone[model, link] < 1 for link in ("open", "4gbit", "1gbit", "200mbit")] == [True, True, False, False]
    pipelines = [arm["as_one_rank"] for arm in overlinks.read(BOX)["arms"].values() if arm["pipeline"] == 2]
    assert len(pipelines) == 8 and set(pipelines) == {"16 of 16 tokens, log-probabilities identical"}


def test_nothing_beats_its_floor_and_what_links_take_above_it_is_the_constant():
    found = overlinks.rows(BOX)
    assert len(found) == 48 and all(row.ratio > 0.99 for row in found)
    above = {(row.model, row.link, row.what): (row.measured_s - row.alone_s) / row.floor_s for row in found if row.strategy == "TP2"}
    assert statistics.median(above.values()) == pytest.approx(strategy.MEASURED_ABOVE_FLOOR, rel=0.05)
    # The slower the link, the nearer it comes to its floor.
    assert all(share < 1.1 for (_, link, what), share in above.items() if link == "200mbit" and "prompt" in what)
    assert max(above.values()) == pytest.approx(4.4, rel=0.02)


def shown_ms(seconds):
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def test_the_guide_says_what_the_file_says():
    text = guide("links")
    cases = {}
    for row in overlinks.rows(BOX):
        cases.setdefault((row.model, row.what, row.link), {})[row.strategy] = row
    for one in overlinks.orders(BOX):
        cells = [one.what, one.link]
        for name in one.pair:
            row = cases[one.model, one.what, one.link][name]
            cells += [shown_ms(row.floor_s), shown_ms(row.predicted_s), shown_ms(row.measured_s), f"{row.ratio:.2f}"]
        line = f"| {' | '.join([*cells, f'{one.expected:.2f}', f'{one.measured:.2f}'])} |"
        assert line in text, line
    for link, told in overlinks.read(BOX)["ways"].items():
        hop, hop_us, group, group_us = (told[key]["median"] for key in ("hop_gb_s", "hop_us", "all_reduce_gb_s", "all_reduce_us"))
        assert f"| {link} | {hop:.3f} | {hop_us:.0f} | {group:.4f} | {group_us:,.0f} |" in text
    assert f"{sum(one.right is True for one in overlinks.orders(BOX))} cases of 24" in text


def test_ranks_on_one_card_have_one_link_whatever_nccl_is_told():
    """Turns of 2 ms: three settings, one rate; and a TP2 decode step is 65 all-reduces (two a layer, one behind the embedding), nothing else."""
    found = json.loads((ROOT / "data" / "boxes" / "h200-x1" / "one-card.json").read_text())
    text = guide("hardware")
    for key, shown in (("hop_gb_s", "1.91 GB/s"), ("hop_us", "2.26 ms"), ("all_reduce_us", "4.51 ms")):
        medians = [way[key]["median"] for way in found["ways"].values()]
        assert max(medians) < 1.01 * min(medians) and shown in text
    each_ms = found["ways"]["peer"]["all_reduce_us"]["median"] / 1e3
    for name in ("dense-tp2-peer", "dense-tp2-host", "dense-tp2-sockets"):
        assert 1e3 * statistics.median(found["arms"][name]["times"]["step_s"]) == pytest.approx(65 * each_ms, rel=0.015)
    assert f"65 of these, {65 * each_ms:.1f} ms" in text and "295.9 ms" in text


def test_a_damaged_file_is_one_line(made_up, tmp_path):
    box = made_up({}, {})
    assert overlinks.rows(box) == [] == overlinks.orders(box)
    (tmp_path / "box" / overlinks.FILE).write_text("[]")
    files.read_of_box.cache_clear()
    with pytest.raises(BadInput, match="data/boxes/box/links.json: cannot be read"):
        overlinks.rows(box)
