"""One arm in a process of its own: `python arm.py ASKED.json ANSWER.json`. Starts vLLM's engine as asked, generates greedily, writes tokens and times.

ASKED: {"engine": arguments of vllm.LLM, "lengths": prompt lengths, "vocabulary", "tokens", "repetitions", "together": all prompts at once, "timed": {} or
{"streams", "steps", "prefill_tokens", "prompts", "repeats"}}. ANSWER: {"vllm", "start_s", "cache": {...}, "runs": [{"repetition", "prompt_tokens", "tokens",
"logprobs"}], "times": {...}}. An exception ends it, as it would end a server; the log has its words.
"""

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
SEED = 7


def prompts_of(lengths: list[int], vocabulary: int) -> list[dict]:
    """The same prompts in every arm."""
    draw = random.Random(SEED)
    return [{"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(length)]} for length in lengths]


def cache_of(llm) -> dict:
    """Blocks, their size, and bytes of each kind of cache."""
    config = llm.llm_engine.vllm_config.cache_config
    found = {"blocks": config.num_gpu_blocks, "block_size_tokens": config.block_size, "dtype": str(config.cache_dtype)}
    plan = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    groups = [(len(group.layer_names), group.kv_cache_spec) for group in plan.kv_cache_groups]
    return found | {"groups": [{"layers": n, "kind": type(spec).__name__, "page_bytes": spec.page_size_bytes} for n, spec in groups]}


def runs_of(llm, asked: dict) -> list[dict]:
    """Greedy tokens with their log-probabilities, all prompts together or one after the other."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, logprobs=1, detokenize=False)
    prompts = prompts_of(asked["lengths"], asked["vocabulary"])
    found = []
    for repetition in range(asked["repetitions"]):
        for group in [prompts] if asked["together"] else [[one] for one in prompts]:
            for prompt, output in zip(group, llm.generate(group, greedy, use_tqdm=False), strict=True):
                answer = output.outputs[0]
                logprobs = [round(one[token].logprob, 5) for one, token in zip(answer.logprobs, answer.token_ids, strict=True)]
                told = {"repetition": repetition, "prompt_tokens": len(prompt["prompt_token_ids"])}
                found.append(told | {"tokens": list(answer.token_ids), "logprobs": logprobs})
    return found


def times_of(llm, vocabulary: int, timed: dict) -> dict:
    """Seconds, each `repeats` times: of a decode step of so many streams, of a prompt that has the engine to itself, and of several prompts, one after the
    other where a prompt fills a step."""
    from vllm import SamplingParams

    streams, steps, length, prompts = (timed[key] for key in ("streams", "steps", "prefill_tokens", "prompts"))

    def took(count: int, length: int, tokens: int) -> float:
        wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts_of([length] * count, vocabulary), wanted, use_tqdm=False)
        return time.perf_counter() - start

    took(streams, 64, steps), took(1, length, 1)
    each = {
        "step_s": lambda: (took(streams, 64, steps + 1) - took(streams, 64, 1)) / steps,
        "prefill_s": lambda: took(1, length, 1),
        "prompts_s": lambda: took(prompts, length, 1),
    }
    return {**timed, **{key: [one() for _ in range(timed["repeats"])] for key, one in each.items()}}


def main() -> None:
    with open(sys.argv[1]) as file:
        asked = json.load(file)
    import vllm

    start = time.monotonic()
    llm = vllm.LLM(**asked["engine"])
    answer = {"vllm": vllm.__version__, "start_s": round(time.monotonic() - start, 1), "cache": cache_of(llm), "runs": runs_of(llm, asked)}
    if asked["timed"]:
        answer["times"] = times_of(llm, asked["vocabulary"], asked["timed"])
    with open(sys.argv[2], "w") as file:
        json.dump(answer, file)
    print("equality: done", flush=True)


if __name__ == "__main__":
    main()
