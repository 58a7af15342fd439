"""What is measured in this step: the config's kinds and intervals, what commands switch on for a while, and what it costs.

In: the config and its edits, commands of the daemon, the time that measuring took. Out: the plan that hooks follow.
Never: measures. A command or an edit changes the plan between two steps, and on every rank in the same one.
"""
