"""Pure: loop -> router -> worker -> loop. One generation is one run of the model over one prompt.

A generation has an id for life and an attempt number that grows each time it is placed again. Events of an older
attempt are dropped by everyone. `tokens` ends with `emitted` tokens that earlier attempts already delivered, so a new
attempt goes on where the last one was cut, with the same random stream (counted from the generation's first token).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from proto.chat import FinishReason, Grammar, Sampling
from proto.errors import ErrorReply
from proto.ids import Id
from proto.message import Keys, Message, Tokens
from proto.receipt import Source


class Generate(Message):
    """loop -> router. Ask for tokens. It names no worker."""

    generation_id: Id
    attempt: int = Field(ge=1)
    session_id: Id
    turn_id: Id
    request_id: Id
    tenant: str
    model: str
    # 32-byte digest under which `keys` were made, and the tenant's salt, so that a worker can check both.
    namespace: bytes = Field(min_length=32, max_length=32)
    salt: bytes = b""
    tokens: Tokens = Field(min_length=1)
    # Keys of the full blocks of `tokens`, in chain order.
    keys: Keys = ()
    emitted: int = Field(default=0, ge=0)
    sampling: Sampling
    # Ids that end the answer (end of turn, end of text), from the tokenizer's side, so that workers need no tokenizer.
    eos_token_ids: Tokens = ()
    grammar: Grammar | None = None
    forced: Tokens = ()
    deadline_at: float
    submitted_at: float
    # Where events go: straight to the loop that asked.
    reply_subject: str


class GenerateAccepted(Message):
    """router -> loop. The generation is in the queue (again); `depth` counts those before it."""

    depth: int


class CancelGenerate(Message):
    """loop -> everyone. Stop all attempts of a generation up to and including `through_attempt`."""

    generation_id: Id
    through_attempt: int
    reason: str


class Stage(StrEnum):
    """What the worker is to do: only the prompt, or the prompt's rest and the tokens."""

    PREFILL = "prefill"
    DECODE = "decode"


class Segment(Message):
    """A run of blocks and where its KV is to come from. `holder_id` names the shard or worker for anything not local."""

    first_block: int
    block_count: int
    source: Source
    holder_id: str | None = None


class Plan(Message):
    """The priced plan for one generation on one worker. A hint: the worker checks every claim and recomputes what fails."""

    policy: str
    segments: tuple[Segment, ...] = ()
    predicted_s: float | None = None
    decided_in_s: float = 0.0
    # When the decision was made for want of any residency knowledge of this worker.
    blind: bool = False


class Assignment(Message):
    """router -> worker: do this."""

    assignment_id: Id
    worker_epoch: int
    stage: Stage
    generate: Generate
    plan: Plan
    queued_s: float
    prefill_worker_id: str | None = None


class AssignReply(Message):
    """worker -> router. A refusal has its reason; the router places the work elsewhere."""

    accepted: bool
    error: ErrorReply | None = None


class RunningWork(Message):
    """One generation that a worker has in hand."""

    generation_id: str
    attempt: int
    assignment_id: str


class WorkerPrice(Message):
    """Calibrated seconds of this worker: prefill = a + b*new + c*new*context; one decode step = d + e*batch + f*context."""

    prefill_base_s: float = 0.002
    prefill_token_s: float = 0.002
    prefill_context_s: float = 0.0
    decode_base_s: float = 0.03
    decode_stream_s: float = 0.002
    decode_context_s: float = 0.0
    load_base_s: float = 0.001
    load_byte_s: float = 2e-10


class Pull(Message):
    """worker -> router: I have room. Sent on every change and each second; the latest one replaces all before it.

    `assigned_count` is how many assignments of this life the worker has seen, so that the router can subtract those
    still on their way. A worker that stops pulling is dead.
    """

    worker_id: Id
    epoch: int
    stage: Stage
    # Digest of the worker's namespace with an empty salt: model, dtype, layout and block size must agree with the loop's.
    base_namespace: bytes
    model: str
    room: int = Field(ge=0)
    assigned_count: int = Field(ge=0)
    running: tuple[RunningWork, ...] = ()
    blocks_total: int
    blocks_free: int
    block_bytes: int
    prefill_tokens_waiting: int = 0
    price: WorkerPrice = WorkerPrice()


class WorkOutcome(StrEnum):
    """How an assignment ended."""

    DONE = "done"
    PREFILLED = "prefilled"
    CANCELLED = "cancelled"
    FAILED = "failed"


class WorkDone(Message):
    """worker -> router: the assignment is off my hands. With what was promised and what was found."""

    worker_id: Id
    epoch: int
    assignment_id: Id
    generation_id: Id
    attempt: int
    outcome: WorkOutcome
    error: ErrorReply | None = None
    promised_cached_tokens: int = 0
    found_cached_tokens: int = 0
    predicted_s: float | None = None
    actual_s: float = 0.0


class RouterHello(Message):
    """router -> workers: a new router life; pull now and let your snapshots be asked for."""

    router_id: Id
    epoch: int


class Queued(Message):
    """Still waiting; said at least each second so that silence means loss."""

    kind: Literal["queued"] = "queued"
    depth: int


class Working(Message):
    """A worker has it: on arrival, when compute starts, when the prompt is done (then with its sources), each silent second."""

    kind: Literal["working"] = "working"
    worker_id: str
    prefilled_tokens: int = 0
    # Known, and final, when the prompt is done: where the KV of each of its tokens came from. Until then prompts that share
    # a prefix may still find blocks that the others have just computed.
    tokens_by_source: dict[Source, int] = Field(default_factory=dict)


class TokensOut(Message):
    """New tokens. `first` counts from the generation's first token over all attempts."""

    kind: Literal["tokens"] = "tokens"
    first: int
    token_ids: Tokens
    logprobs: tuple[float, ...] | None = None


class Generated(Message):
    """Terminal. `total` tokens were delivered over all attempts; the rest is for the receipt."""

    kind: Literal["generated"] = "generated"
    finish_reason: FinishReason
    total: int
    worker_id: str
    prefill_worker_id: str | None = None
    prompt_tokens: int
    tokens_by_source: dict[Source, int]
    bytes_moved: int = 0
    frames_rejected: int = 0
    fallback: str | None = None
    queue_s: float = 0.0
    route_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    predicted_s: float | None = None
    policy: str = ""


class GenerateFailed(Message):
    """Terminal for this attempt. With a retryable code the loop places the generation again."""

    kind: Literal["failed"] = "failed"
    error: ErrorReply


GenerateBody = Annotated[Queued | Working | TokensOut | Generated | GenerateFailed, Field(discriminator="kind")]


class GenerateEvent(Message):
    """router or worker -> loop, on the generation's reply subject."""

    generation_id: Id
    attempt: int
    body: GenerateBody
