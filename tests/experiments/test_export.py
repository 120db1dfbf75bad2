"""`export` turns a checkpoint into the folder written at the run's end."""

from __future__ import annotations

import json
import pathlib

import ml_collections
import numpy as np
import pytest
import toy
from forked import finish
from programs import toy_runs
from safetensors.numpy import load_file

from coa_jax import rl, sft
from coa_jax.cli.export import export
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.runtime.lock import hold
from tests.backend import BACKEND
from tests.cards import read_card


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, dict]:
  """SFT from scratch; SFT with adapters; RL with adapters and a critic."""
  folder = tmp_path_factory.mktemp("inputs")
  runs = toy_runs(folder)
  common = dict(optim=dict(lr=1e-2, warmup=1), checkpoint=dict(every=1, keep=2))
  lora = dict(rank=3, alpha=6.0, matrices=["q", "up"])
  tuned = common | dict(model=dict(scan=True), lora=lora)
  sft = runs["sft"] | tuned
  sft["data"] |= dict(steps=2, rows=4, validation=0)
  # The run from scratch encodes the text with its own tokenizer.
  text = toy.trajectories() * 2
  for segment in (s for t in text for s in t.segments):
    segment.ids = []
  write_jsonl(folder / "text.jsonl", text)
  drawn = sft["data"] | dict(trajectories=str(folder / "text.jsonl"))
  drawn |= dict(vocab_size=toy.MODEL.vocab_size)
  shape = dict(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ff=64)
  rl = runs["rl"] | tuned
  rl["tools"] = dict(tools=["code"], sandbox=BACKEND)
  rl["algo"] |= dict(loss=dict(advantage="gae"), batch=dict(rows=2, length=128))
  rl["algo"]["sampling"] = dict(prompts=1, samples=4, filter_groups=False)
  return {"scratch": common | dict(model=shape, data=drawn), "sft": sft, "rl": rl}


def weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
  return load_file(folder / "model" / "model.safetensors")


@pytest.mark.slow
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
  assert changed or name == "rl"  # one step may change nothing


@pytest.mark.slow
def test_the_program_exports_or_says_what_there_is(configs, tmp_path):
  run, out = f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"
  with pytest.raises(FileNotFoundError, match="holds no SFT or RL run"):
    export(str(tmp_path / "run"), str(tmp_path / "out"))
  sft.run(ml_collections.ConfigDict(configs["scratch"]), str(tmp_path / "run"))
  done = finish("export", run, out, "--step=1")
  assert done.stdout.strip() == f"step 1: {tmp_path / 'out' / 'model'}"
  shape = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
  assert shape["hidden_size"] == 32
  finish("export", run, run.replace("workdir", "out"), reason="holds a run")
  with hold(tmp_path / "out"):
    finish("export", run, out, reason=f"{tmp_path / 'out'}: process")
  with pytest.raises(ValueError, match="no checkpoint 7; kept are 1, 2"):
    export(str(tmp_path / "run"), str(tmp_path / "out"), 7)
