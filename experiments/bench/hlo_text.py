"""Reads a compiled program's instructions and collectives from its HLO text.

XLA's figures count a loop's body once; here each instruction counts as often as the
loops around it run.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective in a compiled program.

  Attributes:
    kind: HLO's name; an all-reduce whose fusion keeps a slice is a reduce-scatter.
    count: runs per step.
    size: bytes of the whole array (for collective-permute, a device's sent bytes).
    ways: devices per group.
    origin: the operation in the model.
    overlapped: whether other work runs between its start and end.
    between_slices: whether the collective uses the network between TPU slices; each
      device in a group is on a different slice.
  """

  kind: str
  count: int
  size: int
  ways: int
  origin: str
  overlapped: bool = False
  between_slices: bool = False

  @property
  def sent(self) -> float:
    """Bytes a device sends per step, with rings."""
    if self.kind == "collective-permute":
      return self.count * self.size
    sent = self.count * self.size * (self.ways - 1) / self.ways
    if self.kind == "all-reduce":  # a reduce-scatter and an all-gather
      return 2 * sent
    return sent


_KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\((.*)")


def array_bytes(shape: str) -> list[int]:
  """Bytes of each array in a type's text, e.g. `(bf16[2,3]{1,0}, u32[])`."""
  out = []
  for dtype, dims in _ARRAY.findall(shape):
    bits = 8  # a predicate: its name has no size
    if dtype != "pred":
      bits = int(re.search(r"\d+", dtype)[0])
    size = math.prod(map(int, filter(None, dims.split(","))))
    out.append(bits * size // 8)
  return out


def group_size(line: str, devices: int) -> int:
  """Devices in a collective's group, in any notation of `replica_groups`."""
  # --- Axes of a mesh, or parts of them.
  if groups := re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  # --- Number and size of groups; a list of groups; none: all devices.
  if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
    return int(groups[1])
  if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return groups[1].count(",") + 1
  return devices


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns an HLO module's instructions per computation, and the entry's name."""
  out: dict[str, list[str]] = {}
  entry = ""
  name = ""  # the current computation; "" between two
  for line in text.splitlines():
    if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
      name = head[2]
      out[name] = []
      if head[1]:
        entry = name
    elif line == "}":
      name = ""
    elif name and " = " in line:
      out[name].append(line)
  return out, entry


def trips(line: str, condition: list[str], body: list[str]) -> int | None:
  """Returns a while instruction's trip count; None if only the run knows.

  Either the compiler wrote the count down, or the counter starts at 0, ends at the
  condition's constant, and grows by the body's constant (2 if unrolled).
  """
  # --- The compiler wrote the count down.
  if known := re.search(r"known_trip_count\W+n\W+(\d+)", line):
    return int(known[1])

  # --- The counter's upper bound, a constant.
  compared = re.search(
    r"compare\(%?([\w.-]+), %?([\w.-]+)\), direction=LT", _root(condition)
  )
  if not compared:
    return None
  most = _constant(condition, compared[2])
  if most is None:
    return None

  # --- The counter's increment: the body returns the counter in a tuple.
  counter = re.search(r"index=(\d+)", _defining(condition, compared[1]))
  parts = re.search(r" tuple\((.*?)\)", _without_braces(_root(body)))
  if not counter or not parts:
    return most
  after = parts[1].split(", ")[int(counter[1])].lstrip("%")
  added = re.search(r" add\(%?([\w.-]+), %?([\w.-]+)\)", _defining(body, after))
  if added:
    for name in added.groups():  # one is the old counter, not a constant
      step = _constant(body, name)
      if step:
        return -(-most // step)
  return most


def _root(lines: list[str]) -> str:
  """A computation's root instruction."""
  return next(line for line in lines if line.lstrip().startswith("ROOT "))


def _defining(lines: list[str], name: str) -> str:
  """The instruction with this name; "" if missing."""
  is_it = re.compile(rf"\s*(ROOT )?%?{re.escape(name)} = ")
  return next(filter(is_it.match, lines), "")


def _constant(lines: list[str], name: str) -> int | None:
  """An integer constant's value; None for anything else."""
  value = re.search(r" = [su]32\[\]\S* constant\((\d+)\)", _defining(lines, name))
  if value is None:
    return None
  return int(value[1])


def instructions(
  text: str, turns: Sequence[int]
) -> Iterator[tuple[int, str, str, str]]:
  """Yields every executed instruction with its count, loop and computation.

  Args:
    text: the compiled HLO module's text.
    turns: trip counts only the run knows, outermost loop first; the last holds for all
      loops further inside. A conditional counts its longest branch.

  Yields:
    The count; the loop body, branch or entry; the computation (a different one inside a
    fusion); the line.
  """
  bodies, entry = computations(text)

  def visit(
    name: str, count: int, owner: str, unknown: int
  ) -> Iterator[tuple[int, str, str, str]]:
    for line in bodies[name]:
      yield count, owner, name, line
      if " while(" in line:
        body = re.search(r"body=%?([\w.-]+)", line)[1]
        condition = re.search(r"condition=%?([\w.-]+)", line)[1]
        times = trips(line, bodies[condition], bodies[body])
        inner = unknown
        if times is None:
          times = turns[min(unknown, len(turns) - 1)]
          inner += 1
        yield from visit(body, count * times, body, inner)
      # A fusion, or work for another core (TPU7x's SparseCore).
      inside = re.findall(r"calls=%?([\w.-]+)", line)
      inside += re.findall(r" call(?:-start)?\(.*to_apply=%?([\w.-]+)", line)
      for other in inside:
        yield from visit(other, count, owner, unknown)
      branches = re.findall(r"branch_computations=\{(.*?)\}", line)
      branches += re.findall(r"(?:true|false)_computation=(%?[\w.-]+)", line)
      branches = re.findall(r"[\w.-]+", " ".join(branches))
      if branches:
        other = max(branches, key=lambda name: len(bodies[name]))
        yield from visit(other, count, other, unknown)

  yield from visit(entry, 1, entry, 0)


def collectives(
  text: str, devices: int, turns: Sequence[int] = (1,)
) -> list[Collective]:
  """Returns a compiled program's collectives, most bytes first.

  `turns` as in `instructions`.
  """
  bodies, _ = computations(text)
  # A fused collective is a chain of fusions with one channel: start, other work, end.
  chained: collections.Counter[str] = collections.Counter()
  for lines in bodies.values():
    chained.update(set(re.findall(r"channel_id=(\d+)", "\n".join(lines))))
  out: dict[Any, Collective] = {}
  for count, owner, name, line in instructions(text, turns):
    # --- Is it a collective? Asynchronous collectives count at their start.
    parts = _INSTRUCTION.search(_without_braces(line))
    if not parts:
      continue
    if between := _between_slices(line, parts[2], count):
      out[owner, line] = between
      continue
    kind = parts[3].removesuffix("-start")
    if kind not in _KINDS:
      continue

    # --- The moved array's size.
    # Asynchronous counters and contexts are scalars.
    sizes = [n for n in array_bytes(parts[2]) if n > 4] or [4]
    if parts[3] != kind and kind != "all-reduce":  # (operands, results, ...)
      sizes = sizes[len(sizes) // 2 :]
    ways = group_size(line, devices)
    size = sum(sizes)
    if kind == "reduce-scatter":  # its result is one device's part
      size *= ways

    # --- Its real kind, unless already counted.
    sliced = name != owner and any(" dynamic-slice(" in x for x in bodies[name])
    if kind == "all-reduce" and sliced:
      kind = "reduce-scatter"
    identity = line
    channel = re.search(r"channel_id=(\d+)", line)
    if channel and name != owner:
      identity = channel[1]
    origin = re.search(r'op_name="([^"]*)"|$', line)[1] or ""
    overlapped = chained[identity] > 1 or _is_overlapped(bodies[name], line)
    for caller in bodies[owner]:  # another core runs the call in parallel
      if f"to_apply=%{name}," in caller:
        overlapped |= _is_overlapped(bodies[owner], caller)
    collective = Collective(kind, count, size, ways, origin, overlapped)
    out.setdefault((owner, identity), collective)
  return sorted(out.values(), key=lambda c: -c.sent)


def _between_slices(line: str, shape: str, count: int) -> Collective | None:
  """Reads a transfer between slices, which the host sends; else None."""
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', line)
  if " send(" not in line or kind is None:
    return None
  kind = kind[1].lower().replace("_", "-")
  if kind == "one-to-one":
    kind = "collective-permute"
  size = array_bytes(shape)[0]  # the type is (data, context, token)
  # The slices' numbers; 1:4 means 1 to 4. A permutation names pairs instead.
  ways = 0
  numbers = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', line)
  for part in numbers[1].split(",") if numbers else ():
    first, _, last = part.partition(":")
    ways += int(last or first) - int(first) + 1
  if kind == "all-gather":  # a device sends its own part
    size *= ways
  origin = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', line)[1]
  return Collective(kind, count, size, ways, origin, True, between_slices=True)


def _is_overlapped(lines: Sequence[str], line: str) -> bool:
  """Whether other work runs before the wait for an asynchronous collective."""
  if "-start(" not in line:
    return False
  name = _INSTRUCTION.search(line)[1]
  work = (" fusion(", " convolution(", " custom-call(", " while(")
  for later in lines[lines.index(line) + 1 :]:
    if re.search(rf"-done\(.*%{re.escape(name)}\b", later):
      return False
    if any(operation in later for operation in work):
      return True
  return False


def _without_braces(line: str) -> str:
  """A line without comments and braces (layouts, configs)."""
  line = re.sub(r"/\*.*?\*/", "", line)
  while (shorter := re.sub(r"\{[^{}]*\}", "", line)) != line:
    line = shorter
  return line
