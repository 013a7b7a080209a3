"""What a recomputation found beside what a receipt says: exactly for whole numbers, lists and texts, to its rounding for a float."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal

from ..errors import FieldbookError

Outcome = Literal["agrees", "differs", "taken", "not_recomputed"]


class CannotTell(FieldbookError):
    """A figure cannot be recomputed here: the message says why."""


@dataclass(frozen=True)
class Found:
    """What a recomputation gives. what: from what, in a few words.

    decimals: the rounding with which the notebook stores the value; None: it stores it as it is. rel: how far a float may lie beside it where an input was
    stored rounded. source, label: what the figure's own texts must be, where they hold numbers too. disagrees: for a stated figure, what it must tell of
    its own inputs; the value is then the statement. value None: there must be no such figure.
    """

    value: Any
    what: str
    decimals: int | None = None
    rel: float = 1e-9
    source: str | None = None
    label: str | None = None
    disagrees: str | None = None


@dataclass(frozen=True)
class Row:
    """One figure with what came of it. says, recomputed: as the receipt and as the recomputation have it; why: from what, or why there is none."""

    station: str
    figure: str
    outcome: Outcome
    says: Any
    recomputed: Any
    why: str

    def document(self) -> dict[str, Any]:
        """The row as JSON."""
        both = {"recomputed": self.recomputed, "from": self.why} if self.outcome in ("agrees", "differs") else {"why": self.why}
        return {"station": self.station, "figure": self.figure, "receipt": self.says, **both}


def plain(value: Any) -> Any:
    """A value as JSON gives it back: tuples as lists, dataclasses as mappings, keys as texts."""
    return json.loads(json.dumps(value, default=lambda one: asdict(one) if is_dataclass(one) else str(one)))


def same(says: Any, found: Any, decimals: int | None = None, rel: float = 1e-9) -> bool:
    """Whether a stored value is a recomputed one, rounded as it was stored."""
    if isinstance(says, bool) or isinstance(found, bool) or says is None or found is None or isinstance(says, str) or isinstance(found, str):
        return type(says) is type(found) and says == found
    if isinstance(says, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(says) == len(found) and all(same(a, b, decimals, rel) for a, b in zip(says, found, strict=True))
    if isinstance(says, dict) and isinstance(found, dict):
        return says.keys() == found.keys() and all(same(says[key], found[key], decimals, rel) for key in says)
    if not isinstance(says, (int, float)) or not isinstance(found, (int, float)):
        return False
    if isinstance(says, int) and isinstance(found, int):
        return says == found
    if decimals is not None:
        # More digits than the notebook stores are somebody else's.
        return round(says, decimals) == says and abs(says - found) <= 0.5 * 10**-decimals * (1 + 1e-6) + abs(found) * rel
    return abs(says - found) <= abs(found) * rel


def judged(station: str, key: str, says: Any, texts: dict[str, str], found: Found) -> Row:
    """The row of one recomputed value. texts: the figure's own source, label and disagrees, as far as it is a figure."""
    for name in ("source", "label", "disagrees"):
        expected = getattr(found, name)
        if expected is not None and name in texts and texts[name] != expected:
            return Row(station, f"{key}, its {name}", "differs", texts[name], expected, found.what)
    if not same(says, found.value, found.decimals, found.rel):
        shown = round(found.value, found.decimals) if isinstance(found.value, float) and found.decimals is not None else found.value
        if texts.get("disagrees") and found.disagrees is None:
            return Row(station, key, "taken", says, None, f"it says itself that its inputs give another figure: {texts['disagrees']}")
        return Row(station, key, "differs", says, shown, found.what)
    return Row(station, key, "agrees", says, found.value, found.what)


def attempt(station: str, key: str, says: Any, texts: dict[str, str], recompute: Callable[[], Found | str]) -> Row:
    """Recompute one value and judge it. A receipt of a stranger may hold anything: what its data cannot give is told, not raised."""
    try:
        found = recompute()
    except FieldbookError as error:
        return Row(station, key, "not_recomputed", says, None, str(error))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        first = (str(error).splitlines() or [""])[0][:120]
        return Row(station, key, "not_recomputed", says, None, f"the receipts' data do not give it ({type(error).__name__}: {first})")
    if isinstance(found, str):
        return Row(station, key, "taken", says, None, found)
    return judged(station, key, says, texts, found)
