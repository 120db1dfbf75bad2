"""Counts how many rows of training data hold questions of evaluation sets.

A row holds a question by the rule of section `filters` (`benchmarks`, `overlap_words`):
a common n-gram of words, or an equal question if it is shorter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from coa_jax.data.tasks.rows import list_uris, read_rows
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.teacher.novelty import Benchmarks
from coa_jax.protocol.trajectory import Trajectory, iter_trajectories


@dataclasses.dataclass
class Overlap:
  """A set's part in training data.

  Attributes:
    rows: the number of rows that hold one of the set's questions.
    example: the first such row's task id; "" for none.
  """

  rows: int = 0
  example: str = ""


def count_overlaps(
  uri: str, questions: Mapping[str, Sequence[str]], words: int
) -> tuple[int, dict[str, Overlap]]:
  """Counts the rows of a file that hold a question, for each set.

  Args:
    uri: trajectories, or tasks in any accepted form.
    questions: set -> its questions.
    words: the length of a common n-gram.

  Returns:
    The number of rows, and set -> its overlap.

  Raises:
    FileNotFoundError, ValueError: the file cannot be read.
  """
  every = Benchmarks(itertools.chain(*questions.values()), words)
  sets = {name: Benchmarks(texts, words) for name, texts in questions.items()}
  found = {name: Overlap() for name in sets}
  total = 0
  for question, trajectory in _rows(uri):
    total += 1
    # Most rows hold none: each text is hashed once for all sets.
    if not every.hold(question, trajectory):
      continue
    for name, benchmark in sets.items():
      if benchmark.hold(question, trajectory):
        found[name].rows += 1
        found[name].example = found[name].example or trajectory.task_id
  return total, found


def _rows(uri: str) -> Iterator[tuple[str, Trajectory]]:
  """Yields each row's question and trajectory; a task's has no segments."""
  first = next(iter(read_rows(uri)), None)
  if first is not None and "segments" in first[1]:
    for trajectory in itertools.chain(*map(iter_trajectories, list_uris(uri))):
      yield str(trajectory.meta.get("question", "")), trajectory
    return
  for task in load_tasks(uri):
    yield task.question, Trajectory(task.id)
