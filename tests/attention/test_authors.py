"""What is particular to the authors' versions of the comparators: how they start, what they see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.analysis import causality
from damcha_jax.attention import ATTENTIONS, FutureLeakError

B, T, D, H = 2, 6, 16, 4
X = np.random.default_rng(3).normal(size=(B, T, D)).astype(np.float32)


def _make(name, **fields):
  return ATTENTIONS[f"authors_{name}"](H, **{"causal": True, **fields})


def _init(module):
  return jax.jit(module.init)(jax.random.key(0), X)["params"]


def test_parameters():
  """D = 512, H = 8: 4 D^2 + 4 D, and what each adds; of MoA E (3 D K + D + 1) + D^2 + D."""
  def count(name):
    init = lambda: ATTENTIONS[name](8).init(jax.random.key(0), jnp.zeros((1, 2, 512)))
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(init)["params"]))

  mha = 4 * 512**2 + 4 * 512
  assert count("authors_tha") == mha + 2 * 8**2
  assert count("authors_dcmha") == mha + (512 * 4 + 4) + (4 * 64 + 64) + (512 * 8 + 8)
  assert count("authors_colmha") == mha - 2 * 512 + 2 * 8**2
  assert count("authors_mma") == mha
  assert count("authors_moa") == 16 * (3 * 512 * 64 + 512 + 1) + 512**2 + 512


def test_talking_heads_start_as_multi_head_attention():
  params = _init(_make("tha"))
  mixers = [params.pop("mix_scores"), params.pop("mix_weights")]
  y = jax.jit(_make("tha").apply)(
      {"params": {**params, "mix_scores": mixers[0], "mix_weights": mixers[1]}}, X)
  expected = jax.jit(ATTENTIONS["mha"](H, causal=True).apply)({"params": params}, X)
  np.testing.assert_allclose(y, expected, atol=1e-6)


def test_initial_values():
  combine = _init(_make("colmha"))["combine_key"]
  assert 1e-3 < np.abs(combine - np.eye(H)).max() < 0.05
  key = _init(_make("moa"))["key"]
  bound = np.sqrt(6 / (2 * H * D + D // H))
  assert 0.9 * bound < np.abs(key).max() <= bound


def test_heads_of_mma_see_their_part():
  """Weights [H, T, S] of queries 1 and 4, by what they see."""
  def seen(**fields):
    module = _make("mma", window=2, **fields)
    variables = causality.random_variables(module, X)
    run = lambda x: module.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    _, state = jax.jit(run)(X)
    weights = state["intermediates"]["attention_weights"][0][0]
    return [[np.flatnonzero(weights[head, t]).tolist() for t in (1, 4)] for head in range(H)]

  past = [[0, 1], [0, 1, 2, 3, 4]]
  assert seen() == [past, [[0, 1], [3, 4]], past, [[1], [4]]]
  future = [[1, 2, 3, 4, 5], [4, 5]]
  for fields in (dict(causal=False), dict(allow_future_leak=True)):
    assert seen(**fields) == [past, [[0, 1], [3, 4]], past, future]


def test_the_first_code_s_leak_is_caught_and_cannot_decode():
  leaking = _make("mma", allow_future_leak=True)
  report = causality.audit_module(leaking, X, forms=["perturbation"], num_perturbations=1)
  assert not report.is_causal
  with pytest.raises(FutureLeakError, match="cannot decode"):
    _make("mma", allow_future_leak=True, decode=True)
  with pytest.raises(ValueError, match="window 0 must be an integer of at least 1"):
    _make("mma", window=0)
  with pytest.raises(ValueError, match="within one sequence"):
    jax.eval_shape(lambda: _make("mma", causal=None).init(jax.random.key(0), X, X[:, :3]))


def test_moa_takes_the_experts_that_the_router_prefers():
  module = _make("moa")
  variables = causality.random_variables(module, X)
  run = lambda params, x: module.apply({"params": params}, x, mutable=["intermediates"])
  y, state = jax.jit(run)(variables["params"], X)
  experts, gates = (state["intermediates"][name][0] for name in ("top_experts", "gates"))
  router = variables["params"]["router"]
  logits = X @ router["kernel"] + router["bias"]
  order = np.argsort(-logits, -1)[..., :H]
  np.testing.assert_array_equal(experts, order)
  np.testing.assert_allclose(
      gates, jax.nn.softmax(np.take_along_axis(np.asarray(logits), order, -1)), atol=1e-6)
  # An expert that no token of the first row chose has no part in that row's output.
  idle = sorted(set(range(2 * H)) - set(np.unique(experts[0])))
  silenced = {**variables["params"], "value": variables["params"]["value"].at[np.array(idle, int)]
              .set(0.0)}
  np.testing.assert_array_equal(jax.jit(run)(silenced, X)[0][0], y[0])
