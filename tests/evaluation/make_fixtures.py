"""Makes `fixtures/`: what torch-fidelity, pytorch-fid and PyTorch's BART compute.

    pip install 'damcha-jax[parity]'
    PYTHONPATH=tests python tests/evaluation/make_fixtures.py

The weights are random and made by NumPy from their names and shapes, so only outputs are kept.
"""

import json
import pathlib
import tempfile

import numpy as np
import pytorch_fid.inception
from random_weights import random_images
from random_weights import random_tensors
import tokenizers
import torch
import torch_fidelity.feature_extractor_inceptionv3
import torchvision
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures"
# Sentences of different lengths; the first target is empty.
SOURCES = ["a dog runs", "The quick brown fox jumps over the lazy dog.", "red",
           "We saw\na café 😀!"]
TARGETS = ["", "the fox jumps", "a dog runs over the lazy dog in the red house", "café!"]


def inception() -> None:
  """Features of two images in both modes."""
  with torch.device("meta"):
    network = torchvision.models.inception_v3(num_classes=1008, aux_logits=False,
                                              init_weights=False)
  shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()
            if not name.endswith("num_batches_tracked")}
  state = {name: torch.from_numpy(array) for name, array in random_tensors(shapes).items()}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "inception.pth"
    torch.save(state, path)
    network = torch_fidelity.feature_extractor_inceptionv3.FeatureExtractorInceptionV3(
        "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path))
  pytorch_fid.inception.load_state_dict_from_url = lambda *args, **kwargs: state
  images = torch.from_numpy(random_images(2, 32)).permute(0, 3, 1, 2)
  with torch.no_grad():
    tf = network(images)[0]
    areas = pytorch_fid.inception.InceptionV3([3]).eval()(images / 255)[0][:, :, 0, 0]
  np.savez(FOLDER / "inception.npz", **{"tf": tf, "pytorch-fid": areas})


def bart_tokenizer() -> None:
  """A byte-level BPE with some merges, whose special tokens stand where BART has them."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=290, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokenizer.train_from_iterator(SOURCES + TARGETS, trainer)
  tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
      ("</s>", 2), ("<s>", 0), trim_offsets=False, add_prefix_space=False)
  tokenizer.save(str(FOLDER / "bart" / "tokenizer.json"), pretty=False)


def bart() -> None:
  """Mean log p of targets given sources under a tiny BART, each pair alone."""
  bart_tokenizer()
  config = transformers.BartConfig.from_json_file(FOLDER / "bart" / "config.json")
  model = transformers.BartForConditionalGeneration(config).eval()
  shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
  copies = ("lm_head.weight", "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight")
  shapes = {name: shape for name, shape in shapes.items() if name not in copies}
  arrays = random_tensors(shapes, 1.0)
  state = {name: torch.from_numpy(array) for name, array in arrays.items()}
  state.update(dict.fromkeys(copies, state["model.shared.weight"]))
  model.load_state_dict(state)
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_file=str(FOLDER / "bart" / "tokenizer.json"))
  scores, tokens = [], []
  with torch.no_grad():
    for source, target in zip(SOURCES, TARGETS):
      source_ids = torch.tensor([tokenizer(source)["input_ids"]])
      target_ids = torch.tensor([tokenizer(target)["input_ids"]])
      logits = model(input_ids=source_ids, labels=target_ids).logits
      log_probs = logits.log_softmax(-1).gather(-1, target_ids[..., None])
      scores.append(float(log_probs.mean()))
      tokens.append([source_ids[0].tolist(), target_ids[0].tolist()])
  shapes = {name: list(array.shape) for name, array in arrays.items()}
  contents = {"sources": SOURCES, "targets": TARGETS, "tokens": tokens, "scores": scores,
              "shapes": shapes}
  lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in contents.items())
  (FOLDER / "bart.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> None:
  FOLDER.mkdir(exist_ok=True)
  inception()
  bart()


if __name__ == "__main__":
  main()
