"""The run that is checked: its params, receipts and raw files, as far as they are there; nothing of the machine that it came from."""

import itertools
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import __version__, bench, bootlog, memory, paths, probes, receipts, station
from .. import params as params_module
from ..bench import Sample
from ..bootlog import BootLog
from ..budget import Gpus, LoggedTerms
from ..errors import BadInput
from ..inventory import Inventory
from ..params import Params
from ..probes import Answer
from ..receipts import Receipt
from ..spec import ModelSpec
from ..splits import layout_name, resolve_split
from .compare import CannotTell

# What a stranger's params may ask of this machine. The exact test looks at every relabelling: two rounds of six against six are 853,776.
MOST_SAMPLES = 100_000
MOST_RELABELLINGS = 5_000_000


@dataclass(frozen=True, eq=False)
class Run:
    """What recomputations get. receipts: by station number. why_no_params: why `params` is None; why_no_plan: why nothing of the model can be computed."""

    folder: Path
    receipts: dict[int, Receipt]
    params: Params | None
    why_no_params: str = ""
    why_no_plan: str = ""

    def receipt(self, number: int) -> Receipt:
        """The receipt of a station. Raises CannotTell where there is none."""
        if number not in self.receipts:
            raise CannotTell(f"{paths.station_name(number)}.json is missing")
        return self.receipts[number]

    @property
    def asked(self) -> Params:
        """The params. Raises CannotTell where they cannot be read by this release."""
        if self.params is None:
            raise CannotTell(self.why_no_params)
        return self.params

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's shape from the config.json here. Raises CannotTell where there is none."""
        if self.why_no_plan:
            raise CannotTell(self.why_no_plan)
        return memory.model_spec(self.asked.model.name)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers per stage that notebook 03 chose."""
        return tuple(self.receipt(3).data["layers_per_stage"])

    @cached_property
    def names(self) -> dict[str, str]:
        """Both arms' layouts, as the notebooks name them."""
        base = self.asked.verdict.baseline
        return {"candidate": layout_name(self.asked.parallel, self.layers), "baseline": layout_name(base, resolve_split(base, self.spec, self.layers))}

    @cached_property
    def box(self) -> Inventory:
        """The inventory in the receipt of notebook 01."""
        return Inventory.model_validate(self.receipt(1).data["inventory"])

    def gpus(self, number: int) -> Gpus | None:
        """The cards as a station counted with them, from receipt 01 and from the earlier run's terms that its own receipt keeps."""
        if not station.takes_cards(self.asked):
            return None
        told = self.receipt(number).data.get("earlier_terms", [])
        return station.cards_of(self.receipt(1), tuple(LoggedTerms(**row) for row in told))

    def terms_untold(self, number: int) -> bool:
        """Whether a receipt does not say which earlier run's terms its pools rest on."""
        return station.takes_cards(self.asked) and "earlier_terms" not in self.receipt(number).data

    def file(self, name: str) -> Path:
        """A raw file: of the run folder, or of a recorded box what it was replayed from, in this checkout. Raises CannotTell where there is none."""
        if (self.folder / name).is_file():
            return self.folder / name
        box = next(iter(self.receipts.values())).box if self.receipts else self.asked.box.name
        kind = next((receipt.kind for receipt in self.receipts.values()), "live")
        # The box's name comes out of a stranger's receipt.
        kept = paths.recorded_file(box, name) if kind == "recorded" and re.fullmatch(r"[a-z0-9][a-z0-9._-]*", box) else None
        if kept:
            return kept
        raise CannotTell(f"{name} is missing" + (f", and this checkout has no data/reports/{box}/{name}" if kind == "recorded" else ""))

    def told(self, name: str) -> str:
        """Which file `file` is, for people."""
        found = self.file(name)
        return name if found.is_relative_to(self.folder) else paths.shown(found)

    @cached_property
    def samples(self) -> list[Sample]:
        """Every sample. Raises CannotTell for a file that is missing or damaged."""
        return self._rows("samples.jsonl", bench.read_samples)

    @cached_property
    def answers(self) -> list[Answer]:
        """Every answer. Raises CannotTell for a file that is missing or damaged."""
        return self._rows("answers.jsonl", probes.read_answers)

    def _rows(self, name: str, read) -> list:
        try:
            return read(self.file(name))
        except BadInput as error:
            raise CannotTell(str(error).replace(f"{self.file(name)}", name).replace("; measure again", "")) from None

    @cached_property
    def readings(self) -> dict[str, Any]:
        """Log-probabilities of the fixed texts, by arm."""
        try:
            return json.loads(self.file("readings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CannotTell(f"readings.json: cannot be read ({error})") from None

    def log(self, arm: str, number: int) -> tuple[BootLog, str]:
        """(what the boot log of an arm tells, which file that is): servers/<arm>-<number>.log, of a recorded box boot-<arm>.log."""
        name = f"servers/{arm}-{number}.log"
        if not (self.folder / name).is_file():
            try:
                name = f"boot-{arm}.log"
                self.file(name)
            except CannotTell:
                raise CannotTell(f"servers/{arm}-{number}.log is missing") from None
        return bootlog.parse(self.file(name).read_text(encoding="utf-8", errors="replace")), self.told(name)

    def step(self, name: str) -> dict[str, Any]:
        """What a step of the verdict kept. Raises CannotTell where it is not there."""
        try:
            return json.loads(self.file(f"steps/{name}.json").read_text(encoding="utf-8"))["data"]
        except (OSError, ValueError, KeyError) as error:
            raise CannotTell(f"steps/{name}.json: cannot be read ({error})") from None

    @cached_property
    def metrics(self) -> list[str]:
        """Names of the metrics that these params measure. Raises CannotTell for a schedule that nobody ran."""
        asked = self.asked.benchmarks
        if asked.rounds * asked.repetitions * len(found := params_module.metric_names(self.asked)) > MOST_SAMPLES:
            raise CannotTell("its params ask for more samples than anybody measures")
        return found

    def base_counts(self, number: int) -> dict[str, Any] | None:
        """The model's baseline here, as a station saw it. Raises CannotTell where it was made after that."""
        found, _ = probes.read_baseline(self.asked.model.name, self.asked.probes)
        if found and str(found.get("made_at", "")) > self.receipt(number).ended_at:
            raise CannotTell("the model's baseline in this checkout is younger than the run")
        return found

    def feasible(self, rounds: list[list[float]], others: list[list[float]]) -> None:
        """Raises CannotTell where the exact test of so many values would not end."""
        ways = math.prod(math.comb(len(a) + len(b), len(a)) for a, b in itertools.zip_longest(rounds, others, fillvalue=[]))
        if ways > MOST_RELABELLINGS:
            raise CannotTell(f"{ways:,} relabellings are too many to look at")


def said(receipt: Receipt, key: str) -> Any:
    """What a receipt says under a key: a figure's value, "data.NAME", "receipt.verdict" or "receipt.passed"; None where it says nothing."""
    if key in ("receipt.verdict", "receipt.passed"):
        return getattr(receipt, key.partition(".")[2])
    if not key.startswith("data."):
        return receipt.figures[key].value if key in receipt.figures else None
    value: Any = receipt.data
    for part in key.split(".")[1:]:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def other_version(receipt: Receipt) -> str:
    """Which other release of Fieldbook a receipt was written by; '' for this one."""
    wrote = receipt.versions.get("fieldbook")
    return "" if wrote == __version__ else f"Fieldbook {wrote or 'of unknown version'}"


def read(folder: Path, given: str) -> Run:
    """The run in a folder. Raises BadInput for a receipt that is none of this schema version."""
    found: dict[int, Receipt] = {}
    for number, name in enumerate(paths.STATIONS, 1):
        try:
            receipt = receipts.read(folder, name)
        except (BadInput, OSError) as error:
            why = str(error).partition("version 1 (")[2].rpartition(")")[0] if isinstance(error, BadInput) else error.strerror
            raise BadInput(f"{given}: {name}.json: not a receipt of schema version 1 ({why}); check it with the Fieldbook that wrote it") from None
        if receipt:
            found[number] = receipt
    return Run(folder, found, *_params(folder, found))


def _params(folder: Path, found: dict[int, Receipt]) -> tuple[Params | None, str, str]:
    """(params, why there are none, why nothing of the model can be computed), from params.yml, or from a receipt where that cannot be read."""
    file, why = folder / "params.yml", ""
    sections = next(iter(found.values())).params if found else None
    try:
        sections = params_module.read(file) if file.is_file() else sections
        return params_module.validate(sections, "params.yml"), "", ""
    except BadInput as error:
        why = str(error).replace(f"{file}", "params.yml")
    try:
        # What the model's config.json would tell is not needed for the statistics.
        return Params.model_validate(sections), "", why
    except ValueError:
        return None, why, why
