"""Tools under other names: real calls behind them, errors that a model can act on."""

from __future__ import annotations

import random

import pytest
import toy

from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.parser import parse
from coa_jax.protocol.tool_naming import ToolNaming, draw_naming
from coa_jax.protocol.tools import SPECS
from coa_jax.protocol.trajectory import CallStatus, Status
from coa_jax.rollout.episode import CoAEpisode, EpisodeConfig
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from experiments.studies.tool_formats import RenamedTools
from tests.backend import BACKEND

TASK = toy.TASKS[0]
PROGRAM = tool_bodies.render_code("print(2+3)")


@pytest.fixture(scope="module")
def tools():
  with Toolbox(ToolsConfig(tools=("code",), sandbox=BACKEND)) as toolbox:
    yield toolbox


def formats(count: int = 12) -> list[ToolNaming]:
  variant = toy.VARIANT.with_tools(("code",))
  drawn = [draw_naming(variant, random.Random(n), held_out=True) for n in range(count)]
  by_format = {f.formats["code"].description: f for f in drawn}
  assert len(by_format) == len(SPECS["code"].held_out.formats)
  return list(by_format.values())


@pytest.mark.parametrize(
  "drawn", formats(), ids=lambda f: f.formats["code"].description
)
def test_a_trajectory_in_another_format(tools, drawn):
  """Written turns, played against the real tool behind another name."""
  variant = drawn.apply(toy.VARIANT.with_tools(("code",)))
  setting = EpisodeConfig(variant, "full", max_calls=4, tool_seconds=60.0)
  name, form = drawn.names["code"], drawn.formats["code"]
  calls = [roles.wrap(name, body) for body in (form.write(PROGRAM), PROGRAM)]
  turns = [roles.wrap(roles.THINK, "t") + call for call in calls]
  episode = CoAEpisode(
    TASK, 0, 0, 0, 1.0, toy.tokenizer(), RenamedTools(tools, drawn), setting
  )
  t = toy.drive(episode, [*turns, toy.end("5")])
  right, wrong = t.calls
  assert (right.name, right.result, right.status) == (name, "5", CallStatus.OK)
  assert right.arguments == form.write(PROGRAM)
  assert wrong.status == CallStatus.MODEL and form.description in wrong.result
  assert wrong.arguments == PROGRAM
  assert t.status == Status.ENDED and t.reward_parts == {"answer": 1.0, "format": 1.0}
  assert parse(t.text, variant).ok
  head = t.segments[0].text
  assert roles.open_tag(name) in head and "<code>" not in head


def test_the_old_name_is_no_tool_any_more(tools):
  drawn = formats()[0]
  call = RenamedTools(tools, drawn).submit("code", PROGRAM).result()
  assert (call.result, call.status) == ("error: no tool code", CallStatus.MODEL)
