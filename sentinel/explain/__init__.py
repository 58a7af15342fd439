"""What recorded anomalies say, for people.

In: anomaly files and incidents. Out: the top k, the story of an incident, drawings, skip lists.
Never: judges, or changes a record.
"""
