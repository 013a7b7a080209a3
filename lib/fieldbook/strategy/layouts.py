"""Every way to spread a model over N GPUs, and which GPU each rank gets."""

import itertools
from dataclasses import dataclass

from ..memory import Layout
from ..schema import Ranks
from ..spec import ModelSpec
from .fabric import Fabric


@dataclass(frozen=True, order=True)
class Strategy:
    """Parallel sizes of one layout; TP x PP x DP x PCP are its GPUs. DCP divides TP ranks and needs none of its own; EP says how experts are cut."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    expert_parallel: bool = False

    @property
    def gpus(self) -> int:
        """GPUs it takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size * self.prefill_context_parallel_size

    @property
    def name(self) -> str:
        """'TP4 x PP2', 'DP3 + EP', 'TP8, DCP8': sizes of 1 are left out."""
        sizes = {"TP": self.tensor_parallel_size, "PP": self.pipeline_parallel_size, "DP": self.data_parallel_size, "PCP": self.prefill_context_parallel_size}
        text = " x ".join(f"{key}{size}" for key, size in sizes.items() if size > 1) or "one GPU"
        text += f", DCP{self.decode_context_parallel_size}" if self.decode_context_parallel_size > 1 else ""
        return text + (" + EP" if self.expert_parallel else "")

    @property
    def spreads_tokens(self) -> bool:
        """Whether each TP rank dispatches its share of the tokens over all ranks of the stage (vLLM: config/parallel.py:use_sequence_parallel_moe)."""
        return self.expert_parallel and self.tensor_parallel_size > 1 and self.data_parallel_size > 1

    @property
    def layout(self) -> Layout:
        """How the ranks of one stage share weights and cache."""
        return Layout(
            self.tensor_parallel_size,
            self.decode_context_parallel_size,
            self.prefill_context_parallel_size,
            self.data_parallel_size,
            self.expert_parallel,
        )


def strategy_of(arm: Ranks) -> Strategy:
    """The parallel sizes of an arm as a strategy."""
    return Strategy(
        arm.tensor_parallel_size,
        arm.pipeline_parallel_size,
        arm.data_parallel_size,
        arm.prefill_context_parallel_size,
        arm.decode_context_parallel_size,
        arm.expert_parallel,
    )


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def every_strategy(gpus: int, spec: ModelSpec) -> list[Strategy]:
    """Every TP x PP x DP x PCP that multiplies to the GPUs, each with every DCP that divides TP, and with and without EP where there are experts to spread."""
    experts = any(layer.mlp.experts for layer in spec.layers)
    found = []
    for tp in divisors(gpus):
        for pp, dp in itertools.product(divisors(gpus // tp), repeat=2):
            if gpus // tp % (pp * dp):
                continue
            pcp = gpus // (tp * pp * dp)
            for dcp in divisors(tp):
                for ep in (False, True) if experts and tp * dp * pcp > 1 else (False,):
                    found.append(Strategy(tp, pp, dp, pcp, dcp, ep))
    return sorted(found, key=lambda s: (s.pipeline_parallel_size, s.data_parallel_size, s.prefill_context_parallel_size, s))


@dataclass(frozen=True)
class Placement:
    """Who is where. tensor_groups[stage], data_groups[stage]: GPUs that exchange what TP cuts, and what data-parallel (or PCP) ranks share; stage_groups:
    all GPUs of a stage; hops[i]: pairs between stage i and i + 1."""

    order: tuple[int, ...]
    tensor_groups: tuple[tuple[tuple[int, ...], ...], ...]
    data_groups: tuple[tuple[tuple[int, ...], ...], ...]
    stage_groups: tuple[tuple[int, ...], ...]
    hops: tuple[tuple[tuple[int, int], ...], ...]


def place(strategy: Strategy, fabric: Fabric) -> Placement:
    """Ranks on GPUs in vLLM's order: DP outermost, then PP, PCP, and TP innermost (distributed/parallel_state.py:initialize_model_parallel).

    The GPUs are taken island by island, so that a tensor-parallel group lies within one as long as it fits; CUDA_VISIBLE_DEVICES gives vLLM this order.
    """
    tp, pp, dp, pcp = (
        strategy.tensor_parallel_size, strategy.pipeline_parallel_size, strategy.data_parallel_size, strategy.prefill_context_parallel_size,
    )  # fmt: skip
    order = fabric.gpus

    def gpu(d: int, p: int, c: int, t: int) -> int:
        return order[((d * pp + p) * pcp + c) * tp + t]

    tensor = tuple(tuple(tuple(gpu(d, p, c, t) for t in range(tp)) for d in range(dp) for c in range(pcp)) for p in range(pp))
    data = tuple(tuple(tuple(gpu(d, p, c, t) for d in range(dp) for c in range(pcp)) for t in range(tp)) for p in range(pp))
    hops = tuple(tuple((gpu(d, p, c, t), gpu(d, p + 1, c, t)) for d in range(dp) for c in range(pcp) for t in range(tp)) for p in range(pp - 1))
    return Placement(order, tensor, data, tuple(tuple(gpu for group in groups for gpu in group) for groups in tensor), hops)
