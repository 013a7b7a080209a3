"""Which of TP x PP x DP x EP x DCP x PCP can run on a box, what each costs in memory and in traffic over its links, and which suits a workload."""

from .choice import TIE, WORKLOADS, Choice, choose, judged_by
from .fabric import LINKS_ABOVE_FLOOR, MEASURED_ABOVE_FLOOR, Fabric, Way, fabric_of
from .layouts import Placement, Strategy, every_strategy, place, strategy_of
from .table import Outcome, Round, decode_round, lone_prefill_s, prefill_at_most_tok_s, stage_read_bytes, strategies
from .traffic import Collectives, Traffic, collectives_of, hop_floors, stage_floors, traffic_of
from .vetoes import NO_WEIGHTS, OPEN, UNVERIFIED, Need, Veto, needs_of, vetoes_of

__all__ = [
    "LINKS_ABOVE_FLOOR",
    "MEASURED_ABOVE_FLOOR",
    "NO_WEIGHTS",
    "OPEN",
    "UNVERIFIED",
    "TIE",
    "WORKLOADS",
    "Choice",
    "Collectives",
    "Fabric",
    "Need",
    "Outcome",
    "Placement",
    "Round",
    "Strategy",
    "Traffic",
    "Veto",
    "Way",
    "choose",
    "collectives_of",
    "decode_round",
    "every_strategy",
    "fabric_of",
    "hop_floors",
    "judged_by",
    "lone_prefill_s",
    "needs_of",
    "place",
    "prefill_at_most_tok_s",
    "stage_floors",
    "stage_read_bytes",
    "strategies",
    "strategy_of",
    "traffic_of",
    "vetoes_of",
]
