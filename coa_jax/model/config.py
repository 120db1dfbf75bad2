"""What a dense decoder is, in numbers: its sizes and its options.

`hf.config` reads and writes them as Hugging Face's `config.json`. Sources: Qwen2 (arXiv
2407.10671), Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388), Llama 3 (arXiv
2407.21783).
"""

from __future__ import annotations

import dataclasses
import math

REMAT = ("none", "full", "attention", "dots")
ATTENTION = ("auto", "xla", "cudnn", "splash")


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN: rotary frequencies stretched to more positions (arXiv 2309.00071).

  Attributes:
    factor: how many times more positions than `positions`.
    positions: the positions that the model was trained on.
    beta_fast: dimensions that turn more often than this are left alone.
    beta_slow: dimensions that turn less often are divided by `factor`.
    attention_factor: scales cosines and sines; 0 for 0.1 ln(factor) + 1.
    truncate: True rounds the bounds of the ramp between the two to whole dimensions.
  """

  factor: float
  positions: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float = 0.0
  truncate: bool = True

  def __post_init__(self):
    if not 1 <= self.factor < math.inf or self.positions < 1:
      raise ValueError(
        f"yarn needs factor and positions of at least 1, got {self.factor} and "
        f"{self.positions}"
      )
    for field in ("beta_fast", "beta_slow"):
      _check_positive(field, getattr(self, field))
    if not 0 <= self.attention_factor < math.inf:
      raise ValueError(
        f"attention_factor is {self.attention_factor}; 0 or more is right"
      )


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama 3.1's stretching of rotary frequencies to more positions.

  A dimension is judged by how often it turns over the positions of before.

  Attributes:
    factor: dimensions that turn seldom are divided by it.
    positions: the positions that the model was trained on before it was stretched.
    low_freq_factor: dimensions that turn less often than this are divided by `factor`.
    high_freq_factor: those that turn more often than this are left alone; between the
      two the frequency is interpolated.
  """

  factor: float
  positions: int
  low_freq_factor: float
  high_freq_factor: float

  def __post_init__(self):
    if not 1 <= self.factor < math.inf or self.positions < 1:
      raise ValueError(
        f"llama3 needs factor and positions of at least 1, got {self.factor} and "
        f"{self.positions}"
      )
    for field in ("low_freq_factor", "high_freq_factor"):
      _check_positive(field, getattr(self, field))
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
        f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
        f"{self.high_freq_factor}"
      )


# The deepest published model has as many (DeepNet, arXiv 2203.00555). More would be
# laid out and compiled for minutes before the machine's memory refuses them.
MOST_LAYERS = 1_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
  """How a model is computed, whatever its sizes.

  Attributes:
    dtype: of activations; norms, softmax and log-probs are float32 whatever it is.
    param_dtype: of the parameters, whatever dtype a file has.
    weight_dtype: what parameters are rounded to where they are used; dtype where empty.
      bfloat16 under a dtype of float32 is a model whose sampler holds half-precision
      weights, and whose sampler and learner agree to float32's precision.
    scan: True if layers are stacked and scanned (training many layers).
    remat: what of a layer the backward pass recomputes: none, full (all of it),
      attention (all but the attention's output), dots (all but matrix products).
    attention: the kernel over packed rows: xla, cudnn (GPU), splash (TPU), or auto,
      which takes splash on TPU, cudnn on GPU in bfloat16, and xla elsewhere and where
      those do not take the model's head_dim or the rows' length.
    logit_chunk: tokens of a row whose logits exist at once in a loss; 0 for those that
      half a gigabyte of a device holds (SFT, where devices split rows alone: at most a
      quarter of its tokens).
  """

  dtype: str = "float32"
  param_dtype: str = "float32"
  weight_dtype: str = ""
  scan: bool = False
  remat: str = "none"
  attention: str = "auto"
  logit_chunk: int = 0

  def __post_init__(self):
    floats = ("float32", "bfloat16")
    choices = {
      "dtype": floats,
      "param_dtype": floats,
      "weight_dtype": ("", *floats),
      "remat": REMAT,
      "attention": ATTENTION,
    }
    for field, accepted in choices.items():
      value = getattr(self, field)
      if value not in accepted:
        raise ValueError(
          f"{field} {value!r}; accepted: {', '.join(filter(None, accepted))}"
        )
    if self.logit_chunk < 0:
      raise ValueError(f"logit_chunk {self.logit_chunk} is negative; 0 chooses it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadConfig(RunOptions):
  """Config section `model` of a run that starts from a model folder.

  The folder decides all else; see RunOptions.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(RunOptions):
  """Config section `model`; the defaults are the quickstart's.

  Attributes:
    vocab_size: V, rows of the embedding.
    width: D.
    layers: L.
    heads: N query heads.
    kv_heads: K key-value heads; divides N.
    head_dim: H; independent of D / N, even.
    ff: F, the SwiGLU's hidden width.
    rope_theta: base of the rotary frequencies.
    yarn: how they are stretched to more positions, if they are.
    llama3: the same, as Llama 3.1 does it; one of the two.
    windows: for each layer how many tokens a query sees, itself included, 0 for all;
      () where every layer sees all.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: True if the output matrix is the embedding.
    attention_bias: True for biases on q, k, v (Qwen2).
    qk_norm: True for RMSNorm on each query and key head (Qwen3). Llama has neither.
    product_dtype: what matrix products of a decoder round both factors to, with float32
      sums; dtype where empty. `decode_params.architecture` sets it.
  """

  vocab_size: int
  width: int = 128
  layers: int = 4
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 32
  ff: int = 384
  rope_theta: float = 10_000.0
  yarn: Yarn | None = None
  llama3: Llama3Rope | None = None
  windows: tuple[int, ...] = ()
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = True
  product_dtype: str = ""

  def __post_init__(self):
    sizes = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ff")
    for field in sizes:
      if getattr(self, field) < 1:
        raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
    if self.layers > MOST_LAYERS:
      raise ValueError(f"layers is {self.layers}; it may be {MOST_LAYERS} at most")
    for field in ("rope_theta", "norm_eps"):
      _check_positive(field, getattr(self, field))
    if self.heads % self.kv_heads:
      raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} is odd; rotary halves need it even")
    if self.yarn and self.llama3:
      raise ValueError(
        "yarn and llama3 both stretch the frequencies; leave one of them"
      )
    if self.windows and len(self.windows) != self.layers:
      raise ValueError(
        f"windows has {len(self.windows)} entries for {self.layers} layers"
      )
    if any(size < 0 for size in self.windows):
      raise ValueError(f"windows has {min(self.windows)}; 0 is for all tokens")
    super().__post_init__()


def _check_positive(field: str, value: float) -> None:
  if not 0 < value < math.inf:
    raise ValueError(f"{field} is {value}; it must be a number above 0")
