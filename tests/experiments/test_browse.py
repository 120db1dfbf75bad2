"""The program that writes the trajectory browser, as a user runs it."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

from coa_jax.protocol.tokenizer_training import train_tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Trajectory, write_jsonl

ROOT = pathlib.Path(__file__).parent.parent.parent


def browse(*flags: str) -> subprocess.CompletedProcess:
  command = [sys.executable, "-m", "experiments.browse", *flags]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_a_runs_folder_becomes_a_page_with_its_tokens(tmp_path):
  text = "<answer> Uruk</answer>"
  tokenizer = train_tokenizer([text], 300)
  tokenizer.save(tmp_path / "rl" / "model")
  ids = tokenizer.encode(text)
  segment = Segment(Author.POLICY, "answer", text, ids, [-0.1] * len(ids))
  file = tmp_path / "rl" / "trajectories" / "step_000000.jsonl"
  write_jsonl(file, [Trajectory("t", [segment])])
  out = tmp_path / "page.html"
  done = browse(f"--trajectories={tmp_path}/rl", f"--out={out}")
  assert done.returncode == 0, done.stderr
  assert "1 trajectories of 1 files" in done.stdout
  data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text())[1])
  (row,) = data["rows"]
  (segment,) = row["spans"][0]["segments"]
  assert "".join(segment["pieces"]) == text
  assert row["answer"] == "Uruk" and row["fault"] == ""
  done = browse(f"--trajectories={tmp_path}/rl", f"--out={out}", "--variant=math")
  assert done.returncode == 0, done.stderr
  assert "illegal_transition at character 0" in out.read_text()
  done = browse(f"--trajectories={tmp_path}/rl", f"--out={out}", "--variant=maths")
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1 and "unified" in done.stderr


def test_nothing_to_show_is_one_line(tmp_path):
  done = browse(f"--trajectories={tmp_path}/none*")
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1 and "no file" in done.stderr
