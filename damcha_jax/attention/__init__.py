"""The attentions, by the names that configs use."""

from damcha_jax.attention.authors import AuthorsColMHA
from damcha_jax.attention.authors import AuthorsDCMHA
from damcha_jax.attention.authors import AuthorsMMA
from damcha_jax.attention.authors import AuthorsMoA
from damcha_jax.attention.authors import AuthorsTHA
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
    "authors_tha": AuthorsTHA,
    "authors_dcmha": AuthorsDCMHA,
    "authors_colmha": AuthorsColMHA,
    "authors_moa": AuthorsMoA,
    "authors_mma": AuthorsMMA,
}

__all__ = ["ATTENTIONS", "FutureLeakError", *sorted(cls.__name__ for cls in ATTENTIONS.values())]
