"""The diagnosis of an incident: its likely cause, with the evidence and the next experiment.

In: what an incident has shown so far. Out: a diagnosis (`batch`, `model`, `precision`, `hardware`, `program`, `unknown`).
Never: asks anything else than the evidence; the same evidence gives the same diagnosis.
"""
