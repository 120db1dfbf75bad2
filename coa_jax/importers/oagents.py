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
Programs call tools as functions: they stay programs, and what they call is noted.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.importers.calls import TOOLS, translate
from coa_jax.importers.row import (
  ASKED,
  TASK_FIELDS,
  ImportedRun,
  Recorder,
  Refused,
  fields,
  note_unread,
  task_of,
)
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Status
from coa_jax.teacher import runs

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
_SUBTASK = fields("task answer tool_calls")
_SUBCALL = fields("name args arguments observation observations id type")
_Program = Sequence[ast.stmt]
_Subtask = tuple[str, Mapping[str, Any]]  # what was asked, and what was done about it
_CALLED = re.compile(r"```|<code>|<end_code>|^[ \t]*(?:Code|Action):", re.MULTILINE)
_THOUGHT = re.compile(r"^\s*Thoughts?:\s*")
_BLOCK = re.compile(
  r"(?ms)```.*?(?:```|\Z)|<code>.*?(?:</code>|\Z)|<end_code>|^[ \t]*Code:"
)
_AGENT = "search_agent"
_PLANNED = fields("facts plan")
_DONE = fields("tool_calls model_output observations error action_output")
# Nodes of a statement that hands a task on, keeps what came back or prints it.
_PLAIN = (ast.Expr, ast.Assign, ast.Call, ast.Name, ast.Constant, ast.keyword)
_PLAIN += (ast.expr_context, ast.JoinedStr, ast.FormattedValue)


def read_oagents(
  row: Mapping[str, Any], task_id: str, table: Mapping[str, str]
) -> ImportedRun:
  """One row as a run.

  Args:
    row: as above.
    task_id: what to call the task.
    table: names of tools beyond `calls.TOOLS`.

  Raises:
    Refused: the steps do not have that shape, a call cannot be translated, several
      calls share one observation, or a sub-task belongs to no step.
  """
  steps = row.get("intermediate_steps") or row.get("steps")
  if not isinstance(steps, list) or not all(isinstance(s, dict) for s in steps):
    raise Refused("no_steps", "intermediate_steps is not a list of objects")
  reading = _Reading(task_id, table, _subtasks(row.get("search_agent_actions")))
  note_unread(reading.recorder, "row", row, _ROW)
  if (row.get("steps") or steps) != steps:
    reading.recorder.note("row", "field 'steps' is not read, but 'intermediate_steps'")
  asked = None
  for at, step in enumerate(steps):
    where = f"step {at}"
    note_unread(reading.recorder, where, step, _STEP)
    # A table gives every step the fields of all kinds: a null one says nothing.
    held = {name for name, value in step.items() if value is not None}
    if held & _PLANNED:
      reading.planning(step)
    if held & _DONE:
      reading.action(step, where)
    elif isinstance(step.get("task"), str):
      asked = step["task"]
    elif "system_prompt" in held:
      reading.recorder.note(where, "the system prompt; ours takes its place")
    elif not set(step) & (_PLANNED | _DONE):
      raise Refused("unknown_step", f"{where} has {', '.join(sorted(step))}")
  if reading.subtasks:
    left, _ = reading.subtasks[0]
    raise Refused("unplaced_subtask", f"no step delegates {left!r:.80}")
  question = next((row[k] for k in ASKED if row.get(k)), asked)
  task = task_of(row, task_id, question, "oagents")
  recorder = reading.recorder
  if row.get("agent_error"):
    recorder.run.status = Status.INFRASTRUCTURE
    recorder.run.error = str(row["agent_error"])
    return recorder.end(task, None)
  prediction = row.get("prediction")
  if row.get("iteration_limit_exceeded"):
    return recorder.end(task, None)
  text = reading.answer if prediction in (None, "") else _text(prediction)
  if reading.answer not in (None, text):
    recorder.note("row", f"the run's own answer {reading.answer!r:.80}")
  return recorder.end(task, text)


def _subtasks(records: Any) -> list[_Subtask]:
  """(sub-task, its record) in order; also of a list of records with their `task`."""
  if isinstance(records, list):
    return [(str(record.get("task", n)), record) for n, record in enumerate(records)]
  return list((records or {}).items())


