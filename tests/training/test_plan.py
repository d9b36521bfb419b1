"""Plans: what fits a device, what does not and why, and how long it may take."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from configs import mix
from damcha_jax.config import ConfigError, freeze, LanguageModelConfig
from damcha_jax.training.devices import KINDS, parse_devices
from damcha_jax.training.plan import check_fits, Plan, plan_run
from experiments import plan

ROOT = Path(__file__).parents[2]
GIB = 2**30
PLAN = Plan(num_params=10**9, state_bytes=12 * 10**9, state_bytes_per_device=12 * GIB,
            params_bytes_per_device=4 * GIB, peak_bytes_per_device=18 * GIB,
            flops_per_step=197 * 10**12, num_steps=100)


def test_devices_are_a_kind_and_a_number():
  assert parse_devices("a100_80gb-16") == (KINDS["a100_80gb"], 16)
  for kind in KINDS.values():
    assert 1e14 < kind.peak_flops < 1e15


@pytest.mark.parametrize("text, message", [
    ("v5e", "no kind and number of devices, such as v5e-64"),
    ("v5e-0", "no kind and number"),
    ("v5-8", "unknown kind 'v5'; choose from v4, v5e"),
    ("v5e-4097", "at most 4096 devices"),
    ("v5e-\N{ARABIC-INDIC DIGIT EIGHT}", "no kind and number"),
])
def test_other_devices_are_an_error(text, message):
  with pytest.raises(ConfigError, match=message):
    parse_devices(text)


@pytest.mark.parametrize("arguments, message", [
    (["--num_devices=0"], r"num_devices=0.*\[1, 4096\]"),
    (["--num_devices=100000"], "num_devices=100000"),
    (["--num_devices=x"], "num_devices=x"),
    (["--num_devices"], "num_devices"),
    (["--devices"], "devices"),
    (["--devices=v5e-8", "--num_devices=4"], "leave out --num_devices"),
])
def test_an_option_that_cannot_be_understood_is_an_error(arguments, message):
  with pytest.raises(ConfigError, match=message):
    plan.parse(["plan", f"--config={ROOT}/configs/mix.py:smoke", *arguments])


def test_help_tells_the_options_of_the_planner():
  done = subprocess.run([sys.executable, "-m", "experiments.plan", "--help"], cwd=ROOT,
                        capture_output=True, text=True, check=True)
  assert done.stdout.startswith("What every attention of an experiment needs")
  assert "--devices:" in done.stdout and "--num_devices:" in done.stdout


def test_a_step_takes_the_longer_the_smaller_the_share_of_the_peak():
  fast, slow = PLAN.step_seconds(KINDS["v5e"], 2)
  assert (fast, slow) == pytest.approx((1.0, 1 / 0.3))


def test_what_does_not_fit_names_the_quantity_and_a_remedy():
  check_fits("mha", PLAN, KINDS["v6e"])
  with pytest.raises(ConfigError, match=r"^mha needs 18.0 GiB on each device, 16.0 GiB of it for "
                                        r"parameters, gradients and optimizer state, and v5e has "
                                        r"14.4 GiB .*; use a larger mesh.fsdp, or more devices"):
    check_fits("mha", PLAN, KINDS["v5e"])
  smaller = PLAN._replace(state_bytes_per_device=3 * GIB, params_bytes_per_device=GIB)
  with pytest.raises(ConfigError, match="14.0 GiB of it for activations.*use model.remat=True, a "
                                        "larger optimizer.accumulation_steps, or more devices"):
    check_fits("mha", smaller, KINDS["v5e"])


def test_attentions_in_chunks_are_named_and_a_plan_without_a_kind_says_what_it_lacks():
  config, _ = plan.parse(["plan", f"--config={ROOT}/configs/cifar10.py"])
  models = {name: (config, name) for name in ("mha", "tha", "damcha", "dcmha")}
  (line,) = plan._about_activations(models)
  assert line.startswith("tha, dcmha: attention weights are made for 128 queries at a time")
  short, _ = plan.parse(["plan", f"--config={ROOT}/configs/cifar10.py:smoke"])  # of 64 tokens
  assert not list(plan._about_activations({"tha": (short, "tha")}))

  tiny = f"--config={ROOT}/configs/mix.py:smoke"
  done = subprocess.run([sys.executable, "-m", "experiments.plan", tiny, "--config.attentions=mha"],
                        cwd=ROOT, capture_output=True, text=True, check=True)
  assert "--devices=v5e-8, tells what a whole step needs" in done.stdout and not done.stderr


def _plan(**model):
  config = mix.get_config("smoke").unlock()
  config.model.update(**{"num_layers": 4, **model})
  return plan_run(freeze(config, LanguageModelConfig), "mha", jax.devices()[:1], with_peak=True)


def test_attention_of_another_kind_of_device_is_planned_as_it_would_be_here():
  config = mix.get_config("smoke").unlock()
  config.context_length = 128  # a multiple of the kernel's blocks
  plans = []
  for implementation in ("auto", "pallas"):
    config.model.attention_implementation = implementation
    plans.append(plan_run(freeze(config, LanguageModelConfig), "mha", jax.devices()[:1]))
  assert plans[0] == plans[1]


@pytest.mark.parametrize("implementation, kind, wrong", [
    ("pallas", "v5e", "h100"), ("cudnn", "h100", "v5e")])
def test_kernels_that_a_kind_of_device_lacks_are_refused(implementation, kind, wrong):
  config, _ = plan.parse(["plan", f"--config={ROOT}/configs/mix.py", "--config.attentions=mha",
                          f"--config.model.attention_implementation={implementation}"])
  models = {"mha": (config, "mha")}
  plan._check_kernels(models, KINDS[kind])
  (line,) = plan._about_kernels(models, KINDS[kind])
  assert line.startswith(f"mha: the kernel that {kind} would run needs less")
  with pytest.raises(ConfigError, match=f"mha: .*='{implementation}' is for .*, not for {wrong}; "
                                        "use 'auto'"):
    plan._check_kernels(models, KINDS[wrong])


@pytest.mark.families
def test_the_peak_is_the_state_and_what_training_keeps_of_every_layer():
  plain, remat = _plan(scan_layers=True), _plan(scan_layers=True, remat=True)
  assert plain.state_bytes == 3 * plain.params_bytes_per_device + 12  # three counters
  assert plain.peak_bytes_per_device > plain.state_bytes + plain.params_bytes_per_device
  # 8 rows of 64 tokens; the weights of 4 heads alone are [8, 4, 64, 64] in every layer.
  assert plain.activation_bytes_per_device > 4 * 4 * 8 * 4 * 64 * 64
  assert remat.activation_bytes_per_device < 0.6 * plain.activation_bytes_per_device


@pytest.mark.families
@pytest.mark.parametrize("rows, status", [(64, 0), (512, 2)])
def test_the_command_refuses_what_cannot_fit(rows, status):
  done = subprocess.run(
      [sys.executable, "-m", "experiments.plan", "--config=configs/mix.py", "--devices=v5e-8",
       "--config.attentions=damcha", f"--config.batch_size={rows}"],
      cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == status, done.stderr
  assert "v5e: 16 GiB and 197 TFLOP/s each" in done.stdout and "damcha" in done.stdout
  if status:
    progress, error = done.stderr.splitlines()
    assert progress == "note: damcha, 1 of 1: compiling a step"
    assert error.startswith("error: damcha needs ")
    assert "for activations" in error and "model.remat=True" in error
