"""Causes that are about the model and how it is cut: parallel sizes, partitions, loaders, state types, and the known pipeline defects."""

import re

from .log import Log
from .rules import Rule

_SPECULATIVE = r"speculative[-_]config|speculative\.py|draft_model_config|num_speculative_tokens"
_QUANTIZED = r"AWQ|GPTQ|W4A16|NVFP4|MXFP4|FP8|quantiz"


def _divisors(number: int, most: int = 64) -> str:
    return ", ".join(str(size) for size in range(1, most + 1) if number % size == 0)


def _drafting(match: re.Match, log: Log, line: int) -> bool:
    return log.says(_SPECULATIVE) is not None


def _heads(match: re.Match, log: Log, line: int) -> str:
    return f"choose a tensor-parallel size that divides {match[1]}: {_divisors(int(match[1]))}"


def _architecture(log: Log) -> str:
    found = log.says(r"Resolved architecture: (\w+)")
    return found[1] if found else "the model"


def _no_pipeline(match: re.Match, log: Log, line: int) -> str:
    version = f" in vLLM {log.version}" if log.version else " in this vLLM"
    return f"{_architecture(log)} cannot be cut into pipeline stages{version}"


def _missing(match: re.Match, log: Log, line: int) -> tuple[str, str]:
    """What a weight that no parameter takes means, and the way out."""
    name, layer, total = match[1], int(match[2]), sum(log.partition)
    if total and layer >= total:
        return (
            f"the loader meets {name}, a weight of layer {layer}: the {total} layers of the split end before it, it is the checkpoint's extra MTP layer",
            "the split is right; take a newer vLLM, whose loader skips that layer, or serve without a pipeline",
        )
    if (stage := re.search(r"_PP(\d+)", log.speaker(line))) and int(stage[1]) > 0 and layer == 0:
        return (
            f"the loader of pipeline stage {stage[1]} looks for {name}, which lies on the first stage: this model's loader does not know pipelines",
            "serve this model without a pipeline (tensor parallel), or take a newer vLLM, whose loader skips weights of other stages",
        )
    why = ": quantization is not laid out as this vLLM expects" if log.says(_QUANTIZED) else ""
    return (
        f"the checkpoint has {name}, and the model built no parameter of that name{why}",
        "take the vLLM release that the checkpoint names, or another quantization of the model",
    )


