"""Benchmarks and probes against real vLLM: sound through a plain proxy, and void or failed through one with each fault."""

import http.server
import json
import secrets
import statistics
import subprocess
import sys
import threading

import pytest
from faultproxy import FaultProxy

from fieldbook import arms, bench, inventory, load, patches, probes, server
from fieldbook.bench import measuring
from fieldbook.probes import cases, likelihood
from fieldbook.probes.answers import ask_all
from fieldbook.schema import Benchmarks, Probes

pytestmark = pytest.mark.live

POINTS = Benchmarks(prefill_tokens=[160], decode_concurrency=[2], decode_prompt_tokens=32, decode_output_tokens=16, repetitions=1, rounds=1)
ASKED = Probes(trials=2, trial_tokens=32, languages=["en"], needle_shares=[], answer_tokens=16)
FAULTS = {
    # Fault: the checks that void the prefill point and the decode point; '' where it does not show there.
    "delays": ("lag", "lag"),
    "slow": ("lag", "lag"),
    "truncates": ("", "tokens"),
    "repeats": ("tokens", "tokens"),
    "doubles the text": ("", "tokens"),
    "empty 200": ("error", "error"),
    "500": ("error", "error"),
    "drops": ("tokens", "tokens"),
    "lies in usage": ("tokens", "tokens"),
    "lies about the prompt": ("tokens", "tokens"),
    "one prompt for all": ("prefix cache", ""),
}


@pytest.fixture(scope="module")
def proxied(quick, tmp_path_factory):
    """(proxy, load client) in front of a real server."""
    patches.apply(patches.vllm_tree(), "cpu-eager-pp")
    run_dir = tmp_path_factory.mktemp("faults")
    booted = arms.start(quick, quick.parallel, (15, 15), run_dir, "candidate-1", inventory.read(quick), lambda _: None)
    proxy = FaultProxy(server.url(booted.state))
    try:
        with load.client(run_dir / "load.log") as run:
            yield proxy, run
    finally:
        proxy.close()
        server.stop(booted.state_file)


def target_of(proxied):
    return bench.Target(proxied[0].url, "smollm2-135m-instruct")


def sampled(proxied, points=POINTS):
    """One sample of each point, without warm-ups: what voids a sample needs none."""
    place = {"arm": "candidate", "boot": 1, "round": 1, "repetition": 1}
    found = []
    for asked in bench.points(points):
        seeds = [measuring.seed_of(secrets.token_hex(4), "candidate", 1, 1, asked.metric, 1, stream) for stream in range(asked.streams)]
        found.append(measuring.measure_point(target_of(proxied), proxied[1], asked, seeds, None, place))
    return found


def asked(proxied):
    """Two questions and two samples, at two requests at a time, with what the probes make of them."""
    some = [case for case in cases.short(ASKED) if case.id in ("question-en-france", "question-en-sum")]
    answers = ask_all(target_of(proxied), some + cases.degeneration(ASKED, "s"), ASKED, "candidate", 2, lambda _: None)
    return answers, probes.against({"counts": probes.counts(answers)}, None)


def unhurried(proxied, points=POINTS, tries=4):
    """Samples of a server without a fault. A busy machine may delay a client by itself, which is a lag and nothing else: then they are taken again."""
    for _ in range(tries):
        taken = sampled(proxied, points)
        reasons = {reason.partition(":")[0] for sample in taken for reason in sample.void}
        if reasons != {"lag"}:
            break
    return taken


def test_a_plain_proxy_changes_nothing(proxied):
    proxied[0].fault = ""
    assert [sample.void for sample in unhurried(proxied)] == [[], []]
    answers, _ = asked(proxied)
    assert not [answer for answer in answers if answer.problems] and [answer.failed for answer in answers[:2]] == ["", ""]
    read = [likelihood.read_texts(target_of(proxied), ["en"]) for _ in range(2)]
    assert read[0] == read[1] and len(read[0]["en"]) > 50


