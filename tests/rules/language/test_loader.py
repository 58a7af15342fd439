import functools
import itertools
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.detect import DETECTORS, Declaration, Scores, known_detectors
from sentinel.document import read_document
from sentinel.errors import RuleError
from sentinel.record import KIND_LABELS
from sentinel.rules.language import listing, loader
from sentinel.rules.language.listing import check_packs, list_detectors, list_rules
from sentinel.rules.language.loader import builtin_packs, load_pack, read_pack
from sentinel.rules.language.schema import Match

NAN = "rules:\n  - name: a\n    detector: AnomalyNan\n    "


@pytest.fixture(scope="module", autouse=True)
def _builtin_packs_are_parsed_once():
    """Nearly every test merges over the default pack, whose document is the same each time."""
    builtin, parsed = set(builtin_packs().values()), functools.cache(read_document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "read_document", lambda path: parsed(path) if path in builtin else read_document(path))
        yield


@pytest.fixture
def pack(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def errors_of(*paths, **how):
    with pytest.raises(RuleError) as caught:
        load_pack(paths, **how)
    return str(caught.value)


def test_the_default_pack_is_sound():
    rules = load_pack()

    by_name = {rule.name: rule for rule in rules.rules}
    assert by_name["non-finite"].severity is Severity.CRITICAL
    assert set(by_name["non-finite"].match.kind) == set(KIND_LABELS) - {"health"}
    assert by_name["loss-spike"].severity is Severity.CRITICAL
    assert {"notify", "escalate"} <= set(by_name["loss-spike"].actions)
    critical = [rule.name for rule in rules.rules if rule.severity is Severity.CRITICAL]
    critical_rules = ["non-finite", "loss-spike", "nan-storm", "replica-divergence", "stale-rank", "rows-lost", "run-ended"]
    assert critical == critical_rules


def test_every_builtin_pack_is_clean():
    assert {"default", "msprobe"} <= set(builtin_packs())
    for name in builtin_packs():
        assert check_packs([name] if name != "default" else []).exit_code == 0, name


def test_msprobe_pack_stands_alone():
    assert [rule.detector for rule in load_pack(["msprobe"]).rules] == ["AnomalyNan", "AnomalyTurbulence"]


def test_a_pack_is_merged_over_the_default_by_name(pack):
    mine = pack("""
rules:
  - name: loss-spike
    args: {k: 12}
  - name: kurtosis-spike
    enabled: false
  - name: my-norm
    detector: AnomalyTurbulence
    match: {kind: wgrad, name: "layers.1.*", statistic: [norm, mean]}
""")

    rules = {rule.name: rule for rule in load_pack([mine]).rules}

    assert rules["loss-spike"].args == {"k": 12}
    assert rules["loss-spike"].severity is Severity.CRITICAL
    assert "kurtosis-spike" not in rules
    assert rules["my-norm"].match.statistic == ("norm", "mean")
    assert rules["my-norm"].source == f"{mine}:7"


@pytest.mark.slow
def test_packs_that_come_with_sentinel_combine_in_any_order():
    packs = sorted(builtin_packs())

    orders = [*itertools.permutations(packs, 2), *(packs[at:] + packs[:at] for at in range(len(packs)))]

    found = {order: load_pack(order).rules for order in map(tuple, orders)}

    for order, rules in found.items():
        others = found.get(order[::-1]) or found[tuple(packs)]
        assert {rule.name: rule for rule in rules} == {rule.name: rule for rule in others}


def test_a_change_of_a_default_rule_takes_it_along_where_the_default_pack_is_left_out(pack):
    mine = pack("""builtin: false
rules:
  - {name: loss-spike, severity: warning}
  - {name: kurtosis-spike, enabled: false}
""")

    (rule,) = load_pack([mine]).rules

    assert (rule.name, rule.detector, rule.severity) == ("loss-spike", "LossSpike", Severity.WARNING)
    assert rule.match == load_pack().rule("loss-spike").match


def test_where_a_rule_was_read_from_is_not_part_of_the_hash(pack):
    text = "builtin: false\nrules: [{name: a, detector: AnomalyNan, match: {kind: wgrad}}]"

    assert load_pack([pack(text, "1.yaml")]).pack_hash == load_pack([pack("\n" + text, "2.yaml")]).pack_hash


def test_args_merge_by_key_while_the_detector_stays(pack):
    first = pack("rules: [{name: a, detector: LossSpike, match: {kind: scalar}, args: {k: 9, floor: 0.2}}]", "1.yaml")
    second = pack("rules: [{name: a, args: {k: 10}}]", "2.yaml")
    third = pack("rules: [{name: a, detector: HiddenNan}]", "3.yaml")

    merged = load_pack([first, second], builtin=False).rule("a")
    changed = load_pack([first, second, third], builtin=False).rule("a")

    assert merged.args == {"k": 10, "floor": 0.2}
    assert changed.args == {}


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "empty file"),
        ("# only a comment\n", 1, "empty file"),
        ("just text", 1, 'expected "rules:"'),
        ("- a\n- b", 1, 'expected "rules:"'),
        ("rulez: []", 1, 'unknown key "rulez"; did you mean "rules"?'),
        ("rules: {a: 1}", 1, '"rules" must be a list, got a mapping'),
        ("rules:\n  - name: [\n", 3, "not YAML"),
        ("rules:\n\t- a", 2, "not YAML"),
        ("rules:\n  - 7", 2, "must be a mapping with a name"),
        ("rules:\n  - detector: LossSpike", 2, 'needs a "name"'),
        ("rules:\n  - name: 3", 2, '"name" must be text, got 3'),
        ("rules:\n  - name: a\n    name: b", 3, 'key "name" is there twice, first on line 2'),
        ("rules:\n  - name: a", 2, 'rule "a": needs a "detector"; known: AnomalyNan'),
        ("rules:\n  - name: a\n    detector: KurtosisSpyke", 3, 'detector "KurtosisSpyke"; did you mean "KurtosisSpike"?'),
        ("rules:\n  - name: a\n    detector: [x]", 3, '"detector" must be a name'),
        (NAN + "severety: info", 4, 'unknown key "severety"; did you mean "severity"?'),
        (NAN + "severity: Critical", 4, 'did you mean "critical"?'),
        (NAN + "severity: 3", 4, "known: info, warning, critical"),
        (NAN + "actions: notify", 4, '"actions" must be a list, got "notify"'),
        (NAN + "actions: [notfy]", 4, 'did you mean "notify"?'),
        (NAN + "actions: [webhook]", 4, "needs its URL"),
        (NAN + "actions: [{webhook: ftp://x}]", 4, "http or https"),
        (NAN + "match: wgrad", 4, '"match" must be a mapping, got text'),
        (NAN + "match:\n      kind: wgrads", 5, 'unknown kind "wgrads"; did you mean "wgrad"?'),
        (NAN + "match: {knd: wgrad}", 4, 'unknown key "knd"; did you mean "kind"?'),
        (
            NAN + "match:\n      kind: wgrad\n      statistic:\n        - norm\n        - nrm",
            8,
            'unknown statistic "nrm"; did you mean "norm"?',
        ),
        (NAN + "match: {name: 7}", 4, "expected text or a list of text, got 7"),
        (NAN + "match: {name: []}", 4, "empty list matches nothing"),
        (NAN + "match: {rank: -1}", 4, "expected ranks"),
        (NAN + "args: [1]", 4, '"args" must be a mapping, got a list'),
        (NAN + "args: {treshold: 1}", 4, 'did you mean "threshold"?'),
        (NAN + "args:\n      threshold: big", 5, "args.threshold: expected float"),
        (NAN + "args: {threshold: -2}", 4, "threshold must not be negative, got -2"),
        (NAN + "episode_quiet_steps: 1.5", 4, "must be a number of steps"),
        (NAN + "enabled: maybe", 4, '"enabled" must be true or false, got "maybe"'),
        ("rules:\n  - name: a\n    detector: LossSpike", 2, "watches scalars"),
        (NAN + "match: {kind: scalar, statistic: norm}", 4, "a scalar has no norm"),
        ("rules:\n  - name: a\n    enabled: false", 2, "no such rule to switch off"),
        (NAN + "match: {}\n  - name: a\n    detector: AnomalyNan", 5, 'rule "a" is there twice'),
        ("rules: &a [*a]", 1, ""),
    ],
)
def test_errors_name_file_and_line(pack, text, line, says):
    path = pack(text)

    message = errors_of(path)

    assert f"{path}:{line}: " in message
    assert says in message


