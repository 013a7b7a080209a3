"""Layouts of a box: which there are, which are vetoed and why, what they send, and the order that two field reports measured."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import kv_builders
import pytest
from conftest import ROOT, least_seconds

from fieldbook import inventory, layouts, memory, params, strategy, strategy_tables, weights
from fieldbook.errors import BadInput
from fieldbook.inventory import merge
from fieldbook.memory_tables import with_engine
from fieldbook.spec import Mlp, Quantization
from fieldbook.strategy import Fabric, Strategy, Way

A100, CMP = ROOT / "params" / "a100-x8-glm53.yml", ROOT / "params" / "cmp170hx-x3.yml"
CARD = 85_094_039_552
NVLINK = Way("NVLink", 200.0, 0.6, 6.6, "computed", "test")
PCIE = Way("PCIe", 20.0, 1.0, 6.6, "computed", "test")
NETWORK = Way("network", 10.0, 5.0, 6.6, "computed", "test")


@pytest.fixture(scope="module")
def glm():
    return memory.model_spec("glm-5.3")


@pytest.fixture(scope="module")
def flash():
    return memory.model_spec("qwen3.8-flash-next")


def pairs_fabric(nvlinked=((0, 1), (2, 3), (4, 5), (6, 7)), count=8, memory_gb_s=2000.0):
    joined = {tuple(pair) for pair in nvlinked}
    ways = {pair: NVLINK if pair in joined else PCIE for pair in itertools.combinations(range(count), 2)}
    single = [(i,) for i in range(count) if not any(i in pair for pair in joined)]
    return Fabric((tuple(range(count)),), (*sorted(joined), *single), (memory_gb_s,) * count, ways)


def of(box, **engine):
    return with_engine(params.load(box), **engine)


def parallel(box, **changes):
    return box.model_copy(update={"parallel": box.parallel.model_copy(update=changes)})


# --- which there are


@pytest.mark.parametrize("gpus", [1, 2, 3, 6, 8, 64])
def test_every_strategy_multiplies_to_the_gpus_and_is_there_once(glm, gpus):
    found = strategy.every_strategy(gpus, glm)
    assert len(set(found)) == len(found) and all(one.gpus == gpus for one in found)
    assert all(one.tensor_parallel_size % one.decode_context_parallel_size == 0 for one in found)
    # The slow way: all sizes, those that multiply.
    sizes = range(1, gpus + 1)
    if gpus <= 8:
        four = [s for s in itertools.product(sizes, repeat=4) if s[0] * s[1] * s[2] * s[3] == gpus]
        expected = {(tp, pp, dp, pcp, dcp) for tp, pp, dp, pcp in four for dcp in range(1, tp + 1) if tp % dcp == 0}
        told = {
            (s.tensor_parallel_size, s.pipeline_parallel_size, s.data_parallel_size, s.prefill_context_parallel_size, s.decode_context_parallel_size)
            for s in found
        }
        assert told == expected


def test_expert_parallel_is_a_choice_only_where_there_are_experts_to_spread(glm):
    assert not any(s.expert_parallel for s in strategy.every_strategy(8, memory.model_spec("smollm2-135m-instruct")))
    spread = {s.name for s in strategy.every_strategy(8, glm) if s.expert_parallel}
    assert {"TP8 + EP", "DP8 + EP", "TP4 x PP2 + EP"} <= spread and "PP8 + EP" not in spread


def test_names_say_the_sizes():
    assert Strategy(1).name == "one GPU" and Strategy(4, 2).name == "TP4 x PP2" and Strategy(1, 1, 3, expert_parallel=True).name == "DP3 + EP"
    assert Strategy(8, decode_context_parallel_size=8).name == "TP8, DCP8" and Strategy(2, 1, 1, 4).name == "TP2 x PCP4"


def test_ranks_are_placed_as_vllm_orders_them():
    # parallel_state.py: arange(world).reshape(dp, pp, pcp, tp).
    placed = strategy.place(Strategy(2, 2, 2), pairs_fabric())
    assert placed.tensor_groups == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert placed.data_groups == (((0, 4), (1, 5)), ((2, 6), (3, 7)))
    assert placed.hops == (((0, 2), (1, 3), (4, 6), (5, 7)),)
    assert placed.stage_groups == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_tensor_groups_lie_within_islands_wherever_these_are():
    fabric = pairs_fabric(nvlinked=((0, 4), (1, 5), (2, 6), (3, 7)))
    placed = strategy.place(Strategy(2, 4), fabric)
    assert {group for stage in placed.tensor_groups for group in stage} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert all(fabric.worst(group).kind == "NVLink" for stage in placed.tensor_groups for group in stage)
    # Four ranks span two islands: the ring takes PCIe between them.
    assert all(fabric.worst(group).kind == "PCIe" for stage in strategy.place(Strategy(4, 2), fabric).tensor_groups for group in stage)


# --- vetoes


def dense(attentions):
    made = kv_builders.model(attentions)
    return replace(made, layers=tuple(replace(one, mlp=Mlp("dense", intermediate_size=4096)) for one in made.layers))


def reasons(s, spec, box, capability=None):
    return [veto.reason for veto in strategy.vetoes_of(s, spec, box, capability)]


def test_heads_that_do_not_divide(glm, flash):
    assert reasons(Strategy(3), glm, of(A100)) [0] == "TP3 does not divide 64 attention heads"
    # 24 heads and 2 KV heads: TP3 divides the one and neither divides nor repeats the other.
    assert reasons(Strategy(3, expert_parallel=True), flash, of(CMP)) == ["2 KV heads are neither divided nor repeated by TP3"]
    assert reasons(Strategy(4), memory.model_spec("smollm2-135m-instruct"), of(CMP))[0] == "TP4 does not divide 9 attention heads"


def test_experts_are_cut_by_width_in_whole_groups_or_left_whole(glm, flash):
    assert reasons(Strategy(1, 1, 3), flash, of(CMP)) == ["experts of width 640 are not divided by 3 ranks; EP keeps them whole"]
    assert reasons(Strategy(1, 1, 3, expert_parallel=True), flash, of(CMP)) == []
    # 2048 / 32 ranks = 64 columns, half a quantization group of 128.
    assert reasons(Strategy(32), glm, of(A100)) == ["64 columns of an expert on each rank are no whole quantization groups of 128; EP keeps experts whole"]
    assert reasons(Strategy(16), glm, of(A100)) == [] == reasons(Strategy(32, expert_parallel=True), glm, of(A100))
    few = replace(glm, layers=tuple(replace(one, mlp=replace(one.mlp, experts=16)) if one.mlp.experts else one for one in glm.layers))
    assert reasons(Strategy(4, 1, 8, expert_parallel=True), few, of(A100)) == ["16 experts on 32 ranks leave some without any"]
    # Seen in 0.30.0: the kernel takes the number of any expert for one of its own. A pipeline keeps its layers' experts together.
    spread = "EP on a CPU: every rank dies of its first request (segmentation fault)"
    assert reasons(Strategy(2, expert_parallel=True), glm, of(A100, device="cpu")) == [spread]
    assert reasons(Strategy(1, 2, expert_parallel=True), glm, of(A100, device="cpu")) == []


def test_drafting_with_a_pipeline_depends_on_the_release(glm, flash):
    old, new = of(A100, vllm_release="0.29"), of(A100, vllm_release="0.30")
    assert "never reach the other stages in 0.29" in reasons(Strategy(4, 2), glm, old)[0]
    assert reasons(Strategy(4, 2), glm, new) == [] == reasons(Strategy(8), glm, old)
    assert reasons(Strategy(4, 2), glm, of(A100, vllm_release="0.29", draft_tokens=0)) == []
    next_ = replace(flash, model_type="qwen3_next")
    assert "asserts on the last stage" in reasons(Strategy(1, 3), next_, of(CMP))[0]


def test_decode_context_parallelism_needs_a_backend_that_returns_the_log_sum_exp(glm, flash):
    box = of(A100)
    assert reasons(Strategy(8, decode_context_parallel_size=8), glm, box, 9.0) == []
    assert reasons(Strategy(8, decode_context_parallel_size=8), glm, box, 8.0) == [
        "DCP on sparse latent attention needs kernels of sm_90, these GPUs are sm_80"
    ]
    assert "fp8_ds_mla only" in reasons(Strategy(8, decode_context_parallel_size=8), glm, of(A100, kv_cache_dtype="bfloat16"))[0]
    assert "sparse attention does not support it" in reasons(Strategy(4, decode_context_parallel_size=2, expert_parallel=True), flash, of(CMP))[0]
    plain = dense([kv_builders.gqa(32, 8)] * 8)
    assert "only ranks that repeat a KV head" in reasons(Strategy(8, decode_context_parallel_size=2), plain, box)[0]
    assert reasons(Strategy(16, decode_context_parallel_size=2), plain, box) == []
    window = dense([kv_builders.sliding(512, 32, 2)] * 8)
    assert "sliding-window" in reasons(Strategy(8, decode_context_parallel_size=2), window, box)[0]
    assert "on a CPU" in reasons(Strategy(16, decode_context_parallel_size=2), plain, of(A100, device="cpu"))[0]


def test_prefill_context_parallelism_is_for_few(glm):
    plain = kv_builders.model([kv_builders.gqa(32, 8)] * 8)
    assert reasons(Strategy(4, 1, 1, 2), plain, of(A100)) == ["PCP supports models of latent attention (MLA) only"]
    assert "without CUDA graphs only" in reasons(Strategy(4, 1, 1, 2), glm, of(A100))[0]
    eager = of(A100, enforce_eager=True)
    assert reasons(Strategy(4, 1, 1, 2), glm, eager) == []
    assert "PCP with PP is refused before 0.32" in reasons(Strategy(2, 2, 1, 2), glm, eager)[0]
    assert reasons(Strategy(2, 2, 1, 2), glm, of(A100, enforce_eager=True, vllm_release="0.32")) == []


def test_prefill_context_parallelism_by_release(glm):
    kimi = replace(glm, layers=(*glm.layers[:4], replace(glm.layers[4], attention=kv_builders.kda())))
    assert "no recurrent layers" in reasons(Strategy(4, 1, 1, 2), kimi, of(A100, enforce_eager=True))[0]
    seeing = replace(glm, not_counted=("vision tower (vision_config)",))
    assert "image or audio" in reasons(Strategy(4, 1, 1, 2), seeing, of(A100, enforce_eager=True))[0]
    # With graphs: 0.29 refuses, 0.30 and 0.32 on sparse latent attention, 0.33 has them.
    told = {release: reasons(Strategy(4, 1, 1, 2), glm, of(A100, vllm_release=release, draft_tokens=0)) for release in ("0.29", "0.30", "0.32", "0.33")}
    assert [bool(why) for why in told.values()] == [True, True, True, False] and "0.29 refuses full CUDA graphs" in told["0.29"][0]
    dense = dense_mla()
    told = {release: reasons(Strategy(4, 1, 1, 2), dense, of(A100, vllm_release=release, draft_tokens=0)) for release in ("0.29", "0.30")}
    assert [bool(why) for why in told.values()] == [True, False]


def dense_mla():
    made = kv_builders.kimi_k2()
    return replace(made, layers=tuple(replace(one, mlp=Mlp("dense", intermediate_size=4096)) for one in made.layers))


def quantized(spec, **scheme):
    return replace(spec, quantization=Quantization(**{"method": "awq", "weight_bits": 4, "kind": "int", "strategy": "group", **scheme}))


def test_quantized_layers_are_cut_between_whole_groups():
    # 13,824 columns: 6,912 and 3,456 on 2 and 4 ranks are 54 and 27 groups of 128, 1,728 on 8 are 13.5.
    awq = quantized(replace(dense([kv_builders.gqa(40, 8)] * 4), hidden_size=5120), group_size=128)
    awq = replace(awq, layers=tuple(replace(one, mlp=Mlp("dense", intermediate_size=13_824)) for one in awq.layers))
    assert [bool(reasons(Strategy(tp), awq, of(A100))) for tp in (2, 4, 8)] == [False, False, True]
    assert reasons(Strategy(8), awq, of(A100)) == ["mlp.down_proj: 1728 input columns on each of 8 ranks are no whole quantization groups of 128"]
    blocks = replace(awq, quantization=Quantization(method="fp8", weight_bits=8, kind="float", strategy="block", block=(128, 128)))
    assert "no whole quantization" in reasons(Strategy(8), blocks, of(A100))[0] and reasons(Strategy(4), blocks, of(A100)) == []


def test_mxfp4_experts_are_padded_and_not_refused():
    # gpt-oss: width 2880, 720 on 4 ranks and 360 on 8, which vLLM pads.
    spec = kv_builders.model([kv_builders.gqa(64, 8, 64)] * 4)
    experts = Mlp("moe", experts=32, experts_per_token=4, expert_intermediate_size=2880)
    spec = quantized(replace(spec, layers=tuple(replace(one, mlp=experts) for one in spec.layers)), method="mxfp4", kind="float", group_size=32)
    assert [reasons(Strategy(tp), spec, of(A100)) for tp in (2, 4, 8)] == [[], [], []]
    assert "no whole quantization groups of 32" in reasons(Strategy(4), quantized(spec, group_size=32), of(A100))[0]


def test_gemma_4_with_per_layer_embeddings_is_no_pipeline():
    spec = replace(kv_builders.model([kv_builders.gqa(32, 8)] * 8), model_type="gemma4_text", boundary_values=1024 + 8 * 256)
    assert "per-layer embeddings are lost" in reasons(Strategy(2, 2), spec, of(A100))[0]
    assert reasons(Strategy(2, 2), replace(spec, boundary_values=1024), of(A100)) == []


def test_needs_name_the_patches(glm, flash):
    def names(s, spec, box, **more):
        return [need.name for need in strategy.needs_of(s, spec, box, **more)]

    assert names(Strategy(4, 2), glm, of(A100)) == ["patch tp-partial"] and names(Strategy(8), glm, of(A100)) == []
    assert names(Strategy(1, 2), glm, of(A100), relayed=True) == ["patch index-relay"]
    assert names(Strategy(2, 4), glm, of(A100)) == ["patch tp-partial", "unverified"]
    assert names(Strategy(1, 3), flash, of(CMP)) == ["patch ple-containment"]
    smollm2 = memory.model_spec("smollm2-135m-instruct")
    assert names(Strategy(1, 2), smollm2, params.load(ROOT / "params" / "cpu-smollm2.yml")) == ["patch cpu-eager-pp"]


def test_weights_that_do_not_fit_veto_a_layout(glm):
    """TP4 in one stage: 97.5 GiB of weights on cards of 80 (79.25 usable)."""
    box = of(A100, max_model_len=65_536)
    found = {o.strategy.name: o for o in strategy.strategies(box, glm, pairs_fabric(count=4, nvlinked=((0, 1), (2, 3))), (CARD,) * 4)}
    reason = found["TP4"].vetoes[0].reason
    assert reason.startswith("no split fits: rank 0: ") and reason.endswith("GiB of weights, and what a step takes besides, leave no room for the KV cache")
    assert float(reason.split("rank 0: ")[1].split()[0]) == pytest.approx(100, abs=1) and found["TP4"].short_of_memory
    # Its layers alone are the report's 97.5 GiB and more; the rest is what TP does not divide, and the draft layer.
    assert sum(weights.layer_rank_bytes(glm, tensor_parallel_size=4)) / 2**30 == pytest.approx(97.5, rel=0.02)


# --- traffic


def test_collectives_of_both_reports(glm, flash):
    tp8 = strategy.traffic_of(Strategy(8), glm, of(A100))
    assert (tp8.collectives.all_reduces, tp8.collectives.dispatches, tp8.hops) == (156, 0, 0)
    dep = strategy.traffic_of(Strategy(1, 1, 3, expert_parallel=True), flash, of(CMP))
    assert (dep.collectives.all_reduces, dep.collectives.dispatches, dep.hops) == (0, 48, 0)
    pp3 = strategy.traffic_of(Strategy(1, 3), flash, of(CMP))
    assert (pp3.collectives.all_reduces, pp3.collectives.dispatches, pp3.hops) == (0, 0, 2)
    # EP over TP ranks alone sends what TP sends: no dispatch.
    assert strategy.traffic_of(Strategy(8, expert_parallel=True), glm, of(A100)) == tp8


def test_bytes_by_hand(glm, flash):
    tp8 = strategy.traffic_of(Strategy(8), glm, of(A100))
    assert tp8.all_reduce_bytes == 2 * 7 / 8 * 6144 * 2 == 21_504
    hop = strategy.traffic_of(Strategy(4, 2), glm, of(A100))
    assert hop.hop_bytes == 2 * 6144 * 2 == 24_576 and hop.relay_bytes == 0
    assert strategy.traffic_of(Strategy(4, 2), glm, of(A100), relayed=True).relay_bytes == 2048 * 4 == 8_192
    # Hyper-connections: four streams of 2560, no residual beside them.
    assert strategy.traffic_of(Strategy(1, 3), flash, of(CMP)).hop_bytes == 4 * 2560 * 2 == 20_480
    dep = strategy.traffic_of(Strategy(1, 1, 3, expert_parallel=True), flash, of(CMP))
    assert dep.dispatch_bytes == 2 * 2560 * 2 and dep.bytes_per_token == 48 * 2 * 10_240
    # Tokens spread over all 8 ranks of a stage: each receives 7 shares of a quarter of its replica's tokens.
    spread = strategy.traffic_of(Strategy(4, 1, 2, expert_parallel=True), glm, of(A100))
    assert spread.dispatch_bytes == 7 / 4 * 6144 * 2 and spread.gather_bytes == 3 / 4 * 6144 * 2
    assert (spread.collectives.all_reduces, spread.collectives.dispatches, spread.collectives.gathers) == (156 - 75, 75, 75)


def test_layers_with_one_part_need_one_all_reduce_and_gemma_4s_experts_one_more():
    spec = kv_builders.model([kv_builders.mamba2(), kv_builders.gqa()])
    alone = replace(spec, layers=tuple(replace(one, mlp=replace(one.mlp, kind="none", experts=0)) for one in spec.layers))
    assert strategy.traffic_of(Strategy(2), alone, of(A100)).collectives.all_reduces == 2
    assert strategy.traffic_of(Strategy(2), replace(spec, model_type="gemma4_text"), of(A100)).collectives.all_reduces == 6


def test_floors_by_hand(glm):
    """Four tokens over TP8: 156 x (4 x 21,504 B / 20 GB/s + 6.6 + 14 x 1.0 us); within NVLink pairs 156 x (4 x 12,288 B / 200 GB/s + 2 x 0.6 us)."""
    box, fabric = of(A100), pairs_fabric()
    (tp8,) = strategy.stage_floors(Strategy(8), glm, box, fabric, (78,), 4)
    assert tp8 == pytest.approx(156 * (4 * 21_504 / 20e9 + 20.6e-6))
    first, second = strategy.stage_floors(Strategy(2, 2, 2), glm, replace_drafts(box), fabric, (41, 37), 4)
    inside = 4 * 12_288 / 200e9 + 1.2e-6
    across = 4 * 1 * 12_288 / 20e9 + 6.6e-6 + 1.0e-6
    assert first == pytest.approx(82 * inside + 2 * 38 * across) and second == pytest.approx(74 * inside + 2 * 37 * across)
    (hop,) = strategy.hop_floors(Strategy(4, 2), glm, box, fabric, 4)
    # A quarter of the payload over each way, then gathered over the four ranks of the next stage, which PCIe joins.
    assert hop == pytest.approx(4 * 24_576 / 4 / 20e9 + 7.6e-6 + 4 * 24_576 * 3 / 4 / 20e9 + (6.6 + 3) * 1e-6)
    (relayed,) = strategy.hop_floors(Strategy(4, 2), glm, box, fabric, 4, relayed=True)
    assert relayed - hop == pytest.approx(4 * 8_192 / 20e9)


def replace_drafts(box):
    return with_engine(box, draft_tokens=0)


def test_an_unknown_link_leaves_the_floor_unknown_and_is_never_taken_for_fast(glm):
    fabric = pairs_fabric()
    unknown = replace(fabric, ways={**fabric.ways, (3, 4): replace(PCIE, gb_s=None)})
    # The ring of eight passes it, those of four do not.
    assert strategy.stage_floors(Strategy(8), glm, of(A100), unknown, (78,), 4) == [None]
    assert None not in strategy.stage_floors(Strategy(4, 2), glm, of(A100), unknown, (41, 37), 4)
    hops = strategy.hop_floors(Strategy(1, 8), glm, of(A100), unknown, 4)
    assert [hop is None for hop in hops] == [False, False, False, True, False, False, False]
    assert strategy.decode_round(Strategy(1, 8), glm, of(A100), unknown, (10,) * 7 + (8,), 1) is None
    assert strategy.prefill_at_most_tok_s(Strategy(8), glm, of(A100), unknown, (78,)) is None


def test_nodes_are_joined_by_the_network():
    nodes = ((0, 1), (2, 3))
    fabric = Fabric(nodes, nodes, (2000.0,) * 4, {(0, 1): NVLINK, (2, 3): NVLINK}, NETWORK)
    assert fabric.way(0, 1) == NVLINK and fabric.way(1, 2) == NETWORK and fabric.worst((0, 1, 2, 3)).kind == "network"
    assert fabric.worst((0, 1)).base_us == 0 and fabric.worst((0,)).kind == "none"


# --- the order that the reports measured


def outcomes_of(file, **engine):
    box = of(file, **engine)
    found = layouts.study(parallel(box, layer_partition="best") if "max_model_len" in engine else box, inventory.read(box))
    return box, found, {o.strategy.name: o for o in found.outcomes}


def test_the_first_report_pipeline_ahead_of_data_and_expert_parallel(flash):
    box, found, by_name = outcomes_of(CMP, available_kv_gib=[])
    pp, dep = by_name["PP3"], by_name["DP3 + EP"]
    assert found.fabric.way(0, 1).gb_s == 2.0 and "through host memory" in found.fabric.way(0, 1).source
    # 32k prefill: 10,156 against 1,950 tok/s; links alone allow DEP 6,100.
    assert pp.prefill_at_most_tok_s > 10_156 and 1_950 < dep.prefill_at_most_tok_s < 10_156
    for streams, (piped, spread) in {1: (76.0, 44.1), 8: (441.9, 290.2)}.items():
        assert piped > spread and pp.decode_expected_tok_s[streams] > dep.decode_expected_tok_s[streams]
        assert pp.decode_at_most_tok_s[streams] > piped and dep.decode_at_most_tok_s[streams] > spread
        assert pp.decode_links_s[streams] < dep.decode_links_s[streams] / 20
    for workload in ("interactive", "throughput"):
        chosen = strategy.choose(list(found.outcomes), workload, box)
        assert chosen.chosen.strategy.name == "PP3" and chosen.ties == ()
    # The cards' memory is not stated: no pool is made up.
    assert strategy.choose(list(found.outcomes), "long_context", box).chosen is None and found.plan is None
    assert "memory is known for 3 ranks" in found.why_not


def test_the_second_report_tp4_pp2_ahead_of_tp8_for_throughput(glm):
    """At 352,000 tokens, which TP8 holds: 310 against 245.8 tok/s measured at 16 streams; 71.3 against 68 at one, a tie here."""
    box = parallel(of(A100, max_model_len=352_000), index_sharing="relay")
    found = layouts.study(box, inventory.read(box))
    by_name = {o.strategy.name: o for o in found.outcomes}
    piped, tp8 = by_name["TP4 x PP2"], by_name["TP8"]
    assert not piped.vetoes and not tp8.vetoes and piped.pool_tokens > 1.8 * tp8.pool_tokens
    assert piped.decode_expected_tok_s[16] > tp8.decode_expected_tok_s[16]
    assert piped.decode_links_s[16] < tp8.decode_links_s[16] and piped.prefill_at_most_tok_s > 2 * tp8.prefill_at_most_tok_s
    assert piped.decode_expected_tok_s[1] == pytest.approx(tp8.decode_expected_tok_s[1], rel=strategy.TIE["interactive"])
    # Every recorded rate stays below what links and memory allow.
    for row in strategy_tables.recorded(box, glm, found.fabric, list(found.outcomes)):
        assert row["recorded"] < row["and weights"] < row["links allow"]


def test_the_estimate_for_links_is_the_reports_all_reduce(glm):
    """191 us for one of TP8's all-reduces: three times the floor of the 64 tokens that 16 streams drafting 3 have."""
    box = of(A100)
    fabric = strategy.fabric_of(inventory.read(box), 8)
    (stage,) = strategy.stage_floors(Strategy(8), glm, box, fabric, (78,), 64)
    assert 191e-6 / (stage / 156) == pytest.approx(strategy.LINKS_ABOVE_FLOOR, rel=0.02)


