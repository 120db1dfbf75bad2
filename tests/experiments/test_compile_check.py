"""Ahead-of-time compilation for TPUs and GPUs, and figures of compiled programs."""

from __future__ import annotations

import collections
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked import ROOT, finish
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from coa_jax.cli.deploy.slices import read_slice
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf.io import save_model
from coa_jax.model.kernels import splash
from coa_jax.model.sharding import MeshConfig, make_partitioner
from coa_jax.model.transformer import init_params
from coa_jax.plan.rl import RLConfig
from coa_jax.runtime.config import read_config
from configs import rl_qwen
from experiments.bench import compile_check, gpus, hlo_text, hlo_work, run_programs

# A compiler's output in small: a loop with 24 trips, two all-gathers, an asynchronous
# one as a chain of fusions, and an unrolled loop inside; an outer loop whose trip count
# only the run knows; a gradient reduced, then sliced. A kernel's text spans lines.
PROGRAM = (ROOT / "tests" / "fixtures" / "hlo_program.txt").read_text()
# A window: a loop on a cache, transposed before and after, sliced and updated in place
# inside; a product with a matrix already on the chip; a kernel, a sort and an inner
# loop. Only the run knows the trip counts of the two loops.
WINDOW = (ROOT / "tests" / "fixtures" / "hlo_work.txt").read_text()

needs_compiler = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the compiler for TPUs is not installed: pip install 'jax[tpu]'",
)


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch) -> None:
  """Lets libtpu describe slices in any process, without asking the cloud."""
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def test_collectives_count_as_often_as_their_loops_run():
  traffic = hlo_text.collectives(PROGRAM, devices=8, turns=(4,))
  table = sorted((c.kind, c.count, c.size, c.ways, c.overlapped) for c in traffic)
  assert table == [
    ("all-gather", 96, 512, 2, False),  # two with one channel count as two
    ("all-gather", 96, 512, 2, False),
    ("all-gather", 96, 1792, 4, True),  # a chain of fusions counts once
    ("all-reduce", 1, 32, 4, False),
    # Up to 8 in steps of 2: 4 trips. Its end directly follows its start.
    ("collective-permute", 4 * 24 * 4, 64, 8, False),
    ("reduce-scatter", 4, 2048, 8, False),
  ]
  assert next(c for c in traffic if c.kind == "all-reduce").origin == "jit(step)/norm"


def test_a_collective_overlaps_what_stands_before_its_end():
  done = "  %y = bf16[4,8]{1,0} collective-permute-done(%cp)\n"
  work = "  %z = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%nothing\n"
  assert done in PROGRAM
  for text, overlapped in (
    (PROGRAM.replace(done, work + done), True),
    (PROGRAM.replace(done, done + work), False),
  ):
    text = text.replace(
      "ENTRY", "%nothing () -> s32[] {\n  ROOT %n = s32[] x()\n}\n\nENTRY"
    )
    traffic = hlo_text.collectives(text, devices=8, turns=(4,))
    (permute,) = [c for c in traffic if c.kind == "collective-permute"]
    assert permute.overlapped == overlapped


def test_operations_count_as_often_as_their_loops_run():
  found = hlo_work.operations(WINDOW, turns=(10, 3))
  product, block = (x for x in found if x.cycles)
  assert (product.product, product.count, product.cycles) == (True, 10, 10 * 50)
  assert (block.product, block.count, block.cycles) == (False, 30, 30 * 1)
  done = hlo_work.work(WINDOW, turns=(10, 3), units=10)
  found = hlo_work.operations(WINDOW, turns=(10, 3), units=10)
  product, block = (x for x in found if x.cycles)
  assert (product.cycles, block.cycles) == (done.product_cycles, done.other_cycles)
  assert sum(x.moved for x in found) == pytest.approx(done.moved - done.kernels_moved)


def test_a_window_is_measured_by_its_moves_copies_and_sorts():
  """Computed by hand: a cache has 1024 bytes, a row of it 128."""
  done = hlo_work.work(WINDOW, turns=(10, 3), large=512, pool_read=300)
  assert (done.copies, done.copied) == (2, 2 * 1024)  # in and out; a row is too small
  assert (done.sorts, done.sorted) == (10, 10 * 512)
  # A kernel moves a row in and out, and `pool_read` bytes of the cache.
  assert (done.kernels, done.kernels_moved) == (10, 10 * (128 + 128 + 300))
  assert (done.product_cycles, done.other_cycles) == (10 * 50, 10 * 3 * 1)
  # The operand of `%small` has no type, so only its write counts. Half of the cache
  # is read onto the chip.
  around = 2 * 1024 + 128 + 512 + 2 * 1024
  cut = 128 + 128 + 4  # the row, read and written; its index
  product = 128 + 128  # the matrix is not in HBM
  put = 128 + 128 + 4
  sort = 2 * 512
  moved = around + 10 * (cut + product + put + sort) + 10 * 3 * 64
  assert done.moved == moved + done.kernels_moved
  # Per token, in a window of 10.
  token = hlo_work.work(WINDOW, turns=(10, 3), large=512, units=10, pool_read=300)
  assert token.moved == pytest.approx(done.moved / 10)
  assert (token.copies, token.kernels) == (0.2, 1)


