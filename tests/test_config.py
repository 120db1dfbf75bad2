"""A bad config is an error that says why, before any work.

budget: configs, and the workdirs that they bind.
"""

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
from coa_jax.runtime.config import ConfigError, nearest, read_config
from coa_jax.runtime.fields import bounded, check_fields, choice, section
from coa_jax.runtime.record import (
  hash_files,
  hash_json,
  prepare_workdir,
  read_begun,
  read_origin_of,
)


@dataclasses.dataclass(frozen=True)
class Loss:
  """A subsection."""

  clip: float = bounded(0.2, least=0, most=1)

  def __post_init__(self):
    check_fields(self)


@dataclasses.dataclass(frozen=True)
class Optim:
  """A section with every kind of field."""

  steps: int
  lr: float = 1e-3
  name: str = "adamw"
  tools: tuple[str, ...] = ()
  corpus: str | None = None
  norm: float | None = None
  nesterov: bool = False
  meta: dict = dataclasses.field(default_factory=dict)
  loss: Loss = section(Loss)

  def __post_init__(self):
    if self.steps < 0:
      raise ValueError("steps must not be negative")


@dataclasses.dataclass(frozen=True)
class Log:
  """An optional section."""

  project: str = ""


@dataclasses.dataclass(frozen=True)
class Whole:
  """A stage's config."""

  optim: Optim
  init: str = ""
  log: Log | None = None

  def __post_init__(self):
    if self.init == "nowhere":
      raise ValueError("init is nowhere")


def config(**optim) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({"optim": {"steps": 3, **optim}})


def read(**optim) -> Optim:
  return read_config(config(**optim), Whole).optim


def test_a_section_becomes_its_dataclass():
  whole = read_config(config(lr=0.5, tools=["a", "b"], corpus="x"), Whole)
  assert whole == Whole(Optim(3, 0.5, tools=("a", "b"), corpus="x"))
  assert isinstance(hash(whole.optim.tools), int)
  meta = read(meta=ml_collections.ConfigDict({"a": 1})).meta
  assert meta == {"a": 1} and type(meta) is dict
  assert read(loss={"clip": 1}).loss.clip == 1.0


@pytest.mark.parametrize("field", ["lr", "norm"])
def test_an_int_will_do_for_a_float(field: str):
  value = getattr(read(**{field: 1}), field)
  assert value == 1.0 and type(value) is float


def test_none_will_do_where_it_is_allowed():
  assert read(corpus=None, norm=None) == Optim(3)


@pytest.mark.parametrize("empty", [None, "", {}])
def test_an_empty_section_is_none_or_its_defaults(empty):
  given = ml_collections.ConfigDict({"optim": {"steps": 3}, "log": empty})
  assert read_config(given, Whole).log is None
  assert read_config(ml_collections.ConfigDict({"a": empty}), Defaults).a == Log()


@dataclasses.dataclass(frozen=True)
class Defaults:
  """A config without required fields."""

  a: Log = section(Log)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"lrr": 1.0}, "config section 'optim' has no field 'lrr'; did you mean 'lr'?"),
    ({"zzz": 1}, "no field 'zzz'; there are corpus, loss, lr, meta, name, nesterov"),
    ({"clip": 1.0}, "has no field 'clip'; did you mean 'loss.clip'?"),
    ({"loss": {"clip_range": 1}}, "no field 'clip_range'; did you mean 'clip'?"),
    ({"lr": "0.1"}, "config.optim.lr is '0.1'; it must be of type float"),
    ({"corpus": 3}, "config.optim.corpus is 3; it must be of type str or NoneType"),
    ({"tools": ("a", 3)}, "config.optim.tools[1] is 3; it must be of type str"),
    ({"steps": -1}, "config section 'optim': steps must not be negative"),
    ({"steps": None}, "config section 'optim' lacks field 'steps'"),
    ({"loss": {"clp": 1}}, "section 'optim.loss' has no field 'clp'; did you mean"),
    ({"loss": {"clip": 1.5}}, "'optim.loss': clip is 1.5; it must be from 0 to 1"),
  ],
)
def test_a_field_that_can_not_be_used_is_named(changes, message: str):
  with pytest.raises(ConfigError) as e:
    read(**changes)
  assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({}, "config section 'optim' lacks field 'steps'"),
    ({"optimm": {}}, "config has no section 'optimm'; did you mean 'optim'?"),
    ({"qqqq": {}}, "config has no section 'qqqq'; there are init, log, optim"),
    ({"init": 3}, "config.init is 3; it must be of type str"),
    ({"init": "nowhere", "optim": {"steps": 1}}, "init is nowhere"),
    *(({"optim": value}, "must be a section") for value in (3, 1.5, True, "x", ("a",))),
    ({"log": 3, "optim": {"steps": 1}}, "config.log is 3; it must be a section"),
  ],
)
def test_a_config_that_can_not_be_used_is_refused(given, message: str):
  with pytest.raises(ConfigError) as e:
    read_config(ml_collections.ConfigDict(given), Whole)
  assert message in str(e.value)


