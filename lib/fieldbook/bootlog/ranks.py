"""From messages to ranks: which process is which rank, which start of the server counts, and what each told.

A rank says a figure once a start. Of two starts in one log the later counts; two engines that run beside each other stay apart.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from . import wording
from .lines import Said, Speaker

STARTS = re.compile(r"LLM\s*engine\s*(?:\(v|with\s*config)")
_V0_WORKERS = ("VllmWorkerProcess", "RayWorkerWrapper", "RayWorkerVllm", "RayTokenizerGroupPool")


@dataclass(frozen=True)
class RankLog:
    """What one rank told, in GiB (2^30 B) and seconds; None where it did not.

    rank: over TP and PP, None when its lines do not say which; pp_rank, tp_rank: stage and place in it. process, pid, ip: as its prefix has them.
    weights_gib is what loading took, weights_load_s and model_load_s how long it lasted (reading the files; all of it).
    consumed_gib: weights and non-torch together, as 0.30 tells it; peak_activation_gib there holds the graph estimate too.
    graphs_gib: measured around the capture, can be negative; graphs_estimated_gib: what was set aside for it.
    free_gib and total_gib of the device before the start; requested_gib = total x utilization. available_kv_gib: what is left for KV.
    """

    rank: int | None = None
    pp_rank: int | None = None
    tp_rank: int | None = None
    dp_rank: int = 0
    process: str = ""
    pid: int | None = None
    ip: str | None = None
    weights_gib: float | None = None
    weights_load_s: float | None = None
    model_load_s: float | None = None
    consumed_gib: float | None = None
    non_torch_gib: float | None = None
    peak_activation_gib: float | None = None
    graphs_gib: float | None = None
    graphs_estimated_gib: float | None = None
    graph_capture_s: float | None = None
    compile_s: float | None = None
    available_kv_gib: float | None = None
    free_gib: float | None = None
    total_gib: float | None = None
    requested_gib: float | None = None
    utilization: float | None = None
    block_size_tokens: int | None = None

    @property
    def is_placed(self) -> bool:
        """Whether its lines say which rank it is."""
        return (self.rank, self.pp_rank, self.tp_rank) != (None, None, None)


FIGURES = tuple(RankLog.__dataclass_fields__)[7:]


def engine_of(message: Said) -> tuple[int, int | None]:
    """(DP rank, pid) of the engine that a message comes from; the pid only where the engine itself, or a process that holds one, has signed."""
    who = message.speakers[-1] if message.speakers else Speaker("")
    holds_one = who.name.startswith("EngineCore") or not (who.is_placed or "Worker" in who.name or who.is_engine)
    return who.dp or 0, who.pid if holds_one or who.name == "WorkerDict" else None


def place_processes(messages: Iterable[Said], placed: dict[tuple, tuple[int, int, int, int]]) -> list[Said]:
    """The messages with the rank of each process filled in, where another of its lines tells it.

    A worker is called 'Worker' until the groups stand and 'Worker_PP0' from then on; `placed` is what parallel_state.py told, by (pid, ip).
    """
    messages, best = list(messages), {}
    for message in messages:
        for who in message.speakers:
            if who.pid is not None and (who.is_placed or who.dp is not None):
                best.setdefault((who.pid, who.ip), who)

    def known(who: Speaker) -> Speaker:
        if who.pid is None or who.is_engine or who.is_placed:
            return who
        if named := best.get((who.pid, who.ip)):
            return named
        rank = placed.get((who.pid, who.ip))
        return replace(who, rank=rank[0], dp=rank[1] or None, pp=rank[2], tp=rank[3]) if rank else who

    return [Said(m.number, tuple(known(who) for who in m.speakers), m.head, m.parts) for m in messages]


def counted_from(messages: list[Said], beside: bool) -> tuple[dict[int, int], int]:
    """({DP rank: first line that counts}, number of earlier starts). `beside`: unsigned starts are engines beside each other, not one after the other."""
    heard: dict[tuple[int, int | None], list[int]] = {}
    starts: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for message in messages:
        if message.speakers and not message.speakers[-1].name.startswith("EngineCore"):
            continue
        key = engine_of(message)
        heard.setdefault(key, [message.number, message.number])[1] = message.number
        if STARTS.search(message.joined()):
            starts[key].append(message.number)
    first, earlier = {}, 0
    for key, lines in starts.items():
        if len(lines) > 1 and not (beside and key[1] is None):
            first[key[0]], earlier = max(first.get(key[0], 0), lines[-1]), earlier + len(lines) - 1
    signed = sorted((span, key) for key, span in heard.items() if key[1] is not None)
    for (span, key), (later_span, later) in zip(signed, signed[1:], strict=False):
        if key[0] == later[0] and span[1] < later_span[0]:
            first[key[0]], earlier = max(first.get(key[0], 0), later_span[0]), earlier + 1
    return first, earlier


def read(messages: list[Said], first: dict[int, int], tp_size: int | None, pp_size: int | None) -> list[RankLog]:
    """The ranks that told something, in order of engine and rank; the sizes are None where the log does not tell them."""
    told: dict[tuple, dict[str, tuple[float, Any]]] = defaultdict(dict)
    who_is: dict[tuple, Speaker] = {}
    unclear: list[tuple[tuple[Speaker, ...], dict[str, Any]]] = []
    nameless: Counter = Counter()
    heard: dict[tuple, tuple[int, int]] = {}
    for message in messages:
        for who in message.speakers:
            heard[who.pid, who.ip] = (heard.get((who.pid, who.ip), (message.number,))[0], message.number)
        for said, found in wording.read(message, wording.RANK):
            figures = wording.values(found)
            if len(message.speakers) > 1:
                unclear.append((message.speakers, figures))
                continue
            who = message.speakers[0] if message.speakers else Speaker("")
            if message.number < first.get(who.dp or 0, 0):
                continue
            key = _key(who)
            if not who.name and who.pid is None:
                # Several ranks without a prefix: the second time that one of them says a thing, it is another one.
                key = (*key, nameless[said] if said.once else 0)
                nameless[said] += 1
            who_is.setdefault(key, who)
            _keep(told[key], figures, said)
    _settle(told, who_is, unclear)
    ranks = [_rank(who_is[key], {name: value for name, (_, value) in figures.items()}) for key, figures in told.items() if figures]
    return _number(_latest(ranks, heard), tp_size, pp_size)


def _key(who: Speaker) -> tuple:
    return (who.dp or 0, who.pp, who.tp, who.rank, who.name if who.pid is None else "", who.pid, who.ip)


def _keep(mine: dict[str, tuple[float, Any]], figures: dict[str, Any], said: wording.Wording) -> None:
    for name, value in figures.items():
        if name not in mine or said.worth > mine[name][0] or (said.worth == mine[name][0] and said.last):
            mine[name] = (said.worth, value)


def _settle(told: dict, who_is: dict, unclear: list) -> None:
    """Figures of ranks whose lines run into each other: it is not known whose is whose, which does not matter as long as all say the same."""
    said_by_all = defaultdict(set)
    for figures in [*({name: value for name, (_, value) in mine.items()} for mine in told.values()), *(figures for _, figures in unclear)]:
        for name, value in figures.items():
            said_by_all[name].add(value)
    for speakers, figures in unclear:
        for who in speakers:
            key = _key(who)
            who_is.setdefault(key, who)
            for name, value in figures.items():
                if len(said_by_all[name]) == 1:
                    told[key].setdefault(name, (0, value))


def _rank(who: Speaker, figures: dict[str, Any]) -> RankLog:
    return RankLog(who.rank, who.pp, who.tp, who.dp or 0, who.name, who.pid, who.ip, **figures)


def _latest(ranks: list[RankLog], heard: dict[tuple, tuple[int, int]]) -> list[RankLog]:
    """Without what a rank told under an earlier pid that fell silent before the later one spoke."""

    def replaced(r: RankLog, other: RankLog) -> bool:
        same = (r.dp_rank, r.pp_rank, r.tp_rank, r.rank, r.process) == (other.dp_rank, other.pp_rank, other.tp_rank, other.rank, other.process)
        return same and r.is_placed and r.pid != other.pid and heard[r.pid, r.ip][1] < heard[other.pid, other.ip][0]

    return [r for r in ranks if not any(replaced(r, other) for other in ranks)]


def _number(ranks: list[RankLog], tp_size: int | None, pp_size: int | None) -> list[RankLog]:
    """The ranks with the numbers that follow: of stage and place, of a lone process, and of V0's driver, which writes without a prefix."""
    width = tp_size or 1 + max((r.tp_rank for r in ranks if r.tp_rank is not None), default=0)
    per_engine = Counter(r.dp_rank for r in ranks)
    out = []
    for r in ranks:
        v0_driver = not r.process and r.pid is None and any(other.process in _V0_WORKERS for other in ranks)
        alone = per_engine[r.dp_rank] == 1 and (tp_size or 1) * (pp_size or 1) == 1
        if r.rank is None and r.is_placed:
            r = replace(r, rank=(r.pp_rank or 0) * width + (r.tp_rank or 0))
        elif r.rank is not None and r.pp_rank is None and (tp_size or pp_size == 1):
            r = replace(r, pp_rank=0 if pp_size == 1 else r.rank // width, tp_rank=r.rank if pp_size == 1 else r.rank % width)
        elif not r.is_placed and (alone or (v0_driver and not any(done.rank == 0 for done in out))):
            r = replace(r, rank=0, pp_rank=0, tp_rank=0)
        out.append(r)
    return sorted(out, key=lambda r: (r.dp_rank, r.rank is None, r.rank or 0))
