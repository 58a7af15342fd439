import math

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sentinel.report.metrics import (
    AGGREGATES,
    COMMAND_STATES,
    OUTCOMES,
    SEVERITIES,
    MetricsSnapshot,
    NormAggregate,
    RunMetrics,
)
from sentinel.report.prometheus_page import DAEMON_SERIES, MAX_LABEL, MAX_SERIES, MetricsCollector, label_value
from sentinel.report.run_series import CORE_SERIES, OTHER
from sentinel.report.stage_times import STAGES

from ..support.snapshots import a_worker, full_run, full_snapshot


def scrape(snapshot, collector=None):
    body, _ = (collector or MetricsCollector(lambda: snapshot)).render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_counters_exist_at_zero_from_the_start():
    samples = scrape(MetricsSnapshot(runs=(RunMetrics(run="a", rules=("nan",)),), sinks=("slack",)))

    expected = [("sentinel_anomalies_total", (("rule", "nan"), ("run", "a"), ("severity", one))) for one in SEVERITIES]
    expected += [("sentinel_notifications_total", (("outcome", one), ("sink", "slack"))) for one in OUTCOMES]
    expected += [("sentinel_commands_total", (("run", "a"), ("state", one))) for one in COMMAND_STATES]
    expected += [
        ("sentinel_reloads_total", (("outcome", one), ("what", what)))
        for one in ("ok", "failed")
        for what in ("rules", "config")
    ]
    expected += [("sentinel_rows_dropped_total", (("run", "a"),)), ("sentinel_series_dropped_total", (("run", "a"),))]
    expected += [("sentinel_blind_records_total", (("run", "a"),)), ("sentinel_keep_alives_total", (("sink", "slack"),))]
    expected += [("sentinel_stage_seconds_total", (("stage", one),)) for one in STAGES]
    assert {key: samples.get(key) for key in expected} == dict.fromkeys(expected, 0.0)


def test_what_the_daemon_says_is_what_is_scraped():
    samples = scrape(MetricsSnapshot(runs=(full_run(),), notifications={("slack", "sent"): 7}))

    run = ("run", "run")
    assert samples["sentinel_judged_step", (run,)] == 11
    assert samples["sentinel_loss", (run,)] == 2.5
    assert samples["sentinel_scalar", (("name", "tokens"), run)] == 4096
    assert samples["sentinel_last_record_timestamp_seconds", (run,)] == 1e9
    assert samples["sentinel_monitoring_enabled", (run,)] == 1
    assert samples["sentinel_monitoring_acknowledged_step", (run,)] == 10
    stage = (("aggregate", "max"), ("kind", "wgrad"), ("pp_stage", "0"), run)
    assert samples["sentinel_norm", stage] == math.inf
    bad = (("kind", "wgrad"), ("pp_stage", "0"), run, ("value", "nan"))
    assert samples["sentinel_nonfinite_elements_total", bad] == 3
    assert samples["sentinel_notifications_total", (("outcome", "sent"), ("sink", "slack"))] == 7
    where = (("host", "node7"), ("job_id", "4711"), ("pod", "trainer-0"), run, ("torch", "2.9"))
    assert samples["sentinel_run_info", where] == 1


def test_only_what_makes_a_rank_blind_counts_as_blind():
    samples = scrape(MetricsSnapshot(runs=(full_run(),)))

    assert samples["sentinel_blind_records_total", (("run", "run"),)] == 1
    assert samples["sentinel_health_records_total", (("code", "unsupported"), ("run", "run"))] == 7


def test_what_the_daemon_says_of_itself_is_what_is_scraped():
    samples = scrape(full_snapshot(()))

    assert samples["sentinel_config_hash", (("what", "rules"),)] == 2**48 - 1
    assert samples["sentinel_config_hash", (("what", "config"),)] == 0
    assert samples["sentinel_last_reload_success_timestamp_seconds", (("what", "config"),)] == 2.0
    assert samples["sentinel_last_reload_successful", (("what", "rules"),)] == 1
    assert samples["sentinel_judge_lag_seconds_bucket", (("le", "0.25"),)] == 0
    assert samples["sentinel_judge_lag_seconds_bucket", (("le", "+Inf"),)] == 1
    assert samples["sentinel_judge_lag_seconds_sum", ()] == 0.3
    assert samples["sentinel_delivery_latency_seconds_count", (("sink", "sink-0"),)] == 1
    assert samples["sentinel_stage_seconds_total", (("stage", "judge"),)] == 1.5
    assert samples["sentinel_stage_items_total", (("stage", "judge"),)] == 3
    assert samples["sentinel_disk_free_bytes", (("directory", "state"),)] == 1
    assert samples["sentinel_heartbeats_total", (("outcome", "failed"),)] == 1
    assert samples["sentinel_heartbeat_success_timestamp_seconds", ()] == 5.0
    assert samples["sentinel_tls_certificate_expiry_timestamp_seconds", ()] == 6.0
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert samples[f"process_{name}", ()] > 0


