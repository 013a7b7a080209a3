"""Qwen4Exp: sparse or full attention beside gated delta nets, hyper-connections instead of norms, and n-gram embeddings on some layers (PLE)."""

from dataclasses import replace

from ..errors import BadInput
from ..spec import Attention, Indexer, Layer, Part, ShortConv
from .dense import dense_mlp, gqa
from .hybrid import gated_delta_net, layer_kinds, state_dtype
from .moe import qwen_experts, sparse_layers
from .source import Decoder, Source

KINDS = {"linear_attention": "gdn", "full_attention": "full", "qwen_sparse_attention": "sparse"}
QSA_KEYS = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")


def gated_residual(name: str, hidden: int, streams: int, rank: int, inject: bool = True) -> Part:
    """Weights of one hyper-connection: a norm over all streams, a low-rank down and up projection; the down projection padded to 16 rows.

    Replicated, in bfloat16, never quantized (vLLM: models/qwen4_exp/nvidia/hyperconnection.py:GatedResidual).
    """
    wide = streams * hidden
    down = rank + streams + (-(rank + streams)) % 16 if inject else rank
    return Part(name, wide + wide * down + rank * wide, dtype="bfloat16")


def _attention(source: Source) -> Attention:
    # vLLM: models/qwen4_exp/nvidia/qsa.py and indexer_qsa.py; QSA is used where indexer_n_heads is given, and then all five keys must be.
    full = gqa(source, output_gate=True, qk_norm=True)
    given = [key for key in QSA_KEYS if source.value(key) is not None]
    if not given:
        return full
    heads, kv_heads, dim, budget, ratio = (source.count(key) for key in QSA_KEYS)
    if kv_heads != 1 or budget % ratio:
        raise BadInput(f"{source.where}: vLLM needs indexer_kv_heads 1 and an indexer_budget that indexer_compress_ratio divides")
    indexer = Indexer(heads, dim, budget, owns=True, compress_ratio=ratio, kv_heads=kv_heads)
    return replace(full, kind="sparse_gqa", indexer=indexer)


def qwen4_exp(source: Source) -> Decoder:
    """Qwen4Exp (vLLM: models/qwen4_exp/nvidia/model.py, mtp.py, ple_layer.py, config.py). ple_layer_ids count from 1.

    layer_types 'qwen_sparse_attention' is the public fixture's word; vLLM's configs say full_attention and give indexer_* keys. Where a layer is called
    sparse and the keys are absent, its indexer is named as not counted. The n-gram table is named too: vLLM keeps it in pinned host memory by default.
    """
    layers, hidden = source.layers, source.count("hidden_size")
    streams, rank = source.count("hc_count", least=2), source.count("hc_lowrank")
    attention, noted = _attention(source), ()
    kinds = layer_kinds(source, KINDS)
    sparse = attention
    if "sparse" in kinds and attention.indexer is None:
        sparse = replace(attention, kind="sparse_gqa")
        noted += (f"indexer of {kinds.count('sparse')} qwen_sparse_attention layers: keys {', '.join(QSA_KEYS)} are missing",)
    linear = gated_delta_net(source) if "gdn" in kinds else attention
    experts = qwen_experts(source, source.count("shared_expert_intermediate_size", least=0))
    mlps = [experts if is_sparse else dense_mlp(source) for is_sparse in sparse_layers(source)]
    connections = tuple(gated_residual(f"{part}_hyper_connection", hidden, streams, rank) for part in ("attn", "mlp"))
    ple, conv, ple_noted = _ple(source, layers, hidden, streams)
    drafts = source.draft_layers("mtp_num_hidden_layers", "num_nextn_predict_layers")
    # A draft layer has the norms of pre_fc (one of hidden_size, one of all streams) and a mixer of its own, and no final norm.
    mixer = gated_residual("hyper_connection_mixer", hidden, streams, rank, inject=False)
    built = []
    for i, kind in enumerate(kinds):
        chosen = {"gdn": linear, "full": attention, "sparse": sparse}[kind]
        built.append(Layer(i, chosen, mlps[i], norms=0, parts=connections + ple.get(i, ()), short_conv=conv if i in ple else None))
    drafted = sparse if "sparse" in kinds else attention
    return Decoder(
        tuple(built),
        tuple(Layer(layers + i, drafted, experts, 1 + streams, (*connections, mixer)) for i in range(drafts)),
        state_dtype=state_dtype(source, "mamba_ssm_dtype", "auto"),
        embeddings_on_every_stage=True,
        parts_last_stage=(mixer,),
        not_counted=noted + ple_noted,
    )


def _ple(source: Source, layers: int, hidden: int, streams: int) -> tuple[dict[int, tuple[Part, ...]], ShortConv | None, tuple[str, ...]]:
    """Weights of the layers with n-gram embeddings by layer index, the convolution's state, and what is not counted."""
    ids = sorted(set(source.counts("ple_layer_ids") or ()))
    if not ids:
        return {}, None, ()
    if ids[0] < 1 or ids[-1] > layers:
        raise BadInput(f"{source.where}: ple_layer_ids count from 1 and must be within the {layers} layers")
    width, kernel = source.count("ple_embed_dim", hidden), source.count("ple_conv_kernel_size", 4)
    size, heads, rows = source.count("ngram_size", 3, least=2), source.count("heads_per_ngram", 8), source.count("ngram_vocab_size_base", 20_000_000)
    tables = (size - 1) * heads
    if width % tables:
        raise BadInput(f"{source.where}: ple_embed_dim {width} is not divisible by {tables} n-gram heads")
    wide = streams * hidden
    # kv_proj is replicated, since the PLE cache is; three grouped norms and a depth-wise convolution over all streams.
    parts = (Part("ple.kv_proj", width * (wide + hidden), linear=True), Part("ple.norms", 3 * wide), Part("ple.conv1d", wide * kernel))
    shown = ", ".join(str(i - 1) for i in ids)
    table = f"PLE n-gram table of layer {shown}: about {tables * rows} rows of {width // tables} each (host memory by default)"
    return {i - 1: parts for i in ids}, ShortConv(wide, (kernel - 1) * size), (table,)
