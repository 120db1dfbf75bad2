"""Contestants for `bench.train` and `bench.gpu`: training on the same rows.

  PYTHON -m experiments.bench.train_work CONTESTANT FOLDER   (the benchmark starts it)

A peer's interpreter runs this file too: it imports neither JAX nor our code at the top.

budget: the work and its three contestants, in the file they all run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.bench.peers import Turn, own_peak_mb, read_job, serve

_BATCHES = 4  # different batches, used in turn
_SHARES = (3, 4, 5, 9, 11)  # a row's segments, in 32nds
# In the contestants' folder.
_MODEL = "model"
_ROWS = "rows.npz"


@dataclasses.dataclass(frozen=True)
class Size:
  """A model and one step's work.

  Attributes:
    model: fields of `ModelConfig`.
    rows: per step, over all forward passes.
    steps: per round.
    length: tokens per row, a multiple of 32.
    dtype: computation dtype; parameters are float32.
    shares: segment lengths, relative to their sum.
  """

  model: Mapping[str, Any]
  rows: int
  steps: int
  length: int = 1024
  dtype: str = "float32"
  shares: tuple[int, ...] = _SHARES


def model_fields(
  V: int, D: int, L: int, N: int, K: int, H: int, F: int
) -> dict[str, Any]:
  return {
    "vocab_size": V,
    "width": D,
    "layers": L,
    "heads": N,
    "kv_heads": K,
    "head_dim": H,
    "ff": F,
    # tunix always computes its rotary frequencies with this base.
    "rope_theta": 1e6,
  }


SIZES = {
  "1M": Size(model_fields(1_344, 128, 4, 4, 2, 32, 384), rows=8, steps=4),
  "5M": Size(model_fields(4_096, 256, 6, 4, 2, 64, 640), rows=8, steps=2),
  "100M": Size(model_fields(32_768, 768, 12, 12, 4, 64, 2_048), rows=2, steps=1),
  # One segment per row: on a CPU transformers' linear attention knows no others.
  "5M-hybrid": Size(
    model_fields(4_096, 256, 8, 4, 2, 64, 512)
    | {
      "layer_kinds": ("delta", "delta", "delta", "attention"),
      "delta": {"key_heads": 2, "value_heads": 4, "key_dim": 64, "value_dim": 64},
      "attention_gate": True,
      "norm_offset": True,
      "rotary_dim": 16,
    },
    rows=8,
    steps=2,
    shares=(1,),
  ),
}


def architecture(model: Mapping[str, Any], **fields: Any) -> Any:
  """The `ModelConfig` for a job's `model`; `fields` override its fields."""
  from coa_jax.model.config import DeltaNet, ModelConfig

  fields = {**model, **fields}
  if "delta" in fields:
    fields["layer_kinds"] = tuple(fields["layer_kinds"])
    fields["delta"] = DeltaNet(**fields["delta"])
  return ModelConfig(**fields)


