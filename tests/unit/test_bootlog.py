"""Reading vLLM's start-up log: figures, phases, and the error a failed start died of."""

import json
import random
import re
import textwrap
import time
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


@pytest.mark.parametrize("text", ["", "\n", "nothing of vLLM\n", "(Worker_TP" + "9" * 5000 + " pid=3) # GPU blocks: " + "9" * 5000, "\x00\x01\ufffd" * 100])
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


def test_an_exception_without_words_is_the_cause_and_not_what_the_engine_says_of_it():
    """StopIteration ends in none of Error, Exception, Interrupt; what a stage with ghost tensors died of on the H200, and the engine's echo of it."""
    head = "(Worker_PP1 pid=1458) ERROR 11-30 16:16:05 [multiproc_executor.py:1055] "
    frames = '  File "vllm/v1/worker/utils.py", line 426, in allocate_kv_cache\n', "    group_id, group = next(\n", "StopIteration\n"
    echo = "RuntimeError: Worker failed with error '', please check the stack trace above for the root cause\n"
    assert bootlog.root_error("".join(head + line for line in frames) + echo) == "StopIteration in allocate_kv_cache"


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


def figures(rank):
    """What a rank told, without who it is and where it stands."""
    return {name: value for name, value in vars(rank).items() if name in bootlog.ranks.FIGURES and value is not None}


# Written in the form of the format strings of vLLM's own code; wording.py names the files.
BUDGET = (
    "Free memory on device (79.2/79.65 GiB) on startup. Desired GPU memory utilization is (0.92, 73.28 GiB). Actual usage is 31.5 GiB for consumed memory "
    "(weights + non-torch), 2.75 GiB for peak activation, and 0.5 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
    "`--kv-cache-memory=40802189312` (38.0 GiB) to fit into requested memory, or `--kv-cache-memory=46170898432` (43.0 GiB) to fully utilize gpu memory. "
    "Current kv cache memory in use is 39.03 GiB."
)
GPU_PP2_TP2 = f"""\
(APIServer pid=10) INFO 11-29 13:20:28 [api_utils.py:286] non-default args: {{'model': '/m', 'gpu_memory_utilization': 0.92, 'block_size': 64}}
(EngineCore pid=20) INFO 11-29 13:20:42 [core.py:123] Initializing a V1 LLM engine (v0.31.0) with config: model='/m', speculative_config=SpeculativeConfig(\
method='mtp', model='/m', num_spec_tokens=3), max_seq_len=262144, tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=1, kv_cache_dtype=fp8
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:46 [gpu_worker.py:441] Using V2 Model Runner
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:46 [utils.py:163] Hidden layers were unevenly partitioned: [41,37]. This can be manually overridden
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:50 [cuda.py:538] Using FLASHMLA_SPARSE attention backend out of potential backends: ['FLASHMLA_SPARSE', 'FLASH_ATTN'].
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:50 [selector.py:194] Using FLASH_ATTN MLA prefill backend.
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:50 [unquantized.py:319] Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:51 [weight_utils.py:896] Filesystem type for checkpoints: EXT4. Checkpoint size: 390.55 GiB. Available RAM: 400.1 GiB.
(Worker_PP1_TP1 pid=33) INFO 11-29 13:20:59 [model_runner.py:429] Model loading took 29.25 GiB memory and 61.250000 seconds
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:59 [default_loader.py:431] Loading weights took 60.10 seconds
(Worker_PP0_TP0 pid=30) INFO 11-29 13:20:59 [model_runner.py:429] Model loading took 30.5 GiB memory and 61.000000 seconds
(Worker_PP0_TP0 pid=30) INFO 11-29 13:21:00 [interface.py:636] Setting kv cache block size to 64 for FLASHMLA_SPARSE backend.
(Worker_PP1_TP1 pid=33) INFO 11-29 13:21:00 [interface.py:636] Setting kv cache block size to 64 for FLASHMLA_SPARSE backend.
(EngineCore pid=20) INFO 11-29 13:21:01 [utils.py:320] Using LBNHC KV cache layout.
(Worker_PP0_TP0 pid=30) INFO 11-29 13:21:02 [model_runner.py:1067] Graph capturing finished in 7 secs, took 0.75 GiB
(Worker_PP0_TP0 pid=30) INFO 11-29 13:21:02 [gpu_worker.py:641] Available KV cache memory: 38.5 GiB
(EngineCore pid=20) INFO 11-29 13:21:03 [kv_cache_utils.py:2395] GPU KV cache size: 1,072,150 tokens, Maximum concurrency for 262,144 tokens per request: 4.09x
(Worker_PP1_TP1 pid=33) INFO 11-29 13:21:09 [model_runner.py:1067] Graph capturing finished in 8 secs, took 0.50 GiB
(Worker_PP1_TP1 pid=33) INFO 11-29 13:21:09 [gpu_worker.py:826] CUDA graph pool memory: -0.19 GiB (actual), 0.9 GiB (estimated), difference: 1.09 GiB (9.0%).
(Worker_PP1_TP1 pid=33) INFO 11-29 13:21:09 [gpu_worker.py:867] {BUDGET}
(EngineCore pid=20) INFO 11-29 13:21:10 [core.py:372] init engine (profile, create kv cache, warmup model) took 20.50 s (compilation: 5.67 s)
"""