def test_recorded_layouts_that_the_box_does_not_have_are_refused(glm, monkeypatch, tmp_path):
    (tmp_path / "layouts.yml").write_text("stated_by: me\nlayouts:\n  - {layout: TP5, streams: 1, decode_tok_s: 1, draft_tokens: 0}\n")
    monkeypatch.setattr("fieldbook.paths.box_data_dir", lambda name: tmp_path)
    with pytest.raises(BadInput, match="layouts.yml: layout 'TP5' is none of 8 GPUs; one of TP8"):
        strategy_tables.recorded(of(A100), glm, pairs_fabric(), strategy.strategies(of(A100), glm, pairs_fabric(), (CARD,) * 8))


# --- choices


def test_the_choice_changes_with_the_workload(glm):
    box = of(A100)
    found = strategy.strategies(box, glm, strategy.fabric_of(inventory.read(box), 8), (CARD,) * 8)
    chosen = {workload: strategy.choose(found, workload, box).chosen.strategy.name for workload in strategy.WORKLOADS}
    assert chosen["interactive"] == "TP4 x PP2" and chosen["long_context"] == "PP8" and len(set(chosen.values())) == 3


def test_equal_layouts_are_called_a_tie_and_unverified_ones_come_last(glm):
    box = of(A100)
    found = strategy.strategies(box, glm, strategy.fabric_of(inventory.read(box), 8), (CARD,) * 8)
    choice = strategy.choose(found, "throughput", box)
    assert "TP4 x PP2" in {o.strategy.name for o in (choice.chosen, *choice.ties)}
    assert not any(need.name == strategy.UNVERIFIED for need in choice.chosen.needs)
    values = [strategy.judged_by(o, "throughput", box) for o in (choice.chosen, *choice.ties)]
    assert min(values) >= 0.9 * max(values) > choice.next_value / 0.9 * 0.9
    assert choice.next_value < 0.9 * max(values)


