"""Code for the jail: runs with hidden tests or with the graded program, never both.

`grader` sends this file's text as a program. The file imports nothing from this
project, and never contains an expected value. `answer_calls` runs the graded program
and answers calls to its functions; `run_tests` runs the tests, in a jail without the
program, and asks for missing call results. Only plain values pass between the two, so
an object with its own `__eq__`, a patched builtin or a walk through frames reaches
neither the tests nor their expected values.

budget: the code is sent as one text, so it is one file.
"""

from __future__ import annotations

import ast
import builtins
import copy
import decimal
import itertools
import json
import os
import random
import signal
import sys
import types
from typing import Any

_LONGEST = 100_000  # values taken from an iterator
_LONG_BITS = 13_000  # in an integer; JSON readers refuse more than 4,300 digits
# Statements that can fail as tests; all others are preparation.
_CHECKS = (ast.Assert, ast.Expr, ast.While, ast.With, ast.Try, ast.If, ast.For)


class Need(BaseException):
  """A call without a known result; a test's `except Exception` does not stop it."""


class Dead(BaseException):
  """A call in which the program died; a test's `except Exception` does not stop it."""


class Broken(BaseException):
  """Tests that cannot be run this way; no verdict on the program."""


class Remote:
  """A function in the graded program, or an object there without a plain value."""

  def __init__(
    self, tests: ReplayedTests, root: dict[str, str], names: tuple[str, ...] = ()
  ):
    self.__dict__.update(_tests=tests, _root=root, _names=names)

  def __getattr__(self, name: str) -> Remote:
    if name.startswith("__"):
      raise AttributeError(name)
    return Remote(self._tests, self._root, (*self._names, name))

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._tests.call(self._root, self._names, args, kwargs)


def encode(
  value: Any, known: dict[str, Any], stay: dict[str, Any] | None = None
) -> Any:
  """Encodes a value as JSON; instances of `known` classes by their attributes.

  Raises:
    TypeError: the value cannot be encoded; with `stay`, it is stored there instead.
  """
  # Numbered instances: long chains need no recursion, and sharing is kept.
  objects: list[Any] = []
  numbers: dict[int, int] = {}  # an object's id() -> its number

  def one(value: Any) -> Any:
    # --- Scalars are themselves; subclass instances become plain scalars.
    kind = type(value)
    if kind is int and value.bit_length() > _LONG_BITS:
      return {"int": str(decimal.Decimal(value))}
    if value is None or kind in (bool, int, float, str):
      return value
    if kind.__module__ == "numpy":
      return one(value.tolist())
    for base in (bool, int, float, str):
      if issubclass(kind, base):  # an IntEnum, say
        return one(base(value))
    # --- An object in the program is sent back by its handle.
    if kind is Remote and not value._names and "handle" in value._root:
      return dict(value._root)
    # --- Collections. The base class's methods, not a subclass's.
    for base in (list, tuple, set, frozenset):
      if issubclass(kind, base):
        return {base.__name__: list(map(one, base.__iter__(value)))}
    if issubclass(kind, dict):
      return {"dict": [[one(k), one(v)] for k, v in dict.items(value)]}
    if issubclass(kind, (bytes, bytearray)):
      return {"bytes": list(value)}
    if kind is complex:
      return {"complex": [value.real, value.imag]}
    # --- Instances of classes known to both sides, and iterators.
    if known.get(kind.__name__) is kind:
      if id(value) not in numbers:
        numbers[id(value)] = len(objects)
        objects.append(value)
      return {"object": numbers[id(value)]}
    if hasattr(kind, "__next__"):
      return {"iterator": list(map(one, itertools.islice(value, _LONGEST)))}
    raise TypeError(f"a {kind.__name__} cannot pass")

  try:
    root = one(value)
    # --- The instances' attributes, which may lead to more instances.
    states = []
    for item in objects:  # grows during the loop
      state = {k: one(v) for k, v in vars(item).items()}
      states.append([type(item).__name__, state])
  except TypeError:
    if stay is None:
      raise
    stay["value"] = value
    return {"opaque": True}
  return {"root": root, "objects": states}


