"""Faults for tests, put on a server's PYTHONPATH by server.extra_env or verdict.baseline.extra_env; FIELDBOOK_PLANT says which. Python imports it at start.

slow: each step of the model runner takes 1 / 0.7 of its time, what passes between two steps included. loop: sampled tokens go round and round.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys
import time

SLOWDOWN = 1 / 0.7
# Longer pauses between steps are a server that waits for a request.
SAME_RUN_S = 0.1
# ' and the river went on' in the tokens of SmolLM2.
ROUND = (284, 260, 4626, 3514, 335)


def slow(module):
    """Wrap execute_model of the model runner."""
    inner, state = module.GPUModelRunner.execute_model, {"ended": 0.0}

    @functools.wraps(inner)
    def execute_model(*arguments, **options):
        start = time.perf_counter()
        between = start - state["ended"] if start - state["ended"] < SAME_RUN_S else 0.0
        result = inner(*arguments, **options)
        time.sleep((time.perf_counter() - start + between) * (SLOWDOWN - 1))
        state["ended"] = time.perf_counter()
        return result

    module.GPUModelRunner.execute_model = execute_model


def loop(module):
    """Wrap the sampler: whatever was sampled, the next token of ROUND comes out for every request."""
    inner, state = module.Sampler.forward, {"steps": 0}

    @functools.wraps(inner)
    def forward(*arguments, **options):
        output = inner(*arguments, **options)
        output.sampled_token_ids.fill_(ROUND[state["steps"] % len(ROUND)])
        state["steps"] += 1
        return output

    module.Sampler.forward = forward


PLANTS = {"slow": ("vllm.v1.worker.gpu_model_runner", slow), "loop": ("vllm.v1.sample.sampler", loop)}


class Planter(importlib.abc.MetaPathFinder):
    """Finds one module as everybody else does, and changes it right after it has been loaded."""

    def __init__(self, name, change):
        self.name, self.change, self.busy = name, change, False

    def find_spec(self, name, path, target=None):
        """The module's own spec, with a loader that changes it afterwards."""
        if name != self.name or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FIELDBOOK_PLANT") in PLANTS:
    sys.meta_path.insert(0, Planter(*PLANTS[os.environ["FIELDBOOK_PLANT"]]))
