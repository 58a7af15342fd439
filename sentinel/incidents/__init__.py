"""Incidents: anomalies that follow from the same causes. Each opens, is revised as it grows, and ends once.

In: the anomalies of a closed step, or of a moment, and the facts of the step. Out: revisions of incidents.
Never: judges a value, reads a clock or a file, or sends a message.
"""
