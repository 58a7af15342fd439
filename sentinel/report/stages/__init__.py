"""What happens to alerts between the outbox and a sink, one plain stage after the other.

In: what waits for one sink, the newest word on each incident; what the sink was told before; the time. Out: what is sent in
the next message; what is settled without one, with the name of the reason. Never: a clock, a thread, a request, a file.
"""
