"""No benchmark is left behind by a change: each imports, and what it takes from us has the names and arguments it uses."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from .support.warm import interpreter

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = {path.stem for path in BENCHMARKS.rglob("*.py")}
OURS = {"sentinel", "tests", *SCRIPTS}
"""Where modules begin whose names and arguments are ours to change."""


def imported(module: str) -> ModuleType | None:
    """Return a module; None where a library that it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        return None


def taken(tree: ast.Module) -> tuple[dict[str, object], list[str]]:
    """Return name -> what a script imports of ours under it, be it in a function; and what is not there."""
    found: dict[str, object] = {}
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                root = one.name.partition(".")[0]
                if root in OURS and (module := imported(one.name)) is not None:
                    found[one.asname or root] = module if one.asname else sys.modules[root]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in OURS:
            source = imported(node.module)
            for one in node.names if source is not None else ():
                if not hasattr(source, one.name) and hasattr(source, "__path__"):
                    with contextlib.suppress(ModuleNotFoundError):
                        imported(f"{node.module}.{one.name}")
                if hasattr(source, one.name):
                    found[one.asname or one.name] = getattr(source, one.name)
                else:
                    missing.append(f"{node.lineno}: {node.module} has no {one.name}")
    bound_again = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound_again |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return {name: one for name, one in found.items() if name not in bound_again}, missing


def outdated(tree: ast.Module) -> Iterator[str]:
    """Yield what a script takes of ours that is not there, and the calls whose arguments do not fit."""
    found, missing = taken(tree)
    yield from missing

    def meant(node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return found.get(node.id)
        module = meant(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(module, node.attr, None) if isinstance(node, ast.Attribute) and inspect.ismodule(module) else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = meant(node.value)
            if inspect.ismodule(module) and not hasattr(module, node.attr):
                yield f"{node.lineno}: {module.__name__} has no {node.attr}"
        elif isinstance(node, ast.Call) and callable(function := meant(node.func)):
            words = {one.arg: one for one in node.keywords if one.arg is not None}
            if len(words) < len(node.keywords) or any(isinstance(one, ast.Starred) for one in node.args):
                continue  # What is handed over is not to be read.
            try:
                signature = inspect.signature(function)
            except ValueError:  # A built-in function that does not say.
                continue
            try:
                signature.bind(*node.args, **words)
            except TypeError as error:
                yield f"{node.lineno}: {ast.unparse(node.func)}: {error}"


def check() -> None:
    """Print what is outdated. Changes this process's modules and where it looks for them."""
    path = list(sys.path)
    for script in sorted(BENCHMARKS.rglob("*.py")):
        # As its own process would: a script's name may be an example's too.
        sys.path[:] = [str(script.parent), *path]
        for name in SCRIPTS & sys.modules.keys():
            del sys.modules[name]
        try:
            if script.parent == BENCHMARKS:
                imported(script.stem)
            problems = list(outdated(ast.parse(script.read_text("utf-8"))))
        except Exception as error:
            problems = [f"0: {type(error).__name__}: {error}"]
        for problem in problems:
            print(f"{script.relative_to(ROOT)}:{problem}")


@pytest.mark.slow
def test_each_benchmark_imports_and_calls_what_is_there() -> None:
    done = subprocess.run(
        [interpreter(), "-c", "from tests.test_benchmarks import check; check()"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
