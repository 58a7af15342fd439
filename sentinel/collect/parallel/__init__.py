"""Where this rank stands, and how each tensor is placed over the others: what the daemon needs to merge shards.

In: process groups, meshes, DTensor placements, autograd graphs, the launcher's environment. Out: `Place` and placements.
Never: communicates. A placement that is not known is `unknown`, and nothing is merged over it.
"""
