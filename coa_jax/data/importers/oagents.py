"""Converts OAgents, smolagents and LangChain runs to our runs.

A row has the question, the prediction, the true answer and four kinds of
`intermediate_steps`: task, planning {facts, plan}, action {model_output, tool_calls,
observations, error, ...} and, in smolagents, a system prompt. Facts and rationales
become thoughts, plans stay plans, and a critique that grades all three criteria becomes
a reflection (arXiv 2508.13167). LangChain's steps are pairs: an action {tool,
tool_input, log} and its observation; the question is `input`, the prediction `output`.

If a manager's program calls the search agent, the step is not a tool call here. The
search agent's own calls (`search_agent_actions`: sub-task -> {answer, tool_calls})
replace it, and the agent's answer, written by a model, becomes the next thought. A
step's error was shown to the agent after the observations, so the error is part of the
result. Programs that call tools as functions stay programs; these calls are noted.

budget: a row is read step by step, and each step can hold all of this.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.data.importers.calls import TOOLS, translate_and_note
from coa_jax.data.importers.programs import (
  AGENT,
  Program,
  callee,
  delegated_texts,
  final_argument,
  literal,
  nodes_in_order,
  only_answers,
  other_statements,
  parse_program,
)
from coa_jax.data.importers.row import (
  TASK_FIELDS,
  ImportedRun,
  Recorder,
  RowRefused,
  are_objects,
  fields,
  note_unread,
  question_of,
  task_of,
)
from coa_jax.data.teacher import runs
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Status

# Fields that are read, or irrelevant to the trajectory (times, counts, requests).
_ROW = TASK_FIELDS | fields(
  "agent_name augmented_question prediction intermediate_steps steps start_time "
  "end_time iteration_limit_exceeded agent_error parsing_error task judgment_result "
  "search_agent_actions input output"
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
_Subtask = tuple[str, Mapping[str, Any]]  # the question, and its record
# The boundary between a reply's rationale and its call; the rationale's heading; and
# written call parts not worth a note.
_CALLED = re.compile(r"```|<code>|<end_code>|^[ \t]*(?:Code|Action):", re.MULTILINE)
_THOUGHT = re.compile(r"^\s*Thoughts?:\s*")
_BLOCK = re.compile(
  r"(?ms)```.*?(?:```|\Z)|<code>.*?(?:</code>|\Z)|<end_code>|^[ \t]*Code:"
)
_INVOKING = re.compile(r"^\s*Invoking: `.*?` with `.*?`\s*(?:responded: )?", re.DOTALL)
# Step fields for a plan, and for an action.
_PLANNED = fields("facts plan")
_DONE = fields("tool_calls model_output observations error action_output")


def read_oagents(
  row: Mapping[str, Any], task_id: str, table: Mapping[str, str]
) -> ImportedRun:
  """Reads one row in the form above as a run; `table` extends `calls.TOOLS`.

  Raises:
    RowRefused: the steps do not have that form, a call cannot be translated, several
      calls share one observation, or a sub-task belongs to no step.
  """
  steps = _with_pairs(row.get("intermediate_steps") or row.get("steps"))
  if not are_objects(steps):
    raise RowRefused("no_steps", "intermediate_steps is not a list of objects")
  reading = _Reading(task_id, table, _subtasks(row.get("search_agent_actions")))
  note_unread(reading.recorder, "row", row, _ROW)
  if (row.get("steps") or steps) != steps:
    reading.recorder.note("row", "field 'steps' is not read, but 'intermediate_steps'")

  # --- The steps, one after the other.
  step_question = None
  for at, step in enumerate(steps):
    where = f"step {at}"
    note_unread(reading.recorder, where, step, _STEP)
    # A table gives every step all fields: a null field says nothing.
    filled = {name for name, value in step.items() if value is not None}
    if filled & _PLANNED:
      reading.planning(step)  # in a separate step, or next to a call
    if filled & _DONE:
      reading.action(step, where)
    elif isinstance(step.get("task"), str):
      step_question = step["task"]
    elif "system_prompt" in filled:
      reading.recorder.note(where, "the system prompt; ours takes its place")
    elif not set(step) & (_PLANNED | _DONE):
      raise RowRefused("unknown_step", f"{where} has {', '.join(sorted(step))}")
  if reading.subtasks:
    name, _ = reading.subtasks[0]
    raise RowRefused("unplaced_subtask", f"no step delegates {name!r:.80}")

  # --- The run's end.
  question = question_of(row, step_question or row.get("input"))
  task = task_of(row, task_id, question, "oagents")
  recorder = reading.recorder
  if row.get("agent_error"):
    recorder.run.status = Status.INFRASTRUCTURE
    recorder.run.error = str(row["agent_error"])
    return recorder.end(task, None)
  prediction = row.get("prediction", row.get("output"))
  if row.get("iteration_limit_exceeded"):
    return recorder.end(task, None)
  # The row's prediction takes precedence: systems reword it after their last step.
  text = reading.answer if prediction in (None, "") else _text(prediction)
  if reading.answer not in (None, text):
    recorder.note("row", f"the run's own answer {reading.answer!r:.80}")
  return recorder.end(task, text)


def _with_pairs(steps: Any) -> Any:
  """Converts pairs among the steps to objects."""
  if not isinstance(steps, list):
    return steps
  return [_of_pair(step) if isinstance(step, list) else step for step in steps]


def _of_pair(pair: list[Any]) -> Any:
  """Converts LangChain's pair of action and observation to a step."""
  action, observation = pair if len(pair) == 2 else (None, None)
  if isinstance(action, dict) and "lc" in action:  # as `dumpd` writes it
    action = action.get("kwargs")
  if not isinstance(action, dict) or not isinstance(action.get("tool"), str):
    raise RowRefused("unknown_step", f"{pair!r:.80} is no action with its observation")
  log = action.get("log")
  if isinstance(log, str):  # a tool-calling agent writes the call itself there
    log = _INVOKING.sub("", log).strip()
  call = {"name": action["tool"], "arguments": action.get("tool_input")}
  return {"model_output": log, "tool_calls": [call], "observations": observation}


