"""Writes the dashboards beside this file: `python deploy/grafana/dashboards.py`. The JSON is what Grafana is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_json import annotation, chosen, dashboard, graph, number, table, target

FOLDER = Path(__file__).parent
RUN_QUERY = 'label_values(sentinel_attempt{job=~"$job", instance=~"$instance"}, run)'
MANY_RUNS = chosen("run", "Run", RUN_QUERY)
ONE_RUN = chosen("run", "Run", RUN_QUERY, is_multi=False)
MARKS = (
    annotation(
        "Incidents",
        "sum by (run, severity) (sentinel_open_incidents{%R} - sentinel_open_incidents{%R} offset 1m) > 0",
        "{{severity}} incident in {{run}}",
        "red",
    ),
    annotation("Attempts", "changes(sentinel_attempt{%R}[1m]) > 0", "{{run}} began anew", "blue"),
)


def overview() -> dict[str, Any]:
    """Return the dashboard of all runs."""
    now = [
        number("Runs", "Runs that the daemons follow.", "short", "sum(sentinel_runs{%I})"),
        number(
            "Ranks heard", "Ranks of the chosen runs that write now.", "short", 'sum(sentinel_ranks{%R, state!="missing"})'
        ),
        number(
            "Critical incidents",
            "Open incidents of the gravest kind.",
            "short",
            'sum(sentinel_open_incidents{%R, severity="critical"})',
            bad_from=1,
        ),
        number(
            "Warnings", "Open incidents below critical.", "short", 'sum(sentinel_open_incidents{%R, severity="warning"})'
        ),
        number("Problems", "What the daemons list in /healthz.", "short", "sum(sentinel_problems{%I})", bad_from=1),
        number(
            "Records lost",
            "Rows measured and lost in the last hour: no anomaly is no all-clear.",
            "short",
            "sum(increase(sentinel_rows_dropped_total{%R}[1h]))",
            bad_from=1,
        ),
    ]
    runs = table(
        "Runs",
        "Each run once: where it trains, and where it stands.",
        {
            "info": "sentinel_run_info{%R}",
            "attempt": "sentinel_attempt{%R}",
            "step": "sentinel_newest_step{%R}",
            "step time, s": "sentinel_step_duration_seconds{%R}",
            "loss": "sentinel_loss{%R}",
            "ranks expected": "sentinel_expected_ranks{%R}",
            "ranks heard": 'sum by (job, instance, run) (sentinel_ranks{%R, state!="missing"})',
            "critical": 'sum by (job, instance, run) (sentinel_open_incidents{%R, severity="critical"})',
        },
        "run",
        hidden=("Value #A",),
    )
    runs["fieldConfig"]["overrides"] = [
        {
            "matcher": {"id": "byName", "options": "run"},
            "properties": [
                {
                    "id": "links",
                    "value": [
                        {"title": "This run", "url": "/d/sentinel-run?var-run=${__value.text}&var-datasource=${datasource}"},
                    ],
                }
            ],
        }
    ]
    courses = [
        graph(
            "Loss",
            "Mean over ranks of the newest judged step; a NaN is a gap.",
            "short",
            target("sentinel_loss{%R}", "{{run}}"),
        ),
        graph(
            "Steps a second",
            "Steps judged.",
            "ops",
            target("rate(sentinel_steps_judged_total{%R}[$__rate_interval])", "{{run}}"),
        ),
        graph(
            "Open incidents",
            "By severity.",
            "short",
            target("sum by (run, severity) (sentinel_open_incidents{%R})", "{{run}} {{severity}}"),
        ),
        graph(
            "Ranks that are not well",
            "Late: the newest step closed without them. Stale: heard, and standing still. Missing: not heard.",
            "short",
            target('sum by (run, state) (sentinel_ranks{%R, state!="live"})', "{{run}} {{state}}"),
        ),
        graph(
            "Judged behind",
            "Steps that ranks reported and that are not judged yet.",
            "short",
            target("sentinel_newest_step{%R} - sentinel_judged_step{%R}", "{{run}}"),
        ),
        graph(
            "Since the newest record",
            "Grows while a run records nothing.",
            "s",
            target("time() - sentinel_last_record_timestamp_seconds{%R}", "{{run}}"),
        ),
    ]
    rows = [("Now", 4, now), ("Runs", 9, [runs]), ("Over time", 8, courses)]
    return dashboard(
        "sentinel-overview",
        "Sentinel / Overview",
        "All runs that are watched.",
        rows,
        variables=[MANY_RUNS],
        annotations=MARKS,
    )


def run() -> dict[str, Any]:
    """Return the dashboard of one run."""
    now = [
        number("Step", "Newest step that was judged.", "none", "max(sentinel_judged_step{%R})"),
        number("Attempt", "Counts restarts, from 0.", "none", "max(sentinel_attempt{%R})"),
        number("Step time", "Median of the last 9 steps.", "s", "max(sentinel_step_duration_seconds{%R})"),
        number("Loss", "Mean over ranks.", "short", "max(sentinel_loss{%R})"),
        number(
            "Ranks heard",
            "Of those that the run says it has.",
            "percentunit",
            'sum(sentinel_ranks{%R, state!="missing"}) / sum(sentinel_expected_ranks{%R})',
        ),
        number(
            "Critical incidents",
            "That are open.",
            "short",
            'sum(sentinel_open_incidents{%R, severity="critical"})',
            bad_from=1,
        ),
        number(
            "Newest record",
            "By the clock of its rank.",
            "dateTimeFromNow",
            "max(sentinel_last_record_timestamp_seconds{%R}) * 1000",
        ),
        number("Module monitoring", "1: on; 0: the black box alone.", "none", "max(sentinel_monitoring_enabled{%R})"),
    ]
    training = [
        graph("Loss", "Mean over ranks; a NaN is a gap.", "short", target("sentinel_loss{%R}", "{{run}}")),
        graph("Gradient norm", "Before clipping.", "short", target("sentinel_grad_norm{%R}", "{{run}}")),
        graph("Learning rate", "As it was logged.", "sci", target("sentinel_learning_rate{%R}", "{{run}}")),
        graph("Step duration", "Median of the last 9 steps.", "s", target("sentinel_step_duration_seconds{%R}", "{{run}}")),
        graph(
            "Other scalars",
            "What else the trainer logs, mean over ranks.",
            "short",
            target("sentinel_scalar{%R}", "{{name}}"),
        ),
        graph(
            "Largest scores",
            "Of the newest judged step; 1 and more is anomalous.",
            "short",
            target("sentinel_top_score{%R}", "place {{slot}}"),
        ),
    ]
    found = [
        graph(
            "Onsets of anomalies",
            "By rule.",
            "short",
            target(
                "sum by (rule) (increase(sentinel_anomalies_total{%R}[$__rate_interval])) > 0 or "
                'sum by (rule) (increase(sentinel_anomalies_total{%R, rule="_other"}[$__rate_interval]))',
                "{{rule}}",
            ),
        ),
        graph(
            "Open incidents",
            "By severity.",
            "short",
            target("sum by (severity) (sentinel_open_incidents{%R})", "{{severity}}"),
        ),
        graph(
            "Non-finite elements",
            "NaN and infinite values seen, by kind of tensor.",
            "short",
            target(
                "sum by (kind, value) (rate(sentinel_nonfinite_elements_total{%R}[$__rate_interval]))", "{{kind}} {{value}}"
            ),
        ),
    ]
    watch = [
        graph(
            "Lost",
            "What was measured and not judged: while it grows, no anomaly is no all-clear.",
            "short",
            target("rate(sentinel_rows_dropped_total{%R}[$__rate_interval])", "rows"),
            target("rate(sentinel_steps_dropped_total{%R}[$__rate_interval])", "steps"),
            target("rate(sentinel_frames_missing_total{%R}[$__rate_interval])", "frames missing"),
            target("sum(rate(sentinel_frame_faults_total{%R}[$__rate_interval]))", "frames damaged"),
        ),
        graph(
            "Blindness",
            "Ranks that say that they measure less than they should.",
            "short",
            target("rate(sentinel_blind_records_total{%R}[$__rate_interval])", "reports"),
            target("sum by (code) (rate(sentinel_health_records_total{%R}[$__rate_interval]))", "{{code}}"),
        ),
        graph(
            "Commands",
            "To the trainer, by the state that they entered.",
            "short",
            target("sum by (state) (rate(sentinel_commands_total{%R}[$__rate_interval]))", "{{state}}"),
        ),
    ]
    where = [
        table(
            "Where it runs", "By the lowest rank.", {"info": "sentinel_run_info{%R}"}, "run", hidden=("Value", "Value #A")
        ),
    ]
    rows = [
        ("Now", 4, now),
        ("Training", 8, training),
        ("What was found", 8, found),
        ("The watch itself", 8, watch),
        ("Where", 4, where),
    ]
    return dashboard(
        "sentinel-run",
        "Sentinel / Run",
        "One run: how it trains, what was found, and what was not seen.",
        rows,
        variables=[ONE_RUN],
        annotations=MARKS,
    )


def pipeline() -> dict[str, Any]:
    """Return the dashboard of pipeline stages and ranks."""
    kind = chosen("kind", "Kind", 'label_values(sentinel_norm{job=~"$job", instance=~"$instance", run=~"$run"}, kind)')
    norms = [
        graph(
            f"{word} norm",
            f"{word} of the l2 norms of the tensors of a kind, by pipeline stage.",
            "short",
            target(f'sentinel_norm{{%R, kind=~"$kind", aggregate="{aggregate}"}}', "stage {{pp_stage}} {{kind}}"),
            custom={"scaleDistribution": {"type": "log", "log": 10}},
        )
        for word, aggregate in (("Largest", "max"), ("Mean", "mean"), ("Smallest", "min"))
    ]
    norms.append(
        graph(
            "Non-finite elements by stage",
            "NaN and infinite values seen.",
            "short",
            target(
                'sum by (pp_stage, value) (rate(sentinel_nonfinite_elements_total{%R, kind=~"$kind"}[$__rate_interval]))',
                "stage {{pp_stage}} {{value}}",
            ),
        )
    )
    ranks = [
        graph(
            "Ranks by state",
            "Each rank is in one.",
            "short",
            target("sum by (state) (sentinel_ranks{%R})", "{{state}}"),
            custom={"stacking": {"mode": "normal"}, "fillOpacity": 40},
        ),
        graph(
            "The quietest rank",
            "Since the newest frame of the running rank that is silent the longest.",
            "s",
            target("time() - sentinel_quietest_rank_heard_timestamp_seconds{%R}", "{{run}}"),
        ),
        graph(
            "Steps closed without a rank",
            "And rows that came after their step was closed.",
            "ops",
            target("rate(sentinel_steps_late_total{%R}[$__rate_interval])", "steps"),
            target("rate(sentinel_rows_late_total{%R}[$__rate_interval])", "rows"),
        ),
        graph(
            "Weights with copies",
            "Compared: held by several ranks, which must be the same. Unchecked: one copy.",
            "short",
            target("sum by (state) (sentinel_weights{%R})", "{{state}}"),
        ),
    ]
    way = [
        graph(
            "Frames",
            "Taken in, seen before, and missing.",
            "ops",
            target("rate(sentinel_frames_total{%R}[$__rate_interval])", "taken in"),
            target("rate(sentinel_frames_duplicate_total{%R}[$__rate_interval])", "seen before"),
            target("rate(sentinel_frames_missing_total{%R}[$__rate_interval])", "missing"),
        ),
        graph(
            "Rows",
            "Taken in, and folded for want of room.",
            "ops",
            target("rate(sentinel_records_total{%R}[$__rate_interval])", "taken in"),
            target("rate(sentinel_rows_folded_total{%R}[$__rate_interval])", "folded"),
        ),
        graph(
            "Spool",
            "Bytes that wait to be judged, of the rank that is nearest to its cap.",
            "bytes",
            target("sentinel_spool_waiting_bytes{%R}", "{{run}}"),
        ),
        graph(
            "Edits of the config",
            "Of the trainer's file, by what became of them.",
            "short",
            target("sum by (outcome) (increase(sentinel_config_edits_total{%R}[$__rate_interval]))", "{{outcome}}"),
        ),
    ]
    rows = [("Pipeline stages", 9, norms), ("Ranks", 8, ranks), ("From the ranks to the daemon", 8, way)]
    return dashboard(
        "sentinel-pipeline",
        "Sentinel / Pipeline and ranks",
        "Which stage and which ranks differ, and what comes of them.",
        rows,
        variables=[ONE_RUN, kind],
        annotations=MARKS,
    )


def daemon() -> dict[str, Any]:
    """Return the dashboard of Sentinel itself."""

    def quantiles(metric: str, by: str, legend: str) -> list[dict[str, Any]]:
        return [
            target(
                f"histogram_quantile({q}, sum by ({by}) (rate({metric}_bucket{{%I}}[$__rate_interval])))",
                f"{legend}p{q[2:]}",
            )
            for q in ("0.5", "0.99")
        ]

    now = [
        number("Up", "Daemons that answer.", "short", "sum(up{%I})"),
        number("Started", "The newest start.", "dateTimeFromNow", "max(process_start_time_seconds{%I}) * 1000"),
        number("Problems", "What /healthz lists.", "short", "sum(sentinel_problems{%I})", bad_from=1),
        number("On standby", "Daemons that wait for another one to end.", "short", "sum(sentinel_standby{%I})"),
        number(
            "Broken files",
            "Rules or configurations on disk that are not in use because they are broken.",
            "short",
            "count(sentinel_last_reload_successful{%I} == 0) or vector(0)",
            bad_from=1,
        ),
        number("Hidden runs", "Runs left out of the metrics for want of room.", "short", "sum(sentinel_runs_hidden{%I})"),
        number(
            "Series", "Of the largest daemon; 5,000 is the bound.", "short", "max(scrape_samples_scraped{%I})", bad_from=5001
        ),
    ]
    work = [
        graph(
            "Judge lag",
            "From the end of a step to its judgement; a quarter of a second is usual.",
            "s",
            *quantiles("sentinel_judge_lag_seconds", "instance, le", "{{instance}} "),
        ),
        graph(
            "Where the time goes",
            "Seconds a second of each stage; 1 is a whole core.",
            "percentunit",
            target("rate(sentinel_stage_seconds_total{%I}[$__rate_interval])", "{{instance}} {{stage}}"),
        ),
        graph(
            "What was done",
            "Frames followed, steps assembled, judged and committed, requests sent.",
            "ops",
            target("rate(sentinel_stage_items_total{%I}[$__rate_interval])", "{{instance}} {{stage}}"),
        ),
    ]
    people = [
        graph(
            "Delivery latency",
            "From the judgement of an alert to the sink's answer that it has it.",
            "s",
            *quantiles("sentinel_delivery_latency_seconds", "sink, le", "{{sink}} "),
        ),
        graph(
            "Notifications",
            "By sink and outcome.",
            "short",
            target(
                "sum by (sink, outcome) (increase(sentinel_notifications_total{%I}[$__rate_interval]))",
                "{{sink}} {{outcome}}",
            ),
        ),
        graph(
            "Waiting alerts",
            "In the outbox; withheld are those that wait for people or for the calendar, not for the sink.",
            "short",
            target("sum by (sink) (sentinel_notifications_pending{%I})", "{{sink}}"),
            target("sum by (sink) (sentinel_notifications_withheld{%I})", "{{sink}} withheld"),
        ),
        graph(
            "Keep-alives",
            "Open incidents sent again to sinks that forget them.",
            "short",
            target("sum by (sink) (increase(sentinel_keep_alives_total{%I}[$__rate_interval]))", "{{sink}}"),
        ),
        graph(
            "Heartbeats",
            "To the dead man's switch; nothing where none is configured.",
            "short",
            target("sum by (outcome) (increase(sentinel_heartbeats_total{%I}[$__rate_interval]))", "{{outcome}}"),
        ),
        graph(
            "Mirrors",
            "Judged steps that TensorBoard and others have, wait for, and lack; nothing where none is configured.",
            "short",
            target(
                "sum by (mirror, outcome) (increase(sentinel_mirror_steps_total{%I}[$__rate_interval]))",
                "{{mirror}} {{outcome}}",
            ),
            target("sum by (mirror) (sentinel_mirror_steps_waiting{%I})", "{{mirror}} waiting"),
            target("sum by (mirror) (increase(sentinel_mirror_failures_total{%I}[$__rate_interval]))", "{{mirror}} failed"),
        ),
        graph(
            "Certificate ends",
            "Of HTTP with TLS; nothing without.",
            "s",
            target("sentinel_tls_certificate_expiry_timestamp_seconds{%I} - time()", "{{instance}}"),
        ),
    ]
    process = [
        graph("CPU", "Cores.", "short", target("rate(process_cpu_seconds_total{%I}[$__rate_interval])", "{{instance}}")),
        graph("Memory", "Resident.", "bytes", target("process_resident_memory_bytes{%I}", "{{instance}}")),
        graph(
            "Open files",
            "Of those that the process may have.",
            "percentunit",
            target("process_open_fds{%I} / process_max_fds{%I}", "{{instance}}"),
        ),
        graph(
            "Disk left",
            "On the file systems of the state directory and of the runs.",
            "percentunit",
            target("sentinel_disk_free_bytes{%I} / sentinel_disk_size_bytes{%I}", "{{instance}} {{directory}}"),
        ),
        graph(
            "Reloads",
            "Of rules and configuration.",
            "short",
            target(
                "sum by (what, outcome) (increase(sentinel_reloads_total{%I}[$__rate_interval]))", "{{what}} {{outcome}}"
            ),
        ),
        graph(
            "What is in use",
            "Hash of rules and configuration: equal lines are daemons that are configured alike.",
            "none",
            target("sentinel_config_hash{%I}", "{{instance}} {{what}}"),
        ),
    ]
    rows = [("Now", 4, now), ("Judging", 8, work), ("Telling people", 8, people), ("The process", 8, process)]
    reloads = annotation("Starts", "changes(process_start_time_seconds{%I}[1m]) > 0", "{{instance}} started", "orange")
    return dashboard(
        "sentinel-daemon",
        "Sentinel / Sentinel itself",
        "Whether the watch works: lag, deliveries, files, memory.",
        rows,
        annotations=[reloads],
    )


def fleet() -> dict[str, Any]:
    """Return the dashboard of the joins of fleets, of the nodes that ship to them, and of workers between them."""
    now = [
        number("Joins at work", "One for each broker.", "short", "sum(sentinel_join_active{%I})"),
        number("Standing by", "Joins that would take over.", "short", "count(sentinel_join_active{%I} == 0) or vector(0)"),
        number("Epoch", "Of the newest lease: one more with each take-over.", "short", "max(sentinel_join_lease_epoch{%I})"),
        number(
            "Silent nodes",
            "Spoke within the hour, and not for 30 s: waited for no more.",
            "short",
            'sum(sentinel_join_nodes{%I, state="silent"})',
            bad_from=1,
        ),
        number(
            "Behind",
            "How long bytes have waited to be shipped, at most.",
            "s",
            "max(sentinel_join_lag_seconds{%I})",
            bad_from=60,
        ),
        number(
            "Broker away",
            "Joins that reach no broker.",
            "short",
            "count(sentinel_join_broker_connected{%I} == 0) or vector(0)",
            bad_from=1,
        ),
        number(
            "Copies refused",
            "Joins whose disk takes no copies.",
            "short",
            "sum(sentinel_join_copies_refused{%I})",
            bad_from=1,
        ),
        number(
            "Rows gone",
            "Frames of the last hour that no node had any more: their steps were judged without them.",
            "short",
            "sum(increase(sentinel_join_gone_frames_total{%I}[1h]))",
            bad_from=1,
        ),
    ]
    flow = [
        graph(
            "New bytes", "Of spools, as they come.", "Bps",
            target("rate(sentinel_join_bytes_total{%I}[$__rate_interval])", "{{instance}}"),
        ),
        graph(
            "Chunks",
            "That came; were here already; came too early for the room; were not taken from who sent them.",
            "ops",
            *(
                target(f"rate(sentinel_join_{what}_total{{%I}}[$__rate_interval])", f"{{{{instance}}}} {words}")
                for what, words in (
                    ("chunks", "came"), ("repeated", "repeated"), ("dropped", "dropped"), ("refused", "refused"),
                )
            ),
        ),
        graph(
            "Steps of digests",
            "Judged of digests; and those whose rows were asked for, for something in them was looked at row by row.",
            "ops",
            target("rate(sentinel_join_digested_steps_total{%I}[$__rate_interval])", "{{instance}} of digests"),
            target("rate(sentinel_join_fetched_steps_total{%I}[$__rate_interval])", "{{instance}} rows asked for"),
        ),
    ]  # fmt: skip
    nodes = [
        graph(
            "Not shipped yet", "Bytes in the spools of all nodes.", "bytes",
            target("sentinel_join_lag_bytes{%I}", "{{instance}}"),
        ),
        graph(
            "Held back", "Bytes that wait until every node has spoken since: a step must not close without its ranks.",
            "bytes", target("sentinel_join_held_bytes{%I}", "{{instance}}"),
        ),
        graph(
            "Nodes", "Live, and silent for 30 s.", "short",
            target("sum by (state) (sentinel_join_nodes{%I})", "{{state}}"),
        ),
        graph(
            "Furthest behind", "Of the nodes furthest behind: how long their bytes have waited.", "s",
            target("sentinel_join_node_lag_seconds{%I}", "{{node}}"),
        ),
        graph(
            "Their bytes", "Of the same nodes.", "bytes", target("sentinel_join_node_lag_bytes{%I}", "{{node}}"),
        ),
        graph(
            "Since they spoke", "Of the same nodes: a beat comes each second.", "s",
            target("time() - sentinel_join_node_heard_timestamp_seconds{%I}", "{{node}}"),
        ),
    ]  # fmt: skip
    workers = [
        graph(
            "Partitions", "Of 64, by the worker that has them; a sum below leaves nodes without an answer.", "short",
            target("sentinel_worker_partitions{%I}", "{{instance}}"), target("sum(sentinel_worker_partitions{%I})", "all"),
        ),
        graph(
            "Nodes behind workers", "Live, and silent for 30 s.", "short",
            target("sum by (instance, state) (sentinel_worker_nodes{%I})", "{{instance}} {{state}}"),
        ),
        graph(
            "Waiting", "Bytes of nodes that are not at the join; and of them those that are at the worker.", "bytes",
            target("sentinel_worker_waiting_bytes{%I}", "{{instance}} waiting"),
            target("sentinel_worker_ahead_bytes{%I}", "{{instance}} at the worker"),
        ),
        graph(
            "In and out", "Bytes of spools that were copied; bytes that went on to the join.", "Bps",
            target("rate(sentinel_worker_bytes_total{%I}[$__rate_interval])", "{{instance}} in"),
            target("rate(sentinel_worker_published_bytes_total{%I}[$__rate_interval])", "{{instance}} out"),
        ),
        graph(
            "Not taken", "Messages that were refused; chunks for which there was no room; 1 where nothing goes on.", "short",
            target("rate(sentinel_worker_refused_total{%I}[$__rate_interval])", "{{instance}} refused"),
            target("rate(sentinel_worker_dropped_total{%I}[$__rate_interval])", "{{instance}} dropped"),
            target("sentinel_worker_blocked{%I}", "{{instance}} blocked"),
        ),
        graph(
            "Taken partitions", "A second: workers that come, go or are late.", "ops",
            target("rate(sentinel_worker_taken_partitions_total{%I}[$__rate_interval])", "{{instance}}"),
        ),
    ]  # fmt: skip
    taken_over = annotation(
        "Take-overs", "changes(sentinel_join_lease_epoch{%I}[1m]) > 0", "{{instance}} took over", "orange"
    )
    return dashboard(
        "sentinel-fleet",
        "Sentinel / Fleet",
        "Whether everything that nodes measure comes to the join, and which node is behind.",
        [("Now", 4, now), ("What comes", 8, flow), ("The nodes", 8, nodes), ("Workers", 8, workers)],
        annotations=[taken_over],
    )


DASHBOARDS = {"overview": overview, "run": run, "pipeline": pipeline, "sentinel": daemon, "fleet": fleet}


def as_text(made: dict[str, Any]) -> str:
    """Return the JSON of a dashboard as it is committed."""
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, make in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(as_text(make()), "utf-8")
