"""What two ranks get of a link through NCCL: measured by two processes (gloo stands in here), kept beside the link, and what the strategies make of it."""

import os
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, guide

from fieldbook import inventory, strategy
from fieldbook.inventory import measure as m
from fieldbook.inventory import nccl_worker as w
from fieldbook.inventory.model import Spread
from fieldbook.strategy.fabric import fabric_of

# Two H200 of one host, by NCCL 2.28.9 under three settings: send/recv and all-reduce of 256 MiB in GB/s.
NVLINK, HOST, SOCKETS = (355.1, 298.3), (36.7, 29.1), (4.79, 3.92)
NO_P2P = {"NCCL_P2P_DISABLE": "1"}
NO_SHM = {**NO_P2P, "NCCL_SHM_DISABLE": "1"}


def spread(value):
    return Spread(min=value, median=value, max=value, samples=7)


def two_cards(through=None):
    box = inventory.read_captured(ROOT / "tests" / "unit" / "outputs" / "h200-x2")
    if through is None:
        return box
    told = {"0->1 through NCCL": spread(through[0]), "0<->1 all-reduce through NCCL": spread(through[1])}
    link = box.links[0].model_copy(update={"measured_gb_s": {**box.links[0].measured_gb_s, **told}})
    return box.model_copy(update={"links": [link]})


