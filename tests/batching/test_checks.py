"""Turns that are verified: silent whatever happens, loud about each fault that is planted, and every report replays."""

import json
import re
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batching import AsyncEngine
from batching.checks import IntegrityError, replay
from batching.prefix import Prefixes
from batching.scheduler import Scheduler
from batching.sequence import SequenceState
from tests.batching.async_tools import requests_of, run
from tests.batching.fake import FakeDevice, make_scheduler, sequence
from tests.batching.fake_engine import fake_engine, finish, letters, prompt_of, request_of
from tests.batching.test_grammar import byte_level
from tests.batching.traffic import Hesitant, S, Traffic, again, state


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_whatever_happens_is_right_and_replays(seed, steps):
    """In the middle of it and in the end."""
    traffic = Traffic(seed).serve(steps)
    assert state(again(traffic.scheduler)) == state(traffic.scheduler)
    traffic.finish()
    assert state(again(traffic.scheduler)) == state(traffic.scheduler)


def test_the_traffic_is_of_every_kind():
    seen = set()
    for seed in range(60):
        scheduler = Traffic(seed).serve().finish().scheduler
        seen |= {event[0] for event in scheduler._events} | {how for _, how in scheduler._ends.values()}
        seen |= {"drops" for kind, told, _ in scheduler._events if kind == "commit" and told and told[0] > 0}
        for one in scheduler._numbers:
            seen |= {one.finish_reason, type(one.stop_reason), (one.error or "")[:15]}
            marks = {"found": one.cached, "scored": one.max_tokens < 1, "preempted": one.metrics.preemptions}
            seen |= {name for name, mark in marks.items() if mark}
    assert seen >= {"cancel", "stop", "fail", "fail running", "policy", "prefix reuse", "drops"}
    assert seen >= {"its consumer fa", "the logits of t", "the logits afte", "ArithmeticError"}
    assert seen >= {"found", "scored", "preempted", "length", "cancelled", "error", int, str}


def after(change):
    """What becomes of the request that a method is given, once it is done."""
    return lambda real, self, one, *more: (real(self, one, *more), change(self, one))[0]


def instead(change):
    """What a method returns, in the place of what it should."""
    return lambda real, self, *args: change(self, real(self, *args))


def altered(fields):
    return instead(lambda self, it: it._replace(**fields(self, it)))


def stale_slot_map(real, self, turn, sampled, progress):
    owners, slots = {one.slot: one for one in self.running}, turn.plan.rows.sample_slots.tolist()
    now = [owners.get(slot, one) for slot, one in zip(slots, turn.sampled, strict=False)]
    real(self, turn._replace(sampled=tuple(now)), sampled, progress)


def kept_slot(real, self, one):
    slot = one.slot
    real(self, one)
    one.slot = slot


def forgotten(self, one):
    if one.id == "5":
        self.waiting.remove(one)
        self._live["5"].remove(one)


def put(some, name, value):
    for one in some:
        setattr(one, name, value)


def decoding(coming):
    """Whether a request decodes, if that many tokens were coming."""
    return instead(lambda self, _: self.slot is not None and not self.prefilling and coming(self) < self.max_tokens)