def test_the_verdict_says_by_how_much_and_what_to_change():
  over = {"own": 12e9, "beside": 8e9, "hbm": 16e9, "fits": False}
  line = compile_check.verdict("window 64 x 8 of 256", over)
  assert "DOES NOT FIT" in line and "4.0 over" in line and "rollout.slots" in line
  assert "algo.batch.rows" in compile_check.verdict("learn", over)
  error = {"error": "Ran out of memory: 20G of 15.75G"}
  line = compile_check.verdict("prefill 4 x 16 of 256", error)
  assert "DOES NOT FIT" in line and "rollout.slots" in line
  assert "DOES NOT COMPILE" in compile_check.verdict("convert", {"error": "no such op"})


ROWS = "--config.algo.batch.rows=16"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
  "words, says",
  [
    # This slice's hosts have 2 x 2 chips: a replica of 8 spans two hosts.
    (("--slice=v6e:4x4", "--config.rollout.tensor=8", ROWS), "several processes"),
    (("--slice=v6e:4x4", "--config.algo.batch.rows=24"), "algo.batch.rows=24 over"),
    (("--slice=v9:4x4",), "v5e, v5p, v6e, tpu7x"),
    (("--slice=v6e:4x5",), "--slice=v6e:4x5: there is no such slice"),
    (("--slice=v6e:4x4", "--slices=2"), "mesh.data=1 must be a multiple of the 2 slic"),
    (("--slice=tpu7x:2x2x2", "--config.rollout.tensor=16", ROWS), "can be 1, 2, 4, 8"),
    (("--slice=v6e:4x4", "--model=qwen9"), "no variant 'qwen9'"),
    (("--slice=h100:12",), "give up to 8 of one host, or whole hosts"),
    (("--slice=h100:8", "--slices=2"), "--slices is of TPUs"),
  ],
)
def test_a_run_that_the_journey_refuses_is_refused(words, says):
  base = ("--config=configs/rl_qwen.py", "--model=qwen3-8b", "--list")
  refused = finish("bench.compile_check", *base, *words, reason=says)
  assert not refused.stdout  # nothing was listed


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
  "name", ["v5e:4x4", pytest.param("v6e:4x4", marks=pytest.mark.soak)]
)
def test_a_first_hosts_chips_add_up_among_themselves(name):
  """Libtpu 0.0.42 compiles it with the flags set by `experiments.pod`."""
  devices = run_programs.devices_of(read_slice(name))
  host = np.array([device for device in devices if device.process_index == 0])
  assert len(host) == 4 < len(devices)
  split = NamedSharding(Mesh(host, ("tensor",)), PartitionSpec("tensor"))
  x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=split)
  compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
  assert "all-reduce" in compiled.as_text()


def sent_for_a_matrix(slice_name: str, mesh: MeshConfig) -> dict[str, float]:
  """A chip's traffic, by collective, for a product with [1024, 4096] and its gradient.

  Sent bytes are in sizes of the matrix. A replica has four chips, as in pods' recipes.
  """
  devices = run_programs.devices_of(read_slice(slice_name))
  partitioner = make_partitioner(mesh, devices, rollout_tensor=4)

  def loss(w, x):
    return jnp.square(x @ partitioner.gathered(w, "gate")).sum()

  def argument(letters, *shape):
    sharding = partitioner.sharding(letters)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

  arguments = (argument("DF", 1024, 4096), argument("BT.", 64, 512, 1024))
  step = jax.jit(jax.grad(loss), out_shardings=arguments[0].sharding)
  text = step.lower(*arguments).compile().as_text()
  sent = collections.Counter()
  for c in hlo_text.collectives(text, len(devices), (1,)):
    sent[c.kind] += c.sent / (2 * 1024 * 4096)
  return sent


