"""The paper's claims as differences between runs at tiny scale: the margin of one seed, positive if the paper is right.

    python reproduce.py claim fig3_correction_alone_is_ahead_at_first --seeds 21 22 23

The name of a function is that of the claim, its docstring the claim, its argument the runs of a seed (measures.py).
Units: points (percentage points), nats, tokens, steps, and thousandths of a push (docs/metrics.md, conflict_push).

* GRPO is the mean over β = 0 and 10⁻⁶, which differ by a negligible KL term: the better of the two would be GRPO with a
  head start by chance. β = 0.04 has claims of its own. GTPO or GRPO without a G is the mean over G = 8 and 12, on both
  sides alike; in the late regime, GRPO with G = 12 has β = 0 alone.
* "Ends" is the mean over the last quarter of the training, "at first" that over the first quarter; "highest" is the
  highest value of the trailing mean that the figures show, and a fall is that minus the end.
* "Stable" and "late" are the two regimes of configs/experiments.yaml. The paper sees GRPO collapse with LLaMA and not
  with Qwen; where it says "comparable or improved" for Qwen, the claim is not to be 5 points below.
"""

from collections.abc import Callable
from math import log

from gtpo.paper.measures import Measures, Runs

Claim = Callable[[Runs], float]

GTPO = {"stable": ("gtpo-g8", "gtpo-g12"), "late": ("gtpo-late-g8", "gtpo-late-g12")}  # G = 8, 12
GRPO = {
    "stable": (("grpo-g8-beta0", "grpo-g8-beta1e-6"), ("grpo-g12-beta0", "grpo-g12-beta1e-6")),
    "late": (("grpo-late-g8-beta0", "grpo-late-g8-beta1e-6"), ("grpo-late-g12-beta0",)),
}
SMALLER_GAMMAS = ("gtpo-late-gamma0.01", "gtpo-late-gamma0.001", "gtpo-late-gamma1e-6")
ONLY_NEGATIVE = ("gtpo-onlyneg0.7", "gtpo-onlyneg1.05", "gtpo-onlyneg2.0")


def gtpo_minus_grpo(runs: Runs, regime: str, measure: Callable[[Measures], float]) -> float:
    """Mean over G = 8 and 12."""
    pairs = zip(GTPO[regime], GRPO[regime], strict=True)
    return sum(measure(runs(gtpo)) - measure(runs(*grpo)) for gtpo, grpo in pairs) / 2


# Fig. 1, late


def fig1_formatting_falls(runs: Runs) -> float:
    """With β = 10⁻⁶ the formatting of GRPO falls by more than 10 points."""
    return runs("grpo-late-g8-beta1e-6").fall("formatting") - 10


def fig1_formatting_falls_with_kl(runs: Runs) -> float:
    """With β = 0.04 the formatting of GRPO falls by more than 10 points."""
    return runs("grpo-late-g8-beta0.04").fall("formatting") - 10


def fig1_formatting_rises_faster_without_kl(runs: Runs) -> float:
    """At first formatting is higher with β = 10⁻⁶ than with 0.04."""
    return runs("grpo-late-g8-beta1e-6").early("formatting") - runs("grpo-late-g8-beta0.04").early("formatting")


def fig1_entropy_rises(runs: Runs) -> float:
    """With β = 10⁻⁶ entropy ends higher than it is at first, as formatting falls."""
    return runs("grpo-late-g8-beta1e-6").late("entropy") - runs("grpo-late-g8-beta1e-6").early("entropy")


def fig1_kl_reacts_late(runs: Runs) -> float:
    """KL reaches half of its highest value after formatting has lost half of what it loses (β = 10⁻⁶)."""
    return runs("grpo-late-g8-beta1e-6").rise_step("kl") - runs("grpo-late-g8-beta1e-6").fall_step("formatting")


# Fig. 2, both regimes