# Kinds of which another one is tried each time; `pytest -m bar` tries them all.
AGAIN = ("slow", "doubles the text", "empty 200", "drops", "lies about the prompt")


@pytest.mark.parametrize("fault", [pytest.param(one, marks=[pytest.mark.bar] * (one in AGAIN)) for one in FAULTS])
def test_each_fault_voids_its_points(proxied, fault):
    proxied[0].fault, proxied[0].seen = fault, {}
    if fault == "one prompt for all":
        sampled(proxied)
    prefill, decode = sampled(proxied)
    for sample, check in zip((prefill, decode), FAULTS[fault], strict=True):
        found = {reason.partition(":")[0] for reason in sample.void}
        # A busy machine may delay a client by itself, whatever the proxy does.
        assert (check in found) if check else not found - {"lag"}, (sample.metric, sample.void)
    assert bench.values([prefill, decode], "candidate", "decode_c2_tok_s") == ([] if decode.void else [decode.value_tok_s])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("empty 200", "no JSON object"),
        pytest.param("500", "status 500", marks=pytest.mark.bar),
        pytest.param("truncates", "empty", marks=pytest.mark.bar),
        ("lies in usage", "usage says"),
        ("ends twice", "more than once"),
    ],
)
def test_a_broken_answer_fails_its_probe(proxied, fault, words):
    proxied[0].fault = fault
    answers, rows = asked(proxied)
    assert words in probes.problems(answers, rows)[0] and all(answer.failed for answer in answers)


def test_degenerate_answers_fail_the_run(proxied):
    proxied[0].fault = "repeats"
    row = next(row for row in asked(proxied)[1] if row["probe"] == "degeneration")
    assert row["failed"] == 2 and row["worse"]


@pytest.fixture
def at_once():
    """A server that streams as many tokens as it is asked for at once: what the client itself can take."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            token = b'data: {"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
            for _ in range(asked["max_tokens"]):
                self.wfile.write(token)
            usage = {"prompt_tokens": 32, "completion_tokens": asked["max_tokens"]}
            self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_the_client_is_not_what_is_measured(proxied, at_once):
    """At the highest concurrency of the server it takes less than a fifth of a core, and it can take more than ten times the tokens."""
    proxied[0].fault = ""
    highest = POINTS.model_copy(update={"prefill_tokens": [64], "decode_concurrency": [8], "decode_output_tokens": 32})
    sample = unhurried(proxied, highest)[-1]
    assert sample.void == [] and len(sample.ttft_s) == 8 and sample.client_cores < 0.2
    result = proxied[1](measuring.arguments(bench.Target(at_once, "m"), bench.Asked("decode_c8_tok_s", 32, 256, 8)), ["word"] * 8)
    assert result["output_lens"] == [256] * 8
    assert sum(result["output_lens"]) / result["duration"] > 10 * sample.value_tok_s


def test_the_command_against_a_server_that_is_up(proxied, tmp_path):
    proxied[0].fault = ""
    changes = [f"benchmarks.{key}={json.dumps(value)}" for key, value in POINTS.model_dump().items()]
    command = [sys.executable, "-m", "fieldbook", "bench", "--base-url", proxied[0].url + "/v1", "--out", str(tmp_path / "out"), "--no-probes", "--json"]
    done = subprocess.run([*command, *(word for change in changes for word in ("--set", change))], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "out" / "bench.json").read_text()) and document["problems"] == []
    # What a busy machine delayed is void and was taken again.
    assert all(row["why"].startswith("lag:") for row in document["void"])
    assert [row["metric"] for row in document["points"]] == ["prefill_160_tok_s", "decode_c2_tok_s"]
    kept = bench.read_samples(tmp_path / "out" / "samples.jsonl")
    assert [row["median"] for row in document["points"]] == [
        statistics.median([s.value_tok_s for s in kept if s.metric == r["metric"] and not s.void]) for r in document["points"]
    ]
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 2 and "a finished measurement is kept there" in again.stderr