SLOTS, SLOT, WHO = r"slots \[.*\] are held and \[.*\] are free", r"slot \d+", r"sample \d of request '\d+'"
AT = rf"position \d+ of {SLOT}, (which )?{WHO}"
COPY, DRAWN, FOLLOWS = r"Copy\(source=\d, target=\d, length=\d+\)", f"{WHO} is drawn by", f"{AT}, follows"
FAULTS = {  # class, method or property, what becomes of it, and the message
    "a slot for two": (Scheduler, "_admit", after(lambda self, it: put(it.admit, "slot", self.running[0].slot)), SLOTS),
    "a slot for nobody": (Scheduler, "_leave", after(lambda self, one: self.free.remove(one.slot)), SLOTS),
    "a slot in the queue": (Scheduler, "_preempt", kept_slot, f"{WHO} waits: True, and has {SLOT}"),
    "a late chunk": (Scheduler, "_advance", altered(lambda _, rows: {"start": rows.start + 1}), FOLLOWS),
    "an early chunk": (Scheduler, "_advance", altered(lambda _, rows: {"start": max(rows.start, 1) - 1}), FOLLOWS),
    "a row elsewhere": (Scheduler, "_advance", altered(lambda self, _: {"slot": self.running[0].slot}), f"{AT}|{COPY}"),
    "a row nowhere": (Scheduler, "_advance", altered(lambda self, it: {"slot": [*self.free, it.slot][0]}), SLOT),
    "a wrong token": (
        Scheduler,
        "_advance",
        altered(lambda _, it: {"tokens": (*it.tokens[:-1], 0)}),
        f"{AT}, is given",
    ),
    "no last row": (Scheduler, "_advance", altered(lambda _, it: {"sampled": len(it.tokens) < 2}), DRAWN),
    "another's seed": (SequenceState, "draw", altered(lambda *_: {"seed": 9}), DRAWN),
    "swapped": (Scheduler, "_turn", altered(lambda _, turn: {"sampled": turn.sampled[::-1]}), DRAWN),
    "not told": (Scheduler, "_turn", altered(lambda *_: {"admitted": ()}), f"of .*{WHO}.* it is not told"),
    "not awaited": (
        Scheduler,
        "_turn",
        instead(lambda _, turn: put(turn.sampled, "in_flight", 0) or turn),
        f"{WHO} awaits 0 tokens, and \\d come",
    ),
    "too many tokens": (SequenceState, "decoding", decoding(lambda one: len(one.output)), f"{WHO} gets "),
    "a hasty grammar": (
        SequenceState,
        "decoding",
        decoding(lambda one: len(one.output) + one.in_flight),
        f"{WHO} is drawn for ahead of its grammar",
    ),
    "a stale slot map": (Scheduler, "_commit", stale_slot_map, f"{WHO} is given the tokens"),
    "lost": (
        Scheduler,
        "_preempt",
        after(lambda self, one: self.waiting.remove(one)),
        f"{WHO} is live 1 .* in 0 places",
    ),
    "unknown": (Scheduler, "submit", after(forgotten), "request '5' is live 0 times, and in 0 places"),
    "undead": (Scheduler, "_end", lambda real, self, one, _: real(self, one, None), f"{WHO} is live 0 times"),
    "no end": (Scheduler, "_end", after(lambda self, one: self._live.update({one.id: [one]})), f"{WHO} has ended"),
    "a long prefix": (Prefixes, "_shared", instead(lambda _, rows: [one + (0 < one < 9) for one in rows]), WHO),
    "a long copy": (
        Prefixes,
        "take_copies",
        instead(lambda _, copies: [one._replace(length=one.length + 1) for one in copies]),
        COPY,
    ),
    "stale rows": (Prefixes, "forget", lambda *_: None, f"position 0 of {SLOT}"),
    "past the end": (
        Scheduler,
        "submit",
        after(lambda _, one: setattr(one, "max_tokens", one.max_tokens + 1)),
        f"position {S} of {SLOT}, {WHO}, is past its end",
    ),
    "many rows": (
        Scheduler,
        "_chunks",
        lambda real, *args: real(*args[:-1], 99),
        r"\d+ prompt rows for .*; there is room",
    ),
    "lost output": (Scheduler, "_admit", after(lambda _, it: put(it.admit, "resumed", 0)), WHO),
    "a wrong score": (
        Scheduler,
        "_turn",
        altered(lambda _, turn: {"scored": tuple(one._replace(start=9) for one in turn.scored)}),
        f"{WHO} is scored by slot and position",
    ),
}


def planted(fault):
    kind, name, change, _ = FAULTS[fault]
    real = getattr(kind, name)
    if isinstance(real, property):
        return mock.patch.object(kind, name, property(lambda self: change(real.fget, self)))
    return mock.patch.object(kind, name, lambda self, *args: change(real, self, *args))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_replays(fault):
    """Again with the fault, from the report alone; and without it nothing is wrong."""
    with planted(fault), pytest.raises(IntegrityError, match=FAULTS[fault][-1]) as raised:
        all(Traffic(seed).serve().finish() for seed in range(100))
    report = json.loads(json.dumps(raised.value.report))
    with planted(fault), pytest.raises(IntegrityError) as once_more:
        replay(report)
    assert str(once_more.value) == str(raised.value) == report["error"]
    replay(report)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 0], "for ['a', 'b'] was never planned, or is committed twice"),
        ([0, 2], "for ['a', 'b'] is committed before one for ['a', 'b']"),
    ],
)
def test_turns_out_of_order(order, message):
    """Whoever commits is at fault, so the report comes to it even without one in the scheduler."""
    scheduler, device = make_scheduler(slots=2, block_q=1), FakeDevice(2, 64)
    for name in "ab":
        scheduler.submit(sequence(name, [1, 2, 3], max_tokens=9))
    turns = [scheduler.plan() for _ in range(3)]
    sampled = [device.step(turn.plan.rows) for turn in turns]
    with pytest.raises(IntegrityError, match=re.escape(message)) as raised:
        all(scheduler.commit(turns[at], sampled[at]) for at in order)
    with pytest.raises(IntegrityError, match=re.escape(message)):
        replay(raised.value.report)