def fig2_stable_accuracy(runs: Runs) -> float:
    """Stable: GTPO ends with the accuracy of GRPO or a higher one (less than 5 points below)."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.late("accuracy")) + 5


def fig2_stable_formatting(runs: Runs) -> float:
    """Stable: the formatting of GTPO ends at most slightly below that of GRPO (less than 5 points)."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.late("formatting")) + 5


def fig2_stable_grpo_does_not_collapse(runs: Runs) -> float:
    """Stable: the formatting of GRPO falls by less than 10 points."""
    return 10 - runs(*GRPO["stable"][0]).fall("formatting")


def fig2_late_accuracy(runs: Runs) -> float:
    """Late: GTPO ends with higher accuracy than GRPO."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.late("accuracy"))


def fig2_late_formatting(runs: Runs) -> float:
    """Late: GTPO ends with higher formatting than GRPO."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.late("formatting"))


def fig2_stable_pass_1(runs: Runs) -> float:
    """Stable: GTPO is ahead of GRPO in pass@1 on held-out problems."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.held_out("pass@1"))


def fig2_stable_pass_32(runs: Runs) -> float:
    """Stable: GTPO is ahead of GRPO in pass@32."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.held_out("pass@32"))


def fig2_stable_maj_32(runs: Runs) -> float:
    """Stable: GTPO is ahead of GRPO in maj@32."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.held_out("maj@32"))


def fig2_stable_lenient_pass_1(runs: Runs) -> float:
    """Stable: GTPO is ahead of GRPO in pass@1 of the answers in any format."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.held_out("pass_lenient@1"))


def fig2_late_pass_1(runs: Runs) -> float:
    """Late: GTPO is ahead of GRPO, at its highest accuracy reward, in pass@1 on held-out problems."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.held_out("pass@1"))


def fig2_late_pass_32(runs: Runs) -> float:
    """Late: GTPO is ahead of GRPO in pass@32."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.held_out("pass@32"))


def fig2_late_maj_32(runs: Runs) -> float:
    """Late: GTPO is ahead of GRPO in maj@32."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.held_out("maj@32"))


def fig2_late_lenient_pass_1(runs: Runs) -> float:
    """Late: GTPO is ahead of GRPO in pass@1 of the answers in any format."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.held_out("pass_lenient@1"))


def fig2_stable_ahead_of_sft(runs: Runs) -> float:
    """Stable: GTPO is ahead of SFT in maj@32."""
    return runs(*GTPO["stable"]).held_out("maj@32") - runs("sft").held_out("maj@32")


def fig2_late_ahead_of_sft(runs: Runs) -> float:
    """Late: GTPO is ahead of SFT in maj@32."""
    return runs(*GTPO["late"]).held_out("maj@32") - runs("sft").held_out("maj@32")


def fig2_larger_groups_are_better(runs: Runs) -> float:
    """A larger G is better for GTPO in pass@1 (mean over both regimes)."""
    return runs("gtpo-g12", "gtpo-late-g12").held_out("pass@1") - runs("gtpo-g8", "gtpo-late-g8").held_out("pass@1")


# Fig. 3, late


def fig3_correction_alone_is_ahead_at_first(runs: Runs) -> float:
    """At first the conflict correction alone is more accurate than GRPO."""
    return runs("gtpo-late-correction-only").early("accuracy") - runs(*GRPO["late"][0]).early("accuracy")


def fig3_correction_alone_is_ahead_of_kl_at_first(runs: Runs) -> float:
    """At first the conflict correction alone is more accurate than GRPO with β = 0.04."""
    return runs("gtpo-late-correction-only").early("accuracy") - runs("grpo-late-g8-beta0.04").early("accuracy")


def fig3_correction_alone_degrades_in_accuracy(runs: Runs) -> float:
    """The conflict correction alone degrades: its accuracy falls by more than 10 points."""
    return runs("gtpo-late-correction-only").fall("accuracy") - 10


