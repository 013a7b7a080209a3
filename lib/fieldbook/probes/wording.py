"""What kind of lines a text has, and how often its grammar is broken: the parts of the degeneration detector that know about language."""

import re

# Words of which nearly every English sentence has one. They tell prose from tables, names and code.
_TEXT = (
    "a an the this that these those i you he she it we they is are was were be been has have had do does did will would can could should must may to of "
    "in on at by for from with as and or but if so then not no what which who when where why how there here let's i'll i'm it's don't my your his her its "
    "our their"
)
_COMMON = frozenset(_TEXT.split())
_WORD = re.compile(r"[A-Za-z][A-Za-z'’]*")
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# Beginnings and ends of lines that people do not write prose with. A lone dash or asterisk is a list and may be prose.
_FORM_START = re.compile(r"\s*(?:[|+{}\[\]\\@$>;#]|//|/\*|\"[^\"]*\"\s*[:,]|'[^']*'\s*[:,]|\d+(?:\s+[\d.-]+){2}|[A-Za-z_][\w.]*\s*(?:=|\+=|:=)\s*\S|-\S)")
# A logger's: level, time or both, whatever process it names first.
_LOGGED = re.compile(r"\s*(?:\([^)]*\)\s*)?(?:(?:INFO|WARNING|ERROR|DEBUG|TRACE|WARN|CRITICAL)\b|\[?\d{2,4}[-/:]\d\d)")
_FORM_END = re.compile(r"[;{}\[\]|\\,=]\s*$")
_COLUMNS = re.compile(r"\S(?:\s{2,}|\t)\S")

# What stands between two words in marked-up prose.
_GAP = r"[\s*_\"'`(\[]*"
# No part of a path, an option, an assignment or a quoted name.
_FREE, _END = r"(?<![\w./='\"-])", r"(?![\w=(.'-])"
_BROKEN = re.compile(
    "|".join(
        (
            # A function word twice.
            rf"{_FREE}(?P<twice>the|an|of|to|and|is|with|on|from|for|are|was|by)\s+{_GAP}(?P=twice)(?![\w=(.'])",
            # An article before a word that no noun phrase begins with.
            rf"{_FREE}(?:the|an)\s+{_GAP}(?:the|an?|of|to|is|are|was|were|for|and|or|from|with|by|into|that|it|be|but|if|then|because){_END}",
            rf"{_FREE}a\s+{_GAP}(?:the|an){_END}",
            # An article before the end of the phrase.
            rf"{_FREE}(?:the|an)(?:\s*[*_`]*[.,;:!?)\]](?=\s)|\s+[*_`]+[.,;:)\"]|(?<!\*\*the)(?<!\*\*an)\*\*\s*(?=\s))",
        )
    ),
    re.IGNORECASE,
)
# Of the words of an English text at least so many are these; other languages have an "an" of their own.
_ENGLISH, _ENGLISH_SHARE = frozenset(("the", "of", "and", "to", "is", "it", "that", "was", "you", "for")), 0.06
# Chinese particles and marks twice, or a mark after a mark; some doubled words are words.
_BROKEN_CHINESE = re.compile(r"(?<![\u4e00-\u9fff])的的|的的(?!确)|在在|与与|(?<=[\u4e00-\u9fff])[,，][,，]|、、|[,，]。|。[,，]|、。")
# Signs that stand alone within a line, one after the other; a single one at its beginning is a list, between two words an operator.
_STRAY = re.compile(r"(?<=\S)[ \t]+[*\"`(<\[](?=[ \t]+[*\"`(<\[])")
# What a tokenizer has for itself.
_SPECIAL = re.compile(
    r"<\|[^|<>\n]{1,60}\|>|<(?:unk|pad|s|/s|bos|eos|mask)>|\[(?:control_\d+|PAD|UNK|MASK|CLS|SEP)\]|<0x[0-9A-F]{2}>|<(?:extra_id|unused)_?\d+>"
)
# Scripts of which a sentence has one beside Latin.
_SCRIPTS = re.compile(
    "|".join(
        f"(?P<{name}>[{letters}])"
        for name, letters in {
            "latin": "A-Za-zÀ-ɏ",
            "east_asian": "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af",
            "cyrillic": "Ѐ-ӿ",
            "arabic": "\u0600-\u06ff",
            "hebrew": "\u0590-\u05ff",
            "devanagari": "\u0900-\u097f",
            "south_asian": "\u0980-\u0dff",
            "thai": "\u0e00-\u0e7f",
            "armenian": "\u0530-\u058f",
            "georgian": "\u10a0-\u10ff",
        }.items()
    )
)


