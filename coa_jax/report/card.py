"""Hugging Face cards: the README.md files of models and data sets.

A card's facts come from the run's own files, so writing a card again gives the same
bytes. The last line holds a hash of the text above. A README.md without this hash was
written or edited by a user, and is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any

import yaml

from coa_jax.protocol.origin import FILE as ORIGIN
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import read_object

FILE = "README.md"
_MARK = "<!-- Written by coa-jax, which keeps an edited card. sha256: "
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LICENSE = re.compile(
  r"\A---\n.*?^license: *([\w.-]+)$.*?^---$", re.ASCII | re.M | re.S
)
# Fields of results.json; no wall times, which differ between equal runs.
_FIGURES = (
  "trajectories",
  "parameters",
  "parameters_trained",
  "loss",
  "validation_loss",
  "reward_first",
  "reward",
  "dev_accuracy_first",
  "dev_accuracy",
)
_MODEL = """\
A [Chain-of-Agents](https://arxiv.org/abs/2508.13167) {name}: one model writes agents'
spans and tool calls in a single sequence. coa-jax trained it by {stage} for {step}
updates, from {base}.

## Use

With its tools, by coa-jax; CONFIG.py is an evaluation's config, which names them:

```
coa chat --config=CONFIG.py --config.init=MODEL
coa serve --config=CONFIG.py --config.init=MODEL
```

Without tools:

```python
from transformers import AutoTokenizer
from {library} import {loader}

tokenizer = AutoTokenizer.from_pretrained("MODEL")
model = {loader}.from_pretrained("{folder}")
```

MODEL is the folder of the whole model.{adapter}
"""
_DATA = """\
Runs of a team ({backend}), each one sequence of agents' spans, tool calls and
observations, to train a [Chain-of-Agents](https://arxiv.org/abs/2508.13167) model.
coa-jax distilled them from the tasks {tasks}.

```
coa sft --config=CONFIG.py --workdir=OUT --config.data.trajectories={file}
```

```python
from datasets import load_dataset

rows = load_dataset("FOLDER")  # of this README.md
```
"""


def write_model_cards(out: str, workdir: str, init: str, step: int) -> None:
  """Writes a card into `out/model` and `out/adapter`, if they exist.

  Args:
    out: the folder with `save_run`'s output.
    workdir: the run's directory. Its config.json is shown, and figures from its
      results.json if `step` was the last step.
    init: the local folder of the initial model, or ""; the license on its card is
      copied to the new cards.
    step: the number of updates.
  """
  # --- Facts for both cards.
  config = read_object(os.path.join(workdir, "config.json"))["config"]
  stage = "RL" if "algo" in config else "SFT"
  results = _read(os.path.join(workdir, "results.json"))
  figures = {}
  if results.get("steps") == step:
    figures = {k: results[k] for k in _FIGURES if results.get(k) is not None}
  front = {"pipeline_tag": "text-generation"}
  base = config.get("init") or ""  # a bucket URI, not its local copy
  if _HUB_NAME.fullmatch(base):  # the Hub refuses any other name
    front["base_model"] = base
  if init and (found := _LICENSE.match(_text(os.path.join(init, FILE)))):
    front["license"] = found[1]

  # --- The cards.
  for name, library, loader in (
    ("model", "transformers", "AutoModelForCausalLM"),
    ("adapter", "peft", "AutoPeftModelForCausalLM"),
  ):
    folder = os.path.join(out, name)
    if not os.path.isdir(folder):
      continue
    text = _MODEL.format(
      name=name,
      stage=stage,
      step=step,
      base=code_span(base) if base else "random weights",
      library=library,
      loader=loader,
      folder=name.upper(),
      adapter=" ADAPTER is this folder." if name == "adapter" else "",
    )
    tags = ["coa-jax", "chain-of-agents", stage.lower()]
    facts = {"Figures": figures, "Training": _read(os.path.join(folder, ORIGIN))}
    facts["Config"] = config
    front_matter = {"library_name": library, **front, "tags": tags}
    _write(folder, front_matter, f"{name}, {stage}", text, facts)


def write_dataset_card(workdir: str, file: str) -> None:
  """Writes the card of a distilled data set.

  Args:
    workdir: the data set's folder, with manifest.json.
    file: the name of its trajectory file.
  """
  manifest = read_object(os.path.join(workdir, "manifest.json"))
  config = manifest.pop("config")
  text = _DATA.format(
    backend=code_span(config["teacher"]["backend"]),
    tasks=code_span(config["tasks"]["uri"]),
    file=file,
  )
  front = {
    "task_categories": ["text-generation"],
    "tags": ["coa-jax", "chain-of-agents"],
    # Other JSON-lines files in the folder have other columns.
    "configs": [{"config_name": "default", "data_files": file}],
  }
  _write(workdir, front, "trajectories", text, {"Manifest": manifest, "Config": config})


def code_span(text: str) -> str:
  """Formats any text as a Markdown code span: one line, ASCII."""
  line = "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text)
  fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
  return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def _write(
  folder: str, front: dict[str, Any], title: str, text: str, facts: dict[str, Any]
) -> None:
  """Writes a card with a section per fact, unless the folder has a user's card."""
  path = os.path.join(folder, FILE)
  if os.path.lexists(path) and not _is_ours(path):
    return
  card = f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n"
  card += f"# Chain-of-Agents {title}\n\n{text}"
  for name, values in facts.items():
    if values:
      # JSON strings contain no line breaks, so none can end the fence.
      card += f"\n## {name}\n\n```json\n{json.dumps(values, indent=1)}\n```\n"
  with atomic_write(path) as f:
    f.write(f"{card}\n{_MARK}{_hash(card)} -->\n")


def _is_ours(path: str) -> bool:
  """Whether `_write` wrote the card and nobody has edited it since."""
  card, _, end = _text(path).rpartition(f"\n{_MARK}")
  return not os.path.islink(path) and end == f"{_hash(card)} -->\n"


def _hash(card: str) -> str:
  return hashlib.sha256(card.encode()).hexdigest()


def _read(path: str) -> dict[str, Any]:
  return read_object(path) if os.path.exists(path) else {}


def _text(path: str) -> str:
  """Reads a text file; returns "" if the file is unreadable."""
  try:
    with open(path, encoding="utf-8") as f:
      return f.read()
  except (OSError, ValueError):
    return ""