def test_pools_of_replicas_add_up_and_experts_are_shared_between_them(glm):
    box = of(A100, max_model_len=131_072)
    found = {o.strategy.name: o for o in strategy.strategies(box, glm, pairs_fabric(), (CARD,) * 8)}
    two = found["TP4 x DP2"]
    assert two.pool_tokens == 2 * two.best.pool_tokens
    # Experts over all eight ranks, attention whole in each replica: between an eighth and a quarter of the checkpoint.
    eighth = found["TP8"].weights_gib
    assert eighth < two.weights_gib < eighth + 14


def test_64_gpus_in_8_nodes_take_less_than_two_seconds(glm):
    nodes = tuple(tuple(range(8 * n, 8 * n + 8)) for n in range(8))
    ways = {pair: NVLINK for node in nodes for pair in itertools.combinations(node, 2)}
    fabric = Fabric(nodes, nodes, (3352.0,) * 64, ways, NETWORK)
    found = strategy.strategies(of(A100), glm, fabric, (CARD,) * 64)
    assert len(found) > 400 and sum(not o.vetoes for o in found) > 50
    assert least_seconds(lambda: strategy.strategies(of(A100), glm, fabric, (CARD,) * 64), 2) < 2


def test_another_way_of_sharing_reaches_layouts_needs_and_choice():
    found = {mode: layouts.study(of(A100), inventory.read(of(A100)), index_sharing=mode) for mode in ("clean", "relay", "flip")}
    splits = {mode: next(o for o in one.outcomes if o.strategy == Strategy(4, 2)).best.layers_per_stage for mode, one in found.items()}
    assert splits == {"clean": (42, 36), "relay": (41, 37), "flip": (41, 37)}
    needs = {mode: [n.name for o in one.outcomes if o.strategy == Strategy(4, 2) for n in o.needs] for mode, one in found.items()}
    assert needs["clean"] == ["patch tp-partial"] and needs["relay"] == ["patch tp-partial", "patch index-relay"]
    # The checkpoint has no weights to flip with: nobody is sent there without being told.
    assert needs["flip"] == ["patch tp-partial", "patch index-flip", strategy.NO_WEIGHTS]
    assert {mode: one.params.parallel.index_sharing for mode, one in found.items()} == {"clean": "clean", "relay": "relay", "flip": "flip"}


