"""Reading vLLM's start-up log: figures, phases, and the error a failed start died of."""

from pathlib import Path

import pytest
from conftest import ROOT

from fieldbook import bootlog

# The form of vLLM 0.30 on CPU, two pipeline ranks, cut to what matters.
CPU_PP2 = """\
(APIServer pid=10) INFO 11-29 13:20:28 [api_utils.py:347]   \u2584\u2588  version 0.30.0
(APIServer pid=10) INFO 11-29 13:20:28 [api_utils.py:286] non-default args: {'host': '127.0.0.1', 'port': 39031}
(APIServer pid=10) WARNING 11-29 13:20:29 [vllm.py:709] Model Runner V2 requires Triton; using the V1 model runner instead.
(EngineCore pid=20) INFO 11-29 13:20:42 [core.py:123] Initializing a V1 LLM engine (v0.30.0) with config: model='/m', speculative_config=None
(Worker_PP1 pid=31) INFO 11-29 13:20:50 [gpu_model_runner.py:5400] Starting to load model /m...
(Worker_PP1 pid=31) INFO 11-29 13:20:52 [default_loader.py:430] Loading weights took 1.35 seconds
(Worker_PP0 pid=30) INFO 11-29 13:20:52 [default_loader.py:430] Loading weights took 1.11 seconds
(Worker_PP0 pid=30) INFO 11-29 13:20:53 [cpu_worker.py:241] Explicitly set (1.0/16.21) GiB for KV cache on node 0.
(Worker_PP1 pid=31) INFO 11-29 13:20:53 [cpu_worker.py:241] Explicitly set (2.0/16.21) GiB for KV cache on node 1.
(EngineCore pid=20) INFO 11-29 13:20:53 [kv_cache_utils.py:2395] CPU KV cache size: 46,592 tokens, Maximum concurrency for 2,048 tokens per request: 22.75x
(APIServer pid=10) INFO:     Application startup complete.
"""
WORKER_DEATH = """\
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055] WorkerProc hit an exception.
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055] Traceback (most recent call last):
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055]   File "/v/gpu_model_runner.py", line 4004, in execute_model
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055]     self.gather(tensors)
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055]   File "/v/gpu_model_runner.py", line 3382, in gather
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055]     assert self.tensors is not None
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055]            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
(Worker_PP1 pid=31) ERROR 11-29 13:21:11 [multiproc_executor.py:1055] AssertionError
(EngineCore pid=20) ERROR 11-29 13:21:11 [core.py:1368] Traceback (most recent call last):
(EngineCore pid=20) ERROR 11-29 13:21:11 [core.py:1368]   File "/v/core.py", line 1, in run_engine
(EngineCore pid=20) ERROR 11-29 13:21:11 [core.py:1368] RuntimeError: Worker failed with error ''
(APIServer pid=10) ERROR 11-29 13:21:11 [async_llm.py:843] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


def test_a_cpu_pipeline_log():
    log = bootlog.parse(CPU_PP2)
    assert (log.vllm_version, log.runner) == ("0.30.0", "V1")
    assert (log.pool_tokens, log.max_concurrency, log.max_model_len) == (46_592, 22.75, 2048)
    assert log.available_kv_gib == {0: 1.0, 1: 2.0} and log.weights_load_s == {0: 1.11, 1: 1.35}
    assert log.phases == ["arguments read", "engine starting", "ranks up, loading weights", "weights loaded", "KV pool allocated", "serving"]
    assert log.error is None


def test_one_rank_is_called_worker_without_a_number():
    log = bootlog.parse("(Worker pid=31) INFO 11-29 13:20:53 [cpu_worker.py:241] Auto set (3.5/16.21) GiB for KV cache on node 0.\n")
    assert log.available_kv_gib == {0: 3.5}


def test_colours_and_progress_bars_change_nothing():
    coloured = CPU_PP2.replace("(Worker_PP0 pid=30)", "\x1b[0;36m(Worker_PP0 pid=30)\x1b[0;0m").replace("(EngineCore", "\x1b[0;36m(EngineCore")
    barred = coloured.replace("(Worker_PP0", "Loading safetensors:   0% 0/1\rLoading safetensors: 100% 1/1\n(Worker_PP0", 1)
    assert bootlog.parse(barred) == bootlog.parse(CPU_PP2)


def test_a_progress_bar_does_not_lend_its_rank_to_the_next_line():
    bar = "(Worker_PP0 pid=30) Loading: 100% 1/1\r(Worker_PP1 pid=31) INFO [cpu_worker.py:241] Explicitly set (2.0/16.21) GiB for KV cache on node 1.\n"
    assert bootlog.parse(bar).available_kv_gib == {1: 2.0}


def test_windows_line_ends():
    assert bootlog.parse(CPU_PP2.replace("\n", "\r\n")) == bootlog.parse(CPU_PP2)


def test_the_gpu_wording_of_the_pool_line():
    log = bootlog.parse(
        "(EngineCore pid=2) INFO [kv_cache_utils.py:1] GPU KV cache size: 1,072,150 tokens, Maximum concurrency for 262,144 tokens per request: 4.09x\n"
    )
    assert (log.pool_tokens, log.max_model_len, log.max_concurrency) == (1_072_150, 262_144, 4.09)


@pytest.mark.parametrize("text", ["", "\n", "nothing of vLLM\n", "\x00\x01\ufffd" * 100])
def test_nothing_is_invented(text):
    log = bootlog.parse(text)
    assert log == bootlog.BootLog(None, None, None, None, None, {}, {}, [], None)


def test_another_programs_version_is_not_vllms():
    assert bootlog.parse("NCCL version 2.32.3+cuda13.4\nworker up\n").vllm_version is None


def test_a_log_that_is_still_growing_gains_and_never_loses():
    seen = []
    for end in range(0, len(CPU_PP2), 40):
        log = bootlog.parse(CPU_PP2[:end])
        assert log.phases[: len(seen)] == seen and log.error is None
        assert log.pool_tokens in (None, 46_592)
        seen = log.phases


def test_a_cut_pool_line_gives_no_figure():
    whole = "CPU KV cache size: 46,592 tokens, Maximum concurrency for 2,048 tokens per request: 22.75x"
    assert bootlog.parse(whole[:25]).pool_tokens is None


def test_the_first_exception_is_the_cause_and_its_frame_is_named():
    assert bootlog.root_error(CPU_PP2 + WORKER_DEATH) == "AssertionError in gather"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('  File "/v/a.py", line 3, in load\n    raise ValueError("x")\nValueError: no such model\n', "ValueError in load: no such model"),
        ("(EngineCore pid=2) ERROR 11-29 13:21:11 [core.py:1] ValueError: free memory 1.0/2.0 GiB\n", "ValueError: free memory 1.0/2.0 GiB"),
        ("ERROR 11-29 13:21:11 [core.py:1] OSError: [Errno 28] No space left on device\n", "OSError: [Errno 28] No space left on device"),
        # Exceptions of packages are printed with their module.
        ("(Worker_PP0 pid=3) ERROR 11-29 13:21:11 [a.py:1] torch.OutOfMemoryError: CUDA out of memory.\n", "OutOfMemoryError: CUDA out of memory."),
        (
            "(APIServer pid=3) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n",
            "ValidationError: 1 validation error for ModelConfig",
        ),
        ("[rank0]: RuntimeError: Assertion error (layout.hpp:45): t.is_cuda()\n", "RuntimeError: Assertion error (layout.hpp:45): t.is_cuda()"),
        (
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ),
    ],
)
def test_the_forms_an_exception_takes(lines, expected):
    found = bootlog.root_error(lines)
    # With or without the module that the exception comes from.
    assert found and (found == expected or found.endswith("." + expected))


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=3) WARNING 11-29 13:20:28 [s.py:299] This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.\n",
        '    raise ValueError("Tokenizer not available")\n',
        '(APIServer pid=3) INFO:     127.0.0.1:57314 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n',
        "/v/api_server.py:24: DeprecationWarning: this is deprecated\n",
        # Told at a level below ERROR: vLLM caught it and went on.
        "WARNING 11-29 12:15:28 [base.py:370] ValueError: Tokenizer not available when `skip_tokenizer_init=True`\n",
        "(EngineCore pid=3) DEBUG 11-29 11:53:25 [platforms/cuda.py:416] ModuleNotFoundError: No module named 'flashinfer'\n",
    ],
)
def test_what_is_no_cause_of_death(line):
    assert bootlog.root_error(line) is None


def test_a_handled_warning_does_not_hide_the_cause():
    handled = "WARNING 11-29 12:15:28 [base.py:370] ValueError: Tokenizer not available\n"
    assert bootlog.root_error(handled + WORKER_DEATH) == "AssertionError in gather"


CAPTURES = ROOT.parent / "shared" / "captures" / "h200-boot"


@pytest.mark.parametrize(
    ("name", "tokens", "concurrency", "version"),
    # Read off the files by eye.
    [
        ("dense-8b-shape-tp1.log", 909_728, 27.76, "0.30.0"),
        ("dsa-pp2-4-8-stock.log", 226_496, 27.65, "0.30.0"),
        ("qwen4exp-pp2-mtp.log", 175_399, 42.82, "0.30.0"),
        ("nccl-duplicate-gpu.log", None, None, None),
    ],
)
def test_real_logs_of_a_gpu_box(name, tokens, concurrency, version):
    if not CAPTURES.is_dir():
        pytest.skip("no captures beside this checkout")
    log = bootlog.parse(Path(CAPTURES / name).read_text(errors="replace"))
    assert (log.pool_tokens, log.max_concurrency, log.vllm_version) == (tokens, concurrency, version)
    # None of the servers died of an exception before its shutdown; the NCCL test ended with torch saying that its second process had.
    assert log.error is None or log.error.startswith("ProcessExitedException" if name.startswith("nccl") else "EngineDeadError")


ONE = "INFO 11-29 13:20:42 [cpu_worker.py:271] Explicitly set (1.0/9.34) GiB for KV cache on node 0.\n"
TWO = ONE.replace("(1.0/", "(2.0/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"(Worker_PP1 pid=4) {ONE}(Worker_PP0 pid=3) {ONE}", {0: 1.0, 1: 1.0}),
        (f"(Worker_PP1 pid=4) {TWO}(Worker_PP0 pid=3) {ONE}", {0: 1.0, 1: 2.0}),
        # Each rank writes its name first and its line after: both names came before both lines.
        (f"(Worker_PP1 pid=4) (Worker_PP0 pid=3) {ONE}{ONE}", {0: 1.0, 1: 1.0}),
        (f"(Worker_PP1 pid=4) (Worker_PP0 pid=3) {ONE}{TWO}", {}),
        (f"(Worker pid=4) {ONE}", {0: 1.0}),
    ],
)
def test_kv_space_of_ranks_whose_lines_run_into_each_other(text, expected):
    assert bootlog.parse(text).available_kv_gib == expected
