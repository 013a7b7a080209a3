"""Fieldbook: a field-report workbook for people who serve language models with vLLM on odd multi-GPU boxes.

The modules follow the walk: params -> inventory -> memory -> partition -> patches -> server -> bench -> verdict -> publish.
Importing this package loads neither torch nor vLLM: planning has to work on a machine that has neither.
"""

__version__ = "0.1.0"
