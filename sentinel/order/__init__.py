"""The law of order: what happened before what, which anomalies came first, and where a fault was born.

In: anomalies. Out: indices and names. Never: groups over steps, writes sentences, or reads a file.
"""
