"""An exception over one request's token is that request's error: nobody else's end is lost."""

from tests.batching.fake import FakeDevice, make_scheduler, run_turn, sequence


class Broken:
    error = None

    def advance(self, token):
        raise ArithmeticError("no such state")


def test_a_grammar_that_raises_ends_its_own_request_alone():
    scheduler, device = make_scheduler(slots=3, block_q=1), FakeDevice(3, 64)
    names = ("broken", "ends", "goes on", "cancelled")
    requests = {name: sequence(name, range(1, 4), max_tokens=1 if name == "ends" else 3) for name in names}
    requests["broken"].grammar = Broken()
    for one in requests.values():
        scheduler.submit(one)
    turn = scheduler.plan()
    scheduler.cancel("cancelled")
    ended = [
        p.sequence.id
        for p in scheduler.commit(turn, device.step(turn.plan.rows))
        if p.sequence.finish_reason is not None
    ]
    assert sorted(ended) == ["broken", "cancelled", "ends"]
    assert (requests["broken"].finish_reason, requests["broken"].error) == ("error", "ArithmeticError: no such state")
    while scheduler.unfinished:
        run_turn(scheduler, device)
    assert len(requests["goes on"].output) == 3
