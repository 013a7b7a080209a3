"""Gates of the layout: the split, the parallel sizes, and cuts that answer wrong."""

from .. import partition, strategy
from ..inventory.measure_worker import visible_gpus
from ..kv import stage_flips
from ..partition.rules import RECURRENT, both_kinds, deepstack_first, kv_sharing_whole, own_indices, ple_first
from ..patches import MENDED
from .ruling import Launch, Ruling, needs


def _best(launch: Launch) -> tuple[str, ...]:
    return launch.alternatives or ("`fieldbook partition FILE` lists the splits that are right",)


def partition_form(launch: Launch) -> Ruling:
    """One positive number of layers for each stage, which sum to the model's; with one stage a partition only says too much."""
    asked, layers, total = launch.arm.layer_partition, launch.layers, launch.spec.num_hidden_layers
    shown = "+".join(map(str, layers))
    if launch.stages == 1:
        if isinstance(asked, list) and asked != [total]:
            told = "+".join(map(str, asked))
            return Ruling("warn", f"parallel.layer_partition {told} is ignored: with PP 1 there is nothing to cut", f"PP 1, {total} layers")
        return Ruling("pass", f"one stage with all {total} layers")
    evidence, problems = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, layers))}, PP {launch.stages}, {total} layers", []
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in layers):
        problems.append(f"{shown} has a stage without a positive number of layers")
    if len(layers) != launch.stages:
        problems.append(f"{shown} has {len(layers)} stages, PP is {launch.stages}")
    if not problems and sum(layers) != total:
        problems.append(f"{shown} has {sum(layers)} of {total} layers")
    if problems:
        return Ruling("refuse", "; ".join(problems), evidence, (f"{launch.stages} positive numbers that sum to {total}", "parallel.layer_partition best"))
    return Ruling("pass", f"{shown} = {total} layers", evidence)


def parallel_sizes(launch: Launch) -> Ruling:
    """TP divides heads, experts and quantization groups; EP, DCP and PCP have what they need; the pipeline has a layer for each stage."""
    capability = min((float(g.compute_capability) for g in (launch.box.gpus if launch.box else []) if g.compute_capability), default=None)
    here = strategy.strategy_of(launch.arm)
    found = strategy.vetoes_of(here, launch.spec, launch.params, capability)
    if launch.arm.tensor_parallel_size % launch.arm.decode_context_parallel_size:
        found.append(strategy.Veto(f"DCP{launch.arm.decode_context_parallel_size} does not divide TP{launch.arm.tensor_parallel_size}", "config/parallel.py"))
    if launch.arm.expert_parallel and not any(layer.mlp.experts for layer in launch.spec.layers):
        found.append(strategy.Veto(f"expert parallel, and {launch.spec.name} has no experts", "config/model.py:verify_with_parallel_config"))
    if found:
        ways = launch.alternatives or ("`fieldbook partition FILE` lists the layouts that can run",)
        return Ruling("refuse", "; ".join(veto.reason for veto in found), "; ".join(veto.source for veto in found), ways)
    return Ruling("pass", f"{here.name}: heads, experts and context parallelism as vLLM wants them")


def devices(launch: Launch) -> Ruling:
    """A rank needs a GPU of its own; the CPU build needs none."""
    if launch.params.engine.device == "cpu":
        return Ruling("pass", "cpu is there")
    if launch.box is None:
        return Ruling("not checked", "nothing tells the GPUs of this box", ways_out=("`fieldbook capture DIR` on the box",))
    seen = visible_gpus(launch.params.extra_env_of(launch.arm).get("CUDA_VISIBLE_DEVICES"), len(launch.box.gpus))
    answering = [g for g in launch.box.gpus if not g.lost]
    have, need = len(answering if seen is None else [g for g in answering if g.index in seen]), launch.arm.ranks
    if not have:
        ways = ("engine.device cpu", "install the driver; `nvidia-smi` must list the cards")
        return Ruling("refuse", "engine.device is cuda, and no GPU answers", launch.box.source, ways)
    if have < need:
        return Ruling("refuse", f"the layout takes {need} GPUs, and the box has {have} that answer", launch.box.source, _best(launch))
    return Ruling("pass", f"{need} of {have} GPUs")


