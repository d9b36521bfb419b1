"""BART, and BARTScore: how likely it finds a text given another one.

The model is read from a directory as Hugging Face lays it out: config.json, model.safetensors and a
tokenizer. Layers normalize after the residual sum, and positions start at 2 in their table.

Axes: N pairs, B batch, T target, S source, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
from pathlib import Path
import re
from typing import Any, NamedTuple, Optional

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from damcha_jax.evaluation import published
from damcha_jax.evaluation.report import MetricError
from damcha_jax.evaluation.published import WeightsError
from damcha_jax.files import expanded
from damcha_jax.interop import tensor_files

Array = jax.Array

_POSITION_OFFSET = 2  # rows of the position table that stand for nothing
_LARGEST = 2**20  # size of anything
_SHORTEST = 32  # lengths are padded to powers of two from here, so that few programs are compiled
# The one embedding, and other names under which files hold it, too or instead.
_SHARED = "model.shared.weight"
_COPIES = ("lm_head.weight", "model.encoder.embed_tokens.weight",
           "model.decoder.embed_tokens.weight")


@dataclasses.dataclass(frozen=True)
class BartConfig:
  """What config.json says of the model, under its own names."""

  vocab_size: int
  d_model: int
  encoder_layers: int
  decoder_layers: int
  encoder_attention_heads: int
  decoder_attention_heads: int
  encoder_ffn_dim: int
  decoder_ffn_dim: int
  max_position_embeddings: int
  pad_token_id: int
  bos_token_id: int
  eos_token_id: int
  decoder_start_token_id: int
  scale_embedding: bool


def _dense(features: int, name: str) -> nn.Dense:
  return nn.Dense(features, precision=lax.Precision.HIGHEST, kernel_init=nn.initializers.zeros,
                  name=name)


def _layer_norm(name: str) -> nn.LayerNorm:
  return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)


class _Attention(nn.Module):
  """Scaled dot-product attention; mask [B, 1, 1 or T, S] is true where a query may look."""

  num_heads: int

  @nn.compact
  def __call__(self, x_BTD: Array, y_BSD: Array, mask: Array) -> Array:
    features = x_BTD.shape[-1]
    heads = lambda z: z.reshape(*z.shape[:2], self.num_heads, features // self.num_heads)
    q_BTHK = heads(_dense(features, "q_proj")(x_BTD))
    k_BSHK = heads(_dense(features, "k_proj")(y_BSD))
    v_BSHK = heads(_dense(features, "v_proj")(y_BSD))
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, precision=lax.Precision.HIGHEST)
    scores_BHTS = scores_BHTS / np.sqrt(features // self.num_heads)
    weights_BHTS = nn.softmax(jnp.where(mask, scores_BHTS, jnp.finfo(scores_BHTS.dtype).min))
    y_BTHK = jnp.einsum("BHTS,BSHK->BTHK", weights_BHTS, v_BSHK, precision=lax.Precision.HIGHEST)
    return _dense(features, "out_proj")(y_BTHK.reshape(x_BTD.shape))


class _Layer(nn.Module):
  """One layer; of a decoder if it is given what an encoder made. Returns a pair, for the scan."""

  num_heads: int
  mlp_features: int

  @nn.compact
  def __call__(self, x_BTD: Array, mask: Array, encoded_BSD: Optional[Array] = None,
               encoded_mask: Optional[Array] = None) -> tuple[Array, None]:
    attended_BTD = _Attention(self.num_heads, name="self_attn")(x_BTD, x_BTD, mask)
    x_BTD = _layer_norm("self_attn_layer_norm")(x_BTD + attended_BTD)
    if encoded_BSD is not None:
      attended_BTD = _Attention(self.num_heads, name="encoder_attn")(
          x_BTD, encoded_BSD, encoded_mask)
      x_BTD = _layer_norm("encoder_attn_layer_norm")(x_BTD + attended_BTD)
    hidden_BTF = nn.gelu(_dense(self.mlp_features, "fc1")(x_BTD), approximate=False)
    x_BTD = x_BTD + _dense(x_BTD.shape[-1], "fc2")(hidden_BTF)
    return _layer_norm("final_layer_norm")(x_BTD), None


class _Stack(nn.Module):
  """Encoder or decoder: positions, normalization and layers."""

  num_layers: int
  num_heads: int
  mlp_features: int
  max_positions: int

  @nn.compact
  def __call__(self, x_BTD: Array, *layer_inputs: Array) -> Array:
    num_positions, features = x_BTD.shape[1:]
    table = nn.Embed(self.max_positions + _POSITION_OFFSET, features, name="embed_positions")
    x_BTD = x_BTD + table(np.arange(num_positions) + _POSITION_OFFSET)
    x_BTD = _layer_norm("layernorm_embedding")(x_BTD)
    # A scan, since the program is compiled for many lengths.
    layers = nn.scan(_Layer, variable_axes={"params": 0}, split_rngs={"params": True},
                     in_axes=nn.broadcast, length=self.num_layers)
    return layers(self.num_heads, self.mlp_features, name="layers")(x_BTD, *layer_inputs)[0]


class Bart(nn.Module):
  """Source tokens, their mask and the decoder's inputs -> logits [B, T, V]."""

  config: BartConfig

  @nn.compact
  def __call__(self, source_BS: Array, source_mask_BS: Array, inputs_BT: Array) -> Array:
    c = self.config
    shared = nn.Embed(c.vocab_size, c.d_model, embedding_init=nn.initializers.zeros, name="shared")
    scale = c.d_model**0.5 if c.scale_embedding else 1.0
    source_mask = source_mask_BS[:, None, None, :]
    encoder = _Stack(c.encoder_layers, c.encoder_attention_heads, c.encoder_ffn_dim,
                     c.max_position_embeddings, name="encoder")
    encoded_BSD = encoder(scale * shared(source_BS), source_mask)
    causal = nn.make_causal_mask(inputs_BT, dtype=bool)
    decoder = _Stack(c.decoder_layers, c.decoder_attention_heads, c.decoder_ffn_dim,
                     c.max_position_embeddings, name="decoder")
    y_BTD = decoder(scale * shared(inputs_BT), causal, encoded_BSD, source_mask)
    bias_1V = self.param("final_logits_bias", nn.initializers.zeros, (1, c.vocab_size))
    logits_BTV = jnp.einsum("BTD,VD->BTV", y_BTD, shared.embedding,
                            precision=lax.Precision.HIGHEST)
    return logits_BTV + bias_1V


