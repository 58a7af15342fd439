"""The daemon: composes ingest, judge, control, report and store into one loop, and serves what it found over HTTP.

In: directories of runs. Out: journals, anomaly files, metrics, alerts, commands, the page.
Never: needs torch, or decides what a stage decides.
"""
