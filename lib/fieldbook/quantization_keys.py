"""Reading a quantization config key by key, each complaint one line."""

from typing import Any

from .errors import BadInput


class Keys:
    """A mapping and how messages name it."""

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def _get(self, key: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise BadInput(f"{self.where}: {key}: got {str(value)[:60]!r}, expected {what}")
        return value

    def string(self, key: str, default: str | None = None) -> str | None:
        return self._get(key, str, "a string", default)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._get(key, bool, "true or false", default)

    def mapping(self, key: str) -> dict:
        found = self._get(key, dict, "a mapping", {})
        if not all(isinstance(name, str) for name in found):
            raise BadInput(f"{self.where}: {key}: expected names as keys")
        return found

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        key = next((name for name in names if self.values.get(name) is not None), None)
        value = self._get(key, int, "a whole number", default) if key else default
        if value is None:
            raise BadInput(f"{self.where}: key {names[0]!r} is missing")
        if not least <= value <= 2**31:
            raise BadInput(f"{self.where}: {key or names[0]}: got {value}, expected at least {least}")
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """The first of these keys that has a list of strings; a list inside it is taken as its members."""
        for key in keys:
            found = self._get(key, (list, str), "a list of strings", None)
            if not found:
                continue
            flat = [found] if isinstance(found, str) else [n for item in found for n in (item if isinstance(item, list) else [item])]
            if not all(isinstance(n, str) for n in flat):
                raise BadInput(f"{self.where}: {key}: expected a list of strings")
            return tuple(flat)
        return ()
