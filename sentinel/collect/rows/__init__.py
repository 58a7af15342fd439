"""From a measurement to a frame: the rows of the running step, its scalars, samples and vectors, and their tensor table.

In: tensors and sites that are due. Out: one step at a time to `wire.handover`, on its way to the host without waiting.
Never: asks a device to finish; what has not arrived is waited for by the writer thread alone.
"""
