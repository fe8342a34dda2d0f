"""How the launchers of several nodes meet, and what they tell each other while they train.

Node 0 listens at the rendezvous. The others call until it answers, and say what they would run. If one of them does not
come in time, comes twice, or would make another run, all end with the same sentence before anything was started. The
lines stay open until the end, as whoever closes one has died:

    node k to node 0    {"rank": 3, "record": ...} when a process of it ended, {"stop": true} when somebody asked it to
    node 0 to node k    {"order": ...} once the run has its folder, {"signal": 3} to end a process, {"over": ...}

Footgun: a line is plain text without a password, as the connections of torch.distributed are. It belongs into a network
that one trusts.
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from nblib.run import jobs
from nblib.run.parameters import ParameterError, clip

LOOK = 0.2  # seconds between two calls
SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a machine without power is noticed in 30 s


class Line:
    """JSON objects to and from another launcher."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in SILENCE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.connection, self.lines, self.lock = connection, connection.makefile("rb"), threading.Lock()

    def send(self, **message: Any) -> None:
        with self.lock, contextlib.suppress(OSError):  # that it is gone, who reads is told
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Until the other one is gone."""
        with contextlib.suppress(OSError, ValueError):
            for line in self.lines:
                yield json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def address(text: str) -> tuple[str, int]:
    """`host:port`."""
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"[1-9]\d{0,4}", port) or int(port) > 65535:
        raise ParameterError(f"--rendezvous: {clip(text)!r} is not host:port, such as 127.0.0.1:29400.")
    return host.strip("[]"), int(port)


def number(given: int | None, nodes: int) -> int:
    """Which node this is: as it was said, or as Slurm says."""
    node = int(os.environ.get("SLURM_NODEID", -1)) if given is None else given
    if not 0 <= node < nodes:
        what = "is missing" if given is None else f"is {node}"
        raise ParameterError(f"--node {what}, allowed: 0 .. {nodes - 1}; Slurm's SLURM_NODEID counts as well.")
    return node


def host(place: tuple[str, int], nodes: int, *, wait: float, mine: dict[str, Any]) -> dict[int, Line]:
    """Node 0's lines to all others, which would make the same run."""
    until, lines = time.monotonic() + wait, dict[int, Line]()
    try:
        listener = socket.create_server(place, family=socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
    except OSError as error:
        why = error.strerror or error
        raise ParameterError(f"--rendezvous: this machine cannot listen at {place[0]}:{place[1]}: {why}.") from None
    with listener:
        while len(lines) < nodes - 1:
            listener.settimeout(max(0.01, until - time.monotonic()))
            try:
                line = Line(listener.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(n) for n in range(1, nodes) if n not in lines)
                _refuse(lines, f"node {missing} did not come to {place[0]}:{place[1]} within {wait:g} s")
            line.connection.settimeout(max(1.0, until - time.monotonic()))
            with contextlib.suppress(LookupError, TypeError, StopIteration):  # a stranger who is no launcher
                theirs = next(line.messages())
                known = lines | {theirs["node"]: line}
                if theirs["node"] in lines or not 0 < theirs["node"] < nodes:
                    _refuse(known, f"node {theirs['node']} came twice or is none of 0 .. {nodes - 1}", line)
                _compare(known, theirs, mine)
                line.connection.settimeout(None)
                lines = known
    return lines


def _compare(lines: dict[int, Line], theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    node = theirs["node"]
    if theirs["key"] != mine["key"]:
        differ = jobs.why(mine["inputs"], theirs["inputs"]) or "its inputs"
        _refuse(lines, f"node {node} would make another run than node 0: {differ}")
    for word in ("processes", "nodes", "mesh"):
        if theirs[word] != mine[word]:
            _refuse(lines, f"{word} is {mine[word]} on node 0 and {theirs[word]} on node {node}")


def _refuse(lines: dict[int, Line], why: str, *more: Line) -> None:
    for line in {*lines.values(), *more}:
        line.send(refused=why)
        line.close()
    raise ParameterError(f"The nodes do not train together: {why}.")


def visit(place: tuple[str, int], *, wait: float, mine: dict[str, Any]) -> Line:
    """Another node's line to node 0; it has not answered yet."""
    until = time.monotonic() + wait
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            line = Line(socket.create_connection(place, timeout=max(0.01, until - time.monotonic())))
            line.send(**mine)
            return line
        time.sleep(LOOK)
    why = f"node 0 did not answer at {place[0]}:{place[1]} within {wait:g} s"
    raise ParameterError(f"The nodes do not train together: {why}.")


def first(line: Line) -> dict[str, Any]:
    """What node 0 says when the run has its folder, or when it ended before."""
    for message in line.messages():
        if "refused" in message:
            raise ParameterError(f"The nodes do not train together: {message['refused']}.")
        return message
    raise ParameterError("The nodes do not train together: node 0 ended before it began.")
