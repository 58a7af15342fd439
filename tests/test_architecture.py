"""The import arrows between stages, read from the source: which stage may know of which."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "sentinel"
NOUNS = {
    "record", "moments", "messages", "place", "anomaly", "command", "errors", "version", "aggregate",
    "config_file", "document", "monitor_config", "target", "dump", "trace", "tensor_file", "structure_file", "reference",
    "bounds", "command_line", "csv_text", "private_files", "process", "process_exits", "regular_expression", "run_end",
    "run_name", "join_health", "worker_health", "decision", "step_view", "known_words", "msprobe_tag", "typed_document",
    "file_keys", "kinds", "incident", "recorded_incidents", "anomaly_words", "entry_points",
    "exception_words", "printable", "import_trial", "outside_calls", "rank_identity", "rank_list",
    "outside_structs", "crc32c", "handled_signals",
}  # fmt: skip
STAGES = {
    "native", "collect", "wire", "ingest", "logs", "detect", "rules", "order", "incidents", "judge", "explain", "report",
    "exports", "control", "store", "history", "mirrors", "fleet", "daemon", "postmortem", "web", "cli",
}  # fmt: skip

MAY_IMPORT: dict[str, set[str]] = {
    "nouns": {"native"},  # moments are folded by the extension, which imports nothing of ours
    "native": set(),
    "wire": {"native"},  # checksums
    "collect": {"wire", "native"},
    "ingest": {"wire", "native"},
    "logs": {"ingest"},
    "detect": {"native"},
    "rules": {"detect", "native"},
    "order": set(),
    "incidents": {"order"},
    "explain": {"order"},
    "report": set(),
    "exports": {"ingest", "store", "wire", "explain", "report"},
    "control": {"wire"},
    "store": set(),
    "history": {"exports", "store"},  # merged steps, vectors; what was found, and where the files of a run lie
    "mirrors": {"exports", "store", "report"},  # merged steps, event files; the journal; one way to post and to read secrets
    "fleet": {"wire", "ingest", "control", "store", "native"},  # spools; digests; commands; where runs lie; checksums
    "judge": {"ingest", "logs", "detect", "rules", "order", "incidents", "control", "report", "store", "wire"},
    "web": set(),
    "daemon": STAGES - {"collect", "cli", "daemon", "postmortem"},
    "postmortem": STAGES - {"collect", "cli", "postmortem", "web"},
    "cli": STAGES - {"cli"},
    "testing": STAGES - {"collect", "cli", "daemon", "postmortem"},
    "root": STAGES,
}
"""Stage -> stages that it may import, for type checkers alone too, beside the nouns and itself."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's tree: walking it costs more than parsing it."""
    return tuple(ast.walk(parsed(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_kept() -> Iterator[None]:
    """Millions of nodes that stay would be gone through again and again by the garbage collector."""
    gc.disable()
    yield
    gc.enable()
    parsed.cache_clear()
    nodes_of.cache_clear()


def stage_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "root"
    if parts[1] in NOUNS:
        return "nouns"
    return parts[1]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports_of(path: Path, *, with_types: bool = True) -> list[tuple[int, str, bool]]:
    """Return (line, module, is_lazy) of each import in a file; those for type checkers alone unless told otherwise."""
    found: list[tuple[int, str, bool]] = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if not with_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                visit(other, is_lazy)
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: expected an absolute import"
            if node.module == "sentinel":
                found.extend((node.lineno, f"sentinel.{alias.name}", is_lazy) for alias in node.names)
            else:
                found.append((node.lineno, node.module, is_lazy))
        inner = is_lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):  # No expression holds a statement.
                visit(child, inner)

    visit(parsed(path), False)
    return found


FILES = sorted(path for path in ROOT.rglob("*.py"))


def test_import_arrows() -> None:
    wrong = []
    for path in FILES:
        stage = stage_of(module_of(path))
        for line, module, _ in imports_of(path):
            if module.partition(".")[0] != "sentinel":
                continue
            other = stage_of(module)
            if other in ("nouns", stage) or other in MAY_IMPORT.get(stage, set()):
                continue
            if other == "root" and module == "sentinel":
                continue
            wrong.append(f"{path.relative_to(ROOT.parent)}:{line}: {stage} must not import {module}")

    assert not wrong, "\n".join(wrong)


def test_no_circles_of_stages() -> None:
    above: dict[str, set[str]] = {stage: set() for stage in MAY_IMPORT}
    while growing := [
        (stage, other)
        for stage, below in MAY_IMPORT.items()
        for under in below
        for other in {under} | above[under]
        if other not in above[stage]
    ]:
        for stage, other in growing:
            above[stage].add(other)

    assert not [stage for stage, below in above.items() if stage in below]


def test_each_stage_says_what_comes_in_what_goes_out_and_what_it_never_does() -> None:
    silent = []
    for path in FILES:
        if path.name != "__init__.py" or path.parent in (ROOT, ROOT / "native"):
            continue
        said = ast.get_docstring(parsed(path)) or ""
        if not all(word in said for word in ("In:", "Out:", "Never:")):
            silent.append(str(path.relative_to(ROOT)))

    assert not silent, silent


def test_only_collect_imports_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{line}"
        for path in FILES
        for line, module, is_lazy in imports_of(path)
        if module.partition(".")[0] in ("torch", "triton")
        and stage_of(module_of(path)) != "collect"
        # A verb that trains (the demo) may look whether there is torch, when it is called.
        and not (is_lazy and stage_of(module_of(path)) == "cli")
    ]

    assert not wrong, wrong


def test_the_command_line_imports_collect_lazily() -> None:
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{line}"
        for path in FILES
        for line, module, is_lazy in imports_of(path, with_types=False)
        if stage_of(module_of(path)) == "cli" and stage_of(module) == "collect" and not is_lazy
    ]

    assert not wrong, wrong