def test_long_contexts_are_judged_by_the_pool_of_one_replica(glm):
    box = of(A100, max_model_len=131_072)
    found = {o.strategy.name: o for o in strategy.strategies(box, glm, pairs_fabric(), (CARD,) * 8)}
    two = found["TP4 x DP2"]
    assert strategy.judged_by(two, "long_context", box) == two.best.pool_tokens == two.pool_tokens / 2


def test_a_layout_that_vllm_refuses_is_refused_first(tmp_path, command):
    # 640 / 2 ranks are 320 columns, two and a half groups of 128.
    text = CMP.read_text().replace("pipeline_parallel_size: 3", "tensor_parallel_size: 2\n  pipeline_parallel_size: 2", 1)
    changes = {
        "layer_partition: [16, 16, 16]": "layer_partition: best", "name: cmp170hx-x3": "name: mine", "max_model_len: 200000": "max_model_len: 8192",
        "prefill_tokens: [8192, 32768]": "prefill_tokens: [4096]", "prefill_32768": "prefill_4096", "available_kv_gib: [10.39, 10.39, 10.39]": "",
    }  # fmt: skip
    for old, new in changes.items():
        text = text.replace(old, new)
    file, box = tmp_path / "mine.yml", tmp_path / "box.yml"
    file.write_text(text)
    box.write_text("stated_by: me\ngpus:\n  count: 4\n  each:\n    - {memory_total_bytes: 51539607552}\n" + "    - {memory_total_bytes: 85899345920}\n" * 3)
    status, out, err = command("partition", file, "--from", box)
    assert (status, err) == (0, "") and out.splitlines()[-1].startswith("must not be served: 320 columns of an expert")