def _subtasks(records: Any) -> list[_Subtask]:
  """Lists (sub-task, record) in order, from a mapping or from records with `task`."""
  if not isinstance(records, list):
    return list((records or {}).items())
  out = []
  for number, record in enumerate(records):
    out.append((str(record.get("task", number)), record))
  return out


class _Reading:
  """Reads one row's steps, one after the other."""

  def __init__(self, task_id: str, table: Mapping[str, str], subtasks: list[_Subtask]):
    self.recorder = Recorder(task_id)
    self.table = table
    self.subtasks = subtasks
    self.answer: str | None = None

  def planning(self, step: Mapping[str, Any]) -> None:
    """Records the facts as a thought and the plan as a plan."""
    self.recorder.think(_text(step.get("facts") or ""))
    if plan := _text(step.get("plan") or "").strip():
      self.recorder.say(runs.PLANNER, runs.PLAN, plan)

  def action(self, step: Mapping[str, Any], where: str) -> None:
    """Records a step's rationale, its call or delegation, and its critique."""
    # --- The step's only call: several calls would share one observation.
    recorder = self.recorder
    calls = [_name_and_arguments(c, where) for c in step.get("tool_calls") or []]
    result = _result(step)
    if len(calls) > 1:
      raise RowRefused("shared_observation", f"{where}: {len(calls)} calls, one result")
    name, arguments = calls[0] if calls else ("", "")
    texts = _texts(arguments)

    # --- The model's text: a rationale, and the call in words; words missing from the
    # call are noted.
    thought, rest = _rationale(step.get("model_output"))
    recorder.think(thought)
    if rest and rest not in "\n".join(texts):
      recorder.note(where, f"text beside the call: {rest!r:.80}")
    code = step.get("code_action")
    if code and _text(code).strip() not in map(str.strip, texts):
      recorder.note(where, f"code_action {code!r:.80} beside the call")

    # --- The call, or the reason for its absence; the ending; the critique.
    program: Program = ()
    if texts and self._tag(name) == "code":
      program = parse_program(texts[0])
    if calls:
      self._call(calls[0], program, step, where)
    elif result.strip():  # an error message: the reply could not be read
      recorder.say(runs.ORCHESTRATOR, runs.MALFORMED, result, "no call")
      recorder.note(where, f"a reply without a call: {result!r:.80}")
    self._ending(step, program, where)
    self._critique(step, where)

  def _tag(self, name: str) -> str | None:
    return self.table.get(name.lower()) or TOOLS.get(name.lower())

  def _call(
    self,
    call: tuple[str, Any],
    program: Program,
    step: Mapping[str, Any],
    where: str,
  ) -> None:
    name, arguments = call
    recorder = self.recorder
    result = _result(step)

    # --- The sub-task's own calls replace a delegation. A step calls the search agent
    # as a tool, or as a function in a program.
    subtasks: Sequence[str | None] = delegated_texts(program)
    if name == AGENT:
      subtasks = (_texts(arguments) or [None])[:1]
    if self._delegate(subtasks, program, where) or name == AGENT:
      recorder.calls_read += 1
      rest = other_statements(program)
      if rest:
        first = ast.get_source_segment(_texts(arguments)[0], rest[0])
        recorder.note(
          where, f"{len(rest)} statements beside the delegation: {first!r:.80}"
        )
      if isinstance(arguments, dict) and name == AGENT and len(arguments) > 1:
        recorder.note(where, f"arguments beside the sub-task: {arguments!r:.80}")
      self._unseen(f"report of the {AGENT}", result, where)
      return

    # --- A tool call, or the final answer.
    if only_answers(program):
      recorder.calls_read += 1
      self._unseen("result of the final answer", result, where)
      return
    functions = set(map(callee, nodes_in_order(program, ast.Call))) - {None}
    theirs = sorted(f for f in functions if f == AGENT or self._tag(f))
    if theirs:  # our sandbox lacks such functions; the program stays unchanged
      recorder.note(where, f"the program calls their {', '.join(theirs)}")
    ours = translate_and_note(recorder, where, name, arguments, self.table)
    if ours.tag == roles.ANSWER:
      self.answer = ours.body
      self._unseen("result of the final answer", result, where)
    elif ours.tag == roles.SUGGESTED_ANSWER:
      recorder.say(runs.SOLVER, runs.CANDIDATE, ours.body)
      self._unseen("result of a suggested answer", result, where)
    else:
      recorder.call(ours.tag, ours.body, result, failed=bool(step.get("error")))

  def _unseen(self, label: str, result: str, where: str) -> None:
    if result:
      self.recorder.note(where, f"the {label}: {result!r:.80}")

  def _ending(self, step: Mapping[str, Any], program: Program, where: str) -> None:
    """Reads a final step's answer; notes another step's output."""
    output = step.get("action_output")
    argument = final_argument(program)
    is_final = step.get("is_final_answer")
    if is_final is None:  # an older version lacks the field
      is_final = argument is not None
    if is_final and not step.get("error"):
      # The executed output is the most reliable; a step without output may still
      # contain its answer.
      answer = output
      if answer is None:
        answer = literal(argument)
      if answer is not None:
        self.answer = _text(answer)
        return
    # Usually the output equals the observation, or the answer read before.
    shown = f"{self.answer}\n{_result(step)}"
    if output is not None and _text(output) not in shown and str(output) not in shown:
      self.recorder.note(where, f"action_output {output!r:.80} beside the observation")

  def _delegate(
    self, texts: Sequence[str | None], program: Program, where: str
  ) -> bool:
    """Records the sub-tasks that a program delegates, in order; False for none.

    If a call does not contain its sub-task (None), the text may be elsewhere in the
    program; if the program builds the text at run time, the sub-task is the next
    record, in run order.
    """
    # --- The records for calls without a text.
    if not texts:
      return False
    others = [name for name, _ in self.subtasks if name not in texts]
    elsewhere: list[str] = []  # sub-tasks in the program outside calls
    for node in nodes_in_order(program, ast.Constant):
      if node.value in others and node.value not in elsewhere:
        elsewhere.append(node.value)
    spare = [name for name in others if name not in elsewhere]
    names = []
    for text in texts:
      if text is None and not elsewhere and spare:
        self.recorder.note(
          where, f"a sub-task that is not written out; taken is {spare[0]!r:.80}"
        )
      if text is None:  # each record is taken once
        text = (elsewhere or spare or [None]).pop(0)
      names.append(text)

    # --- The records, in place of the calls.
    any_record = False
    for name in [*names, *elsewhere]:
      record = self._take_subtask(name)
      if record is not None:
        self._record_subtask(name, record, where)
        any_record = True
      elif name is not None:
        self.recorder.note(where, f"no record of the sub-task {name!r:.80}")
    return any_record

  def _take_subtask(self, name: str | None) -> Mapping[str, Any] | None:
    """Removes the first sub-task with this name; returns its record, or None."""
    for at, (other, record) in enumerate(self.subtasks):
      if other == name:
        del self.subtasks[at]
        return record
    return None

  def _record_subtask(self, name: str, record: Mapping[str, Any], where: str) -> None:
    """Records a sub-task, its calls, and its answer."""
    recorder = self.recorder
    calls = record.get("tool_calls")
    if not isinstance(calls, list):
      raise RowRefused("bad_subtasks", f"sub-task {name!r:.60} has no list of calls")
    note_unread(recorder, where, record, _SUBTASK)
    recorder.think(name)
    for call in calls:
      if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise RowRefused("bad_call", f"sub-task {name!r:.60}: {call!r:.80}")
      note_unread(recorder, where, call, _SUBCALL)
      arguments = call.get("args", call.get("arguments"))
      ours = translate_and_note(recorder, where, call["name"], arguments, self.table)
      if ours.tag in roles.ROLES:
        continue  # the answer, which follows
      observation = call.get("observation", call.get("observations"))
      if not isinstance(observation, str):
        raise RowRefused("no_result", f"{where}: {call['name']} has no observation")
      recorder.call(ours.tag, ours.body, observation)
    if record.get("answer") is not None:
      recorder.think(_text(record["answer"]))

  def _critique(self, step: Mapping[str, Any], where: str) -> None:
    text = _text(step.get("evaluate_thought") or "")
    if text.strip():
      grades = roles.reflection_grades(text)
      if set(grades) == set(roles.CRITERIA):
        # The last line is the reflection, earlier text the thought: see `convert`.
        line = " ".join(f"{c} : {grades[c].capitalize()}" for c in roles.CRITERIA)
        review = f"{text.strip()}\n{line}"
        self.recorder.say(runs.REFLECTOR, runs.REFLECTION, review)
      else:
        self.recorder.think(text)
    if step.get("score") is not None:
      self.recorder.note(where, f"score {step['score']!r:.20} of the step")


