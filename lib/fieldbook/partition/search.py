"""Exact search over all ways to cut L layers into P runs. Arrays in, splits out; nothing here knows what a layer is.

Every array is [P, L + 1, L + 1]: stage, first layer, one past the last. A stage's value depends on its own run only, and what a split is judged by is
the worst of its stages (fewest blocks, heaviest load) or their sum (distance from vLLM's split). For such values a prefix can be replaced by any other
prefix that ends at the same layer and is at least as good, without making the whole worse; so the best prefix for each end, found stage by stage from
those one stage shorter, is the prefix of a best split (Bellman's principle). That is exact, and takes P x L^2 steps instead of C(L - 1, P - 1).

The order of preference (blocks, then load, then distance) is kept by solving for one value at a time: its optimum is found, and only runs that do not
fall short of it stay allowed for the next. A split is optimal in the first value exactly if none of its stages falls short of the optimum, so nothing is
lost and nothing else comes in.
"""

import itertools

import numpy as np

from ..splits import Split

NEVER = np.iinfo(np.int64).min
HUGE = np.iinfo(np.int64).max // 4


def best_split(blocks: np.ndarray, load: np.ndarray, default: Split, least_equal=lambda blocks: blocks) -> Split | None:
    """The split with the most blocks on its poorest stage; among those the lightest heaviest stage; then nearest to `default`, then the smallest tuple.

    blocks: int64, negative where a stage must not hold this run; load: int64. least_equal: fewest blocks that are worth as much as so many (rounding
    makes several counts one pool). None when no split is allowed.
    """
    most = most_of_poorest(blocks)
    if most is None:
        return None
    allowed = blocks >= least_equal(most)
    lightest = least_of_heaviest(load, allowed)
    return nearest(default, allowed & (load <= lightest))


def most_of_poorest(blocks: np.ndarray) -> int | None:
    """Largest possible minimum over the stages; None when no split is allowed."""
    best = np.where(blocks[0, 0] >= 0, blocks[0, 0], NEVER)
    for stage in blocks[1:]:
        best = np.minimum(best[:, None], np.where(stage >= 0, stage, NEVER)).max(axis=0)
    return int(best[-1]) if best[-1] != NEVER else None


def least_of_heaviest(load: np.ndarray, allowed: np.ndarray) -> int:
    """Smallest possible maximum over the stages, of splits whose runs are all allowed. HUGE when there is none."""
    best = np.where(allowed[0, 0], load[0, 0], HUGE)
    for stage, open_ in zip(load[1:], allowed[1:], strict=True):
        best = np.maximum(best[:, None], np.where(open_, stage, HUGE)).min(axis=0)
    return int(best[-1])


def nearest(default: Split, allowed: np.ndarray) -> Split | None:
    """The allowed split whose stages differ from `default` by the fewest layers in sum, the smallest tuple of several."""
    stages, size, _ = allowed.shape
    lengths = np.arange(size)[None, :] - np.arange(size)[:, None]
    # rest[s][a]: least distance of stages s.. when stage s starts at layer a.
    rest = [np.full(size, HUGE, dtype=np.int64) for _ in range(stages)] + [np.where(np.arange(size) == size - 1, 0, HUGE)]
    for stage in range(stages - 1, -1, -1):
        step = np.where(allowed[stage], np.abs(lengths - default[stage]), HUGE)
        rest[stage] = np.minimum(step + rest[stage + 1][None, :], HUGE).min(axis=1)
    if rest[0][0] >= HUGE:
        return None
    split, start = [], 0
    for stage in range(stages):
        for end in range(start + 1, size):
            if allowed[stage, start, end] and abs(end - start - default[stage]) + rest[stage + 1][end] == rest[stage][start]:
                split.append(end - start)
                start = end
                break
    return tuple(split)


def pareto_front(blocks: np.ndarray, load: np.ndarray, default: Split, least_equal=lambda blocks: blocks) -> list[Split]:
    """Every trade of blocks for load that no other split beats in both: one split for each, most blocks first.

    After the best split, the heaviest stage is bounded to less than it had, and the best split under that bound is the next of the front.
    """
    found, open_ = [], blocks
    while (split := best_split(open_, load, default, least_equal)) is not None:
        found.append(split)
        edges = (0, *itertools.accumulate(split))
        heaviest = max(int(load[stage, a, b]) for stage, (a, b) in enumerate(itertools.pairwise(edges)))
        open_ = np.where(load < heaviest, open_, -1)
    return found


def count(allowed: np.ndarray) -> int:
    """How many splits have only allowed runs."""
    ways = [int(x) for x in allowed[0, 0]]
    for stage in allowed[1:]:
        ways = [sum(ways[a] for a in np.flatnonzero(stage[:, b])) for b in range(len(ways))]
    return ways[-1]
