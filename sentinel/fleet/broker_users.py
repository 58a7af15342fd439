"""Who may do what at the broker of a fleet: rights and logins of nodes, of joins, of workers and of who looks on.

The names and the forms are those of the `accounts` of a nats-server's configuration.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError
from sentinel.fleet import subjects
from sentinel.fleet.overheard import HEARD
from sentinel.printable import printable
from sentinel.private_files import create_file, make_directory
from sentinel.run_name import folder_name

ACCOUNT = "SENTINEL"
"""The account that has the streams."""
JOIN = "join"
WORKER = "worker"
STATUS = "status"
OURS = (JOIN, WORKER, STATUS)
"""Users that no node may be called as."""
RUN_CREDENTIALS = "run-credentials"
"""Folder of logins that are of one run: there are many of them, and a folder of the others may be handed on as a whole."""
JETSTREAM_API = "$JS.API.>"
"""Subjects of requests by which streams and consumers are made, read, purged and deleted."""
STREAM_RIGHTS = (
    *(f"$JS.API.STREAM.{act}.{{stream}}" for act in ("INFO", "CREATE", "UPDATE", "PURGE", "MSG.GET")),
    "$JS.API.CONSUMER.CREATE.{stream}",
    "$JS.API.CONSUMER.*.{stream}.>",
    "$JS.API.CONSUMER.DURABLE.CREATE.{stream}.*",
    "$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
)
"""Subjects of requests by which one stream is made and read, and what was taken from it is deleted."""
PASSWORD_BYTES = 32


class BrokerUser(msgspec.Struct, frozen=True, kw_only=True):
    """One user, and the subjects that it may publish and subscribe to; everything else is refused by the server."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def user_name(node: str, run: str | None = None) -> str:
    """Return what the user of a node is called: NODE, or NODE@RUN, by the run's folder, where it speaks of one run alone.

    run: its name; None: the user may speak of any. ConfigError.
    """
    if node in OURS or set("/@") & set(node) or node.startswith(".") or not node.isprintable() or not node:
        raise ConfigError(
            f"node {printable(node)!r}: expected a name that is a file's, without @, and none of {', '.join(OURS)}"
        )
    return node if run is None else f"{node}@{folder_name(run)}"


def node_user(name: str) -> BrokerUser:
    """Return the user of a node, by its name: it publishes the node's chunks and beats, and hears the answers to it."""
    ways = (subjects.TO_JOIN, subjects.TO_WORKERS)
    node, _, folder = name.partition("@")
    run = folder or None
    return BrokerUser(
        name=name,
        publish=tuple(publish(run, node) for way in ways for publish in (way.chunk, way.beat)),
        subscribe=(*(way.answer(run, node) for way in ways), f"{subjects.inbox(name)}.>"),
    )


def join_user() -> BrokerUser:
    """Return the user of all joins: it hears every node, answers, and administers the streams."""
    return BrokerUser(
        name=JOIN,
        publish=(subjects.ANSWERS, subjects.LEASE, JETSTREAM_API),
        subscribe=(subjects.BEATS, f"{subjects.inbox(JOIN)}.>"),
    )


def worker_user() -> BrokerUser:
    """Return the user of all workers: they hear nodes that ship to workers, speak in their names, and have two streams."""
    streams = (subjects.FRAMES_STREAM, subjects.PARTITIONS_STREAM)
    return BrokerUser(
        name=WORKER,
        publish=(
            subjects.RAW, subjects.BEATS, subjects.FRAMES_ANSWERS, subjects.PARTITIONS, subjects.WORKERS,
            *(right.format(stream=stream) for stream in streams for right in STREAM_RIGHTS),
        ),
        subscribe=(subjects.FRAMES_BEATS, subjects.ANSWERS, f"{subjects.inbox(WORKER)}.>"),
    )  # fmt: skip


def status_user() -> BrokerUser:
    """Return the user of `sentinel fleet status`: it hears what is said, and publishes nothing."""
    return BrokerUser(name=STATUS, publish=(), subscribe=HEARD)


