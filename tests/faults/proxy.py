"""A TCP proxy in front of one server: it lets everything pass, slows it down, holds it back or refuses it."""

from __future__ import annotations

import asyncio

_CHUNK_BYTES = 1 << 16
_UNDER_WAY_MAX = 1024


class Proxy:
    """Listens on a free port of 127.0.0.1. Faults hold until `heal`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._requests, self._answers = asyncio.Event(), asyncio.Event()
        """Whether bytes pass to the server, and back."""
        self._refusing = False
        self._delay_s = 0.0
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.accepted = 0
        """Connections so far."""
        self.requests = 0
        """Chunks of bytes that clients sent so far: at most one for each message, fewer if several came together."""
        self.heal()

    def heal(self) -> None:
        """Let everything pass at once. What was held back arrives late."""
        self._refusing = False
        self._delay_s = 0.0
        self._requests.set()
        self._answers.set()

    def slow_down(self, delay_s: float) -> None:
        """Deliver what clients send so much later, in its order."""
        self._delay_s = delay_s

    def hang(self) -> None:
        """Hold back everything, in both directions; connections stay, and new ones are accepted."""
        self._requests.clear()
        self._answers.clear()

    def hold_answers(self) -> None:
        """Let the server do what it is asked, and tell nobody."""
        self._answers.clear()

    def refuse(self) -> None:
        """End all connections, and each new one at once."""
        self._refusing = True
        self.reset()

    def reset(self) -> None:
        """End all connections; new ones are welcome."""
        for connection in self._connections:
            connection.cancel()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._refusing:
            writer.transport.abort()
            return
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        ends = [writer]
        try:
            answers, server = await asyncio.open_connection(*self._target)
            ends.append(server)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, server, self._requests, counted=True))
                pumps.create_task(self._pump(answers, writer, self._answers))
        except* OSError:
            for end in ends:
                end.close()
        except* asyncio.CancelledError:
            for end in ends:
                end.transport.abort()
        finally:
            self._connections.discard(connection)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: asyncio.Event, *, counted: bool = False
    ) -> None:
        """Pass everything on, one chunk after the other, each at its time; then end the connection."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY_MAX)

        async def take() -> None:
            chunk = b"any"
            while chunk:
                chunk = await source.read(_CHUNK_BYTES)
                if counted and chunk:
                    self.requests += 1
                await under_way.put((loop.time() + (self._delay_s if counted else 0.0), chunk))

        async with asyncio.TaskGroup() as taking:
            taking.create_task(take())
            while True:
                due, chunk = await under_way.get()
                await asyncio.sleep(due - loop.time())
                await gate.wait()
                if not chunk:
                    break
                target.write(chunk)
                await target.drain()
        raise ConnectionResetError("one side has ended")
