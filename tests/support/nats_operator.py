"""An operator of NATS on paper: accounts and users whose rights are in JWTs that it signed, and files of credentials."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nkeys

from sentinel.fleet.broker_users import BrokerUser

HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
UNBOUNDED = {"subs": -1, "data": -1, "payload": -1}
JETSTREAM = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
SYSTEM = "SYS"


class NatsOperator:
    """Signs accounts, and users for them; a server that has `config` lets in those users alone."""

    def __init__(self) -> None:
        self._key = key_pair(nkeys.PREFIX_BYTE_OPERATOR)
        self._accounts: dict[str, nkeys.KeyPair] = {}
        self._claims: dict[str, dict[str, Any]] = {}
        self.add_account(SYSTEM)

    def add_account(
        self,
        name: str,
        *,
        exports: Sequence[dict[str, Any]] = (),
        imports: Sequence[dict[str, Any]] = (),
        streams: bool = False,
    ) -> None:
        """Make an account. exports and imports: as claims have them. streams: it has JetStream."""
        self._accounts[name] = key_pair(nkeys.PREFIX_BYTE_ACCOUNT)
        limits = {**UNBOUNDED, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
        self._claims[name] = {
            "type": "account", "version": 2, "limits": {**limits, **(JETSTREAM if streams else {})},
            "exports": list(exports), "imports": list(imports),
        }  # fmt: skip

    def import_of(self, account: str, kind: str, subject: str) -> dict[str, Any]:
        """Return the import of a subject of another account, under the same name. kind: service or stream."""
        return {"name": subject, "subject": subject, "to" if kind == "service" else "local_subject": subject,
                "account": public(self._accounts[account]), "type": kind}  # fmt: skip

    @property
    def config(self) -> str:
        """Lines of the configuration of a server."""
        system = public(self._accounts[SYSTEM])
        known = "\n".join(
            f"  {public(key)}: {self._signed(self._key, name, public(key), self._claims[name])}"
            for name, key in self._accounts.items()
        )
        operator = self._signed(self._key, "operator", public(self._key), {"type": "operator", "version": 2})
        return f"operator: {operator}\nsystem_account: {system}\nresolver: MEMORY\nresolver_preload: {{\n{known}\n}}"

    def write_creds(
        self, path: Path, account: str, user: BrokerUser, *, expires_s: float | None = None, seed: bytes | None = None
    ) -> Path:
        """Write the credentials of a user, with a key of its own, in place of what is there, as a tool would."""
        key = key_pair(nkeys.PREFIX_BYTE_USER)
        publish = {"allow": list(user.publish)} if user.publish else {"deny": [">"]}
        rights = {"pub": publish, "sub": {"allow": list(user.subscribe)}}
        claims = {"type": "user", "version": 2, **UNBOUNDED, **rights}
        token = self._signed(self._accounts[account], user.name, public(key), claims, expires_s)
        text = (
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            "************************* IMPORTANT *************************\nNKEY Seed printed below ...\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{(seed or key.seed).decode()}\n------END USER NKEY SEED------\n"
        )
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(text)
        new.replace(path)
        return path

    def _signed(
        self, issuer: nkeys.KeyPair, name: str, subject: str, claims: dict[str, Any], expires_s: float | None = None
    ) -> str:
        body: dict[str, Any] = {"jti": os.urandom(8).hex(), "iat": int(time.time()), "iss": public(issuer), "name": name,
                                "sub": subject, "nats": claims}  # fmt: skip
        if expires_s is not None:
            body["exp"] = int(time.time() + expires_s)
        words = ".".join(map(encoded, (json.dumps(HEADER).encode(), json.dumps(body).encode())))
        return f"{words}.{encoded(issuer.sign(words.encode()))}"


def key_pair(prefix: int) -> nkeys.KeyPair:
    """Return a new pair of keys of a kind."""
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))


def public(key: nkeys.KeyPair) -> str:
    """Return the public key as claims have it."""
    return str(key.public_key.decode())


def encoded(data: bytes) -> str:
    """Return bytes as a part of a JWT."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
