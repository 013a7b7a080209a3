"""`fieldbook memory` and `fieldbook bootlog` as commands, the ledger after a launch, and what an earlier run's log teaches a later estimate."""

import io
import json

import pytest
from conftest import ROOT

from fieldbook import bootlog, budget, memory, memory_tables, receipts, show, station
from fieldbook import params as params_module
from fieldbook.command import command_line
from fieldbook.params import Parallel

GLM = ROOT / "params" / "a100-x8-glm53.yml"
GIB = 2**30
# The second field report, GPU by GPU: 79.25 GiB usable each.
A100S = budget.Gpus((round(79.25 * GIB),) * 8)
LOG = """\
(EngineCore pid=7) INFO 11-29 11:53:21 [core.py:123] Initializing a V1 LLM engine (v0.30.0) with config: tensor_parallel_size=1, pipeline_parallel_size=2
(Worker_PP0 pid=8) INFO 11-29 11:53:27 [model_runner.py:428] Model loading took 0.30 GiB memory and 1.5 seconds
(Worker_PP1 pid=9) INFO 11-29 11:53:27 [model_runner.py:428] Model loading took 0.31 GiB memory and 1.5 seconds
(EngineCore pid=7) INFO 11-29 11:53:44 [kv_cache_utils.py:2395] GPU KV cache size: 46,592 tokens, Maximum concurrency for 2,048 tokens per request: 22.75x
"""


def test_the_published_layout(command):
    status, out, err = command("memory", GLM, "--json")
    found = json.loads(out)
    # Measured: 729,280; the printed 19.35 GiB hold 19.35 x 2^30 // (28480 x 64) = 11,398 blocks.
    assert (status, err) == (0, "") and found["pool_tokens"] == 11_398 * 64 and found["binding_rank"] == 0
    assert [r["kv_bytes_per_token"] for r in found["ranks"]] == [41 * 656 + 12 * 132, 38 * 656 + 11 * 132]
    assert [r["draft_layers"] for r in found["ranks"]] == [0, 1] and found["block_size_tokens"] == 64
    status, out, err = command("memory", GLM, "--partition", "39,39", "--available-gib", "21.95,15.56", "--json")
    found = json.loads(out)
    assert abs(found["pool_tokens"] / 597_760 - 1) < 0.0005 and found["binding_rank"] == 1


def test_text_shows_how_it_comes_about(command):
    status, out, err = command("memory", ROOT / "params" / "cpu-smollm2.yml")
    assert (status, err) == (0, "") and "KV pool 46,592 tokens: 364 blocks of 128 tokens, rank 0 binds" in out
    assert "2 (K and V) x 3 KV heads x 64, as float32" in out and "TP1 x PP1, vLLM's split" in out and "23,296" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", GLM, "--partition", "40,40"], "78 layers"),
        (["memory", GLM, "--partition", "a"], "--partition: got 'a'"),
        (["memory", GLM, "--available-gib", "0"], "--available-gib: got '0'"),
        (["memory", GLM, "--available-gib", "1,2,3"], "3 values for 2 stages"),
        (["memory", GLM, "--available-gib", "0.001"], "one request of 524288 tokens"),
        (["bootlog", "/nowhere"], "no such file"),
    ],
)
def test_wrong_words_get_one_line(command, words, said):
    status, out, err = command(*words)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and said in err


def test_bootlog_as_text_and_json(command, tmp_path, monkeypatch):
    (tmp_path / "boot.log").write_text(LOG)
    status, out, err = command("bootlog", tmp_path / "boot.log", "--json")
    found = json.loads(out)
    assert (status, err, found["pool_tokens"], len(found["ranks"])) == (0, "", 46_592, 2) and found["runner"] == "V2"
    status, out, err = command("bootlog", tmp_path / "boot.log")
    assert status == 0 and "46,592" in out and "rank 1" in out and "0.31" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    status, out, err = command("bootlog", "-")
    assert (status, out) == (2, "") and "no line of a vLLM start-up log" in err


