"""The meaning, normal values and dashboard section of every SFT and RL metric.

One table gives the tags in TensorBoard and Weights & Biases, and the page
docs/metrics.md:

  python -c 'from coa_jax.report import metric_names as m; print(m.markdown(), end="")'

`metrics.jsonl` has the names without their sections.
"""

from __future__ import annotations

import dataclasses
import fnmatch

from coa_jax.report import timers

# Dashboard section -> contents.
SECTIONS = {
  "reward": "Rewards of rollouts, and accuracy on held-out tasks.",
  "policy": "The loss, the update, and the policy's distance from its start.",
  "rollout": "Lengths, calls and endings of trajectories.",
  "time": "Seconds per step and tokens per second.",
  "health": "Numbers that precede a failure.",
}


@dataclasses.dataclass(frozen=True)
class MetricName:
  """One metric, or all metrics with a matching name.

  Attributes:
    name: as in metrics.jsonl; `*` matches any text.
    section: a key of SECTIONS.
    meaning: one line.
    normal: usual values, and suspicious ones.
  """

  name: str
  section: str
  meaning: str
  normal: str


def _of(section: str, *rows: tuple[str, str, str]) -> list[MetricName]:
  return [MetricName(name, section, meaning, normal) for name, meaning, normal in rows]


METRICS: tuple[MetricName, ...] = (
  *_of(
    "reward",
    ("reward", "mean reward of graded trajectories", "rises, with noise"),
    ("answer", "mean reward part for right answers", "rises with `reward`"),
    ("format", "mean reward part for well-formed text", "soon near 1"),
    ("tool_cost", "mean penalty for tool calls", "0 or below"),
    ("overlong", "mean penalty for length near the limit", "0 or below"),
    ("dev_accuracy", "greedy accuracy on section `dev`", "rises; compare runs"),
    (
      "reward_variance_share",
      "share of groups neither all right nor all wrong, penalties aside",
      "0.2 to 0.8; near 0 nothing is learned",
    ),
  ),
  *_of(
    "policy",
    ("loss", "loss per policy token", "SFT: falls; RL: near 0, says little"),
    (
      "validation_loss",
      "SFT: loss of held-out trajectories",
      "falls; rising: too long",
    ),
    ("grad_norm", "norm of the gradient, before clipping", "steady; a jump is a fault"),
    ("entropy", "policy entropy, nats per token", "falls slowly, not to 0"),
    ("entropy_*", "entropy of sampled tokens by role", "no role at 0"),
    ("removed_mass", "probability cut by top_p, top_k, grammar", "below 0.1"),
    ("ratio", "learner's probability over the sampler's", "1 at the first update"),
    ("clipped", "share of clipped tokens", "below 0.2"),
    ("kl", "estimated KL(sampler, learner), nats per token", "below 0.1"),
    ("reference_kl", "estimated KL to the reference", "grows slowly"),
    ("teacher_kl", "estimated KL(policy, teacher), nats per scored token", "falls"),
    ("teacher_share", "share of scored tokens", "1, unless by role or family"),
    ("importance", "mean importance weight", "near 1"),
    ("importance_capped", "share of capped weights", "below 0.05"),
    ("value", "mean value of the critic", "follows the return"),
    ("value_loss", "squared error of the critic", "falls"),
    ("value_clipped", "share of clipped value losses", "below 0.2"),
    ("norm", "norm of the parameters", "steady"),
    ("rate", "learning rate", "as scheduled"),
  ),
  *_of(
    "rollout",
    ("generated_tokens", "sampled tokens per step", "steady"),
    ("tokens_per_trajectory", "prompt, sampled, observed tokens", "below max_len"),
    ("calls_per_trajectory", "tool calls", "neither 0 nor the turn limit"),
    ("call_turns_per_trajectory", "turns with calls, if some have several", "lower"),
    ("contexts_per_trajectory", "contexts, if any had several", "above 1"),
    ("truncated", "number of trajectories cut at a token limit", "few"),
    ("truncated_share", "the same as a share", "below 0.1"),
    (
      "repeated_share",
      "share of trajectories with a repeated call, think or plan",
      "below 0.2",
    ),
    ("staleness", "mean token age, in steps", "below the bound"),
    ("staleness_max", "maximum token age", "at most `algo.sampling.staleness`"),
    ("off_policy_share", "share of an older policy's tokens", "0 without staleness"),
    ("learner_waited", "seconds of the learner's waits for rollouts", "small"),
    ("rollouts_waited", "seconds of rollouts' waits for the learner", "small"),
    ("tokens", "SFT: tokens per step", "near rows times length"),
  ),
  *_of(
    "time",
    *(
      (timers.SECONDS + phase, meaning, "steady after step 1, which compiles")
      for phase, meaning in timers.PHASES.items()
    ),
    ("*" + timers.RATE, "tokens per second of a phase", "steady after step 1"),
    (
      "output" + timers.RATE + "_per_chip",
      "RL: sampled tokens per second of the whole step and device",
      "steady after step 1",
    ),
    (
      "goodput",
      "useful seconds divided by the wall time since the first start",
      "rises to near 1; falls with each restart and pause",
    ),
    (
      "useful_seconds",
      "seconds of all steps without compilation; lost steps do not count",
      "grows",
    ),
    ("devices", "number of devices", "constant, unless resumed on others"),
    ("processes", "number of processes", "likewise"),
    ("mfu", "the learner's share of the accelerator's peak", "0.2 to 0.5"),
  ),
  *_of(
    "health",
    ("logp_diff", "sampler-learner difference, nats per token", "below 0.01"),
    ("logp_diff_share", "share of tokens above the guard", "near 0"),
    ("ratio_outlier_share", "share of tokens e times likelier to one", "near 0"),
    ("infrastructure", "trajectories lost to unavailable tools or judges", "0"),
    ("infrastructure_share", "the same as a share", "0"),
    ("failed_calls_*", "share of failed tool calls, by owner", "falls; tool's: 0"),
  ),
)


def find(name: str) -> MetricName | None:
  """Returns a metric's row, preferring an exact name; None if there is none."""
  for metric in sorted(METRICS, key=lambda m: "*" in m.name):
    if fnmatch.fnmatchcase(name, metric.name):
      return metric
  return None


def tag(name: str) -> str:
  """Returns a metric's dashboard tag: SECTION/NAME."""
  metric = find(name)
  # Metrics outside the table are parts of a user's reward.
  return f"{metric.section if metric else 'reward'}/{name}"


def markdown() -> str:
  """Returns the text of docs/metrics.md."""
  lines = [
    "# Metrics of a run",
    "",
    "`metrics.jsonl` has a line per step with these names. TensorBoard and Weights &",
    "Biases show them under the table's section (`policy/loss`). `*` is a role, an",
    "owner or a phase. Normal values are rules of thumb, not measured limits: a sudden",
    "change matters more than a size. Parts of your own reward are under `reward/`.",
    "`coa_jax/report/metric_names.py` writes this page.",
  ]
  for section, text in SECTIONS.items():
    lines += ["", f"## {section}/", "", text, ""]
    lines += ["| metric | meaning | normal |", "|---|---|---|"]
    for m in METRICS:
      if m.section == section:
        lines.append(f"| `{m.name}` | {m.meaning} | {m.normal} |")
  return "\n".join(lines) + "\n"
