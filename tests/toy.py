"""Toy parts for tests: tokenizers, a two-layer model, scripts, table-driven tools.

Two ways to get a policy that calls tools: `actor` learns SCRIPTS in seconds; `drive`
needs no model: it feeds an episode scripted text, token by token, and stops it as the
automaton would stop a sampler.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers

from coa_jax.data.tasks.task import Task
from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs as losses
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, init_state
from coa_jax.model import transformer
from coa_jax.model.config import ModelConfig, RunOptions
from coa_jax.model.distribution import NO_TRUNCATION, Truncation
from coa_jax.model.hf.io import save_model
from coa_jax.protocol import prompts, roles, tokenizer_training, tokens, tool_bodies
from coa_jax.protocol.grammar.automaton import compile_stops
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Segment, ToolCall, Trajectory
from coa_jax.rewards.grader import Grader
from coa_jax.rollout.episode import CoAEpisode, EpisodeConfig
from coa_jax.rollout.types import Attempt, Engine, Episode
from coa_jax.tools.types import CallFuture, CallRequest, Tools

TOOLS = ("wiki_search", "code")
VARIANT = roles.get_variant("unified").with_tools(TOOLS)
MODEL = ModelConfig(
  vocab_size=384, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ff=64
)
# For tests independent of the model's depth: half the compile time.
ONE_LAYER = dataclasses.replace(MODEL, layers=1)
# Fits the longest script; a training row holds one or two scripts.
MAX_LEN = 128

GRADER = Grader()  # as in `RolloutWorker`

_THINK = roles.wrap(roles.THINK, "work it out")


def code(program: str) -> str:
  """A turn that runs a program."""
  return _THINK + roles.wrap("code", tool_bodies.render_code(program))


def search(query: str) -> str:
  """A turn that searches."""
  return _THINK + roles.wrap("wiki_search", query)


def end(answer: str) -> str:
  """The last turn, with the answer."""
  return (
    roles.wrap(roles.SUGGESTED_ANSWER, answer)
    + roles.wrap(roles.DOUBLE_CHECK, "4")
    + roles.wrap(roles.ANSWER, answer)
  )


# Question -> the policy's turns, interleaved with tool results.
SCRIPTS: dict[str, tuple[str, ...]] = {
  "2 + 3": (code("print(2+3)"), "5", end("5")),
  "4 * 4 + 1": (code("print(4*4)"), "16", code("print(16+1)"), "17", end("17")),
  "capital of Ur": (search("Ur"), "Ur: its capital is Uruk.", end("Uruk")),
  "mixed": (search("zz"), "no result", code("print(7)"), "7", end("7")),
}
TASKS = [Task(q, q, (s[-2].split()[-1].strip("."),)) for q, s in SCRIPTS.items()]
# Tool results for the calls in SCRIPTS.
_REPLIES = {
  tool_bodies.render_code("print(2+3)"): "5",
  tool_bodies.render_code("print(4*4)"): "16",
  tool_bodies.render_code("print(16+1)"): "17",
  tool_bodies.render_code("print(7)"): "7",
  "Ur": "Ur: its capital is Uruk.",
}


@functools.cache
def tokenizer() -> Tokenizer:
  """Every tag is one token; a few merges from the scripts."""
  texts = [q for q in SCRIPTS] + [t for s in SCRIPTS.values() for t in s]
  return tokenizer_training.train_tokenizer(texts * 4, MODEL.vocab_size)


# Merges of the stock-like tokenizer: `></` and `><` cross tag borders.
_MERGES = (
  *(("<", "/"), (">", "<"), (">", "</"), ("e", ">"), ("e", "><"), ("o", "d")),
  *(("c", "od"), ("a", "n"), ("s", "w"), ("e", "r"), ("sw", "er"), ("an", "swer")),
  *(("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("x", "</"), ("a", "t")),
)


@functools.cache
def stock_tokenizer() -> Tokenizer:
  """Tags are ordinary text, as in Qwen's; `><`, `></` and `e><` are single tokens."""
  split = tokenizers.pre_tokenizers
  pieces = [*sorted(split.ByteLevel.alphabet()), *(a + b for a, b in _MERGES)]
  vocab = {piece: i for i, piece in enumerate(pieces)}
  model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, list(_MERGES)))
  # Without the regex, merges cross word borders too.
  model.pre_tokenizer = split.ByteLevel(add_prefix_space=False, use_regex=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  model.add_special_tokens([tokens.PAD, tokens.IM_START, tokens.IM_END])
  # Like Qwen's vocabulary: an added token not marked special.
  model.add_tokens([tokenizers.AddedToken("<tool_call>", special=False)])
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=model,
    pad_token=tokens.PAD,
    eos_token=tokens.IM_END,
    chat_template=tokenizer().hf.chat_template,
  )
  return Tokenizer(hf)


