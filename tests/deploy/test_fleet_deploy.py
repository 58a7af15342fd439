"""What deploys a fleet: units, objects and scripts name options, files and rights that there are, and do what they say."""

import getpass
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from sentinel.cli.join import join
from sentinel.cli.listening import Listening
from sentinel.cli.main import run_cli
from sentinel.cli.ship import ship
from sentinel.cli.worker import worker
from sentinel.fleet.broker import STREAM_BYTES
from sentinel.fleet.fetched_rows import STALLED_S

from ..support.certificates import write_pair
from ..support.servers import need, run_tool
from ..support.waiting import wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"
VERBS = {"ship": ship, "join": join, "worker": worker}


def objects(folder):
    """Return kind -> object of a folder of `deploy/kubernetes`, which has one of each."""
    paths = (DEPLOY / "kubernetes" / folder).glob("*.yaml")
    return {one["kind"]: one for path in paths for one in yaml.safe_load_all(path.read_text())}


OBJECTS, WORKERS = objects("fleet"), objects("fleet-workers")
PODS = {"ship": OBJECTS["DaemonSet"], "join": OBJECTS["Deployment"], "worker": WORKERS["Deployment"]}


def line_of(unit, name):
    return re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_units_start_what_there_is_and_write_where_they_may(verb, tmp_path):
    unit = (DEPLOY / "systemd" / f"sentinel-{verb}.service").read_text()
    [line] = line_of(unit, "ExecStart")
    program, first, *words = shlex.split(line)
    options = VERBS[verb].make_context(verb, words).params

    assert (Path(program).name, first) == ("sentinel", verb)
    assert options["directory"] == f"/var/lib/{line_of(unit, 'StateDirectory')[0]}"
    assert options.get("drain_s", 0.0) < float(line_of(unit, "TimeoutStopSec")[0])
    assert line_of(unit, "Restart") == ["always"]
    # Only what notifies may be waited for, and feeds a watchdog; a join's waits longer than a step does for rows of nodes.
    assert line_of(unit, "Type") == ([] if verb == "ship" else ["notify"])
    longest_s = {"join": 2 * STALLED_S, "worker": 30.0}.get(verb, 0.0)
    assert [float(one) > longest_s for one in line_of(unit, "WatchdogSec")] == ([] if verb == "ship" else [True])
    if shutil.which("systemd-analyze") is not None:
        path = tmp_path / f"sentinel-{verb}.service"
        path.write_text(re.sub("^User=.*$", "User=daemon", unit, flags=re.MULTILINE).replace(program, "/bin/true"))
        assert run_tool("systemd-analyze", "verify", str(path)) == (0, "")


@pytest.mark.parametrize("verb", PODS)
def test_pods_are_started_with_options_and_files_that_there_are(verb):
    spec = PODS[verb]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    first, *words = container["args"]
    options = VERBS[verb].make_context(verb, words).params
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    used = [options["directory"], *(options[name] for name in ("config", "tls_cert", "tls_key") if name in options)]
    given = [word.partition("=")[2] for word in container["args"] if word.startswith(("--tls-ca", "--login"))]

    assert first == verb and len(given) == 2
    assert all(any(path == one or path.startswith(f"{one}/") for one in mounted) for path in [*used, *given] if path)
    assert options.get("drain_s", 0.0) < spec["terminationGracePeriodSeconds"]
    volumes = {one["name"] for one in spec["volumes"]}
    for one in (*spec["initContainers"], container):
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
        assert one["securityContext"]["readOnlyRootFilesystem"] and one["securityContext"]["capabilities"]["drop"] == ["ALL"]
    # The node's own login is copied from the secret of all, which the pod does not see.
    assert "/secret" not in mounted
    label = PODS[verb]["spec"]["selector"]["matchLabels"]
    assert PODS[verb]["spec"]["template"]["metadata"]["labels"] == label


