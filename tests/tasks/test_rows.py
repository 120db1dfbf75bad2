"""Sources by URI: every file type and library gives the same rows."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from coa_jax.data.tasks import rows as reading
from coa_jax.data.tasks.rows import read_rows
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.protocol import trajectory
from coa_jax.protocol.storage import write_lines

ROWS = [
  {"question": f"q{n}?", "answers": [f"a{n}", "b"], "id": f"i{n}"} for n in range(5)
]


WHOLE = gzip.compress(json.dumps(ROWS).encode(), mtime=0)


def jsonl(path) -> str:
  path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
  return str(path)


def parquet(path) -> str:
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
  return str(path)


def rows(uri: str) -> list[dict]:
  return [row for _, row in read_rows(uri)]


def test_files_by_suffix(tmp_path):
  uris = [jsonl(tmp_path / "a.jsonl"), parquet(tmp_path / "a.parquet")]
  lines = gzip.compress(pathlib.Path(uris[0]).read_bytes(), mtime=0)
  (tmp_path / "a.jsonl.gz").write_bytes(lines)
  (tmp_path / "a.json.gz").write_bytes(WHOLE)
  plain = tmp_path / "a.json"
  plain.write_text(json.dumps(ROWS))
  for name in ("a.jsonl.gz", "a.json.gz", "a.json"):
    uris.append(str(tmp_path / name))
  for uri in uris:
    assert rows(uri) == ROWS
    assert [t.answers for t in load_tasks(uri)][1] == ("a1", "b")
  plain.write_text(json.dumps(ROWS[0]))
  assert rows(str(plain)) == ROWS[:1]


@pytest.mark.parametrize(
  ("uri", "error", "message"),
  [
    ("{}/a.txt", ValueError, "unknown kind of task file '.txt'; accepted: .*hf:"),
    ("{}/none", FileNotFoundError, "no task file at .*none"),
    ("ftp:{}/none", FileNotFoundError, "no task file at ftp:"),
    ("hf:x?spilt=train", ValueError, "unknown option 'spilt'; accepted: split"),
    ("tfds:?split=train", ValueError, "names no data set"),
  ],
)
def test_refusals_name_the_source(tmp_path, uri, error, message):
  (tmp_path / "a.txt").write_text("x")
  with pytest.raises(error, match=message):
    rows(uri.format(tmp_path))


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.jsonl", b'{"question": "q"}\n{"question', r"a\.jsonl:2: not JSON"),
    ("a.jsonl", b'{"question": "q"}\n\xff\xfe\n', r"a\.jsonl:2: not UTF-8"),
    ("a.json", b"\xff", r"a\.json: not UTF-8"),
    ("a.json", b"[1, 2", r"a\.json: not JSON"),
    ("a.parquet", b"PAR1 no", r"a\.parquet row 0: cannot be read as parquet"),
    ("a.jsonl.gz", WHOLE[:-20], r"a\.jsonl\.gz.*cannot be read: Compressed file"),
    ("a.json.gz", WHOLE[:-20], r"a\.json\.gz.*cannot be read: Compressed file"),
    ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz.*cannot be read: Not a gzipped"),
    ("a.json.gz", b"not gzip", r"a\.json\.gz.*cannot be read: Not a gzipped"),
  ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    rows(str(tmp_path / name))


def test_array_record(tmp_path):
  pytest.importorskip("array_record")
  from array_record.python.array_record_module import ArrayRecordWriter

  path = tmp_path / "a.array_record"
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for row in ROWS:
    writer.write(json.dumps(row).encode())
  writer.close()
  assert rows(str(path)) == ROWS


def test_rows_of_a_saved_dataset_are_read(tmp_path):
  datasets = pytest.importorskip("datasets")
  one = datasets.Dataset.from_list(ROWS)
  one.save_to_disk(str(tmp_path / "one"))
  datasets.DatasetDict(test=one).save_to_disk(str(tmp_path / "more"))
  assert rows(f"hf:{tmp_path / 'one'}") == ROWS
  assert rows(f"hf:{tmp_path / 'more'}?split=test") == ROWS
  with pytest.raises(ValueError, match="no split 'train'; there are test"):
    rows(f"hf:{tmp_path / 'more'}")


OFFLINE = """
import json, sys
from coa_jax.data.tasks import rows as reading
for uri in sys.argv[1:]:
  try:
    print(json.dumps([row for _, row in reading.read_rows(uri)]))
  except ValueError as e:
    print(json.dumps(str(e)))
