"""What the three language-model experiments of Section 5.4 (Table 5) have in common.

Not an experiment of its own: `mix.py`, `enwik8.py` and `text8.py` call `get_config` with their
corpus. A comment `5.4` marks a value that the paper's Section 5.4 states (`5.1`, `3.4` likewise);
`omitted` marks one that the paper leaves out, with the reason for the value chosen here.
"""

import ml_collections
from ml_collections import config_dict

SIZES = ("paper", "wide", "cpu", "smoke")


def get_config(size: str, dataset: str, sample: str) -> ml_collections.ConfigDict:
  """The experiment named for its `dataset`; the small sizes run on `sample`, which ships with us.

  Raises:
    ValueError: `size` is none of `SIZES`.
  """
  if size not in SIZES:
    raise ValueError(f"unknown size '{size}'; choose one of {', '.join(SIZES)}")
  config = paper(dataset)
  if size == "wide":
    # The other reading of 5.1's 9-layer MLP, which the paper's omission of W allows: W = D, no
    # longer comparable in parameters (453M in the generator's last layer alone).
    config.damcha.widths = (config.model.features,) * 8
  elif size != "paper":
    {"cpu": shrink_to_cpu, "smoke": shrink_to_smoke}[size](config)
    config.dataset = sample
  config.size = size
  return config.lock()


def paper(dataset: str) -> ml_collections.ConfigDict:
  """Section 5.4 in full: GPT-2 small over bytes, 100k steps of 64 x 512 tokens."""
  config = ml_collections.ConfigDict()
  config.experiment = "gpt2_enwik8"
  config.name = dataset
  config.size = "paper"
  config.dataset = dataset  # 5.4; also PATH, text8:PATH or mix:PATH, of a text file of your own
  config.attentions = "mha,dcmha,damcha"  # Table 5's rows; comma-separated
  config.seeds = (0,)  # omitted: one run per cell is what Table 5 shows
  config.num_steps = 100_000  # 5.4
  config.batch_size = 64  # 5.4, sequences over all devices
  config.context_length = 512  # 5.4, tokens T

  config.model = ml_collections.ConfigDict(dict(
      num_layers=12,  # 5.4
      num_heads=12,  # 5.4
      features=768,  # 5.4
      mlp_features=3072,  # omitted: 4D, as in GPT-2
      vocab_size=256,  # omitted: "characters" read as bytes; 0 doubles as the begin symbol
      positions="learned",  # omitted: as in GPT-2
      norm_placement="pre",  # omitted: as in GPT-2
      tie_embeddings=True,  # omitted: as in GPT-2
      initializer="gpt2",  # omitted: as in GPT-2
      gelu="exact",  # omitted: as in the authors' code; GPT-2 itself has the tanh approximation
      dropout_rate=0.1,  # omitted: GPT-2's; 100k steps are 36 passes over enwik8, 18 over Mix
      attention_dropout_rate=0.0,  # omitted: GPT-2 drops weights too, but fused kernels keep none
      remat=False,  # no effect on results: 64 x 512 fits a TPU v4 or an 80 GB GPU
      scan_layers=True,  # no effect on results: compiles one layer instead of twelve
      attention_implementation="auto",  # no effect on results beyond rounding
      dtype="bfloat16",  # omitted: the accelerators' matrix units; softmax and metric in float32
      param_dtype="float32",  # omitted: bfloat16 would lose small updates
  ))

  config.damcha = ml_collections.ConfigDict(dict(
      form="head_slice",  # 3.3: head i scores its own slice of the input
      update_rank=config_dict.placeholder(int),  # unused by the head-slice form
      static_part=True,  # unused by the head-slice form
      metric="generated",  # 3.2
      sharing="generator",  # 3.4: one f_theta for the stack, each layer its own context
      context="prefix",  # omitted: a mean over the whole sequence would leak the future
      stride=64,  # omitted: 8 contexts per window; 1 is the exact prefix mean, at T times the cost
      half_life=config_dict.placeholder(float),  # 3.2: a mean, in which all tokens count alike
      mix_slices=False,  # 3.3: slices of the layer input itself
      # 5.1: f_theta is a 9-layer MLP: 9 Linear layers, so 8 hidden widths. The width is omitted:
      # W = 2N = 24 matches the query and key projections it replaces (2ND^2) in parameters, which
      # the paper's "comparable parameter count" needs.
      widths=(24,) * 8,
      parameterization="blocks",  # 3.2: M with all its H x H blocks
      preset="paper",  # omitted: PyTorch's default initial values, as in the authors' code
      initializer=config_dict.placeholder(str),  # the preset's, as the next two
      residual=config_dict.placeholder(bool),
      normalize_context=config_dict.placeholder(bool),
      block_ablation_train="full",  # 5.4 ablates nothing
      block_ablation_eval="full",
      allow_future_leak=False,
  ))

  comparators(config)

  config.optimizer = ml_collections.ConfigDict(dict(
      learning_rate=6e-4,  # 5.4
      end_learning_rate_factor=0.1,  # omitted: cosine to a tenth, usual for GPT-2 at this rate
      warmup_steps=2_000,  # omitted: usual for GPT-2 at this rate; 2% of the steps
      b1=0.9,  # omitted: Adam's default
      b2=0.95,  # omitted: usual for GPT-2 at this rate; 0.999 reacts too slowly after warm-up
      eps=1e-8,  # omitted: Adam's default
      weight_decay=0.1,  # omitted: usual for GPT-2; matrices only
      clip_norm=1.0,  # omitted: usual for GPT-2
      accumulation_steps=1,  # no effect on results
  ))

  config.data = ml_collections.ConfigDict(dict(
      data_dir="~/.cache/damcha_jax",  # where `python -m damcha_jax.data.prepare` puts corpora
      decontaminate=False,  # the paper mixes as is, though text8 covers enwik8's held-out articles
      max_held_out_bytes=config_dict.placeholder(int),  # 5.4: whole splits
  ))

  execution(config)

  config.evaluation = ml_collections.ConfigDict(dict(
      every_steps=5_000,  # omitted: 20 points on the curve, each over the whole validation split
      batch_size=64,  # no effect on results
  ))
  config.checkpoint = ml_collections.ConfigDict(dict(every_steps=5_000, keep_last=2, keep_best=1))
  config.logging = ml_collections.ConfigDict(dict(every_steps=100, tensorboard=True))
  config.sampling = ml_collections.ConfigDict(dict(
      prompt="The ",
      num_tokens=400,
      temperature=0.8,  # omitted: the paper shows no text from these models
      top_k=0,
      top_p=0.95,
  ))
  return config


