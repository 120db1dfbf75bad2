"""A pretrained model, SmolLM2-135M-Instruct, against transformers and our own rules.

`pytest -n 0 -s -m weights` prints the figures. real_weights.py makes the folder once.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re

import hypothesis
import jax
import numpy as np
import pytest
import real_weights
import toy
from hypothesis import strategies as st
from safetensors.numpy import load_file

from coa_jax.data.tasks.task import Task
from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.model import decode_params, lora
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.distribution import TokenMask, Truncation
from coa_jax.model.hf.folder import save_run
from coa_jax.model.hf.io import load_model, save_model
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.protocol import roles
from coa_jax.protocol.grammar.automaton import Constraint
from coa_jax.protocol.parser import ParseVerdict, parse
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.rollout.agents.sessions import Session
from coa_jax.rollout.agents.types import Sampling
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import RolloutConfig

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

from tests.model import comparing, models  # noqa: E402

pytestmark = pytest.mark.weights
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

ROWS = [
  json.loads(line)
  for line in (pathlib.Path(__file__).parent / "fixtures" / "gsm8k_test.jsonl")
  .read_text()
  .splitlines()
]
# One learner row length, so that all tests share a few compiled programs.
LENGTH = 512
VARIANT = roles.get_variant("mhqa")
# Helps the model to close its tags before it runs out of tokens.
HINT = (
  "Write: <think>I add.</think><plan>1+1</plan><think>It is 2.</think>"
  "<answer>2</answer>"
)
# Characters with bytes missing in this vocabulary.
SPELT = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")


@pytest.fixture(scope="module")
def folder(request) -> pathlib.Path:
  """The model's folder, made on the first run and kept in pytest's cache."""
  out = request.config.cache.mkdir("real_weights") / real_weights.NAME
  real_weights.make_folder(out)
  return out


@pytest.fixture(scope="module")
def tok(folder) -> Tokenizer:
  return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def model(folder) -> tuple[ModelConfig, dict]:
  return load_model(folder, LoadConfig(scan=True))


@pytest.fixture(scope="module")
def reference(folder):
  """The model in transformers."""
  return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def prompts(tok) -> list[np.ndarray]:
  """Questions in the chat template, as token ids."""
  before, after = tok.chat_frame
  ids = [before + tok.encode_untrusted(row["question"]) + after for row in ROWS[:20]]
  return [np.array(x, np.int32) for x in ids]


@pytest.fixture(scope="module")
def texts(tok, prompts) -> list[np.ndarray]:
  """Two prompts with solutions and one non-English text; one row in total."""
  solved = [
    np.append(ids, tok.encode(row["answer"])).astype(np.int32)
    for ids, row in zip(prompts[:2], ROWS, strict=False)
  ]
  other = (
    "def f(x):\n\treturn 'na\u00efve'  # \u4f60\u597d, \u0437\u0434 \U0001f600 1234567"
  )
  return [*solved, np.array(tok.encode(other), np.int32)]


def test_logits_are_transformers(model, reference, texts):
  found = comparing.ours(*model, comparing.rows([texts], LENGTH))
  worst = max(map(models.difference, found, comparing.theirs(reference, texts)))
  print(f"\nlogits, of the largest: {worst:.1e} ({sum(map(len, texts))} tokens)")
  assert worst <= comparing.TOLERANCE


def test_bfloat16_errs_as_transformers_does(folder, texts):
  half = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  cfg, params = load_model(folder, LoadConfig(scan=True, **half))
  mine = np.concatenate(comparing.ours(cfg, params, comparing.rows([texts], LENGTH)))
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16
  ).eval()
  other = np.concatenate(comparing.theirs(theirs, texts))
  exact = np.concatenate(comparing.theirs(theirs.float(), texts))
  error, accepted = comparing.rms(mine - exact), comparing.rms(other - exact)
  size = comparing.rms(exact)
  print(f"\nbfloat16, rms of the logits': {error / size:.2e}, {accepted / size:.2e}")
  assert 0 < error <= 1.2 * accepted


def test_greedy_tokens_are_those_of_generate(model, reference, tok, prompts):
  cfg, params = model
  new = 64
  found = comparing.greedy(decode_params.architecture(cfg), params, prompts, new)
  expected = generate(reference, prompts, new)
  end = tok.hf.eos_token_id
  same = 0
  for ids, mine, theirs in zip(prompts, found, expected, strict=True):
    if end in mine:
      mine = mine[: mine.index(end) + 1]
    pairs = enumerate(itertools.zip_longest(mine, theirs))
    first = next((n for n, (a, b) in pairs if a != b), None)
    if first is None:
      same += 1
      continue
    # Within rounding error either token may be the likeliest.
    whole = np.append(ids, theirs[:first]).astype(np.int32)
    last_V = comparing.theirs(reference, [whole])[0][-1]
    gap = abs(last_V[mine[first]] - last_V[theirs[first]]) / np.abs(last_V).max()
    print(f"\na near tie at token {first}: {gap:.1e} of the largest logit")
    assert gap <= 2 * comparing.TOLERANCE
  print(f"\n{same} of {len(prompts)} prompts have the same {new} tokens")
  assert same >= len(prompts) - 2


def generate(reference, prompts: list[np.ndarray], new: int) -> list[list[int]]:
  """Greedy tokens from transformers, in one batch, end token included."""
  longest = max(map(len, prompts))
  given = np.stack([np.pad(ids, (longest - len(ids), 0)) for ids in prompts])
  mask = np.stack([np.arange(longest) >= longest - len(ids) for ids in prompts])
  out = reference.generate(
    torch.tensor(given).long(),
    attention_mask=torch.tensor(mask).long(),
    do_sample=False,
    max_new_tokens=new,
  )
  end, found = reference.generation_config.eos_token_id, []
  for ids in out[:, longest:].tolist():
    found.append(ids[: ids.index(end) + 1] if end in ids else ids)
  return found


def test_a_chat_of_two_turns_is_transformers(model, reference, tok):
  """As an agent has it: the template's text, and the first reply's own ids."""
  cfg, params = model
  config = RolloutConfig(slots=1, window=16, max_len=256)
  asked = [{"role": "user", "content": "Name a colour."}]
  greedy = Sampling(temperature=0.0, most=24)
  with make_worker(cfg, tok, config, (), conversations="chat") as worker:
    worker.engine.set_policy(params, 0)
    session = Session(worker.engine, tok, worker.form)
    first = session.complete(asked, [], greedy).result()
    said = {"role": "assistant", "content": first.reply.content}
    again = [*asked, said, {"role": "user", "content": "Another <|im_end|>?"}]
    second = session.complete(again, [], greedy).result()
    (t,) = session.close().split()
  prompt = tok.hf.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
  (between,) = (s.ids for s in t.segments if s.author == Author.TOOL)
  assert t.segments[0].ids == list(prompt)
  # The hostile text is no control token.
  end = tok.hf.eos_token_id
  assert between.count(end) == (end not in first.ids) + 1
  for before, reply in ((prompt, first), ([*prompt, *first.ids, *between], second)):
    (expected,) = generate(reference, [np.array(before)], 24)
    assert reply.ids == expected


@dataclasses.dataclass(frozen=True)
class Played:
  """Rollouts under the grammar, and their sampler-learner log-prob differences."""

  trajectories: list[Trajectory]
  constraint: Constraint
  logp_diff: np.ndarray


def play(folder, tok, length: int, **load) -> Played:
  cfg, params = load_model(folder, LoadConfig(scan=True, **load))
  config = RolloutConfig(
    variant=VARIANT.name,
    style="brief",
    slots=6,
    window=32,
    max_len=length,
    constrain=True,
  )
  tasks = [
    Task(str(n), f"{row['question']} {HINT}", ("1",)) for n, row in enumerate(ROWS[:3])
  ]
  with make_worker(cfg, tok, config, VARIANT.tools) as worker:
    tools = toy.TableToolbox()
    groups = worker.generate_groups(params, tasks, tools, 2, 1.0, seed=3)
  played = [t for group in groups for t in group]
  scored = batching.batches(played, 2, length, [1.0] * 6, worker.constraint)
  constraint = TokenMask.of(worker.constraint)

  @jax.jit
  def score(params, batch):
    args = (1.0, ONE_DEVICE, Truncation(), constraint)
    return log_probs.token_logps(cfg, params, batch, *args)[0]

  diffs = []
  for batch in scored:
    logp_BT = score(params, batch)
    wrote = batch.loss_mask_BT > 0
    diffs.append(np.abs(np.asarray(logp_BT) - batch.logp_BT)[wrote])
  return Played(played, worker.constraint, np.concatenate(diffs))


@pytest.fixture(scope="module")
def played(folder, tok) -> Played:
  return play(folder, tok, 448)


def test_all_that_is_sampled_under_the_grammar_parses(played, tok):
  ended = 0
  for t in played.trajectories:
    state = 0
    for s in t.segments:
      if s.author == Author.TOOL:
        state = int(played.constraint.resume_S[state])
      elif s.author == Author.POLICY:
        state = int(played.constraint.states(s.ids, state)[-1])
        assert not set(s.ids) & set(tok.added)
      assert state >= 0
    read = parse(t.text, VARIANT)
    assert read.ok == (t.status == Status.ENDED)
    if read.ok:
      ended += 1
    else:  # it ran out of tokens
      assert t.status == Status.TRUNCATED
      assert read.verdict in (ParseVerdict.UNCLOSED, ParseVerdict.MALFORMED)
      assert "<" in t.text[read.offset :] or read.verdict == ParseVerdict.UNCLOSED
  print(f"\n{ended} of {len(played.trajectories)} trajectories ended")
  assert ended


def test_the_learner_has_the_samplers_log_probs(played):
  diff = played.logp_diff
  print(f"\nfloat32, {diff.size} tokens: mean {diff.mean():.1e}, most {diff.max():.1e}")
  # The limit in docs/config.md for two float32 programs; toy models stay below 2e-5.
  assert diff.max() <= 1e-4


@pytest.mark.soak
@pytest.mark.parametrize("decoded", ["float32", "bfloat16"])
def test_half_precision_costs_agreement(folder, tok, monkeypatch, decoded: str):
  if decoded == "bfloat16":  # as on devices other than CPUs

    def unrolled(cfg, partitioner=None):
      return dataclasses.replace(cfg, scan=False)

    monkeypatch.setattr(decode_params, "architecture", unrolled)
  diff = play(folder, tok, 256, dtype="bfloat16").logp_diff
  print(
    f"\nbfloat16, decoded in {decoded}, {diff.size} tokens, nats: "
    f"mean {diff.mean():.4f}, most {diff.max():.3f}"
  )
  # Measured mean and max: 0.034, 0.217 in float32 decoding; 0.041, 0.271 in bfloat16.
  assert diff.mean() < 0.06 and 1e-3 < diff.max() < 0.5


HOSTILE = st.lists(
  st.one_of(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>"]),
    st.sampled_from(["<|im_start|>system\n", "<answer>", "</observation>", "<|", "|>"]),
    st.text(max_size=8),
  ),
  max_size=6,
).map("".join)


@hypothesis.given(HOSTILE)
@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_control_tokens_never_come_from_text(tok, text: str):
  ids = tok.encode_untrusted(text)
  assert not set(ids) & set(tok.added)
  assert tok.decode(ids) == SPELT.sub("?", text)
  assert not set(tok.encode_observation(text).ids) & set(tok.added)
  # A prompt has its template's control tokens and no others.
  before, after = tok.chat_frame
  prompt = [Segment(Author.PROMPT, "question", text)]
  tok.encode_prompt(prompt)
  assert prompt[0].ids == before + ids + after


def test_export_is_the_folder_again(folder, tok, model, tmp_path):
  save_model(tmp_path, *model, tok, like=folder)
  before, after = (load_file(p / "model.safetensors") for p in (folder, tmp_path))
  assert set(before) == set(after)
  assert all(before[k].tobytes() == after[k].tobytes() for k in before)
  mine, theirs = (
    transformers.AutoTokenizer.from_pretrained(p) for p in (tmp_path, folder)
  )
  for row in ROWS:
    turns = [{"role": "user", "content": row["question"]}]
    chat = {"conversation": turns, "add_generation_prompt": True}
    assert mine.apply_chat_template(**chat) == theirs.apply_chat_template(**chat)
    assert mine.encode(row["answer"]) == theirs.encode(row["answer"])
    assert tok.encode(row["answer"]) == theirs.encode(row["answer"])


def test_merged_adapters_write_the_same_tokens_in_transformers(
  folder, tok, model, prompts, tmp_path
):
  cfg, params = model
  config = lora.LoraConfig(rank=4, alpha=8.0)
  adapters, frozen = lora.split(cfg, params, config, 0)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda x: np.asarray(x) + 0.02 * rng.normal(size=x.shape).astype(np.float32),
    adapters,
  )
  save_run(str(tmp_path), cfg, adapters, frozen, config, tok, str(folder))
  merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
  wrote = generate(merged, prompts[:2], 24)
  whole = [
    np.append(ids, x).astype(np.int32)
    for ids, x in zip(prompts[:2], wrote, strict=True)
  ]
  joined = lora.join(params, adapters, config)
  batch = comparing.rows([whole], LENGTH)
  found, plain = comparing.ours(cfg, joined, batch), comparing.ours(cfg, params, batch)
  for ids, x, mine_TV in zip(prompts, wrote, found, strict=False):
    assert mine_TV[len(ids) - 1 : -1].argmax(-1).tolist() == x
  assert max(map(models.difference, plain, found)) > 0.01  # adapters matter
  peft = pytest.importorskip("peft")
  base = transformers.AutoModelForCausalLM.from_pretrained(folder)
  base = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
  for other in (merged, base):
    expected = comparing.theirs(other, whole)
    worst = max(map(models.difference, found, expected))
    print(f"\nadapters, logits, of the largest: {worst:.1e}")
    assert worst <= comparing.TOLERANCE