def test_a_join_says_how_it_is_and_names_the_nodes_furthest_behind_alone():
    samples = scrape(full_snapshot(()))

    assert samples["sentinel_join_active", ()] == samples["sentinel_join_broker_connected", ()] == 1
    assert samples["sentinel_join_lease_epoch", ()] == 2
    assert samples["sentinel_join_nodes", (("state", "live"),)] == 1999
    assert samples["sentinel_join_lag_bytes", ()] == 20_000 and samples["sentinel_join_lag_seconds", ()] == 5000
    assert samples["sentinel_join_refused_total", ()] == 4 and samples["sentinel_join_chunks_total", ()] == 0
    assert samples["sentinel_join_digested_steps_total", ()] == 5 and samples["sentinel_join_fetched_steps_total", ()] == 0
    named = {dict(labels)["node"] for name, labels in samples if name == "sentinel_join_node_lag_seconds"}
    assert named == {f"node-{number}" for number in range(10)}
    assert not [name for name, _ in scrape(MetricsSnapshot()) if name.startswith("sentinel_join")]


def test_a_worker_says_how_it_is_and_nothing_that_only_a_daemon_has():
    samples = scrape(MetricsSnapshot(worker=a_worker(32), start_time=1.0, disks={"copies": (1, 2)}))

    assert samples["sentinel_worker_partitions", ()] == 32 and samples["sentinel_worker_workers", ()] == 2
    assert samples["sentinel_worker_partition_epoch", (("partition", "31"),)] == 3
    assert samples["sentinel_worker_nodes", (("state", "live"),)] == 4
    assert samples["sentinel_worker_waiting_bytes", ()] == 30 and samples["sentinel_worker_lag_seconds", ()] == 4
    assert samples["sentinel_worker_refused_total", ()] == 2 and samples["sentinel_worker_dropped_total", ()] == 0
    ours = {name for name, _ in samples if not name.startswith(("sentinel_worker_", "process_"))}
    assert ours == {
        "sentinel_build_info", "sentinel_start_timestamp_seconds", "sentinel_problems", "sentinel_disk_free_bytes",
        "sentinel_disk_size_bytes",
    }  # fmt: skip
    assert len(scrape(MetricsSnapshot(worker=a_worker()))) < 110


def test_what_is_not_configured_has_no_series():
    names = {name for name, _ in scrape(MetricsSnapshot())}

    assert not names & {
        "sentinel_heartbeats_total", "sentinel_heartbeat_success_timestamp_seconds",
        "sentinel_tls_certificate_expiry_timestamp_seconds",
    }  # fmt: skip


HUGE = full_run(
    norms=tuple(
        NormAggregate(pp_stage=stage, kind=kind)
        for stage in range(200)
        for kind in ("wgrad", "activation", "dgrad", "param")
    ),
    rules=tuple(f"rule-{number}" for number in range(400)),
    num_ranks_expected=4096,
    ranks={"live": 4096},
    scalars={"loss": 1.0, "grad_norm": 1.0, **{f"scalar_{number}": 1.0 for number in range(500)}},
    health={f"code-{number}": 1 for number in range(200)},
    top_scores=(1.0,) * 100,
    anomalies={(f"unknown-{number}", "warning"): 1 for number in range(30)},
)