def written(question: str, script: Sequence[str], tok: Tokenizer) -> Trajectory:
  """A trajectory with ids: policy text interleaved with tool results."""
  segments = prompts.prompt_segments(VARIANT, question, "brief")
  for turn, text in enumerate(script):
    if turn % 2:
      text = roles.wrap(roles.OBSERVATION, roles.escape(text))
      segments.append(Segment(Author.TOOL, roles.OBSERVATION, text))
    else:
      segments.append(Segment(Author.POLICY, "", text))
  out = Trajectory(question, segments)
  tok.encode_trajectories([out])
  return out


def trajectories() -> list[Trajectory]:
  """SCRIPTS as trajectories with ids."""
  return [written(q, script, tokenizer()) for q, script in SCRIPTS.items()]


@functools.cache
def params(seed: int = 0, **changes):
  """Fresh parameters of MODEL with these changed fields."""
  return transformer.init_params(dataclasses.replace(MODEL, **changes), seed)


def use_float64() -> dict[str, str]:
  """Makes the library compute in float64 instead of float32; needs its own process.

  A reordered sum then differs by about 1e-16; a larger difference is a bug.

  Returns:
    The config fields of such a model.
  """
  jax.config.update("jax_enable_x64", True)
  jnp.float32 = jnp.float64
  # Config checks do not accept this dtype.
  RunOptions.__post_init__ = lambda self: None
  return {"dtype": "float64", "param_dtype": "float64"}


def sft_loss(cfg: ModelConfig):
  """Summed negative log-likelihood of policy tokens, for `Learner`."""

  def loss(p, frozen, batch):
    logp_BT, *_ = losses.token_logps(cfg, p, batch)
    return losses.nll(logp_BT, batch.loss_mask_BT), {}

  return loss


@dataclasses.dataclass(frozen=True)
class Actor:
  """A trained policy, and its loss (nats per token) at every training step."""

  params: dict
  losses: tuple[float, ...]


@functools.cache
def actor(steps: int = 200) -> Actor:
  """MODEL trained on SCRIPTS with the learner."""
  return train(trajectories(), steps)


def train(
  examples: Sequence[Trajectory], steps: int, model: ModelConfig = MODEL
) -> Actor:
  """Trains a model on all examples in every step."""
  optimizer = make_optimizer(OptimConfig(lr=1e-2, warmup=10, final=0.05), steps)
  learner = Learner(sft_loss(model), optimizer)
  state = init_state(transformer.init_params(model, 0), optimizer)
  (batch,) = batching.batches(examples, len(SCRIPTS), MAX_LEN)
  curve = []
  for _ in range(steps):
    state, values = learner.step(state, [batch], float(batch.loss_mask_BT.sum()))
    curve.append(float(values["loss"]))
  return Actor(state.params, tuple(curve))


def save_policy(path: str, params: dict, model: ModelConfig = MODEL) -> None:
  """Writes a model folder: the model with these parameters, and the tokenizer."""
  save_model(path, model, params)
  tokenizer().save(path)


class TableToolbox(Tools):
  """Answers from a table after a delay; records its calls."""

  def __init__(
    self,
    reply: Callable[[str, str], str | ToolCall] | None = None,
    latency: Callable[[], float] = lambda: 0.0,
  ):
    """Takes results from `reply(name, arguments)` and delays from `latency()`."""
    self.reply = reply or (lambda _, body: _REPLIES.get(body, "no result"))
    self.latency = latency
    self.calls: list[tuple[str, str]] = []
    self.seconds: list[float] = []  # each call's limit
    self._pool = concurrent.futures.ThreadPoolExecutor(8)

  def environment(self) -> None:
    return None

  def code_session(self) -> None:
    """Calls share nothing."""

  def start(self, request: CallRequest) -> CallFuture:
    """Answers after the delay."""
    self.calls.append((request.name, request.arguments))
    self.seconds.append(request.seconds)
    return self._pool.submit(
      self._call, request.name, request.arguments, self.latency()
    )

  def _call(self, name: str, arguments: str, seconds: float) -> ToolCall:
    time.sleep(seconds)
    result = self.reply(name, arguments)
    if isinstance(result, ToolCall):
      return result
    return ToolCall(name, arguments, result)


