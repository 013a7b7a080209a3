"""Asking: many cases at once, each answer with what is wrong with it."""

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from .. import files
from ..bench.target import Target
from ..errors import GateFailed
from ..schema import Probes
from .cases import Case
from .degeneration import judge

TIMEOUT_S = 600.0
NO_TOOLS = "the server takes no tools"
NOTHING = {"text": "", "finish_reason": "", "prompt_tokens": 0, "completion_tokens": 0}


class Answer(BaseModel):
    """One answer. problems: what no answer may have, whatever the model; failed: why it fails its probe ('' where it passes); both are texts for people."""

    model_config = ConfigDict(frozen=True)
    arm: str
    probe: str
    case: str
    language: str
    concurrency: int
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    problems: list[str]
    failed: str


def ask_all(target: Target, cases: list[Case], probes: Probes, arm: str, concurrency: int, progress: Callable[[str], None]) -> list[Answer]:
    """All cases, so many at a time, in their order. A request that fails is an answer with a problem; a server that is gone raises GateFailed."""
    done = 0

    def one(case: Case) -> Answer:
        nonlocal done
        found = _round_trip(target, case, probes, arm, concurrency) if case.tool else _answer(target, case, probes, arm, concurrency)
        done += 1
        progress(f"{arm}: {case.probe}, {done} of {len(cases)} at concurrency {concurrency}")
        return found

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, cases))


def _body(target: Target, case: Case, probes: Probes) -> dict:
    sampling = {"temperature": probes.temperature, "top_p": probes.top_p} if case.sampled else {"temperature": 0}
    return {"model": target.model, "messages": case.messages, "max_tokens": case.max_tokens, "return_token_ids": True, **sampling}


def _answer(target: Target, case: Case, probes: Probes, arm: str, concurrency: int, messages: list | None = None) -> Answer:
    start = time.monotonic()
    try:
        document = target.post("/v1/chat/completions", _body(target, case, probes) | ({"messages": messages} if messages else {}), TIMEOUT_S)
        choice, usage = document["choices"][0], document["usage"]
        text = choice["message"]["content"] or ""
        found = {"text": text, "finish_reason": str(choice["finish_reason"]), "prompt_tokens": usage["prompt_tokens"]}
        found["completion_tokens"] = usage["completion_tokens"]
        problems = conformity(text, found["finish_reason"], found["completion_tokens"], case.max_tokens, choice.get("token_ids"), choice.get("stop_reason"))
    except (GateFailed, KeyError, IndexError, TypeError) as error:
        # A server that answers nothing any more is no property of a model's answers.
        target.get("/health", 30)
        why = str(error) if isinstance(error, GateFailed) else f"no {error} where a chat completion has it"
        found, problems = NOTHING, [f"no answer: {why}"]
    failed = problems[0] if problems else failure(case, found["text"], found["finish_reason"])
    return _as_answer(case, arm, concurrency, start, failed, problems, found)


def _as_answer(case: Case, arm: str, concurrency: int, start: float, failed: str, problems: list[str], found: dict[str, Any]) -> Answer:
    about = {"arm": arm, "probe": case.probe, "case": case.id, "language": case.language, "concurrency": concurrency}
    return Answer(**about, **found, elapsed_s=round(time.monotonic() - start, 3), problems=problems, failed=failed)


def conformity(
    text: str, finish_reason: str, completion_tokens: int, most_tokens: int, token_ids: list[int] | None, stop_reason: int | str | None = None
) -> list[str]:
    """What no answer of any model may have: nothing said, an unexpected end, wrong counts, the end of the sequence within it.

    token_ids and stop_reason as vLLM gives them; without a reason it was the end of the sequence that stopped the answer.
    """
    problems = []
    if not text.strip():
        problems.append("empty")
    if finish_reason not in ("stop", "length"):
        problems.append(f"finish reason {finish_reason}")
    if finish_reason == "length" and completion_tokens != most_tokens:
        problems.append(f"{completion_tokens} tokens, {most_tokens} were allowed")
    if token_ids is not None and len(token_ids) != completion_tokens:
        problems.append(f"usage says {completion_tokens} tokens, {len(token_ids)} came")
    if token_ids and finish_reason == "stop" and stop_reason is None and token_ids[-1] in token_ids[:-1]:
        problems.append("the end of the sequence comes more than once")
    return problems


def failure(case: Case, text: str, finish_reason: str) -> str:
    """Why an answer fails its probe; '' where it passes."""
    judged = judge(text)
    # A loop that the model itself ends is no endless one; what is no language is none however it ends.
    if judged.degenerate and (finish_reason == "length" or not judged.loops):
        return f"degenerate: {judged.reason}"
    if case.expect and not re.search(case.expect, text, re.IGNORECASE):
        return f"no match for {case.expect}"
    return ""


def _round_trip(target: Target, case: Case, probes: Probes, arm: str, concurrency: int) -> Answer:
    """Ask with a tool, give the tool's result back, look at the answer."""
    tool = case.tool
    parameters = {"type": "object", "properties": {tool["argument"]: {"type": "string"}}, "required": [tool["argument"]]}
    offered = [{"type": "function", "function": {"name": tool["function"], "description": f"Tells the {tool['function'][4:]}.", "parameters": parameters}}]
    start = time.monotonic()

    def none(failed: str) -> Answer:
        return _as_answer(case, arm, concurrency, start, failed, [], NOTHING)

    try:
        document = target.post("/v1/chat/completions", _body(target, case, probes) | {"tools": offered}, TIMEOUT_S)
        message = document["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        arguments = json.loads(calls[0]["function"]["arguments"]) if calls else {}
    except GateFailed as error:
        return none(NO_TOOLS if "tool" in str(error) else str(error))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return none(f"no tool call that can be read: {type(error).__name__}")
    if not calls or calls[0]["function"]["name"] != tool["function"]:
        return none("no call of the tool")
    if tool["value"] not in str(arguments.get(tool["argument"], "")).lower():
        return none(f"called with {json.dumps(arguments, ensure_ascii=False)[:80]}")
    turn = {"role": "assistant", "content": message.get("content") or "", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": tool["result"]}
    return _answer(target, case, probes, arm, concurrency, [*case.messages, turn, result])


def read_answers(file: Path) -> list[Answer]:
    """Answers of a JSON-lines file; none where there is no file. Raises BadInput for one that is damaged."""
    return files.read_models(file, Answer, "answers")


def keep_answers(file: Path, fresh: list[Answer]) -> None:
    """Add answers to a JSON-lines file, in place of those of the same arms. Written whole."""
    redone = {answer.arm for answer in fresh}
    files.write_models(file, [answer for answer in read_answers(file) if answer.arm not in redone] + fresh)
