"""Logins of one run beside those of any: who is named where, and that a server holds a login of a run to that run."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nats.aio.client import Client

from sentinel.errors import ConfigError
from sentinel.fleet import subjects
from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, ensure_streams
from sentinel.fleet.broker_users import node_user, user_name, user_of
from sentinel.fleet.users_conf import let_in, users_in

from ..support.broker_acts import Act, act_as, until_refused
from ..support.fleet_parts import Join, Shipper, assert_same_results, bytes_of, recorded_run, split
from ..support.nats_broker import NatsBroker
from ..support.waiting import wait_for

ODD = 'g"pu 1.*>\\ö'


def named(directory: Path) -> list[str]:
    """Return whom a server would let in."""
    return users_in((directory / "users.conf").read_text())


def login_of(directory: Path, user: str) -> Path:
    """Return the file of a login."""
    return directory / ("run-credentials" if "@" in user else "credentials") / user


def test_nodes_of_runs_and_of_any_run_are_named_apart_and_keep_their_passwords(tmp_path: Path) -> None:
    let_in(tmp_path, ["n1", "n2"])
    let_in(tmp_path, ["n1", "n3"], "A")
    let_in(tmp_path, ["n1"], "A run.B")
    assert named(tmp_path) == ["n1", "n2", "n1@A", "n3@A", "n1@A%20run.B"]
    files = {user: login_of(tmp_path, user).read_text() for user in named(tmp_path)}
    assert [text.splitlines()[0] for text in files.values()] == list(files)
    assert len({text.splitlines()[1] for text in files.values()}) == len(files)

    for nodes, run in ((["n2", "n4"], None), (["n3"], "A"), ([], "A run.B")):
        let_in(tmp_path, nodes, run)

    assert sorted(named(tmp_path)) == ["n2", "n3@A", "n4"]
    let_in(tmp_path, ["n1", "n3"], "A")
    let_in(tmp_path, ["n1", "n2"])
    assert sorted(named(tmp_path)) == ["n1", "n1@A", "n2", "n3@A"]
    assert all(login_of(tmp_path, user).read_text() == text for user, text in files.items())
    assert all(login_of(tmp_path, user).stat().st_mode & 0o777 == 0o600 for user in files)


def test_names_of_nodes_and_runs_may_be_odd(tmp_path: Path) -> None:
    let_in(tmp_path, [ODD])
    let_in(tmp_path, [ODD], 'r/u@n."')

    assert named(tmp_path) == [ODD, f"{ODD}@r%2Fu%40n.%22"]
    of_any, of_run = map(node_user, named(tmp_path))
    for mine, other in ((of_any, of_run), (of_run, of_any)):
        assert not set(mine.publish) & set(other.publish) and not set(mine.subscribe) & set(other.subscribe)
    for one in of_run.publish:
        assert one.startswith("sn.r%252Fu%2540n%2E%2522.") and not set(one) & set(" *>@")


def test_what_cannot_be_a_node_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    let_in(tmp_path, ["n1"], "A")
    before = (tmp_path / "users.conf").read_text()
    for name in ("", "a/b", ".a", "a@b", "join", "worker", "status", "a\nb"):
        with pytest.raises(ConfigError, match="expected a name that is a file's, without @"):
            let_in(tmp_path, ["n2", name], "A")
    with pytest.raises(ConfigError, match="join: expected a node where a run is named"):
        user_of("join", "A")

    assert (tmp_path / "users.conf").read_text() == before
    assert user_name("n1", "A") == "n1@A" and user_of("n1", "A") == node_user("n1@A")


def test_a_full_disk_leaves_everybody_let_in(tmp_path: Path) -> None:
    let_in(tmp_path, ["n1", "n2"])
    let_in(tmp_path, ["n1"], "A")
    before = (tmp_path / "users.conf").read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            let_in(tmp_path, [], "A")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert (tmp_path / "users.conf").read_text() == before and not list(tmp_path.glob(".*.new"))
    let_in(tmp_path, [], "A")
    assert named(tmp_path) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("torn", "said"),
    [
        (lambda text: b"", "got an empty file"),
        (lambda text: text[:900], "got 900 bytes that are not, or not all, of that form"),
        (lambda text: text[:-2], "bytes that are not"),
        (lambda text: bytes(len(text)), "bytes that are not"),
        (lambda text: text.replace(b'users: [{ user: "n2"', bytes(20)), "bytes that are not"),
        (lambda text: text.replace(b'"n2"', b'"n\xff"'), "bytes that are not"),
    ],
    ids=["empty", "cut", "without its end", "zeros", "zeros inside", "no text"],
)
def test_of_a_file_that_is_not_whole_nobody_is_forgotten(tmp_path: Path, torn: Callable[[bytes], bytes], said: str) -> None:
    let_in(tmp_path, ["n1", "n2"])
    conf = tmp_path / "users.conf"
    before = torn(conf.read_bytes())
    conf.write_bytes(before)
    with pytest.raises(
        ConfigError, match=rf"users\.conf: expected the users .*{said}.*; put a copy of it back, or delete it"
    ):
        let_in(tmp_path, ["n3"], "A")

    assert conf.read_bytes() == before and not (tmp_path / "run-credentials").exists()
    conf.unlink()
    let_in(tmp_path, ["n3"], "A")
    assert named(tmp_path) == ["n3@A"]


def test_whoever_may_read_it_may_do_so_after_a_change(tmp_path: Path) -> None:
    let_in(tmp_path, ["n1"])
    conf = tmp_path / "users.conf"
    assert conf.stat().st_mode & 0o777 == 0o600
    conf.chmod(0o640)
    let_in(tmp_path, ["n1", "n2"])

    assert conf.stat().st_mode & 0o777 == 0o640


def test_of_jobs_that_begin_at_once_each_is_let_in(tmp_path: Path) -> None:
    runs = [f"run{number}" for number in range(8)]
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(lambda run: let_in(tmp_path, ["n1"], run), runs))

    assert sorted(named(tmp_path)) == [f"n1@{run}" for run in runs]


def is_kept_out(access: BrokerConfig) -> bool:
    """Return whether a server does not let a user in."""

    async def leave(client: Client, refused: list[str]) -> None:
        pass

    try:
        act_as(access, leave, within_s=1.0)
    except TimeoutError:
        return True
    return False


@pytest.mark.server
@pytest.mark.slow
def test_a_login_of_a_run_speaks_of_that_run_alone(tmp_path: Path) -> None:
    let_in(tmp_path, [ODD, "node-1"])
    for run in ("A", "B"):
        let_in(tmp_path, ["node-1", ODD], run)

    async def make(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)

    def publish(node: str) -> Act:
        async def act(client: Client, refused: list[str]) -> None:
            assert (await client.jetstream().publish(subjects.raw("A", node), b"mine", timeout=60.0)).seq
            await client.subscribe(subjects.answer("A", node))
            await client.publish(subjects.beat("A", node), b"mine")
            await client.flush()
            assert not refused
            for other in (subjects.raw("B", node), subjects.beat("B", node), subjects.frames_beat("B", node)):
                await client.publish(other, b"forged")
                await until_refused(refused, f'publish to "{other}"')
            for other in (subjects.answer("B", node), subjects.answer(None, node), subjects.frames_answer("B", node)):
                await client.subscribe(other)
                await until_refused(refused, f'subscription to "{other}"')

        return act

    def publish_any(node: str) -> Act:
        async def act(client: Client, refused: list[str]) -> None:
            for run in ("A", "B", "C"):
                assert (await client.jetstream().publish(subjects.raw(run, node), b"mine", timeout=60.0)).seq

        return act

    with NatsBroker(tmp_path / "broker", "include ../users.conf") as broker:

        def as_user(name: str) -> BrokerConfig:
            return BrokerConfig(server=broker.url, login_file=str(login_of(tmp_path, name)))

        assert not act_as(as_user("join"), make)
        for node in ("node-1", ODD):
            assert act_as(as_user(f"{node}@A"), publish(node))
            assert not act_as(as_user(node), publish_any(node))
        # A run that is over: its login is let in no more, and the others are.
        let_in(tmp_path, [], "A")
        broker.signal(signal.SIGHUP)
        wait_for(lambda: is_kept_out(as_user("node-1@A")))
        assert not act_as(as_user("node-1"), publish_any("node-1"))


@pytest.mark.server
@pytest.mark.slow
def test_a_node_with_a_login_of_its_run_ships_that_run_and_no_other(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "whole", "pp2 dp2", 8)
    nodes = split(run.directory, tmp_path, 2)
    foreign = recorded_run(tmp_path / "elsewhere", "dp4", 4)
    foreign.directory.rename(nodes[0] / "foreign")
    let_in(tmp_path, ["node1"])
    let_in(tmp_path, ["node0"], "run")
    with NatsBroker(tmp_path / "broker", "include ../users.conf") as broker:
        access = [
            BrokerConfig(server=broker.url, login_file=str(login_of(tmp_path, one)))
            for one in ("join", "node0@run", "node1")
        ]
        join = Join(tmp_path / "joined", access[0])
        shippers = [Shipper(path, path.name, one) for path, one in zip(nodes, access[1:], strict=True)]
        own = [path / "run" for path in nodes]
        wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(own))

        assert shippers[1].end()
        shippers[0].drop()
        join.finish()
    assert_same_results(run.directory, join.run_dir)
    assert sorted(join.copies.nodes()) == ["run"]