def execution(config: ml_collections.ConfigDict) -> None:
  """Devices and random numbers; none of it has an effect on results beyond rounding."""
  config.mesh = ml_collections.ConfigDict(dict(data=-1, fsdp=1, tensor=1))  # -1: all devices
  # Which mesh axes each named axis of the parameters and the batch is split over.
  config.logical_rules = (
      ("batch", ("data", "fsdp")),
      ("embed", "fsdp"),
      ("mlp", "tensor"),
      ("heads", "tensor"),
      ("head_dim", None),
      ("vocab", "tensor"),
      ("positions", None),
      ("layers", None),
      ("metric_in", None),
      ("metric_hidden", None),
      ("metric_row", "fsdp"),
      ("experts", "tensor"),
      ("norm", None),
  )
  config.prng_impl = "threefry2x32"  # the same numbers on every backend and device count


def comparators(config: ml_collections.ConfigDict) -> None:
  """The other attentions, each as its own paper trains it; all values are omitted by the paper.

  Every comparator keeps its own paper's initial values, whatever `model.initializer` says.
  """
  config.tha = ml_collections.ConfigDict(dict(
      num_key_heads=config_dict.placeholder(int),  # H; Shazeer et al. 2020 vary the three numbers
      num_softmax_heads=config_dict.placeholder(int),
      num_value_heads=config_dict.placeholder(int),
      key_head_features=config_dict.placeholder(int),  # D / H
      value_head_features=config_dict.placeholder(int),
      query_chunk=128,  # no effect on results: bounds memory, no fused kernel applies
  ))
  config.dcmha = ml_collections.ConfigDict(dict(
      static=False,  # Xiao et al. 2024: off in its language models, on in its Vision Transformer
      dynamic=True,  # Xiao et al. 2024
      gate=True,  # Xiao et al. 2024
      rank=2,  # Xiao et al. 2024: R
      gelu="tanh",  # its Flax code; the PyTorch code has 'exact'
      qk_norm=config_dict.placeholder(str),  # off, as in the MHA it is compared with
      rope=False,  # the model's learned positions, as in the MHA it is compared with
      window=config_dict.placeholder(int),  # all keys, as in the MHA it is compared with
      query_chunk=128,  # no effect on results: its code's chunk
      use_bias=False,  # its language models; the Vision Transformer has biases
  ))
  config.colmha = ml_collections.ConfigDict(dict(
      form="fairseq",  # Cordonnier et al. 2020: their code for training from scratch
      key_features=config_dict.placeholder(int),  # Dk = D; D / 4 makes the small variant
      mixing_init=config_dict.placeholder(str),  # the form's: Xavier-uniform
  ))
  config.moa = ml_collections.ConfigDict(dict(
      num_experts=config_dict.placeholder(int),  # 2H: 16 for the 8 heads of width 64 at D = 512
      experts_per_token=config_dict.placeholder(int),  # H, as many as MHA has heads
      expert_features=config_dict.placeholder(int),  # D / H
      renormalize=False,  # Zhang et al. 2022: off in their code
      switch_coefficient=0.01,  # Zhang et al. 2022
      z_coefficient=0.001,  # Zhang et al. 2022
      cv_coefficient=0.0,  # Zhang et al. 2022: an option, off
      dispatch="dense",  # no effect on results; 'sorted' saves FLOPs on TPU
  ))
  # Omitted by Cui et al. 2019 as far as we could read: the window of the DAMCHA authors' MMA.
  config.mma = ml_collections.ConfigDict(dict(local_window=8))
  config.authors = ml_collections.ConfigDict(dict(
      router_rank=config_dict.placeholder(int),  # their code: max(4, H / 2)
      expert_factor=2,  # their code
      local_window=8,  # their code
      allow_future_leak=False,  # their first commit leaked; a causal model must not
  ))


