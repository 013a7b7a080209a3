"""cpu-eager-pp on real servers: mended, two stages answer as one does, and the ranks say that they run the mend; stock dies at the first request.

FIELDBOOK_TEST_PYTHON names the Python of another environment whose vLLM is meant, for releases other than the one installed here. Of that one stock code is
started as well; of the one here the walk does it (notebook 04 of the quick box).
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from fieldbook import bootlog, patches, server, starting
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


def dies(box, run_dir):
    """A stock server with two stages, asked once."""
    state_file = server.launch(box, TWO, (15, 15), run_dir, "stock")
    starting.wait_ready(state_file, 300, first_token=False)
    with pytest.raises(GateFailed):
        server.complete(server.read_state(state_file), PROMPTS[0], TOKENS)
    assert bootlog.root_error(server.log_text(server.read_state(state_file))) == patches.CATALOGUE[ID].symptom
    server.stop(state_file)


ONE, TWO = Parallel(), Parallel(pipeline_parallel_size=2)


def test_mended_says_what_one_stage_says_and_every_rank_runs_the_mend(quick, run_dir):
    elsewhere = os.environ.get("FIELDBOOK_TEST_PYTHON", "")
    box = quick.model_copy(update={"engine": quick.engine.model_copy(update={"python": elsewhere})})
    tree = patches.tree_of_box(box)
    found = patches.state_of(tree, ID)
    patches.revert(tree, ID)
    assert patches.state_of(tree, ID) == "present"
    try:
        if elsewhere:
            dies(box, run_dir)
        assert patches.apply(tree, ID, box) == "patched"
        started = [server.launch(box, ONE, (30,), run_dir, "one-stage"), server.launch(box, TWO, (15, 15), run_dir, "mended")]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda file: starting.wait_ready(file, 300), started))
        whole, mended = (server.read_state(file) for file in started)
        expected = answers(whole)
        assert answers(mended) == expected and len(set(expected)) > 15
        rows = evidence.rows(tree, [ID], server.running_code(mended, evidence.places([ID]), 2))
        assert [(row["rank"], row["wrong"]) for row in rows] == [(0, ""), (1, "")]
        assert {row["sha256"] for row in rows} == {patches.status(tree)[0].sha256}
        print(patches.release(tree), len(expected), "greedy answers equal;", rows[1]["sha256"], rows[1]["file"])
        for file in started:
            server.stop(file)
    finally:
        (patches.apply if found == "patched" else patches.revert)(tree, ID)
