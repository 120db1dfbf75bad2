"""Best of k by a reward part, and by a model behind a real server on loopback."""

from __future__ import annotations

import json

import pytest
from chat_server import ChatServer
from programs import small_evaluation
from report import samples

from coa_jax import evaluate
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.report import scores
from coa_jax.rewards.best_of import (
  CHOSEN,
  SelectorConfig,
  choose_by_model,
  choose_by_part,
  read_choice,
)
from tools_sandbox.chat import ChatConfig

REPLIES = [
  ('{"rationale": "x", "choice": 2}', 1),
  ('```json\n{"choice": "3"}\n```', 2),
  ("2", 1),
  ("**1**.", 0),
  ('<think>"choice": 3</think>{"choice": 1}', 0),
  ('{"rationale": "\\"choice\\": 3", "choice": 1}', 0),  # a quotation
  ('{"choice": 1} {"choice": 2}', None),
  ('{"choice": 0}', None),
  ('{"choice": 4}', None),
  ("99999999999999999999", None),
  ("attempt 2 or 3", None),
  # The object, and what stands around it.
  ('I choose this: {"choice": 2}', 1),
  ('{"choice": 2}\nBoth say Paris.', 1),
  ('{"choice": 2, "rationale": "not 1"}', 1),
  ('{"rationale": "{1}", "choice": 3}', 2),
  ("{'choice': 2}", None),  # no JSON
  ('{"choice":\n  2\n}', 1),
  ('{"choice": 3} {"choice": 3}', 2),  # said twice
  ('```\n{"choice": 1}\n```', 0),
  ('{"choice": 2', 1),  # cut off after the number
  ('{"choice": null}', None),
  ('{"choice": "none"}', None),
  ('{"choice": -1}', None),
  ('{"choice": [1, 2]}', None),
  ('{"rationale": "the second"}', None),
  # A number alone, and in prose.
  (" 3\n", 2),
  ("(2)", 1),
  ("[1]", 0),
  ("#3", 2),
  ("4", None),
  ("0", None),
  ("2.", 1),
  ("1, 2", None),
  ("two", None),
  ("The answer is Paris.", None),
  ("I can not choose.", None),
  ("<think>1</think>2", 1),
  ("<think>1</think><think>2</think>3", 2),
  ("<think>2</think>", None),
  ('<think>"choice": 3', None),
  ("", None),
  # Signs, fractions and other ways to write a number.
  ("-1", None),
  ("- 2", None),
  ("+2", 1),
  ("1.5", None),
  ("2/3", None),
  ("02", 1),
  ("2\u20e3", 1),  # the key-cap emoji
  ("\u0662", 1),  # an Arabic-Indic two
  ("\u00b2", None),  # a superscript
  ("II", None),
  ('{"choice": 2.0}', 1),
  ('{"choice": 2.5}', None),
  ('{"choice": 2e0}', None),
  ('{"choice": true}', None),
  # Other keys and nested objects.
  ('{"Choice": 2}', None),
  ('{"choices": 2}', None),
  ('{"attempt": 2}', None),
  ('{"result": {"choice": 2}}', 1),
  ('{"rationale": "\\"choice\\": 3"}', None),
  ('{"rejected": 1, "choice": 3}', 2),
  ("{choice: 2}", None),
]


@pytest.mark.parametrize(("reply", "choice"), REPLIES)
def test_a_reply(reply, choice):
  assert read_choice(reply, 3) == choice


def group(task: str, *answers: str | None) -> list[Trajectory]:
  """A task's attempts; "Paris" is right."""
  return [
    samples.trajectory(task, sample=i, answer=a, right=a == "Paris")
    for i, a in enumerate(answers)
  ]


class Chooser(ChatServer):
  """Chooses the attempt whose answer is the longest."""

  def answer(self, body: dict) -> str:
    text = body["messages"][-1]["content"]
    data = json.loads(text[text.index("{\n") : text.rindex("\n}") + 2])
    best = max(data["attempts"], key=lambda one: len(one["answer"]))
    assert data["question"] and best["work"]
    return json.dumps({"rationale": "longest", "choice": best["attempt"]})


