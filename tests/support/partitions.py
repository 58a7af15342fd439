"""Three real nats-servers and their clients, each at a place of its own, of which any two may be parted, or be slow.

Twice, by one interface: `NamespacedCluster` gives each place a network namespace, joined by a bridge, and needs root;
`ProxiedCluster` has all of them on loopback, and every connection go through a proxy.

    with ProxiedCluster(tmp_path) as cluster:
        with cluster.at("join"):
            join = Join(tmp_path / "joined", cluster.url_at("join"))
        cluster.part("n0", "n1")
        cluster.cut("n2", "join")  # What n2 sends does not come; what the join sends does.
        cluster.heal()
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import pytest

from .nats_broker import NatsBroker
from .ports import free_port

SERVERS = ("n0", "n1", "n2")
"""Places of the servers, and their names."""
READ_BYTES = 2**16
CLIENT_PORT, ROUTE_PORT = 4222, 6222
NOWHERE = "02:ff:ff:ff:ff:ff"
"""An address that no card has: what is sent there arrives nowhere, and nobody says so."""


class PartedCluster(Protocol):
    """Three servers that hold streams together, and places for their clients, which are made as they are named."""

    servers: list[NatsBroker]

    def __init__(self, directory: Path) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def at(self, place: str) -> AbstractContextManager[None]:
        """Have what is started in the block, threads and processes, be at a place."""

    def url_at(self, place: str, servers: tuple[str, ...] = SERVERS) -> str:
        """Return the addresses by which a place reaches servers."""

    def cut(self, source: str, target: str) -> None:
        """Have nothing arrive at `target` any more that `source` sends; neither is told."""

    def part(self, one: str, *others: str) -> None:
        """Have nothing pass any more between a place and others."""

    def slow(self, place: str, bytes_per_s: int, delay_s: float) -> None:
        """Have all that a place sends and receives be slow. delay_s: each way."""

    def heal(self) -> None:
        """Have everything pass, at once."""


def clustered(
    directory: Path, place: str, host: str, ports: tuple[int, int], advertise: str, routes: list[str]
) -> NatsBroker:
    """Return the server of a place. ports: for clients, and for other servers. advertise: to other servers."""
    # Clients and servers keep to the addresses that they were given: of others they would learn past the proxies.
    cluster = f'name: sentinel, listen: "{host}:{ports[1]}", advertise: "{advertise}", no_advertise: true'
    listed = ", ".join(f'"nats://{one}"' for one in routes)
    return NatsBroker(
        directory / place, f"server_name: {place}\ncluster {{ {cluster}, routes: [{listed}] }}", host=host, port=ports[0]
    )


class Link:
    """What one place sends to another, through proxies."""

    def __init__(self) -> None:
        self.passes = asyncio.Event()
        self.passes.set()
        self.bytes_per_s, self.delay_s = float("inf"), 0.0

    async def carry(self, num_bytes: int) -> None:
        """Return when as many bytes have arrived."""
        await asyncio.sleep(self.delay_s + num_bytes / self.bytes_per_s)
        await self.passes.wait()


class Proxies:
    """Carries TCP connections between places of loopback in a thread. What does not pass is held, and passes later."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], Link] = defaultdict(Link)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._connections: set[asyncio.Task[None]] = set()

    def port_to(self, source: str, target: str, port: int) -> int:
        """Return a new port by which `source` reaches a port of `target`."""
        listening = socket.create_server(("127.0.0.1", free_port()))

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await self._carry(self._links[source, target], self._links[target, source], port, reader, writer)
            writer.transport.abort()

        asyncio.run_coroutine_threadsafe(asyncio.start_server(connected, sock=listening), self._loop).result()
        return int(listening.getsockname()[1])

    def change(self, of: Callable[[str, str], bool], change: Callable[[Link], None]) -> None:
        """Change links. of: whether one from a place to another is meant."""

        async def do() -> None:
            for (source, target), link in self._links.items():
                if of(source, target):
                    change(link)

        asyncio.run_coroutine_threadsafe(do(), self._loop).result()

    def link(self, source: str, target: str) -> None:
        """Have a link be there, which may be before any connection is."""
        self._links[source, target]

    def close(self) -> None:
        """End all connections."""

        async def end() -> None:
            connections = list(self._connections)
            for one in connections:
                one.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _carry(
        self, there: Link, back: Link, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # To begin a connection takes both directions.
        await there.passes.wait()
        await back.passes.wait()
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.gather(_pump(reader, other_writer, there), _pump(other_reader, writer, back))
        finally:
            other_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(READ_BYTES):
            await link.carry(len(data))
            writer.write(data)
            await writer.drain()
    # The end of a connection travels as its bytes do.
    await link.passes.wait()
    writer.close()


class ProxiedCluster:
    """On loopback, with a proxy between each two that speak."""

    def __init__(self, directory: Path) -> None:
        self._proxies = Proxies()
        self._ports = {place: (free_port(), free_port()) for place in SERVERS}
        self.servers = []
        for place in SERVERS:
            others = [other for other in SERVERS if other != place]
            routes = [f"127.0.0.1:{self._proxies.port_to(place, other, self._ports[other][1])}" for other in others]
            # What servers say of each other leads nowhere: they have the routes that they were given.
            self.servers.append(clustered(directory, place, "127.0.0.1", self._ports[place], "127.0.0.1:1", routes))

    def __enter__(self) -> Self:
        try:
            for one in self.servers:
                one.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.servers:
            one.kill()
        self._proxies.close()

    def at(self, place: str) -> AbstractContextManager[None]:
        return nullcontext()

    def url_at(self, place: str, servers: tuple[str, ...] = SERVERS) -> str:
        ports = [self._proxies.port_to(place, one, self._ports[one][0]) for one in servers]
        return ",".join(f"nats://127.0.0.1:{port}" for port in ports)

    def cut(self, source: str, target: str) -> None:
        self._proxies.link(source, target)
        self._proxies.change(lambda one, other: (one, other) == (source, target), lambda link: link.passes.clear())

    def part(self, one: str, *others: str) -> None:
        for other in others:
            self.cut(one, other)
            self.cut(other, one)

    def slow(self, place: str, bytes_per_s: int, delay_s: float) -> None:
        def change(link: Link) -> None:
            link.bytes_per_s, link.delay_s = bytes_per_s, delay_s

        self._proxies.change(lambda one, other: place in (one, other), change)

    def heal(self) -> None:
        def change(link: Link) -> None:
            link.bytes_per_s, link.delay_s = float("inf"), 0.0
            link.passes.set()

        self._proxies.change(lambda one, other: True, change)


class Namespace:
    """A network namespace without a name: it is gone with whoever holds it, however that ends."""

    NEW = 0x40000000
    """CLONE_NEWNET."""

    def __init__(self) -> None:
        """Skip the test where this process may not make one."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = -1
        thread = threading.Thread(target=self._make)
        thread.start()
        thread.join()
        if self.fd < 0:
            pytest.skip("network namespaces: they need root, and a kernel that has them")

    @property
    def path(self) -> str:
        """Where programs find it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and the threads and processes that it starts, be in it."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            assert self._libc.setns(self.fd, self.NEW) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert self._libc.setns(home, self.NEW) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(home)

    def run(self, *commands: str) -> None:
        """Have lines of `ip -batch` done in it."""
        self._do(["ip", "-batch", "-"], "\n".join(commands))

    def shape(self, device: str, bytes_per_s: int, delay_s: float) -> None:
        """Have what leaves through a device be slow. Where the kernel has no netem, there is no delay but of queues."""
        root = ["tc", "qdisc", "replace", "dev", device, "root"]
        try:
            self._do([*root, "netem", "delay", f"{1e3 * delay_s:g}ms", "rate", f"{8 * bytes_per_s}bit"])
        except AssertionError:
            self._do([*root, "tbf", "rate", f"{8 * bytes_per_s}bit", "burst", "16kb", "latency", "400ms"])

    def close(self) -> None:
        os.close(self.fd)

    def _make(self) -> None:
        # In a thread that ends: the others stay where they are.
        if self._libc.unshare(self.NEW) == 0:
            self.fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def _do(self, command: list[str], lines: str = "") -> None:
        with self.entered():
            done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command} {lines}: {done.stderr}"


