"""Boot logs out of the wild, from ../shared/cases/C where that folder lies beside the checkout.

Today bootlog reads the pool where it stands on one line, as vLLM 0.30 writes it. All other wordings are listed here by name: for them it must say
nothing rather than something wrong, and a case that becomes readable fails here until it is moved to those that are read.
"""

import re

import pytest
from conftest import ROOT

from fieldbook import bootlog

CASES = ROOT.parent / "shared" / "cases" / "C"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no cases beside this checkout")

# (case, pool tokens, longest request, concurrency), each figure also looked for in the .expect.txt.
READ = [
    ("27-one-line-size-and-concurrency-tp4-glm53", 1_072_150, 262_144, 4.09),
    ("30-kv-pool-transcribed-comment", 1_072_150, None, 4.09),
]
# Wordings that are not read yet, and why.
NOT_YET = {
    "01-v1-first-torchcompile-gpu-blocks": "first V1 wording: blocks, no tokens",
    "02-pp4-v1-0.10-per-rank-available": "V1 0.10: available memory of each rank, no pool line",
    "05-mamba-capped-capture-sizes-spark": "before 0.30: size and concurrency on two lines",
    "06-hybrid-padding-layers-5090": "before 0.30: size and concurrency on two lines",
    "07-v0.6.4-memory-profiling-results-29k": "V0 wording",
    "10-v0-cuda-blocks-wording-phi4": "V0 wording",
    "11-qwen3.5-4b-no-timestamps": "before 0.30: size alone, no concurrency",
    "12-minicpm5-model-runner-v2": "before 0.30: size alone, no concurrency",
    "15-ray-worker-0.4-ip-prefix": "V0 wording, no pool line",
    "16-cpu-doc-15M-tokens-no-x": "two lines, concurrency without its x",
    "17-intel-b60-xpu": "before 0.30: size and concurrency on two lines",
    "20-kimi-k2.6-hand-aligned": "a summary set by hand, no log",
    "21-glm5.1-markdown-table": "a table, no log",
    "22-exl3-negative-graph-pool": "graph pool only, no pool line",
    "25-fake-lookalike-club3090-fixture": "not written by vLLM",
    "26-cmp170hx-4card-pp4-dsv4-path-in-brackets": "before 0.30: size and concurrency on two lines",
}


def figures(name):
    """Numbers of the .expect.txt, thousands separators removed."""
    return {float(n) for n in re.findall(r"\d+(?:\.\d+)?", (CASES / f"{name}.expect.txt").read_text().replace(",", ""))}


def log_of(name):
    return bootlog.parse((CASES / f"{name}.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "tokens", "longest", "concurrency"), READ, ids=[case[0] for case in READ])
def test_read_as_expected(name, tokens, longest, concurrency):
    log = log_of(name)
    assert (log.pool_tokens, log.max_concurrency) == (tokens, concurrency)
    assert longest is None or log.max_model_len == longest
    assert {tokens, concurrency, *([longest] if longest else [])} <= figures(name)


@pytest.mark.parametrize("name", NOT_YET)
def test_not_read_yet_and_nothing_made_up(name):
    log = log_of(name)
    assert (log.pool_tokens, log.max_concurrency, log.max_model_len) == (None, None, None), f"readable now: move {name} to READ"
    assert log.error is None or "07" in name or "Error" in (CASES / f"{name}.txt").read_text()


def test_every_case_is_accounted_for():
    there = {file.name.removesuffix(".expect.txt") for file in CASES.glob("*.expect.txt")}
    assert there == {case[0] for case in READ} | set(NOT_YET)
