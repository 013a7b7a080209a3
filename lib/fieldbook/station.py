"""What every notebook does at its start and end: validate the parameters, find earlier receipts, write its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from . import files, paths, processes, receipts, reported
from . import params as params_module
from .budget import Gpus, LoggedTerms
from .errors import BadInput, Degenerate, GateFailed
from .inventory import Inventory
from .params import Params
from .receipts import Evidence, Figure, Receipt

BY_HAND = "by-hand"


@dataclass
class Station:
    """One notebook's work in one run folder. Collects figures, then `close` writes the receipt."""

    notebook: str
    params: Params
    run_dir: Path
    started_at: str
    figures: dict[str, Figure] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """True when things are read, launched and measured on this machine."""
        return self.params.box.kind == "live"

    @property
    def report(self) -> reported.Report | None:
        """What stands for the runs of a recorded box that has none: a published report, or nothing but captured outputs. None for live and replayed boxes."""
        return None if self.live else reported.read(self.params.box.name)

    @property
    def published(self) -> reported.Report | None:
        """The published report that the box is known by."""
        return self.report if self.report and self.report.published else None

    def figure(self, key: str, value: Any, unit: str, evidence: Evidence, source: str, label: str, headline: bool = False) -> Figure | None:
        """Record a figure under its key and return it. A value that is unknown (None) is no figure."""
        if value is None:
            return None
        self.figures[key] = Figure(value=value, unit=unit, evidence=evidence, source=source, label=label, headline=headline)
        return self.figures[key]

    def figures_of(self, *keys: str) -> dict[str, Figure]:
        """Some of the figures recorded so far, for a table."""
        return {key: self.figures[key] for key in keys if key in self.figures}

    def earlier(self, number: int) -> Receipt:
        """Receipt of an earlier station. When it is missing or made with other params, that station is run first, headlessly.

        Raises GateFailed when it does not pass.
        """
        name = paths.station_name(number)
        receipt = receipts.read(self.run_dir, name)
        if not receipts.is_current(receipt, self.params):
            _run_station(self, name)
            receipt = receipts.read(self.run_dir, name)
        if not receipts.is_current(receipt, self.params):
            raise GateFailed(f"{self.notebook} needs {name}, which did not pass: {receipt.verdict if receipt else 'no receipt'}")
        return receipt

    def gpus(self) -> Gpus | None:
        """The GPUs' memory from notebook 01, and what the log of an earlier run of this box told; None where the params give the KV space.

        What the earlier run told goes into data["earlier_terms"]: whoever recomputes this receipt's pools elsewhere does not have that run.
        """
        if not takes_cards(self.params):
            return None
        terms = self._earlier_terms()
        self.data["earlier_terms"] = [asdict(one) for one in terms]
        return cards_of(self.earlier(1), terms)

    def box(self) -> Inventory:
        """The inventory of notebook 01."""
        return Inventory.model_validate(self.earlier(1).data["inventory"])

    def _earlier_terms(self) -> tuple[LoggedTerms, ...]:
        """Terms of the newest run of this box with the same model and layout that came to serve; empty without one."""
        runs = sorted(p for p in paths.reports_dir().glob(f"{self.params.box.name}/*/05_server_launch.json") if p.parent != self.run_dir)
        for file in reversed(runs):
            receipt = receipts.read(file.parent, "05_server_launch")
            # Everything in these sections moves the terms: layout, longest request, tokens of a step, graphs, drafting.
            same = receipt and receipt.passed and all(receipt.params.get(key) == self.params.shareable()[key] for key in ("model", "parallel", "engine"))
            if same and receipt.data.get("measured_terms"):
                return tuple(LoggedTerms(**row) for row in receipt.data["measured_terms"])
        return ()

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Add the time spent inside to data["elapsed_s"][what], so that a walk can say where its time went."""
        start = time.monotonic()
        try:
            yield
        finally:
            elapsed = self.data.setdefault("elapsed_s", {})
            elapsed[what] = round(elapsed.get(what, 0.0) + time.monotonic() - start, 1)

    def progress(self, text: str) -> None:
        """One line that the runner and JupyterLab show while a cell is busy. An empty one clears it, so it never stays in the notebook's output."""
        files.write_whole(self.run_dir / ".progress", text + "\n")
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None and self.live:
            from IPython.display import clear_output

            # Takes effect with the next output: the next line, or the table that the cell ends with.
            clear_output(wait=True)
            if text:
                print(text)

    @property
    def unfinished(self) -> str:
        """How files begin that hold what this station has measured so far, in the run's servers/ folder."""
        return f"unfinished-{self.notebook[:2]}-"

    def close(self, verdict: str, passed: bool = True, degenerate: bool = False) -> str:
        """Write the receipt and return the verdict line. Raises GateFailed after writing when `passed` is false; Degenerate when that is why."""
        if self.report and not self.published:
            self.data["only_captured"] = True
        receipt = Receipt(
            notebook=self.notebook,
            box=self.params.box.name,
            kind=self.params.box.kind,
            params_hash=self.params.hash,
            params=self.params.shareable(),
            versions=receipts.versions(self.params.engine.python) if self.live else recorded_versions(self.params),
            started_at=self.started_at,
            ended_at=receipts.now(),
            passed=passed,
            verdict=verdict,
            figures=self.figures,
            data=self.data,
        )
        receipts.write(self.run_dir, receipt)
        for file in (self.run_dir / "servers").glob(f"{self.unfinished}*"):
            file.unlink()
        if not passed:
            raise (Degenerate if degenerate else GateFailed)(verdict)
        return verdict


