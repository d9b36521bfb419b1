"""What train steps of paper size exchange on 8 and on 256 devices, and how it is counted."""

import json
from pathlib import Path
import types

import pytest

from damcha_jax.analysis.collectives import Exchange, exchanges
from tiny_task import run_script

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "collectives.json").read_text())

PROGRAM = """HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %b)
}

%body (state: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %gather.1 = bf16[4,8]{1,0} all-gather(%part), replica_groups={{0,1}}, dimensions={0}
  %both = (f32[8]{0}, f32[]) all-reduce(%x, %y), replica_groups={}, to_apply=%sum
}

%condition (state: (s32[], f32[4,8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8]) while(%start), condition=%condition, body=%body, TRIPS
  %once = f32[2,8]{1,0} all-reduce-start(%z), to_apply=%sum
  ROOT %once.done = f32[2,8]{1,0} all-reduce-done(%once)
}
"""


def _exchanges(trips: str) -> dict[str, Exchange]:
  return exchanges(types.SimpleNamespace(as_text=lambda: PROGRAM.replace("TRIPS", trips)))


def test_what_a_loop_exchanges_counts_once_for_each_turn():
  assert _exchanges('backend_config={"known_trip_count":{"n":"3"}}') == {
      "all-gather": Exchange(3, 3 * 64, 3 * 64), "all-reduce": Exchange(4, 3 * 36 + 64, 3 * 36)}


def test_a_loop_of_unknown_length_is_an_error():
  with pytest.raises(ValueError, match="'body' exchanges in a loop of unknown length"):
    _exchanges("backend_config={}")


@pytest.mark.parametrize("case", [case for case in GOLDEN if case.split()[2] != "4x1x2"])
def test_parameters_and_gradients_are_exchanged_and_no_activations(case):
  """Parameters move twice, for the forward and the backward pass; gradients once.

  The embedding's gradient is exchanged in two parts, and so is that of sums over many devices.
  The generator's is exchanged in every layer (see forced_devices.py), with one part in H of what
  all its blocks take, their gradients being equal.
  """
  exchanged = GOLDEN[case]
  data, fsdp, _ = map(int, case.split()[2].split("x"))
  kinds = {"all-gather", "all-reduce"} if fsdp > 1 else {"all-reduce"}
  assert set(exchanged) == {"params_bytes", "state_share"} | kinds
  assert exchanged["state_share"] < 1.02 / fsdp
  params = exchanged["params_bytes"]
  assert exchanged["all-reduce"]["num_bytes"] < params * (1.2 if data > 1 < fsdp else 1.07)
  if fsdp > 1:
    assert exchanged["all-gather"]["num_bytes"] < 2 * params


def test_more_devices_exchange_no_more_each():
  for name in ("mix mha", "mix damcha", "cifar10 damcha"):
    few, many = GOLDEN[f"{name} 1x8x1"], GOLDEN[f"{name} 32x8x1"]
    assert many["all-gather"] == few["all-gather"]
    assert many["all-reduce"]["num_bytes"] < 1.15 * few["all-reduce"]["num_bytes"]


@pytest.mark.families
def test_the_golden_is_what_is_compiled():
  """If this is meant to change, renew the golden as forced_devices.py says."""
  done = run_script(HERE / "forced_devices.py", num_devices=256)
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == GOLDEN
