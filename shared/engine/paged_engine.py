"""Pure: what both engines share. Claims, plans steps, seals blocks, says tokens, ends requests. No tensors, no clock.

The part that differs is a Backend: where the bytes of a block are, and how a step's next tokens are chosen.

Rules that the rest of the system relies on:

* Room: a request needs ceil(tokens with K and V / block size) blocks, where the last token it can ever sample has none.
* Window (failure catalogue F-CTX-01): prompt tokens + tokens still to be sampled <= context_tokens, counted as the
  engine counts them; the error says all three numbers. With `prefill_only`, prompt tokens <= context_tokens.
* The prompt's last token is always computed (F-TIE-04, F-TIE-07): at most (length - 1) // block_tokens blocks come
  from memory.
* A block is sealed when the K and V of all its tokens are computed or loaded, so the answer becomes reusable like the
  prompt, up to the last sampled token, which has none yet (F-TOK-02).
* A token that ends the answer is said like any other, then the request finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from proto.chat import FinishReason, Grammar
from proto.ids import ROOT_KEY, BlockKey, NamespaceDigest
from shared.block_hash import chain_keys
from shared.engine.batch import Broken, Choice, Chunk, GrammarState, Phase, StepBudget, plan_step
from shared.engine.batch import Sequence as Running
from shared.engine.block_table import BlockTable
from shared.engine.protocol import (
    BadGrammar,
    BadLoad,
    BlocksEvicted,
    BlocksSealed,
    Buffer,
    Claim,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    NeverFits,
    PrefillProgress,
    RequestFailed,
    RequestFinished,
    SealedBlock,
    TokensEmitted,
)

# Steps kept for the price model: about the last two seconds of a busy worker.
RECENT_STEPS_COUNT: Final = 64


class Backend(Protocol):
    """Bytes and numbers behind a PagedEngine."""

    def export(self, block: int) -> bytes:
        """The body of a block."""
        ...

    def load(self, block: int, body: Buffer) -> None:
        """Overwrite a block; the size has been checked."""
        ...

    def scrub(self, blocks: Sequence[int]) -> None:
        """Overwrite these blocks with zeros."""
        ...

    def forward(self, chunks: Sequence[Chunk]) -> Sequence[Choice | Broken | None]:
        """Compute K and V of the chunks; for those that choose, the next token. Any chunk may turn out Broken."""
        ...


class GrammarSource(Protocol):
    """Makes grammar states; see shared/engine/grammar.py."""

    def start(self, grammar: Grammar, said: Sequence[int]) -> GrammarState:
        """The state after `said`. Raises BadGrammar."""
        ...


class PagedEngine:
    """Implements protocol.Engine over a backend."""

    def __init__(
        self,
        info: EngineInfo,
        backend: Backend,
        *,
        clock: Callable[[], float],
        budget: StepBudget,
        grammars: GrammarSource | None,
    ) -> None:
        self._info = info
        self._backend = backend
        self._clock = clock
        self._budget = budget
        self._grammars = grammars
        self._table = BlockTable(blocks_total=info.blocks_total)
        # In order of service: prompts that had a turn go to the end.
        self._sequences: dict[str, Running] = {}
        self._events: list[EngineEvent] = []
        self._recent: deque[tuple[int, int, int, float]] = deque(maxlen=RECENT_STEPS_COUNT)

    @property
    def info(self) -> EngineInfo:
        """See Engine."""
        return self._info

    def claim(self, request: EngineRequest) -> Claim:
        """See Engine."""
        _check(request, self._info.vocab_size)
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is already here")
        blocks_needed = self._blocks_needed(request)
        said = request.tokens[len(request.tokens) - request.emitted :]
        grammar, over = self._grammar(request, said)
        size = self._info.block_tokens
        keys = list(chain_keys(NamespaceDigest(request.namespace), request.tokens, size))
        usable = (len(request.tokens) - 1) // size
        claimed = self._table.claim(request.request_id, keys[:usable], blocks_needed=blocks_needed)
        if claimed.evicted:
            self._events.append(BlocksEvicted(claimed.evicted))
        self._sequences[request.request_id] = Running(
            request=request,
            tokens=list(request.tokens),
            keys=keys,
            block_tokens=size,
            blocks=self._table.blocks(request.request_id),
            grammar=grammar,
            already_over=over,
            computed=claimed.resident_count * size,
            resident_blocks=claimed.resident_count,
        )
        return Claim(keys=tuple(keys), resident_blocks=claimed.resident_count, usable_blocks=usable)

    def load(self, request_id: str, block_index: int, body: Buffer) -> None:
        """See Engine."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.phase is not Phase.CLAIMED:
            raise BadLoad(f"request {request_id} is not waiting for blocks")
        expected = sequence.resident_blocks + sequence.loaded_blocks
        usable = (len(sequence.request.tokens) - 1) // self._info.block_tokens
        if block_index != expected or block_index >= usable:
            raise BadLoad(f"block {block_index} of request {request_id}: the next one is {expected} of {usable}")
        size_bytes = memoryview(body).nbytes
        if size_bytes != self._info.block_bytes:
            raise BadLoad(f"a body of {size_bytes} bytes, blocks have {self._info.block_bytes}")
        self._backend.load(sequence.blocks[block_index], body)
        sequence.loaded_blocks += 1
        sequence.computed += self._info.block_tokens

    def start(self, request_id: str) -> None:
        """See Engine. Raises ValueError on an id that is not claimed."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.phase is not Phase.CLAIMED:
            raise ValueError(f"request {request_id} is not waiting to start")
        sequence.phase = Phase.PREFILLING
        sequence.started_at = self._clock()
        sequence.first_suspect_block = sequence.resident_blocks
        self._seal(sequence)

    def cancel(self, request_id: str) -> None:
        """See Engine."""
        if self._sequences.pop(request_id, None) is not None:
            self._table.release(request_id)

    def step(self) -> list[EngineEvent]:
        """See Engine."""
        began = self._clock()
        running = [sequence for sequence in self._sequences.values() if sequence.phase is not Phase.CLAIMED]
        for sequence in running:
            self._adopt(sequence)
        chunks = plan_step(running, self._budget)
        assert chunks or not running, "a step always makes progress"
        if chunks:
            prefill_tokens = sum(chunk.count for chunk in chunks if chunk.sequence.phase is Phase.PREFILLING)
            decoding = sum(chunk.sequence.phase is Phase.DECODING for chunk in chunks)
            context_tokens = sum(chunk.start + chunk.count for chunk in chunks)
            choices = self._backend.forward(chunks)
            ended = self._clock()
            for chunk, choice in zip(chunks, choices, strict=True):
                self._advance(chunk, choice, now=ended)
            self._recent.append((prefill_tokens, decoding, context_tokens, ended - began))
        events, self._events = self._events, []
        return events

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return bool(self._events) or any(item.phase is not Phase.CLAIMED for item in self._sequences.values())

    def export(self, key: BlockKey) -> bytes | None:
        """See Engine."""
        block = self._table.find(key)
        return None if block is None else self._backend.export(block)

    def resident(self) -> Sequence[SealedBlock]:
        """See Engine."""
        return self._table.resident()

    def stats(self) -> EngineStats:
        """See Engine."""
        phases = [sequence.phase for sequence in self._sequences.values()]
        return EngineStats(
            blocks_total=self._table.blocks_total,
            blocks_free=self._table.free_count,
            blocks_cached=self._table.cached_count,
            blocks_held=self._table.held_count,
            requests_claimed=phases.count(Phase.CLAIMED),
            requests_prefilling=phases.count(Phase.PREFILLING),
            requests_decoding=phases.count(Phase.DECODING),
            prefill_tokens_waiting=sum(
                sequence.pending for sequence in self._sequences.values() if sequence.phase is Phase.PREFILLING
            ),
            recent_steps=tuple(self._recent),
        )

    def check_integrity(self) -> None:
        """See Engine."""
        self._table.check_integrity()
        size = self._info.block_tokens
        for request_id, sequence in self._sequences.items():
            assert sequence.request.request_id == request_id
            assert sequence.blocks is self._table.blocks(request_id)
            assert 0 <= sequence.computed < sequence.length <= len(sequence.blocks) * size + 1
            sealed = self._table.sealed_count(request_id)
            full = sequence.computed // size
            assert sealed == (sequence.resident_blocks if sequence.phase is Phase.CLAIMED else full)
            assert sequence.phase is not Phase.DECODING or sequence.pending == 1

    def _blocks_needed(self, request: EngineRequest) -> int:
        """Blocks that hold every token of the request that will ever have K and V. Raises NeverFits."""
        prompt = len(request.tokens)
        more = 0 if request.prefill_only else max(request.sampling.max_tokens - request.emitted, 0)
        window = self._info.context_tokens
        if prompt + more > window:
            message = f"{prompt} prompt tokens and up to {more} more are over the window of {window} tokens"
            raise NeverFits(message, limit_tokens=window, asked_tokens=prompt + more)
        size = self._info.block_tokens
        needed = -(-(prompt + max(more - 1, 0)) // size)
        if needed > self._info.blocks_total:
            limit = self._info.blocks_total * size
            message = f"{prompt} prompt tokens and up to {more} more need {needed} blocks, the pool has {limit // size}"
            raise NeverFits(message, limit_tokens=limit, asked_tokens=prompt + more)
        return needed

    def _grammar(self, request: EngineRequest, said: tuple[int, ...]) -> tuple[GrammarState | None, bool]:
        """The grammar's state, and whether the answer that earlier attempts gave is complete already."""
        if request.prefill_only:
            return None, True
        last = said[-1:]
        over = request.emitted >= request.sampling.max_tokens or bool(last and _ends(request, last[0]))
        if request.grammar is None or over:
            return None, over
        if self._grammars is None:
            raise BadGrammar("this engine has no grammars")
        state = self._grammars.start(request.grammar, said)
        return state, state.ended

    def _adopt(self, sequence: Running) -> None:
        """Skip what another sequence has sealed since the claim: prompts that share a prefix compute it once."""
        size = self._info.block_tokens
        while sequence.phase is Phase.PREFILLING and sequence.computed % size == 0:
            index = sequence.computed // size
            if index >= (len(sequence.request.tokens) - 1) // size:
                return
            if not self._table.join(sequence.request.request_id, sequence.keys[index]):
                return
            sequence.computed += size
            sequence.resident_blocks += 1

    def _seal(self, sequence: Running) -> None:
        """Seal what is full by now and say which blocks are new here."""
        request = sequence.request
        size = self._info.block_tokens
        new = []
        for index in range(self._table.sealed_count(request.request_id), sequence.computed // size):
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            parent = sequence.key(index - 1) if index else ROOT_KEY
            sealed = SealedBlock(sequence.key(index), parent, tokens, request.namespace)
            if self._table.seal(request.request_id, sealed):
                new.append(sealed)
        if new:
            self._events.append(BlocksSealed(request.request_id, tuple(new)))

    def _advance(self, chunk: Chunk, choice: Choice | Broken | None, *, now: float) -> None:
        """Book one chunk that was run."""
        sequence, request = chunk.sequence, chunk.sequence.request
        chose = chunk.chooses
        assert choice is not None if chose else not isinstance(choice, Choice)
        sequence.computed += chunk.count
        if isinstance(choice, Broken):
            self._fail(sequence, choice)
            return
        self._seal(sequence)
        if sequence.phase is Phase.PREFILLING:
            memory = (sequence.resident_blocks + sequence.loaded_blocks) * self._info.block_tokens
            total = len(request.tokens) - memory
            self._events.append(PrefillProgress(request.request_id, sequence.computed - memory, total))
            if not sequence.pending:
                sequence.phase = Phase.DECODING
                sequence.prompt_done_at = now
            else:
                del self._sequences[request.request_id]
                self._sequences[request.request_id] = sequence
        if choice is not None:
            self._say(sequence, choice, now=now)
        elif not sequence.pending:
            self._finish(sequence, self._reason_without_words(request), now=now)

    def _say(self, sequence: Running, choice: Choice, *, now: float) -> None:
        """Emit one token, then go on or end."""
        request = sequence.request
        first = sequence.next_index
        ends = _ends(request, choice.token)
        if sequence.grammar is not None and not ends and not sequence.grammar.advance(choice.token):
            self._fail(sequence, Broken(f"token {first} ({choice.token}) is not in the grammar", kv_suspect=False))
            return
        sequence.tokens.append(choice.token)
        logprobs = None if choice.logprob is None else (choice.logprob,)
        self._events.append(TokensEmitted(request.request_id, first, (choice.token,), logprobs))
        if ends or (sequence.grammar is not None and sequence.grammar.ended):
            self._finish(sequence, FinishReason.STOP, now=now)
        elif sequence.next_index >= request.sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, now=now)

    def _finish(self, sequence: Running, reason: FinishReason, *, now: float) -> None:
        request, size = sequence.request, self._info.block_tokens
        resident, loaded = sequence.resident_blocks * size, sequence.loaded_blocks * size
        self._events.append(
            RequestFinished(
                request_id=request.request_id,
                reason=reason,
                generated=sequence.generated,
                resident_tokens=resident,
                loaded_tokens=loaded,
                computed_tokens=len(request.tokens) - resident - loaded,
                prefill_s=sequence.prompt_done_at - sequence.started_at,
                decode_s=now - sequence.prompt_done_at,
            )
        )
        self.cancel(request.request_id)

    def _fail(self, sequence: Running, broken: Broken) -> None:
        request_id = sequence.request.request_id
        self._events.append(RequestFailed(request_id, broken.message))
        del self._sequences[request_id]
        if not broken.kv_suspect:
            self._table.release(request_id)
            return
        blocks, sealed = list(sequence.blocks), self._table.sealed_count(request_id)
        dropped = self._table.discard(request_id, first_index=sequence.first_suspect_block)
        # What is free now and was written: the next owner reads a block beyond its own tokens, where a mask hides any
        # number but one that is none.
        self._backend.scrub(blocks[sealed - len(dropped) :])
        if dropped:
            self._events.append(BlocksEvicted(dropped))

    @staticmethod
    def _reason_without_words(request: EngineRequest) -> FinishReason:
        """Why a request ends that was to say nothing: only a prompt, or an answer that was complete before."""
        if request.prefill_only or request.emitted >= request.sampling.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.STOP


def _ends(request: EngineRequest, token: int) -> bool:
    """The token ends the answer."""
    if token in request.sampling.stop_token_ids:
        return True
    return token in request.eos_token_ids and not request.sampling.ignore_eos


def _check(request: EngineRequest, vocab_size: int) -> None:
    """Raises ValueError on a request that makes no sense."""
    if not request.tokens:
        raise ValueError("a request needs at least one token")
    if not 0 <= request.emitted <= len(request.tokens):
        raise ValueError(f"{request.emitted} emitted tokens in a prompt of {len(request.tokens)}")
    for name, tokens in (("tokens", request.tokens), ("forced", request.forced)):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(f"{name} has an id outside the vocabulary of {vocab_size}")
