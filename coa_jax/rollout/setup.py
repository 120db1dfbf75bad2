"""Makes a rollout worker: its engine (ours, or a vLLM server), dialect and grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from coa_jax.model import memory
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.protocol import prompts, roles
from coa_jax.protocol.grammar.automaton import compile_constraint, compile_stops
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.rewards.grader import Grader
from coa_jax.rollout.agents.formats import ChatFormat, Format, TeamFormat
from coa_jax.rollout.episode import EpisodeConfig
from coa_jax.rollout.replicas import ReplicaPool
from coa_jax.rollout.types import Engine, RolloutConfig
from coa_jax.rollout.vllm.client import VllmConfig
from coa_jax.rollout.vllm.engine import VllmEngine, VllmReplica
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tools.journal import ToolJournal


def make_worker(
  model: ModelConfig,
  tokenizer: Tokenizer,
  config: RolloutConfig,
  tools: Iterable[str],
  partitioner: Partitioner = ONE_DEVICE,
  vllm: VllmConfig | None = None,
  grader: Grader | None = None,
  journal: ToolJournal | None = None,
  policy_changes: bool = False,
  parallel_calls: int = 1,
  own_top_p: bool = False,
  conversations: str = "",
) -> RolloutWorker:
  """Compiles the dialect, then prepares our engine or connects to a vLLM server.

  budget: every argument is documented; the rest is three steps.

  Args:
    tools: the dialect's tags, and function tools with their descriptions.
    partitioner: the decoding mesh (`Partitioner.decoding`).
    vllm: the sampling server; None for our own engine.
    policy_changes: whether newer policies arrive while episodes run (for vLLM).
    parallel_calls: maximum calls in one `tool` span (`tools.parallel`).
    own_top_p: whether episodes may have their own top_p, with our own engine.
    conversations: the format of agents' conversations (`AgentConfig.format`); "" for
      our own loop.

  Raises:
    ValueError: the tokenizer does not fit the model, the variant lacks a tool, the
      model does not fit the device, or vLLM does not support `config`.
    VllmError: there is no usable server at `vllm.url`.
  """
  # --- The dialect.
  variant = roles.get_variant(config.variant).with_tools(tools)
  variant = dataclasses.replace(
    variant, summaries=config.context.summarises, parallel=parallel_calls
  )
  # Checked before anything large is allocated, also by compiling.
  memory.check_rollouts(model, config, partitioner, is_served=vllm is not None)
  if vllm and config.tensor:
    raise ValueError(
      f"rollout.tensor={config.tensor} splits our own sampler's model; with section "
      "vllm take 0"
    )
  if vllm and variant.summaries:
    raise ValueError(
      "rollout.context.keep=0 begins summaries for the policy, which only our own "
      "sampler can; with section vllm keep at least 1 observation"
    )

  # --- The stop conditions, the grammar, and the engine.
  form = None
  if conversations:
    form = _format(conversations, config, vllm, tokenizer, variant)
  stops = form.stops if form else variant.yield_tags
  automaton = compile_stops(stops, tokenizer, model.vocab_size)
  constraint = None
  if config.constrain:
    constraint = compile_constraint(variant, tokenizer, model.vocab_size)
  engine: Engine
  if vllm is None:
    engine = ReplicaPool(model, automaton, config, partitioner, constraint, own_top_p)
  else:
    server = VllmReplica(
      vllm,
      model,
      automaton,
      config,
      probe=_probe(variant, tokenizer, config.style),
      tokenizer=tokenizer,
      partitioner=partitioner,
      constraint=constraint,
      policy_changes=policy_changes,
    )
    engine = VllmEngine(server)

  # --- The episodes' common settings.
  episode_config = EpisodeConfig(
    variant=variant,
    style=config.style,
    max_calls=config.max_calls,
    tool_seconds=config.tool_seconds,
    observation_tokens=config.observation_tokens,
    context=config.context,
    max_sampled=config.max_sampled,
  )
  return RolloutWorker(
    engine, tokenizer, episode_config, grader, journal, constraint, form
  )


def _format(
  name: str,
  config: RolloutConfig,
  vllm: VllmConfig | None,
  tokenizer: Tokenizer,
  variant: roles.Variant,
) -> Format:
  if vllm is not None:
    raise ValueError("agents need our own sampler; leave out section vllm")
  if config.context.count > 1:
    raise ValueError(
      f"rollout.context.count={config.context.count}: an agent manages its contexts "
      "itself; take 1"
    )
  if config.max_sampled:
    raise ValueError(
      f"rollout.max_sampled={config.max_sampled}: an agent limits its requests itself; "
      "take 0"
    )
  if name == "team":
    return TeamFormat(tokenizer, variant, config.style, config.observation_tokens)
  if config.constrain:
    raise ValueError(
      "rollout.constrain is the protocol's grammar; with agent.format='chat' take False"
    )
  return ChatFormat(tokenizer)


def _probe(variant: roles.Variant, tokenizer: Tokenizer, style: str) -> list[int]:
  """Returns a prompt's ids, for comparing vLLM's log-probs with ours; any will do."""
  segments = prompts.prompt_segments(variant, "What is asked here?", style)
  tokenizer.encode_prompt(segments)
  return [i for segment in segments for i in segment.ids]
