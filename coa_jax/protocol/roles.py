"""Tags, variants and transition rules of the Chain-of-Agents protocol, as data.

A Chain-of-Agents model writes one growing text of tagged spans. Role agents think,
plan, reflect, propose and verify; tool agents call tools. A `Variant` defines the
spans, their order, and the rules on their content.

Source: Chain-of-Agents, arXiv 2508.13167, section 3 and appendix D (prompts); the
transition rules of the web, mhqa, code and math variants are the rule lists in the
paper's prompts. `unified` is this project's union of them.

budget: tags, transition rules and the escaping of tags are one language.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from coa_jax.protocol.tools import FUNCTION_TAG, SPECS

THINK = "think"
PLAN = "plan"
REFLECTION = "reflection"
SUGGESTED_ANSWER = "suggested_answer"
DOUBLE_CHECK = "double_check"
ANSWER = "answer"
OBSERVATION = "observation"
CONTEXT_SUMMARY = "context_summary"
START = "start"  # the state before the first span; never a tag

ROLES = (THINK, PLAN, REFLECTION, SUGGESTED_ANSWER, DOUBLE_CHECK, ANSWER)
TOOLS = tuple(SPECS)
SPANS = (*ROLES, *TOOLS, OBSERVATION, CONTEXT_SUMMARY)  # every tag of the protocol

# The reflection agent grades three criteria; any "poor" asks for a new plan.
CRITERIA = ("information_conflict", "tool_effectiveness", "trajectory_monitoring")
GRADES = ("good", "average", "fair", "poor")
# The verification agent scores 1 (wrong) to 4 (fully correct); 3 lets an answer pass.
PASS_SCORE = 3
SCORES = (1, 2, 3, 4)
# Joins several answers to one question inside `answer`.
ANSWER_SEPARATOR = "|"


def open_tag(role: str) -> str:
  """Returns `role`'s opening tag, e.g. `<think>`."""
  return f"<{role}>"


def close_tag(role: str) -> str:
  """Returns `role`'s closing tag, e.g. `</think>`."""
  return f"</{role}>"


def tags_of(names: Iterable[str]) -> list[str]:
  """Lists each name's opening and closing tags."""
  out = []
  for name in names:
    out += [open_tag(name), close_tag(name)]
  return out


def wrap(role: str, content: str) -> str:
  """Writes a span; one space follows the opening tag.

  Byte-level tokenizers encode a word after a space as one token and the bare word often
  as several; with the space a name always has the same tokens.
  """
  return f"{open_tag(role)} {content}{close_tag(role)}"


