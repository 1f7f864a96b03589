"""The directory for other processes: a small ZeroMQ service, and its client.

One request, one reply; both are validated, limited in size and sealed with the deployment's secret. What the words mean
is the directory's.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Annotated, Final, Literal

import pydantic
import zmq
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kv_transfer.arguments import check_endpoint, check_kind, check_listening, check_seconds, check_whole
from kv_transfer.directory import Directory, Member, Side, check_side, is_whole
from kv_transfer.errors import ArgumentError, PeerLost, ProtocolError
from kv_transfer.secret import check_secret, seal_receiver, seal_sender

__all__ = ["DirectoryClient", "DirectoryServer"]

_MOST_BYTES: Final = 16 << 20
_TURN_MS: Final = 100


class _Word(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Literal[1] = 1


class _Register(_Word):
    type: Literal["register"] = "register"
    member: Member


class _Renew(_Word):
    type: Literal["renew"] = "renew"
    generation: int


class _Remove(_Word):
    type: Literal["remove"] = "remove"
    generation: int


class _List(_Word):
    type: Literal["list"] = "list"
    side: Side


class _Reply(_Word):
    value: int = 0
    members: tuple[Member, ...] = Field(default=(), strict=False)
    error: str = ""


_Request = Annotated[_Register | _Renew | _Remove | _List, Field(discriminator="type")]
_REQUESTS: TypeAdapter[_Request] = TypeAdapter(_Request)


class DirectoryServer:
    """Serves a directory until `close`.

    Args:
        directory: What is served; a new one by default.
        bind: ZeroMQ address; loopback and a free port by default. A taken port is an error.
        secret: As at the endpoints of the deployment.

    Raises:
        ArgumentError: The secret is too short, the directory is none, or the address is none or cannot be bound.
    """

    def __init__(
        self, directory: Directory | None = None, *, bind: str = "tcp://127.0.0.1:0", secret: str | None = None
    ) -> None:
        """Listens."""
        check_secret(secret)
        check_listening(bind)
        self.directory = Directory() if directory is None else check_kind("directory", directory, Directory)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        seal_receiver(self._socket, secret)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ArgumentError(
                f"bind: {bind!r} cannot be bound: {error}",
                local=bind,
                consequence="nobody could be found",
                remedy="use an address of this machine, and a free port or 0",
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-transfer-directory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the service; may be called twice."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> DirectoryServer:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(_TURN_MS):
                    identity, *parts = self._socket.recv_multipart()
                    self._socket.send_multipart([identity, self._answer(parts).model_dump_json().encode()])
        finally:
            self._socket.close()
            self._context.term()

    def _answer(self, parts: list[bytes]) -> _Reply:
        """Whatever bytes came: a reply."""
        try:
            request = _REQUESTS.validate_json(parts[0] if len(parts) == 1 else b"")
            if isinstance(request, _Register):
                return _Reply(value=self.directory.register(request.member))
            if isinstance(request, _List):
                return _Reply(members=self.directory.members(request.side))
            change = self.directory.renew if isinstance(request, _Renew) else self.directory.remove
            return _Reply(value=int(change(request.generation)))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            return _Reply(error=f"malformed request: {first['msg']}")
        except ArgumentError as error:
            return _Reply(error=str(error))


class DirectoryClient:
    """A directory in another process; its calls are those of `Directory`.

    Args:
        endpoint: The server's.
        secret: As at the server.
        timeout: Seconds that a call waits.

    Raises:
        ArgumentError: The secret is too short, the endpoint is no ZeroMQ address, or the time is none.
    """

    def __init__(self, endpoint: str, *, secret: str | None = None, timeout: float = 5.0) -> None:
        """Connects with the first call."""
        self._endpoint = check_endpoint(endpoint)
        self._secret = check_secret(secret)
        self._timeout = check_seconds("timeout", timeout)
        self._lock = threading.Lock()

    def register(self, member: Member) -> int:
        """See `Directory.register`."""
        return self._ask(_Register(member=check_kind("member", member, Member))).value

    def renew(self, generation: int) -> bool:
        """See `Directory.renew`."""
        return bool(self._ask(_Renew(generation=check_whole("generation", generation))).value)

    def remove(self, generation: int) -> bool:
        """See `Directory.remove`."""
        return bool(self._ask(_Remove(generation=check_whole("generation", generation))).value)

    def members(self, side: Side) -> tuple[Member, ...]:
        """See `Directory.members`."""
        return self._ask(_List(side=check_side(side))).members

    def is_whole(self, side: Side, dp_rank: int = 0) -> bool:
        """See `Directory.is_whole`."""
        check_whole("dp_rank", dp_rank)
        return is_whole(self.members(side), dp_rank)

    def _ask(self, request: _Request) -> _Reply:
        """One question on a socket of its own: a late answer to an earlier one cannot be taken for its answer.

        Raises:
            PeerLost: No answer in time.
            ProtocolError: An answer that is none.
            ArgumentError: The directory refused the request.
        """
        with self._lock, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            seal_sender(socket, self._secret)
            socket.connect(self._endpoint)
            socket.send(request.model_dump_json().encode())
            if not socket.poll(round(self._timeout * 1000)):
                raise PeerLost(
                    f"the directory at {self._endpoint} did not answer within {self._timeout:g} s",
                    consequence="ranks cannot find each other; transfers that run go on",
                    remedy="see that it runs, and that all ends have the same secret, or none",
                )
            data = socket.recv()
        try:
            reply = _Reply.model_validate_json(data)
        except pydantic.ValidationError as error:
            raise ProtocolError(f"malformed answer of the directory at {self._endpoint}: {error}") from None
        if reply.error:
            raise ArgumentError(f"refused by the directory: {reply.error}", consequence="nothing was changed there")
        return reply
