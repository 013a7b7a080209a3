"""The known defects in vLLM's stock releases, without the release being here: what a box that only a report describes would meet."""

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from .. import memory
from ..errors import BadInput
from ..params import Params
from .catalogue import CATALOGUE, OBSERVED
from .states import Status, is_met

_WORDS = {"P": "present", "F": "fixed", "-": "does not apply"}


@functools.lru_cache
def table() -> dict[str, dict[str, str]]:
    """{defect: {release: state}}, states as `status` names them (releases.yml)."""
    document = yaml.safe_load((Path(__file__).parent / "releases.yml").read_text(encoding="utf-8"))
    return {name: {release: _WORDS[mark] for release, mark in zip(document["releases"], marks, strict=True)} for name, marks in document["states"].items()}


def stock_rows(params: Params) -> list[dict[str, Any]]:
    """Every defect in the stock release that the params name, as `as_rows` gives them; lines and hashes are those of files that are not here.

    Raises BadInput for a release that was not looked at.
    """
    release, spec, rows = ".".join(params.engine.vllm_release.split(".")[:2]), memory.model_spec(params.model.name), []
    known = next(iter(table().values()))
    if release not in known:
        raise BadInput(f"engine.vllm_release: got {params.engine.vllm_release}; the known defects were looked for in {', '.join(known)}")
    for defect in [*CATALOGUE.values(), *OBSERVED.values()]:
        # The same code may lie in another file in another release.
        alike = len({one.file for one in defect.sites}) == 1
        state = table()[defect.id][release]
        met = is_met(defect, params, spec)
        told = {"effect": defect.effect, "drop_when": defect.drop_when, "reports": defect.reports, "upstream": defect.upstream, "blocks": defect.blocks}
        file, symbol = (defect.sites[0].file if alike else "", defect.sites[0].symbol) if defect.sites else ("", "")
        rows.append(asdict(Status(defect.id, defect.title, state, file, None, symbol, met, None, mendable=defect.id in CATALOGUE, **told)))
    return rows


def fates(report: str) -> list[dict[str, Any]]:
    """What became of the defects of one field report ('000') in each release, in the report's order; those with several patches take a row for each."""
    rows = []
    for defect in [*CATALOGUE.values(), *OBSERVED.values()]:
        for number in (one for one in defect.reports if one.startswith(f"{report}-")):
            rows.append({"number": int(number.partition("-")[2]), "defect": defect.id, "what it was": defect.title, **table()[defect.id]})
    return sorted(rows, key=lambda row: (row["number"], row["defect"]))