def index_sharing(launch: Launch) -> Ruling | None:
    """A stage that starts on layers which use the top-k indices of layers before the cut answers wrong without an error."""
    rule = own_indices(launch.spec, launch.stages)
    if rule is None or launch.stages == 1 or not launch.bounds:
        return None
    cut, mode = rule.broken_by(launch.bounds), launch.index_sharing
    if not cut:
        return Ruling("pass", "every stage starts on a layer that computes its own top-k indices", rule.source)
    text = "; ".join(cut)
    if mode == "relay":
        return Ruling("pass", f"the indices are relayed over the cut ({text})", "patch index-relay, which the gate of the patches asks for")
    evidence = partition.indexer_evidence(launch.params, launch.spec)
    if mode == "clean":
        ways = (*launch.alternatives[:1], "parallel.index_sharing relay (the patch index-relay sends the indices along)")
        return Ruling("refuse", f"{text}: wrong answers without an error", rule.source, ways, "index_sharing")
    flipped = tuple(i for stage in stage_flips(launch.spec, launch.layers, "flip") for i in stage)
    shown = ", ".join(map(str, flipped))
    if evidence.allows(flipped):
        return Ruling("pass", f"layer {shown} computes its own indices", f"patch index-flip; {evidence.source}")
    ways = (*launch.alternatives[:1], "parallel.index_sharing relay, which needs no weights")
    reason = f"flip needs indexer weights for layer {shown}, which this checkpoint is not known to have: it would compute with uninitialised memory"
    if not launch.live and "tensor names" not in evidence.source:
        # Nothing is launched of a recorded box, and only a stated size speaks against it.
        return Ruling("warn", reason, f"{evidence.source}; {len(partition.sharing_layers(launch.spec))} layers share", ways)
    return Ruling("refuse", reason, evidence.source, ways, "index_sharing")


def boundary_sums(launch: Launch) -> Ruling | None:
    """Models that send partial sums of their tensor-parallel ranks over the boundary, where stock vLLM takes them for whole ones."""
    wanted = [n for n in needs(launch) if n.patch == "tp-partial"]
    if not wanted:
        return None
    row = launch.defect("tp-partial")
    ways = ("`fieldbook patches apply --id tp-partial`", "tensor_parallel_size 1", "pipeline_parallel_size 1")
    if row is None:
        return Ruling("not checked", f"whether tp-partial is mended in the vLLM that serves is not known: {wanted[0].why}", ways_out=ways)
    if row["state"] in MENDED:
        return Ruling("pass", f"tp-partial: {row['state']} in the vLLM that serves", row["file"])
    return Ruling("refuse", f"tp-partial: {row['state']} in the vLLM that serves, and {wanted[0].why}", row["file"], ways, "boundary_sums")


def unverified_stages(launch: Launch) -> Ruling | None:
    """Four stages and more of a model with sparse latent attention: a field report saw a fifth of the answers degenerate, and nobody has shown them right."""
    if not [n for n in needs(launch) if n.name == strategy.UNVERIFIED]:
        return None
    why = "field report 001: 20% of the answers degenerate without drafting, 45% with, at PP4 unpatched; nobody has shown it right since"
    tp, ranks = launch.arm.tensor_parallel_size, launch.arm.ranks
    fewer = f"fewer stages, such as TP{tp * launch.stages // 2} x PP2 with a clean split" if launch.stages % 2 == 0 else "fewer stages"
    ways = (
        *(launch.alternatives[:1] or (fewer,)),
        f"one stage: TP{ranks} x PP1",
        "server.allow [unverified_pp], and the degeneration probes before anybody relies on it",
    )
    return Ruling("refuse", f"PP{launch.stages} of {launch.spec.name} is unverified", why, ways, "unverified_pp")


def ngram_layers(launch: Launch) -> Ruling | None:
    """Layers with an n-gram embedding lie on the first stage, which alone has token ids."""
    rule = ple_first(launch.spec, launch.stages)
    return _of_rule(launch, rule, "n-gram layers lie on the first stage")


def both_layer_kinds(launch: Launch) -> Ruling | None:
    """Every stage of a hybrid has attention and recurrent layers: one without chooses another block size, or fails."""
    if not any(layer.attention.kind in RECURRENT for layer in launch.spec.layers):
        return None
    return _of_rule(launch, both_kinds(launch.spec, launch.stages), "every stage has attention and recurrent layers")


def shared_caches(launch: Launch) -> Ruling | None:
    """Layers that share one KV cache lie on one stage."""
    return _of_rule(launch, kv_sharing_whole(launch.spec, launch.stages), "layers that share a KV cache lie on one stage")


def visual_features(launch: Launch) -> Ruling | None:
    """Layers that features of the image encoder are added to lie on the first stage."""
    return _of_rule(launch, deepstack_first(launch.spec, launch.stages), "layers with visual features lie on the first stage")


def _of_rule(launch: Launch, rule: partition.Rule | None, good: str) -> Ruling | None:
    if rule is None or launch.stages == 1 or not launch.bounds:
        return None
    broken = rule.broken_by(launch.bounds)
    return Ruling("refuse", "; ".join(broken), f"{rule.source}: {rule.reason}", _best(launch)) if broken else Ruling("pass", good, rule.source)
