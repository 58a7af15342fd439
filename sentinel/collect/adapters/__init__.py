"""Adapters: one file a trainer, each of them imported only by those who use that trainer (`sentinel.ADAPTERS`).

In: the trainer's own objects: its model, optimizer, numbers, callbacks. Out: a monitor that has been attached to them.
Never: measures. What only one trainer does is known here and nowhere else.
"""
