"""Reads a compiled program's memory traffic and matrix work from its HLO text.

Each instruction counts as often as the loops around it run. Not counted: kernels'
arithmetic and repeated reads, which the text lacks, and arrays on the chip (memory
space 1, VMEM).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from experiments.bench.hlo_text import array_bytes, computations, instructions

# Without traffic: names, tuples and barriers; loops and branches, because their bodies
# are counted.
_FREE = {
  "bitcast",
  "conditional",
  "constant",
  "get-tuple-element",
  "parameter",
  "partition-id",
  "replica-id",
  "tuple",
  "while",
  "after-all",
  "opt-barrier",
}
_DEFINITION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z\d-]*)\((.*)")
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "__cudnn$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass
class Work:
  """Sums over a program, on one chip.

  Attributes:
    moved: bytes read from and written to HBM, kernels included.
    copied: bytes of large arrays copied or transposed whole.
    copies: number of these copies.
    sorted: bytes of sorted arrays.
    sorts: number of sorts.
    kernels: kernel calls.
    kernels_moved: the kernels' part of `moved`: operands and results once; for a page
      pool, the caller's figure.
    product_cycles: the compiler's estimate for matrix products and their fusions.
    other_cycles: the compiler's estimate for the rest, without collectives and kernels.
  """

  moved: float = 0
  copied: float = 0
  copies: float = 0
  sorted: float = 0
  sorts: float = 0
  kernels: float = 0
  kernels_moved: float = 0
  product_cycles: float = 0
  other_cycles: float = 0


@dataclasses.dataclass(frozen=True)
class Operation:
  """One operation in a program's source.

  Attributes:
    origin: JAX's name for the model's code; "" if the compiler made it.
    result: type and shape.
    product: whether it is or contains a matrix product.
    count: number of runs.
    cycles: the compiler's estimate for all runs; 0 on GPUs.
    moved: bytes read from and written to HBM.
  """

  origin: str
  result: str
  product: bool
  count: float
  cycles: float
  moved: float


@dataclasses.dataclass(frozen=True)
class _Instruction:
  """An instruction: its type as text, operation, operands and line."""

  kind: str
  operation: str
  operands: tuple[str, ...]
  line: str


def work(
  text: str,
  turns: Sequence[int],
  large: float = 0,
  units: int = 1,
  pool_read: float = 0,
) -> Work:
  """Sums a program's traffic, kernels and cycles.

  Args:
    text: the compiled HLO module's text.
    turns: as in `instructions`.
    large: minimum bytes for a counted copy; 0 counts none.
    units: divisor of all sums.
    pool_read: bytes a kernel reads from a large operand.
  """
  out = Work()
  for count, around, x, inside in _running(text, turns):
    operations = _operations(x, inside)

    # --- Time.
    if estimate := _CYCLES.search(x.line):
      if _is_product(operations):
        out.product_cycles += count * int(estimate[1])
      else:
        out.other_cycles += count * int(estimate[1])
    if _is_kernel(x):
      out.kernels += count
      arrays = _hbm_bytes(x.kind)
      for operand in x.operands:
        if operand in around:
          size = sum(_hbm_bytes(around[operand].kind))
          arrays.append(pool_read if large and size >= large else size)
      out.kernels_moved += count * sum(arrays)
      out.moved += count * sum(arrays)
      continue

    # --- Memory.
    out.moved += count * _moved(around, x, inside)
    size = max(_hbm_bytes(x.kind), default=0)
    whole = _is_copy(x, inside)
    if large and whole and size >= large:
      out.copies += count
      out.copied += count * size
    if "sort" in operations or "topk" in x.line.lower():
      out.sorts += count
      out.sorted += count * size
  for field in dataclasses.fields(Work):
    setattr(out, field.name, getattr(out, field.name) / units)
  return out


def operations(text: str, turns: Sequence[int], units: int = 1) -> list[Operation]:
  """Lists operations with estimated cycles or memory traffic, without kernels.

  `turns` as in `instructions`; counts, cycles and bytes are divided by `units`.
  """
  found: dict[tuple[str, str, bool], Operation] = {}
  for count, around, x, inside in _running(text, turns):
    cycles = int(estimate[1]) if (estimate := _CYCLES.search(x.line)) else 0
    moved = 0.0 if _is_kernel(x) else _moved(around, x, inside)
    if not cycles and not moved:
      continue
    origin = re.search(r'op_name="([^"]*)"|$', x.line)[1] or ""
    result = re.sub(r"\{[^}]*\}", "", x.kind)  # without layouts
    key = origin, result, _is_product(_operations(x, inside))
    old = found.get(key, Operation(*key, 0, 0, 0))
    times = count / units
    found[key] = Operation(
      *key, old.count + times, old.cycles + times * cycles, old.moved + times * moved
    )
  return list(found.values())


def _running(
  text: str, turns: Sequence[int]
) -> Iterator[
  tuple[int, Mapping[str, _Instruction], _Instruction, Mapping[str, _Instruction]]
]:
  """Yields the instructions outside fusions.

  Instructions inside a fusion do not access memory, and its estimate covers them.

  Yields:
    The number of runs, the surrounding instructions, the instruction, and a fusion's
    inner instructions.
  """
  module = {name: _parsed(lines) for name, lines in computations(text)[0].items()}
  for count, owner, name, line in instructions(text, turns):
    definition = _DEFINITION.match(line)
    if name == owner and definition:
      x = module[name][definition[1]]
      inside = module.get(_called(line), {}) if x.operation == "fusion" else {}
      yield count, module[name], x, inside


def _operations(x: _Instruction, inside: Mapping[str, _Instruction]) -> set[str]:
  return {x.operation} | {each.operation for each in inside.values()}


def _is_kernel(x: _Instruction) -> bool:
  return x.operation == "custom-call" and any(name in x.line for name in _KERNELS)


def _is_product(operations: set[str]) -> bool:
  return bool(operations & {"convolution", "dot"})


def _parsed(lines: Sequence[str]) -> dict[str, _Instruction]:
  out = {}
  for line in lines:
    if found := _DEFINITION.match(line):
      # Operands end where attributes begin; operands' types have parentheses.
      depth, end = 1, 0
      rest = found[4]
      while end < len(rest) and depth:
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
      operands = tuple(re.findall(r"%([\w.-]+)", rest[:end]))
      out[found[1]] = _Instruction(found[2], found[3], operands, line)
  return out


def _called(line: str) -> str:
  found = re.search(r"calls=%?([\w.-]+)", line)
  return found[1] if found else ""


def _hbm_bytes(kind: str) -> list[int]:
  """Bytes of each HBM array in a type's text."""
  arrays = re.findall(r"[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", kind)
  out = []
  for array in arrays:
    if not re.search(r"S\([1-9]\)", array):
      out += array_bytes(array)
  return out