class _Reading:
  """The steps of one row, read one after the other."""

  def __init__(self, task_id: str, table: Mapping[str, str], subtasks: list[_Subtask]):
    self.recorder = Recorder(task_id)
    self.table = table
    self.subtasks = subtasks
    self.answer: str | None = None

  def planning(self, step: Mapping[str, Any]) -> None:
    """Facts are a thought, the plan a plan."""
    self.recorder.think(_text(step.get("facts") or ""))
    if plan := _text(step.get("plan") or "").strip():
      self.recorder.say(runs.PLANNER, runs.PLAN, plan)

  def action(self, step: Mapping[str, Any], where: str) -> None:
    """A rationale, a call with its result or a delegation, a critique."""
    recorder = self.recorder
    calls = [_name_and_arguments(c, where) for c in step.get("tool_calls") or []]
    result = _result(step)
    if len(calls) > 1:
      raise Refused("shared_observation", f"{where}: {len(calls)} calls, one result")
    name, arguments = calls[0] if calls else ("", "")
    texts = _texts(arguments)
    thought, rest = _rationale(step.get("model_output"))
    recorder.think(thought)
    if rest and rest not in "\n".join(texts):
      recorder.note(where, f"text beside the call: {rest!r:.80}")
    code = step.get("code_action")
    if code and _text(code).strip() not in (t.strip() for t in texts):
      recorder.note(where, f"code_action {code!r:.80} beside the call")
    program = _parsed(texts[0]) if texts and self._tag(name) == "code" else []
    if calls:
      self._call(calls[0], program, step, where)
    elif result.strip():  # the reply could not be read, and the agent was told so
      recorder.say(runs.ORCHESTRATOR, runs.MALFORMED, result, "no call")
      recorder.note(where, f"a reply without a call: {result!r:.80}")
    self._ended(step, program, where)
    self._critique(step, where)

  def _tag(self, name: str) -> str | None:
    return self.table.get(name.lower()) or TOOLS.get(name.lower())

  def _call(
    self,
    call: tuple[str, Any],
    program: _Program,
    step: Mapping[str, Any],
    where: str,
  ) -> None:
    (name, arguments), recorder, result = call, self.recorder, _result(step)
    asked = (_texts(arguments) or [None])[:1] if name == _AGENT else _asked(program)
    if self._delegate(asked, program, where) or name == _AGENT:
      if rest := _beside(program):
        first = ast.get_source_segment(_texts(arguments)[0], rest[0])
        told = f"{len(rest)} statements beside the delegation: {first!r:.80}"
        recorder.note(where, told)
      if isinstance(arguments, dict) and name == _AGENT and len(arguments) > 1:
        recorder.note(where, f"arguments beside the sub-task: {arguments!r:.80}")
      self._unseen(f"report of the {_AGENT}", result, where)
      return
    if _only_answers(program):
      self._unseen("result of the final answer", result, where)
      return
    called = {_callee(n) for n in _in_order(program, ast.Call)} - {None}
    if theirs := sorted(n for n in called if n == _AGENT or self._tag(n)):
      recorder.note(where, f"the program calls their {', '.join(theirs)}")
    made = translate(name, arguments, self.table)
    for lost in made.lost:
      recorder.note(where, f"argument {lost} of {name}")
    if made.tag == roles.ANSWER:
      self.answer = made.body
      self._unseen("result of the final answer", result, where)
    elif made.tag == roles.SUGGESTED_ANSWER:
      recorder.say(runs.SOLVER, runs.CANDIDATE, made.body)
      self._unseen("result of a suggested answer", result, where)
    else:
      recorder.call(made.tag, made.body, result, failed=bool(step.get("error")))

  def _unseen(self, what: str, result: str, where: str) -> None:
    if result:
      self.recorder.note(where, f"the {what}: {result!r:.80}")

  def _ended(self, step: Mapping[str, Any], program: _Program, where: str) -> None:
    """Reads the answer of a step that ends the run, notes what another came to."""
    output, final = step.get("action_output"), step.get("is_final_answer")
    ending = _final(program)
    if (ending is not None if final is None else final) and not step.get("error"):
      given = _literal(ending) if output is None else output
      if given is not None:
        self.answer = _text(given)
        return
    shown = f"{self.answer}\n{_result(step)}"
    if output is not None and _text(output) not in shown and str(output) not in shown:
      self.recorder.note(where, f"action_output {output!r:.80} beside the observation")

  def _delegate(
    self, asked: Sequence[str | None], program: _Program, where: str
  ) -> bool:
    """Plays the records of what each call asked, in order; whether there is one.

    A sub-task that its call does not write out may stand elsewhere in the program;
    where it is put together as that runs, it is the next record, as runs write them.
    """
    names = [name for name, _ in self.subtasks if asked and name not in asked]
    texts = dict.fromkeys(node.value for node in _in_order(program, ast.Constant))
    named = [text for text in texts if text in names]
    spare = [name for name in names if name not in named]
    wanted, placed = [], False
    for text in asked:
      if text is None and not named and spare:
        told = f"a sub-task that is not written out; taken is {spare[0]!r:.80}"
        self.recorder.note(where, told)
      wanted.append(text if text is not None else (named or spare or [None]).pop(0))
    for text in [*wanted, *named]:
      at = next((i for i, (name, _) in enumerate(self.subtasks) if name == text), None)
      if at is not None:
        self._play(*self.subtasks.pop(at), where)
        placed = True
      elif text is not None:
        self.recorder.note(where, f"no record of the sub-task {text!r:.80}")
    return placed

  def _play(self, name: str, record: Mapping[str, Any], where: str) -> None:
    """A sub-task, the calls made for it, and its answer."""
    recorder, calls = self.recorder, record.get("tool_calls")
    if not isinstance(calls, list):
      raise Refused("bad_subtasks", f"sub-task {name!r:.60} has no list of calls")
    note_unread(recorder, where, record, _SUBTASK)
    recorder.think(name)
    for call in calls:
      if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Refused("bad_call", f"sub-task {name!r:.60}: {call!r:.80}")
      note_unread(recorder, where, call, _SUBCALL)
      given = call.get("args", call.get("arguments"))
      made = translate(call["name"], given, self.table)
      for lost in made.lost:
        recorder.note(where, f"argument {lost} of {call['name']}")
      if made.tag in roles.ROLES:
        continue  # its answer, which follows
      observed = call.get("observation", call.get("observations"))
      if not isinstance(observed, str):
        raise Refused("no_result", f"{where}: {call['name']} has no observation")
      recorder.call(made.tag, made.body, observed)
    if record.get("answer") is not None:
      recorder.think(_text(record["answer"]))

  def _critique(self, step: Mapping[str, Any], where: str) -> None:
    text = _text(step.get("evaluate_thought") or "")
    if text.strip():
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


