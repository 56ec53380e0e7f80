"""The faults that engines have had, planted one by one: random schedules find each of them, with no other check on.

In one program shape, since a fault costs the compilation of every program.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings

from batching import step as step_module
from batching.scheduler import Scheduler
from model import layers
from tests.batching.schedules import Programs, Schedule, alone, check, schedules, serve

SHAPE = (3, (16,))


def attention_of(change):
    """Attention, and the write before it, get other slots and positions than they should."""
    real = layers.slot_attention

    def changed(q, cache, slots, positions, **how):
        return real(q, cache, *change(slots, positions, cache[0].shape), **how)

    return mock.patch.object(layers, "slot_attention", changed)


def mask_off_by_one():
    return attention_of(lambda slots, positions, shape: (slots, jnp.minimum(positions + 1, shape[2] - 1)))


def stale_rows_in_sight():
    """Of all rows of the slot, whoever wrote them."""
    return attention_of(lambda slots, positions, shape: (slots, jnp.full_like(positions, shape[2] - 1)))


def clamped_write():
    """A padding row's slot, one past the last, becomes the last."""
    real = layers.write_rows

    def changed(cache, k, v, slots, positions, **how):
        return real(cache, k, v, jnp.minimum(slots, cache[0].shape[0] - 1), positions, **how)

    return mock.patch.object(layers, "write_rows", changed)


def shared_random_key():
    """The draws of a turn differ by their row, not by their request's seed."""
    real = step_module.settings_of

    def changed(rows):
        seeds = jnp.stack([jnp.arange(len(rows.words), dtype=jnp.uint32)] * 2, axis=1)
        return real(rows)._replace(seeds=seeds)

    return mock.patch.object(step_module, "settings_of", changed)


def stale_slot_map():
    """A turn's tokens go to whoever has the slots when they are read."""
    real = Scheduler.commit

    def changed(self, turn, sampled):
        if turn is not None:
            owners = {one.slot: one for one in self.running}
            slots = turn.plan.rows.sample_slots.tolist()
            turn = turn._replace(
                sampled=tuple(owners.get(slot, one) for slot, one in zip(slots, turn.sampled, strict=False))
            )
        return real(self, turn, sampled)

    return mock.patch.object(Scheduler, "commit", changed)


@pytest.fixture
def compiled():
    jax.clear_caches()  # what was traced without the fault
    made = Programs()
    yield made
    made.clear()


def engine_for(compiled, schedule):
    with mock.patch("batching.runner.all_programs_agree", return_value=False):
        return compiled.engine(schedule.config(deterministic=True, checks=False))


@pytest.fixture(scope="module")
def undisturbed():
    made = Programs()
    yield alone(engine_for(made, Schedule(SHAPE, "continuous", 0, False, (), ())))
    made.clear()


def examples(compiled, undisturbed):
    """Serves up to 300 random schedules; how many it took until one failed."""
    tried = 0

    @settings(max_examples=300, deadline=None, database=None, phases=[Phase.generate])
    @given(schedules(shapes=[SHAPE]))
    def run(schedule):
        nonlocal tried
        tried += 1
        check(serve(engine_for(compiled, schedule), schedule), undisturbed, tolerance=0)

    try:
        run()
    except AssertionError:
        return tried
    return None


@pytest.mark.parametrize(
    "fault", [mask_off_by_one, stale_rows_in_sight, clamped_write, shared_random_key, stale_slot_map]
)
def test_a_fault_is_found(compiled, undisturbed, fault):
    with fault():
        assert examples(compiled, undisturbed) is not None


def test_without_a_fault_there_is_nothing_to_find(compiled, undisturbed):
    assert examples(compiled, undisturbed) is None
