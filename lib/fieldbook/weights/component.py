"""One named weight of a layer, its bytes in the checkpoint and on one tensor-parallel rank, under every quantization format."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from ..errors import BadInput
from ..quantization import scheme_of
from ..spec import ModelSpec, Quantization

Sharding = Literal["column", "row", "vocab", "experts", "replicated"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}
# vLLM: vocab_parallel_embedding.py:DEFAULT_VOCAB_PADDING_SIZE. The padded size is then divided by TP, without a second padding.
VOCAB_PADDING = 64
# Formats that store zero points, packed like GPTQ, whether or not they are symmetric, and an index of groups (vLLM: auto_gptq.py:create_weights).
GPTQ_PACKED = ("gptq", "gptq_marlin", "auto_gptq", "auto-round", "inc")


@dataclass(frozen=True)
class Component:
    """One weight. A matrix has rows (output) and cols (input), a vector only rows; count copies of it (experts) share one entry.

    parameters and bytes are those of the checkpoint, all copies together; both are 0 where vLLM builds the weight and no checkpoint stores it.
    module is the checkpoint's path without '.weight'; '*' stands for an expert's number.
    """

    name: str
    module: str
    parameters: int
    bytes: int
    rows: int
    cols: int | None
    sharding: Sharding
    scheme: Quantization | None  # how it is quantized, None where it stays plain
    count: int = 1
    width_bytes: int | None = None  # fixed precision, whatever the model's dtype
    loaded_width_bytes: int | None = None  # where vLLM holds it wider than the checkpoint
    within: Sharding = "replicated"  # experts: how TP cuts one expert when they are not spread by expert parallel
    grouped_rows: int = 0  # rows that belong to `groups` units (KV heads, mamba groups) which repeat when there are fewer than ranks
    groups: int = 1
    plain_when_loaded: bool = False  # quantized in the checkpoint, the model's dtype in memory
    stored: bool = True

    @property
    def quantized(self) -> bool:
        """Whether the checkpoint stores it in a quantized format."""
        return self.scheme is not None

    @property
    def group(self) -> str:
        """Line of the ledger that this weight belongs to: the part of its name before the first dot."""
        return self.name.partition(".")[0]


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value. Raises BadInput for a dtype that vLLM does not load models in."""
    if dtype not in DTYPE_BYTES:
        raise BadInput(f"dtype {dtype!r} of the model: expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def scale_count(rows: int, cols: int, quantization: Quantization) -> int:
    """Weight scales of one matrix: one, one per row, one per row and group of columns, or one per block (edges count whole)."""
    if quantization.strategy == "tensor":
        return 1
    if quantization.strategy == "channel":
        return rows
    if quantization.strategy == "block":
        block_rows, block_cols = quantization.block or (128, 128)
        return ceil(rows / block_rows) * ceil(cols / block_cols)
    return rows * group_count(cols, quantization)


def group_count(cols: int, quantization: Quantization) -> int:
    """Groups of input columns that share a scale; a group size of -1 or none is one group."""
    size = quantization.group_size or -1
    return 1 if size < 0 else ceil(cols / size)


def packed_bytes(rows: int, cols: int, bits: int, kind: str) -> int:
    """Bytes of the values alone. Integers are packed in int32 along the columns (vLLM: compressed_tensors_wNa16.py), floats in bytes."""
    return rows * ceil(cols * bits / 32) * 4 if kind == "int" and bits < 8 else rows * ceil(cols * bits / 8)


def zero_point_bytes(rows: int, cols: int, bits: int, quantization: Quantization) -> int:
    """Zero points, packed in int32 along the rows, one row of them per group (vLLM: compressed_tensors_wNa16.py, auto_gptq.py, auto_awq.py)."""
    return ceil(rows * bits / 32) * 4 * group_count(cols, quantization)


def quantized_bytes(rows: int, cols: int, quantization: Quantization, loaded: bool = False) -> int:
    """Bytes of one quantized matrix: values, scales, zero points, and what the format adds.

    loaded: as it lies in GPU memory after vLLM's process_weights_after_loading, which drops g_idx, the zero points of symmetric GPTQ and the
    stored shape. Padding and swizzling of scales for a kernel are not counted.
    """
    q = quantization
    total = packed_bytes(rows, cols, q.weight_bits, q.kind) + scale_count(rows, cols, q) * q.scale_bytes
    total += 4 * q.global_scales + 4 * q.activation_scales
    gptq = q.method in GPTQ_PACKED and q.kind == "int"
    zero_bits = q.zero_point_bits or (q.weight_bits if gptq and not loaded else 0)
    if zero_bits:
        total += zero_point_bytes(rows, cols, zero_bits, q)
    if not loaded and gptq:
        total += 4 * cols  # g_idx, int32
    if not loaded and q.method == "compressed-tensors" and q.kind == "int" and q.weight_bits < 8:
        total += 16  # weight_shape, two int64
    return total


def shapeless_bytes(parameters: int, quantization: Quantization) -> int:
    """Bytes of quantized weights whose shape is not told (a Part): scales by group or block, those of a row or tensor left out."""
    q = quantization
    rows, cols = q.block or (128, 128)
    per_scale = {"group": q.group_size or 0, "block": rows * cols}.get(q.strategy, 0)
    scales = ceil(parameters / per_scale) * q.scale_bytes + ceil(parameters / per_scale * q.zero_point_bits / 8) if per_scale > 0 else 0
    return ceil(parameters * q.weight_bits / 8) + scales


def one_copy_bytes(rows: int, cols: int | None, scheme: Quantization | None, width_bytes: int, loaded: bool = False) -> int:
    """Bytes of one weight, in the checkpoint or loaded; scheme None for one that stays in width_bytes per value."""
    if scheme is None:
        return rows * (cols or 1) * width_bytes
    return shapeless_bytes(rows, scheme) if cols is None else quantized_bytes(rows, cols, scheme, loaded)


def build(
    spec: ModelSpec,
    name: str,
    module: str,
    rows: int,
    cols: int | None = None,
    sharding: Sharding = "replicated",
    *,
    quantizable: bool = False,
    stored: bool = True,
    count: int = 1,
    width_bytes: int | None = None,
    **more,
) -> Component:
    """A component of this model with its parameters and checkpoint bytes. quantizable: the format may cover it, the ignore list decides."""
    scheme = scheme_of(spec.quantization, module.replace("*", "0")) if quantizable else None
    total = count * one_copy_bytes(rows, cols, scheme, width_bytes or dtype_bytes(spec.dtype)) if stored else 0
    parameters = count * rows * (cols or 1) if stored else 0
    return Component(name, module, parameters, total, rows, cols, sharding, scheme, count, width_bytes, stored=stored, **more)


def linear(spec: ModelSpec, name: str, module: str, rows: int, cols: int, sharding: Sharding, *, bias: bool = False, **more) -> list[Component]:
    """A linear layer and its bias, which column parallelism divides and row parallelism repeats (vLLM: layers/linear.py)."""
    found = [build(spec, name, module, rows, cols, sharding, **{"quantizable": True, **more})]
    if bias:
        shared = {key: more[key] for key in ("grouped_rows", "groups", "stored", "count") if key in more}
        found.append(build(spec, f"{name}.bias", module, rows, None, "column" if sharding == "column" else "replicated", **shared))
    return found


def pad_vocab(vocab_size: int) -> int:
    """Rows of the embedding in memory (vLLM: vocab_parallel_embedding.py:pad_vocab_size)."""
    return ceil(vocab_size / VOCAB_PADDING) * VOCAB_PADDING


def divided(what: str, size: int, ranks: int) -> int:
    """Size on one of the ranks. Raises BadInput where vLLM's divide() fails its assertion."""
    if size % ranks:
        raise BadInput(f"{what}: {size} cannot be divided over {ranks} tensor-parallel ranks; vLLM refuses this layout")
    return size // ranks


def local_rows(component: Component, ranks: int) -> int:
    """Output rows on one rank of a column-parallel weight. Units fewer than ranks repeat, one on each (vLLM: layers/linear.py:QKVParallelLinear)."""
    plain = divided(component.module, component.rows - component.grouped_rows, ranks)
    if not component.grouped_rows:
        return plain
    per_unit = component.grouped_rows // component.groups
    if component.groups >= ranks:
        return plain + divided(f"{component.module} heads", component.groups, ranks) * per_unit
    divided(f"ranks over {component.module} heads", ranks, component.groups)
    return plain + per_unit


def local_shape(component: Component, ranks: int, expert_parallel: bool, expert_ranks: int | None = None) -> tuple[int, int | None, int]:
    """Rows, columns and copies of a weight on one tensor-parallel rank; the fullest rank where experts do not divide evenly.

    expert_ranks: ranks that share the experts, by width or, with expert_parallel, whole ones; None: the tensor-parallel ranks. Data-parallel ranks of
    one model share them too (vLLM: fused_moe/config.py:FusedMoEParallelConfig.make).
    """
    rows, cols, count, sharding = component.rows, component.cols, component.count, component.sharding
    if sharding == "experts":
        ranks = expert_ranks or ranks
        if expert_parallel:
            return rows, cols, ceil(count / ranks)
        sharding = component.within
    if sharding == "column":
        return local_rows(component, ranks), cols, count
    if sharding == "row":
        return rows, divided(component.module, cols or 0, ranks), count
    if sharding == "vocab":
        return divided(f"{component.module}, padded vocabulary", pad_vocab(rows), ranks), cols, count
    return rows, cols, count


def rank_bytes(
    component: Component, spec: ModelSpec, ranks: int, expert_parallel: bool = False, dtype: str | None = None, expert_ranks: int | None = None
) -> int:
    """Bytes of a weight on one tensor-parallel rank after loading. dtype: what the server was told to use in place of the checkpoint's."""
    rows, cols, count = local_shape(component, ranks, expert_parallel, expert_ranks)
    scheme = None if component.plain_when_loaded else component.scheme
    width = component.loaded_width_bytes or component.width_bytes or dtype_bytes(dtype or spec.dtype)
    return count * one_copy_bytes(rows, cols, scheme, width, loaded=True)
