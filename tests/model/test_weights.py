"""Model folders: exact round trips, and errors that list every fault."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import virtual_devices
from models import QWEN2, QWEN3, assert_identical, params_of
from safetensors.numpy import load_file, save_file
from started import outputs

from coa_jax.model import transformer
from coa_jax.model.config import LoadConfig
from coa_jax.model.hf.io import load_model, save_model
from coa_jax.model.hf.stored import StoredArray

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def refused(folder: pathlib.Path, error: type[Exception] = ValueError) -> str:
  """Returns the error message for a folder."""
  with pytest.raises(error) as e:
    load_model(folder)
  return str(e.value)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("cfg", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_saved_and_loaded_is_identical(tmp_path, cfg, saved: bool, loaded: bool):
  unrolled = params_of(cfg)
  scanned = transformer.stack(unrolled, cfg.layers)
  save_model(
    tmp_path, dataclasses.replace(cfg, scan=saved), scanned if saved else unrolled
  )
  back, params = load_model(tmp_path, LoadConfig(scan=loaded, remat="dots"))
  assert back == dataclasses.replace(cfg, scan=loaded, remat="dots")
  assert_identical(params, scanned if loaded else unrolled)


def test_bfloat16_survives_and_is_cast_when_asked(tmp_path):
  cfg = dataclasses.replace(QWEN3, param_dtype="bfloat16", dtype="bfloat16")
  params = params_of(cfg)
  save_model(tmp_path, cfg, params)
  both = LoadConfig(dtype="bfloat16", param_dtype="bfloat16")
  back, same = load_model(tmp_path, both)
  assert back == cfg
  assert_identical(params, same)
  _, wide = load_model(tmp_path)
  assert_identical(wide, jax.tree.map(lambda x: x.astype(np.float32), params))


def weight_files(path: pathlib.Path) -> list[str]:
  return sorted(p.name for p in path.iterdir() if "safetensors" in p.name)


@pytest.mark.parametrize("scan", [False, True])
def test_a_model_in_several_files_is_the_same_model(tmp_path, scan: bool):
  cfg = dataclasses.replace(QWEN2, scan=scan)
  params = params_of(cfg)
  save_model(tmp_path, cfg, params, shard_bytes=30_000)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  found = {}
  for file in set(index["weight_map"].values()):
    arrays = load_file(tmp_path / file)
    assert len(arrays) == 1 or sum(x.nbytes for x in arrays.values()) <= 30_000
    assert all(index["weight_map"][name] == file for name in arrays)
    found |= arrays
  assert set(found) == set(index["weight_map"])
  assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
  assert_identical(load_model(tmp_path, LoadConfig(scan=scan))[1], params)


def test_files_of_an_earlier_save_are_gone(tmp_path):
  params = params_of(QWEN3)
  (tmp_path / "adapter_model.safetensors").write_bytes(b"of somebody else")
  for shard_bytes, number in ((10**9, 1), (30_000, 4), (60_000, 3), (10**9, 1)):
    save_model(tmp_path, QWEN3, params, shard_bytes=shard_bytes)
    several = [
      f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)
    ]
    several.append("model.safetensors.index.json")
    expected = several if number > 1 else ["model.safetensors"]
    assert weight_files(tmp_path) == ["adapter_model.safetensors", *expected]
    assert_identical(load_model(tmp_path)[1], params)


def test_a_folder_of_links_is_read_as_the_hubs_cache_is(tmp_path):
  params = params_of(QWEN3)
  save_model(tmp_path / "blobs", QWEN3, params, shard_bytes=60_000)
  (tmp_path / "snapshot").mkdir()
  for file in (tmp_path / "blobs").iterdir():
    (tmp_path / "snapshot" / file.name).symlink_to(file)
  assert_identical(load_model(tmp_path / "snapshot")[1], params)


READER = pathlib.Path(__file__).with_name("read_on_devices.py")
# How many ways a mesh of fsdp=4 and tensor=2 splits each array.
WAYS = {"embed_tokens": 8, "lm_head": 8, "proj.weight": 8, "proj.bias": 2, "norm": 1}


@pytest.mark.slow
def test_each_device_reads_its_own_part_and_no_more(tmp_path):
  """On one device, and on eight."""
  save_model(tmp_path, QWEN2, params_of(QWEN2), shard_bytes=60_000)
  sizes = {}
  for file in tmp_path.glob("*.safetensors"):
    sizes |= {name: x.size for name, x in load_file(file).items()}
  (said,) = outputs([READER, tmp_path], **virtual_devices.environment(8))
  for case in json.loads(said):
    assert set(case["read"]) == set(sizes)
    for name, parts in case["read"].items():
      ways = 1
      if case["devices"] > 1:
        (ways,) = (n for kind, n in WAYS.items() if kind in name)
      # A part on several devices may be read once per device.
      assert set(parts) == {sizes[name] // ways}, name
      assert ways <= len(parts) <= case["devices"], name


def test_an_output_matrix_beside_tied_embeddings_must_be_the_embedding(tmp_path):
  """transformers 5 uses a stored matrix that differs, tied or not."""
  params = params_of(QWEN3)
  save_model(tmp_path, QWEN3, params)
  file = tmp_path / SINGLE
  arrays = load_file(file)
  embedding = arrays["model.embed_tokens.weight"]
  save_file({**arrays, "lm_head.weight": embedding}, file)
  assert_identical(load_model(tmp_path)[1], params)
  other = embedding.copy()
  other[-1, -1] += 1
  save_file({**arrays, "lm_head.weight": other}, file)
  assert "set tie_word_embeddings to false in config" in refused(tmp_path)
  save_file({**arrays, "lm_head.weight": embedding[:-1]}, file)
  assert "lm_head.weight has shape (383, 32), expected" in refused(tmp_path)


@pytest.fixture
def saved(tmp_path, monkeypatch) -> pathlib.Path:
  """A model folder; reading one of its arrays fails the test."""
  save_model(tmp_path, QWEN3, params_of(QWEN3))

  def read(*_):
    raise AssertionError("an array is read")

  monkeypatch.setattr(StoredArray, "__getitem__", read)
  assert refused(tmp_path, AssertionError) == "an array is read"
  return tmp_path


def write_index(folder: pathlib.Path, weight_map) -> None:
  """Writes the index of a model in several files."""
  (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_everything_that_does_not_fit_is_listed(saved):
  arrays = load_file(saved / SINGLE)
  layer = "model.layers.1."
  del arrays[layer + "mlp.up_proj.weight"], arrays["model.norm.weight"]
  arrays[layer + "self_attn.q_proj.bias"] = np.zeros(32, np.float32)
  arrays["visual.patch"] = np.zeros((2, 3), np.float32)
  key = layer + "self_attn.k_proj.weight"
  arrays[key] = arrays[key].T.copy()
  save_file(arrays, saved / SINGLE)
  message = refused(saved)
  assert message.startswith(f"{saved}: the weights do not fit config.json: ")
  for fault in (
    f"missing {layer}mlp.up_proj.weight",
    "missing model.norm.weight",
    f"unknown {layer}self_attn.q_proj.bias (32,)",
    "unknown visual.patch (2, 3)",
    f"{key} has shape (32, 16), expected (16, 32)",
  ):
    assert fault in message
  assert message.count(";") == 4


def test_a_folder_without_a_model_is_named(tmp_path):
  message = refused(tmp_path, FileNotFoundError)
  assert message.endswith("config.json: not a model folder (no config.json)")
  gone = refused(tmp_path / "runs" / "model", FileNotFoundError)
  assert "; give --config.init=DIR, a folder" in gone and "\n" not in gone
  named = refused("Qwen/Qwen2.5-0.5B-Instruct", FileNotFoundError)
  command = "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir=DIR, then --config.init"
  assert command in named


@pytest.mark.parametrize(
  "damage",
  [
    lambda content: content[:100],
    lambda content: content[:-1],
    lambda content: b"",
    lambda content: content[:8] + b"{" * (len(content) - 8),
  ],
  ids=["header cut", "data cut", "empty", "garbage"],
)
def test_a_damaged_file_is_named(saved, damage):
  file = saved / SINGLE
  file.write_bytes(damage(file.read_bytes()))
  assert refused(saved).startswith(f"{file}: damaged safetensors file (")


def test_a_wrong_file_in_place_of_the_weights_is_named(saved):
  file = saved / SINGLE
  file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
  assert "is a Git LFS pointer, not the weights; run 'git lfs pull'" in refused(saved)
  file.unlink()
  (saved / "pytorch_model.bin").touch()
  message = refused(saved, FileNotFoundError)
  assert "pytorch_model.bin there is PyTorch's" in message
  file.mkdir()
  assert "is a folder, not a safetensors file" in refused(saved)


def test_files_that_do_not_fit_their_index_are_named(saved):
  names = list(load_file(saved / SINGLE))
  # Arrays that are only in the index.
  write_index(saved, dict.fromkeys([*names, "extra.b", "extra.a"], SINGLE))
  message = f"{saved / SINGLE}: lacks extra.a, extra.b, which {INDEX} promises"
  assert refused(saved) == message
  # Two sets of weights: transformers reads the single file, others the index.
  (saved / "two.safetensors").write_bytes((saved / SINGLE).read_bytes())
  write_index(saved, dict.fromkeys(names, "two.safetensors"))
  assert refused(saved).startswith(f"{saved}: has {SINGLE} and {INDEX}, ")
  # All missing files are named.
  (saved / SINGLE).rename(saved / "one.safetensors")
  write_index(saved, {"a": "one.safetensors", "b": "2.safetensors", "c": "three"})
  message = f"{saved}/2.safetensors: the weights are missing (and three)"
  assert refused(saved, FileNotFoundError) == message
  (saved / INDEX).unlink()
  message = f"{saved}/{SINGLE}: the weights are missing"
  assert refused(saved, FileNotFoundError) == message


@pytest.mark.parametrize(
  ("name", "fault"),
  [
    ("../model.safetensors", "has the part '..'"),
    ("/etc/passwd", "is an absolute path"),
    ("sub/model.safetensors", "is not directly in the folder"),
    ("..", "has the part '..'"),
    (".", "has the part '.'"),
    ("", "has the part ''"),
    ("a\0b", "has a control character"),
    ("n" * 256, "has a part longer than 255 bytes"),
  ],
)
def test_an_index_leads_nowhere_but_into_its_folder(saved, name: str, fault: str):
  write_index(saved, {"model.norm.weight": SINGLE, "a": name})
  message = refused(saved)
  assert message.startswith(f"{saved / INDEX}: file name ") and fault in message
  assert "\n" not in message


def test_an_index_of_broken_text_is_refused(saved):
  write_index(saved, {"model.norm.weight": SINGLE, "a": "\udcff"})
  assert refused(saved).startswith(f"{saved / INDEX}: '\\udcff' is half of")


@pytest.mark.parametrize("content", [{}, {"weight_map": ["a"]}, {"weight_map": {}}])
def test_an_index_without_a_table_is_named(saved, content):
  (saved / INDEX).write_text(json.dumps(content))
  assert f"{INDEX}: field 'weight_map' is no table" in refused(saved)


def test_dtypes_that_are_not_weights_are_all_named(saved):
  odd = {"model.norm.weight": ("I8", 1), "model.embed_tokens.weight": ("F8_E4M3", 1)}
  odd["model.layers.0.mlp.up_proj.weight"] = ("F64", 8)
  header = {}
  end = 0
  for name, x in load_file(saved / SINGLE).items():
    code, size = odd.get(name, ("F32", 4))
    begin = end
    end += size * x.size
    header[name] = {"dtype": code, "shape": x.shape, "data_offsets": [begin, end]}
  text = json.dumps(header).encode()
  content = len(text).to_bytes(8, "little") + text + bytes(end)
  (saved / SINGLE).write_bytes(content)
  message = refused(saved)
  for name, (code, _) in odd.items():
    assert f"{name} has dtype {code}, supported: F32, BF16, F16" in message
  assert message.count("has dtype") == 3


def test_a_config_of_another_model_is_refused_with_all_that_differs(saved):
  file = saved / "config.json"
  config = json.loads(file.read_text())
  file.write_text(json.dumps({**config, "intermediate_size": 72, "vocab_size": 400}))
  message = refused(saved)
  assert "model.embed_tokens.weight has shape (384, 32), expected (400, 32)" in message
  assert message.count("has shape") == 1 + 3 * QWEN3.layers