def test_layouts_that_fit_are_named_where_the_one_asked_for_does_not(tmp_path, command):
    text = A100.read_text().replace("tensor_parallel_size: 4\n  pipeline_parallel_size: 2", "tensor_parallel_size: 1\n  pipeline_parallel_size: 2")
    lines = [line for line in text.splitlines() if not any(key in line for key in ("available_kv_gib", "other_boots"))]
    file = tmp_path / "a100-x8-glm53.yml"
    file.write_text("\n".join(lines).replace("[41, 37]", "best"))
    status, out, err = command("partition", file)
    assert (status, out) == (2, "") and "layouts of all 8 GPUs that hold it: " in err and "TP4 x PP2" in err and len(err.splitlines()) == 1
    assert "of the box's other cards: pipeline_parallel_size" in err


def test_a_layout_that_cannot_be_divided_is_vetoed_alone():
    # 9 heads and 1,536 columns of the MLP.
    smollm2, box = memory.model_spec("smollm2-135m-instruct"), params.load(ROOT / "params" / "cpu-smollm2.yml")
    ways = {pair: PCIE for pair in itertools.combinations(range(9), 2)}
    fabric = Fabric((tuple(range(9)),), tuple((i,) for i in range(9)), (100.0,) * 9, ways)
    found = {o.strategy.name: o for o in strategy.strategies(box, smollm2, fabric, ())}
    assert found["TP9"].vetoes[0].reason == "model.layers.0.mlp.gate_proj: 1536 cannot be divided over 9 tensor-parallel ranks; vLLM refuses this layout"
    assert not found["TP3 x PP3"].vetoes and not found["PP9"].vetoes


