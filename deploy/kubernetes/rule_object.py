"""Writes monitoring/prometheus-rule.yaml from the rules beside Prometheus: `python deploy/kubernetes/rule_object.py`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
HEAD = """\
# Written by rule_object.py from deploy/prometheus/sentinel.rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: sentinel
spec:
"""


def rule_object() -> str:
    """Return the object of the Prometheus operator with the very rules that Prometheus is given."""
    rules = (FOLDER.parent / "prometheus" / "sentinel.rules.yml").read_text("utf-8")
    groups = rules[rules.index("groups:") :]
    return HEAD + "".join(f"  {line}\n" if line else "\n" for line in groups.splitlines())


if __name__ == "__main__":
    (FOLDER / "monitoring" / "prometheus-rule.yaml").write_text(rule_object(), "utf-8")
