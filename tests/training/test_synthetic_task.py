"""The lanes of a synthetic cell: trained together, and yet each by itself."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from configs import synthetic
from damcha_jax.attention import ATTENTIONS
from damcha_jax.config import ConfigError, freeze
from damcha_jax.config.synthetic import SyntheticConfig
from damcha_jax.models.lookup import methods
from damcha_jax.training import synthetic as synthetic_training
from damcha_jax.training.synthetic import held_out, lane_of, lane_task, synthetic_task


def _config(**changes):
  return dataclasses.replace(freeze(synthetic.get_config("smoke"), SyntheticConfig), **changes)


def _task(attention="damcha", task="retrieval", **changes):
  return synthetic_task(_config(**changes), task, 8, attention)


def _gradient(task, params, batch):
  loss = lambda params: task.loss_fn(params, batch, None)[0]
  return jax.jit(jax.value_and_grad(loss))(params)


def _lane(tree, index):
  return jax.tree.map(lambda leaf: np.asarray(leaf[index]), tree)


@pytest.mark.families
@pytest.mark.parametrize("attention", ["damcha", "moa"])  # moa adds losses of its own
def test_a_lane_is_what_its_seed_and_entanglement_give_alone(attention):
  together = _task(attention, seeds=(4, 7), entanglements=(0.0, 1.0))
  alone = _task(attention, seeds=(7,), entanglements=(0.0, 1.0))
  results = []
  for task, lanes in ((together, (1, 3)), (alone, (0, 1))):
    params = task.init_params(jax.random.key(0))
    _, grads = _gradient(task, params, task.train_source.batch_at(2))
    results.append([_lane((params, grads), lane) for lane in lanes])
  for one, other in zip(*results):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@pytest.mark.families
def test_a_lane_by_itself_is_the_lane_of_the_whole():
  config = _config(seeds=(4, 7), entanglements=(0.0, 1.0))
  whole = synthetic_task(config, "retrieval", 8, "mha")
  lane = lane_task(config, "retrieval", 8, "mha", 1.0, 7)
  params = whole.init_params(jax.random.key(0))
  own = lane_of(config, 8, 1.0, 7, params)
  jax.tree.map(np.testing.assert_array_equal, own, lane.init_params(jax.random.key(1)))
  batch, own_batch = (task.train_source.batch_at(2) for task in (whole, lane))
  np.testing.assert_array_equal(own_batch["features"][:, 0], batch["features"][:, 3])
  sums = whole.loss_fn(params, batch, None)[1]
  loss, own_sums = lane.loss_fn(own, own_batch, None)
  assert float(loss) == pytest.approx(float(sums["nats_e1_seed7"]), rel=1e-5)
  assert own_sums["weight"] == sums["weight"] and own_sums["nats"] == loss
  assert lane.eval_loss_fn(own, own_batch)["nats"].sum() == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.families
def test_lanes_of_a_seed_start_alike_and_learn_apart():
  task = _task("mha", seeds=(4, 7))
  params = task.init_params(jax.random.key(0))
  _, grads = _gradient(task, params, task.train_source.batch_at(0))
  kernel = lambda tree, lane: np.asarray(tree["stack"]["layer_0"]["mlp"]["in"]["kernel"][lane])
  assert np.array_equal(kernel(params, 0), kernel(params, 2))
  assert not np.array_equal(kernel(params, 0), kernel(params, 1))
  assert not np.allclose(kernel(grads, 0), kernel(grads, 2))


@pytest.mark.families
def test_one_after_the_other_is_the_same_as_all_at_once(monkeypatch):
  task = _task("damcha", task="classification")
  params, batch = task.init_params(jax.random.key(0)), task.train_source.batch_at(0)
  loss, grads = _gradient(task, params, batch)
  monkeypatch.setattr(synthetic_training.jax, "default_backend", lambda: "tpu")
  other_loss, other_grads = _gradient(task, params, batch)
  np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
               grads, other_grads)


@pytest.mark.parametrize("task", ["classification", "retrieval"])
def test_the_told_control_with_the_noise_of_the_queries_is_the_optimum(task):
  config = _config(num_held_out=256)
  control = synthetic_task(config, task, 8, "told")
  noise = synthetic_training.lookup_of(config, task, 8).noise
  params = {"log_precision": np.full(4, -2 * np.log(noise), np.float32)}
  sums = control.eval_loss_fn(params, held_out(config, task, 8, "test").batch(0, 256))
  metrics = control.metrics_of({name: float(rows.sum()) for name, rows in sums.items()})
  optimum = held_out(config, task, 8, "test").optimum()
  for index, entanglement in enumerate(("e0", "e1")):
    for metric in ("accuracy", "nats_per_query"):
      assert metrics[f"{metric}_{entanglement}_seed1"] == pytest.approx(
          optimum[metric][index], abs=1e-3)


def test_padding_counts_for_nothing():
  task = _task("mha")
  params = task.init_params(jax.random.key(0))
  source = task.eval_sources["test"]
  whole = task.eval_loss_fn(params, source.batch(0, 16))
  padded = task.eval_loss_fn(params, source.batch(0, 20))
  for name, rows in whole.items():
    np.testing.assert_allclose(rows.sum(), padded[name].sum(), rtol=1e-5)


@pytest.mark.families
def test_an_attention_learns_and_what_it_learns_is_in_its_metrics():
  task = _task("mha", seeds=(0,), batch_size=64)
  params = task.init_params(jax.random.key(0))
  optimizer = optax.adam(1e-2)

  @jax.jit
  def step(params, state, batch):
    (_, sums), grads = jax.value_and_grad(task.loss_fn, has_aux=True)(params, batch, None)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, sums

  state = optimizer.init(params)
  for index in range(150):
    params, state, sums = step(params, state, task.train_source.batch_at(index))
  metrics = task.metrics_of(jax.device_get(sums))
  assert metrics["accuracy_e0_seed0"] > 0.8 > 0.5 + metrics["nats_per_query_e0_seed0"] / 10
  lanes = [metrics[f"nats_per_query_{entanglement}_seed0"] for entanglement in ("e0", "e1")]
  assert metrics["nats_per_query"] == pytest.approx(np.mean(lanes))


def test_an_attention_that_is_added_later_is_known(monkeypatch):
  monkeypatch.setitem(ATTENTIONS, "later", ATTENTIONS["mha"])
  assert _task("later").name == _task("mha").name.replace("mha", "later")


def test_what_cannot_be_built_is_named_with_the_remedy():
  with pytest.raises(ConfigError, match="unknown attention 'mah' in config key 'attentions'"):
    _task("mah")
  assert set(methods()) > {"mha", "damcha", "told"}
  config = _config()
  wide = dataclasses.replace(config.damcha, widths=(500,))
  with pytest.raises(ConfigError, match="alone has more parameters .* raise model.mlp_features"):
    _task("damcha", damcha=wide)
