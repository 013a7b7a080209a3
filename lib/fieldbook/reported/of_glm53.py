"""Recomputations for the second field report: GLM-5.3 on eight A100. Each is (value, from what)."""

from .. import budget, kv, memory, partition, weights
from ..memory import GIB
from ..probes.counting import more_p
from ..spec import Layer
from ..strategy import Strategy, traffic_of
from .source import Recompute, Recomputed, Source, against, percent_more, total

MIB = 2**20
_SPLITS = ((39, 39), (40, 38), (41, 37), (42, 36))
# What a moved MoE layer takes of a rank, by the report.
_LAYER_GIB = 1.30
_BOARD_MIB = 81_920


def _layer(s: Source, mlp: str, owns: bool) -> Layer:
    return next(layer for layer in s.spec.layers if (layer.mlp.kind, bool(layer.attention.indexer.owns)) == (mlp, owns))


def _owners(s: Source) -> int:
    return sum(layer.attention.indexer.owns for layer in (*s.spec.layers, *s.spec.mtp_layers))


def _stage0(s: Source):
    return memory.rank_weights_bytes(s.spec, s.params, [39, 39], 4)[0]


def _available(s: Source, rank: int) -> Recomputed:
    share = budget.requested_bytes(s.box.gpus[0].memory_usable_bytes, s.params.engine.gpu_memory_utilization) / GIB
    held, peak = s.report.number(f"glm-3939-r{rank}/held"), s.report.number(f"glm-3939-r{rank}/activation")
    return share - held - peak, f"{share:.2f} - {held:g} - {peak:g}"


def _closure(s: Source) -> Recomputed:
    tight = s.pool((39, 39), (21.95, 15.56))
    # The log's count: what the KV cache really takes on rank 0 is its share of the blocks that rank 1 leaves to both.
    blocks = int(s.report.number("glm-pool-3939")) // tight.block_size_tokens
    pages = blocks * tight.ranks[0].kv_bytes_per_block / GIB
    parts = sum(s.report.number(f"glm-3939-r0/{one}") for one in ("held", "activation", "graphs"))
    seen, context = s.report.number("glm-3939-r0/smi") / 1024, s.report.number("glm-3939-closure/context")
    return seen - context - parts - pages, f"{seen:.2f} - {context:g} - {parts:.2f} - {pages:.2f} of KV pages"


def _linear(rank0_moved: int) -> Recompute:
    """The report's rule: tokens go with the tightest GiB, each moved layer takes 1.30."""

    def compute(s: Source) -> Recomputed:
        r0, r1 = s.report.number("glm-3939-r0/available"), s.report.number("glm-3939-r1/available")
        least = min(r0 - rank0_moved * _LAYER_GIB, r1 + rank0_moved * _LAYER_GIB)
        tokens = s.report.number("glm-pool-3939")
        return tokens * least / r1, f"{tokens:,} x {least:.2f} / {r1:g}"

    return compute


def _moved(split: tuple[int, int], index_sharing: str) -> Recompute:
    """The ledger with the report's own 1.30 GiB a layer, from the space of 39+39."""

    def compute(s: Source) -> Recomputed:
        n = split[0] - 39
        space = (21.95 - n * _LAYER_GIB, 15.56 + n * _LAYER_GIB)
        found = s.pool(split, space, index_sharing=index_sharing)
        return found.pool_tokens, f"{space[0]:.2f} and {space[1]:.2f} GiB, rank {found.binding_rank} binds"

    return compute


def _logged(split: tuple[int, ...], gib: tuple[float, ...], tp: int = 4, sharing: str | None = None, **engine) -> Recompute:
    def compute(s: Source) -> Recomputed:
        found = s.pool(split, gib, tp, sharing, **engine)
        tight = found.ranks[found.binding_rank]
        return found.pool_tokens, f"rank {tight.rank}: {gib[tight.rank]:g} GiB at {tight.kv_bytes_per_token:,} B per token, blocks of {found.block_size_tokens}"

    return compute


def _tp8(s: Source, **engine):
    return s.pool((78,), (17.26,), 8, max_model_len=131_072, **engine)


