"""What the container holds: Sentinel without torch. Its commands run where torch cannot be imported."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sentinel.cli.serve import serve
from sentinel.testing import Nan

from ..support.servers import get
from ..support.serving import small_run
from ..support.waiting import wait_for

ROOT = Path(__file__).parents[2]
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"there is no {name} here", name=name)

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def no_torch(tmp_path):
    """Return an environment in which no process finds torch."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(REFUSE)
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


def command(*words):
    return [sys.executable, "-m", "sentinel.cli", *map(str, words)]


@pytest.mark.slow
def test_a_daemon_serves_and_commands_answer_where_there_is_no_torch(tmp_path, no_torch):
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o700)
    source = small_run(runs / "run").plant(Nan(step=3, module="layers.2"))
    source.write(6)
    source.end()
    options = ["serve", runs, "--state-dir", tmp_path / "state", "--listen", "127.0.0.1:0", "--open-reads"]

    refused = subprocess.run([sys.executable, "-c", "import torch"], env=no_torch, capture_output=True, timeout=240)
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(command(*options), env=no_torch, stderr=log)
    try:
        address = tmp_path / "state" / "http.json"
        wait_for(lambda: address.exists() or daemon.poll() is not None)
        url = json.loads(address.read_text())["url"]
        wait_for(lambda: b'sentinel_judged_step{run="run"} 5.0' in get(f"{url}/metrics"))
    finally:
        daemon.terminate()
        code = daemon.wait(240)
    questions = [
        ("status", runs),
        ("explain", "worst", "-d", runs / "run"),
        ("check-config", ROOT / "deploy" / "kubernetes" / "base" / "sentinel.yml"),
    ]
    told = [
        subprocess.run(command(*words), env=no_torch, capture_output=True, text=True, timeout=240) for words in questions
    ]

    assert refused.returncode == 1
    assert code == 0, (tmp_path / "log").read_text()
    assert "step 5 judged" in told[0].stdout and "layers.2" in told[1].stdout
    assert told[2].returncode == 0, told[2].stderr
    assert not any("torch" in one.stderr for one in told)


def test_nothing_that_is_installed_with_sentinel_brings_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    names = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}

    assert not names & {"torch", "triton", "lightning", "transformers", "accelerate"}


def test_the_container_copies_what_is_there_and_serves_as_the_command_line_does():
    lines = (ROOT / "deploy" / "container" / "Containerfile").read_text().splitlines()

    for line in lines:
        if line.startswith("COPY") and "--from" not in line:
            *sources, _ = line.split()[1:]
            assert all((ROOT / one).exists() for one in sources), line
    [entry] = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("ENTRYPOINT")]
    [words] = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("CMD")]
    assert entry == ["sentinel"] and words[0] == "serve"
    assert parsed(words[1:])["state_dir"] == "/state"
    assert any(line.startswith("USER 1000") for line in lines)
    assert not any("torch" in line for line in lines if line.startswith("RUN"))


def parsed(words):
    """Return the options of `sentinel serve`; what it does not know is an error."""
    return serve.make_context("serve", list(words)).params