@needs_compiler
@pytest.mark.parametrize(
  "context",
  [pytest.param(1, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.slow)],
)
def test_a_cube_of_chips_gathers_matrices_and_scatters_their_gradients(context: int):
  """Scattering over all chips at once, libtpu 0.0.42 all-reduces whole matrices."""
  sent = sent_for_a_matrix("v5p:4x4x4", MeshConfig(context=context))
  # The matrix once in each direction, plus padding of rows to a tile.
  assert 0.5 < sent["all-gather"] < 1.1
  assert 0 < sent["reduce-scatter"] < 1.2
  assert sent["all-reduce"] < 0.1


@pytest.mark.soak
@needs_compiler
def test_hosts_of_v5e_share_copies_of_the_state():
  """It does not compile if the first host's chips are in another order."""
  sent = sent_for_a_matrix("v5e:4x8", MeshConfig(data=2))
  assert sent["reduce-scatter"] > 0.5


@pytest.mark.slow
@needs_compiler
def test_attention_over_heads_of_256_goes_back_on_a_tpu():
  """Qwen3.5 has these heads; with heads of 128 the kernel's blocks may be larger."""
  (device, *_) = run_programs.devices_of(read_slice("v5e:2x2"))
  on_chip = SingleDeviceSharding(device)

  def argument(*shape: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on_chip)

  def total(q, k, v, segment):
    out = splash.attend_segments(q, k, v, segment)
    return out.astype(jnp.float32).sum()

  step = jax.jit(jax.grad(total, (0, 1, 2)))
  q, kv = argument(1, 32_768, 16, 256), argument(1, 32_768, 4, 256)
  compiled = step.lower(q, kv, kv, argument(1, 32_768, dtype=jnp.int32)).compile()
  assert "splash_mqa_dkv" in compiled.as_text()


@pytest.mark.slow
@needs_compiler
def test_the_smallest_case_compiles_and_fits(tmp_path):
  out = tmp_path / "out.json"
  words = next(iter(compile_check.CASES.values()))
  chosen = "--cases=learn|window|prefill 16 x 512"
  finish("bench.compile_check", *words, "--quick", chosen, f"--out={out}")
  table = json.loads(out.read_text())["table"]
  assert len(table) == 3 and all(row["fits"] for row in table.values())
  (learn,) = [row for name, row in table.items() if name.endswith("learn")]
  assert learn["floor"] < learn["estimate"]
  (window,) = [row for name, row in table.items() if "window" in name]
  (prefill,) = [row for name, row in table.items() if "prefill" in name]
  # Kernels read the pages; no array as large as a layer's keys is copied.
  for row in (window, prefill):
    assert row["kernels"] and not row["copies"]


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="the compiler for GPUs is not installed: pip install 'jax[cuda13]'",
)
@pytest.mark.parametrize(("count", "max_len"), [(1, 1024), (2, 32768)])
def test_on_gpus_pages_are_read_by_kernels_and_not_copied(count, max_len, tmp_path):
  out = tmp_path / "out.json"
  words = ["--config=configs/rl_qwen.py", "--model=qwen2.5-7b", f"--slice=h100:{count}"]
  words += [f"--config.rollout.max_len={max_len}", "--config.algo.batch.length=32768"]
  cases = "--cases=prefill 1 x 512|prefill 8 x 512|window"
  finish("bench.compile_check", *words, "--quick", cases, f"--out={out}")
  table = json.loads(out.read_text())["table"]
  assert len(table) == 3 and all(row["fits"] for row in table.values())
  for row in table.values():
    assert not row["copies"] and row["temporaries"] < 0.5e9
    assert row["kernels"]


def test_gpus_are_read_by_kind_and_number():
  assert gpus.read_gpus("v5p:2x2x4") is None and gpus.read_gpus("h100") is None
  assert gpus.read_gpus("h100:4") == ("h100", 4)
  assert gpus.read_gpus("h200:16") == ("h200", 16)
  with pytest.raises(ValueError, match="h100:12: give up to 8 of one host, or whole"):
    gpus.read_gpus("h100:12")