def takes_cards(params: Params) -> bool:
    """Whether the KV space of an arm depends on the cards' memory: the params do not give it for every layout."""
    engine, layouts = params.engine, (params.parallel, params.verdict.baseline)
    given = len(engine.available_kv_gib)
    return engine.kv_cache_gib_per_rank is None and not (given and all(given in (1, one.pipeline_parallel_size) for one in layouts))


def cards_of(inventory_receipt: Receipt, terms: tuple[LoggedTerms, ...]) -> Gpus:
    """Memory of the GPUs in the receipt of notebook 01, with what an earlier run's log told."""
    found = inventory_receipt.data["inventory"]["gpus"]
    # A card of unknown size keeps its place: the ranks behind it must not move up.
    return Gpus(tuple(gpu["memory_usable_bytes"] or gpu["memory_total_bytes"] for gpu in found), terms)


def open_station(notebook: str, run_dir: str = "", **sections: Any) -> Station:
    """Validate a notebook's parameters and open its run folder (empty: reports/<box>/by-hand, shared by all notebooks run by hand).

    Raises BadInput with one line for a wrong parameter.
    """
    params = params_module.validate(sections, f"{notebook} parameters")
    folder = Path(run_dir) if run_dir else paths.reports_dir() / params.box.name / BY_HAND
    folder.mkdir(parents=True, exist_ok=True)
    return Station(notebook=notebook, params=params, run_dir=folder.resolve(), started_at=receipts.now())


def recorded_versions(params: Params) -> dict[str, str | None]:
    """Versions that a recorded box was measured with (data/boxes/<box>/versions.yml); fieldbook's own is the present one.

    Unknown for a box of which only outputs were captured. Raises BadInput where a run was recorded without them.
    """
    file = paths.box_data_dir(params.box.name) / "versions.yml"
    if not file.is_file():
        if paths.only_captured(params.box.name):
            return {key: version if key == "fieldbook" else None for key, version in receipts.versions().items()}
        raise BadInput(f"data/boxes/{params.box.name}/versions.yml: missing; a recorded box has to say which versions it ran")
    return {"fieldbook": receipts.versions()["fieldbook"], **yaml.safe_load(file.read_text())}


def _run_station(station: Station, name: str) -> None:
    # A fresh process: this code runs inside a kernel, whose event loop nbclient must not share.
    params_file = station.run_dir / "params.yml"
    files.write_whole(params_file, yaml.safe_dump(station.params.model_dump(), sort_keys=False))
    command = [sys.executable, "-m", "fieldbook", "run", str(params_file), "--only", name[:2], "--run-dir", str(station.run_dir), "--keep-server"]
    # The server it may start belongs to whoever owns this notebook's servers, not to the passing process.
    env = {**os.environ, "FIELDBOOK_NESTED": "1", "FIELDBOOK_OWNER": str(processes.owner_of_servers())}
    done = subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=processes.die_with_parent, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        from .correctness import has_degenerated

        kind = Degenerate if has_degenerated(receipts.read(station.run_dir, name), station.params) else GateFailed
        raise kind(f"{station.notebook} needs {name}, which failed: {lines[-1] if lines else f'exit status {done.returncode}'}")
