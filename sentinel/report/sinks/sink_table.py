"""The table of sinks and the `notify:` section of the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TextIO

import msgspec

from sentinel.errors import ConfigError, SentinelError
from sentinel.exception_words import described
from sentinel.known_words import nearest
from sentinel.outside_calls import misfit
from sentinel.outside_structs import OutsideStructs
from sentinel.report.alert import RouteConfig
from sentinel.report.escalation import EscalationStep
from sentinel.report.links import MessageLinks, check_template
from sentinel.report.message_writer import OrdersOf, no_orders
from sentinel.report.sinks.alertmanager import AlertmanagerConfig
from sentinel.report.sinks.console import ConsoleConfig
from sentinel.report.sinks.delivery import Capture, DeliveryNotes, NotesInMemory, Sink, SinkParts, SinkSettings
from sentinel.report.sinks.discord import DiscordConfig
from sentinel.report.sinks.mail import EmailConfig
from sentinel.report.sinks.pagerduty import PagerDutyConfig
from sentinel.report.sinks.slack import SlackConfig
from sentinel.report.sinks.slack_bot import SlackBotConfig
from sentinel.report.sinks.teams import TeamsConfig
from sentinel.report.sinks.webhook import WebhookConfig
from sentinel.report.stages.correlate import CorrelateConfig
from sentinel.report.stages.gather import DigestConfig
from sentinel.report.stages.hold import HoldConfig
from sentinel.report.stages.withhold import RUN_ENDED, InhibitRule, MaintenanceConfig

ENTRY_POINTS = "sentinel.sinks"
"""Group of entry points: the `type` of a sink -> its configuration, a struct that keeps `delivery.SinkSettings`."""

SinkConfig = (
    SlackConfig | SlackBotConfig | AlertmanagerConfig | PagerDutyConfig | WebhookConfig | EmailConfig | DiscordConfig
    | TeamsConfig | ConsoleConfig
)  # fmt: skip
"""Distinguished by `type`, as in SINKS; those of other packages by the names of entry points."""

SINKS: dict[str, type[SinkSettings]] = {
    "slack": SlackConfig,
    "slack-bot": SlackBotConfig,
    "alertmanager": AlertmanagerConfig,
    "pagerduty": PagerDutyConfig,
    "webhook": WebhookConfig,
    "email": EmailConfig,
    "discord": DiscordConfig,
    "teams": TeamsConfig,
    "console": ConsoleConfig,
}
"""`type` -> configuration of the sinks that come with Sentinel."""


class NotifyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sinks to which incidents are sent, and how long sending is tried."""

    sinks: tuple[SinkConfig, ...] = ()
    """Sinks to which alerts are sent; none: incidents are only recorded."""

    external_url: str = ""
    """Address of the daemon's page as readers of a message see it, for links; empty: no links."""

    runbook_url: str = ""
    """Address of the runbook, for links, with names in braces: `https://wiki.example/sentinel/{detector}`. The names: run,
    incident, detector, cause, severity, module, attempt, step, rank, host, job, from_ms, to_ms. Empty: no link."""

    dashboard_url: str = ""
    """Address of a dashboard, for links, with the same names: `https://grafana.example/d/sentinel?var-run={run}&from={from_ms}
    &to={to_ms}`. Empty: no link."""

    proxy: str = ""
    """HTTP proxy for all sinks, `http://host:port`; empty: none. The environment's proxies are not used."""

    ca_file: str = ""
    """Certificate authorities to trust, a PEM file; empty: the usual ones."""

    retry_s: float = 1.0
    """Wait before the second try; doubled at each further failure."""

    max_retry_s: float = 60.0
    """Longest wait between two tries, unless the server asks for more (Retry-After)."""

    give_up_after_s: float = 86400.0
    """Seconds after which an alert that could not be delivered is given up and counted as expired."""

    max_pending: int = 5000
    """Most incidents that wait for one sink; past it the oldest that are no pages are dropped, counted."""

    hold_s: HoldConfig = HoldConfig()
    """How long what opens is held before it is told."""

    correlate: CorrelateConfig = CorrelateConfig()
    """When incidents of several runs are told as one."""

    digest: DigestConfig = DigestConfig()
    """When a storm is told as one."""

    inhibit: tuple[InhibitRule, ...] = (RUN_ENDED,)
    """What need not be told where something else was told that explains it; by default silent ranks of a run that ended."""

    maintenance: tuple[MaintenanceConfig, ...] = ()
    """When something is expected to go wrong, and is not told."""

    escalate: tuple[EscalationStep, ...] = ()
    """Who is told next of a page that nobody has acknowledged."""

    def __post_init__(self) -> None:
        check_template(self.runbook_url, "notify.runbook_url")
        check_template(self.dashboard_url, "notify.dashboard_url")
        names = [sink.name for sink in self.sinks]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"notify.sinks: expected every name once, got {name!r} {names.count(name)} times")
            if not name or not all(char.isalnum() or char in "-_." for char in name):
                raise ConfigError(f"notify.sinks: expected a name of letters, digits, '-', '_', '.', got {name!r}")
        for at, step in enumerate(self.escalate):
            for name in step.sinks:
                if name not in names:
                    where = f"notify.escalate[{at}].sinks"
                    raise ConfigError(f'{where}: unknown sink "{name[:80]}"{nearest(name, names) if names else ""}')
        if not self.max_retry_s < math.inf:
            raise ConfigError(f"notify.max_retry_s must be finite, got {self.max_retry_s}")
        if not 0 < self.retry_s <= self.max_retry_s:
            raise ConfigError(f"notify.retry_s must be in (0, notify.max_retry_s], got {self.retry_s}")
        if not 0 < self.give_up_after_s < math.inf:
            raise ConfigError(f"notify.give_up_after_s must be above 0 and finite, got {self.give_up_after_s}")
        if self.max_pending < 1:
            raise ConfigError(f"notify.max_pending must be at least 1, got {self.max_pending}")
        for sink in self.sinks:
            for name in ("timeout_s", "rate_per_s"):
                value = getattr(sink, name, 1.0)
                if not 0 < value < math.inf:
                    raise ConfigError(f"notify.sinks.{sink.name}.{name} must be above 0 and finite, got {value}")

    def routes(self) -> list[tuple[str, RouteConfig]]:
        """Return (name, route) of every sink: what `report.alert.alerts_for` takes."""
        return [(sink.name, sink.route) for sink in self.sinks]

    @property
    def links(self) -> MessageLinks:
        """Where messages, and post-mortems, lead to."""
        return MessageLinks(external_url=self.external_url, runbook_url=self.runbook_url, dashboard_url=self.dashboard_url)


