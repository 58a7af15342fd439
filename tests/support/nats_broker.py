"""A real nats-server with JetStream, which a test may kill, whose store it may cut, and which it may start again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .ports import free_port
from .servers import need
from .waiting import wait_for


class NatsBroker:
    """On a free loopback port; skips the test where nats-server is not installed."""

    def __init__(self, directory: Path, config: str = "") -> None:
        """config: further lines of its configuration."""
        need("nats-server")
        self.port = free_port()
        self.store = directory / "store"
        self.url = f"nats://127.0.0.1:{self.port}"
        self._log = directory / "nats.log"
        self._config = directory / "nats.conf"
        directory.mkdir(parents=True, exist_ok=True)
        self._config.write_text(f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.store}" }}\n{config}\n')
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NatsBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with self._log.open("ab") as log:
            arguments: Sequence[str] = (str(shutil.which("nats-server")), "-c", str(self._config))
            self._process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
        wait_for(self._listens, f"nats-server on {self.port}: {self._log.read_text()[-500:]}")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(240)
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Have it stand still, and go on."""
        assert self._process is not None
        self._process.send_signal(number)

    def lose_messages(self) -> int:
        """Delete the messages of all streams while it is down, as after a loss of power; return the bytes that were lost."""
        assert self._process is None
        num_bytes = 0
        for block in self.store.rglob("msgs/*"):
            num_bytes += block.stat().st_size
            block.unlink()
        return num_bytes

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class NatsCluster:
    """Three servers on loopback that hold streams together; skips the test where nats-server is not installed."""

    def __init__(self, directory: Path) -> None:
        at = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        routes = ", ".join(f'"nats://{one}"' for one in at)
        self.servers = [
            NatsBroker(
                directory / f"n{number}",
                f'server_name: n{number}\ncluster {{ name: sentinel, listen: "{own}", routes: [{routes}] }}',
            )
            for number, own in enumerate(at)
        ]
        self.url = ",".join(one.url for one in self.servers)

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
