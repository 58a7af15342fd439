"""Regular expressions whose matching takes a bounded time, whoever wrote them: no backtracking.

Python's `re` tries alternatives one after the other, so that `((\\w+\\.?)+)+!` takes longer than any training on a name of
forty letters. Here all alternatives are followed at once (Thompson's construction): a match costs at most states times
letters. The syntax is that of `re`, without what is not regular: back references, conditions, atomic groups, possessive
repeats. Source: swtch.com/~rsc/regexp/regexp1.html.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_PATTERN = 512
"""Characters of an expression; a bound on time to parse one, since expressions come from the network too."""
MAX_STATES = 1000
"""States of an expression, counted repeats written out; a bound on memory that `.{1,500}` meets, `(.{1,500}){1,500}` not."""
MAX_NESTING = 50
"""Groups in groups; a bound on the parser's recursion, far below Python's own limit of 1,000 calls."""
MAX_KNOWN = 50_000
"""Answers, and transitions, that are remembered; a bound on memory, past which they are forgotten and found again."""

_REPEAT = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")
_FLAGS = re.compile(r"\(\?([aimsuxL]*)(?:-([imsx]+))?([:)])")
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|[1-3][0-7]{2}|.)", re.DOTALL
)
_BITS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "u": re.UNICODE, "x": re.VERBOSE}


class _Letter:
    """Takes one character."""

    __slots__ = ("known", "next", "pattern")

    def __init__(self, text: str, flags: int, following: int) -> None:
        self.pattern = re.compile(text, flags)
        self.next = following
        self.known: dict[str, bool] = {}

    def takes(self, letter: str) -> bool:
        found = self.known.get(letter)
        if found is None:
            found = self.known[letter] = self.pattern.fullmatch(letter) is not None
        return found


class _Choice:
    """Goes on at several states; at none where nothing can follow."""

    __slots__ = ("nexts",)

    def __init__(self, *nexts: int) -> None:
        self.nexts = nexts


class _Condition:
    """Goes on where something holds between two characters: an anchor, a look ahead or behind."""

    __slots__ = ("holds", "next")

    def __init__(self, holds: Callable[[str, int], bool], following: int) -> None:
        self.holds = holds
        self.next = following


_State = _Letter | _Choice | _Condition
_END = 0
"""The state that means a match."""


class RegularExpression:
    """An expression of `re`'s syntax; ValueError where it is none, is too large, or needs backtracking."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN:
            raise ValueError(f"expected at most {MAX_PATTERN} characters, got {len(text)}")
        try:
            flags = re.compile(text).flags
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression: {text!r}: {error or 'nested too deeply'}") from error
        self.text = text
        parser = _Parser(text, flags)
        self._states = parser.states
        self._begin = parser.parse()
        self._is_plain = not any(isinstance(one, _Condition) for one in self._states)
        self._answers: dict[str, bool] = {}
        self._moves: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def __repr__(self) -> str:
        return f"RegularExpression({self.text!r})"

    def fullmatch(self, name: str) -> bool:
        """Return whether the whole of `name` matches; remembered, so that asking again is quick."""
        found = self._answers.get(name)
        if found is None:
            if len(self._answers) >= MAX_KNOWN:
                self._answers.clear()
            found = self._answers[name] = self._matches(name)
        return found

    def _matches(self, name: str) -> bool:
        here = _closure(self._states, {self._begin}, name, 0)
        for at, letter in enumerate(name):
            if not here:
                return False
            following = self._moves.get((here, letter)) if self._is_plain else None
            if following is None:
                following = _step(self._states, here, letter, name, at + 1)
                if self._is_plain:
                    if len(self._moves) >= MAX_KNOWN:
                        self._moves.clear()
                    self._moves[here, letter] = following
            here = following
        return _END in here


def _closure(states: list[_State], begun: set[int], name: str, at: int) -> frozenset[int]:
    """Return the states that take a letter, or are the end, and are reached from `begun` at a place of a name."""
    found, seen, waiting = set(), set(begun), list(begun)
    while waiting:
        number = waiting.pop()
        state = states[number]
        nexts: tuple[int, ...] = ()
        if number == _END or isinstance(state, _Letter):
            found.add(number)
        elif isinstance(state, _Choice):
            nexts = state.nexts
        elif state.holds(name, at):
            nexts = (state.next,)
        for one in nexts:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return frozenset(found)


