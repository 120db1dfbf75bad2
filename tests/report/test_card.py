"""Cards of models and data sets, read back and compared with the run's files."""

from __future__ import annotations

import json
import pathlib

import pytest

from coa_jax.report.card import code_span, write_dataset_card, write_model_cards
from tests.cards import read_card

HOSTILE = "models/`a`\n---\nlicense: mit\n# [x](http://y) <b>"


def write_run(folder: pathlib.Path, config: dict, results: dict | None = None):
  """Writes the run's files that cards read."""
  (folder / "model").mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps({"config": config, "inputs": {}}))
  (folder / "model" / "coa.json").write_text('{"seed": 3}')
  if results is not None:
    (folder / "results.json").write_text(json.dumps(results))


def test_a_models_card_has_the_runs_facts(tmp_path):
  base = tmp_path / "base"
  base.mkdir()
  (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n")
  config = {"algo": {"steps": 5}, "init": str(base)}
  write_run(tmp_path, config, {"steps": 5, "reward": 0.25, "seconds": 1.5})
  (tmp_path / "adapter").mkdir()
  write_model_cards(str(tmp_path), str(tmp_path), str(base), 5)
  front, sections, text = read_card(tmp_path / "model")
  assert front == {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "license": "apache-2.0",
    "tags": ["coa-jax", "chain-of-agents", "rl"],
  }
  assert sections == {
    "Figures": {"reward": 0.25},
    "Training": {"seed": 3},
    "Config": config,
  }
  assert "by RL for 5\nupdates" in text and f"`{base}`" in text
  assert "coa chat" in text and "AutoModelForCausalLM.from_pretrained" in text
  front, _, text = read_card(tmp_path / "adapter")
  assert front["library_name"] == "peft" and "AutoPeftModelForCausalLM" in text


def test_unknown_fields_are_left_out(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # The results belong to the last step, not to an earlier checkpoint.
  write_run(tmp_path / "run", {"data": {}}, {"steps": 5, "loss": 0.25})
  write_model_cards("run", "run", "", 4)
  front, sections, text = read_card(tmp_path / "run" / "model")
  assert not {"license", "base_model"} & set(front) and "Figures" not in sections
  assert front["tags"][-1] == "sft" and "from random weights" in text
  # The front matter may contain a name in the Hub's form.
  (tmp_path / "org" / "base").mkdir(parents=True)
  (tmp_path / "run" / "config.json").write_text('{"config": {"init": "org/base"}}')
  write_model_cards("run", "run", "org/base", 4)
  front, _, _ = read_card(tmp_path / "run" / "model")
  assert front["base_model"] == "org/base" and "license" not in front


def test_names_from_outside_stay_names(tmp_path):
  write_run(tmp_path, {"init": HOSTILE})
  write_model_cards(str(tmp_path), str(tmp_path), HOSTILE, 0)
  front, sections, text = read_card(tmp_path / "model")
  assert "license" not in front and sections["Config"] == {"init": HOSTILE}
  assert text.count("\n---\n") == 0 and text.isascii()
  assert code_span("a`b``c") == "``` a`b``c ```"
  assert code_span("a\nb\u2028\x1b\udc80") == r"`a\nb\u2028\x1b\udc80`"


@pytest.mark.parametrize("change", ["edit", "other", "link", "folder", "bytes"])
def test_a_users_card_is_kept(change, tmp_path):
  write_run(tmp_path, {"data": {}})
  arguments = (str(tmp_path), str(tmp_path), "")
  write_model_cards(*arguments, 1)
  card = tmp_path / "model" / "README.md"
  first = card.read_bytes()
  write_model_cards(*arguments, 1)
  assert card.read_bytes() == first  # the same facts, the same bytes
  write_model_cards(*arguments, 2)
  assert card.read_bytes() != first  # our own card is updated
  if change == "edit":
    card.write_bytes(first.replace(b"by SFT", b"by me"))
  elif change == "other":
    card.write_text("# Mine\n")
  elif change == "bytes":
    card.write_bytes(b"\xff\xfe")
  else:
    card.unlink()
    if change == "folder":
      card.mkdir()
    else:
      (tmp_path / "mine.md").write_bytes(first)
      card.symlink_to(tmp_path / "mine.md")
  kept = None if card.is_dir() else card.read_bytes()
  write_model_cards(*arguments, 3)
  assert (None if card.is_dir() else card.read_bytes()) == kept
  assert card.is_symlink() == (change == "link")


def test_a_data_sets_card_has_its_manifest(tmp_path):
  config = {"teacher": {"backend": "scripted"}, "tasks": {"uri": HOSTILE}}
  manifest = {"config": config, "counts": {"runs": 7}, "sha256": {"t.jsonl": "0a"}}
  (tmp_path / "manifest.json").write_text(json.dumps(manifest))
  write_dataset_card(str(tmp_path), "t.jsonl")
  front, sections, text = read_card(tmp_path)
  assert front["configs"] == [{"config_name": "default", "data_files": "t.jsonl"}]
  assert sections["Config"] == manifest.pop("config")
  assert sections["Manifest"] == manifest
  assert "`scripted`" in text and text.count("\n---\n") == 0
