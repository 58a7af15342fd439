"""Whether what another package hands in can be called as it is going to be called: said before it is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence


def misfit(found: object, methods: Mapping[str, Sequence[str]]) -> str:
    """Return in words which methods of an object, or of the instances of a class, take other arguments; empty: they fit.

    methods: name -> the arguments, by position, that it is called with. What says nothing of its arguments fits.
    """
    wrong = []
    for name, arguments in methods.items():
        is_plain = isinstance(found, type) and inspect.isfunction(inspect.getattr_static(found, name, None))
        try:
            signature = inspect.signature(getattr(found, name))
        except (TypeError, ValueError):
            continue
        try:
            signature.bind(*([None] if is_plain else []), *arguments)
        except TypeError:
            taken = ", ".join(map(str, list(signature.parameters.values())[is_plain:]))
            wrong.append(f"{name}({', '.join(arguments)}) is called, and it takes ({taken})")
    return "; ".join(wrong)
