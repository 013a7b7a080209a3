"""A model folder without weights: the config.json of data/models and a made-up tokenizer. vLLM fills the weights in itself (--load-format dummy).

Memory, start-up and speed of such a server are those of the model's shape. What it answers means nothing, so nothing is asked of it.
"""

import itertools
import json
import string
from pathlib import Path

from . import files, memory, paths
from .bench.prompts import FILLERS, WORDS
from .errors import BadInput, FieldbookError

# Raised when the tokenizer is made otherwise: folders of before are made again.
TOKENIZER = 2
PAD, BEGIN, END = "<pad>", "<begin>", "<end>"
# GPT-2's way of writing bytes as letters: a token is a string of these. What is no letter by itself lies at 256 and beyond.
SPACE = "\u0120"
ASCII = [chr(byte) if 33 <= byte <= 126 else chr(256 + min(byte, 33)) for byte in range(128)]


def write(model: str, folder: Path) -> None:
    """Write config.json, tokenizer and generation_config.json of a model into a folder. Raises BadInput for a vocabulary that does not hold ASCII."""
    text = (paths.model_config_dir(model) / "config.json").read_text(encoding="utf-8")
    files.write_whole(folder / "config.json", text)
    config, spec = json.loads(text), memory.model_spec(model)
    inner = {**config, **config.get("text_config", {})}
    begin, end = (_first(inner.get(key), otherwise) for key, otherwise in (("bos_token_id", 1), ("eos_token_id", 2)))
    _tokenizer(spec.vocab_size, begin, end, model).save(str(folder / "tokenizer.json"))
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": spec.max_position_embeddings, "chat_template": template}
    files.write_json(folder / "tokenizer_config.json", told)
    files.write_json(folder / "generation_config.json", {"bos_token_id": begin, "eos_token_id": end})


def _first(value, otherwise: int) -> int:
    """A token id of a config, the first one where it lists several."""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else otherwise


def _tokenizer(size: int, begin: int, end: int, model: str):
    """A tokenizer with exactly so many tokens: three special ones, ASCII, the words of the load's prompts, and made-up words of four letters.

    A text that was generated holds as many tokens when it is read again, whichever the model happened to choose. Bytes beyond ASCII would break that, being no
    text by themselves; of such characters nothing is left.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise FieldbookError("model.source dummy: the package tokenizers is missing in this environment; vLLM's requirements bring it") from None
    special = {begin: BEGIN, end: END}
    special |= {next(number for number in range(4) if number not in special): PAD}
    if begin == end or max(special) >= size or len(ASCII) + len(special) > size:
        raise BadInput(f"model.source dummy: {model} has {size} tokens and the special ones {begin} and {end}; ASCII's 128 have to fit beside them")
    ours = [SPACE + word for word in WORDS] + [filler.replace(" ", SPACE) for filler in FILLERS]
    # A capital in front: no letter over and over, with a space before it, is one of these.
    made_up = (SPACE + "".join(four) for four in itertools.product(string.ascii_uppercase, *[string.ascii_lowercase] * 3))
    texts = iter(dict.fromkeys(itertools.chain(ASCII, ours, made_up)))
    pad = next(number for number, text in special.items() if text == PAD)
    # All pieces count alike, so a text is read as the fewest tokens that it can be: those that it was made of, whatever stands beside what.
    tokenizer = Tokenizer(models.Unigram([(special.get(number) or next(texts), -1.0) for number in range(size)], unk_id=pad))
    # A prompt's first word gets the space that the others have.
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    return tokenizer
