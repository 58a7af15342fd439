"""From a measurement to a step: the rows of the running step, its scalars, samples and vectors, and their tensor table.

In: tensors and sites that are due. Out: one step at a time to `writing/`, on its way to the host without waiting.
Never: asks a device to finish; what has not arrived is waited for by the writer thread alone.
"""
