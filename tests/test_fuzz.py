"""Fuzzing of completions: a reward, never a traceback.

    python -m pytest tests/test_fuzz.py                          # 720 completions, the same in every run
    GTPO_FUZZ=full python -m pytest tests/test_fuzz.py           # 24,000 others

A failure names the seed of its completions.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from rewards import accuracy_reward, format_reward

FULL = os.environ.get("GTPO_FUZZ") == "full"
BATCH = 24  # completions per call of the rewards

GOLDS = ["18", "-3", "0.5", r"\frac{1}{2}", "(3, 4)", r"[0, 1)", r"x^2 + 1", r"2\sqrt{3}", "204_5", r"\{1, 2\}", "033"]
GOLDS += [
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\frac{\pi}{3}",
    "x = 5",
    r"10\%",
    r"\text{Monday}",
    "y < 3",
    "2^{99}",
]
TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]


def attack(generator: random.Random) -> str:
    """A text meant to crash a parser, exhaust it, or be executed by it."""
    n = generator.choice([1, 2, 3, 10, 39, 41, 200, 900, 5000])
    return generator.choice(
        [
            "^".join(["9"] * n),
            "9^{" * n + "9" + "}" * n,
            "(" * n + "1" + ")" * n,
            r"\frac{1}{" * n + "x" + "}" * n,
            r"\sqrt{" * n + "2" + "}" * n,
            r"\boxed{" * n + "18" + "}" * n,
            "9" * n,
            "1e" + "9" * n,
            "9" * min(n, 8) + "!" * min(n, 4),
            "((" + "9" * min(n, 5) + "!)!)!",
            rf"\binom{{{10 ** min(n, 20)}}}{{{10 ** min(n, 19)}}}",
            rf"\sum_{{i=1}}^{{{10 ** min(n, 30)}}} i",
            rf"(x+1)^{{{n}}}",
            rf"x^{{{n}}} - 1 = 0",
            ", ".join(map(str, range(min(n, 300)))),
            r"\cup".join(rf"[{i}, {i + 1})" for i in range(min(n, 60))),
            "|" * n + "x" + "|" * n,
            r"\text{" * n + "a" + "}" * n,
            "__import__('os').system('touch hacked')",
            "().__class__.__bases__[0].__subclasses__()",
            "exec(\"open('hacked', 'w')\")",
            r"\def\x{\x\x}\x",
            "%s%n{0}{}",
            "１８",
            "\u202e81",
            "1\u0301" * min(n, 300),
            r"\begin{pmatrix}" + r" 1 \\" * min(n, 200) + r"\end{pmatrix}",
            r"\infty - \infty",
            r"\frac{0}{0}",
            r"(-8)^{1/3}",
        ]
    )


def fragment(generator: random.Random) -> str:
    return generator.choice(
        [
            lambda: generator.choice(TAGS),
            lambda: generator.choice(GOLDS),
            lambda: generator.choice(GOLDS).replace("1", generator.choice("0123456789")),
            lambda: attack(generator),
            lambda: generator.randbytes(generator.randrange(30)).decode("latin-1"),
            lambda: generator.randbytes(generator.randrange(30)).decode("utf-8", "replace"),
            lambda: generator.randbytes(generator.randrange(30)).decode("utf-8", "surrogateescape"),
            lambda: "".join(chr(generator.randrange(0x110000)) for _ in range(generator.randrange(12))),
            lambda: "".join(
                generator.choice(r"0123456789x+-*/^_{}()[]\,.=<>|!%$& ") for _ in range(generator.randrange(40))
            ),
            lambda: generator.choice(["\n", " ", "", "The answer is ", "**", "$"]),
        ]
    )()


def hostile(generator: random.Random) -> Any:
    """A completion: well-formed around a hostile answer, or random fragments; text or a conversation."""
    if generator.random() < 0.5:
        inside = "".join(fragment(generator) for _ in range(generator.choice([1, 1, 1, 2, 3])))
        text = f"<reasoning>\n{fragment(generator)}\n</reasoning>\n<answer>\n{inside}\n</answer>"
    else:
        text = "".join(fragment(generator) for _ in range(generator.randrange(12)))
    return generator.choice([text, text, [{"role": "assistant", "content": text}]])


@pytest.mark.parametrize("part", range(10))
def test_rewards_accept_any_completion(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = random.Random() if FULL else random.Random(part)
    for _ in range(100 if FULL else 3):
        seed = generator.randrange(2**32)
        drawn = random.Random(seed)
        completions = [hostile(drawn) for _ in range(BATCH)]
        golds = [drawn.choice(GOLDS) for _ in range(BATCH)]
        metrics: dict[str, float] = {}
        formats = format_reward(completions)
        accuracies = accuracy_reward(completions, answer=golds, log_metric=metrics.__setitem__)
        assert len(formats) == len(accuracies) == BATCH, seed
        assert set(formats) <= {0.0, 1.0, 10.0} and set(accuracies) <= {0.0, 10.0}, seed
        assert 0 <= metrics["grader_timeouts"] <= BATCH, seed
    assert list(tmp_path.iterdir()) == []
