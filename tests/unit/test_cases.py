"""Boot logs out of the wild, from ../shared/cases/C where that folder lies beside the checkout: each gives the reading that its .expect.txt names."""

import re

import pytest
from conftest import ROOT

from fieldbook import bootlog

SHARED = ROOT.parent / "shared" / "cases"
CASES = SHARED / "C"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no cases beside this checkout")

# Per case what is read: fields of the log, and under "ranks" the figures of each rank in order. Whatever is not named of POOL has to be None.
POOL = ("pool_tokens", "max_concurrency", "max_model_len", "gpu_blocks", "cpu_blocks", "pool_tokens_from_blocks")
READ = {
    "01-v1-first-torchcompile-gpu-blocks": {
        "ranks": [{"rank": 0, "weights_gib": 67.7229, "available_kv_gib": None}],
        "gpu_blocks": 1381,
        "pool_tokens_from_blocks": 22_096,
        "max_model_len": 2048,
        "max_concurrency": 10.79,
        "engine": "V1",
        "runner": "V1",
    },
    "02-pp4-v1-0.10-per-rank-available": {
        "available_kv_gib": {0: 18.02, 1: 18.25, 2: 18.22},
        "pp_size": 4,
        "tp_size": 1,
        "ranks": [{"pp_rank": 0}, {"pp_rank": 1}, {"pp_rank": 2}, {"pp_rank": 3, "available_kv_gib": None}],
    },
    "05-mamba-capped-capture-sizes-spark": {
        "pool_tokens": 188_640,
        "max_model_len": 131_072,
        "max_concurrency": 5.23,
        "utilization": 0.7,
        "ranks": [{"available_kv_gib": 17.36, "graphs_estimated_gib": 0.26}],
    },
    "06-hybrid-padding-layers-5090": {"pool_tokens": 1_823_372, "max_model_len": 1_048_576, "max_concurrency": 1.74, "padding_layers": 3},
    "07-v0.6.4-memory-profiling-results-29k": {
        "ranks": [{"weights_gib": 14.9888, "available_kv_gib": 2.89, "total_gib": 23.58, "non_torch_gib": 0.35, "utilization": 0.9}],
        "gpu_blocks": 1478,
        "cpu_blocks": 2048,
        "pool_tokens_from_blocks": 23_648,
        "max_model_len": 29_000,
        "max_concurrency": 0.82,
        "error": "The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648)",
    },
    "10-v0-cuda-blocks-wording-phi4": {
        "ranks": [
            {
                "weights_gib": 8.6253,
                "model_load_s": 7.670299,
                "total_gib": 79.15,
                "utilization": 0.7,
                "requested_gib": 55.09,
                "available_kv_gib": 45.21,
                "non_torch_gib": 0.09,
                "peak_activation_gib": 1.16,
                "graphs_gib": 1.12,
                "graph_capture_s": 59,
            }
        ],
        "gpu_blocks": 14_815,
        "cpu_blocks": 1966,
        "pool_tokens_from_blocks": 237_040,
        "max_concurrency": 462.97,
        "max_model_len": 512,
        "engine": "V0",
        "runner": None,
        "init_engine_s": 70.01,
    },
    "11-qwen3.5-4b-no-timestamps": {
        "ranks": [{"weights_gib": 8.61, "available_kv_gib": 10.21, "process": "EngineCore", "pid": None, "weights_load_s": 2.35}],
        "pool_tokens": 235_706,
        "vllm_version": "0.23.0",
        "runner": "V1",
        "attention_backend": "FLASH_ATTN",
        "attention_backends": ("FLASH_ATTN",),
        "init_engine_s": 286.39,
        "max_seq_len": 4096,
    },
    "12-minicpm5-model-runner-v2": {
        "ranks": [{"weights_gib": 2.09, "available_kv_gib": 11.54}],
        "pool_tokens": 504_192,
        "vllm_version": "0.23.0",
        "runner": "V2",
        "weights_load_s": {0: 0.52},
    },
    "15-ray-worker-0.4-ip-prefix": {
        "ranks": [{"rank": 0, "weights_gib": 0.1189, "process": ""}, {"rank": None, "weights_gib": 0.1189, "process": "RayWorkerWrapper", "ip": "192.0.2.1"}]
    },
    "16-cpu-doc-15M-tokens-no-x": {"pool_tokens": 15_728_640, "max_concurrency": 1920, "max_model_len": 8192},
    "17-intel-b60-xpu": {"pool_tokens": 114_432, "max_model_len": 18_000, "max_concurrency": 6.36},
    "20-kimi-k2.6-hand-aligned": {"pool_tokens": 1_822_464, "max_concurrency": 6.95, "max_model_len": 262_144, "notes": "hand-made"},
    "21-glm5.1-markdown-table": {
        "pool_tokens": 329_792,
        "max_concurrency": 5.03,
        "max_model_len": 65_536,
        "available_kv_gib": {0: 19.12},
        "notes": "hand-made",
    },
    "22-exl3-negative-graph-pool": {"ranks": [{"graphs_gib": -0.19, "graphs_estimated_gib": 2.43}]},
    "25-fake-lookalike-club3090-fixture": {
        "pool_tokens": 524_288,
        "max_concurrency": 2.0,
        "max_model_len": 262_144,
        "ranks": [{"weights_gib": 13.62, "available_kv_gib": None, "non_torch_gib": None}],
        "available_kv_gib": {},
        "vllm_version": None,
        "notes": "not read, since vLLM does not write it: Available KV cache / card = 8.00 GiB",
    },
    "26-cmp170hx-4card-pp4-dsv4-path-in-brackets": {"pool_tokens": 1_621_821, "max_model_len": 262_144, "max_concurrency": 6.19},
    "27-one-line-size-and-concurrency-tp4-glm53": {
        "pool_tokens": 1_072_150,
        "max_concurrency": 4.09,
        "max_model_len": 262_144,
        "utilization": 0.95,
        "attention_backend": None,
    },
    "30-kv-pool-transcribed-comment": {"pool_tokens": 1_072_150, "max_concurrency": 4.09, "max_model_len": 262_144, "ranks": []},
}


