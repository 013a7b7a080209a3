"""What a recomputation may look at: the report, the params of its box, the model's shape, and ledgers at a stated KV space."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import memory
from ..inventory import Inventory
from ..memory import Pool
from ..memory_tables import with_engine
from ..params import Params
from ..spec import ModelSpec
from .figures import Report

# (value, from what it follows)
Recomputed = tuple[int | float | str, str]


@dataclass(frozen=True)
class Source:
    """Everything that recomputed figures of a report follow from."""

    report: Report
    params: Params
    spec: ModelSpec
    box: Inventory

    @property
    def gpu_count(self) -> int:
        """GPUs of the box."""
        return len(self.box.gpus)

    def pool(
        self, split: Sequence[int], available_gib: Sequence[float], tensor_parallel_size: int | None = None, index_sharing: str | None = None, **engine
    ) -> Pool:
        """The ledger where each stage of this split has so many GiB for its cache; engine: other settings than the params'."""
        given = list(available_gib) if len(available_gib) == len(split) else [available_gib[0]] * len(split)
        params = with_engine(memory.with_space(self.params, list(split), given), **engine)
        return memory.pool(params, self.spec, list(split), tensor_parallel_size=tensor_parallel_size, index_sharing=index_sharing)


Recompute = Callable[[Source], Recomputed]


def against(ours: str, theirs: str) -> Recompute:
    """One figure of the report over another."""

    def compute(s: Source) -> Recomputed:
        a, b = s.report.number(ours), s.report.number(theirs)
        return a / b, f"{a:,} / {b:,}"

    return compute


def percent_more(ours: str, theirs: str) -> Recompute:
    """How much more one figure of the report is than another, in percent."""

    def compute(s: Source) -> Recomputed:
        a, b = s.report.number(ours), s.report.number(theirs)
        return 100 * (a / b - 1), f"{a:,} / {b:,} - 1"

    return compute


def total(*ids: str) -> Recompute:
    """The sum of figures of the report."""

    def compute(s: Source) -> Recomputed:
        parts = [s.report.number(one) for one in ids]
        return sum(parts), " + ".join(f"{part:g}" for part in parts)

    return compute
