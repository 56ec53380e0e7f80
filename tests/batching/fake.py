"""A step whose arithmetic can be done by hand, in place of the device.

A token is a fixed function of all tokens before it in its request, read back from the rows that were written: a row
that is missing, stale, or someone else's changes it. No weights, no jax.
"""

import numpy as np

from batching.checks import CheckedScheduler
from batching.plan import FROM_DEVICE, PlanShapes, Rows, Sampled
from batching.policies import make_policy
from batching.prefix import Copy
from batching.request import Metrics, SamplingParams
from batching.sequence import SequenceState

VOCABULARY = 97


def next_token(history):
    """The token that follows `history`."""
    total = 0
    for position, token in enumerate(history):
        total = (total * 31 + (position + 1) * int(token) + 7) % 1_000_003
    return total % VOCABULARY


def alone(prompt, count):
    """What a request must generate, whoever runs beside it."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class FakeDevice:
    """Slots of rows, as the cache has them. Rows never written hold -999."""

    def __init__(self, slots: int, max_len: int) -> None:
        self.cache = np.full((slots, max_len), -999)
        self.last_token = np.full(slots, -999)

    def copy(self, copy: Copy) -> None:
        """The rows behind those that are asked for are lost: on the device others may come along."""
        rows = self.cache[copy.source, : copy.length].copy()
        assert (rows != -999).all(), "a row is copied that was never written"
        self.cache[copy.target] = -999
        self.cache[copy.target, : copy.length] = rows

    def step(self, rows: Rows) -> Sampled:
        B, S = self.cache.shape
        live = rows.slots < B
        assert ((rows.positions[live] >= 0) & (rows.positions[live] < S)).all(), "a row lies past the end of its slot"
        places = list(zip(rows.slots[live], rows.positions[live], strict=True))
        assert len(set(places)) == len(places), "two rows write the same place"
        tokens = rows.tokens.copy()
        tokens[live] = np.where(tokens == FROM_DEVICE, self.last_token[np.minimum(rows.slots, B - 1)], tokens)[live]
        self.cache[rows.slots[live], rows.positions[live]] = tokens[live]
        sampled = np.zeros(len(rows.sample_rows), np.int32)
        for index, (row, slot) in enumerate(zip(rows.sample_rows, rows.sample_slots, strict=True)):
            if slot < B:
                assert rows.slots[row] == slot
                history = self.cache[slot, : rows.positions[row] + 1]
                assert (history != -999).all(), "a row attends to one that was never written"
                sampled[index] = self.last_token[slot] = next_token(history)
        return Sampled(sampled)


def make_scheduler(
    slots=4, max_len=64, chunk_sizes=(16,), policy="continuous", max_queue=1000, block_q=16, reuse=False
):
    shapes = PlanShapes.choose(slots, chunk_sizes, block_q)
    clock = iter(range(10**9)).__next__
    return CheckedScheduler(
        shapes=shapes,
        max_len=max_len,
        policy=make_policy(policy),
        max_queue=max_queue,
        prefix_reuse=reuse,
        clock=clock,
    )


def sequence(name, prompt, **params):
    params = SamplingParams(**params)
    return SequenceState(name, tuple(prompt), params, 0, frozenset(params.stop_token_ids), Metrics(0.0))


def check_invariants(scheduler, device):
    held = [one.slot for one in scheduler.running]
    assert sorted(held + scheduler.free) == list(range(scheduler.shapes.slots)), "a slot leaked or is held twice"
    for one in scheduler.running:
        assert one.finish_reason is None
        assert one.computed <= scheduler.max_len
    for slot, rows in enumerate(device.cache):
        held = scheduler.prefixes.held(slot)
        assert rows[: len(held)].tolist() == list(held), "a slot does not hold what the scheduler thinks it does"
        rows[len(held) :] = -999  # nobody may count on these


def run_turn(scheduler, device):
    """Plan, compute, commit; the turn and the sequences that ended."""
    turn = scheduler.plan()
    for copy in turn.copies if turn else ():
        device.copy(copy)
    sampled = device.step(turn.plan.rows) if turn else Sampled(np.empty(0, np.int32))
    ended = [step.sequence for step in scheduler.commit(turn, sampled) if step.sequence.finish_reason]
    check_invariants(scheduler, device)
    return turn, ended
