"""Credentials of operator mode: what a file of them must be, what a server lets their user do, and how they are rotated."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from sentinel.errors import ConfigError
from sentinel.fleet import subjects
from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, connect, ensure_streams
from sentinel.fleet.broker_users import BrokerUser, node_user, user_of, write_users
from sentinel.fleet.overheard import overhear

from ..support.broker_acts import Act, act_as, until_refused
from ..support.certificates import write_pair
from ..support.fleet_parts import Join, Shipper, assert_same_results, bytes_of, recorded_run, split
from ..support.nats_broker import NatsBroker
from ..support.nats_operator import NatsOperator
from ..support.waiting import wait_for

SHARED = "SENTINEL"


@pytest.fixture
def operator() -> NatsOperator:
    """An operator with one account, of all users."""
    found = NatsOperator()
    found.add_account(SHARED, streams=True)
    return found


@pytest.fixture
def operated(tmp_path: Path, operator: NatsOperator) -> Iterator[NatsBroker]:
    """A server of the operator."""
    with NatsBroker(tmp_path / "broker", operator.config) as running:
        yield running


def access(broker: NatsBroker, creds: Path) -> BrokerConfig:
    """Return how a server is reached with credentials."""
    return BrokerConfig(server=broker.url, creds_file=str(creds))


def refusal(creds: Path) -> str:
    """Return what is said of a file of credentials."""
    with pytest.raises(ConfigError) as refused:
        BrokerConfig(server="nats://host:4222", creds_file=str(creds)).credentials()
    return str(refused.value)


def test_a_file_of_credentials_is_read_and_one_that_is_none_says_what_it_lacks(
    tmp_path: Path, operator: NatsOperator
) -> None:
    creds = operator.write_creds(tmp_path / "creds", SHARED, node_user("node-1"))
    text = creds.read_text()
    _, _, after_jwt = text.partition("END NATS USER JWT")

    found = BrokerConfig(server="nats://host:4222", creds_file=str(creds)).credentials()

    assert found is not None and found.user == "node-1" and found.jwt in text and found.seed in text
    assert "No such file" in refusal(tmp_path / "none")
    for other, said in (
        (after_jwt, "got no JWT"),
        (text.replace("USER NKEY SEED", "USER NKEY"), "got no seed"),
        (text.replace(found.jwt, "eyJ.e30.x"), "got a JWT that cannot be read"),
        (text.replace(found.jwt, f"{found.jwt}.x"), "got a JWT that cannot be read"),
        (text.replace(found.seed, "SUAAAA"), "got a seed that is none"),
        (text.replace("-----BEGIN NATS USER JWT-----\n", ""), "got no JWT"),
        ("", "got no JWT"),
    ):
        creds.write_text(other)
        assert said in refusal(creds) and str(creds) in refusal(creds) and "have it written anew" in refusal(creds)
        assert found.seed not in refusal(creds)
    creds.write_text(text)
    for mode in (0o640, 0o604):
        creds.chmod(mode)
        assert refusal(creds) == f"{creds}: expected a file that only its owner may read, got mode {mode:04o}; chmod 600"


def test_a_jwt_and_a_seed_of_two_users_are_told_apart(tmp_path: Path, operator: NatsOperator) -> None:
    one = operator.write_creds(tmp_path / "one", SHARED, node_user("node-1"))
    other = BrokerConfig(server="nats://h:1", creds_file=str(operator.write_creds(tmp_path / "two", SHARED, node_user("n"))))
    seed = other.credentials()
    assert seed is not None

    operator.write_creds(one, SHARED, node_user("node-1"), seed=seed.seed.encode())

    assert "and the seed of U" in refusal(one)


def test_a_user_without_a_name_has_no_inbox(tmp_path: Path, operator: NatsOperator) -> None:
    nameless = BrokerUser(name="", publish=("x",), subscribe=("y",))

    assert "got a JWT that does not name its user" in refusal(operator.write_creds(tmp_path / "creds", SHARED, nameless))


def test_a_login_and_credentials_are_not_both_given() -> None:
    with pytest.raises(ConfigError, match="--login and --creds: expected one or none, got both"):
        BrokerConfig(server="nats://host:4222", login_file="login", creds_file="creds")


def test_credentials_without_the_package_for_keys_say_what_to_install(
    tmp_path: Path, operator: NatsOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    creds = operator.write_creds(tmp_path / "creds", SHARED, node_user("node-1"))
    monkeypatch.setitem(sys.modules, "nkeys", None)

    assert 'pip install "sentinel[fleet]" (nkeys)' in refusal(creds)


@pytest.mark.server
@pytest.mark.slow
def test_a_node_with_credentials_ships_to_a_join_with_some(
    tmp_path: Path, operator: NatsOperator, operated: NatsBroker
) -> None:
    run = recorded_run(tmp_path / "whole", "pp2 dp2", 8)
    nodes = split(run.directory, tmp_path, 2)
    creds = {
        user.name: operator.write_creds(tmp_path / f"{user.name}.creds", SHARED, user)
        for user in (user_of("join"), user_of("status"), user_of("node0"), user_of("node1", "run"))
    }

    join = Join(tmp_path / "joined", access(operated, creds["join"]))
    shippers = [
        Shipper(path, path.name, access(operated, one))
        for path, one in zip(nodes, (creds["node0"], creds["node1@run"]), strict=True)
    ]
    wait_for(lambda: join.turn() or join.copies.counts["bytes"] >= bytes_of(nodes))
    said = asyncio.run(overhear(access(operated, creds["status"]), 1.5))

    assert [one.node for one in said] == ["node0", "node1"]
    assert [one.end() for one in shippers] == [True, True]
    join.finish()
    assert_same_results(run.directory, join.run_dir)


@pytest.mark.server
@pytest.mark.slow
def test_a_user_by_jwt_speaks_of_its_own_alone(tmp_path: Path, operator: NatsOperator, operated: NatsBroker) -> None:
    creds = {
        user.name: operator.write_creds(tmp_path / f"{user.name}.creds", SHARED, user)
        for user in (user_of("join"), user_of("status"), user_of("node-1"), user_of("node-1", "A"))
    }

    async def make(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)

    async def of_any_run(client: Client, refused: list[str]) -> None:
        for run in ("A", "B"):
            assert (await client.jetstream().publish(subjects.raw(run, "node-1"), b"mine", timeout=60.0)).seq
        for other in (subjects.raw("A", "node-2"), subjects.answer("A", "node-1"), "$JS.API.STREAM.PURGE.SENTINEL_RAW"):
            await client.publish(other, b"forged")
            await until_refused(refused, f'publish to "{other}"')

    async def of_one_run(client: Client, refused: list[str]) -> None:
        assert (await client.jetstream().publish(subjects.raw("A", "node-1"), b"mine", timeout=60.0)).seq
        for other in (subjects.raw("B", "node-1"), subjects.beat("B", "node-1"), subjects.frames("B", "node-1")):
            await client.publish(other, b"forged")
            await until_refused(refused, f'publish to "{other}"')
        for other in (subjects.answer("B", "node-1"), subjects.answer(None, "node-1"), f"{subjects.inbox('node-1')}.>"):
            await client.subscribe(other)
            await until_refused(refused, f'subscription to "{other}"')

    async def look_on(client: Client, refused: list[str]) -> None:
        await client.publish(subjects.beat("A", "node-1"), b"forged")
        await until_refused(refused, f'publish to "{subjects.beat("A", "node-1")}"')

    assert not act_as(access(operated, creds["join"]), make)
    assert act_as(access(operated, creds["node-1"]), of_any_run)
    assert act_as(access(operated, creds["node-1@A"]), of_one_run)
    assert act_as(access(operated, creds["status"]), look_on)


@pytest.mark.server
@pytest.mark.slow
def test_an_account_of_a_run_bounds_what_its_users_may_say_and_where_acknowledgements_go(tmp_path: Path) -> None:
    operator = NatsOperator()
    exports = [
        {"name": subject, "subject": subject, "type": kind}
        for kind, names in (("service", (subjects.RAW, subjects.BEATS)), ("stream", (subjects.ANSWERS,)))
        for subject in names
    ]
    operator.add_account(SHARED, exports=exports, streams=True)
    one = node_user("node-1@A")
    imports = [
        *(operator.import_of(SHARED, "service", subject) for subject in one.publish if ".frames" not in subject),
        operator.import_of(SHARED, "stream", subjects.answer("A", "node-1")),
    ]
    operator.add_account("TEAM", imports=imports)
    # Whoever has the team's keys may give its users any rights.
    free = BrokerUser(name="node-1@A", publish=(">",), subscribe=(">",))
    creds = operator.write_creds(tmp_path / "node.creds", "TEAM", free)
    join = operator.write_creds(tmp_path / "join.creds", SHARED, user_of("join"))

    async def fill(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)
        await client.jetstream().publish(subjects.LEASE, b"record")

    async def speak(client: Client, refused: list[str]) -> None:
        for other in (subjects.raw("B", "node-1"), subjects.raw("A", "node-2"), subjects.LEASE):
            await client.publish(other, b"goes nowhere")
        await client.publish(subjects.raw("A", "node-1"), b"mine", reply=f"$JS.API.STREAM.PURGE.{subjects.LEASES}")
        assert (await client.jetstream().publish(subjects.raw("A", "node-1"), b"last", timeout=60.0)).seq == 2

    async def look(client: Client, refused: list[str]) -> None:
        states = [(await client.jetstream().stream_info(name)).state for name in (subjects.STREAM, subjects.LEASES)]
        assert [state.messages for state in states] == [2, 1]

    with NatsBroker(tmp_path / "broker", operator.config) as broker:
        for user, act in ((join, fill), (creds, speak), (join, look)):
            assert not act_as(access(broker, user), act)


@pytest.mark.server
@pytest.mark.slow
def test_in_one_account_for_all_an_acknowledgement_may_be_asked_for_elsewhere(
    tmp_path: Path, operator: NatsOperator, operated: NatsBroker
) -> None:
    node = operator.write_creds(tmp_path / "node.creds", SHARED, user_of("node-1"))
    join = operator.write_creds(tmp_path / "join.creds", SHARED, user_of("join"))

    async def fill(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)
        await client.jetstream().publish(subjects.LEASE, b"record")

    def ask(elsewhere: str) -> Act:
        async def act(client: Client, refused: list[str]) -> None:
            await client.publish(subjects.raw("A", "node-1"), b"mine", reply=elsewhere)
            assert (await client.jetstream().publish(subjects.raw("A", "node-1"), b"last", timeout=60.0)).seq

        return act

    def find(num_records: int) -> Act:
        async def act(client: Client, refused: list[str]) -> None:
            async with asyncio.timeout(60.0):
                while (await client.jetstream().stream_info(subjects.LEASES)).state.messages != num_records:
                    await asyncio.sleep(0.02)

        return act

    # What the pages say of permissions without accounts. A server that refuses it is better, and they are to say so.
    purge = f"$JS.API.STREAM.PURGE.{subjects.LEASES}"
    for user, act in ((join, fill), (node, ask(subjects.LEASE)), (join, find(2)), (node, ask(purge)), (join, find(0))):
        assert not act_as(access(operated, user), act)


async def until_connected_again(client: Client, times: int) -> None:
    async with asyncio.timeout(60.0):
        while client.stats["reconnects"] < times or not client.is_connected:
            await asyncio.sleep(0.02)


async def publish_mine(client: Client) -> int:
    return int((await client.jetstream().publish(subjects.raw("A", "node-1"), b"mine", timeout=60.0)).seq)


@pytest.mark.server
@pytest.mark.slow
def test_credentials_are_read_anew_at_each_connection(
    tmp_path: Path, operator: NatsOperator, operated: NatsBroker, caplog: pytest.LogCaptureFixture
) -> None:
    join = operator.write_creds(tmp_path / "join.creds", SHARED, user_of("join"))
    creds = tmp_path / "node.creds"

    async def make(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)

    async def rotate() -> None:
        operator.write_creds(creds, SHARED, node_user("node-1"), expires_s=3.0)
        client = await connect(access(operated, creds), "test")
        assert await publish_mine(client) == 1
        # The server ends the connection as these expire. Until others are there it refuses, and it is tried again.
        async with asyncio.timeout(60.0):
            while "authorization violation" not in caplog.text.lower():
                await asyncio.sleep(0.02)
        for other, said in ((node_user("node-2"), "got node-2"), (None, "No such file")):
            if other is None:
                creds.unlink()
            else:
                operator.write_creds(creds, SHARED, other)
            async with asyncio.timeout(60.0):
                while said not in caplog.text:
                    await asyncio.sleep(0.02)
        operator.write_creds(creds, SHARED, node_user("node-1"))
        await until_connected_again(client, 1)
        assert await publish_mine(client) == 2
        # So it is where the connection was lost, and the key is another.
        operator.write_creds(creds, SHARED, node_user("node-1"))
        await client.force_reconnect()
        await until_connected_again(client, 2)
        assert await publish_mine(client) == 3
        await client.close()

    assert not act_as(access(operated, join), make)
    asyncio.run(rotate())
    assert "authentication expired" in caplog.text.lower()


@pytest.mark.server
@pytest.mark.slow
def test_certificates_are_read_anew_at_each_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Signed by itself, it is what the server is known by, and what either shows the other.
    certificate, key = write_pair(tmp_path)
    both = f'cert_file: "{certificate}", key_file: "{key}", ca_file: "{certificate}", verify: true'

    async def go_on(broker: NatsBroker) -> None:
        server = broker.url.replace("nats:", "tls:")
        files = BrokerConfig(server=server, ca_file=str(certificate), cert_file=str(certificate), key_file=str(key))
        client = await connect(files, "test")
        broker.kill()
        write_pair(tmp_path)
        broker.start()
        certificate.rename(tmp_path / "away")
        async with asyncio.timeout(60.0):
            while "expected certificates in PEM, got: No such file" not in caplog.text:
                await asyncio.sleep(0.02)
        (tmp_path / "away").rename(certificate)
        await until_connected_again(client, 1)
        await client.close()

    with NatsBroker(tmp_path / "broker", f"tls {{ {both} }}") as broker:
        asyncio.run(go_on(broker))


@pytest.mark.server
@pytest.mark.slow
def test_a_password_is_changed_under_a_node_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logins, conf = tmp_path / "credentials", tmp_path / "users.conf"
    conf.write_text(write_users(logins, ["node-1"]))

    async def go_on(broker: NatsBroker) -> None:
        client = await connect(BrokerConfig(server=broker.url, login_file=str(logins / "node-1")), "test")
        (logins / "node-1").unlink()
        conf.write_text(write_users(logins, ["node-1"]))
        broker.signal(signal.SIGHUP)
        await until_connected_again(client, 1)
        # Only the login of now is taken.
        (logins / "node-1").write_text("node-1\nguessed\n")
        await client.force_reconnect()
        async with asyncio.timeout(60.0):
            while caplog.text.lower().count("authorization violation") < 2:
                await asyncio.sleep(0.02)
        assert client.stats["reconnects"] == 1 and not client.is_connected
        await client.close()

    with NatsBroker(tmp_path / "broker", "include ../users.conf") as broker:
        asyncio.run(go_on(broker))