def test_all_errors_of_a_file_are_collected(pack):
    path = pack("""
rules:
  - name: a
    detector: KurtosisSpyke
    severity: Critical
  - name: loss-spike
    args: {k: high, flor: 2}
    actions: notify
""")

    lines = errors_of(path).splitlines()

    assert len(lines) == 5
    assert [int(line[len(str(path)) + 1 :].split(":")[0]) for line in lines] == [4, 5, 7, 7, 8]


def test_aliases_of_aliases_are_refused(pack):
    bomb = "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    for last, this in zip("abcdefg", "bcdefgh", strict=True):
        bomb += f"{this}: &{this} [{','.join(f'*{last}' for _ in range(10))}]\n"

    assert "aliases unfolded" in errors_of(pack(bomb))


def test_missing_paths_and_empty_directories_are_named(tmp_path):
    assert "no such file" in errors_of(tmp_path / "nothing.yaml")
    assert 'did you mean "msprobe"?' in errors_of("msprobes")
    assert "no rule packs here" in errors_of(tmp_path)


def test_a_directory_is_one_pack_whose_names_must_differ(pack, tmp_path):
    pack("rules: [{name: a, detector: AnomalyNan}]", "1.yaml")
    second = pack("rules: [{name: a, detector: AnomalyNan}]", "2.yaml")

    assert f"{second}:1: " in errors_of(tmp_path)