def test_traffic_between_slices_is_told_from_the_rest():
  send = (
    "  %send.{n} = ({shape}{{1,0:T(8,128)}}, u32[], token[]) send(%x, %t), "
    "channel_id=9{n}, is_host_transfer=true, frontend_attributes={{"
    '_xla_host_transfer_rendezvous="{name}",_xla_megascale_target="{slices}x{{0:3}}",'
    '_xla_megascale_transfer_type="{kind}"}}\n'
  )
  lines = (
    send.format(n=1, shape="f32[8,4]", name="a", slices="{1,2}", kind="ALL_REDUCE"),
    send.format(n=2, shape="bf16[8,4]", name="b", slices="{1:3}", kind="ALL_GATHER"),
    send.format(n=3, shape="bf16[8,4]", name="c", slices="{}", kind="ONE_TO_ONE"),
    # A transfer to the host for another reason.
    "  %send.4 = (f32[8]{0}, u32[], token[]) send(%y, %t), is_host_transfer=true\n",
  )
  start = PROGRAM.index("\n", PROGRAM.index("ENTRY")) + 1
  text = PROGRAM[:start] + "".join(lines) + PROGRAM[start:]
  before = hlo_text.collectives(PROGRAM, devices=8, turns=(4,))
  after = hlo_text.collectives(text, devices=8, turns=(4,))
  assert [c for c in after if not c.between_slices] == before
  table = sorted((c.kind, c.size, c.ways, c.sent) for c in after if c.between_slices)
  assert table == [
    ("all-gather", 3 * 64, 3, 2 * 64),
    ("all-reduce", 128, 2, 128),
    ("collective-permute", 64, 0, 64),
  ]


def test_a_collective_that_another_core_does_is_one():
  called = (
    "%apart (p: bf16[4,8]) -> bf16[4,64] {\n"
    "  ROOT %ag.9 = bf16[4,64]{1,0} all-gather(%p), channel_id=99, "
    "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}\n}\n\n"
  )
  start = (
    "  %ag.9.start = ((bf16[4,8]{1,0}), bf16[4,64]{1,0}) call-start(%x), "
    'async_execution_thread="sparsecore", to_apply=%apart, metadata={op_name="x"}\n'
  )
  work = "  %z = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%nothing\n"
  done = "  %ag.9.done = bf16[4,64]{1,0} call-done(%ag.9.start)\n"
  nothing = "%nothing () -> s32[] {\n  ROOT %n = s32[] x()\n}\n\n"
  entry = PROGRAM.index("ENTRY")
  body = PROGRAM.index("\n", entry) + 1
  for lines, overlapped in ((start + done + work, False), (start + work + done, True)):
    head = PROGRAM[:entry] + called + nothing + PROGRAM[entry:body]
    traffic = hlo_text.collectives(head + lines + PROGRAM[body:], 8, (4,))
    (found,) = [c for c in traffic if c.size == 512 and c.ways == 8]
    assert (found.kind, found.count, found.overlapped) == ("all-gather", 1, overlapped)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
  ("name", "slices"),
  [("v5e:4x4", 2), pytest.param("tpu7x:2x2x2", 3, marks=pytest.mark.soak)],
)
def test_between_slices_goes_the_gradient_and_no_parameter(name, slices, tmp_path):
  """Gathering decode parameters sends nothing between slices."""
  # --- A run with a model whose kinds of parameters differ in size.
  model = ModelConfig(
    vocab_size=1024, width=256, layers=2, heads=4, kv_heads=2, head_dim=64, ff=768
  )
  save_model(tmp_path, model, init_params(model, 0))
  devices = run_programs.devices_of(read_slice(name), slices)
  config = rl_qwen.get_config()
  config.init = str(tmp_path)
  config.model.scan = True
  config.model.attention = "xla"
  config.mesh = dict(data=slices, tensor=2)
  config.rollout.tensor = 2
  config.rollout.max_len = 512
  config.algo.batch = dict(rows=len(devices), length=512)
  run = run_programs.make_run(read_config(config, RLConfig), devices, hbm=16e9)

  # --- The mesh: every copy of the state is within a slice.
  for copy in run.learner.mesh.devices:
    assert len({device.slice_index for device in copy.flat}) == 1

  # --- Traffic: each device sums the gradients of its part of the parameters.
  between = {}
  for program in run_programs.programs(run, 128):
    if program.name in ("learn", "gather", "gather a layer"):
      text = program.lower().compile().as_text()
      traffic = hlo_text.collectives(text, program.devices, (1,))
      assert any(not c.between_slices for c in traffic)
      between[program.name] = [c for c in traffic if c.between_slices]
  assert not between["gather"] and not between["gather a layer"]
  sums = [c for c in between["learn"] if c.kind == "all-reduce"]
  others = [c for c in between["learn"] if c.kind != "all-reduce"]
  assert sums and all(c.ways == slices for c in sums)
  gradient = run_programs.device_bytes(run.state.params) / 2  # in bfloat16
  # Small arrays are padded. XLA may move the embedding's gradient to another device.
  assert 0.9 * gradient < sum(c.size for c in sums) < 1.6 * gradient
  embed = 2 * model.vocab_size * model.width / (len(devices) / slices)
  assert sum(c.size for c in others) <= embed
