"""Gates of this machine and this moment: port, exposure, foreign processes, environment, checkpoint."""

import ipaddress

from ..command import LOCAL
from .ruling import Launch, Ruling

# A desktop and its services take less.
FOREIGN_CORES = 0.5


def port(launch: Launch) -> Ruling | None:
    """The wanted port can be had."""
    if launch.facts is None:
        return None
    if launch.facts.port_taken.startswith("server.host"):
        return Ruling("refuse", launch.facts.port_taken, "bind", (f"server.host {LOCAL}", "an address of this machine (`ip addr`)"))
    if launch.facts.port_taken:
        return Ruling("refuse", launch.facts.port_taken, "bind", ("server.port 0, for any free one", "stop what listens there (`ss -ltnp`)"))
    return Ruling("pass", f"port {launch.params.server.port or 'any free one'} on {launch.params.server.host}", "bind")


def is_local(host: str) -> bool:
    """Whether only this machine reaches a server on that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposure(launch: Launch) -> Ruling:
    """Nothing listens beyond this machine without a key."""
    asked = launch.params.server
    local = is_local(asked.host)
    if not local and not asked.api_key:
        reason = f"server.host {asked.host} is reached from elsewhere, and anybody could use the server"
        return Ruling("refuse", reason, "params", ("server.api_key $NAME, with the key in that variable", f"server.host {LOCAL}"))
    if asked.api_key and launch.facts is not None and not launch.facts.api_key_set:
        return Ruling("refuse", f"server.api_key: {asked.api_key} is not set in this environment", "environment", (f"export {asked.api_key[1:]}=...",))
    if launch.facts is not None and launch.facts.unset:
        shown = ", ".join(launch.facts.unset)
        return Ruling("refuse", f"server.extra_env: {shown} is not set in this environment", "environment", (f"export {launch.facts.unset[0][1:]}=...",))
    where = "only this machine reaches it" if local else f"reached at {asked.host}"
    return Ruling("pass", f"{where}, {'with a key' if asked.api_key else 'no key'}", "params")


def foreign_processes(launch: Launch) -> Ruling | None:
    """Nobody else computes on the devices: it would take memory, and spoil what is measured."""
    if launch.facts is None:
        return None
    if launch.facts.walk is not None:
        ways = ("wait until it is done",)
        reason = f"a walk runs on this machine (process {launch.facts.walk or 'unknown'}), which patches and measures"
        return Ruling("refuse", reason, "its socket", ways, "foreign_processes")
    if launch.params.engine.device == "cpu":
        cores, names = launch.facts.busy_cores, launch.facts.busy
        if cores is None:
            return Ruling("not checked", "nothing tells who computes on this machine")
        if cores > FOREIGN_CORES:
            reason = f"others take {cores:.1f} cores, and measured rates will suffer{': ' if names else ''}{', '.join(names)}"
            return Ruling("warn", reason, "/proc", ("stop them, or wait (`top`)",))
        return Ruling("pass", "nobody else computes on the CPUs", "/proc")
    busy = {gpu: names for gpu, names in launch.facts.gpu_processes.items() if names and gpu in launch.facts.cards}
    if busy:
        shown = "; ".join(f"GPU {gpu}: {', '.join(names)}" for gpu, names in busy.items())
        ways = ("stop them, or wait", "server.extra_env CUDA_VISIBLE_DEVICES with free cards")
        return Ruling("refuse", f"others compute on the devices: {shown}", "NVML", ways, "foreign_processes")
    return Ruling("pass", "nobody else computes on the devices", "NVML")


def environment(launch: Launch) -> Ruling | None:
    """No variable left over in the shell changes the server without the params saying so."""
    if launch.facts is None:
        return None
    if launch.facts.inherited:
        ways = ("say it in server.extra_env, where the report shows it", "unset it")
        return Ruling("warn", f"inherited from this shell and in no params: {', '.join(launch.facts.inherited)}", "environment", ways)
    return Ruling("pass", "nothing inherited that vLLM, torch or NCCL read", "environment")


def checkpoint(launch: Launch) -> Ruling | None:
    """All shards are there, with the bytes that their headers say and the tensors that the index says."""
    if launch.facts is None:
        return None
    facts, wanted = launch.facts, launch.params.model.headers_sha256
    if facts.checkpoint:
        return Ruling("refuse", facts.checkpoint, "headers of the .safetensors files", ("fetch the checkpoint again, whole", "model.path of another folder"))
    if facts.checkpoint_doubt:
        ways = ("fetch the checkpoint again, whole", "server.allow [checkpoint], for one whose maker wrote another size into its index")
        return Ruling("refuse", facts.checkpoint_doubt, facts.checkpoint_told, ways, "checkpoint")
    if facts.checkpoint_pending:
        ways = () if launch.params.model.made_up else ("`fieldbook model FILE` makes it",)
        return Ruling("not checked", facts.checkpoint_pending, ways_out=ways)
    if not facts.checkpoint_told:
        return Ruling("not checked", "the checkpoint has no .safetensors files to look into")
    if wanted and wanted != facts.checkpoint_sha256:
        reason = f"headers have sha256 {facts.checkpoint_sha256[:16]}..., and model.headers_sha256 says {wanted[:16]}...: another checkpoint"
        return Ruling("refuse", reason, facts.checkpoint_told, ("the checkpoint that was meant", "model.headers_sha256 of this one"))
    return Ruling("pass", facts.checkpoint_told, f"sha256 of headers {facts.checkpoint_sha256}")


def served_model(launch: Launch) -> Ruling | None:
    """What is served under model.name is the model that was planned with."""
    if launch.facts is None:
        return None
    name = launch.params.model.name
    if launch.facts.other_model:
        reason = f"would be served as {name}, but the checkpoint's config.json is of another model: {launch.facts.other_model}"
        return Ruling("refuse", reason, f"data/models/{name}/config.json", ("model.path of that model", "model.name of this one"))
    return Ruling("pass", f"served as {name}, the model that was planned with", f"data/models/{name}/config.json")
