"""The program `browse`: from a run's trajectories to the page of the browser."""

from __future__ import annotations

import json
import re

import pytest
from forked import finish

from coa_jax.protocol.tokenizer_training import train_tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Trajectory, write_jsonl


@pytest.mark.slow
def test_a_runs_folder_becomes_a_page_with_its_tokens(tmp_path):
  text = "<answer> Uruk</answer>"
  tokenizer = train_tokenizer([text], 300)
  tokenizer.save(tmp_path / "rl" / "model")
  ids = tokenizer.encode(text)
  segment = Segment(Author.POLICY, "answer", text, ids, [-0.1] * len(ids))
  file = tmp_path / "rl" / "trajectories" / "step_000000.jsonl"
  write_jsonl(file, [Trajectory("t", [segment])])
  out = tmp_path / "page.html"
  flags = (f"--trajectories={tmp_path}/rl", f"--out={out}")
  done = finish("browse", *flags)
  assert "1 trajectories of 1 files" in done.stdout
  data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text())[1])
  (row,) = data["rows"]
  (segment,) = row["spans"][0]["segments"]
  assert "".join(segment["pieces"]) == text
  assert row["answer"] == "Uruk" and row["fault"] == ""
  finish("browse", *flags, "--variant=math")
  assert "illegal_transition at character 0" in out.read_text()
  finish("browse", *flags, "--variant=maths", reason="unified")


def test_without_out_the_page_is_written_into_the_run(tmp_path):
  rows = [Trajectory("t", [Segment(Author.POLICY, "answer", "<answer> 1</answer>")])]
  write_jsonl(tmp_path / "rl" / "trajectories" / "step_000000.jsonl", rows)
  done = finish("browse", f"--trajectories={tmp_path}/rl/trajectories/*.jsonl")
  assert done.stdout.startswith(f"{tmp_path}/rl/browse.html: 1 trajectories")
  finish("browse", reason="--workdir=DIR")
  finish("browse", f"--workdir={tmp_path}", reason="no trajectories are there")