def fig3_correction_alone_degrades_in_formatting(runs: Runs) -> float:
    """The conflict correction alone degrades: its formatting falls by more than 10 points."""
    return runs("gtpo-late-correction-only").fall("formatting") - 10


def fig3_correction_alone_ends_below_grpo(runs: Runs) -> float:
    """The conflict correction alone ends below GRPO in accuracy."""
    return runs(*GRPO["late"][0]).late("accuracy") - runs("gtpo-late-correction-only").late("accuracy")


def fig3_entropy_control_repairs_accuracy(runs: Runs) -> float:
    """GTPO, with entropy control, ends above the conflict correction alone in accuracy."""
    return runs("gtpo-late-g8").late("accuracy") - runs("gtpo-late-correction-only").late("accuracy")


def fig3_entropy_control_repairs_formatting(runs: Runs) -> float:
    """GTPO, with entropy control, ends above the conflict correction alone in formatting."""
    return runs("gtpo-late-g8").late("formatting") - runs("gtpo-late-correction-only").late("formatting")


def fig3_gtpo_ends_above_kl_in_accuracy(runs: Runs) -> float:
    """GTPO ends above GRPO with β = 0.04 in accuracy."""
    return runs("gtpo-late-g8").late("accuracy") - runs("grpo-late-g8-beta0.04").late("accuracy")


def fig3_gtpo_ends_above_kl_in_formatting(runs: Runs) -> float:
    """GTPO ends above GRPO with β = 0.04 in formatting."""
    return runs("gtpo-late-g8").late("formatting") - runs("grpo-late-g8-beta0.04").late("formatting")


# Fig. 4a, late


def fig4a_larger_gamma_is_more_accurate(runs: Runs) -> float:
    """γ = 0.1 ends with higher accuracy than smaller γ (mean of three)."""
    return runs("gtpo-late-g8").late("accuracy") - runs(*SMALLER_GAMMAS).late("accuracy")


def fig4a_larger_gamma_keeps_entropy(runs: Runs) -> float:
    """γ = 0.1 keeps entropy slightly higher than γ = 10⁻⁶ (at the end)."""
    return runs("gtpo-late-g8").late("entropy") - runs("gtpo-late-gamma1e-6").late("entropy")


def fig4a_entropy_rises_without_filter(runs: Runs) -> float:
    """Without the filter entropy ends above ln 2."""
    return runs("gtpo-late-no-filter").late("entropy") - log(2)


def fig4a_entropy_stays_low_with_filter(runs: Runs) -> float:
    """With the filter entropy stays below ln 2 (its highest value)."""
    return log(2) - runs("gtpo-late-g8").highest("entropy")


def fig4a_filter_keeps_accuracy(runs: Runs) -> float:
    """Without the filter accuracy collapses: it ends higher with the filter."""
    return runs("gtpo-late-g8").late("accuracy") - runs("gtpo-late-no-filter").late("accuracy")


def fig4a_filter_keeps_formatting(runs: Runs) -> float:
    """Without the filter formatting collapses: it ends higher with the filter."""
    return runs("gtpo-late-g8").late("formatting") - runs("gtpo-late-no-filter").late("formatting")


# Fig. 4b, late


def fig4b_loose_threshold_raises_entropy(runs: Runs) -> float:
    """With the loose threshold 2.0 entropy ends higher than with 0.7."""
    return runs("gtpo-late-h2.0").late("entropy") - runs("gtpo-late-h0.7").late("entropy")


def fig4b_tight_thresholds_are_more_accurate(runs: Runs) -> float:
    """Tight thresholds (mean of 0.7 and 1.05) end with higher accuracy than 2.0."""
    return runs("gtpo-late-h0.7", "gtpo-late-h1.05").late("accuracy") - runs("gtpo-late-h2.0").late("accuracy")


def fig4b_tight_thresholds_keep_formatting(runs: Runs) -> float:
    """Tight thresholds (mean of 0.7 and 1.05) end with higher formatting than 2.0."""
    return runs("gtpo-late-h0.7", "gtpo-late-h1.05").late("formatting") - runs("gtpo-late-h2.0").late("formatting")


