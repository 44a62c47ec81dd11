"""The paper's claims as differences between runs at tiny scale: the margin of one seed, positive if the paper is right.

    python reproduce.py claim fig3_correction_alone_is_ahead_at_first --seeds 21 22 23

Units: points (percentage points), nats, tokens, steps, and thousandths of a push (docs/metrics.md, conflict_push).

* GRPO is the mean over β = 0 and 10⁻⁶, which differ by a negligible KL term: the better of the two would be GRPO with a
  head start by chance. β = 0.04 has claims of its own. GTPO or GRPO without a G is the mean over G = 8 and 12, on both
  sides alike; in the late regime, GRPO with G = 12 has β = 0 alone.
* "Ends" is the mean over the last quarter of the training, "at first" that over the first quarter; "highest" is the
  highest value of the trailing mean that the figures show, and a fall is that minus the end.
* "Stable" and "late" are the two regimes of configs/experiments.yaml. The paper sees GRPO collapse with LLaMA and not
  with Qwen; where it says "comparable or improved" for Qwen, the claim is not to be 5 points below.
"""

# ruff: noqa: RUF001

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log

from gtpo.paper.measures import Measure, SeedRuns, early, fall, fall_step, highest, late, mean, rise_step, score

Side = Measure | float
PUSH, WORD = "conflict_push", "rewards/word_reward/mean"
UNITS = {"entropy": "nats", "conflict_tokens": "tokens", PUSH: "10⁻³", "kl": "steps"}  # by metric; of others points
SCALES = {PUSH: 1000, WORD: 10}  # units per unit of the metric


@dataclass(frozen=True)
class Claim:
    """``more`` is above ``less``; either can be a threshold.

    Attributes:
        name: Its figure and what it says.
        sentence: The claim for readers.
        more: A measure of some runs; several are compared with as many of ``less``, and the margin is the mean.
        less: As ``more``.
        allowed: How far ``more`` may be below ``less``, in points; this makes it a claim about a threshold.
    """

    name: str
    sentence: str
    more: Side | tuple[Measure, ...]
    less: Side | tuple[Measure, ...]
    allowed: float = 0.0

    @property
    def pairs(self) -> list[tuple[Side, Side]]:
        more, less = (side if isinstance(side, tuple) else (side,) for side in (self.more, self.less))
        return list(zip(more, less, strict=True))

    @property
    def measures(self) -> list[Measure]:
        return [side for pair in self.pairs for side in pair if isinstance(side, Measure)]

    @property
    def runs(self) -> list[str]:
        """The names of the runs that it reads."""
        return list(dict.fromkeys(name for measure in self.measures for name in measure.runs))

    @property
    def unit(self) -> str:
        """Of the margin, a key of :data:`gtpo.paper.verdicts.SIZES`."""
        return next((UNITS[measure.name] for measure in self.measures if measure.name in UNITS), "points")

    @property
    def compares_runs(self) -> bool:
        """Whether it is about a difference between runs; the other claims are about a threshold."""
        return not self.allowed and len(self.measures) == 2 * len(self.pairs)

    def margin(self, runs: SeedRuns) -> float:
        """The margin of one seed; positive supports the claim.

        Raises:
            KeyError: If a run, metric or score is missing.
        """
        values = [[side.value(runs) if isinstance(side, Measure) else side for side in pair] for pair in self.pairs]
        scale = SCALES.get(self.measures[0].name, 1)
        return scale * sum(more - less for more, less in values) / len(values) + self.allowed


GTPO = {"stable": ("gtpo-g8", "gtpo-g12"), "late": ("gtpo-late-g8", "gtpo-late-g12")}  # G = 8, 12
GRPO = {
    "stable": (("grpo-g8-beta0", "grpo-g8-beta1e-6"), ("grpo-g12-beta0", "grpo-g12-beta1e-6")),
    "late": (("grpo-late-g8-beta0", "grpo-late-g8-beta1e-6"), ("grpo-late-g12-beta0",)),
}
SMALLER_GAMMAS = ("gtpo-late-gamma0.01", "gtpo-late-gamma0.001", "gtpo-late-gamma1e-6")
ONLY_NEGATIVE = ("gtpo-onlyneg0.7", "gtpo-onlyneg1.05", "gtpo-onlyneg2.0")
BETA_0, BETA_1E6, BETA_04 = (f"grpo-late-g8-beta{beta}" for beta in ("0", "1e-6", "0.04"))
CORRECTION = "gtpo-late-correction-only"
BOTH = ("accuracy", "formatting")
KINDS = ("pass", "maj")
AT_BEST = {"stable": "", "late": ", at its highest accuracy reward,"}

held_out = partial(score, "arithmetic")
harder = partial(score, "arithmetic_hard")  # problems with more steps than those of the training


