"""What a strategy sends per forward pass, and the least time that takes over these links: a floor, which no run can beat and most stay far above.

Counted: the all-reduces behind attention and MLP of each layer, a dispatch and a combine for each layer of experts that data-parallel ranks share, and
what crosses each pipeline boundary. Not counted: embedding and logits (one collective each per pass), draft passes, sampled tokens, routing weights, and
whatever waits for a kernel or another rank.
"""

from dataclasses import dataclass

from ..memory import DTYPE_BYTES
from ..params import Params
from ..partition.sharing import relay_bytes_per_token
from ..spec import Layer, ModelSpec
from .fabric import Fabric, Way
from .layouts import Placement, Strategy, place


@dataclass(frozen=True)
class Collectives:
    """How many of each kind a run of layers needs in one forward pass: all-reduces over TP, dispatches (each with its combine), gathers over TP."""

    all_reduces: int
    dispatches: int
    gathers: int


@dataclass(frozen=True)
class Traffic:
    """One forward pass of one replica. Bytes are per token of that replica and per rank.

    all_reduce_bytes: what a rank sends, and receives, for one all-reduce; dispatch_bytes: what it receives for one dispatch, as much again for the combine;
    gather_bytes: what it receives for one gather. hop_bytes: of one boundary, all TP ranks of the replica together; relay_bytes: what relayed top-k indices
    add to it on every TP rank.
    """

    collectives: Collectives
    hops: int
    all_reduce_bytes: float
    dispatch_bytes: float
    gather_bytes: float
    hop_bytes: int
    relay_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """What one token costs one rank of each stage to receive, all layers and boundaries together."""
        c = self.collectives
        inside = c.all_reduces * self.all_reduce_bytes + 2 * c.dispatches * self.dispatch_bytes + c.gathers * self.gather_bytes
        return inside + self.hops * (self.hop_bytes + self.relay_bytes)


def reduces(layer: Layer, spec: ModelSpec) -> int:
    """All-reduces of a layer over TP: behind the mixer and behind the MLP, where it has them; Gemma 4 reduces its MLP and its experts apart."""
    apart = spec.model_type.startswith("gemma4") and layer.mlp.kind == "moe"
    return (layer.attention.kind != "none") + (layer.mlp.kind != "none") + apart


def collectives_of(strategy: Strategy, spec: ModelSpec, layers: range) -> Collectives:
    """Collectives of a run of layers (vLLM: layers/linear.py:RowParallelLinear; fused_moe runner: dispatch only where dp or pcp is above 1)."""
    run = [spec.layers[i] for i in layers]
    moe = sum(layer.mlp.kind == "moe" for layer in run)
    shares = strategy.data_parallel_size * strategy.prefill_context_parallel_size
    all_reduces = sum(reduces(layer, spec) for layer in run) if strategy.tensor_parallel_size > 1 else 0
    if strategy.spreads_tokens:
        # Tokens come back by a gather, in place of the experts' all-reduce.
        return Collectives(all_reduces - moe, moe, moe)
    return Collectives(all_reduces, moe if shares > 1 else 0, 0)


def traffic_of(strategy: Strategy, spec: ModelSpec, params: Params, relayed: bool = False) -> Traffic:
    """Counts and bytes of a strategy. Rings: an all-reduce sends 2 (n - 1) / n of the hidden state; vLLM's default dispatch gathers all ranks' tokens.

    Sources: device_communicators/all2all.py (allgather_reducescatter), the models' make_empty_intermediate_tensors for boundaries.
    """
    tp, width = strategy.tensor_parallel_size, spec.hidden_size * DTYPE_BYTES[params.engine.dtype]
    shares = strategy.data_parallel_size * strategy.prefill_context_parallel_size
    return Traffic(
        collectives=collectives_of(strategy, spec, range(spec.num_hidden_layers)),
        hops=strategy.pipeline_parallel_size - 1,
        all_reduce_bytes=2 * (tp - 1) / tp * width,
        dispatch_bytes=(shares * tp - 1) / tp * width if strategy.spreads_tokens else float((shares - 1) * width),
        gather_bytes=(tp - 1) / tp * width,
        hop_bytes=(spec.boundary_values or 2 * spec.hidden_size) * DTYPE_BYTES[params.engine.dtype],
        relay_bytes=relay_bytes_per_token(spec) if relayed else 0,
    )


