"""All rules: what is looked for, what it means, and what to do. The rules themselves lie by subject in the modules beside this one."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..bootlog.lines import loosely
from .log import Log

Say = Callable[[re.Match, Log, int], str]


@dataclass(frozen=True)
class Rule:
    """id: short name of the cause. pattern: looked for in a message, blanks loose; when(match, log, line): what else must hold.

    what: one sentence with the log's own figures; remedy: the way out. kind: 'cause'; 'echo', which follows from a failure elsewhere; 'notice', which is no
    failure at all. at_info: told below the level of a warning as well, where other causes are only talked about. sure: 'high' where the words leave no
    doubt, 'medium' where they fit more than one cause.
    """

    id: str
    pattern: str
    what: Say | str
    remedy: Say | str
    kind: str = "cause"
    sure: str = "high"
    at_info: bool = False
    when: Callable[[re.Match, Log, int], bool] = lambda match, log, line: True

    def match(self, message: str) -> re.Match | None:
        """Where in a message, None where it is not."""
        return self._loose.search(message)

    @cached_property
    def _loose(self) -> re.Pattern:
        return loosely(self.pattern)


def said(text: Say | str, match: re.Match, log: Log, line: int) -> str:
    """A rule's sentence for one match."""
    return text if isinstance(text, str) else text(match, log, line)
