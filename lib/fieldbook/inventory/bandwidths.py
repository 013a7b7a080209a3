"""Link rates that somebody measured with CUDA's p2pBandwidthLatencyTest, or a list of GPU pairs with their rates."""

import itertools
import re
from typing import Any

from .model import Gpu, Link, Reading, Spread
from .values import bus_id


def read_bandwidth_test(text: str) -> Reading | None:
    """p2pBandwidthLatencyTest: devices, peer access, GB/s one way and both ways, latency. The diagonal is a GPU's own memory and no link."""
    if not re.search(r"P2P=(?:Enabled|Disabled)|Device=\d+ CAN|P2P Connectivity Matrix", text):
        return None
    gpus: dict[int, Gpu] = {}
    for index, name, bus, device, domain in re.findall(
        r"Device: (\d{1,2}), (.{1,80}?), pciBusID: ([0-9a-fA-F]{1,2}), pciDeviceID: ([0-9a-fA-F]{1,2}), pciDomainID:\s*([0-9a-fA-F]{1,4})", text
    ):
        gpus[int(index)] = Gpu(index=int(index), name=name, bus_id=bus_id(f"{domain:0>4}:{bus:0>2}:{device:0>2}.0"))
    access: dict[tuple[int, int], bool] = {}
    for a, can, b in re.findall(r"Device=(\d{1,2}) (CAN(?:NOT|'T)?) Access Peer Device=(\d{1,2})", text):
        access[int(a), int(b)] = can == "CAN"
    tables = _tables(text)
    for a, b, value in tables.get("Connectivity", []):
        if a != b:
            access.setdefault((a, b), value == 1)
    rates: dict[tuple[int, int], dict[str, Spread]] = {}
    latency: dict[tuple[int, int], dict[str, Spread]] = {}
    for title, cells in tables.items():
        enabled, both, timed = "=Enabled" in title, title.startswith("Bidirectional"), "Latency" in title
        for a, b, value in cells:
            if a == b or title == "Connectivity":
                continue
            way = f"{min(a, b)}<->{max(a, b)}" if both else f"{a}->{b}"
            # Without peer access the run that asks for it goes through the host all the same.
            way += "" if enabled and access.get((a, b)) is not False else " through host"
            place = (latency if timed else rates).setdefault((min(a, b), max(a, b)), {})
            place.setdefault(way, Spread(min=value, median=value, max=value, samples=1))
    seen = {i for pair in [*access, *rates] for i in pair} | set(gpus)
    if not seen:
        return None
    count = max(seen) + 1
    links = []
    for a, b in itertools.combinations(range(count), 2):
        known = [access[pair] for pair in ((a, b), (b, a)) if pair in access]
        status = {"read": "OK", "write": "OK"} if known and all(known) else {"read": "NS", "write": "NS"} if known else {}
        links.append(Link(a=a, b=b, p2p=status, measured_gb_s=rates.get((a, b), {}), measured_latency_us=latency.get((a, b), {}), unknown=_NO_KIND))
    missing = sorted(set(range(count)) - (set(gpus) or seen))
    return Reading(
        command="p2pBandwidthLatencyTest",
        gpus=[gpus.get(i, Gpu(index=i)) for i in range(count)],
        gpu_count=count,
        links=links,
        incomplete=[f"no {'Device line' if gpus else 'word'} of GPU {', '.join(map(str, missing))}"] if missing else [],
        notes=["p2pBandwidthLatencyTest does not tell how the GPUs are linked; `nvidia-smi topo -m` does"],
    )


_NO_KIND = {"kind": "not told by a bandwidth test"}


def _tables(text: str) -> dict[str, list[tuple[int, int, float]]]:
    """Title -> (row, column, value) of each matrix. Titles end in 'Matrix'; latencies of the CPU's side are left out."""
    tables: dict[str, list[tuple[int, int, float]]] = {}
    title, columns = None, None
    for line in text.split("\n"):
        if "Matrix" in line or "P2P=" in line:
            title = "Connectivity" if "Connectivity" in line else line.strip()
            columns = None
        elif title and (head := re.match(r"^\s*(D\\D|GPU|CPU)((?:\s+\d{1,2})+)\s*$", line)):
            columns = None if head[1] == "CPU" else [int(n) for n in head[2].split()]
        elif title and columns and (row := re.match(r"^\s*(\d{1,2})((?:\s+\d{1,9}(?:\.\d{1,6})?)+)\s*$", line)):
            values = [float(v) for v in row[2].split()]
            if len(values) == len(columns):
                tables.setdefault(title, []).extend((int(row[1]), c, v) for c, v in zip(columns, values, strict=True))
        elif line.strip():
            title, columns = None, None
    return tables


def read_pair_list(text: str) -> Reading | None:
    """Lines such as `[0]->[1]  OK  5.79 GB/s`: peer access and rate of ordered pairs."""
    rows = re.findall(r"^[^\w\n\[]*\[(\d{1,2})\]\s*->\s*\[(\d{1,2})\]\s+(\w+)(?:\s+([\d.]{1,9})\s*GB/s)?", text, re.M)
    if all(a == b for a, b, *_ in rows):
        return None
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for a, b, status, rate in ((int(a), int(b), s, r) for a, b, s, r in rows if a != b):
        pair = found.setdefault((min(a, b), max(a, b)), {"ok": [], "rates": {}})
        pair["ok"].append(status == "OK")
        if re.fullmatch(r"\d+(\.\d+)?", rate):
            pair["rates"][f"{a}->{b}"] = Spread(min=float(rate), median=float(rate), max=float(rate), samples=1)
    count = max(i for pair in found for i in pair) + 1 if found else 0
    stated = re.search(r"all (\d{1,4}) ordered pairs enabled", text)
    # n GPUs have n(n-1) ordered pairs.
    enabled = next((n for n in range(2, 65) if stated and n * (n - 1) == int(stated[1])), None)
    incomplete = []
    if enabled and enabled != count:
        incomplete.append(f"{stated[1]} ordered pairs are {enabled} GPUs, the list names {count}")
    count = max(count, enabled or 0)
    missing = count * (count - 1) - len({(a, b) for a, b, *_ in rows if a != b})
    if missing > 0:
        incomplete.append(f"{missing} of {count * (count - 1)} ordered pairs are not in the list")
    links = []
    for a, b in itertools.combinations(range(count), 2):
        pair = found.get((a, b))
        ok = (all(pair["ok"]) if pair else None) if not enabled else not pair or all(pair["ok"])
        p2p = {} if ok is None else dict.fromkeys(("read", "write"), "OK" if ok else "NS")
        links.append(Link(a=a, b=b, p2p=p2p, measured_gb_s=pair["rates"] if pair else {}, unknown=_NO_KIND))
    return Reading(command="list of GPU pairs", gpus=[Gpu(index=i) for i in range(count)], gpu_count=count, links=links, incomplete=incomplete)
