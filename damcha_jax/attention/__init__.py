"""The attentions, by the names that configs use."""

from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.damcha import FutureLeakError
from damcha_jax.attention.mha import MultiHeadAttention

ATTENTIONS = {
    "damcha": DamchaAttention,
    "mha": MultiHeadAttention,
}

__all__ = ["ATTENTIONS", "DamchaAttention", "FutureLeakError", "MultiHeadAttention"]
