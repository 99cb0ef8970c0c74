"""HTTP that is too broken to become a request is refused in the same shape as everything else."""

from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.api.errors import BadRequest, encode_error


class ApiHttpProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what its parser does not take; ends the connection."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None until the first request
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            # An answer is under way: another one in its middle would be taken for a part of it.
            self.transport.close()
            return
        body = encode_error(BadRequest(f"this is no HTTP/1.1 request: {msg}", code="invalid_http"))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
