"""The synthesis program: tasks from a corpus, a stop and a resume, refusals."""

from __future__ import annotations

import pytest
from chat_server import ChatServer
from world_backend import WorldBackend

from coa_jax.cli import synthesize
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.world.build import WorldConfig, write_world
from coa_jax.data.teacher.backend import InfrastructureError
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.runtime.config import ConfigError
from configs.synthesize_chat import get_config


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
  """The pages of a small world."""
  world = WorldConfig(towns=40, people=60, films=20, companies=20, train_worlds=1)
  folder = tmp_path_factory.mktemp("world")
  return write_world(folder, "train", 4, world)["corpus"]


def config_for(corpus: str, url: str):
  config = get_config()
  config.tools.corpus = corpus
  config.synthesis.seeds, config.synthesis.workers = 30, 3
  config.chat.update(dict(base_url=url, model="scripted"))
  config.chat.retries = 0
  config.lock()
  return config


def test_tasks_come_out_the_same_after_a_stop_and_nothing_is_paid_twice(
  corpus, tmp_path
):
  with ChatServer(WorldBackend()) as server:
    config = config_for(corpus, server.url)
    whole = synthesize.run(config, str(tmp_path / "whole"))
    num_requests = len(server.requests)
    server.requests.clear()
    server.faults = ["ok"] * 60 + [500] * 99
    with pytest.raises(InfrastructureError, match="status 500"):
      synthesize.run(config, str(tmp_path / "cut"))
    server.faults = []
    paid = (tmp_path / "cut" / "calls.jsonl").read_text().count('"kind": "model"')
    failed = len(server.requests) - paid
    again = synthesize.run(config, str(tmp_path / "cut"))
    assert len(server.requests) - failed == num_requests == again["calls"]["calls"]
  for results in (whole, again):
    for name in ("seconds", "retries"):
      del results["calls"][name]
  assert again == whole and paid == 60
  tasks = load_tasks(tmp_path / "cut" / "tasks.jsonl")
  assert len(tasks) == whole["tasks"] == sum(whole["by_family"].values())
  assert set(whole["by_family"]) <= {"atomic", "depth", "width"}
  assert whole["by_family"]["atomic"] > 25 and whole["by_family"]["depth"] > 5


def test_refusals(corpus, tmp_path):
  config = config_for(corpus, "http://localhost:9/v1").copy_and_resolve_references()
  config.tools.tools = ("code",)
  with pytest.raises(ConfigError, match="needs wiki_search"):
    synthesize.run(config, str(tmp_path))
  config.tools.tools = ("wiki_search",)
  config.tools.corpus = str(tmp_path / "none.jsonl")
  with pytest.raises(FileNotFoundError, match="none"):
    synthesize.run(config, str(tmp_path))
  write_jsonl(tmp_path / "bad.jsonl", [{"id": "x"}])
  config.tools.corpus = str(tmp_path / "bad.jsonl")
  with pytest.raises(ValueError, match=r"bad\.jsonl"):
    synthesize.run(config, str(tmp_path))