def sections() -> list[type]:
  """Returns the library's dataclasses for configs and sections (`*Config`)."""
  found = {}
  for module in pkgutil.walk_packages(coa_jax.__path__, "coa_jax."):
    # vLLM modules need vLLM's environment; the flags in coa_jax.cli collide in one
    # process.
    if "vllm" in module.name or module.name.startswith("coa_jax.cli"):
      continue
    for value in vars(importlib.import_module(module.name)).values():
      named = isinstance(value, type) and value.__name__.endswith("Config")
      if named and dataclasses.is_dataclass(value):
        found[f"{value.__module__}.{value.__name__}"] = value
  return [found[name] for name in sorted(found)]


EACH = pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
# Field type -> invalid values.
WRONG = {
  float: (math.nan, math.inf, -math.inf, "x", True, (1.0,)),
  int: (10**30, -(10**30), 1.5, "x", True, (1,)),
  str: (3, True, ("x",)),
  bool: (1, "x"),
  tuple: (3, "x", {"a": 1}),
  dict: (3, "x", (1,)),
}


@EACH
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
      given = ml_collections.ConfigDict({field.name: value})
      with pytest.raises(ConfigError, match=rf"config\.part\.{field.name}\b") as e:
        read_config(given, cls, "part")
      assert len(str(e.value)) < 300


def beyond(field: dataclasses.Field) -> list:
  """Returns values just outside a field's bounds, or a name not among its choices."""
  bounds = field.metadata
  step = 1 if field.type == "int" else 0.5
  out = [bounds[name] for name in ("above", "below") if name in bounds]
  if "least" in bounds:
    out.append(bounds["least"] - step)
  if "most" in bounds:
    out.append(bounds["most"] + step)
  return ["nothing of that name"] if "of" in bounds else out


@EACH
def test_a_value_beyond_its_bounds_is_refused_and_the_field_named(cls: type):
  hints = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    for value in beyond(field):
      value = float(value) if hints[field.name] is float else value
      given = ml_collections.ConfigDict({**_required(cls), field.name: value})
      message = rf"^config section 'part': {field.name} .*{value}.*(must be|accepted: )"
      with pytest.raises(ConfigError, match=message):
        read_config(given, cls, "part")


def _required(cls: type) -> dict:
  """Returns values for the required fields of a section and its subsections."""
  hints = typing.get_type_hints(cls)
  return {
    f.name: _some(hints[f.name])
    for f in dataclasses.fields(cls)
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
  }


def _some(hint: type):
  if dataclasses.is_dataclass(hint):
    return _required(hint)
  return {int: 1, str: "http://x", float: 1.0}[hint]


@pytest.mark.parametrize(
  ("field", "value", "words"),
  [
    (bounded(least=1), 0, "at least 1"),
    (bounded(above=0), 0.0, "above 0"),
    (bounded(most=2), 3, "at most 2"),
    (bounded(least=0, most=1), 1.5, "from 0 to 1"),
    (bounded(least=0, below=1), 1.0, "at least 0 and below 1"),
    (bounded(above=0), math.nan, "a finite number"),
  ],
)
def test_bounds_are_told_in_words(field, value, words: str):
  cls = dataclasses.make_dataclass("Part", [("size", float, field)])
  with pytest.raises(ValueError, match=f"^size is {value}; it must be {words}$"):
    check_fields(cls(value))
  cls = dataclasses.make_dataclass("Part", [("name", str, choice("a", of=("a", "b")))])
  check_fields(cls("b"))
  with pytest.raises(ValueError, match=r"^name 'c'; accepted: a, b$"):
    check_fields(cls("c"))