class NamespacedCluster:
    """In namespaces that a bridge in one more of them joins: nothing is seen of it outside."""

    def __init__(self, directory: Path) -> None:
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                pytest.skip(f"not installed: {program}")
        self._bridge = Namespace()
        self._bridge.run("link add br0 type bridge", "link set br0 up")
        self._places: dict[str, Namespace] = {}
        addresses = {place: self._address(place) for place in SERVERS}
        self.servers = [
            clustered(
                directory, place, address, (CLIENT_PORT, ROUTE_PORT), f"{address}:{ROUTE_PORT}",
                [f"{other}:{ROUTE_PORT}" for other in addresses.values()],
            )
            for place, address in addresses.items()
        ]  # fmt: skip

    def __enter__(self) -> Self:
        try:
            for place, server in zip(SERVERS, self.servers, strict=True):
                with self.at(place):
                    server.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.servers:
            one.kill()
        for one in (self._bridge, *self._places.values()):
            one.close()

    def at(self, place: str) -> AbstractContextManager[None]:
        self._address(place)
        return self._places[place].entered()

    def url_at(self, place: str, servers: tuple[str, ...] = SERVERS) -> str:
        self._address(place)
        return ",".join(f"nats://{self._address(one)}:{CLIENT_PORT}" for one in servers)

    def cut(self, source: str, target: str) -> None:
        there = self._address(target)
        self._address(source)
        self._places[source].run(f"neigh replace {there} lladdr {NOWHERE} dev eth0 nud permanent")

    def part(self, one: str, *others: str) -> None:
        for other in others:
            self.cut(one, other)
            self.cut(other, one)

    def slow(self, place: str, bytes_per_s: int, delay_s: float) -> None:
        number = self._number(place)
        self._places[place].shape("eth0", bytes_per_s, delay_s)
        self._bridge.shape(f"to{number}", bytes_per_s, delay_s)

    def heal(self) -> None:
        for number, one in enumerate(self._places.values()):
            one.run("neigh flush dev eth0 nud permanent")
            for namespace, device in ((one, "eth0"), (self._bridge, f"to{number}")):
                with contextlib.suppress(AssertionError):  # It was not slow.
                    namespace._do(["tc", "qdisc", "del", "dev", device, "root"])

    def _number(self, place: str) -> int:
        return list(self._places).index(place)

    def _address(self, place: str) -> str:
        """Return the address of a place, which is made where it is new."""
        if place not in self._places:
            namespace, number = Namespace(), len(self._places)
            self._places[place] = namespace
            self._bridge.run(
                f"link add to{number} type veth peer name eth0 netns {namespace.path}",
                f"link set to{number} master br0 up",
            )
            namespace.run("link set lo up", f"addr add 10.0.0.{number + 1}/24 dev eth0", "link set eth0 up")
        return f"10.0.0.{self._number(place) + 1}"
