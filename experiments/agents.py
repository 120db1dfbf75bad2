"""Example agents: loops of their own that learn; docs/agents.md explains them.

`chat` is any tool-calling loop with the `openai` package; `sdk` is the same agent under
OpenAI's Agents SDK (`pip install openai-agents`). Both play the quickstart's world.
`ask` is an instruct model without tools.
"""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

import openai

from coa_jax.rollout.agents.worker import Client
from coa_jax.tools.toolbox import Toolbox, ToolsConfig

WORLD = "runs/world"  # of the quickstart, or of experiments.make_world
MOST_CALLS = 8


def _tool(name: str, argument: str) -> dict[str, Any]:
  schema = {"type": "object", "properties": {argument: {"type": "string"}}}
  return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [_tool("wiki_search", "query"), _tool("code", "program")]


_opening = threading.Lock()  # attempts run in threads


@functools.cache
def _toolbox(split: str) -> Toolbox:
  """Opens the tools over a split's pages; needs the lock."""
  pages = f"{WORLD}/{split}_pages.jsonl"
  return Toolbox(ToolsConfig(tools=("wiki_search", "code"), corpus=pages, top_k=1))


def _call(task: dict[str, Any], name: str, argument: str) -> str:
  split = task["meta"]["world"].partition("-")[0]
  with _opening:
    toolbox = _toolbox(split)
  return toolbox.submit(name, argument).result().result


def chat(task: dict[str, Any], client: Client) -> str | None:
  """Answers a task: asks the policy, and runs its calls until it makes none."""
  llm = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
  messages: list[Any] = [{"role": "user", "content": task["question"]}]
  for _ in range(MOST_CALLS + 1):
    reply = llm.chat.completions.create(
      model=client.model, messages=messages, tools=TOOLS
    )
    message = reply.choices[0].message
    if not message.tool_calls:
      return message.content
    messages.append(message)
    for call in message.tool_calls:
      arguments = json.loads(call.function.arguments)
      result = "error: give the tool's one argument"
      if len(arguments) == 1:
        result = _call(task, call.function.name, *map(str, arguments.values()))
      messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
  return None


_FORMS = {  # of the answer, by the task's kind
  "math": "Put the final answer in \\boxed{}.",
  "code": "Reply with one Python program in a block that begins with ```python.",
  "qa": "Reply with the answer alone.",
}


def ask(task: dict[str, Any], client: Client) -> str | None:
  """Answers a task in one reply."""
  llm = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
  content = f"{task['question']}\n\n{_FORMS[task['kind']]}"
  reply = llm.chat.completions.create(
    model=client.model, messages=[{"role": "user", "content": content}]
  )
  return reply.choices[0].message.content


async def sdk(task: dict[str, Any], client: Client) -> str | None:
  """Answers a task by the Agents SDK's own loop."""
  import agents  # optional

  @agents.function_tool
  def wiki_search(query: str) -> str:
    """Searches the pages."""
    return _call(task, "wiki_search", query)

  @agents.function_tool
  def code(program: str) -> str:
    """Runs a program."""
    return _call(task, "code", program)

  agents.set_tracing_disabled(True)
  # Closed while its event loop runs: each attempt has a loop of its own.
  async with openai.AsyncOpenAI(
    base_url=client.base_url, api_key=client.api_key
  ) as llm:
    model = agents.OpenAIChatCompletionsModel(client.model, llm)
    team = agents.Agent(name="team", model=model, tools=[wiki_search, code])
    try:
      done = await agents.Runner.run(team, task["question"], max_turns=MOST_CALLS + 1)
    except agents.MaxTurnsExceeded:
      return None
  return str(done.final_output)
