"""Checkpoints: a restored state is bit-identical to the saved one."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib
import re
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.learner import checkpoint
from coa_jax.learner.checkpoint import (
  MANIFEST,
  CheckpointConfig,
  Checkpoints,
  read_params,
  whole_steps,
)
from coa_jax.learner.state import TrainState
from coa_jax.runtime.interruption import Interrupted


def assert_identical(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def tiny(step: int) -> TrainState:
  """A small state; its arrays depend on the step."""
  w = np.random.default_rng(step).normal(size=(64, 8)).astype(np.float32)
  return TrainState(jnp.int32(step), {"w": jnp.array(w)}, (jnp.array(w[0]), None))


def test_a_state_may_be_donated_while_it_is_written(tmp_path):
  step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  state = tiny(1)
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(state, {"epoch": 3, "rows": [1, 2]})
    step(state)
  with Checkpoints(tmp_path) as checkpoints:
    restored, cursor = checkpoints.restore(tiny(0))
  assert_identical(restored, tiny(1))
  assert cursor == {"epoch": 3, "rows": [1, 2]}


def cut(path: pathlib.Path) -> None:
  with open(path, "r+b") as f:
    f.truncate(path.stat().st_size // 2)


def flip(path: pathlib.Path) -> None:
  """Flips one bit. In a manifest this changes a name, a size or a hash."""
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def largest(folder: pathlib.Path) -> pathlib.Path:
  files = (p for p in (folder / "state").rglob("*") if p.is_file())
  return max(files, key=lambda p: p.stat().st_size)


DAMAGES = {
  "a file is cut": (lambda f: cut(largest(f)), r"damaged \(state/.* has \d+ of \d+"),
  "a file is gone": (lambda f: largest(f).unlink(), r"damaged \(state/.* is missing\)"),
  "a bit is wrong": (lambda f: flip(largest(f)), r"damaged \(state/.* other bytes"),
  "the cursor is cut": (lambda f: cut(f / "cursor" / "metadata"), r"damaged \(cursor/"),
  "the manifest is cut": (lambda f: cut(f / MANIFEST), r"damaged \(manifest.json can"),
  "the manifest's bit": (lambda f: flip(f / MANIFEST), r"damaged \("),
  "no manifest": (lambda f: (f / MANIFEST).unlink(), "was not finished"),
  "no commit": (
    lambda f: f.rename(f.with_name(f"{f.name}.orbax-checkpoint-tmp")),
    "was not finished",
  ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(
  damage, tmp_path, caplog
):
  with Checkpoints(tmp_path, CheckpointConfig(keep=3)) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(tiny(step), {"round": 10 * step})
  harm, words = DAMAGES[damage]
  harm(tmp_path / "3")
  with Checkpoints(tmp_path, CheckpointConfig(keep=3)) as checkpoints:
    restored, cursor = checkpoints.restore(tiny(0))
    assert_identical(restored, tiny(2))
    assert cursor == {"round": 20}
    (record,) = [r for r in caplog.records if r.name.startswith("coa_jax")]
    assert re.search(rf"checkpoint 3 (is )?{words}", record.getMessage())
    assert record.getMessage().endswith("; resuming from 2")
    aside = tmp_path / "damaged_3"
    assert aside.is_dir() == ("damaged" in words) and not (tmp_path / "3").exists()
    checkpoints.save(tiny(3), {"round": 30})  # its folder name is free
  caplog.clear()
  with Checkpoints(tmp_path) as checkpoints:
    assert_identical(checkpoints.restore(tiny(0))[0], tiny(3))
  assert not [r for r in caplog.records if r.name.startswith("coa_jax")]


def test_without_a_whole_one_a_run_stops_and_nothing_is_deleted(tmp_path):
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(tiny(1), {})
    checkpoints.save(tiny(2), {})
  for step in "12":
    flip(largest(tmp_path / step))
  with (
    Checkpoints(tmp_path) as checkpoints,
    pytest.raises(ValueError, match="every checkpoint is damaged"),
  ):
    checkpoints.restore(tiny(0))
  assert {"1", "2"} <= set(os.listdir(tmp_path))


def test_without_a_proven_one_a_run_begins_anew_and_nothing_is_deleted(
  tmp_path, caplog
):
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(tiny(1), {})
    checkpoints.save(tiny(2), {})
  for step in "12":  # as a version without manifests left them
    (tmp_path / step / MANIFEST).unlink()
  (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
  with Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.restore(tiny(0)) is None
  assert caplog.text.count("was not finished") == 3
  assert "starting at step 0" in caplog.text
  assert sorted(os.listdir(tmp_path)) == ["unfinished_1", "unfinished_2"]
  (tmp_path / "unfinished_2").rename(tmp_path / "2")
  checkpoint.write_manifest(tmp_path / "2")
  with Checkpoints(tmp_path) as checkpoints:
    assert_identical(checkpoints.restore(tiny(0))[0], tiny(2))


def test_the_last_good_one_stays_until_the_next_is_proven(tmp_path, monkeypatch):
  real, there = checkpoint.write_manifest, []

  def proving(folder):
    there.append(whole_steps(tmp_path))
    real(folder)

  monkeypatch.setattr(checkpoint, "write_manifest", proving)
  with Checkpoints(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
    assert checkpoints.restore(tiny(0)) is None
    for step in (1, 2, 3, 4):
      checkpoints.save(tiny(step), {})
    checkpoints.wait()
    assert checkpoints.oldest == 3
  assert there == [[], [1], [1, 2], [2, 3]]
  assert whole_steps(tmp_path) == [3, 4]
  with Checkpoints(tmp_path) as checkpoints:
    assert_identical(checkpoints.restore(tiny(0))[0], tiny(4))


def test_an_unproven_checkpoint_is_an_error_and_deletes_nothing(tmp_path, monkeypatch):
  with Checkpoints(tmp_path, CheckpointConfig(keep=1)) as checkpoints:
    checkpoints.save(tiny(1), {})

  def full(folder):
    raise OSError("no space left")

  monkeypatch.setattr(checkpoint, "write_manifest", full)
  with (
    pytest.raises(OSError, match="no space left"),
    Checkpoints(tmp_path, CheckpointConfig(keep=1)) as checkpoints,
  ):
    checkpoints.save(tiny(2), {})
  assert whole_steps(tmp_path) == [1]


def test_parameters_alone_are_read_as_numpy(tmp_path):
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(tiny(5), {})
  params = read_params(tmp_path, 5)
  assert isinstance(params["w"], np.ndarray) and set(params) == {"w"}
  assert_identical(params, jax.device_get(tiny(5).params))
  flip(largest(tmp_path / "5"))
  with pytest.raises(ValueError, match=r"5 is damaged: state/.* other bytes"):
    read_params(tmp_path, 5)


def test_a_step_is_saved_when_it_is_due_and_once(tmp_path):
  with Checkpoints(tmp_path, CheckpointConfig(every=2, keep=9)) as checkpoints:
    for step in (1, 2, 3, 4, 5):
      checkpoints.reached(tiny(step), {"n": step}, last=step == 5)
    checkpoints.save(tiny(5), {"n": "again"})
  assert whole_steps(tmp_path) == [2, 4, 5]
  with Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.restore(tiny(0))[1] == {"n": 5}


def kept_by_saving(folder: pathlib.Path) -> float:
  """Memory still held after saving a state, as a multiple of the state's size."""

  def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

  rng = np.random.default_rng(0)
  w = {f"w{i}": jnp.asarray(rng.random((1024, 1024), np.float32)) for i in range(60)}
  size = sum(x.nbytes for x in w.values())
  with Checkpoints(folder) as checkpoints:
    checkpoints.save(tiny(1), {})
    checkpoints.wait()
    before = resident_bytes()
    checkpoints.save(TrainState(jnp.int32(2), w, ()), {})
    checkpoints.wait()
    return (resident_bytes() - before) / size


