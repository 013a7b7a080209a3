"""Why a start or a run failed, from its log: the cause, the lines that show it, the way out, and how sure that is.

Rules name causes by the words that vLLM, torch, NCCL and the driver use. The earliest cause in the log is the one; lines that only follow from a failure
elsewhere (a peer that closed its connection, the engine that reports its dead worker) are never taken for it.
"""

from .ending import diagnose_end, told_of_end
from .judge import NONE, Diagnosis, diagnose
from .log import Log
from .rules import Rule

__all__ = ["NONE", "Diagnosis", "Log", "Rule", "diagnose", "diagnose_end", "told_of_end"]
