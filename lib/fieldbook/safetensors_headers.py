"""Headers of a checkpoint's safetensors files: names, dtypes, shapes and bytes, without reading one weight. And beside them what the formula says.

A file is 8 bytes of header length, the header as JSON, then the data (safetensors format 0.4). Every file may be broken or hostile: nothing is believed
before it is checked, and what is wrong is one line.
"""

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from .errors import BadInput, short
from .spec import ModelSpec
from .weights import checkpoint_components
from .weights.names import names_of

INDEX = "model.safetensors.index.json"
# Longer headers are refused by the safetensors library too (safetensors/src/tensor.rs: MAX_HEADER_SIZE).
MOST_HEADER_BYTES = 100_000_000
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
# What a tensor's name has behind the module that owns it.
SUFFIX = re.compile(
    r"\.(weight|bias|weight_scale|weight_scale_inv|weight_scale_2|weight_packed|weight_shape|weight_zero_point|weight_g_idx"
    r"|weight_global_scale|input_global_scale|input_scale|qweight|qzeros|scales|g_idx)$"
)
EXPERTS = re.compile(r"\.experts\..*")
ROOT = re.compile(r"(.+?)\.layers\.\d+\.(?:self_attn|mlp|mixer|linear_attn|block_sparse_moe)\.")


@dataclass(frozen=True)
class Tensor:
    """One tensor as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a kind of weight over all layers. formula_bytes is 0 for tensors that no formula covers, header_bytes for missing ones."""

    component: str
    modules: int
    formula_bytes: int
    header_bytes: int

    @property
    def residual_bytes(self) -> int:
        """Header less formula."""
        return self.header_bytes - self.formula_bytes


def read_folder(folder: Path) -> list[Tensor]:
    """All tensors of a checkpoint folder, by the index where there is one, else of every .safetensors file in it.

    Raises BadInput for a folder without any, a missing shard, a tensor that its shard does not have, and whatever read_header refuses.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder; expected a checkpoint folder with .safetensors files")
    if (folder / INDEX).is_file():
        return _by_index(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{folder}: no .safetensors files in it")
    tensors = [tensor for file in files for tensor in read_header(file)]
    twice = [name for name, count in Counter(t.name for t in tensors).items() if count > 1]
    if twice:
        raise BadInput(f"{folder}: tensor {_short(twice[0])} is in more than one file, and there is no {INDEX} that says which counts")
    return tensors


def _by_index(folder: Path) -> list[Tensor]:
    shown = folder / INDEX
    try:
        index = _json(shown.read_bytes(), shown)
    except OSError as error:
        raise BadInput(f"{shown}: {error.strerror}") from None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise BadInput(f"{shown}: weight_map: expected a mapping of tensor names to file names")
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if not shard or Path(shard).name != shard or "\0" in shard]
    if outside:
        raise BadInput(f"{shown}: weight_map names {_short(outside[0])}; expected the name of a file in the same folder")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise BadInput(f"{folder}: {len(missing)} of {len(shards)} files that {INDEX} names are missing, the first is {_short(missing[0])}")
    found = {(tensor.file, tensor.name): tensor for shard in shards for tensor in read_header(folder / shard)}
    absent = [name for name, shard in weight_map.items() if (shard, name) not in found]
    if absent:
        raise BadInput(f"{folder / weight_map[absent[0]]}: tensor {_short(absent[0])} is not in it, though {INDEX} says so; {len(absent)} such tensors")
    return [found[shard, name] for name, shard in weight_map.items()]


def read_header(file: Path) -> list[Tensor]:
    """Tensors of one file. Raises BadInput unless header and offsets describe exactly the bytes that are there."""
    file = Path(file)
    if not file.is_file():
        raise BadInput(f"{file}: no such file")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if len(start) < 8:
                raise BadInput(f"{file}: {size} bytes long; a safetensors file begins with 8 bytes of header length")
            length = int.from_bytes(start, "little")
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise BadInput(f"{file}: not a safetensors file, or cut off: its header would be {length} bytes long, the file is {size}")
            header = _json(stream.read(length), file)
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from None
    header.pop("__metadata__", None)
    entries = [_tensor(name, entry, file) for name, entry in header.items()]
    _check_offsets([span for _, span in entries], size - 8 - length, file)
    return [tensor for tensor, _ in entries]


def header_bytes(file: Path) -> bytes:
    """A file's header as it is: what its hash is taken of. Call it after read_header, which checks it."""
    with Path(file).open("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little"))


