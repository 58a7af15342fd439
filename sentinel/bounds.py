"""What a rank may say: the range of every number, and the most of everything, that a frame can hold.

A frame whose checksum is right may still be wrong: memory flips bits before the checksum is taken, and a defect writes what
it likes. What is out of bounds is refused when it is read, and never reaches arithmetic, tables or memory.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_RANKS = 2**18
"""Ranks of a run; a bound on memory, since tables are as long as the highest rank: 262,144 entries."""
MAX_CHUNKS = 2**12
"""Model chunks on one rank; a bound on memory, far above the virtual stages of any pipeline."""
MAX_SCHEDULE = 256
"""Characters of a pipeline schedule's name; a bound on memory for what a file may claim."""
MAX_STEP = 2**40
"""Largest step, about 1e12; a larger one is a damaged or forged number: a step a millisecond takes 35 years to it."""
MAX_TENSORS = 2**24
"""Ids of tensors are below; a bound on memory, since tables are as long as the largest id: 16.8 million entries."""
MAX_ATTEMPT = 2**20
"""Attempts of a run; a larger number is a damaged or forged one: a restart a minute takes two years to it."""
MAX_WALL_NS = 4_102_444_800 * 10**9
"""The year 2100, nanoseconds since the epoch."""
MAX_MONO_NS = 2**62
MAX_ELEMENTS = 2**60
"""Elements of one tensor; sums over a few tensors still fit a signed 64-bit integer."""
MAX_SCALARS = 100_000
"""Logged values of one rank and step; a bound on memory for one frame."""
MAX_SETTINGS_DEPTH = 32
"""Containers in one another in a config; a bound on recursion."""

Step = Annotated[int, Meta(ge=-1, le=MAX_STEP)]
"""A step, or -1 for none."""
Count = Annotated[int, Meta(ge=0, le=2**48)]
"""A number of rows, calls, elements or bytes."""
Small = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A micro-step, a place in an order: what fits a row's 32 bits, or -1 for none."""
TensorId = Annotated[int, Meta(ge=0, lt=MAX_TENSORS)]
Chunk = Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]
"""A vpp_stage."""
Depth = Annotated[int, Meta(ge=0, lt=2**16)]
"""Place of a chunk in the forward order of all."""
Offset = Annotated[int, Meta(ge=0, le=2**48)]
"""A place in a file, bytes."""
Shift = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
"""What is added to the number of a layer."""
LayoutId = Annotated[int, Meta(ge=0, lt=2**32)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""A duration; below 0: not known. NaN is out of bounds."""
Word = Annotated[str, Meta(max_length=256)]
"""A word that is one of a few, or names a command."""
MAX_NAME = 4096
Name = Annotated[str, Meta(max_length=MAX_NAME)]
"""The name of a module, a tensor, a scalar."""
Text = Annotated[str, Meta(max_length=2**20)]
"""Something for people."""
Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**48)], ...], Meta(max_length=64)]
"""Sizes of the dimensions of a tensor."""
Dtype = Annotated[str, Meta(max_length=16, pattern=r"^[<>|=]?[iufb][1248]\Z")]
"""numpy's name of a type of numbers; its size is checked by numpy."""