def test_a_gpu_log_of_two_stages_with_two_ranks_each():
    log = bootlog.parse(GPU_PP2_TP2)
    assert (log.vllm_version, log.engine, log.runner, log.attention_backends) == ("0.31.0", "V1", "V2", ("FLASHMLA_SPARSE",))
    assert (log.pool_tokens, log.max_concurrency, log.max_model_len, log.gpu_blocks) == (1_072_150, 4.09, 262_144, None)
    assert (log.tp_size, log.pp_size, log.dp_size, log.partition, log.block_size_tokens) == (2, 2, 1, (41, 37), 64)
    assert (log.kv_cache_layout, log.kv_cache_dtype, log.checkpoint_gib, log.spec_method, log.spec_tokens) == ("LBNHC", "fp8", 390.55, "mtp", 3)
    assert (log.utilization, log.init_engine_s, log.available_kv_gib, log.weights_load_s) == (0.92, 20.5, {0: 38.5, 1: 39.03}, {0: 60.1})
    first, last = log.ranks
    assert (first.rank, first.pp_rank, first.tp_rank, first.process, first.pid) == (0, 0, 0, "Worker_PP0_TP0", 30)
    assert figures(first) == {
        "weights_gib": 30.5,
        "weights_load_s": 60.1,
        "model_load_s": 61.0,
        "graphs_gib": 0.75,
        "graph_capture_s": 7.0,
        "available_kv_gib": 38.5,
        "block_size_tokens": 64,
    }
    assert (last.rank, last.pp_rank, last.tp_rank) == (3, 1, 1)
    # The pool message is what the graphs took; the figures of the budget line are rounded once more.
    assert (last.graphs_gib, last.graphs_estimated_gib, last.consumed_gib, last.peak_activation_gib) == (-0.19, 0.9, 31.5, 2.75)
    assert (last.free_gib, last.total_gib, last.requested_gib, last.utilization, last.available_kv_gib) == (79.2, 79.65, 73.28, 0.92, 39.03)
    assert last.non_torch_gib is None and log.notes == ()


@pytest.mark.parametrize("width", [46, 60, 79, 80, 100, 132, 160])
@pytest.mark.parametrize("indent", ["", "    "])
def test_wrapped_by_a_terminal_anywhere(width, indent):
    wrapped = "".join(f"{indent if at else ''}{line[at : at + width]}\n" for line in GPU_PP2_TP2.splitlines() for at in range(0, max(len(line), 1), width))
    assert bootlog.parse(wrapped) == bootlog.parse(GPU_PP2_TP2)


@pytest.mark.parametrize("width", [50, 72, 80, 120])
def test_wrapped_at_blanks(width):
    wrapped = "\n".join(part for line in GPU_PP2_TP2.splitlines() for part in textwrap.wrap(line, width, break_on_hyphens=False))
    assert bootlog.parse(wrapped + "\n") == bootlog.parse(GPU_PP2_TP2)


def test_all_on_one_line():
    assert bootlog.parse(GPU_PP2_TP2.replace("\n", " ") + "\n") == bootlog.parse(GPU_PP2_TP2)
    assert bootlog.parse(GPU_PP2_TP2.replace("\n", "") + "\n") == bootlog.parse(GPU_PP2_TP2)


@pytest.mark.parametrize("before", ["2026-11-29T13:20:28.123Z ", "vllm-1  | ", "[2026-11-29T13:20:28Z] ", "> ", "    ", "# ", "Nov 29 13:20:28 box vllm[12]: "])
def test_what_containers_and_quotes_put_before_a_line(before):
    assert bootlog.parse("".join(before + line for line in GPU_PP2_TP2.splitlines(True))) == bootlog.parse(GPU_PP2_TP2)