def _token_tp8(s: Source) -> Recomputed:
    return _tp8(s).ranks[0].kv_bytes_per_token, "79 x 656 + 22 x 132"


def _loads(s: Source) -> Recomputed:
    table = partition.stage_table(s.params, s.spec)
    pairs = [table.candidate(split).stage_load for split in _SPLITS]
    return "; ".join(f"{a} vs {b}" for a, b in pairs), "layers, and the MTP layer once for each of 3 drafted tokens"


def _flipped(s: Source, split: tuple[int, int]) -> str:
    return ",".join(map(str, kv.flipped_layers(s.spec, split)[1])) or "none"


def _gates(s: Source) -> Recomputed:
    return "; ".join(
        f"{'+'.join(map(str, split))}: {_flipped(s, split)}" for split in _SPLITS
    ), "layers behind the cut before the next one with indices of its own"


def _islands(s: Source) -> Recomputed:
    return ",".join("-".join(map(str, island)) for island in s.box.islands or [] if len(island) > 1), "inventory of the box"


def _every_indexer(s: Source) -> Recomputed:
    each, without = weights.indexer_checkpoint_bytes(s.spec), weights.checkpoint_bytes(s.spec)
    more = s.spec.num_hidden_layers - sum(layer.attention.indexer.owns for layer in s.spec.layers)
    return (without + more * each) / GIB, f"{without / GIB:.3f} + {more} x {each / MIB:.3f} MiB"


def _resident(s: Source) -> Recomputed:
    pool, request = s.report.number("glm-pool-4137"), 131_072 + 256
    return pool / request, f"{pool:,} / (131,072 + 256)"


def _fisher(s: Source) -> Recomputed:
    ours, theirs = s.report.counted("glm-degen-pp2-mtp"), s.report.counted("glm-degen-pp1-v2")
    return more_p(*ours, *theirs), "hypergeometric distribution"


def _headroom(figure_id: str) -> Recompute:
    return lambda s: (_BOARD_MIB - s.report.number(figure_id), f"{_BOARD_MIB:,} - {s.report.number(figure_id):,}")


