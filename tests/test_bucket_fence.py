"""A suspended run, continued later, overwrites no file from its successor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import http_server
import object_store
import pytest
from test_bucket import read, store, stores, write
from toy import eventually

from coa_jax.runtime.bucket import lease, mirror, objects
from coa_jax.runtime.lock import InUseError

__all__ = ["store", "stores"]  # fixtures

# Pushes six files and suspends itself (SIGSTOP) after the third; after SIGCONT it
# continues in its folder.
STOPPED = """
import os, signal, sys
from coa_jax.runtime.bucket import lease, mirror, objects
lease.BEAT_S = 0.1
lease.SILENT_S = 1.0
objects._THREADS = 1
real = objects.Bucket.put
done = []

def put(self, *args):
  real(self, *args)
  done.append(args)
  if len(done) == 3:
    os.kill(os.getpid(), signal.SIGSTOP)

objects.Bucket.put = put
try:
  with mirror.opened(sys.argv[1], sys.argv[2]) as folder:
    for name in "abcdef":
      with open(f"{folder}/{name}", "w") as f:
        f.write("old")
    mirror.push(folder + "/x")
except ValueError as e:
  sys.exit(f"error: {e}")
"""


def test_a_process_that_was_stopped_between_two_writes(store, tmp_path):
  uri = store.uri + "/run"
  with mirror.opened(uri, str(tmp_path)) as folder:
    write(folder, **dict.fromkeys("abcdef", "before"))
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  process = subprocess.Popen(
    [sys.executable, "-c", STOPPED, uri, str(tmp_path)],
    env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    os.waitpid(process.pid, os.WUNTRACED)
    # The successor runs on the same machine, with the same scratch folder.
    with mirror.opened(uri, str(tmp_path)) as folder:
      write(folder, **dict.fromkeys("abc", "new"))
      mirror.push(folder + "/x")
      before = files(store)
      process.send_signal(signal.SIGCONT)
      _, errors = process.communicate(timeout=http_server.LONG * 4)
      assert process.returncode == 1
      lines = errors.splitlines()
      assert [line for line in lines if "another run took over" in line] == lines[-1:]
      assert "Traceback" not in errors
      assert {name: read(folder)[name] for name in "abc"} == dict.fromkeys("abc", "new")
      # The successor's objects survive. The old run's late write of another object,
      # already sent, is repaired by the successor's next push.
      assert before["a"] == b"new"
      assert {n: files(store)[n] for n in "abc"} == {n: before[n] for n in "abc"}
      mirror.push(folder + "/x")
      assert files(store) == before
  finally:
    process.kill()
    process.communicate()


def files(store: object_store.Store) -> dict[str, bytes]:
  found = store.files("run")
  return {n: text for n, text in found.items() if not n.startswith(lease.FOLDER)}


@contextlib.contextmanager
def held_back(store: object_store.Store, folder: str):
  """Delays all writes and deletes in `folder` until the block ends.

  Yields a `push` that records an InUseError instead of raising it, the delayed
  requests, and the recorded errors. The lease's requests are not delayed.
  """
  let_go = threading.Event()
  held = []

  def fault(request) -> str:
    where = object_store.asked(request).replace("%2F", "/")
    is_write = request.command in ("POST", "PUT", "DELETE")
    if is_write and folder in where and lease.FOLDER not in where:
      held.append(where)
      let_go.wait(http_server.LONG * 4)
    return ""

  store.fault = fault
  ends = []

  def push(path: str) -> None:
    try:
      mirror.push(path)
    except InUseError as e:
      ends.append(e)

  try:
    yield push, held, ends
  finally:
    let_go.set()
    store.fault = lambda request: ""


def test_requests_that_arrive_late_change_nothing(store, tmp_path, monkeypatch):
  uri = store.uri + "/run"
  monkeypatch.setattr(lease, "BEAT_S", 1000.0)  # no heartbeats
  names = ["a", "b", "gone", "checkpoints/2/x", "checkpoints/2/manifest.json"]
  with contextlib.ExitStack() as stack:
    stack.enter_context(pytest.raises(InUseError))
    old = stack.enter_context(mirror.opened(uri, str(tmp_path / "one")))
    write(old, **{name.replace("/", "__"): "before" for name in names})
    mirror.push(old + "/x")
    write(old, a="old", b="old", late="old")
    with held_back(store, "run/") as (push, held, ends):
      thread = threading.Thread(target=push, args=(old + "/x",))
      thread.start()
      eventually(lambda: len(held) >= 3)
      monkeypatch.setattr(store, "fault", lambda request: "")
      new = stack.enter_context(mirror.opened(uri, str(tmp_path / "two")))
      write(new, a="new")
      mirror.push(new + "/x")
    thread.join()
    assert len(ends) == 1 and "another run took over" in str(ends[0])
    found = store.files("run")
    assert found["a"] == b"new"
    # The successor's next push repairs late writes of other objects.
    mirror.push(new + "/x")
    assert store.files("run")["b"] == b"before"
    write(new, late="new")
    mirror.push(new + "/x")
    assert store.files("run")["late"] == b"new"


def test_a_late_delete_is_of_what_it_saw(store):
  bucket = objects.Bucket(store.uri + "/run")
  bucket.write("x", b"1")
  seen = bucket.list()["x"]
  bucket.write("x", b"2")
  with pytest.raises(FileExistsError):
    bucket.delete("x", seen)
  bucket.delete("x", bucket.list()["x"])
  bucket.delete("x", seen)
  assert not bucket.list()


@pytest.mark.parametrize("size", [1, 6 << 20])
def test_an_upload_is_over_what_it_saw(store, tmp_path, monkeypatch, size):
  monkeypatch.setattr(objects, "_WHOLE", 0)
  bucket = objects.Bucket(store.uri + "/run")
  file = tmp_path / "x"
  file.write_bytes(b"x" * size)
  bucket.put(str(file), "x", None)
  seen = bucket.list()["x"]
  bucket.put(str(file), "x", seen)
  file.write_bytes(b"y" * size)
  bucket.put(str(file), "x", bucket.list()["x"])
  store.requests.clear()
  if store.scheme == "s3" or size == 1:
    for wrong in (seen, None):
      with pytest.raises(FileExistsError):
        bucket.put(str(file), "x", wrong)
    return
  # fake-gcs-server ignores the condition on an upload in pieces.
  bucket.put(str(file), "x", seen)
  assert f"ifGenerationMatch={seen.tag}" in store.requests[0].path


def test_a_checkpoint_that_a_stopped_run_proves_late_counts_for_nothing(
  store, tmp_path
):
  uri = store.uri + "/run"
  bucket = objects.Bucket(uri)
  bucket.write("checkpoints/4/x", b"old")
  with mirror.opened(uri, str(tmp_path)) as folder:
    assert "checkpoints/4/x" not in store.files("run")  # deleted at the start
    bucket.write("checkpoints/4/manifest.json", b"{}")
    write(folder, x="1")
    mirror.push(folder + "/x")
    assert "checkpoints/4/manifest.json" not in store.files("run")
