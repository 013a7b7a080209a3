"""The vLLM server: launch under a supervisor, finding it again, asking it, stopping it. `command` has its command line, `starting` its start-up."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import files, live, processes, secrecy
from .command import LOCAL, command_line, weights_dir
from .errors import BadInput, GateFailed
from .inventory import Inventory
from .inventory.measure_worker import visible_gpus
from .schema import Baseline, Parallel, Params
from .watching import port_of


def reached_at(host: str) -> str:
    """Where a server that listens on `host` is asked from this machine: one that listens everywhere answers on the loopback."""
    return LOCAL if host in ("0.0.0.0", "") else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host


def url(state: dict[str, Any], path: str = "") -> str:
    """Address of a server by its state."""
    return f"http://{reached_at(state.get('host', LOCAL))}:{state['port']}{path}"


def api_key(state: dict[str, Any]) -> str:
    """The key that the server asks for, out of this environment; '' where it asks for none. The state holds only the variable's name."""
    reference = state.get("api_key") or ""
    return secrecy.resolved({"api_key": reference}, os.environ, "server")["api_key"] if reference else ""


def api_key_of(params: Params) -> str:
    """The key of the params' servers, as api_key has it. Raises BadInput where its variable is not set."""
    return api_key({"api_key": params.server.api_key})


def headers(state: dict[str, Any]) -> dict[str, str]:
    """HTTP headers that every request to it has to carry."""
    key = api_key(state)
    return {"Authorization": f"Bearer {key}"} if key else {}


