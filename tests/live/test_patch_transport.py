"""What the tp-partial patch changes, over vLLM's own transport: two stages of two tensor-parallel ranks, four processes on the CPU."""

import json
import os
import subprocess
import sys

import pytest

from fieldbook import patches

pytestmark = pytest.mark.live

WORKER = """
import json, sys
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group, init_distributed_environment, initialize_model_parallel, tensor_model_parallel_all_reduce

rank, store, names = int(sys.argv[1]), sys.argv[2], {"torch": torch}
exec(open(sys.argv[3]).read(), names)
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(4, rank, f"file://{store}", rank, "gloo")
    initialize_model_parallel(2, 2, backend="gloo")
    found = {}
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
    print("FOUND " + json.dumps(found), flush=True)
"""


def test_partial_sums_arrive_added_up_and_stock_mixes_them(tmp_path):
    helper, worker = tmp_path / "helper.py", tmp_path / "worker.py"
    helper.write_text(patches.CATALOGUE["tp-partial"].sites[0].helper)
    worker.write_text(WORKER)
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), tmp_path / "rendezvous", helper],
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
    assert [rank.returncode for rank in ranks] == [0] * 4, [err[-500:] for _, err in said]
    for out, _ in said[2:]:
        found = json.loads(next(line for line in out.splitlines() if line.startswith("FOUND ")).removeprefix("FOUND "))
        # 100 + 1 + 10 on every row; stock joins shares of different sums and adds them up twice.
        assert found == {"stock": [102.0, 120.0], "mended": [111.0]}