def test_layers_1_does_not_take_layers_10():
    match = Match(kind=("wgrad",), name=("layers.1.*", "head"))

    names = ("layers.1.mlp.weight", "layers.10.mlp.weight", "layers.1", "head", "heads", "x.head")
    taken = [name for name in names if match.takes_name(name)]

    assert taken == ["layers.1.mlp.weight", "head"]


def test_pack_hash_follows_content_not_place(pack, tmp_path):
    text = "rules: [{name: a, detector: AnomalyNan}]"
    here, there = pack(text), pack("# moved\n" + text, "other.yaml")
    changed = pack(text.replace("AnomalyNan", "AnomalyTurbulence"), "changed.yaml")

    assert load_pack([here]).pack_hash == load_pack([there]).pack_hash
    assert load_pack([here]).pack_hash != load_pack([changed]).pack_hash
    assert load_pack().pack_hash != load_pack([here]).pack_hash


class Above(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A detector of another package."""

    declares: ClassVar[Declaration] = Declaration(summary="above a limit", statistics=("absmax",))
    limit: float

    def state(self, num_series):
        return {"seen": np.zeros(num_series)}

    def score(self, values, state):
        return Scores.of(values / self.limit, np.full(len(values), np.nan))

    def learn(self, values, state, anomalous):
        state["seen"] += 1


def test_detectors_of_other_packages_have_their_args_checked(pack):
    known = {**DETECTORS, "Above": Above}
    good = pack("rules: [{name: a, detector: Above, args: {limit: 3}}]", "good.yaml")
    bad = pack("rules: [{name: a, detector: Above}]", "bad.yaml")

    assert load_pack([good], detectors=known).rule("a").args == {"limit": 3}
    assert "limit" in errors_of(bad, detectors=known)


def test_lint_is_told_apart_from_errors(pack):
    path = pack("""
rules:
  - name: quiet-page
    detector: AnomalyNan
    severity: critical
    actions: []
  - name: one-layer
    detector: AnomalyTurbulence
    match: {kind: wgrad, name: layers.1}
""")

    result = check_packs([path])

    assert result.exit_code == 3
    assert [note.line for note in result.lint] == [3, 7]
    assert not result.errors and result.pack_hash


@pytest.mark.slow
def test_lists_show_every_argument_and_detector():
    lines = {line.name: line for line in list_rules(load_pack())}

    assert lines["loss-spike"].args["k"] == 8.3
    assert lines["loss-spike"].statistic == ("value",)
    assert {one["name"] for one in list_detectors()} >= set(DETECTORS)
    assert all(one["summary"] for one in list_detectors())


def test_docs_name_every_detector_argument_and_key():
    text = (Path(__file__).parents[3] / "docs" / "rules.md").read_text()

    for one in list_detectors():
        if one["name"] in DETECTORS:
            assert f"`{one['name']}`" in text, one["name"]
            for argument in one["args"]:
                assert f"`{argument}`" in text, argument
    for rule in load_pack().rules:
        assert f"`{rule.name}`" in text, rule.name
    for key in ("episode_quiet_steps", "builtin", "enabled", "actions", "severity", "webhook", "rank"):
        assert f"`{key}`" in text, key


def test_a_misspelt_rule_to_switch_off_is_guessed(tmp_path):
    (tmp_path / "mine.yaml").write_text("rules:\n  - {name: loss-spik, enabled: false}\n")

    (problem,) = check_packs([tmp_path / "mine.yaml"]).errors

    assert problem.message == 'rule "loss-spik": there is no such rule to switch off; did you mean "loss-spike"?'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules:\n\t- name: a\n", ":2: not YAML: found a tab; indent with spaces"),
        ("rules: []\n---\nrules: []\n", "found a second document behind ---"),
        ("rules:\n  - {name: a, detector: Threshold, args: {above: '0.5'}}\n", 'got str "0.5"; write it without quotes'),
        ('rules: [{name: "a\\e[31m", detector: AnomalyNan}]', "text that can be printed"),
        ("rules: [{name: a, detector: ReplicaDivergence, match: {kind: scalar}}]", "compares copies of tensors"),
        ("rules: [{name: a, <<: 5, detector: AnomalyNan}]", '"<<" merges mappings'),
        ("rules:\n  - &a {<<: *a, name: b}\n", "nested too deeply"),
    ],
)
def test_slips_of_the_hand_are_named_with_what_to_do(text, words, tmp_path):
    (tmp_path / "a.yaml").write_text(text)

    _, problems = read_pack([tmp_path / "a.yaml"])

    assert words in str(problems[0]) and len(problems) == 1


def test_numbers_with_exponents_and_merged_mappings_are_what_they_look_like(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "rules:\n"
        "  - &a {name: a, detector: Threshold, match: {kind: wgrad, statistic: norm}, args: {above: 1e6}}\n"
        "  - {<<: *a, name: b, severity: critical}\n"
    )

    pack = load_pack([tmp_path / "a.yaml"], builtin=False)

    assert [rule.args for rule in pack.rules] == [{"above": 1e6}] * 2
    assert [(rule.name, rule.severity.value) for rule in pack.rules] == [("a", "warning"), ("b", "critical")]


def test_a_pack_of_too_many_rules_is_refused_in_words_and_the_most_are_read(tmp_path, monkeypatch):
    def pack_of(name, num_rules):
        lines = [f"- {{name: {name}{at}, detector: AnomalyNan, match: {{kind: '*'}}}}" for at in range(num_rules)]
        path = tmp_path / f"{name}.yaml"
        path.write_text("builtin: false\nrules:\n" + "\n".join(lines) + "\n")
        return path

    assert loader.MAX_RULES == 2000
    monkeypatch.setattr(loader, "MAX_RULES", 60)
    most = pack_of("most", 60)

    assert len(load_pack([most]).rules) == 60
    with pytest.raises(RuleError, match=r"more\.yaml:2: expected at most 60 rules .*got 61$"):
        load_pack([pack_of("more", 61)])
    with pytest.raises(RuleError, match=r"expected at most 60 rules .*got 61 of all files"):
        load_pack([most, pack_of("one", 1)])


def test_what_detectors_there_are_is_found_out_once_a_check(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(listing, "known_detectors", lambda: asked.append(1) or known_detectors())

    assert check_packs(["default"]).num_rules > 10
    assert len(asked) == 1
