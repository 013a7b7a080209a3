"""Made-up samples and answers for the unit tests of the verdict."""

from fieldbook.bench import Sample
from fieldbook.probes import Answer


def sample(arm, boot, value, metric="decode_c4_tok_s", repetition=1, round_number=1, void=()):
    """One sample with this rate; what else a sample has is nothing in particular."""
    return Sample(
        arm=arm, boot=boot, round=round_number, metric=metric, repetition=repetition, seed=f"{arm}/{boot}/{metric}/{repetition}",
        started_at="2026-01-01T00:00:00Z", server_started_at_s=1.0, value_tok_s=value, ttft_s=[0.1], itl_s=[[0.1]], start_s=[0.0], output_tokens=[2],
        prompt_tokens=[8], text_tokens=[2], queue_s=0.0, server_ttft_s=0.1, server_e2e_s=0.2, cached_share=0.0, preemptions=0, acceptance_length=None,
        client_cores=0.1, conditions={}, ceiling_tok_s=None, void=list(void),
    )  # fmt: skip


def boot_of(arm, boot, middle, metrics, round_number=1):
    """Three samples of each metric around a rate."""
    return [sample(arm, boot, middle * share, m, r, round_number) for m in metrics for r, share in enumerate((0.99, 1.0, 1.01), 1)]


def answer(arm, failed="", probe="degeneration", problems=()):
    """One answer of a probe, failed or not."""
    return Answer(
        arm=arm, probe=probe, case="case", language="en", concurrency=1, text="x", finish_reason="stop", prompt_tokens=1, completion_tokens=1, elapsed_s=0.1,
        problems=list(problems), failed=failed,
    )  # fmt: skip
