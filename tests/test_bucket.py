"""Workdirs in buckets: objects, the lease, the mirror and inputs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time

import object_store
import pytest
from toy import eventually

from coa_jax.learner import bucket_steps
from coa_jax.runtime.bucket import inputs, lease, mirror, objects
from coa_jax.runtime.lock import InUseError


@pytest.fixture(scope="module", params=["gs", "s3"])
def stores(request):
  object_store.needs(request.param)
  with object_store.Store(request.param).running() as running:
    yield running


@pytest.fixture
def store(stores, monkeypatch):
  """An empty bucket without faults, with short lease and retry times."""
  stores.fault = lambda request: ""
  stores.faults = 0
  monkeypatch.setattr(objects, "_FIRST_WAIT_S", 0.01)
  monkeypatch.setattr(lease, "BEAT_S", 0.1)
  monkeypatch.setattr(lease, "SILENT_S", 1.0)
  fs = stores.client()
  for path in fs.find(object_store.BUCKET):
    fs.rm_file(path)
  return stores


def write(folder: str, **files: str) -> None:
  for name, text in files.items():
    path = os.path.join(folder, name.replace("__", "/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
      f.write(text)


def read(folder: str) -> dict[str, str]:
  out = {}
  for parent, _, names in os.walk(folder):
    for name in names:
      path = os.path.join(parent, name)
      with open(path, encoding="utf-8") as f:
        out[os.path.relpath(path, folder)] = f.read()
  return out


def test_only_one_of_several_writers_creates_an_object(store):
  bucket = objects.Bucket(store.uri + "/x")
  won = []

  def create(i: int) -> None:
    if bucket.create("lease", b"%d" % i):
      won.append(b"%d" % i)

  threads = [threading.Thread(target=create, args=(i,)) for i in range(6)]
  for each in threads:
    each.start()
  for each in threads:
    each.join()
  assert len(won) == 1 and bucket.read("lease") == won[0]
  assert bucket.read("nothing") is None


def test_another_machine_fetches_the_pushed_files(store, tmp_path):
  uri = store.uri + "/a/run"
  with mirror.opened(uri, str(tmp_path / "one")) as folder:
    assert os.path.basename(folder) == "run" and not os.listdir(folder)
    write(folder, metrics="1\n", deep__er__x="2", half__tmp="3")
    os.rename(f"{folder}/half", f"{folder}/half.tmp")
    write(folder, **{".lock": "me"})
  assert not os.path.exists(folder)
  with mirror.opened(uri, str(tmp_path / "two")) as folder:
    assert read(folder) == {"metrics": "1\n", "deep/er/x": "2"}
    os.remove(f"{folder}/deep/er/x")
    with open(f"{folder}/metrics", "a", encoding="utf-8") as f:
      f.write("4\n")
  with mirror.opened(uri, str(tmp_path / "one")) as folder:
    assert read(folder) == {"metrics": "1\n4\n"}


def test_a_checkpoint_counts_once_its_proof_is_there(store, tmp_path):
  uri = store.uri + "/run"
  with mirror.opened(uri, str(tmp_path)) as folder:
    write(folder, checkpoints__2__x="old", checkpoints__4__x="new", metrics="1")
    write(folder, **{"checkpoints__2__manifest.json": "{}"})
    mirror.push(folder + "/checkpoints/2")
    named = [n for n in store.files("run") if not n.startswith(lease.FOLDER)]
    assert named == ["checkpoints/2/manifest.json", "checkpoints/2/x", "metrics"]
  # As after a kill between the checkpoint's data and its proof.
  objects.Bucket(uri).write("checkpoints/4/x", b"new")
  with mirror.opened(uri, str(tmp_path)) as folder:
    assert sorted(os.listdir(folder + "/checkpoints")) == ["2"]
  assert "checkpoints/4/x" not in store.files("run")


def test_a_step_under_orbaxs_temporary_name_is_deleted(store):
  """A process killed during a save leaves it on stores without a rename."""
  bucket = objects.Bucket(store.uri + "/run")
  bucket.write("10.000001.orbax-checkpoint-tmp/state/x", b"part")
  assert bucket_steps.choose(bucket) == (-1, "")
  assert not store.files("run")


def test_the_proof_is_written_last_and_deleted_first(store, tmp_path):
  with mirror.opened(store.uri + "/run", str(tmp_path)) as folder:
    files = {f"checkpoints__2__{i}": str(i) for i in range(20)}
    write(folder, **files, **{"checkpoints__2__manifest.json": "{}"})
    store.requests.clear()
    mirror.push(folder + "/x")
    writes = [
      object_store.asked(r) for r in store.requests if r.command in ("POST", "PUT")
    ]
    writes = [each for each in writes if lease.FOLDER not in each]  # no heartbeats
    assert ["manifest.json" in each for each in writes[-2:]] == [False, True]
    for name in os.listdir(folder + "/checkpoints/2"):
      os.remove(f"{folder}/checkpoints/2/{name}")
    os.rmdir(folder + "/checkpoints/2")
    store.requests.clear()
    mirror.push(folder + "/x")
    deletes = [r for r in store.requests if r.command == "DELETE"]
    assert "manifest.json" in object_store.asked(deletes[0]) and len(deletes) == 21


def test_progress_is_seen_while_it_runs(store, tmp_path, monkeypatch):
  monkeypatch.setattr(mirror, "PUSH_EVERY_S", 0.05)
  with mirror.opened(store.uri + "/run", str(tmp_path)) as folder:
    write(folder, metrics="1\n")
    eventually(lambda: store.files("run").get("metrics") == b"1\n")
    write(folder, metrics="1\n2\n")
    eventually(lambda: store.files("run").get("metrics") == b"1\n2\n")


def test_a_second_writer_is_refused_and_a_dead_one_replaced(store, tmp_path):
  uri = store.uri + "/run"
  with mirror.opened(uri, str(tmp_path / "one")) as folder:
    write(folder, x="1")
    with pytest.raises(InUseError, match=r"process \d+ on .* works there"):
      mirror.Mirror(uri, str(tmp_path / "two")).__enter__()
    assert read(folder) == {"x": "1"}  # unchanged
  dead = lease.Lease(objects.Bucket(uri), beat_s=1000, silent_s=1000).__enter__()
  with mirror.opened(uri, str(tmp_path / "two")) as folder:
    assert read(folder) == {"x": "1"}
    with pytest.raises(InUseError, match="another run took over"):
      lease.check(objects.Bucket(uri), dead.number)
  # A released lease is taken without a wait.
  with lease.Lease(objects.Bucket(uri), beat_s=1000, silent_s=1000):
    pass
  with lease.Lease(objects.Bucket(uri), beat_s=1000, silent_s=1000):
    pass


def test_a_replaced_run_writes_nothing_more(store, tmp_path, monkeypatch):
  uri = store.uri + "/run"
  monkeypatch.setattr(lease, "BEAT_S", 1000.0)  # no heartbeats
  with (
    pytest.raises(InUseError, match="another run took over"),
    mirror.opened(uri, str(tmp_path / "one")) as old,
  ):
    with mirror.opened(uri, str(tmp_path / "two")) as folder:
      write(folder, x="new")
    write(old, x="old")
    mirror.push(old + "/x")
  assert store.files("run")["x"] == b"new"


@pytest.mark.parametrize("fault", ["503", "cut", "silence"])
def test_faults_that_pass_change_nothing(store, tmp_path, fault, monkeypatch):
  """The first write and the first read of each file fail."""
  monkeypatch.setattr(objects, "_SILENT_S", 2.0 if fault == "silence" else 60.0)
  seen = set()

  def first(request) -> str:
    # Only some requests fail: clients wait for seconds before each retry.
    where = object_store.asked(request).replace("%2F", "/")
    name = next((n for n in ("run/a", "run/b/c") if n in where), "")
    what = request.command, name
    if not name or what in seen:
      return ""
    seen.add(what)
    return fault

  files = {"a": "x" * 100_000, "b__c": "y"}
  store.fault = first
  with mirror.opened(store.uri + "/run", str(tmp_path / "one")) as folder:
    write(folder, **files)
  seen.clear()
  with mirror.opened(store.uri + "/run", str(tmp_path / "two")) as folder:
    assert read(folder) == {"a": "x" * 100_000, "b/c": "y"}
  assert store.faults >= 4


def test_inputs_are_fetched_once_and_named_by_their_address(store, tmp_path):
  bucket = objects.Bucket(store.uri + "/in")
  for name in ("a.jsonl", "b.jsonl", "b.txt", "model/x", "model/deep/y"):
    bucket.write(name, name.encode())
  cache = str(tmp_path / "cache")
  at = store.uri + "/in"
  value = inputs.localized(f"{at}/a.jsonl=2,{at}/*.jsonl", cache)
  one, every = value.split(",")
  with open(one.removesuffix("=2"), encoding="utf-8") as f:
    assert f.read() == "a.jsonl"
  assert set(read(os.path.dirname(every))) == {"a.jsonl", "b.jsonl"}
  assert inputs.named({"uri": [value]}) == {"uri": [f"{at}/a.jsonl=2,{at}/*.jsonl"]}
  model = inputs.localized(at + "/model/", cache)
  assert read(model) == {"x": "model/x", "deep/y": "model/deep/y"}
  assert inputs.localized("data/x.jsonl", cache) == "data/x.jsonl"
  assert inputs.localized(3, cache) == 3
  # An unchanged object is not fetched again; a changed one is.
  with pytest.MonkeyPatch.context() as patch:
    patch.delattr(objects.Bucket, "get_all")
    assert inputs.localized(at + "/model", cache) == model
  bucket.write("model/x", b"other")
  again = inputs.localized(at + "/model", cache)
  assert again != model and read(again)["x"] == "other"
  assert inputs.named(again) == at + "/model"
  with pytest.raises(objects.BucketError, match="there is nothing"):
    inputs.localized(at + "/missing", cache)


def test_a_bucket_that_is_not_there_is_one_line(store, tmp_path):
  uri = f"{store.scheme}://no-such-bucket/run"
  with pytest.raises(objects.BucketError, match=uri):
    mirror.Mirror(uri, str(tmp_path)).__enter__()


@pytest.mark.parametrize("uri", ["az://b/run", "gs://", "http://x/y"])
def test_other_addresses_are_refused(uri, tmp_path):
  with pytest.raises(objects.BucketError, match="accepted: gs://BUCKET/PATH"):
    mirror.Mirror(uri, str(tmp_path))


def test_a_missing_library_names_its_extra(tmp_path, monkeypatch):
  def missing(*args, **named):
    raise ImportError("no")

  monkeypatch.setattr(objects.fsspec, "filesystem", missing)
  with pytest.raises(objects.BucketError, match=r"pip install -e '\.\[gcs\]'"):
    mirror.Mirror("gs://b/run", str(tmp_path))


# Object name -> its fault in the message. Both stores' clients list these names
# unchanged.
HOSTILE = {
  "../../evil": "has the part '..'",
  "a/../../../evil": "has the part '..'",
  "/abs": "absolute path",
  "./dot": "has the part '.'",
  "a//b": "has the part ''",
  "a\\b": "has a backslash",
  "n" * 300: "has a part longer than 255 bytes",
  "f": "is a file and a folder",
}


def write_raw(store: object_store.Store, key: str) -> None:
  """Writes an object under any name through the store's raw API."""
  fs = store.client()
  if store.scheme == "s3":
    fs.call_s3("put_object", Bucket=object_store.BUCKET, Key=key, Body=b"evil")
    return
  url = f"{fs._location}/upload/storage/v1/b/{object_store.BUCKET}/o"
  fs.call("POST", url, uploadType="media", name=key, data=b"evil")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_object_is_written_outside_of_its_folder(store, tmp_path, name):
  for folder in ("public", "run"):
    write_raw(store, f"{folder}/{name}")
    write_raw(store, f"{folder}/f/g")
  machine = tmp_path / "a" / "b" / "c"
  fault = rf"{store.uri}/public: .*{re.escape(HOSTILE[name])}"
  with pytest.raises(ValueError, match=fault) as refusal:
    inputs.localized(store.uri + "/public", str(machine / "inputs"))
  assert "\n" not in str(refusal.value)
  with (
    pytest.raises(ValueError, match=re.escape(HOSTILE[name])),
    mirror.opened(store.uri + "/run", str(machine / "scratch")),
  ):
    pass
  assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("address", ["a/../..", "a//b", "a/./b", "a\\b", "a\nb"])
