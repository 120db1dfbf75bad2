"""A decoder's sizes and options.

`hf.config` reads and writes them as Hugging Face's `config.json`. Sources: Qwen2 (arXiv
2407.10671), Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388), Qwen3.5 (transformers
`models/qwen3_5`), Llama 3 (arXiv 2407.21783).
"""

from __future__ import annotations

import dataclasses

from coa_jax.runtime.fields import bounded, check_fields, choice

_FLOATS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN: rotary frequencies stretched to more positions (arXiv 2309.00071).

  Attributes:
    factor: ratio of the stretched positions to `positions`.
    positions: positions in training.
    beta_fast: dimensions turning more often than this are left alone.
    beta_slow: dimensions turning less often than this are divided by `factor`.
    attention_factor: scales cosines and sines; 0 for 0.1 ln(factor) + 1.
    truncate: True rounds the bounds of the ramp between the two to whole dimensions.
  """

  factor: float = bounded(least=1)
  positions: int = bounded(least=1)
  beta_fast: float = bounded(32.0, above=0)
  beta_slow: float = bounded(1.0, above=0)
  attention_factor: float = bounded(0.0, least=0)
  truncate: bool = True

  def __post_init__(self):
    check_fields(self)


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama 3.1's rotary frequencies, stretched to more positions.

  A dimension's number of turns over the original positions decides its scaling.

  Attributes:
    factor: the divisor for slowly turning dimensions.
    positions: positions in training, before stretching.
    low_freq_factor: dimensions turning less often than this are divided by `factor`.
    high_freq_factor: dimensions turning more often than this are left alone; between
      the two the frequency is interpolated.
  """

  factor: float = bounded(least=1)
  positions: int = bounded(least=1)
  low_freq_factor: float = bounded(above=0)
  high_freq_factor: float = bounded(above=0)

  def __post_init__(self):
    check_fields(self)
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
        f"{self.high_freq_factor}"
      )


# Layer kinds: softmax attention, and the gated delta rule (linear attention).
KINDS = ("attention", "delta")


@dataclasses.dataclass(frozen=True)
class DeltaNet:
  """Sizes of linear-attention layers: the gated delta rule (arXiv 2412.06464).

  Attributes:
    key_heads: Y query and key heads.
    value_heads: Z value heads, a multiple of Y; each has its own state.
    key_dim: units per query or key.
    value_dim: units per value.
    conv: tokens read by the causal convolution before the rule.
  """

  key_heads: int = bounded(least=1)
  value_heads: int = bounded(least=1)
  key_dim: int = bounded(128, least=1)
  value_dim: int = bounded(128, least=1)
  conv: int = bounded(4, least=2)

  def __post_init__(self):
    check_fields(self)
    if self.value_heads % self.key_heads:
      raise ValueError(
        f"key_heads {self.key_heads} does not divide value_heads {self.value_heads}"
      )

  @property
  def channels(self) -> int:
    """Counts a key head's channels: its query, its key, and its value heads."""
    return 2 * self.key_dim + self.value_heads // self.key_heads * self.value_dim


