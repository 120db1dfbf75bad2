"""Formats end to end: a toy that has learnt nothing of them, real tools, one table."""

from __future__ import annotations

import json
import random

import ml_collections
import pytest
import toy

from coa_jax import evaluate
from coa_jax.config import ConfigError
from coa_jax.protocol import prompts
from coa_jax.protocol.tool_naming import draw_naming
from coa_jax.protocol.trajectory import read_trajectories, write_jsonl
from experiments.studies import tool_formats
from tests.backend import BACKEND


@pytest.fixture
def config(tmp_path) -> ml_collections.ConfigDict:
  toy.save_policy(str(tmp_path / "model"), toy.actor(60).params)
  write_jsonl(tmp_path / "tasks.jsonl", [t.to_json() for t in toy.TASKS[:2]])
  prompt = prompts.prompt_segments(toy.VARIANT.with_tools(("code",)), "2 + 3", "full")
  toy.tokenizer().encode_prompt(prompt)
  length = sum(len(s.ids) for s in prompt)
  return ml_collections.ConfigDict(
    dict(
      init=str(tmp_path / "model"),
      rollout=dict(style="full", slots=2, window=16, max_len=length + 200),
      tools=dict(tools=("code",), sandbox=BACKEND),
      tasks=dict(uri=str(tmp_path / "tasks.jsonl")),
      eval=dict(greedy=True, samples=0),
      formats=dict(seen=1, unseen=1),
    )
  )


def test_every_format_and_other_tools_are_played_and_compared(config, tmp_path):
  functions = dict(quote=dict(description="quote a text", function="json:dumps"))
  with config.unlocked():
    config.formats.tools = dict(quoting=dict(tools=("tool",), functions=functions))
  results = tool_formats.run(config, str(tmp_path / "w"))
  names = [row["name"] for row in results["formats"]]
  assert names == ["native", "seen_0", "unseen_0", "tools_quoting"]
  assert set(results["groups"]) == {"native", "seen", "unseen", "tools"}
  assert all(group["tasks"] == 2 for group in results["groups"].values())
  assert set(results["differences"]) == {"seen", "unseen", "tools"}
  for row in results["formats"]:
    played = read_trajectories(tmp_path / "w" / row["name"] / "greedy.jsonl")
    assert len(played) == 2
    prompt = played[0].segments[0].text
    if row["name"] == "native":
      assert "<code>" in prompt and row["tools"] == "code"
    elif row["name"] == "tools_quoting":
      assert "quote a text" in prompt and "<code>" not in prompt
    else:
      name, layout = row["tools"].split(": ", 1)
      assert f"<{name}>" in prompt and layout in prompt
  assert json.loads((tmp_path / "w" / "formats.json").read_text()) == results
  first = (tmp_path / "w" / "unseen_0" / "greedy.jsonl").stat().st_mtime_ns
  assert tool_formats.run(config, str(tmp_path / "w")) == results
  assert (tmp_path / "w" / "unseen_0" / "greedy.jsonl").stat().st_mtime_ns == first


# A tool that can not be opened: to be said before anything is played.
BROKEN = dict(
  tools=("tool",),
  functions=dict(quote=dict(description="quote a text", function="json:dumbs")),
)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(rollout=dict(style="brief")), "only 'full' describes formats"),
    (dict(rollout=dict(constrain=True)), "the grammar knows the protocol's own tools"),
    (dict(tools=dict(descriptions=dict(code="run it"))), r"leave out tools\.mcp"),
    (dict(formats=dict(tools=dict(x=dict(tools=("codd",))))), r"tools.*x.*'codd'"),
    (dict(formats=dict(tools={"a/b": dict(tools=("code",))})), "'a/b' names a folder"),
    (dict(formats=dict(tools=dict(x=BROKEN))), r"functions\.quote.*json:dumbs"),
  ],
)
def test_refusals(config, tmp_path, change, message):
  with config.unlocked():
    config.update(change)
  with pytest.raises(ValueError, match=message):
    tool_formats.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_a_format_is_drawn_for_functions_too(config, tmp_path):
  with config.unlocked():
    tool = dict(function="experiments.calculator:calculate", description="sums")
    config.tools.functions = dict(calculate=tool)
    config.rollout.max_len += 600
    config.formats = dict(seen=0, unseen=1)
  results = tool_formats.run(config, str(tmp_path / "w"))
  _, unseen = results["formats"]
  assert "a JSON object with function" in unseen["tools"]
  played = read_trajectories(tmp_path / "w" / "unseen_0" / "greedy.jsonl")
  assert "- calculate: sums." in played[0].segments[0].text


def test_a_workdir_of_one_variant_is_not_gone_on_with_in_another(config, tmp_path):
  with config.unlocked():
    del config.formats
  variant = toy.VARIANT.with_tools(("code",))
  first, other = (
    draw_naming(variant, random.Random(n), held_out=True).apply(variant) for n in (0, 1)
  )
  evaluate.run(config, str(tmp_path / "w"), variant=first)
  with pytest.raises(ConfigError, match="variant"):
    evaluate.run(config, str(tmp_path / "w"), variant=other)
