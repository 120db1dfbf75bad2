"""`Sandbox`: runs and searches, its defaults, its errors."""

import os

import pytest

from tools_sandbox.client import Sandbox
from tools_sandbox.jail.wire import Verdict

ROWS = '{"id": 1, "title": "Paris", "text": "Capital of France."}\n'


def test_run_with_defaults_and_overrides():
  with Sandbox(
    slots=1, timeout_s=20, output_bytes=100, preload=(), backend="subprocess"
  ) as sandbox:
    assert sandbox.run("print(input())", "hi").stdout == "hi\n"
    result = sandbox.run("import time; time.sleep(30)", timeout_s=0.2)
    assert result.verdict == Verdict.TIMEOUT
    result = sandbox.run("bytearray(1 << 28)", memory_mb=50)
    assert result.verdict == Verdict.MEMORY
    assert sandbox.run("bytearray(1 << 28)").verdict == Verdict.OK
    assert sandbox.run("print('x' * 200)").truncated
    with pytest.raises(ValueError, match="wall_s"):
      sandbox.run("1", timeout_s=0)
  with pytest.raises(RuntimeError, match="closed"):
    sandbox.run("1")


def test_search_and_its_cache(tmp_path):
  corpus, cache = tmp_path / "c.jsonl", tmp_path / "cache"
  corpus.write_text(ROWS)
  for _ in range(2):
    with Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None) as sandbox:
      assert sandbox.search("paris", 3)[0].document.text == "Capital of France."
    (first,) = os.listdir(cache)
  stamp = os.stat(cache / first).st_mtime_ns
  with Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None):
    assert os.stat(cache / first).st_mtime_ns == stamp  # mapped, not built again
  corpus.write_text(ROWS.replace("Paris", "Lyon"))
  with Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None) as sandbox:
    assert sandbox.search("paris", 3) == [] and sandbox.search("lyon")
  assert len(os.listdir(cache)) == 2


def test_a_broken_corpus_leaves_no_cache(tmp_path):
  corpus, cache = tmp_path / "c.jsonl", tmp_path / "cache"
  corpus.write_text("{")
  with pytest.raises(ValueError, match=r"c\.jsonl:1"):
    Sandbox(corpus=str(corpus), index_cache=str(cache), backend=None)
  assert os.listdir(cache) == []


def test_a_sandbox_says_what_it_does_not_have(tmp_path):
  with Sandbox(backend=None) as sandbox:
    with pytest.raises(ValueError, match="no corpus"):
      sandbox.search("x")
    with pytest.raises(ValueError, match="back-end"):
      sandbox.run("print(1)")
    with pytest.raises(ValueError, match="'jail'"):
      sandbox.session()
  with pytest.raises(ValueError, match="index_cache"):
    Sandbox(index_cache=str(tmp_path), backend=None)
  with pytest.raises(FileNotFoundError):
    Sandbox(corpus=str(tmp_path / "none.jsonl"), backend=None)
  refusal = pytest.raises(ValueError, match="'subprocess' has no sessions")
  with Sandbox(backend="subprocess", preload=()) as sandbox, refusal:
    sandbox.session()