def shrink_to_cpu(config: ml_collections.ConfigDict) -> None:
  """Minutes on two cores: enough for either attention to beat `gzip -9` on the sample text."""
  config.attentions = "mha,damcha"  # the others take as long again, each
  config.num_steps = 2_500
  config.batch_size = 16
  config.context_length = 64
  config.model.update(num_layers=3, num_heads=4, features=128, mlp_features=512, dropout_rate=0.0,
                      tie_embeddings=False, initializer="lecun", scan_layers=False,
                      dtype="float32")
  # rowsum trains the same function as blocks with fewer parameters; W = 2NH matches the
  # parameters of the projections it replaces; stride 8 gives 8 contexts per window.
  config.damcha.update(parameterization="rowsum", stride=8, widths=(24,) * 8)
  config.optimizer.update(learning_rate=4e-3, warmup_steps=100, b2=0.99)
  config.evaluation.update(every_steps=1_250, batch_size=256)
  config.checkpoint.update(every_steps=500)
  config.logging.update(every_steps=20)


def shrink_to_smoke(config: ml_collections.ConfigDict) -> None:
  """Seconds: every part of the program once, on a model too small to learn much."""
  shrink_to_cpu(config)
  config.num_steps = 30
  config.batch_size = 8
  config.data.max_held_out_bytes = 50_000
  config.model.update(num_layers=2, num_heads=4, features=16, mlp_features=64)
  config.damcha.update(widths=(8,) * 8)
  config.optimizer.update(learning_rate=1e-2, warmup_steps=3)
  config.evaluation.update(every_steps=10)
  config.checkpoint.update(every_steps=10)
  config.logging.update(every_steps=2)
  config.sampling.update(num_tokens=64)
