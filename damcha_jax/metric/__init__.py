"""The metric generator f_theta, its contexts and its views."""

from damcha_jax.metric.blocks import blocks_to_rowsum
from damcha_jax.metric.generator import MetricGenerator
from damcha_jax.metric.generator import StaticMetric

__all__ = ["MetricGenerator", "StaticMetric", "blocks_to_rowsum"]
