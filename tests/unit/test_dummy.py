"""A model without weights: its made-up tokenizer, its folder, and what is not asked of it."""

import json
import os
import random
from types import SimpleNamespace

import pytest

from fieldbook import arms, command, dummy, models, probes, served_by
from fieldbook.bench import prompts
from fieldbook.errors import BadInput
from fieldbook.gates import machine

DENSE = {"model.name": "dense-8b-shape", "model.source": "dummy"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FIELDBOOK_MODEL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    return dummy._tokenizer(128_256, 1, 2, "dense-8b-shape")


def count(tokenizer):
    return lambda text: len(tokenizer.encode(text).ids)


def test_the_vocabulary_is_as_large_as_the_models_and_every_token_has_its_own_text(tokenizer):
    assert tokenizer.get_vocab_size() == 128_256
    assert {tokenizer.id_to_token(number) for number in (0, 1, 2)} == {dummy.PAD, dummy.BEGIN, dummy.END}
    assert len({tokenizer.decode([number]) for number in range(3, 128_256)}) == 128_256 - 3
    assert {tokenizer.decode([number]) for number in range(3, 131)} == {chr(byte) for byte in range(128)}


def test_a_generated_text_holds_as_many_tokens_when_it_is_read_again(tokenizer):
    """The tokens check of the benchmarks reads the answer again: a stretch of made-up words must not melt into fewer tokens or fall apart."""
    ids = [number * 7919 % 120_000 + 5000 for number in range(256)]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_so_does_one_token_over_and_over_whichever_it_is():
    """A model of made-up weights likes to repeat itself. In a vocabulary of 8,192 a tenth of all tokens once fell apart: words without a space before them
    into letters ("wordword" is no word), bytes beyond ASCII into the three of a replacement character."""
    small = dummy._tokenizer(8192, 1, 2, "dense-12-layers")
    for number in range(3, 8192):
        text = small.decode([number] * 64)
        # One more where the first letter gets a space before it.
        assert len(small.encode(text).ids) in (64, 65), (number, text[:20])
    # Nor do letters cling to the word before them: two tokens in turn, and any in any order.
    draw = random.Random(0)
    for length in [2] * 2000 + [16] * 2000:
        cycle = [draw.randrange(3, 8192) for _ in range(length - 1)] + [draw.randrange(3, 131)]
        text = small.decode(cycle * (64 // length))
        assert len(small.encode(text).ids) in (64, 65), (cycle, text[:40])


def test_the_loads_prompts_come_out_exactly_with_one_question_to_the_server(tokenizer):
    asked = []

    def counted(text):
        asked.append(text)
        return count(tokenizer)(text)

    for tokens in (1, 16, 512, 8192):
        asked.clear()
        text = prompts.exact(counted, tokens, f"seed/{tokens}")
        assert count(tokenizer)(text) == tokens and len(asked) == 1


def test_any_ascii_can_be_said_and_the_rest_is_padding(tokenizer):
    for text in ("What is your name?", "def f(x):\n\treturn x", "".join(map(chr, range(1, 128)))):
        assert tokenizer.decode(tokenizer.encode(text).ids).removeprefix(" ") == text.removeprefix(" ")
    assert tokenizer.encode("").ids == []
    assert tokenizer.encode("ß").ids[1:] == [0] and tokenizer.decode(tokenizer.encode("heißt").ids) == " heit"


def test_a_folder_with_the_config_that_was_planned_with(changed, cache):
    folder = models.ensure(changed(DENSE))
    assert folder == cache / "dense-8b-shape" and models.is_complete(folder) and models.verify(folder) == []
    planned = models.paths.model_config_dir("dense-8b-shape") / "config.json"
    assert (folder / "config.json").read_bytes() == planned.read_bytes() and not list(folder.glob("*.safetensors"))
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    before = os.stat(folder / "tokenizer.json").st_mtime_ns
    assert models.ensure(changed(DENSE)) == folder and os.stat(folder / "tokenizer.json").st_mtime_ns == before
    # A tokenizer that was made otherwise, by a release of before.
    manifest = folder / models.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"made_up": {dummy.TOKENIZER}', '"made_up": true'))
    models.ensure(changed(DENSE))
    assert json.loads(manifest.read_text())["made_up"] == dummy.TOKENIZER
    # A shape that was changed since: the folder follows, and nothing of the making is left.
    (folder / "config.json").write_text(planned.read_text().replace("4096", "8192"))
    models.ensure(changed(DENSE))
    assert (folder / "config.json").read_bytes() == planned.read_bytes()
    assert sorted(p.name for p in cache.iterdir()) == [".lock", "dense-8b-shape"]


@pytest.mark.parametrize(
    "size, begin, end, wrong",
    [(100, 1, 2, "has 100 tokens"), (130, 1, 2, "ASCII's 128 have to fit"), (4096, 1, 1, "special ones 1 and 1"), (4096, 1, 5000, "special ones 1 and 5000")],
)
def test_a_vocabulary_that_cannot_hold_ascii_is_refused(size, begin, end, wrong):
    with pytest.raises(BadInput, match=wrong):
        dummy._tokenizer(size, begin, end, "tiny")


def test_special_tokens_where_the_config_has_them():
    # The sparse model: 0 begins, 1 ends; of several end tokens the first counts.
    made = dummy._tokenizer(4096, 0, dummy._first([1, 7], 2), "dsa-12-layers")
    assert [made.id_to_token(number) for number in (0, 1, 2)] == [dummy.BEGIN, dummy.END, dummy.PAD]
    assert dummy._first(None, 2) == 2 and dummy._first([], 2) == 2


def test_the_server_is_told_and_nothing_contradicts_it(changed):
    words = command.command_line(changed(DENSE), changed(DENSE).parallel, (30,), 0).argv
    assert words[words.index("--load-format") + 1] == "dummy"
    assert "--load-format" not in command.command_line(changed(), changed().parallel, (15, 15), 0).argv
    for changes, wrong in (
        ({"model.path": "/models/x"}, "model.path: source dummy has no checkpoint"),
        ({"model.headers_sha256": "a" * 64}, "model.headers_sha256: source dummy has no checkpoint"),
        ({"server.extra_args": ["--load-format=auto"]}, "--load-format is set by model.source dummy"),
        ({"verdict.baseline.extra_args": ["--load-format", "auto"]}, "--load-format is set by model.source dummy"),
    ):
        with pytest.raises(BadInput, match=wrong):
            served_by.check(changed({**DENSE, **changes}), "box.yml")
    served_by.check(changed(DENSE), "box.yml")


def test_nothing_is_asked_of_it_and_that_is_said(changed, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "run", lambda *_: pytest.fail("asked"))
    st = SimpleNamespace(params=changed(DENSE), run_dir=tmp_path, live=True, report=None, progress=lambda text: None)
    st.clock = lambda what: __import__("contextlib").nullcontext()
    monkeypatch.setattr(arms.bench, "of_state", lambda state: None)
    booted = SimpleNamespace(state={}, state_file=None)
    answers, told = arms.probe(st, booted, "candidate")
    assert answers == [] and told == {"counts": {}, "median_tokens": None, "logprobs": None, "distance_again": None}
    assert arms.probe_baseline(st) == (None, arms.NOT_ASKED) and arms.without_signs(st) == arms.NOT_ASKED
    assert probes.problems(answers, probes.against(told, None)) == []
    # What `fieldbook check` looks for is there.
    assert (tmp_path / "answers.jsonl").read_text() == "" and json.loads((tmp_path / "readings.json").read_text())["candidate"]["logprobs"] is None


def test_the_checkpoint_gate_says_that_there_is_none(changed):
    told = "vLLM makes the weights up (--load-format dummy): speed and memory are the model's, answers mean nothing"
    facts = SimpleNamespace(checkpoint="", checkpoint_doubt="", checkpoint_pending=told)
    ruling = machine.checkpoint(SimpleNamespace(facts=facts, params=changed(DENSE)))
    assert ruling.result == "not checked" and ruling.reason == told and ruling.ways_out == ()


def test_a_moved_cache_is_not_told_in_a_command_line(changed, cache):
    line = command.command_line(changed(DENSE), changed(DENSE).parallel, (32,), 0)
    assert str(cache / "dense-8b-shape") in line.argv
    assert "--model data/models/cache/dense-8b-shape" in line.shown() and str(cache) not in line.shown()
    assert "data/models/cache/dense-8b-shape" in line.document()["argv"]
