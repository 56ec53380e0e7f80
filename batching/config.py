"""How an engine serves (`EngineConfig`) and what it counted (`EngineStats`)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import jax.numpy as jnp

from batching.params import as_int, as_token_ids
from batching.plan import PlanShapes
from batching.policies import make_policy
from batching.sequence import SequenceState
from batching.turn import Progress, Turn, TurnTimes
from pallas_kernels.attention import IMPLEMENTATIONS

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class EngineConfig:
    """How requests are served. Raises ValueError at construction for a value that cannot be."""

    slots: int = 16  # requests that run at once
    max_len: int = 1024  # positions in a slot: prompt and generated tokens
    chunk_sizes: tuple[int, ...] = (128,)  # most prompt tokens a turn, in a few sizes that are compiled
    dtype: str = "float32"  # of weights and arithmetic; float32 or bfloat16
    cache_dtype: str | None = None  # None: as dtype
    policy: str = "continuous"  # who gets the next turn: a name of batching/policies.py, or path.py:Name
    max_queue: int = 1024  # samples that wait for a slot; there is no room for further ones
    run_ahead: int = 1  # turns that the device may have while their tokens are not read; results are the same
    prefix_reuse: bool = True  # rows that are in some slot already are not computed again; results are the same
    deterministic: bool = False  # logprobs too are the same to the last bit, whatever runs beside a request
    checks: bool = False  # verify every turn, and stop at the first that is wrong; see batching/checks.py
    attention: str | None = None  # an implementation of `slot_attention`; None: the first that runs here

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("max_len", 1), ("max_queue", 1), ("run_ahead", 0)):
            object.__setattr__(self, name, as_int(getattr(self, name), name))
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        object.__setattr__(self, "chunk_sizes", as_token_ids(self.chunk_sizes, "chunk_sizes"))
        for name in ("dtype", "cache_dtype"):
            if getattr(self, name) not in (*DTYPES, *((None,) if name == "cache_dtype" else ())):
                raise ValueError(f"{name} must be one of {sorted(DTYPES)}, not {getattr(self, name)!r}")
        if self.attention not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"attention must be one of {list(IMPLEMENTATIONS)}, not {self.attention!r}")
        for name in ("prefix_reuse", "deterministic", "checks"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        make_policy(self.policy)
        PlanShapes.choose(self.slots, self.chunk_sizes, block_q=1)


@dataclass
class EngineStats:
    """Counts since the engine was made or `reset_stats`; shares are of slots or rows, not of time."""

    turns: int = 0
    slots: int = 0  # of the engine
    busy_slots: int = 0  # summed over turns
    rows: int = 0  # computed, padding included
    live_rows: int = 0
    prompt_tokens: int = 0  # of the requests, whether computed or found in a slot
    cached_tokens: int = 0  # of these, found
    generated_tokens: int = 0
    _until: float = field(default=-math.inf, repr=False)  # when the last turn was committed
    wasted_rows: int = 0  # live ones, sampled for requests that had ended when their tokens were read
    preemptions: int = 0  # of requests that ended
    wall_s: float = 0.0  # while there was a turn somewhere between its planning and its commit
    host_s: float = 0.0  # planning, launching, interpreting and delivering, whether the device was busy or not
    gap_s: float = 0.0  # at most so long the device waited for the host

    def count_launch(self, turn: Turn, gap_s: float) -> None:
        self.turns += 1
        self.busy_slots += turn.busy
        self.rows += len(turn.plan.rows.tokens)
        self.live_rows += turn.plan.live_rows
        self.gap_s += gap_s

    def count_commit(self, progress: Iterable[Progress]) -> None:
        self.generated_tokens += sum(token is not None for _, token in progress)

    def count_end(self, sequence: SequenceState) -> None:
        self.prompt_tokens += min(max(sequence.computed, sequence.reached), len(sequence.prompt))
        self.cached_tokens += sequence.cached
        self.preemptions += sequence.metrics.preemptions

    def count_times(self, times: TurnTimes) -> None:
        self.host_s += times.launched - times.plan + times.committed - times.ready
        self.wall_s += times.committed - max(times.plan, self._until)
        self._until = times.committed

    @property
    def busy_share(self) -> float:
        """Mean share of slots that hold a request, over turns."""
        return self.busy_slots / (self.turns * self.slots) if self.turns else 0.0

    @property
    def padding_share(self) -> float:
        """Share of computed rows that were padding."""
        return 1 - self.live_rows / self.rows if self.rows else 0.0

    @property
    def gap_share(self) -> float:
        """Of the time with turns, at most so much the device waited for the host."""
        return self.gap_s / self.wall_s if self.wall_s else 0.0