# The deepest published model has this many layers (DeepNet, arXiv 2203.00555). A deeper
# one would be laid out and compiled for minutes before memory runs out.
MOST_LAYERS = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
  """Options for a model's computation, independent of its sizes.

  Attributes:
    dtype: the activations' dtype; norms, softmax and log-probs are always float32.
    param_dtype: the parameters' dtype, whatever the file's.
    weight_dtype: the dtype to which parameters are rounded for use; dtype if empty.
      With bfloat16 under a float32 dtype the sampler holds half-precision weights, and
      sampler and learner agree to float32's precision.
    scan: True stacks and scans the layers, for training deep models: one layer is
      compiled, whatever their number.
    remat: the part recomputed by a layer's backward pass: none, full (everything),
      attention (all but the attention's output), dots (all but matrix products),
      offload (as attention, with the kept arrays in host memory meanwhile).
    attention: the kernel for packed rows: xla, cudnn or triton (GPU), splash (TPU), or
      auto. On TPU auto takes splash; on GPU in bfloat16, cudnn for rows with up to
      4,096 tokens on a device and triton for longer rows; elsewhere, or if these
      kernels do not support the model's head_dim or the row length, xla.
    logit_chunk: tokens per row with logits in memory at once in a loss; a value above
      128 is rounded down to a multiple of 128. 0 takes half a gigabyte of logits per
      device (SFT, if devices split rows alone: at most a quarter of a device's tokens).
      With a whole row at once RL computes no logits twice.
  """

  dtype: str = choice("float32", of=_FLOATS)
  param_dtype: str = choice("float32", of=_FLOATS)
  weight_dtype: str = choice("", of=("", *_FLOATS))
  scan: bool = False
  remat: str = choice("none", of=("none", "full", "attention", "dots", "offload"))
  attention: str = choice("auto", of=("auto", "xla", "cudnn", "triton", "splash"))
  logit_chunk: int = bounded(0, least=0)

  def __post_init__(self):
    check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadConfig(RunOptions):
  """Config section `model` for a run from a model folder.

  The folder decides all other fields; see RunOptions.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(RunOptions):
  """Config section `model`; the defaults are the quickstart's.

  Attributes:
    vocab_size: V, the embedding's rows.
    width: D.
    layers: L.
    heads: N query heads.
    kv_heads: K key-value heads; divides N.
    head_dim: H; independent of D / N, even.
    ff: F, the SwiGLU's hidden width.
    rope_theta: base of the rotary frequencies.
    yarn: stretches these frequencies to more positions as YaRN does, if set.
    llama3: stretches them as Llama 3.1 does, if set; excludes yarn.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: True if the output matrix is the embedding.
    attention_bias: True for biases on q, k, v (Qwen2).
    qk_norm: True for RMSNorm on each query and key head (Qwen3). Llama has neither
      these norms nor biases.
    layer_kinds: "attention" or "delta" (linear attention) for each layer in one
      period, which the model repeats; at least one is "attention".
    delta: the sizes for "delta" layers.
    attention_gate: True if a sigmoid gate, projected beside the query, multiplies each
      head's output (Qwen3.5).
    norm_offset: True if norms multiply by 1 + scale (Qwen3.5).
    rotary_dim: rotated units per head, from the first; 0 for all.
    product_dtype: the dtype for both factors in a decoder's matrix products, with
      float32 sums; dtype if empty. `decode_params.architecture` sets it.
  """

  vocab_size: int = bounded(least=1)
  width: int = bounded(128, least=1)
  layers: int = bounded(4, least=1, most=MOST_LAYERS)
  heads: int = bounded(4, least=1)
  kv_heads: int = bounded(2, least=1)
  head_dim: int = bounded(32, least=1)
  ff: int = bounded(384, least=1)
  rope_theta: float = bounded(10_000.0, above=0)
  yarn: Yarn | None = None
  llama3: Llama3Rope | None = None
  norm_eps: float = bounded(1e-6, above=0)
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = True
  layer_kinds: tuple[str, ...] = ("attention",)
  delta: DeltaNet | None = None
  attention_gate: bool = False
  norm_offset: bool = False
  rotary_dim: int = bounded(0, least=0)
  product_dtype: str = ""

  def __post_init__(self):
    super().__post_init__()
    if self.heads % self.kv_heads:
      raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} is odd; rotary halves need it even")
    if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
      raise ValueError(
        f"rotary_dim is {self.rotary_dim}; it must be even, and at most head_dim "
        f"{self.head_dim}"
      )
    self._check_kinds()
    if self.yarn and self.llama3:
      raise ValueError(
        "yarn and llama3 both stretch the frequencies; leave one of them"
      )

  def _check_kinds(self) -> None:
    """Refuses layer kinds that make no valid model with this depth."""
    for kind in self.layer_kinds:
      if kind not in KINDS:
        raise ValueError(f"layer_kinds has {kind!r}; there are {', '.join(KINDS)}")
    if "attention" not in self.layer_kinds:
      raise ValueError('layer_kinds has no "attention"; at least one layer needs it')
    if self.layers % len(self.layer_kinds):
      raise ValueError(
        f"layer_kinds has {len(self.layer_kinds)} entries, which does not divide "
        f"layers {self.layers}"
      )
    if (self.delta is None) == ("delta" in self.layer_kinds):
      raise ValueError(
        'delta (the sizes of linear attention) and layers of kind "delta" in '
        "layer_kinds go together; set both or neither"
      )

  @property
  def kinds(self) -> tuple[str, ...]:
    """Returns every layer's kind."""
    return self.layer_kinds * (self.layers // len(self.layer_kinds))

  @property
  def axes(self) -> dict[str, int]:
    """Returns the sizes of axes that a mesh may split, by letter."""
    out = {
      "D": self.width,
      "N": self.heads,
      "K": self.kv_heads,
      "F": self.ff,
      "V": self.vocab_size,
    }
    if self.delta:
      out |= {"Y": self.delta.key_heads, "Z": self.delta.value_heads}
    return out
