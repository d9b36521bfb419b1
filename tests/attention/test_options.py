"""Options that make no sense are refused by one line when an attention or its metric is made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from damcha_jax.attention import ATTENTIONS, DamchaAttention
from damcha_jax.metric import MetricGenerator, StaticMetric
from damcha_jax.metric.authors import AuthorsMetricGenerator

D, H = 16, 4
X = np.random.default_rng(0).normal(size=(2, 3, D)).astype(np.float32)

COUNTS = {
    "tha": ("num_key_heads", "num_softmax_heads", "num_value_heads", "key_head_features",
            "value_head_features", "query_chunk"),
    "dcmha": ("rank", "window", "query_chunk"),
    "colmha": ("key_features",),
    "moa": ("num_experts", "experts_per_token", "expert_features"),
    "authors_dcmha": ("router_rank",),
    "authors_mma": ("window",),
    "authors_moa": ("expert_factor",),
}


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("field, value, wanted", [
    *(("num_heads", value, "an integer of at least 1") for value in (0, -4, 4.0, "4", True, None)),
    ("qkv_features", 0, "an integer of at least 1, or None"),
    ("out_features", -1, "an integer of at least 1, or None"),
    *(("dropout_rate", value, "at least 0 and below 1")
      for value in (-0.1, 1.0, 2, float("nan"), "0.1", None)),
])
def test_what_attentions_have_in_common(name, field, value, wanted):
  with pytest.raises(ValueError, match=f"{field} {value!r} must be {wanted}"):
    ATTENTIONS[name](**{"num_heads": H, field: value})


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("field", ["dtype", "param_dtype"])
def test_attentions_compute_with_floating_point_numbers(name, field):
  ATTENTIONS[name](H, **{field: jnp.bfloat16})
  with pytest.raises(ValueError, match=f"{field} int32 must be a floating-point type"):
    ATTENTIONS[name](H, **{field: jnp.int32})


@pytest.mark.parametrize("name, field",
                         [(name, field) for name, fields in COUNTS.items() for field in fields])
def test_counts_of_one_attention(name, field):
  for value in (0, -2, 1.5, "2", True):
    with pytest.raises(ValueError, match=f"{field} {value!r} must be an integer of at least 1"):
      ATTENTIONS[name](H, **{field: value})


@pytest.mark.parametrize("make, message", [
    (lambda: DamchaAttention(H, stride=1.5), "stride 1.5 must be an integer of at least 1"),
    (lambda: DamchaAttention(H, stride=0), "stride 0 must be an integer of at least 1"),
    (lambda: DamchaAttention(H, form="full_width", update_rank=-1), "update_rank -1 must be"),
    (lambda: DamchaAttention(H, generator=MetricGenerator), "must be a module, such as"),
    (lambda: ATTENTIONS["moa"](H, z_coefficient=-1.0), "z_coefficient -1.0 must be a finite"),
    (lambda: ATTENTIONS["moa"](H, switch_coefficient=float("inf")), "of at least 0"),
    (lambda: ATTENTIONS["moa"](H, experts_per_token=9), "exceeds num_experts 8; choose"),
    (lambda: ATTENTIONS["mma"](H, local_window=-1), "local_window -1 must be .* at least 0"),
    (lambda: ATTENTIONS["mma"](H, local_window=1.5), "local_window 1.5 must be"),
    (lambda: ATTENTIONS["mma"](H, groups=(0, 1, 2, 3)), "must hold each of global"),
])
def test_options_of_one_attention(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize("make, message", [
    *((functools.partial(cls, value, *more), f"num_heads {value!r} must be an integer")
      for cls, more in (
          (MetricGenerator, ()), (StaticMetric, (D,)), (AuthorsMetricGenerator, ((),)))
      for value in (0, -1, 2.0)),
    *((functools.partial(cls, H, widths), "must be a tuple of integers")
      for cls in (MetricGenerator, AuthorsMetricGenerator)
      for widths in ((8, 0), (-1,), (8.0,), 8, "8")),
    (lambda: MetricGenerator(H, row_features=0), "row_features 0 must be"),
    (lambda: MetricGenerator(H, dtype=jnp.int8), "dtype int8 must be a floating-point type"),
    (lambda: StaticMetric(H, 18), "num_heads 4 does not divide the metric's width 18"),
    (lambda: StaticMetric(H, D, "sum"), "parameterization 'sum' is not one of"),
    (lambda: AuthorsMetricGenerator(H, (), num_layers=0), "num_layers 0 must be"),
    (lambda: AuthorsMetricGenerator(H, (), dropout_rate=1.5), "dropout_rate 1.5 must be"),
    (lambda: AuthorsMetricGenerator(H, (), diagonal_scale=float("nan")), "a finite number"),
    (lambda: AuthorsMetricGenerator(H, (), alpha_std=-0.1), "alpha_std -0.1 must be"),
])
def test_options_of_metrics(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize("generator, told", [
    (lambda: MetricGenerator(2), "2 heads of width 8"),
    (lambda: MetricGenerator(2, parameterization="blocks"), "2 heads of width 8"),
    (lambda: MetricGenerator(8), "8 heads of width 2"),
    (lambda: MetricGenerator(H, row_features=D, column_features=D), "4 heads of width 16"),
    (lambda: StaticMetric(2, D), "2 heads of width 8"),
    (lambda: StaticMetric(H, 2 * D), "4 heads of width 8"),
    (lambda: AuthorsMetricGenerator(2, (4,)), "2 heads of width 8"),
])
@pytest.mark.parametrize("context", ["prefix", "learned"])
def test_a_generator_for_other_heads_is_refused(generator, told, context):
  attention = DamchaAttention(H, generator=generator(), context=context)
  message = f"the metric is for {told}, but the attention has 4 of width 4; give its generator"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(attention.init, jax.random.key(0), X)


@pytest.mark.parametrize("options", [dict(num_heads=2, column_features=3),
                                     dict(num_heads=H, column_features=5)])
def test_a_generator_for_another_update_is_refused(options):
  generator = MetricGenerator(row_features=D, **options)
  attention = DamchaAttention(H, form="full_width", update_rank=3, generator=generator)
  with pytest.raises(ValueError, match="column_features=3 and num_heads=4"):
    jax.eval_shape(attention.init, jax.random.key(0), X)


def test_full_width_attends_to_keys_of_another_width():
  attention = DamchaAttention(H, form="full_width", update_rank=3)
  keys = np.ones((2, 5, D + 8), np.float32)
  assert attention.init_with_output(jax.random.key(0), X, keys)[0].shape == X.shape


def test_a_cache_of_another_batch_size_is_named():
  for name in ("damcha", "mha", "mma"):
    module = ATTENTIONS[name](H, decode=True, causal=True)
    variables = module.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="initialised for batch size 2, not 1"):
      module.apply(variables, X[:1, :1], mutable=["cache"])


def test_a_mask_may_be_a_list():
  attention = ATTENTIONS["mha"](H)
  variables = attention.init(jax.random.key(0), X)
  rows = np.tril(np.ones((3, 3), bool))
  np.testing.assert_array_equal(attention.apply(variables, X, mask=rows.tolist()),
                                attention.apply(variables, X, mask=rows))
