"""What is asked: the cases of every probe, out of the prompt sets and the params."""

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..bench.prompts import WORDS
from ..bench.target import Target, count_tokens
from ..schema import Probes

PROBES = ("degeneration", "identity", "short", "questions", "needle", "tools")
LABELS = {
    "degeneration": "degenerate samples",
    "identity": "identity: unsound answers",
    "short": "short prompts: unsound answers",
    "questions": "questions: wrong answers",
    "needle": "needle: not found",
    "tools": "tool calls: failed round trips",
}


@dataclass(frozen=True)
class Case:
    """One request. `expect`: what the answer has to match; sampled: with temperature, else greedy; tool: function, argument, value, result."""

    id: str
    probe: str
    language: str
    messages: list[dict[str, Any]]
    max_tokens: int
    expect: str = ""
    sampled: bool = False
    tool: dict[str, str] = field(default_factory=dict)


@cache
def sets() -> dict[str, Any]:
    """The prompt sets."""
    return yaml.safe_load((Path(__file__).parent / "sets.yml").read_text(encoding="utf-8"))


def of_languages(name: str, languages: list[str]) -> list[dict[str, Any]]:
    """The prompts of one set in these languages."""
    return [entry for entry in sets()[name] if entry["language"] in languages]


def degeneration(probes: Probes, salt: str) -> list[Case]:
    """Agent-style prompts in turn, sampled; each begins otherwise, so that none is a repetition."""
    prompts = of_languages("agent", probes.languages)
    found = []
    for trial in range(probes.trials):
        entry = prompts[trial % len(prompts)]
        system = f"Session {salt}-{trial + 1}. {entry['system']}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": entry["user"]}]
        found.append(Case(f"{entry['id']}-{trial + 1}", "degeneration", entry["language"], messages, probes.trial_tokens, sampled=True))
    return found


def short(probes: Probes) -> list[Case]:
    """Identity prompts, short prompts in turn, questions with a known answer, and the params' own prompts; greedy."""
    found = []
    for name in ("identity", "short", "questions"):
        for entry in of_languages(name, probes.languages):
            found.append(Case(entry["id"], name, entry["language"], _user(entry["user"]), probes.answer_tokens, entry.get("expect", "")))
    own = [Case(f"own-{number}", "short", "", _user(text), probes.answer_tokens) for number, text in enumerate(probes.prompts, 1)]
    return found + own


def tools(probes: Probes) -> list[Case]:
    """Tool-call round trips."""
    return [
        Case(entry["id"], "tools", entry["language"], _user(entry["user"]), probes.answer_tokens + 32, entry["expect"], tool=entry)
        for entry in of_languages("tools", probes.languages)
    ]


def needles(probes: Probes, target: Target, max_model_len: int, salt: str) -> list[Case]:
    """A fact at several depths of prompts whose length is a share of the longest request. Raises GateFailed where the server cannot count a chat."""
    found = []
    for entry in of_languages("needle", probes.languages):
        for share in probes.needle_shares:
            room = int(share * max_model_len) - probes.answer_tokens
            filler = _filler(target, entry, room, f"{salt}/{share}")
            for depth in probes.needle_depths:
                place = int(depth * len(filler))
                text = " ".join([*filler[:place], entry["fact"], *filler[place:], entry["user"]])
                case_id = f"{entry['id']}-{share:.0%}-at-{depth:.0%}"
                found.append(Case(case_id, "needle", entry["language"], _user(text), probes.answer_tokens, entry["expect"]))
    return found


def _filler(target: Target, entry: dict[str, Any], room: int, seed: str) -> list[str]:
    """Sentences of no meaning that fill a chat with this fact and question up to so many tokens."""
    draw = random.Random(seed)
    sentences = [" ".join(draw.choice(WORDS) for _ in range(9)).capitalize() + "." for _ in range(max(1, room // 9))]
    few, many = 0, len(sentences)
    while few < many:
        middle = (few + many + 1) // 2
        fits = count_tokens(target, messages=_user(" ".join([*sentences[:middle], entry["fact"], entry["user"]]))) <= room
        few, many = (middle, many) if fits else (few, middle - 1)
    return sentences[:few]


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
