"""Headers of safetensors files: real ones, and everything a broken or hostile file can do, each as one line."""

import json
import struct

import pytest
from test_weights import llama, quantization

from fieldbook import safetensors_headers as headers
from fieldbook import weights
from fieldbook.errors import BadInput

SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I32": 4, "F8_E4M3": 1, "I64": 8}


def entries(shapes):
    """Header of {name: (dtype, shape)}, tensors one behind the other; and the bytes of data that it describes."""
    table, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = SIZES[dtype]
        for length in shape:
            size *= length
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return table, at


def write(file, table, data=0, length=None):
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(raw) if length is None else length) + raw)
        out.truncate(8 + len(raw) + data)
    return file


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def refused(what, call, *arguments):
    with pytest.raises(BadInput, match=what) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_reads_names_dtypes_shapes_and_bytes(file):
    table, data = entries({"a.weight": ("BF16", (3, 4)), "a.bias": ("F32", (3,)), "empty": ("U8", (0, 9))})
    found = headers.read_folder(write(file, {"__metadata__": {"format": "pt"}, **table}, data).parent)
    assert [(t.name, t.dtype, t.shape, t.bytes, t.file) for t in found] == [
        ("a.weight", "BF16", (3, 4), 24, file.name),
        ("a.bias", "F32", (3,), 12, file.name),
        ("empty", "U8", (0, 9), 0, file.name),
    ]


