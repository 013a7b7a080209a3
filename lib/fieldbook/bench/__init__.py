"""Benchmarks by measuring protocol 1: schedule, prompts and checks are ours, the load comes from vLLM's own client (`load`)."""

from .checks import Asked as Asked
from .checks import void_reasons as void_reasons
from .measuring import check_lengths as check_lengths
from .measuring import forget as forget
from .measuring import measure as measure
from .measuring import points as points
from .samples import Sample as Sample
from .samples import by_boot as by_boot
from .samples import keep_samples as keep_samples
from .samples import read_samples as read_samples
from .samples import repeated_rounds as repeated_rounds
from .samples import summary_rows as summary_rows
from .samples import values as values
from .samples import write_samples as write_samples
from .target import Target as Target
from .target import of_state as of_state
from .target import of_url as of_url
