"""`sentinel rules test`: inputs, and the anomalies that rules must make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from sentinel.cli.code import allow_code_option
from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, to_stderr

if TYPE_CHECKING:
    from sentinel.document import Problem
    from sentinel.judge.rule_tests import RuleTestResult
    from sentinel.rules.language.schema import Pack


@click.command("test")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--rules", "packs", multiple=True, metavar="PATH", help="Test these rules, not those that the files name.")
@click.option("--run", "only", metavar="GLOB", help="Run the tests whose names match.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a test.")
@allow_code_option()
def test(files: tuple[str, ...], packs: tuple[str, ...], only: str | None, as_json: bool) -> int:
    """Run the tests of rules in FILEs: YAML of inputs and of the anomalies expected of them.

    \b
    rules: [mine.yaml]                     # beside the file; merged over the built-in default pack
    tests:
      - name: a spike pages
        input:
          - {scalar: loss, values: "2x40 9 2x10", noise: 0.01}
          - {tensor: head.weight, kind: wgrad, statistic: norm, values: "1x51"}
        expect:                            # all alarms of warning and above, no more and no less
          - {rule: loss-spike, step: 41, severity: critical}

    Exit codes: 0 all as expected, 1 something is not, 2 a file or a pack cannot be used.
    """
    from fnmatch import fnmatchcase

    from sentinel.document import Problem
    from sentinel.judge.rule_tests import run_rule_test, unknown_rules
    from sentinel.rules.language.rule_test_file import read_rule_tests

    results: list[RuleTestResult] = []
    problems: list[Problem] = []
    for name in files:
        file, broken = read_rule_tests(name)
        problems += broken
        if broken:
            continue
        pack, unusable = _pack_of(packs or file.rules, builtin=file.builtin)
        problems += unusable
        if pack is None:
            continue
        for rule_test in file.rule_tests:
            if only is not None and not fnmatchcase(rule_test.name, only):
                continue
            unknown = unknown_rules(rule_test, pack)
            problems += [
                Problem(file.path, line, f'test "{rule_test.name}": no rule "{rule}" is on{_near(rule, pack)}')
                for line, rule in unknown
            ]
            if not unknown:
                results.append(run_rule_test(file, rule_test, pack))
                _print_result(results[-1], as_json)
    for problem in problems:
        click.echo(str(problem), err=True)
    failed = [one for one in results if one.failures]
    to_stderr(f"{len(results)} test{'' if len(results) == 1 else 's'}, {len(failed)} failed"
        + (f"; {len(problems)} problem{'' if len(problems) == 1 else 's'} before that" if problems else ""))  # fmt: skip
    if not results and not problems:
        to_stderr(f'no test has a name that matches "{only}"')
    return BAD_USAGE if problems or not results else FOUND if failed else CLEAN


def _pack_of(paths: tuple[str, ...], *, builtin: bool) -> tuple[Pack | None, list[Problem]]:
    from sentinel.judge.references import read_references
    from sentinel.rules.language.loader import read_pack

    pack, problems = read_pack(paths, builtin=builtin, references=read_references)
    return (None, problems) if problems else (pack, [])


def _near(rule: str, pack: Pack) -> str:
    from sentinel.known_words import nearest

    return nearest(rule, [one.name for one in pack.rules])


def _print_result(result: RuleTestResult, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    state = "FAILED" if result.failures else "ok"
    click.echo(f"{state}  {result.file}:{result.line}  {result.test} ({result.num_steps} steps, {result.num_points} points)")
    for failure in result.failures:
        click.echo(f"  {failure}")
