"""The manifest for Kubernetes: its parts fit each other, and its command trains, is drained and goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain.config.schema import LaunchConfig
from disttrain.record import RunFolder
from tests.cli.words import TINY
from tests.launch.slow import HURRY, curve
from tests.launch.slurm import wait_for
from tests.quality.source import ROOT

JOBSET: dict[str, Any] = yaml.safe_load((ROOT / "experiments/kubernetes/jobset.yaml").read_text())
(WORKERS,) = JOBSET["spec"]["replicatedJobs"]
JOB = WORKERS["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
GIVEN = {one["name"]: one["value"] for one in CONTAINER["env"] if "value" in one}
WORDS = [*TINY[:-3], "callbacks=[minimal,checkpoint]", "callbacks.grad_accumulation.micro_batch_size=2", "train.eval_every=null"]


def command(env: dict[str, str]) -> list[str]:
    """The container's command line with `$(NAME)` replaced, as the kubelet does."""
    return [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in (*CONTAINER["command"], *CONTAINER["args"])]


def test_it_is_a_jobset_of_one_indexed_job() -> None:
    assert (JOBSET["apiVersion"], JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (JOB["completionMode"], JOB["backoffLimit"], WORKERS["replicas"]) == ("Indexed", 0, 1)
    assert POD["restartPolicy"] == "Never", "a pod failure policy needs this"


def test_as_many_pods_as_torchrun_waits_for_and_as_many_ranks_as_gpus() -> None:
    words = command(GIVEN | {"JOB_COMPLETION_INDEX": "1"})
    assert f"--nnodes={JOB['parallelism']}" in words
    assert JOB["parallelism"] == JOB["completions"]
    assert "--node-rank=1" in words
    assert f"--nproc-per-node={CONTAINER['resources']['limits']['nvidia.com/gpu']}" in words


def test_the_ranks_meet_at_the_name_of_the_first_pod() -> None:
    network = JOBSET["spec"]["network"]
    assert network["enableDNSHostnames"]
    assert GIVEN["LEAD"] == f"{JOBSET['metadata']['name']}-{WORKERS['name']}-0-0.{network['subdomain']}"


def test_a_stop_has_its_time_and_a_drained_pod_does_not_count() -> None:
    assert POD["terminationGracePeriodSeconds"] >= LaunchConfig().grace_seconds + 20
    (rule,) = JOB["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"]) == ("FailJob", [{"type": "DisruptionTarget", "status": "True"}])
    (uncounted,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert (uncounted["action"], uncounted["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])


def test_what_is_mounted_is_there_and_runs_go_onto_what_is_shared() -> None:
    mounts = {one["name"]: one["mountPath"] for one in CONTAINER["volumeMounts"]}
    volumes = {one["name"]: one for one in POD["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes["runs"]
    assert mounts["runs"] == GIVEN["OUTPUTS"]


@pytest.mark.service
@pytest.mark.long
def test_its_command_trains_is_drained_and_goes_on(tmp_path: Path) -> None:
    """One of two pods is told to leave: all ranks stop at one step, and the next start goes on to the unbroken curve."""
    words = [*WORDS, "launch.threads=1", "train.steps=60", "callbacks.dawdles._target_=tests.launch.slow.Dawdles"]

    def start() -> list[subprocess.Popen[bytes]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            here = GIVEN | {"LEAD": "127.0.0.1", "PORT": str(free.getsockname()[1]), "RANKS": "1", "OUTPUTS": str(tmp_path / "runs")}
        pods = []
        for index in range(JOB["completions"]):
            env = here | {"JOB_COMPLETION_INDEX": str(index), "NODE_NAME": f"machine-{index}"}
            torchrun, *rest = command(env)
            assert torchrun == "torchrun"
            whole = [sys.executable, "-m", "torch.distributed.run", *rest, *words, "strategy=ddp"]
            log = (tmp_path / f"pod-{index}.log").open("ab")
            pods.append(subprocess.Popen(whole, cwd=tmp_path, env=os.environ | env | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log))
            log.close()
        return pods

    first, second = start()
    wait_for(lambda: any(curve(folder) for folder in tmp_path.glob("runs/*/*")), 100, "first row")
    second.send_signal(signal.SIGTERM)
    assert first.wait(60) != 0
    assert second.wait(60) != 0
    (folder,) = tmp_path.glob("runs/*/*")
    result = RunFolder(folder).result()
    assert (result["status"], result["exit_code"], result["reason"]) == ("preempted", 143, "stopped by SIGTERM")
    assert (folder / "checkpoints" / f"step-{result['step']}").is_dir()

    (tmp_path / HURRY).touch()
    assert [pod.wait(100) for pod in start()] == [0, 0], (tmp_path / "pod-0.log").read_text()
    assert list(tmp_path.glob("runs/*/*")) == [folder]
    alone = [sys.executable, "-m", "disttrain", *words, "strategy=ddp", "paths.outputs=whole"]
    subprocess.run(alone, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    assert curve(folder) == curve(next(tmp_path.glob("whole/*/*")))
