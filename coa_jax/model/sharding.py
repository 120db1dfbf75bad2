"""Array sharding: one table from array axes to mesh axes.

Every axis of a parameter or an activation has a letter (the alphabet in
docs/internals.md); the table maps a letter to the mesh axes that split it. The table
determines the sharding of parameters, optimizer state and batches, and the constraints
inside the model.

budget: the table, and all its uses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import (
  AbstractMesh,
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
  SingleDeviceSharding,
)

from coa_jax.model import placement
from coa_jax.model.moving import mesh_over, moved
from coa_jax.runtime.fields import bounded, check_fields

AXES = ("data", "fsdp", "context", "tensor")
# B, T and R are activation axes, D is a parameter axis: an activation's D is never
# split. R is the token axis between matrices: `tensor` has no other axis to split there
# (Megatron's sequence parallelism, arXiv 2205.05198).
RULES: dict[str, tuple[str, ...]] = {
  "B": ("data", "fsdp"),
  "T": ("context",),
  "R": ("context", "tensor"),
  "D": ("fsdp", "context"),
  "N": ("tensor",),
  "K": ("tensor",),
  "F": ("tensor",),
  "V": ("tensor",),
  "Y": ("tensor",),
  "Z": ("tensor",),
}
# Each parameter's axis letters, by name. "." is an axis never split (norms, head dim,
# adapter rank); ">" separates a matrix's inputs from its outputs. A stacked layer axis,
# if any, comes first.
PARAMETERS = {
  "embed": "VD",
  "head": "D>V",
  "final_norm": ".",
  "attn_norm": ".",
  "q": "D>N.",
  "k": "D>K.",
  "v": "D>K.",
  "q_bias": "N.",
  "k_bias": "K.",
  "v_bias": "K.",
  "q_norm": ".",
  "k_norm": ".",
  "o": "N.>D",
  "ff_norm": ".",
  "gate": "D>F",
  "up": "D>F",
  "down": "F>D",
  "delta_qkv": "D>Y.",
  "delta_gate": "D>Z.",
  "delta_write": "D>Z",
  "delta_rate": "D>Z",
  "delta_rate_bias": "Z",
  "delta_decay_log": "Z",
  "delta_conv": "Y..",
  "delta_norm": ".",
  "delta_out": "Z.>D",
  "value_head": "D>.",  # a critic's
}
# Constrained activations' axis letters: attention, SwiGLU, logits, layer inputs and
# outputs, linear attention.
_ACTIVATIONS = ("BTN.", "BTK.", "BTF", "BTV", "BR.", "BTY.", "BTZ.")
# The `ModelConfig` field with an axis's size, for messages.
_FIELDS = {
  "D": "width",
  "N": "heads",
  "K": "kv_heads",
  "F": "ff",
  "V": "vocab_size",
  "Y": "delta.key_heads",
  "Z": "delta.value_heads",
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Config section `mesh`.

  Attributes:
    data: devices with whole copies of the state, splitting the batch.
    fsdp: devices splitting both state and batch; -1 takes all remaining devices.
    context: devices splitting a row's tokens.
    tensor: devices splitting heads, hidden units and the vocabulary.
    devices: number of devices used, from the first; 0 for all.
    rollout: number of devices for RL's rollouts alone, each process's last ones; the
      other axes share the rest, the learner's. 0: all devices do both, interleaved or
      concurrently.
    rules: replacements for lines of `RULES`, e.g. {"K": ()} keeps all key-value heads
      on every device.
  """

  data: int = bounded(1, least=1)
  fsdp: int = -1
  context: int = bounded(1, least=1)
  tensor: int = bounded(1, least=1)
  devices: int = bounded(0, least=0)
  rollout: int = bounded(0, least=0)
  rules: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    check_fields(self)
    if self.fsdp < 1 and self.fsdp != -1:
      raise ValueError(
        f"fsdp is {self.fsdp}; it must be at least 1, or -1 for the rest"
      )
    for letter, axes in self.rules.items():
      if letter not in RULES:
        raise ValueError(f"rules has axis {letter!r}; there are {', '.join(RULES)}")
      for axis in axes:
        if axis not in AXES:
          raise ValueError(f"rules.{letter} has {axis!r}; there are {', '.join(AXES)}")
      if len(set(axes)) < len(axes):
        raise ValueError(f"rules.{letter} has an axis twice: {', '.join(axes)}")


