"""Pure: what can happen to a worker, and what its core asks the shell to do.

`now` is monotonic time of the worker's process. Deadlines come as wall time, so `AssignArrived` carries both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proto.errors import ErrorReply
from proto.generate import Assignment, AssignReply, CancelGenerate, GenerateEvent, Pull, WorkDone
from proto.ids import BlockKey
from proto.receipt import Source
from proto.residency import ResidencyDelta
from shared.engine.protocol import Claim, EngineEvent, EngineRequest, EngineStats, SealedBlock

# -- events


@dataclass(frozen=True, slots=True)
class AssignArrived:
    """A router hands work over. It is answered by one AnswerAssign, in this list or a later one."""

    now: float
    wall: float
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class ClaimAnswered:
    """The engine admitted a request, or did not."""

    now: float
    assignment_id: str
    answer: Claim | ErrorReply


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch brought into the engine, by source and in blocks, and why it ended early if it did."""

    blocks: Mapping[Source, int] = field(default_factory=dict)
    bytes_moved: int = 0
    rejected: int = 0
    fallback: str | None = None

    @property
    def block_count(self) -> int:
        """Blocks of all sources."""
        return sum(self.blocks.values())


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """Everything that will be loaded is loaded."""

    now: float
    assignment_id: str
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class FlushEnded:
    """The kvstore has what a prefill made, or (`is_stored` false) does not say so."""

    now: float
    assignment_id: str
    is_stored: bool


@dataclass(frozen=True, slots=True)
class EngineTold:
    """What one step did."""

    now: float
    events: Sequence[EngineEvent]


@dataclass(frozen=True, slots=True)
class StatsArrived:
    """The engine's counts of a moment ago."""

    now: float
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class CancelHeard:
    """A loop or a router stops a generation up to an attempt."""

    now: float
    cancel: CancelGenerate


@dataclass(frozen=True, slots=True)
class RouterHeard:
    """A router began a life, or we are back on the bus: it knows nothing of us."""

    now: float


@dataclass(frozen=True, slots=True)
class BusRestored:
    """The connection was made again; what was said meanwhile may be lost."""

    now: float


@dataclass(frozen=True, slots=True)
class DrainBegan:
    """Take nothing new."""

    now: float


@dataclass(frozen=True, slots=True)
class DrainCut:
    """The time to finish is over: give back what is in hand."""

    now: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""

    now: float


Event = (
    AssignArrived
    | ClaimAnswered
    | FetchEnded
    | FlushEnded
    | EngineTold
    | StatsArrived
    | CancelHeard
    | RouterHeard
    | BusRestored
    | DrainBegan
    | DrainCut
    | Ticked
)

# -- instructions


@dataclass(frozen=True, slots=True)
class AnswerAssign:
    """Answer the router."""

    assignment_id: str
    reply: AssignReply


@dataclass(frozen=True, slots=True)
class ClaimBlocks:
    """Have the engine admit this; feed back ClaimAnswered."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Load blocks `first` to `last` (not included) of a chain, in order, as far as they are to be had; feed back FetchEnded.

    `keys` and `tokens` are the whole chain's. Cut after `within_s`, and when nothing came for `stall_s`.
    """

    assignment_id: str
    namespace: bytes
    keys: tuple[BlockKey, ...]
    tokens: tuple[int, ...]
    first: int
    last: int
    within_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class StartEngine:
    """No more loads: compute."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class CancelEngine:
    """Stop whatever runs for this assignment here, fetch and flush included, and give its blocks back."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class PutBlocks:
    """Write these consecutive blocks of a chain, which begins with `first_key`, to the kvstore when there is time."""

    namespace: bytes
    first_key: BlockKey
    blocks: tuple[SealedBlock, ...]


@dataclass(frozen=True, slots=True)
class FlushPuts:
    """Wait until the kvstore has all that was put before, but no longer than this; feed back FlushEnded."""

    assignment_id: str
    within_s: float


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the loop that asked."""

    address: str
    event: GenerateEvent


@dataclass(frozen=True, slots=True)
class SayDone:
    """Tell the router that an assignment is off our hands."""

    done: WorkDone


@dataclass(frozen=True, slots=True)
class SayPull:
    """Tell the router what room there is."""

    pull: Pull


@dataclass(frozen=True, slots=True)
class SayDelta:
    """Tell the router which blocks came and went."""

    delta: ResidencyDelta


@dataclass(frozen=True, slots=True)
class CountTokens:
    """For the metrics: prompt tokens by source, or generated ones."""

    kind: str
    count: int


Instruction = (
    AnswerAssign
    | ClaimBlocks
    | FetchBlocks
    | StartEngine
    | CancelEngine
    | PutBlocks
    | FlushPuts
    | Say
    | SayDone
    | SayPull
    | SayDelta
    | CountTokens
)
