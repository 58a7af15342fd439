"""The fleet: ranks on machines without a shared file system, judged in one place, over a NATS JetStream server.

In: spools on the disks of nodes, as trainers write them; at the join, messages of nodes, and of workers in their names.
Out: at the join, for the daemon to judge, a copy of each spool, byte for byte or without rows, and digests that stand for
these; at the nodes, `ack` files and commands. Between them workers make digests of what nodes only ship.
Never: judges, deletes what no join has committed, touches a trainer.
"""