def is_prose(line: str) -> bool:
    """Whether a line is written in sentences; tables, code, data, paths and headings of columns are not."""
    if len(CJK.findall(line)) >= 4:
        return not _FORM_START.match(line)
    words = [word.replace("’", "'") for word in _WORD.findall(line)]
    # N/A and X are no words of a sentence, nor are names in capitals.
    if not any(word.lower() in _COMMON and (word.islower() or word[1:].islower()) for word in words):
        return False
    if len(_COLUMNS.findall(line)) >= 3 or len(line.split()) < 2:
        return False
    ends = re.search(r"[.!?…]['\")*_]*\s*$", line)
    if _FORM_START.match(line) or _LOGGED.match(line) or (_FORM_END.search(line) and not ends):
        return False
    numbers = len(re.findall(r"\d+", line))
    return numbers <= len(words) / 2 and len(words) >= (2 if ends else 8)


def is_form(line: str) -> bool:
    """Whether a line is a row of a table, of data or of code. A line may be neither prose nor form: a heading, a name, an item of a list."""
    if is_prose(line):
        return False
    words, numbers = len(_WORD.findall(line)), len(re.findall(r"\d+(?:\.\d+)?", line))
    return bool(_FORM_START.match(line) or _LOGGED.match(line) or _FORM_END.search(line) or len(_COLUMNS.findall(line)) >= 2 or numbers > words)


def broken_grammar(text: str) -> tuple[int, float]:
    """Places where no sentence could go on like that, and how many there are for 100 words."""
    # Wrapped lines are one: what ends a line is not the end of a phrase.
    joined = re.sub(r"\n(?=[ \t]*\S)", " ", text.replace("’", "'"))
    words = len(_WORD.findall(joined)) + len(CJK.findall(joined)) / 2
    latin = [word.lower() for word in _WORD.findall(joined)]
    english = sum(word in _ENGLISH for word in latin) >= _ENGLISH_SHARE * len(latin)
    found = (len(list(_BROKEN.finditer(joined))) if english else 0) + len(_BROKEN_CHINESE.findall(joined))
    return found, 100 * found / max(words, 1)


def stray_signs(text: str) -> tuple[int, float]:
    """Quotes, brackets and asterisks that stand alone within a line, and how many there are for 100 words."""
    words = len(_WORD.findall(text)) + len(CJK.findall(text)) / 2
    found = len(_STRAY.findall(text))
    return found, 100 * found / max(words, 1)


def script_changes(text: str) -> int:
    """Places where a word of one script runs into, or stands right beside, a word of another, in a text that does so with three scripts or more.

    Latin within the words of others is everyday, and a list of languages or a glossary has its words apart or pairs the same two.
    """
    glued, beside = [], []
    before, end = None, -2
    for match in _SCRIPTS.finditer(text):
        here, between = match.lastgroup, text[end : match.start()] if end >= 0 else None
        if before is not None and here != before:
            glued += [(before, here)] if between == "" else []
            beside += [(before, here)] if between in ("", " ") and "latin" not in (before, here) else []
        before, end = here, match.end()
    return max(len(pairs) if len({script for pair in pairs for script in pair}) >= 3 else 0 for pairs in (glued, beside))


def special_tokens(text: str) -> tuple[int, float]:
    """A tokenizer's own tokens in a text, and the share of its characters that they are."""
    found = _SPECIAL.findall(text)
    return len(found), sum(map(len, found)) / max(len(text), 1)
