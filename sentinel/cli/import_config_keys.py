"""msProbe's monitor config as ours: what each of its keys becomes, and why one becomes nothing.

Source: msProbe 26.2, its documented keys and what it takes for them. A wrong type is an error here as it is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.kinds import PARAMETER_KINDS, labels
from sentinel.known_words import near
from sentinel.regular_expression import RegularExpression

OPS = ("norm", "min", "max", "zeros", "nans", "id", "mean", "shape", "dtype")
L2_HOOKS = {
    "linear_hook": "weight_spectrum",
    "attention_hook": "attention",
    "moe_router_weight_hook": "router",
    "moe_router_logit_hook": "router",
}
WHOLE_PARAMETERS = labels(PARAMETER_KINDS) - {"weight_spectrum"}
JUDGED = ("norm", "min", "max", "mean", "zeros", "nans")
TURBULENT = ("norm", "mean")
"""Statistics of which msProbe records turbulence; of the others it finds it and drops it."""
RULES = ("AnomalyTurbulence", "AnomalyNan")
_INDEXED = re.compile(r"(?:tuple|list)\[(?P<size>\d+)\](?::(?P<at>\d+))?|tensor")


class Probe(msgspec.Struct):
    """The settings of one kind, beside the common schedule."""

    targets: list[str] = []
    histogram: bool = False
    log_only: bool = False


class ImportedRule(msgspec.Struct, frozen=True):
    """One alert rule of msProbe's config."""

    name: str
    detector: str
    threshold: float | None
    statistics: tuple[str, ...]
    where: str


class Mapped(msgspec.Struct):
    """A config of msProbe's, mapped."""

    settings: dict[str, Any] = {}
    """Key of the trainer's config -> value, in the order in which they are written."""
    reasons: dict[str, str] = {}
    """Key of the trainer's config -> the key of msProbe's that it comes from, in words."""
    probes: dict[str, Probe] = {}
    notes: list[tuple[str, str]] = []
    """(key of msProbe's, what differs here, or why it is not needed)"""
    rules: list[ImportedRule] = []
    kinds: list[str] = []

    def set(self, key: str, value: Any, reason: str) -> None:
        """Set a key of the trainer's config. reason: where it comes from."""
        self.settings[key] = value
        self.reasons[key] = f"{self.reasons[key]}; {reason}" if key in self.reasons else reason

    def note(self, key: str, why: str) -> None:
        """Note what differs for a key of msProbe's, or why it is not needed."""
        self.notes.append((key, why))

    def measure(self, *kinds: str) -> None:
        """Have the trainer measure these kinds."""
        self.kinds += [kind for kind in kinds if kind not in self.kinds]

    def probe(self, kind: str) -> Probe:
        """Return the settings of a kind, to be changed."""
        return self.probes.setdefault(kind, Probe())


