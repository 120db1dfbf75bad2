"""The training record in a model folder, and its comparison with a run."""

from __future__ import annotations

import dataclasses
import json

import pytest

from coa_jax.protocol.origin import (
  FILE,
  Dialect,
  Origin,
  dialects_of_data,
  read_origin,
  warn_if_other,
)
from coa_jax.protocol.roles import get_variant

TOOLS = ("code", "wiki_search")
TRAINED = Dialect("unified", "brief", TOOLS)


def test_a_written_origin_is_read_back(tmp_path):
  assert read_origin(tmp_path) is None
  record = {"dialects": [dataclasses.asdict(TRAINED)], "max_len": 256, "seed": 3}
  origin = Origin.of_run({**record, "commit": "abc"}, 7)
  assert origin == Origin((TRAINED,), 256, 3, 7, "abc")
  origin.write(tmp_path)
  assert read_origin(tmp_path) == origin
  assert Origin.of_run(None, 7) is None


@pytest.mark.parametrize(
  ("variant", "tools", "style", "words"),
  [
    ("unified", TOOLS, "brief", ""),
    ("unified", TOOLS[::-1], "brief", ""),
    ("unified", TOOLS, "full", "prompt style 'brief' and not 'full'"),
    ("unified-plan", TOOLS, "brief", "variant 'unified' and not 'unified-plan'"),
    ("unified", TOOLS[:1], "brief", "tools 'code, wiki_search' and not 'code'"),
    (
      "unified",
      (*TOOLS, "tool:weather"),
      "full",
      "prompt style 'brief' and not 'full', tools 'code, wiki_search' and not 'code, "
      "tool, wiki_search', function tools none and not 'weather'",
    ),
  ],
)
def test_a_run_in_another_dialect_is_told_by_what(
  tmp_path, caplog, variant, tools, style, words
):
  # Trained on copies in other formats too, and on another, very different dialect.
  varied = dataclasses.replace(TRAINED, tool_formats=("protocol", "varied"))
  other = Dialect("math", "other", ())
  ours = get_variant(variant).with_tools(tools)
  warn_if_other(str(tmp_path), ours, style)  # no file: no warning
  Origin((), 1, 0).write(tmp_path)
  warn_if_other(str(tmp_path), ours, style)  # no dialect recorded: no warning
  assert not caplog.messages
  Origin((other, varied), 256, 0).write(tmp_path)
  warn_if_other(str(tmp_path), ours, style)
  expected = [f"{tmp_path} was trained with {words} as in this run"] if words else []
  assert caplog.messages == expected


def test_parallel_calls_are_part_of_a_dialect():
  variant = get_variant("unified").with_tools((*TOOLS, "tool:weather"))
  several = Dialect.of(dataclasses.replace(variant, parallel=4), "brief")
  assert Dialect.of(variant, "brief").differences(several) == [
    "tools.parallel 1 and not 4"
  ]
  # Without the tag `tool` there is no list of calls.
  own = dataclasses.replace(get_variant("unified").with_tools(TOOLS), parallel=4)
  assert Dialect.of(own, "brief") == TRAINED


@pytest.mark.parametrize(
  "text",
  [
    "",
    "[]",
    '{"max_len": 3',
    "[" * 99999,
    '{"dialects": [3], "max_len": 1, "seed": 0}',
  ],
)
def test_a_damaged_file_is_named(tmp_path, text: str):
  (tmp_path / FILE).write_text(text)
  with pytest.raises(ValueError, match=r"coa\.json: .* Delete it") as e:
    read_origin(tmp_path)
  assert "\n" not in str(e.value)


def test_data_is_known_by_the_manifest_beside_it(tmp_path):
  """Manifests of `distill`, of `import_traces`, and of neither."""

  def manifest(name: str, about: str, *dialects: Dialect) -> None:
    rows = [dataclasses.asdict(d) for d in dialects]
    value = {"sha256": {about: "0"}, "dialects": rows}
    (tmp_path / name).write_text(json.dumps(value))

  full = dataclasses.replace(TRAINED, style="full")
  manifest("manifest.json", "a.jsonl", TRAINED)
  manifest("b.jsonl.manifest.json", "b.jsonl", full, TRAINED)
  (tmp_path / "c.jsonl.manifest.json").write_text("somebody else's")
  a, b, c = (str(tmp_path / f"{name}.jsonl") for name in "abc")
  assert dialects_of_data(a) == (TRAINED,)
  assert dialects_of_data(a, b) == (TRAINED, full)
  assert dialects_of_data(c) == ()
