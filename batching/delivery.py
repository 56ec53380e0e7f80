"""What turns bring, on its way to those who wait for it."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batching.request import Delta, Output
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from batching.text import TextStream
from batching.turn import Progress
from model.tokenizer import Tokenizer


@dataclass
class _Ticket:
    """Who waits for a sequence, and its text so far."""

    deliver: Callable[[Delta], None] | None
    text: TextStream | None
    told: int = 0  # logprobs that were in pieces


class Delivery:
    """Puts tokens, their text and ends where they are waited for, and ends requests at stop strings.

    A sequence's Deltas go to the function that it was expected with, or else its Output goes to an outbox.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, scheduler: Scheduler, on_end: Callable[[SequenceState], None]
    ) -> None:
        """The scheduler is told of a request whose text has come to a stop string, before the next turn is planned.

        `on_end` is called with every sequence that ends while somebody waits for it.
        """
        self._tokenizer, self._scheduler, self._on_end = tokenizer, scheduler, on_end
        self._tickets: dict[SequenceState, _Ticket] = {}
        self._progress: deque[Progress] = deque()
        self._outbox: list[Output] = []

    @property
    def waiting(self) -> int:
        """For how many sequences somebody waits."""
        return len(self._tickets)

    @property
    def unfinished(self) -> bool:
        """Whether there is something to put or to take, without a further turn."""
        return bool(self._progress or self._outbox)

    def expect(self, sequence: SequenceState, deliver: Callable[[Delta], None] | None) -> None:
        text = None if self._tokenizer is None else TextStream(self._tokenizer, sequence.params.stop)
        self._tickets[sequence] = _Ticket(deliver, text)

    def abandon(self, sequence: SequenceState) -> bool:
        """Nobody waits for a sequence any more; whether anybody did."""
        return self._tickets.pop(sequence, None) is not None

    def take(self) -> list[Output]:
        """What is in the outbox."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def put(self, progress: Iterable[Progress]) -> None:
        """One after the other. After an exception the next call goes on behind the one that it came over."""
        self._progress += progress
        while self._progress:
            one = self._progress.popleft()
            try:
                self._put(*one)
            except BaseException as error:
                if one.sequence in self._tickets:  # its text may lack the token: it ends, and that is still owed
                    self._scheduler.fail(one.sequence, f"its delivery broke off: {type(error).__name__}: {error}")
                    self._progress.appendleft(Progress(one.sequence, None))
                raise

    def _put(self, sequence: SequenceState, token: int | None) -> None:
        ticket = self._tickets.get(sequence)
        if ticket is None:  # of a stream that was closed
            return
        piece = None if ticket.text is None else self._read(sequence, token, ticket.text)
        told = sequence.logprobs[ticket.told :] if sequence.params.logprobs is not None else None
        ticket.told = len(sequence.logprobs)
        output = None
        if sequence.finish_reason is not None:
            output = self._output(sequence, None if ticket.text is None else ticket.text.text)
            self._on_end(sequence)
            del self._tickets[sequence]
        if ticket.deliver is None:
            self._outbox += [] if output is None else [output]
            return
        tokens = [] if token is None else [token]
        try:
            ticket.deliver(Delta(sequence.id, tokens, piece, output, sequence.index, told))
        except Exception:  # whoever waited is not there any more
            logging.getLogger(__name__).exception("a consumer of request %s failed", sequence.id)
            if self.abandon(sequence) and sequence.finish_reason is None:
                self._scheduler.fail(sequence, "its consumer failed")

    def _output(self, sequence: SequenceState, text: str | None) -> Output:
        """Of a sequence that has ended; if it cannot be made, one that says why."""
        try:
            return sequence.end(text)
        except Exception as error:  # of this request, and nobody else's
            self._scheduler.fail(sequence, f"{type(error).__name__}: {error}")
            return Output(
                id=sequence.id,
                token_ids=sequence.output,
                text=text,
                finish_reason="error",
                prompt_tokens=len(sequence.prompt),
                completion_tokens=len(sequence.output),
                index=sequence.index,
                seed=sequence.seed,
                error=sequence.error,
                unservable=sequence.unservable,
                metrics=sequence.metrics,
            )

    def _read(self, sequence: SequenceState, token: int | None, text: TextStream) -> str:
        """The piece of text that a token or the end brings. A stop string ends the request."""
        shown = None if token in sequence.stop_ids else token  # the token that stops a request has no text
        # As in vLLM, and as with stop tokens: the first `min_tokens` tokens never end a request.
        may_stop = token is not None and len(sequence.output) > sequence.params.min_tokens
        try:
            piece = text.push(shown, last=sequence.finish_reason is not None, may_stop=may_stop)
        except Exception as error:  # of this request, and nobody else's
            self._scheduler.fail(sequence, f"{type(error).__name__}: {error}")
            return ""
        if text.stop_reason is not None and sequence.finish_reason != "error":
            self._scheduler.stop(sequence, text.stop_reason)
        return piece
