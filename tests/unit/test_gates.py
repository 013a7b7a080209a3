"""Each gate with a launch that it refuses, or warns of, and one that it passes; escapes; and what a preview says as a command."""

import json
import os
from dataclasses import replace

import pytest
from conftest import ROOT, python, until

from fieldbook import gates, memory, serve, tables
from fieldbook.budget import Gpus
from fieldbook.errors import BadInput
from fieldbook.gates import Facts, look
from fieldbook.inventory import Gpu, Host, Inventory

GIB = 2**30
GLM, QWEN, SMALL = (str(ROOT / "params" / f"{name}.yml") for name in ("a100-x8-glm53", "cmp170hx-x3", "cpu-smollm2"))
LOOSE = ["engine.available_kv_gib=[]", "engine.other_boots=[]"]
PP4 = [*LOOSE, "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=4", "engine.draft_tokens=0"]
CLEAN = "parallel.index_sharing=clean"
# A machine with nothing against it.
SOUND = Facts(
    cards=tuple(range(8)),
    release="0.30.0", disk_free_bytes={"the run folder": 50 * GIB}, shm_free_bytes=GIB, memory_available_bytes=32 * GIB, busy_cores=0.1,
    checkpoint_told="272 tensors in 1 files", checkpoint_sha256="a" * 64,
)  # fmt: skip


def host(**told):
    return Host(memory_total_bytes=64 * GIB, memory_available_bytes=32 * GIB).model_copy(update=told)


def box(gpus=(), **of_host):
    empty = {"numa": {}, "driver": None, "cuda": None, "links": [], "nics": [], "ports": [], "islands": None, "cuts": [], "switches": None}
    return Inventory(source="a test", readings=[], host=host(**of_host), gpus=list(gpus), incomplete=[], notes=[], findings=[], measured=[], **empty)


def launch(file=SMALL, changes=(), layers=None, facts=SOUND, defects=(), cards=(), **told):
    """What the gates look at: a params file with changes, and facts of a machine that is not asked."""
    params = serve.with_changes(file, list(changes))
    layers = layers if layers is not None else serve.splits.resolve_split(params.parallel, memory.model_spec(params.model.name))
    recorded = params.model_copy(update={"box": params.box.model_copy(update={"kind": "recorded"})})
    found = look(recorded, params.parallel, tuple(layers), box=told.pop("where", box(cards)), defects=list(defects) if defects is not None else None)
    return replace(found, params=params, facts=facts, **told)


def ruling(gate, *args, **told):
    return gates.GATES[gate](launch(*args, **told))


def refuses(found, *words):
    """Refused, with these words in the reason, and a way out."""
    assert found.result == "refuse" and found.ways_out and all(word in found.reason for word in words), found
    return True


def passes(found):
    assert found is None or found.result == "pass", found
    return True


def test_every_gate_passes_a_sound_launch_and_its_row_is_whole():
    rows = gates.check(launch())
    assert {row["result"] for row in rows} == {"pass"} and not gates.refused(rows) and not gates.escaped(rows)
    assert all(set(row) == {"gate", "result", "reason", "evidence", "ways_out", "escape", "escaped"} and row["reason"] for row in rows)
    assert {"partition", "memory", "host memory", "port", "checkpoint", "known defects"} <= {row["gate"] for row in rows}


def test_partition_needs_one_positive_number_a_stage_that_sum_to_the_layers():
    assert passes(ruling("partition", layers=(20, 10)))
    assert refuses(ruling("partition", layers=(15, 14)), "29 of 30 layers")
    assert refuses(ruling("partition", layers=(30,)), "1 stages, PP is 2") and refuses(ruling("partition", layers=()), "0 stages")
    for wrong in ((0, 30), (-1, 31), (True, 29)):
        assert refuses(ruling("partition", layers=wrong), "without a positive number")
    assert refuses(ruling("partition", GLM, layers=(40, 37)), "77 of 78 layers")
    alone = ["parallel.pipeline_parallel_size=1", "parallel.layer_partition=[41, 37]"]
    told = ruling("partition", changes=alone)
    assert told.result == "warn" and "41+37 is ignored" in told.reason
    assert "VLLM_PP_LAYER_PARTITION" not in launch(changes=alone).command.env
    assert passes(ruling("partition", changes=["parallel.pipeline_parallel_size=1", "parallel.layer_partition=[30]"]))