OF_GLM53: dict[str, Recompute] = {
    "glm-link": _islands,
    "glm-link/usable": lambda s: (s.box.gpus[0].memory_usable_bytes / GIB, "inventory of the box"),
    "glm-ckpt": lambda s: (weights.checkpoint_bytes(s.spec) / GIB, "all weights from config.json, indexers only where layers own one"),
    "glm-moe-layer": lambda s: (weights.layer_bytes(_layer(s, "moe", False), s.spec) / MIB, "weight by weight, notebook 02"),
    "glm-mtp-layer": lambda s: (sum(one.bytes for one in weights.mtp_components(s.spec)) / MIB, "weight by weight"),
    "glm-dense-layer-tp4": lambda s: (weights.layer_bytes(s.spec.layers[0], s.spec) / 4 / MIB, "764.65 MiB / 4"),
    "glm-embed-tp4": lambda s: (_stage0(s).by_component["embedding"] / MIB, "154,880 x 6,144 x 2 B / 4"),
    "glm-pp0-weights": lambda s: (_stage0(s).bytes / MIB, "ledger of rank 0"),
    "glm-pp0-weights/log": lambda s: (
        (_stage0(s).bytes + weights.buffer_bytes(s.spec, s.params.engine.max_num_batched_tokens)) / GIB, "ledger of rank 0, rotary table and top-k buffer",
    ),
    "glm-budget": lambda s: (budget.requested_bytes(s.box.gpus[0].memory_usable_bytes, 0.95) / GIB, "0.95 x 79.25 GiB"),
    "glm-kv-main": lambda s: (kv.kv_bytes_per_token(s.spec.layers[0].attention, 4, "fp8_ds_mla"), "512 + 16 + 128"),
    "glm-kv-indexer": lambda s: (kv.indexer_bytes_per_token(s.spec.layers[0].attention), "128 + 4"),
    "glm-full-layers": lambda s: (sum(layer.attention.indexer.owns for layer in s.spec.layers), "max(layer - 2, 0) mod 4 = 0"),
    "glm-indexer-owners": lambda s: (_owners(s), "with the MTP layer"),
    "glm-indexer-owners/all": _every_indexer,
    "glm-kv-token-tp8": _token_tp8,
    "glm-kv-token-tp8/stated": lambda s: (79 * 656 + 21 * 132, "79 x 656 + 21 x 132"),
    "glm-3939-r0/available": lambda s: _available(s, 0),
    "glm-3939-r1/available": lambda s: _available(s, 1),
    "glm-3939-r0/total": total("glm-3939-r0/held", "glm-3939-r0/activation", "glm-3939-r0/graphs", "glm-3939-r1/available"),
    "glm-3939-r1/total": total("glm-3939-r1/held", "glm-3939-r1/activation", "glm-3939-r1/graphs", "glm-3939-r1/available"),
    "glm-3939-closure": _closure,
    "glm-split-compute": _loads,
    "glm-split-gates": _gates,
    "glm-split-gates/4533": lambda s: (int(_flipped(s, (45, 33))), "the same"),
    "glm-pred-4038": _linear(1),
    "glm-pred-4236": _linear(3),
    "glm-pool-4137/linear": _linear(2),
    "glm-clean-4236": _moved((42, 36), "clean"),
    "glm-clean-4236/3840": _moved((38, 40), "clean"),
    "glm-relay-4137": _logged((41, 37), (19.35, 18.16), sharing="relay"),
    "glm-relay-4137/bytes": lambda s: (traffic_of(Strategy(4, 2), s.spec, s.params, relayed=True).relay_bytes, "2,048 indices of 4 B"),
    "glm-allreduce": lambda s: (traffic_of(Strategy(8), s.spec, s.params).collectives.all_reduces, "two for each of 78 layers"),
    "glm-pool-tp8-v028": lambda s: (_tp8(s).pool_tokens, "17.26 GiB at 54,728 B per token, blocks of 64"),
    "glm-pool-4-2-v028/ratio": against("glm-pool-4-2-v028", "glm-pool-tp8-v028"),
    "glm-pool-2-4-v028/ratio": against("glm-pool-2-4-v028", "glm-pool-tp8-v028"),
    "glm-pool-4-2-mtp-v028/cost": lambda s: (
        100 * (1 - s.report.number("glm-pool-4-2-mtp-v028") / s.report.number("glm-pool-4-2-v028")), "1 - 623,168 / 791,744",
    ),
    "glm-pool-3939": _logged((39, 39), (21.95, 15.56)),
    "glm-pool-4137": _logged((41, 37), (19.35, 18.16)),
    "glm-pool-4137/available-0": lambda s: (s.report.number("glm-3939-r0/available") - 2 * _LAYER_GIB, "21.95 - 2 x 1.30"),
    "glm-pool-4137/available-1": lambda s: (s.report.number("glm-3939-r1/available") + 2 * _LAYER_GIB, "15.56 + 2 x 1.30"),
    "glm-pool-4137/gain": percent_more("glm-pool-4137", "glm-pool-3939"),
    "glm-4137-smi/before": _headroom("glm-3939-r1/smi"),
    "glm-4137-smi/after": _headroom("glm-4137-smi"),
    "glm-format-ratio": against("glm-format-ratio/fp8", "glm-format-ratio/bf16"),
    "glm-format-ratio/limit": lambda s: (
        kv.kv_bytes_per_token(s.spec.layers[0].attention, 8, "bfloat16") / kv.kv_bytes_per_token(s.spec.layers[0].attention, 8, "fp8_ds_mla"), "1,152 / 656",
    ),
    "glm-tokens-per-gib": lambda s: (GIB / _tp8(s).ranks[0].kv_bytes_per_token, "2^30 / 54,728"),
    "glm-degen-pp2-mtp/longer": against("glm-degen-pp2-mtp/median", "glm-degen-pp2-mtp/median-pp1"),
    "glm-degen-p": _fisher,
    "glm-final-new/gain": percent_more("glm-final-new/conc16", "glm-final-old/conc16"),
    "glm-128k": _resident,
}  # fmt: skip
