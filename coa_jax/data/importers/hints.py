"""Hints for dropped rows, by reason.

A hint's flags have been tried on the dropped row, and give a trajectory.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping

from coa_jax.data.importers.importers import Importer, Record
from coa_jax.data.tasks.task import Kind
from coa_jax.data.teacher.convert import Dropped
from coa_jax.protocol import roles
from coa_jax.protocol.roles import VARIANTS, Variant, get_variant
from coa_jax.protocol.tools import FUNCTION_TAG, SPECS
from coa_jax.protocol.trajectory import Trajectory

THINK = "Go on."  # a hint's text for a missing thought
# Formats that keep records verbatim; other formats are converted.
VERBATIM = ("alpaca", "trajectories")
_TWO_READINGS = (
  "the text is damaged or holds the format's own marks, so nobody can tell who wrote "
  "what; no flag reads it"
)
_SHAPE = "the row has not the shape of this format; --format=NAME reads it as another"
_NO_ANSWER = "the run has no answer to learn from; it can only be left out"
_RESULTS = (
  "results are told apart by tool_call_id, or by their order where no call has an id: "
  "each call needs exactly one, right after it"
)
# Reason -> advice if no flag makes the row readable.
HINTS: Mapping[str, str] = {
  "ambiguous": _TWO_READINGS,
  "bad_arguments": "--tools=NAME=tool writes a call with any arguments, as one object",
  "bad_call": "a call is an object of name and arguments",
  "bad_content": "a message's content is text, or a list of parts",
  "bad_field": _SHAPE,
  "bad_kind": f"kind is {', '.join(Kind)}, or left out",
  "bad_record": _SHAPE,
  "bad_subtasks": _SHAPE,
  "bad_turn": "a turn is text of human, gpt, function_call, observation or system",
  "cut": _NO_ANSWER,
  "empty": _NO_ANSWER,
  "illegal_transition": "the record breaks the order of spans in every dialect",
  "infrastructure": "the run failed for reasons outside it; it can only be left out",
  "malformed": "a span holds what its tool does not read; see the line of the row",
  "mixed_ids": _RESULTS,
  "multi_turn": "the record goes on after its answer; each question needs a user's "
  "message of its own, then its turns are read one by one",
  "nested": _TWO_READINGS,
  "no_messages": _SHAPE,
  "no_question": "give it in a field `question`, or as the first user's message",
  "no_result": _RESULTS,
  "no_steps": _SHAPE,
  "no_text": _SHAPE,
  "shared_observation": "calls made at once share one result; give each its own",
  "stray_result": _RESULTS,
  "stray_text": _TWO_READINGS,
  "tool_failed": _NO_ANSWER,
  "truncated": _NO_ANSWER,
  "turn_limit": _NO_ANSWER,
  "unread_call": "a call of the row is in a form that is not read; write it as "
  "tool_calls of OpenAI's chat messages",
  "unclosed": "the text is cut off or damaged; no flag reads it",
  "ungraded": _NO_ANSWER,
  "unknown_step": _SHAPE,
  "unknown_task": "give the runs' tasks: --tasks=FILE",
  "unknown_tool": f"--tools=NAME=TAG says what it is here; tags: {', '.join(SPECS)}",
  "unplaced_subtask": "no step of the run hands that sub-task on; it is incomplete",
}
_NAME = re.compile(r"no tag for the tool '(.+?)';")
_TAG = re.compile(r"<(\w+)> is no span")


def hint(importer: Importer, dropped: Dropped, record: Record) -> str:
  """Returns a one-line hint for a dropped row: flags that read it, or the obstacle."""
  # --- A tool in the dialect, but not in this run.
  tag = _TAG.search(dropped.detail)
  base = get_variant(importer.variant.name)
  if tag and tag[1] in base.tools and tag[1] not in importer.variant.tools:
    return f"add --described_tools={tag[1]}, which the run that plays needs, too"

  # --- Tool names in no table: treated as the user's functions by default.
  flags = []
  tried, names = _with_functions(importer, dropped, record)
  if names:
    flags.append(f"--tools={','.join(f'{name}={FUNCTION_TAG}' for name in names)}")
  for settings, more in _settings(tried, dropped.reason):
    read = settings.read(*record)
    if not isinstance(read, Dropped) and _uses_all(settings, importer, read[1]):
      flags += more
      break
  else:
    return HINTS.get(dropped.reason, "it can only be left out")
  line = f"try {' and '.join(flags)}"
  if names:
    line += (
      f" ({FUNCTION_TAG}: a function of yours, under its own name; other tags: "
      f"{', '.join(tag for tag in SPECS if tag != FUNCTION_TAG)})"
    )
  elif tag and importer.format not in VERBATIM:
    line += f", or --tools=NAME=TAG with a tag of yours: {', '.join(base.tools)}"
  return line


def _with_functions(
  importer: Importer, dropped: Dropped | None, record: Record
) -> tuple[Importer, list[str]]:
  """Returns an importer with a row's unknown tools as functions, and their names."""
  names: list[str] = []
  while dropped and (found := _NAME.search(dropped.detail)) and len(names) < 32:
    if found[1] in names:
      break
    names.append(found[1])
    tools = {**importer.tools, found[1]: FUNCTION_TAG}
    importer = dataclasses.replace(importer, tools=tools)
    result = importer.read(*record)
    dropped = result if isinstance(result, Dropped) else None
  return importer, names


