"""How an engine serves (`EngineConfig`) and what it counted (`EngineStats`)."""

from dataclasses import dataclass

import jax.numpy as jnp

from batching.params import as_int, as_token_ids
from batching.plan import PlanShapes
from batching.policies import make_policy
from pallas_kernels.attention import IMPLEMENTATIONS

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class EngineConfig:
    """How requests are served. Raises ValueError at construction for a value that cannot be."""

    slots: int = 16
    max_len: int = 1024  # positions in a slot: prompt and generated tokens
    chunk_sizes: tuple[int, ...] = (128,)  # most prompt tokens a turn, in a few sizes that are compiled
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: as dtype
    policy: str = "continuous"
    max_queue: int = 1024
    prefix_reuse: bool = True  # rows that are in some slot already are not computed again; results are the same
    attention: str | None = None  # an implementation of `slot_attention`; None: the first that runs here

    def __post_init__(self) -> None:
        for name in ("slots", "max_len", "max_queue"):
            object.__setattr__(self, name, as_int(getattr(self, name), name))
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        object.__setattr__(self, "chunk_sizes", as_token_ids(self.chunk_sizes, "chunk_sizes"))
        for name in ("dtype", "cache_dtype"):
            if getattr(self, name) not in (*DTYPES, *((None,) if name == "cache_dtype" else ())):
                raise ValueError(f"{name} must be one of {sorted(DTYPES)}, not {getattr(self, name)!r}")
        if self.attention not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"attention must be one of {list(IMPLEMENTATIONS)}, not {self.attention!r}")
        if not isinstance(self.prefix_reuse, bool):
            raise ValueError(f"prefix_reuse must be true or false, not {self.prefix_reuse!r}")
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

    @property
    def busy_share(self) -> float:
        """Mean share of slots that hold a request, over turns."""
        return self.busy_slots / (self.turns * self.slots) if self.turns else 0.0

    @property
    def padding_share(self) -> float:
        """Share of computed rows that were padding."""
        return 1 - self.live_rows / self.rows if self.rows else 0.0
