"""What each policy decides, turn by turn, on the fake device; and policies from files."""

from dataclasses import replace
from pathlib import Path

import pytest

from batching import EngineConfig
from batching.policies import POLICIES, make_policy
from tests.batching.fake import FakeDevice, alone, make_scheduler, run_turn, sequence
from tests.batching.fake_engine import expected_of, fake_engine, finish, prompt_of, request_of

OWN = Path(__file__).parents[1] / "data" / "policies" / "last_come.py"


def one(name, prompt, tokens, **facts):
    made = sequence(name, prompt_of(prompt, len(name)), max_tokens=tokens)
    for fact, value in facts.items():
        setattr(made, fact, value)
    return made


class Turns:
    """Serves sequences and keeps, of each turn, who had prompt rows and how many, and who decoded."""

    def __init__(self, policy, now=None, **how):
        self.scheduler = make_scheduler(policy=policy, block_q=1, **how)
        if now is not None:
            self.scheduler.clock = now
        self.device = FakeDevice(self.scheduler.shapes.slots, self.scheduler.max_len)
        self.turns, self.ended, self.submitted = [], [], []

    def submit(self, *sequences):
        for each in sequences:
            self.scheduler.submit(each)
            self.submitted.append(each)

    def turn(self):
        before = {each: each.computed for each in self.submitted}
        prefilling = {each for each in self.submitted if each.prefilling}
        _, ended = run_turn(self.scheduler, self.device)
        self.ended += [each.id for each in ended]
        moved = {each: each.computed - rows for each, rows in before.items() if each.computed > rows}
        prompts = {each.id: rows for each, rows in moved.items() if each in prefilling}
        self.turns.append((prompts, sorted(each.id for each in moved if each not in prefilling)))
        return self.turns[-1]

    def finish(self):
        while self.scheduler.unfinished:
            self.turn()
        for each in self.submitted:
            assert each.output == alone(each.prompt, each.params.max_tokens)
        return self.turns


def test_prefill_first_stops_decoding_for_every_prompt():
    served = Turns("prefill_first", slots=2)
    served.submit(one("a", 5, 4))
    assert [served.turn(), served.turn()] == [({"a": 5}, []), ({}, ["a"])]
    served.submit(one("b", 20, 2))
    assert [served.turn(), served.turn(), served.turn()] == [({"b": 18}, []), ({"b": 2}, []), ({}, ["a", "b"])]
    served.finish()


def test_dynamic_takes_nobody_in_during_a_prefill():
    served = Turns("dynamic", slots=3)
    served.submit(one("a", 30, 3))
    served.turn()
    served.submit(one("b", 3, 3))
    assert served.turn() == ({"a": 11}, [])
    assert served.turn() == ({"b": 3}, []), "the next batch: a does not decode beside it"
    assert served.turn() == ({}, ["a", "b"])
    served.finish()


def test_decode_first_gives_prompts_few_rows_beside_decoding():
    served = Turns("decode_first", slots=2, chunk_sizes=(64,), max_len=128)
    served.submit(one("a", 60, 6))
    assert served.turn() == ({"a": 60}, []), "nobody decodes: all the room"
    served.submit(one("b", 80, 2))
    assert [served.turn()[0] for _ in range(3)] == [{"b": 32}, {"b": 32}, {"b": 16}]
    served.finish()


def test_shortest_first_goes_by_the_predicted_or_the_given_length():
    served = Turns("shortest_first", slots=1)
    served.submit(one("long", 4, 20), one("short", 4, 6), one("predicted", 4, 30, predicted_tokens=1))
    served.submit(one("a prompt counts", 40, 1))
    served.finish()
    assert served.ended == ["predicted", "short", "long", "a prompt counts"]


