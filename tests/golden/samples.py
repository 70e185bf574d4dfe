"""One instance of every message on the wire, with every kind of body. Change the wire and the golden bytes beside show it."""

from __future__ import annotations

from pydantic import BaseModel

from proto.chat import ChatMessage, FinishReason, Grammar, Role, Sampling, ToolCall, ToolChoice, ToolSpec
from proto.errors import ErrorCode, ErrorReply
from proto.fleet import FleetPing, Heartbeat, KvStoreCard, ModelCard, ServiceState
from proto.generate import (
    Assignment,
    AssignReply,
    CancelGenerate,
    Generate,
    GenerateAccepted,
    Generated,
    GenerateEvent,
    GenerateFailed,
    Plan,
    Pull,
    Queued,
    RouterHello,
    RunningWork,
    Segment,
    Stage,
    TokensOut,
    WorkDone,
    Working,
    WorkOutcome,
)
from proto.ids import BlockKey
from proto.kv import KvRejected, KvTouched
from proto.receipt import Receipt, Seconds, Source, StepReceipt, Usage
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier, TierChange
from proto.retrieval import DeleteDocument, DocumentOp, Passage, Passages, PutDocument, Search
from proto.sessions import (
    CreateSession,
    GetSession,
    Record,
    SessionInfo,
    SessionOpened,
    Span,
    StepGenerated,
    ToolsAnswered,
    TurnClosed,
    TurnOpened,
    TurnSummary,
)
from proto.tools import ListTools, RunTool, ToolList, ToolOutcome, ToolResult
from proto.turns import (
    CancelTurn,
    StartTurn,
    TextDelta,
    ToolCalled,
    ToolReturned,
    TurnBody,
    TurnDone,
    TurnEvent,
    TurnFailed,
    TurnStarted,
)

KEYS = (BlockKey(bytes(range(16))), BlockKey(bytes(range(16, 32))))
ERROR = ErrorReply(code=ErrorCode.OVERLOADED, message="full", field="messages", retry_after_s=1.0)
SPEC = ToolSpec(name="python", description="Run code.", parameters={"type": "object", "properties": {}})
CALL = ToolCall(call_id="c1", name="python", arguments='{"code": "print(1)"}')
USER = ChatMessage(role=Role.USER, content="Hällo")
SAMPLING = Sampling(max_tokens=8, temperature=0.5, seed=7, stop=("END",), stop_token_ids=(2,), logprobs=1)
GRAMMAR = Grammar(kind="regex", text="[0-9]+")
CHOICE = ToolChoice(mode="named", name="python", arguments="{}")
SPAN = Span(role=Role.USER, tokens=(1, 49151), text="Hällo")
SECONDS = Seconds(queue=0.1, route=0.01, load=0.2, prefill=0.3, decode=0.4, tool=0.5, total=2.0)
STEP = StepReceipt(
    step=0,
    worker_id="decode-0",
    prefill_worker_id="prefill-0",
    attempts=2,
    prompt_tokens=32,
    generated_tokens=4,
    tokens_by_source={Source.RAM: 16, Source.COMPUTED: 16},
    bytes_moved=1024,
    frames_rejected=1,
    fallback="checksum",
    predicted_s=0.5,
    seconds=SECONDS,
    policy="residency",
)
USAGE = Usage(prompt_tokens=32, cached_tokens=16, completion_tokens=4)
RECEIPT = Receipt(
    steps=(STEP,),
    seconds=SECONDS,
    tokens_by_source={Source.RAM: 16},
    bytes_moved=1024,
    tool_calls=1,
    kv_byte_seconds={"ram": 2.0},
)
GENERATE = Generate(
    generation_id="t1-0",
    attempt=1000,
    session_id="s1",
    turn_id="t1",
    request_id="r1",
    tenant="acme",
    model="m",
    namespace=bytes(32),
    salt=b"acme",
    tokens=(1, 2, 3),
    keys=KEYS,
    emitted=1,
    sampling=SAMPLING,
    eos_token_ids=(2,),
    grammar=GRAMMAR,
    forced=(5,),
    deadline_at=1000.0,
    submitted_at=900.0,
    reply_subject="roost.generate.event.loop-0.t1-0",
)
PLAN = Plan(
    policy="residency",
    segments=(Segment(first_block=0, block_count=2, source=Source.NVME, holder_id="kvstore-0"),),
    predicted_s=0.1,
    decided_in_s=0.001,
    blind=True,
)
CARD = ModelCard(
    worker_id="decode-0",
    epoch=7,
    model="m",
    fingerprint="f",
    tokenizer_digest="d",
    kv_dtype="float32",
    layout_version=1,
    block_tokens=16,
    context_tokens=8192,
    block_bytes=1024,
)
KV_CARD = KvStoreCard(
    shard_id="kvstore-0", epoch=7, host="h", data_port=4000, ram_path="/r", nvme_path="/n", host_token="abc"
)


