"""From a rank to the daemon: frames, the spool on disk, and the hand-over to the thread that writes it. Bytes only.

In: whole steps of one rank. Out: files that any number of readers follow.
Never: knows what a row means, beyond which are worth keeping when there is no room for all.
"""