@pytest.mark.slow
def test_saving_gives_its_memory_back(tmp_path):
  """Runs in a new process: in this one, other tests' memory could grow meanwhile."""
  fresh = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, fresh) as pool:
    # 0.06 on two EPYC cores; 0.6 if nothing is given back.
    assert pool.submit(kept_by_saving, tmp_path).result() < 1 / 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["params", "opt_state"])
def test_a_state_that_is_not_finite_takes_the_place_of_none(where, bad, tmp_path):
  broken = tiny(2)
  broken = broken.replace(
    **{where: jax.tree.map(lambda x: x.at[..., -1].set(bad), broken.params)}
  )
  with (
    pytest.raises(ValueError, match=r"step 2: .* NaN or infinite, and are not saved"),
    Checkpoints(tmp_path, CheckpointConfig(every=1, keep=1)) as checkpoints,
  ):
    checkpoints.reached(tiny(1), {})
    checkpoints.reached(broken, {})
  assert whole_steps(tmp_path) == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_at_the_next_boundary(number, tmp_path, capfd):
  before = signal.getsignal(number)
  with (
    pytest.raises(Interrupted, match=r"stopped after step 7, .* resumes") as caught,
    Checkpoints(tmp_path, CheckpointConfig(every=100)) as checkpoints,
  ):
    checkpoints.reached(tiny(6), {})
    os.kill(os.getpid(), number)
    checkpoints.reached(tiny(7), {"n": 7})
  assert caught.value.status == 128 + number
  assert signal.getsignal(number) == before
  assert whole_steps(tmp_path) == [7]
  # Repeatable work stops at once, and the state before it is saved.
  with (
    pytest.raises(Interrupted, match="stopped after step 8,"),
    Checkpoints(tmp_path) as checkpoints,
    checkpoints.resumable(tiny(8), {}),
  ):
    os.kill(os.getpid(), number)
    time.sleep(60)
  assert whole_steps(tmp_path) == [7, 8]
  # A finished run is not interrupted.
  with Checkpoints(tmp_path) as checkpoints:
    os.kill(os.getpid(), number)
    checkpoints.reached(tiny(9), {}, last=True)


