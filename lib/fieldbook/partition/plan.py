"""The best split of a table, what it is traded against, and the split that the params ask for."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from math import comb

import numpy as np

from ..errors import BadInput
from ..params import Params
from ..spec import ModelSpec
from ..splits import Split, all_splits, resolve_split
from . import search
from .table import Candidate, StageTable

# Up to here a table of all splits is still something to look at: 77 for two stages of GLM-5.3, 435 for three of a model of 31 layers.
SHOWN_IN_FULL = 500


@dataclass(frozen=True)
class Plan:
    """All that notebook 03 shows of one table. best is None where no split is allowed."""

    table: StageTable
    best: Candidate | None

    @property
    def looked_at(self) -> int:
        """Number of splits there are: C(L - 1, P - 1)."""
        return comb(self.table.spec.num_hidden_layers - 1, self.table.stages - 1)

    @cached_property
    def allowed(self) -> int:
        """How many of them break no rule and hold one longest request."""
        return search.count(self.table.allowed_blocks >= 0)

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """Pareto front of pool against straggler, largest pool first."""
        splits = search.pareto_front(self.table.allowed_blocks, self.table.load, self.table.default, self.table.least_equal)
        return tuple(self.table.candidate(split) for split in splits)

    def neighbours(self, split: Split, reach: int = 2) -> tuple[Candidate, ...]:
        """The split, vLLM's own, every split that moves one cut by up to `reach` layers, allowed or not, and the next allowed one each way of each cut."""
        found, forbidden = {split, self.table.default}, self.table.forbidden
        for cut, way in itertools.product(range(len(split) - 1), (-1, 1)):
            for step in itertools.count(1):
                moved = list(split)
                moved[cut] += way * step
                moved[cut + 1] -= way * step
                if min(moved) < 1:
                    break
                keeps = not any(forbidden[stage, a, b] for stage, (a, b) in enumerate(self.table.bounds(moved)))
                if step <= reach or keeps:
                    found.add(tuple(moved))
                if step >= reach and keeps:
                    break
        return tuple(self.table.candidate(one) for one in sorted(found))

    def all(self) -> tuple[Candidate, ...] | None:
        """Every split, allowed or not, best first; None where there are more than SHOWN_IN_FULL."""
        if self.looked_at > SHOWN_IN_FULL:
            return None
        found = [self.table.candidate(split) for split in all_splits(self.table.spec.num_hidden_layers, self.table.stages)]
        return tuple(sorted(found, key=lambda c: (bool(c.wrong), *preference(c, self.table.default))))


def preference(candidate: Candidate, default: Split) -> tuple:
    """Smaller is better: pool, straggler, distance from vLLM's own split, the split itself. What search.best_split optimizes."""
    distance = sum(abs(a - b) for a, b in zip(candidate.layers_per_stage, default, strict=True))
    return -candidate.pool_tokens, candidate.straggler_layers, distance, candidate.layers_per_stage


def plan(table: StageTable) -> Plan:
    """The best allowed split of a table: largest pool, then lightest heaviest stage, then nearest to vLLM's own split. search.py says why it is exact."""
    split = search.best_split(table.allowed_blocks, table.load, table.default, table.least_equal)
    return Plan(table, None if split is None else table.candidate(split))


def roomiest(table: StageTable) -> Candidate:
    """The split that comes nearest to fitting: most blocks where any are left, else the least weights too much on a rank. Rules are kept."""
    never = np.int64(-1)
    some = np.where(table.forbidden | (table.available <= 0), never, table.blocks)
    split = search.best_split(some, table.load, table.default)
    if split is None:
        # Shifted to be positive, since a negative value means 'not allowed' to the search.
        lowest = int(table.available.min())
        split = search.best_split(np.where(table.forbidden, never, table.available - lowest), table.load, table.default)
    if split is None:
        rules = "; ".join(f"{rule.name} ({rule.reason})" for rule in table.rules[1:])
        raise BadInput(f"no split of {table.spec.num_hidden_layers} layers in {table.stages} stages keeps all rules: {rules}; use fewer stages")
    return table.candidate(split)


def choose(params: Params, spec: ModelSpec, found: Plan) -> Candidate:
    """The split that the params ask for: the best one, vLLM's default, or the one given by hand. Raises BadInput where it must not be used.

    Call it with a plan that has a best split; remedies.refusal says what to say otherwise.
    """
    if params.parallel.layer_partition == "best" and found.best is not None:
        return found.best
    candidate = found.table.candidate(resolve_split(params.parallel, spec))
    if candidate.wrong:
        instead = f"; best is {'+'.join(map(str, found.best.layers_per_stage))}" if found.best else ""
        raise BadInput(f"parallel.layer_partition: {'+'.join(map(str, candidate.layers_per_stage))} must not be used: {'; '.join(candidate.wrong)}{instead}")
    return candidate