def test_an_address_is_made_of_names(store, address):
  with pytest.raises(ValueError, match="file name"):
    objects.Bucket(f"{store.uri}/{address}")


def test_names_of_globs_and_versions_are_names(store, tmp_path):
  """Names may contain characters with a meaning in globs and URLs."""
  for folder in ("run[1]*?", "r#1", "100%25", "\u00fc \u4e2d"):
    uri = f"{store.uri}/{folder}"
    with mirror.opened(uri, str(tmp_path / "[s]*")) as local:
      write(local, **{"[g]*?": "x", "a#1": "y", "%2e%2e": "p"})
    with mirror.opened(uri, str(tmp_path / "two")) as local:
      assert read(local) == {"[g]*?": "x", "a#1": "y", "%2e%2e": "p"}
  copy = inputs.localized(store.uri + "/run[1]*?", str(tmp_path / "cache"))
  assert read(copy)["a#1"] == "y"


ODD_LEASES = [
  b"[]",
  b"5",
  b"null",
  b"{}",
  b'{"owner": 5}',
  b'{"owner": "a\\nb"}',
  b"not JSON",
  b"\xff\xfe",
  b"",
  b"[" * 100_000,
  b'{"owner": "' + b"x" * 20_000 + b'"}',
]


@pytest.mark.parametrize("value", ODD_LEASES, ids=range(len(ODD_LEASES)))
def test_an_odd_lease_is_one_line(store, value):
  bucket = objects.Bucket(store.uri + "/run")
  bucket.write(".lease/000003", value)
  with (
    pytest.raises(objects.BucketError, match=r"000003: is not the lease of a run") as e,
    lease.Lease(bucket),
  ):
    pass
  assert "\n" not in str(e.value) and len(str(e.value)) < 400


