"""Writes the reference pages when the site is built: a table for each configuration struct, and the help of each command.

A hook of mkdocs. A line `{{ fields sentinel.monitor_config.MonitorConfig }}` of a page becomes the struct's table, read from
its fields and the docstring under each of them; `{{ commands }}` becomes the help of every command. Nothing of it is kept in
a file, so nothing of it can be older than the code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import click
import msgspec

ROOT = Path(__file__).parents[1]
"""The repository."""
DOCS = ROOT / "docs"
HELP_WIDTH = 100
"""Characters in a line of a command's help."""


class PageError(Exception):
    """A page asks for what the code does not have, or a field of a configuration says nothing of itself."""


def on_page_markdown(markdown: str, *, page: Any = None, **kwargs: Any) -> str:
    """Return a page as mkdocs goes on with it: directives filled in, links to files of the repository checked.

    page: as mkdocs has it; None: one of the pages beside this file.
    """
    folder = DOCS if page is None else (DOCS / page.file.src_uri).parent
    markdown = re.sub(r"^\{\{ fields (\S+) \}\}$", lambda found: fields_table(found[1]), markdown, flags=re.MULTILINE)
    if "{{ commands }}" in markdown:
        markdown = markdown.replace("{{ commands }}", commands_text())
    link = re.compile(r'\[([^\]]*)\]\((\.\./[^)\s]+)(?: "([^"]*)")?\)')
    return link.sub(lambda found: _repository_link(found, folder), markdown)


def fields_table(path: str) -> str:
    """Return a table of a msgspec struct's fields: name, type, default, meaning. path: its dotted path."""
    struct = found_at(path)
    docs = field_docs(struct)
    types = field_types(struct)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        meaning = docs.get(field.name) or _doc_of_nested(field.type)
        if not meaning:
            raise PageError(f"{path}.{field.name}: expected a docstring under the field, which the reference shows")
        cells = (f"`{field.encode_name}`", types[field.name], shown_default(field), meaning)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def commands_text() -> str:
    """Return a section for each command of `sentinel`, with the help that `--help` prints."""
    from sentinel.cli.main import VERBS, sentinel

    context = click.Context(sentinel, info_name="sentinel")
    found = []
    for verb in VERBS:
        command = sentinel.get_command(context, verb)
        assert command is not None
        found += _sections(command, click.Context(command, info_name=verb, parent=context, terminal_width=HELP_WIDTH), 2)
    return "\n\n".join(found)


def field_docs(struct: type) -> dict[str, str]:
    """Return the docstring under each field of a class and of those that it inherits from, on one line."""
    found: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        body = _class_body(cls)
        for line, below in itertools.pairwise(body):
            match line, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def field_types(struct: type) -> dict[str, str]:
    """Return the type of each field in words of YAML."""
    found: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        for line in _class_body(cls):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = _type_words(line.annotation)
    return found


def found_at(path: str) -> Any:
    """Return what a dotted path leads to."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PageError(f"{path}: expected a struct, got {error}") from error


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default as YAML has it; a nested section has none of its own."""
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if default is msgspec.NODEFAULT:
        return "required"
    if isinstance(default, msgspec.Struct):
        given = {key: value for key, value in _plain(default).items() if value != _plain(type(default)()).get(key)}
        return f"`{_json(given)}`" if given else "its own defaults"
    if isinstance(default, int) and not isinstance(default, bool) and field.name.endswith("bytes"):
        return f"`{default}` ({_size(default)})"
    if default == "":
        return "empty"
    return f"`{_json(_plain(default))}`"


def _class_body(cls: type) -> list[ast.stmt]:
    if not issubclass(cls, msgspec.Struct) or cls is msgspec.Struct:
        return []
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return tree.body


def _type_words(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return f"{_type_words(left)} or null"
        case ast.Subscript(value=ast.Name(id="tuple" | "list"), slice=ast.Tuple(elts=[one, *_])):
            return f"list of {_type_words(one)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, value])):
            return f"{_type_words(key)} to {_type_words(value)}"
        case ast.Name(id=name):
            return {"str": "text", "float": "number", "int": "integer", "bool": "true or false"}.get(name, f"`{name}`")
    return f"`{ast.unparse(node)}`"


def _doc_of_nested(kind: Any) -> str:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return (inspect.getdoc(kind) or "").split("\n\n")[0] if is_struct else ""


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _size(number: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            return f"{number / 2**power:g} {unit}"
    return f"{number} bytes"


def _cell(text: str) -> str:
    # In a table a bar ends the cell, and a page is named by its link.
    text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
    return text.replace("|", "\\|").replace("\n", " ")


def _sections(command: click.Command, context: click.Context, level: int) -> list[str]:
    found = [f"{'#' * level} {context.command_path}", f"```text\n{command.get_help(context)}\n```"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            inner = click.Context(child, info_name=name, parent=context, terminal_width=HELP_WIDTH)
            found += _sections(child, inner, level + 1)
    return found


def _repository_link(found: re.Match[str], folder: Path) -> str:
    """Turn a link to a file outside docs/, which the site does not hold, into its text; the file has to be there.

    folder: of the page.
    """
    text, given, title = found[1], found[2], found[3]
    path = (folder / given.partition("#")[0]).resolve()
    if path.is_relative_to(DOCS):
        return found[0]
    if not path.is_relative_to(ROOT) or not path.exists():
        raise PageError(f"a page links to {given}: expected a file of the repository, got none")
    return f'<span title="{path.relative_to(ROOT)}{": " + title if title else ""}">{text}</span>'