def test_ledger_after_the_launch(changed):
    params = changed()
    pool = memory.pool(params, memory.model_spec(params.model.name), (15, 15))
    rows = {row["quantity"]: row for row in memory_tables.after_launch(pool, bootlog.parse(LOG), {0: GIB})}
    assert rows["KV pool, tokens"]["residual"] == 0 and rows["longest requests at once"]["residual"] == 0
    # 325,651,968 B of weights are 0.3033 GiB; the log prints two decimals.
    assert rows["rank 0: weights, GiB"]["residual"] == pytest.approx(-0.003, abs=0.001) and rows["rank 1: weights, GiB"]["boot log"] == 0.31
    assert rows["rank 0: KV space, GiB"]["boot log"] is None and any("NVML" in name for name in rows)


def test_pool_follows_the_logs_own_space_where_it_was_estimated():
    glm = params_module.load(GLM)
    free = memory_tables.with_engine(glm, available_kv_gib=[])
    spec = memory.model_spec("glm-5.3")
    # Given with two decimals, as a log tells it: 0.005 GiB are 2.9 blocks of 1,822,720 B, and one that is not whole. Set by hand it is exact.
    assert memory.pool_after(glm, spec, (41, 37), {}, None)[1] == round(0.005 * GIB / 1_822_720 * 64) + 64
    by_hand = memory_tables.with_engine(glm, available_kv_gib=[], other_boots=[], kv_cache_gib_per_rank=18)
    assert memory.pool_after(by_hand, spec, (41, 37), {}, None)[1] == 0
    pool, rounding = memory.pool_after(free, spec, (39, 39), {0: 21.95, 1: 15.56}, A100S)
    # 0.005 GiB are 3 blocks of 1,789,184 B, and one more for the block that is not whole.
    assert abs(pool.pool_tokens - 597_760) <= rounding and rounding == 192 + 64
    assert memory.pool_after(free, spec, (39, 39), {0: 21.95}, A100S)[1] is None


def test_space_given_for_one_layout_is_not_anothers():
    glm, spec = params_module.load(GLM), memory.model_spec("glm-5.3")
    other = memory.pool(glm, spec, (78,), tensor_parallel_size=8, gpus=A100S, must_fit=False)
    # The report logged 386,943 tokens at TP8 PP1.
    assert other.ranks[0].budget.evidence == "estimated" and abs(other.pool_tokens / 386_943 - 1) < 0.05
    assert memory.pool(glm, spec, (41, 37), gpus=A100S).ranks[0].budget is None


def test_context_parallel_ranks_share_the_tokens():
    """Latent attention is the same on every TP rank; with DCP each rank keeps its share of the tokens, and the pool grows by as much."""
    glm, spec = params_module.load(GLM), memory.model_spec("glm-5.3")
    alone = glm.model_copy(update={"parallel": Parallel(tensor_parallel_size=4, pipeline_parallel_size=2, layer_partition=[41, 37])})
    shared = glm.model_copy(
        update={"parallel": Parallel(tensor_parallel_size=4, pipeline_parallel_size=2, layer_partition=[41, 37], decode_context_parallel_size=4)}
    )
    one, four = (memory.pool(each, spec, (41, 37)).pool_tokens for each in (alone, shared))
    assert one == 11_398 * 64 and four == pytest.approx(4 * one, rel=0.001)
    words = command_line(shared, shared.parallel, (41, 37), 8000).argv
    assert words[words.index("--decode-context-parallel-size") + 1] == "4" and "--decode-context-parallel-size" not in " ".join(
        command_line(alone, alone.parallel, (41, 37), 8000).argv
    )


def test_what_if_keeps_context_parallelism_and_estimates_only_other_layouts():
    """Space given for TP4 x PP2 is not that of another layout, which is estimated from its cards and says so."""
    glm, spec = params_module.load(GLM), memory.model_spec("glm-5.3")
    layout = Parallel(tensor_parallel_size=4, pipeline_parallel_size=2, layer_partition=[41, 37], decode_context_parallel_size=4)
    glm = glm.model_copy(update={"parallel": layout})
    rows = {row["change"]: row["pool tokens"] for row in memory_tables.what_if(glm, spec, (41, 37), A100S)}
    assert rows["as it is"] == memory.pool(glm, spec, (41, 37)).pool_tokens > 2_900_000
    # The report logged 386,943 tokens at TP8 x PP1 and 1,193,600 at TP2 x PP4.
    assert rows["TP8 x PP1, vLLM's split, space estimated"] == pytest.approx(386_943, rel=0.05)
    assert rows["TP2 x PP4, vLLM's split, space estimated"] == pytest.approx(1_193_600, rel=0.05)
    one_for_all = memory_tables.with_engine(glm, available_kv_gib=[15.0])
    again = {row["change"]: row["pool tokens"] for row in memory_tables.what_if(one_for_all, spec, (41, 37), A100S)}
    assert again["as it is"] < rows["as it is"]
    assert again["TP8 x PP1, vLLM's split, space estimated"] == rows["TP8 x PP1, vLLM's split, space estimated"]


