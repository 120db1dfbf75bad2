"""transformers' `generate` as a contestant of `bench.gpu`.

  PYTHON -m experiments.bench.generate_work torch FOLDER   (bench.gpu starts it)

A peer's interpreter runs this file: it imports neither JAX nor our code.
"""

from __future__ import annotations

from typing import Any

from experiments.bench.peers import Turn, serve
from experiments.bench.rollout_work import prompts


def start(name: str, folder: str, job: dict[str, Any]) -> Turn:
  """A random model with the job's config; a turn continues {"rows": B} prompts."""
  import torch
  import transformers

  device = "cuda" if torch.cuda.is_available() else "cpu"
  config = transformers.AutoConfig.for_model(**job["hf"])
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
  model.eval()

  def turn(rows: int) -> dict[str, Any]:
    ids = prompts(rows, job["prompt"], job["hf"]["vocab_size"])
    ids = torch.tensor(ids, device=device)
    with torch.inference_mode():
      out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=job["new"],
        max_new_tokens=job["new"],
        pad_token_id=0,
        cache_implementation="static",  # compiled on a GPU
      )
    return {"tokens": out[:, ids.shape[1] :].cpu().numel()}

  return turn


if __name__ == "__main__":
  serve(start)
