"""The recipes in `configs/` for pretrained models run in their tiny form.

A random model that reads full prompts replaces the pretrained one.
"""

from __future__ import annotations

import copy
import json
import pathlib
import runpy

import ml_collections
import pytest
import toy
from chat_server import ChatServer

from coa_jax import evaluate, rl, sft
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf.io import save_model
from coa_jax.model.transformer import init_params
from coa_jax.protocol import prompts, roles, tokenizer_training
from coa_jax.protocol.trajectory import read_trajectories, write_jsonl
from coa_jax.tools.functions import Functions, FunctionTool
from tests.backend import BACKEND
from tools_sandbox.faults import BadCall

ROOT = pathlib.Path(__file__).parent.parent
READ = {
  "sft_afm": sft.SFTConfig,
  "rl_afm": rl.RLConfig,
  "evaluate_afm": evaluate.EvaluateConfig,
}
EXITS = {"cellar": {"up": "hall"}, "hall": {"down": "cellar"}}
ROOMS = {"start": "cellar", "goal": "hall", "exits": EXITS}
TASKS = [
  {"id": f"sum-{i}", "question": f"{i} + 3", "answers": [str(i + 3)], "meta": ROOMS}
  for i in range(3)
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
  """A folder with a model, tasks, a corpus and trajectories."""
  folder = tmp_path_factory.mktemp("recipes")
  texts = []
  for name in ("unified", "web", "mhqa", "code", "math"):
    texts.append(prompts.instructions(roles.get_variant(name), "full"))
  tokenizer = tokenizer_training.train_tokenizer(texts * 4, 2048)
  cfg = ModelConfig(vocab_size=2048, width=16, layers=1, heads=2, head_dim=8, ff=32)
  save_model(str(folder / "model"), cfg, init_params(cfg, 0))
  tokenizer.save(str(folder / "model"))
  (folder / "tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in TASKS))
  page = {"id": "p", "title": "Sums", "text": "2 + 3 is 5."}
  (folder / "corpus.jsonl").write_text(json.dumps(page) + "\n")
  # Like a user's own trajectories: text without token ids.
  rows = [copy.deepcopy(t) for t in toy.trajectories() * 2]
  for segment in (s for t in rows for s in t.segments):
    segment.ids, segment.logps, segment.versions = [], [], []
  write_jsonl(str(folder / "trajectories.jsonl"), rows)
  return folder


def tiny(home: pathlib.Path, recipe: str) -> ml_collections.ConfigDict:
  """The tiny form of the recipe FILE:ARGUMENT, on the files in `home`."""
  file, _, arg = recipe.partition(":")
  path = str(ROOT / "configs" / f"{file}.py")
  config = runpy.run_path(path)["get_config"](f"{arg}:tiny" if arg else "tiny")
  config.init = str(home / "model")
  config.model.dtype = "float32"
  for section in ("tasks", "dev"):
    if section in config:
      config[section].uri = str(home / "tasks.jsonl")
  if "tools" in config:
    config.tools.sandbox = BACKEND
    if "corpus" in config.tools:
      config.tools.corpus = str(home / "corpus.jsonl")
  return config


@pytest.mark.slow
@pytest.mark.parametrize(
  "recipe",
  [
    "rl_own_tool",
    "rl_own_environment",
    "rl_gsm8k",
    "rl_smollm2",
    pytest.param("rl_afm:web:32b", marks=pytest.mark.soak),
    pytest.param("rl_afm:mhqa", marks=pytest.mark.soak),
    "rl_afm:code:1.5b",
    pytest.param("rl_afm:math", marks=pytest.mark.soak),
  ],
)
def test_rl_makes_its_two_updates(home, tmp_path, recipe):
  results = rl.run(tiny(home, recipe), str(tmp_path))
  assert results["steps"] == 2, results


def test_the_tool_of_the_recipe_counts_days_and_says_what_is_no_date():
  config = runpy.run_path(str(ROOT / "configs" / "rl_own_tool.py"))["get_config"]()
  (name, tool), *_ = config.tools.functions.items()
  tools = Functions({name: FunctionTool(**tool)})

  def call(first: object, last: object) -> str:
    arguments = {"first": first, "last": last}
    return tools(json.dumps({"name": name, "arguments": arguments}), 1.0)

  assert call("2024-02-28", "2024-03-01") == "2"
  for wrong in ("yesterday", 7):
    with pytest.raises(BadCall, match=r"isoformat|must be str"):
      call(wrong, "2024-03-01")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft_afm:mhqa:7b", "sft_smollm2"])
def test_sft_trains_on_trajectories(home, tmp_path, recipe):
  config = tiny(home, recipe)
  config.data.trajectories = str(home / "trajectories.jsonl")
  assert sft.run(config, str(tmp_path))["steps"] == 2


@pytest.mark.slow
def test_an_instruct_model_answers_in_one_reply(home, tmp_path):
  pytest.importorskip("openai")
  results = evaluate.run(tiny(home, "evaluate_chat"), str(tmp_path))
  assert results["tasks"] == len(TASKS) and results["tool_calls_per_task"] == 0
  for t in read_trajectories(str(tmp_path / "greedy.jsonl")):
    assert "Reply with the answer alone." in t.segments[0].text
    assert len(t.written) == 1


@pytest.mark.slow
def test_a_judge_of_ones_own_is_asked(home, tmp_path):
  config = tiny(home, "evaluate_judge")
  with ChatServer() as server:
    config.reward.judge.chat.base_url = server.url
    config.reward.judge.chat.model = "judge"
    results = evaluate.run(config, str(tmp_path))
  assert results["tasks"] == len(TASKS) and results["pass3"] is not None


@pytest.mark.slow
@pytest.mark.parametrize(
  "recipe",
  [
    "evaluate_afm:math",
    "evaluate_afm:web:32b",
    pytest.param("evaluate_afm:mhqa:1.5b", marks=pytest.mark.soak),
    pytest.param("evaluate_afm:code", marks=pytest.mark.soak),
  ],
)
def test_benchmarks_are_scored_by_source(home, tmp_path, recipe):
  sources = []
  for source in ("aime", "amc"):
    folder = tmp_path / source
    folder.mkdir()
    rows = [{**task, "id": f"{source}-{task['id']}"} for task in TASKS[:2]]
    for row in rows:
      row.update(kind="math", source=source)
    (folder / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources.append(f"{folder}/*.jsonl")
  config = tiny(home, recipe)
  config.tasks.uri = ",".join(sources)
  results = evaluate.run(config, str(tmp_path / "run"))
  assert results["tasks"] == 4
  assert {name: one["tasks"] for name, one in results["by_source"].items()} == {
    "aime": 2,
    "amc": 2,
  }
  stage = "greedy" if config.eval.greedy else "sampled"
  played = read_trajectories(str(tmp_path / "run" / f"{stage}.jsonl"))
  assert len(played) == 4 * max(1, config.eval.samples)


def test_every_agent_has_a_config_of_every_size():
  for file in ("sft_afm", "rl_afm", "evaluate_afm"):
    found = runpy.run_path(str(ROOT / "configs" / f"{file}.py"))
    get_config = found["get_config"]
    texts = set()
    for agent in found["AGENTS"]:
      for size in found["SIZES"]:
        config = get_config(f"{agent}:{size}")
        assert config.to_dict() == get_config(f"{size}:{agent}").to_dict()
        mesh = config.mesh
        if file == "sft_afm":
          assert config.data.rows % (mesh.data * mesh.fsdp) == 0
        if file == "rl_afm":
          assert config.algo.batch.rows % (mesh.data * mesh.fsdp) == 0
        texts.add(str(config))
        evaluate.read_config(config, READ[file])
    assert len(texts) >= 9
    for wrong in ("web:web", "web:mhqa", "7b:32b", "web::7b"):
      with pytest.raises(ValueError, match=f"{file} answers"):
        get_config(wrong)
