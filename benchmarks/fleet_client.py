"""What the client of the broker takes of a join's core, which `fleet_scale.py` has not in it.

    python benchmarks/fleet_client.py [--nodes 32] [--steps 4] [--layers 280] [--paced-as 2048] [--a-second 2500]

Messages are those of `fleet_scale.py`'s nodes behind their first steps, in their order, handed to a real nats-server so many
a second. Real: the server, and in a process of its own the thread of a join that reads the stream, hears what nodes say and
answers, without what it hands that to. Printed: microseconds of that process for a message of the stream, and for a beat
and its answer, what it takes when nothing comes left out; the same less what `unseal` and `seal` take, which are in the
figures of `fleet_scale.py`; and what that comes to with so many nodes as are paced, in seconds of a core a step.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from fleet_daemon import cpu_s

from sentinel.fleet import subjects
from sentinel.fleet.broker import BrokerConfig, connect
from sentinel.fleet.join_intake import JoinIntake
from sentinel.fleet.join_lease import JoinLease, LeaseTimes
from sentinel.fleet.sealed import PLAIN_VERSION, Answer, Beat, Published, SpoolHeld, seal, unseal, unseal_published
from tests.support.nats_broker import NatsBroker

STEP_S = 10
IDLE_S = 5.0


class Taken:
    """In place of the copies of a join: takes what comes, and answers at once."""

    directory = Path("nowhere")

    def recall(self) -> None:
        """Nothing lies anywhere."""

    def has_room(self) -> bool:
        """There is."""
        return True

    def take(self, published: Published) -> None:
        """Do nothing with it."""

    def take_beat(self, beat: Beat, *, is_drained: bool) -> Answer:
        """Return an answer of the usual size."""
        held = {folder: SpoolHeld(head.sent, head.acked) for folder, head in beat.spools.items()}
        return Answer(
            version=PLAIN_VERSION, join="bench", stamp=time.monotonic_ns(), node=beat.node, run=beat.run, spools=held,
            is_drained=is_drained, to=beat.number,
        )  # fmt: skip

    def release(self, may_act: Any) -> int:
        """Nothing waits."""
        return 0

    def refuse(self, what: str, why: str) -> None:
        """Say it: nothing is to be refused here."""
        print(what, why, file=sys.stderr)

    def end(self, why: str) -> None:
        """Nobody waits."""


def take(url: str) -> None:
    """Be the thread of a join until standard input ends."""
    copies: Any = Taken()
    intake = JoinIntake(copies, BrokerConfig(server=url), JoinLease("bench", LeaseTimes(takeover_s=30.0)))
    intake.start()
    sys.stdin.read()
    intake.close()


def spoken(given: argparse.Namespace) -> list[tuple[bool, str, bytes]]:
    """Return (is it a beat, its subject, the message) of what nodes say behind their first steps."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        said, numbers = Path(name) / "said", (given.nodes, 0, given.steps, given.layers, STEP_S, given.paced_as, 0)
        script = Path(__file__).parent / "fleet_scale.py"
        subprocess.run(
            [sys.executable, str(script), "--fleet", str(said), *map(str, numbers)], stdout=subprocess.DEVNULL, check=True
        )
        found, is_steady = list[tuple[bool, str, bytes]](), False
        with said.open("rb") as file:
            while file.peek(1):
                _, is_beat, data = pickle.load(file)
                if is_steady:
                    one = unseal(data, Beat) if is_beat else unseal_published(data)[0]
                    found.append((is_beat, (subjects.beat if is_beat else subjects.raw)(one.run, one.node), data))
                is_steady |= not data
    return found


async def measured(url: str, process: subprocess.Popen[bytes], given: argparse.Namespace) -> None:
    """Send what nodes say, and print what it takes."""
    client = await connect(BrokerConfig(server=url), "benchmark")
    jetstream, num_answers, answered = client.jetstream(), 0, list[bytes]()

    async def hear(message: Any) -> None:
        nonlocal num_answers
        num_answers += 1
        answered[:] = [message.data]

    await client.subscribe(subjects.ANSWERS, cb=hear)
    while True:
        try:
            if (await jetstream.stream_info(subjects.STREAM)).state.consumer_count:
                break
        except Exception:  # It is made by the join.
            await asyncio.sleep(0.1)
    cpu, began = cpu_s(process), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    idle = (cpu_s(process) - cpu) / (time.perf_counter() - began)
    said = spoken(given)
    print(f"{'':8}{'messages':>10}{'a node, step':>14}{'kB':>8}{'us':>8}{'without sealing':>17}{'a second':>10}")
    takes_s = 0.0
    for is_beat in (False, True):
        wanted = [(subject, data) for is_one, subject, data in said if is_one == is_beat]
        headers = None if is_beat else {"Nats-Expected-Stream": subjects.STREAM}
        num_answers, cpu, began = 0, cpu_s(process), time.perf_counter()
        for at, (subject, data) in enumerate(wanted):
            await client.publish(subject, data, headers=headers)
            if at % 20 == 0:
                await asyncio.sleep(max(0.0, began + at / given.a_second - time.perf_counter()))
        await client.flush()
        sent_s = time.perf_counter() - began
        while num_answers < len(wanted) if is_beat else (await jetstream.stream_info(subjects.STREAM)).state.messages:
            await asyncio.sleep(0.1)
        took = cpu_s(process) - cpu - idle * (time.perf_counter() - began)
        began = time.process_time()
        for _, data in wanted:
            if is_beat:
                unseal(data, Beat)
                seal(unseal(answered[0], Answer))
            else:
                unseal_published(data)
        sealing = time.process_time() - began
        a_step = len(wanted) / given.nodes / given.steps
        takes_s += given.paced_as * a_step * (took - sealing) / len(wanted)
        print(
            f"{'beats' if is_beat else 'stream':8}{len(wanted):10}{a_step:14.2f}"
            f"{sum(len(data) for _, data in wanted) / len(wanted) / 1e3:8.1f}{1e6 * took / len(wanted):8.1f}"
            f"{1e6 * (took - sealing) / len(wanted):17.1f}{len(wanted) / sent_s:10.0f}",
            flush=True,
        )
    print(f"idle {100 * idle:.1f} % of a core; {given.paced_as} nodes: {takes_s:.2f} s of a core a step")
    await client.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=280)
    parser.add_argument("--paced-as", type=int, default=2048)
    parser.add_argument("--a-second", type=float, default=2500.0)
    parser.add_argument("--take", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.take:
        take(given.take)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, NatsBroker(Path(name)) as broker:
        process = subprocess.Popen([sys.executable, __file__, "--take", broker.url], stdin=subprocess.PIPE)
        try:
            asyncio.run(measured(broker.url, process, given))
        finally:
            process.communicate()


if __name__ == "__main__":
    main()
