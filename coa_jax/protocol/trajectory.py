"""Segment, ToolCall, Usage, Trajectory: the records every stage reads or writes.

Tokens are the truth, text is a view: a rollout segment has the sampled ids, and its
text is their decoding; a text segment (distilled or imported) gets its ids once, from
`Tokenizer.encode_trajectories`. The code that appends a token sets its author, never a
search in the text.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, AnyStr, cast

from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import parse_object, to_dataclass

MOST_OF_A_LINE = 1 << 28  # bytes or characters in a row; a decompression bomb has more


class Author(enum.StrEnum):
  """Who wrote a segment; only `policy` tokens are ever trained on."""

  PROMPT = "prompt"
  POLICY = "policy"
  TOOL = "tool"
  CARRIED = "carried"  # an earlier context's text, repeated in the next one
  ENVIRONMENT = "environment"  # the rollout loop: the opening tag of a summary


class Status(enum.StrEnum):
  """How a trajectory ended. A bad rollout is data with a status, not a crash."""

  ENDED = "ended"  # wrote its answer
  TRUNCATED = "truncated"  # ran out of tokens
  TURN_LIMIT = "turn_limit"  # asked for one tool call more than allowed
  TOOL_FAILED = "tool_failed"  # spent its tool budget (seconds) before an answer
  INFRASTRUCTURE = "infrastructure"  # sandbox or judge down: leaves its group
  UNGRADED = "ungraded"  # no verdict yet


class CallStatus(enum.StrEnum):
  """The outcome of a tool call, by its cause."""

  OK = "ok"
  MODEL = "model"  # malformed call, program raised, unknown tool
  TOOL = "tool"  # the tool hit its own limits on a well-formed call
  INFRASTRUCTURE = "infrastructure"  # the service behind the tool is down


@dataclasses.dataclass
class ToolCall:
  """One call: the tool's tag, its arguments, its result and its cost."""

  name: str
  arguments: str
  result: str = ""
  status: CallStatus = CallStatus.OK
  seconds: float = 0.0


@dataclasses.dataclass
class Segment:
  """A run of text by one author under one tag.

  Attributes:
    author: its author.
    role: its tag; "" for the prompt and for text outside every span.
    text: verbatim, tags and trailing white space included.
    ids: token ids; empty until tokenised.
    logps: for a rollout's policy segment, each id's log p under the sampling
      distribution (float, nats); else empty.
    versions: the policy version that sampled each id; else empty.
  """

  author: Author
  role: str
  text: str
  ids: list[int] = dataclasses.field(default_factory=list)
  logps: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)


def grammar_parts(segments: Iterable[Segment]) -> list[tuple[list[int], bool]]:
  """Returns `Constraint.after`'s parts: all but prompts, unread ones marked."""
  out = []
  for s in segments:
    # A summary is sampled text, and read, except where it is repeated.
    unread = s.role == "observation"
    unread |= s.author == Author.CARRIED and s.role == "context_summary"
    if s.author != Author.PROMPT:
      out.append((s.ids, s.author == Author.TOOL or unread))
  return out


@dataclasses.dataclass
class Usage:
  """A trajectory's cost in tokens, calls and seconds.

  A single decoding stream prefills `prompt` and `observation` tokens once, and samples
  `generated` tokens; `cached` counts the prompt tokens available from a prefix cache
  (multi-agent systems re-send their context at every call). `tool_turns` counts calls
  made at the same time once: the longest chain of calls.
  """

  prompt: int = 0
  cached: int = 0
  generated: int = 0
  observation: int = 0
  tool_calls: int = 0
  model_calls: int = 0
  seconds: float = 0.0
  tool_turns: int = 0

  @property
  def total(self) -> int:
    """All input and output tokens, without credit for caching."""
    return self.prompt + self.generated + self.observation