def user_of(name: str, run: str | None = None) -> BrokerUser:
    """Return `join`, `worker` or `status`, or the user of a node, as of `user_name`. ConfigError."""
    shared = {user.name: user for user in (join_user(), worker_user(), status_user())}
    if name not in shared:
        return node_user(user_name(name, run))
    if run is not None:
        raise ConfigError(f"{name}: expected a node where a run is named, for {', '.join(OURS)} have to do with all runs")
    return shared[name]


def write_users(credentials: Path, nodes: Sequence[str]) -> str:
    """Write a login for each user of a node, joins, workers and who looks on, where it has none; return their `accounts`.

    credentials: folder of the logins, each called as its user; those of one run are in `run-credentials` beside it. nodes:
    names of users, as of `user_name`. ConfigError, OSError.
    """
    of_runs = credentials.parent / RUN_CREDENTIALS
    shared, own = [join_user(), worker_user(), status_user()], [node_user(name) for name in dict.fromkeys(nodes)]
    where = {user.name: of_runs if "@" in user.name else credentials for user in (*shared, *own)}
    for folder in dict.fromkeys(where.values()):
        make_directory(folder)
    known = {name: password_in(folder / name, name) for name, folder in where.items()}
    return accounts([(user, known[user.name]) for user in shared], [(user, known[user.name]) for user in own])


def password_in(login: Path, user: str) -> str:
    """Return the password of a login file, which is made with a new one where there is none. ConfigError, OSError."""
    try:
        lines = login.read_text("utf-8").splitlines()
    except FileNotFoundError:
        password = secrets.token_urlsafe(PASSWORD_BYTES)
        with os.fdopen(create_file(login, os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW), "w") as file:
            file.write(f"{user}\n{password}\n")
        return password
    if len(lines) < 2 or lines[0] != user or len(lines[1]) < 16:
        raise ConfigError(f"{login}: expected user {user} and a password in two lines, got others; delete it for new ones")
    return lines[1]


def accounts(users: Sequence[tuple[BrokerUser, str]], nodes: Sequence[tuple[BrokerUser, str]]) -> str:
    """Return the lines of a nats-server's configuration that know these users, each with its password.

    users: of the account that has the streams. nodes: each gets an account of its own, which sees of that one its own
    subjects alone. Rights do not bind the subject to which a message asks to be acknowledged, and an account does: a node
    could have a stream purged by the server's own acknowledgement.
    """
    shared = []
    own = []
    for user, password in nodes:
        account = _quoted(f"NODE_{subjects.token(user.name)}")
        answers = [one for one in user.subscribe if not one.startswith("_INBOX")]
        shared += [f"      {{ service: {_quoted(one)}, accounts: [{account}] }}" for one in user.publish]
        shared += [f"      {{ stream: {_quoted(one)}, accounts: [{account}] }}" for one in answers]
        own += [f"  {account} {{", f"    users: [{_user(user, password)}]", "    imports: ["]
        for kind, names in (("service", user.publish), ("stream", answers)):
            own += [f"      {{ {kind}: {{ account: {ACCOUNT}, subject: {_quoted(one)} }} }}" for one in names]
        own += ["    ]", "  }"]
    joins = [f"      {_user(user, password)}" for user, password in users]
    lines = ["accounts {", f"  {ACCOUNT} {{", "    jetstream: enabled", "    users: [", *joins, "    ]"]
    return "\n".join([*lines, "    exports: [", *shared, "    ]", "  }", *own, "}", ""])


def nsc_command(user: BrokerUser) -> str:
    """Return the command of `nsc` that makes the user in an account of an operator, for a shell."""
    publish = ("--allow-pub", ",".join(user.publish)) if user.publish else ("--deny-pub", ">")
    return shlex.join(["nsc", "add", "user", "--name", user.name, *publish, "--allow-sub", ",".join(user.subscribe)])


def _user(user: BrokerUser, password: str) -> str:
    # A list that is empty allows everything: what may publish nothing is denied all.
    publish = f"allow: {_list(user.publish)}" if user.publish else 'deny: [">"]'
    rights = f"publish: {{ {publish} }}, subscribe: {{ allow: {_list(user.subscribe)} }}"
    return f"{{ user: {_quoted(user.name)}, password: {_quoted(password)}, permissions: {{ {rights} }} }}"


def _list(names: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_quoted, names))}]"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