def read_config(directory: str | Path) -> BartConfig:
  """config.json of a directory.

  Raises:
    WeightsError: it is missing, damaged, or of another architecture.
  """
  path = expanded(directory) / "config.json"
  try:
    contents = json.loads(path.read_text(encoding="utf-8"))
    kind, activation = contents.get("model_type"), contents.get("activation_function")
    names = [field.name for field in dataclasses.fields(BartConfig)]
    config = BartConfig(**{name: contents[name] for name in names})
    _check(config)
  except OSError as error:
    raise WeightsError(f"{path} cannot be read: {error.strerror or error};"
                       f" {published.how_to_get(published.BART)}") from error
  except (AttributeError, RecursionError, ValueError) as error:
    raise WeightsError(f"{path} is damaged: {error}") from error
  except KeyError as error:
    raise WeightsError(f"{path} is not of a BART: it lacks {error}") from error
  if kind != "bart" or activation != "gelu" or contents.get("normalize_before"):
    raise WeightsError(f"{path} is of a {kind} with {activation}, not of a BART with gelu that"
                       " normalizes after each sum, such as facebook/bart-large-cnn")
  return config


def _check(config: BartConfig) -> None:
  """Raises ValueError for what no model can have."""
  for name, value in dataclasses.asdict(config).items():
    kind = bool if name == "scale_embedding" else int
    if type(value) is not kind:
      raise ValueError(f"it has {name}={value!r}, which is no {kind.__name__}")
    first = 0 if name.endswith("_token_id") else 1
    limit = config.vocab_size if name.endswith("_token_id") else _LARGEST + 1
    if kind is int and not first <= value < limit:
      raise ValueError(f"it has {name}={value}, which is not from {first} to {limit - 1}")
  for name in ("encoder_attention_heads", "decoder_attention_heads"):
    if config.d_model % getattr(config, name):
      raise ValueError(f"it has {name}={getattr(config, name)}, which do not divide "
                       f"d_model={config.d_model}")


def load_params(directory: str | Path, config: BartConfig) -> dict[str, Any]:
  """The parameters of `Bart` in a directory's model.safetensors.

  Raises:
    UserError: the file is missing, damaged or of another model.
  """
  path = expanded(directory) / published.BART.file_name
  arrays = _complete(tensor_files.read_tensors(path), config)
  rename = lambda name: name if name == "final_logits_bias" else f"model.{name}"
  return published.fill(path, _stack_layers(path, arrays), abstract_params(config), rename)


