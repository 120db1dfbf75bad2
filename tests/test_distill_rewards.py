"""Distillation grades answers like RL: text, mathematics, tests, a judge."""

from __future__ import annotations

import json

import ml_collections
import pytest
from chat_server import ChatServer

from coa_jax import distill
from coa_jax.data.teacher.backend import InfrastructureError, Reply
from coa_jax.protocol.trajectory import read_trajectories
from coa_jax.runtime.config import ConfigError
from tests.backend import BACKEND, needs_jail

RIGHT, WRONG = "print(int(input())*2)", "print(int(input())+2)"
TESTS = {"stdin": ["2", "5"], "expected_output": ["4", "10"]}
PROGRAM = dict(kind="code", answers=["a program"], meta=dict(tests=TESTS))
TASKS = {
  "twice": dict(PROGRAM, reply=RIGHT),
  "twice, badly": dict(PROGRAM, reply=WRONG),
  "half of one": dict(kind="math", answers=["1/2"], reply="0.5"),
  "the playwright": dict(
    kind="qa", answers=["William Shakespeare"], reply="W. Shakespeare"
  ),
}
LINES = {
  "planner": "compute it",
  "code": "```py\nprint(1)\n```",
  "reflector": "it works",
  "verifier": "SCORE: 4\nWHY: as observed",
}
NEXT = ("planner", "code", "solver")


def team(agent, messages):
  """Plays a team: runs one program, then answers with the task's `reply`."""
  if agent == "orchestrator":
    turn = sum(m.role == "assistant" for m in messages)
    return Reply(f"NEXT: {NEXT[turn]}\nREASON: go")
  if agent == "solver":
    question = messages[1].content.splitlines()[0].removeprefix("Question: ")
    return Reply(f"ANSWER: {TASKS[question]['reply']}")
  return Reply(LINES[agent])


def any_answer(task, answer, trajectory):
  """A user-defined grader that accepts every answer."""
  return 1.0


class Server(ChatServer):
  """A mock server for the team and the answer judge.

  Attributes:
    down: whether the judge gives no verdict.
    judged: number of requests to the judge.
  """

  down = False
  judged = 0

  def answer(self, body: dict) -> str:
    if "expert evaluator" not in body["messages"][0]["content"]:
      return super().answer(body)
    self.judged += 1
    return "I would rather not say" if self.down else '{"judgement": "correct"}'


@pytest.fixture
def config(tmp_path) -> ml_collections.ConfigDict:
  rows = [
    {"id": q, "question": q, **{k: v for k, v in row.items() if k != "reply"}}
    for q, row in TASKS.items()
  ]
  path = tmp_path / "tasks.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return ml_collections.ConfigDict(
    dict(
      tasks=dict(uri=str(path)),
      tools=dict(tools=("code",), sandbox=BACKEND),
      teacher=dict(backend="chat", workers=2),
      filters=dict(min_activations=1),
      reward=dict(code=dict(test_s=20.0)),
    )
  )


def run(config, server, workdir):
  with config.unlocked():
    config.chat = dict(base_url=server.url, model="m")
  return distill.run(config, str(workdir))


def rewards(workdir) -> dict[str, float]:
  return {t.task_id: t.reward for t in read_trajectories(workdir / distill.TEACHER)}


@pytest.mark.slow
@needs_jail
def test_each_kind_has_its_grader(config, tmp_path):
  workdir = tmp_path / "w"
  with Server(team) as server:
    results = run(config, server, workdir)
  assert list(rewards(workdir).values()) == [1.0, 0.0, 1.0, 0.0]
  found = read_trajectories(workdir / distill.TRAJECTORIES)
  assert {t.task_id for t in found} == {"twice", "half of one"}
  assert all(t.reward_parts == {"answer": 1.0} for t in found)
  assert found[0].meta["graded"] == {"outcome": "passed", "passed": 2, "seen": 2}
  assert results["filters"]["quality"]["dropped"] == {"wrong_answer": 2}
  assert results["right"] == 0.5


@pytest.mark.slow
@needs_jail
def test_a_judge_by_config_and_its_failure_is_no_wrong_answer(config, tmp_path):
  with Server(team) as server:
    judge = dict(chat=dict(base_url=server.url, model="j"))
    with config.unlocked():
      config.reward = dict(graders=dict(qa="judge"), judge=judge)
    server.down = True
    results = run(config, server, tmp_path / "w")
    assert results["infrastructure"] == 1 and server.judged == 3
    assert "the playwright" not in rewards(tmp_path / "w")
    paid = results["calls"]["calls"]
    server.down = False
    results = run(config, server, tmp_path / "w")  # only that run resumes
    assert results["infrastructure"] == 0 and server.judged == 4
    assert results["calls"]["calls"] == paid
    assert rewards(tmp_path / "w")["the playwright"] == 1.0
    run(config, server, tmp_path / "w")
    assert server.judged == 4  # verdicts are saved with their runs
  assert (tmp_path / "w" / "verdicts.jsonl").exists()


def test_a_judge_that_stays_down_stops_the_run(config, tmp_path):
  with Server(team) as server:
    judge = dict(chat=dict(base_url=server.url, model="j"))
    graders = dict(qa="judge", code="judge", math="judge")
    with config.unlocked():
      config.reward = dict(graders=graders, judge=judge)
      config.tools.sandbox = "subprocess"
    server.down = True
    with pytest.raises(InfrastructureError, match=r"reward\.judge: no verdict"):
      run(config, server, tmp_path / "w")


@pytest.mark.parametrize(
  ("reward", "message"),
  [
    (dict(graders=dict(code="qa")), "'twice': code tasks need hidden tests"),
    (dict(graders=dict(qa="judge")), "needs reward.judge"),
    (dict(shaping=dict(tool_cost=dict(per_call=0.1))), "config.reward.shaping"),
    (dict(graders=dict(qa="nowhere:f")), "'nowhere:f' cannot be imported"),
  ],
)
def test_an_unjudgeable_reward_is_refused_first(config, tmp_path, reward, message):
  with config.unlocked():
    config.reward = reward
    config.chat = dict(base_url="http://127.0.0.1:9/v1", model="m")
  with pytest.raises((ConfigError, ValueError), match=message):
    distill.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_violations_are_inspected_by_config(config, tmp_path):
  def backend(agent, messages):
    if agent != "inspector":
      return team(agent, messages)
    broken = '{"rule": 4, "quote": "x"}' if "twice" in messages[1].content else ""
    return Reply(f'{{"violations": [{broken}]}}')

  with Server(backend) as server:
    graders = dict(code="test_distill_rewards:any_answer")
    with config.unlocked():
      config.violations = dict(base_url=server.url, model="m")
      config.tools.sandbox = "subprocess"
      config.reward = dict(graders=graders)
    results = run(config, server, tmp_path / "w")
  assert results["filters"]["quality"]["dropped"] == {
    "instruction_violation": 2, "wrong_answer": 1
  }  # fmt: skip
  assert results["violations"]["inspected"] == 3
  assert results["violations"]["rules"] == {"4": 2}
  found = read_trajectories(tmp_path / "w" / distill.TRAJECTORIES)
  assert [t.task_id for t in found] == ["half of one"]
  manifest = json.loads((tmp_path / "w" / distill.MANIFEST).read_text())
  assert manifest["counts"]["violations"]["violating"] == 2