@pytest.mark.parametrize("on", ["\x1b[1;36m", "^[[0;36m", "#033[1;36m", "[0;36m"])
def test_colours_in_every_spelling(on):
    off = re.sub(r"[\d;]+m$", "0m", on)
    coloured = re.sub(r"(?m)^(\([^)]*\)) (\w+)", lambda m: f"{on}{m[1]}{off} {on}{m[2]}{off}", GPU_PP2_TP2)
    assert bootlog.parse(coloured) == bootlog.parse(GPU_PP2_TP2)


V0_TP2 = """\
INFO 02-11 07:40:40 llm_engine.py:234] Initializing a V0 LLM engine (v0.7.2) with config: model='/m', tensor_parallel_size=2, pipeline_parallel_size=1,
INFO 02-11 07:40:41 cuda.py:230] Using Flash Attention backend.
INFO 02-11 07:40:45 model_runner.py:1115] Loading model weights took 13.9476 GB
(VllmWorkerProcess pid=17) INFO 02-11 07:40:45 model_runner.py:1115] Loading model weights took 13.9476 GB
(VllmWorkerProcess pid=17) INFO 02-11 07:40:47 worker.py:266] Memory profiling takes 2.05 seconds
(VllmWorkerProcess pid=17) INFO 02-11 07:40:47 worker.py:266] the current vLLM instance can use total_gpu_memory (23.50GiB) x gpu_memory_utilization \
(0.90) = 21.15GiB
(VllmWorkerProcess pid=17) INFO 02-11 07:40:47 worker.py:266] model weights take 13.95GiB; non_torch_memory takes 0.25GiB; PyTorch activation peak memory \
takes 0.20GiB; the rest of the memory reserved for KV Cache is 6.75GiB.
INFO 02-11 07:40:47 worker.py:266] model weights take 13.95GiB; non_torch_memory takes 0.26GiB; PyTorch activation peak memory takes 1.39GiB; the rest of \
the memory reserved for KV Cache is 5.55GiB.
INFO 02-11 07:40:48 executor_base.py:110] # cuda blocks: 3789, # CPU blocks: 2730
INFO 02-11 07:40:48 executor_base.py:115] Maximum concurrency for 8192 tokens per request: 7.40x
INFO 02-11 07:41:00 model_runner.py:1562] Graph capturing finished in 12 secs, took 0.31 GiB
"""


def test_v0_the_driver_writes_without_a_prefix():
    log = bootlog.parse(V0_TP2)
    assert (log.vllm_version, log.engine, log.runner, log.attention_backend, log.tp_size) == ("0.7.2", "V0", None, "Flash Attention", 2)
    assert (log.pool_tokens, log.gpu_blocks, log.cpu_blocks, log.pool_tokens_from_blocks, log.max_concurrency) == (None, 3789, 2730, 3789 * 16, 7.4)
    driver, worker = log.ranks
    assert (driver.rank, driver.available_kv_gib, driver.peak_activation_gib, driver.graphs_gib) == (0, 5.55, 1.39, 0.31)
    assert (worker.rank, worker.pid, worker.available_kv_gib, worker.total_gib, worker.requested_gib) == (None, 17, 6.75, 23.5, 21.15)
    # The exact figure of the loader, not the rounded one of the profiler.
    assert driver.weights_gib == worker.weights_gib == 13.9476 and log.available_kv_gib == {0: 5.55}


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("(Worker_PP2_TP1 pid=3) ", ("Worker_PP2_TP1", 2, 1, 3, None)),
        ("(Worker_PP1_TP0_DCP1_EP3 pid=3) ", ("Worker_PP1_TP0_DCP1_EP3", 1, 0, 3, None)),
        ("(Worker_TP3_EP3 pid=3) ", ("Worker_TP3_EP3", 0, 3, 3, None)),
        ("(VllmWorker TP1 pid=3) ", ("VllmWorker TP1", 0, 1, 3, None)),
        ("(Worker pid=3) (Worker_TP1_EP1 pid=3) ", ("Worker_TP1_EP1", 0, 1, 3, None)),
        ("(EngineCore_DP0 pid=2) (Worker_PP1 pid=3) ", ("Worker_PP1", 1, 0, 3, None)),
        ("(Worker_PP1) ", ("Worker_PP1", 1, 0, None, None)),
        ("(EngineCore pid=2) (RayWorkerWrapper pid=3, ip=192.0.2.7) ", ("RayWorkerWrapper", 0, 0, 3, "192.0.2.7")),
        ("(pid=3) ", ("", 0, 0, 3, None)),
        ("**(Worker_PP1 pid=3)** ", ("Worker_PP1", 1, 0, 3, None)),
        ("", ("", 0, 0, None, None)),
    ],
)
def test_the_names_of_ranks(prefix, expected):
    (rank,) = bootlog.parse(f"{prefix}INFO 11-29 13:20:53 [gpu_worker.py:641] Available KV cache memory: 3.5 GiB\n").ranks
    assert (rank.process, rank.pp_rank, rank.tp_rank, rank.pid, rank.ip) == expected and rank.available_kv_gib == 3.5