def _step(states: list[_State], here: frozenset[int], letter: str, name: str, at: int) -> frozenset[int]:
    begun = set()
    for number in here:
        state = states[number]
        if isinstance(state, _Letter) and state.takes(letter):
            begun.add(state.next)
    return _closure(states, begun, name, at)


def _ends(states: list[_State], begin: int, name: str, first: int) -> set[int]:
    """Return where the parts of `name` end that begin at `first` and match."""
    here, ends = _closure(states, {begin}, name, first), set()
    for at in range(first, len(name) + 1):
        if _END in here:
            ends.add(at)
        if at == len(name) or not here:
            break
        here = _step(states, here, name[at], name, at + 1)
    return ends


class _Parser:
    """Makes states of an expression that `re` has found to be one, from its end to its beginning: each knows its next."""

    def __init__(self, text: str, flags: int) -> None:
        self.states: list[_State] = [_Choice()]
        self._text = text
        self._at = 0
        self._flags = flags & (re.ASCII | re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE)
        self._nesting = 0

    def parse(self) -> int:
        """Return the state that an expression begins with; ValueError for what needs backtracking."""
        return self._alternatives(self._flags)(self.states, _END)

    def _refuse(self, what: str) -> ValueError:
        return ValueError(f"{what} cannot be matched in bounded time, in {self._text!r}; write it without")

    def _alternatives(self, flags: int) -> _Build:
        if flags & re.VERBOSE:
            raise self._refuse("the flag x")
        choices = [self._sequence(flags)]
        while self._text.startswith("|", self._at):
            self._at += 1
            choices.append(self._sequence(flags))
        return choices[0] if len(choices) == 1 else _any_of(choices)

    def _sequence(self, flags: int) -> _Build:
        parts: list[_Build] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._atom(flags)
            if part is not None:
                parts.append(self._repeated(part))
            elif parts:  # a comment may stand before what repeats the part before it
                parts[-1] = self._repeated(parts[-1])
        return _in_turn(parts)

    def _repeated(self, part: _Build) -> _Build:
        while self._at < len(self._text):
            sign = self._text[self._at]
            counted = _REPEAT.match(self._text, self._at)
            if sign in "*+?":
                least, most = (1, None) if sign == "+" else (0, 1 if sign == "?" else None)
                self._at += 1
            elif counted is not None and (counted[1] or counted[2]) and (counted[1] or counted[3]):
                least = int(counted[1] or 0)
                most = least if not counted[2] else int(counted[3]) if counted[3] else None
                self._at = counted.end()
            elif counted is not None and counted[2]:  # `{,}` is any number
                least, most = 0, None
                self._at = counted.end()
            else:
                break
            if self._text.startswith("+", self._at):
                raise self._refuse("a possessive repeat")
            if self._text.startswith("?", self._at):  # lazy: the same strings match
                self._at += 1
            part = _repeat(part, least, most)
        return part

    def _atom(self, flags: int) -> _Build | None:
        text, at = self._text, self._at
        sign = text[at]
        if sign == "(":
            return self._group(flags)
        if sign in "^$":
            self._at += 1
            return _condition(_anchor(sign, flags))
        if sign == "\\":
            escape = _ESCAPE.match(text, at)
            assert escape is not None
            word = escape[0]
            self._at = escape.end()
            if word in ("\\A", "\\Z", "\\b", "\\B"):
                return _condition(_anchor(word, flags))
            if word[1] in "123456789" and len(word) == 2:
                raise self._refuse("a back reference")
            return _letter(word, flags)
        end = at + 1
        if sign == "[":
            end += text.startswith("^", end)
            end += text.startswith("]", end)
            while text[end] != "]":
                end += 2 if text[end] == "\\" else 1
            end += 1
        self._at = end
        word = text[at:end]
        return _letter(word if sign in "[." else re.escape(word), flags)

    def _group(self, flags: int) -> _Build | None:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise ValueError(f"expected at most {MAX_NESTING} groups in one another, got more, in {self._text!r}")
        text, at = self._text, self._at
        look = next((one for one in ("(?=", "(?!", "(?<=", "(?<!") if text.startswith(one, at)), "")
        stated = _FLAGS.match(text, at)
        if text.startswith("(?#", at):
            self._at = text.index(")", at) + 1
            self._nesting -= 1
            return None
        if text.startswith(("(?P=", "(?(", "(?>"), at):
            kind = {"P": "a back reference", "(": "a condition", ">": "an atomic group"}[text[at + 2]]
            raise self._refuse(kind)
        if look:
            self._at += len(look)
        elif text.startswith("(?P<", at):
            self._at = text.index(">", at) + 1
        elif stated is not None:
            self._at = stated.end()
            for letter in stated[1]:
                flags |= _BITS[letter] if letter != "L" else 0
            for letter in stated[2] or "":
                flags &= ~_BITS[letter]
            if "u" in stated[1]:
                flags &= ~re.ASCII
            if stated[3] == ")":  # flags of the whole, which `re` has reported already
                self._nesting -= 1
                return None
        else:
            self._at += 1
        inner = self._alternatives(flags)
        self._at += 1
        self._nesting -= 1
        return _condition(_looking(look, inner)) if look else inner