def test_a_lease_lives_on_beside_odd_objects(store):
  bucket = objects.Bucket(store.uri + "/run")
  for name in ("x", "-5", "1_0", "+7", "000001/x", "\u0663", "9" * 40):
    bucket.write(f".lease/{name}", b"?")
  with lease.Lease(bucket, beat_s=0.02, silent_s=1000) as held:
    assert held.number == 1
    bucket.write(".lease/y", b"[]")
    before = bucket.read(".lease/000001")
    eventually(lambda: bucket.read(".lease/000001") != before)
    assert held._thread.is_alive()


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("how", ["refused", "unknown host", "silent", "hangs up"])
def test_a_store_that_is_not_there_is_refused_soon(scheme, how, tmp_path, monkeypatch):
  object_store.needs(scheme)
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    if how in ("silent", "hangs up"):
      s.listen()
    if how == "hangs up":
      threading.Thread(target=hang_up, args=(s,), daemon=True).start()
    host = "no-such-host.invalid" if how == "unknown host" else "127.0.0.1"
    monkeypatch.setattr(objects, "_REACH_S", 2.0)
    url = f"http://{host}:{s.getsockname()[1]}"
    for name, value in object_store.environment(scheme, url).items():
      monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(objects.BucketError, match=f"no store .* at {url}") as refusal:
      mirror.Mirror(f"{scheme}://b/run", str(tmp_path)).__enter__()
    assert time.monotonic() - began < 10 and "\n" not in str(refusal.value)


def hang_up(listening: socket.socket) -> None:
  with contextlib.suppress(OSError):
    while True:
      listening.accept()[0].close()


def test_a_store_that_goes_away_for_a_moment_is_waited_for(store):
  bucket = objects.Bucket(store.uri + "/run")
  left = [3]

  def fault(request) -> str:
    left[0] -= 1
    return "cut" if left[0] > 0 else ""

  store.fault = fault
  bucket.write("x", b"1")
  assert bucket.read("x") == b"1" and store.faults >= 2
