"""Gradients by layer and part, and the layers' contributions to a shared generator's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis import gradient_flow
from damcha_jax.training.decoder import loss_and_sums
from tests.models import decoders


def _setup(changes):
  model, params = decoders.decoder(changes)
  loss_fn = lambda params, batch, rng: loss_and_sums(model, params, batch, rng)
  tokens = decoders.TOKENS.astype(np.int32)
  batch = {"inputs": tokens, "targets": tokens, "weights": np.ones(tokens.shape, np.float32)}
  return model, loss_fn, params, batch


def _gradient(loss_fn, params, batch):
  def mean(params):
    loss, sums = loss_fn(params, batch, None)
    return loss / sums["weight"]
  return jax.device_get(jax.jit(jax.grad(mean))(params))


def _norm(*trees):
  return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(trees)))


@pytest.mark.families
def test_norms_are_those_of_the_gradients_leaves():
  _, loss_fn, params, batch = _setup({"attention": "mha"})
  found = gradient_flow.gradient_norms(loss_fn, params, batch)
  grads = _gradient(loss_fn, params, batch)
  for layer in (0, 1):
    own = grads["stack"][f"layer_{layer}"]
    attention = own["attention"]
    assert found.by_layer[layer] == pytest.approx({
        "values and output": _norm(attention["value"], attention["out"]),
        "queries, keys, mixing": _norm(attention["query"], attention["key"]),
        "feed-forward": _norm(own["mlp"]),
        "norms": _norm(own["attention_norm"], own["mlp_norm"])}, rel=1e-4)
  assert found.outside == pytest.approx({
      "norms": _norm(grads["norm"]),
      "embeddings and head": _norm(grads["embed"], grads["positions"], grads["head"])}, rel=1e-4)
  assert found.loss == pytest.approx(
      float(loss_fn(params, batch, None)[0]) / batch["weights"].sum(), rel=1e-5)


@pytest.mark.families
def test_the_gradient_of_a_layers_copy_is_that_of_its_own_generator_without_sharing():
  model, loss_fn, params, batch = _setup({})
  _, unshared_loss_fn, _, _ = _setup({"damcha.sharing": "none"})
  stack = dict(params["stack"])
  generator = stack.pop("generator")
  for layer in (0, 1):
    own = stack[f"layer_{layer}"]
    stack[f"layer_{layer}"] = {**own, "attention": {**own["attention"], "generator": generator}}
  expected = _gradient(unshared_loss_fn, {**params, "stack": stack}, batch)["stack"]
  found = jax.device_get(jax.jit(
      lambda params: gradient_flow.layer_gradients(model, loss_fn, params, batch))(params))
  for layer in (0, 1):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[layer], b, rtol=1e-3, atol=1e-6),
                 found, expected[f"layer_{layer}"]["attention"]["generator"])


@pytest.mark.families
def test_contributions_to_a_metric_that_all_layers_share_add_up_to_its_gradient():
  model, loss_fn, params, batch = _setup({"damcha.sharing": "stack"})
  whole = _gradient(loss_fn, params, batch)["stack"]["generator"]
  parts = jax.device_get(jax.jit(
      lambda params: gradient_flow.layer_gradients(model, loss_fn, params, batch))(params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a.sum(0), b, rtol=1e-3, atol=1e-6), parts,
               whole)
  found = gradient_flow.contributions(model, loss_fn, params, batch)
  flat = np.concatenate([leaf.reshape(2, -1) for leaf in jax.tree.leaves(parts)], axis=1)
  assert found.norm_N == pytest.approx(np.linalg.norm(flat, axis=1), rel=1e-4)
  assert found.total == pytest.approx(_norm(whole), rel=1e-4)


def test_agreement_of_vectors_that_are_known():
  g = np.array([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [-3.0, 0.0]])
  found = gradient_flow._agreement(g @ g.T)  # pylint: disable=protected-access
  np.testing.assert_allclose(found.norm_N, [3, 4, 0, 3])
  np.testing.assert_allclose(found.cosine_NN, [[1, 0, 0, -1], [0, 1, 0, 0], [0, 0, 0, 0],
                                               [-1, 0, 0, 1]])
  assert (found.total, found.alignment) == pytest.approx((4, 0.4))


@pytest.mark.parametrize("path, part", [
    ("stack/generator/hidden_0/kernel", "metric"),
    ("stack/layer_0/attention/generator/out_kernel", "metric"),
    ("stack/layer_0/attention/generator/metric_blocks", "metric"),
    ("stack/layer_0/attention/value/kernel", "values and output"),
    ("stack/layer_0/attention/out_kernel", "values and output"),  # of moa
    ("stack/layer_0/attention/query_kernel", "queries, keys, mixing"),
    ("stack/layer_0/attention/mix_scores", "queries, keys, mixing"),
    ("stack/layer_0/mlp/in/bias", "feed-forward"),
    ("stack/layer_0/mlp_norm/scale", "norms"),
    ("norm/scale", "norms"),
    ("embed/embedding", "embeddings and head"),
    ("patch_embed/kernel", "embeddings and head"),
])
def test_parameters_belong_to_parts(path, part):
  assert gradient_flow._part(path) == part  # pylint: disable=protected-access


def test_models_without_a_shared_generator_have_none():
  assert gradient_flow.shared_generator({"log_precision": jnp.zeros(())}) is None
  assert gradient_flow.shared_generator({"stack": {"layer_0": {}}}) is None