def test_nearest_names_one_or_all():
  assert nearest("steps", {"step": 1, "lr": 2}) == "; did you mean 'step'?"
  assert nearest("qqqq", ["b", "a"]) == "; there are a, b"


def begin(workdir: str) -> str:
  """Creates a workdir with a run's output."""
  os.makedirs(workdir)
  with open(os.path.join(workdir, "metrics.jsonl"), "w") as f:
    f.write("{}\n")
  return workdir


def whole(**optim) -> Whole:
  return read_config(config(**optim), Whole)


@pytest.mark.parametrize(
  "text",
  ["", '{"config": {"opt', "[]", "{}", '{"config": [1]}', "[" * 100_000],
)
def test_a_damaged_record_of_a_run_is_named(tmp_path, text: str):
  prepare_workdir(whole(), begin(str(tmp_path / "run")))
  (tmp_path / "run" / "config.json").write_text(text)
  with pytest.raises(ConfigError, match=r"run/config\.json: .* choose another workdir"):
    prepare_workdir(whole(), str(tmp_path / "run"))


def test_a_workdir_belongs_to_one_config(tmp_path):
  workdir = str(tmp_path / "run")
  prepare_workdir(whole(tools=("a",)), workdir)
  written = json.loads((tmp_path / "run" / "config.json").read_text())
  assert written["config"]["optim"]["tools"] == ["a"]
  assert written["config"]["optim"]["lr"] == 1e-3  # defaults included
  assert "git_commit" in written
  prepare_workdir(whole(tools=("a",)), workdir)
  assert read_begun(workdir) == written["begun"]  # the same run restarts
  prepare_workdir(whole(tools=("b",)), workdir)  # no output yet
  prepare_workdir(whole(tools=("a",)), workdir)
  (tmp_path / "run" / "checkpoints").mkdir()
  log = tmp_path / "run" / "checkpoints" / "metrics.jsonl"
  log.write_text("")
  prepare_workdir(whole(tools=("b",)), workdir)
  prepare_workdir(whole(tools=("a",)), workdir)
  log.write_text("{}\n")
  prepare_workdir(whole(tools=("a",)), workdir)
  with pytest.raises(ConfigError, match=r"a run whose optim\.tools was .*'a'.* not .*"):
    prepare_workdir(whole(tools=("b",)), workdir)
  again = json.loads((tmp_path / "run" / "config.json").read_text())
  assert again.pop("begun") > written.pop("begun")  # time of the config's last change
  assert again == written


def test_every_field_that_differs_is_named_and_no_other(tmp_path):
  workdir = begin(str(tmp_path / "run"))
  prepare_workdir(whole(lr=0.1), workdir)
  words = (
    r"a run whose optim\.lr was 0\.1 and not 0\.2, optim\.tools was .* not \['b'\];"
  )
  with pytest.raises(ConfigError, match=words):
    prepare_workdir(whole(lr=0.2, tools=("b",)), workdir)


def test_a_field_that_may_grow_grows_and_is_on_record(tmp_path):
  workdir = begin(str(tmp_path / "run"))
  prepare_workdir(whole(steps=3), workdir, origin={"seed": 1})
  free, fixed = {"optim.steps": ""}, {"optim.steps": "it decays"}
  with pytest.raises(ConfigError, match=r"was 3 and not 5 \(it decays\); choose"):
    prepare_workdir(whole(steps=5), workdir, may_grow=fixed)
  with pytest.raises(ConfigError, match=r"whose optim\.lr was .* and not 0\.5;"):
    prepare_workdir(whole(steps=5, lr=0.5), workdir, may_grow=free)
  prepare_workdir(whole(steps=5), workdir, may_grow=free)
  prepare_workdir(whole(steps=5), workdir, may_grow=fixed)
  with pytest.raises(ConfigError, match="was 5 and not 3; choose"):
    prepare_workdir(whole(steps=3), workdir, may_grow=free)
  origin = read_origin_of(workdir)
  assert len(origin.pop("commit")) == 40 and origin == {"seed": 1}


