"""Prompts of an exact number of tokens, no two of which begin alike: none is answered out of the prefix cache."""

import random
from collections.abc import Callable

from ..errors import GateFailed
from .target import Target, count_tokens

# Everyday words, nearly all one token in every vocabulary with a space before them.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case week "
    "company system program question work government number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line end member law car city community name "
    "president team minute idea body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan college interest "
    "death experience effect use class control field development role effort rate heart drug show leader light voice wife police mind price "
    "report decision son view relationship town road arm difference value building action season society tax director position player record "
    "paper space ground form event official matter center couple site project activity star table need court oil situation cost industry figure "
    "street image phone data picture practice piece land product doctor wall worker news test movie north love food model step bring see take "
    "come think look want give find tell ask seem feel try leave call keep let begin help talk turn start might play run move like live believe "
    "hold happen write provide sit stand lose pay meet include continue set learn lead understand watch follow stop create speak read allow add "
    "spend grow open walk win offer remember consider appear buy wait serve die send expect build stay fall cut reach kill remain suggest raise "
    "pass sell require decide pull"
)
WORDS = _TEXT.split()
# Put at the end until the count is right; each is one token in most vocabularies, and no two of them merge.
FILLERS = (" the", " of", " and", " to", " in")
ATTEMPTS = 24


def counter(target: Target) -> Callable[[str], int]:
    """Tokens of a prompt as the server itself counts them, what it puts before a prompt included. Raises GateFailed where it does not tell."""

    return lambda text: count_tokens(target, prompt=text)


def exact(count: Callable[[str], int], tokens: int, seed: str) -> str:
    """A text of exactly so many tokens; the same seed gives the same text, another one differs from its first words on.

    Raises GateFailed where no such text is found, as for fewer tokens than the server puts before every prompt.
    """
    draw = random.Random(seed)
    words = [draw.choice(WORDS) for _ in range(tokens)]
    lengths: dict[int, int] = {}
    # Words first, as many as fit; then one-token fillers.
    few, many = 0, tokens
    for _ in range(ATTEMPTS):
        if few >= many:
            break
        middle = (few + many + 1) // 2 if lengths else many
        lengths[middle] = count(" ".join(words[:middle]))
        few, many = (middle, many) if lengths[middle] <= tokens else (few, middle - 1)
    text = " ".join(words[:few])
    have = lengths[few] if few in lengths else count(text)
    while have < tokens:
        longer = text + "".join(draw.choice(FILLERS) for _ in range(tokens - have))
        found = count(longer)
        if not have < found <= tokens:
            break
        text, have = longer, found
    if have != tokens:
        raise GateFailed(f"no prompt of exactly {tokens} tokens is found with this model's tokenizer ({have} are the nearest)")
    return text