def stated_bytes(folder: Path) -> int | None:
    """Bytes of all tensors as the index states them (metadata.total_size); None without an index, or where it does not say."""
    index = Path(folder) / INDEX
    metadata = _json(index.read_bytes(), index).get("metadata") if index.is_file() else None
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(stated) if isinstance(stated, (int, float)) and not isinstance(stated, bool) else None


def _json(raw: bytes, file: Path) -> dict:
    def unique(pairs: list[tuple[str, Any]]) -> dict:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise BadInput(f"{file}: a key of its header is there twice")
        return made

    try:
        document = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise BadInput(f"{file}: its header is not JSON") from None
    if not isinstance(document, dict):
        raise BadInput(f"{file}: its header is not a mapping of names to tensors")
    return document


def _tensor(name: str, entry: Any, file: Path) -> tuple[Tensor, tuple[int, int]]:
    where = f"{file}: tensor {_short(name)}"
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadInput(f"{where}: dtype {_short(dtype)} is not known")
    if not _counts(shape):
        raise BadInput(f"{where}: shape {_short(shape)}: expected a list of whole numbers")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise BadInput(f"{where}: data_offsets {_short(span)}: expected where it begins and ends")
    begin, end = span
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise BadInput(f"{where}: {end - begin} bytes, which is not what {dtype} of shape {_short(shape)} takes")
    return Tensor(name, dtype, tuple(shape), end - begin, file.name), (begin, end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in value)


def _check_offsets(spans: list[tuple[int, int]], data_bytes: int, file: Path) -> None:
    """Tensors lie one behind the other and fill the file, as the format demands."""
    ordered = sorted(spans)
    for (_, end), (begin, _) in pairwise(ordered):
        if begin != end:
            raise BadInput(f"{file}: tensors {'overlap' if begin < end else 'leave a gap'} at byte {begin} of the data")
    first, last = (ordered[0][0], ordered[-1][1]) if ordered else (0, 0)
    if first != 0 or last != data_bytes:
        raise BadInput(f"{file}: its header describes bytes {first} to {last} of the data, the file has {data_bytes}; is it whole?")


def _short(value: Any) -> str:
    return short(value, 100)


def compare(spec: ModelSpec, tensors: list[Tensor]) -> list[Row]:
    """Formula and headers side by side, one row per kind of weight in the formula's order, then what no formula covers; matched by module path.

    Experts are one row, however the checkpoint cuts them up. A decoder that lies under another prefix than expected is found by its layers.
    """
    expected: dict[str, tuple[str, int]] = {}
    for one in checkpoint_components(spec):
        module = _module(one.module)
        name, so_far = expected.get(module, (_kind(one.name), 0))
        expected[module] = (name, so_far + one.bytes)
    stored: Counter[str] = Counter()
    root = _renamed_root(spec, tensors)
    for tensor in tensors:
        module = _module(root(tensor.name))
        stored[_owner(module, expected) or module] += tensor.bytes
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for module, (name, formula_bytes) in expected.items():
        _add(rows[name], formula_bytes, stored.pop(module, 0))
    for module, header_bytes in stored.items():
        _add(rows[f"not in the formula: {re.sub(r'[0-9]+', '*', module)}"], 0, header_bytes)
    return [Row(name, *figures) for name, figures in rows.items()]


def _add(row: list[int], formula_bytes: int, header_bytes: int) -> None:
    row[0] += 1
    row[1] += formula_bytes
    row[2] += header_bytes


def _kind(name: str) -> str:
    return re.sub(r"\bexperts\.(gate|up|down)_proj.*", "experts", name).removesuffix(".bias")


def _module(name: str) -> str:
    return EXPERTS.sub(".experts", SUFFIX.sub("", name))


def _owner(module: str, expected: dict[str, tuple[str, int]]) -> str:
    """The module itself or the nearest one around it that the formula knows, since a Part may stand for several; '' when there is none."""
    while module and module not in expected:
        module = module.rpartition(".")[0]
    return module


def _renamed_root(spec: ModelSpec, tensors: list[Tensor]):
    """Function that gives names of the decoder the prefix that the formula uses; the checkpoint's is the one that most of its layers have."""
    ours = names_of(spec).layers.removesuffix(".layers")
    roots = Counter(match[1] for tensor in tensors if (match := ROOT.match(tensor.name)) and not match[1].startswith("mtp"))
    if not roots or ours in roots:
        return lambda name: name
    theirs = roots.most_common(1)[0][0]
    return lambda name: f"{ours}{name[len(theirs) :]}" if name.startswith(f"{theirs}.") else name
