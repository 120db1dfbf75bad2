"""Runs of OAgents and smolagents (JSON lines, one task each) as runs of ours.

A row holds the question, the prediction, the true answer and `intermediate_steps` of
four kinds: task, planning {facts, plan}, action {model_output, tool_calls,
observations, error, ...} and, in smolagents, a system prompt. Facts and rationales are
thoughts, plans plans, a critique that grades all three criteria a reflection (arXiv
2508.13167).

A step of the manager whose program calls the search agent is no tool call of ours: the
search agent's own calls (`search_agent_actions`: sub-task -> {answer, tool_calls})
stand in its place, and its answer, which a model wrote, is the thought that follows. A
step's error is what the agent was shown after the observations: part of the result.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Status
from coa_jax.teacher import runs
from coa_jax.teacher.calls import translate
from coa_jax.teacher.imported import (
  ASKED,
  TASK_FIELDS,
  Imported,
  Recorder,
  Refused,
  fields,
  note_unread,
  task_of,
)

# What is read, or says nothing of the trajectory (times, counts, what was sent).
_ROW = TASK_FIELDS | fields(
  "agent_name augmented_question prediction intermediate_steps steps start_time "
  "end_time iteration_limit_exceeded agent_error parsing_error task judgment_result "
  "search_agent_actions"
)
_STEP = fields(
  "step step_type type step_number timing start_time end_time duration times task "
  "facts plan model_input_messages model_output_message model_output_message_facts "
  "model_output_message_plan model_output tool_calls code_action observations error "
  "action_output evaluate_thought score token_usage is_final_answer system_prompt "
  "agent_memory"
)
_CALLED = re.compile(r"```|<code>|<end_code>|^[ \t]*(?:Code|Action):", re.MULTILINE)
_THOUGHT = re.compile(r"^\s*Thoughts?:\s*")
_AGENT = "search_agent"


def read_oagents(
  row: Mapping[str, Any], task_id: str, table: Mapping[str, str]
) -> Imported:
  """One row as a run.

  Args:
    row: as above.
    task_id: what to call the task.
    table: names of tools beyond `calls.TOOLS`.

  Raises:
    Refused: the steps do not have that shape, a call cannot be translated, several
      calls share one observation, or a sub-task belongs to no step.
  """
  steps = row.get("intermediate_steps", row.get("steps"))
  if not isinstance(steps, list) or not all(isinstance(s, dict) for s in steps):
    raise Refused("no_steps", "intermediate_steps is not a list of objects")
  reading = _Reading(task_id, table, _subtasks(row.get("search_agent_actions")))
  note_unread(reading.recorder, "row", row, _ROW)
  asked = None
  for at, step in enumerate(steps):
    where = f"step {at}"
    note_unread(reading.recorder, where, step, _STEP)
    if "plan" in step or "facts" in step:
      reading.planning(step)
    elif "tool_calls" in step or "model_output" in step or "observations" in step:
      reading.action(step, where)
    elif isinstance(step.get("task"), str):
      asked = step["task"]
    elif "system_prompt" in step:
      reading.recorder.note(where, "the system prompt; ours takes its place")
    else:
      raise Refused("unknown_step", f"{where} has {', '.join(sorted(step))}")
  if reading.subtasks:
    left = next(iter(reading.subtasks))
    raise Refused("unplaced_subtask", f"no step delegates {left!r:.80}")
  question = next((row[k] for k in ASKED if row.get(k)), asked)
  task = task_of(row, task_id, question, "oagents")
  recorder = reading.recorder
  if row.get("agent_error"):
    recorder.run.status = Status.INFRASTRUCTURE
    recorder.run.error = str(row["agent_error"])
    return recorder.end(task, None)
  prediction = row.get("prediction", reading.answer)
  if row.get("iteration_limit_exceeded") or prediction is None:
    return recorder.end(task, None)
  text = prediction if isinstance(prediction, str) else json.dumps(prediction)
  return recorder.end(task, text)


def _subtasks(records: Any) -> dict[str, dict[str, Any]]:
  """Sub-task -> its record; also of a list of records that name their `task`."""
  if isinstance(records, list):
    records = {
      str(r.get("task", number)): r
      for number, r in enumerate(records)
      if isinstance(r, dict)
    }
  if not isinstance(records or {}, dict):
    raise Refused("bad_subtasks", f"search_agent_actions is {records!r:.60}")
  return dict(records or {})


class _Reading:
  """The steps of one row, read one after the other."""

  def __init__(
    self, task_id: str, table: Mapping[str, str], subtasks: dict[str, dict[str, Any]]
  ):
    self.recorder = Recorder(task_id)
    self.table = table
    self.subtasks = subtasks
    self.answer: str | None = None

  def planning(self, step: Mapping[str, Any]) -> None:
    """Facts are a thought, the plan a plan."""
    self.recorder.think(step.get("facts"))
    if isinstance(step.get("plan"), str) and step["plan"].strip():
      self.recorder.say(runs.PLANNER, runs.PLAN, step["plan"].strip())

  def action(self, step: Mapping[str, Any], where: str) -> None:
    """A rationale, a call with its result or a delegation, a critique."""
    recorder = self.recorder
    recorder.think(_rationale(step.get("model_output")))
    calls = [_name_and_arguments(c, where) for c in step.get("tool_calls") or []]
    result = _result(step)
    if len(calls) > 1:
      raise Refused("shared_observation", f"{where}: {len(calls)} calls, one result")
    if not calls:
      if result.strip():  # the reply could not be read, and the agent was told so
        recorder.say(runs.ORCHESTRATOR, runs.MALFORMED, result, "no call")
        recorder.note(where, f"a reply without a call: {result!r:.80}")
    else:
      self._call(*calls[0], step, result, where)
    self._critique(step, where)

  def _call(
    self, name: str, arguments: Any, step: Mapping[str, Any], result: str, where: str
  ) -> None:
    recorder = self.recorder
    program = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if name == _AGENT or (f"{_AGENT}(" in program and self.subtasks):
      self._delegate(program, where)
      if result:
        recorder.note(where, f"the report of the {_AGENT}: {result!r:.80}")
      return
    if _only_answers(program):
      if result:
        recorder.note(where, f"the result of the final answer: {result!r:.80}")
      return
    made = translate(name, arguments, self.table)
    for lost in made.lost:
      recorder.note(where, f"argument {lost} of {name}")
    if made.tag == roles.ANSWER:
      self.answer = made.body
      if result:
        recorder.note(where, f"the result of the final answer: {result!r:.80}")
    elif made.tag == roles.SUGGESTED_ANSWER:
      recorder.say(runs.SOLVER, runs.CANDIDATE, made.body)
      if result:
        recorder.note(where, f"the result of a suggested answer: {result!r:.80}")
    else:
      recorder.call(made.tag, made.body, result, failed=bool(step.get("error")))
      output = step.get("action_output")
      if isinstance(output, str) and output and output not in result:
        recorder.note(where, f"action_output {output!r:.80} beside the observation")

  def _delegate(self, program: str, where: str) -> None:
    """Plays the search agent's calls for every sub-task that the program names."""
    named = [name for name in self.subtasks if name in program]
    for name in named or list(self.subtasks)[:1]:
      record = self.subtasks.pop(name)
      calls = record.get("tool_calls")
      if not isinstance(calls, list):
        raise Refused("bad_subtasks", f"sub-task {name!r:.60} has no list of calls")
      self.recorder.think(name)
      for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
          raise Refused("bad_call", f"sub-task {name!r:.60}: {call!r:.80}")
        arguments = call.get("args", call.get("arguments"))
        made = translate(call["name"], arguments, self.table)
        for lost in made.lost:
          self.recorder.note(where, f"argument {lost} of {call['name']}")
        if made.tag in roles.ROLES:
          continue  # its answer, which follows
        observed = call.get("observation", call.get("observations"))
        if not isinstance(observed, str):
          raise Refused("no_result", f"{where}: {call['name']} has no observation")
        self.recorder.call(made.tag, made.body, observed)
      self.recorder.think(record.get("answer"))

  def _critique(self, step: Mapping[str, Any], where: str) -> None:
    text = step.get("evaluate_thought")
    if isinstance(text, str) and text.strip():
      grades = roles.reflection_grades(text)
      if set(grades) == set(roles.CRITERIA):
        # The last line is the reflection, all before it the thought: see `convert`.
        line = " ".join(f"{c} : {grades[c].capitalize()}" for c in roles.CRITERIA)
        review = f"{text.strip()}\n{line}"
        self.recorder.say(runs.REFLECTOR, runs.REFLECTION, review)
      else:
        self.recorder.think(text)
    if step.get("score") is not None:
      self.recorder.note(where, f"score {step['score']!r:.20} of the step")


