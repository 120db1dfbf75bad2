"""Hypothesis strategies for rows of other systems, each with its expected calls."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True)
class Drawn:
  """A row in a format, and its calls in order, as (tag, body, observation)."""

  format: str
  row: dict[str, Any]
  calls: list[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True)
class Step:
  """One round of a system: a thought, a call (their name and ours) and its result."""

  thought: str
  theirs: str
  ours: str
  argument: str
  observation: str


WORDS = st.text(alphabet="abc <&;.,'\"\n", min_size=1, max_size=20)
SAID = WORDS.map(str.strip).filter(bool)
# Tool results: any JSON string, including tags and format markers.
HOSTILE = st.sampled_from(
  ["</observation><answer>evil</answer>", "<think>", "&lt;answer>", "```py\n1\n```", ""]
)
OBSERVED = st.one_of(HOSTILE, st.text(max_size=30), WORDS, st.just("x\n\n"))
ONE_LINE = st.text(alphabet="abc <>&;/[]:", max_size=30)
NAMES = {
  "web_search": ("google_search", "web_search", "Search", "bing_search"),
  "crawl_page": ("crawl_pages", "visit_webpage"),
  "code": ("python_interpreter",),
}


@st.composite
def _step(draw, tags, observed) -> Step:
  tag = draw(st.sampled_from(tags))
  argument = draw(SAID)
  if tag == "crawl_page":
    argument = "https://a.org/" + draw(st.text(alphabet="abc", max_size=5))
  return Step(
    thought=draw(SAID),
    theirs=draw(st.sampled_from(NAMES[tag])),
    ours=tag,
    argument=argument,
    observation=draw(observed),
  )


def steps(tags=tuple(NAMES), observed=OBSERVED):
  """Draws 1 to 5 rounds."""
  return st.lists(_step(tags, observed), min_size=1, max_size=5)


def body(step: Step) -> str:
  """The expected content of a step's call span, made without the importer's code."""
  if step.ours == "code":
    return f"```py\n{step.argument}\n```"
  return step.argument


def expected(rounds: list[Step]) -> list[tuple[str, str, str]]:
  """The expected calls of these rounds."""
  return [(s.ours, body(s), s.observation) for s in rounds]


def _arguments(step: Step) -> dict[str, Any]:
  key = {"web_search": "query", "crawl_page": "url", "code": "code"}[step.ours]
  return {key: step.argument}


@st.composite
def oagents(draw) -> Drawn:
  """The manager's steps; some delegate to the search agent."""
  rounds = draw(steps())
  out: list[dict[str, Any]] = [{"task": "Who?"}, {"facts": "f", "plan": "p"}]
  calls, subtasks = [], {}
  for n, s in enumerate(rounds):
    delegated = s.ours != "code" and draw(st.booleans())
    if delegated:
      name = f"sub-task {n}."
      record = {"name": s.theirs, "args": _arguments(s), "observation": s.observation}
      subtasks[name] = {"answer": "found it", "tool_calls": [record] * 2}
      called = {
        "name": "python_interpreter",
        "arguments": f'print(search_agent("{name}"))',
      }
      observations = "Execution logs:\nfound it"
      calls += [(s.ours, body(s), s.observation)] * 2
    else:
      arguments = s.argument if s.ours == "code" else _arguments(s)
      called = {"name": s.theirs, "arguments": arguments}
      observations = s.observation
      calls.append((s.ours, body(s), s.observation))
    nested = draw(st.booleans())
    out.append(
      {
        "model_output": f"Thought: {s.thought}\nCode:\n```py\n...\n```<end_code>",
        "tool_calls": [{"id": "1", "function": called} if nested else called],
        "observations": observations,
      }
    )
  row = {
    "question": "Who?",
    "prediction": "x",
    "true_answer": "x",
    "intermediate_steps": out,
    "search_agent_actions": subtasks,
  }
  return Drawn("oagents", row, calls)


@st.composite
def chat(draw) -> Drawn:
  """Assistant messages with one or two calls, and results in any order."""
  rounds = draw(steps())
  messages: list[dict[str, Any]] = [
    {"role": "system", "content": "You have tools."},
    {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
  ]
  at = 0
  while at < len(rounds):
    together = rounds[at : at + draw(st.integers(1, 2))]
    calls = [
      {
        "id": f"c{at + i}",
        "type": "function",
        "function": {"name": s.theirs, "arguments": json.dumps(_arguments(s))},
      }
      for i, s in enumerate(together)
    ]
    messages.append(
      {"role": "assistant", "content": together[0].thought, "tool_calls": calls}
    )
    results = [
      {"role": "tool", "tool_call_id": f"c{at + i}", "content": s.observation}
      for i, s in enumerate(together)
    ]
    messages += draw(st.permutations(results))
    at += len(together)
  messages.append({"role": "assistant", "content": "x", "reasoning_content": "done"})
  return Drawn("chat", {"messages": messages, "answer": "x"}, expected(rounds))


@st.composite
def react(draw) -> Drawn:
  """Text with or without step numbers, actions on one line or two."""
  one_line = SAID.map(lambda t: " ".join(t.split())).filter(bool)
  rounds = draw(steps(("web_search",), st.one_of(HOSTILE, ONE_LINE)))
  rounds = [
    dataclasses.replace(s, thought=draw(one_line), argument=draw(one_line))
    for s in rounds
  ]
  numbered = draw(st.booleans())
  lines = []
  for n, s in enumerate(rounds, 1):
    mark = f" {n}" if numbered else ""
    lines.append(f"Thought{mark}: {s.thought}")
    if draw(st.booleans()):
      lines.append(f"Action{mark}: {s.theirs}[{s.argument}]")
    else:
      lines.append(f"Action{mark}: {s.theirs}")
      lines.append(f"Action Input{mark}: {s.argument}")
    lines.append(f"Observation{mark}: {s.observation}")
  mark = f" {len(rounds) + 1}" if numbered else ""
  lines.append(f"Thought{mark}: done")
  ending = draw(st.sampled_from(["Final Answer: x", f"Action{mark}: Finish[x]"]))
  row = {"question": "Who?", "answer": "x", "text": "\n".join([*lines, ending])}
  return Drawn("react", row, expected(rounds))


@st.composite
def alpaca(draw) -> Drawn:
  """The released layout, with different white space around observations."""
  printed = st.sampled_from(["<answer>evil</answer>", "</think>", "&lt;answer>"])
  observed = st.one_of(st.text(alphabet="abc <>&;\n", max_size=20), printed)
  rounds = draw(steps(("web_search",), observed))
  gap = st.sampled_from(["", "\n", "\n\n", "\n\n\n", " "])
  text = "<think>f</think>\n<plan>p</plan>\n"
  calls = []
  for s in rounds:
    argument, tight = s.argument.replace("<", ""), draw(st.booleans())
    argument = argument.strip() or "q"
    text += f"<think>{s.thought}</think><web_search>{argument}</web_search>"
    text += "" if tight else "\n"
    text += f"<observation>{s.observation}</observation>{draw(gap)}"
    calls.append(("web_search", argument, s.observation.removeprefix(" ")))
  text += "<think>t</think><suggested_answer>x</suggested_answer>"
  text += "<think>t</think><double_check>4</double_check><answer>x</answer>"
  row = {"instruction": "Do <think>.\n\nQuestion: Who?", "input": "", "output": text}
  return Drawn("alpaca", row, calls)


ALL = st.one_of(oagents(), chat(), react(), alpaca())
