"""The attentions, by the names that configs use."""

from damcha_jax.attention.colmha import CollaborativeAttention
from damcha_jax.attention.damcha import DamchaAttention
from damcha_jax.attention.damcha import FutureLeakError
from damcha_jax.attention.dcmha import DynamicallyComposableAttention
from damcha_jax.attention.mha import MultiHeadAttention
from damcha_jax.attention.mma import MixedMultiHeadAttention
from damcha_jax.attention.moa import MixtureOfHeadsAttention
from damcha_jax.attention.tha import TalkingHeadsAttention

ATTENTIONS = {
    "damcha": DamchaAttention,
    "mha": MultiHeadAttention,
    "tha": TalkingHeadsAttention,
    "dcmha": DynamicallyComposableAttention,
    "colmha": CollaborativeAttention,
    "moa": MixtureOfHeadsAttention,
    "mma": MixedMultiHeadAttention,
}

__all__ = ["ATTENTIONS", "FutureLeakError", *sorted(cls.__name__ for cls in ATTENTIONS.values())]
