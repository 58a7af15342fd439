"""The same as `hooks/` where modules are compiled: ops in the graph stand for the hooks that a graph would leave out.

In: the modules that torch.compile traces. Out: the same sites, met by ops at run time.
Never: breaks a graph; where this torch loses the ops of its graphs, their inside is not measured, and that is reported.
"""
