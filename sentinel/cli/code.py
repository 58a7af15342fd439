"""`--allow-code`: the option of every verb that reads rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _allow(context: click.Context, parameter: click.Parameter, is_given: bool) -> bool:
    # Where no daemon runs in this process the word of one command must not be the next one's: tests call several.
    from sentinel.detect.dotted import allow_code

    allow_code(is_given)
    return is_given


def allow_code_option(*, is_handed_on: bool = False) -> Callable[[_Command], _Command]:
    """Return the decorator. is_handed_on: the command gets it too, as the argument `allow_code`."""
    return click.option(
        "--allow-code",
        is_flag=True,
        expose_value=is_handed_on,
        callback=_allow,
        help="Let rules name detectors by dotted path, package.module:Class: this runs that code. Default: refused.",
    )