@pytest.mark.parametrize("verb", ["join", "worker"])
def test_probes_and_prometheus_ask_where_it_listens(verb):
    [container] = PODS[verb]["spec"]["template"]["spec"]["containers"]
    first, *words = container["args"]
    options = VERBS[verb].make_context(first, words).params
    http = Listening(**{name: options[name] for name in Listening.__struct_fields__}).config()
    service, monitor = (OBJECTS if verb == "join" else WORKERS)["Service"], objects("fleet-monitoring")["ServiceMonitor"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}

    assert http.has_tls and container["ports"] == [{"name": "https", "containerPort": http.port}]
    assert {name: one["path"] for name, one in probes.items()} == {
        "startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz",
    }  # fmt: skip
    assert {(one["port"], one["scheme"]) for one in probes.values()} == {("https", "HTTPS")}
    assert service["spec"]["ports"][0]["port"] == http.port
    assert service["spec"]["selector"] == PODS[verb]["spec"]["selector"]["matchLabels"]
    [wanted] = monitor["spec"]["selector"]["matchExpressions"]
    assert service["metadata"]["labels"][wanted["key"]] in wanted["values"]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    # What the rules ask for.
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "sentinel"}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_who_applies_the_fleet_with_workers_has_nodes_that_ship_to_them():
    code, built = run_tool("kubectl", "kustomize", str(DEPLOY / "kubernetes" / "fleet-workers"))
    assert code == 0, built

    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(built)}

    assert {name for kind, name in made if kind in ("DaemonSet", "Deployment")} == {
        "sentinel-ship", "sentinel-join", "sentinel-worker",
    }  # fmt: skip
    [container] = made["DaemonSet", "sentinel-ship"]["spec"]["template"]["spec"]["containers"]
    verb, *words = container["args"]
    assert ship.make_context(verb, words).params["to_workers"]
    assert not ship.make_context(
        "ship", OBJECTS["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["args"][1:]
    ).params["to_workers"]
    for one in made.values():
        assert one["metadata"]["namespace"] == "training"
        kubernetes_validate.validate(one, "1.31", strict=True)


def test_two_joins_share_one_volume_and_the_service_leads_to_the_one_that_works():
    deployment, service = OBJECTS["Deployment"], OBJECTS["Service"]
    spec = deployment["spec"]["template"]["spec"]
    [rule] = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    assert deployment["spec"]["replicas"] == 2 and deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert rule["topologyKey"] == "kubernetes.io/hostname" and OBJECTS["PersistentVolumeClaim"]["spec"]["accessModes"] == [
        "ReadWriteOnce"
    ]
    assert spec["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_the_broker_of_the_chart_finds_its_users_and_has_room_for_the_stream():
    values = yaml.safe_load((DEPLOY / "kubernetes" / "nats" / "values.yml").read_text())
    [mount] = [one["value"] for one in values["container"]["patch"]]
    [volume] = [one["value"] for one in values["podTemplate"]["patch"]]
    included = values["config"]["merge"]["00$include"]

    assert os.path.normpath(f"/etc/nats-config/{included}") == f"{mount['mountPath']}/users.conf"
    assert volume["name"] == mount["name"]
    assert int(values["config"]["jetstream"]["fileStore"]["pvc"]["size"].removesuffix("Gi")) << 30 > 2 * STREAM_BYTES


@pytest.mark.server
def test_a_server_takes_the_configuration_with_the_users_that_are_made_for_it(tmp_path, capsys):
    need("nats-server")
    assert run_cli(["fleet", "users", str(tmp_path), "gpu-1", "gpu-2"]) == 0
    before = {path.name: path.read_text() for path in (tmp_path / "credentials").iterdir()}
    assert run_cli(["fleet", "users", str(tmp_path), "gpu-1", "gpu-3"]) == 0
    after = {path.name: path.read_text() for path in (tmp_path / "credentials").iterdir()}
    write_pair(tmp_path)
    config = tmp_path / "nats.conf"
    config.write_text((DEPLOY / "nats" / "nats.conf").read_text().replace("/etc/nats", str(tmp_path)))

    code, said = run_tool("nats-server", "-t", "-c", str(config))

    assert (code, "is valid" in said) == (0, True), said
    assert before.keys() == {"join", "worker", "status", "gpu-1", "gpu-2"}
    assert after.items() >= before.items() and "gpu-3" in after
    users = (tmp_path / "users.conf").read_text()
    assert '"gpu-3"' in users and '"gpu-2"' not in users and (tmp_path / "users.conf").stat().st_mode & 0o77 == 0
    assert run_cli(["fleet", "users", str(tmp_path), "join"]) == 2
    assert "none of join, worker, status" in capsys.readouterr().err


SHIPPER = """#!/bin/bash
if [ "$1" = ship ]; then
    echo "$@" > "$HOME/shipped"
    trap 'sleep 0.1; exit "${SHIP_EXIT:-0}"' TERM
    while :; do sleep 0.02; done
fi
if [ "$1" = worker ]; then
    mkdir "$2"
    echo "$@" > "$HOME/worked"
    exit "${WORKER_EXIT:-0}"
fi
"""


@pytest.fixture
def node(tmp_path):
    """A node of a cluster: its home, and what Slurm tells its scripts there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "sentinel": SHIPPER,
        "srun": '#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nexec "$@"\n',
        "trainer": '#!/bin/bash\necho "$SENTINEL_DIR $SENTINEL_RUN" > "$HOME/trained"\nexit "${TRAINER_EXIT:-0}"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("login", "ca.pem", "gpu-1"):
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc" / name).write_text("gpu-1\nsecret\n")
    return tmp_path, {
        "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "SENTINEL_HOME": str(tmp_path / "jobs"),
        "SENTINEL_ETC": str(tmp_path / "etc"), "SENTINEL_BROKER": "tls://broker:4222", "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "gpt", "SLURM_JOB_USER": getpass.getuser(), "SLURMD_NODENAME": "gpu-1", "SENTINEL_DRAIN_S": "60",
        "SENTINEL_LOCAL": str(tmp_path / "local"),
    }  # fmt: skip


def played(name, environment, home, *arguments):
    command = ["bash", str(DEPLOY / "slurm" / name), *(arguments or ["train.py"])]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, timeout=240).returncode


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_is_shipped_from_prolog_to_epilog_and_what_is_not_held_stays(node, code):
    home, environment = node
    runs = home / "jobs" / "4711"

    to = "--to-workers" if code else ""
    assert played("fleet_prolog.sh", {**environment, "SHIP_EXIT": str(code), "SENTINEL_SHIP": to}, home) == 0
    wait_for(lambda: (home / "shipped").exists() and (home / "shipped").read_text().endswith("\n"))
    verb, *words = (home / "shipped").read_text().split()
    assert runs.stat().st_mode & 0o777 == 0o700 and (runs / ".ship" / "login").stat().st_mode & 0o777 == 0o600
    options = ship.make_context(verb, words).params
    assert (options["directory"], options["node"], options["drain_s"]) == (str(runs), "gpu-1", 60.0)
    assert options["to_workers"] is bool(code)

    assert played("fleet_epilog.sh", environment, home) == 0
    assert runs.exists() is bool(code)


def test_a_node_without_its_login_holds_no_job_up(node):
    home, environment = node
    (home / "etc" / "login").unlink()

    assert played("fleet_prolog.sh", environment, home) == 0
    assert played("fleet_epilog.sh", {**environment, "SLURM_JOB_ID": "4712"}, home) == 0
    assert not (home / "shipped").exists()


@pytest.mark.parametrize(("trained", "shipped"), [(0, 0), (3, 0), (0, 1)])
def test_a_batch_script_ships_beside_the_trainer_and_drains_before_the_job_ends(node, trained, shipped):
    home, environment = node
    local = home / "local" / "sentinel-4711"
    # As fast as it is on a node: the trainer ends when the shipper is up.
    waits = '#!/bin/bash\nuntil [ -s "$HOME/shipped" ]; do sleep 0.02; done\n'
    trainer = home / "bin" / "trainer"
    trainer.write_text(trainer.read_text().replace("#!/bin/bash\n", waits))
    told = {**environment, "TRAINER": "trainer", "TRAINER_EXIT": str(trained), "SHIP_EXIT": str(shipped)}
    told |= {"SENTINEL_SHIP": "--to-workers"} if shipped else {}

    assert played("fleet.sbatch", told, home) == trained
    assert (home / "trained").read_text() == f"{local} gpt-4711\n"
    assert local.exists() is bool(shipped)
    verb, *words = (home / "shipped").read_text().split()
    assert ship.make_context(verb, words).params["to_workers"] is bool(shipped)


@pytest.mark.parametrize("code", [0, 1])
def test_workers_of_a_job_of_their_own_leave_no_copies_behind(node, code):
    home, environment = node
    (home / "local").mkdir()
    told = {**environment, "SLURM_PROCID": "1", "WORKER_EXIT": str(code)}

    assert played("workers.sbatch", told, home, "--rules", "my rules.yaml") == code
    assert (home / "worked").read_text().endswith("--rules my rules.yaml\n")
    verb, *words = (home / "worked").read_text().replace("my rules", "rules").split()
    options = worker.make_context(verb, words).params
    copies = home / "local" / "sentinel-worker-4711-1"
    assert (options["directory"], options["listen"]) == (str(copies), f"unix:{copies}/http")
    assert not list((home / "local").iterdir())
