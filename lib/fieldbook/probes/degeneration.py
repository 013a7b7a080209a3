"""Whether a completion has degenerated: it goes round until it is cut off, or it is no language any more (measuring protocol 1).

Three looks at a text, each with a score that is shown. Its end: the longest stretch up to the last character that repeats itself, also when only
markup changes between the rounds. The whole: how much of its prose is said again and again, numbers aside. The grammar: words doubled, articles
without a noun, signs that stand alone, scripts mixed; that is how a model writes that has lost its context, mostly with words that do not repeat.
Tables, code, lists and the output of tools repeat in form and are not degenerate, so lines of that kind need far more rounds.
"""

import re
import unicodedata
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from .wording import CJK, broken_grammar, is_form, is_prose, script_changes, special_tokens, stray_signs

# Rounds of a stretch, and characters they cover together, from which the end of a text is a loop: many short rounds, or few long ones.
LOOPS = ((8.0, 48), (5.0, 80), (3.0, 200), (2.2, 600))
# Fewer rounds are enough where nearly the whole text is in them: rounds, characters, share.
WHOLE_LOOP = (2.5, 120, 0.6)
# Rows of a table, of data or of code may be the same many times over; without a letter in them even more often.
FORM_LOOP, FIGURES_LOOP = (30.0, 600), (100.0, 600)
# A run of one sign: a line drawn under a heading or between two outputs is shorter, and something follows it.
SIGN_RUN, DRAWN_RUN = 40, 200
DRAWN = set("-=_*#~.─━═+·•^<>|█▓▒░▏▎▍▌▋▊▉■□⬛⬜")
# Rounds that differ in their numbers only are a loop from so many on: cases and verses are counted through as well.
COUNTED_LOOP = (20.0, 200)
# 8-grams of the prose that a text holds so many times or more; the share of the prose, and of its last tokens, in them, and the tokens of prose and the
# share of the text that prose has, from which that says something. Licences of several works, and scenarios of a test, say the same a few times.
SAID_OFTEN, SAID_SHARE, SAID_TOKENS, SAID_PROSE, SAID_LAST = 8, 0.6, 90, 0.8, 40
# A text that ends in so many blanks, or so many empty lines.
BLANKS, EMPTY_LINES = 200, 60
# A tokenizer's own tokens: how many, and which share of the text.
SPECIAL_AT_LEAST, SPECIAL_SHARE = 8, 0.3
# Places of broken grammar and of stray signs: how many at least, and for 100 words. Edited prose has fewer than 0.6 in 99.9% of 2,800 characters.
BROKEN_AT_LEAST, BROKEN_PER_100 = 4, 1.2
STRAY_AT_LEAST, STRAY_PER_100 = 20, 20.0
# Words right beside a word of another script.
SCRIPT_CHANGES = 5
LONGEST_WORD = 30

