"""Typed, frozen configuration: the one place where a ConfigDict becomes dataclasses.

`configs/*.py` write every value out; `freeze` turns the result into the dataclasses of this
package, which everything else takes. No field has a default: a key that is missing, unknown or of
the wrong type is a `ConfigError` that names it and, for an unknown one, the nearest valid name. What
involves several keys at once is checked when the dataclass is made.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from damcha_jax.config import conversion
from damcha_jax.config.ablations import AblationsConfig
from damcha_jax.config.conversion import ConfigError, to_dict, unknown_key_message
from damcha_jax.config.decoder import DecoderConfig, LanguageModelConfig
from damcha_jax.config.image_classification import (AugmentationConfig, ClassificationDataConfig,
                                                    ImageClassificationConfig)
from damcha_jax.config.image_generation import (ImageDataConfig, ImageGenerationConfig,
                                                ImageMetricsConfig, ImageSamplingConfig)
from damcha_jax.config.sections import (AttentionsConfig, AuthorsConfig, CheckpointConfig,
                                        ColmhaConfig, DamchaConfig, DataConfig, DcmhaConfig,
                                        EvaluationConfig, LoggingConfig, MeshConfig, MmaConfig,
                                        MoaConfig, ModelConfig, OptimizerConfig, SamplingConfig,
                                        ThaConfig, VisionModelConfig)
from damcha_jax.config.text_generation import (DecodingConfig, TextDataConfig,
                                               TextGenerationConfig, TextMetricsConfig)
from damcha_jax.config.transformer import for_any_device, TransformerConfig
from damcha_jax.config.upgrade import upgraded


def freeze(config: ConfigDict | Mapping[str, Any], cls: type = LanguageModelConfig) -> Any:
  """Turns a ConfigDict, or the contents of a `config.json`, into `cls`.

  Raises:
    ConfigError: a key is missing, unknown or of the wrong type, or values do not fit each other.
  """
  return conversion.freeze(config, cls)