def test_parallel_sizes_follow_heads_experts_and_context_parallelism():
    assert passes(ruling("parallel sizes", GLM))
    odd = launch(GLM)
    assert refuses(gates.GATES["parallel sizes"](replace(odd, arm=odd.arm.model_copy(update={"tensor_parallel_size": 3}))), "TP3 does not divide 64")
    uneven = odd.arm.model_copy(update={"decode_context_parallel_size": 3})
    assert refuses(gates.GATES["parallel sizes"](replace(odd, arm=uneven)), "DCP3 does not divide TP4")
    # DCP on sparse latent attention needs kernels of sm_90.
    a100 = Gpu(index=0, compute_capability="8.0", memory_total_bytes=80 * GIB)
    shared = [*LOOSE, "parallel.decode_context_parallel_size=2"]
    assert refuses(ruling("parallel sizes", GLM, shared, cards=[a100] * 8), "sm_90")
    assert passes(ruling("parallel sizes", GLM, shared, cards=[a100.model_copy(update={"compute_capability": "9.0"})] * 8))
    # Experts of width 640 are not cut by three ranks, and are spread whole with EP.
    wide = ["engine.available_kv_gib=[]", "parallel.layer_partition=default", "parallel.pipeline_parallel_size=1", "parallel.data_parallel_size=3"]
    assert refuses(ruling("parallel sizes", QWEN, wide), "EP keeps")
    assert passes(ruling("parallel sizes", QWEN, [*wide, "parallel.expert_parallel=true"]))
    assert refuses(ruling("parallel sizes", SMALL, ["parallel.expert_parallel=true"]), "has no experts")
    assert refuses(ruling("parallel sizes", QWEN, [*wide, "parallel.prefill_context_parallel_size=2"]), "PCP")


def test_devices_are_as_many_as_ranks():
    cards = [Gpu(index=i) for i in range(8)]
    assert passes(ruling("devices")) and passes(ruling("devices", GLM, cards=cards))
    assert refuses(ruling("devices", GLM, cards=cards[:7]), "takes 8 GPUs", "has 7")
    assert refuses(ruling("devices", GLM, cards=[*cards[:7], Gpu(index=7, lost="GPU is lost")]), "has 7")
    assert refuses(ruling("devices", GLM), "no GPU answers")
    assert ruling("devices", GLM, where=None).result == "not checked"
    assert refuses(ruling("devices", GLM, ["server.extra_env={CUDA_VISIBLE_DEVICES: '0,1,2,3'}"], cards=cards), "has 4")


def test_a_cut_through_shared_indices_is_refused_relayed_or_flipped_with_weights():
    clean = [CLEAN, "parallel.layer_partition=[42, 36]"]
    assert passes(ruling("index sharing", GLM, [*LOOSE, *clean]))
    cut = ruling("index sharing", GLM, [CLEAN])
    assert refuses(cut, "layer 41", "wrong answers without an error") and cut.escape == "index_sharing"
    assert "42+36" in cut.ways_out[0] and "665,152" in cut.ways_out[0]
    assert passes(ruling("index sharing", GLM, ["parallel.index_sharing=relay"]))
    # Flipped without weights: a recorded box says so; nothing is launched so on a live one.
    told = ruling("index sharing", GLM)
    assert told.result == "warn" and "layer 41" in told.reason and "not known to have" in told.reason
    assert refuses(ruling("index sharing", GLM, ["box.kind=live"]), "uninitialised memory")
    # A checkpoint as large as one with all indexers has them.
    assert passes(ruling("index sharing", GLM, ["model.checkpoint_gib=391.54", "box.kind=live"]))
    assert ruling("index sharing", SMALL) is None
    assert ruling("index sharing", GLM, [*LOOSE, "parallel.tensor_parallel_size=8", "parallel.pipeline_parallel_size=1"]) is None


@pytest.mark.parametrize(("split", "bad"), [((39, 39), True), ((41, 37), True), ((40, 38), True), ((42, 36), False), ((38, 40), False), ((45, 33), True)])
def test_clean_cuts_are_those_before_layers_that_compute_indices(split, bad):
    assert (ruling("index sharing", GLM, [*LOOSE, CLEAN], layers=split).result == "refuse") == bad


def defect(name, state, **more):
    row = {"id": name, "met_by_this_box": True, "state": state, "file": "a.py", "effect": "it dies", "mendable": True, "drop_when": "somebody mended it"}
    return {**row, **more}


