"""Published field reports: boxes of which figures are known and nothing of the runs. Each figure is shown with its label, recomputed where it can be.

`figures` reads them and depends on nothing; `arms` stands for logs and samples; `recompute`, `tables`, `story` and `wrong_turns` are for the notebooks.
"""

from .figures import Report, Reported, is_report, read

__all__ = ["Report", "Reported", "is_report", "read"]
