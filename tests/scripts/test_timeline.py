"""Timelines of schedules that can be done by hand: whose slot it was, and when."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from batching.plan import FROM_DEVICE
from scripts.timeline import Kind, Timeline
from scripts.timeline_picture import label
from tests.batching.fake_engine import fake_engine, finish, prompt_of, request_of


class Clock:
    """A second a look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Later:
    """Tokens that are there at some time, and whoever wants them waits until then."""

    def __init__(self, tokens, done, clock):
        self.tokens, self.done, self.clock = tokens, done, clock

    def is_ready(self):
        return self.clock.now >= self.done

    def __array__(self, dtype=None, copy=None):
        self.clock.now = max(self.clock.now, self.done)
        return self.tokens


def timed_engine(seconds=10.0, **config):
    """Its device takes so long for a turn, on a clock of whole seconds."""
    engine = fake_engine(**{"attention": "xla", "prefix_reuse": False} | config)
    clock, compute, free = Clock(), engine.run, 0.0
    engine.scheduler.clock = engine.scripted = clock

    def run(turn):
        nonlocal free
        free = max(free, clock.now) + seconds
        sampled = compute(turn)
        return sampled._replace(tokens=Later(sampled.tokens, free, clock))

    engine.run = run
    return engine


def submit(engine, *requests):
    for request in requests:
        engine.submit(request)
        for sequence in engine.scheduler.waiting:
            if sequence.id == request.id:
                sequence.metrics.arrival = engine.scripted.now


def grid(timeline):
    """A line a slot, a word a turn: a:0-15 prefill, a decode, a? no row, . idle."""
    lines = [["."] * len(timeline.turns) for _ in range(timeline.slots)]
    for turn, record in enumerate(timeline.turns):
        for slot, request, kind, start, rows in record.cells:
            name = label(timeline.requests[request])
            word = {Kind.PREFILL: f"{name}:{start}-{start + rows - 1}", Kind.DECODE: name, Kind.WAIT: f"{name}?"}[kind]
            lines[slot][turn] = word
    return [" ".join(line) for line in lines]


def recorded(engine, *requests):
    submit(engine, *requests)
    with Timeline().recording(engine) as timeline:
        finish(engine)
    return timeline