def decode(message: Any, known: dict[str, Any], handles: Any) -> Any:
  """Decodes a value from `encode`; `handles` resolves a key to its object.

  Raises:
    ValueError, TypeError, KeyError: the message is malformed.
  """
  # Empty instances first: their attributes may refer to one another in circles.
  states = message["objects"]
  objects = [known[name].__new__(known[name]) for name, _ in states]

  makers = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
  makers["iterator"] = iter

  def one(value: Any) -> Any:
    if not isinstance(value, dict):
      return value
    ((kind, inner),) = value.items()
    if kind == "dict":
      return {one(key): one(item) for key, item in inner}
    if kind == "handle":
      return handles(inner)
    if kind == "object":
      return objects[inner]
    if kind == "int":
      return int(inner)
    if kind == "bytes":
      return bytes(inner)
    if kind == "complex":
      return complex(*inner)
    return makers[kind](list(map(one, inner)))

  for item, (_, state) in zip(objects, states, strict=True):
    for name, value in state.items():
      vars(item)[name] = one(value)
  return one(message["root"])


def module(name: str, *sources: str) -> dict[str, Any]:
  """Makes a module from these sources; returns its namespace."""
  new = types.ModuleType(name)
  sys.modules[name] = new
  for source in sources:
    exec(compile(source, f"<{name}>", "exec", dont_inherit=True), new.__dict__)
  return new.__dict__


def classes(namespace: dict[str, Any], source: str) -> dict[str, Any]:
  """Returns the classes defined at a source's top level."""
  found = {}
  for node in ast.parse(source).body:
    # The name may have been bound to something else since, or deleted.
    if isinstance(node, ast.ClassDef) and isinstance(namespace.get(node.name), type):
      found[node.name] = namespace[node.name]
  return found


def answer_calls() -> None:
  """Answers calls to the graded program, one line each, as soon as each is done.

  On stdin: JSON with `nonce`, `prelude`, `prefix` (trusted), `program` (graded),
  `seconds` for one call and `calls`, a list of [key, {root, names, args, kwargs}].
  The program may forge lines: this gains no more than giving the same answers.
  """
  request = json.loads(sys.stdin.read())
  out = _take_stdout()
  handles: dict[str, Any] = {}
  # --- A time limit for the program itself, before any call.
  # Without a handler, the program cannot catch the time limit.
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.setitimer(signal.ITIMER_REAL, request["seconds"])
  # --- The trusted prefix, then the program as a module of its own.
  prefix = module("prefix", request["prelude"], request["prefix"])
  known = classes(prefix, request["prefix"])
  sys.modules["solution"] = solution = types.ModuleType("solution")
  space = solution.__dict__
  # Names available without an import, but not the program's own functions.
  space["__builtins__"] = {**prefix, **vars(builtins)}
  program = compile(request["program"], "<solution>", "exec", dont_inherit=True)
  exec(program, space)
  # --- The calls, each with its own time limit. Reply at once: the next may kill us.
  for key, call in request["calls"]:
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    _say(out, f"{request['nonce']} {key}", _answer(key, call, space, known, handles))
  os._exit(0)  # the program's threads must not delay the answers


def _take_stdout() -> int:
  """Takes stdout for answers; prints by the program or the tests are discarded."""
  sys.setrecursionlimit(20_000)
  sys.set_int_max_str_digits(0)
  out = os.dup(1)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  return out


def _say(out: int, head: str, message: dict[str, Any]) -> None:
  line = f"{head} {json.dumps(message)}\n".encode()
  while line:
    line = line[os.write(out, line) :]


def _answer(
  key: str,
  call: dict[str, Any],
  space: dict[str, Any],
  known: dict[str, Any],
  handles: dict[str, Any],
) -> dict[str, Any]:
  """Returns a call's reply: its value and changed arguments, or its error."""
  try:
    # --- The callee: an earlier result, the function with this name or, failing that, a
    # fresh `Solution`'s method.
    args = decode(call["args"], known, handles.__getitem__)
    kwargs = decode(call["kwargs"], known, handles.__getitem__)
    root = call["root"]
    if "handle" in root:
      function = handles[root["handle"]]
    elif root["name"] not in space and "Solution" in space:
      function = getattr(space["Solution"](), root["name"])
    else:
      function = space[root["name"]]
    for name in call["names"]:
      function = getattr(function, name)
    # --- Its result. A value without plain form stays here, under the call's key.
    stay: dict[str, Any] = {}
    value = encode(function(*args, **kwargs), known, stay)
    if "value" in stay:
      handles[key] = stay["value"]
    # --- Its changes to its arguments, if they can be encoded.
    after = encode(args, known, {})
    if after == call["args"] or "opaque" in after:
      after = None
    return {"value": value, "args": after}
  except Exception as e:
    return {"raised": type(e).__name__}


