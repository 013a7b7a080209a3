"""Proving the mends of a box: stock against mended on a made-up package, with what the servers would have said."""

import types

import pytest
from test_patches import ID, content, plant

from fieldbook import live, patches, proofs, server
from fieldbook.errors import GateFailed
from fieldbook.params import Parallel
from fieldbook.patches import evidence

DIES = {"boots": True, "answers": False, "evidence": patches.CATALOGUE[ID].symptom}
ANSWERS = {"boots": True, "answers": True, "evidence": "Red, green and blue."}
TWO = Parallel(pipeline_parallel_size=2)


@pytest.fixture
def box(tmp_path, monkeypatch, changed):
    """A station on a small package, and what its servers do: box.say is asked for (name of the server, state of the tree) each time."""
    tree = plant(tmp_path)
    station = types.SimpleNamespace(live=True, report=None, params=changed())
    told = types.SimpleNamespace(tree=tree, station=station, asked=[], state="active", same=True)
    monkeypatch.setattr(proofs, "_tree", lambda given: tree)

    def request(given, name, arm, layers, after=lambda started: None):
        told.asked.append((name, patches.state_of(tree, ID)))
        row = told.say(name)
        return row, after(types.SimpleNamespace(state={"name": name})) if row["answers"] else None

    def running(state, places, ranks):
        (file, symbol), row = places[0], next(row for row in patches.status(tree) if row.id == ID)
        place = {"file": file, "symbol": symbol, "path": str(tree / file), "sha256": row.sha256, "state": told.state, "same": told.same}
        engine, runner = live.Answer(1, None, None, None, (), ()), "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
        return [engine, *(live.Answer(2 + rank, rank, rank, 0, (place,), (runner,)) for rank in range(ranks))]

    monkeypatch.setattr(proofs, "_request", request)
    monkeypatch.setattr(server, "running_code", running)
    told.say = lambda name: DIES if name.startswith("stock") else ANSWERS
    return told


def test_stock_is_asked_before_and_the_tree_is_mended_after(box):
    proof = proofs.prove(box.station, [ID], TWO, (15, 15))
    assert box.asked == [(f"stock-{ID}", "present"), ("mended", "patched")] and patches.state_of(box.tree, ID) == "patched"
    assert [(row["defect"], row["code"], row["answers"]) for row in proof.answers] == [(ID, "stock", False), (ID, "mended", True)]
    assert [(row["rank"], row["wrong"]) for row in proof.live] == [(0, ""), (1, "")]
    # Again, with the mend in from the start.
    assert proofs.prove(box.station, [ID], TWO, (15, 15)) == proof and box.asked[2:] == box.asked[:2]


def test_nothing_wanted_starts_nothing(box):
    before = content(box.tree)
    assert proofs.prove(box.station, [], TWO, (15, 15)) == proofs.Proof([], []) and box.asked == [] and content(box.tree) == before


def test_a_mend_that_no_rank_reaches_stops_the_walk(box):
    box.state = "unused"
    why = "a mend is not live: cpu-eager-pp on rank 0: the active path never reaches it: .* the model runner is vllm.v1.worker.gpu.model"
    with pytest.raises(GateFailed, match=why):
        proofs.prove(box.station, [ID], TWO, (15, 15))
    box.state, box.same = "active", False
    with pytest.raises(GateFailed, match="on rank 0: in memory is other code than in the file.*on rank 1"):
        proofs.prove(box.station, [ID], TWO, (15, 15))


def test_a_stock_server_that_dies_of_something_else_proves_nothing(box):
    box.say = lambda name: {**DIES, "evidence": "MemoryError"} if name.startswith("stock") else ANSWERS
    with pytest.raises(GateFailed, match="died of something else .MemoryError., which proves nothing"):
        proofs.prove(box.station, [ID], TWO, (15, 15))


def test_a_mended_server_that_fails_is_told(box):
    box.say = lambda name: DIES
    with pytest.raises(GateFailed, match="the mended server still fails: AssertionError in sync_and_gather"):
        proofs.prove(box.station, [ID], TWO, (15, 15))


def test_a_stock_server_that_answers_is_shown_as_it_is(box):
    box.say = lambda name: ANSWERS
    proof = proofs.prove(box.station, [ID], TWO, (15, 15))
    assert [row["answers"] for row in proof.answers] == [True, True] and evidence.problems(proof.live) == []


def test_a_defect_without_an_error_starts_no_stock_server(box, monkeypatch):
    """Wrong answers do not show in one request: the row says so, and the mend is asked for all the same."""
    silent = patches.CATALOGUE[ID].__class__(**{**vars(patches.CATALOGUE[ID]), "symptom": ""})
    monkeypatch.setitem(patches.CATALOGUE, ID, silent)
    proof = proofs.prove(box.station, [ID], TWO, (15, 15))
    assert box.asked == [("mended", "patched")]
    assert (proof.answers[0]["boots"], proof.answers[0]["answers"]) == (None, None) and "answers wrong without an error" in proof.answers[0]["evidence"]