def test_partial_sums_over_the_boundary_need_their_patch():
    open_ = ruling("boundary sums", GLM, defects=[defect("tp-partial", "present")])
    assert refuses(open_, "tp-partial", "wrong without an error") and open_.escape == "boundary_sums"
    assert refuses(ruling("boundary sums", GLM, defects=[defect("tp-partial", "not recognised")]), "not recognised")
    for state in ("patched", "fixed", "does not apply"):
        assert passes(ruling("boundary sums", GLM, defects=[defect("tp-partial", state)]))
    assert ruling("boundary sums", GLM, defects=None).result == "not checked"
    # One rank a stage, one stage, or another model: nothing partial crosses.
    one_rank = [*LOOSE, "parallel.tensor_parallel_size=1"]
    assert ruling("boundary sums", GLM, one_rank) is None and ruling("boundary sums", SMALL, ["parallel.tensor_parallel_size=3"]) is None
    assert ruling("boundary sums", GLM, [*LOOSE, "parallel.tensor_parallel_size=8", "parallel.pipeline_parallel_size=1"]) is None


def test_four_stages_of_such_a_model_are_refused_with_three_ways_out_and_an_escape():
    found = launch(GLM, [*PP4, "parallel.layer_partition=[20, 20, 20, 18]"], facts=None, defects=None, cards=[Gpu(index=i) for i in range(8)])
    rows = {row["gate"]: row for row in gates.check(found)}
    assert rows["unverified stages"]["result"] == "refuse" and len(rows["unverified stages"]["ways_out"]) == 3
    text = gates.refused(list(rows.values()))
    assert text.startswith("unverified stages: PP4") and "TP8 x PP1" in text and "TP4 x PP2" in text and "server.allow [unverified_pp]" in text
    through = replace(found, params=found.params.model_copy(update={"server": found.params.server.model_copy(update={"allow": ["unverified_pp"]})}))
    rows = gates.check(through)
    assert not gates.refused(rows) and len(gates.escaped(rows)) == 1 and "although: PP4" in gates.escaped(rows)[0]
    assert ruling("unverified stages", GLM) is None
    three = [*LOOSE, "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=3", "parallel.layer_partition=[26, 28, 24]"]
    assert ruling("unverified stages", GLM, three) is None


def test_an_escape_that_nothing_needs_is_told_and_one_does_not_open_other_gates():
    rows = gates.check(launch(changes=["server.allow=[index_sharing]"]))
    assert [row["result"] for row in rows if row["gate"] == "escapes"] == ["warn"] and not gates.refused(rows)
    assert refuses(ruling("index sharing", GLM, [CLEAN, "server.allow=[unverified_pp]"]))
    rows = gates.check(launch(GLM, [CLEAN, "server.allow=[unverified_pp]"], facts=None, defects=None))
    assert "index sharing" in gates.refused(rows)


def test_ngram_layers_lie_on_the_first_stage():
    assert passes(ruling("n-gram layers", QWEN)) and ruling("n-gram layers", SMALL) is None
    assert refuses(ruling("n-gram layers", QWEN, layers=(1, 23, 24)), "n-gram layer 1")


def test_every_stage_of_a_hybrid_has_both_kinds():
    assert passes(ruling("layer kinds", QWEN)) and ruling("layer kinds", SMALL) is None
    # Full attention is every fourth layer: 3, 7, ..., 47.
    assert refuses(ruling("layer kinds", QWEN, layers=(3, 21, 24)), "stage 0", "no attention layer")
    assert refuses(ruling("layer kinds", QWEN, layers=(24, 23, 1)), "stage 2", "no recurrent layer")


def test_drafting_by_method_release_runner_and_pipeline():
    ngram = ["engine.draft_method=ngram"]
    for release in ("0.29", "0.30"):
        assert refuses(ruling("drafting", GLM, [*ngram, f"engine.vllm_release='{release}'"]), "ngram")
    assert passes(ruling("drafting", GLM, [*ngram, "engine.vllm_release='0.32'"]))
    assert passes(ruling("drafting", GLM)) and ruling("drafting", SMALL) is None
    # Asked for by name it is refused where it cannot be; automatic it is lowered to none, and that is told.
    assert refuses(ruling("drafting", GLM, ["engine.draft_method=mtp", "engine.vllm_release='0.29'"]), "0.29")
    lowered = launch(GLM, ["engine.vllm_release='0.29'"])
    assert gates.GATES["drafting"](lowered).result == "warn" and "3 tokens" in gates.GATES["drafting"](lowered).reason
    assert "--speculative-config" not in lowered.command.argv and lowered.params.engine.draft_tokens == 0
    assert refuses(ruling("drafting", SMALL, ["engine.draft_method=mtp", "engine.draft_tokens=2"]), "no layers of multi-token prediction")
    assert refuses(ruling("drafting", SMALL, ["engine.draft_method=ngram", "engine.draft_tokens=2"]), "runner v2")
    alone = ["engine.draft_method=ngram", "engine.draft_tokens=2", "parallel.pipeline_parallel_size=1"]
    assert passes(ruling("drafting", SMALL, alone))
    own = ["engine.draft_model=/models/draft"]
    assert ruling("drafting", GLM, ["engine.draft_method=eagle3", *own]).result == "warn"
    for method in ("eagle", "eagle3", "medusa", "draft_model", "dflash", "custom_class"):
        assert refuses(ruling("drafting", SMALL, [f"engine.draft_method={method}", *alone[1:]]), "needs a draft model")
        assert passes(ruling("drafting", SMALL, [f"engine.draft_method={method}", *own, *alone[1:]]))
    assert refuses(ruling("drafting", SMALL, ["engine.draft_method=dspark", *own, *alone[1:]]), "runner v2 only")
    assert refuses(ruling("drafting", SMALL, ["engine.draft_method=extract_hidden_states", *alone[1:]]), "takes 1 token, not 2")
    one = [*LOOSE, "parallel.tensor_parallel_size=8", "parallel.pipeline_parallel_size=1"]
    stuck = ruling("drafting", GLM, [*one, "engine.runner=v2", *ngram])
    assert refuses(stuck, "runner v2 of 0.30") and stuck.ways_out[0].startswith("engine.runner auto")