# Fig. 4c, stable


def fig4c_negative_filter_costs_accuracy(runs: Runs) -> float:
    """Filtering negative completions alone (mean of three thresholds) ends with lower accuracy than no filter."""
    return runs("gtpo-no-filter").late("accuracy") - runs(*ONLY_NEGATIVE).late("accuracy")


def fig4c_negative_filter_costs_formatting(runs: Runs) -> float:
    """Filtering negative completions alone ends with lower formatting than no filter."""
    return runs("gtpo-no-filter").late("formatting") - runs(*ONLY_NEGATIVE).late("formatting")


def fig4c_negative_filter_lowers_entropy(runs: Runs) -> float:
    """Filtering negative completions alone ends with lower entropy than no filter."""
    return runs("gtpo-no-filter").late("entropy") - runs(*ONLY_NEGATIVE).late("entropy")


# Fig. 4d, late


def fig4d_grpo_loses_formatting(runs: Runs) -> float:
    """GRPO without KL (β = 0) collapses: its formatting falls by more than 10 points."""
    return runs("grpo-late-g8-beta0").fall("formatting") - 10


def fig4d_grpo_loses_accuracy(runs: Runs) -> float:
    """GRPO without KL (β = 0) collapses: its accuracy falls by more than 10 points."""
    return runs("grpo-late-g8-beta0").fall("accuracy") - 10


def fig4d_grpo_entropy_spikes(runs: Runs) -> float:
    """The entropy of GRPO without KL (β = 0) rises above ln 2 (its highest value)."""
    return runs("grpo-late-g8-beta0").highest("entropy") - log(2)


def fig4d_entropy_control_helps_grpo(runs: Runs) -> float:
    """Entropy control lets GRPO end with higher accuracy."""
    return runs("gtpo-late-no-correction-h1.05").late("accuracy") - runs("grpo-late-g8-beta0").late("accuracy")


def fig4d_entropy_control_repairs_formatting(runs: Runs) -> float:
    """Entropy control lets GRPO end with higher formatting."""
    return runs("gtpo-late-no-correction-h1.05").late("formatting") - runs("grpo-late-g8-beta0").late("formatting")


def fig4d_correction_adds_accuracy(runs: Runs) -> float:
    """GTPO ends more accurate than GRPO with the same entropy control."""
    return runs("gtpo-late-h1.05").late("accuracy") - runs("gtpo-late-no-correction-h1.05").late("accuracy")


def fig4d_correction_adds_formatting(runs: Runs) -> float:
    """GTPO ends with higher formatting than GRPO with the same entropy control."""
    return runs("gtpo-late-h1.05").late("formatting") - runs("gtpo-late-no-correction-h1.05").late("formatting")


def fig4d_gtpo_keeps_entropy_lower(runs: Runs) -> float:
    """GTPO ends with lower entropy than GRPO (β = 0)."""
    return runs("grpo-late-g8-beta0").late("entropy") - runs("gtpo-late-h1.05").late("entropy")


# Fig. 5a, stable


def fig5a_kl_raises_entropy(runs: Runs) -> float:
    """With β = 0.04 entropy increases: it ends higher than it is at first."""
    return runs("grpo-g8-beta0.04").late("entropy") - runs("grpo-g8-beta0.04").early("entropy")


def fig5a_kl_costs_accuracy(runs: Runs) -> float:
    """GRPO (β = 0 and 10⁻⁶) ends with higher accuracy than with β = 0.04."""
    return runs(*GRPO["stable"][0]).late("accuracy") - runs("grpo-g8-beta0.04").late("accuracy")


def fig5a_kl_costs_formatting(runs: Runs) -> float:
    """GRPO (β = 0 and 10⁻⁶) ends with higher formatting than with β = 0.04."""
    return runs(*GRPO["stable"][0]).late("formatting") - runs("grpo-g8-beta0.04").late("formatting")


