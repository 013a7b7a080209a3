"""One YAML file per box: reading it, and the one line that a wrong value gets.

Sections: box, model, engine, parallel, server, benchmarks, probes, verdict (`schema`). Notebooks receive the same sections as papermill
parameters, so a params file and an injected cell are validated by the same code.
"""

import difflib
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from . import drafts, memory, paths, secrecy, served_by
from .errors import BadInput, short
from .schema import Baseline, Measuring, Parallel, Params, describe, metric_label, metric_names

__all__ = ["Baseline", "Parallel", "Params", "describe", "load", "metric_label", "metric_names", "validate", "validate_measuring"]

Checked = TypeVar("Checked", bound=BaseModel)


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
    return validate(read(file), str(file))


def read(file: str | Path) -> Any:
    """The sections of a params file as they stand there, not validated. Raises BadInput for what is no YAML file."""
    file = Path(file)
    shown = str(file) if str(file).isprintable() else repr(str(file))
    try:
        there = file.is_file()
    except (OSError, ValueError) as error:
        raise BadInput(f"{shown[:120]}: no such params file ({getattr(error, 'strerror', None) or error})") from None
    if not there:
        known = sorted(p.stem for p in (paths.root() / "params").glob("*.yml"))
        raise BadInput(f"{shown}: no such params file; params/ has {', '.join(known)}")
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise BadInput(f"{file}: line {line}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise BadInput(f"{file}: not a YAML file in UTF-8: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise BadInput(f"{file}: nested too deeply; a params file has sections with keys") from None


def validate(sections: Any, where: str) -> Params:
    """Validate the sections as a params file or a notebook gives them; `where` names the source in the message."""
    if not isinstance(sections, dict):
        raise BadInput(f"{where}: got {short(sections)}, expected the sections {', '.join(Params.model_fields)}")
    params = _checked(Params, sections, where)
    served_by.check(params, where)
    _check_against_model(params, where)
    return _lowered(params)


def validate_measuring(sections: dict[str, Any], where: str) -> Measuring:
    """The sections `benchmarks` and `probes` by themselves, for a server that no params file describes."""
    return _checked(Measuring, sections, where)


def _checked(model: type[Checked], sections: Any, where: str) -> Checked:
    try:
        return model.model_validate(sections)
    except ValidationError as error:
        problems = list({_location(problem): problem for problem in reversed(error.errors())}.values())[::-1]
        # A misspelt key explains why the right one is missing.
        problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise BadInput(f"{where}: {_explain(problems[0])}{more}") from None


def _lowered(params: Params) -> Params:
    """The params with drafting switched off where `auto` comes to nothing, and the reason kept in engine.draft_lowered."""
    why = drafts.why_lowered(params.engine, params.parallel, memory.model_spec(params.model.name))
    kept = params.engine.draft_lowered if not params.engine.draft_tokens else ""
    if why == kept == params.engine.draft_lowered:
        return params
    engine = params.engine.model_copy(update={"draft_lowered": why or kept, "draft_tokens": 0 if why else params.engine.draft_tokens})
    return params.model_copy(update={"engine": engine})


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


def _got(location: tuple, value: Any) -> str:
    """A wrong value in a message; a secret, or what may hold one, is not repeated."""
    section = 2 if location[:2] == ("verdict", "baseline") else 1
    if location[0] in ("server", "verdict") and location[section : section + 1] in (("api_key",), ("extra_args",), ("extra_env",)):
        one = len(location) == section + 2 and not isinstance(value, (list, dict))
        plain = one and location[section] != "api_key" and not secrecy.is_secret(str(location[-1]))
        if not plain:
            return f"a {type(value).__name__}"
    return secrecy.scrubbed(short(value), ())


def _explain(problem: dict) -> str:
    location = _location(problem)
    # A variable given as one text, NAME=value, would bring its value along.
    key = ".".join(str(part).partition("=")[0] for part in location)
    if not key.isprintable():
        key = repr(key)
    kind, got = problem["type"], _got(location, problem.get("input"))
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
    attention_heads, kv_heads = memory.heads(spec)
    arms = {"parallel": params.parallel, "verdict.baseline": params.verdict.baseline}
    for key, arm in arms.items():
        tp, pp, split = arm.tensor_parallel_size, arm.pipeline_parallel_size, arm.layer_partition
        if attention_heads % tp:
            fitting = [n for n in range(1, attention_heads + 1) if attention_heads % n == 0]
            raise BadInput(
                f"{where}: {key}.tensor_parallel_size: got {tp}, which does not divide the {attention_heads} attention heads of {params.model.name}; "
                f"one of {', '.join(map(str, fitting))} would"
            )
        if kv_heads % tp and tp % kv_heads:
            raise BadInput(
                f"{where}: {key}.tensor_parallel_size: got {tp}, but the {kv_heads} KV heads of {params.model.name} must be divided by it or divide it"
            )
        if pp > spec.num_hidden_layers:
            raise BadInput(
                f"{where}: {key}.pipeline_parallel_size: got {pp}, more than the {spec.num_hidden_layers} layers of {params.model.name}; "
                "at most one stage per layer"
            )
        # With one stage there is nothing to cut: the gate of the partition warns, and the server is told nothing.
        if pp > 1 and isinstance(split, list) and (len(split) != pp or sum(split) != spec.num_hidden_layers):
            raise BadInput(
                f"{where}: {key}.layer_partition: got {split} ({len(split)} stages, {sum(split)} layers), expected {pp} numbers that sum to the "
                f"{spec.num_hidden_layers} layers of {params.model.name}"
            )
    engine, bench, layout = params.engine, params.benchmarks, params.parallel
    try:
        # With the cards' memory known the ledger would estimate instead, and what was given would be dropped in silence.
        memory.given_kv_gib(engine.available_kv_gib or [0.0], layout.pipeline_parallel_size)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None
    for i, boot in enumerate(engine.other_boots):
        if boot.layer_partition == layout.layer_partition:
            raise BadInput(f"{where}: engine.other_boots.{i}: {boot.layer_partition} is parallel.layer_partition, whose space is engine.available_kv_gib")
        stages, own = layout.pipeline_parallel_size, layout.layer_partition
        if not isinstance(own, list) or not engine.available_kv_gib:
            raise BadInput(f"{where}: engine.other_boots: goes with engine.available_kv_gib and a list of layers in parallel.layer_partition")
        if len(boot.layer_partition) != stages or sum(boot.layer_partition) != spec.num_hidden_layers or len(boot.available_kv_gib) != stages:
            raise BadInput(
                f"{where}: engine.other_boots.{i}: got {boot.layer_partition} with {boot.available_kv_gib}, expected {stages} stages that sum to the "
                f"{spec.num_hidden_layers} layers of {params.model.name}, and as many GiB"
            )
    if layout.tensor_parallel_size % layout.decode_context_parallel_size:
        raise BadInput(
            f"{where}: parallel.decode_context_parallel_size: got {layout.decode_context_parallel_size}, "
            f"which does not divide tensor_parallel_size {layout.tensor_parallel_size}"
        )
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
    for key in ("trial_tokens", "answer_tokens"):
        if getattr(params.probes, key) < engine.max_model_len:
            continue
        raise BadInput(
            f"{where}: probes.{key}: got {getattr(params.probes, key)}, but prompt and answer have to fit in engine.max_model_len {engine.max_model_len}"
        )
    metrics = metric_names(params)
    if params.verdict.primary_metric not in metrics:
        raise BadInput(
            f"{where}: verdict.primary_metric: got {params.verdict.primary_metric!r}, which these benchmarks do not measure; one of {', '.join(metrics)}"
        )
