"""The row pipeline: the same result with any number of processes, bounded memory."""

from __future__ import annotations

import json

import pytest
import toy

from coa_jax.data.importers.importers import Importer
from coa_jax.data.importers.pipeline import CHUNK, ImportJob, RowPipeline
from coa_jax.data.teacher import filters
from coa_jax.data.teacher.convert import ConvertConfig
from coa_jax.data.teacher.filters import FiltersConfig, load_benchmarks
from coa_jax.data.teacher.tool_augmentation import ToolAugmentation
from coa_jax.protocol import roles
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.runtime.shard import Shard

CONVERT = ConvertConfig(missing_think="Go on.", score_right=True)


def row(n: int) -> dict:
  """An OAgents run; every seventh is wrong, every fifth repeats the one before."""
  word = f"town{n - (n % 5 == 4)}"
  called = {"name": "wiki_search", "arguments": {"query": f"where is {word}", "k": 3}}
  words = " ".join(f"{word}_{i}" for i in range(30))
  return {
    "task_id": f"t{n}",
    "question": f"Where is {word}?",
    "prediction": "there" if n % 7 else "nowhere",
    "true_answer": "there",
    "intermediate_steps": [
      {"facts": words, "plan": "look"},
      {"model_output": "go", "tool_calls": [called], "observations": f"in {n}"},
    ],
  }


def pipeline(**options) -> RowPipeline:
  config = FiltersConfig(min_activations=2, keep_unreflected=1.0, max_similarity=0.8)
  importer = Importer("oagents", get_variant("unified"), convert=CONVERT)
  return RowPipeline(importer, config, load_benchmarks(config), **options)


def records(count: int):
  return ((n, f"rows:{n}", row(n)) for n in range(count))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
  folder = str(tmp_path_factory.mktemp("tokenizer"))
  toy.tokenizer().save(folder)
  return folder


def test_processes_change_nothing(tokenizer):
  out = {}
  for workers in (0, 2):
    work = ImportJob(pipeline(tokenizer=tokenizer), workers)
    out[workers] = [list(work.lines(records(70))), work.counts()]
  assert out[0] == out[2]
  lines, counts = out[0]
  # Wrong rows are dropped at conversion, since they have no passing score.
  wrong = sum(n % 7 == 0 for n in range(70))
  assert counts["import"]["dropped"] == {"illegal_transition": wrong}
  assert counts["import"]["with_losses"] == 70 - wrong
  twice = sum(n % 5 == 4 and n % 7 != 0 and (n - 1) % 7 != 0 for n in range(70))
  assert counts["filters"]["duplicates"]["dropped"] == {"near_duplicate": twice}
  assert len(lines) == 70 - wrong - twice
  for line in lines:
    t = Trajectory.from_json(json.loads(line))
    assert all(s.ids for s in t.segments)
    assert [s.role for s in t.segments if s.author == Author.TOOL] == ["observation"]


def test_what_is_kept_is_written_in_other_formats_too(tokenizer):
  styled = pipeline(tokenizer=tokenizer, formats=ToolAugmentation(copies=2))
  work = ImportJob(styled)
  lines = [Trajectory.from_json(json.loads(x)) for x in work.lines(records(20))]
  plain = ImportJob(pipeline(tokenizer=tokenizer))
  plain_lines = list(plain.lines(records(20)))
  first = [t for t in lines if "copy" not in t.meta]
  assert [json.dumps(t.to_json()) for t in first] == plain_lines and plain_lines
  assert len(lines) == 3 * len(plain_lines)
  assert work.counts() == plain.counts() | {"augmented": 2 * len(plain_lines)}
  names = set()
  for original, *copies in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
    assert [c.meta["copy"] for c in copies] == [1, 2]
    for copy in copies:
      assert copy.task_id == original.task_id and all(s.ids for s in copy.segments)
      name, _ = copy.meta["format"]["wiki_search"]
      names.add(name)
      assert f"<{name}>" in copy.text and f"<{name}>" in copy.segments[0].text
  assert len(names) > 1


def test_rows_are_read_as_they_are_needed():
  read = 0

  def counted():
    nonlocal read
    for record in records(10 * CHUNK):
      read += 1
      yield record

  lines = ImportJob(pipeline()).lines(counted())
  next(lines)
  assert read == CHUNK


def test_a_fault_in_a_worker_is_raised_here():
  broken = RowPipeline(pipeline().importer, tokenizer="/nowhere")
  with pytest.raises(FileNotFoundError, match="no tokenizer there"):
    list(ImportJob(broken, 1).lines(records(3)))


def has_reflection(spans) -> bool:
  return any(span.role == roles.REFLECTION for span in spans)


def test_copies_are_numbered_and_every_row_is_told(monkeypatch):
  monkeypatch.setattr(filters, "was_corrected", has_reflection)
  config = FiltersConfig(min_activations=2, keep_unreflected=1.0, corrected_copies=3)
  importer = Importer("oagents", get_variant("unified"), convert=CONVERT)
  critique = " ".join(
    f"{c} : Good" for c in ("information_conflict", "tool_effectiveness")
  )
  one = row(1)
  one["intermediate_steps"][1]["evaluate_thought"] = (
    critique + " trajectory_monitoring : Good"
  )
  work = ImportJob(RowPipeline(importer, config, load_benchmarks(config)))
  dropped, imported = [], []
  lines = work.lines(
    [(0, "a", one), (1, "b", row(7)), (2, "c", row(2))],
    on_dropped=lambda d, record: dropped.append((d.task_id, record[1])),
    on_imported=lambda f, copies: imported.append((f.task_id, copies)),
  )
  metas = [json.loads(line)["meta"].get("copy") for line in lines]
  assert metas == [None, 1, 2, None]
  assert dropped == [("t7", "b")] and imported == [("t1", 3), ("t2", 1)]


def test_parts_that_are_not_all_are_refused(tmp_path):
  for number in range(2):
    part = tmp_path / f"{number}.jsonl"
    ImportJob(pipeline()).write_part(part, records(9), Shard(number, 2))
  both = [(tmp_path / f"{number}.jsonl").read_text() for number in range(2)]
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(both))
  joined = list(ImportJob(pipeline()).joined_lines(path))
  assert joined == list(ImportJob(pipeline()).lines(records(9)))
  for wrong in (both[1], both[0] * 2, both[0] + both[1] * 2):
    path.write_text(wrong)
    with pytest.raises(ValueError, match="rows are missing, or there twice"):
      list(ImportJob(pipeline()).joined_lines(path))
  path.write_text("{}\n")
  with pytest.raises(ValueError, match="no part of an import"):
    list(ImportJob(pipeline()).joined_lines(path))
