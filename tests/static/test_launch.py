"""The launch scripts say what they would run, and what is wrong with what they are given."""

from pathlib import Path
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from experiments import command_line

ROOT = Path(__file__).parents[2]


def _run(*arguments, **environment):
  return subprocess.run(["bash", *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
                        env={**os.environ, **environment})


def test_a_tpu_slice_is_told_what_to_install_and_run():
  done = _run("launch/tpu_vm.sh", "--tpu=pod", "--zone=there", "--dry_run", "--", "gpt2_enwik8",
              "--config=configs/mix.py", "--config.attentions=mha,damcha")
  assert done.returncode == 0, done.stderr
  copy, start = done.stdout.splitlines()
  assert copy.startswith("gcloud compute tpus tpu-vm scp ") and "pod:damcha-jax.tar.gz" in copy
  for part in ("tpu-vm ssh pod --zone=there --worker=all", "launch/constraints-", "[tpu]",
               "export JAX_COMPILATION_CACHE_DIR=", "--distributed",
               "python -m experiments.gpt2_enwik8 --config=configs/mix.py"):
    assert part in start


@pytest.mark.parametrize("flags", [[], ["--workdir=/my runs/it's \"one\"", "--config.a=(1, *)"]])
def test_flags_reach_the_experiment_as_they_are_given(flags, tmp_path):
  wanted = ["python", "-m", "experiments.gpt2_enwik8", *flags, "--distributed"]
  done = _run("launch/slurm.sbatch", "gpt2_enwik8", *flags, DRY_RUN="1", PYTHON="python")
  assert shlex.split(done.stdout)[2:] == wanted

  (tmp_path / "gcloud").write_text("#!/bin/sh\nfor last; do :; done; echo \"$last\"\n")
  (tmp_path / "gcloud").chmod(0o755)
  done = _run("launch/tpu_vm.sh", "--tpu=pod", "--zone=there", "--", "gpt2_enwik8", *flags,
              PATH=f"{tmp_path}:{os.environ['PATH']}")
  assert shlex.split(done.stdout.splitlines()[-1]) == wanted


def test_a_tpu_slice_is_explained():
  done = _run("launch/tpu_vm.sh", "--help")
  assert done.returncode == 0 and done.stdout.startswith("Runs an experiment on every host")


def test_slurm_says_what_it_lacks(tmp_path):
  (tmp_path / "bash").symlink_to(shutil.which("bash"))
  done = _run("launch/slurm.sbatch", "gpt2_enwik8", PATH=str(tmp_path))
  assert done.returncode == 1 and done.stderr.startswith("error: there is no srun; submit this")
  (tmp_path / "srun").symlink_to(shutil.which("true"))
  done = _run("launch/slurm.sbatch", "gpt2_enwik8", PATH=str(tmp_path), PYTHON="no/python")
  assert done.returncode == 1 and done.stderr.startswith("error: there is no no/python; make")


def test_slurm_starts_every_process_alike():
  done = _run("launch/slurm.sbatch", "gpt2_enwik8", "--config=configs/mix.py", DRY_RUN="1",
              PYTHON="python3")
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == [
      "srun", "--kill-on-bad-exit=1", "python3", "-m", "experiments.gpt2_enwik8",
      "--config=configs/mix.py", "--distributed"]


def _pod():
  """The Job of launch/kubernetes.yaml and its container."""
  service, job = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
  assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
  (container,) = job["spec"]["template"]["spec"]["containers"]
  return job, container


def test_kubernetes_starts_a_process_in_every_pod():
  job, container = _pod()
  assert job["spec"]["completionMode"] == "Indexed"
  number = job["spec"]["completions"]
  assert number == job["spec"]["parallelism"]
  name = job["metadata"]["name"]
  assert {f"--num_processes={number}", f"--coordinator_address={name}-0.{name}:1234",
          "--process_id=$(PROCESS_ID)"} < set(container["args"])
  variables = {entry["name"]: entry for entry in container["env"]}
  assert "job-completion-index" in str(variables["PROCESS_ID"]["valueFrom"])
  mounts = {mount["name"] for mount in container["volumeMounts"]}
  assert mounts == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}


def test_kubernetes_gives_flags_that_the_experiment_takes(monkeypatch):
  _, container = _pod()
  monkeypatch.chdir(ROOT)
  assert container["command"][:2] == ["python", "-m"]
  argv = [*container["command"][2:],
          *(argument.replace("$(PROCESS_ID)", "1") for argument in container["args"])]
  config, workdir = command_line.parse(argv)
  assert argv[0] == f"experiments.{config.experiment}" and str(workdir) == "/shared/mix"


def test_gpus_are_told_flags_that_xla_knows():
  done = _run("-c", "source launch/gpu.sh; printf '%s' \"$XLA_FLAGS\"", XLA_FLAGS="")
  _, container = _pod()
  (told,) = [entry["value"] for entry in container["env"] if entry["name"] == "XLA_FLAGS"]
  assert done.stdout.split() == told.split() and "=true" in told
  known = subprocess.run(  # XLA ends a process whose flags it does not know
      [sys.executable, "-c", "import jax; jax.devices()"], check=False, capture_output=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": told})
  assert known.returncode == 0, known.stderr


@pytest.mark.parametrize("arguments, message", [
    (("launch/tpu_vm.sh",), "--tpu is missing"),
    (("launch/tpu_vm.sh", "--tpu=a"), "--zone is missing"),
    (("launch/tpu_vm.sh", "--tpu=a", "--zone=b"), "the experiment is missing"),
    (("launch/tpu_vm.sh", "--tpu=a", "--zone=b", "--", "gpt3"), "no experiments/gpt3.py"),
    (("launch/tpu_vm.sh", "--region=a"), "unknown option '--region=a'"),
    (("launch/slurm.sbatch",), "name an experiment"),
    (("launch/tpu_vm.sh", "--tpu=a", "--zone=b", "--", "../experiments/rowsum"),
     "no experiments/../experiments/rowsum.py"),
    (("launch/slurm.sbatch", "gpt3"), "name an experiment"),
    (("launch/slurm.sbatch", "../experiments/rowsum"), "name an experiment"),
])
def test_a_mistake_is_exit_status_2(arguments, message):
  done = _run(*arguments)
  assert done.returncode == 2 and message in done.stderr
