"""The results table: its columns are those of Table 1."""

from dataclasses import replace

from pytest import mark

from gtpo.evaluation.records import CompletionSettings, Entry, Origin, Sampling, Scores
from gtpo.evaluation.table import MAJ_COLUMNS, PASS_COLUMNS, columns_up_to, format_table, lay_out


def test_the_table_has_the_columns_of_the_paper() -> None:
    def entry(label: str, benchmark: str, k: int, scores: list[float]) -> Entry:
        ks = [2**i for i in range(k.bit_length())]
        values = dict(zip(ks, scores, strict=True))
        return Entry(
            label=label,
            benchmark=benchmark,
            problems=40,
            k=k,
            strict=Scores(
                {"pass": values, "maj": {k: value / 4 for k, value in values.items()}}, {"pass": {1: [30.0, 45.04]}}
            ),
            lenient=Scores(
                {
                    "pass": {k: value + 1 for k, value in values.items()},
                    "maj": {k: value / 4 for k, value in values.items()},
                },
                {"pass": {1: [31.0, 50.0]}},
            ),
            shares={"format": 97.5, "finished": 87.5, "unreadable": 2.25},
            settings=CompletionSettings(sampling=Sampling(k)),
            origin=Origin("Qwen/Qwen2.5-3B-Instruct", None if label == "base" else label),
            per_problem=[],
        )

    base = entry("base", "amc23", 8, [37.5, 0, 40, 65])
    gtpo = entry("gtpo-gsm8k", "amc23", 8, [40, 0, 52, 100])
    elsewhere = entry("gtpo-gsm8k", "aime24", 1, [3.333])
    assert format_table([base, elsewhere, gtpo]).splitlines() == [
        "AMC 2023: 40 problems, k = 8",
        "Base model: Qwen2.5-3B-Instruct",
        "           Pass@k (%)        Maj@k (%)       Format Cut off Unreadable  \\",
        "                    1      8         4     8    (%)     (%)        (%)",
        "base             37.5   65.0      10.0  16.2   97.5    12.5        2.2",
        "gtpo-gsm8k       40.0  100.0      13.0  25.0   97.5    12.5        2.2",
        "",
        "                  Pass@1",
        "           95 % interval",
        "base        30.0 to 45.0",
        "gtpo-gsm8k  30.0 to 45.0",
        "",
        "AIME 2024: 40 problems, k = 1",
        "Base model: Qwen2.5-3B-Instruct",
        "           Pass@k (%) Maj@k (%) Format Cut off Unreadable        Pass@1",
        "                    1         1    (%)     (%)        (%) 95 % interval",
        "gtpo-gsm8k        3.3       0.8   97.5    12.5        2.2  30.0 to 45.0",
    ]
    assert gtpo.lenient is not None
    gtpo.lenient.means["maj"][8] = 26.1  # strict: 25
    dropped = {"with an empty prompt": 2, "without a readable gold answer": 1}
    lines = format_table([replace(gtpo, dropped=dropped, graded_by={"grader": "math_verify"}), base]).splitlines()
    assert lines[2:4] == [
        "Graded by math_verify",
        "Rows dropped: 2 with an empty prompt, 1 without a readable gold answer",
    ]
    assert lines[7].split() == ["lenient", "41.0", "101.0", "13.0", "26.1"]
    assert [line for line in lines if line.startswith("  lenient")][1].split() == ["lenient", "31.0", "to", "50.0"]
    gtpo.lenient.means["maj"][8] = 26.0  # a point is not more than a point
    gtpo = replace(gtpo, settings=CompletionSettings(sampling=Sampling(8, load_in_4bit=True)))
    lines = format_table([replace(base, origin=Origin("other")), gtpo]).splitlines()
    assert lines[1] == "Base model: other and Qwen2.5-3B-Instruct"
    labels = [line.partition("  ")[0] for line in lines]
    assert labels[4:6] == labels[-2:] == ["base", "gtpo-gsm8k (4-bit)"]  # no lenient rows


def test_rows_of_several_k_and_what_each_was_trained_on() -> None:
    """A score that a row lacks is a dash; the lines above name every base model once, and each row that was trained."""
    rows = []
    for label, k, seen in (("a", 8, 3), ("b", 1, None), ("c", 4, 2)):
        values = {2**i: 50.0 for i in range(k.bit_length())}
        rows.append(
            Entry(
                label=label,
                benchmark="amc23",
                problems=40,
                trained_on=seen,
                k=k,
                strict=Scores({"pass": values, "maj": values}, {"pass": {1: [30.0, 45.0]}}),
                shares={"format": 1.0, "finished": 100.0, "unreadable": 0.0},
                settings=CompletionSettings(),
                origin=Origin("some/model" if label != "c" else "some/other"),
                per_problem=[],
            )
        )
    lines = format_table(rows).splitlines()
    assert lines[:4] == [
        "AMC 2023: 40 problems, k = 8 and 1 and 4",
        "Base model: model and other",
        "a was trained on 3 of the 40 problems",
        "c was trained on 2 of the 40 problems",
    ]
    assert [line.split()[:7] for line in lines[5:9]] == [
        ["1", "4", "8", "1", "4", "8", "(%)"],
        ["a", *["50.0"] * 6],
        ["b", "50.0", "-", "-", "50.0", "-", "-"],
        ["c", "50.0", "50.0", "-", "50.0", "50.0", "-"],
    ]


def test_columns_that_do_not_fit_follow_below() -> None:
    assert lay_out([["a\x1b[31m", "b"], ["c", "d\n"]], 1) == ["a\\x1b[31m    b", "c          d\\n"]
    wide = lay_out([["", *("x" * 24 for _ in range(7))], ["row", *"1234567"]], 1)
    assert max(map(len, wide)) <= 80
    assert [line.split()[1:] for line in wide if line.startswith("row")] == [["1", "2"], ["3", "4"], ["5", "6", "7"]]
    assert "y" * 90 in lay_out([["first", "y" * 90], ["", ""]], 1)[0]  # a cell is never cut


@mark.parametrize(
    ("k", "pass_columns", "maj_columns"),
    [
        *((1, [1], [1]), (12, [1, 8, 12], [4, 8, 12])),
        (100, [1, 8, 16, 32, 64, 100], [4, 8, 16, 32, 64, 100]),
    ],
)
def test_columns(k: int, pass_columns: list[int], maj_columns: list[int]) -> None:
    assert columns_up_to(k, PASS_COLUMNS) == pass_columns
    assert columns_up_to(k, MAJ_COLUMNS) == maj_columns
