"""What a client is told when it does not get what it asked for, in OpenAI's form."""

import json
from collections.abc import Mapping
from typing import Any

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_S = 1  # what a client shall wait for before it asks again


class ApiError(Exception):
    """An answer with a status of 400 or above. `param`: the field that it is about, as the client calls it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_S))

    @property
    def body(self) -> bytes:
        """Characters that have no UTF-8, such as a client may have sent, are escaped."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error: dict[str, Any] = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served whenever it is sent."""
    return ApiError(400, message, param=param, code=code)


def closing() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, code="overloaded")


class Gone(Exception):
    """The client went away, or takes nothing any more: nobody is there to be answered."""
