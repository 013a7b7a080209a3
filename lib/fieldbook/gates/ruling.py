"""What a gate looks at, and what it says."""

from dataclasses import dataclass, field
from typing import Any, Literal

from .. import kv
from ..command import CommandLine
from ..inventory import Inventory
from ..memory import Pool
from ..params import Params
from ..schema import Baseline, Parallel
from ..spec import ModelSpec
from ..splits import is_split
from ..strategy import Need, needs_of, strategy_of

Result = Literal["pass", "warn", "refuse", "not checked"]


@dataclass(frozen=True)
class Ruling:
    """One gate's answer. ways_out: what would make it pass, at least one with each refusal. escape: the name in server.allow that lets it through all the
    same; '' where nothing does, because the server would not start."""

    result: Result
    reason: str
    evidence: str = ""
    ways_out: tuple[str, ...] = ()
    escape: str = ""


@dataclass(frozen=True)
class Facts:
    """What only the machine of the launch can tell, at the moment of asking. None: it does not tell."""

    cards: tuple[int, ...] = ()  # of the ranks, by their numbers in NVML
    release: str | None = None  # of the vLLM that will serve
    port_taken: str = ""  # why the wanted port cannot be had
    disk_free_bytes: dict[str, int] = field(default_factory=dict)  # of each folder that is written to
    not_writable: tuple[str, ...] = ()
    shm_free_bytes: int | None = None
    memory_available_bytes: int | None = None
    gpu_processes: dict[int, tuple[str, ...]] = field(default_factory=dict)  # foreign ones, by GPU
    gpu_used_bytes: dict[int, int] = field(default_factory=dict)
    walk: int | None = None  # process of a walk that runs on this machine and is not this one's
    busy: tuple[str, ...] = ()  # foreign processes that compute on the CPUs now, the busiest first
    busy_cores: float | None = None  # what they take together
    inherited: tuple[str, ...] = ()  # variables of this environment that vLLM, torch or NCCL read, and that no params say
    api_key_set: bool = True
    unset: tuple[str, ...] = ()  # $NAME of server.extra_env that this environment has not
    checkpoint: str = ""  # what is wrong with it
    checkpoint_doubt: str = ""  # what does not agree in it, though all is there
    checkpoint_pending: str = ""  # why there is none to look into yet
    checkpoint_told: str = ""  # what was found
    checkpoint_sha256: str = ""
    other_model: str = ""  # how the checkpoint's own config differs from the one that was planned with


@dataclass(frozen=True)
class Launch:
    """Everything a gate may look at. box None: no inventory; defects None: nothing is known of the vLLM that serves; facts None: not this machine.

    pool is the ledger at this split; where there is none, no_pool says why, and unknown is True when only because nothing tells the cards' memory.
    """

    params: Params
    arm: Parallel | Baseline
    spec: ModelSpec
    layers: tuple[int, ...]
    command: CommandLine
    box: Inventory | None = None
    defects: list[dict[str, Any]] | None = None
    facts: Facts | None = None
    pool: Pool | None = None
    no_pool: str = ""
    unknown: bool = False
    alternatives: tuple[str, ...] = ()  # other layouts of the same cards that are right, best first

    @property
    def live(self) -> bool:
        return self.params.box.kind == "live"

    @property
    def stages(self) -> int:
        return self.arm.pipeline_parallel_size

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """[start, end) of every stage; empty where the split is none of this model."""
        return list(kv.stage_bounds(self.spec, self.layers)) if is_split(self.layers, self.stages, self.spec) else []

    @property
    def index_sharing(self) -> str:
        """How a cut through layers that share indices is treated; the baseline of a comparison treats it as the candidate does."""
        return self.params.parallel.index_sharing

    def defect(self, name: str) -> dict[str, Any] | None:
        """Status of a known defect, None where nothing is known."""
        return next((row for row in self.defects or [] if row["id"] == name), None)


def needs(launch: Launch, relayed: bool = False, flipped: tuple[int, ...] = ()) -> list[Need]:
    """What the layout needs of the vLLM that serves, as strategy.needs_of has it."""
    return needs_of(strategy_of(launch.arm), launch.spec, launch.params, relayed, flipped)