def test_outside_the_main_thread_signals_stay_as_they_are(tmp_path):
  before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
  during = []

  def work():
    with Checkpoints(tmp_path) as checkpoints, checkpoints.resumable(tiny(1), {}):
      during.extend(signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert during == before


def test_processes_leave_where_they_wait_for_each_other(tmp_path, monkeypatch):
  """One of two processes; the test fakes the signals that they exchange."""
  with Checkpoints(tmp_path) as checkpoints:
    checkpoints.until_done([concurrent.futures.Future()])  # no wait if alone
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    done: concurrent.futures.Future = concurrent.futures.Future()
    done.set_result(None)
    others = iter([0, signal.SIGTERM])
    monkeypatch.setattr(checkpoints, "_signal", lambda: next(others))
    checkpoints.until_done([done])
    with pytest.raises(Interrupted) as e:  # a signal elsewhere, no work here
      checkpoints.until_done([])
    assert e.value.status == 143
    # A failed process does not wait for the others, which may never arrive.
    failed: concurrent.futures.Future = concurrent.futures.Future()
    failed.set_exception(ValueError("broken"))
    checkpoints.until_done([concurrent.futures.Future(), failed])
    # After a signal it does not wait for its work.
    others = iter([signal.SIGINT])
    timer = threading.Timer(
      0.1, lambda: setattr(checkpoints._interruption, "number", signal.SIGINT)
    )
    timer.start()
    with pytest.raises(Interrupted):
      checkpoints.until_done([concurrent.futures.Future()])
    monkeypatch.undo()