def text_of(name):
    return (CASES / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", READ)
def test_read_as_expected(name):
    log, expected = bootlog.parse(text_of(name)), dict(READ[name])
    note, ranks = expected.pop("notes", None), expected.pop("ranks", None)
    assert {key: getattr(log, key) for key in {*POOL, *expected}} == dict.fromkeys(POOL) | expected
    assert bool(log.notes) == bool(note) and (note is None or any(note in line for line in log.notes))
    assert log.error is None or "error" in expected
    if ranks is not None:
        assert [{key: getattr(r, key) for key in wanted} for r, wanted in zip(log.ranks, ranks, strict=True)] == ranks


@pytest.mark.parametrize("name", READ)
def test_the_figures_are_those_of_the_case(name):
    """Guards this file: what READ claims of the pool stands in the .expect.txt or in the log."""
    there = {float(n) for n in re.findall(r"\d+(?:\.\d+)?", ((CASES / f"{name}.expect.txt").read_text() + text_of(name)).replace(",", ""))}
    assert {float(value) for key, value in READ[name].items() if key in POOL and value is not None} <= there


@pytest.mark.parametrize("name", READ)
def test_colours_blanks_and_quotes_around_a_case_change_nothing(name):
    text, plain = text_of(name), bootlog.parse(text_of(name))
    coloured = re.sub(r"\((?:EngineCore|Worker)[^)]*\)", lambda m: f"\x1b[0;36m{m[0]}\x1b[0;0m", text)
    assert bootlog.parse(coloured) == plain
    assert bootlog.parse(re.sub(r"(?m)[ \t]+$", "", text) + "\n\n") == plain
    if "|" not in text:
        assert bootlog.parse("".join(f"vllm-1  | {line}\n" for line in text.splitlines())).ranks == plain.ranks


def test_every_case_is_accounted_for():
    assert {file.name.removesuffix(".expect.txt") for file in CASES.glob("*.expect.txt")} == set(READ)


@pytest.mark.parametrize("file", sorted((SHARED / "D").glob("*.txt")) if CASES.is_dir() else [], ids=lambda file: file.stem)
def test_failures_give_their_figures_and_no_others(file):
    """Logs of failed starts: a pool only where one was printed."""
    text = file.read_text(encoding="utf-8", errors="replace")
    log = bootlog.parse(text)
    assert (log.pool_tokens is not None) == ("KV cache size: " in text) and (log.gpu_blocks is not None) == ("# GPU blocks: " in text)
    assert bootlog.bootlog_document(log)["pool_tokens"] == log.pool_tokens


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("10-tp2-oom-two-ranks", "OutOfMemoryError: CUDA out of memory"),
        ("12-docker-compose-prefix-no-cache", "ValueError in raise_if_cache_size_invalid: No available memory for the cache blocks"),
        ("15-free-memory-less-ansi-caret", "ValueError: Free memory on device cuda:0 (1.54/22.05 GiB)"),
        ("16-free-memory-real-esc", "ValueError: Free memory on device cuda:0 (1.54/22.05 GiB)"),
        ("21-keyerror-granite-pp2", "KeyError in _load: 'layers.0.block_sparse_moe.gate.weight'"),
        ("32-nccl-unhandled-cuda-init", "RuntimeError: NCCL error: unhandled cuda error"),
    ],
)
def test_the_error_behind_prefixes_that_no_server_of_ours_writes(name, expected):
    assert bootlog.root_error((SHARED / "D" / f"{name}.txt").read_text(encoding="utf-8")).startswith(expected)
