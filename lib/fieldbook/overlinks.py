"""Pipeline against tensor parallelism as the link slows: arms that ran, what the strategies' model says of them, and whether it orders them right.

`tools/equality/prove.py` runs the arms of a plan with times, tools/equality/ways.py measures what two ranks have between them; data/boxes/<box>/links.json
keeps both. What one rank takes by itself calibrates arithmetic and reads; everything that a layout adds to that is the model's, from the measured link.
"""

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from . import equality, files, memory, partition, paths, strategy
from .strategy import Fabric, Strategy, Way

FILE = "links.json"
WHAT = {"prefill_s": "one prompt of {prefill_tokens} tokens", "prompts_s": "{prompts} such prompts", "step_s": "decode step of {streams} streams"}


@dataclass(frozen=True)
class Row:
    """One quantity of one arm, in seconds. alone_s: by the model without links; floor_s: what its links take at least; expected_s: all of it, with links as
    far above their floor as is to expect; measured_s: median of the samples, which lie between low_s and high_s. link: name of the link's setting."""

    model: str
    strategy: str
    link: str
    what: str
    alone_s: float
    floor_s: float
    expected_s: float
    measured_s: float
    low_s: float
    high_s: float

    @property
    def predicted_s(self) -> float:
        """With links at their floor."""
        return self.alone_s + self.floor_s

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


@dataclass(frozen=True)
class Order:
    """Two layouts over one link. expected and measured: seconds of the second over those of the first; right None: their samples overlap, or the model calls
    it a tie (strategy.TIE), so there is no order that it could miss."""

    model: str
    link: str
    what: str
    pair: tuple[str, str]
    expected: float
    measured: float
    right: bool | None


def read(box: str) -> dict[str, Any]:
    """data/boxes/<box>/links.json: {"machine", "vllm", "measured_at", "ways", "arms"}. Raises BadInput where it is missing or damaged.

    ways: {link: {"hop_gb_s", "hop_us", "all_reduce_gb_s", "all_reduce_us"}}, each {"median", "samples"}; arms: {name: arm of prove.py with "link"}.
    """
    return files.read_of_box(paths.box_data_dir(box) / FILE, ("machine", "vllm", "measured_at", "ways", "arms"), "tools/equality/keep_links.py")


def fabric(way: dict[str, dict[str, float]], memory_gb_s: float) -> Fabric:
    """Two ranks with a measured link between them: send and receive for a hop, all-reduce for a group, each with its own rate and latency."""

    def measured(name: str) -> Way:
        return Way("loopback", way[f"{name}_gb_s"]["median"], 0.0, way[f"{name}_us"]["median"], "measured", "two ranks", of_ranks=True)

    return Fabric(((0, 1),), ((0,), (1,)), (memory_gb_s,) * 2, {(0, 1): measured("hop")}, group_ways={(0, 1): measured("all_reduce")}, custom_all_reduce=False)


def rows(box: str) -> list[Row]:
    """Every quantity of every arm of two ranks, in the order of the file."""
    found = read(box)
    alone = {arm["model"]: arm for arm in found["arms"].values() if arm["tensor"] * arm["pipeline"] == 1}
    pairs = [arm for arm in found["arms"].values() if arm["tensor"] * arm["pipeline"] == 2 and arm["model"] in alone]
    return [one for arm in pairs for one in _rows(arm, alone[arm["model"]], found["ways"][arm["link"]])]


def _rows(arm: dict[str, Any], one_rank: dict[str, Any], way: dict[str, dict[str, float]]) -> list[Row]:
    spec, params, times = memory.model_spec(arm["model"]), equality.params_of(arm), arm["times"]
    here = Strategy(arm["tensor"], arm["pipeline"])
    split = partition.resolve_split(params.parallel, spec)
    median = {key: statistics.median(one_rank["times"][key]) for key in WHAT}
    piece, streams = times["prefill_tokens"], times["streams"]
    # What one rank did, as rates: all operations of a prompt, all weights read in a step.
    flops = 2 * piece * memory.parameters_per_rank(spec, range(spec.num_hidden_layers), 1, 1) / median["prefill_s"]
    whole = strategy.stage_read_bytes(Strategy(1), spec, params, (spec.num_hidden_layers,), streams)[0]
    linked = fabric(way, whole / median["step_s"] / 1e9)
    found = []
    for key, tokens in (("prefill_s", piece), ("prompts_s", piece * times["prompts"])):
        both = (linked, linked.as_expected)
        (total, of_links), (expected, _) = (strategy.lone_prefill_s(here, spec, params, over, split, tokens, flops) for over in both)
        found.append((key, total - of_links, of_links, expected))
    step, without = (strategy.decode_round(here, spec, params, one, split, streams) for one in (linked, _free(linked)))
    found.append(("step_s", without.seconds, step.seconds - without.seconds, step.expected_s))
    told = (arm["model"], here.name, arm["link"])
    return [
        Row(*told, WHAT[key].format(**times), *predicted, statistics.median(times[key]), min(times[key]), max(times[key])) for key, *predicted in found
    ]


def _free(linked: Fabric) -> Fabric:
    free = Way("loopback", float("inf"), 0.0, 0.0, "computed", "no link")
    return Fabric(linked.nodes, linked.islands, linked.memory_gb_s, {(0, 1): free}, custom_all_reduce=False)


def orders(box: str) -> list[Order]:
    """For each model, link and quantity whether the model puts the two layouts in the order that was measured."""
    found = []
    by_case: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows(box):
        by_case.setdefault((row.model, row.link, row.what), []).append(row)
    for (model, link, what), group in by_case.items():
        for one, other in itertools.combinations(group, 2):
            expected, measured = other.expected_s / one.expected_s, other.measured_s / one.measured_s
            apart = one.high_s < other.low_s or other.high_s < one.low_s
            decided = apart and abs(expected - 1) > strategy.TIE["throughput"]
            found.append(Order(model, link, what, (one.strategy, other.strategy), expected, measured, (expected > 1) == (measured > 1) if decided else None))
    return found
