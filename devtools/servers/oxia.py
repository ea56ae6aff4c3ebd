"""A real Oxia: a standalone server, or a cluster of three nodes and a coordinator.

Oxia comes from no package that the tests could install. `LLOG_TEST_OXIA` names the program, or it is `oxia` on PATH; or
`LLOG_TEST_OXIA_ADDRESS` (`oxia://host:port/namespace`) names a running server, of which the tests use, and empty, the
whole namespace.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import msgspec

from devtools.servers.leash import leashed, signal_command
from devtools.servers.weed import ServerError
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub

START_LIMIT_S = 60
START_ATTEMPTS = 3
PORTS = range(12_000, 32_000)
"""Below those that the kernel gives to outgoing connections, so that a node that is down finds its port free again."""
NAMESPACE = "default"


class OxiaMissing(ServerError):
    """Oxia is not available here."""


class OxiaNode:
    """One process of a server, which keeps its ports and its data when it is started again."""

    def __init__(self, address: str, command: Sequence[str], directory: Path) -> None:
        self.address = address
        self._command = command
        self._directory = directory
        self._running = ExitStack()
        self._watcher: int | None = None

    @property
    def log(self) -> Path:
        return self._directory / "oxia.log"

    def start(self) -> None:
        """Start the process; it listens some time later."""
        assert self._watcher is None, f"{self.address} is running"
        self._directory.mkdir(parents=True, exist_ok=True)
        process = self._running.enter_context(leashed(self._command, log=self.log, cwd=self._directory))
        self._watcher = process.pid

    def kill(self) -> None:
        """SIGKILL; no error if the process is not running."""
        self._watcher = None
        self._running.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop the process where it is: its connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._watcher is not None, f"{self.address} is not running"
        try:
            signal_command(self._watcher, number)
        except ProcessLookupError as error:
            raise ServerError(f"the Oxia node {self.address} is not running: {_tail(self.log)}") from error


class OxiaServer:
    """A server that answers: `url` is what LLOG_META may be. One that the tests did not start has no nodes."""

    def __init__(self, addresses: Sequence[str], namespace: str = NAMESPACE, nodes: Sequence[OxiaNode] = ()) -> None:
        self.addresses = tuple(addresses)
        self.namespace = namespace
        self.nodes = tuple(nodes)

    @property
    def url(self) -> str:
        return f"oxia://{','.join(self.addresses)}/{self.namespace}"

    def leaders(self) -> dict[int, str]:
        """Return the address of each shard's leader, "" if it has none; raise `ServerError` if no node answers."""
        refusals = []
        for address in self.addresses:
            try:
                return self._leaders(address)
            except grpc.RpcError as error:
                refusals.append(f"{address}: {error.code()}: {error.details()}")
        raise ServerError("; ".join(refusals))

    def _leaders(self, address: str) -> dict[int, str]:
        request = proto.ShardAssignmentsRequest(namespace=self.namespace)
        with grpc.insecure_channel(address) as channel:
            found = next(OxiaClientStub(channel).GetShardAssignments(request, timeout=2, wait_for_ready=True))
        return {each.shard: each.leader for each in found.namespaces[self.namespace].assignments}

    def leader_of(self, shard: int) -> OxiaNode:
        leader = self.leaders()[shard]
        (node,) = (node for node in self.nodes if node.address == leader)
        return node

    def wipe(self) -> None:
        """Delete every key of the log, so that the next test finds an empty store."""
        everything = proto.DeleteRangeRequest(start_inclusive="=", end_exclusive=">")
        for shard, leader in self.leaders().items():
            _write(leader, proto.WriteRequest(shard=shard, delete_ranges=[everything]))

    def wait(self) -> None:
        """Wait until every shard has a leader that takes a write."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                for shard, leader in self.leaders().items():
                    if not leader:
                        raise ServerError(f"shard {shard} has no leader")
                    _write(leader, proto.WriteRequest(shard=shard, puts=[proto.PutRequest(key="#ready")]))
                return
            except (ServerError, grpc.RpcError) as error:
                if time.monotonic() > deadline:
                    logs = "; ".join(_tail(node.log) for node in self.nodes)
                    raise ServerError(f"oxia is not up after {START_LIMIT_S} s: {error}: {logs}") from error
            time.sleep(0.1)


@contextmanager
def oxia_server(directory: Path, *, shards: int = 1, key_sorting: str = "hierarchical") -> Iterator[OxiaServer]:
    """Run a standalone server with its data in `directory`, or yield the one of `LLOG_TEST_OXIA_ADDRESS`."""
    running = os.environ.get("LLOG_TEST_OXIA_ADDRESS")
    if running and key_sorting == "hierarchical":
        addresses, _, namespace = running.removeprefix("oxia://").partition("/")
        server = OxiaServer(addresses.split(","), namespace or NAMESPACE)
        server.wait()
        yield server
        return
    binary = _binary()

    def nodes(directory: Path) -> tuple[OxiaServer, list[OxiaNode]]:
        public, metrics = _free_addresses(2)
        command = [binary, "standalone", "-p", public, "-m", metrics, "-s", str(shards), "--key-sorting", key_sorting]
        node = OxiaNode(public, [*command, "--data-dir", "db", "--wal-dir", "wal"], directory / "standalone")
        return OxiaServer([public], nodes=[node]), [node]

    with _start_retrying(directory, nodes) as server:
        yield server


@contextmanager
def oxia_cluster(directory: Path, *, shards: int = 4) -> Iterator[OxiaServer]:
    """Run three nodes that all have all shards, with a leader for each; the coordinator is not one of `nodes`."""
    binary = _binary()

    def nodes(directory: Path) -> tuple[OxiaServer, list[OxiaNode]]:
        ports = iter(_free_addresses(12))
        members = [{"name": f"n{number}", "public": next(ports), "internal": next(ports)} for number in range(3)]
        found = []
        for member in members:
            command = [binary, "server", "-p", member["public"], "-i", member["internal"], "-m", next(ports)]
            node_directory = directory / member["name"]
            found.append(OxiaNode(member["public"], [*command, "--data-dir", "db", "--wal-dir", "wal"], node_directory))
        namespace = {
            "name": NAMESPACE,
            "initialShardCount": shards,
            "replicationFactor": 3,
            "keySorting": "hierarchical",
        }
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "cluster.yaml"  # JSON is YAML
        config.write_bytes(msgspec.json.encode({"namespaces": [namespace], "servers": members}))
        internal, admin, metrics = next(ports), next(ports), next(ports)
        command = [
            binary,
            "coordinator",
            "--cconfig",
            str(config),
            "-i",
            internal,
            _admin_flag(binary),
            admin,
            "-m",
            metrics,
        ]
        status = ["--metadata", "file", "--file-clusters-status-path", "status.json"]
        coordinator = OxiaNode(internal, [*command, *status], directory / "coordinator")
        return OxiaServer([node.address for node in found], nodes=found), [*found, coordinator]

    with _start_retrying(directory, nodes) as server:
        yield server


@contextmanager
def _start_retrying(directory: Path, make: Callable[[Path], tuple[OxiaServer, list[OxiaNode]]]) -> Iterator[OxiaServer]:
    """Start the server that `make` creates; try again on other ports if another process has taken one meanwhile."""
    failures: list[str] = []
    for attempt in range(START_ATTEMPTS):
        with ExitStack() as stack:
            server, nodes = make(directory / f"attempt-{attempt}")
            for node in nodes:
                stack.callback(node.kill)
                node.start()
            try:
                server.wait()
            except ServerError as error:
                failures.append(str(error))
                continue
            yield server
            return
    raise ServerError("; ".join(failures))


def _write(address: str, request: proto.WriteRequest) -> None:
    with grpc.insecure_channel(address) as channel:
        OxiaClientStub(channel).Write(request, timeout=20)


def _binary() -> str:
    named = os.environ.get("LLOG_TEST_OXIA")
    found = named or shutil.which("oxia")
    if found is None:
        raise OxiaMissing("no Oxia: LLOG_TEST_OXIA and LLOG_TEST_OXIA_ADDRESS are not set, and no `oxia` is on PATH")
    if not os.access(found, os.X_OK):
        raise OxiaMissing(f"no Oxia: LLOG_TEST_OXIA is {found}, which is no program")
    return os.path.abspath(found)


def _admin_flag(binary: str) -> str:
    """Return the flag of the address for administrators: `--admin-addr` until 0.16, `--public-addr` since."""
    usage = subprocess.run([binary, "coordinator", "--help"], capture_output=True, text=True, check=True).stdout
    return "--public-addr" if "--public-addr" in usage else "--admin-addr"


def _free_addresses(count: int) -> list[str]:
    found: list[str] = []
    with ExitStack() as held:
        for port in random.sample(PORTS, len(PORTS)):
            try:
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(f"127.0.0.1:{port}")
            if len(found) == count:
                return found
    raise ServerError(f"no {count} free ports in {PORTS}")


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:]) if log.exists() else "no log"