class ReplayedTests:
  """Hidden tests, run as far as the known call results reach."""

  def __init__(self, request: dict[str, Any]):
    """Reads the tests; runs only their prefix."""
    self.known = request["known"]  # key -> [the call, its reply]
    self.space = module("tests", request["prefix"])
    self.classes = classes(self.space, request["prefix"])
    self.needs: list[Any] = []
    self.verdicts: list[str] = []
    self._unit = 0  # the running unit and its call count: a call's key
    self._calls = 0
    self._unsure = False  # whether a unit stopped with more calls to come
    tree = ast.parse(request["source"])
    entry = request["entry"]
    # --- The program's names, each a `Remote`. A name used but not defined by the tests
    # is the program's; so is the entry's name, even if a prefix or Python defines it
    # too.
    own = {entry.partition("(")[0].partition(".")[0]} - {""}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    self._local = (set(self.space) | set(dir(builtins))) - own
    for name in (used - self._local | own) - _bound(tree):
      self.space[name] = Remote(self, {"name": name})
    # --- `check(candidate)` is unrolled, so that each assert is a test.
    body = tree.body
    check = _check_function(body)
    if check is not None and entry and len(check.args.args) == 1:
      body = [n for n in body if n is not check]
      if _has(check, ast.Return | ast.Global):  # which mean nothing outside it
        body += [check, *ast.parse(f"check({entry})").body]
      else:
        body += ast.parse(f"{check.args.args[0].arg} = {entry}").body + check.body
    self.units = _units(body)

  def run(self) -> None:
    """Runs every unit; afterwards `verdicts` are final if `needs` is empty."""
    for unit in self.units:
      # --- A unit is one test, unless a plain loop ends the unit.
      *before, loop = unit
      if not isinstance(loop, ast.For) or loop.orelse or _has(loop, ast.Break):
        self._attempt(unit, counts=isinstance(loop, _CHECKS))
        continue
      # Each iteration is a separate test. If one lacks a result, the others still ask
      # for theirs.
      self._attempt(before, counts=False)
      turns = ast.Name("__turns", ast.Store())
      self.space["__turns"] = ()
      self._attempt([ast.Assign([turns], loop.iter)], counts=False)
      one = ast.For(loop.target, ast.Name("__turn", ast.Load()), loop.body, [])
      for item in self.space["__turns"]:
        self.space["__turn"] = (item,)
        self._attempt([one], counts=True)

  def _attempt(self, statements: list[ast.stmt], counts: bool) -> None:
    """Runs statements as the next unit; they are a test if `counts`."""
    verdict = "passed"
    self._calls = 0
    tree = ast.fix_missing_locations(ast.Module(copy.deepcopy(statements), []))
    try:
      exec(compile(tree, "<tests>", "exec", dont_inherit=True), self.space)
    except Need:
      verdict = "needs"
      calls = 0  # to the program; others may follow the needed call
      for node in ast.walk(tree):
        if isinstance(node, ast.Call):
          calls += getattr(node.func, "id", "") not in self._local
      self._unsure |= calls > 1
    except AssertionError:
      verdict = "wrong"
    except Dead:
      verdict = "dead"
    except Exception as e:
      verdict = type(e).__name__
    if counts or verdict not in ("passed", "needs"):
      self.verdicts.append(verdict)
    self._unit += 1

  def call(
    self, root: dict[str, str], names: tuple[str, ...], args: Any, kwargs: Any
  ) -> Any:
    """Returns a call's known result, or records the call and raises Need."""
    key = f"{self._unit}.{self._calls}"
    self._calls += 1
    # --- The call as a JSON message, as in the known results.
    message: dict[str, Any] = {"root": root, "names": list(names)}
    try:
      message["args"] = encode(list(args), self.classes)
      message["kwargs"] = encode(kwargs, self.classes)
    except TypeError as e:
      raise Broken(f"an argument of a call: {e}") from e
    message = json.loads(json.dumps(message))
    # --- Not yet known, or another call's: an earlier result may have changed the call.
    earlier, reply = self.known.get(key, (None, None))
    if earlier != message:
      # An object must have met all earlier calls before the next call.
      if not (self._unsure and "handle" in root):
        self.needs.append([key, message])
      raise Need
    if reply is None:
      raise Dead
    # --- Known: the program's exception, its changes to the arguments, and its result.
    reply = json.loads(reply)
    if reply.get("raised"):
      kind = getattr(builtins, str(reply["raised"]), None)
      known = isinstance(kind, type) and issubclass(kind, Exception)
      # A StopIteration would end one of the tests' loops, as if all had passed.
      if not known or issubclass(kind, StopIteration | StopAsyncIteration):
        kind = RuntimeError
      raise kind("raised by the program")
    if reply["args"] is not None:
      _change(args, decode(reply["args"], self.classes, self._handle))
    if reply["value"].get("opaque"):
      return self._handle(key)
    return decode(reply["value"], self.classes, self._handle)

  def _handle(self, key: str) -> Remote:
    return Remote(self, {"handle": key})