_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+(?:['’][^\W_]+)*|[^\s]")
_LINK = re.compile(r"\(?\bhttps?://\S+")
_MARKUP = re.compile(r" ?(?:</?[A-Za-z][^<>\n]{0,60}>|\[/?[A-Za-z]+_?\d*\]|\*\*|__|~~) ?")


@dataclass(frozen=True)
class Loop:
    """A text's end: a stretch of `period_tokens` tokens, repeated `rounds` times up to the end, `chars` characters together, `share` of all."""

    period_tokens: int
    rounds: float
    chars: int
    share: float
    text: str


@dataclass(frozen=True)
class Judgement:
    """Whether a text has degenerated, why ('' where it has not), whether it is going round (else it is no language), and the scores."""

    degenerate: bool
    reason: str
    loops: bool
    scores: dict[str, Any]


def judge(text: str) -> Judgement:
    """Look at one completion. An empty one is not degenerate; that is another fault."""
    blanks = text[len(text.rstrip()) :]
    text = unicodedata.normalize("NFKC", text)
    plain_text = _MARKUP.sub(lambda found: " " if " " in (found[0][0], found[0][-1]) else "", text)
    raw, plain, counted = tail_loop(text), tail_loop(plain_text), tail_loop(re.sub(r"\d+", "0", plain_text), counted=True)
    said, prose_tokens, prose_share = said_often(plain_text)
    broken, broken_rate = broken_grammar(text)
    stray, stray_rate = stray_signs(text)
    special, special_share = special_tokens(text)
    changes = script_changes(text)
    loops = [(loop, why) for loop in (raw, plain) if loop and (why := _loop_reason(loop))]
    loops += [(counted, why) for why in [_counted_reason(counted)] if why]
    reason = loops[0][1] if loops else ""
    if not reason and (len(blanks) >= BLANKS or blanks.count("\n") >= EMPTY_LINES):
        reason = f"it ends in {len(blanks)} blanks"
    if not reason and special >= SPECIAL_AT_LEAST and special_share >= SPECIAL_SHARE:
        reason = f"{special} of the tokenizer's own tokens, {special_share:.0%} of the text"
    if not reason and prose_tokens >= SAID_TOKENS and prose_share >= SAID_PROSE and said >= SAID_SHARE:
        reason = f"{said:.0%} of its prose is said again and again"
    goes_round = bool(reason)
    if not reason and broken >= BROKEN_AT_LEAST and broken_rate >= BROKEN_PER_100:
        reason = f"broken grammar in {broken} places, {broken_rate:.1f} for 100 words"
    if not reason and stray >= STRAY_AT_LEAST and stray_rate >= STRAY_PER_100:
        reason = f"{stray} signs stand alone, {stray_rate:.0f} for 100 words"
    if not reason and changes >= SCRIPT_CHANGES:
        reason = f"{changes} words stand beside one of another script"
    shown = loops[0][0] if loops else max(filter(None, (raw, plain)), key=lambda loop: loop.chars, default=None)
    packed = len(zlib.compress(text.encode(), 9)) / max(len(text.encode()), 1)
    tokens = _TOKEN.findall(text)
    scores = {
        "tail_rounds": round(shown.rounds, 1) if shown else 1.0,
        "tail_period_tokens": shown.period_tokens if shown else 0,
        "tail_share": round(shown.share, 3) if shown else 0.0,
        "said_often_share": round(said, 3),
        "broken_grammar_per_100_words": round(broken_rate, 2),
        "stray_signs_per_100_words": round(stray_rate, 2),
        "script_changes": changes,
        "special_token_share": round(special_share, 3),
        "blanks_at_the_end": len(blanks),
        "compression_ratio": round(packed, 3),
        "distinct_token_share": round(len({token.lower() for token in tokens}) / max(len(tokens), 1), 3),
    }
    return Judgement(bool(reason), reason, goes_round, scores)


def tail_loop(text: str, counted: bool = False) -> Loop | None:
    """The repeated end of a text that covers most of it; None where the last token has not been there before.

    A last word that was cut in two counts as the one it begins; a last full stop may be another mark, and a few dots behind the loop are not looked at.
    Anything else that follows means that the text found its way out. counted: the numbers of the text have been taken as equal.
    """
    text = re.sub(r"(?<=\S)(?:\.{3,6}|…{1,3})\s*$", "", text)
    spans = [span for match in _TOKEN.finditer(text) for span in _pieces(*match.span())]
    tokens = [text[a:b].lower() for a, b in spans]
    best = None
    for dropped in range(min(2, len(spans))):
        end = len(spans) - dropped
        agree = _agreement(tokens[:end][::-1])
        for period in range(1, end // 2 + 1):
            length = period + agree[period]
            if length < 2 * period:
                continue
            goes_on = not dropped or tokens[end - period].startswith(tokens[end]) or (tokens[end] in ".!?。！？" and length >= 5 * period)
            if not goes_on:
                continue
            start = spans[end - length][0]
            covered = text[start : spans[end - 1][1]]
            loop = Loop(period, length / period, len(covered), len(covered) / max(len(text.strip()), 1), covered)
            # Of the periods of one loop the shortest; of two loops the longer.
            if best is None or loop.chars > 1.2 * best.chars:
                best = loop
        if best and (_counted_reason(best) if counted else _loop_reason(best)):
            return best
    return best


def _pieces(start: int, end: int) -> list[tuple[int, int]]:
    """A word too long to be one (0000…, aaaa…) character by character."""
    return [(start, end)] if end - start <= LONGEST_WORD else [(at, at + 1) for at in range(start, end)]


def _agreement(tokens: list[str]) -> list[int]:
    """For each shift, how many tokens from the first on are equal to those shifted (the Z function)."""
    count = len(tokens)
    agree, left, right = [0] * count, 0, 0
    for i in range(1, count):
        if i < right:
            agree[i] = min(right - i, agree[i - left])
        while i + agree[i] < count and tokens[agree[i]] == tokens[i + agree[i]]:
            agree[i] += 1
        if i + agree[i] > right:
            left, right = i, i + agree[i]
    return agree


def _loop_reason(loop: Loop) -> str:
    """Why this end of a text is a loop, '' where it may be meant."""
    said = f"{loop.rounds:.1f} rounds of {loop.period_tokens} tokens up to the end, {loop.share:.0%} of the text"
    one_round = loop.text[: max(1, int(len(loop.text) / loop.rounds) + 1)]
    if not re.search(r"[^\W_]", one_round):
        drawn = set("".join(loop.text.split())) <= DRAWN and loop.share < 0.97
        return said if loop.chars >= (DRAWN_RUN if drawn else SIGN_RUN) else ""
    lines = [line for line in loop.text.splitlines() if line.strip()]
    # The equal cells of one row stand apart; a phrase with blanks in it is no cell.
    cells = loop.period_tokens <= 2 and len(re.findall(r"\S(?: {2,}|\t)\S", loop.text)) >= loop.rounds / 2
    form = (len(lines) > 1 or cells) and sum(is_form(line) for line in lines) > len(lines) / 2
    if form:
        rounds, chars = FORM_LOOP if re.search(r"[^\W\d_]", one_round) else FIGURES_LOOP
        return said if loop.rounds >= rounds and loop.chars >= chars else ""
    # A Chinese character says as much as two or three letters.
    size = loop.chars + 1.5 * len(CJK.findall(loop.text))
    if any(loop.rounds >= rounds and size >= chars for rounds, chars in LOOPS):
        return said
    rounds, chars, share = WHOLE_LOOP
    return said if loop.rounds >= rounds and size >= chars and loop.share >= share else ""


def _counted_reason(loop: Loop | None) -> str:
    """Why an end whose rounds differ in their numbers only is a loop; '' where it may be meant."""
    if loop is None or loop.rounds < COUNTED_LOOP[0] or loop.chars < COUNTED_LOOP[1]:
        return ""
    lines = [line for line in loop.text.splitlines() if line.strip()]
    if sum(is_form(line) for line in lines) > len(lines) / 2 or not re.search(r"[^\W\d_]{3}", loop.text):
        return ""
    return f"{loop.rounds:.1f} rounds up to the end that differ in their numbers only, {loop.share:.0%} of the text"


def said_often(text: str, n: int = 8) -> tuple[float, int, float]:
    """How much of a text's prose goes round.

    Returns (share of its prose's tokens, or of the last of them where that is less, in n-grams that it holds SAID_OFTEN times or more, tokens of prose,
    share of the text's characters that is prose).
    """
    lines = [line for line in text.splitlines() if is_prose(line)]
    tokens = [token.lower() for token in _TOKEN.findall(_LINK.sub("", " ".join(lines)))]
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    counts = Counter(grams)
    covered = [False] * len(tokens)
    for i, gram in enumerate(grams):
        if counts[gram] >= SAID_OFTEN:
            covered[i : i + n] = [True] * n
    last = covered[-SAID_LAST:]
    share = min(sum(covered) / max(len(covered), 1), sum(last) / max(len(last), 1))
    whole = sum(len(line.strip()) for line in text.splitlines())
    return share, len(tokens), sum(len(line.strip()) for line in lines) / max(whole, 1)
