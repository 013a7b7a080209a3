"""Reading keys of a config.json one by one: a value of the right type, or one line that names the key and what would be right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BadInput, short
from ..spec import Layer, Part

# Larger than any model there is; keeps a mistyped count from becoming a tuple of a billion layers.
MOST_LAYERS = 2048
MOST = 2**40
REQUIRED: Any = object()


@dataclass(frozen=True)
class Source:
    """Keys of the text model, the keys around it (the same when nothing is nested), and how messages name the place."""

    text: dict
    outer: dict
    where: str
    architecture: str
    defaulted: tuple[str, ...] = ()

    def bad(self, key: str, wanted: str) -> BadInput:
        """The error for a key whose value cannot be used."""
        return BadInput(f"{self.where}: {key}: got {short(self.text.get(key))}, but {self.architecture} needs {wanted}")

    def absent(self, key: str) -> BadInput:
        """The error for a key that is not there and has no default."""
        return BadInput(f"{self.where}: key {key!r} is missing, and {self.architecture} needs it")

    def value(self, key: str) -> Any:
        """What the config says, None when it says nothing or null."""
        return self.text.get(key)

    def count(self, key: str, default: Any = REQUIRED, least: int = 1, most: int = MOST) -> Any:
        """A whole number. A key that is absent or null gives the default, or BadInput where there is none."""
        value = self.text.get(key)
        if value is None:
            if default is REQUIRED:
                raise self.absent(key)
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.bad(key, f"a whole number from {least} to {most}")
        return value

    def any_count(self, keys: Sequence[str], default: Any = REQUIRED, least: int = 1) -> Any:
        """The first of several spellings of one key."""
        for key in keys:
            if self.text.get(key) is not None:
                return self.count(key, least=least)
        if default is REQUIRED:
            raise self.absent(keys[0])
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false; absent and null give the default."""
        value = self.text.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text_value(self, key: str, default: str | None = None) -> str | None:
        """A string; absent and null give the default."""
        value = self.text.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def strings(self, key: str, length: int | None = None) -> list[str] | None:
        """A list of strings, of a given length; None when absent or null."""
        return self._list(key, str, "strings", length)

    def counts(self, key: str, length: int | None = None) -> list[int] | None:
        """A list of whole numbers that are not negative, of a given length; None when absent or null."""
        values = self._list(key, int, "whole numbers, none negative", length)
        if values is not None and any(isinstance(v, bool) or not 0 <= v <= MOST for v in values):
            raise self.bad(key, "a list of whole numbers, none negative")
        return values

    def _list(self, key: str, kind: type, what: str, length: int | None) -> list | None:
        value = self.text.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, kind) for v in value):
            raise self.bad(key, f"a list of {what}")
        if length is not None and len(value) < length:
            raise BadInput(f"{self.where}: {key} has {len(value)} entries for {length} layers")
        return value if length is None else value[:length]

    def inner(self, key: str) -> "Source":
        """The mapping under a key, to be read the same way. Raises BadInput when it is no mapping."""
        value = self.text.get(key)
        if value is None:
            raise self.absent(key)
        if not isinstance(value, dict):
            raise self.bad(key, "a mapping")
        return Source(value, self.outer, f"{self.where}: {key}", self.architecture)

    @property
    def layers(self) -> int:
        """num_hidden_layers."""
        return self.count("num_hidden_layers", most=MOST_LAYERS)

    @property
    def window(self) -> int | None:
        """sliding_window; 0 means none (vLLM: config/model.py:ModelConfig.__post_init__)."""
        return self.count("sliding_window", None, least=0) or None

    def draft_layers(self, *keys: str, default: int = 0) -> int:
        """Layers of multi-token prediction; none when no key says so."""
        found = self.any_count(keys, default, least=0)
        if found > MOST_LAYERS:
            raise self.bad(next(k for k in keys if self.text.get(k) is not None), f"at most {MOST_LAYERS}")
        return found


@dataclass(frozen=True)
class Decoder:
    """What a family makes of its keys; read() adds what is the same for all of them. tied: tie_word_embeddings where no key says so."""

    layers: tuple[Layer, ...]
    mtp_layers: tuple[Layer, ...] = ()
    tied: bool = False
    state_dtype: str = "auto"
    embeddings_on_every_stage: bool = False
    lm_head_on_last_stage: bool = False
    parts_with_embedding: tuple[Part, ...] = ()
    parts_last_stage: tuple[Part, ...] = ()
    not_counted: tuple[str, ...] = ()
    defaulted: tuple[str, ...] = ()
    mtp_own_embeddings: bool = False