def test_a_rank_counted_over_stages_is_placed_where_the_sizes_are_told():
    sizes = "INFO 05-01 10:00:00 [core.py:58] Initializing a V1 LLM engine (v0.8.5) with config: tensor_parallel_size=2, pipeline_parallel_size=2,\n"
    line = "(VllmWorker rank=3 pid=4) INFO 05-01 10:00:01 [gpu_model_runner.py:1347] Model loading took 7.5 GiB and 3.100000 seconds\n"
    assert [(r.rank, r.pp_rank, r.tp_rank) for r in bootlog.parse(sizes + line).ranks] == [(3, 1, 1)]
    assert [(r.rank, r.pp_rank, r.tp_rank) for r in bootlog.parse(line).ranks] == [(3, None, None)]


def test_a_process_is_known_by_its_pid_before_and_after_it_has_its_name():
    log = bootlog.parse(
        "(Worker pid=8) INFO 11-29 13:20:45 [gpu_worker.py:1] Model loading took 3.0 GiB memory and 2.000000 seconds\n"
        "(Worker_PP1 pid=8) INFO 11-29 13:20:46 [gpu_worker.py:641] Available KV cache memory: 3.5 GiB\n"
        "(Worker pid=7) INFO 11-29 13:20:45 [parallel_state.py:2267] rank 0 in world size 2 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 0, EP\n"
        "(Worker pid=7) INFO 11-29 13:20:46 [gpu_worker.py:641] Available KV cache memory: 4.5 GiB\n"
    )
    assert log.available_kv_gib == {0: 4.5, 1: 3.5} and [(r.rank, r.weights_gib) for r in log.ranks] == [(0, None), (1, 3.0)]


def pool(who, tokens, longest="4,096", times="7.00"):
    size = f"{who}INFO 09-24 20:53:41 [kv_cache_utils.py:864] GPU KV cache size: {tokens:,} tokens\n"
    return size + f"{who}INFO 09-24 20:53:41 [kv_cache_utils.py:868] Maximum concurrency for {longest} tokens per request: {times}x\n"


def start(who):
    return f"{who}INFO 09-24 20:50:00 [core.py:76] Initializing a V1 LLM engine (v0.11.0) with config: model='/m'\n"


def test_engines_beside_each_other_keep_their_pools():
    a, b = "(EngineCore_DP0 pid=20) ", "(EngineCore_DP1 pid=21) "
    log = bootlog.parse(start(a) + start(b) + pool(b, 229_376, times="56.00") + pool(a, 238_208, times="58.16"))
    assert [(e.dp_rank, e.pid, e.pool_tokens, e.max_concurrency) for e in log.engines] == [(0, 20, 238_208, 58.16), (1, 21, 229_376, 56.0)]
    assert (log.pool_tokens, log.max_concurrency, log.max_model_len, log.dp_size) == (None, None, 4096, 2) and "2 engines" in log.notes[0]
    assert bootlog.parse(start(a) + start(b) + pool(b, 229_376) + pool(a, 229_376)).pool_tokens == 229_376


def test_two_servers_in_one_log_that_run_at_once():
    a, b = "(EngineCore_DP0 pid=20) ", "(EngineCore_DP0 pid=21) "
    log = bootlog.parse(start(a) + start(b) + pool(a, 1_000) + pool(b, 2_000))
    assert sorted(e.pool_tokens for e in log.engines) == [1_000, 2_000] and log.pool_tokens is None


def test_engines_without_a_prefix_beside_each_other():
    configured = start("").replace("model='/m'", "model='/m', data_parallel_size=2, ")
    log = bootlog.parse(configured * 2 + pool("", 1_000) + pool("", 3_000))
    assert [e.pool_tokens for e in log.engines] == [1_000, 3_000] and log.pool_tokens is None