def test_without_the_memorys_rate_no_decode_rate_is_made_up(glm):
    box = of(A100)
    fabric = replace(pairs_fabric(), memory_gb_s=(2000.0,) * 7 + (None,))
    found = strategy.strategies(box, glm, fabric, (CARD,) * 8)
    able = [o for o in found if not o.vetoes]
    assert able and all(rate is None for o in able for rate in (*o.decode_at_most_tok_s.values(), *o.decode_expected_tok_s.values()))
    choice = strategy.choose(found, "throughput", box)
    assert choice.chosen is None and len(choice.unknown) == len(able)
    assert strategy.choose(found, "long_context", box).chosen is not None


def test_params_for_cpus_are_not_priced_with_gpus(command):
    status, out, err = command("partition", ROOT / "params" / "cpu-smollm2.yml", "--from", ROOT / "data" / "boxes" / "a100-x8-glm53", "--json")
    rows = json.loads(out)["strategies"]
    assert (status, err) == (0, "") and {row["name"] for row in rows} == {"TP2", "TP2, DCP2", "PCP2", "DP2", "PP2"}
    assert all(not any(row["decode_expected_tok_s"].values()) for row in rows)


def test_rules_hold_where_no_memory_is_known(command, tmp_path):
    file = tmp_path / "cmp170hx-x3.yml"
    file.write_text(CMP.read_text().replace("[16, 16, 16]", "[1, 23, 24]"))
    status, out, err = command("partition", file)
    assert (status, out) == (2, "") and "1+23+24 must not be used: n-gram layer 1 is not on the first stage" in err and len(err.splitlines()) == 1


