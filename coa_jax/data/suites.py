"""Benchmark suites, as data: each set's files, agent and published figures.

A new set is a row of `SETS`. The paper's figures are those of arXiv 2508.13167
after RL, in percent.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import os
import re
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class BenchmarkSet:
  """One benchmark.

  Attributes:
    name: its source in results.
    agent: the paper's agent that plays it: web, mhqa, code or math.
    hub: its public name, to download it.
    patterns: names of the file or of a folder above it, in lower case, or with a `/`
      the end of its path; the first pattern with a file counts.
    grader: its own grader; "" for the one of its tasks' kind.
    paper: model size -> the paper's figure after RL, in percent.
  """

  name: str
  agent: str
  hub: str
  patterns: tuple[str, ...]
  grader: str = ""
  paper: Mapping[str, float] = dataclasses.field(default_factory=dict)


def _set(
  agent: str,
  name: str,
  hub: str,
  patterns: str,
  paper: tuple[float, ...] = (),
  grader: str = "",
) -> BenchmarkSet:
  figures = dict(zip(("7b", "32b"), paper, strict=False))
  return BenchmarkSet(name, agent, hub, tuple(patterns.split()), grader, figures)


_FLASH = "RUC-NLPIR/FlashRAG_datasets"

SETS = (
  _set("math", "aime24", "HuggingFaceH4/aime_2024", "*aime*24*", (51.9, 66.7)),
  _set("math", "aime25", "yentinglin/aime_2025", "*aime*25*", (37.8, 59.8)),
  _set("math", "amc23", "math-ai/amc23", "*amc*23*", (81.6, 96.6)),
  _set("math", "math500", "HuggingFaceH4/MATH-500", "*math*500*", (89.4, 94.6)),
  # The text-only English problems in mathematics with a final answer.
  _set(
    "math",
    "olympiadbench",
    "Hothan/OlympiadBench",
    "*oe_to_maths_en_comp* *olympiad*",
    (60.6, 72.1),
  ),
  _set(
    "code",
    "livecodebench_v4",
    "livecodebench/code_generation_lite",
    "*livecodebench*v4* *lcb*v4*",
    (29.0, 43.0),
  ),
  _set(
    "code",
    "livecodebench_v5",
    "livecodebench/code_generation_lite",
    "*livecodebench*v5* *lcb*v5*",
    (28.7, 47.9),
  ),
  _set(
    "code", "codecontests", "deepmind/code_contests", "*code*contests*", (18.8, 32.7)
  ),
  _set("code", "humaneval", "openai/openai_humaneval", "*humaneval*"),
  _set("code", "mbppplus", "evalplus/mbppplus", "*mbpp*"),
  _set("mhqa", "nq", f"{_FLASH}, nq", "nq*", (43.9,)),
  _set("mhqa", "triviaqa", f"{_FLASH}, triviaqa", "*trivia*", (63.3,)),
  _set("mhqa", "popqa", f"{_FLASH}, popqa", "*popqa*", (46.5,)),
  _set("mhqa", "hotpotqa", f"{_FLASH}, hotpotqa", "*hotpotqa*", (43.9,)),
  _set("mhqa", "2wikimultihopqa", f"{_FLASH}, 2wikimultihopqa", "*2wiki*", (49.2,)),
  _set("mhqa", "musique", f"{_FLASH}, musique", "*musique*", (22.3,)),
  _set("mhqa", "bamboogle", f"{_FLASH}, bamboogle", "*bamboogle*", (49.6,)),
  # The test split has no answers; the validation split has files by level, too.
  _set(
    "web",
    "gaia",
    "gaia-benchmark/GAIA",
    "validation/metadata.parquet validation/metadata.jsonl *gaia*",
    (40.8, 55.3),
    "gaia",
  ),
  _set("web", "webwalkerqa", "callanwu/WebWalkerQA", "*webwalker*", (55.6, 63.0)),
  _set(
    "web",
    "browsecomp",
    "openai/simple-evals, browse_comp_test_set",
    "browse_comp* browsecomp.* browsecomp",
    (5.8, 11.1),
  ),
  _set("web", "hle", "cais/hle", "*hle*", (15.6, 18.0)),
  _set("math", "gsm8k", "openai/gsm8k", "*gsm8k*"),
  _set("math", "gpqa", "Idavidrein/gpqa, gpqa_diamond", "*gpqa*diamond* *gpqa*"),
  _set("math", "mmlu_pro", "TIGER-Lab/MMLU-Pro", "*mmlu*pro*"),
  _set("web", "simpleqa", "openai/simple-evals, simple_qa_test_set", "*simple*qa*"),
  _set("web", "frames", "google/frames-benchmark", "*frames*"),
  _set("web", "xbench", "xbench/DeepSearch", "*xbench* *deepsearch*"),
  # Over its own corpus (tools.corpus), with wiki_search.
  _set("mhqa", "browsecomp_plus", "Tevatron/browsecomp-plus", "*browsecomp*plus*"),
)
# Sets without figures in the paper are in no suite of the paper's.
_PAPERS = tuple(s.name for s in SETS if s.paper)


def _of(*agents: str) -> tuple[str, ...]:
  return tuple(s.name for s in SETS if s.agent in agents and s.paper)


SUITES: Mapping[str, tuple[str, ...]] = {
  "afm": _PAPERS,
  "math": _of("math"),
  "code": _of("code"),
  "mhqa": _of("mhqa"),
  "web": _of("web"),
  "more": tuple(s.name for s in SETS if not s.paper),
  # No service is needed: the programs run here.
  "offline": tuple(s.name for s in SETS if s.agent in ("math", "code")),
}
# Published as a training split alone.
_TRAIN_ONLY = ("aime24", "aime25")
_ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".array_record")


def find_files(folder: str, sets: Sequence[BenchmarkSet]) -> dict[str, str]:
  """Finds sets' files below a folder; returns set name -> path.

  Of several files that match a pattern, the first by path counts: test files before
  development and training files. A file in parts (test-00000-of-00002.parquet, or
  test.jsonl and test2.jsonl) is all of them, joined by commas. Corpora are passed over.

  Raises:
    FileNotFoundError: the folder does not exist.
  """
  if not os.path.isdir(folder):
    raise FileNotFoundError(f"{folder}: no folder there")
  paths = []
  for place, _, names in os.walk(folder):
    for name in names:
      if name.endswith(_ENDINGS) and "corpus" not in name.lower():
        paths.append(os.path.join(place, name))
  paths.sort(key=lambda path: (_split_rank(os.path.basename(path).lower()), path))
  found = {}
  for one in sets:
    for pattern, path in itertools.product(one.patterns, paths):
      if _matches(os.path.relpath(path, folder).lower(), pattern):
        found[one.name] = ",".join(p for p in paths if _whole(p) == _whole(path))
        break
  return found


def _whole(path: str) -> str:
  """Returns the path without the number of a part."""
  folder, name = os.path.split(path)
  name = re.sub(r"-\d{5}-of-(\d{5})", r"-of-\1", name)
  return os.path.join(folder, re.sub(r"^test\d+\.jsonl", "test.jsonl", name))


def training_sets(found: Mapping[str, str]) -> list[str]:
  """Returns the sets whose file, by its name, has training rows."""
  return [
    name
    for name, path in found.items()
    if _split_rank(os.path.basename(path).lower()) == 2 and name not in _TRAIN_ONLY
  ]


def _split_rank(name: str) -> int:
  """Orders splits: 0 for the test split and unknown ones, 1 development, 2 training."""
  if "train" in name:
    return 2
  return int(name.startswith(("dev", "val")))


def _matches(path: str, pattern: str) -> bool:
  parts = path.split(os.sep)
  if "/" in pattern:
    parts = ["/".join(parts[-pattern.count("/") - 1 :])]
  return any(fnmatch.fnmatch(part, pattern) for part in parts)
