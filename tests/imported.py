"""Foreign rows and their import, for tests of importers and conversion."""

from __future__ import annotations

import itertools
import json

from coa_jax.data.importers.importers import Importer
from coa_jax.data.teacher.convert import ConvertConfig
from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Trajectory

# The web dialect with code, so that one variant fits every row.
UNIFIED = roles.get_variant("unified")
# A single agent's dialect.
ALONE = roles.get_variant("unified-plan-reflection-suggested_answer-double_check")
# Fills every gap of a foreign run.
WHOLE = ConvertConfig(missing_think="Go on.", score_right=True)


def read(format_: str, row: dict, **options):
  """Imports one row as if read from a file."""
  options = {"variant": UNIFIED, "stem": "t", "convert": WHOLE, **options}
  importer = Importer(format_, **options)
  return importer.read(0, "t:1", json.loads(json.dumps(row)))


def lost(format_: str, row: dict, **options) -> list[str]:
  """The parts of a row lost in its trajectory."""
  return read(format_, row, **options)[1].meta.get("lost", [])


def calls_in(
  trajectory: Trajectory, variant: Variant = UNIFIED
) -> list[tuple[str, str, str]]:
  """The calls in a trajectory's text, as (tag, body, observation)."""
  spans = parse(trajectory.text, variant).spans
  return [
    (a.role, a.content, b.content)
    for a, b in itertools.pairwise(spans)
    if a.role in variant.tools
  ]


def search(n: int = 1, **fields) -> dict:
  """An OAgents step that searches."""
  call = {"name": "google_search", "arguments": {"query": f"q{n}"}}
  step = {"model_output": "Thought: go", "tool_calls": [call], "observations": "o"}
  return {**step, **fields}


def row_of(*steps, **fields) -> dict:
  """An OAgents row with a plan, these steps and a right answer."""
  return {
    "question": "Who?",
    "prediction": "x",
    "true_answer": "x",
    "intermediate_steps": [{"facts": "f", "plan": "p"}, *steps],
    **fields,
  }


GAVE = {"role": "tool", "tool_call_id": "search", "content": "o"}
ENDS = {"role": "assistant", "content": "x"}


def asks(*messages) -> dict:
  """A chat row with a question and these messages."""
  user = {"role": "user", "content": "Who?"}
  return {"messages": [user, *messages], "answer": "x"}


def calls(*names: str, arguments: str | None = '{"query": "q"}', **fields) -> dict:
  """An assistant message with a call for each name, which is also its id."""
  made = [{"id": n, "function": {"name": n, "arguments": arguments}} for n in names]
  return {"role": "assistant", "content": "go", "tool_calls": made, **fields}
