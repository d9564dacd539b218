"""What a plan says, as plain records. Bytes are of one rank (rank 0), times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("parameters", "gradients", "optimizer", "gathered", "reduction", "activations", "other")
"""What memory is for. gathered: the window of unsharded parameters. reduction: gradients on their way through the
wires. other: buffers of the model and tables that the engine leaves alone."""


@dataclass(frozen=True)
class MemoryPlan:
    """Of the last recorded step, which is what every later step looks like.

    at_peak: bytes by kind at the moment when most is allocated; ``peak_unit`` and ``peak_phase`` say when that is.
    peak_by_kind: the largest that each kind gets, not at the same moment.
    allocated, active, reserved: peaks, as ``torch.cuda.memory_stats`` counts them.
    needed: reserved if memory had no end; usable: what there is. Their difference is the margin to the first retry.
    largest_unit: gathered bytes of the largest unit below the root.
    num_alloc_retries: of a step. fits: False if even giving back every unused segment is not enough.
    """

    at_peak: dict[str, int]
    peak_by_kind: dict[str, int]
    peak_unit: str
    peak_phase: str
    allocated: int
    active: int
    reserved: int
    needed: int
    usable: int
    largest_unit: int
    num_alloc_retries: int
    fits: bool

    @property
    def margin(self) -> int:
        return self.usable - self.needed

    @property
    def margin_units(self) -> float:
        """The margin in gathered units: so many more could be in flight."""
        return self.margin / self.largest_unit if self.largest_unit else 0.0


@dataclass(frozen=True)
class TrafficRow:
    """One primitive in one phase of a step. nbytes: what this rank sends."""

    primitive: str
    phase: str
    calls: int
    nbytes: int


@dataclass(frozen=True)
class TrafficPlan:
    """Bytes that one rank sends in a step.

    intra_host, cross_host: as a ring really sends them, crossing each host's boundary once (mean over its ranks).
    cross_host_by_hop: as the paper's formulas count, every hop of a ring that spans hosts charged to the network.
    per_host: what one host's network card carries.
    """

    rows: tuple[TrafficRow, ...]
    intra_host: int
    cross_host: int
    cross_host_by_hop: int
    per_host: int


@dataclass(frozen=True)
class TimePlan:
    """One step.

    forward_s, backward_s, optimizer_s: of the compute stream; they add up to ``step_s``.
    compute_s: the compute stream is busy. communication_s: the channel is. exposed_s: the compute stream stands and
    the channel works. idle_s: both stand, the host is behind. latency_s: what the step's collectives would take
    without a byte to move, and no step is shorter than that or than the host's part (``host_s``).
    """

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    latency_s: float
    host_s: float

    @property
    def floor_s(self) -> float:
        return max(self.latency_s, self.host_s)


@dataclass(frozen=True)
class Rates:
    """Of a step that is neither retried nor out of memory.

    tflops_per_rank, mfu: the model's own work. hardware_tflops_per_rank, hfu: with recomputation. None where the
    model gives no FLOP count. units: tokens or samples, over all ranks. qps_per_rank: click models only.
    """

    samples_per_s: float
    unit: str
    units_per_s: float
    tflops_per_rank: float | None
    hardware_tflops_per_rank: float | None
    mfu: float | None
    hfu: float | None
    qps_per_rank: float | None
    days: float


@dataclass(frozen=True)
class Advice:
    """Something to know. is_blocking: the run would not go through. change: overrides to type, if any."""

    what: str
    change: str = ""
    is_blocking: bool = False


@dataclass(frozen=True)
class Plan:
    """The whole answer. rates: None where retries or a lack of memory make every speed a guess. habits: assumed of
    another engine, as words; empty for a plan of this one."""

    model: str
    num_parameters: int
    num_units: int
    world_size: int
    ranks_per_host: int
    sharding_factor: int
    reshard_after_forward: bool
    micro_batch: int
    num_micro_batches: int
    hardware: str
    assumed: tuple[str, ...]
    habits: tuple[str, ...]
    memory: MemoryPlan
    traffic: TrafficPlan
    time: TimePlan
    rates: Rates | None
    advice: tuple[Advice, ...]

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def has_retries(self) -> bool:
        return self.memory.num_alloc_retries > 0