def shuffled_latency(seed: int) -> Callable[[], float]:
  """Random delays between 0 and 30 ms."""
  rng = random.Random(seed)
  return lambda: rng.random() * 0.03


def episode(task: Task, toolbox, sequence: int = 0, **changes) -> CoAEpisode:
  """An episode as in `RolloutWorker`; `changes` apply to its config or attempt."""
  temperature = changes.pop("temperature", 1.0)
  seed = changes.pop("seed", 3)
  fields = {"style": "brief", "max_calls": 8, "tool_seconds": 60.0, **changes}
  attempt = Attempt(task, 0, seed, sequence, temperature)
  return CoAEpisode(attempt, tokenizer(), toolbox, EpisodeConfig(VARIANT, **fields))


def play(engine: Engine, params: dict, episodes: Iterable[Episode]) -> list[Episode]:
  """Plays all episodes to their ends, concurrently."""
  engine.set_policy(params, 0)
  with engine.batch():
    futures = [engine.submit(episode) for episode in episodes]
  return [future.result() for future in futures]


def graded(over: CoAEpisode) -> Trajectory:
  """A finished episode's trajectory, graded as in `RolloutWorker`."""
  GRADER.grade(over.task, over.trajectory, over.config.variant)
  return over.trajectory


def drive(playing: CoAEpisode, turns: Sequence[str]) -> Trajectory:
  """Plays scripted turns as if a sampler had drawn them; returns the trajectory.

  A turn ends at the automaton's stop, otherwise at its end with `tag=None`. Text after
  a stop is an error: a sampler would not have drawn it.
  """
  tok = playing.tokenizer
  table = compile_stops(playing.config.variant.yield_tags, tok, tok.vocab_size)
  playing.start()
  for text in turns:
    ids, tag, state = tok.encode(text), None, 0
    for n, i in enumerate(ids, 1):
      stop = table.stop_SC[state, table.class_V[i]]
      state = table.next_SC[state, table.class_V[i]]
      if stop:
        assert n == len(ids), f"text after a stop: {text!r}"
        tag = table.tags[stop - 1]
    logps = [-0.25 * n for n in range(len(ids))]
    future = playing.sampled(ids, logps, tag)
    if future is None or playing.observed(future.result()) is None:
      return graded(playing)
  raise AssertionError("the episode is not over")


@functools.partial(jax.jit, static_argnums=(0, 4))
def _token_logps(cfg: ModelConfig, p, batch: batching.Batch, temperature: float, cut):
  return losses.token_logps(cfg, p, batch, temperature, truncation=cut)[0]


def logps_of(
  cfg: ModelConfig,
  p,
  played: Sequence[Trajectory],
  temperature: float = 1.0,
  cut: Truncation = NO_TRUNCATION,
) -> list[np.ndarray]:
  """The learner's log-probs of each trajectory's policy tokens, in packed rows."""
  packed = batching.pack([t.num_tokens for t in played], MAX_LEN)
  (batch,) = batching.batches(played, len(packed), MAX_LEN)
  logp_BT = np.asarray(_token_logps(cfg, p, batch, temperature, cut))
  out: list[np.ndarray] = [np.zeros(0)] * len(played)
  for row, members in enumerate(packed):
    for number, i in enumerate(members, 1):
      mine_T = (batch.segment_BT[row] == number) & (batch.loss_mask_BT[row] > 0)
      out[i] = logp_BT[row][mine_T]
  return out


def sampled_logps(trajectory: Trajectory) -> list[float]:
  """The sampler's log-probs of a trajectory's policy tokens."""
  return [x for s in trajectory.segments for x in s.logps]


def sampled_ids(trajectory: Trajectory) -> list[int]:
  """The policy's token ids."""
  out = []
  for s in trajectory.segments:
    if s.author == Author.POLICY:
      out += s.ids
  return out


def eventually(condition: Callable[[], object], seconds: float = 120.0) -> None:
  """Waits until the condition holds, at most `seconds`."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it never came to be"
    time.sleep(0.005)
