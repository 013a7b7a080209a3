"""The predicted KV pool against the boot log of real servers, to the token, also where the split or the context length is odd.

PP1 and the even PP2 split are checked by the walk itself (notebooks 05 and 07 fail on one token of difference); here are the uneven ones.
"""

import json
import subprocess
import sys

import pytest

from fieldbook import bootlog, memory, partition, patches, server, starting
from fieldbook.params import Parallel

pytestmark = pytest.mark.live


# A token takes 768 B of a layer in bfloat16: 2^30 // (18 x 768 x 128) = 606 blocks. With 2,000 tokens as the longest request, which takes 16 blocks of 128,
# vLLM counts int(606 / 16 x 2000) = 75,750 tokens and not 606 x 128.
@pytest.mark.parametrize(
    ("split", "max_model_len", "dtype", "tokens"),
    [((12, 18), 2000, "bfloat16", 75_750)],
)
def test_predicted_pool_is_the_logged_one_and_the_server_answers(quick, run_dir, split, max_model_len, dtype, tokens):
    patches.apply(patches.vllm_tree(), "cpu-eager-pp")
    params = quick.model_copy(update={"engine": quick.engine.model_copy(update={"max_model_len": max_model_len, "dtype": dtype})})
    arm = Parallel(pipeline_parallel_size=2, layer_partition=list(split))
    predicted = memory.pool(params, memory.model_spec(params.model.name), split)
    assert predicted.pool_tokens == tokens
    # What notebook 03's search says of the same split.
    table = partition.stage_table(params.model_copy(update={"parallel": arm}), memory.model_spec(params.model.name))
    assert table.candidate(split).pool_tokens == tokens and not table.candidate(split).wrong

    state_file = server.launch(params, arm, split, run_dir, "uneven")
    starting.wait_ready(state_file, 300)
    state = server.read_state(state_file)
    log = bootlog.parse(server.log_text(state))
    assert log.pool_tokens == tokens
    assert log.max_concurrency == pytest.approx(predicted.max_concurrency, abs=0.0051)  # the log has two decimals
    assert log.available_kv_gib == {0: 1.0, 1: 1.0}
    answer = server.complete(state, "Name three primary colours.", 8)
    assert answer["completion_tokens"] == 8 and answer["text"].strip()

    # Found again by its state, and not once it is stopped.
    assert server.find(state_file, params.model.name)["port"] == state["port"]
    assert server.find(state_file, "another-model") is None
    assert server.stop(state_file)["status"] == "ended"
    assert server.find(state_file, params.model.name) is None


# Layers and stages of models that people serve, and odd ones.
SIZES = [
    (30, 1), (30, 2), (30, 4), (30, 7), (32, 3), (48, 3), (48, 5), (61, 2), (61, 8), (62, 4), (78, 2), (78, 3), (78, 4), (78, 8), (80, 6), (92, 5),
    (94, 4), (126, 16), (5, 5), (7, 4),
]  # fmt: skip


def test_vllms_own_split_is_what_the_installed_vllm_says():
    """The default that the best split is compared with, from get_pp_indices itself."""
    code = (
        "import json; from vllm.distributed.utils import get_pp_indices\n"
        f"print(json.dumps([[b - a for a, b in (get_pp_indices(n, r, p) for r in range(p))] for n, p in {SIZES}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert len(SIZES) == len(theirs) == 20
    assert [tuple(split) for split in theirs] == [partition.default_split(layers, stages) for layers, stages in SIZES]
