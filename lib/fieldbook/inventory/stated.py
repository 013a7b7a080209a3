"""A box that is only described: `box.yml` with what a report states. What it does not state stays unknown."""

import re
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import BadInput
from .model import Gpu, Link, Reading
from .topology import P2P_MEANING

# More GPUs than any one box has; every pair of them becomes a link.
LARGEST_COUNT = 256


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Gpus(_Strict):
    count: int = Field(ge=0, le=LARGEST_COUNT)
    each: dict[str, Any] | list[dict[str, Any]] = {}  # one mapping for all GPUs, or one for each
    numa_node: list[int] = []


class _Links(_Strict):
    pairs: dict[str, list[list[int]]] = {}  # kind -> pairs
    across_nodes: str | None = None  # kind of every other pair whose GPUs are at different NUMA nodes
    nvlinks: int | None = None  # of every pair whose kind is not given
    p2p: dict[str, str] = {}


class _Box(_Strict):
    stated_by: str
    gpus: _Gpus
    links: _Links = _Links()
    notes: list[str] = []


def read_stated(text: str) -> Reading | None:
    """The GPUs and links of a box.yml. Raises BadInput naming the key that is wrong.

    `gpus.each` takes the field names of a Gpu, once for all GPUs or as a list with one entry for each; `links.pairs` names pairs by kind,
    `links.across_nodes` the kind of the rest where it crosses NUMA nodes.
    """
    if not re.match(r"(?:#.*\n|\s)*stated_by:", text):
        return None
    try:
        document = yaml.safe_load(text)
    # A date that is none is a ValueError of the YAML reader.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"a stated box that is no YAML: {str(error).splitlines()[0]}") from None
    where = ""
    try:
        box = _Box.model_validate(document)
        where = "gpus.each."
        gpus = [_gpu(box, index) for index in range(box.gpus.count)]
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"a stated box: {where}{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    named = _named(box)
    links = [_link(box, gpus[a], gpus[b], named.get((a, b))) for a in range(box.gpus.count) for b in range(a + 1, box.gpus.count)]
    return Reading(command=f"stated by {box.stated_by}", gpus=gpus, gpu_count=box.gpus.count, links=links, notes=box.notes)


def _named(box: _Box) -> dict[tuple[int, int], str]:
    """Pair -> kind. Raises BadInput for what would otherwise be left out or read wrong."""
    count, kinds = box.gpus.count, [*box.links.pairs, *([box.links.across_nodes] if box.links.across_nodes else [])]
    wrong = next((kind for kind in kinds if not re.fullmatch(r"NV\d{1,2}|PIX|PXB|PHB|NODE|SYS", kind)), None)
    if wrong is not None:
        raise BadInput(f"a stated box: links: {wrong!r} is no kind of link; give NV with a number, PIX, PXB, PHB, NODE or SYS")
    word = next((word for word in box.links.p2p.values() if word not in P2P_MEANING), None)
    if word is not None:
        raise BadInput(f"a stated box: links.p2p: {word!r} is no word of `nvidia-smi topo -p2p`; give OK, CNS, GNS, TNS, NS, DR or U")
    if box.gpus.numa_node and len(box.gpus.numa_node) != count:
        raise BadInput(f"a stated box: gpus.numa_node: {len(box.gpus.numa_node)} nodes for {count} GPUs; give one for each")
    named: dict[tuple[int, int], str] = {}
    for kind, pairs in box.links.pairs.items():
        for pair in pairs:
            if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= i < count for i in pair):
                raise BadInput(f"a stated box: links.pairs.{kind}: {pair} is no pair of GPUs 0 to {count - 1}")
            if named.setdefault((min(pair), max(pair)), kind) != kind:
                raise BadInput(f"a stated box: links.pairs: {pair} is {named[min(pair), max(pair)]} and {kind}; give one kind")
    return named


def _gpu(box: _Box, index: int) -> Gpu:
    each = box.gpus.each
    if isinstance(each, list) and len(each) != box.gpus.count:
        raise BadInput(f"a stated box: gpus.each: {len(each)} entries for {box.gpus.count} GPUs; give one for each, or one mapping for all")
    stated = each[index] if isinstance(each, list) else each
    own = next((name for name in ("index", "unknown") if name in stated), None)
    if own:
        raise BadInput(f"a stated box: gpus.each.{own}: GPUs are numbered in their order; leave it out")
    several = next((name for name, value in stated.items() if isinstance(value, list) and name in ("name", "architecture", "memory_total_bytes")), None)
    if several:
        raise BadInput(f"a stated box: gpus.each.{several}: got a list; for unequal GPUs make gpus.each itself a list with one mapping for each GPU")
    node = {"numa_node": box.gpus.numa_node[index]} if index < len(box.gpus.numa_node) else {}
    told = {**stated, **node}
    silent = [name for name in ("memory_total_bytes", "pcie_generation", "pcie_width_lanes", "compute_capability", "numa_node") if told.get(name) is None]
    return Gpu(index=index, **told, unknown={name: f"not stated by {box.stated_by}" for name in silent})


def _link(box: _Box, one: Gpu, other: Gpu, kind: str | None) -> Link:
    if kind is None and None not in (one.numa_node, other.numa_node) and one.numa_node != other.numa_node:
        kind = box.links.across_nodes
    count = int(kind[2:]) if kind and kind.startswith("NV") else 0 if kind else box.links.nvlinks
    unknown = {} if kind else {"kind": f"not stated by {box.stated_by}"}
    return Link(a=one.index, b=other.index, kind=kind, nvlinks=count, p2p=box.links.p2p, unknown=unknown)