def test_the_environment_is_read_in_two_places() -> None:
    readers = []
    for path in FILES:
        stage = stage_of(module_of(path))
        if stage == "cli" or path.relative_to(ROOT) == Path("collect/environment.py"):
            continue
        for node in nodes_of(path):
            names_it = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            if names_it and ast.unparse(node).startswith("os."):
                readers.append(f"{path.relative_to(ROOT.parent)}:{node.lineno}")

    assert not readers, readers


def test_adapters_use_the_public_surface_of_a_monitor() -> None:
    parts = {"session", "runner", "recorder", "planning"}
    wrong = []
    for path in FILES:
        if path.parent != ROOT / "collect" / "adapters":
            continue
        for node in nodes_of(path):
            if not isinstance(node, ast.Attribute) or not ast.unparse(node.value).endswith("monitor"):
                continue
            if node.attr in parts or node.attr.startswith("_"):
                wrong.append(f"{path.relative_to(ROOT.parent)}:{node.lineno}: {ast.unparse(node)}")

    assert not wrong, wrong


WALK = re.compile(r"^(\d+)\. `([\w.]+)` \(`(sentinel/[\w/]+\.py)`(?:, from (\d+))?", re.MULTILINE)


def test_the_walk_from_a_closed_step_to_a_message_goes_down_functions_that_exist() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text("utf-8")
    section = page.partition("## From a closed step to a message")[2].partition("\n## ")[0]
    stays = {int(number): (name, path, caller) for number, name, path, caller in WALK.findall(section)}

    assert list(stays) == list(range(1, len(stays) + 1)) and 15 < len(stays) <= 20, "a stranger follows twenty at most"
    for number, (name, path, caller) in stays.items():
        *cls, function = name.split(".")
        scope: ast.AST = parsed(ROOT.parent / path)
        for one in cls:
            scope = next(node for node in ast.walk(scope) if isinstance(node, ast.ClassDef) and node.name == one)
        body = getattr(scope, "body", [])
        assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in body), f"{number}: {name}"
        if caller:
            above = (ROOT.parent / stays[int(caller)][1]).read_text("utf-8")
            assert int(caller) < number and re.search(rf"\b{function}\b", above), f"{number}: {caller} does not name it"


