"""A failed log as rules read it: without colours and prefixes, without the source text that a traceback quotes, and with broken messages joined."""

import re
from dataclasses import dataclass
from functools import cached_property

from ..bootlog.errors import _WHO as WHO
from ..bootlog.lines import HEAD, PREFIX, clean

# A message goes over this many lines at most, as terminals and people break them.
_JOINED = 6
# In a traceback: the statement that raises, and the string literals of the message it makes.
_RAISES = re.compile(r"\s*raise \w[\w.]*\(")
_LITERAL = re.compile(r"\s*(?:[fr]{0,2}[\"']|\.\.\.<\d+ lines>|\)|[~^]+\s*$)")
_BLANK = re.compile(r"\s+")


@dataclass(frozen=True)
class Log:
    """A log's text, as it was pasted."""

    text: str

    @cached_property
    def raw(self) -> list[str]:
        """Physical lines without colours."""
        return clean(self.text).splitlines()

    @cached_property
    def lines(self) -> list[str]:
        """The same without the names and times in front; '' where the line is source text of a raise, which says what might have happened."""
        found, quoted = [], False
        for line in self.raw:
            bare = WHO.sub("", line)
            head = HEAD.match(bare)
            bare = bare[head.end() :].lstrip(" ]") if head else bare
            indented = WHO.sub("", line)
            source = _RAISES.match(bare) or (quoted and _LITERAL.match(bare))
            quoted = bool(source)
            found.append("" if source else bare if head else indented)
        return found

    def window(self, number: int) -> str:
        """The message that begins on a line (from 0), with what may be its continuation, white space as single blanks."""
        return _BLANK.sub(" ", " ".join(self.lines[number : number + _JOINED])).strip()

    def is_quiet(self, number: int) -> bool:
        """Whether a line was told at a level below that of a warning."""
        head = HEAD.match(WHO.sub("", self.raw[number]))
        return head is not None and head["level"] in ("DEBUG", "INFO")

    def speaker(self, number: int) -> str:
        """Name of the process that wrote a line, '' where it does not say."""
        found = PREFIX.search(self.raw[number])
        return (found["name"] or found["bare"] or "") if found else ""

    def says(self, pattern: str) -> re.Match | None:
        """The first place anywhere in the log, white space loose, where a pattern is."""
        return self.says_before(len(self.raw), pattern)

    def says_before(self, number: int, pattern: str) -> re.Match | None:
        """The same among the lines before one."""
        return re.search(pattern.replace(" ", r"\s+"), "\n".join(self.raw[:number]))

    @property
    def partition(self) -> list[int]:
        """VLLM_PP_LAYER_PARTITION where the log, or the command in front of it, shows it."""
        found = re.search(r"VLLM_PP_LAYER_PARTITION[\"']?\s*[=:]\s*[\"']?(\d+(?:\s*,\s*\d+)+)", "\n".join(self.raw))
        return [int(part) for part in found[1].split(",")] if found else []

    @property
    def version(self) -> str | None:
        """vLLM's version as the log shows it."""
        found = self.says(r"\bversion (0\.\d+[\w.+]*)") or self.says(r"\(v(0\.\d+[\w.+]*)\)")
        return found[1] if found else None
