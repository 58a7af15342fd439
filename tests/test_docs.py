"""The site: its pages are found, its reference is the code's, and what it names exists. `make docs` builds it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import msgspec
import pytest
import torch
import yaml
from torch import nn

from sentinel import ADAPTERS
from sentinel.cli.main import VERBS, sentinel
from sentinel.collect.probes import PROBES
from sentinel.daemon.config import DaemonConfig
from sentinel.detect import DETECTORS
from sentinel.monitor_config import MonitorConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    """The hook of the site, imported as mkdocs does it: it lies beside the pages, in no package."""
    spec = importlib.util.spec_from_file_location("docs_reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_reference"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["docs_reference"]


def structs_in(kind: Any) -> Iterator[type]:
    """Every struct that a configuration may hold, itself first."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs_in(field.type)
    for inner in getattr(kind, "__args__", ()):
        yield from structs_in(inner)


@pytest.mark.parametrize("config", [MonitorConfig, DaemonConfig])
def test_every_struct_of_a_configuration_is_on_the_reference_page(config: type) -> None:
    expected = {f"{one.__module__}.{one.__name__}" for one in structs_in(config)}

    assert expected <= set(re.findall(r"\{\{ fields (\S+) \}\}", (DOCS / "reference.md").read_text()))


def test_the_reference_shows_every_field_with_its_default_and_meaning(reference: ModuleType) -> None:
    page = reference.on_page_markdown((DOCS / "reference.md").read_text())

    for struct in (*structs_in(MonitorConfig), *structs_in(DaemonConfig)):
        for name in struct.__struct_fields__:
            assert f"| `{name}` |" in page, (struct, name)
    assert "{{" not in page
    assert "| `step_interval` | integer | `1` | Measure every this many steps, counted from start_step;" in page
    assert "| `max_bytes` | integer | `4294967296` (4 GiB) |" in page


def test_a_field_that_says_nothing_of_itself_is_an_error(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "field_docs", lambda struct: {})

    with pytest.raises(reference.PageError, match=r"SpoolConfig\.max_bytes: expected a docstring under the field"):
        reference.fields_table("sentinel.monitor_config.SpoolConfig")


def test_the_command_page_has_every_verb_and_its_options(reference: ModuleType) -> None:
    page = reference.commands_text()

    for verb in VERBS:
        assert f"## sentinel {verb}\n" in page, verb
    assert "### sentinel rules backtest\n" in page
    assert "--fail-on [info|warning|critical]" in page


def test_each_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    (nav,) = re.findall(r"^nav:\n((?:  .*\n?)+)", text, re.MULTILINE)
    entries = [page for part in yaml.safe_load(nav) for page in leaves(part)]

    assert sorted(entries) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from leaves(inner)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


@functools.cache
def prose(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that mkdocs gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower() for title in titles]
    return {re.sub(r"[-\s]+", "-", word) for word in words}


def test_paths_that_pages_name_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        for path in re.findall(
            r"`((?:sentinel|tests|benchmarks|docs|examples|rules|deploy)/[\w/.-]*)(?:::\w+[^`]*)?`", prose(page)
        ):
            assert (ROOT / path).exists(), (page.name, path)


def test_the_files_of_the_architecture_are_the_folders_that_there_are() -> None:
    tree = (DOCS / "architecture.md").read_text().split("## The files")[1].split("```")[1]
    named = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    there = {path.name for path in (ROOT / "sentinel").iterdir() if (path / "__init__.py").is_file()}

    assert named == there
    assert set(re.findall(r"^    (\w+)/ ", tree, re.MULTILINE)) == {
        path.name for path in (ROOT / "sentinel" / "collect").iterdir() if (path / "__init__.py").is_file()
    }
    for path in re.findall(r"^(\w+)/ ", tree, re.MULTILINE):
        assert (ROOT / path).is_dir(), path


