"""The two errors a reader meets. Both show as one line in a notebook and on the command line, never as a traceback."""


class FieldbookError(Exception):
    """Something a person has to act on; `exit_status` is what the command line returns for it."""

    exit_status = 1

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for its own rendering before it formats a traceback.
        return [f"{type(self).__name__}: {self}"]


class BadInput(FieldbookError):
    """Wrong input: the message says what, where, and what would be right. Exit status 2."""

    exit_status = 2


class GateFailed(FieldbookError):
    """A station's gate or probe said no. Exit status 1; the receipt and the report show the failure."""


class Degenerate(GateFailed):
    """The candidate's answers degenerate. Exit status 2, as `fieldbook bench` has it (measuring protocol 1)."""

    exit_status = 2


class NoSamples(BadInput):
    """There is nothing to compare: no samples were recorded of a box, or none of an arm in a metric is sound."""


def short(value: object, most: int = 60) -> str:
    """A value in a message, cut when it is long."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