def outside_sinks() -> OutsideStructs:
    """Return the sinks of other packages, by `type`; none is imported before it is asked for."""
    return OutsideStructs(ENTRY_POINTS, "a sink", fields=("name", "route"), methods=("build",), taken=SINKS)


def build_sink(
    config: SinkSettings,
    notify: NotifyConfig,
    environ: Mapping[str, str],
    stream: TextIO,
    orders_of: OrdersOf = no_orders,
    notes: DeliveryNotes | None = None,
    capture: Capture | None = None,
) -> Sink:
    """Return the sink that `config` describes; ConfigError when its secret is missing. Opens no connection.

    capture: is given what would be sent; None: it is sent.
    """
    parts = SinkParts(
        environ=environ, stream=stream, links=notify.links, orders_of=orders_of, notes=notes or NotesInMemory(),
        capture=capture, proxy=notify.proxy, ca_file=notify.ca_file,
    )  # fmt: skip
    try:
        sink = config.build(parts)
    except SentinelError:
        raise
    except Exception as error:  # another package's code may fail in any way
        raise ConfigError(f"notify.sinks.{config.name} cannot be built: {described(error)}") from error
    lacking = [name for name in ("name", "digest_after", "max_batch", "deliver") if not hasattr(sink, name)]
    problem = f"it has no {' and no '.join(lacking)}" if lacking else misfit(sink, {"deliver": ("alerts", "now")})
    if problem:
        what = f"build() gave {type(sink).__name__}, which is no sink: {problem}; see sentinel.report.sinks.delivery.Sink"
        raise ConfigError(f"notify.sinks.{config.name} cannot be built: {what}")
    return sink


def build_sinks(
    notify: NotifyConfig,
    environ: Mapping[str, str],
    stream: TextIO,
    orders_of: OrdersOf = no_orders,
    notes: DeliveryNotes | None = None,
) -> list[Sink]:
    """Return all sinks. environ: the environment as the command line hands it down; stream: for the console."""
    return [build_sink(config, notify, environ, stream, orders_of, notes) for config in notify.sinks]
