"""Rule packs and the engine that applies them: what is watched, by which detector, and how severe it is.

In: closed steps and a pack. Out: anomalies. `language/` reads packs, `watches/` hold a rule's state, `engine.py` runs them.
Never: relates anomalies to one another (`order`, `incidents`); reads a clock or a file while judging.
"""
