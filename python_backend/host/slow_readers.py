"""Cuts HTTP connections whose clients do not read.

The Triton server writes what a stream makes into memory and never asks how much of it was read. The
kernel knows: it resets a connection that took nothing for TCP_USER_TIMEOUT, the server then sees a
client that left, and the model ends its request. The server has no option for that, but sockets
inherit it from the one that listens, which a parent may open.
"""

from __future__ import annotations

import ctypes
import os
import socket

import psutil

_PIDFD_GETFD = 438  # a system call that Python has no name for; one number on every architecture
_LIBC = ctypes.CDLL(None, use_errno=True)


def cut_slow_readers(process: psutil.Process, port: int, seconds: float) -> None:
    """Connections that the process takes on `port` from now on are reset when their client takes
    nothing for so long. Raises OSError where the system does not allow it."""
    pidfd = os.pidfd_open(process.pid)
    try:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                _set_patience(pidfd, connection.fd, seconds)
    finally:
        os.close(pidfd)


def _set_patience(pidfd: int, fd: int, seconds: float) -> None:
    opened = _LIBC.syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if opened < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    with socket.socket(fileno=opened) as listening:
        milliseconds = round(seconds * 1000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
