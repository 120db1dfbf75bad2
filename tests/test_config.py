"""A config that can not be used is an error that says why, before any work."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import pkgutil
import types
import typing

import ml_collections
import pytest

import coa_jax
from coa_jax.config import (
  ConfigError,
  check_sections,
  hash_files,
  hash_json,
  nearest,
  optional,
  prepare_workdir,
  section,
)


@dataclasses.dataclass(frozen=True)
class Optim:
  """A section of every kind of field."""

  steps: int
  lr: float = 1e-3
  name: str = "adamw"
  tools: tuple[str, ...] = ()
  corpus: str | None = None
  clip: float | None = None
  nesterov: bool = False
  meta: dict = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.steps < 0:
      raise ValueError("steps must not be negative")


def config(**optim) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({"optim": {"steps": 3, **optim}})


def test_a_section_becomes_its_dataclass():
  read = section(config(lr=0.5, tools=["a", "b"], corpus="x"), "optim", Optim)
  assert read == Optim(3, 0.5, tools=("a", "b"), corpus="x")
  assert isinstance(hash(read.tools), int)
  nested = section(config(meta=ml_collections.ConfigDict({"a": 1})), "optim", Optim)
  assert nested.meta == {"a": 1} and type(nested.meta) is dict


@pytest.mark.parametrize("field", ["lr", "clip"])
def test_an_int_will_do_for_a_float(field: str):
  value = getattr(section(config(**{field: 1}), "optim", Optim), field)
  assert value == 1.0 and type(value) is float


def test_none_will_do_where_it_is_allowed():
  read = section(config(corpus=None, clip=None), "optim", Optim)
  assert read.corpus is None and read.clip is None


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"lrr": 1.0}, "config section 'optim' has no field 'lrr'; did you mean 'lr'?"),
    ({"nestrov": True}, "no field 'nestrov'; did you mean 'nesterov'?"),
    ({"zzz": 1}, "no field 'zzz'; there are clip, corpus, lr, meta, name, nesterov"),
    ({"lr": "0.1"}, "config.optim.lr is '0.1'; it must be of type float"),
    ({"lr": True}, "config.optim.lr is True; it must be of type float"),
    ({"steps": 1.5}, "config.optim.steps is 1.5; it must be of type int"),
    ({"steps": True}, "config.optim.steps is True; it must be of type int"),
    ({"name": 3}, "config.optim.name is 3; it must be of type str"),
    ({"name": None}, "config.optim.name is None; it must be of type str"),
    ({"corpus": 3}, "config.optim.corpus is 3; it must be of type str or NoneType"),
    ({"nesterov": 1}, "config.optim.nesterov is 1; it must be of type bool"),
    ({"tools": "code"}, "config.optim.tools is 'code'; it must be of type tuple"),
    ({"steps": -1}, "config section 'optim': steps must not be negative"),
  ],
)
def test_a_field_that_can_not_be_used_is_named(changes, message: str):
  with pytest.raises(ConfigError) as e:
    section(config(**changes), "optim", Optim)
  assert message in str(e.value) and "\n" not in str(e.value)


def sections() -> list[type]:
  """Every dataclass of the library that a section of a config is read into."""
  found = {}
  for module in pkgutil.walk_packages(coa_jax.__path__, "coa_jax."):
    if "vllm" in module.name:  # what another environment loads
      continue
    for value in vars(importlib.import_module(module.name)).values():
      named = isinstance(value, type) and value.__name__.endswith("Config")
      if named and dataclasses.is_dataclass(value):
        found[f"{value.__module__}.{value.__name__}"] = value
  return [found[name] for name in sorted(found)]


# For a field of each type values that it can not have, and JSON's own for all.
WRONG = {
  float: (math.nan, math.inf, -math.inf, "x", True, (1.0,)),
  int: (10**30, -(10**30), 1.5, "x", True, (1,)),
  str: (3, True, ("x",)),
  bool: (1, "x"),
  tuple: (3, "x", {"a": 1}),
  dict: (3, "x", (1,)),
}


@pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
def test_no_field_of_any_section_takes_what_is_not_of_its_type(cls: type):
  hints = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    hint = hints[field.name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = {typing.get_origin(kind) or kind for kind in kinds}
    wrong = set(WRONG) & kinds
    if len(wrong) > 1 or typing.Any in kinds:
      continue
    for value in WRONG[wrong.pop()] if wrong else (3, "x"):
      given = ml_collections.ConfigDict({"part": {field.name: value}})
      with pytest.raises(ConfigError, match=rf"config\.part\.{field.name}\b") as e:
        section(given, "part", cls)
      assert len(str(e.value)) < 300


@pytest.mark.parametrize("value", [3, 1.5, True, "x", ("a",)])
def test_a_section_that_is_a_value_is_named(value):
  given = ml_collections.ConfigDict({"optim": value})
  for read in (section, optional):
    with pytest.raises(ConfigError, match=r"config\.optim is .*must be a section"):
      read(given, "optim", Optim)
  with pytest.raises(ConfigError, match=r"config\.optim is .*must be a section"):
    check_sections(given, ("optim",))


def test_an_entry_of_a_list_is_named():
  with pytest.raises(ConfigError, match=r"config\.optim\.tools\[1\] is 3"):
    section(config(tools=("a", 3)), "optim", Optim)


@pytest.mark.parametrize(
  "text",
  ["", '{"config": {"opt', "[]", "{}", '{"config": [1]}', "[" * 100_000],
)
def test_a_damaged_record_of_a_run_is_named(tmp_path, text: str):
  prepare_workdir(config(), begin(str(tmp_path / "run")))
  (tmp_path / "run" / "config.json").write_text(text)
  with pytest.raises(ConfigError, match=r"run/config\.json: .* choose another workdir"):
    prepare_workdir(config(), str(tmp_path / "run"))


@pytest.mark.parametrize("given", [{}, {"optim": {"lr": 0.1}}, {"optim": {}}])
def test_a_missing_field_is_named(given):
  with pytest.raises(ConfigError, match="section 'optim' lacks field 'steps'"):
    section(ml_collections.ConfigDict(given), "optim", Optim)


def test_a_section_that_nothing_reads_is_refused():
  check_sections(config(), ("optim", "data"))
  with pytest.raises(ConfigError, match=r"no section 'optim'; did you mean 'optimum'"):
    check_sections(config(), ("optimum", "data"))
  with pytest.raises(ConfigError, match="no section 'optim'; there are data, zoo"):
    check_sections(config(), ("zoo", "data"))


@pytest.mark.parametrize("given", [{}, {"init": ""}, {"init": None}])
def test_what_a_journey_can_not_do_without_is_named(given):
  check_sections(ml_collections.ConfigDict({"init": "x"}), ("init",), ("init",))
  with pytest.raises(ConfigError, match="config lacks field 'init'"):
    check_sections(ml_collections.ConfigDict(given), ("init",), ("init",))


def test_nearest_names_one_or_all():
  assert nearest("steps", {"step": 1, "lr": 2}) == "; did you mean 'step'?"
  assert nearest("qqqq", ["b", "a"]) == "; there are a, b"


def begin(workdir: str) -> str:
  """A workdir in which something has come of a run."""
  os.makedirs(workdir)
  with open(os.path.join(workdir, "metrics.jsonl"), "w") as f:
    f.write("{}\n")
  return workdir


def test_a_workdir_belongs_to_one_config(tmp_path):
  workdir = str(tmp_path / "run")
  prepare_workdir(config(tools=("a",)), workdir)
  written = json.loads((tmp_path / "run" / "config.json").read_text())
  assert written["config"]["optim"] == {"steps": 3, "tools": ["a"]}
  assert "git_commit" in written
  prepare_workdir(config(tools=("b",)), workdir)  # nothing has come of it yet
  prepare_workdir(config(tools=("a",)), workdir)
  (tmp_path / "run" / "checkpoints").mkdir()
  log = tmp_path / "run" / "checkpoints" / "metrics.jsonl"
  log.write_text("")
  prepare_workdir(config(tools=("b",)), workdir)
  prepare_workdir(config(tools=("a",)), workdir)
  log.write_text("{}\n")
  prepare_workdir(config(tools=("a",)), workdir)
  with pytest.raises(ConfigError, match=r"holds a run whose section 'optim' was"):
    prepare_workdir(config(tools=("b",)), workdir)
  again = json.loads((tmp_path / "run" / "config.json").read_text())
  assert again == written


def test_a_workdir_belongs_to_what_was_read(tmp_path):
  """The same path may hold something else by the time that a run goes on."""
  workdir, file = str(tmp_path / "run"), tmp_path / "model" / "weights"
  begin(workdir)
  file.parent.mkdir()
  file.write_bytes(bytes(3 << 20))

  def go():
    read = {"tasks": hash_json([{"id": "a"}])}
    read["init"] = hash_files(str(file.parent), samples=16)
    prepare_workdir(config(), workdir, inputs=read)

  go()
  go()
  prepare_workdir(config(), workdir)  # who names no inputs is not asked
  with file.open("r+b") as f:
    f.seek(12 * (3 << 20) // 16)
    f.write(b"x")
  with pytest.raises(ConfigError, match="read other contents of init; choose another"):
    go()
  whole = hash_files(str(file))
  assert hash_files(None) == hash_files("") != whole
  with file.open("r+b") as f:
    f.seek(-1, 2)
    f.write(b"x")
  assert hash_files(str(file)) != whole
  assert hash_json([1, 2]) != hash_json([2, 1])


def test_what_may_change_may_also_appear(tmp_path):
  """A run that began before section `log` goes on with it, and the other way round."""
  both = config(), config()
  both[1].log = ml_collections.ConfigDict({"wandb_project": "x"})
  for i, (first, second) in enumerate((both, both[::-1])):
    workdir = begin(str(tmp_path / str(i)))
    prepare_workdir(first, workdir)
    prepare_workdir(second, workdir, may_change=("log.wandb_project",))
    both[1].log.wandb_project = "y"
  prepare_workdir(both[0], begin(str(tmp_path / "strict")))
  with pytest.raises(ConfigError, match="whose section 'log' was None"):
    prepare_workdir(both[1], str(tmp_path / "strict"))


def test_what_was_only_derived_binds_no_other_config(tmp_path):
  workdir, derived = tmp_path / "run", ("data",)
  prepare_workdir(config(lr=0.1), str(workdir), derived=derived)
  (workdir / "data").mkdir()
  (workdir / "data" / "tokens").write_text("1 2 3")
  prepare_workdir(config(lr=0.1), str(workdir), derived=derived)
  assert (workdir / "data" / "tokens").exists()
  with pytest.raises(ConfigError, match="holds a run whose section 'optim'"):
    prepare_workdir(config(lr=0.2), str(workdir))
  prepare_workdir(config(lr=0.2), str(workdir), derived=derived)
  assert not (workdir / "data").exists()
  (workdir / "data").mkdir()
  (workdir / "metrics.jsonl").write_text("{}\n")
  with pytest.raises(ConfigError, match="holds a run whose section 'optim'"):
    prepare_workdir(config(lr=0.1), str(workdir), derived=derived)
  assert (workdir / "data").exists()