def test_a_field_that_a_record_lacks_counts_as_its_default(tmp_path):
  """An earlier version had fewer fields, or recorded only explicit ones."""
  workdir = begin(str(tmp_path / "run"))
  record = {"config": {"optim": {"steps": 3}, "log": ""}, "git_commit": None}
  (tmp_path / "run" / "config.json").write_text(json.dumps(record))
  prepare_workdir(whole(), workdir)
  with pytest.raises(ConfigError, match=r"whose optim\.loss\.clip was 0\.2 and not 0"):
    prepare_workdir(whole(loss={"clip": 0.0}), workdir)
  record["config"]["optim"]["clip_range"] = 0.2
  (tmp_path / "run" / "config.json").write_text(json.dumps(record))
  with pytest.raises(
    ConfigError, match=r"config.json has the field 'optim.clip_range'"
  ):
    prepare_workdir(whole(), workdir)


def test_a_workdir_belongs_to_what_was_read(tmp_path):
  """A path's contents may change before a run resumes."""
  workdir, file = str(tmp_path / "run"), tmp_path / "model" / "weights"
  begin(workdir)
  file.parent.mkdir()
  file.write_bytes(bytes(3 << 20))

  def go():
    inputs = {"tasks": hash_json([{"id": "a"}])}
    inputs["init"] = hash_files(str(file.parent), samples=16)
    prepare_workdir(whole(), workdir, inputs=inputs)

  go()
  go()
  prepare_workdir(whole(), workdir)  # without inputs there is no check
  with file.open("r+b") as f:
    f.seek(12 * (3 << 20) // 16)
    f.write(b"x")
  with pytest.raises(ConfigError, match="read other contents of init; choose another"):
    go()
  digest = hash_files(str(file))
  assert hash_files(None) == hash_files("") != digest
  with file.open("r+b") as f:
    f.seek(-1, 2)
    f.write(b"x")
  assert hash_files(str(file)) != digest
  assert hash_json([1, 2]) != hash_json([2, 1])


def test_a_field_that_may_change_may_also_appear(tmp_path):
  """A run that started without section `log` resumes with it, and vice versa."""
  plain = whole()
  logged = dataclasses.replace(plain, log=Log("x"))
  renamed = dataclasses.replace(plain, log=Log("y"))
  for may_change in ("log", "log.project"):
    for i, runs in enumerate(((plain, logged, renamed), (renamed, logged))):
      workdir = begin(str(tmp_path / f"{may_change}{i}"))
      for settings in runs:
        prepare_workdir(settings, workdir, may_change=(may_change,))
  prepare_workdir(plain, begin(str(tmp_path / "strict")))
  with pytest.raises(ConfigError, match="whose log was None"):
    prepare_workdir(logged, str(tmp_path / "strict"))


def test_a_derived_value_binds_no_other_config(tmp_path):
  workdir = tmp_path / "run"
  scratch_dirs = ("data",)
  prepare_workdir(whole(lr=0.1), str(workdir), scratch_dirs=scratch_dirs)
  (workdir / "data").mkdir()
  (workdir / "data" / "tokens").write_text("1 2 3")
  prepare_workdir(whole(lr=0.1), str(workdir), scratch_dirs=scratch_dirs)
  assert (workdir / "data" / "tokens").exists()
  with pytest.raises(ConfigError, match=r"holds a run whose optim\.lr was 0\.1"):
    prepare_workdir(whole(lr=0.2), str(workdir))
  prepare_workdir(whole(lr=0.2), str(workdir), scratch_dirs=scratch_dirs)
  assert not (workdir / "data").exists()
  (workdir / "data").mkdir()
  (workdir / "metrics.jsonl").write_text("{}\n")
  with pytest.raises(ConfigError, match=r"holds a run whose optim\.lr was 0\.2"):
    prepare_workdir(whole(lr=0.1), str(workdir), scratch_dirs=scratch_dirs)
  assert (workdir / "data").exists()
