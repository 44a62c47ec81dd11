"""The runs of each figure, written by hand from the paper's text."""

_MAIN = {  # Section 6: all models x datasets; GRPO with beta 0 and 1e-6; G = 8 and 12
    f"{method}-{model}-{dataset}{variant}"
    for model in ("llama", "qwen")
    for dataset in ("gsm8k", "math")
    for method, variants in {
        "sft": [""],
        "grpo": ["-g8-beta0", "-g8-beta1e-6", "-g12-beta0", "-g12-beta1e-6"],
        "gtpo": ["-g8", "-g12"],
    }.items()
    for variant in variants
}
FIGURES = {
    "Fig. 1": {"grpo-llama-gsm8k-g8-beta0.04", "grpo-llama-gsm8k-g8-beta1e-6"},
    "Fig. 2": _MAIN,
    "Fig. 3": {
        *("grpo-llama-gsm8k-g8-beta0", "grpo-llama-gsm8k-g8-beta0.04", "grpo-llama-gsm8k-g8-beta1e-6"),
        *("gtpo-llama-gsm8k-g8", "gtpo-llama-gsm8k-correction-only"),
    },
    "Fig. 4a": {
        *("gtpo-llama-math-g8", "gtpo-llama-math-gamma0.01", "gtpo-llama-math-gamma0.001"),
        *("gtpo-llama-math-gamma1e-6", "gtpo-llama-math-no-filter"),
    },
    "Fig. 4b": {"gtpo-llama-gsm8k-h0.7", "gtpo-llama-gsm8k-h1.05", "gtpo-llama-gsm8k-h2.0"},
    "Fig. 4c": {
        *("grpo-qwen-gsm8k-g8-beta1e-6", "gtpo-qwen-gsm8k-g8", "gtpo-qwen-gsm8k-onlyneg0.7"),
        *("gtpo-qwen-gsm8k-onlyneg1.05", "gtpo-qwen-gsm8k-onlyneg2.0"),
    },
    "Fig. 4d": {"grpo-llama-gsm8k-g8-beta0", "gtpo-llama-gsm8k-no-correction-h1.05", "gtpo-llama-gsm8k-h1.05"},
    "Fig. 5a": {"grpo-qwen-math-g8-beta0", "grpo-qwen-math-g8-beta1e-6", "grpo-qwen-math-g8-beta0.04"},
    "Fig. 5b": {
        *("gtpo-llama-gsm8k-g8", "gtpo-llama-gsm8k-g12", "gtpo-llama-math-g8", "gtpo-llama-math-g12"),
        *("gtpo-qwen-gsm8k-g8", "gtpo-qwen-gsm8k-g12", "gtpo-qwen-math-g8", "gtpo-qwen-math-g12"),
    },
    "Fig. 6": {
        *("grpo-llama-math-g8-beta1e-6", "grpo-llama-math-g8-beta1e-6-adam0.999999"),
        *("grpo-qwen-math-g8-beta1e-6", "grpo-qwen-math-g8-beta1e-6-adam0.999999"),
    },
    "Logs": {  # what the authors' wandb files of August 2025 have other than Listing 1
        *("gtpo-llama-gsm8k-g8", "gtpo-llama-gsm8k-temperature0.9"),
        *("gtpo-llama-gsm8k-lr2e-6", "gtpo-llama-gsm8k-h1.02"),
    },
    "Table 1": _MAIN,  # "using the best of GTPO, GRPO, and SFT": every run of Fig. 2 is a candidate
}