def test_a_space_that_no_gpu_has_is_one_line(command, tmp_path):
    file = tmp_path / "cpu-smollm2.yml"
    file.write_text((ROOT / "params" / "cpu-smollm2.yml").read_text().replace("kv_cache_gib_per_rank: 1", "kv_cache_gib_per_rank: 99999999999999"))
    status, out, err = command("partition", file)
    assert (status, out) == (2, "") and "engine.kv_cache_gib_per_rank" in err and len(err.splitlines()) == 1


# --- the box as the strategies see it


def test_fabric_of_a_described_box_takes_what_is_told_and_bounds_the_rest():
    fabric = strategy.fabric_of(inventory.read(of(A100)), 8)
    assert fabric.islands == ((0, 1), (2, 3), (4, 5), (6, 7)) and fabric.capability == 8.0
    assert (fabric.way(0, 1).gb_s, fabric.way(0, 1).evidence) == (200.0, "computed")
    # The report does not tell the PCIe links: no A100 has more than Gen4 x16.
    assert fabric.way(0, 2).gb_s == pytest.approx(31.5, abs=0.01) and fabric.way(0, 2).evidence == "estimated"
    assert fabric.memory_gb_s == (2039.0,) * 8


def test_measured_rates_come_before_stated_ones():
    link = inventory.Link(a=0, b=1, kind="PHB", nvlinks=0, theoretical_gb_s=31.5, measured_gb_s={
        "0->1": inventory.Spread(min=20, median=22, max=23, samples=5), "1->0": inventory.Spread(min=18, median=19, max=20, samples=5),
        "0<->1": inventory.Spread(min=30, median=31, max=32, samples=5)})  # fmt: skip
    gpus = [inventory.Gpu(index=0, name="H200", clock_memory_max_mhz=3201, memory_bus_width_bits=6016), inventory.Gpu(index=1)]
    box = merge.combine([inventory.Reading(command="test", gpus=gpus, gpu_count=2, links=[link])], "test")
    fabric = strategy.fabric_of(box, 2)
    assert (fabric.way(0, 1).gb_s, fabric.way(0, 1).evidence) == (19, "measured")
    assert fabric.memory_gb_s[0] == pytest.approx(4814.3, abs=0.1) and fabric.memory_gb_s[1] is None


