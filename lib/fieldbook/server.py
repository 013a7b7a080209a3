"""The vLLM server: its command line, launch under a supervisor, waiting, finding it again, stopping it."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bootlog, diagnosis, files, live, paths, processes
from .errors import BadInput, GateFailed
from .schema import Baseline, Parallel, Params, is_secret, without_secrets

HOST = "127.0.0.1"
# Set for every server: no network look-ups, no usage statistics.
QUIET_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class CommandLine:
    """What starts a server. `env` holds only what Fieldbook sets, not the inherited environment."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def shown(self) -> str:
        """As a person would type it, one option per line, without machine paths."""
        root = str(paths.root())
        words = [shlex.quote(word.replace(root + "/", "")) for word in without_secrets(list(self.argv))]
        words[0] = "python"
        lines = [f"{key}={'***' if is_secret(key) else shlex.quote(value)} \\" for key, value in self.env.items()] + [" ".join(words[:3])]
        for word in words[3:]:
            if word.startswith("--"):
                lines[-1] += " \\"
                lines.append(f"    {word}")
            else:
                lines[-1] += f" {word}"
        return "\n".join(lines)


def weights_dir(params: Params) -> Path:
    """Folder of the weights that the params name."""
    return Path(params.model.path) if params.model.path else paths.model_weights_dir(params.model.name)


def command_line(params: Params, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...], port: int) -> CommandLine:
    """argv and environment of one arm: data in, command out, nothing else decides.

    The `vllm` script is not used because it looks its version up under the distribution name vllm, which the CPU build does not have.
    """
    engine = params.engine
    argv = [engine.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(weights_dir(params)), "--served-model-name", params.model.name]
    argv += ["--host", HOST, "--port", str(port)]
    argv += ["--dtype", engine.dtype, "--max-model-len", str(engine.max_model_len)]
    argv += ["--max-num-seqs", str(engine.max_num_seqs), "--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    argv += ["--tensor-parallel-size", str(arm.tensor_parallel_size), "--pipeline-parallel-size", str(arm.pipeline_parallel_size)]
    if (dcp := getattr(arm, "decode_context_parallel_size", 1)) > 1:
        argv += ["--decode-context-parallel-size", str(dcp)]
    if engine.enforce_eager:
        argv += ["--enforce-eager"]
    if engine.kv_cache_dtype != "auto":
        argv += ["--kv-cache-dtype", engine.kv_cache_dtype]
    if engine.block_size_tokens:
        argv += ["--block-size", str(engine.block_size_tokens)]
    if not engine.prefix_caching:
        argv += ["--no-enable-prefix-caching"]
    if engine.draft_tokens:
        argv += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": engine.draft_tokens})]
    env = dict(QUIET_ENV)
    if engine.device == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(engine.kv_cache_gib_per_rank)
        # Binding threads to cores needs as many free cores as ranks have threads; a shared machine has not.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if engine.omp_threads_per_rank:
            env["OMP_NUM_THREADS"] = str(engine.omp_threads_per_rank)
    else:
        argv += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
        if engine.kv_cache_gib_per_rank:
            argv += ["--kv-cache-memory-bytes", str(engine.kv_cache_gib_per_rank * 2**30)]
    if arm.pipeline_parallel_size > 1:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layers_per_stage))
    return CommandLine(tuple(argv + params.server.extra_args), {**env, **params.server.extra_env})