def test_model_runner_is_pinned_in_a_pipeline_on_gpus():
    assert launch(GLM).command.env["VLLM_USE_V2_MODEL_RUNNER"] == "1" and passes(ruling("model runner", GLM))
    assert "VLLM_USE_V2_MODEL_RUNNER" not in launch().command.env and passes(ruling("model runner"))
    assert launch(GLM, ["engine.runner=v1"]).command.env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert ruling("model runner", GLM, ["engine.runner=v1"]).result == "warn"
    assert refuses(ruling("model runner", SMALL, ["engine.runner=v2"]), "Triton")
    assert refuses(ruling("model runner", GLM, ["engine.runner=v1", "parallel.prefill_context_parallel_size=2"]), "prefill context parallelism")
    assert refuses(ruling("model runner", QWEN, ["engine.runner=v1"]), "n-gram embeddings are in runner v2 only")
    assert passes(ruling("model runner", QWEN))


def test_state_has_the_type_that_the_model_declares_on_every_stage():
    assert passes(ruling("state dtype", QWEN)) and ruling("state dtype", SMALL) is None
    argv = launch(QWEN).command.argv
    assert argv[argv.index("--mamba-ssm-cache-dtype") + 1] == "float32"
    wrong = ruling("state dtype", QWEN, ["engine.state_dtype=bfloat16"])
    assert refuses(wrong, "bfloat16", "declares float32") and wrong.escape == "state_dtype"


def test_block_size_is_a_multiple_of_64_for_sparse_latent_attention():
    assert ruling("block size", GLM) is None and passes(ruling("block size", GLM, ["engine.block_size_tokens=128"]))
    assert refuses(ruling("block size", GLM, ["engine.block_size_tokens=80"]), "80", "multiple of 64")
    # Seen live: 16 and 48 end in select_common_block_size.
    for wrong in (7, 16, 48):
        assert refuses(ruling("block size", SMALL, [f"engine.block_size_tokens={wrong}"]), "multiple of 32", "CPU")
    assert passes(ruling("block size", SMALL, ["engine.block_size_tokens=96"]))
    dense = ["engine.device=cuda", "engine.block_size_tokens=40"]
    assert refuses(ruling("block size", SMALL, dense), "multiple of 16") and passes(ruling("block size", SMALL, [*dense[:1], "engine.block_size_tokens=48"]))
    assert "hides" in ruling("block size", QWEN, ["engine.block_size_tokens=1600"]).reason


def test_a_step_has_a_token_for_each_request():
    assert passes(ruling("step size")) and passes(ruling("step size", changes=["engine.max_num_seqs=2048"]))
    assert refuses(ruling("step size", changes=["engine.max_num_seqs=2049"]), "2048", "2049")


def test_sparse_latent_attention_needs_its_kernels():
    cards = {capability: [Gpu(index=i, compute_capability=capability) for i in range(8)] for capability in ("8.0", "9.0", "10.0")}
    live = ["box.kind=live"]
    old = ruling("kernels", GLM, live, cards=cards["8.0"])
    assert refuses(old, "sm_80") and old.escape == "kernels"
    assert ruling("kernels", GLM, cards=cards["8.0"]).result == "warn", "the report's box had a vLLM of its own"
    assert passes(ruling("kernels", GLM, live, cards=cards["9.0"])) and passes(ruling("kernels", GLM, live, cards=cards["10.0"]))
    assert ruling("kernels", GLM).result == "not checked" and ruling("kernels", QWEN) is None and ruling("kernels", SMALL) is None
    assert refuses(ruling("kernels", GLM, ["engine.dtype=float16"]), "bfloat16 only") and refuses(
        ruling("kernels", GLM, ["engine.kv_cache_dtype=fp8_e5m2"]), "fp8_e5m2"
    )