def _change(args: Any, after: Any) -> None:
  """Applies the program's changes to the test's own objects."""
  for mine, its in zip(args, after, strict=True):
    if type(mine) is not type(its):
      continue
    if type(mine) in (list, bytearray):
      mine[:] = its
    elif type(mine) in (dict, set):
      mine.clear()
      mine.update(its)
    elif hasattr(mine, "__dict__"):
      vars(mine).update(vars(its))


def _bound(tree: ast.Module) -> set[str]:
  """Lists the names defined by tests, except locals of functions other than `check`."""
  out = set()
  nodes = list(tree.body)
  for node in nodes:  # grows during the loop
    # Functions and classes with their own name are not searched.
    if getattr(node, "name", "check") == "check" or isinstance(node, ast.alias):
      nodes += ast.iter_child_nodes(node)
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
      out.add(node.id)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
      out.add(node.name)
    elif isinstance(node, ast.arg):
      out.add(node.arg)
    elif isinstance(node, ast.alias):
      out.add((node.asname or node.name).partition(".")[0])
    elif isinstance(node, ast.ExceptHandler) and node.name:
      out.add(node.name)
  return out


def _check_function(body: list[ast.stmt]) -> ast.FunctionDef | None:
  """Returns the first top-level function called `check`."""
  for node in body:
    if isinstance(node, ast.FunctionDef) and node.name == "check":
      return node
  return None


def _has(tree: ast.AST, kinds: Any) -> bool:
  """Whether a statement contains a node of these kinds, at any depth."""
  return any(isinstance(node, kinds) for node in ast.walk(tree))


def _units(body: list[ast.stmt]) -> list[list[ast.stmt]]:
  """Groups statements; each group ends with one that can fail as a test."""
  units: list[list[ast.stmt]] = [[]]
  for node in body:
    units[-1].append(node)
    doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, _CHECKS) and not doc:
      units.append([])
  return [u for u in units if u]


def run_tests() -> None:
  """Runs the tests; prints one line: their needed calls, or their verdicts.

  On stdin: JSON with `nonce`, `prefix`, `source`, `entry` ("" for none) and `known`.
  """
  request = json.loads(sys.stdin.read())
  out = _take_stdout()
  # The known results change from run to run and must not change the random draws.
  random.seed(0)
  if "numpy" in sys.modules:
    sys.modules["numpy"].random.seed(0)
  try:
    tests = ReplayedTests(request)
    tests.run()
    reply = {"needs": tests.needs, "verdicts": tests.verdicts}
  except (Exception, Broken) as e:
    reply = {"broken": f"{type(e).__name__}: {e}"}
  _say(out, request["nonce"], reply)
  os._exit(0)