# Fig. 5b, mean over both regimes


def fig5b_larger_groups_are_more_accurate(runs: Runs) -> float:
    """GTPO with G = 12 ends with higher accuracy than with 8."""
    return runs("gtpo-g12", "gtpo-late-g12").late("accuracy") - runs("gtpo-g8", "gtpo-late-g8").late("accuracy")


def fig5b_larger_groups_format_earlier(runs: Runs) -> float:
    """At first the formatting of GTPO is higher with G = 12 than with 8."""
    return runs("gtpo-g12", "gtpo-late-g12").early("formatting") - runs("gtpo-g8", "gtpo-late-g8").early("formatting")


def fig5b_conflict_grows_with_groups(runs: Runs) -> float:
    """A completion has more conflict tokens with G = 12 than with 8."""
    more, less = runs("gtpo-g12", "gtpo-late-g12"), runs("gtpo-g8", "gtpo-late-g8")
    return more.mean("conflict_tokens") - less.mean("conflict_tokens")


# Fig. 6, stable


def fig6_adam_costs_accuracy(runs: Runs) -> float:
    """Adam with α₁ = α₂ = 0.999999 costs GRPO accuracy at the end (the paper: LLaMA; Qwen slightly)."""
    return runs("grpo-g8-beta1e-6").late("accuracy") - runs("grpo-g8-beta1e-6-adam0.999999").late("accuracy")


def fig6_adam_costs_formatting(runs: Runs) -> float:
    """Adam with α₁ = α₂ = 0.999999 costs GRPO formatting at the end (the paper: LLaMA)."""
    return runs("grpo-g8-beta1e-6").late("formatting") - runs("grpo-g8-beta1e-6-adam0.999999").late("formatting")


# Table 1: out of distribution


def table1_stable_pass_64(runs: Runs) -> float:
    """Stable: GTPO is ahead of GRPO in pass@64 on harder problems."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.harder("pass@64"))


def table1_stable_maj_64(runs: Runs) -> float:
    """Stable: GTPO is ahead of GRPO in maj@64 on harder problems."""
    return gtpo_minus_grpo(runs, "stable", lambda run: run.harder("maj@64"))


def table1_late_pass_64(runs: Runs) -> float:
    """Late: GTPO is ahead of GRPO, at its highest accuracy reward, in pass@64 on harder problems."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.harder("pass@64"))


def table1_late_maj_64(runs: Runs) -> float:
    """Late: GTPO is ahead of GRPO, at its highest accuracy reward, in maj@64 on harder problems."""
    return gtpo_minus_grpo(runs, "late", lambda run: run.harder("maj@64"))


def table1_ahead_of_sft_in_pass_64(runs: Runs) -> float:
    """GTPO (mean over both regimes) is ahead of SFT in pass@64 on harder problems."""
    return runs(*GTPO["stable"], *GTPO["late"]).harder("pass@64") - runs("sft").harder("pass@64")


def table1_ahead_of_sft_in_maj_64(runs: Runs) -> float:
    """GTPO (mean over both regimes) is ahead of SFT in maj@64 on harder problems."""
    return runs(*GTPO["stable"], *GTPO["late"]).harder("maj@64") - runs("sft").harder("maj@64")


# Beyond the paper: other aggregations, late. Is the correction more than leaving 1/|o_i| out?


def baselines_gtpo_ends_above_dr_grpo_in_accuracy(runs: Runs) -> float:
    """GTPO ends above Dr. GRPO in accuracy."""
    return runs("gtpo-late-g8").late("accuracy") - runs("grpo-late-dr-grpo").late("accuracy")


def baselines_gtpo_ends_above_dr_grpo_in_formatting(runs: Runs) -> float:
    """GTPO ends above Dr. GRPO in formatting."""
    return runs("gtpo-late-g8").late("formatting") - runs("grpo-late-dr-grpo").late("formatting")