def test_context_is_not_longer_than_the_model():
    found = launch()
    assert passes(gates.GATES["context length"](found))
    longer = found.params.model_copy(update={"engine": found.params.engine.model_copy(update={"max_model_len": 8193})})
    assert refuses(gates.GATES["context length"](replace(found, params=longer)), "8,193", "8,192 positions")


def test_the_release_that_serves_is_the_one_counted_with():
    assert passes(ruling("release"))
    other = ruling("release", facts=replace(SOUND, release="0.32.0"))
    assert refuses(other, "0.32.0", "0.30") and other.escape == "release"
    assert ruling("release", facts=None) is None and ruling("release", facts=replace(SOUND, release=None)) is None


def test_open_defects_are_refused_with_what_is_to_be_done():
    for state, result in (("present", "refuse"), ("not recognised", "refuse"), ("patched", "pass"), ("fixed", "pass")):
        assert ruling("known defects", defects=[defect("x", state)]).result == result
    assert passes(ruling("known defects", defects=[defect("x", "present", met_by_this_box=False)]))
    assert passes(ruling("known defects", defects=[defect("x", "present", blocks=False)]))
    for more, why in [
        ({}, "x is not mended (it dies): set engine.patches to needed"),
        ({"mendable": False}, "x has no patch (it dies): take a release of which it is true that somebody mended it"),
        ({"state": "not recognised"}, "x is not recognised in a.py, so it cannot be mended: serve with a vLLM of 0.29 to 0.33 as released"),
    ]:
        assert refuses(ruling("known defects", defects=[{**defect("x", "present"), **more}]), why)
    unknown = ruling("known defects", GLM, defects=None)
    assert unknown.result == "not checked" and "tp-partial, index-flip" in unknown.reason


def test_memory_passes_is_tight_or_does_not_fit():
    assert ruling("memory").reason.startswith("PASS: 46,592 tokens")
    # 41+37 of the second field report: one request of 524,288 tokens and 39% of another.
    assert ruling("memory", GLM).reason.startswith("PASS: 729,472 tokens, 1.39")
    tight = ruling("memory", GLM, ["engine.max_model_len=700000", "engine.available_kv_gib=[19.35, 18.16]"])
    assert tight.result == "warn" and tight.reason.startswith("TIGHT")
    assert refuses(ruling("memory", GLM, ["engine.max_model_len=800000"]), "REFUSE", "one request has to fit")
    # 39 layers of 1.3 GiB and more do not lie on a card of 40 GiB.
    small = [Gpu(index=i, memory_total_bytes=40 * GIB) for i in range(8)]
    assert refuses(ruling("memory", GLM, LOOSE, cards=small), "no KV space is left")
    assert ruling("memory", GLM, LOOSE).result == "not checked" and ruling("memory", layers=(15, 14)).result == "not checked"


def test_an_estimate_that_may_be_short_is_tight():
    """Cards on which the longest request fits by the estimate, but not with its error taken off."""
    found = launch(GLM, LOOSE, cards=[Gpu(index=i, memory_total_bytes=80 * GIB) for i in range(8)])
    rank = found.pool.ranks[found.pool.binding_rank]
    needed = found.pool.blocks_per_request * rank.kv_bytes_per_block
    assert gates.GATES["memory"](found).result == "pass"
    uncertain = replace(rank.budget, error_bytes=rank.available_kv_bytes - needed)
    ranks = tuple(replace(one, budget=uncertain) if one.rank == rank.rank else one for one in found.pool.ranks)
    told = gates.GATES["memory"](replace(found, pool=replace(found.pool, ranks=ranks)))
    assert told.result == "warn" and "within the estimate's error" in told.reason


def test_device_memory_that_others_hold_is_refused():
    cards = [Gpu(index=i, memory_usable_bytes=80 * GIB) for i in range(8)]
    share = round(0.95 * 80 * GIB)
    free = replace(SOUND, gpu_used_bytes={i: 80 * GIB - share for i in range(8)})
    assert passes(ruling("device memory", GLM, cards=cards, facts=replace(free, gpu_used_bytes={i: 0 for i in range(8)})))
    # vLLM looks after its own context and NCCL have taken their part.
    assert ruling("device memory", GLM, cards=cards, facts=free).result == "warn"
    # Cards that no rank gets may be full.
    assert ruling("device memory", GLM, cards=cards, facts=replace(free, cards=(0, 1), gpu_used_bytes={3: 80 * GIB})).result == "pass"
    taken = replace(SOUND, gpu_used_bytes={**free.gpu_used_bytes, 3: 80 * GIB - share + 1})
    assert refuses(ruling("device memory", GLM, cards=cards, facts=taken), "GPU 3 has 76.00 GiB free")
    assert ruling("device memory") is None


