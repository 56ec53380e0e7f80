"""More clients than slots for as long as one likes, many of which leave: nothing stays, memory does not grow."""

import asyncio
import ctypes
import gc
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.server.servers import LIMIT, Running
from tests.server.test_abuse import ENDS, KINDS, PROMPTS, Storm, left_over, sixteen_slots

CLIENTS = 128  # at once
QUICK = [name for name in KINDS if name not in ("sends_no_end", "sends_nothing")]  # those wait to be cut off


class Crowd(Storm):
    """As many clients at every moment: where one has gone, the next comes."""

    async def stay(self, seconds: float, draw: random.Random) -> None:
        end = time.monotonic() + seconds

        async def place() -> None:
            while time.monotonic() < end:
                await self._client(draw.choice(QUICK), draw.choice(PROMPTS), draw.random())

        await asyncio.gather(*(place() for _ in range(CLIENTS)))
        for (kind, outcome), count in self.outcomes.items():
            assert outcome in ENDS[kind], (kind, outcome, count)

    async def _status(self, reader) -> str:
        """Without waiting for the connection's end: the server lets who sends too much finish first."""
        return (await reader.readuntil(b"\r\n\r\n"))[9:12].decode()


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    ))  # fmt: skip


def memory() -> dict[str, float]:
    """Of this process: server, engine and clients. The resident part has what allocators hold back, too."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    gc.collect()
    info = mallinfo()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident MB": resident / 1e6,
        "MB in malloc's use": (info.uordblks + info.hblkhd) / 1e6,
        "thousands of Python's blocks": sys.getallocatedblocks() / 1e3,
    }


def soak(folder, seconds: float, spell: float) -> list[dict[str, float]]:
    """Minutes and memory after every spell, when its clients have gone.

    What may be left of clients (slots, tasks, files, connections, ...) is then compared with what was there at first.
    """
    engine, expected = sixteen_slots(folder)
    rests, draw = [], random.Random(0)
    with Running(engine) as server:
        before, start = left_over(server), time.monotonic()
        crowd = Crowd(server.port, expected)
        while time.monotonic() - start < seconds:
            asyncio.run(asyncio.wait_for(crowd.stay(spell, draw), spell + LIMIT))
            server.wait(lambda: server.idle() and left_over(server) == before)
            rests.append({"minutes": (time.monotonic() - start) / 60} | memory())
    asked, answered = crowd.outcomes.total(), sum(crowd.outcomes[kind, "answered"] for kind in KINDS)
    stats = engine.stats
    print(
        f"\n{asked} clients in {rests[-1]['minutes']:.1f} minutes, {answered} answered; "
        f"{stats.generated_tokens} tokens, {stats.turns} turns, {stats.busy_share:.0%} of the slots busy"
    )
    assert asked / 6 < answered < asked
    return rests


def test_a_short_soak(folder):
    assert len(soak(folder, seconds=1, spell=1)) == 1


@pytest.mark.slow
def test_ten_minutes(folder):
    rests = soak(folder, seconds=600, spell=30)
    late = [rest for rest in rests if rest["minutes"] > rests[-1]["minutes"] / 4]  # by then allocators have their pools
    minutes, slopes = [rest.pop("minutes") for rest in late], {}
    for name in late[0]:
        slopes[name], _ = np.polyfit(minutes, [rest[name] for rest in late], 1)
        print(f"{name}: {rests[0][name]:.2f} at first, {rests[-1][name]:.2f} at last, {slopes[name]:+.3f} a minute")
    # Tens of thousands of clients come in a minute: ten bytes that stay of each would be more than this.
    assert slopes["MB in malloc's use"] < 0.1
    assert slopes["thousands of Python's blocks"] < 1
    assert slopes["resident MB"] < 2  # what is free but in pieces is counted here