def baselines_gtpo_ends_above_dapo_in_accuracy(runs: Runs) -> float:
    """GTPO ends above DAPO in accuracy."""
    return runs("gtpo-late-g8").late("accuracy") - runs("grpo-late-dapo").late("accuracy")


def baselines_gtpo_ends_above_dapo_in_formatting(runs: Runs) -> float:
    """GTPO ends above DAPO in formatting."""
    return runs("gtpo-late-g8").late("formatting") - runs("grpo-late-dapo").late("formatting")


def baselines_gtpo_improves_dr_grpo_in_accuracy(runs: Runs) -> float:
    """With the aggregation of Dr. GRPO, GTPO ends above Dr. GRPO in accuracy."""
    return runs("gtpo-late-dr-grpo").late("accuracy") - runs("grpo-late-dr-grpo").late("accuracy")


def baselines_gtpo_improves_dr_grpo_in_formatting(runs: Runs) -> float:
    """With the aggregation of Dr. GRPO, GTPO ends above Dr. GRPO in formatting."""
    return runs("gtpo-late-dr-grpo").late("formatting") - runs("grpo-late-dr-grpo").late("formatting")


def baselines_gtpo_improves_dapo_in_accuracy(runs: Runs) -> float:
    """With the aggregation of DAPO, GTPO ends above DAPO in accuracy."""
    return runs("gtpo-late-dapo").late("accuracy") - runs("grpo-late-dapo").late("accuracy")


def baselines_gtpo_improves_dapo_in_formatting(runs: Runs) -> float:
    """With the aggregation of DAPO, GTPO ends above DAPO in formatting."""
    return runs("gtpo-late-dapo").late("formatting") - runs("grpo-late-dapo").late("formatting")


def baselines_w_reinforce_keeps_entropy(runs: Runs) -> float:
    """W-REINFORCE ends with higher entropy than GRPO (arXiv 2506.01347)."""
    return runs("grpo-late-w-reinforce").late("entropy") - runs("grpo-late-g8-beta0").late("entropy")


def baselines_grpo_pushes_conflict_tokens_down(runs: Runs) -> float:
    """GRPO lowers the probability of the tokens that rewarded and penalized completions share (Section 4.1)."""
    return -1000 * runs("grpo-late-g8-beta0").mean("conflict_push")


def baselines_equal_weights_push_conflict_tokens_less_down(runs: Runs) -> float:
    """DAPO, whose tokens have equal weights, lowers the probability of shared tokens less than GRPO."""
    return 1000 * (runs("grpo-late-dapo").mean("conflict_push") - runs("grpo-late-g8-beta0").mean("conflict_push"))


# Beyond the paper: which tokens, late; a task without mathematics


def spans_anchored_is_ahead_of_first_run(runs: Runs) -> float:
    """Correcting runs at both ends (GTPO) ends with higher accuracy than the first run anywhere."""
    return runs("gtpo-late-g8").late("accuracy") - runs("gtpo-late-span-first-run").late("accuracy")


def spans_anchored_is_ahead_of_common(runs: Runs) -> float:
    """Correcting runs at both ends (GTPO) ends with higher accuracy than the span common to the whole group."""
    return runs("gtpo-late-g8").late("accuracy") - runs("gtpo-late-span-common").late("accuracy")


def word_gtpo_ends_above_grpo(runs: Runs) -> float:
    """GTPO ends with more required words than GRPO (percent of the maximum reward)."""
    metric = "rewards/word_reward/mean"
    return 10 * (runs("gtpo-word").late(metric) - runs("grpo-word").late(metric))