"""


def test_a_hub_data_set_from_a_local_cache(tmp_path):
  """Offline: a data set that `datasets` prepared earlier, by its hub name."""
  datasets = pytest.importorskip("datasets")
  (tmp_path / "toy").mkdir()
  parquet(tmp_path / "toy" / "train.parquet")
  datasets.load_dataset(str(tmp_path / "toy"), cache_dir=str(tmp_path / "made"))
  (prepared,) = (tmp_path / "made").glob("toy/*/*/*/")
  # The cache path of a hub data set; the files are the same.
  cache = tmp_path / "cache" / "some___toy" / "default" / "0.0.0" / ("a" * 40)
  shutil.copytree(prepared, cache)

  uris = [f"hf:some/{name}?cache={tmp_path / 'cache'}" for name in ("toy", "other")]
  command = [sys.executable, "-c", OFFLINE, *uris]
  env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
  done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
  found, refusal = map(json.loads, done.stdout.splitlines()[-2:])
  assert found == ROWS and "hf:some/other?cache=" in refusal


def test_a_hugging_face_data_set(tmp_path):
  pytest.importorskip("datasets")
  (tmp_path / "data").mkdir()
  parquet(tmp_path / "data" / "train.parquet")
  assert rows(f"hf:{tmp_path / 'data'}?split=train") == ROWS
  assert len(load_tasks(f"hf:{tmp_path / 'data'}")) == 5
  with pytest.raises(ValueError, match=r"hf:.*split=tset"):
    rows(f"hf:{tmp_path / 'data'}?split=tset")


def test_a_tfds_data_set(tmp_path):
  tfds = pytest.importorskip("tensorflow_datasets")

  features = tfds.features.FeaturesDict(
    {
      "question": tfds.features.Text(),
      "answers": tfds.features.Sequence(tfds.features.Text()),
      "id": tfds.features.Text(),
    }
  )

  class Toy(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Five questions."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      yield from ((row["id"], row) for row in ROWS)

  Toy(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
  toy_rows = rows(f"tfds:toy?data_dir={tmp_path}")
  assert sorted(toy_rows, key=lambda r: r["id"]) == ROWS
  assert rows(f"tfds:toy?data_dir={tmp_path}") == toy_rows


def test_our_own_columns_of_text_are_objects_again(tmp_path):
  path = tmp_path / "a.parquet"
  written = [{**row, "meta": {"n": n}} for n, row in enumerate(ROWS)]
  write_lines(path, written)
  assert rows(str(path)) == written
  assert [t.meta for t in load_tasks(path)][:2] == [{"n": 0}, {"n": 1}]
  others = [{**row, "meta": "plain"} for row in ROWS]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(others), path)
  assert rows(str(path)) == others


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz", "x.csv.gz"])
def test_a_bomb_is_refused(name, tmp_path, monkeypatch):
  """A small compressed file may contain a line of any length."""
  monkeypatch.setattr(trajectory, "MOST_OF_A_LINE", 1 << 20)
  monkeypatch.setattr(reading, "_MOST_OF_JSON", 1 << 20)
  path = tmp_path / name
  with gzip.open(path, "wb") as f:
    f.write(b" " * (1 << 22))
  fault = rf"{name}.*(longer than 1 MiB|holds more than)"
  with pytest.raises(ValueError, match=fault):
    list(read_rows(path))