@dataclasses.dataclass(frozen=True)
class Partitioner:
  """A mesh and the axis table; hashable, so usable as a jit's static argument.

  Attributes:
    mesh: devices under the names `AXES`; abstract in `ONE_DEVICE`.
    rules: (letter, mesh axes) pairs, in the order of `RULES`.
  """

  mesh: Mesh | AbstractMesh
  rules: tuple[tuple[str, tuple[str, ...]], ...] = tuple(RULES.items())

  @property
  def devices(self) -> list[jax.Device]:
    """Lists the devices in mesh order; JAX's default device for an abstract mesh."""
    if isinstance(self.mesh, AbstractMesh):
      return jax.local_devices()[:1]
    return list(self.mesh.devices.flat)

  @property
  def num_processes(self) -> int:
    """Counts the processes that drive the devices."""
    return len({device.process_index for device in self.devices})

  @property
  def is_default(self) -> bool:
    """Whether this is `ONE_DEVICE`: its arrays may be used on any mesh."""
    return self.mesh.size == 1 and isinstance(self.mesh, AbstractMesh)

  @property
  def platform(self) -> str:
    """Returns the devices' platform: cpu, gpu or tpu."""
    return self.devices[0].platform

  def axes(self, letter: str) -> tuple[str, ...]:
    """Returns the mesh axes that split `letter`; () for "." and unknown letters."""
    return dict(self.rules).get(letter, ())

  def ways(self, letter: str) -> int:
    """Counts the pieces that `letter` is cut into."""
    return math.prod(self.mesh.shape[a] for a in self.axes(letter))

  def spec(self, letters: str) -> PartitionSpec:
    """Returns the partition for an array with axes `letters`."""
    return PartitionSpec(*[self.axes(x) or None for x in letters])

  def sharding(self, letters: str) -> Sharding:
    """Puts `spec` on this mesh."""
    if self.is_default:
      return SingleDeviceSharding(self.devices[0])
    return NamedSharding(self.mesh, self.spec(letters))

  def shard(self, x: jax.Array, letters: str) -> jax.Array:
    """Constrains an activation with axes `letters`; inside a jit."""
    if self.mesh.size == 1:
      return x
    return jax.lax.with_sharding_constraint(x, self.sharding(letters))

  def gathered(self, w: jax.Array, name: str) -> jax.Array:
    """Gathers the parameter `name` over axis D for use; inside a jit.

    By default XLA multiplies by one device's part of D at a time and sums the products
    in w's dtype: slower, and a sum's rounding depends on the mesh. The gradient is
    constrained to the parameter's split, so every device receives only its own part's
    sum (ZeRO, arXiv 1910.02054).

    Args:
      w: the parameter in its dtype for products, which the gather keeps.
    """
    kept = letters_of_name(name)
    # Constrained before the gather too: a conversion may not move behind it.
    return self.moved(self.shard(w, kept), kept, kept.replace("D", "."))

  def moved(self, x: jax.Array, before: str, after: str) -> jax.Array:
    """Moves an array between two splits given as letters; see `moving.moved`."""
    return moved(x, self.sharding(before), self.sharding(after))

  def tree(self, tree: Any, outputs_first: bool = False) -> Any:
    """Returns shardings for a parameter tree, or for a state that mirrors one.

    Args:
      tree: arrays or shapes; leaves of no parameter (counters) are replicated.
      outputs_first: True if matrices have their inputs last.
    """

    def leaf(path: tuple[Any, ...], x: Any) -> Sharding:
      letters = letters_of(path)
      if outputs_first:
        n = inputs_of(name_of(path))
        letters = letters[n:] + letters[:n]
      # One extra axis is the stacked layers'; any other shape is not a parameter.
      extra = np.ndim(x) - len(letters)
      if extra not in (0, 1):
        return self.sharding("")
      return self.sharding("." * extra + letters)

    return jax.tree_util.tree_map_with_path(leaf, tree)

  def out_shardings(self, tree: Any) -> Any:
    """Returns `tree`'s result for a jit's outputs; None for `ONE_DEVICE`."""
    return None if self.is_default else self.tree(tree)

  def put(self, tree: Any) -> Any:
    """Puts host arrays [..., B, T] onto the mesh; each process puts its own rows.

    Args:
      tree: arrays [..., b, T] with all this process's `rows`, in order.
    """
    if self.is_default:
      return tree
    # B / b: all batch parts over this process's own parts.
    parts = self.ways("B")
    own_parts = int(self.rows(parts).sum())

    def leaf(x: np.ndarray) -> jax.Array:
      *others, b, T = x.shape
      B = b * parts // own_parts
      place_B = np.cumsum(self.rows(B)) - 1  # a row's place among this process's rows

      def part(index: tuple[slice, ...]) -> np.ndarray:
        *_, rows, tokens = index
        place_b = place_B[rows]  # contiguous, like the rows
        return x[..., place_b[0] : place_b[-1] + 1, tokens]

      sharding = self.sharding("." * len(others) + "BT")
      return jax.make_array_from_callback((*others, B, T), sharding, part)

    return jax.tree.map(leaf, tree)

  def own(self, x_BT: jax.Array) -> np.ndarray:
    """Fetches this process's `rows`, [b, T], from an array with sharding "B."."""
    B, T = x_BT.shape
    out_BT = np.empty((B, T), x_BT.dtype)
    for shard in x_BT.addressable_shards:
      out_BT[shard.index] = shard.data
    return out_BT[self.rows(B)]

  def rows(self, B: int) -> np.ndarray:
    """Marks which of B rows `put` places on this process's devices; [B] bool."""
    me = jax.process_index()
    return np.array([me in processes for processes in self.processes(B)], bool)

  def processes(self, B: int) -> list[set[int]]:
    """Lists, for each of B rows, the processes to which `put` sends the row."""
    out: list[set[int]] = [set() for _ in range(B)]
    for device, (rows,) in self.sharding("B").devices_indices_map((B,)).items():
      for processes in out[rows]:
        processes.add(device.process_index)
    return out

  def decoding(self, tensor: int = 0) -> Partitioner:
    """Returns the sampler's mesh: `tensor` splits matrices, the rest splits rows.

    A decoding step is too short to gather parameters, whatever axes training splits
    them over. The devices and their order stay the same.

    Args:
      tensor: parts per matrix; 0 for this mesh's number.

    Raises:
      ValueError: `tensor` does not divide the number of devices.
    """
    rules: dict[str, tuple[str, ...]] = {}
    for letter, axes in self.rules:
      rules[letter] = ()
      if "tensor" in axes:
        rules[letter] = ("tensor",)
    rules |= {"B": ("data", "fsdp", "context"), "T": (), "R": (), "D": ()}
    mesh = self.mesh
    if tensor and tensor != mesh.shape["tensor"]:
      if mesh.size % tensor:
        raise ValueError(
          f"rollout.tensor={tensor} does not divide the {mesh.size} devices"
        )
      mesh = mesh_over(mesh.devices.reshape(-1, 1, 1, tensor), AXES)
    return Partitioner(mesh, self.rules).replacing(rules)

  def replicas(self) -> list[Partitioner]:
    """Returns one partitioner per model copy on this process, split by `tensor`.

    Copies decode side by side; none waits for another, in this process or others.

    Raises:
      ValueError: devices splitting a matrix span several processes.
    """
    if self.mesh.size == 1:
      return [self]
    # `tensor` is the last axis: adjacent devices hold one copy.
    ways = self.mesh.shape["tensor"]
    grid = self.mesh.devices
    if placement.num_split(grid, ways):
      fitting = ", ".join(map(str, placement.team_sizes(grid)))
      raise ValueError(
        f"matrices split {ways} ways lie on several processes, and rollouts need each "
        f"copy of the model within one: rollout.tensor (or mesh.tensor, where that is "
        f"0) can be {fitting}"
      )
    out = []
    for team in grid.reshape(-1, ways):
      if team[0].process_index == jax.process_index():
        out.append(
          Partitioner(mesh_over(team.reshape(1, 1, 1, ways), AXES), self.rules)
        )
    return out

  def over_vocabulary(self, V: int) -> Partitioner:
    """Returns the same mesh for logits: the parameters' axes split the vocabulary.

    Each device then computes logits for many devices' tokens, over its own vocabulary
    part: hidden states move, and neither the output matrix nor its gradient is ever
    whole (as in Megatron, arXiv 1909.08053, over all axes that split parameters).

    Args:
      V: vocabulary size; if the axes do not divide V, this mesh is returned.
    """
    axes = (*self.axes("D"), *self.axes("V"))
    if V % math.prod(self.mesh.shape[a] for a in axes):
      return self
    rules = {"V": axes, "D": (), "R": ()}
    for letter in "BT":
      rules[letter] = tuple(a for a in self.axes(letter) if a not in axes)
    return self.replacing(rules)

  def replacing(self, rules: Mapping[str, tuple[str, ...]]) -> Partitioner:
    """Returns the same mesh with some table lines replaced."""
    return Partitioner(self.mesh, tuple({**dict(self.rules), **rules}.items()))

  def check(self, sizes: Mapping[str, int], section: str = "") -> None:
    """Refuses sizes that this mesh does not divide, and contradictory rules.

    Args:
      sizes: axis sizes by letter: `ModelConfig.axes`, and others such as B for rows.
      section: config section with `rows` B and `length` T.

    Raises:
      ValueError: axes are indivisible, and the message lists them all; or two rules
        split one array over one mesh axis; or rows are split under linear attention.
    """
    self._check_rules()
    if "Z" in sizes and self.ways("T") > 1:
      over = " x ".join(f"mesh.{a}={self.mesh.shape[a]}" for a in self.axes("T"))
      raise ValueError(
        f"{over} splits the tokens of a row, and linear attention (model.delta) passes "
        "its state from each token to the next; take 1"
      )
    fields = {letter: f"model.{field}" for letter, field in _FIELDS.items()}
    if section:
      fields |= {"B": f"{section}.rows", "T": f"{section}.length"}
    faults = []
    for letter, size in sizes.items():
      cut = self.ways(letter)
      over = " x ".join(f"{a}={self.mesh.shape[a]}" for a in self.axes(letter))
      if letter == "T" and cut > 1:
        cut *= 2
        over += " in two pieces each"  # see `zigzag`
      if size % cut == 0:
        continue
      faults.append(f"{fields.get(letter, letter)}={size} over {over}")
    if faults:
      raise ValueError(
        f"the mesh does not divide {'; '.join(faults)}: choose other sizes in section "
        "mesh, or take the axis out of mesh.rules"
      )

  def _check_rules(self) -> None:
    """Refuses rules splitting two dimensions of an array over one mesh axis."""
    arrays = dict.fromkeys(_ACTIVATIONS, "activations")
    for name, letters in PARAMETERS.items():
      arrays[letters.replace(">", "")] = f"parameter {name!r}"
    # Many arrays have the same two dimensions: each pair is named once.
    faults: dict[Any, str] = {}
    for letters, name in arrays.items():
      for a, b in itertools.combinations(letters.replace(".", ""), 2):
        for axis in self.axes(a):
          if axis in self.axes(b):
            pair = (frozenset((a, b)), axis)
            faults.setdefault(pair, f"{a} and {b} over {axis} ({name})")
    if faults:
      raise ValueError(
        f"mesh.rules splits two dimensions of an array over one mesh axis: "
        f"{'; '.join(faults.values())}; take the axis out of one of each two rules"
      )