class Source:
    """The JSON file of the config, read strictly: no key twice, no bare NaN."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self._text = text
        try:
            self.config = json.loads(text, object_pairs_hook=self._object, parse_constant=self._refuse)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}:{error.lineno}: not JSON: {error.msg.lower()}") from error
        except RecursionError as error:
            raise ConfigError(f"{name}: not a config: nested too deep") from error
        if not isinstance(self.config, dict):
            raise ConfigError(f"{name}: expected an object of keys, got {type(self.config).__name__}")

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise self.error(key, "is there twice")
            found[key] = value
        return found

    def _refuse(self, word: str) -> float:
        raise ConfigError(f"{self.name}: not JSON: {word} is no number of JSON")

    def error(self, path: str, problem: str) -> ConfigError:
        """Return the error of a key, with its line."""
        key = re.split(r"[.\[]", path)[0]
        at = self._text.find(json.dumps(key))
        line = self._text.count("\n", 0, at) + 1 if at >= 0 else 1
        return ConfigError(f"{self.name}:{line}: {path}: {problem}")

    def typed(self, path: str, value: Any, kind: type | tuple[type, ...], words: str) -> Any:
        """Return a value of the right type; true and false are no numbers."""
        is_bool = isinstance(value, bool)
        if not isinstance(value, kind) or (is_bool and kind is not bool):
            raise self.error(path, f"expected {words}, got {json.dumps(value)[:80]}")
        return value


def map_config(source: Source, *, is_dynamic: bool = False) -> Mapped:
    """Return a config mapped. ConfigError, with file and line, for a key or a value that msProbe does not know.

    is_dynamic: it was used with DYNAMIC_MONITOR set, so that dynamic_on switches everything.
    """
    config = dict(source.config)
    for key in config:
        if key not in _KEYS:
            raise source.error(key, f"unknown key{near(key, tuple(_KEYS))}; known: {', '.join(_KEYS)}")
    found = Mapped()
    asked = _Asked(source, config, is_dynamic)
    for key, take in _KEYS.items():
        if key in config:
            take(asked, found, key, config[key])
    asked.finish(found)
    return found


class _Asked:
    """A config while it is read: the meaning of some keys depends on others."""

    def __init__(self, source: Source, config: dict[str, Any], is_dynamic: bool) -> None:
        self.source = source
        self.config = config
        self.is_dynamic = is_dynamic
        self.targets: list[str] = []
        self.parameter_targets: list[str] = []

    def flag(self, key: str) -> bool:
        """Return the value of a key that is true or false; false where it is missing."""
        return bool(self.source.typed(key, self.config.get(key, False), bool, "true or false"))

    @property
    def has_all_modules(self) -> bool:
        """Whether every module is measured: none is named, or all_xy is true."""
        return not self.targets or self.flag("all_xy")

    def finish(self, found: Mapped) -> None:
        """Map what several keys mean together."""
        if self.targets and any(kind in found.kinds for kind in ("activation", "dgrad")):
            if self.flag("all_xy"):
                found.note("targets", "of activations: all_xy takes every module")
            else:
                found.set("targets", self.targets, "targets: those modules alone, as msProbe takes them")
        if self.parameter_targets:
            for kind in found.kinds:
                if kind in WHOLE_PARAMETERS:
                    found.probe(kind).targets = list(self.parameter_targets)
        if not found.kinds:
            found.note("kinds", "no *_distribution is on: nothing but the black box is measured")
        found.settings = {"kinds": [kind for kind in found.kinds if kind not in found.probes], **found.settings}
        found.reasons.setdefault("kinds", "of the switches *_distribution, mg_direction, recording_l2_features")


def _switch(*kinds: str) -> Callable[[_Asked, Mapped, str, Any], None]:
    def take(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
        if asked.flag(key):
            found.measure(*kinds)

    return take


def _unneeded(
    why: str, kind: type | tuple[type, ...], words: str, least: int | None = None
) -> Callable[[_Asked, Mapped, str, Any], None]:
    def take(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
        asked.source.typed(key, value, kind, words)
        if least is not None and value is not None and value < least:
            raise asked.source.error(key, f"expected at least {least}, got {value}")
        found.note(key, why)

    return take


def _take_targets(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    asked.source.typed(key, value, dict, "an object of module names")
    is_squashed = asked.flag("squash_name")
    for name, fields in value.items():
        path = f"targets.{name}"
        asked.source.typed(path, fields, dict, 'an object like {"input": "tensor"}')
        vpp, colon, bare = name.partition(":")
        if colon and not vpp.isdigit():
            raise asked.source.error(path, f'expected a chunk before the colon, as in "0:{bare}", got "{vpp}"')
        bare = bare if colon else name
        if colon and vpp != "0":
            found.note(path, f"of chunk {vpp} alone: taken on every chunk, names being those of the whole model")
        if not bare:
            continue
        front = r"(?:.*\.)?" if is_squashed else ""
        asked.parameter_targets.append(f"re:.*\\.?{re.escape(bare)}(?:\\..*)?" if is_squashed else bare)
        elements = set()
        for slot, word in fields.items():
            if slot not in ("input", "output", "input_grad", "output_grad"):
                known = "input, output, input_grad, output_grad"
                raise asked.source.error(f"{path}.{slot}", f"unknown slot; known: {known}")
            match = _INDEXED.fullmatch(word) if isinstance(word, str) else None
            if match is None:
                raise asked.source.error(f"{path}.{slot}", f"expected tensor, or tuple[2]:0, got {json.dumps(word)[:60]}")
            if match["at"] is not None and int(match["at"]) >= int(match["size"]):
                raise asked.source.error(f"{path}.{slot}", f'expected an element below {match["size"]}, got "{word}"')
            elements.add(match["at"])
        numbers = sorted(int(one) for one in elements - {None})
        if not numbers:
            asked.targets.append(f"re:{front}{re.escape(bare)}")
        for number in numbers:
            # A pattern cannot ask for the first element alone: it has no number in its name.
            asked.targets.append(f"re:{front}{re.escape(bare)}:{number}" if number else f"{bare}:0")


def _take_xy(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    if not asked.flag(key):
        return
    forward, backward = not asked.flag("backward_only"), not asked.flag("forward_only")
    if not forward and not backward:
        raise asked.source.error("forward_only", "expected not both forward_only and backward_only: that is nothing at all")
    found.measure(*(("activation_in", "activation") if forward else ()), *(("dgrad_in", "dgrad") if backward else ()))
    found.note(key, "msProbe writes a line a micro-step; here they fold into one row a step unless per_micro_step is true")


def _take_flag(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    asked.flag(key)


def _take_updates(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    if asked.flag(key):
        found.measure("update", "update_ratio")
        for kind in ("update", "update_ratio"):
            found.probe(kind).histogram = True


def _take_micro(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    if asked.flag(key):
        found.set("per_micro_step", True, f"{key}: each micro-batch's own gradient, where msProbe has sums up to it")


def _take_struct(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    if asked.flag(key):
        found.set("struct", True, f"{key}; the training goes on" if key == "print_struct" else key)


def _take_l2(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    asked.source.typed(key, value, dict, "an object of hooks")
    for hook, names in value.items():
        path = f"{key}.{hook}"
        if hook not in L2_HOOKS:
            raise asked.source.error(path, f"unknown hook{near(hook, tuple(L2_HOOKS))}; known: {', '.join(L2_HOOKS)}")
        asked.source.typed(path, names, list, "a list of module names")
        for at, name in enumerate(names):
            asked.source.typed(f"{path}[{at}]", name, str, "a module name")
    if not asked.flag("recording_l2_features"):
        found.note(key, "recording_l2_features is off, so msProbe does not look at them")
        return
    for hook, names in value.items():
        kind = L2_HOOKS[hook]
        if not names and hook != "linear_hook":
            found.note(f"{key}.{hook}", "an empty list is no module at all for msProbe: nothing is measured")
            continue
        found.measure(kind)
        targets = [re.sub(r"^\d+:", "", name) for name in names]
        probe = found.probe(kind)
        # A parameter is meant by its module: a spectrum is that of the module's weight.
        probe.targets = list(dict.fromkeys([*probe.targets, *targets])) if names else []


def _take_communication(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    source = asked.source
    source.typed(key, value, dict, 'an object like {"enable": true}')
    known = ("enable", "cc_codeline", "cc_pre_hook", "cc_log_only")
    for word in value:
        if word not in known:
            raise source.error(f"{key}.{word}", f"unknown key{near(word, known)}; known: {', '.join(known)}")
    is_on = source.typed(f"{key}.enable", value.get("enable", False), bool, "true or false")
    lines = source.typed(f"{key}.cc_codeline", value.get("cc_codeline", []), list, "a list of patterns")
    is_logged = source.typed(f"{key}.cc_log_only", value.get("cc_log_only", False), bool, "true or false")
    source.typed(f"{key}.cc_pre_hook", value.get("cc_pre_hook", False), bool, "true or false")
    for at, line in enumerate(lines):
        source.typed(f"{key}.cc_codeline[{at}]", line, str, "a pattern")
        try:
            RegularExpression(f".*(?:{line}).*")
        except ValueError as error:
            raise source.error(f"{key}.cc_codeline[{at}]", str(error)) from error
    if not is_on:
        return
    found.measure("comm")
    probe = found.probe("comm")
    probe.log_only = is_logged
    probe.targets = [f"re:.*(?:{line}).*" for line in lines]
    if "cc_pre_hook" in value:
        found.note(f"{key}.cc_pre_hook", "what goes in is measured as well as what comes out")
    if lines:
        found.note(f"{key}.cc_codeline", "looked for at the line that calls; msProbe looks in the whole stack")
    if is_logged:
        found.note(f"{key}.cc_log_only", "the training goes on, where msProbe ends it after a step")


def _take_ranks(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    asked.source.typed(key, value, list, "a list of ranks")
    for at, rank in enumerate(value):
        asked.source.typed(f"{key}[{at}]", rank, int, "a rank")
        if rank < 0:
            raise asked.source.error(f"{key}[{at}]", f"expected a rank from 0 on, got {rank}")
    if value:
        found.set("ranks", value, key)


def _take_number(least: int) -> Callable[[_Asked, Mapped, str, Any], None]:
    def take(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
        if value is None:
            return
        asked.source.typed(key, value, int, "a whole number")
        if value < least:
            raise asked.source.error(key, f"expected at least {least}, got {value}; msProbe takes its default for it")
        if key != "collect_times":
            found.set(key, value, key)
        elif value == 0:
            found.set("enabled", False, "collect_times 0: nothing is measured")
        elif value < 10**8:
            found.set(key, value, key)

    return take


def _take_eps(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    asked.source.typed(key, value, float, "a number like 1e-8")
    if not value >= 0:
        raise asked.source.error(key, f"expected at least 0, got {value}")
    found.set("zero_eps", value, "eps: abs(x) <= zero_eps, where msProbe has abs(x) < eps")


def _take_ops(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    asked.source.typed(key, value, list, "a list of statistics")
    for at, op in enumerate(value):
        asked.source.typed(f"{key}[{at}]", op, str, "a statistic")
        if op not in OPS:
            raise asked.source.error(f"{key}[{at}]", f'unknown statistic "{op}"{near(op, OPS)}; known: {", ".join(OPS)}')
    found.note(key, "every statistic is always there; `sentinel export --statistic` chooses")
    if "zeros" in value and "eps" not in asked.config:
        found.set("zero_eps", 1e-8, "ops has zeros: msProbe's own eps")


def _take_alert(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    source = asked.source
    source.typed(key, value, dict, "an object of rules")
    for word in value:
        if word not in ("rules", "dump"):
            raise source.error(f"{key}.{word}", f"unknown key{near(word, ('rules', 'dump'))}; known: rules, dump")
    source.typed(f"{key}.dump", value.get("dump", False), bool, "true or false")
    if "dump" in value:
        found.note(f"{key}.dump", "every anomaly is recorded; `sentinel export --format msprobe` writes its files")
    ops = [op for op in asked.config.get("ops") or ["norm"] if op in JUDGED] or ["norm"]
    for at, rule in enumerate(source.typed(f"{key}.rules", value.get("rules", []), list, "a list of rules")):
        path = f"{key}.rules[{at}]"
        source.typed(path, rule, dict, 'an object like {"rule_name": "AnomalyNan"}')
        for word in rule:
            if word not in ("rule_name", "args"):
                hint = near(word, ("rule_name", "args"))
                raise source.error(f"{path}.{word}", f"unknown key{hint}; known: rule_name, args")
        name = rule.get("rule_name")
        if name not in RULES:
            hint = f"{near(str(name), RULES)}; known: {', '.join(RULES)}"
            raise source.error(f"{path}.rule_name", f"unknown rule {json.dumps(name)}{hint}")
        args = source.typed(f"{path}.args", rule.get("args") or {}, dict, 'an object like {"threshold": 0.5}')
        for word in args:
            if word != "threshold":
                raise source.error(f"{path}.args.{word}", "unknown argument; known: threshold")
        threshold = args.get("threshold")
        if threshold is not None:
            source.typed(f"{path}.args.threshold", threshold, (int, float), "a number")
            if not threshold >= 0:
                raise source.error(f"{path}.args.threshold", f"expected at least 0, got {threshold}")
        elif name == "AnomalyTurbulence":
            raise source.error(f"{path}.args", "expected a threshold; msProbe leaves this rule out without one")
        statistics = tuple(op for op in ops if name != "AnomalyTurbulence" or op in TURBULENT)
        if not statistics:
            found.note(path, f"msProbe records turbulence of norm and mean alone, and ops has {', '.join(ops)}")
            continue
        short = name.removeprefix("Anomaly").lower()
        number = sum(one.name.startswith(f"msprobe-{short}") for one in found.rules)
        label = f"msprobe-{short}" + (f"-{number + 1}" if number else "")
        found.rules.append(ImportedRule(label, name, threshold, statistics, path))


def _take_dynamic(asked: _Asked, found: Mapped, key: str, value: Any) -> None:
    is_on = asked.flag(key)
    if asked.is_dynamic:
        found.set("enabled", is_on, "dynamic_on")
    else:
        found.note(key, "counts with DYNAMIC_MONITOR set alone: then give --dynamic; this file may be edited while training")


_SAME = ("start_step", "step_interval", "collect_times")
_KEYS: dict[str, Callable[[_Asked, Mapped, str, Any], None]] = {
    "targets": _take_targets,
    "param_distribution": _switch("param"),
    "wg_distribution": _switch("wgrad_unreduced", "wgrad"),
    "xy_distribution": _take_xy,
    "all_xy": _take_flag,
    "forward_only": _take_flag,
    "backward_only": _take_flag,
    "mv_distribution": _switch("exp_avg", "exp_avg_sq"),
    "mg_direction": _switch("grad_momentum_alignment"),
    "ur_distribution": _take_updates,
    "monitor_mbs_grad": _take_micro,
    "recording_l2_features": _take_flag,
    "l2_targets": _take_l2,
    "sa_order": _unneeded("attention is read where it is computed, whose order of dimensions is known", str, "a text"),
    "cc_distribution": _take_communication,
    "start_step": _take_number(0),
    "step_interval": _take_number(1),
    "collect_times": _take_number(0),
    "module_ranks": _take_ranks,
    "eps": _take_eps,
    "ops": _take_ops,
    "print_struct": _take_struct,
    "stack_info": _take_struct,
    "dynamic_on": _take_dynamic,
    "alert": _take_alert,
    "format": _unneeded("a run is recorded once; `sentinel export --format` writes each form of it", str, "a text"),
    "ndigits": _unneeded("all digits are kept", (int, type(None)), "a whole number", 0),
    "step_count_per_record": _unneeded("`sentinel export --steps-per-file` says it", int, "a whole number", 1),
    "squash_name": _unneeded("`sentinel export --squash-names` does it; names in a run are whole", bool, "true or false"),
    "append_output": _unneeded("a resumed run joins the former one by its name (`run`)", list, "a list of two times"),
}
"""Key that msProbe reads -> what maps it, in the order in which the trainer's config is written."""