def test_a_model_chooses_and_its_choices_are_kept(tmp_path):
  cache = str(tmp_path / "selections.jsonl")
  with Chooser() as server:
    config = SelectorConfig(ChatConfig(server.url, "m"), chars=300)
    for _ in range(2):
      groups = [
        group("a", "Rome", "Oslo", "Paris", "Constantinople"),
        group("b", "Paris", "paris.", "the Paris"),  # equal answers: not asked
        group("c", "Rome", "Paris"),  # too few for 3
        group("d", None, None, None),
      ]
      choose_by_model(config, groups, (3, 4), cache)
      chosen = {
        t.task_id: t.meta[CHOSEN] for g in groups for t in g if CHOSEN in t.meta
      }
      assert chosen["b"] == chosen["d"] == ["selected_of_3"] and "c" not in chosen
      assert groups[0][2].meta[CHOSEN] == ["selected_of_3"]
      assert groups[0][3].meta[CHOSEN] == ["selected_of_4"]
    assert len(server.requests) == 2
    assert "Capital of France?" in server.requests[0].body.decode()
    assert "Lutetia" not in server.requests[0].body.decode()  # an accepted answer
  results = scores.summary([], [t for g in groups for t in g], ks=(3, 4))
  assert results["selected_of_3"] == pytest.approx(2 / 3)
  assert results["selected_of_4"] == 0.0 and results["best_of_4"] == 0.0
  assert results["ci95"]["selected_of_3"][0] > 0


def test_a_missing_choice_is_left_out_and_said(tmp_path, caplog):
  with Chooser() as server:
    server.faults.extend(["I can not say"] * 3)
    config = SelectorConfig(ChatConfig(server.url, "m", retries=0), workers=1)
    groups = [group("a", "Paris", "Oslo"), group("b", "Oslo", "Paris")]
    choose_by_model(config, groups, (2,), str(tmp_path / "s.jsonl"))
  assert "1 of 2 choices failed" in caplog.text and "can not say" in caplog.text
  results = scores.summary([], [t for g in groups for t in g], ks=(2,))
  assert results["selected_of_2"] == 1.0


def test_a_file_that_holds_no_choices_is_refused(tmp_path):
  (tmp_path / "s.jsonl").write_text('{"key": "x", "choice": true}\n')
  config = SelectorConfig(ChatConfig("http://127.0.0.1:1/v1", "m"))
  with pytest.raises(ValueError, match=r"s.jsonl:1: not a choice; accepted: key"):
    choose_by_model(config, [], (3,), str(tmp_path / "s.jsonl"))


def test_a_reward_part_chooses(tmp_path):
  groups = [group("a", "Rome", "Paris", "Oslo"), group("b", "Paris", "Rome", "Oslo")]
  for attempts in groups:
    for t, score in zip(attempts, (0.1, 0.7, 0.7), strict=True):
      t.reward_parts["part_score"] = score
  choose_by_part(groups, "part_score", (1, 3))
  results = scores.summary([], [t for g in groups for t in g], ks=(1, 3))
  assert results["best_of_1_by_part_score"] == results["best_of_3_by_part_score"] == 0.5
  choose_by_part(groups, "reward", (3,))
  results = scores.summary([], [t for g in groups for t in g], ks=(3,))
  assert results["best_of_3_by_reward"] == 1.0
  with pytest.raises(
    ValueError, match=r"best_by='x': task 'a' .* accepted: reward, an"
  ):
    choose_by_part(groups, "x", (3,))


@pytest.mark.slow
def test_a_finished_evaluation_gets_choices(tmp_path):
  """They change neither the attempts nor the other figures."""
  config = small_evaluation(tmp_path)
  config.eval.samples = 3
  before = evaluate.run(config, str(tmp_path / "out"))
  played = (tmp_path / "out/sampled.jsonl").read_bytes()
  with Chooser() as server:
    config.eval.best_by = "answer"
    config.eval.selector = dict(chat=dict(base_url=server.url, model="m"))
    after = evaluate.run(config, str(tmp_path / "out"))
  assert (tmp_path / "out/sampled.jsonl").read_bytes() == played
  assert 0 <= after["selected_of_3"] <= after["best_of_3_by_answer"]
  same = [name for name in before if name not in ("ci95", "by_source", "by_family")]
  assert [after[name] for name in same] == [before[name] for name in same]