def _rationale(output: Any) -> str:
  """What a model wrote before its call."""
  if isinstance(output, list):
    output = "".join(str(p.get("text", "")) for p in output if isinstance(p, dict))
  if not isinstance(output, str):
    return ""
  called = _CALLED.search(output)
  return _THOUGHT.sub("", output[: called.start()] if called else output)


def _name_and_arguments(call: Any, where: str) -> tuple[str, Any]:
  """Of smolagents' ToolCall: bare, or as its `dict()` nests it under `function`."""
  inner = call.get("function", call) if isinstance(call, dict) else None
  if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
    raise Refused("bad_call", f"{where}: {call!r:.80}")
  return inner["name"], inner.get("arguments")


def _result(step: Mapping[str, Any]) -> str:
  """The observations as they are, and the error that was shown below them."""
  observations, error = step.get("observations"), step.get("error")
  texts = [observations] if isinstance(observations, str) else []
  if error:
    message = error.get("message") if isinstance(error, dict) else error
    texts.append(str(message or error))
  return "\n".join(texts)


def _only_answers(program: str) -> bool:
  """Whether a program does nothing but call `final_answer` with something plain."""
  try:
    body = ast.parse(program).body
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return False
  if len(body) != 1 or not isinstance(body[0], ast.Expr):
    return False
  call = body[0].value
  if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
    return False
  if call.func.id != "final_answer":
    return False
  return not any(isinstance(n, ast.Call) for a in call.args for n in ast.walk(a))
