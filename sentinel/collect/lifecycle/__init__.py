"""The process that trains: that a forked child is not watched, how the process ends, where it stands still, what it holds.

In: exits, exceptions, signals, forks. Out: the last words of a rank, and events for the writer thread.
Never: replaces a trainer's own handlers, or keeps a process from ending.
"""
