"""The degeneration detector: texts of both kinds, the public cases where they are, and error rates on a thousand made texts."""

import json
import random
import re
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

from fieldbook.__main__ import main
from fieldbook.probes import bounds, judge
from fieldbook.probes.degeneration import tail_loop
from fieldbook.probes.wording import broken_grammar, is_prose, script_changes

CASES = ROOT.parent / "shared" / "cases" / "G"

PROSE = (
    "The pump feeds two tanks, and each tank has a valve that closes when the water is too warm. A technician looks at both of them in the morning. "
    "If one does not close, it is taken out, cleaned with warm water and put back before noon. What was found goes into the book on the shelf."
)
LOOPS = {
    "one sign": "!" * 60,
    "one word without spaces": "The answer is 1" + "0" * 90,
    "one word": "The answer is " + "very " * 30,
    "a word and a comma": "I am so sorry, " + "wow, " * 40,
    "a sentence": "So the answer is 12.\n" + "I will check it once more.\n" * 9,
    "a sentence, cut": "So the answer is 12. " + "I will check it once more. " * 9 + "I will che",
    "a paragraph": PROSE + "\n\n" + (PROSE + "\n\n") * 2,
    "two paragraphs in turn": ("First we look at the valve of the left tank.\n\nThen we look at the valve of the right tank again.\n\n") * 5,
    "special tokens": "<|reserved_special_token_12|>" * 9,
    "markup that changes": "".join(
        f"<b>the</b> panda{tag} eats and then it {tag}stops and looks at us, and then it goes on. " for tag in ("", " [Pause_3]", "") * 3
    ),
    "numbered checks": " ".join(f"Step {n}: wait, I should check whether the valve of the tank is closed before I go on." for n in range(1, 20)),
    "a Chinese sentence": "答案是四百六十。" + "我们再检查一下这个结果是否正确。" * 12,
    "a fragment": "assistant\n\n" * 20,
    "empty lines": '{"name": "John", "age": 30}' + "\n \n" * 60,
    "blanks": "Java is a programming" + " " * 300,
    "a count that does not end": "".join(f"tell me something about you? assistant{n}\n" for n in range(57, 80)),
    "another mark at the end": "I'm sorry, but " + "I'm not able to meet you. " * 7 + "I'm not able to meet you!",
    "a phrase with blanks": "That is what he said. " + "Let me)  Let me   ( " * 17,
    "two characters": "我们把衣服放在水里，洗，洗，" + "洗小" * 15,
    "control tokens in any order": "memorial" + "".join(f"[control_{n * 7919 % 260}]" for n in range(12)) + " Orts [control_11] of [control_2]",
    "a list that does not end": "- check the log\n- check the disk\n" * 20,
}
BROKEN = {
    "articles": "The the pump closed the. It was a the valve of of the the tank **, and the is warm. Then she the protocols to to the bench, the are cold.",
    "stray signs": "".join(f"{word} {sign} * ( " for word, sign in zip(PROSE.split(), "*`(<" * 20, strict=False)),
    "scripts": "насос ปั๊ม закрыт מים клапан ถัง вода חם насос ปั๊ม закрыт מים клапан ถัง",
    "Chinese particles": "这个的的水泵，，关闭了。，阀门是是热的的，。我们在在这里和和他们",
}
NORMAL = {
    "prose": PROSE,
    "prose twice": PROSE + "\n\nOnce more, since it matters:\n\n" + PROSE,
    "a song": "Row the boat along the stream\nRow the boat along the stream\nSlowly, slowly, as in a dream\nRow the boat along the stream\n",
    "laughter": "Ha ha ha ha ha! That was a good one.",
    "a table": "| part | price |\n| --- | --- |\n" + "".join(f"| screw M{n} | 0.{n:02d} |\n" for n in range(2, 40)),
    "equal rows": "Idx W C\n" + "0 36 40 - 0 10 0 0 405 300\n" * 20,
    "a matrix": "GPU0  X   " + "SYS  " * 14 + "\n" + "\n".join(f"GPU{n}  " + "SYS  " * n + "X" for n in range(1, 8)),
    "zeros": "x = [" + "0, " * 60 + "0]",
    "JSON": json.dumps({"layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 40}, indent=1),
    "JSON, cut": '{\n  "types": [\n' + '    "linear_attention",\n' * 24,
    "a rule": "Result\n" + "=" * 78,
    "bars of a chart": "".join(f"{n:3} {'#' * n}\n" for n in range(1, 40)),
    "code": "".join(f"    assert area({n}, {n + 1}) == {n * (n + 1)}\n" for n in range(30)),
    "numbered steps": "".join(f"{n}. Open valve {n} and wait until the gauge shows {n * 3} bar.\n" for n in range(1, 9)),
    "a log": "".join(f"INFO 11-29 10:00:{n:02d} [loader.py:42] loading shard {n} of 30\n" for n in range(30)),
    "names of languages": "ru: Русский, he: עברית, th: ไทย, ar: العربية, ka: ქართული, hi: हिन्दी, el: Ελληνικά, zh: 中文, hy: Հայերեն",
    "Chinese": "把模型分到几张显卡上，每张卡只保存其中的几层。插槽越慢，就越应该少传一些数据。测量之前先写下预期，再把所有的数值都列出来。",
    "an answer and its word again": PROSE + "\n\nTherefore the tank on the left is the warm one.\n\nleft\n",
    "German": "Die Funktion nimmt zwei Parameter an. Der erste gibt an, ob die Datei im Modus geöffnet wird; der zweite gibt an, wie viele Bytes gelesen "
    "werden, und am Ende zeigt der Wert das Ende an. Danach kommt der Zug in Rom an, und wir fangen an.",
    "sums": "".join(f"{n} * {m} = {n * m}\n" for n in (1, 2, 3) for m in range(1, 11)),
    "empty cells": "| part | a | b | c |\n|---|---|---|---|\n" + "|  |  |  |  |\n" * 14,
    "a glossary": "спасибо 谢谢\nвода 水\nдом 家\nрека 河\nгора 山\nмир 和平\nлес 森林\nнебо 天空\nземля 地\n",
    "cases": "".join(f"For n = {n}, the value of the polynomial is {n * n + n + 41}, and this number is a prime.\n" for n in range(12)),
    "scenarios": "".join(
        f"Scenario: order {n}\n  Given the shop has {n} lamps on the shelf and the customer is logged in\n  When the customer orders {n} of them\n"
        "  Then the order is confirmed by mail and the shelf is empty\n"
        for n in range(2, 7)
    ),
    "a lesson": "Use **a** before a consonant sound and **an** before a vowel sound. It is **an** hour, but **a** house, and it is **an** honest man.",
    "a tree": "".join(f" |           +-{n:02x}.0  Advanced Devices, Inc. Device 14a{n % 10}\n" for n in range(30)),
    "mail": "Dear Ms Lind,\n\nThank you for your letter. We are sorry that the lamp has failed. Please send it back.\n\nKind regards\nThe shop",
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_found(name):
    found = judge(LOOPS[name])
    assert found.degenerate and found.loops, found


@pytest.mark.parametrize("name", BROKEN)
def test_broken_language_is_found(name):
    found = judge(BROKEN[name])
    assert found.degenerate and not found.loops, found


@pytest.mark.parametrize("name", NORMAL)
def test_what_repeats_in_form_is_not_degenerate(name):
    found = judge(NORMAL[name])
    assert not found.degenerate, found


@pytest.mark.skipif(not CASES.is_dir(), reason="no cases beside this checkout")
@pytest.mark.parametrize("file", sorted(f for f in CASES.glob("*.txt") if not f.name.endswith(".expect.txt")) if CASES.is_dir() else [], ids=lambda f: f.stem)
def test_public_cases(file):
    expected = (CASES / f"{file.stem}.expect.txt").read_text().partition(":")[0]
    text = "\n".join(line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("# source:"))
    # One is on the border by its finder's own words: coherent sentences that come to no end.
    assert expected == "BORDERLINE" or judge(text).degenerate is (expected == "DEGENERATE"), judge(text)


def test_the_loop_is_measured():
    loop = tail_loop("start " + "one two three four. " * 6 + "one two")
    # Four words and a full stop a round; six rounds and two tokens.
    assert loop.period_tokens == 5 and loop.rounds == pytest.approx(32 / 5) and loop.text.startswith("one two")
    assert tail_loop("every word here is another one") is None


def test_prose_is_told_from_form():
    assert all(is_prose(line) for line in ["I'll use \\boxed{460}.", "The valve is closed.", "我们再检查一下结果。", "- Wait, that is not what they asked."])
    assert not any(is_prose(line) for line in ["x = the(a)", "| the | a |", "GPU0\tSYS\tSYS\tN/A", "0 36 40 - 0 10", '"key": "the value is here",', "if (a) {"])


def test_grammar_and_scripts_by_hand():
    assert broken_grammar("It was in the\nhouse, and the 'a' key is one of the best.")[0] == 0
    assert broken_grammar("The the pump is the. It has a the valve.")[0] == 3
    assert (
        script_changes("русский ไทย עברית") == 2
        and script_changes("вода 水, дом 家, река 河") == 0
        and script_changes("русский, ไทย: עברית (العربية)") == 0
        and script_changes("使用 GPU 加速") == 0
    )


# Texts that people wrote, on every machine that has Python: its own sources, whose docstrings are prose and whose rest is code.
def written(draw):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    while True:
        text = draw.choice(files).read_text(encoding="utf-8", errors="replace")
        if draw.random() < 0.5:
            blocks = [block for block in re.findall(r'"""(.*?)"""', text, re.DOTALL) if len(block) > 400]
            text = draw.choice(blocks) if blocks else ""
        start = draw.randrange(max(1, len(text) - 2400))
        if len(text[start : start + 2400].split()) > 40:
            return text[start : start + draw.choice((700, 1400, 2400))]


def data(draw):
    """What a tool or a model writes in rows: tables, JSON, lists, logs, configurations."""
    n, word = draw.randrange(8, 60), draw.choice(("gpu", "layer", "item", "node", "disk"))
    rows = [(f"{word}{i}", draw.randrange(3), draw.choice(("ok", "ok", "ok", "busy")), draw.randrange(1000)) for i in range(n)]
    return draw.choice(
        (
            lambda: "| name | id | state | value |\n|---|---|---|---|\n" + "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows),
            lambda: json.dumps([dict(zip(("name", "id", "state", "value"), row, strict=True)) for row in rows], indent=draw.choice((None, 1, 2))),
            lambda: "\n".join(f"- {name}: {state}, {value}" for name, _, state, value in rows),
            lambda: "\n".join(f"2026-11-{1 + i % 28:02d} 10:{i % 60:02d} {row[0]} state={row[2]} value={row[3]}" for i, row in enumerate(rows)),
            lambda: "\n".join(f"{row[0]:10}{row[1]:6}{row[2]:>8}{row[1] * 0:8}" for row in rows),
            lambda: "\n".join(f"[{name}]\nstate = {state}\nvalue = {value}\n" for name, _, state, value in rows),
        )
    )()


def looping(draw):
    """A text that goes round until it is cut off: a piece of prose, a line, a few words or a sign, after a sound beginning."""
    sentences = re.split(r"(?<=[.]) ", PROSE)
    head = " ".join(draw.sample(sentences, draw.randrange(0, 3)))
    piece = draw.choice(
        (
            " ".join(draw.sample(PROSE.split(), draw.randrange(2, 9))) + draw.choice((" ", ", ", ".\n")),
            draw.choice(sentences) + draw.choice((" ", "\n", "\n\n")),
            draw.choice(("!", "？", "0", "…", "\\n", "<|endoftext|>", "的", "and ")),
            " ".join(draw.sample(sentences, 3)) + "\n",
        )
    )
    rounds = max(4, 480 // len(piece) + draw.randrange(4))
    whole = piece * rounds
    return head + " " + whole[: len(whole) - draw.randrange(len(piece))]


def broken(draw):
    """Prose whose words have lost their order and double here and there, as a model writes that reads wrong places of its context."""
    words = (PROSE + " " + " ".join(NORMAL["mail"].split())).split() * 2
    for place in range(0, len(words) - 6, 6):
        part = words[place : place + 6]
        draw.shuffle(part)
        words[place : place + 6] = part
    for _ in range(8):
        place = draw.randrange(len(words))
        words.insert(place, draw.choice(("the", "the", "a the", "the of", "of")))
    return " ".join(words)


def test_error_rates_on_a_thousand_texts():
    draw = random.Random(20261130)
    normal = [written(draw) for _ in range(350)] + [data(draw) for _ in range(150)]
    degenerate = [looping(draw) for _ in range(350)] + [broken(draw) for _ in range(150)]
    false_alarms = [text for text in normal if judge(text).degenerate]
    missed = [text for text in degenerate if not judge(text).degenerate]
    # Of each 500: at most 2 false alarms, at most 5 missed; one-sided 95% bounds by Clopper and Pearson.
    assert len(false_alarms) <= 2 and len(missed) <= 5, (false_alarms, missed)
    assert bounds(len(false_alarms), 500)[1] < 0.0126 and bounds(len(missed), 500)[1] < 0.021


def test_the_command(capsys, tmp_path, monkeypatch):
    (tmp_path / "loop.txt").write_text(LOOPS["a sentence"])
    assert main(["degeneration", str(tmp_path / "loop.txt"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["degenerate"] is True and document["loops"] is True and document["scores"]["tail_rounds"] == pytest.approx(9.0, abs=0.1)
    (tmp_path / "prose.txt").write_text(PROSE)
    assert main(["degeneration", str(tmp_path / "prose.txt")]) == 0 and capsys.readouterr().out.startswith("not degenerate\n")
    (tmp_path / "empty.txt").write_text(" \n")
    for name, words in (("empty.txt", "is empty"), ("none.txt", "cannot be read")):
        assert main(["degeneration", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err