def segments(size: Size) -> list[int]:
  """A row's segment lengths, in tokens."""
  return [share * size.length // sum(size.shares) for share in size.shares]


def make_rows(size: Size, seed: int) -> dict[str, np.ndarray]:
  """Fills rows with random tokens; all rows have the same segments in random order.

  So rows have equally many weighted tokens, and the mean of row means is the mean.

  Returns:
    tokens, segment, position (int32) and weight (float32), each [rows, length]. A
    segment's first quarter, its prompt, has weight 0.
  """
  rng = np.random.default_rng(seed)
  shape = (size.rows, size.length)
  out = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment", "position")}
  out["tokens"][:] = rng.integers(0, size.model["vocab_size"], shape)
  out["weight"] = np.zeros(shape, np.float32)
  for row in range(size.rows):
    begin = 0
    for number, n in enumerate(rng.permutation(segments(size)), 1):
      out["segment"][row, begin : begin + n] = number
      out["position"][row, begin : begin + n] = np.arange(n)
      out["weight"][row, begin + n // 4 : begin + n] = 1
      begin += n
  return out


def write_work(folder: str) -> None:
  """Writes all contestants' input: a model folder and batches, [batches, rows, T].

  `folder` has the job with `size`.
  """
  from coa_jax.model.hf.io import save_model
  from coa_jax.model.transformer import init_params

  size = Size(**read_job(folder)["size"])
  cfg = architecture(size.model)
  save_model(os.path.join(folder, _MODEL), cfg, init_params(cfg, 0))
  batches = [make_rows(size, i) for i in range(_BATCHES)]
  stacked = {k: np.stack([b[k] for b in batches]) for k in batches[0]}
  np.savez(os.path.join(folder, _ROWS), **stacked)


class Work:
  """A contestant's training data; every step uses the next batch.

  Attributes:
    model: the folder to load.
    setting: the contestant's setting, without rows.
    rows: rows per forward pass.
    size: the model and work.
    splits: micro-batches per step.
    tokens: weighted tokens per step.
  """

  def __init__(self, folder: str, setting: Mapping[str, Any]):
    """Args: the folder from `write_work`; the contestant's setting."""
    self.model = os.path.join(folder, _MODEL)
    self.setting = dict(setting)
    with np.load(os.path.join(folder, _ROWS)) as arrays:
      self._arrays = dict(arrays)
    self.size = Size(**read_job(folder)["size"])
    shape = self._arrays["tokens"].shape
    self.rows = min(self.setting.pop("rows"), shape[1])
    if shape[1] % self.rows:
      raise ValueError(f"rows={self.rows} does not divide a step's {shape[1]} rows")
    self.splits = shape[1] // self.rows
    # Weighted tokens, equal in all steps.
    self.tokens = float(self._arrays["weight"][0].sum())
    self._step = 0

  def micro_batches(self) -> list[dict[str, np.ndarray]]:
    """The next step's rows, in `splits` parts; arrays as in `make_rows`."""
    batch = {k: x[self._step % _BATCHES] for k, x in self._arrays.items()}
    self._step += 1
    starts = range(0, self.splits * self.rows, self.rows)
    return [{k: x[i : i + self.rows] for k, x in batch.items()} for i in starts]


# AdamW's settings and the gradient clipping norm.
_LR = 1e-3
_DECAY = 0.1
_B1 = 0.9
_B2 = 0.95
_CLIP = 1.0

# number of steps -> each step's loss, nats per weighted token.
Train = Callable[[int], list[float]]


def ours(work: Work) -> Train:
  """This project's learner, as in `sft.run`."""
  from coa_jax.cli.launch import prepare

  # No compile cache: peers compile too, which counts in the memory peak. Below two rows
  # per device, products are too small to be fast.
  devices = max(1, min(work.setting.pop("devices", 1), work.rows // 2))
  prepare("", devices)
  import jax

  from coa_jax.learner.cross_entropy import cross_entropy
  from coa_jax.learner.optim import OptimConfig, make_optimizer
  from coa_jax.learner.state import Learner, init_state
  from coa_jax.model.config import LoadConfig
  from coa_jax.model.hf.io import load_model
  from coa_jax.model.sharding import MeshConfig, make_partitioner

  # --- The model.
  load = LoadConfig(dtype=work.size.dtype, param_dtype="float32", **work.setting)
  partitioner = make_partitioner(MeshConfig(data=devices))
  cfg, params = load_model(work.model, load, partitioner)

  def loss(params: Any, _: Any, batch: Any) -> tuple[jax.Array, dict]:
    return cross_entropy(cfg, params, batch, partitioner), {}

  # --- The learner.
  config = OptimConfig(
    lr=_LR, schedule="constant", weight_decay=_DECAY, clip_norm=_CLIP, b1=_B1, b2=_B2
  )
  optimizer = make_optimizer(config, 1_000)
  learner = Learner(loss, optimizer, partitioner)
  state = init_state(params, optimizer, partitioner)
  del params

  def train(steps: int) -> list[float]:
    nonlocal state
    values = []
    for _ in range(steps):
      micro = [_batch(b) for b in work.micro_batches()]
      state, metrics = learner.step(state, micro, work.tokens)
      # Read at every step, as in `sft.run`: queued steps would hold memory.
      values.append(float(metrics["loss"]))
    jax.block_until_ready(state)
    return values

  return train


def _batch(b: Mapping[str, np.ndarray]) -> Any:
  """The rows as the learner's batch."""
  from coa_jax.learner.batch import Batch

  free = np.full_like(b["tokens"], -1)
  nothing = np.zeros_like(b["weight"])
  return Batch(
    b["tokens"], b["segment"], b["position"], b["weight"], nothing, nothing, free
  )


def torch(work: Work) -> Train:
  """transformers' model and loss, torch's fused AdamW; segments as a 4D mask.

  Runs on a GPU if torch sees one. In half precision, computation uses autocast.
  """
  import torch
  import transformers

  # --- The model.
  size = work.size
  device = "cuda" if torch.cuda.is_available() else "cpu"
  dtype = getattr(torch, size.dtype)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    work.model,
    dtype=torch.float32,
    attn_implementation=work.setting["attention"],
  ).to(device)
  model.config.use_cache = False
  if work.setting["remat"]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
  model.train()
  forward = torch.compile(model) if work.setting["compile"] else model
  trained = list(model.parameters())
  # --- The optimizer.
  groups = [
    {"params": [p for p in trained if p.ndim > 1], "weight_decay": _DECAY},
    {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
  ]
  optimizer = torch.optim.AdamW(groups, lr=_LR, betas=(_B1, _B2), fused=True)

  # --- A micro-batch, and a step.
  def backward(b: Mapping[str, np.ndarray]) -> torch.Tensor:
    tokens, segment, position, weight = (
      torch.from_numpy(b[k]).to(device)
      for k in ("tokens", "segment", "position", "weight")
    )
    tokens = tokens.long()
    mask = None  # one segment: causal
    if len(size.shares) > 1:
      T = tokens.shape[1]
      same = segment[:, :, None] == segment[:, None, :]
      seen = same & torch.ones(T, T, dtype=torch.bool, device=device).tril()
      # Additive: scaled_dot_product_attention would convert a boolean mask in
      # every layer.
      mask = torch.zeros((len(tokens), 1, T, T), dtype=dtype, device=device)
      mask.masked_fill_(~seen[:, None], torch.finfo(dtype).min)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
      loss = forward(
        input_ids=tokens,
        position_ids=position.long(),
        attention_mask=mask,
        labels=torch.where(weight > 0, tokens, -100),
        num_items_in_batch=work.tokens,
      ).loss
    loss.backward()
    return loss.detach()

  def train(steps: int) -> list[float]:
    values = []
    for _ in range(steps):
      values.append(sum(backward(b) for b in work.micro_batches()))
      torch.nn.utils.clip_grad_norm_(trained, _CLIP)
      optimizer.step()
      optimizer.zero_grad(set_to_none=True)
    if device == "cuda":
      torch.cuda.synchronize()
    return [float(v) for v in values]

  return train


def tunix(work: Work) -> Train:
  """tunix's SFT trainer over its Qwen3, with its own loss."""
  import jax
  import jax.numpy as jnp
  from tunix.models.qwen3 import params as loading
  from tunix.sft import peft_trainer

  config = tunix_config(work.model, work.setting["remat"])
  model = loading.create_model_from_safe_tensors(work.model, config, dtype=jnp.float32)
  values: list[jax.Array] = []

  # --- Its own loss, over our batch.
  class Trainer(peft_trainer.PeftTrainer):
    """Keeps the loss of every micro-batch; tunix only logs them."""

    def _post_process_train_step(self, aux: jax.Array) -> None:
      values.append(aux)

  def loss(
    model: Any,
    input_tokens: jax.Array,
    input_mask: jax.Array,
    positions: jax.Array,
    attention_mask: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    value = peft_trainer._default_loss_fn(
      model, input_tokens, input_mask, positions, attention_mask
    )
    return value, value

  def model_input(b: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    T = b["tokens"].shape[1]
    same = b["segment"][:, :, None] == b["segment"][:, None, :]
    return {
      "input_tokens": b["tokens"],
      "input_mask": b["weight"],
      "positions": b["position"],
      "attention_mask": same & jnp.tril(jnp.ones((T, T), bool)),
    }

  # --- Its trainer, with the same optimizer.
  splits = work.splits
  optimizer = tunix_optimizer(_LR, _DECAY, _B1, _B2, _CLIP)
  training = peft_trainer.TrainingConfig(
    eval_every_n_steps=1_000_000,
    gradient_accumulation_steps=splits if splits > 1 else None,
  )
  trainer = Trainer(model, optimizer, training)
  trainer = trainer.with_loss_fn(loss, has_aux=True)
  trainer = trainer.with_gen_model_input_fn(model_input)
  # Otherwise the first call of `train` closes the trainer.
  trainer.is_managed_externally = True

  def train(steps: int) -> list[float]:
    values.clear()
    trainer.train([b for _ in range(steps) for b in work.micro_batches()])
    jax.block_until_ready(trainer.optimizer)
    return [float(x) for x in np.reshape(np.array(values), (steps, splits)).mean(1)]

  return train


def tunix_optimizer(lr: float, decay: float, b1: float, b2: float, clip: float) -> Any:
  """AdamW after clipping, with decay for matrices only."""
  import jax
  import optax

  return optax.chain(
    optax.clip_by_global_norm(clip),
    optax.adamw(
      lr,
      b1=b1,
      b2=b2,
      weight_decay=decay,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  )


def tunix_config(folder: str, remat: str) -> Any:
  """A model folder's architecture as a tunix config."""
  from tunix.models.qwen3 import model as modeling

  with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
    hf = json.load(f)
  return modeling.ModelConfig(
    num_layers=hf["num_hidden_layers"],
    vocab_size=hf["vocab_size"],
    embed_dim=hf["hidden_size"],
    hidden_dim=hf["intermediate_size"],
    num_heads=hf["num_attention_heads"],
    head_dim=hf["head_dim"],
    num_kv_heads=hf["num_key_value_heads"],
    rope_theta=hf["rope_theta"],
    norm_eps=hf["rms_norm_eps"],
    use_tied_embedding=hf["tie_word_embeddings"],
    remat_config=modeling.RematConfig[remat],
  )


CONTESTANTS: dict[str, Callable[[Work], Train]] = {
  "ours": ours,
  "torch": torch,
  "tunix": tunix,
}


def start(name: str, folder: str, job: dict[str, Any]) -> Turn:
  """A contestant's turn: {"steps": n} updates."""
  train = CONTESTANTS[name](Work(folder, job["settings"][name]))
  return lambda steps: {"losses": train(steps)}


def _peak_mb(name: str) -> float:
  """Peak MiB on the contestant's GPU, or of its process without one."""
  if name == "torch":
    import torch

    if torch.cuda.is_available():
      return torch.cuda.max_memory_allocated() / 2**20
  else:
    import jax

    if jax.default_backend() == "gpu":
      return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**20
  return own_peak_mb()


if __name__ == "__main__":
  serve(start, _peak_mb)
