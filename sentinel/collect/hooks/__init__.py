"""What is hung on modules, parameters, optimizers and functions of torch, and the sites that they make.

In: tensors as forward, backward and the optimizer make them. Out: calls of the recorder, one for each site that is due.
Never: decides what is due (`schedule/`) or measures (`kernels/`, `probes/`); keeps a tensor alive, or changes one.
"""
