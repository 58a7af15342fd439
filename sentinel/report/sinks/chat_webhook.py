"""ChatWebhook: posts to an incoming webhook of a chat; how a message looks there is the service's own module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from sentinel.errors import ConfigError
from sentinel.report.alert import Alert
from sentinel.report.sinks.delivery import Delivery, Poster, check_url
from sentinel.report.sinks.secret import read_secret


class ChatForm(Protocol):
    """How one service shows messages."""

    def message(self, alert: Alert) -> dict[str, Any]:
        """Return the body of the request about one alert."""
        ...

    def digest(self, alerts: Sequence[Alert]) -> dict[str, Any]:
        """Return the body of the request about many."""
        ...


class ChatWebhook:
    """One message a delivery: the alert, or a digest of several."""

    max_batch = 5000

    def __init__(
        self,
        name: str,
        form: ChatForm,
        poster: Poster,
        environ: Mapping[str, str],
        *,
        digest_after: int,
        url_file: str,
        url_env: str,
    ) -> None:
        """url_file, url_env: one of them says where the webhook's address is, which is a secret."""
        path = f"notify.sinks.{name}.url"
        self.name = name
        self.digest_after = digest_after
        self.form = form
        if not url_file and not url_env:
            raise ConfigError(
                f"{path}: expected url_file or url_env, which says where the webhook's address is; got neither"
            )
        self._url = check_url(read_secret(path, url_file, url_env, environ), path)
        self._poster = poster

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Post one message."""
        body = self.form.message(alerts[0]) if len(alerts) == 1 else self.form.digest(alerts)
        return self._poster.post(self._url, msgspec.json.encode(body), {}, now)