_Build = Callable[[list[_State], int], int]
"""Puts the states of a part before the state that follows it, and returns the one that the part begins with."""


def _put(states: list[_State], state: _State) -> int:
    if len(states) >= MAX_STATES:
        raise ValueError(f"expected an expression of at most {MAX_STATES} states, repeats written out, got more")
    states.append(state)
    return len(states) - 1


def _letter(text: str, flags: int) -> _Build:
    return lambda states, following: _put(states, _Letter(text, flags, following))


def _condition(holds: Callable[[str, int], bool]) -> _Build:
    return lambda states, following: _put(states, _Condition(holds, following))


def _in_turn(parts: list[_Build]) -> _Build:
    def build(states: list[_State], following: int) -> int:
        for part in reversed(parts):
            following = part(states, following)
        return following

    return build


def _any_of(choices: list[_Build]) -> _Build:
    def build(states: list[_State], following: int) -> int:
        return _put(states, _Choice(*(choice(states, following) for choice in choices)))

    return build


def _repeat(part: _Build, least: int, most: int | None) -> _Build:
    if max(least, most or 0) > MAX_STATES:
        raise ValueError(f"expected at most {MAX_STATES} repeats, got {max(least, most or 0)}")

    def build(states: list[_State], following: int) -> int:
        if most is None:
            again = _Choice()
            following, behind = _put(states, again), following
            again.nexts = (part(states, following), behind)
        else:
            behind = following
            for _ in range(most - least):
                following = _put(states, _Choice(part(states, following), behind))
        for _ in range(least):
            following = part(states, following)
        return following

    return build


def _anchor(sign: str, flags: int) -> Callable[[str, int], bool]:
    is_by_line = bool(flags & re.MULTILINE)
    if sign in ("^", "\\A"):
        return lambda name, at: at == 0 or (sign == "^" and is_by_line and name[at - 1] == "\n")
    if sign == "\\Z":
        return lambda name, at: at == len(name)
    if sign == "$":
        return lambda name, at: name[at:] in ("", "\n") or (is_by_line and name[at] == "\n")
    word = re.compile(r"\w", flags)

    def is_border(name: str, at: int) -> bool:
        before = at > 0 and word.match(name[at - 1]) is not None
        return before != (at < len(name) and word.match(name[at]) is not None)

    # Python's own: an empty string has no place where `\B` holds.
    return is_border if sign == "\\b" else lambda name, at: bool(name) and not is_border(name, at)


def _looking(look: str, part: _Build) -> Callable[[str, int], bool]:
    states: list[_State] = [_Choice()]
    begin = part(states, _END)
    is_wanted = look.endswith("=")
    if "<" in look:
        return lambda name, at: is_wanted == any(at in _ends(states, begin, name, first) for first in range(at + 1))
    return lambda name, at: is_wanted == bool(_ends(states, begin, name, at))
