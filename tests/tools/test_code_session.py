"""A trajectory's programs share a session, which ends with the trajectory."""

from __future__ import annotations

import gc

import pytest

from coa_jax.data.tasks.task import Task
from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall
from coa_jax.rollout.episode import CoAEpisode, EpisodeConfig
from coa_jax.rollout.types import Attempt
from coa_jax.tools.code_session import SandboxSession
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from coa_jax.tools.types import CallFuture
from tests import toy
from tests.backend import needs_jail
from tests.tools_sandbox.sandbox_server import serving, soon
from tools_sandbox.client import Sandbox
from tools_sandbox.service.remote import RemoteConfig

pytestmark = needs_jail
CODE = roles.get_variant("code")


def config(**changes) -> ToolsConfig:
  values = dict(tools=("code",), session=True, workers=1, max_sessions=2)
  return ToolsConfig(**{**values, "timeout_s": 20.0, **changes})


@pytest.fixture
def opened(monkeypatch) -> list[SandboxSession]:
  """Sandbox sessions opened during the test."""
  sessions = []
  real = Sandbox.session

  def spy(self, *args, **options) -> SandboxSession:
    sessions.append(real(self, *args, **options))
    return sessions[-1]

  monkeypatch.setattr(Sandbox, "session", spy)
  return sessions


@pytest.fixture(scope="module")
def box():
  with Toolbox(config()) as box:
    yield box


@pytest.fixture(scope="module")
def remote():
  """A toolbox with a remote sandbox; tests/tools_sandbox tests its sessions."""
  with serving("--slots=2") as server:
    remote = RemoteConfig((server.url,), wait_s=9.0)
    with Toolbox(config(sandbox="remote", remote=remote)) as box:
      yield box
    soon(lambda: server.health()["busy"] == 0)


def episode(box) -> CoAEpisode:
  setting = EpisodeConfig(CODE, "brief", max_calls=9, tool_seconds=300.0)
  attempt = Attempt(Task("t", "q", ("1",)), 0, 0, 0, 1.0)
  playing = CoAEpisode(attempt, toy.tokenizer(), box, setting)
  playing.start()
  return playing


def start(playing: CoAEpisode, program: str, stdin: str = "") -> CallFuture:
  """Starts a call as if it had been sampled."""
  text = roles.wrap("code", tool_bodies.render_code(program, stdin))
  ids = playing.tokenizer.encode(text)
  return playing.sampled(ids, [0.0] * len(ids), "</code>")


def call(playing: CoAEpisode, program: str, stdin: str = "") -> ToolCall:
  """Makes a call, and appends its observation."""
  result = start(playing, program, stdin).result(120)
  playing.observed(result)
  return result


def end(playing: CoAEpisode) -> None:
  ids = playing.tokenizer.encode("<answer> 1</answer>")
  assert playing.sampled(ids, [0.0] * len(ids), "</answer>") is None


@pytest.mark.parametrize("where", ["box", "remote"])
def test_variables_live_from_call_to_call_in_their_trajectory_alone(where, request):
  box = request.getfixturevalue(where)
  a, b = episode(box), episode(box)
  call(a, "x = 41")
  call(b, "x = 1")
  assert call(a, "print(x + int(input()))", "1").result == "42"
  assert call(b, "print(x)").result == "1"
  failed = call(a, "y = x / 0")
  assert failed.status == CallStatus.MODEL and "ZeroDivision" in failed.result
  assert call(a, "print(x)").result == "41"
  end(a)
  end(b)
  soon(lambda: not box.session_owners)
  c = episode(box)
  assert "NameError" in call(c, "print(x)").result
  end(c)


def test_a_lost_session_is_told_in_one_line_and_the_next_program_runs(box):
  a = episode(box)
  call(a, "x = 1")
  lost = call(a, "import os\nprint('here', flush=True)\nos._exit(3)")
  assert lost.status == CallStatus.MODEL
  assert lost.result.startswith("here\n")
  assert lost.result.splitlines()[-1] == (
    "[variables are lost; the next program starts afresh]"
  )
  first, *rest = call(
    a, "try:\n  print(x)\nexcept NameError:\n  print('gone')"
  ).result.split("\n")
  assert "lost" in first and rest == ["gone"]
  assert call(a, "print(2)").result == "2"
  end(a)


def test_more_trajectories_than_sessions_wait_for_each_other(box):
  owners = [episode(box) for _ in range(2)]
  for playing in owners:
    call(playing, "x = 1")
  waiting = episode(box)
  future = start(waiting, "print(5)")
  # Trajectories with a session do not wait behind it.
  assert call(owners[0], "print(x)").result == "1" and not future.done()
  end(owners[0])
  assert future.result(120).result == "5"
  end(owners[1])
  end(waiting)
  soon(lambda: not box.session_owners)


@pytest.mark.parametrize("how", ["lost", "dropped", "cut", "out_of_room", "down"])
def test_every_end_of_a_trajectory_ends_its_session(box, opened, how):
  a = episode(box)
  call(a, "x = 1")
  (session,) = opened
  assert session.alive
  if how == "lost":
    a.lost()
  elif how == "cut":
    a.sampled([], [], None)
  elif how == "out_of_room":
    a.out_of_room()
  elif how == "down":
    down = ToolCall("code", "", "error", CallStatus.INFRASTRUCTURE)
    assert a.observed(down) is None and a.trajectory.status == Status.INFRASTRUCTURE
  else:
    del a
    gc.collect()
  soon(lambda: not session.alive and not box.session_owners)


def test_a_call_dropped_while_waiting_keeps_no_permit():
  nap = tool_bodies.render_code("import time; time.sleep(1)")
  with Toolbox(config(max_sessions=1)) as box:
    a, b, c = (box.code_session() for _ in range(3))
    running = box.submit("code", nap, session=a)
    waits = box.submit("code", tool_bodies.render_code("print(2)"), session=b)
    b.close()
    assert waits.result(120).status == CallStatus.INFRASTRUCTURE
    running.result(120)
    a.close()
    soon(lambda: not box.session_owners)
    last = box.submit("code", tool_bodies.render_code("print(3)"), session=c)
    assert last.result(120).result == "3"
    c.close()


def test_a_later_program_gets_no_more_seconds_than_it_is_given(opened):
  nap = tool_bodies.render_code("import time; time.sleep(4); print('done')")
  with Toolbox(config()) as box:
    owner = box.code_session()
    box.submit("code", tool_bodies.render_code("x = 1"), session=owner).result(120)
    (session,) = opened
    call = box.submit("code", nap, 0.5, owner).result(120)
    expected = (CallStatus.TOOL, "error: no answer after 0.5 s")
    assert (call.status, call.result) == expected and 0.5 <= call.seconds < 3
    assert session.alive and box.session_owners  # until its program has ended
    owner.close()
    soon(lambda: not session.alive and not box.session_owners and box.hung == 0)


def test_without_sessions_programs_share_nothing():
  with Toolbox(config(session=False)) as box:
    assert box.code_session() is None
    a = episode(box)
    call(a, "x = 1")
    assert "NameError" in call(a, "print(x)").result


def test_subprocess_has_none():
  with pytest.raises(ValueError, match="session: sandbox='jail'"):
    config(sandbox="subprocess")
