"""A real nats-server with JetStream, which a test may kill, whose store it may cut, and which it may start again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from .ports import free_port
from .servers import need
from .waiting import wait_for


class NatsBroker:
    """On a free loopback port; skips the test where nats-server is not installed."""

    def __init__(
        self, directory: Path, config: str = "", *, host: str = "127.0.0.1", port: int = 0, store: Path | None = None
    ) -> None:
        """config: further lines of its configuration. host and port: another address. store: another place of its own."""
        need("nats-server")
        self.host, self.port = host, port or free_port()
        self.store = store or directory / "store"
        self.url = f"nats://{host}:{self.port}"
        self._log = directory / "nats.log"
        self._config = directory / "nats.conf"
        directory.mkdir(parents=True, exist_ok=True)
        # Without a limit it would take three quarters of its disk, and refuse what the disk still takes.
        jetstream = f'store_dir: "{self.store}", max_file_store: 64GB'
        self._config.write_text(f'listen: "{host}:{self.port}"\njetstream {{ {jetstream} }}\n{config}\n')
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NatsBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with self._log.open("ab") as log:
            arguments: Sequence[str] = (str(shutil.which("nats-server")), "-c", str(self._config))
            self.process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self._listens, f"nats-server on {self.port}: {self._log.read_text()[-500:]}")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(240)
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        """Have it stand still, and go on."""
        assert self.process is not None
        self.process.send_signal(number)

    def lose_messages(self) -> int:
        """Delete the messages of all streams while it is down, as after a loss of power; return the bytes that were lost."""
        assert self.process is None
        num_bytes = 0
        for block in self.store.rglob("msgs/*"):
            num_bytes += block.stat().st_size
            block.unlink()
        return num_bytes

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0


class NatsCluster:
    """Three servers on loopback that hold streams together; skips the test where nats-server is not installed."""

    def __init__(
        self, directory: Path, config: str = "", *, stores: Mapping[int, Path] | None = None, num_servers: int = 3
    ) -> None:
        """config: of each server, as of `NatsBroker`. stores: of some, by their numbers. num_servers: one needs no other."""
        at = [f"127.0.0.1:{free_port()}" for _ in range(num_servers)]
        routes = ", ".join(f'"nats://{one}"' for one in at)
        self.servers = [
            NatsBroker(
                directory / f"n{number}",
                f"server_name: n{number}\n{config}\n"
                + (f'cluster {{ name: sentinel, listen: "{own}", routes: [{routes}] }}' if num_servers > 1 else ""),
                store=(stores or {}).get(number),
            )
            for number, own in enumerate(at)
        ]
        self.url = ",".join(one.url for one in self.servers)

    def at(self, place: str) -> AbstractContextManager[None]:
        """As of a cluster that can be parted (`partitions`): here all places are one."""
        return nullcontext()

    def url_at(self, place: str, servers: tuple[str, ...] = ("n0", "n1", "n2")) -> str:
        """Return the addresses of servers by their names."""
        return ",".join(self.servers[int(one[1:])].url for one in servers)

    def url_without(self, left_out: NatsBroker) -> str:
        """Return the addresses of the other servers."""
        return ",".join(one.url for one in self.servers if one is not left_out)

    def __enter__(self) -> NatsCluster:
        for one in self.servers:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.servers:
            one.kill()
