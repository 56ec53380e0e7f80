"""The text of one request as its tokens come, up to the first stop string."""

from collections.abc import Sequence

from model.tokenizer import Detokenizer, Tokenizer


class TextStream:
    """Pieces of text that are final: joined they are the request's text, and no stop string is in them.

    The request ends with the first token after which its text holds a stop string. The text is cut where the earliest
    one starts; of several that start there, the longest is the reason. What could still become a stop string (the
    longest end of the text that is a proper start of one) is held back until it cannot.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stop_reason: str | None = None  # the stop string that was found
        self._detokenizer, self._stop = Detokenizer(tokenizer), tuple(stop)
        self._pieces: list[str] = []
        self._held = ""  # certain, but not yet a piece
        self._early = ""  # what the first tokens had from the start of `_held` on: a match within it does not count

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self._pieces)

    def push(self, token: int | None, *, last: bool = False, may_stop: bool = True) -> str:
        """The piece that a token brings.

        Args:
            token: None for one that has no text.
            last: nothing follows; bytes that are no character are now known to be none.
            may_stop: whether a stop string that this token completes counts; if not, it never will.
        """
        if self.stop_reason is not None:
            return ""
        self._held += "" if token is None else self._detokenizer.push(token)
        self._held += self._detokenizer.flush() if last else ""
        piece = self._search(last, may_stop) if self._stop else self._take(len(self._held))
        self._pieces.append(piece)
        return piece

    def _search(self, last: bool, may_stop: bool) -> str:
        # What the detokenizer holds is in the text if the request ends here.
        text = self._held if last else self._held + self._detokenizer.preview()
        found = self._first(text) if may_stop else None
        if found is not None:
            start, self.stop_reason = found
            return text[:start]
        # Kept if only the start of a character came: until its other bytes come, `preview` hides those before it.
        if not may_stop and not self._early.startswith(text):
            self._early = text
        kept = 0 if last else max(overlap(self._held, stop) for stop in self._stop)
        return self._take(len(self._held) - kept)

    def _take(self, count: int) -> str:
        piece, self._held = self._held[:count], self._held[count:]
        self._early = self._early[count:]
        return piece

    def _first(self, text: str) -> tuple[int, str] | None:
        """Where the earliest stop string starts, and which it is."""
        early = common(self._early, text)  # later tokens may have changed the end of it
        starts = ((text.find(stop, max(0, early - len(stop) + 1)), -len(stop), stop) for stop in self._stop)
        found = [start for start in starts if start[0] >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper start of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


def common(one: str, other: str) -> int:
    """The length of the start that they share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