def _rationale(output: Any) -> tuple[str, str]:
  """Splits a model's text into the parts before and after its call."""
  if isinstance(output, list):  # parts, as in chat messages
    output = "".join(str(p.get("text", "")) for p in output if isinstance(p, dict))
  if not isinstance(output, str):
    return "", ""
  called = _CALLED.search(output)
  if called is None:
    return _THOUGHT.sub("", output), ""
  thought = _THOUGHT.sub("", output[: called.start()])
  if "Action" in called[0]:  # the rest is the call itself, without a block
    return thought, ""
  return thought, _BLOCK.sub("", output[called.start() :]).strip()


def _name_and_arguments(call: Any, where: str) -> tuple[str, Any]:
  """Reads a smolagents ToolCall: bare, or nested under `function` by its `dict()`."""
  inner = call.get("function", call) if isinstance(call, dict) else None
  if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
    raise RowRefused("bad_call", f"{where}: {call!r:.80}")
  return inner["name"], inner.get("arguments")


def _result(step: Mapping[str, Any]) -> str:
  """Joins the observations, unchanged, and the error shown after them."""
  observations = step.get("observations")
  error = step.get("error")
  texts = []
  if isinstance(observations, str) or observations:
    texts.append(_text(observations))
  if isinstance(error, dict):  # smolagents: {type, message}
    error = error.get("message") or error
  if error:
    texts.append(str(error))
  return "\n".join(texts)


def _text(value: Any) -> str:
  """Returns a string unchanged, other values as JSON."""
  return value if isinstance(value, str) else json.dumps(value, default=str)


def _texts(arguments: Any) -> list[str]:
  """Lists the strings among a call's arguments; for a program, the program."""
  values = arguments.values() if isinstance(arguments, dict) else (arguments,)
  return [v for v in values if isinstance(v, str)]
