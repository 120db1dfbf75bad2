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
  "reward": "What rollouts earn, and what a model does on tasks it is not trained on.",
  "policy": "The loss, the update, and how far the policy has moved.",
  "rollout": "What trajectories are like.",
  "time": "Seconds of a step and tokens per second.",
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
    ("answer", "mean of the part for a right answer", "rises with `reward`"),
    ("format", "mean of the part for keeping the protocol", "near 1 soon"),
    ("tool_cost", "mean of the part that tool calls cost", "0 or below"),
    ("overlong", "mean of the part for length near the limit", "0 or below"),
    ("dev_accuracy", "greedy answers right, of section `dev`", "rises; compare runs"),
    (
      "reward_variance_share",
      "groups that are neither all right nor all wrong, penalties aside",
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
    ("entropy", "nats a token of the policy's distribution", "falls slowly, not to 0"),
    ("entropy_*", "the same by role, of what was sampled", "no role's falls to 0"),
    ("removed_mass", "probability that top_p, top_k and the grammar cut", "below 0.1"),
    ("ratio", "learner's probability over the sampler's", "1 at the first update"),
    ("clipped", "share of tokens that the loss clips", "below 0.2"),
    ("kl", "estimate of KL(sampler, learner), nats a token", "below 0.1"),
    ("reference_kl", "estimate of the KL to the reference", "grows slowly"),
    ("teacher_kl", "estimate of KL(policy, teacher), nats a scored token", "falls"),
    ("teacher_share", "tokens that a teacher scored", "1, unless by role or family"),
    ("importance", "weight that corrects for the sampler's policy", "near 1"),
    ("importance_capped", "share of tokens whose weight was capped", "below 0.05"),
    ("value", "mean of the critic", "follows the return"),
    ("value_loss", "squared error of the critic", "falls"),
    ("value_clipped", "share of tokens whose value loss is clipped", "below 0.2"),
    ("norm", "norm of the parameters", "steady"),
    ("rate", "learning rate", "as scheduled"),
  ),
  *_of(
    "rollout",
    ("generated_tokens", "tokens written in a step", "steady"),
    ("tokens_per_trajectory", "prompt, written and observed", "below max_len"),
    ("calls_per_trajectory", "tool calls", "neither 0 nor the turn limit"),
    ("call_turns_per_trajectory", "turns with calls, if some have several", "fewer"),
    ("contexts_per_trajectory", "contexts, if any had several", "above 1"),
    ("truncated", "trajectories cut at a token limit", "few"),
    ("truncated_share", "the same as a share", "below 0.1"),
    (
      "repeated_share",
      "trajectories that call, think or plan the same twice",
      "below 0.2",
    ),
    ("staleness", "mean age of the tokens, in updates", "below the bound"),
    ("staleness_max", "age of the oldest", "at most `algo.sampling.staleness`"),
    ("off_policy_share", "tokens of an older policy", "0 without staleness"),
    ("learner_waited", "seconds that the learner waited for rollouts", "small"),
    ("rollouts_waited", "seconds that rollouts waited for the learner", "small"),
    ("tokens", "SFT: tokens of a step", "near rows times length"),
  ),
  *_of(
    "time",
    *(
      (timers.SECONDS + phase, meaning, "after step 1 steady: that one compiles")
      for phase, meaning in timers.PHASES.items()
    ),
    ("*" + timers.RATE, "tokens per second of a phase", "steady after step 1"),
    (
      "output" + timers.RATE + "_per_chip",
      "RL: tokens written, per second of the whole step and device",
      "steady after step 1",
    ),
    (
      "goodput",
      "useful seconds by the wall time since the run first began",
      "rises to near 1; falls with each restart and pause",
    ),
    (
      "useful_seconds",
      "of all steps so far but compiling; steps that were lost do not count",
      "grows",
    ),
    ("devices", "that the run uses", "constant, unless the run resumes on others"),
    ("processes", "that the run has", "likewise"),
    ("mfu", "share of the accelerator's peak that the learner uses", "0.2 to 0.5"),
  ),
  *_of(
    "health",
    ("logp_diff", "nats between sampler and learner on the same tokens", "below 0.01"),
    ("logp_diff_share", "tokens apart by more than the guard", "near 0"),
    ("ratio_outlier_share", "tokens e times likelier to one of the two", "near 0"),
    ("infrastructure", "trajectories lost to tools or judges that were down", "0"),
    ("infrastructure_share", "the same as a share", "0"),
    ("failed_calls_*", "tool calls that failed, by whose fault", "falls; tool's: 0"),
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
    "`metrics.jsonl` has a line a step with these names. TensorBoard and Weights &",
    "Biases show them under the section that heads each table (`policy/loss`). `*`",
    "stands for a role, an owner or a phase. What is normal are rules of thumb, not",
    "measured limits: a number that changes suddenly says more than its size. Parts of",
    "your own reward are under `reward/`. This page is made by",
    "`coa_jax/report/metric_names.py`.",
  ]
  for section, text in SECTIONS.items():
    lines += ["", f"## {section}/", "", text, ""]
    lines += ["| metric | what it is | what is normal |", "|---|---|---|"]
    for m in METRICS:
      if m.section == section:
        lines.append(f"| `{m.name}` | {m.meaning} | {m.normal} |")
  return "\n".join(lines) + "\n"