@dataclasses.dataclass
class Trajectory:
  """One attempt at one task.

  Attributes:
    task_id: its task.
    segments: in order; the first is the prompt. A later prompt begins another context:
      the model reads none of the segments before it.
    calls: every tool call, in order.
    status: its final status.
    reward: total reward, or None while ungraded.
    reward_parts: name -> value, e.g. {"answer": 1.0, "format": 1.0}.
    usage: its cost.
    sample: this sample's index within the task (0-based).
    meta: additional data for readers (question, answers, family, agent events); JSON
      values only.
  """

  task_id: str
  segments: list[Segment] = dataclasses.field(default_factory=list)
  calls: list[ToolCall] = dataclasses.field(default_factory=list)
  status: Status = Status.UNGRADED
  reward: float | None = None
  reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
  usage: Usage = dataclasses.field(default_factory=Usage)
  sample: int = 0
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def written(self) -> list[Segment]:
    """All segments except prompts and the segments repeated in later contexts."""
    repeated = (Author.PROMPT, Author.CARRIED)
    return [s for s in self.segments if s.author not in repeated]

  @property
  def text(self) -> str:
    """Everything after the prompt, as one string; see `written`."""
    return "".join(s.text for s in self.written)

  def split(self) -> list[Trajectory]:
    """Returns one trajectory per context, each with its own segments.

    Other fields are shared. A one-context trajectory is returned as it is.
    """
    parts: list[list[Segment]] = [[]]
    for segment in self.segments:
      last = parts[-1]
      if segment.author == Author.PROMPT and last and last[-1].author != Author.PROMPT:
        parts.append([])
      parts[-1].append(segment)
    if len(parts) == 1:
      return [self]
    return [dataclasses.replace(self, segments=segments) for segments in parts]

  @property
  def num_tokens(self) -> int:
    """The number of tokens, the prompt included."""
    return sum(len(s.ids) for s in self.segments)

  @property
  def num_policy(self) -> int:
    """The number of policy tokens."""
    return sum(len(s.ids) for s in self.segments if s.author == Author.POLICY)

  @property
  def versions(self) -> list[tuple[int, int]]:
    """Policy versions, and how many tokens each sampled."""
    counts: collections.Counter[int] = collections.Counter()
    for segment in self.segments:
      counts.update(segment.versions)
    return sorted(counts.items())

  def to_json(self) -> dict[str, Any]:
    """Returns a JSON-serialisable dict; `from_json` reads it back.

    The dict shares the id lists and `meta` with the trajectory: `dataclasses.asdict`
    would copy every id, which takes twice as long as writing the ids.
    """
    # In field order, so that the same trajectory is always the same line.
    return {
      **vars(self),
      "segments": [dict(vars(s)) for s in self.segments],
      "calls": [dict(vars(c)) for c in self.calls],
      "usage": dict(vars(self.usage)),
    }

  @classmethod
  def from_json(cls, row: dict[str, Any], where: str = "trajectory") -> Trajectory:
    """Builds a trajectory from `to_json`'s dict.

    Raises:
      ValueError: a field is missing, unknown or has another type; the message starts
        with `where` and names the field and its value.
    """
    return to_dataclass(row, cls, where, needed=("segments",))


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Any]) -> int:
  """Writes rows (Trajectory, or anything json.dumps takes), one per line.

  The file appears under its name only when complete, so a reader never sees a part.
  Returns the number of rows.
  """
  count = 0
  with atomic_write(path) as f:
    for row in rows:
      if isinstance(row, Trajectory):
        row = row.to_json()
      # ASCII: no byte of a line depends on a locale, and U+2028 ends no line.
      f.write(json.dumps(row, ensure_ascii=True) + "\n")
      count += 1
  return count


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields ("FILE:LINE", row) for every non-empty line; `.gz` is read as gzip.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: a line is not a JSON object, or not UTF-8, or the file is cut short; the
      message names file and line.
  """
  path = os.fspath(path)
  begin = gzip.open if path.endswith(".gz") else open
  # As bytes: invalid UTF-8 is then refused with its line, like invalid JSON.
  with begin(path, "rb") as f:
    for number, line in enumerate(bounded_lines(cast(IO[bytes], f), path), 1):
      if line.strip():
        where = f"{path}:{number}"
        yield where, parse_object(line, where)


def bounded_lines(f: IO[AnyStr], path: str) -> Iterator[AnyStr]:
  """Yields an open file's lines.

  Args:
    f: the file, text or bytes, compressed or not.
    path: its name, for messages.

  Raises:
    ValueError: a line is longer than `MOST_OF_A_LINE`, which a small compressed file
      can hold, or the compressed file is damaged; the message names file and line.
  """
  number = 1
  try:
    while line := f.readline(MOST_OF_A_LINE + 1):
      if len(line) > MOST_OF_A_LINE:
        raise ValueError(
          f"{path}:{number}: the line is longer than {MOST_OF_A_LINE >> 20} MiB, the "
          "limit of a row"
        )
      yield line
      number += 1
  except (gzip.BadGzipFile, EOFError, zlib.error) as e:
    raise ValueError(f"{path}:{number}: cannot be read: {e}") from e


def read_trajectories(path: str | os.PathLike[str]) -> list[Trajectory]:
  """Reads all trajectories in a file; see `iter_trajectories`."""
  return list(iter_trajectories(path))


def iter_trajectories(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
  """Yields the trajectories in a file; the suffix selects the format.

  Raises:
    FileNotFoundError, ValueError: the file cannot be read; the message names file and
      row.
  """
  from coa_jax.protocol import storage  # pyarrow, imported on use

  readers = {
    ".parquet": storage.read_parquet,
    ".array_record": storage.read_array_record,
  }
  read = readers.get(os.path.splitext(os.fspath(path))[1], read_jsonl)
  for where, row in read(path):
    yield Trajectory.from_json(row, where)
