"""Functions and methods of torch replaced by ours while at least one monitor is installed, and put back exactly
afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from sentinel.collect.hooks.weak import WeakList

User = TypeVar("User")
_INHERITED = object()
"""Marks an attribute that the owner inherits: it is deleted, not restored."""


@dataclasses.dataclass(slots=True, eq=False)
class _Replacement:
    """One attribute that stands replaced."""

    owner: Any
    name: str
    original: Any
    """What stood there, as it was stored; `_INHERITED`: nothing did."""
    ours: Any


_IN_FORCE: list[_Replacement] = []
"""Of all interceptions, in the order in which they were made: where two replace one attribute, the later is on top."""


class Interception(Generic[User]):
    """One set of replacements, shared by all monitors of the process; the replacements call each of `users`."""

    def __init__(self, replace_all: Callable[[Interception[User]], None]) -> None:
        """replace_all: calls `replace` for everything there is to replace now; called when the first user joins."""
        self.users: WeakList[User] = WeakList(self._restore)
        """The users that are called, held weakly."""
        self._replace_all = replace_all
        self._replaced: list[_Replacement] = []

    @property
    def names(self) -> frozenset[str]:
        """Names of the attributes replaced now."""
        return frozenset(one.name for one in self._replaced)

    def join(self, user: User) -> None:
        """Call `user` from now on."""
        self.users.append(user)
        if not self._replaced:
            _have_the_compiler_look_up_torch()
            self._replace_all(self)

    def leave(self, user: User) -> None:
        """Call `user` no more; with the last one every replacement is undone."""
        self.users.remove(user)

    def _restore(self) -> None:
        while self._replaced:
            gone = self._replaced.pop()
            _IN_FORCE.remove(gone)
            if getattr(gone.owner, gone.name, None) is not gone.ours:
                # Another interception came on top of it, and puts back in its own time what stood here before.
                for above in _IN_FORCE:
                    if above.owner is gone.owner and above.original is gone.ours:
                        above.original = gone.original
            elif gone.original is _INHERITED:
                delattr(gone.owner, gone.name)
            else:
                setattr(gone.owner, gone.name, gone.original)

    def replace_everywhere(self, name: str, original: Any, ours: Any) -> None:
        """Put `ours` in the place of a function in every module that has imported it under this name."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if isinstance(names, dict) and names.get(name) is original:
                self.replace(module, name, ours)

    def replace_imported(self, ours_of: Mapping[Any, Any]) -> None:
        """Put ours in the place of functions of torch in every module outside torch that has imported one.

        ours_of: function of torch -> ours. They are found by identity, under whatever name. Torch's own modules have no
        more of them, or compare them by identity; and to look through its 2,000 would copy every page of it in a process
        that was forked after the import.
        """
        for path, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or path.partition(".")[0] == "torch":
                continue
            for original, ours in ours_of.items():
                # Nearly none has it: asked without a step of the interpreter for each of its names. Of a copy: other threads
                # import meanwhile.
                if any(map(operator.is_, list(names.values()), itertools.repeat(original))):
                    for name in [name for name, value in list(names.items()) if value is original]:
                        self.replace(module, name, ours)

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Put `ours` in the place of an attribute of a module or class."""
        # As it is stored: looked up, a method of a C++ class is a function that no longer takes its object.
        replacement = _Replacement(owner, name, vars(owner).get(name, _INHERITED), ours)
        setattr(owner, name, ours)
        self._replaced.append(replacement)
        _IN_FORCE.append(replacement)


def _have_the_compiler_look_up_torch() -> None:
    """Have torch.compile look up torch's functions while they are torch's own.

    It does so once a process, by name, when it is first imported and used, which the first optimizer brings about. What
    stands there in the place of a function it takes for torch's from then on, and the function itself, once it is back, for
    an unknown one, at which graphs break.

    Source: torch/_dynamo/trace_rules.py, get_torch_obj_rule_map, of torch 2.4 to 2.13.
    """
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
