"""HTTP as it comes over the wire: in any pieces, and what is none."""

import asyncio

import pytest

from scripts.http_client import Failed, Reply, Server


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://x", "http://", "http://x?y=1", "http://x:99999"])
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match=r"server must be|Port out of range"):
        Server(address, "m")


@pytest.mark.parametrize("key", ["", "a b", "secret\n", "sésame"])
def test_keys_that_cannot_be_sent(key):
    with pytest.raises(ValueError, match="API key must be printable"):
        Server("http://localhost:8000", "m", key)


def read_reply(data: bytes, *, by: int) -> tuple[int, list[str]]:
    """In pieces of so many bytes."""

    async def read() -> tuple[int, list[str]]:
        reader, events = asyncio.StreamReader(), []

        async def feed() -> None:
            for start in range(0, len(data), by):
                reader.feed_data(data[start : start + by])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.create_task(feed())
        reply = Reply(reader)
        try:
            await reply.begin()
            while (one := await reply.event()) is not None:
                events.append(one)
        finally:
            await feeding
        return reply.status, events

    return asyncio.run(read())


BODY = b': a comment\r\n\r\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata:two\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("by", [1, 7, 1000])
def test_bodies_in_any_pieces(by):
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(BODY[i : i + 9]), BODY[i : i + 9]) for i in range(0, len(BODY), 9))
    for head, body in (
        (b"Content-Length: %d" % len(BODY), BODY + b"data: of another reply\n"),
        (b"transfer-encoding: Chunked", chunks + b"0\r\n\r\n"),
        (b"Connection: close", BODY),
    ):
        assert read_reply(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body, by=by) == (
            200,
            ['{"a": 1}', "two", "[DONE]"],
        )


@pytest.mark.parametrize(
    "data",
    [b"", b"SSH-2.0\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)
def test_what_is_no_reply(data):
    with pytest.raises((Failed, EOFError, ValueError)):
        read_reply(data, by=1000)
