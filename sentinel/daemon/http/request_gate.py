"""RequestGate: which requests are let in.

Loopback by default; the Host header must be a name of ours (a page elsewhere that rebinds its own name to 127.0.0.1 is
refused); Origin and Sec-Fetch-Site on every POST; tokens for whatever changes something always, for reads everywhere but on
a loopback that no other people share.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping

from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.tokens import Scope, Tokens

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
"""A Host header: a name or an address, and a port; nothing that another parser may read otherwise (`localhost:80@evil`)."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class RequestGate:
    """Lets a request in or says why not: Host, then Origin, then the token."""

    def __init__(self, config: HttpConfig, tokens: Tokens) -> None:
        self._config = config
        self.tokens = tokens
        """Those in force; exchanged when their file changes."""
        self._names = LOOPBACK_NAMES | {config.host.lower()} | {name.lower() for name in config.allowed_hosts}
        self._is_wildcard = config.host in ("0.0.0.0", "::")
        if self._is_wildcard:
            self._names = self._names | {socket.gethostname().lower()}

    def refuse(
        self, method: str, headers: Mapping[str, str], needed: Scope, *, tells_of_data: bool = False
    ) -> tuple[int, str] | None:
        """Return (status, reason) to refuse with, or None to let it in. headers: lower-case names.

        tells_of_data: the answer tells of the training data itself; a token is needed wherever we listen.
        """
        host = headers.get("host", "")
        if not self._is_ours(host):
            return 421, "the Host header names another server; start the daemon with --allow-host NAME if it is yours"
        if method not in ("GET", "HEAD"):
            origin = headers.get("origin")
            is_same = origin is None or origin.partition("://")[2].lower() == host.lower()
            if not is_same or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                return 403, "requests from other pages are refused"
        if needed is Scope.READ and self._config.are_reads_open and not tells_of_data:
            return None
        scope = self.tokens.scope(headers.get("authorization", ""))
        if scope < needed:
            what = needed.name.lower()
            if scope is Scope.NOTHING:
                return 401, (
                    f"a token with the {what} scope is needed, as Authorization: Bearer TOKEN (in a browser: any name, the "
                    "token as password; reads only); it is in tokens.json of the state directory"
                )
            return 403, f"this token has no {what} scope"
        return None

    def refuse_socket(self, headers: Mapping[str, str]) -> str:
        """Return why a WebSocket is refused; empty: it may say its token. A browser always names the page it is of."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return "the Host header names another server"
        is_same = origin is None or origin.partition("://")[2].lower() == host.lower()
        return "" if is_same else "pages of others are refused"

    def may_read(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request that is let in may also see what reads see. headers: lower-case names."""
        if self._config.are_reads_open:
            return True
        return self.tokens.scope(headers.get("authorization", "")) >= Scope.READ

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found["address"] or found["name"]).lower()
        if name.rstrip(".") in self._names:
            return True
        if not self._is_wildcard:
            return False
        # An address cannot be rebound to another one, a name can.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
