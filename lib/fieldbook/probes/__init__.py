"""Probes: does a server still answer as its model does? Degeneration, identity, short prompts, questions, needles, tool calls, log-probabilities."""

from .answers import NO_TOOLS as NO_TOOLS
from .answers import Answer as Answer
from .answers import keep_answers as keep_answers
from .answers import read_answers as read_answers
from .cases import LABELS as LABELS
from .cases import PROBES as PROBES
from .counting import bounds as bounds
from .counting import more_p as more_p
from .counting import share_text as share_text
from .counting import trials_to_see as trials_to_see
from .counting import trials_to_tell as trials_to_tell
from .degeneration import judge as judge
from .running import against as against
from .running import ask_nothing as ask_nothing
from .running import by_probe as by_probe
from .running import counts as counts
from .running import keep_baseline as keep_baseline
from .running import problems as problems
from .running import read_baseline as read_baseline
from .running import run as run
from .running import signs as signs
from .running import summary as summary