@dataclasses.dataclass(frozen=True)
class Variant:
  """One dialect of the protocol.

  Attributes:
    name: its name in configs.
    roles: role tags the policy may write, `think` included.
    tools: tool tags the policy may write.
    follows: last span, or START -> the spans that may come next. Neither side has
      `think`: the next two fields tell whether a `think` may come between. An
      observation is not a state: its successors are its tool's.
    think_required: spans that must come directly after a `think`.
    think_allowed: spans that may come directly after a `think`.
    graded: True if every reflection must grade all three CRITERIA; if False, grades are
      optional, but count if written.
    max_plans: maximum `plan` spans per trajectory; None for no limit.
    min_calls: minimum tool calls in a well-formed trajectory.
    tool_descriptions: tool -> its description in the prompt, if different from its row
      in `tools.SPECS`.
    functions: functions called by the tag `tool`: name -> description in the prompt. If
      empty, every name is allowed.
    parallel: maximum calls in one `tool` span, a JSON list if there are several.
    summaries: whether a summary may follow an observation and end the context. It is
      not a state either.
  """

  name: str
  roles: tuple[str, ...]
  tools: tuple[str, ...]
  follows: Mapping[str, frozenset[str]]
  think_required: frozenset[str]
  think_allowed: frozenset[str]
  graded: bool = False
  max_plans: int | None = None
  min_calls: int = 0
  tool_descriptions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  functions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  summaries: bool = False
  parallel: int = 1

  @property
  def tags(self) -> tuple[str, ...]:
    """All tags of the variant's texts, tool results and summaries included."""
    return self.roles + self.tools + (OBSERVATION, CONTEXT_SUMMARY)

  @property
  def callable_names(self) -> tuple[str, ...]:
    """Names in a `tool` span: functions, and with parallel calls the other tools.

    () allows every name.
    """
    if self.parallel == 1:
      return tuple(self.functions)
    return (*self.functions, *(t for t in self.tools if t != FUNCTION_TAG))

  @property
  def yield_tags(self) -> tuple[str, ...]:
    """Closing tags at which decoding stops: tools', the answer's, a summary's."""
    summary = (CONTEXT_SUMMARY,) if self.summaries else ()
    return tuple(close_tag(t) for t in (*self.tools, ANSWER, *summary))

  def with_tools(self, tools: Iterable[str]) -> Variant:
    """Returns the variant with only these tools.

    Args:
      tools: their tags; a mapping also gives each tool's description in the prompt, ""
        for the default one. `tool:NAME` means a function called by the tag `tool`.

    Raises:
      ValueError: the variant lacks a tool.
    """
    descriptions = dict.fromkeys(tools, "")
    if isinstance(tools, Mapping):
      descriptions.update(tools)
    # Functions share one tag.
    prefix = f"{FUNCTION_TAG}:"
    functions = {}
    for key in list(descriptions):
      if key.startswith(prefix):
        functions[key.removeprefix(prefix)] = descriptions.pop(key)
    if functions:
      descriptions.setdefault(FUNCTION_TAG, "")
    for tool in descriptions:
      if tool not in self.tools:
        raise ValueError(
          f"variant {self.name!r} has no tool {tool!r}; it has {', '.join(self.tools)}"
        )
    # Removed tools are removed from every rule.
    gone = frozenset(self.tools).difference(descriptions)
    follows = {k: v - gone for k, v in self.follows.items() if k not in gone}
    return dataclasses.replace(
      self,
      tools=tuple(descriptions),
      tool_descriptions={tool: text for tool, text in descriptions.items() if text},
      functions=functions,
      follows=follows,
      think_required=self.think_required - gone,
      think_allowed=self.think_allowed - gone,
    )

  def without(self, gone: Iterable[str]) -> Variant:
    """Returns the variant without some role agents.

    Predecessors of a removed role get its successors, so a trajectory stays well formed
    if the removed agents' spans are cut out.

    Args:
      gone: role tags; not `think` and `answer`, which every dialect has.

    Raises:
      ValueError: the variant lacks an agent, or `double_check` would be left without a
        `suggested_answer` to check.
    """
    gone = frozenset(gone)
    agents = [r for r in self.roles if r not in (THINK, ANSWER)]
    unknown = sorted(gone.difference(agents))
    if unknown:
      raise ValueError(
        f"variant {self.name!r} has no agent {unknown[0]!r} to do without; it has "
        f"{', '.join(agents)}"
      )
    if SUGGESTED_ANSWER in gone and DOUBLE_CHECK in set(agents) - gone:
      raise ValueError(f"without {SUGGESTED_ANSWER} a {DOUBLE_CHECK} checks nothing")
    # Each removed role's predecessors get its successors, one role after the other.
    follows = dict(self.follows)
    for role in gone:
      after = follows.pop(role) - {role}
      for state, names in follows.items():
        if role in names:
          follows[state] = names - {role} | after
    return dataclasses.replace(
      self,
      name="-".join((self.name, *sorted(gone))),
      roles=tuple(r for r in self.roles if r not in gone),
      follows=follows,
      think_required=self.think_required - gone,
      think_allowed=self.think_allowed - gone,
    )


def _follows(call: tuple[str, ...], **table: str) -> Mapping[str, frozenset[str]]:
  """Reads a table of space-separated names; `tools` means every tool in `call`."""

  rows: dict[str, frozenset[str]] = {}
  for state, names in table.items():
    after = set(names.split())
    if "tools" in after:
      after.remove("tools")
      after.update(call)
    # All tools have the same row, in the order of `call`.
    states = call if state == "tools" else (state,)
    rows |= dict.fromkeys(states, frozenset(after))
  rows[ANSWER] = frozenset()
  return rows


def _web_like(name: str, tools: tuple[str, ...], graded: bool, strict: bool) -> Variant:
  """Plan, call, reflect, propose, verify; `strict` asks for more thinks."""
  always = {PLAN, REFLECTION, SUGGESTED_ANSWER, DOUBLE_CHECK, *tools}
  required = {PLAN, *tools}
  if strict:
    required = always
  return Variant(
    name=name,
    roles=ROLES,
    tools=tools,
    follows=_follows(
      tools,
      start="plan tools",
      plan="tools suggested_answer",
      tools="tools reflection suggested_answer",
      reflection="plan tools suggested_answer",
      suggested_answer="double_check",
      double_check="plan tools answer",
    ),
    think_required=frozenset(required),
    think_allowed=frozenset(always | {ANSWER}),
    graded=graded,
  )