# JAX's default device, for callers without a mesh. Abstract: its import starts no
# device.
ONE_DEVICE = Partitioner(AbstractMesh((1,) * len(AXES), AXES))


def make_partitioner(
  config: MeshConfig,
  devices: list[jax.Device] | None = None,
  rollout_tensor: int = 0,
) -> Partitioner:
  """Builds a config's partitioner.

  Args:
    devices: None for all devices of all processes.
    rollout_tensor: devices decoding together; 0 for `config.tensor`.

  Raises:
    ValueError: the sizes do not multiply to the number of devices, there are fewer than
      requested, a process would have none, the slice's programs need all its devices,
      or some are reserved for RL's rollouts.
  """
  if config.rollout:
    raise ValueError(
      f"mesh.rollout={config.rollout} gives devices to the rollouts of RL; no other "
      "stage has two kinds of work for them: take 0"
    )
  return _over(config, _used(config, devices), rollout_tensor)


def make_partitioners(
  config: MeshConfig,
  devices: list[jax.Device] | None = None,
  rollout_tensor: int = 0,
) -> tuple[Partitioner, Partitioner]:
  """Builds the learner's partitioner, like `make_partitioner`, and its sampler's.

  Both have the same devices if `config.rollout` is 0. Otherwise they share none: each
  process's last devices roll out.

  Raises:
    ValueError: as for `make_partitioner`; or `config.rollout` leaves the learner no
      device, or is not a multiple of the devices decoding together in every process,
      or the slice's programs need all its devices.
  """
  devices = _used(config, devices)
  count = config.rollout
  if not count:
    both = _over(config, devices, rollout_tensor)
    return both, both.decoding(rollout_tensor)

  # --- Refuse indivisible numbers.
  processes: dict[int, list[jax.Device]] = {}
  for device in devices:
    processes.setdefault(device.process_index, []).append(device)
  if count >= len(processes) * min(map(len, processes.values())):
    raise ValueError(
      f"mesh.rollout={count} leaves the learner none of the {len(devices)} devices, or "
      "none of a process"
    )
  tensor = rollout_tensor or config.tensor
  if count % (len(processes) * tensor):
    of_processes = f" on each of {len(processes)} processes" * (len(processes) > 1)
    raise ValueError(
      f"mesh.rollout={count} must be a multiple of the {tensor} devices that decode "
      f"together (rollout.tensor; mesh.tensor where that is 0){of_processes}"
    )
  placement.check_leaving_out(f"mesh.rollout={count}", devices)
  own = count // len(processes)

  # --- Each process's first devices learn, and its last ones roll out.
  learning: list[jax.Device] = []
  grids = []
  for local in processes.values():
    learning += local[:-own]
    grids.append(placement.device_grid((own // tensor, 1, 1, tensor), local[-own:], 1))
  learner = _over(config, learning)
  rollouts = Partitioner(mesh_over(np.concatenate(grids), AXES))
  return learner, rollouts.replacing(config.rules).decoding()


def _used(config: MeshConfig, devices: list[jax.Device] | None) -> list[jax.Device]:
  """Returns the config's devices among `devices`; None for all processes' devices."""
  devices = jax.devices() if devices is None else devices
  if not config.devices:
    return devices
  if config.devices > len(devices):
    raise ValueError(f"mesh.devices={config.devices}; there are {len(devices)}")
  if config.devices < len(devices):
    placement.check_leaving_out(f"mesh.devices={config.devices}", devices)
  processes = {d.process_index for d in devices}
  devices = devices[: config.devices]
  if {d.process_index for d in devices} != processes:
    raise ValueError(
      f"mesh.devices={config.devices} leaves a process without any; 0 takes all"
    )
  return devices


def _over(
  config: MeshConfig, devices: list[jax.Device], rollout_tensor: int = 0
) -> Partitioner:
  """Builds a config's partitioner over all these devices; see `make_partitioner`."""
  # --- The size of each axis.
  sizes = [getattr(config, axis) for axis in AXES]
  if config.fsdp == -1:
    rest = config.data * config.context * config.tensor
    sizes[AXES.index("fsdp")] = max(1, len(devices) // rest)
  if math.prod(sizes) != len(devices):
    shape = " x ".join(f"{a}={n}" for a, n in zip(AXES, sizes, strict=True))
    beside = f" beside mesh.rollout={config.rollout}" if config.rollout else ""
    rest = config.data * config.context * config.tensor
    fitting = f"data x context x tensor must divide {len(devices)}"
    if len(devices) % rest == 0:
      fitting = f"mesh.fsdp={len(devices) // rest} would fit, and -1 always takes it"
    raise ValueError(
      f"mesh {shape} needs {math.prod(sizes)} devices; there are {len(devices)}"
      f"{beside}: {fitting}"
    )
  if rollout_tensor and len(devices) % rollout_tensor:
    raise ValueError(
      f"rollout.tensor={rollout_tensor} does not divide the {len(devices)} devices"
    )

  # --- The device grid, and the axis table with the config's lines.
  team = rollout_tensor or config.tensor
  grid = placement.device_grid(sizes, devices, team)
  return Partitioner(mesh_over(grid, AXES)).replacing(config.rules)


def count_devices(*partitioners: Partitioner) -> int:
  """Counts the distinct devices in all these meshes."""
  return len({device for p in partitioners for device in p.devices})


def name_of(path: tuple[Any, ...]) -> str:
  """Returns a tree path's last dict key; "" if none."""
  # An optimizer's state has other keys too, before and after a parameter's.
  for key in reversed(path):
    if isinstance(key, jax.tree_util.DictKey):
      return key.key
  return ""


def letters_of(path: tuple[Any, ...]) -> str:
  """Returns the parameter axes at a tree path, without a stacked layer axis."""
  return letters_of_name(name_of(path))


def letters_of_name(name: str) -> str:
  """Returns a parameter's axes by its name; "" for any other name.

  An adapter's `q_a` and `q_b` split their inputs and outputs as `q` does, and leave
  their rank whole.
  """
  if name in PARAMETERS:
    return PARAMETERS[name].replace(">", "")
  inputs, _, outputs = PARAMETERS.get(name[:-2], "").partition(">")
  if name.endswith("_a"):
    return inputs + "."
  if name.endswith("_b"):
    return "." + outputs
  return ""


def inputs_of(name: str) -> int:
  """Counts a parameter's leading input axes; 0 if it is not a matrix.

  An adapter's halves have one rank axis: `q_a`'s last, `q_b`'s first.
  """
  if name in PARAMETERS:
    return max(0, PARAMETERS[name].find(">"))
  if name[:-2] not in PARAMETERS:
    return 0
  return 1 if name.endswith("_b") else inputs_of(name[:-2])