CLAIMS: dict[str, tuple[Claim, ...]] = {  # figure -> its claims, in the order of the page
    "fig1": (
        fig1_formatting_falls,
        fig1_formatting_falls_with_kl,
        fig1_formatting_rises_faster_without_kl,
        fig1_entropy_rises,
        fig1_kl_reacts_late,
    ),
    "fig2": (
        fig2_stable_accuracy,
        fig2_stable_formatting,
        fig2_stable_grpo_does_not_collapse,
        fig2_stable_pass_1,
        fig2_stable_pass_32,
        fig2_stable_maj_32,
        fig2_stable_lenient_pass_1,
        fig2_stable_ahead_of_sft,
        fig2_late_accuracy,
        fig2_late_formatting,
        fig2_late_pass_1,
        fig2_late_pass_32,
        fig2_late_maj_32,
        fig2_late_lenient_pass_1,
        fig2_late_ahead_of_sft,
        fig2_larger_groups_are_better,
    ),
    "fig3": (
        fig3_correction_alone_is_ahead_at_first,
        fig3_correction_alone_is_ahead_of_kl_at_first,
        fig3_correction_alone_degrades_in_accuracy,
        fig3_correction_alone_degrades_in_formatting,
        fig3_correction_alone_ends_below_grpo,
        fig3_entropy_control_repairs_accuracy,
        fig3_entropy_control_repairs_formatting,
        fig3_gtpo_ends_above_kl_in_accuracy,
        fig3_gtpo_ends_above_kl_in_formatting,
    ),
    "fig4a": (
        fig4a_larger_gamma_is_more_accurate,
        fig4a_larger_gamma_keeps_entropy,
        fig4a_entropy_rises_without_filter,
        fig4a_entropy_stays_low_with_filter,
        fig4a_filter_keeps_accuracy,
        fig4a_filter_keeps_formatting,
    ),
    "fig4b": (
        fig4b_loose_threshold_raises_entropy,
        fig4b_tight_thresholds_are_more_accurate,
        fig4b_tight_thresholds_keep_formatting,
    ),
    "fig4c": (
        fig4c_negative_filter_costs_accuracy,
        fig4c_negative_filter_costs_formatting,
        fig4c_negative_filter_lowers_entropy,
    ),
    "fig4d": (
        fig4d_grpo_loses_formatting,
        fig4d_grpo_loses_accuracy,
        fig4d_grpo_entropy_spikes,
        fig4d_entropy_control_helps_grpo,
        fig4d_entropy_control_repairs_formatting,
        fig4d_correction_adds_accuracy,
        fig4d_correction_adds_formatting,
        fig4d_gtpo_keeps_entropy_lower,
    ),
    "fig5a": (fig5a_kl_raises_entropy, fig5a_kl_costs_accuracy, fig5a_kl_costs_formatting),
    "fig5b": (
        fig5b_larger_groups_are_more_accurate,
        fig5b_larger_groups_format_earlier,
        fig5b_conflict_grows_with_groups,
    ),
    "fig6": (fig6_adam_costs_accuracy, fig6_adam_costs_formatting),
    "table1": (
        table1_stable_pass_64,
        table1_stable_maj_64,
        table1_late_pass_64,
        table1_late_maj_64,
        table1_ahead_of_sft_in_pass_64,
        table1_ahead_of_sft_in_maj_64,
    ),
    "baselines": (
        baselines_gtpo_ends_above_dr_grpo_in_accuracy,
        baselines_gtpo_ends_above_dr_grpo_in_formatting,
        baselines_gtpo_ends_above_dapo_in_accuracy,
        baselines_gtpo_ends_above_dapo_in_formatting,
        baselines_gtpo_improves_dr_grpo_in_accuracy,
        baselines_gtpo_improves_dr_grpo_in_formatting,
        baselines_gtpo_improves_dapo_in_accuracy,
        baselines_gtpo_improves_dapo_in_formatting,
        baselines_w_reinforce_keeps_entropy,
        baselines_grpo_pushes_conflict_tokens_down,
        baselines_equal_weights_push_conflict_tokens_less_down,
    ),
    "spans": (spans_anchored_is_ahead_of_first_run, spans_anchored_is_ahead_of_common),
    "word": (word_gtpo_ends_above_grpo,),
}
