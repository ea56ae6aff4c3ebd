"""What a worker must know besides the settings, as the supervisor writes it down before it starts the worker."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from llog.base.decoders import json_decoder
from llog.base.lockfile import WorkerAddress


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one worker among those of its supervisor. The sockets and the pipe are open file descriptors."""

    number: int
    group: str
    """A random id of the supervisor's workers."""
    addresses: list[str]
    """Where the workers reach each other, by their numbers: on the loopback interface."""
    directory: str
    """The private directory of the supervisor."""
    started_s: float
    """When the supervisor started, in seconds since 1970."""
    listener: int
    """The socket that this worker accepts connections to the broker's port from."""
    own_listener: int
    """The socket at this worker's own address."""
    ready_pipe: int
    """Gets this worker's number in a line, once it answers."""

    @property
    def own_address(self) -> WorkerAddress:
        return WorkerAddress(group=self.group, address=self.addresses[self.number])

    @property
    def siblings(self) -> dict[int, str]:
        """The addresses of the other workers, by their numbers."""
        return {number: each for number, each in enumerate(self.addresses) if number != self.number}

    @property
    def uptime_s(self) -> float:
        """The seconds since the supervisor started."""
        return time.time() - self.started_s

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> WorkerPlan:
        return json_decoder(cls).decode(path.read_bytes())
