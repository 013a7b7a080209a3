"""Which layers go to which pipeline stage: the best split under hard constraints, exactly, and what every other one costs."""

from ..spec import sharing_layers
from ..splits import all_splits, default_split, resolve_split
from .plan import Plan, choose, plan, roomiest
from .remedies import refusal, remedies
from .rules import Rule, even_split_flips, ple_contained, ple_layers, rules_of
from .sharing import IndexerEvidence, Treatment, flip_refused, indexer_evidence, treatments
from .table import Candidate, StageTable, stage_table

__all__ = [
    "Candidate",
    "IndexerEvidence",
    "Plan",
    "Rule",
    "StageTable",
    "Treatment",
    "all_splits",
    "choose",
    "default_split",
    "even_split_flips",
    "flip_refused",
    "indexer_evidence",
    "plan",
    "ple_contained",
    "ple_layers",
    "refusal",
    "remedies",
    "resolve_split",
    "roomiest",
    "rules_of",
    "sharing_layers",
    "stage_table",
    "treatments",
]
