"""cpu-eager-pp on real servers: stock dies at the first request, mended answers as one stage does, and its ranks say that they run the mend.

FIELDBOOK_TEST_PYTHON names the Python of another environment whose vLLM is meant, for releases other than the one installed here.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from fieldbook import bootlog, patches, server
from fieldbook.errors import GateFailed
from fieldbook.params import Parallel
from fieldbook.patches import evidence

pytestmark = pytest.mark.live

PROMPTS = [
    "Name three primary colours.", "What is two plus three?", "What is the capital of France?", "Say hello in Spanish.", "Name a fruit that is yellow.",
    "How many days are in a week?", "What do bees make?", "Finish: roses are red, violets are", "Name the largest planet.", "What is ice made of?",
    "Give a word that rhymes with cat.", "What colour is the sky?", "Name an animal with a trunk.", "What is ten minus four?", "Who wrote Hamlet?",
    "Write a short greeting.", "List two European rivers.", "What is the opposite of hot?", "Name a musical instrument.", "What is the first month?",
]  # fmt: skip
TOKENS = 8
ID = "cpu-eager-pp"


def answers(state):
    return [server.complete(state, prompt, TOKENS)["text"] for prompt in PROMPTS]


def test_stock_dies_and_mended_says_what_one_stage_says(quick, run_dir, record_property):
    box = quick.model_copy(update={"engine": quick.engine.model_copy(update={"python": os.environ.get("FIELDBOOK_TEST_PYTHON", "")})})
    tree = patches.tree_of_box(box)
    one, two = Parallel(), Parallel(pipeline_parallel_size=2)
    found = patches.state_of(tree, ID)
    patches.revert(tree, ID)
    assert patches.state_of(tree, ID) == "present"
    try:
        started = [server.launch(box, one, (30,), run_dir, "one-stage"), server.launch(box, two, (15, 15), run_dir, "stock")]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda file: server.wait_ready(file, 300), started))
        whole, stock = (server.read_state(file) for file in started)
        with pytest.raises(GateFailed):
            server.complete(stock, PROMPTS[0], TOKENS)
        assert bootlog.root_error(server.log_text(stock)) == patches.CATALOGUE[ID].symptom
        server.stop(started[1])
        assert patches.apply(tree, ID, box) == "patched"
        mended = server.launch(box, two, (15, 15), run_dir, "mended")
        expected = answers(whole)
        server.stop(started[0])
        server.wait_ready(mended, 300)
        state = server.read_state(mended)
        assert answers(state) == expected and len(set(expected)) > 15
        rows = evidence.rows(tree, [ID], server.running_code(state, evidence.places([ID]), 2))
        assert [(row["rank"], row["wrong"]) for row in rows] == [(0, ""), (1, "")]
        assert {row["sha256"] for row in rows} == {patches.status(tree)[0].sha256}
        record_property("vllm", patches.release(tree))
        print(patches.release(tree), len(expected), "greedy answers equal;", rows[1]["sha256"], rows[1]["file"])
        server.stop(mended)
    finally:
        (patches.apply if found == "patched" else patches.revert)(tree, ID)
