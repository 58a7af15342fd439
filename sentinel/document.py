"""YAML with line numbers: a document as plain values that know where they were written, and what is wrong in it.

Every file that people write for Sentinel is read here: the trainer's config, the daemon's, rule packs and rule tests.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MAX_DEPTH = 32
"""Most levels of a document; what people write has six."""
MAX_NODES = 100_000
"""A pack is small; what unfolds to more than this is a mistake or an attack (aliases of aliases)."""
_TOO_DEEP = f"nested too deeply: expected at most {MAX_DEPTH} levels"
_EXPONENT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""1e6 is a number to whoever writes it, as to YAML 1.2 and JSON; to YAML 1.1, which the parser reads, it is text."""
_MERGE = "tag:yaml.org,2002:merge"
_HINTS = {"found character '\\t' that cannot start any token": "found a tab; indent with spaces",
          "but found another document": "found a second document behind ---; give each a file of its own"}  # fmt: skip


class BrokenDocument(ValueError):
    """A file that is not there, or no YAML; `line` is 1-based."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a document."""

    file: str
    """As the user named it; empty where the values came from code."""
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.file else self.message


@dataclass(frozen=True, slots=True)
class Located:
    """A value and the 1-based line it begins on. `value` holds dict[str, Located], list[Located] or a scalar."""

    value: Any
    line: int
    key_line: int = 0
    """Line of the key it belongs to; 0 in a list."""

    @property
    def where(self) -> int:
        """The line to name in an error: that of the key where there is one."""
        return self.key_line or self.line

    def plain(self) -> Any:
        """Return the value without lines."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    @staticmethod
    def of(value: object) -> Located:
        """Return a value of Python as a document has it, on line 0: mappings with text as keys, lists, and the rest."""
        if isinstance(value, Mapping):
            return Located({str(key): Located.of(item) for key, item in value.items()}, 0)
        if isinstance(value, list | tuple | set | frozenset):
            return Located([Located.of(item) for item in value], 0)
        return Located(value, 0)


def read_document(path: Path) -> Located | None:
    """Return the document in a file, None when it is empty. BrokenDocument says what is wrong with it, and on which line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BrokenDocument(1, f"cannot be read: {error.strerror}") from error
    return parse_bytes(data)


def parse_bytes(data: bytes) -> Located | None:
    """Return the document in the bytes of a file; else as `read_document`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BrokenDocument(line, f"not UTF-8: {error.reason} at byte {error.start}") from error
    return parse(text)


@functools.lru_cache(maxsize=4)
def parse(text: str) -> Located | None:
    """Return the one document in `text`, None when it is empty. BrokenDocument names the line of what is wrong.

    The newest documents are kept, for nobody changes one: the default pack, which takes 50 ms, is read for each run and at
    each reload.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _NodeReader(loader).read(node, 0, 0)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "broken"
        problem = _HINTS.get(problem, problem)
        raise BrokenDocument(mark.line + 1 if mark else 1, f"not YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise BrokenDocument(1, f"not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise BrokenDocument(1, _TOO_DEEP) from error


def type_of(value: object) -> str:
    """Return what a value of a document is, in words."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def show(value: object) -> str:
    """Return a value of a document as it may be quoted: one line, cut where it is long."""
    if isinstance(value, str):
        return f'"{value[:200]}"' if value.isprintable() else ascii(value[:200])
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a number of hundreds of digits"  # which Python does not write
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return repr(value) if isinstance(value, int | float) else type_of(value)


class _Loader(yaml.SafeLoader):
    """Composes no deeper than `MAX_DEPTH`: composing recurses, and the message names the line that goes too deep."""

    depth = -1

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth >= MAX_DEPTH:
            raise BrokenDocument(self.line + 1, _TOO_DEEP)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _NodeReader:
    """Turns nodes into Located values, refusing duplicate keys, keys that are no text, and bombs."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._num_nodes = 0

    def read(self, node: yaml.Node, depth: int, key_line: int) -> Located:
        line = node.start_mark.line + 1
        self._num_nodes += 1
        if depth > MAX_DEPTH:
            raise BrokenDocument(line, _TOO_DEEP)
        if self._num_nodes > MAX_NODES:
            raise BrokenDocument(line, f"expected at most {MAX_NODES:,} values, aliases unfolded; got more by here")
        if isinstance(node, yaml.MappingNode):
            return Located(self._mapping(node, depth), line, key_line)
        if isinstance(node, yaml.SequenceNode):
            return Located([self.read(item, depth + 1, 0) for item in node.value], line, key_line)
        try:
            if isinstance(node, yaml.ScalarNode) and node.style is None and _EXPONENT.fullmatch(node.value):
                return Located(float(node.value), line, key_line)
            return Located(self._loader.construct_object(node), line, key_line)
        except (ValueError, yaml.YAMLError) as error:
            raise BrokenDocument(line, f'cannot read "{node.value}" as {node.tag.rpartition(":")[2]}') from error

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Located]:
        found: dict[str, Located] = {}
        merged: dict[str, Located] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                below = self.read(value_node, depth + 1, line)
                for one in below.value if isinstance(below.value, list) else [below]:
                    if not isinstance(one.value, dict):
                        raise BrokenDocument(line, '"<<" merges mappings; expected an alias of one, such as *name')
                    merged = {**one.value, **merged}  # of several the first counts
                continue
            key = key_node.value
            if not isinstance(key, str):
                raise BrokenDocument(line, "a key must be text")
            if key in found:
                raise BrokenDocument(line, f'key "{key}" is there twice, first on line {found[key].key_line}')
            found[key] = self.read(value_node, depth + 1, line)
        return {**merged, **found}
