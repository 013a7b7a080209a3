"""What tp-partial and index-relay change, over vLLM's own transport, worker and model code: two stages of two tensor-parallel ranks on the CPU."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from fieldbook import patches
from fieldbook.patches import store

pytestmark = pytest.mark.live

# Layers of a model that shares top-k indices: 0, 1, 2 and 6 compute their own, so the second stage of 4+4 begins with two that share (4 and 5).
WORKER = """
import contextlib, importlib.util, json, sys, types
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group, init_distributed_environment, initialize_model_parallel, tensor_model_parallel_all_reduce
from vllm.sequence import IntermediateTensors
from vllm.utils import torch_utils

rank, store, trees = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
TOKENS, TOPK = 6, 4


def load(tree, path):
    # Beside the installed module of its package, whose relative imports it makes.
    package, _, name = f"vllm/{path}".removesuffix(".py").replace("/", ".").rpartition(".")
    spec = importlib.util.spec_from_file_location(f"{package}.{name}_under_test", f"{tree}/{path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Layer(torch.nn.Module):
    # Stands for a decoder layer: an owner writes this step's indices, which differ by tensor-parallel rank; one that shares notes what it reads.
    use_sequence_parallel_moe = False
    read, step = {}, 0

    def __init__(self, vllm_config, prefix, topk_indices_buffer, **more):
        super().__init__()
        self.index, self.buffer = int(prefix.rpartition(".")[2]), topk_indices_buffer
        self.indexer = object() if self.index in (0, 1, 2, 6) else None

    def forward(self, positions, hidden_states, residual, *more):
        rows = self.buffer[: positions.shape[0]]
        if self.indexer is not None:
            rows.fill_(1000 * Layer.step + 10 * self.index + get_tp_group().rank_in_group)
        else:
            Layer.read.setdefault(self.index, []).append(sorted(set(rows.flatten().tolist())))
        return hidden_states, hidden_states if residual is None else residual


class Runner:
    # What vLLM's second runner does with a model and the tensors of the stage before.
    is_pooling_model = False

    def __init__(self, model):
        self.model = model

    def execute_model(self, scheduler_output, came):
        if came is not None:
            own = self.model.make_empty_intermediate_tensors(batch_size=TOKENS, dtype=torch.float32, device="cpu")
            came = IntermediateTensors({name: rows[:TOKENS].copy_(came.tensors[name][:TOKENS]) for name, rows in own.tensors.items()})
        out = self.model(torch.zeros(TOKENS, dtype=torch.long), torch.arange(TOKENS), came, torch.ones(TOKENS, 8))
        return out if isinstance(out, IntermediateTensors) else None


def steps(tree, config):
    # Two steps of a patched or stock worker with a patched or stock model; what layers 4 and 5 read.
    model_code, worker_code = load(tree, "model_executor/models/deepseek_v2.py"), load(tree, "v1/worker/gpu_worker.py")
    model_code.DeepseekV2DecoderLayer = Layer
    # The MoE plumbing that asks its layers is not what is looked at here.
    for name in ("is_model_fused_shared_expert_compatible", "SparseMLAIndexGroupBuilder", "get_sparse_mla_index_group_max_rows"):
        if hasattr(model_code, name):
            setattr(model_code, name, lambda *given, **more: None)
    Layer.read = {}
    model = model_code.DeepseekV2Model(vllm_config=config, prefix="model")
    worker = object.__new__(worker_code.Worker)
    worker._pp_send_work, worker.vllm_config, worker.use_v2_model_runner, worker.model_runner = [], config, False, Runner(model)
    worker.annotate_profile = lambda scheduler_output: contextlib.nullcontext()
    for Layer.step in (1, 2):
        worker.execute_model(types.SimpleNamespace(total_num_scheduled_tokens=TOKENS, num_scheduled_tokens={}))
    for handle in worker._pp_send_work:
        handle.wait()
    return {str(layer): seen for layer, seen in Layer.read.items() if layer in (4, 5)}


config = VllmConfig(compilation_config=CompilationConfig(mode=0))
config.scheduler_config.max_num_batched_tokens = TOKENS
shape = types.SimpleNamespace(
    hidden_size=8, vocab_size=16, num_hidden_layers=8, index_topk=TOPK, index_topk_freq=4, index_skip_topk_offset=3, rms_norm_eps=1e-6,
    model_type="glm_moe_dsa", qk_nope_head_dim=1, qk_rope_head_dim=1,
)
with set_current_vllm_config(config):
    init_distributed_environment(4, rank, f"file://{store}", rank, "gloo")
    initialize_model_parallel(2, 2, backend="gloo")
    found = {}
    names = {"torch": torch}
    exec(open(f"{trees[1]}/helper.py").read(), names)
    for code in ("stock", "mended"):
        if get_pp_group().is_first_rank:
            # Partial sums of 1 and 10 on the two ranks; the residual is the same on both.
            hidden = torch.full((6, 4), (1.0, 10.0)[get_tp_group().rank_in_group])
            residual = torch.full((6, 4), 100.0)
            if code == "mended":
                hidden, residual = names["_summed_over_tp"](hidden, residual)
            get_pp_group().send_tensor_dict({"hidden_states": hidden, "residual": residual}, all_gather_group=get_tp_group())
        else:
            came = get_pp_group().recv_tensor_dict(all_gather_group=get_tp_group())
            # The next layer's norm adds up over the ranks first.
            total = came["residual"] + tensor_model_parallel_all_reduce(came["hidden_states"])
            found[code] = sorted(set(total.flatten().tolist()))
    # After the groups are there, for which vLLM would use shared memory else. A module that is loaded again would register its operators again.
    import vllm.model_executor.models.deepseek_v2, vllm.v1.worker.gpu_worker

    torch_utils.direct_register_custom_op = lambda *given, **more: None
    config.model_config = types.SimpleNamespace(hf_config=shape, dtype=torch.float32, is_moe=False)
    relay = {code: steps(tree, config) for code, tree in zip(("stock", "mended"), trees)}
    print("FOUND " + json.dumps({"sums": found, "relay": relay, "tp_rank": get_tp_group().rank_in_group, "pp_rank": get_pp_group().rank_in_group}), flush=True)
"""
PATHS = ("model_executor/models/deepseek_v2.py", "v1/worker/gpu_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the four ranks saw, with stock code and with patched."""
    scratch = tmp_path_factory.mktemp("ranks")
    tree = patches.vllm_tree()
    for path in PATHS:
        (scratch / "stock" / path).parent.mkdir(parents=True, exist_ok=True)
        (scratch / "stock" / path).write_bytes(store.original(tree, path, store.load(tree)))
    patches.overlay(tree, ["index-relay", "tp-partial"], scratch / "overlay")
    mended = scratch / "overlay" / "vllm"
    (mended / "helper.py").write_text(patches.CATALOGUE["tp-partial"].sites[0].helper)
    worker = scratch / "worker.py"
    worker.write_text(WORKER)
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    quiet |= {"VLLM_PP_LAYER_PARTITION": "4,4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # vLLM leaves sockets in its temporary folder, whose path must be short.
    sockets = tempfile.mkdtemp(prefix="fieldbook-test-")
    quiet["TMPDIR"] = sockets
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), scratch / "rendezvous", scratch / "stock", mended],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
        )
        for rank in range(4)
    ]
    try:
        said = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        shutil.rmtree(sockets)
    assert [rank.returncode for rank in ranks] == [0] * 4, [err[-1500:] for _, err in said]
    return [json.loads(next(line for line in out.splitlines() if line.startswith("FOUND ")).removeprefix("FOUND ")) for out, _ in said]


def test_partial_sums_arrive_added_up_and_stock_mixes_them(found):
    # 100 + 1 + 10 on every row; stock joins shares of different sums and adds them up twice.
    assert [rank["sums"] for rank in found[2:]] == [{"stock": [102.0, 120.0], "mended": [111.0]}] * 2


def test_relayed_indices_arrive_where_the_first_layers_read_them(found):
    """Layer 2 wrote them last on the first stage (1020 and 2020 in the two steps, plus the rank); each tensor-parallel rank gets its own, unmixed."""
    assert [rank["relay"]["mended"] for rank in found[:2]] == [{}, {}]
    for rank in found[2:]:
        own = rank["tp_rank"]
        assert rank["relay"]["mended"] == {"4": [[1020 + own], [2020 + own]], "5": [[1020 + own], [2020 + own]]}
        # Stock reads what its own layer 6 left there a step before.
        assert rank["relay"]["stock"]["4"][1] == [1060 + own] == rank["relay"]["stock"]["5"][1]
