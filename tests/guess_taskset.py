"""An offline taskset of `verifiers`: find a hidden number with a tool."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["GuessTaskset"]


class GuessState(vf.State):
  guesses: int = 0


class GuessData(vf.TaskData):
  hidden: int


class GuessTools(vf.Toolset[vf.ToolsetConfig, GuessState]):
  TOOL_PREFIX = None

  async def setup_task(self, task: GuessData) -> None:
    self.hidden = task.hidden

  @vf.tool
  async def compare(self, number: int) -> str:
    """Says whether the hidden number is larger."""
    if number < 0:
      raise ValueError("the number is not below 0")
    self.state.guesses += 1
    return "larger" if number < self.hidden else "not larger"


class GuessTask(vf.Task[GuessData, GuessState]):
  @classmethod
  def toolsets(cls, config):
    return [GuessTools(vf.ToolsetConfig())]

  @vf.reward(weight=0.75)
  async def right(self, trace: vf.Trace) -> float:
    return float(trace.last_reply == str(self.data.hidden))

  @vf.reward(weight=0.25)
  async def quick(self, trace: vf.Trace) -> float:
    assert len(trace.tool_messages) >= trace.state.guesses
    return float(trace.state.guesses < 3)


class GuessTaskset(vf.Taskset[GuessTask]):
  def load(self):
    for n in (3, 8):
      data = GuessData(prompt="Which number?", system_prompt="Ask.", hidden=n)
      yield GuessTask(data, self.config.task)


if __name__ == "__main__":  # verifiers serves the tools from a process of its own
  GuessTools.run()