def collective_s(way: Way, ranks: int, sent_bytes: float, steps: int) -> float | None:
    """Least seconds of one collective: its bytes over the slowest way, and the latency of its steps. None where that way's rate is not known."""
    if ranks < 2:
        return 0.0
    if way.gb_s is None:
        return None
    # vLLM's own all-reduce within NVLink has no base and two barriers, whatever the ranks.
    count = 2 if way.base_us == 0 and way.kind == "NVLink" else steps
    return sent_bytes / (way.gb_s * 1e9) + (way.base_us + count * way.step_us) * 1e-6


def stage_floors(strategy: Strategy, spec: ModelSpec, params: Params, fabric: Fabric, split: tuple[int, ...], tokens: int) -> list[float | None]:
    """Least seconds of communication inside every stage for a step of so many tokens per replica; split: layers of each stage."""
    placed, sent = place(strategy, fabric), traffic_of(strategy, spec, params)
    tp, shares = strategy.tensor_parallel_size, strategy.data_parallel_size * strategy.prefill_context_parallel_size
    ranks = tp * shares if strategy.spreads_tokens else shares
    found: list[float | None] = []
    start = 0
    for stage, count in enumerate(split):
        c = collectives_of(strategy, spec, range(start, start + count))
        tensor = _slowest(fabric, placed.tensor_groups[stage])
        wide = _slowest(fabric, (placed.stage_groups[stage],) if strategy.spreads_tokens else placed.data_groups[stage])
        times = [
            (c.all_reduces, collective_s(tensor, tp, tokens * sent.all_reduce_bytes, 2 * (tp - 1))),
            (2 * c.dispatches, collective_s(wide, ranks, tokens * sent.dispatch_bytes, ranks - 1)),
            (c.gathers, collective_s(tensor, tp, tokens * sent.gather_bytes, tp - 1)),
        ]
        known = all(each is not None for number, each in times if number)
        found.append(sum(number * each for number, each in times if number) if known else None)
        start += count
    return found


def hop_floors(strategy: Strategy, spec: ModelSpec, params: Params, fabric: Fabric, tokens: int, relayed: bool = False) -> list[float | None]:
    """Least seconds of every boundary. Each TP rank sends its share over its own way, the next stage gathers the shares; relayed indices go whole."""
    placed, sent = place(strategy, fabric), traffic_of(strategy, spec, params, relayed)
    return [_hop_s(strategy, sent, placed, fabric, boundary, tokens) for boundary in range(strategy.pipeline_parallel_size - 1)]


def _hop_s(strategy: Strategy, sent: Traffic, placed: Placement, fabric: Fabric, boundary: int, tokens: int) -> float | None:
    tp = strategy.tensor_parallel_size
    ways = [fabric.way(a, b) for a, b in placed.hops[boundary]]
    if any(way.gb_s is None for way in ways):
        return None
    slowest = min(ways, key=lambda way: way.gb_s)
    sending = tokens * (sent.hop_bytes / tp + sent.relay_bytes) / (slowest.gb_s * 1e9) + (slowest.base_us + slowest.step_us) * 1e-6
    gathered = collective_s(_slowest(fabric, placed.tensor_groups[boundary + 1]), tp, tokens * sent.hop_bytes * (tp - 1) / tp, tp - 1)
    return None if gathered is None else sending + gathered


def _slowest(fabric: Fabric, groups: tuple[tuple[int, ...], ...]) -> Way:
    """The slowest of the ways that these groups work over; unknown ones before all."""
    return min((fabric.worst(group) for group in groups), key=lambda way: (way.gb_s is not None or way.kind == "none", way.gb_s or float("inf")))