def _event(body: TurnBody) -> TurnEvent:
    return TurnEvent(turn_id="t1", session_id="s1", step=0, offset=2, part=0, body=body)


SAMPLES: dict[str, BaseModel] = {
    "ErrorReply": ERROR,
    "StartTurn": StartTurn(
        turn_id="t1",
        session_id="s1",
        request_id="r1",
        tenant="acme",
        model="m",
        messages=(USER,),
        tools=(SPEC,),
        server_tools=("python",),
        tool_choice=CHOICE,
        sampling=SAMPLING,
        grammar=GRAMMAR,
        deadline_at=1000.0,
        started_at=900.0,
        forced=(1,),
    ),
    "TurnEvent.started": _event(TurnStarted(model="m", prompt_tokens=32)),
    "TurnEvent.text": _event(TextDelta(token_ids=(1, 2), pieces=("a", "b"), logprobs=(-0.5, -1.0))),
    "TurnEvent.tool_call": _event(ToolCalled(index=0, call=CALL, run_here=True)),
    "TurnEvent.tool_result": _event(
        ToolReturned(call_id="c1", name="python", outcome="ok", content="1\n", seconds=0.5)
    ),
    "TurnEvent.done": _event(TurnDone(finish_reason=FinishReason.STOP, usage=USAGE, receipt=RECEIPT)),
    "TurnEvent.failed": _event(TurnFailed(error=ERROR)),
    "CancelTurn": CancelTurn(turn_id="t1"),
    "Record.opened": Record(
        body=SessionOpened(
            session_id="s1",
            tenant="acme",
            model="m",
            created_at=1.0,
            system="Be brief.",
            tools=(SPEC,),
            server_tools=("python",),
            spans=(SPAN,),
            parent="s0@4",
        )
    ),
    "Record.turn_opened": Record(
        body=TurnOpened(
            turn_id="t1",
            request_id="r1",
            opened_at=1.0,
            deadline_at=2.0,
            spans=(SPAN,),
            messages=(USER,),
            sampling=SAMPLING,
            max_steps=8,
        )
    ),
    "Record.generated": Record(
        body=StepGenerated(
            turn_id="t1",
            step=0,
            tokens=(3, 2),
            text="ok",
            calls=(CALL,),
            finish_reason=FinishReason.TOOL_CALLS,
            receipt=STEP,
        )
    ),
    "Record.tools_answered": Record(body=ToolsAnswered(turn_id="t1", step=1, spans=(SPAN,), seconds=0.5)),
    "Record.turn_closed": Record(
        body=TurnClosed(
            turn_id="t1",
            final=StepGenerated(
                turn_id="t1", step=2, tokens=(3, 2), text="ok", finish_reason=FinishReason.STOP, receipt=STEP
            ),
            steps=3,
            error=ERROR,
            usage=USAGE,
            receipt=RECEIPT,
            closed_at=3.0,
        )
    ),
    "CreateSession": CreateSession(session_id="s1", tenant="acme", model="m", system="Be brief.", tools=(SPEC,)),
    "GetSession": GetSession(session_id="s1", tenant="acme"),
    "SessionInfo": SessionInfo(
        session_id="s1",
        tenant="acme",
        model="m",
        created_at=1.0,
        token_count=32,
        tools=("python",),
        parent="s0@4",
        turns=(
            TurnSummary(turn_id="t1", status="done", opened_at=1.0, messages=(USER,), usage=USAGE, receipt=RECEIPT),
        ),
    ),
    "Generate": GENERATE,
    "GenerateAccepted": GenerateAccepted(depth=3),
    "Pull": Pull(
        worker_id="decode-0",
        epoch=7,
        stage=Stage.DECODE,
        base_namespace=bytes(32),
        model="m",
        room=2,
        assigned_count=5,
        running=(RunningWork(generation_id="t1-0", attempt=1000, assignment_id="a1"),),
        blocks_total=100,
        blocks_free=50,
        block_bytes=1024,
    ),
    "WorkDone": WorkDone(
        worker_id="decode-0",
        epoch=7,
        assignment_id="a1",
        generation_id="t1-0",
        attempt=1000,
        outcome=WorkOutcome.DONE,
        promised_cached_tokens=16,
        found_cached_tokens=16,
        actual_s=0.5,
    ),
    "RouterHello": RouterHello(router_id="router-0", epoch=7),
    "Assignment": Assignment(
        assignment_id="a1", worker_epoch=7, stage=Stage.DECODE, generate=GENERATE, plan=PLAN, queued_s=0.1
    ),
    "AssignReply": AssignReply(accepted=False, error=ERROR),
    "GenerateEvent.queued": GenerateEvent(generation_id="t1-0", attempt=1000, body=Queued(depth=1)),
    "GenerateEvent.working": GenerateEvent(
        generation_id="t1-0", attempt=1000, body=Working(worker_id="decode-0", tokens_by_source={Source.RAM: 16})
    ),
    "GenerateEvent.tokens": GenerateEvent(
        generation_id="t1-0", attempt=1000, body=TokensOut(first=0, token_ids=(3, 4), logprobs=(-0.5, -1.0))
    ),
    "GenerateEvent.generated": GenerateEvent(
        generation_id="t1-0",
        attempt=1000,
        body=Generated(
            finish_reason=FinishReason.LENGTH,
            total=8,
            worker_id="decode-0",
            prompt_tokens=32,
            tokens_by_source={Source.COMPUTED: 32},
        ),
    ),
    "GenerateEvent.failed": GenerateEvent(generation_id="t1-0", attempt=1000, body=GenerateFailed(error=ERROR)),
    "CancelGenerate": CancelGenerate(generation_id="t1-0", through_attempt=1000, reason="client gone"),
    "ResidencyDelta": ResidencyDelta(
        holder_id="kvstore-0",
        epoch=7,
        seq=1,
        changes=(TierChange(tier=Tier.RAM, stored=KEYS), TierChange(tier=Tier.NVME, dropped=KEYS[:1])),
    ),
    "SnapshotRequest": SnapshotRequest(after_key=KEYS[0], tier=Tier.NVME),
    "ResidencySnapshot": ResidencySnapshot(
        holder_id="kvstore-0", epoch=7, seq=1, tier=Tier.RAM, keys=KEYS, is_last=True
    ),
    "KvTouched": KvTouched(shard_id="kvstore-0", keys=KEYS),
    "KvRejected": KvRejected(shard_id="kvstore-0", tier=Tier.RAM, key=KEYS[0], reason="checksum"),
    "RunTool": RunTool(
        session_id="s1",
        turn_id="t1",
        request_id="r1",
        call_id="c1",
        tenant="acme",
        name="python",
        arguments="{}",
        deadline_at=1000.0,
    ),
    "ToolResult": ToolResult(
        call_id="c1",
        name="python",
        outcome=ToolOutcome.OUTPUT_LIMIT,
        content="a",
        dropped_bytes=9,
        seconds=0.5,
        sandbox="sandlock",
    ),
    "ListTools": ListTools(),
    "ToolList": ToolList(tools=(SPEC,), sandbox="sandlock"),
    "DocumentOp.put": DocumentOp(
        put=PutDocument(document_id="d1", tenant="acme", title="T", text="x", metadata={"a": "b"})
    ),
    "DocumentOp.delete": DocumentOp(delete=DeleteDocument(document_id="d1", tenant="acme")),
    "Search": Search(tenant="acme", query="why"),
    "Passages": Passages(
        passages=(Passage(document_id="d1", chunk=0, title="T", text="x", score=0.5),), document_count=1
    ),
    "Heartbeat": Heartbeat(
        service="decode",
        instance_id="decode-0",
        epoch=7,
        state=ServiceState.READY,
        degraded=True,
        reasons=("slow",),
        host="h",
        pid=1,
        metrics_port=9100,
        started_at=1.0,
        sent_at=2.0,
        load={"streams": 1.0},
        model_card=CARD,
        kv_card=KV_CARD,
        residency_seq=3,
    ),
    "FleetPing": FleetPing(asked_by="console"),
}
