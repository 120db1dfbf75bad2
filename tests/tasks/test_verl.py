"""Rows as written for verl: numbers as truths, several turns, system messages."""

from __future__ import annotations

import json

import pytest

from coa_jax.data.tasks.sources import TasksConfig, select_tasks
from coa_jax.data.tasks.task import Kind

NAN = float("nan")


def write(path, lines) -> str:
  path.write_text("".join(json.dumps(row) + "\n" for row in lines))
  return str(path)


def one(tmp_path, row, **config):
  (task,) = select_tasks(TasksConfig(write(tmp_path / "set.jsonl", [row]), **config))
  return task


def verl(*turns, truth="1", index=0, **extra):
  prompt = [dict(zip(("role", "content"), turn, strict=True)) for turn in turns]
  return {
    "data_source": "s",
    "prompt": prompt or [{"role": "user", "content": "one?"}],
    "reward_model": {"ground_truth": truth},
    "extra_info": {"index": index, **extra},
  }


def test_index_0_and_numbers_as_truths(tmp_path):
  assert one(tmp_path, verl()).id == "s-0"
  for truth, answer in ((72, "72"), (72.0, "72"), (0, "0"), (2.5, "2.5")):
    task = one(tmp_path, verl(truth=truth, difficulty=0))
    assert (task.answers, task.kind, task.family) == ((answer,), Kind.MATH, "0")
  for truth in NAN, "", None:
    with pytest.raises(ValueError, match=r"'reward_model.ground_truth' is missing"):
      one(tmp_path, verl(truth=truth))


def test_earlier_turns_are_kept(tmp_path):
  turns = (("user", "one?"), ("assistant", "x"), ("user", "two?"))
  whole = "User: one?\n\nAssistant: x\n\nUser: two?"
  assert one(tmp_path, verl(*turns)).question == whole
  assert one(tmp_path, verl(*turns, question="2?")).question == whole.replace(
    "two?", "2?"
  )
  row = verl(*turns)
  assert one(tmp_path, {**row, "prompt": json.dumps(row["prompt"])}).question == whole
  parts = ("user", [{"type": "text", "text": "one?"}])
  assert one(tmp_path, verl(parts)).question == "one?"
  trl = {"prompt": row["prompt"], "answer": "1 x"}
  assert one(tmp_path, trl).question == whole
  for bad, message in (
    ((*turns, ("assistant", "y")), "a user message at the end of 'prompt'"),
    ((("user", "one?"), ("tool", "x"), ("user", "b")), r"field 'prompt\[1\]' is"),
    ((("user", 5),), r"field 'prompt\[0\]' is"),
  ):
    with pytest.raises(ValueError, match=rf"set.jsonl:1: .*{message}"):
      one(tmp_path, verl(*bad))


def test_system_messages_are_kept_beside_the_question(tmp_path, caplog):
  row = verl(("system", "Be brief."), ("user", "one?"))
  for given in row, {"prompt": row["prompt"], "answer": "1 x"}:
    caplog.clear()
    task = one(tmp_path, given)
    assert (task.question, task.meta["system"]) == ("one?", "Be brief.")
    assert "rows with a system message: 1" in caplog.text