def _ring(match: re.Match, log: Log, line: int) -> str:
    ring, block = int(match[1]), int(match[2])
    fits = [drafts for drafts in range(1, 13) if block % (4 * -(-(4 + drafts) // 4)) == 0]
    good = f"with --block-size {block} it may be {', '.join(map(str, fits))}" if fits else f"no number of drafts suits --block-size {block}"
    return f"change num_speculative_tokens, from which the ring of {ring} follows: {good}"


RULES = (
    Rule(
        "heads-not-divisible",
        r"number of attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        lambda match, log, line: f"{match[1]} attention heads cannot be shared by {match[2]} tensor-parallel ranks",
        _heads,
    ),
    Rule(
        "experts-not-divisible",
        r"n_physical_experts=(\d+) must be divisible by ep_size=(\d+)",
        lambda match, log, line: f"{match[1]} experts cannot be shared by {match[2]} expert-parallel ranks",
        lambda match, log, line: f"choose an expert-parallel size that divides {match[1]} ({_divisors(int(match[1]), 16)}, ...), "
        f"or add redundant experts: num_redundant_experts {-int(match[1]) % int(match[2])}",
    ),
    Rule(
        "experts-on-cpu",
        r"Segfault encountered",
        "experts are spread over CPU ranks, whose kernel takes the number of any expert for one of its own",
        "leave --enable-expert-parallel out: tensor parallelism cuts each expert instead, and a pipeline keeps whole layers",
        when=lambda match, log, line: log.says(r"cpu_fused_moe") is not None and log.says(r"enable_expert_parallel|_EP\d|--enable-expert-parallel") is not None,
    ),
    Rule(
        "partition-count",
        r"len\(partitions\)=(\d+) does not match pp_size=(\d+)",
        lambda match, log, line: f"VLLM_PP_LAYER_PARTITION has {match[1]} numbers, and the process that reads it has {match[2]} pipeline stage(s)",
        lambda match, log, line: f"give {match[2]} numbers; where it has 1 stage it is a helper process or a draft, which the variable must not reach"
        if match[2] == "1"
        else f"give {match[2]} numbers with commas between, one for each stage",
    ),
    Rule(
        "partition-sum",
        r"sum\(partitions\)=(\d+) does not match num_hidden_layers=(\d+)",
        lambda match, log, line: f"VLLM_PP_LAYER_PARTITION counts {match[1]} layers, and the model has {match[2]}",
        lambda match, log, line: f"let the numbers add up to {match[2]}; `fieldbook partition FILE` finds the best",
    ),
    Rule(
        "partition-form",
        r"Invalid partition string: (\S+)",
        lambda match, log, line: f"VLLM_PP_LAYER_PARTITION is {match[1]}, which is no list of whole numbers",
        "write layers per stage with commas between, such as 41,37",
    ),
    Rule(
        "draft-without-pipeline",
        r"Pipeline parallelism is not supported for this model",
        "the draft model (speculative decoding) cannot be served in a pipeline, which says nothing about the model itself",
        "leave --speculative-config out, or serve without a pipeline; vLLM 0.30 and later draft on the last stage for most MTP models",
        when=_drafting,
    ),
    Rule(
        "model-without-pipeline",
        r"Pipeline parallelism is (?:not supported for this model|only supported for the following)",
        _no_pipeline,
        "serve with tensor parallelism only, or take a newer vLLM that lists this model as SupportsPP",
        when=lambda match, log, line: "only supported" in match[0] or not _drafting(match, log, line),
    ),
    Rule(
        "ple-needs-first-stage",
        r"(?:N-gram PLE embedding (?:currently )?requires pipeline_parallel_size=1|PLE CPU offload is not supported: PP=\d+)",
        "Qwen4Exp refuses pipelines: only the first stage has the token ids that its n-gram embedding reads",
        "`fieldbook patches apply --id ple-containment` lets pipelines pass whose first stage holds all n-gram layers; stock: serve with PP=1",
    ),
    Rule(
        "index-sharing-cut",
        r"this pipeline stage begins with layer (\d+), which reads top-k indices that an earlier layer computes",
        lambda match, log, line: f"a pipeline cut before layer {match[1]} parts layers that share top-k indices (Fieldbook's index-guard)",
        "cut where a layer computes its own indices (`fieldbook partition FILE --index-sharing clean`), or apply index-relay",
    ),
    Rule(
        "indexer-weights-missing",
        r"layer (\d+) has to compute its own top-k indices on this pipeline stage, and the checkpoint is not known to have indexer weights",
        lambda match, log, line: f"index-flip is applied, and the checkpoint has no indexer weights for layer {match[1]}",
        "cut where a layer computes its own indices, or apply index-relay instead",
    ),
    Rule(
        "kv-ghost",
        r"StopIteration\s*$|StopIteration (?=\(|Traceback|Exception)",
        "a stage was planned KV tensors of layers that lie on other stages, and found no group for them",
        "`fieldbook patches apply --id kv-ghost`",
        when=lambda match, log, line: log.says(r"allocate_kv_cache|_reshape_kv_cache|initialize_kv_cache|initialize_from_config") is not None,
    ),
    Rule(
        "stage-buffer-missing",
        r"AssertionError",
        "a pipeline stage has no buffer for what the stage before sends: it is only made in a dummy run, which did not happen",
        "`fieldbook patches apply --id cpu-eager-pp`, or leave --enforce-eager out",
        when=lambda match, log, line: log.says_before(line + 1, r"sync_and_gather_intermediate_tensors") is not None,
    ),
    Rule(
        "draft-takes-first-stage",
        r"AssertionError",
        "the draft model takes its stage for one that has to be given tensors by a stage before",
        "`fieldbook patches apply --id mtp-stage`, or draft nothing",
        when=lambda match, log, line: log.says_before(line + 1, r"\w*mtp\.py.*\n(?:.*\n)?.*assert intermediate_tensors is not None") is not None,
    ),
    Rule(
        "weight-without-parameter",
        r"KeyError: '([\w.]*layers\.(\d+)\.[\w.]+)'",
        lambda match, log, line: _missing(match, log, line)[0],
        lambda match, log, line: _missing(match, log, line)[1],
        sure="medium",
    ),
    Rule(
        "state-type-mismatch",
        r"Mismatched type for \w+ between then block \(<\[[^\]]*\], (\w+)>\) and else block \(<\[[^\]]*\], (\w+)>\)",
        lambda match, log, line: f"the recurrent state is kept in {match[1]} and computed in {match[2]}: the convolution's kernel does not take both",
        "leave --mamba-cache-dtype at auto, and set only --mamba-ssm-cache-dtype; do not change --block-size for it",
        when=lambda match, log, line: {match[1], match[2]} in ({"fp32", "bf16"}, {"fp32", "fp16"}),
    ),
    Rule(
        "state-page-mismatch",
        r"(?:page size is not divisible by the maximum page size|[Ff]ailed to unify .{0,40}page size|page sizes? .{0,40}(?:must be equal|do(?:es)? not match))",
        "recurrent state and attention blocks do not fit into pages of one size, as when stages disagree on the type of the state",
        "give every stage the same --mamba-ssm-cache-dtype (float32 where the model declares it); do not raise --block-size",
        sure="medium",
    ),
    Rule(
        "draft-ring-block-size",
        r"QSA ring capacity (\d+) must divide the attention block size (\d+)",
        lambda match, log, line: f"drafting needs a ring of {match[1]} tokens, which does not divide the block of {match[2]}",
        _ring,
    ),
    Rule(
        "moe-backend",
        r"moe_backend='(\w+)' is not supported for unquantized MoE",
        lambda match, log, line: f"--moe-backend {match[1]} takes quantized experts only, and some are not: often those of the draft layer",
        "leave --moe-backend at auto",
    ),
    Rule(
        "longer-than-model",
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \([\w ]*=?(\d+)",
        lambda match, log, line: f"max_model_len {match[1]} is more than the {match[2]} that the model's config allows",
        lambda match, log, line: f"lower max_model_len to {match[2]}, or give the model's rope scaling with --hf-overrides",
    ),
    Rule(
        "wrong-quantization",
        r"Quantization method specified in the model config \(([\w-]+)\) does not match the quantization method specified in the "
        r"`?quantization`? argument \(([\w-]+)\)",
        lambda match, log, line: f"the checkpoint is quantized as {match[1]}, and --quantization says {match[2]}",
        "leave --quantization out: vLLM reads it from the checkpoint",
    ),
    Rule(
        "quantization-needs-newer-card",
        r"quantization method (\S+) is not supported for the current GPU\. Minimum capability: (\d+)\. Current capability: (\d+)",
        lambda match, log, line: f"{match[1]} needs compute capability {int(match[2]) / 10:g}, and this card has {int(match[3]) / 10:g}",
        "take a checkpoint with a quantization that this card can run (GPTQ and AWQ run from 7.5)",
    ),
)