def test_what_the_engine_section_says_reaches_the_server():
    glm = memory_tables.with_engine(params_module.load(GLM), kv_cache_gib_per_rank=16, block_size_tokens=64, prefix_caching=False)
    words = command_line(glm, glm.parallel, (41, 37), 8000).argv

    def after(option):
        return words[words.index(option) + 1]

    assert after("--kv-cache-dtype") == "fp8_ds_mla" and after("--block-size") == "64" and "--no-enable-prefix-caching" in words
    assert json.loads(after("--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 3}
    assert after("--kv-cache-memory-bytes") == str(16 * 2**30)


def test_an_estimate_is_replaced_by_an_earlier_runs_figures(monkeypatch, tmp_path):
    """Boot logs of a run tell what the next run of the box can count on; another layout's do not."""
    monkeypatch.setenv("FIELDBOOK_REPORTS", str(tmp_path))
    free = memory_tables.with_engine(params_module.load(GLM), available_kv_gib=[], other_boots=[])
    sections = {**free.model_dump(), "box": {"name": free.box.name, "kind": "live", "note": ""}}
    terms = [{"non_torch_gib": 3.13, "peak_activation_gib": 2.36}, {"non_torch_gib": 3.2, "peak_activation_gib": 3.2}]

    def write(name, notebook, data, document):
        st = station.open_station(notebook, str(tmp_path / free.box.name / name), **document)
        st.data.update(data)
        st.close("fine")

    box = {"inventory": {"gpus": [{"memory_usable_bytes": size, "memory_total_bytes": None} for size in A100S.total_bytes]}}
    write("20260101-000000", "05_server_launch", {"measured_terms": terms}, sections)
    other = json.loads(json.dumps(sections))
    other["parallel"]["layer_partition"] = [39, 39]
    write("20260102-000000", "05_server_launch", {"measured_terms": terms[::-1]}, other)
    write("20260103-000000", "01_hardware_inventory", box, sections)
    st = station.open_station("02_memory_accounting", str(tmp_path / free.box.name / "20260103-000000"), **sections)
    gpus = st.gpus()
    assert gpus.total_bytes == A100S.total_bytes and gpus.terms == tuple(budget.LoggedTerms(**row) for row in terms)
    # Who recomputes the receipt elsewhere has no earlier run.
    assert st.data["earlier_terms"] == terms
    spec = memory.model_spec("glm-5.3")
    before, after = memory.pool(free, spec, (41, 37), gpus=A100S), memory.pool(free, spec, (41, 37), gpus=gpus)
    assert before.ranks[0].budget.evidence == "estimated" and after.ranks[0].budget.evidence == "an earlier run's log"
    assert after.ranks[0].budget.error_bytes < before.ranks[0].budget.error_bytes
    assert after.ranks[0].budget.non_torch_bytes == round(3.13 * GIB) and after.ranks[0].budget.activation_bytes == round(2.36 * GIB)
    assert receipts.read(tmp_path / free.box.name / "20260103-000000", "01_hardware_inventory").passed


def test_bars_stand_in_one_order_and_carry_the_budget_line():
    free = memory_tables.with_engine(params_module.load(GLM), available_kv_gib=[], other_boots=[])
    pool = memory.pool(free, memory.model_spec("glm-5.3"), (39, 39), gpus=A100S)
    rows, lines = memory_tables.parts(pool), memory_tables.limits(pool)
    for stage in ("rank 0", "rank 1"):
        whole = sum(row["GiB"] for row in rows if row["rank"] == stage)
        # What is shown fills exactly what vLLM may take: 0.95 x 79.25 GiB.
        assert whole == pytest.approx(0.95 * 79.25, abs=1e-6) and next(line["GiB"] for line in lines if line["rank"] == stage) == pytest.approx(whole)
    assert len({row["part"] for row in rows}) <= len(show.STACK)
