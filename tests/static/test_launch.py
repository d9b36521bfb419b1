"""The launch scripts say what they would run, and what is wrong with what they are given."""

from pathlib import Path
import os
import subprocess

import pytest

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
               "python -m experiments.gpt2_enwik8 --config=configs/mix.py", "--distributed"):
    assert part in start


def test_slurm_starts_every_process_alike():
  done = _run("launch/slurm.sbatch", "gpt2_enwik8", "--config=configs/mix.py", DRY_RUN="1",
              PYTHON="python3")
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == [
      "srun", "--kill-on-bad-exit=1", "python3", "-m", "experiments.gpt2_enwik8",
      "--config=configs/mix.py", "--distributed"]


@pytest.mark.parametrize("arguments, message", [
    (("launch/tpu_vm.sh",), "--tpu is missing"),
    (("launch/tpu_vm.sh", "--tpu=a"), "--zone is missing"),
    (("launch/tpu_vm.sh", "--tpu=a", "--zone=b"), "the experiment is missing"),
    (("launch/tpu_vm.sh", "--tpu=a", "--zone=b", "--", "gpt3"), "no experiments/gpt3.py"),
    (("launch/tpu_vm.sh", "--region=a"), "unknown option '--region=a'"),
    (("launch/slurm.sbatch",), "name an experiment"),
    (("launch/slurm.sbatch", "gpt3"), "name an experiment"),
])
def test_a_mistake_is_exit_status_2(arguments, message):
  done = _run(*arguments)
  assert done.returncode == 2 and message in done.stderr
