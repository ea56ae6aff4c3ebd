"""What is measured, beside what, and how often: the parts that every measurement needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.broker.process import Process
from bench.load import Address, Exchange, run_load
from bench.peers.peer import Peer
from bench.report import Report
from bench.stores_bare import Bare, Pace

PARTITIONS = 64
VALUE = "x" * 100


class Subject(NamedTuple):
    """A running broker, its peers, and the bare metadata store on the same disk or server."""

    peers: Sequence[Peer]
    bare: Bare
    directory: Path
    """On the disk that holds the log: bare files go here."""
    report: Report
    rounds: int
    seconds: float
    """Of one turn of a load."""
    process: Process

    def load(self, address: Address, exchanges: Sequence[Exchange], figure: Callable[[Pace], float]) -> float:
        """Return a figure of one turn of load on the broker or a peer."""
        return figure(run_load(address, exchanges, self.seconds))
