"""Tests the recipes in deploy/, as far as that's possible without the engines that run them."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from jaxcross.commands import launch
from jaxcross.commands.hosts import parse_hosts

DEPLOY = Path(__file__).parents[3] / "deploy"
SCHEMAS = json.loads(Path(__file__).with_name("crds.json").read_text())["schemas"]
MANIFESTS = {
    f"{file.stem}-{document['kind']}": document
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
}
DOCKERFILE = (DEPLOY / "kubernetes" / "Dockerfile").read_text()
SCRIPTS = [DEPLOY / "slurm" / "job.sbatch", Path(__file__).parents[2] / "support" / "slurm_box.sh"]


def errors(document):
    found = jsonschema.Draft202012Validator(SCHEMAS[document["kind"]]).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def nodes(tree):
    """Yields all mappings in a document."""
    if isinstance(tree, dict):
        yield tree
    for inner in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from nodes(inner)


def containers(document):
    return [each for node in nodes(document) for each in node.get("containers", ())]


def test_all_kinds_are_there():
    assert set(MANIFESTS) == {"mpijob-MPIJob", "trainjob-TrainingRuntime", "trainjob-TrainJob"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_one_that_the_operator_takes(name):
    assert errors(MANIFESTS[name]) == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_misspelt_field_is_found(name):
    """The schemas know the names of all fields. A check that accepted everything would otherwise go
    unnoticed.
    """
    document = json.loads(
        json.dumps(MANIFESTS[name]).replace('"mpiImplementation"', '"mpiImplementations"', 1)
    )
    document["spec"]["slotPerWorker"] = 1
    assert any("slotPerWorker" in error for error in errors(document))


def test_job_names_the_runtime_in_its_folder():
    reference = MANIFESTS["trainjob-TrainJob"]["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == ("TrainingRuntime", "jaxcross-mpi")
    assert MANIFESTS["trainjob-TrainingRuntime"]["metadata"]["name"] == "jaxcross-mpi"


@pytest.mark.parametrize("name", ["mpijob-MPIJob", "trainjob-TrainingRuntime"])
def test_no_pod_runs_as_root(name):
    pods = [node for node in nodes(MANIFESTS[name]) if "containers" in node]
    assert len(pods) == 2
    for pod in pods:
        assert (
            pod["securityContext"]["runAsNonRoot"] is True
            and pod["securityContext"]["runAsUser"] == 1000
        )


def commands():
    for document in MANIFESTS.values():
        for holder in [*containers(document), document["spec"].get("trainer", {})]:
            if holder.get("command") == ["bash", "-c"]:
                yield holder["args"][0]


# The formats that the MPI operator (for Open MPI) and Kubeflow Trainer write.
@pytest.mark.parametrize("line", ["{} slots=1\n", "{}:1\n"])
def test_launcher_command_names_the_hosts(tmp_path, line):
    """`jaxcross launch` accepts the command, with the hosts from the operator's file."""
    names = ("job-worker-0.job.default.svc", "job-worker-1.job.default.svc")
    (tmp_path / "hostfile").write_text("".join(line.format(name) for name in names))
    checked = 0
    for command in commands():
        if ":1" in line and "cut -d :" not in command:
            continue
        text = command.replace("/etc/mpi/hostfile", str(tmp_path / "hostfile")).replace(
            "exec ", "printf '%s\\n' ", 1
        )
        done = subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True)
        arguments = done.stdout.splitlines()
        parser = argparse.ArgumentParser()
        launch.add_parser(parser.add_subparsers())
        args = parser.parse_args(arguments[1:])
        assert arguments[0] == "jaxcross" and args.program == ["train.py"]
        assert parse_hosts(args.hosts) == names and args.max_restarts == 3
        checked += 1
    assert checked


def instructions():
    """Returns the image's instructions as names and arguments, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_image_runs_sshd_of_a_user_who_is_not_root():
    steps = instructions()
    names = [name for name, _ in steps]
    known = {"FROM", "RUN", "ENV", "USER", "WORKDIR", "COPY", "EXPOSE", "CMD"}
    assert names[0] == "FROM" and set(names) <= known and names[-1] == "CMD"
    assert [rest for name, rest in steps if name == "USER"] == ["mpiuser"]
    installs = next(
        n for n, (name, rest) in enumerate(steps) if name == "RUN" and "pip install" in rest
    )
    assert names.index("USER") < installs, "what is installed belongs to the user"
    assert json.loads(steps[-1][1])[0] == "/usr/sbin/sshd"


def test_image_and_pods_agree_on_the_port():
    (port,) = [int(rest) for name, rest in instructions() if name == "EXPOSE"]
    assert f"'Port {port}'" in DOCKERFILE and f"'  Port {port}'" in DOCKERFILE
    probes = [
        each["readinessProbe"]["tcpSocket"]["port"]
        for m in MANIFESTS.values()
        for each in containers(m)
        if "readinessProbe" in each
    ]
    assert probes == [port] * 2 and port > 1023, (
        "a user who is not root cannot listen on lower ones"
    )


def test_image_copies_what_is_there():
    for name, rest in instructions():
        if name == "COPY":
            for source in shlex.split(rest)[1:-1]:
                assert (DEPLOY.parent / source).exists(), source


def test_image_copies_what_the_wheel_is_made_of():
    build = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    copied = {
        source
        for name, rest in instructions()
        if name == "COPY"
        for source in shlex.split(rest)[1:-1]
    }
    assert {*build["packages"], *build["force-include"], "README.md"} <= copied


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_clean_shell(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck")
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_batch_script_states_what_the_guide_explains():
    text = (DEPLOY / "slurm" / "job.sbatch").read_text()
    options = set(re.findall(r"^#SBATCH (--\S+)$", text, re.MULTILINE))
    assert {"--requeue", "--open-mode=append", "--signal=TERM@120"} <= options