def test_host_memory_counts_weights_space_and_overhead_of_every_rank():
    # Weights 325,651,968 + 325,654,272 B, two ranks of 1 GiB KV space and 1 GiB beside it.
    needed = 325_651_968 + 325_654_272 + 2 * (GIB + GIB)
    assert passes(ruling("host memory", facts=replace(SOUND, memory_available_bytes=needed)))
    assert refuses(ruling("host memory", facts=replace(SOUND, memory_available_bytes=needed - 1)), "4.6 GiB for weights")
    nobody = {"facts": None, "where": box(memory_available_bytes=None, memory_total_bytes=None)}
    assert ruling("host memory", **nobody).result == "not checked"
    assert passes(ruling("host memory", facts=None, where=box(memory_available_bytes=None, memory_total_bytes=needed)))
    # TP 3 x PP 2 are six processes with 1 GiB of KV space each.
    six = ["parallel.tensor_parallel_size=3"]
    assert refuses(ruling("host memory", SMALL, six, facts=replace(SOUND, memory_available_bytes=12 * GIB)), "GiB available")
    # Weights that GPUs leave on the host.
    assert ruling("host memory", GLM) is None
    offload = ["server.extra_args=['--cpu-offload-gb', '10']"]
    assert refuses(ruling("host memory", GLM, offload), "88.0 GiB")
    assert passes(ruling("host memory", GLM, offload, facts=replace(SOUND, memory_available_bytes=88 * GIB)))


