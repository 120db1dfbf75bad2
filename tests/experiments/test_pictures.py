"""The README's pictures, from a workdir like a finished quickstart's."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from forked import finish

from coa_jax.protocol.roles import wrap
from coa_jax.protocol.trajectory import Author, Segment, Trajectory, write_jsonl


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
  """Learning curves of two stages, and one trajectory."""
  for stage in ("sft", "rl"):
    rows = [
      {"stage": stage, "step": i, "seconds": i, "reward": 0.1 * i, "dev_accuracy": 0.5}
      if stage == "rl"
      else {"stage": stage, "step": i, "seconds": i, "validation_loss": 1 / (i + 1)}
      for i in range(5)
    ]
    (tmp_path / stage).mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / stage / "metrics.jsonl").write_text(lines)
  segments = [
    Segment(Author.POLICY, role, wrap(role, "x")) for role in ("think", "answer")
  ]
  write_jsonl(tmp_path / "eval_rl" / "greedy.jsonl", [Trajectory("t1", segments)])
  return tmp_path


def draw(workdir: pathlib.Path, task: str, reason: str = "") -> None:
  flags = (f"--workdir={workdir}", f"--out={workdir}/pictures", task)
  finish("pictures", *flags, reason=reason)


def test_the_curves_need_no_browser_and_a_wrong_task_is_one_line(workdir):
  draw(workdir, "--task=t2", reason="--task=t2: ")
  picture = (workdir / "pictures" / "learning.png").read_bytes()
  assert picture.startswith(b"\x89PNG") and len(picture) < 150_000


def test_a_trajectory_in_a_browser(workdir):
  pytest.importorskip("playwright", reason="needs playwright")
  if not shutil.which("chromium"):
    pytest.skip("needs Chromium: apt-get install chromium")
  draw(workdir, "--task=t1")
  picture = (workdir / "pictures" / "trajectory.png").read_bytes()
  assert picture.startswith(b"\x89PNG") and len(picture) < 200_000
  assert int.from_bytes(picture[16:20]) == 1400  # pixels wide