def free_port(wanted: int) -> int:
    """The wanted port, or any free one for 0. Raises GateFailed when the wanted one is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError:
            raise GateFailed(f"server.port: {wanted} on {HOST} is taken; stop what listens there, or give 0 for any free port") from None
        return probe.getsockname()[1]


def launch(params: Params, arm: Parallel | Baseline, layers_per_stage: tuple[int, ...], run_dir: Path, name: str) -> Path:
    """Start a server under a supervisor and return its state file at once. `name` names its log and state in the run folder."""
    if not (weights_dir(params) / "config.json").is_file():
        raise BadInput(f"model.path: no config.json in {weights_dir(params)}; `python -m fieldbook model FILE` prepares a model that has a source")
    folder = run_dir / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port(params.server.port)
    command = command_line(params, arm, layers_per_stage, port)
    state_file, log = folder / f"{name}.json", folder / f"{name}.log"
    if state_file.is_file():
        # A notebook that was interrupted and is run again, or a walk killed a moment ago, whose supervisor would write into the new state.
        stop(state_file)
    log.unlink(missing_ok=True)
    state = {
        "status": "starting",
        "name": name,
        "model": params.model.name,
        "port": port,
        "owner": str(processes.owner_of_servers()),
        "argv": command.argv,
        "env": command.env,
        "log": str(log),
        "stop_timeout_s": params.server.stop_timeout_s,
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


def wait_ready(state_file: Path, timeout_s: float, progress: Callable[[str], None] = lambda text: None) -> tuple[float, list[tuple[str, float]]]:
    """Wait until /health answers. Returns (seconds waited, [(phase, seconds after the start)]).

    Raises GateFailed with the root error from the log when the server dies or does not get ready in time; it is stopped then.
    """
    import httpx

    start, passed = time.monotonic(), []
    while True:
        waited = time.monotonic() - start
        state = read_state(state_file)
        text = bootlog.clean(log_text(state))
        for phase in bootlog.phases(text):
            if phase not in [p for p, _ in passed]:
                passed.append((phase, round(waited, 1)))
                progress(f"{state['name']}: {phase} after {waited:.0f} s")
        # Right after the launch the supervisor has not written 'running' yet; a supervisor that never does was killed at once.
        died = not is_up(state) and (state["status"] != "starting" or waited > 20)
        if died or waited > timeout_s:
            # Stopping first: only then has the supervisor written why the server ended.
            ended = stop(state_file)
            cause = bootlog.root_error(log_text(state) if died else text) or (ended.get("reason") if died else f"not ready after {timeout_s:.0f} s")
            way_out = diagnosis.told(log_text(state))
            raise GateFailed(f"server {state['name']} did not start: {cause}; its log is servers/{Path(state['log']).name}{way_out}")
        try:
            if state["status"] == "running" and httpx.get(f"http://{HOST}:{state['port']}/health", timeout=2).status_code == 200:
                return waited, passed
        except httpx.HTTPError:
            pass
        time.sleep(0.25)


def complete(state: dict[str, Any], prompt: str, max_tokens: int, timeout_s: float = 120) -> dict[str, Any]:
    """One greedy chat completion: {"text", "finish_reason", "prompt_tokens", "completion_tokens"}. Raises GateFailed when the server does not answer it."""
    import httpx

    body = {"model": state["model"], "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    try:
        answer = httpx.post(f"http://{HOST}:{state['port']}/v1/chat/completions", json=body, timeout=timeout_s)
    except httpx.HTTPError as error:
        raise GateFailed(f"server {state['name']} does not answer: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise GateFailed(f"server {state['name']} answered with status {answer.status_code}: {answer.text[:200]}")
    document = answer.json()
    choice, usage = document["choices"][0], document["usage"]
    return {
        "text": choice["message"]["content"] or "",
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
    }


def running_code(state: dict[str, Any], places: list[tuple[str, str]], ranks: int) -> list[live.Answer]:
    """What each rank of a running server, and its engine, say about these (file, symbol) of vLLM. Raises GateFailed as live.ask does."""
    try:
        return live.ask(Path(state["live"]), places, ranks)
    except GateFailed as error:
        raise GateFailed(f"server {state['name']}: {error}") from None


def stop(state_file: Path) -> dict[str, Any]:
    """Stop a server and return its final state; one that has ended already is left alone, a killed supervisor is stood in for."""
    state = read_state(state_file)
    if state["status"] == "ended" and not state.get("server"):
        return state
    supervisor = processes.parse(state["supervisor"]) if state.get("supervisor") else None
    if state["status"] == "starting":
        # The supervisor was launched a moment ago and has not written yet, or never came up.
        for _ in range(40):
            time.sleep(0.25)
            state = read_state(state_file)
            if state["status"] != "starting":
                return stop(state_file)
        return state
    if supervisor and processes.is_alive(supervisor):
        os.kill(supervisor.pid, 15)
        deadline = time.monotonic() + state["stop_timeout_s"] + 20
        while processes.is_alive(supervisor) and time.monotonic() < deadline:
            time.sleep(0.1)
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
        served = httpx.get(f"http://{HOST}:{state['port']}/v1/models", timeout=10).json()["data"]
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return state if model in [entry["id"] for entry in served] else None
