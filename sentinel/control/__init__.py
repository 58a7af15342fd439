"""Anomalies become commands, commands become files, ranks answer.

In: judgements, and what people ask for. Out: commands that are dated and expire, and what became of each.
Never: waits for a rank, or changes what training computes.
"""
