"""The load generator: vLLM's own benchmark client in one long-lived process, driven by JSON lines.

`client` starts it; the process itself is `python -m fieldbook.load`. One process because importing the client takes longer than a measurement.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import processes
from .errors import GateFailed


@contextmanager
def client(log: Path, api_key: str = "") -> Iterator[Callable[[list[str], list[str]], dict]]:
    """A function that sends prompts (arguments as for `vllm bench serve`, then the prompts) and returns vLLM's result document.

    The document has two more keys: client_cpu_s, what the load process computed meanwhile, and client_wall_s. The function raises GateFailed when the
    client fails or dies; everything it prints goes to `log`. api_key: what the server asks for.
    """
    # vLLM itself may lie on the search path.
    search = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": search}
    # A proxy of the environment is not for a server of this machine; vLLM's client would ask it.
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1", "localhost", "::1"]))
    # Where vLLM's client looks for it; in its arguments every user of the machine could read it.
    env |= {"OPENAI_API_KEY": api_key} if api_key else {}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "fieldbook.load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env=env,
            preexec_fn=processes.die_with_parent,
        )

    def run(arguments: list[str], prompts: list[str]) -> dict:
        try:
            process.stdin.write(json.dumps({"arguments": arguments, "prompts": prompts}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise GateFailed(f"the load client died; see {log.name}")
        answer = json.loads(line)
        if "error" in answer:
            raise GateFailed(f"the load client failed: {answer['error']}")
        return answer["result"]

    try:
        yield run
    finally:
        # It holds nothing worth a goodbye, and its own would take two seconds; a line left unsent in its pipe does not matter either.
        process.kill()
        process.wait()
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()


@contextmanager
def client_if(live: bool, log: Path, api_key: str = "") -> Iterator[Callable[[list[str], list[str]], dict] | None]:
    """`client` for a live box; for a recorded one nothing is started and the function is None."""
    if not live:
        yield None
        return
    with client(log, api_key) as run:
        yield run


def main() -> None:
    """Answer each line of arguments on stdin with one line of result on stdout until stdin closes."""
    import asyncio

    answers = os.fdopen(os.dup(1), "w")
    # vLLM prints its own tables on stdout; they belong into the log.
    os.dup2(2, 1)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for line in sys.stdin:
        try:
            asked = json.loads(line)
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as prompts:
                prompts.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in asked["prompts"])
                prompts.flush()
                parser = FlexibleArgumentParser()
                serve.add_cli_args(parser)
                arguments = parser.parse_args([*asked["arguments"], "--dataset-path", prompts.name])
                cpu_s, wall_s = time.process_time(), time.monotonic()
                result = asyncio.run(serve.main_async(arguments))
                answer = {"result": {**result, "client_cpu_s": time.process_time() - cpu_s, "client_wall_s": time.monotonic() - wall_s}}
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
