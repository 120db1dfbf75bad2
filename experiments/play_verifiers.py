"""Plays a taskset of the package `verifiers` in our RL and evaluation.

`environment` gives our own loop the taskset's tools and rewards. `solve` runs
verifiers' own loop with our policy. docs/environments.md compares them. Written for
verifiers 0.4 (`pip install verifiers`). This command writes a taskset's tasks:

  python -m experiments.play_verifiers TASKSET > tasks.jsonl
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated

if TYPE_CHECKING:
  from coa_jax.rollout.agents.worker import Client


@functools.cache
def _load(taskset: str) -> tuple[vf.Taskset, list[vf.Task]]:
  """Loads a taskset by its id, an installed package's or module's name."""
  loaded = vf.load_taskset(vf.taskset_config_type(taskset)(id=taskset))
  if not loaded.bounded:
    raise ValueError(f"taskset {taskset!r} has no end")
  return loaded, list(loaded)


def rows(taskset: str) -> Iterator[dict[str, Any]]:
  """Yields a taskset's tasks as our rows; `meta` has the task's number."""
  for number, task in enumerate(_load(taskset)[1]):
    texts = (task.data.system_prompt, task.data.prompt_text)
    yield {
      "id": f"{taskset}-{number}",
      "question": "\n\n".join(filter(None, texts)),
      "answers": ["judged by the taskset"],
      "meta": {"taskset": taskset, "number": number},
    }


# In our loop.


def environment(taskset: str) -> type:
  """Makes a class for `tools.environment`, with a method for each of the tools.

  Raises:
    ValueError: the tasks need a machine of their own, which only `solve` gives them.
  """
  loaded, tasks = _load(taskset)
  first = tasks[0]
  hooks = [*first.hooks("reward"), *first.hooks("metric")]
  for name in ("setup", "finalize"):
    if getattr(type(first), name) is not getattr(vf.Task, name):
      hooks.append(getattr(first, name))
  for hook in hooks:
    if "runtime" in inspect.signature(hook).parameters:
      raise ValueError(f"taskset {taskset!r}: {hook.__name__} needs a runtime")
  methods = {
    name: _method(name, tool) for name, tool in _tools(_toolsets(loaded, first))
  }
  return type("TasksetEnvironment", (_Environment,), {"taskset": taskset, **methods})


def _toolsets(loaded: vf.Taskset, task: vf.Task) -> list[vf.Toolset]:
  shared = type(loaded).toolsets(loaded.config)
  return [*shared, *type(task).toolsets(task.config)]


def _tools(toolsets: list[vf.Toolset]) -> list[tuple[str, Callable[..., Any]]]:
  found = [tool for toolset in toolsets for tool in discover_decorated(toolset, "tool")]
  return [(getattr(tool, "tool_name", None) or tool.__name__, tool) for tool in found]


def _method(name: str, tool: Callable[..., Any]) -> Callable[..., str]:
  @functools.wraps(tool.__func__)  # our loop reads the tool's parameters
  def method(self: _Environment, **arguments: Any) -> str:
    return self._call(name, arguments)

  return method


class _Environment:
  """One task: its tools in this process, and the trace that its rewards read."""

  taskset = ""
  _toolsets: Sequence[vf.Toolset] = ()  # so that `close` works after a failed `reset`

  def reset(self, task: dict[str, Any]) -> None:
    """Begins the task; the row's question is its whole prompt."""
    self._loop = asyncio.new_event_loop()
    loaded, tasks = _load(self.taskset)
    self._task = tasks[task["meta"]["number"]]
    kind = type(self._task)
    self._trace = vf.Trace(
      task=vf.TraceTask(type=kind.__name__, data=self._task.data, key=self._task.key),
      agent=vf.AgentInfo(config=vf.AgentConfig()),
      state=state_cls(kind)(),
    )
    if self._task.data.system_prompt:
      self._say(vf.SystemMessage(content=self._task.data.system_prompt))
    self._say(vf.UserMessage(content=self._task.data.prompt_text))
    self._toolsets = _toolsets(loaded, self._task)
    self._tools = dict(_tools(self._toolsets))
    for toolset in self._toolsets:
      toolset._inert_state = self._trace.state  # a server would share it by HTTP
      self._run(toolset.setup())
      self._run(toolset.setup_task(self._task.data))
    self._hook(self._task.setup)

  def _call(self, name: str, arguments: dict[str, Any]) -> str:
    key = f"call_{len(self._trace.nodes)}"
    call = vf.ToolCall(id=key, name=name, arguments=json.dumps(arguments))
    self._say(vf.AssistantMessage(tool_calls=[call]), sampled=True)
    try:
      result = self._run(self._tools[name](**arguments))
    except (ValueError, TypeError) as e:  # the model's mistake
      self._say(vf.ToolMessage(tool_call_id=key, name=name, content=f"error: {e}"))
      raise
    text = result if isinstance(result, str) else json.dumps(result, default=str)
    self._say(vf.ToolMessage(tool_call_id=key, name=name, content=text))
    return text

  def reward(self, answer: str | None) -> float:
    """Returns the weighted sum of the task's rewards."""
    self._say(vf.AssistantMessage(content=answer or ""), sampled=True)
    self._trace.stop("agent_completed")
    self._hook(self._task.finalize)
    self._run(self._task.score(self._trace))
    return self._trace.reward

  def close(self) -> None:
    """Ends the tools."""
    for toolset in self._toolsets:
      self._run(toolset._exit_stack.aclose())
    self._loop.close()

  def _say(self, message: vf.Message, sampled: bool = False) -> None:
    nodes = self._trace.nodes
    parent = len(nodes) - 1 if nodes else None
    nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))

  def _hook(self, hook: Callable[..., Any]) -> None:
    if "runtime" not in inspect.signature(hook).parameters:  # else it does nothing
      self._run(hook(trace=self._trace))

  def _run(self, value: Any) -> Any:
    """Waits for a coroutine in the trajectory's own loop."""
    return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


# In verifiers' loop.


_starting = threading.Lock()  # attempts run in threads


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  """Starts an event loop for all attempts; needs the lock.

  verifiers' attempts share locks, which may be used in one event loop only.
  """
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
  return loop


def solve(task: dict[str, Any], client: Client) -> float:
  """Plays a task as verifiers does, with our policy; returns its reward.

  The harness is `null`, a loop over the taskset's tools, in processes of this machine.
  It installs its packages by `uv`.
  """
  with _starting:
    loop = _loop()
  return asyncio.run_coroutine_threadsafe(_solve(task, client), loop).result()


async def _solve(task: dict[str, Any], client: Client) -> float:
  seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
  config = {"taskset": {"id": task["meta"]["taskset"]}, "agent": seat}
  env = vf.load_environment(vf.resolve_env_config(config))
  variable = f"COA_{client.api_key}"  # verifiers reads keys from the environment
  os.environ[variable] = client.api_key
  endpoint = vf.EvalClientConfig(base_url=client.base_url, api_key_var=variable)
  try:
    async with env.serving():
      context = vf.ModelContext(model=client.model, client=endpoint)
      played = _load(task["meta"]["taskset"])[1][task["meta"]["number"]]
      episode = await env.run_episode(played, context)
  finally:
    del os.environ[variable]
  if not episode.ok:
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    raise RuntimeError("; ".join(f"{e.type}: {e.message}" for e in errors)[:500])
  return episode.traces[-1].reward


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python -m experiments.play_verifiers TASKSET > tasks.jsonl")
  for row in rows(sys.argv[1]):
    print(json.dumps(row))
