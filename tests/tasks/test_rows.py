"""Sources by URI: the same rows from every kind of file and library."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from coa_jax.tasks.rows import read_rows
from coa_jax.tasks.sources import load_tasks

ROWS = [
  {"question": f"q{n}?", "answers": [f"a{n}", "b"], "id": f"i{n}"} for n in range(5)
]


def jsonl(path) -> str:
  path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
  return str(path)


def parquet(path) -> str:
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
  return str(path)


def rows(uri: str) -> list[dict]:
  return [row for _, row in read_rows(uri)]


def test_files_by_suffix_and_by_scheme(tmp_path):
  lines, table = jsonl(tmp_path / "a.jsonl"), parquet(tmp_path / "a.parquet")
  plain = tmp_path / "a.json"
  plain.write_text(json.dumps(ROWS))
  odd, odder = jsonl(tmp_path / "a.txt"), parquet(tmp_path / "a.data")
  for uri in (lines, table, str(plain), f"json:{odd}", f"parquet:{odder}"):
    assert rows(uri) == ROWS
    assert [t.answers for t in load_tasks(uri)][1] == ("a1", "b")


@pytest.mark.parametrize(
  ("uri", "error", "message"),
  [
    ("{}/a.txt", ValueError, "unknown kind of task file '.txt'; accepted: .*json:"),
    ("json:{}/none", FileNotFoundError, "no task file at .*none"),
    ("ftp:{}/none", FileNotFoundError, "no task file at ftp:"),
    ("hf:x?spilt=train", ValueError, "unknown option 'spilt'; accepted: split"),
    ("tfds:?split=train", ValueError, "names no data set"),
  ],
)
def test_refusals_name_the_source(tmp_path, uri, error, message):
  (tmp_path / "a.txt").write_text("x")
  with pytest.raises(error, match=message):
    rows(uri.format(tmp_path))


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
  found = rows(f"tfds:toy?data_dir={tmp_path}")
  assert sorted(found, key=lambda r: r["id"]) == ROWS
  assert rows(f"tfds:toy?data_dir={tmp_path}") == found