def abstract_params(config: BartConfig) -> dict[str, Any]:
  """Shapes of the model's parameters, those of all layers stacked."""
  tokens_11 = jnp.zeros((1, 1), jnp.int32)
  init_fn = Bart(config).init
  return jax.eval_shape(init_fn, jax.random.key(0), tokens_11, tokens_11 > 0, tokens_11)["params"]


def _complete(arrays: Mapping[str, np.ndarray], config: BartConfig) -> dict[str, np.ndarray]:
  """Every tensor once, under the name that BartForConditionalGeneration has for it.

  Published files differ: some hold the embedding under several names or another one, some leave out
  the bias of the logits, which is zero, some are of the model without its head.
  """
  outside = ("model.", "lm_head.", "final_logits_bias")
  if not any(name.startswith("model.") for name in arrays):
    arrays = {name if name.startswith(outside) else f"model.{name}": array
              for name, array in arrays.items()}
  complete = {name: array for name, array in arrays.items()
              if name not in _COPIES and not name.endswith(".version")}
  for name in _COPIES:
    if name in arrays:
      complete.setdefault(_SHARED, arrays[name])
  complete.setdefault("final_logits_bias", np.zeros((1, config.vocab_size), np.float32))
  return complete


def _stack_layers(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """`layers.0.x`, `layers.1.x`, .. as one array `layers.x`."""
  stacked, layers = {}, {}
  for name, array in arrays.items():
    if match := re.fullmatch(r"(.*\.layers)\.(\d+)\.(.*)", name):
      layers.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
    else:
      stacked[name] = array
  for name, by_index in layers.items():
    if sorted(by_index) != list(range(len(by_index))) or len(
        {array.shape for array in by_index.values()}) > 1:
      raise WeightsError(f"{path} holds another model: its layers differ in {name}")
    stacked[name] = np.stack([by_index[index] for index in range(len(by_index))])
  return stacked


class Scores(NamedTuple):
  """Scores of N pairs, and what they must be read with."""

  values_N: np.ndarray
  notes: tuple[str, ...]


class BartScorer:
  """Pairs of texts -> mean log p(target | source) over all target tokens, <s> and </s> included."""

  def __init__(self, directory: str | Path, *, batch_size: int = 16,
               allow_other_weights: bool = False):
    """Reads the model.

    Args:
      directory: with config.json, model.safetensors and tokenizer.json (or vocab.json and
        merges.txt).
      batch_size: pairs per call.
      allow_other_weights: also take a model other than the one BARTScore was published with.

    Raises:
      UserError: a file is missing, damaged, or not the published one.
    """
    directory = expanded(directory)
    self.config = read_config(directory)
    path = directory / published.BART.file_name
    published.require_file(path, published.BART)
    self.weights_sha256 = published.file_sha256(path)
    published.require_published(path, self.weights_sha256, published.BART, allow_other_weights)
    self._tokenizer = load_tokenizer(directory)
    self._params = load_params(directory, self.config)
    self._batch_size = batch_size
    self._score_fn = jax.jit(self._mean_log_prob)

  def score(self, sources: Sequence[str], targets: Sequence[str]) -> Scores:
    """log p(target | source) / tokens of the target, in nats, [N].

    Texts longer than the model's positions (1024) are cut, which the notes count.

    Raises:
      MetricError: no pairs, or not as many targets as sources.
    """
    if not len(sources) or len(sources) != len(targets):
      raise MetricError(f"{len(sources)} sources and {len(targets)} targets do not make pairs")
    source_tokens, long_sources = self.encode(sources)
    target_tokens, long_targets = self.encode(targets)
    notes = tuple(
        f"{count} of {len(sources)} {kind} were cut to {self.config.max_position_embeddings} tokens"
        for kind, count in (("sources", long_sources), ("targets", long_targets)) if count
    )
    groups: dict[tuple[int, int], list[int]] = {}
    for index, pair in enumerate(zip(source_tokens, target_tokens)):
      groups.setdefault(tuple(self._padded(len(tokens)) for tokens in pair), []).append(index)
    values_N = np.empty(len(sources))
    for (source_length, target_length), members in sorted(groups.items()):
      for start in range(0, len(members), self._batch_size):
        batch = members[start : start + self._batch_size]
        source_BS = self._rows([source_tokens[index] for index in batch], source_length)
        target_BT = self._rows([target_tokens[index] for index in batch], target_length)
        scores_B = self._score_fn(self._params, *source_BS, *target_BT)
        values_N[batch] = np.asarray(scores_B)[: len(batch)]
    return Scores(values_N, notes)

  def encode(self, texts: Sequence[str]) -> tuple[list[list[int]], int]:
    """Tokens of each text from <s> to </s>, and how many texts were cut.

    Raises:
      MetricError: the tokenizer is of another model.
    """
    longest, num_cut, tokens = self.config.max_position_embeddings, 0, []
    for text, encoding in zip(texts, self._tokenizer.encode_batch(list(texts))):
      ids = encoding.ids
      if ids[:1] != [self.config.bos_token_id] or ids[-1:] != [self.config.eos_token_id]:
        raise MetricError("the tokenizer does not put <s> and </s> around a text; take the"
                          " tokenizer.json that belongs to the model")
      if max(ids) >= self.config.vocab_size:
        raise MetricError(f"the text {text[:40]!r} has token {max(ids)}, and the model knows"
                          f" {self.config.vocab_size}; take the tokenizer.json that belongs to it")
      if len(ids) > longest:
        ids, num_cut = ids[: longest - 1] + ids[-1:], num_cut + 1
      tokens.append(ids)
    return tokens, num_cut

  def _padded(self, length: int) -> int:
    padded = _SHORTEST
    while padded < length:
      padded *= 2
    return min(padded, self.config.max_position_embeddings)

  def _rows(self, tokens: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their mask, [batch_size, length]; rows beyond the given ones are all padding."""
    rows = np.full((self._batch_size, length), self.config.pad_token_id, np.int32)
    mask = np.zeros((self._batch_size, length), bool)
    for row, ids in enumerate(tokens):
      rows[row, : len(ids)], mask[row, : len(ids)] = ids, True
    return rows, mask

  def _mean_log_prob(self, params: Any, source_BS: Array, source_mask_BS: Array,
                     target_BT: Array, target_mask_BT: Array) -> Array:
    # The decoder starts from </s>, so <s> is predicted like any other token.
    inputs_BT = jnp.roll(target_BT, 1, axis=1).at[:, 0].set(self.config.decoder_start_token_id)
    logits_BTV = Bart(self.config).apply({"params": params}, source_BS, source_mask_BS, inputs_BT)
    chosen_BT = jnp.take_along_axis(logits_BTV, target_BT[..., None], -1)[..., 0]
    log_probs_BT = chosen_BT - nn.logsumexp(logits_BTV, -1)
    sums_B = jnp.where(target_mask_BT, log_probs_BT, 0).sum(-1)
    return sums_B / jnp.maximum(target_mask_BT.sum(-1), 1)


def load_tokenizer(directory: str | Path) -> Any:
  """The byte-level BPE of a directory, without padding or truncation.

  Raises:
    WeightsError: its files are missing or damaged, or the tokenizers package is.
  """
  directory = expanded(directory)
  try:
    import tokenizers
  except ImportError as error:
    raise WeightsError("BARTScore needs the tokenizers package; run"
                       " pip install 'damcha-jax[generation]'") from error
  whole, parts = directory / "tokenizer.json", [directory / "vocab.json", directory / "merges.txt"]
  if not whole.exists() and not all(part.exists() for part in parts):
    raise WeightsError(f"{directory} has neither tokenizer.json nor vocab.json and merges.txt;"
                       f" {published.how_to_get(published.BART)}")
  try:
    if whole.exists():
      tokenizer = tokenizers.Tokenizer.from_file(str(whole))
      tokenizer.no_padding()
      tokenizer.no_truncation()
      return tokenizer
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*map(str, parts)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = tokenizer.get_vocab()
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    tokenizer.add_special_tokens([token for token in special if token in vocabulary])
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
        ("</s>", vocabulary["</s>"]), ("<s>", vocabulary["<s>"]), trim_offsets=False,
        add_prefix_space=False)
    return tokenizer
  except Exception as error:  # the package raises plain Exception
    first = (str(error).strip().splitlines() or [""])[0]
    raise WeightsError(f"the tokenizer in {directory} is damaged: {first}") from error