@pytest.mark.parametrize("again", [20, 40])
def test_of_two_starts_the_later_counts(again):
    a, b = "(EngineCore pid=20) ", f"(EngineCore pid={again}) "
    kv = "(Worker_TP0 pid={}) INFO 09-24 20:53:40 [gpu_worker.py:298] Available KV cache memory: {} GiB\n"
    log = bootlog.parse(start(a) + kv.format(30, 9.5) + pool(a, 200_000) + start(b) + kv.format(again + 10, 10.5) + pool(b, 238_208))
    assert (log.pool_tokens, log.available_kv_gib, len(log.ranks), len(log.engines)) == (238_208, {0: 10.5}, 1, 1)
    assert log.notes == ("2 starts in one log: the figures are those of the last",)


def test_of_the_pools_that_old_v1_prints_for_each_rank_the_smallest_is_used():
    log = bootlog.parse(start("") + pool("", 300_016, times="73.25") + pool("", 299_008, times="73.00"))
    assert (log.pool_tokens, log.max_concurrency) == (299_008, 73.0) and "300,016, 299,008" in log.notes[0]


def test_ranks_that_lost_their_prefixes_are_counted_and_not_named():
    line = "INFO 09-24 20:53:41 [gpu_worker.py:298] Available KV cache memory: {} GiB\n"
    log = bootlog.parse(line.format(3.5) + line.format(3.25))
    assert [(r.rank, r.available_kv_gib) for r in log.ranks] == [(None, 3.5), (None, 3.25)]


def test_ranks_that_disagree_on_the_block_size():
    line = "(Worker_PP{} pid={}) INFO 11-29 13:21:00 [interface.py:934] Setting attention block size to {} tokens to ensure that attention page\n"
    log = bootlog.parse(line.format(0, 3, 832) + line.format(1, 4, 1600))
    assert log.block_size_tokens is None and [r.block_size_tokens for r in log.ranks] == [832, 1600] and "rank 0: 832, rank 1: 1600" in log.notes[0]


@pytest.mark.parametrize(
    ("blocks", "block_size", "concurrency", "longest", "tokens"),
    [
        (1381, None, 10.79, 2048, 22_096),
        (1381, None, None, None, 22_096),
        (1000, None, 31.25, 4096, 128_000),  # 128 on Gaudi
        (1000, None, 3.33, 4096, None),
        (1000, 32, None, None, 32_000),
        (None, 16, 2.0, 4096, None),
        (0, None, None, None, 0),
    ],
)
def test_tokens_out_of_blocks(blocks, block_size, concurrency, longest, tokens):
    assert bootlog.pool_tokens_from_blocks(blocks, block_size, concurrency, longest) == tokens


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Actual usage is 14.25 GiB for weight, 1.5 GiB for peak activation, -3.5 GiB for non-torch memory, and 0.75 GiB for CUDAGraph memory.",
         {"weights_gib": 14.25, "peak_activation_gib": 1.5, "non_torch_gib": -3.5, "graphs_gib": 0.75}),
        ("Current kv cache memory in use is 59055800320 bytes.", {"available_kv_gib": 55.0}),
        ("Auto set (12.5/31.25) GiB for KV cache on node 0, with 20.0 GiB requested memory for the worker. 7.5 GiB memory was consumed by non-kv usages.",
         {"available_kv_gib": 12.5, "total_gib": 31.25, "requested_gib": 20.0, "consumed_gib": 7.5}),
        ("Loading model weights took 512.0 MB", {"weights_gib": 0.5}),
        ("Available KV cache memory: -2.5 GiB", {"available_kv_gib": -2.5}),
        ("Forcing kv cache block size to 64 for FlashMLA backend.", {"block_size_tokens": 64}),
    ],
)  # fmt: skip
def test_wordings_of_other_releases(line, expected):
    (rank,) = bootlog.parse(f"(EngineCore_0 pid=3) INFO 09-23 18:12:39 [gpu_worker.py:391] {line}\n").ranks
    assert figures(rank) == expected


@pytest.mark.parametrize(
    "line",
    [
        "Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.2%, Prefix cache hit rate: 6.8%",
        "the model needs 14.0 GiB for weights and 2 GiB for peak activation",
        "GPU KV cache size: 1,07,150 tokens",
        "GPU KV cache size: 12.5 GiB",
        "Maximum concurrency for many tokens per request: 2.00x",
        "gpu_memory_utilization=0.90",
        "Using ['PYNCCL'] all-reduce backends (in dispatch order) out of potential backends: ['FLASHINFER'].",
        "NCCL version 2.27.5, 12 GB free",
    ],
)
def test_what_only_looks_like_a_figure(line):
    log = bootlog.parse(line + "\n")
    assert (log.ranks, log.engines, log.attention_backend, log.utilization) == ((), (), None, None)


