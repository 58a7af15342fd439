"""`sentinel replay RUN`: judge a recorded run again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click
import msgspec

from sentinel.cli.code import allow_code_option
from sentinel.cli.main import CLEAN, FOUND, to_stderr
from sentinel.cli.outputs import no_stdout
from sentinel.cli.places import find_run


@click.command()
@click.argument("run", required=False)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    callback=no_stdout,
    help="Where anomalies/ and incidents.jsonl go. Default: nowhere, only compare.",
)
@click.option("--recompute", is_flag=True, help="Decide anew which rows make a step, instead of what the journal says.")
@click.option("--rules", "packs", multiple=True, metavar="PATH", help="Judge by these rules, not by those of the day.")
@allow_code_option()
@click.option("--state-dir", metavar="DIR", help="Where the journal is, if the run does not say so itself.")
@click.option("--config", metavar="FILE", help="Configuration of the daemon: its judging section counts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    run: str | None,
    output: str | None,
    recompute: bool,
    packs: tuple[str, ...],
    state_dir: str | None,
    config: str | None,
    as_json: bool,
) -> int:
    """Judge RUN again: a run's directory or name; by default the newest. Same journal, same spool: the same anomalies.

    Exit 1 when they differ from what the daemon wrote, or when the spool no longer has every row. With --recompute or
    --rules differences are expected: then exit 1 says that there are anomalies.
    """
    from sentinel.daemon.config import load_config
    from sentinel.judge.packs import RulePacks
    from sentinel.judge.replay import replay as judge_again
    from sentinel.store.run_paths import RunPaths

    paths = RunPaths.of(find_run(run), Path(state_dir) if state_dir else None)
    pack = RulePacks(packs).load() if packs or (recompute and not paths.journal.exists()) else None
    judging = load_config(Path(config) if config else None).judging
    with tempfile.TemporaryDirectory(prefix="sentinel-replay-") as scratch:
        out = Path(output) if output else Path(scratch)
        result = judge_again(paths, out, pack=pack, recompute=recompute, judging=judging)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(result)))
    else:
        click.echo(
            f"{result.num_steps} steps, {result.num_anomalies} anomalies, {result.num_revisions} revisions of incidents"
            + (f" in {output}" if output else "")
        )
    if result.num_before:
        to_stderr(f"from decision {result.num_before + 1} on: the journal keeps none before it (retention)")
    if recompute or packs:
        return FOUND if result.num_anomalies else CLEAN
    if result.num_incomplete:
        to_stderr(f"{result.num_incomplete} steps are no longer whole in the spool; their judgements may differ")
    if result.first_difference is not None:
        to_stderr(f"not identical: {result.first_difference}")
        return FOUND
    return FOUND if result.num_incomplete else CLEAN
