"""Fuzzing of command lines, YAML files and completions: a result or a one-line error, never a traceback.

    python -m pytest tests/test_fuzz.py                          # a few hundred examples of each kind
    GTPO_FUZZ=full python -m pytest tests/test_fuzz.py           # 2,400 settings and 24,000 completions

The few examples are the same in every run, the many differ; hypothesis prints the smallest failing one.
"""

import contextlib
import io
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import HfArgumentParser
from trl import GRPOConfig, SFTConfig

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, PromptArguments, RewardArguments, RunArguments
from gtpo.cli import parse as cli
from gtpo.cli.parse import parse
from gtpo.runs import script
from gtpo.runs.script import run_script
from rewards import accuracy_reward, format_reward

FULL = os.environ.get("GTPO_FUZZ") == "full"
BATCH = 24  # completions per call of the rewards

CLASSES: dict[str, tuple[type, ...]] = {
    "gtpo": (DataArguments, PromptArguments, RewardArguments, ModelArguments, RunArguments, GTPOArguments, GRPOConfig),
    "grpo": (DataArguments, PromptArguments, RewardArguments, ModelArguments, RunArguments, GRPOConfig),
    "sft": (DataArguments, PromptArguments, ModelArguments, RunArguments, SFTConfig),
}
ACTIONS = {
    method: {
        flag: action
        for flag, action in HfArgumentParser(classes, conflict_handler="resolve")._option_string_actions.items()
        if flag.startswith("--")
    }
    for method, classes in CLASSES.items()
}


def examples(few: int, full: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=full if FULL else few, derandomize=not FULL, suppress_health_check=checks)


# ---- settings ----

ODD = ["", " ", "-", "--", "=", "a=b", "\n", "a\nb", "\r", "\u2028", "é", "🙂", "\udcff", "x" * 3000, "%s", "%", "{0}"]
ODD += ["nan", "inf", "-inf", "1e400", "-1e400", "1e-320", "9" * 25, "9" * 5000, "0x12", "1_0", "１２", "-0", "1.0"]
ODD += ["true", "False", "oui", "on", "off", "none", "None", "null", "auto", "[]", "{}", '{"a": [1]}', "[1, 2]", "{"]
ODD += ["../..", "/dev/null", "~", "$HOME", "-x", "-h", "--help", "--gamma=3", "tiny", "llama", "gsm8k", "lm_head"]
WORDS = st.sampled_from(ODD) | st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)
INTEGERS = st.sampled_from(["0", "-1", "1", "2", "3", "12", "100", "-5", str(2**32), str(2**63), "1" + "0" * 30])
FLOATS = st.sampled_from(["0", "-1", "1e-6", "0.5", "1", "1.5", "1e9", "1e308", "1e-320", "nan", "inf", "1e400"])
YAML_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | WORDS
    | st.dates()
    | st.datetimes()
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.integers() | st.dates(), inner, max_size=2),
    max_leaves=4,
)
YAML_TEXTS = ["a: [", "- 1", "gamma: 1\ngamma: 2", "gamma: &a [*a]", "lr_scheduler_kwargs: &a {b: *a}", "<<: 1"]
YAML_TEXTS += ["gamma: !!int ''", "gamma: !!bool x", "gamma: !!timestamp x", "gamma: !!float x", "gamma: 2001-99-99"]
YAML_TEXTS += [
    "gamma: !!python/object:os.system {}",
    "gamma: " + "9" * 5000,
    "? [1]\n: 2",
    "\x00",
    "\ufeff",
    "gamma: 0b",
]
YAML_TEXTS += ["gamma: 'a\n", "gamma: |\n  a\n  b", "gamma: 1:30:00", "gamma: .nan", "--- 1\n--- 2", "gamma: \t1"]
YAML_TEXTS += ["[" * 5000, "gamma: " + "{a: " * 5000]


def values_for(action: Any) -> st.SearchStrategy[str]:
    """Values of the type that a flag takes, sensible and absurd; "" is the flag without a value."""
    if action.choices:
        return st.sampled_from([str(choice) for choice in action.choices])
    if action.nargs == 0:
        return st.just("")
    kinds = {"int": INTEGERS, "float": FLOATS, "string_to_bool": st.sampled_from(["true", "false", ""])}
    return kinds.get(getattr(action.type, "__name__", ""), WORDS | INTEGERS)


@st.composite
def command_lines(draw: Any, method: str) -> list[str]:
    argv: list[str] = []
    for _ in range(draw(st.integers(0, 3))):
        flag = draw(st.sampled_from(sorted(ACTIONS[method])))
        if draw(st.integers(0, 4)):
            value = draw(values_for(ACTIONS[method][flag]))
            argv += [f"{flag}={value}"] if value else [flag]
        else:
            argv += [draw(st.just(flag) | st.text(max_size=6).map("--".__add__)), *draw(st.lists(WORDS, max_size=2))]
    return argv


@st.composite
def files(draw: Any, method: str) -> bytes:
    if not draw(st.integers(0, 6)):
        return draw(
            st.sampled_from(YAML_TEXTS).map(str.encode) | st.binary(max_size=20) | st.text(max_size=20).map(str.encode)
        )
    content: dict[Any, Any] = {}
    for _ in range(draw(st.integers(0, 3))):
        flag = draw(st.sampled_from(sorted(ACTIONS[method])))
        if draw(st.integers(0, 3)):
            content[flag[2:]] = draw(values_for(ACTIONS[method][flag]))
        else:
            content[draw(st.just(flag[2:]) | WORDS | st.integers())] = draw(YAML_VALUES)
    return yaml.safe_dump(content, allow_unicode=True).encode(errors="surrogatepass")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; the environment is restored after the test."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(cli, "gpu_is_available", lambda: False)
    environment = dict(os.environ)
    yield tmp_path / "empty"
    os.environ.clear()
    os.environ.update(environment)


def assert_settings_or_one_line_error(method: str, argv: list[str], empty: Path) -> None:
    """The exit code is 0 with settings that YAML can store, or 2 with one line; nothing is written."""
    resolved: dict[str, Any] = {}
    stderr = io.StringIO()
    sys.argv = [f"train_{method}.py"]
    script._training = False  # a test before may have begun one
    with (
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(SystemExit) as ended,
    ):
        run_script(lambda: resolved.update(parse(method, CLASSES[method], argv).to_dict()))
    assert list(empty.iterdir()) == []
    if ended.value.code == 0:
        wants_help = any(argument.startswith("-h") or argument == "--help" for argument in argv)
        assert wants_help or yaml.safe_load(yaml.safe_dump(resolved)) == resolved
        return
    assert ended.value.code == 2
    (line,) = stderr.getvalue().splitlines()
    assert line.startswith(f"train_{method}.py: ") and len(line) > len(f"train_{method}.py: ")


@pytest.mark.parametrize("method", CLASSES)
def test_a_command_line_gives_settings_or_a_one_line_error(method: str, empty: Path) -> None:
    @examples(40, 400)
    @given(command_lines(method))
    def holds(argv: list[str]) -> None:
        assert_settings_or_one_line_error(method, argv, empty)

    holds()


@pytest.mark.parametrize("method", CLASSES)
def test_a_settings_file_gives_settings_or_a_one_line_error(method: str, empty: Path) -> None:
    file = empty.parent / "settings.yaml"

    @examples(40, 400)
    @given(files(method))
    def holds(text: bytes) -> None:
        file.write_bytes(text)
        assert_settings_or_one_line_error(method, ["--config", str(file)], empty)

    holds()


# ---- completions ----

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
