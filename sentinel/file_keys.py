"""Which of Sentinel's YAML files a key belongs to, for messages about keys that stand in the wrong one."""

from __future__ import annotations

from collections.abc import Mapping

from sentinel.document import show

TRAINER, DAEMON, RULES, RULE_TESTS = "trainer", "daemon", "rules", "rule-tests"

FILES: Mapping[str, str] = {
    TRAINER: "the trainer's config (sentinel.attach(..., config=FILE))",
    DAEMON: "the daemon's configuration (sentinel serve --config FILE)",
    RULES: "a rule pack (sentinel serve --rules FILE)",
    RULE_TESTS: "a file of rule tests (sentinel rules test FILE)",
}
"""Kind of file -> what it is, and who takes it."""

KEYS: Mapping[str, tuple[str, ...]] = {
    TRAINER: (
        "enabled", "kinds", "targets", "black_box", "per_micro_step", "start_step", "step_interval", "collect_times",
        "ranks", "stagger", "probes", "max_overhead", "at_step", "directory", "run", "labels", "blocks", "zero_eps",
        "checksum", "allow_commands", "dump", "trace", "struct", "layer_offset", "name_map", "site_placements",
        "gradient_divisor", "outside_probes", "max_rows",
        "spool", "dump.end_step", "dump.first_n", "dump.quota_bytes", "dump.in_flight_bytes", "trace.ring_bytes",
        "trace.in_flight_bytes", "trace.vectors", "spool.max_bytes",
        "spool.file_bytes", "spool.queue_bytes",
    ),
    DAEMON: (
        "judging", "notify", "control", "heartbeat", "retention", "history", "mirrors", "labels", "judging.late_after_steps",
        "judging.late_after_s", "judging.max_anomalies_per_step", "judging.snapshot_interval_s", "notify.sinks",
        "notify.external_url", "notify.runbook_url", "notify.dashboard_url", "notify.proxy", "notify.ca_file",
        "notify.retry_s", "notify.max_retry_s", "notify.give_up_after_s", "notify.max_pending", "notify.hold_s",
        "notify.correlate", "notify.digest", "notify.inhibit", "notify.maintenance", "notify.escalate",
        "control.escalate", "control.dry_run", "control.policies", "control.for_steps", "control.latency_s",
        "control.cooldown_s", "control.max_per_hour", "control.expires_s", "control.follow_config",
        "control.max_edits_per_hour", "control.dump_kinds", "control.dump_for_steps", "control.dump_first_n",
        "control.max_dumps_per_hour", "heartbeat.url", "heartbeat.url_file", "heartbeat.url_env", "heartbeat.method",
        "heartbeat.interval_s", "heartbeat.timeout_s", "retention.age_days", "retention.journal_bytes",
        "retention.anomalies_bytes", "retention.incidents_bytes", "retention.spool_bytes", "history.full_steps",
        "history.around_steps", "history.bytes", "history.flush_s",
    ),
    RULES: ("rules", "builtin", "rules.detector", "rules.match", "rules.severity", "rules.actions"),
    RULE_TESTS: ("tests", "tests.input", "tests.expect"),
}  # fmt: skip
"""Kind of file -> the keys at its top, and dotted those of its sections that no other section has."""


def belongs(key: str, kind: str) -> str:
    """Return `; it is a key of ...` for a key that a file of another kind has at its top or in a section."""
    for other, known in KEYS.items():
        dotted = next((one for one in known if key == one or one.endswith(f".{key}")), None)
        if other != kind and dotted is not None:
            return f"; {'it' if dotted == key else show(dotted)} is a key of {FILES[other]}"
    return ""


def kind_of(keys: list[str]) -> str:
    """Return the kind of file that knows most of the keys at its top; the daemon's where none knows any."""
    if "tests" in keys:
        return RULE_TESTS
    order = (DAEMON, RULES, TRAINER)
    return max(order, key=lambda kind: sum(key in KEYS[kind] for key in keys))