def huge_run(name="huge", **changes):
    return msgspec.structs.replace(HUGE, run=name, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", [0, 1, 3, 100, 130])
def test_metrics_within_budget_of_the_whole_daemon(num_runs):
    runs = tuple(huge_run(f"run-{number:03}", last_record_time=float(number)) for number in range(num_runs))

    samples = scrape(full_snapshot(runs, num_sinks=20))

    assert len(samples) <= MAX_SERIES
    assert sum("run" not in dict(labels) for _, labels in samples) <= DAEMON_SERIES
    shown = {dict(labels)["run"] for _, labels in samples if "run" in dict(labels)}
    assert shown == {f"run-{number:03}" for number in range(max(num_runs - 100, 0), num_runs)}
    assert samples["sentinel_runs_hidden", ()] == max(num_runs - 100, 0)
    for run in shown:
        assert samples["sentinel_judged_step", (("run", run),)] == 11


def test_the_core_of_a_run_is_as_large_as_is_kept_for_it():
    core = full_run(rules=(), norms=(), scalars={"loss": 1.0, "grad_norm": 1.0}, top_scores=(), health={})
    runs = tuple(msgspec.structs.replace(core, run=f"r{number}") for number in range(100))

    samples = scrape(full_snapshot(runs))

    details = ("sentinel_commands_total", "sentinel_weights", "sentinel_config_edits_total",
               "sentinel_monitoring_acknowledged_step", "sentinel_learning_rate")  # fmt: skip
    num_core = sum(dict(labels).get("run") == "r99" and name not in details for name, labels in samples)
    assert num_core == CORE_SERIES


def test_what_is_left_out_is_counted_once_and_the_same_ones_stay():
    snapshot = full_snapshot((huge_run(), full_run()))
    collector = MetricsCollector(lambda: snapshot)

    first = scrape(snapshot, collector)
    again = scrape(snapshot, collector)

    assert again.keys() == first.keys()
    dropped = ("sentinel_series_dropped_total", (("run", "huge"),))
    assert again[dropped] == first[dropped] > 2000
    assert first["sentinel_series_dropped_total", (("run", "run"),)] == 0
    # Its last rules have no room; what they found is in the sum.
    assert first["sentinel_anomalies_total", (("rule", OTHER), ("run", "huge"), ("severity", "warning"))] == 30


def test_runs_that_left_are_forgotten():
    snapshots = [full_snapshot(tuple(huge_run(f"run-{number}") for number in range(50)))]
    collector = MetricsCollector(lambda: snapshots[-1])
    scrape(None, collector)
    snapshots.append(full_snapshot((full_run("new"),)))

    samples = scrape(None, collector)

    assert {dict(labels).get("run") for _, labels in samples} == {None, "new"}
    assert collector._rooms.keys() == {"new"}


@pytest.mark.slow
def test_a_run_that_trains_has_its_details_before_those_that_ended():
    ended = tuple(huge_run(f"ended-{number}", ranks={"missing": 4096}, last_record_time=2e9) for number in range(99))

    samples = scrape(full_snapshot((*ended, full_run("live"))))

    rule = (("rule", "loss-spike"), ("run", "live"), ("severity", "critical"))
    assert samples["sentinel_anomalies_total", rule] == 2
    assert samples["sentinel_series_dropped_total", (("run", "live"),)] == 0


def test_many_runs_are_bounded_newest_first():
    snapshot = MetricsSnapshot(runs=tuple(RunMetrics(run=f"r{n}", last_record_time=float(n)) for n in range(130)))

    samples = scrape(snapshot)

    shown = {dict(labels)["run"] for name, labels in samples if name == "sentinel_records_total"}
    assert shown == {f"r{n}" for n in range(30, 130)}
    assert samples["sentinel_runs_hidden", ()] == 30


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ('a"\\{}', 'a"\\{}'),
        ("a\nb\x1b[31m\0", "a\\nb\\u001b[31m\\u0000"),
        ("\udc80", "\\udc80"),
        ("é 日本", "é 日本"),
    ],
)
def test_label_values_are_escaped(value, shown):
    samples = scrape(MetricsSnapshot(runs=(RunMetrics(run=value, scalars={value: 1.0}),)))

    assert ("sentinel_records_total", (("run", shown),)) in samples
    assert samples["sentinel_scalar", (("name", shown), ("run", shown))] == 1.0


def test_label_values_are_bounded_and_stay_apart():
    values = ["a" * 10**6, "a" * 10**6 + "b", "\n" * 200, "a" * MAX_LABEL]

    shown = [label_value(value) for value in values]

    assert max(map(len, shown)) <= MAX_LABEL
    assert len(set(shown)) == len(values)
    assert shown[-1] == values[-1]


def test_every_sample_of_a_group_is_there():
    samples = scrape(MetricsSnapshot(runs=(full_run(),)))

    shown = {dict(labels)["aggregate"] for name, labels in samples if name == "sentinel_norm"}
    assert shown == set(AGGREGATES)


def test_every_metric_is_in_the_docs(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "configuration.md").read_text()
    snapshots = (full_snapshot((full_run(),)), MetricsSnapshot(worker=a_worker()))
    shown = [MetricsCollector(lambda one=one: one).render()[0].decode() for one in snapshots]

    names = {line.split()[2] for body in shown for line in body.splitlines() if line.startswith("# TYPE")}

    assert sorted(name for name in names if f"`{name}`" not in text and not name.startswith("process_")) == []
