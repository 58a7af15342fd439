"""The daemon over HTTP: the page, metrics, health, and the JSON API. Names of runs are looked up, never turned into paths.

In: requests, and a `DaemonApi` that answers for the runs. Out: responses, each with the headers that guard it.
Never: decides anything, or lets a request in that `guard` refuses.
"""
