"""Why a start or a run failed, from its log: the cause, the lines that show it, the way out, and how sure that is.

Rules name causes by the words that vLLM, torch, NCCL and the driver use. The earliest cause in the log is the one; lines that only follow from a failure
elsewhere (a peer that closed its connection, the engine that reports its dead worker) are never taken for it.
"""

from .judge import Diagnosis, diagnose, told
from .log import Log
from .rules import Rule

__all__ = ["Diagnosis", "Log", "Rule", "diagnose", "told"]
