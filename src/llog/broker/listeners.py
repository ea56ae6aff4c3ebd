"""The sockets that a process listens on, and the addresses at which others reach them."""

from __future__ import annotations

import errno
import socket
import sys
from ipaddress import ip_address

from llog.config import Settings
from llog.errors import ConfigurationError


def listen(host: str, port: int, prefix: str = "LLOG_BROKER", *, reuse_port: bool = False) -> socket.socket:
    """Return a socket that listens there. A `ConfigurationError` says what to change if there can be none: `prefix` is
    that of the two settings. With `reuse_port`, others that have it, too, may listen on the same port.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, reuse_port=reuse_port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} of {host} is in use: end the process that listens there, or choose another port with "
                f"--port or {prefix}_PORT"
            ) from error
        raise ConfigurationError(
            f"cannot listen on {host}, port {port} ({error.strerror}): check {prefix}_BIND_HOST and {prefix}_PORT"
        ) from error


def listen_together(host: str, port: int, number: int) -> list[socket.socket]:
    """Return sockets that listen on one port, for as many processes: the kernel spreads connections over them.

    Where it cannot (it is Linux that does), all get the same socket, and the first that wakes up accepts.
    """
    single = listen(host, port)  # fails if another process listens there, with SO_REUSEPORT or without
    if sys.platform != "linux":
        return [single] * number
    port = single.getsockname()[1]
    single.close()
    return [listen(host, port, reuse_port=True) for _ in range(number)]


def listening_address(listener: socket.socket) -> str:
    """Return the address of a socket, as http://host:port."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def advertised_address(settings: Settings, listener: socket.socket) -> str | None:
    """Return the address at which other brokers reach this one.

    None if it listens on every address of the machine and LLOG_BROKER_ADVERTISED_ADDRESS names none of them.
    """
    if settings.broker_advertised_address is not None:
        return settings.broker_advertised_address.rstrip("/")
    return None if ip_address(listener.getsockname()[0]).is_unspecified else listening_address(listener)


def is_open_to_others(host: str) -> bool:
    """Return whether other machines can reach a server that listens on this host."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
