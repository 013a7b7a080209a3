"""What a log says of the whole server: version, sizes, attention backend, draft model."""

import re
from dataclasses import dataclass

from .lines import CUT, Said, loosely
from .ranks import STARTS

_BETWEEN = " \0 "


def _whole(pattern: str, text: str) -> list[str]:
    """The first group of each match that the end of the log has not cut short."""
    return [found[1] for found in loosely(pattern).finditer(text) if not text.startswith(CUT, found.end())]


_BACKENDS = (
    r"Using (\w+) attention backend",
    r"Using AttentionBackendEnum\.(\w+) backend",
    r"Using ([\w -]+?) backend on V1 engine",
    r"Using (\w+) backend out of potential backends",
    r"Using (\w+) backend \(selected via",
    r"Using ([\w /-]+?) backend\.",
)
# What else has a backend: experts, encoders, the prefill half of MLA, sampling, communication.
_ATTENTION = re.compile(r"(?i)attn|attention|flash|xformers|sdpa|mla|pallas|ipex|triton|flex|turboquant")
_OTHER = re.compile(r"(?i)moe|prefill|gemm|linear|quantiz|sampl|vit\b|encoder|reduce")


@dataclass(frozen=True)
class SetUp:
    """What a log says of the whole server; None and () where it does not. Sizes are those asked for, or those of the prefixes seen."""

    vllm_version: str | None
    engine: str | None
    runner: str | None
    attention_backends: tuple[str, ...]
    tp_size: int | None
    pp_size: int | None
    dp_size: int | None
    partition: tuple[int, ...] | None
    block_size_tokens: int | None
    kv_cache_layout: str | None
    kv_cache_dtype: str | None
    padding_layers: int | None
    checkpoint_gib: float | None
    spec_method: str | None
    spec_tokens: int | None
    utilization: float | None
    max_seq_len: int | None


def read(messages: list[Said]) -> SetUp:
    """Version, runner, backend, sizes, draft model and the like. Of several statements the last counts; of backends all are kept."""
    # Wraps undone: a blank in a pattern stands for any white space or none, and nothing is matched beyond a message.
    text = _BETWEEN.join(m.joined() for m in messages)
    # Where nothing marks the end of a value, it ends with its line.
    by_line = _BETWEEN.join(part for m in messages for part in m.parts)
    config = next((m.joined() for m in reversed(messages) if STARTS.search(m.joined())), "")
    args = next((m.joined() for m in reversed(messages) if "non-default" in m.joined()), "")

    def told(configured: str, argument: str, option: str) -> str | None:
        """By the engine's configuration, by the server's arguments, or by a command line pasted along."""
        for pattern, where in ((configured, config), (argument, args), (option, by_line)):
            if pattern and where and (found := _whole(pattern, where)):
                return found[0]
        return None

    def last(pattern: str, where: str = text) -> str | None:
        found = _whole(pattern, where)
        return found[-1] if found else None

    def number(value: str | None) -> int | None:
        return None if value is None or len(value) > 12 else int(value)

    def size(word: str, short: str) -> int | None:
        option = rf"(?:--{word}-parallel-size|-{short})[= ](\d+)"
        return number(told(rf"\b{word}_parallel_size=(\d+)", rf"'{word}_parallel_size': (\d+)", option))

    version = (
        last(r"LLM engine \(v([^)\s]+)\)") or last(rf"[█▀▄] +version ([^\s{CUT}]+)", by_line) or last(rf"vLLM API server version (\d[^\s{CUT}]*)", by_line)
    )
    layers = last(r"unevenly partitioned: \[([\d, ]+)\]") or last(r"VLLM_PP_LAYER_PARTITION[\"']?\s*[=:]\s*[\"']?(\d+(?:,\d+)+)(?![,\d])", by_line)
    method = told(
        r"SpeculativeConfig\(method=['\"](\w+)", r"'speculative_config': \{[^}]*'method': '(\w+)'", r"--speculative-config\S* ?\W*\{[^}]*\"method\": ?\"(\w+)\""
    )
    depth = told(r"num_spec_tokens=(\d+)", r"'num_speculative_tokens': (\d+)", r"--speculative-config\S* ?\W*\{[^}]*\"num_speculative_tokens\": ?(\d+)")
    engine, runner = _generation(text, messages)
    checkpoint, utilization = last(r"Checkpoint size: (\d{1,12}\.\d\d) GiB"), told("", r"'gpu_memory_utilization': (\d{1,3}(?:\.\d{1,12})?)(?![\d.])", "")
    return SetUp(
        vllm_version=version,
        engine=engine,
        runner=runner,
        attention_backends=_backends(text),
        tp_size=size("tensor", "tp"),
        pp_size=size("pipeline", "pp"),
        dp_size=size("data", "dp"),
        partition=tuple(int(n) for n in re.findall(r"\d{1,6}", layers)) or None if layers else None,
        block_size_tokens=number(told("", r"'block_size': (\d+)", r"--block-size[= ](\d+)")),
        kv_cache_layout=last(r"[Uu]sing (\w+) (?:KV|kv) cache layout"),
        kv_cache_dtype=told(r"\bkv_cache_dtype=(\w+)", r"'kv_cache_dtype': '(\w+)'", r"--kv-cache-dtype[= ](\w+)"),
        padding_layers=number(last(r"Add (\d+) padding layers")),
        checkpoint_gib=float(checkpoint) if checkpoint else None,
        spec_method=method or last(r"Speculative decoding \(method=(\w+)\) is enabled"),
        spec_tokens=number(depth),
        utilization=float(utilization) if utilization else None,
        max_seq_len=number(told(r"\bmax_seq_len=(\d+)", r"'max_model_len': (\d+)", "") or last(r"Using max model len (\d+)", by_line)),
    )


def _generation(text: str, messages: list[Said]) -> tuple[str | None, str | None]:
    """(engine generation, model runner), 'V0', 'V1' or 'V2': where vLLM says so, else by the source file that a message comes from."""
    files = {message.file for message in messages}
    v1_files = {"kv_cache_utils.py", "gpu_worker.py", "gpu_model_runner.py", "cpu_worker.py"}
    v1 = loosely(r"V1 LLM engine").search(text) or files & v1_files or any(who.name.startswith("EngineCore") for m in messages for who in m.speakers)
    v0 = loosely(r"V0 LLM engine|# \w+ blocks: \d+, # CPU blocks").search(text)
    if loosely("using the V1 model runner").search(text):
        runner = "V1"
    elif loosely("Using V2 Model Runner").search(text):
        runner = "V2"
    else:
        # v1/worker/gpu/model_runner.py is the second runner; worker/model_runner.py was V0's.
        runner = "V1" if files & {"gpu_model_runner.py", "cpu_model_runner.py", "tpu_model_runner.py"} else "V2" if v1 and "model_runner.py" in files else None
    return "V1" if v1 else "V0" if v0 else None, runner


def _backends(text: str) -> tuple[str, ...]:
    found = [(m.start(), m[1]) for pattern in _BACKENDS for m in loosely(pattern).finditer(text) if _ATTENTION.search(m[1]) and not _OTHER.search(m[1])]
    return tuple(dict.fromkeys(re.sub(r"(?<=[A-Z_])\s*attention$", "", name) for _, name in sorted(found)))
