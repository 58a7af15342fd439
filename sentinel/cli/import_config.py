"""`sentinel import msprobe-config FILE`: the config of msProbe's monitor as a trainer config, and its alerts as rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sentinel.cli.import_config_keys import Mapped, Source, map_config
from sentinel.cli.main import CLEAN, to_stderr
from sentinel.cli.outputs import STDOUT
from sentinel.errors import ConfigError

MAX_BYTES = 2**20


@click.command("msprobe-config")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="YAML",
    type=click.Path(path_type=Path),
    help="The trainer's config, for sentinel.attach. Default, and -: stdout.",
)
@click.option(
    "--rules-output",
    metavar="YAML",
    type=click.Path(path_type=Path),
    help="Its alert rules as a rule pack; - with -o YAML is stdout. Default: beside -o, as NAME-rules.yaml; else nowhere.",
)
@click.option("--dynamic", is_flag=True, help="It was used with DYNAMIC_MONITOR set: dynamic_on switches everything.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: config, rules, unneeded keys with reasons.")
def msprobe_config(file: Path, output: Path | None, rules_output: Path | None, dynamic: bool, as_json: bool) -> int:
    """Read the JSON config of msProbe's monitor as it is, and write ours. Each key is mapped, or its line says why not.

    Keys and values that msProbe does not know are errors, with the nearest that it does.
    """
    try:
        text = file.read_bytes()[: MAX_BYTES + 1].decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not JSON: expected UTF-8, {error.reason} at byte {error.start}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{file}: expected at most {MAX_BYTES} bytes")
    mapped = map_config(Source(text, str(file)), is_dynamic=dynamic)
    trainer = trainer_yaml(mapped, file.name)
    pack = rules_yaml(mapped, file.name) if mapped.rules else ""
    _check(trainer, pack)
    if output == Path(STDOUT):
        output = None
    if rules_output == Path(STDOUT) and (as_json or output is None):
        raise click.UsageError(
            "--rules-output - is stdout, where the config or the JSON object goes; give -o FILE, no --json"
        )
    if output is not None and rules_output is None and pack:
        rules_output = output.with_name(f"{output.stem}-rules.yaml")
    for path, words in ((output, trainer), (rules_output, pack)):
        if path == Path(STDOUT):
            click.echo(words, nl=False)
        elif path is not None and words:
            if path.exists():
                raise ConfigError(f"{path}: expected no such file yet; give another one, or remove it")
            path.write_text(words, "utf-8")
            to_stderr(f"wrote {path}")
    if as_json:
        click.echo(json.dumps(_reported(mapped)))
    elif output is None:
        click.echo(trainer, nl=False)
    if pack and rules_output is None and not as_json:
        to_stderr(f"{len(mapped.rules)} alert rules: give --rules-output FILE for them")
    return CLEAN


def _reported(mapped: Mapped) -> dict[str, Any]:
    import yaml

    return {
        "config": yaml.safe_load(trainer_yaml(mapped, "")),
        "rules": yaml.safe_load(rules_yaml(mapped, ""))["rules"] if mapped.rules else [],
        "unneeded": [{"key": key, "reason": reason} for key, reason in mapped.notes],
    }


def _check(trainer: str, pack: str) -> None:
    """Raise ConfigError where what was made is not what the trainer and the daemon take."""
    import yaml

    from sentinel.monitor_config import parse_config
    from sentinel.rules.language.loader import load_pack

    parse_config(trainer.encode(), "what was made of it")
    if pack:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "rules.yaml"
            path.write_text(pack, "utf-8")
            load_pack([path])
        assert yaml.safe_load(pack)["rules"]


def trainer_yaml(mapped: Mapped, name: str) -> str:
    """Return the trainer's config as YAML, each key with a comment that says where it comes from."""
    lines = [f"# What msProbe's monitor was asked for in {name}. docs/probes.md tells what each key means."]
    for key, value in mapped.settings.items():
        why = f"  # {mapped.reasons[key]}" if key in mapped.reasons else ""
        lines.append(f"{key}: {_flow(value)}{why}")
    if mapped.probes:
        lines.append("probes:")
        for kind, probe in mapped.probes.items():
            said = {
                key: value
                for key, value in (("targets", probe.targets), ("histogram", probe.histogram), ("log_only", probe.log_only))
                if value
            }
            lines.append(f"  {kind}: {_flow(said)}")
    if mapped.notes:
        lines += ["", "# What is otherwise than there, or not needed:"]
        lines += [f"#   {key}: {reason}" for key, reason in mapped.notes]
    return "\n".join(lines) + "\n"


def rules_yaml(mapped: Mapped, name: str) -> str:
    """Return the alert rules as a rule pack, YAML."""
    kinds = [kind for kind in mapped.kinds if kind != "comm"] or ["wgrad"]
    lines = [
        f"# The alert rules of msProbe's monitor in {name}, with its own formulas. Where several fire on one tensor all are",
        "# kept; msProbe keeps the first. Add a pack of ours beside it to know what it misses: docs/rules.md.",
        "builtin: false",
        "rules:",
    ]
    for rule in mapped.rules:
        args: dict[str, Any] = {"compat": "msprobe"}
        if rule.threshold is not None:
            args["threshold"] = rule.threshold
        lines += [
            f"  - name: {rule.name}",
            f"    detector: {rule.detector}  # {rule.where}",
            "    match:",
            f"      kind: {_flow(kinds)}",
            f"      statistic: {_flow(list(rule.statistics))}",
            f"    args: {_flow(args)}",
            f"    severity: {'critical' if rule.detector == 'AnomalyNan' else 'warning'}",
            "    episode_quiet_steps: 0",
        ]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line: as JSON, but for numbers like 1e-08, which YAML 1.1 takes for a word."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
