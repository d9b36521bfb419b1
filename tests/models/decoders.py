"""Small decoders in every mode of the attentions, for tests."""

import functools

import jax.numpy as jnp
import numpy as np

from configs import mix
from damcha_jax.analysis.causality import random_variables
from damcha_jax.config import freeze
from damcha_jax.models.decoder import make_decoder

VOCAB, CONTEXT_LENGTH = 17, 16
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, CONTEXT_LENGTH))

# Name -> changes to the config; the attention is DAMCHA unless 'attention' says otherwise.
MODES = {
    "damcha": {},
    "mha": {"attention": "mha"},
    "mha_sinusoidal_post": {"attention": "mha", "model.positions": "sinusoidal",
                            "model.norm_placement": "post", "model.tie_embeddings": False},
    "stride_1": {"damcha.stride": 1},
    "stride_16": {"damcha.stride": 16},
    "learned": {"damcha.context": "learned"},
    "stack": {"damcha.sharing": "stack"},
    "none": {"damcha.sharing": "none"},
    "none_blocks_scan": {"damcha.sharing": "none", "damcha.parameterization": "blocks",
                         "model.scan_layers": True},
    "scan": {"model.scan_layers": True},
    "stack_scan": {"damcha.sharing": "stack", "model.scan_layers": True},
    "static": {"damcha.metric": "static"},
    "robust": {"damcha.preset": "robust"},
    "full_width": {"damcha.form": "full_width", "damcha.update_rank": 2},
    "full_width_stack": {"damcha.form": "full_width", "damcha.sharing": "stack"},
    "full_width_static": {"damcha.form": "full_width", "damcha.update_rank": 0},
    "bfloat16": {"model.dtype": "bfloat16"},
}


def config(changes):
  """Two layers, two heads, width 8, stride 3, in float32; with `changes` by dotted key."""
  values = mix.get_config("smoke")
  values.unlock()
  values.context_length = CONTEXT_LENGTH
  values.model.update(num_layers=2, num_heads=2, features=8, mlp_features=16, vocab_size=VOCAB)
  values.damcha.update(stride=3, widths=(6, 6))
  for key, value in changes.items():
    *sections, name = key.split(".")
    section = functools.reduce(lambda node, part: node[part], sections, values)
    with section.ignore_type():
      section[name] = value
  return freeze(values)


def decoder(changes, *, decode=False, std=0.3):
  """The model in one mode, and random parameters of which none is zero, in their true shapes."""
  changes = dict(changes)
  attention = changes.pop("attention", "damcha")
  frozen = config(changes)
  tokens = jnp.zeros((1, 4), jnp.int32)
  params = random_variables(make_decoder(frozen, attention), tokens, std=std)["params"]
  return make_decoder(frozen, attention, decode=decode), params
