"""The verbs: `sentinel VERB`. Data goes to stdout, messages to stderr; each parses, calls a stage, and prints.

In: arguments and the environment. Out: exit codes: 0 clean, 1 anomalies or errors found, 2 bad usage, 3 lint only.
Never: decides what the stages decide.
"""