def _rationale(output: Any) -> tuple[str, str]:
  """What a model wrote before its call, and what it wrote after it."""
  if isinstance(output, list):
    output = "".join(str(p.get("text", "")) for p in output if isinstance(p, dict))
  if not isinstance(output, str):
    return "", ""
  called = _CALLED.search(output)
  if called is None:
    return _THOUGHT.sub("", output), ""
  # Below "Action:" stands the call itself, as no block.
  rest = "" if "Action" in called[0] else _BLOCK.sub("", output[called.start() :])
  return _THOUGHT.sub("", output[: called.start()]), rest.strip()


def _name_and_arguments(call: Any, where: str) -> tuple[str, Any]:
  """Of smolagents' ToolCall: bare, or as its `dict()` nests it under `function`."""
  inner = call.get("function", call) if isinstance(call, dict) else None
  if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
    raise Refused("bad_call", f"{where}: {call!r:.80}")
  return inner["name"], inner.get("arguments")


def _result(step: Mapping[str, Any]) -> str:
  """The observations as they are, and the error that was shown below them."""
  observations, error = step.get("observations"), step.get("error")
  held = isinstance(observations, str) or bool(observations)
  texts = [_text(observations)] if held else []
  if error:
    message = error.get("message") if isinstance(error, dict) else error
    texts.append(str(message or error))
  return "\n".join(texts)


def _text(value: Any) -> str:
  """A string as it is, anything else as JSON."""
  return value if isinstance(value, str) else json.dumps(value, default=str)


def _texts(arguments: Any) -> list[str]:
  """The strings among a call's arguments; of a program, the program."""
  values = arguments.values() if isinstance(arguments, dict) else (arguments,)
  return [v for v in values if isinstance(v, str)]


def _parsed(program: str) -> list[ast.stmt]:
  """A program's statements; none where it is not Python."""
  try:
    return ast.parse(program).body
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return []


def _callee(node: ast.AST) -> str | None:
  """The plain name that a node calls."""
  plain = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
  return node.func.id if plain else None


def _in_order(program: _Program, kind: type) -> list[Any]:
  """Nodes of a kind by where they end: what is given to a call before the call."""
  nodes = [n for s in program for n in ast.walk(s) if isinstance(n, kind)]
  return sorted(nodes, key=lambda n: (n.end_lineno, n.end_col_offset))


def _asked(program: _Program) -> list[str | None]:
  """The text that each call of the search agent is given; None where none is."""
  out = []
  for call in _in_order(program, ast.Call):
    if _callee(call) == _AGENT:
      given = [_literal(n) for n in (*call.args, *(k.value for k in call.keywords))]
      out.append(next((text for text in given if isinstance(text, str)), None))
  return out


def _beside(program: _Program) -> list[ast.stmt]:
  """The statements that do more than hand tasks on and keep or print what came back."""
  out = []
  for statement in program:
    calls = {_callee(n) for n in _in_order([statement], ast.Call)}
    plain = all(isinstance(n, _PLAIN) for n in ast.walk(statement))
    if not (calls and plain and calls <= {_AGENT, "print"}):
      out.append(statement)
  return out


def _final(program: _Program) -> ast.expr | None:
  """What a program gives to `final_answer` at its end."""
  last = program[-1] if program else None
  if not isinstance(last, ast.Expr) or _callee(last.value) != "final_answer":
    return None
  given = [*last.value.args, *(k.value for k in last.value.keywords)]
  return given[0] if given else None


def _literal(node: ast.expr | None) -> Any:
  """The value that is written out; None where there is none, or it is computed."""
  try:
    return None if node is None else ast.literal_eval(node)
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return None


def _only_answers(program: _Program) -> bool:
  """Whether a program does nothing but give `final_answer` something plain."""
  calls = _in_order(program, ast.Call)
  return len(program) == len(calls) == 1 and _final(program) is not None
