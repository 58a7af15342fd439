"""Sinks: where alerts go. One module each; `table.py` names them all.

In: an alert. Out: what became of its delivery. Never: longer than its deadline, or a secret in a message or a log.
"""