def test_a_scalar_takes_one_value_and_four_bit_values_half_a_byte(file):
    table = {"s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [4, 7]}}
    assert sum(t.bytes for t in headers.read_header(write(file, table, 7))) == 7


def one(**changes):
    return {"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4], **changes}}


@pytest.mark.parametrize(
    "table, data, length, what",
    [
        (b"", 0, 2**63, "9223372036854775808 bytes long, the file is 8"),
        (one(), 4, 10_000, "cut off"),
        (b"not json", 0, None, "not JSON"),
        (b"\xff\xfe", 0, None, "not JSON"),
        (b"[" * 50_000, 0, None, "not JSON"),
        (b'{"w": 1' + b"1" * 5000 + b"}", 0, None, "not JSON|expected dtype"),
        (b"[]", 0, None, "not a mapping"),
        (b'{"w": 1, "w": 2}', 0, None, "there twice"),
        ({"w": 3}, 0, None, "expected dtype, shape"),
        ({"w": {}}, 0, None, "dtype None is not known"),
        (one(dtype="Q4"), 4, None, "dtype 'Q4' is not known"),
        (one(dtype=["BF16"]), 4, None, "is not known"),
        (one(shape=[-2]), 4, None, "whole numbers"),
        (one(shape=[True, 2]), 4, None, "whole numbers"),
        (one(shape="2"), 4, None, "whole numbers"),
        (one(shape=[1] * 100_000), 4, None, "whole numbers"),
        (one(data_offsets=[4, 0]), 4, None, "where it begins"),
        (one(data_offsets=[0]), 4, None, "where it begins"),
        (one(data_offsets=[0, 8]), 8, None, "8 bytes, which is not what BF16"),
        (one(shape=[2**62, 2**62]), 4, None, "which is not what"),
        ({**one(), "v": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]}}, 5, None, "overlap at byte 2"),
        ({**one(), "v": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, 10, None, "leave a gap"),
        (one(), 3, None, "the file has 3; is it whole"),
        (one(), 900, None, "the file has 900"),
        (one(data_offsets=[2, 6]), 6, None, "describes bytes 2 to 6"),
    ],
)
def test_a_broken_file_is_one_line(file, table, data, length, what):
    refused(what, headers.read_header, write(file, table, data, length))


def test_too_short_files_and_things_that_are_no_files(file, tmp_path):
    file.write_bytes(b"1234")
    refused("4 bytes long", headers.read_header, file)
    refused("no such file", headers.read_header, tmp_path)
    refused("no such folder", headers.read_folder, tmp_path / "elsewhere")
    file.unlink()
    refused("no .safetensors files", headers.read_folder, tmp_path)


def sharded(folder, shards, weight_map=None):
    for name, shapes in shards.items():
        write(folder / name, *entries(shapes))
    listed = {tensor: name for name, shapes in shards.items() for tensor in shapes}
    (folder / headers.INDEX).write_text(json.dumps({"weight_map": listed if weight_map is None else weight_map}))


def test_the_index_says_which_tensors_count(tmp_path):
    sharded(tmp_path, {"a.safetensors": {"x": ("U8", (3,))}, "b.safetensors": {"y": ("U8", (4,))}})
    write(tmp_path / "consolidated.safetensors", *entries({"x": ("U8", (300,))}))
    assert {t.name: t.bytes for t in headers.read_folder(tmp_path)} == {"x": 3, "y": 4}
    (tmp_path / headers.INDEX).unlink()
    refused("'x' is in more than one file", headers.read_folder, tmp_path)


@pytest.mark.parametrize(
    "weight_map, what",
    [
        ({"x": "a.safetensors", "y": "c.safetensors"}, "1 of 2 files that .* names are missing, the first is 'c.safetensors'"),
        ({"x": "../a.safetensors"}, "a file in the same folder"),
        ({"x": "/etc/passwd"}, "a file in the same folder"),
        ({"x": "a\0b"}, "a file in the same folder"),
        ({"z": "a.safetensors"}, "tensor 'z' is not in it"),
        ({"x": 3}, "expected a mapping"),
        ([], "expected a mapping"),
        ({}, "expected a mapping"),
    ],
)
def test_a_broken_index_is_one_line(tmp_path, weight_map, what):
    sharded(tmp_path, {"a.safetensors": {"x": ("U8", (3,))}}, weight_map)
    refused(what, headers.read_folder, tmp_path)


def test_an_index_that_is_not_json(tmp_path):
    (tmp_path / headers.INDEX).write_text("{")
    refused("not JSON", headers.read_folder, tmp_path)


def made(spec, folder, rename=lambda name: name):
    """A checkpoint with one byte tensor per component, of just the size that the formula gives."""
    shapes = {}
    for number, component in enumerate(weights.checkpoint_components(spec)):
        name = rename(component.module.replace("*", "0"))
        shapes[f"{name}.{'bias' if component.name.endswith('bias') else 'weight'}{'' if name not in shapes else number}"] = ("U8", (component.bytes,))
    write(folder / "model.safetensors", *entries(shapes))
    return headers.read_folder(folder)


def test_compare_finds_every_module_of_a_checkpoint(tmp_path):
    spec = llama(layers=3)
    rows = headers.compare(spec, made(spec, tmp_path))
    assert all(row.residual_bytes == 0 for row in rows)
    assert sum(row.header_bytes for row in rows) == weights.checkpoint_bytes(spec)
    assert [row.modules for row in rows if row.component == "attention.q_proj"] == [3]


def test_compare_finds_a_decoder_under_another_prefix(tmp_path):
    spec = llama(layers=2)
    rows = headers.compare(spec, made(spec, tmp_path, lambda name: name.replace("model.", "language_model.model.", 1)))
    assert all(row.residual_bytes == 0 for row in rows)


def test_compare_shows_what_is_missing_and_what_no_formula_covers(file):
    spec = llama(layers=1)
    table, data = entries(
        {"vision.blocks.7.weight": ("BF16", (5,)), "vision.blocks.8.weight": ("BF16", (5,)), "model.norm.weight": ("F32", (spec.hidden_size,))}
    )
    rows = {row.component: row for row in headers.compare(spec, headers.read_header(write(file, table, data)))}
    assert rows["not in the formula: vision.blocks.*"].residual_bytes == 20
    assert rows["final_norm.weight"].residual_bytes == 2 * spec.hidden_size
    assert rows["attention.q_proj"].residual_bytes == -rows["attention.q_proj"].formula_bytes < 0


def test_experts_are_one_row_however_they_are_cut_up(file):
    spec = llama(layers=1, experts=4, quantization=quantization("mxfp4", 4, "float", "group", 32, scale_bytes=1))
    matrices = 4 * 3 * spec.layers[0].mlp.expert_intermediate_size * spec.hidden_size
    table, data = entries(
        {"model.layers.0.mlp.experts.all_blocks": ("U8", (matrices // 2,)), "model.layers.0.mlp.experts.all_scales": ("U8", (matrices // 32,))}
    )
    rows = {row.component: row for row in headers.compare(spec, headers.read_header(write(file, table, data)))}
    assert rows["experts"].residual_bytes == 0
