"""`Runner`: the weights, the state and every compiled program of an engine; it launches turns."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from batching.config import DTYPES, EngineConfig
from batching.grammar import slot_masks
from batching.intake import slot_rows
from batching.plan import PlanShapes, Sampled
from batching.policies import make_policy
from batching.programs import compile_copy, compile_programs, compile_sampling
from batching.sequence import SequenceState
from batching.step import EngineState, init_state, split_model
from batching.turn import Turn
from model.config import ModelConfig
from model.kv_cache import cache_bytes
from model.logits import SamplingState
from model.transformer import Transformer
from pallas_kernels import cpu
from pallas_kernels.attention import IMPLEMENTATIONS, choose_implementation


class Runner:
    """Turns in, arrays out, perhaps still being computed: nothing here waits for the device."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        on_compile: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """Allocates the state and compiles every program: nothing compiles afterwards.

        Args:
            on_compile: called with (programs compiled, programs in all, seconds of the last), first with none compiled.
        """
        if config.max_len > model.config.max_positions:
            raise ValueError(f"max_len {config.max_len} exceeds the model's {model.config.max_positions} positions")
        if model.embed.weight.dtype != DTYPES[config.dtype]:
            raise ValueError(f"dtype is {config.dtype}, but the model's weights are {model.embed.weight.dtype}")
        self.config, self.max_len = model.config, config.max_len
        self.cache_dtype = DTYPES[config.cache_dtype or config.dtype]
        self.attention = choose_implementation(
            config.attention,
            dtype=DTYPES[config.dtype],
            cache_dtype=self.cache_dtype,
            head_dim=model.config.head_dim,
            heads=model.config.num_heads,
            kv_heads=model.config.num_kv_heads,
        )
        block_q = IMPLEMENTATIONS[self.attention].block_q
        # One program computes a row the same whatever is beside it; where all programs do, all may be used.
        one = config.deterministic and not all_programs_agree(self.attention, model.config, config)
        self.shapes = PlanShapes.choose(config.slots, config.chunk_sizes, block_q, one=one)
        self.copies = config.prefix_reuse
        self.check(config)
        self._state: EngineState | None = None
        self.graph, self.weights = split_model(model)
        self.programs = compile_programs(self.graph, self.weights, self.state, self.shapes, self.attention, on_compile)
        self.sampling_programs = compile_sampling(self.state.sampling)
        self._copy_prefix = compile_copy(self.state) if self.copies else None
        self.cache_bytes = cache_bytes(self.state.cache)
        self.weight_bytes = sum(weight.nbytes for weight in self.weights)

    def check(self, config: EngineConfig) -> None:
        """Raises ValueError where a configuration asks for what these programs cannot do."""
        if config.prefix_reuse and not self.copies:
            raise ValueError("prefix_reuse was off when the programs were compiled: there is none that copies rows")
        if not config.deterministic or self.shapes.block_q == 1:
            return
        # A token of an output comes through the kernel for decode rows; as part of a prompt, or computed again, not.
        reason = f"attention {self.attention!r} has other kernels for prompt chunks than for decode rows"
        if config.prefix_reuse:
            raise ValueError(f"deterministic goes without prefix_reuse here: {reason}")
        if getattr(make_policy(config.policy), "preempts", True):
            raise ValueError(f"deterministic goes without the policy {config.policy!r} here: {reason}")

    @property
    def model(self) -> Transformer:
        """The model, for another engine on the same weights."""
        return self.graph.model(self.weights)

    @property
    def state(self) -> EngineState:
        """What the turns launched so far leave on the device; made afresh where a failure took it."""
        if self._state is None:
            self._state = init_state(
                self.config,
                slots=self.shapes.slots,
                max_len=self.max_len,
                cache_dtype=self.cache_dtype,
                implementation=self.attention,
            )
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state

    def reset(self) -> None:
        """Let go of a state that is in doubt. A new one is allocated when it is needed."""
        self._state = None

    def launch(self, turn: Turn, fail: Callable[[SequenceState, str], None]) -> Sampled:
        """Have a turn computed; what will come of it.

        `fail` is told of a request of which the host can't tell the device what its draws need; its rows mean nothing.
        """
        admitted = [one for one in turn.admitted if one.uses_slot_rows]
        for sequence, rows in _contained(lambda one: slot_rows(one, self.config.vocab_size), admitted, fail):
            assert sequence.slot is not None
            self._set_sampling(self.sampling_programs.set_slot, np.int32(sequence.slot), rows)
        for copy in turn.copies:
            assert self._copy_prefix is not None
            self.state = self._copy_prefix(self.state, *np.asarray(copy, np.int32))
        if bound := [one for one in turn.sampled if one.grammar is not None and one.slot is not None]:
            self._set_masks(bound, fail)
        self.state, sampled = self.programs[turn.plan.shape](self.weights, self.state, turn.plan.rows)
        return sampled

    def _set_masks(self, bound: list[SequenceState], fail: Callable[[SequenceState, str], None]) -> None:
        """All at once; one by one if that fails, to find out whose fault it is."""
        try:
            masks = [slot_masks(bound, self.shapes.slots)]
        except Exception:
            alone = _contained(lambda one: slot_masks([one], self.shapes.slots), bound, fail)
            masks = [mask for _, mask in alone]
        for mask in masks:
            self._set_sampling(self.sampling_programs.set_masks, *mask)

    def _set_sampling(self, program: Callable[..., SamplingState], *arguments: Any) -> None:
        self.state = replace(self.state, sampling=program(self.state.sampling, *arguments))


def all_programs_agree(attention: str, model: ModelConfig, config: EngineConfig) -> bool:
    """Whether a row has the same bits in every program: where the kernels for CPUs compute all that is not the same
    for any number of rows. XLA's exact GELU is not."""
    return attention == "cpu" and cpu.rows_invariant(DTYPES[config.dtype]) and model.activation != "gelu"


def ready(sampled: Sampled) -> bool:
    """Whether a turn has been computed."""
    is_ready = getattr(sampled.tokens, "is_ready", None)  # NumPy arrays are
    return is_ready is None or is_ready()


def _contained[T](
    function: Callable[[SequenceState], T],
    sequences: Iterable[SequenceState],
    fail: Callable[[SequenceState, str], None],
) -> list[tuple[SequenceState, T]]:
    """The function's results, without the sequences for which it raised."""
    results = []
    for sequence in sequences:
        try:
            results.append((sequence, function(sequence)))
        except Exception as error:
            fail(sequence, f"{type(error).__name__}: {error}")
    return results
