"""Texts from a trained decoder and the likelihood of true ones, kept beside the run.

`outputs.jsonl` has a line for each test example, in order, and all that metrics and figures need:

  index, source, references   the example, by its number in the split
  output                      what the best checkpoint made of the source
  log_likelihood, num_tokens  of the output in nats, and its tokens, the end included
  nll, nll_tokens             of the first reference: -log p in nats, and its tokens
  step                        of the checkpoint
  seal                        a checksum of all this and of whose it is: what is another run's,
                              step's or rule's, or was changed, is refused

Batches are written as soon as they are there, so that an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import json
from pathlib import Path
from typing import Any, Optional

import numpy as np

from damcha_jax.config import TextGenerationConfig
from damcha_jax.data.source_target import EvalRows
from damcha_jax.data.tokenizers import EOS, NUM_SPECIAL
from damcha_jax.decoding import TextDecoder
from damcha_jax.errors import WorkdirError
from damcha_jax.evaluation.text_quality import GeneratedTexts
from damcha_jax.origins import Origin, origin_of, seal
from damcha_jax.sampling import Sampler, row_keys
from damcha_jax.training.restore import restore_decoder
from damcha_jax.training.text_generation import Texts, eval_rows, score
from damcha_jax.training.workdir import Workdir, write_atomically

FILE = "outputs.jsonl"
PARTIAL = "outputs.partial.jsonl"
SPLIT = "test"
Record = dict[str, Any]
_KINDS = {"index": (int,), "source": (str,), "references": (list,), "output": (str,),
          "log_likelihood": (float,), "num_tokens": (int,), "nll": (float,), "nll_tokens": (int,),
          "step": (int,)}


def generate_texts(config: TextGenerationConfig, attention: str, seed: int, directory: Path,
                   texts: Texts, note: Callable[[str], None], result: Mapping[str, Any],
                   trained: Optional[Path] = None) -> list[Record]:
  """What `config.sampling` asks of a run's best checkpoint for the test split, or what is there.

  Args:
    config: the experiment.
    attention: the attention's name.
    seed: seed of the sampling.
    directory: where they are kept.
    texts: the data.
    note: prints one line.
    result: the run's `result.json`, which says which checkpoint is the best.
    trained: the directory of the run, where it is another.

  Raises:
    CheckpointError: that checkpoint is not readable.
    WorkdirError: the outputs cannot be written, or are damaged or another's, or the run was trained
      on other data.
  """
  trained, rule = trained or directory, config.sampling
  Workdir(trained).check_data(texts.hashes)
  origin = origin_of(attention, seed, result, rule)
  kept, rows = read_outputs(directory, origin), eval_rows(config, texts, SPLIT)
  if kept is not None:
    if [record["index"] for record in kept] != rows.kept.tolist():
      raise _damaged(directory / FILE, "it does not hold the examples of the test split")
    return kept
  model, step, params = restore_decoder(trained, config, attention, result["best"]["step"], note)
  decoder = TextDecoder(
      Sampler(model, rule.temperature, rule.top_k, rule.top_p), EOS,
      config.data.max_target_tokens + 1, rule.num_beams, rule.length_penalty)
  made = _Made(directory / PARTIAL, origin)
  missing = [batch for batch in _batches(rows, rule.batch_size) if not made.has(batch)]
  if missing:
    note("compiling the sampler")
  for batch in missing:
    made.add(batch, _decode(decoder, params, rows, batch, rule.batch_size, seed, texts))
    note(f"{len(made.records):,} of {len(rows):,} texts made")
  nll_N, nll_tokens_N = score(config, attention, params, rows, config.evaluation.batch_size)
  records = []
  for number, index in enumerate(rows.kept.tolist()):
    example = texts.held_out[SPLIT][index]
    records.append({
        "index": index, "source": example.source, "references": list(example.references),
        **made.records[number], "nll": float(nll_N[number]),
        "nll_tokens": int(nll_tokens_N[number]), "step": step})
  write_outputs(directory, origin, records)
  (directory / PARTIAL).unlink(missing_ok=True)
  return records


def write_outputs(directory: Path, origin: Origin, records: Sequence[Record]) -> None:
  """Writes and seals them.

  Raises:
    WorkdirError: the file cannot be written.
  """
  write_atomically(directory / FILE, "".join(
      _line({**record, "seal": seal(origin, record)}) for record in records))


def read_outputs(directory: Path, origin: Origin) -> Optional[list[Record]]:
  """What was made with a run, or None if it was not, or not all.

  Raises:
    WorkdirError: the file is damaged, or of another origin.
  """
  path = directory / FILE
  if not path.is_file():
    return None
  try:
    # Not splitlines, which also ends a line at characters that texts may have.
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
  except (OSError, RecursionError, ValueError) as error:
    raise _damaged(path, error) from error
  if not records:
    raise _damaged(path, "it is empty")
  for number, record in enumerate(records, start=1):
    if not (isinstance(record, dict) and all(type(record.get(key)) in kinds
                                             for key, kinds in _KINDS.items())):
      raise _damaged(path, f"line {number} is no record")
    if record.pop("seal", None) != seal(origin, record):
      raise _damaged(path, f"line {number} is of another run, step or rule, or was changed")
  return records


def _damaged(path: Path, why: Any) -> WorkdirError:
  return WorkdirError(f"{path} cannot be read: {why}; delete it, and the same command makes it "
                      "again")


def generated(records: Sequence[Record], languages: tuple[str, str]) -> GeneratedTexts:
  """The outputs as metrics take them; `languages` are those of sources and targets."""
  column = lambda name: [record[name] for record in records]
  return GeneratedTexts(
      hypotheses=column("output"), references=column("references"), sources=column("source"),
      log_likelihoods_N=np.array(column("log_likelihood"), np.float64),
      num_tokens_N=np.array(column("num_tokens"), np.int64),
      nll_N=np.array(column("nll"), np.float64),
      nll_tokens_N=np.array(column("nll_tokens"), np.int64),
      source_language=languages[0], language=languages[1])


def _batches(rows: EvalRows, batch_size: int) -> Iterator[list[int]]:
  """The numbers of the examples, those of similar length together: less padding, few shapes."""
  order = sorted(range(len(rows)), key=lambda number: (len(rows.prompt(number)), number))
  for start in range(0, len(order), batch_size):
    yield order[start:start + batch_size]


def _decode(decoder: TextDecoder, params: Any, rows: EvalRows, batch: list[int], batch_size: int,
            seed: int, texts: Texts) -> list[Record]:
  """The outputs of a batch, which is completed to `batch_size` rows: one size, one compilation."""
  numbers = batch + batch[-1:] * (batch_size - len(batch))
  made = decoder.decode(params, [rows.prompt(number) for number in numbers],
                        row_keys(seed, numbers))
  return [{"output": texts.tokenizer.decode([token for token in tokens if token >= NUM_SPECIAL]),
           "log_likelihood": float(log_probs.sum(dtype=np.float64)), "num_tokens": int(count)}
          for tokens, log_probs, count in zip(made.texts(EOS), made.log_probs_BN, made.counts_B)
          ][:len(batch)]


class _Made:
  """The outputs made so far of one checkpoint, in a file that grows."""

  def __init__(self, path: Path, origin: Origin):
    self._path, self._origin = path, origin
    self.records: dict[int, Record] = {}
    try:
      lines = path.read_text(encoding="utf-8").split("\n")[:-1]
      self.records = {number: record for number, kept, record in map(json.loads, lines)
                      if kept == seal(origin, [number, record])}
    except (OSError, RecursionError, TypeError, ValueError):  # none yet, or damaged: made again
      pass

  def has(self, numbers: Sequence[int]) -> bool:
    return all(number in self.records for number in numbers)

  def add(self, numbers: Sequence[int], records: Sequence[Record]) -> None:
    self.records.update(zip(numbers, records))
    write_atomically(self._path, "".join(
        _line([number, seal(self._origin, [number, record]), record])
        for number, record in self.records.items()))


def _line(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False) + "\n"
