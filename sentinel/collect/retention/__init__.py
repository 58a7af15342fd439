"""What of a spool is kept when there is no room for all: what is finite and ordinary goes first, a NaN last.

In: steps that wait, and closed files of the spool. Out: the same with less in them, and what each step lost.
Never: writes the file that is being written; deletes what no loss report counts.
"""