def _moved(
  around: dict[str, _Instruction],
  x: _Instruction,
  inside: dict[str, _Instruction],
) -> float:
  """Bytes an instruction reads from and writes to HBM.

  Slices and updates move only the slice.
  """
  operation = x.operation
  if operation in _FREE or operation.endswith("-done"):
    return 0
  if operation in ("slice", "dynamic-slice", "gather"):
    return 2 * min(_hbm_bytes(x.kind), default=0)
  if operation == "slice-start":  # results: source, slice, counter
    piece = array_bytes(x.kind)[1]
    return piece * sum(n > 4 for n in _hbm_bytes(x.kind))
  if operation == "copy-start":  # results: copy, source, counter
    return float(sum(n for n in _hbm_bytes(x.kind) if n > 4))
  if operation in ("dynamic-update-slice", "scatter"):
    written = x.operands[1 if operation == "dynamic-update-slice" else -1]
    return 2 * sum(_hbm_bytes(around[written].kind)) if written in around else 0

  # --- Bytes written, and bytes a fusion reads from each operand.
  read = 0
  for number, name in enumerate(x.operands):
    if name in around:
      size = sum(_hbm_bytes(around[name].kind))
      read += _used(inside, number, size)
  return read + _written(inside, x)


def _used(inside: dict[str, _Instruction], number: int, size: int) -> int:
  """Bytes a fusion reads from an operand of `size` bytes."""
  parameter = next(
    (
      name
      for name, x in inside.items()
      if x.operation == "parameter" and f"parameter({number})" in x.line
    ),
    None,
  )
  users = [x for x in inside.values() if parameter in x.operands]
  read = 0
  for user in users:
    if user.operation in ("dynamic-slice", "gather", "slice"):
      read += sum(array_bytes(user.kind))
    elif user.operation in ("dynamic-update-slice", "scatter"):
      # Written in place: the old array is not read.
      read += 0 if user.operands[0] == parameter else size
    else:
      return size
  return min(read, size) if users else size


def _written(inside: dict[str, _Instruction], x: _Instruction) -> int:
  """Bytes an instruction writes; only the updates if it writes in place."""
  pieces = 0
  whole = sum(_hbm_bytes(x.kind))
  for each in inside.values():
    if each.operation == "dynamic-update-slice":
      pieces += sum(array_bytes(inside[each.operands[1]].kind))
    elif each.operation == "scatter":
      pieces += sum(array_bytes(inside[each.operands[-1]].kind))
  return min(pieces, whole) if pieces else whole


def _is_copy(x: _Instruction, inside: dict[str, _Instruction]) -> bool:
  """Whether an instruction only moves an array: a copy or a transposition."""
  moves = {"copy", "transpose", "copy-start"}
  if x.operation in moves:
    return True
  work_inside = {each.operation for each in inside.values()} - _FREE
  return bool(work_inside) and work_inside <= moves