def _settings(importer: Importer, reason: str) -> Iterator[tuple[Importer, list[str]]]:
  """Lists importers to try and their flags, the nearest to the requested one first.

  First the same dialect with missing thoughts filled in, then without optional agents;
  then the dialect with all tools, likewise.
  """
  if importer.format in VERBATIM:
    if reason == "unknown_tool":
      for name in VARIANTS:
        other = dataclasses.replace(importer, variant=get_variant(name))
        yield other, [f"--variant={name}"]
    elif not importer.keep_illegal:
      keeping = dataclasses.replace(importer, keep_illegal=True)
      yield keeping, ["--keep_illegal, which keeps those that break order rules only"]
    return
  think = []
  convert = importer.convert
  if not convert.missing_think:
    convert = dataclasses.replace(convert, missing_think=THINK)
    think = [f"--convert.missing_think='{THINK}'"]
  yield importer, []
  yield dataclasses.replace(importer, convert=convert), think
  for base in (importer.variant, get_variant("unified")):
    for variant in _without_some(base):
      other = dataclasses.replace(importer, variant=variant)
      flag = f"--variant={_name(variant)}"
      yield other, [flag]
      yield dataclasses.replace(other, convert=convert), [flag, *think]


def _without_some(variant: Variant) -> Iterator[Variant]:
  """Lists the dialect, then its versions without some agents, fewest removed first."""
  check = (roles.SUGGESTED_ANSWER, roles.DOUBLE_CHECK)
  groups = ((roles.REFLECTION,), check, (roles.PLAN,))
  groups = [[role for role in group if role in variant.roles] for group in groups]
  groups = [group for group in groups if group]
  for count in range(len(groups) + 1):
    for gone in itertools.combinations(groups, count):
      names = itertools.chain(*gone)
      yield variant.without(names) if gone else variant


def _name(variant: Variant) -> str:
  """Returns a dialect's name, with its missing agents in speaking order."""
  base, *gone = variant.name.split("-")
  return "-".join([base, *(role for role in roles.ROLES if role in gone)])


def _uses_all(settings: Importer, asked: Importer, trajectory: Trajectory) -> bool:
  """Whether a trajectory uses all agents in a dialect tried by the hint."""
  if settings.variant == asked.variant or settings.format in VERBATIM:
    return True
  agents = set(settings.variant.roles) - {roles.THINK, roles.ANSWER}
  return agents <= {segment.role for segment in trajectory.segments}
