"""Where this rank stands, and how each tensor is placed over the others: what the daemon needs to merge shards.

In: process groups, meshes, DTensor placements, autograd graphs, the launcher's environment. Out: `Place` and placements.
Never: communicates. What it cannot tell it calls unknown, and nobody merges over that.
"""