@pytest.mark.parametrize("text", [CPU_PP2, GPU_PP2_TP2, V0_TP2, start("") + pool("", 300_016, times="73.25")])
def test_a_growing_log_never_takes_a_part_of_a_number(text):
    whole = bootlog.parse(text)
    names = [name for name in whole.__dataclass_fields__ if name not in ("ranks", "engines", "phases", "tp_size", "pp_size", "dp_size", "weights_load_s")]
    # A rank's first graph capture counts until its second; what is set in several steps is left out here.
    told = {(r.process, name, value) for r in whole.ranks for name, value in figures(r).items()} | {("Worker_PP1_TP1", "graphs_gib", 0.5)}
    for end in range(0, len(text), 3):
        log = bootlog.parse(text[:end])
        for name in names:
            value = getattr(log, name)
            if name == "available_kv_gib":
                assert value.items() <= whole.available_kv_gib.items() or end < len(text) - 1 and "VllmWorkerProcess" in text, (end, value)
            else:
                assert value in (None, (), getattr(whole, name)) or name in ("runner", "block_size_tokens", "engine"), (end, name, value)
        assert {(r.process, name, value) for r in log.ranks for name, value in figures(r).items()} <= told, end


def test_the_document_of_the_command_line():
    document = bootlog.bootlog_document(bootlog.parse(GPU_PP2_TP2))
    assert json.loads(json.dumps(document)) == document
    assert (document["pool_tokens"], document["available_kv_gib"], document["block_size"], document["runner"]) == (1_072_150, 38.5, 64, "V2")
    assert [r["rank"] for r in document["ranks"]] == [0, 3] and document["weights_gib"] is None and document["partition"] == [41, 37]
    empty = bootlog.bootlog_document(bootlog.parse(""))
    assert empty.keys() == document.keys() and not any(value for value in empty.values())


def test_is_read_keeps_all_that_parse_takes():
    text = GPU_PP2_TP2 + CPU_PP2 + "Loading safetensors: 100% 1/1\n(APIServer pid=10) INFO: 192.0.2.1 - GET /secret\n"
    kept = [line for line in text.splitlines() if bootlog.is_read(line)]
    assert bootlog.parse("\n".join(kept) + "\n") == bootlog.parse(text) and not any("secret" in line or "safetensors" in line for line in kept)


def test_edited_logs_raise_nothing_and_give_no_pool_that_is_not_there():
    rng = random.Random(20)
    scraps = [
        "\n",
        " ",
        "\r",
        "9",
        ",",
        ".",
        "x",
        "|",
        "`",
        "\x1b[0m",
        "(Worker_PP1 pid=3) ",
        "INFO 11-29 13:20:53 ",
        "\u2028",
        "\x00",
        "tokens",
        "\n    ",
        "-",
    ]
    texts = [CPU_PP2, GPU_PP2_TP2, V0_TP2, pool("(EngineCore pid=3) ", 150_745) + BUDGET]
    for _ in range(2000):
        text = list(rng.choice(texts))
        for _ in range(rng.randint(1, 12)):
            at, edit = rng.randrange(len(text) + 1), rng.randrange(4)
            if edit == 0:
                del text[at : at + rng.randint(1, 40)]
            elif edit == 1:
                text[at:at] = rng.choice(scraps)
            elif edit == 2:
                text[at : at + 1] = [chr(rng.randrange(32, 127))]
            else:
                text[at:at] = text[rng.randrange(len(text) + 1) :][:200]
        edited = "".join(text)
        log = bootlog.parse(edited)
        bootlog.bootlog_document(log)
        # A wrapped number stands there in two pieces.
        there = re.sub(r"[\s,*`]", "", bootlog.clean(edited))
        for tokens in (log.pool_tokens, log.gpu_blocks, *(engine.pool_tokens for engine in log.engines)):
            assert tokens is None or str(tokens) in there, edited


def test_a_long_log_is_read_in_reasonable_time():
    access = '(APIServer pid=10) INFO:     127.0.0.1:52 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    started = time.process_time()
    assert bootlog.parse(GPU_PP2_TP2 + access * 50_000).pool_tokens == 1_072_150
    assert time.process_time() - started < 5
