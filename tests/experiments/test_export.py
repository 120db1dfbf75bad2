"""A checkpoint of any run becomes the folder that the run itself writes at its end."""

from __future__ import annotations

import json
import pathlib

import ml_collections
import numpy as np
import pytest
import toy
from forked import finish
from safetensors.numpy import load_file

from coa_jax import rl, sft
from coa_jax.cli.export import export
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.runtime.lock import hold
from tests.backend import BACKEND
from tests.cards import read_card


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, dict]:
  """SFT from scratch; SFT and RL of adapters, RL's with a critic."""
  folder = tmp_path_factory.mktemp("inputs")
  toy.save_policy(str(folder / "base"), toy.params())
  write_jsonl(folder / "data.jsonl", toy.trajectories() * 2)
  (folder / "tasks.jsonl").write_text('{"question": "2 + 3", "answers": ["5"]}\n')
  tasks = dict(uri=str(folder / "tasks.jsonl"))
  data = dict(
    trajectories=str(folder / "data.jsonl"), steps=2, rows=4, length=toy.MAX_LEN
  )
  data |= dict(validation=0, vocab_size=toy.MODEL.vocab_size)
  text = toy.trajectories() * 2  # another tokenizer will read it
  for segment in (s for t in text for s in t.segments):
    segment.ids = []
  write_jsonl(folder / "text.jsonl", text)
  drawn = {**data, "trajectories": str(folder / "text.jsonl")}
  shape = dict(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ff=64)
  common = dict(optim=dict(lr=1e-2, warmup=1), checkpoint=dict(every=1, keep=2))
  lora = dict(rank=3, alpha=6.0, matrices=["q", "up"])
  tuned = dict(init=str(folder / "base"), model=dict(scan=True), lora=lora)
  return {
    "scratch": common | dict(init="", model=shape, data=drawn),
    "sft": common | tuned | dict(data=data),
    "rl": common
    | tuned
    | dict(
      rollout=dict(style="brief", slots=4, max_len=64),
      tools=dict(tools=["code"], sandbox=BACKEND),
      tasks=tasks,
      dev=dict(every=9, **tasks),
      algo=dict(
        steps=2,
        sampling=dict(prompts=1, samples=4, filter_groups=False),
        loss=dict(advantage="gae"),
        batch=dict(rows=2, length=64),
      ),
    ),
  }


def weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
  return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize("name", ["scratch", "sft", "rl"])
def test_a_checkpoint_becomes_what_the_run_wrote(configs, name, tmp_path):
  journey = rl if name == "rl" else sft
  run, out = tmp_path / "run", tmp_path / "out"
  journey.run(ml_collections.ConfigDict(configs[name]), str(run))
  assert export(str(run), str(out)) == 2
  for parent in ("model", "adapter"):
    ours = {p.name: p.read_bytes() for p in (out / parent).glob("*")}
    assert not ours or {"coa.json", "README.md"} <= set(ours)
    assert ours == {p.name: p.read_bytes() for p in (run / parent).glob("*")}
  assert (out / "adapter").exists() == (name != "scratch")
  _, sections, text = read_card(out / "model")
  config = json.loads((run / "config.json").read_text())["config"]
  origin = json.loads((out / "model" / "coa.json").read_text())
  assert sections["Config"] == config and sections["Training"] == origin
  results = json.loads((run / "results.json").read_text())
  figures = sections["Figures"].items()
  assert figures <= results.items() and "seconds" not in sections["Figures"]
  assert f"`{config['init'] or 'random weights'}`".strip("`") in text
  before, after = tmp_path / "before", weights(out)
  assert export(str(run), str(before), 1) == 1
  assert "Figures" not in read_card(before / "model")[1]
  changed = {k for k, x in weights(before).items() if not np.array_equal(x, after[k])}
  assert set(weights(before)) == set(after)
  assert changed or name == "rl"  # where one step may teach nothing


def test_the_program_exports_or_says_what_there_is(configs, tmp_path):
  run, out = f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"
  with pytest.raises(FileNotFoundError, match="holds no SFT or RL run"):
    export(str(tmp_path / "run"), str(tmp_path / "out"))
  sft.run(ml_collections.ConfigDict(configs["scratch"]), str(tmp_path / "run"))
  done = finish("export", run, out, "--step=1")
  assert done.stdout.strip() == f"step 1: {tmp_path / 'out' / 'model'}"
  shape = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
  assert shape["hidden_size"] == 32
  with hold(tmp_path / "out"):
    finish("export", run, out, reason=f"{tmp_path / 'out'}: process")
  with pytest.raises(ValueError, match="no checkpoint 7; kept are 1, 2"):
    export(str(tmp_path / "run"), str(tmp_path / "out"), 7)