MAX_METHODS = 20
"""Methods, properties included, of a class of collect/: one that has more decides more than one thing (chosen)."""
MANY_METHODS = {
    "Monitor": "what trainers call: each method hands its call to one part",
    "Unmeasured": "the methods of Monitor, none of which does anything",
    "HuggingFaceCallback": "the Trainer's events, by their names",
    "LightningCallback": "Lightning's hooks, by their names",
}
"""Class of collect/ -> why it has more."""


def test_no_class_of_collect_decides_many_things() -> None:
    found = {
        node.name: len([one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))])
        for path in FILES
        if path.is_relative_to(ROOT / "collect")
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }

    assert {name for name, number in found.items() if number > MAX_METHODS} == MANY_METHODS.keys()


def test_no_drawers() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}

    assert not [path for path in FILES if path.stem in drawers]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["sentinel", "sentinel.daemon.daemon", "sentinel.cli.main", "sentinel.cli.serve"])
def test_daemon_needs_no_torch(module: str) -> None:
    # An import hook that refuses torch stands for a machine without it.
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"import {module}\n"
        "assert 'torch' not in sys.modules\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)

    assert result.returncode == 0, result.stderr


def test_no_class_name_is_used_for_two_things() -> None:
    where: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT.parent)))

    assert {name: files for name, files in where.items() if len(files) > 1} == {}


SAME_SUBJECT = {
    "attention", "backtest", "clock", "config", "liveness", "nonfinite", "outside", "replay", "rolling", "saturation",
    "topk",
}  # fmt: skip
"""File names of several folders, which have one subject there: what is measured and judged, a stage and its verb, ..."""


def test_no_file_name_is_used_for_two_things() -> None:
    names = [path.stem for path in FILES if path.stem != "__init__"]

    assert {name for name in names if names.count(name) > 1} == SAME_SUBJECT


TESTS = Path(__file__).parent
MIN_COPIED_LINES = 3
"""Lines, its docstring left out, from which a helper that two test modules hold alike is a copy (chosen)."""
PROGRAMS = {"__init__", "frozen", "warm_client", "warm_server"}
"""Modules of the support that no test imports: what its other ones start."""


def helpers_of(path: Path) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield the functions and classes at the top of a test module that pytest does not collect."""
    for node in parsed(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith(("test_", "Test")):
            yield node


def test_no_two_test_modules_hold_the_same_helper() -> None:
    # Bodies of the same kinds of nodes, in the same order, are few: only these are written out and compared.
    alike: dict[tuple[type, ...], list[tuple[str, list[ast.stmt]]]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        for node in helpers_of(path):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and node.end_lineno is not None and node.end_lineno - body[0].lineno + 2 >= MIN_COPIED_LINES:
                kinds = tuple(type(part) for one in body for part in ast.walk(one))
                alike.setdefault(kinds, []).append((f"{path.relative_to(TESTS)}:{node.lineno}: {node.name}", body))
    where: dict[str, list[str]] = {}
    for helpers in alike.values():
        for helper, body in helpers if len(helpers) > 1 else ():
            where.setdefault("\n".join(map(ast.unparse, body)), []).append(helper)

    copied = [helpers for helpers in where.values() if len(helpers) > 1]
    assert not copied, "move one of each into tests/support/, and take it from there:\n" + "\n".join(map(str, copied))


def test_no_test_module_names_a_helper_as_one_of_the_support_is_named() -> None:
    support = {
        node.name: path.name
        for path in (TESTS / "support").glob("*.py")
        if path.stem not in PROGRAMS
        for node in helpers_of(path)
        if not node.name.startswith("_")
    }
    again = [
        f"{path.relative_to(TESTS)}:{node.lineno}: {node.name} is in support/{support[node.name]}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.parent != TESTS / "support"
        for node in helpers_of(path)
        if node.name in support
    ]

    assert not again, "take it from there, or say in its name what it is:\n" + "\n".join(again)


def test_the_support_says_of_each_of_its_modules_what_it_is_for() -> None:
    said = ast.get_docstring(ast.parse((TESTS / "support" / "__init__.py").read_text("utf-8"))) or ""
    modules = {path.stem for path in (TESTS / "support").glob("*.py")} - PROGRAMS

    assert [name for name in sorted(modules) if f"`{name}`" not in said] == []
