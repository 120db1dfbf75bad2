"""Synthesises tasks that need tools, from a search tool's documents.

  coa synthesize --config=configs/synthesize_chat.py --workdir=DIR
  coa synthesize --config=configs/synthesize_cloze.py --workdir=DIR

The second needs no model: its questions are gaps in the documents' sentences. Writes
`tasks.jsonl` (a `tasks.uri`), `results.json` (tasks by family, rejection reasons, the
bill) and `calls.jsonl`, from which an interrupted run resumes without paying for a call
twice. The endpoint's key, if required, is read from COA_API_KEY.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_collections

from coa_jax.cli.launch import launch
from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher import cloze
from coa_jax.data.teacher.journal import Journal
from coa_jax.data.teacher.llm import ChatBackend, TeacherChatConfig
from coa_jax.data.teacher.synthesis import (
  SAMPLE,
  TOOL,
  Corpus,
  SynthesisConfig,
  SynthesisResult,
  Synthesizer,
)
from coa_jax.protocol.trajectory import write_jsonl
from coa_jax.report.metrics import Metrics, write_json
from coa_jax.report.tables import Table
from coa_jax.runtime.config import read_config
from coa_jax.runtime.fields import section
from coa_jax.runtime.lock import exclusive
from coa_jax.runtime.record import hash_files, prepare_workdir
from coa_jax.runtime.shard import Shard
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from tools_sandbox.search.index import read_corpus

CALLS = "calls.jsonl"
# A shard's result files, joined by the last shard.
LOGS = (CALLS,)
_MAY_CHANGE = (
  "synthesis.workers",
  "chat.base_url",
  "chat.timeout_s",
  "chat.retries",
  "chat.prices",
  "chat.key_file",
)


@dataclasses.dataclass(frozen=True)
class SynthesizeConfig:
  """The synthesis config's sections.

  Attributes:
    synthesis: number and kind of tasks.
    tools: the search tool and its corpus.
    chat: the endpoint of `synthesis.backend="chat"`.
  """

  synthesis: SynthesisConfig = section(SynthesisConfig)
  tools: ToolsConfig = section(ToolsConfig)
  chat: TeacherChatConfig | None = None

  def __post_init__(self):
    backend = self.synthesis.backend
    if backend == "chat" and self.chat is None:
      raise ValueError("config lacks section 'chat', for synthesis.backend='chat'")
    if backend != "chat" and self.chat is not None:
      raise ValueError(
        f"config has no section 'chat' with synthesis.backend={backend!r}: it is read "
        "with synthesis.backend='chat' alone"
      )
    if TOOL not in self.tools.tools or not self.tools.corpus:
      raise ValueError(f"tools: synthesis needs {TOOL} in tools.tools, and a corpus")


@exclusive()
def run(
  config: ml_collections.ConfigDict, workdir: str, shard: Shard | None = None
) -> dict[str, Any]:
  """Synthesises tasks over `tools.corpus` through its search tool.

  budget: one stage, from a corpus to its tasks.

  Args:
    config: see `SynthesizeConfig`.
    workdir: the output folder.
    shard: makes tasks only from this part of the documents, into `LOGS`. With all
      parts' logs joined, the whole synthesis resumes from there.

  Returns:
    results.json's content.

  Raises:
    ConfigError, ValueError, FileNotFoundError: before any request.
    InfrastructureError, RefusedError: the endpoint or the tool fails or refuses.
  """
  # --- Read the config, and the corpus.
  settings = read_config(config, SynthesizeConfig)
  plan = settings.synthesis
  tools = settings.tools
  passages = collections.defaultdict(list)  # a long page may be in several
  for page in read_corpus(tools.corpus):
    passages[page.title].append(page.text)
  corpus = Corpus({title: "\n".join(t) for title, t in passages.items() if title})
  titles = sorted(corpus.documents)
  random.Random(plan.seed).shuffle(titles)
  prepare_workdir(
    settings,
    workdir,
    may_change=_MAY_CHANGE,
    inputs={"tools.corpus": hash_files(tools.corpus)},
  )
  path = os.path.join(workdir, CALLS)
  with contextlib.ExitStack() as stack:
    toolbox = stack.enter_context(Toolbox(tools))
    backend = cloze.answer
    usd = {}
    if settings.chat is not None:
      backend = ChatBackend(settings.chat, os.environ.get("COA_API_KEY"))
      stack.enter_context(backend)
      usd = {"usd": settings.chat.usd}
    journal = Journal(path, **usd)

    # --- Make tasks from documents, then from pairs of tasks. Calls are recorded under
    # the document's or the pair's key, so a resumed run pays for none twice.
    def maker(key: str) -> Synthesizer:
      run_key = (key, SAMPLE)
      return Synthesizer(
        corpus,
        journal.backend(backend, run_key),
        journal.tools(toolbox.call, run_key),
        plan,
      )

    def grow(title: str) -> list[SynthesisResult]:
      return list(maker(title).grow(title))

    def widen(pair: tuple[Task, Task]) -> list[SynthesisResult]:
      return [maker(f"{pair[0].id}+{pair[1].id}").widen(*pair)]

    seeds = titles[: plan.seeds]
    if shard:
      seeds = list(shard.of(seeds))
    attempts = _in_parallel(grow, seeds, plan.workers, journal, workdir, "grow")
    grown = [made for made in attempts if isinstance(made, Task)]
    if shard:
      return {"tasks": len(grown), "calls": journal.bill()}
    pairs = _pairs(grown, plan)
    attempts += _in_parallel(widen, pairs, plan.workers, journal, workdir, "widen")
    bill = journal.bill()
  # --- Write the tasks, and counts of the rest.
  tasks = [made for made in attempts if isinstance(made, Task)]
  reasons = [made for made in attempts if isinstance(made, str)]
  write_jsonl(os.path.join(workdir, "tasks.jsonl"), [t.to_json() for t in tasks])
  count = collections.Counter
  results = {
    "documents": len(corpus.documents),
    "tasks": len(tasks),
    "by_family": dict(sorted(count(t.family for t in tasks).items())),
    "by_hops": dict(sorted(count(str(t.meta["hops"]) for t in tasks).items())),
    "left_out": dict(sorted(count(reasons).items())),
    "calls": bill,
  }
  write_json(os.path.join(workdir, "results.json"), results)
  return results


def _pairs(tasks: list[Task], plan: SynthesisConfig) -> list[tuple[Task, Task]]:
  """Draws pairs of tasks from different documents; a task is in at most one pair."""
  drawn = list(tasks)
  random.Random(plan.seed + 1).shuffle(drawn)
  drawn = drawn[: round(plan.width * len(drawn))]
  pairs = []
  for first, second in zip(drawn[::2], drawn[1::2], strict=False):  # an odd one is left
    if set(first.meta["titles"]).isdisjoint(second.meta["titles"]):
      pairs.append((first, second))
  return pairs


def _in_parallel(
  work: Callable[[Any], list[SynthesisResult]],
  items: Iterable[Any],
  workers: int,
  journal: Journal,
  workdir: str,
  stage: str,
) -> list[SynthesisResult]:
  """Returns `work`'s results for all items, in their order."""
  items = list(items)
  out: list[SynthesisResult] = []
  with Metrics(workdir, stage, len(items), unit="document") as metrics:
    for done, some in enumerate(journal.in_order(work, items, workers), 1):
      out += some
      num_tasks = sum(isinstance(made, Task) for made in out)
      # About a hundred lines for any number of documents, and the last.
      if done % max(1, len(items) // 100) == 0 or done == len(items):
        figure = f"{num_tasks} tasks  {journal.spent()}"
        metrics.log(done, {"tasks": num_tasks, **journal.values()}, figure)
  return out


def table(results: Mapping[str, Any]) -> Table:
  """Makes a table of `results.json`: tasks by family and hops, and rejected ones."""
  rows = []
  for title, counts in (
    ("family", results["by_family"]),
    ("hops", results["by_hops"]),
    ("left out", results["left_out"]),
  ):
    rows += [{"of": f"{title} {name}", "tasks": n} for name, n in counts.items()]
  calls = results["calls"]
  note = (
    f"{results['tasks']:,} tasks of {results['documents']:,} documents, in "
    f"tasks.jsonl; {calls['calls']:,} model calls. More is in results.json."
  )
  return Table("Tasks made", rows, {"of": "", "tasks": "tasks"}, note)


def command() -> None:
  """Runs the command line."""
  launch(run, SynthesizeConfig, lambda results: [table(results)], logs=LOGS)
