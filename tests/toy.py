"""A toy house for tests: tokenizers, a two-layer model, scripts, tools from a table.

Two ways to a policy that calls tools: `actor` learns SCRIPTS by heart in seconds, and
`drive` needs no model at all: it feeds an episode written text, token by token, and
stops it where the automaton would stop a sampler.
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
# For laws of what is done with a model, whatever computes it: half the compiling.
ONE_LAYER = dataclasses.replace(MODEL, layers=1)
# Room for the longest script; one training row holds one or two of them.
MAX_LEN = 128

GRADER = Grader()  # as `RolloutWorker`'s own

_THINK = roles.wrap(roles.THINK, "work it out")


def code(program: str) -> str:
  """A turn that runs a program."""
  return _THINK + roles.wrap("code", tool_bodies.render_code(program))


def search(query: str) -> str:
  """A turn that searches."""
  return _THINK + roles.wrap("wiki_search", query)


def end(answer: str) -> str:
  """The turn that answers."""
  return (
    roles.wrap(roles.SUGGESTED_ANSWER, answer)
    + roles.wrap(roles.DOUBLE_CHECK, "4")
    + roles.wrap(roles.ANSWER, answer)
  )


# Question -> what the policy writes, turn by turn, and between turns what tools say.
SCRIPTS: dict[str, tuple[str, ...]] = {
  "2 + 3": (code("print(2+3)"), "5", end("5")),
  "4 * 4 + 1": (code("print(4*4)"), "16", code("print(16+1)"), "17", end("17")),
  "capital of Ur": (search("Ur"), "Ur: its capital is Uruk.", end("Uruk")),
  "mixed": (search("zz"), "no result", code("print(7)"), "7", end("7")),
}
TASKS = [Task(q, q, (s[-2].split()[-1].strip("."),)) for q, s in SCRIPTS.items()]
# What tools say to the calls of SCRIPTS.
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


# Merges of the stock-like tokenizer: `></` and `><` straddle the borders of tags.
_MERGES = (
  *(("<", "/"), (">", "<"), (">", "</"), ("e", ">"), ("e", "><"), ("o", "d")),
  *(("c", "od"), ("a", "n"), ("s", "w"), ("e", "r"), ("sw", "er"), ("an", "swer")),
  *(("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("x", "</"), ("a", "t")),
)


@functools.cache
def stock_tokenizer() -> Tokenizer:
  """Tags are ordinary text, as to Qwen's; single tokens hold `><`, `></` and `e><`."""
  split = tokenizers.pre_tokenizers
  pieces = [*sorted(split.ByteLevel.alphabet()), *(a + b for a, b in _MERGES)]
  vocab = {piece: i for i, piece in enumerate(pieces)}
  model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, list(_MERGES)))
  # Without the regex, merges cross the borders of words too.
  model.pre_tokenizer = split.ByteLevel(add_prefix_space=False, use_regex=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  model.add_special_tokens([tokens.PAD, tokens.IM_START, tokens.IM_END])
  # Qwen's vocabulary too has tokens that are added but not marked special.
  model.add_tokens([tokenizers.AddedToken("<tool_call>", special=False)])
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=model,
    pad_token=tokens.PAD,
    eos_token=tokens.IM_END,
    chat_template=tokenizer().hf.chat_template,
  )
  return Tokenizer(hf)


def written(question: str, script: Sequence[str], tok: Tokenizer) -> Trajectory:
  """A trajectory with ids: policy text and tool results by turns."""
  segments = prompts.prompt_segments(VARIANT, question, "brief")
  for turn, text in enumerate(script):
    if turn % 2:
      text = roles.wrap(roles.OBSERVATION, roles.escape(text))
      segments.append(Segment(Author.TOOL, roles.OBSERVATION, text))
    else:
      segments.append(Segment(Author.POLICY, "", text))
  out = Trajectory(question, segments)
  tok.encode_trajectory(out)
  return out


def trajectories() -> list[Trajectory]:
  """SCRIPTS with ids."""
  return [written(q, script, tokenizer()) for q, script in SCRIPTS.items()]


@functools.cache
def params(seed: int = 0, **changes):
  """Fresh parameters of MODEL, some of its fields changed."""
  return transformer.init_params(dataclasses.replace(MODEL, **changes), seed)


