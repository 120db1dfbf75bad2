"""A small world, tasks about it, and the real tools over its pages."""

from __future__ import annotations

import pytest

from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.tasks.world.build import WorldConfig, write_world
from coa_jax.data.tasks.world.questions import FAMILIES
from coa_jax.protocol.roles import get_variant
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from tests.backend import BACKEND

TOOLS = ("wiki_search", "code")


@pytest.fixture(scope="session")
def world_files(tmp_path_factory):
  """Paths of the pages and of 120 tasks from all families."""
  config = WorldConfig(
    towns=40,
    people=60,
    films=20,
    companies=20,
    train_worlds=2,
    mix=tuple((family, 1.0) for family in FAMILIES),
  )
  return write_world(tmp_path_factory.mktemp("world"), "train", 120, config)


@pytest.fixture(scope="session")
def tasks(world_files):
  """The world's tasks."""
  return load_tasks(world_files["tasks"])


@pytest.fixture(scope="session")
def toolbox(world_files):
  """The real tools: search over the pages, and code in the sandbox."""
  corpus = world_files["corpus"]
  config = ToolsConfig(tools=TOOLS, corpus=corpus, top_k=1, sandbox=BACKEND)
  with Toolbox(config) as box:
    yield box


@pytest.fixture(scope="session")
def unified():
  """The unified variant, with these tools."""
  return get_variant("unified").with_tools(TOOLS)


@pytest.fixture(scope="session")
def run_code():
  """A function that runs the real code tool."""
  with Toolbox(ToolsConfig(tools=("code",), sandbox=BACKEND)) as box:
    yield box.call