def test_tables_to_which_one_adds_are_where_the_architecture_says() -> None:
    page = (DOCS / "architecture.md").read_text()

    for name, holder in re.findall(r"`([A-Z]+)` of `([\w/.]+)`", page):
        assert re.search(rf"^{name}\b.* = ", (ROOT / holder).read_text(), re.MULTILINE), (name, holder)
    assert all((DETECTORS, PROBES, ADAPTERS, VERBS))


@pytest.mark.slow
def test_messages_of_the_questions_are_those_of_the_code() -> None:
    said = "\n".join(texts_of_the_code())
    rows = re.findall(r"^\| (`[^|]*`) \|", (DOCS / "faq.md").read_text(), re.MULTILINE)
    pieces = [
        piece.strip() for row in rows for one in re.findall(r"`([^`]+)`", row) for piece in re.split(r"\.\.\.|: ", one)
    ]

    assert len(rows) > 35
    for piece in pieces:
        assert len(piece) < 3 or piece.removeprefix("sentinel: ") in said, piece


def texts_of_the_code() -> Iterator[str]:
    """Every text that the code may say; what is filled in is cut out, and logging's %s, too."""
    for path in (ROOT / "sentinel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sd]", "", node.value)
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


def test_every_term_of_the_glossary_stands_once_with_a_sentence() -> None:
    terms = re.findall(r"^\| ([^|]+) \| ", (DOCS / "concepts.md").read_text().split("## Glossary")[1], re.MULTILINE)
    terms = [term for term in terms if term != "word"]

    assert len(terms) == len(set(terms)) > 50
    for line in (DOCS / "concepts.md").read_text().split("## Glossary")[1].splitlines():
        if line.startswith("| ") and not line.startswith("| word"):
            assert line.rstrip().endswith(". |"), line


@pytest.mark.slow
def test_the_quickstart_trains_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DIR", str(tmp_path))
    (block,) = [
        one for one in re.findall(r"```python\n(.*?)```", (DOCS / "quickstart.md").read_text(), re.DOTALL) if "range(" in one
    ]
    names: dict[str, Any] = {"torch": torch, "nn": nn}

    exec(compile(block.replace("range(300)", "range(3)"), "quickstart.md", "exec"), names)
    names["monitor"].detach()

    assert list(tmp_path.glob("*/spool/r00000-*/*.spool"))


def test_each_trainer_has_a_quickstart_whose_example_exists() -> None:
    page = (DOCS / "quickstart.md").read_text()

    for name in ADAPTERS:
        assert f"sentinel.{name}(" in page, name
    for example in re.findall(r"examples/\w+\.py", page):
        assert (ROOT / example).is_file(), example


def test_nothing_refers_to_documents_that_are_not_here() -> None:
    absent = re.compile(r"\b(DESIGN|STYLE|FIELD_" r"NOTES|FEATURES)(\.md|, section| section)")
    folders = ("sentinel", "tests", "benchmarks", "docs", "examples", "rules", "deploy")
    paths = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".c", ".h", ".yaml", ".yml"}
    ]

    for path in [*paths, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        assert not absent.search(path.read_text()), path


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_code_blocks_are_of_their_language(page: Path) -> None:
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python":
            ast.parse(block)
        elif language == "yaml":
            yaml.safe_load(block)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_commands_that_pages_show_have_these_options(page: Path) -> None:
    shown = re.findall(r"^(?: {4})?sentinel ((?!(?:run|open)\b)[a-z][^\n#|]*)", page.read_text(), re.MULTILINE)
    shown += re.findall(r"`sentinel ((?!(?:run|open)\b)[a-z][^`]*)`", page.read_text())

    for words in shown:
        command, *rest = words.split()
        found = named(command)
        while isinstance(found, click.Group) and rest:
            assert rest[0] in found.commands, (words, page.name)
            found, rest = found.commands[rest[0]], rest[1:]
        known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0].rstrip(".,;:)") for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= known | {"--help"}, words


def named(verb: str) -> click.Command:
    """Return the command of a verb."""
    found = sentinel.get_command(click.Context(sentinel), verb)
    assert found is not None, verb
    return found