def free_port(wanted: int, host: str = LOCAL) -> int:
    """The wanted port, or any free one for 0. Raises GateFailed when the wanted one is taken, or the host is none of this machine."""
    try:
        return port_of(wanted, host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise GateFailed(f"server.port: {wanted} on {host} is taken; stop what listens there, or give 0 for any free port") from None
        raise GateFailed(
            f"server.host: {host}: nothing can listen there on port {wanted} ({error.strerror or error}); give an address of this machine"
        ) from None


def launch(params: Params, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...], run_dir: Path, name: str, box: Inventory | None = None) -> Path:
    """Start a server under a supervisor and return its state file at once. `name` names its log and state in the run folder."""
    if not (weights_dir(params) / "config.json").is_file():
        raise BadInput(f"model.path: no config.json in {weights_dir(params)}; `python -m fieldbook model FILE` prepares a model that has a source")
    folder = run_dir / "servers"
    port = free_port(params.server.port, params.server.host)
    command = command_line(params, arm, layers_per_stage, port, box)
    # The supervisor inherits this environment, and puts the secrets in place of their names.
    secrecy.resolved(command.env, os.environ, "server.extra_env")
    folder.mkdir(parents=True, exist_ok=True)
    state_file, log = folder / f"{name}.json", folder / f"{name}.log"
    if state_file.is_file():
        # A notebook that was interrupted and is run again, or a walk killed a moment ago, whose supervisor would write into the new state.
        stop(state_file)
    log.unlink(missing_ok=True)
    state = {
        "status": "starting",
        "name": name,
        "model": params.model.name,
        "host": params.server.host,
        "port": port,
        "device": params.engine.device,
        "gpus": cards_of(params, arm) if params.engine.device == "cuda" else [],
        "api_key": params.server.api_key,
        "owner": str(processes.owner_of_servers()),
        "argv": command.argv,
        "env": command.env,
        "log": str(log),
        "stop_timeout_s": params.server.stop_timeout_s,
        "stall_timeout_s": params.server.stall_timeout_s,
        "layers_per_stage": layers_per_stage,
    }
    files.write_json(state_file, state)
    package_parent = str(Path(__file__).resolve().parents[1])
    search = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    subprocess.Popen(
        [sys.executable, "-m", "fieldbook.supervisor", str(state_file)],
        env={**os.environ, "PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return state_file


def cards_of(params: Params, arm: Parallel | Baseline) -> list[int]:
    """The GPUs of an arm's ranks by their numbers in NVML, as CUDA_VISIBLE_DEVICES of server.extra_env or of this environment orders them.

    Where it names them otherwise than by number, the first ones.
    """
    asked_for = params.extra_env_of(arm).get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    found = visible_gpus(asked_for, arm.ranks)
    return (list(range(arm.ranks)) if found is None else found)[: arm.ranks]


def read_state(state_file: Path) -> dict[str, Any]:
    """The state a supervisor keeps. Raises BadInput when the file is missing or damaged."""
    try:
        return json.loads(state_file.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{state_file}: no server state ({error})") from None


def is_up(state: dict[str, Any]) -> bool:
    """True while exactly the recorded server process runs, by pid and start time."""
    return state.get("status") == "running" and processes.is_alive(processes.parse(state["server"]))


def log_text(state: dict[str, Any]) -> str:
    """The server's log so far."""
    file = Path(state["log"])
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def asked(state: dict[str, Any], path: str, timeout_s: float):
    """The answer to a GET. Never through a proxy of the environment, which would get the key as well. Raises httpx.HTTPError."""
    import httpx

    return httpx.get(url(state, path), timeout=timeout_s, headers=headers(state), trust_env=False)


def _posted(state: dict[str, Any], path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The answer's JSON. Raises GateFailed with one line for anything but status 200 with a JSON object."""
    import httpx

    try:
        answer = httpx.post(url(state, path), json=body, timeout=timeout_s, headers=headers(state), trust_env=False)
    except httpx.HTTPError as error:
        raise GateFailed(f"server {state['name']} does not answer: {type(error).__name__}") from None
    return object_of(sound(answer, f"server {state['name']}", api_key(state)), f"server {state['name']}")


def sound(answer, who: str, key: str):
    """An HTTP answer of status 200. Raises GateFailed for any other, with what it says but no secret; `who` names the server, `key` is the one it was sent."""
    if answer.status_code != 200:
        said = " ".join(secrecy.scrubbed(answer.text, [*secrecy.secret_values(), *filter(None, [key])])[:200].split())
        raise GateFailed(f"{who} answered with status {answer.status_code}: {said}")
    return answer


def object_of(answer, who: str) -> dict[str, Any]:
    """The JSON object that an HTTP answer holds. Raises GateFailed where it holds none."""
    try:
        document = answer.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise GateFailed(f"{who} answered with status 200 and no JSON object: {answer.text[:100]!r}")
    return document


def complete(state: dict[str, Any], prompt: str, max_tokens: int, timeout_s: float = 120) -> dict[str, Any]:
    """One greedy chat completion: {"text", "finish_reason", "prompt_tokens", "completion_tokens"}. Raises GateFailed when the server does not answer it."""
    body = {"model": state["model"], "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    document = _posted(state, "/v1/chat/completions", body, timeout_s)
    try:
        choice, usage = document["choices"][0], document["usage"]
        return {
            "text": choice["message"]["content"] or "",
            "finish_reason": choice["finish_reason"],
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
        }
    except (KeyError, IndexError, TypeError) as error:
        raise GateFailed(f"server {state['name']} answered without {error} where a chat completion has it") from None


def first_token(state: dict[str, Any], timeout_s: float) -> None:
    """One token of a plain completion, which needs no chat template. Raises GateFailed when none comes."""
    body = {"model": state["model"], "prompt": "The", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    document = _posted(state, "/v1/completions", body, timeout_s)
    usage, choices = document.get("usage"), document.get("choices")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if tokens != 1 or not choices:
        raise GateFailed(f"server {state['name']} was asked for one token and answered with {tokens}")


def running_code(state: dict[str, Any], places: list[tuple[str, str]], ranks: int) -> list[live.Answer]:
    """What each rank of a running server, and its engine, say about these (file, symbol) of vLLM. Raises GateFailed as live.ask does."""
    try:
        return live.ask(Path(state["live"]), places, ranks)
    except GateFailed as error:
        raise GateFailed(f"server {state['name']}: {error}") from None


def stop(state_file: Path) -> dict[str, Any]:
    """Stop a server and return its final state; one that has ended already is left alone, a killed supervisor is stood in for.

    Returns when its processes are gone, its port is free and its GPUs have their memory back.
    """
    state = read_state(state_file)
    if state["status"] == "ended" and not state.get("server"):
        return state
    supervisor = processes.parse(state["supervisor"]) if state.get("supervisor") else None
    if state["status"] == "starting" and not supervisor:
        # The supervisor was launched a moment ago and has not written yet, or never came up.
        for _ in range(40):
            time.sleep(0.25)
            state = read_state(state_file)
            if state["status"] != "starting" or state.get("supervisor"):
                return stop(state_file)
        return state
    if supervisor and processes.is_alive(supervisor):
        os.kill(supervisor.pid, 15)
        deadline = time.monotonic() + state["stop_timeout_s"] + 30
        while processes.is_alive(supervisor) and time.monotonic() < deadline:
            time.sleep(0.1)
        state = read_state(state_file)
    if state.get("server"):
        processes.end_session(processes.parse(state["server"]), 0 if state["status"] == "ended" else state["stop_timeout_s"])
    state = read_state(state_file)
    if state["status"] != "ended":
        state.update(status="ended", reason="its supervisor was killed")
        files.write_json(state_file, state)
    return state


def stop_all(run_dir: Path) -> list[str]:
    """Stop every server of a run folder; returns the names of those that were still up."""
    stopped = []
    for state_file in sorted((run_dir / "servers").glob("*.json")):
        try:
            state = read_state(state_file)
        except BadInput:
            # Nothing is known of this one; the others must still be stopped.
            stopped.append(f"{state_file.stem}: its state file is damaged")
            continue
        if state["status"] == "starting" or is_up(state) or (state.get("server") and processes.session_members(processes.parse(state["server"]))):
            stop(state_file)
            stopped.append(state["name"])
    return stopped


def find(state_file: Path, model: str) -> dict[str, Any] | None:
    """The running server of an earlier notebook: same process (pid and start time), same model, answering on its port; else None."""
    import httpx

    if not state_file.is_file():
        return None
    state = read_state(state_file)
    if not is_up(state) or state["model"] != model or not processes.is_alive(processes.parse(state["owner"])):
        return None
    try:
        served = asked(state, "/v1/models", 10).json()["data"]
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return state if model in [entry["id"] for entry in served] else None