def test_disk_shared_memory_and_port():
    assert passes(ruling("disk")) and passes(ruling("shared memory")) and passes(ruling("port"))
    assert refuses(ruling("disk", facts=replace(SOUND, disk_free_bytes={"the run folder": GIB // 4})), "0.2 GiB free for the run folder")
    assert ruling("disk", facts=replace(SOUND, disk_free_bytes={"vLLM's cache": GIB})).result == "warn"
    assert refuses(ruling("disk", facts=replace(SOUND, not_writable=("vLLM's cache",))), "vLLM's cache")
    # What a container has by default.
    assert refuses(ruling("shared memory", facts=replace(SOUND, shm_free_bytes=64 << 20)), "/dev/shm")
    assert ruling("shared memory", changes=["parallel.pipeline_parallel_size=1"], facts=replace(SOUND, shm_free_bytes=64 << 20)) is None
    assert refuses(ruling("port", facts=replace(SOUND, port_taken="server.port: 8000 on 127.0.0.1 is taken")), "8000")


def test_nothing_listens_beyond_the_machine_without_a_key():
    assert passes(ruling("exposure")) and refuses(ruling("exposure", changes=["server.host=0.0.0.0"]), "0.0.0.0", "anybody")
    for local in ("localhost", "127.0.0.2", "::1"):
        assert passes(ruling("exposure", changes=[f"server.host='{local}'"]))
    unset = ruling("exposure", facts=replace(SOUND, unset=("$NOPE",)))
    assert refuses(unset, "$NOPE is not set")
    nowhere = ruling("port", facts=replace(SOUND, port_taken="server.host: nosuch.invalid: nothing can listen there"))
    assert refuses(nowhere, "nosuch.invalid") and nowhere.ways_out[0] == "server.host 127.0.0.1"
    keyed = ["server.host=0.0.0.0", "server.api_key=$MY_KEY"]
    assert passes(ruling("exposure", changes=keyed))
    assert refuses(ruling("exposure", changes=keyed, facts=replace(SOUND, api_key_set=False)), "$MY_KEY is not set")
    command = launch(changes=keyed).command
    assert command.env["VLLM_API_KEY"] == "$MY_KEY" and "--api-key" not in command.argv and command.argv[command.argv.index("--host") + 1] == "0.0.0.0"
    # The ranks of one machine keep to its loopback; a server for others still does between its ranks only if nothing else was asked.
    assert launch().command.env["VLLM_HOST_IP"] == "127.0.0.1"


def test_others_on_the_devices_and_leftovers_in_the_shell():
    assert passes(ruling("foreign processes")) and passes(ruling("environment"))
    told = ruling("foreign processes", facts=replace(SOUND, busy_cores=1.2, busy=("yes (77, 1.0 cores)",)))
    assert told.result == "warn" and "1.2 cores" in told.reason and "yes (77" in told.reason
    assert refuses(ruling("foreign processes", facts=replace(SOUND, walk=77)), "a walk runs", "process 77")
    assert ruling("foreign processes", facts=replace(SOUND, busy_cores=None)).result == "not checked"
    busy = ruling("foreign processes", GLM, facts=replace(SOUND, gpu_processes={1: ("python (99)",)}))
    assert refuses(busy, "GPU 1: python (99)") and busy.escape == "foreign_processes"
    # A card that no rank gets may do what it wants.
    assert passes(ruling("foreign processes", GLM, facts=replace(SOUND, gpu_processes={9: ("python (99)",), 2: ()})))
    shell = {"NCCL_ALGO": "Tree", "VLLM_ATTENTION_BACKEND": "X", "HOME": "/", "VLLM_API_KEY": "k", "OMP_NUM_THREADS": "9"}
    left = gates.looking.inherited(shell, launch().params, launch().arm)
    assert left == ("NCCL_ALGO", "VLLM_ATTENTION_BACKEND")
    told = ruling("environment", facts=replace(SOUND, inherited=left))
    assert told.result == "warn" and "NCCL_ALGO" in told.reason


def test_who_computes_here_is_seen(spawned):
    busy = spawned(python("while True: pass"))
    assert until(lambda: any(f"({busy.pid}, " in name for name in gates.looking._busy()[0]))
    assert f"({os.getpid()}, " not in str(gates.looking._busy())


def test_checkpoint_and_model_are_those_that_were_planned_with():
    assert passes(ruling("checkpoint")) and passes(ruling("served model"))
    assert refuses(ruling("checkpoint", facts=replace(SOUND, checkpoint="1 of 2 files are missing")), "missing")
    doubt = ruling("checkpoint", facts=replace(SOUND, checkpoint_doubt="its index says 5 bytes"))
    assert refuses(doubt, "5 bytes") and doubt.escape == "checkpoint"
    assert refuses(ruling("checkpoint", changes=[f"model.headers_sha256={'b' * 64}"]), "another checkpoint")
    assert passes(ruling("checkpoint", changes=[f"model.headers_sha256={'a' * 64}"]))
    assert ruling("checkpoint", facts=replace(SOUND, checkpoint_pending="made at the first start")).result == "not checked"
    assert refuses(ruling("served model", facts=replace(SOUND, other_model="num_hidden_layers is 28")), "num_hidden_layers is 28")


def test_the_table_cuts_hashes_and_the_receipt_keeps_them():
    rows = gates.check(launch())
    row = next(row for row in rows if row["gate"] == "checkpoint")
    shown = next(row for row in tables.gates(rows) if row["gate"] == "checkpoint")
    assert "a" * 64 in row["evidence"] and shown["evidence"].endswith("a" * 12 + "...") and shown["ways out"] is None


def shards(folder, tensors, index=None):
    """A checkpoint folder: {file: {tensor: floats}}, and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, held in tensors.items():
        header, at = {}, 0
        for tensor, count in held.items():
            header[tensor] = {"dtype": "F32", "shape": [count], "data_offsets": [at, at + 4 * count]}
            at += 4 * count
        raw = json.dumps(header).encode()
        (folder / name).write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * at)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_checkpoint_is_looked_into_header_by_header(tmp_path):
    two = {"a.safetensors": {"x": 3}, "b.safetensors": {"y": 5}}
    index = {"metadata": {"total_size": 32}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    whole = gates.looking.checkpoint_facts(shards(tmp_path / "whole", two, index))
    assert set(whole) == {"checkpoint_told", "checkpoint_sha256"} and whole["checkpoint_told"].startswith("2 tensors in 2 files")
    # The hash is of the headers: other numbers of the same shapes have the same one, another shape has not.
    same, other = shards(tmp_path / "same", two, index), shards(tmp_path / "other", {"a.safetensors": {"x": 4}, "b.safetensors": {"y": 4}}, index)
    (same / "a.safetensors").write_bytes((same / "a.safetensors").read_bytes()[:-1] + b"\1")
    assert gates.looking.checkpoint_facts(same) == whole and gates.looking.checkpoint_facts(other)["checkpoint_sha256"] != whole["checkpoint_sha256"]
    wrong_size = shards(tmp_path / "size", two, {**index, "metadata": {"total_size": 36}})
    assert "36 bytes" in gates.looking.checkpoint_facts(wrong_size)["checkpoint_doubt"]
    missing = shards(tmp_path / "missing", {"a.safetensors": {"x": 3}}, index)
    assert "1 of 2 files" in gates.looking.checkpoint_facts(missing)["checkpoint"]
    cut = shards(tmp_path / "cut", two, index)
    (cut / "b.safetensors").write_bytes((cut / "b.safetensors").read_bytes()[:-4])
    assert "is it whole?" in gates.looking.checkpoint_facts(cut)["checkpoint"]
    pointer = shards(tmp_path / "pointer", two, index)
    (pointer / "b.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "Git LFS pointer" in gates.looking.checkpoint_facts(pointer)["checkpoint"]
    (shards(tmp_path / "begun", two, index) / "c.safetensors.incomplete").write_text("")
    assert "beginning of a download" in gates.looking.checkpoint_facts(tmp_path / "begun")["checkpoint"]
    assert "no config.json" in gates.looking.checkpoint_facts(tmp_path)["checkpoint"]


def test_a_checkpoint_of_another_model_is_told(tmp_path, changed):
    config = json.loads((ROOT / "data" / "models" / "smollm2-135m-instruct" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_version": "9", "new_key": 1}))
    assert gates.looking.other_model(changed({"model.path": str(tmp_path)})) == ""
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 28}))
    assert "num_hidden_layers is 28, planned with 30" in gates.looking.other_model(changed({"model.path": str(tmp_path)}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not a config.json"):
        gates.looking.other_model(changed({"model.path": str(tmp_path)}))


# As a command.


def preview(command, file, *words):
    status, out, err = command("serve", file, "--print", "--json", *words)
    return status, json.loads(out) if out else None, err


def test_a_preview_shows_command_and_gates_and_starts_nothing(command):
    status, document, err = preview(command, GLM)
    assert status == 0 and not err and document["argv"][:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert document["env"]["VLLM_PP_LAYER_PARTITION"] == "41,37" and document["layers_per_stage"] == [41, 37]
    assert {row["gate"] for row in document["gates"]} >= {"partition", "index sharing", "boundary sums", "memory"} and document["refused"] == ""
    status, out, err = command("serve", GLM, "--print")
    assert status == 0 and "--disable-custom-all-reduce" in out and "may start: " in out


def changes(words):
    return [part for word in words for part in ("--set", word)]


def test_the_refusals_of_the_second_report(command):
    four = [*changes(PP4), "--partition", "20,20,20,18"]
    status, document, err = preview(command, GLM, *four)
    assert status == 1 and err.count("\n") == 1 and err.startswith("fieldbook: serve: unverified stages: PP4") and err.count(" | ") == 2
    assert len(next(row for row in document["gates"] if row["gate"] == "unverified stages")["ways_out"]) == 3
    status, document, err = preview(command, GLM, *four, "--set", "server.allow=[unverified_pp]")
    assert status == 0 and len(document["escaped"]) == 1 and "PP4" in document["escaped"][0] and document["refused"] == ""
    status, out, err = command("serve", GLM, "--print", *four, "--set", "server.allow=[unverified_pp]")
    assert status == 0 and out.rstrip().splitlines()[-1].startswith("LET THROUGH: unverified stages")
    for wrong, why in (("40,37", "77 layers"), ("41,x", "positive number of layers"), ("41,0", "positive number"), ("78", "1 stages"), ("41,37,", "positive")):
        status, out, err = command("serve", GLM, "--print", "--partition", wrong)
        assert (status, out) == (2, "") and why in err and err.count("\n") == 1
    status, document, err = preview(command, GLM, "--set", "engine.draft_method=ngram")
    assert status == 1 and "ngram" in err and "vLLM 0.32" in err


def test_a_wrong_change_is_one_line_and_a_recorded_box_is_not_launched(command):
    for words, why in [
        (["--set", "engine"], "expected SECTION.KEY=VALUE"),
        (["--set", "engine.max_model_len"], "expected SECTION.KEY=VALUE"),
        (["--set", "engine.max_model_len=[1"], "not a value in YAML"),
        (["--set", "engine.max_model_lem=1"], "did you mean 'max_model_len'?"),
        (["--set", "box.name.x=1"], "name is not a section"),
        (["--stop-after", "1", "--print"], "--stop-after goes with a launch"),
    ]:
        status, out, err = command("serve", GLM, "--print", *words)
        assert (status, out) == (2, "") and why in err and err.count("\n") == 1, words
    status, out, err = command("serve", GLM)
    assert (status, out) == (2, "") and "recorded box" in err


def test_gpus_with_an_earlier_runs_terms_are_taken_when_given():
    params = serve.with_changes(GLM, LOOSE)
    assert look(params, params.parallel, (41, 37), gpus=Gpus((80 * GIB,) * 8)).pool is not None