def gtpo_and_grpo(
    measure: Callable[..., Measure], name: str, regime: str
) -> tuple[tuple[Measure, ...], tuple[Measure, ...]]:
    """GTPO and GRPO with G = 8, and with G = 12."""
    return tuple(measure(name, run) for run in GTPO[regime]), tuple(measure(name, *runs) for runs in GRPO[regime])


def large_and_small_groups(measure: Callable[..., Measure], name: str) -> tuple[Measure, Measure]:
    """GTPO with G = 12 and 8, each the mean over both regimes."""
    return measure(name, "gtpo-g12", "gtpo-late-g12"), measure(name, "gtpo-g8", "gtpo-late-g8")


# fmt: off
def score_claims(regime: str) -> list[Claim]:
    """Fig. 2 on held-out problems."""
    ahead = f"{regime.title()}: GTPO is ahead of"
    return [
        Claim(f"fig2_{regime}_pass_1", f"{ahead} GRPO{AT_BEST[regime]} in pass@1 on held-out problems.",
              *gtpo_and_grpo(held_out, "pass@1", regime)),
        *(Claim(f"fig2_{regime}_{kind}_32", f"{ahead} GRPO in {kind}@32.",
                *gtpo_and_grpo(held_out, f"{kind}@32", regime)) for kind in KINDS),
        Claim(f"fig2_{regime}_lenient_pass_1", f"{ahead} GRPO in pass@1 of the answers in any format.",
              *gtpo_and_grpo(held_out, "pass_lenient@1", regime)),
        Claim(f"fig2_{regime}_ahead_of_sft", f"{ahead} SFT in maj@32.",
              held_out("maj@32", *GTPO[regime]), held_out("maj@32", "sft")),
    ]