def test_a_machine_without_gpus_is_as_many_processes():
    box = merge.combine([inventory.Reading(command="test", host=inventory.Host(logical_cpus=2))], "test")
    fabric = strategy.fabric_of(box, 2, 10e9)
    assert fabric.gpus == (0, 1) and fabric.memory_gb_s == (5.0, 5.0) and fabric.way(0, 1).gb_s is None


# --- the command


def test_command_gives_one_document(command):
    status, out, err = command("partition", A100, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and found["best"]["partition"] == [41, 37] and found["best"]["pool_tokens"] == 729_472
    assert (found["best"]["binding_rank"], found["best"]["stage_load"], found["best"]["flips"]) == (0, [41, 40], [41])
    assert len(found["candidates"]) == 77 and len(found["strategies"]) == 69 and found["refused"].startswith("flip needs indexer weights")
    assert {row["workload"] for row in found["choices"]} == set(strategy.WORKLOADS)
    status, out, _ = command("partition", A100, "--index-sharing", "clean", "--json")
    assert json.loads(out)["best"]["partition"] == [42, 36] and json.loads(out)["refused"] == ""


def test_command_prints_tables(command, tmp_path):
    status, out, err = command("partition", A100)
    assert (status, err) == (0, "")
    for words in ("77 splits of 78 layers", "VLLM_PP_LAYER_PARTITION=41,37", "390.547 GiB with indexers on owning layers only", "must not be served",
                  "TP4 x PP2", "tp-partial", "Choice by workload"):  # fmt: skip
        assert words in out
    untold = tmp_path / "cmp.yml"
    untold.write_text(CMP.read_text().replace("  available_kv_gib: [10.39, 10.39, 10.39]\n", ""))
    status, out, _ = command("partition", untold)
    assert status == 0 and "splits cannot be compared" in out and "DP3 + EP" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("gpu_memory_utilization: 0.3", ("no split of 78 layers in 2 stages fits", "what would fit:", "gpu_memory_utilization 0.95")),
        ("max_model_len: 1048576", ("no split of 78 layers in 2 stages fits", "engine.max_model_len")),
    ],
)
def test_an_infeasible_box_is_one_line_and_exit_2(command, tmp_path, change, words):
    text = A100.read_text().replace("gpu_memory_utilization: 0.95" if "util" in change else "max_model_len: 524288", change)
    lines = [line for line in text.splitlines() if not any(key in line for key in ("available_kv_gib", "other_boots"))]
    file = tmp_path / "a100-x8-glm53.yml"
    file.write_text("\n".join(lines))
    status, out, err = command("partition", file)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and all(word in err for word in words), err


def test_a_live_box_that_would_flip_without_weights_is_told_no(command, tmp_path):
    file = Path(tmp_path) / "mine.yml"
    file.write_text(A100.read_text().replace("kind: recorded", "kind: live").replace("name: a100-x8-glm53", "name: mine"))
    status, out, err = command("partition", file, "--from", ROOT / "data" / "boxes" / "a100-x8-glm53")
    assert (status, err) == (1, "") and "must not be served" in out