def test_two_processes_send_and_reduce(monkeypatch):
    """The worker's two ranks for real, over gloo on the CPU: all four quantities, each with its samples, and no process left."""
    import torch

    monkeypatch.setattr(w, "ROUND_TRIPS", 5)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    lines = []
    pid = os.fork()
    if pid == 0:
        # A process group is the process's own, and gloo leaves threads.
        try:
            w.measure(torch, (0, 1), ("cpu", "cpu"), lambda **fields: lines.append(fields), backend="gloo", large_bytes=2**20)
            sound = all(len(x["samples"]) == w.SAMPLES and min(x["samples"]) > 0 for x in lines)
            os._exit(0 if sound and [x["quantity"] for x in lines] == ["nccl", "nccl_latency", "nccl_reduce", "nccl_reduce_latency"] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_a_worker_tells_is_read_and_kept_beside_its_link():
    lines = (
        '{"doing": "x"}\n{"quantity": "nccl", "where": "GPU 0 -> GPU 1", "through_host": false, "size_bytes": 268435456, "samples": [350.0, 355.0, 356.0]}\n'
        '{"quantity": "nccl_reduce_latency", "where": "GPU 0 <-> GPU 1", "through_host": false, "size_bytes": 4096, "samples": [48.0]}\n{"done": true}\n'
    )
    found, notes = m.read_results(lines, "", "")
    assert notes == [] and [(x.what, x.unit) for x in found] == [m.WHAT["nccl"], m.WHAT["nccl_reduce_latency"]]
    (link,) = m.attach(two_cards().links, found)
    assert link.measured_gb_s["0->1 through NCCL"].median == 355.0 and link.measured_latency_us["0<->1 all-reduce through NCCL"].median == 48.0
    # NVLink bounds it as it bounds a copy: 18 links of Hopper.
    assert [x.ceiling for x in m.with_ceilings(found, two_cards().gpus, two_cards().links, None)] == [two_cards().links[0].theoretical_gb_s, None]


def test_pairs_are_measured_with_the_servers_settings_and_only_where_a_copy_arrived(monkeypatch):
    asked = []

    def run(argv, timeout_s, env=None):
        asked.append((argv[2], argv[3:], env))
        copy = '{"quantity": "pair", "where": "GPU 0 -> GPU 1", "through_host": false, "size_bytes": 8, "samples": [1.0]}\n{"done": true}'
        return (copy if "measure_worker" in argv[2] else '{"done": true}'), "", 0

    monkeypatch.setattr(m, "_run", run)
    m.measure(3, nccl_env=NO_P2P)
    assert asked == [(m.WORKER, ["--gpus=3", "--pairs=0-1,0-2,1-2"], None), (m.NCCL_WORKER, ["--pair=0-1"], NO_P2P)]
    asked.clear()
    m.measure(3)
    assert len(asked) == 1


def test_the_environment_of_the_servers_without_secrets(monkeypatch):
    told = {}
    monkeypatch.setattr(inventory.measuring, "measure", lambda gpus, pairs, nccl_env: told.update(env=nccl_env) or ([], []))
    inventory.measured(two_cards(), None, {**NO_P2P, "HF_TOKEN": "$TOKEN", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert told["env"] == NO_P2P
    inventory.measured(two_cards())
    assert told["env"] is None


@pytest.mark.parametrize(
    "through, settings, kind, hop, group",
    [
        (NVLINK, {}, "NVLink", 355.1, 298.3),
        (HOST, NO_P2P, "PCIe", 36.7, 29.1),
        (SOCKETS, NO_SHM, "network", 4.79, 3.92),
        (HOST, {"NCCL_P2P_LEVEL": "LOC"}, "PCIe", 36.7, 29.1),
    ],
)
def test_a_hop_and_a_collective_have_what_nccl_was_measured_to_give(through, settings, kind, hop, group):
    fabric = fabric_of(two_cards(through), 2, environment=settings, custom_all_reduce=False)
    assert (fabric.way(0, 1).kind, fabric.way(0, 1).gb_s, fabric.way(0, 1).evidence) == (kind, hop, "measured")
    assert (fabric.worst((0, 1)).gb_s, fabric.worst((0, 1)).base_us) == (group, 6.6)


def test_vllms_own_all_reduce_knows_nothing_of_nccls_settings():
    """It copies over NVLink by itself: with it on, tensor parallelism stays fast where a pipeline's hops take sockets."""
    fabric = fabric_of(two_cards(SOCKETS), 2, environment=NO_SHM)
    direct = two_cards().links[0].measured_gb_s["0->1"].median
    assert fabric.worst((0, 1)).kind == "NVLink" and fabric.worst((0, 1)).gb_s == pytest.approx(direct, rel=0.1) and fabric.worst((0, 1)).base_us == 0
    assert fabric.way(0, 1).gb_s == 4.79


def test_without_a_measurement_the_settings_still_close_the_link():
    fabric = fabric_of(two_cards(), 2, environment=NO_P2P, custom_all_reduce=False)
    assert (fabric.way(0, 1).kind, fabric.way(0, 1).evidence) == ("PCIe", "estimated") and 30 < fabric.way(0, 1).gb_s < 70
    assert fabric_of(two_cards(), 2, environment=NO_SHM, custom_all_reduce=False).way(0, 1).gb_s is None
    # What was measured with other settings is no measurement of these.
    assert fabric_of(two_cards(NVLINK), 2, environment=NO_SHM, measured_with={}, custom_all_reduce=False).way(0, 1).gb_s is None
    assert fabric_of(two_cards(NVLINK), 2, environment={"X": "1"}, measured_with={}).way(0, 1).gb_s == 355.1


def test_the_model_orders_pipeline_and_tensor_parallelism_as_the_links_slow(changed):
    """The first report's claim by the links' floors alone: over NVLink two cards halve the time of a prompt, over sockets they are slower than a pipeline."""
    from fieldbook import memory

    asked = changed({"engine.device": "cuda", "engine.dtype": "bfloat16", "model.name": "dense-8b-shape", "model.source": "dummy"})
    spec, floors = memory.model_spec("dense-8b-shape"), []
    for through, settings in ((NVLINK, {}), (HOST, NO_P2P), (SOCKETS, NO_SHM)):
        fabric = fabric_of(two_cards(through), 2, environment=settings, custom_all_reduce=False)
        tensor = strategy.stage_floors(strategy.Strategy(2), spec, asked, fabric, (32,), 8192)[0]
        hop = strategy.hop_floors(strategy.Strategy(1, 2), spec, asked, fabric, 8192)[0]
        floors.append((tensor, hop))
    # 64 all-reduces of 64 MiB, each sent once; one hop of twice that.
    assert floors[0][0] == pytest.approx(64 * (8192 * 8192 / 298.3e9 + 7.8e-6), rel=0.01) and floors[0][1] == pytest.approx(2 * 8192 * 8192 / 355.1e9, rel=0.05)
    assert all(tensor > 25 * hop for tensor, hop in floors)
    # One H200 took 8,192 / 33,896 s for such a prompt; a pipeline passes it through one card after the other, tensor parallelism halves the arithmetic.
    one = 8192 / 33_896
    ahead = ["TP2" if one / 2 + tensor < one + hop else "PP2" for tensor, hop in floors]
    assert ahead == ["TP2", "PP2", "PP2"] and floors[2][0] > 1.0


def test_a_pair_that_is_hidden_is_told(monkeypatch, capfd):
    """CUDA_VISIBLE_DEVICES leaves one out: one note, and no rank is started."""
    monkeypatch.setattr(sys, "argv", ["w", "--pair=0-3"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    told = []
    monkeypatch.setattr(w.os, "fdopen", lambda *_: SimpleNamespace(write=lambda text: told.append(text), flush=lambda: None, close=lambda: None))
    monkeypatch.setattr(w.os, "dup2", lambda *_: None)
    monkeypatch.setattr(w.os, "_exit", lambda status: told.append(status))
    w.main()
    assert any("CUDA_VISIBLE_DEVICES leaves one out" in str(text) for text in told) and told[-1] == 0


def test_a_lone_prompt_passes_a_pipeline_one_stage_after_the_other(changed):
    from fieldbook import memory

    wide = {"engine.max_num_batched_tokens": 8192, "engine.max_model_len": 65536, "model.name": "dense-8b-shape", "model.source": "dummy"}
    asked = changed({"engine.device": "cuda", "engine.dtype": "bfloat16", **wide})
    spec, fabric = memory.model_spec("dense-8b-shape"), fabric_of(two_cards(NVLINK), 2, custom_all_reduce=False)
    work = 2 * memory.active_parameters(spec) / 1e14

    def lone(s, split, tokens, expected=False):
        return strategy.lone_prefill_s(s, spec, asked, fabric.as_expected if expected else fabric, split, tokens, 1e14)

    hop = strategy.hop_floors(strategy.Strategy(1, 2), spec, asked, fabric, 8192)[0]
    # One piece: both halves of the layers one after the other, and the hop between them. One card alone sends nothing.
    assert lone(strategy.Strategy(1, 2), (16, 16), 8192)[0] == pytest.approx(8192 * work + hop)
    assert lone(strategy.Strategy(1), (32,), 8192) == pytest.approx((8192 * work, 0.0))
    # Four pieces: the first goes all the way, the three others follow at the pace of a stage; of unequal ones, the longer.
    assert lone(strategy.Strategy(1, 2), (16, 16), 32768)[0] == pytest.approx(8192 * work * 2.5 + hop)
    assert lone(strategy.Strategy(1, 2), (8, 24), 32768)[0] == pytest.approx(8192 * work * (1 + 3 * 0.75) + hop)
    # Tensor parallelism shares the arithmetic and pays for 64 all-reduces, which are expected to take 1.3 times their floor by a rate that NCCL had there.
    links = strategy.stage_floors(strategy.Strategy(2), spec, asked, fabric, (32,), 8192)[0]
    assert lone(strategy.Strategy(2), (32,), 8192, True) == pytest.approx((8192 * work / 2 + 1.3 * links, 1.3 * links))
    # By what the link carries at most, three times.
    bare = fabric_of(two_cards(), 2, custom_all_reduce=False)
    links = strategy.stage_floors(strategy.Strategy(2), spec, asked, bare, (32,), 8192)[0]
    found = strategy.lone_prefill_s(strategy.Strategy(2), spec, asked, bare.as_expected, (32,), 8192, 1e14)
    assert found == pytest.approx((8192 * work / 2 + 3 * links, 3 * links))


def test_experts_are_shared_by_all_ranks_that_hold_them():
    from fieldbook import memory

    spec = memory.model_spec("moe-24-layers")
    # 8 of 128 experts of 3 x 2048 x 768, 24 layers; on four ranks a quarter, where the rest is whole.
    experts = 24 * 8 * 3 * 2048 * 768
    whole = memory.parameters_per_rank(spec, range(24), 1, 1)
    assert whole == pytest.approx(memory.active_parameters(spec), rel=1e-6)
    assert memory.parameters_per_rank(spec, range(24), 1, 4) == pytest.approx(whole - 0.75 * experts)
    assert memory.parameters_per_rank(spec, range(12), 2, 2) == pytest.approx(whole / 4)


def test_the_guide_says_what_the_model_expects_of_two_cards():
    """docs/links.md: a prompt of 8,192 tokens by the rates of three NCCL settings and the 710 TFLOP/s of one H200's matrix product."""
    from fieldbook import memory, params

    asked, lines = params.load(ROOT / "params" / "h200-x2.yml"), []
    spec = memory.model_spec(asked.model.name)
    for link, through, settings in (("NVLink", NVLINK, {}), ("host memory", HOST, NO_P2P), ("sockets", SOCKETS, NO_SHM)):
        fabric = fabric_of(two_cards(through), 2, environment=settings, custom_all_reduce=link == "NVLink")
        pair = [
            strategy.lone_prefill_s(s, spec, asked, fabric.as_expected, split, 8192, 710e12)
            for s, split in ((strategy.Strategy(1, 2), (16, 16)), (strategy.Strategy(2), (32,)))
        ]
        cells = " | ".join(f"{1e3 * seconds:,.0f} | {1e3 * of_links:,.0f}" for seconds, of_links in pair)
        lines.append(f"| {link} | {through[0]:g} | {through[1]:g} | {cells} | {pair[1][0] / pair[0][0]:.2f} |")
    text = guide("links")
    assert [line for line in lines if line not in text] == []