A = request_of("a", prompt_of(20, 1), max_tokens=3, ignore_eos=True)
B = request_of("b", prompt_of(5, 2), max_tokens=2, ignore_eos=True)
C = request_of("c", prompt_of(4, 3), max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_who_had_which_slot(run_ahead):
    """Chunks of 16 rows: b waits until a's prompt is through. All ends are by length, so no turn is wasted."""
    timeline = recorded(timed_engine(run_ahead=run_ahead), A, B, C)
    assert grid(timeline) == ["a:0-15 a:16-19 a a c:0-3", "b? b? b:0-4 b ."]
    assert [(one.rows, one.live_rows) for one in timeline.turns] == [(18, 16), (18, 4), (18, 6), (2, 2), (18, 4)]
    assert [one.waiting for one in timeline.turns] == [1, 1, 1, 1, 0]
    assert [one.tokens for one in timeline.turns] == [0, 1, 2, 2, 1]
    assert timeline.dropped == 0
    spans = [(one.slot, one.kind, one.first, one.last, one.start, one.rows) for one in timeline.spans()]
    assert spans == [
        (0, "prefill", 0, 0, 0, 16),
        (0, "prefill", 1, 1, 16, 4),
        (0, "decode", 2, 3, 20, 2),
        (0, "prefill", 4, 4, 0, 4),
        (1, "wait", 0, 1, 0, 0),
        (1, "prefill", 2, 2, 0, 5),
        (1, "decode", 3, 3, 5, 1),
    ]


@pytest.mark.parametrize(
    ("run_ahead", "times", "device", "gaps", "summary"),
    [
        # plan, launch, launched, wait, ready, committed; the device has a turn for 10 s from its launch on.
        (
            0,
            [(1, 4, 5, 6, 15, 17), (18, 20, 21, 22, 31, 34)],
            [(5, 15), (21, 31)],
            [(1, 5), (15, 21)],
            {"wall_s": 32, "host_s": 12, "device_s": 20, "gap_s": 10},
        ),
        (
            1,
            [(1, 4, 5, 10, 15, 17), (6, 8, 9, 20, 25, 28)],
            [(5, 15), (15, 25)],
            [(1, 5)],
            {"wall_s": 27, "host_s": 12, "device_s": 20, "gap_s": 4},
        ),
    ],
)
def test_times(run_ahead, times, device, gaps, summary):
    engine = timed_engine(slots=1, run_ahead=run_ahead)
    timeline = recorded(engine, replace(A, params=replace(A.params, max_tokens=1)))
    assert [one.times for one in timeline.turns] == times
    assert [(one.begin, one.times.ready) for one in timeline.turns] == device
    assert summary.items() <= timeline.summary().items()
    assert timeline.summary()["device_share"] == 20 / summary["wall_s"]


@pytest.mark.parametrize("seconds", [0.0, 4.0, 30.0])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_the_summary_is_what_the_engine_counted(run_ahead, seconds):
    engine = timed_engine(seconds, slots=3, run_ahead=run_ahead)
    stop = request_of("s", prompt_of(30, 4), max_tokens=9, stop_token_ids=list(range(0, 97, 2)))
    engine.generate([prompt_of(3)], replace(B.params, max_tokens=2))
    engine.reset_stats()
    timeline = recorded(engine, A, stop, B, C)
    summary, stats = timeline.summary(), engine.stats
    assert summary["turns"] + summary["dropped_turns"] == stats.turns
    assert summary["tokens"] == stats.generated_tokens
    for name in ("wall_s", "host_s", "gap_s"):
        assert summary[name] == pytest.approx(getattr(stats, name)), name
    assert summary["gap_share"] == pytest.approx(stats.gap_share)
    if not timeline.dropped:
        assert summary["busy_share"] == pytest.approx(stats.busy_share)


def stopping(engine):
    """A request that its second token stops."""
    tokens = engine.generate([prompt_of(3, 5)], replace(B.params, max_tokens=4))[0].token_ids
    assert tokens[0] != tokens[1]
    return request_of("s", prompt_of(3, 5), max_tokens=9, stop_token_ids=[tokens[1]])


def longer(request, tokens):
    return replace(request, params=replace(request.params, max_tokens=tokens))


def test_an_end_that_nobody_foresaw():
    """Two turns ahead: two rows of the one that stopped are its own still, though others wait for the slot."""
    engine = timed_engine(run_ahead=2)
    timeline = recorded(engine, stopping(engine), longer(B, 6), C)
    assert grid(timeline) == ["s:0-2 s s s c:0-3 c? c?", "b? b:0-4 b b b b b"]
    assert [one.tokens for one in timeline.turns] == [1, 2, 1, 1, 2, 1, 1]
    assert engine.stats.wasted_rows == 2


def test_turns_of_which_nothing_came():
    engine = timed_engine(0.0, slots=1, run_ahead=2)
    stop = stopping(engine)
    engine.reset_stats()
    timeline = recorded(engine, stop)
    assert (grid(timeline), timeline.dropped) == (["s:0-2 s"], 2)
    assert timeline.summary()["gap_s"] == engine.stats.gap_s > sum(one.gap_s for one in timeline.turns)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_slot_that_is_taken_before_the_turn_is_read(run_ahead):
    """The chunk of a is in flight when u takes its slot: it is a's still. Then a computes all of it once more."""
    engine = timed_engine(slots=1, policy="priority", run_ahead=run_ahead)
    submit(engine, replace(A, priority=5))
    with Timeline().recording(engine) as timeline:
        engine.step()
        submit(engine, request_of("u", prompt_of(6, 8), max_tokens=2, ignore_eos=True))
        finish(engine)
    assert grid(timeline) == ["a:0-15 u:0-5 u a:0-15 a:16-19 a a"]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_request_that_loses_its_slot_and_gets_another(run_ahead):
    """u takes the slot of b, which came last, and b goes on in the one that a, more urgent, has left."""
    engine = timed_engine(policy="priority", run_ahead=run_ahead)
    submit(engine, longer(replace(C, id="a", priority=4), 2), replace(B, priority=5))
    with Timeline().recording(engine) as timeline:
        engine.step()
        submit(engine, request_of("u", prompt_of(16, 8), max_tokens=9, ignore_eos=True))
        finish(engine)
    words = [[word for word in line.split() if word != "." and not word.endswith("?")] for line in grid(timeline)]
    assert words == [["a:0-3", "a", "b:0-4", "b"], ["u:0-15", *["u"] * 8]]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_cancellation(run_ahead):
    engine = timed_engine(run_ahead=run_ahead)
    submit(engine, A, longer(B, 9), C, replace(C, id="d"))
    with Timeline().recording(engine) as timeline:
        for _ in range(3):
            engine.step()
        engine.cancel("a")
        engine.cancel("d")
        finish(engine)
    slot, other = grid(timeline)
    assert slot.replace("c?", ".").split() == ["a:0-15", "a:16-19", "a", "c:0-3", *["."] * 7]
    assert other == "b? b? b:0-4 b b b b b b b b"


def test_samples_and_copies_of_rows():
    """Three samples: one computes the prompt, the others have its rows copied, and compute its last token."""
    engine = timed_engine(slots=3, prefix_reuse=True, run_ahead=0)
    timeline = recorded(engine, request_of("n", A.prompt_ids, max_tokens=3, n=3, ignore_eos=True))
    assert grid(timeline) == [
        "n#0:0-15 n#0:16-19 n#0 n#0 . .",
        "n#1? n#1? n#1:19-19 n#1 n#1 .",
        "n#2? n#2? n#2? n#2:19-19 n#2 n#2",
    ]
    assert [one.copies for one in timeline.turns] == [(), (), ((0, 1, 19), (0, 2, 19)), (), (), ()]


def random_run(run_ahead, policy, attention=None, seconds=5.0):
    """24 requests with different prompts, some of them cancelled. Timeline, engine, the turns committed, outputs."""
    rng = random.Random(run_ahead)
    config = {"attention": attention, "policy": policy, "run_ahead": run_ahead, "prefix_reuse": True}
    engine = timed_engine(seconds, slots=3, **config)
    committed, outputs = [], []
    engine.on_turn = lambda turn, times: committed.append(turn)
    with Timeline(policy).recording(engine) as timeline:
        for number in range(24):
            priority = rng.randrange(3) if policy == "priority" else 0
            prompt, stops = prompt_of(rng.randint(1, 40), number), [rng.randrange(97) for _ in range(8)]
            one = request_of(f"{number}", prompt, max_tokens=rng.randint(1, 12), stop_token_ids=stops)
            submit(engine, replace(one, priority=priority))
            for _ in range(rng.randint(0, 3)):
                outputs += engine.step()
            if rng.random() < 0.2:
                engine.cancel(f"{rng.randrange(number + 1)}")
        outputs += finish(engine)
    return timeline, engine, committed, outputs


@pytest.mark.parametrize("attention", ["xla", None])
@pytest.mark.parametrize("policy", ["continuous", "static", "priority"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_every_row_is_whose_the_timeline_says(run_ahead, policy, attention):
    """The tokens of a chunk say whose it is."""
    timeline, engine, committed, outputs = random_run(run_ahead, policy, attention)
    rows = Counter()
    assert len(committed) == len(timeline.turns) == engine.stats.turns - timeline.dropped
    unseen = {one.id for one in outputs} - {one.id for one in timeline.requests}
    assert len(outputs) == len(timeline.requests) + len(unseen) == 24
    assert all(one.metrics.turns == 0 for one in outputs if one.id in unseen), "cancelled before any turn"
    for turn, record in zip(committed, timeline.turns, strict=True):
        slots, tokens = turn.plan.rows.slots, turn.plan.rows.tokens
        assert len(record.cells) == turn.busy
        assert len({cell.slot for cell in record.cells}) == len({cell.request for cell in record.cells}) == turn.busy
        assert sum(cell.rows for cell in record.cells) == turn.plan.live_rows
        drawn = {timeline.requests[cell.request] for cell in record.cells if cell.rows}
        assert set(turn.sampled) <= drawn
        for cell in record.cells:
            sequence, own = timeline.requests[cell.request], tokens[slots == cell.slot]
            rows[sequence] += cell.rows
            assert len(own) == cell.rows
            if cell.kind == Kind.PREFILL:
                known = [*sequence.prompt, *sequence.output]
                assert own.tolist() == known[cell.start : cell.start + cell.rows]
            elif cell.kind == Kind.DECODE:
                assert own.tolist() == [FROM_DEVICE]
                assert sequence in turn.sampled
    for sequence in timeline.requests:
        if not sequence.metrics.preemptions and sequence.finish_reason == "length":
            assert rows[sequence] == len(sequence.prompt) - sequence.cached + len(sequence.output) - 1


def test_the_engine_is_left_as_it_was():
    engine, seen = timed_engine(), []
    engine.on_turn = lambda turn, times: seen.append(turn)
    hooks = engine.run, engine.on_turn
    submit(engine, A)
    engine.step()  # in flight when the recording begins
    with Timeline().recording(engine) as timeline:
        engine.step()
    assert (engine.run, engine.on_turn) == hooks
    finish(engine)
    assert (len(seen), len(timeline.turns) + timeline.dropped) == (4, 1)
