"""HTTP on one connection: uvicorn's, with refusals in OpenAI's form, and an eye on clients that go away."""

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from scripts.server.errors import ApiError, overloaded

PENDING = 2**16  # bytes that may come before the request ahead of them is answered
TURNED_AWAY = 64  # connections beyond the limit that are told so; further ones are cut off

UNANSWERED = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # pyright: ignore  # a client's states after its request


class Wire(H11Protocol):
    """`limit_concurrency` of the configuration is how many connections there may be, whether they ask or not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn's own would count otherwise
        self._surplus = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        surplus = 0 if self._most is None else len(self.connections) - self._most
        self._surplus = surplus > 0
        if surplus > TURNED_AWAY:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._surplus:
            self._refuse(overloaded(f"the server has {self._most} connections, as many as it may"))
        elif self.conn.their_state is not h11.MUST_CLOSE:  # what follows a last request is ignored
            super().data_received(data)

    def handle_events(self) -> None:
        """Uvicorn reads no further while there is a next request in line, and would not see the client's end."""
        super().handle_events()
        if self.conn.their_state in UNANSWERED and self.flow.read_paused:
            if len(self.conn.trailing_data[0]) > PENDING:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Instead of the application, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            response = h11.Response(status_code=error.status, headers=[*(headers | error.headers).items()])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.app.watch.refused(error.status)  # pyright: ignore
        self.transport.close()
