"""The bar of an evaluation: it moves with each token and fits 80 columns."""

import pytest

from gtpo.evaluation.progress import CompletionBar


def test_a_token_moves_the_bar_and_a_completion_that_ends_early_counts_as_a_whole() -> None:
    with CompletionBar("run, Arithmetic", total=8, done=2, max_new_tokens=10) as bar:
        assert bar.bar.n == 2
        bar.count_tokens(4)
        assert bar.bar.n == pytest.approx(2.4)
        bar.count_tokens(3)
        bar.count_completions([{"tokens": 2}, {"tokens": 3}])  # two tokens are those of a third completion
        assert bar.bar.n == pytest.approx(4.2)
        bar.count_tokens(8)
        bar.count_completions([{"tokens": 10}])
        assert (bar.bar.n, bar.tokens) == (5, 15)


@pytest.mark.parametrize("title", ["run, AMC 23", "a-run-with-a-long-name@best, Arithmetic, 4 to 5 steps"])
def test_the_bar_fits_80_columns(
    title: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with CompletionBar(title, total=32_000, done=31_000, max_new_tokens=1500) as bar:
        bar.count_tokens(1_234_567)
    lines = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line]
    assert lines and all(len(line) <= 80 for line in lines)
    assert title[:20] in lines[-1] and "31000/32000, 1.23M tokens]" in lines[-1]