CLAIMS: dict[str, tuple[Claim, ...]] = {  # figure -> its claims, in the order of the page
    "fig1": (  # late
        Claim("fig1_formatting_falls", "With β = 10⁻⁶ the formatting of GRPO falls by more than 10 points.",
              fall("formatting", BETA_1E6), 10),
        Claim("fig1_formatting_falls_with_kl", "With β = 0.04 the formatting of GRPO falls by more than 10 points.",
              fall("formatting", BETA_04), 10),
        Claim("fig1_formatting_rises_faster_without_kl", "At first formatting is higher with β = 10⁻⁶ than with 0.04.",
              early("formatting", BETA_1E6), early("formatting", BETA_04)),
        Claim("fig1_entropy_rises", "With β = 10⁻⁶ entropy ends higher than it is at first, as formatting falls.",
              late("entropy", BETA_1E6), early("entropy", BETA_1E6)),
        Claim("fig1_kl_reacts_late",
              "KL reaches half of its highest value after formatting has lost half of what it loses (β = 10⁻⁶).",
              rise_step("kl", BETA_1E6), fall_step("formatting", BETA_1E6)),
    ),
    "fig2": (  # both regimes
        Claim("fig2_stable_accuracy",
              "Stable: GTPO ends with the accuracy of GRPO or a higher one (less than 5 points below).",
              *gtpo_and_grpo(late, "accuracy", "stable"), allowed=5),
        Claim("fig2_stable_formatting",
              "Stable: the formatting of GTPO ends at most slightly below that of GRPO (less than 5 points).",
              *gtpo_and_grpo(late, "formatting", "stable"), allowed=5),
        Claim("fig2_stable_grpo_does_not_collapse", "Stable: the formatting of GRPO falls by less than 10 points.",
              10, fall("formatting", *GRPO["stable"][0])),
        *score_claims("stable"),
        *(Claim(f"fig2_late_{metric}", f"Late: GTPO ends with higher {metric} than GRPO.",
                *gtpo_and_grpo(late, metric, "late")) for metric in BOTH),
        *score_claims("late"),
        Claim("fig2_larger_groups_are_better", "A larger G is better for GTPO in pass@1 (mean over both regimes).",
              *large_and_small_groups(held_out, "pass@1")),
    ),
    "fig3": (  # late
        Claim("fig3_correction_alone_is_ahead_at_first",
              "At first the conflict correction alone is more accurate than GRPO.",
              early("accuracy", CORRECTION), early("accuracy", *GRPO["late"][0])),
        Claim("fig3_correction_alone_is_ahead_of_kl_at_first",
              "At first the conflict correction alone is more accurate than GRPO with β = 0.04.",
              early("accuracy", CORRECTION), early("accuracy", BETA_04)),
        *(Claim(f"fig3_correction_alone_degrades_in_{metric}",
                f"The conflict correction alone degrades: its {metric} falls by more than 10 points.",
                fall(metric, CORRECTION), 10) for metric in BOTH),
        Claim("fig3_correction_alone_ends_below_grpo", "The conflict correction alone ends below GRPO in accuracy.",
              late("accuracy", *GRPO["late"][0]), late("accuracy", CORRECTION)),
        *(Claim(f"fig3_entropy_control_repairs_{metric}",
                f"GTPO, with entropy control, ends above the conflict correction alone in {metric}.",
                late(metric, "gtpo-late-g8"), late(metric, CORRECTION)) for metric in BOTH),
        *(Claim(f"fig3_gtpo_ends_above_kl_in_{metric}", f"GTPO ends above GRPO with β = 0.04 in {metric}.",
                late(metric, "gtpo-late-g8"), late(metric, BETA_04)) for metric in BOTH),
    ),
    "fig4a": (  # late
        Claim("fig4a_larger_gamma_is_more_accurate",
              "γ = 0.1 ends with higher accuracy than smaller γ (mean of three).",
              late("accuracy", "gtpo-late-g8"), late("accuracy", *SMALLER_GAMMAS)),
        Claim("fig4a_larger_gamma_keeps_entropy", "γ = 0.1 keeps entropy slightly higher than γ = 10⁻⁶ (at the end).",
              late("entropy", "gtpo-late-g8"), late("entropy", "gtpo-late-gamma1e-6")),
        Claim("fig4a_entropy_rises_without_filter", "Without the filter entropy ends above ln 2.",
              late("entropy", "gtpo-late-no-filter"), log(2)),
        Claim("fig4a_entropy_stays_low_with_filter", "With the filter entropy stays below ln 2 (its highest value).",
              log(2), highest("entropy", "gtpo-late-g8")),
        *(Claim(f"fig4a_filter_keeps_{metric}",
                f"Without the filter {metric} collapses: it ends higher with the filter.",
                late(metric, "gtpo-late-g8"), late(metric, "gtpo-late-no-filter")) for metric in BOTH),
    ),
    "fig4b": (  # late
        Claim("fig4b_loose_threshold_raises_entropy", "With the loose threshold 2.0 entropy ends higher than with 0.7.",
              late("entropy", "gtpo-late-h2.0"), late("entropy", "gtpo-late-h0.7")),
        *(Claim(f"fig4b_tight_thresholds_{effect}",
                f"Tight thresholds (mean of 0.7 and 1.05) end with higher {metric} than 2.0.",
                late(metric, "gtpo-late-h0.7", "gtpo-late-h1.05"), late(metric, "gtpo-late-h2.0"))
          for effect, metric in (("are_more_accurate", "accuracy"), ("keep_formatting", "formatting"))),
    ),
    "fig4c": (  # stable
        *(Claim(f"fig4c_negative_filter_{verb}_{metric}",
                f"Filtering negative completions alone{note} ends with lower {metric} than no filter.",
                late(metric, "gtpo-no-filter"), late(metric, *ONLY_NEGATIVE))
          for verb, metric, note in (("costs", "accuracy", " (mean of three thresholds)"), ("costs", "formatting", ""),
                                     ("lowers", "entropy", ""))),
    ),
    "fig4d": (  # late
        *(Claim(f"fig4d_grpo_loses_{metric}",
                f"GRPO without KL (β = 0) collapses: its {metric} falls by more than 10 points.",
                fall(metric, BETA_0), 10) for metric in reversed(BOTH)),
        Claim("fig4d_grpo_entropy_spikes",
              "The entropy of GRPO without KL (β = 0) rises above ln 2 (its highest value).",
              highest("entropy", BETA_0), log(2)),
        Claim("fig4d_entropy_control_helps_grpo", "Entropy control lets GRPO end with higher accuracy.",
              late("accuracy", "gtpo-late-no-correction-h1.05"), late("accuracy", BETA_0)),
        Claim("fig4d_entropy_control_repairs_formatting", "Entropy control lets GRPO end with higher formatting.",
              late("formatting", "gtpo-late-no-correction-h1.05"), late("formatting", BETA_0)),
        Claim("fig4d_correction_adds_accuracy", "GTPO ends more accurate than GRPO with the same entropy control.",
              late("accuracy", "gtpo-late-h1.05"), late("accuracy", "gtpo-late-no-correction-h1.05")),
        Claim("fig4d_correction_adds_formatting",
              "GTPO ends with higher formatting than GRPO with the same entropy control.",
              late("formatting", "gtpo-late-h1.05"), late("formatting", "gtpo-late-no-correction-h1.05")),
        Claim("fig4d_gtpo_keeps_entropy_lower", "GTPO ends with lower entropy than GRPO (β = 0).",
              late("entropy", BETA_0), late("entropy", "gtpo-late-h1.05")),
    ),
    "fig5a": (  # stable
        Claim("fig5a_kl_raises_entropy", "With β = 0.04 entropy increases: it ends higher than it is at first.",
              late("entropy", "grpo-g8-beta0.04"), early("entropy", "grpo-g8-beta0.04")),
        *(Claim(f"fig5a_kl_costs_{metric}", f"GRPO (β = 0 and 10⁻⁶) ends with higher {metric} than with β = 0.04.",
                late(metric, *GRPO["stable"][0]), late(metric, "grpo-g8-beta0.04")) for metric in BOTH),
    ),
    "fig5b": (  # mean over both regimes
        Claim("fig5b_larger_groups_are_more_accurate", "GTPO with G = 12 ends with higher accuracy than with 8.",
              *large_and_small_groups(late, "accuracy")),
        Claim("fig5b_larger_groups_format_earlier",
              "At first the formatting of GTPO is higher with G = 12 than with 8.",
              *large_and_small_groups(early, "formatting")),
        Claim("fig5b_conflict_grows_with_groups", "A completion has more conflict tokens with G = 12 than with 8.",
              *large_and_small_groups(mean, "conflict_tokens")),
    ),
    "fig6": (  # stable
        *(Claim(f"fig6_adam_costs_{metric}",
                f"Adam with α₁ = α₂ = 0.999999 costs GRPO {metric} at the end (the paper: {models}).",
                late(metric, "grpo-g8-beta1e-6"), late(metric, "grpo-g8-beta1e-6-adam0.999999"))
          for metric, models in (("accuracy", "LLaMA; Qwen slightly"), ("formatting", "LLaMA"))),
    ),
    "table1": (  # out of distribution
        *(Claim(f"table1_{regime}_{kind}_64",
                f"{regime.title()}: GTPO is ahead of GRPO{AT_BEST[regime]} in {kind}@64 on harder problems.",
                *gtpo_and_grpo(harder, f"{kind}@64", regime)) for regime in GRPO for kind in KINDS),
        *(Claim(f"table1_ahead_of_sft_in_{kind}_64",
                f"GTPO (mean over both regimes) is ahead of SFT in {kind}@64 on harder problems.",
                harder(f"{kind}@64", *GTPO["stable"], *GTPO["late"]), harder(f"{kind}@64", "sft")) for kind in KINDS),
    ),
    "baselines": (  # beyond the paper: other aggregations, late. Is the correction more than leaving 1/|o_i| out?
        *(Claim(f"baselines_gtpo_ends_above_{run.replace('-', '_')}_in_{metric}",
                f"GTPO ends above {title} in {metric}.", late(metric, "gtpo-late-g8"), late(metric, f"grpo-late-{run}"))
          for run, title in (("dr-grpo", "Dr. GRPO"), ("dapo", "DAPO")) for metric in BOTH),
        *(Claim(f"baselines_gtpo_improves_{run.replace('-', '_')}_in_{metric}",
                f"With the aggregation of {title}, GTPO ends above {title} in {metric}.",
                late(metric, f"gtpo-late-{run}"), late(metric, f"grpo-late-{run}"))
          for run, title in (("dr-grpo", "Dr. GRPO"), ("dapo", "DAPO")) for metric in BOTH),
        Claim("baselines_w_reinforce_keeps_entropy",
              "W-REINFORCE ends with higher entropy than GRPO (arXiv 2506.01347).",
              late("entropy", "grpo-late-w-reinforce"), late("entropy", BETA_0)),
        Claim("baselines_grpo_pushes_conflict_tokens_down",
              "GRPO lowers the probability of the tokens that rewarded and penalized completions share (Section 4.1).",
              0, mean(PUSH, BETA_0)),
        Claim("baselines_equal_weights_push_conflict_tokens_less_down",
              "DAPO, whose tokens have equal weights, lowers the probability of shared tokens less than GRPO.",
              mean(PUSH, "grpo-late-dapo"), mean(PUSH, BETA_0)),
    ),
    "spans": (  # beyond the paper: which tokens, late
        *(Claim(f"spans_anchored_is_ahead_of_{span.replace('-', '_')}",
                f"Correcting runs at both ends (GTPO) ends with higher accuracy than the {what}.",
                late("accuracy", "gtpo-late-g8"), late("accuracy", f"gtpo-late-span-{span}"))
          for span, what in (("first-run", "first run anywhere"), ("common", "span common to the whole group"))),
    ),
    "word": (  # beyond the paper: a task without mathematics; its highest reward is 10
        Claim("word_gtpo_ends_above_grpo",
              "GTPO ends with more required words than GRPO (percent of the maximum reward).",
              late(WORD, "gtpo-word"), late(WORD, "grpo-word")),
    ),
}
# fmt: on