def use_float64() -> dict[str, str]:
  """Computes in float64 what the library computes in float32, in a process of its own.

  A sum in another order then differs by some 1e-16; what is more is a mistake.

  Returns:
    The fields of a model that is computed so.
  """
  jax.config.update("jax_enable_x64", True)
  jnp.float32 = jnp.float64
  # Fields of a config name no such dtype.
  RunOptions.__post_init__ = lambda self: None
  return {"dtype": "float64", "param_dtype": "float64"}


def sft_loss(cfg: ModelConfig):
  """Summed negative log-likelihood of policy tokens, as `Learner` wants it."""

  def loss(p, frozen, batch):
    logp_BT, *_ = losses.token_logps(cfg, p, batch)
    return losses.nll(logp_BT, batch.loss_mask_BT), {}

  return loss


@dataclasses.dataclass(frozen=True)
class Actor:
  """A trained policy, and its loss (nats a token) at every step of the training."""

  params: dict
  losses: tuple[float, ...]


@functools.cache
def actor(steps: int = 200) -> Actor:
  """MODEL trained on SCRIPTS through the learner."""
  return train(trajectories(), steps)


def train(
  examples: Sequence[Trajectory], steps: int, model: ModelConfig = MODEL
) -> Actor:
  """A model trained on examples, all of them in every step."""
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
  """Answers from a table after a random while; counts its calls."""

  def __init__(
    self,
    reply: Callable[[str, str], str | ToolCall] | None = None,
    latency: Callable[[], float] = lambda: 0.0,
  ):
    """Args: what a call (name, arguments) gives; how many seconds it takes."""
    self.reply = reply or (lambda _, body: _REPLIES.get(body, "no result"))
    self.latency = latency
    self.calls: list[tuple[str, str]] = []
    self.seconds: list[float] = []  # that each call was given
    self._pool = concurrent.futures.ThreadPoolExecutor(8)

  def code_session(self) -> None:
    """Calls share nothing."""

  def start(self, request: CallRequest) -> CallFuture:
    """Answers after a while."""
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
  """Seconds between 0 and 30 ms, in an order of their own."""
  rng = random.Random(seed)
  return lambda: rng.random() * 0.03


def episode(task: Task, toolbox, sequence: int = 0, **changes) -> CoAEpisode:
  """An episode as `RolloutWorker` makes it; `changes` are of its config, or its own."""
  temperature = changes.pop("temperature", 1.0)
  seed = changes.pop("seed", 3)
  fields = {"style": "brief", "max_calls": 8, "tool_seconds": 60.0, **changes}
  attempt = Attempt(task, 0, seed, sequence, temperature)
  return CoAEpisode(attempt, tokenizer(), toolbox, EpisodeConfig(VARIANT, **fields))


def play(engine: Engine, params: dict, episodes: Iterable[Episode]) -> list[Episode]:
  """Plays episodes to their ends, all at once."""
  engine.set_policy(params, 0)
  with engine.batch():
    futures = [engine.submit(episode) for episode in episodes]
  return [future.result() for future in futures]


def graded(over: CoAEpisode) -> Trajectory:
  """The trajectory of an episode that is over, graded as `RolloutWorker` would."""
  GRADER.grade(over.task, over.trajectory, over.config.variant)
  return over.trajectory


def drive(playing: CoAEpisode, turns: Sequence[str]) -> Trajectory:
  """Plays written turns as if a sampler had drawn them; returns the trajectory.

  Every turn ends where the automaton stops it, or with `tag=None` at its end. Text
  after the stop may not be there: a sampler would not have drawn it.
  """
  tok = playing.tokenizer
  table = compile_stops(playing.config.variant, tok, tok.vocab_size)
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
  """The learner's log-probs of every trajectory's policy tokens, rows packed."""
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
  """The ids that the policy wrote."""
  out = []
  for s in trajectory.segments:
    if s.author == Author.POLICY:
      out += s.ids
  return out


def eventually(condition: Callable[[], object], seconds: float = 120.0) -> None:
  """Waits until something is so, for a while at most."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it never came to be"
    time.sleep(0.005)