def test_a_policy_that_has_no_name_is_given_again():
    for seed in range(40):
        traffic = Traffic(seed, "continuous")
        traffic.policies, traffic.scheduler.policy = [], Hesitant(seed)
        scheduler = traffic.serve().finish().scheduler
        assert state(again(scheduler, Hesitant(seed))) == state(scheduler)
    with pytest.raises(ValueError, match="a policy that has no name: give it"):
        again(scheduler)


def test_what_requests_ask_for_replays():
    """Keys that are numbers, fields that are tuples or JSON, and a grammar without the tokenizer that it is of."""
    engine = fake_engine(slots=2, tokenizer=byte_level("he", "ab"), eos_ids=[11], checks=True)
    kinds = [
        {"logit_bias": {5: 1.0, 96: -100.0}, "allowed_token_ids": [5, 96, 7]},
        {"min_tokens": 4, "stop": ["a", "xy"], "stop_token_ids": [3]},
        {"bad_words": ["hello"], "n": 2, "seed": 2**64 - 1},
        {"json_schema": {"type": "object", "properties": {"é": {"type": "string"}}}},
        {"choice": ["ab", "he"], "ignore_eos": True},
    ]
    for index, kind in enumerate(kinds):
        engine.submit(request_of(str(index), prompt_of(20, index), max_tokens=9, **kind))
    assert len(finish(engine)) == 6
    assert state(again(engine.scheduler)) == state(engine.scheduler)


def test_only_who_asks_is_checked():
    assert type(fake_engine(checks=False).scheduler) is Scheduler


# What the requests below do not bring about.
NEEDS_MORE = ("stale rows", "a hasty grammar", "a wrong score", "a long copy", "a long prefix", "many rows")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in NEEDS_MORE])
def test_an_engine_stops_at_a_fault(fault):
    """All are told once, whether they had a slot, waited or had no room in the queue yet, and nobody else comes in."""
    engine = fake_engine(3, S, policy="priority", max_queue=7, run_ahead=2, tokenizer=letters(), checks=True)
    kinds = [{"max_tokens": None}, {"max_tokens": 3}, {"stop_token_ids": [*range(0, 97, 4)]}]
    requests = [request_of(str(index), prompt_of(1 + index, index), **kinds[index % 3]) for index in range(24)]
    stream, outputs = engine.stream(requests[6:]), []
    deltas = [next(stream)]
    urgent, sent = [replace(request, priority=-1) for request in requests[:6]], []

    def serve():
        for _ in range(200):
            sent.extend([engine.submit(urgent.pop())] if urgent and engine.scheduler.queue_room else [])
            outputs.extend(engine.step())

    with planted(fault), pytest.raises(IntegrityError, match=FAULTS[fault][-1]) as raised:
        serve()
    while engine.unfinished:
        outputs += engine.step()
    assert sorted(one.id for one in outputs) == sorted(sent)
    deltas += list(stream)
    streamed = [delta.output for delta in deltas if delta.output is not None]
    assert sorted(one.id for one in streamed) == sorted(one.id for one in requests[6:])
    failed = {one.id: one.error for one in (*outputs, *streamed) if one.finish_reason == "error"}
    assert requests[-1].id in failed, "which was not queued yet"
    assert all(str(raised.value) in error for error in failed.values())
    for refused in (engine.submit, lambda one: engine.generate([one]), lambda one: engine.stream([one])):
        with pytest.raises(RuntimeError, match="the engine stopped: "):
            refused(request_of("new", [5]))
    assert not engine.unfinished
    assert json.loads(json.dumps(raised.value.report)) == raised.value.report


@pytest.mark.parametrize("fault", ["a slot for nobody", "no end", "a late chunk"])
def test_the_thread_of_an_engine_comes_to_rest(fault, caplog):
    engine, steps = fake_engine(slots=1, checks=True), []
    step = engine.step
    engine.step = lambda: steps.append(None) or step()

    async def main():
        async with AsyncEngine(engine) as served:
            with planted(fault):
                outputs = await served.generate(requests_of(3))
            assert [one.finish_reason for one in outputs] == ["error"] * 3
            with pytest.raises(RuntimeError, match="the engine stopped"):
                await served.generate(requests_of(1))
            before = len(steps)
            assert [await served.call(lambda engine: engine.unfinished) for _ in range(9)] == [False] * 9
            assert len(steps) == before

    run(main())
    assert [record.message for record in caplog.records] == ["a step failed"]