def test_fair_shares_slots_between_users():
    """Of one who asks for much and one who asks for little, the latter does not wait behind all of the former."""
    served = Turns("fair", slots=1)
    served.submit(*(one(f"a{index}", 10, 5, user="a") for index in range(4)))
    served.submit(*(one(f"b{index}", 10, 5, user="b") for index in range(2)))
    served.finish()
    assert served.ended == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_absence_earns_nothing():
    """A user who was away while another was served does not get all slots for as long."""
    served = Turns("fair", slots=1)
    served.submit(*(one(f"a{index}", 10, 5, user="a") for index in range(4)))
    for _ in range(11):
        served.turn()
    assert served.ended == ["a0", "a1"]
    served.submit(*(one(f"b{index}", 10, 5, user="b") for index in range(3)))
    served.finish()
    assert served.ended == ["a0", "a1", "a2", "b0", "a3", "b1", "b2"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_fair_charges_what_ends_in_the_turn_that_admits_it(ahead):
    engine = fake_engine(slots=1, run_ahead=ahead, policy="fair", prefix_reuse=False)
    for user, count in (("a", 6), ("b", 3)):
        for index in range(count):
            engine.submit(replace(request_of(f"{user}{index}", prompt_of(9, index), max_tokens=1), user=user))
    order = [output.id for output in finish(engine)]
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_fair_does_not_hold_a_past_against_somebody_when_all_were_away():
    served = Turns("fair", slots=1)
    served.submit(*(one(f"a{index}", 30, 9, user="a") for index in range(5)))
    served.finish()
    served.submit(*(one(f"c{index}", 10, 5, user="c") for index in range(6)), one("a late", 10, 5, user="a"))
    served.finish()
    assert served.ended.index("a late") < served.ended.index("c1")


def test_fair_forgets_users_who_are_away():
    served = Turns("fair", slots=1)
    for index in range(30):
        served.submit(one(str(index), 5, 2, user=str(index)))
        served.finish()
    assert len(served.scheduler.policy.counters) <= 2


def test_slo_lets_nobody_starve():
    """One without an objective, beside a trickle of others that have one."""
    clock = [0.0]
    served = Turns("slo", slots=1, now=lambda: clock[0])
    served.submit(one("none", 4, 2))
    served.submit(one("0", 4, 2, ttft_slo_s=10.0))
    for index in range(1, 60):
        clock[0] = float(index)
        made = one(str(index), 4, 2, ttft_slo_s=10.0)
        made.metrics.arrival = clock[0]
        served.submit(made)
        served.turn()
    assert "none" in served.ended


def test_slo_takes_the_earliest_deadline():
    served = Turns("slo", slots=1, now=lambda: 0.0)
    served.submit(one("none", 4, 2), one("later", 4, 2, ttft_slo_s=9.0), one("soon", 4, 2, ttft_slo_s=3.0))
    served.submit(one("none either", 4, 2))
    served.finish()
    assert served.ended == ["soon", "later", "none", "none either"]


@pytest.mark.parametrize("now", [1.0, 30.0])
def test_slo_keeps_turns_short_while_somebody_is_late(now):
    clock = [0.0]
    served = Turns("slo", slots=2, chunk_sizes=(64,), max_len=128, now=lambda: clock[0])
    served.submit(one("a", 60, 9, tpot_slo_s=5.0))
    served.turn()
    clock[0] = now
    served.submit(one("b", 63, 2))
    assert served.turn()[0] == {"b": 32 if now > 5 else 63}
    served.finish()


def test_what_a_policy_does_not_look_at_is_refused():
    facts = {"priority": 2, "user": "a", "ttft_slo_s": 1.0, "tpot_slo_s": 0.1, "predicted_tokens": 7}
    for name in POLICIES:
        scheduler = make_scheduler(policy=name)
        for fact, value in facts.items():
            made = one(fact, 3, 2, **{fact: value})
            if fact in getattr(scheduler.policy, "uses", ()):
                scheduler.submit(made)
                continue
            with pytest.raises(ValueError, match=f"{fact} is {value!r}, but the policy .* does not look at it"):
                scheduler.submit(made)


def test_a_policy_of_ones_own_in_a_file():
    config = EngineConfig(policy=f"{OWN}:LastCome")
    engine = fake_engine(slots=1, run_ahead=0, policy=config.policy)
    requests = [request_of(str(index), prompt_of(9, index), max_tokens=3) for index in range(4)]
    for request in requests:
        engine.submit(request)
    outputs = finish(engine)
    assert [output.id for output in outputs] == ["3", "2", "1", "0"]
    for output in outputs:
        assert output.token_ids == expected_of(requests[int(output.id)])


def test_a_file_may_use_all_of_python():
    assert make_policy(f"{OWN}:Typed").rows == 7


@pytest.mark.parametrize("name", [None, 3, OWN])
def test_what_is_no_name(name):
    with pytest.raises(ValueError, match="is not one of"):
        EngineConfig(policy=name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{OWN}:Nobody", "AttributeError: .*Nobody"),
        (f"{OWN}:Broken", "RuntimeError: no such thing"),
        (f"{OWN}:Empty", "no method decide"),
        ("nowhere.py:Policy", "there is no file nowhere.py"),
        (str(OWN), "nor a file with a class, path.py:Name"),
    ],
)
def test_files_that_hold_no_policy(name, reason):
    with pytest.raises(ValueError, match=reason):
        make_policy(name)
    with pytest.raises(ValueError, match=reason):
        EngineConfig(policy=name)