def _program_like(name: str) -> Variant:
  """Plan, (think, code, observation, reflection)*N, think, answer."""
  return Variant(
    name=name,
    roles=(THINK, PLAN, REFLECTION, ANSWER),
    tools=("code",),
    follows=_follows(
      ("code",),
      start="plan",
      plan="code answer",
      tools="reflection",
      reflection="code answer",
    ),
    think_required=frozenset({"code", ANSWER}),
    think_allowed=frozenset({"code", ANSWER}),
    max_plans=1,
    min_calls=1,
  )


_MHQA_SPANS = frozenset({PLAN, "wiki_search", REFLECTION, ANSWER})

VARIANTS: Mapping[str, Variant] = {
  v.name: v
  for v in (
    _web_like("web", ("web_search", "crawl_page"), graded=True, strict=True),
    Variant(
      name="mhqa",
      roles=(THINK, PLAN, REFLECTION, ANSWER),
      tools=("wiki_search",),
      follows=_follows(
        ("wiki_search",),
        start="plan tools",
        plan="tools answer",
        tools="tools reflection plan answer",
        reflection="plan tools answer",
      ),
      think_required=_MHQA_SPANS,
      think_allowed=_MHQA_SPANS,
    ),
    _program_like("code"),
    _program_like("math"),
    # Think is required at decisions (a plan, a call) and optional elsewhere.
    _web_like("unified", TOOLS, graded=False, strict=False),
  )
}


def get_variant(name: str) -> Variant:
  """Returns the variant called `name`; "NAME-ROLE-ROLE" is NAME without these agents.

  So "unified-plan-reflection-suggested_answer-double_check" is ReAct: one agent's
  thoughts, calls, observations and answer.

  Raises:
    ValueError: the variant is unknown (the message lists the known variants), or lacks
      an agent; see `Variant.without`.
  """
  base, *gone = name.split("-")
  if base not in VARIANTS:
    raise ValueError(
      f"unknown protocol variant {name!r}; there are {', '.join(VARIANTS)}"
    )
  return VARIANTS[base].without(gone) if gone else VARIANTS[base]


# Only ASCII digits and letters count, like white space in `tool_bodies`.
_GRADE = re.compile(
  rf"({'|'.join(CRITERIA)})\s*:\s*({'|'.join(GRADES)})\b", re.IGNORECASE | re.ASCII
)
_INTEGER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)


def reflection_grades(content: str) -> dict[str, str]:
  """Reads a reflection's grades: criterion -> grade, lower case; {} if it has none.

  The surface form is `criterion : Grade` (arXiv 2508.13167, case studies). A criterion
  graded twice keeps its worst grade.
  """
  grades: dict[str, str] = {}
  for criterion, grade in _GRADE.findall(content):
    criterion = criterion.lower()
    # GRADES go from the best to the worst.
    before = grades.get(criterion, GRADES[0])
    grades[criterion] = max(before, grade.lower(), key=GRADES.index)
  return grades


def has_poor_grade(content: str) -> bool:
  """Whether a reflection grades some criterion poor, which requires a new plan."""
  return "poor" in reflection_grades(content).values()


def check_score(content: str) -> int | None:
  """Reads a `double_check`'s score: its only number, 1 to 4; otherwise None."""
  numbers = _INTEGER.findall(content)
  if len(numbers) != 1 or numbers[0] not in map(str, SCORES):
    return None
  return int(numbers[0])


_ANY_TAG = "|".join(SPANS)
_TAG_IN_TEXT = re.compile(rf"<(/?(?:{_ANY_TAG}))>")
# An already escaped tag, at any level.
_RAISED = re.compile(rf"&((?:amp;)*)lt;(/?(?:{_ANY_TAG}))>")


def find_tag(text: str) -> str | None:
  """Finds the first protocol tag in `text`, opening or closing; None without one."""
  match = _TAG_IN_TEXT.search(text)
  return match[0] if match else None


def escape(text: str) -> str:
  """Makes every protocol tag in `text` harmless; `unescape` restores `text` exactly.

  Observations are hostile: a page may print `</observation><answer>`. Each tag gets one
  more escape level (`<x>` to `&lt;x>`, `&lt;x>` to `&amp;lt;x>`), so a trajectory's
  text is unambiguous.
  """
  # Escaped tags first: a tag escaped below must not be raised again.
  text = _RAISED.sub(r"&amp;\1lt;\2>", text)
  return _TAG_IN_TEXT.sub(r"&lt;\1>", text)


def unescape(text: str) -> str:
  """Inverts `escape`."""

  def lower(match: re.Match[str]) -> str:
    levels = match[1]
    tag = match[2]
    if not levels:
      return f"<{tag}>"
    return "&" + levels[len("amp;") :] + f"lt;{tag}>"

  return _RAISED.sub(lower, text)
