"""What was judged, reported to files, gauges and people.

In: anomalies and revisions of incidents. Out: JSON lines, Prometheus metrics, alerts through `sinks/`.
Never: keeps judging waiting: each sink has a thread of its own and its own place in the outbox.
"""
