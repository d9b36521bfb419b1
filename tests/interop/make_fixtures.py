"""Makes the .pt files of `fixtures/`; needs torch (pip install 'damcha-jax[parity]').

    python tests/interop/make_fixtures.py

`vit.pt` is a state dict as `torch.save` leaves it, with the names, buffers and repeated entries of
the DAMCHA authors' VisionTransformer with a shared generator, and `vit_io.npz` what that computes.
`tensors.pt` holds dtypes and views under the wrappings that training programs put around them, and
`tensors_stream.pt` the same as torch before version 1.6 wrote it, `tensors.npz` as plain arrays.
"""

import collections
import math
import pathlib

import numpy as np
import torch
from torch import nn

D, H, W, F, PATCH, NUM_CLASSES = 8, 2, 6, 12, 4, 3
FOLDER = pathlib.Path(__file__).parent / "fixtures"


class Generator(nn.Module):
  """Mean of the tokens -> the row sums of a D x D metric; diagonal blocks mixed by alpha."""

  def __init__(self):
    super().__init__()
    self.mlp = nn.Sequential(nn.Linear(D, W), nn.GELU(), nn.Dropout(0.0), nn.Linear(W, D * D))
    self.off_diag_alpha = nn.Parameter(torch.randn(H, H, H))
    diagonal = torch.block_diag(*[torch.ones(D // H, D // H)] * H)
    self.register_buffer("diag_mask", diagonal)
    self.register_buffer("off_diag_mask", 1 - diagonal)

  def forward(self, x):
    blocks = self.mlp(x.mean(1)).reshape(-1, H, D // H, H, D // H)
    diagonal = torch.stack([blocks[:, i, :, i] for i in range(H)], 1)
    others = self.off_diag_alpha * (1 - torch.eye(H))[:, :, None]
    return diagonal + torch.einsum("ijk,bkac->biac", others, diagonal)


class Attention(nn.Module):

  def __init__(self, shared):
    super().__init__()
    self._shared_mlp = shared
    self.W_v, self.out_proj = nn.Linear(D, D), nn.Linear(D, D)

  def forward(self, x, metric):
    heads = lambda y: y.reshape(*y.shape[:2], H, D // H).transpose(1, 2)
    scores = heads(x) @ metric @ heads(x).mT / math.sqrt(D // H)
    output = scores.softmax(-1) @ heads(self.W_v(x))
    return self.out_proj(output.transpose(1, 2).flatten(2))


class Block(nn.Module):

  def __init__(self, shared):
    super().__init__()
    self.attn = Attention(shared)
    self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
    self.mlp = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Dropout(0.0), nn.Linear(F, D))

  def forward(self, x, metric):
    x = x + self.attn(self.norm1(x), metric)
    return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):

  def __init__(self):
    super().__init__()
    shared = Generator()
    self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, D, PATCH, PATCH)})
    self.cls_token = nn.Parameter(torch.randn(1, 1, D))
    self.pos_embed = nn.Parameter(torch.randn(1, 5, D))
    self.blocks = nn.ModuleList([Block(shared), Block(shared)])
    self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, NUM_CLASSES)

  def forward(self, images):
    patches = self.patch_embed["proj"](images).flatten(2).mT
    x = torch.cat([self.cls_token.expand(len(images), 1, D), patches], 1) + self.pos_embed
    metric = self.blocks[0].attn._shared_mlp(x)
    for block in self.blocks:
      x = block(x, metric)
    return self.head(self.norm(x)[:, 0])


def main():
  torch.manual_seed(0)
  model, images = VisionTransformer(), torch.randn(2, 3, 2 * PATCH, 2 * PATCH)
  torch.save(model.state_dict(), FOLDER / "vit.pt")
  np.savez(FOLDER / "vit_io.npz", images=images, logits=model(images).detach())
  base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
  tensors = collections.OrderedDict(
      whole=base,
      transposed=base.T,
      part=base[1:3, ::2],
      parameter=nn.Parameter(base[0]),
      scalar=torch.tensor(1.5, dtype=torch.float64),
      empty=torch.zeros(0, 3),
      half=torch.tensor([1.5, -2.0], dtype=torch.float16),
      brain=torch.tensor([1.5, -3.0], dtype=torch.bfloat16),
      long=torch.tensor([1, -(2**40)]),
      int=torch.tensor([3], dtype=torch.int32),
      byte=torch.tensor([200], dtype=torch.uint8),
      bool=torch.tensor([True, False]),
  )
  arrays = {name: tensor.detach().float().numpy() if name == "brain" else tensor.detach().numpy()
            for name, tensor in tensors.items()}
  np.savez(FOLDER / "tensors.npz", **arrays)
  wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
  contents = {"epoch": 3, "loss": 0.5, "state_dict": wrapped}
  torch.save(contents, FOLDER / "tensors.pt")
  torch.save(contents, FOLDER / "tensors_stream.pt", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
  main()
