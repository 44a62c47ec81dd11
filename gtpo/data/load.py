"""Training rows and benchmark problems: the datasets of the paper, generated arithmetic, and your own data.

A training row is ``prompt`` (a conversation), ``answer`` (the gold answer as text) and ``solution`` (the reference
completion, for SFT). Rows that cannot be used and prompts over the length limit are dropped and counted by reason.
``datasets`` is imported when rows are read.
"""

import json
import logging
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo.arguments import BENCHMARK_TITLES, DataArguments, Settings, SourceArguments
from gtpo.data.arithmetic import arithmetic
from gtpo.data.preview import check_first_rows
from gtpo.data.tables import Row, Table, check_source, is_on_hub, read_file, read_hub, read_table, value_of
from gtpo.data.tokenizer import encode_prompt
from gtpo.data.values import (
    elements_of,
    has_decimal_comma,
    is_answered,
    is_empty,
    is_missing,
    to_answer,
    to_question,
    to_text,
)
from gtpo.errors import UsageError, nearest
from gtpo.files import read_yaml
from gtpo.grading import alternatives, gsm8k_gold, is_correct, last_boxed
from gtpo.processes import is_main_process
from gtpo.prompts import PAPER, PromptFormat

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

ARITHMETIC_TRAIN_ROWS = 4000
ARITHMETIC_TEST_ROWS = 500
ARITHMETIC_STEPS = {"arithmetic": (1, 2, 3), "arithmetic_hard": (4, 5)}  # benchmark -> operations in a problem


@dataclass(frozen=True)
class Problem:
    """A problem of a benchmark."""

    id: str  # BENCHMARK/NUMBER
    question: Any  # text, or a conversation
    gold: str
    columns: dict[str, Any] = field(default_factory=dict)  # of its row, for --grader


# The datasets of the paper


@dataclass(frozen=True)
class Source:
    """Where a split is stored, and the columns of its rows."""

    hub_id: str
    hub_split: str
    file: str  # in --data_dir
    columns: dict[str, str]  # role -> column
    rows: int  # with a readable gold answer
    configs: Sequence[str] = ("default",)
    form: str = "answer"  # of the gold answer

    def read(self, row: Mapping[str, str]) -> Row:
        """Question, gold answer and reasoning of a row; the gold answer is None where it has none."""
        gold = _READERS[self.form](row["gold"])
        reasoning = row.get("reasoning")
        if self.form == "gsm8k":
            before, _, _ = row["gold"].rpartition("####")
            reasoning = re.sub(r"<<[^<>]*>>", "", before.strip())  # <<3*4=12>>, for a calculator
        return {"question": row["question"], "gold": gold, "reasoning": reasoning}


_READERS: dict[str, Callable[[str], str | None]] = {"answer": str, "gsm8k": gsm8k_gold, "boxed": last_boxed}
_FILE = Path(__file__).with_name("sources.yaml")
SOURCES = {name: Source(**fields) for name, fields in read_yaml(_FILE).items()}  # SPLIT/NAME
DATASETS = ("gsm8k", "math", "arithmetic")
ROLES = ("prompt", "answer", "solution")  # of columns of your data
UNREADABLE = "without a readable gold answer"
Placed = tuple[Row, str]  # a row with its place
Dropped = dict[str, list[str]]  # reason -> places of rows


def data_directory(data_dir: str | None) -> str | None:
    """``--data_dir``, by default what GTPO_DATA_DIR names; None: the Hub."""
    return data_dir or os.environ.get("GTPO_DATA_DIR") or None


def _rows_of(name: str, split: str, data_dir: str | None, seed: int = 0) -> list[Row]:
    """The rows {question, gold, reasoning} of a dataset of the paper, or of arithmetic: split train, or its test."""
    if name in ARITHMETIC_STEPS:
        if split == "train":
            return list(arithmetic("train", ARITHMETIC_TRAIN_ROWS, seed))
        return list(arithmetic("test", ARITHMETIC_TEST_ROWS, seed=0, steps=ARITHMETIC_STEPS[name]))
    source = SOURCES[f"{split}/{name}"]
    directory = data_directory(data_dir)
    if directory is None:
        hub_rows = []
        for config in source.configs:
            hub_rows += read_hub(source.hub_id, config, source.hub_split).rows
        table = Table.of(source.hub_id, hub_rows)
    else:
        table = read_file(Path(directory) / source.file)
    kept, dropped = _pick(table, source.columns, required=source.columns, needed=source.columns)
    rows = []
    for row, place in kept:
        texts = {}
        for role, column in source.columns.items():
            texts[role] = to_text(row[role], f"{place}: column {column!r}")
        read = source.read(texts)
        if read["gold"] is None:
            dropped[UNREADABLE].append(place)
        else:
            rows.append(read)
    _report_dropped(table, dropped)
    return rows


def load_rows(settings: Settings) -> tuple["Dataset", "Dataset | None"]:
    """Training rows and held-out rows, which have the same columns; None without ``eval_dataset`` and ``eval_rows``.

    The seed of the run also chooses the rows that are held out.
    """
    data = settings.data
    seed = settings.trainer.seed
    is_graded = "accuracy" in scored_by(settings)
    load = partial(
        load_train,
        dry_run=settings.run.dry_run,
        prompt_format=settings.prompt.format,
        for_sft=settings.method == "sft",
        graded=is_graded,
        required=("prompt", "answer") if is_graded else ("prompt",),
    )
    held_out = rows = load(data, seed)
    if data.eval_dataset is not None:
        own = replace(data, dataset=data.eval_dataset, split=data.eval_split, limit=None)
        held_out = load(own, held_out=True)
    elif data.eval_rows is None:
        return rows, None
    if not rows.column_names or not held_out.column_names:  # a dry run of the Hub
        return rows, None
    is_part = held_out is rows
    count = data.eval_rows or len(held_out)
    if is_part or count != len(held_out):
        rest, held_out = hold_out(held_out, count, seed)
        rows = rest if is_part else rows
    if "answer" in rows.column_names and "answer" not in held_out.column_names:
        raise UsageError(f"--eval_dataset {data.eval_dataset} has no column 'answer', and the training rows have.")
    held_out = held_out.select_columns([name for name in rows.column_names if name in held_out.column_names])
    trained = {json.dumps(prompt) for prompt in rows["prompt"]}
    known = sum(json.dumps(prompt) in trained for prompt in held_out["prompt"])
    if known and not settings.run.dry_run:
        logger.warning("%d of %d held-out prompts are also prompts of training rows", known, len(held_out))
    return rows, held_out


def load_train(
    data: DataArguments,
    seed: int = 0,
    dry_run: bool = False,
    prompt_format: PromptFormat = PAPER,
    for_sft: bool = False,
    held_out: bool = False,
    graded: bool = True,
    required: Sequence[str] = ("prompt",),
) -> "Dataset":
    """The rows of ``data.dataset``: columns prompt, answer, solution, and all others of your data under their names.

    A prompt that is a conversation is not changed. The number of dropped rows is logged. ``seed``: of the generated
    arithmetic problems. ``for_sft``: without a column of solutions, the last turn of a conversation is one where it is
    the assistant's. ``held_out``: the rows are those of ``--eval_dataset``, by default of its test split. ``graded``:
    answers are read as gold answers, and a row is dropped whose answer no completion can give; else they stay as they
    are, for a reward of your own. ``required``: roles that need a column.

    A ``dry_run`` does not ask the Hub. The rows of gsm8k and math are empty then, and their number and columns are
    enough for a plan; of another dataset of the Hub neither is known, and the result has no columns.
    """
    known = tuple(BENCHMARK_TITLES) if held_out else DATASETS
    name = data.dataset
    split = data.split or ("test" if held_out else "train")
    if name not in known:
        check_source(f"{'eval_' * held_out}dataset", name, known)
        if dry_run and is_on_hub(name):
            return _to_dataset({})
        return _load_own(data, prompt_format, split, for_sft, graded, required)
    _check_flags_of_paper(data, split, held_out)
    if dry_run and data_directory(data.data_dir) is None and name not in ARITHMETIC_STEPS:
        unread = [""] * SOURCES[f"{split}/{name}"].rows
        return _to_dataset(dict.fromkeys(ROLES, unread[: data.limit]))
    rows = []
    for row in _rows_of(name, split, data.data_dir, seed)[: data.limit]:
        made = {"prompt": prompt_format.to_messages(row["question"]), "answer": row["gold"]}
        if row["reasoning"] is not None:
            made["solution"] = prompt_format.to_completion(row["reasoning"], row["gold"])
        rows.append(made)
    return _from_rows(rows)


def _check_flags_of_paper(data: DataArguments, split: str, held_out: bool) -> None:
    """Refuse what a dataset of the paper has not: other splits, and columns of your own."""
    splits = ("test",) if held_out else ("train", "test")
    for flag in () if held_out else ("prompt_column", "answer_column", "solution_column", "dataset_config"):
        value = getattr(data, flag)
        if value != getattr(DataArguments, flag):
            raise UsageError(f"--{flag} {value} is for your own data, not for {data.dataset}: remove it.")
    if split not in splits:
        raise UsageError(f"--{'eval_' * held_out}split is {split!r}: expected {' or '.join(splits)} of {data.dataset}.")


def hold_out(rows: "Dataset", count: int, seed: int) -> tuple["Dataset", "Dataset"]:
    """(rest, held out): rows chosen by the seed, and the others; both in the order of the rows."""
    total = len(rows)
    if count >= total:
        raise UsageError(f"--eval_rows is {count}: expected 1 to {total - 1} of the {total} rows.")
    places = range(total)
    chosen = sorted(random.Random(seed).sample(places, count))
    rest = sorted({*places} - {*chosen})
    return rows.select(rest), rows.select(chosen)


def load_benchmark(name: str, data_dir: str | None = None) -> list[Problem]:
    """The problems of a benchmark of ``BENCHMARK_TITLES``, in the order of the source."""
    rows = _rows_of(name, "test", data_dir)
    return [Problem(f"{name}/{number}", row["question"], row["gold"]) for number, row in enumerate(rows)]


def load_user_benchmark(
    name: str, source: str, flags: SourceArguments, with_grader: bool = False, limit: int | None = None
) -> tuple[list[Problem], dict[str, int]]:
    """The problems of your benchmark, and why rows were dropped -> their number.

    A question may be a conversation. A row whose gold answer the grader cannot read, so that no completion could be
    right, is dropped and counted. ``limit``: only the first usable ones.

    With your ``--grader`` a gold answer can be anything, or missing, and a problem has the columns of its row.
    """
    table = read_table(source, flags, "test")
    named = {"prompt": flags.prompt_column, "answer": flags.answer_column}
    required = ("prompt",) if with_grader else ("prompt", "answer")
    kept, dropped = _pick(table, named, required, required, graded=not with_grader)
    for row, place in kept:
        row["prompt"] = to_question(row["prompt"], place)
    if not with_grader:
        kept = _with_answers(table, kept, flags, dropped)
    problems: list[Problem] = []
    for row, _ in kept[:limit]:
        question = row.pop("prompt")
        gold = row.get("answer")
        if not isinstance(gold, str):
            gold = repr(gold)
        problems.append(Problem(f"{name}/{len(problems)}", question, gold, row if with_grader else {}))
    _report_dropped(table, dropped)
    return problems, {reason: len(places) for reason, places in dropped.items()}


def _with_answers(
    table: Table, rows: list[Placed], flags: SourceArguments, dropped: Dropped, graded: bool = True
) -> list[Placed]:
    """The rows with their answers as text. Gold answers that no completion can give are noted as dropped."""
    kept = []
    lists = 0
    commas = []
    for row, place in rows:
        value = row["answer"]
        elements = elements_of(value) if graded or isinstance(value, list) else None
        lists += len(elements or ()) > 1
        answer = to_answer(value, elements, f"{place}: column {flags.answer_column!r}", flags.answer_list, graded)
        if graded and not any(is_correct(each, answer) for each in alternatives(answer)):
            dropped[UNREADABLE].append(place)
            continue
        if graded and has_decimal_comma(answer):
            commas.append(f"{answer!r} ({place})")
        kept.append((row | {"answer": answer}, place))
    if lists:
        how = "all are needed" if flags.answer_list == "all" else "any is right (--answer_list all: all are needed)"
        logger.warning("%s: answers are lists: %s", table.name, how)
    if commas:
        text = "%s: %d answers such as %s count as lists of numbers: write a decimal comma as a point"
        logger.warning(text, table.name, len(commas), commas[0])
    return kept


def prepare_prompts(
    rows: "Dataset", held_out: "Dataset | None", tokenizer: Any, settings: Settings
) -> tuple["Dataset", "Dataset | None"]:
    """The rows that fit, after one look at the first ones (preview.py)."""
    rows = drop_long_prompts(rows, tokenizer, settings)
    held_out = held_out and drop_long_prompts(held_out, tokenizer, settings)
    if is_main_process():
        golds = rows["answer"] if "answer" in rows.column_names else [None] * len(rows)
        check_first_rows(tokenizer, rows["prompt"], golds, settings.prompt, scored_by(settings))
    return rows, held_out


def scored_by(settings: Settings) -> Sequence[str]:
    """Which of the paper's rewards a run has; SFT learns the format."""
    return settings.reward.reward if settings.reward else ("format",)


def drop_long_prompts(rows: "Dataset", tokenizer: Any, settings: Settings) -> "Dataset":
    """Drop prompts of more than ``max_prompt_length`` tokens, chat template included; their number is logged.

    Of demonstrations also those of more than SFT's ``max_length``, which TRL would cut.
    """
    template_kwargs = settings.prompt.template_kwargs
    lengths = [len(encode_prompt(tokenizer, prompt, **template_kwargs)) for prompt in rows["prompt"]]
    rows = _drop_long(rows, lengths, settings.data.max_prompt_length, "prompts", "--max_prompt_length")
    longest = getattr(settings.trainer, "max_length", None)
    if "completion" not in rows.column_names or longest is None:
        return rows
    options = {"add_generation_prompt": False, **template_kwargs}
    whole = [len(encode_prompt(tokenizer, row["prompt"] + row["completion"], **options)) for row in rows]
    return _drop_long(rows, whole, longest, "prompts with their solution", "--max_length")


def _drop_long(rows: "Dataset", lengths: Sequence[int], most: int, what: str, flag: str) -> "Dataset":
    kept = [i for i, length in enumerate(lengths) if length <= most]
    dropped = len(lengths) - len(kept)
    if not kept:
        raise UsageError(f"all {dropped} {what} are over {most} tokens: raise {flag}.")
    if dropped:
        logger.warning("%d of %d %s dropped: over %d tokens (%s)", dropped, len(lengths), what, most, flag)
    return rows.select(kept)


def to_demonstrations(rows: "Dataset", template_kwargs: Mapping[str, Any] | None = None) -> "Dataset":
    """Prompts with their reference solutions: columns prompt and completion, as TRL's SFTTrainer expects.

    Rows without a solution are dropped and counted. Arguments of the chat template are a third column, from which TRL
    takes them.
    """
    if not rows.column_names:  # a dry run of a dataset of the Hub
        return rows
    columns: dict[str, list[Any]] = {"prompt": [], "completion": []}
    for row in rows:
        if row.get("solution") is not None:
            columns["prompt"].append(row["prompt"])
            columns["completion"].append([{"role": "assistant", "content": row["solution"]}])
    kept = len(columns["prompt"])
    if kept < len(rows):
        logger.warning("%d of %d rows dropped: with an empty solution", len(rows) - kept, len(rows))
    if template_kwargs:
        columns["chat_template_kwargs"] = [dict(template_kwargs)] * kept
    return _to_dataset(columns)


def _load_own(
    data: DataArguments,
    prompt_format: PromptFormat,
    default_split: str,
    for_sft: bool,
    graded: bool,
    required: Sequence[str],
) -> "Dataset":
    table = read_table(data.dataset, data, default_split)
    named = {role: getattr(data, f"{role}_column") for role in ROLES}
    kept, dropped = _pick(table, named, required, ("prompt", "answer"), graded)
    names = kept[0][0].keys() if kept else set()
    if "answer" in names:
        kept = _with_answers(table, kept, data, dropped, graded)
    _report_dropped(table, dropped)
    takes_answers = for_sft and "solution" not in names
    rows = []
    for row, place in kept[: data.limit]:
        question = to_question(row["prompt"], place, takes_answers)
        solution = row.get("solution")
        if is_answered(question):
            *question, answer = question
            solution = answer["content"]
        row["prompt"] = prompt_format.to_messages(question)
        if "solution" in row or takes_answers:
            row["solution"] = None if is_empty(solution) else to_text(solution, place)
        rows.append(row)
    return _from_rows(rows)


def _pick(
    table: Table,
    named: Mapping[str, str],
    required: Collection[str],
    needed: Collection[str],
    graded: bool = False,
) -> tuple[list[Placed], Dropped]:
    """The rows with columns under their roles, and reason -> places of those with an empty one.

    ``named`` are role -> column, or a field of the objects in a column, as COLUMN.FIELD. A role that is not in
    ``required``, and has its own name, needs no column; those in ``needed`` are not empty. Other columns keep their
    names.
    """
    roles = {}
    for role, name in named.items():
        if name in table.columns or any(value_of(row, name) is not None for row, _ in table.rows):
            roles[role] = name
        elif role in required or name != role:
            flags = " and ".join(f"--{role}_column" for role in required if role in ROLES)
            raise UsageError(
                f"{table.name} has no column {name!r}{nearest(name, table.columns)}: it has "
                f"{', '.join(map(repr, table.columns))}{'; set ' * bool(flags)}{flags}."
            )
    taken = {*roles, *roles.values()}
    others = [name for name in table.columns if name not in taken]
    kept = []
    dropped = defaultdict(list)
    for row, place in table.rows:
        picked = {role: value_of(row, name) for role, name in roles.items()}
        empty = [role for role, value in picked.items() if role in needed and is_empty(value)]
        if graded and is_missing(picked.get("answer", "0")):
            empty.append("answer")
        if empty:
            dropped[f"with an empty {empty[0]}"].append(place)
            continue
        for name in others:
            picked[name] = row.get(name)
        kept.append((picked, place))
    return kept, dropped


def _report_dropped(table: Table, dropped: Dropped) -> None:
    """Log how many rows are dropped, by reason; a UsageError if no row is left."""
    count = sum(map(len, dropped.values()))
    total = len(table.rows)
    reasons = []
    for reason, places in dropped.items():
        reasons.append(f"{len(places)} {reason} (first: {places[0]})")
    told = ", ".join(reasons)
    if count == total:
        raise UsageError(f"{table.name} has no usable row: {told}.")
    if count:
        logger.warning("%s: %d of %d rows dropped: %s", table.name, count, total, told)


def _from_rows(rows: list[Row]) -> "Dataset":
    """Rows, one or more, that have the same columns."""
    return _to_dataset({name: [row[name] for row in rows] for name in rows[0]})


def _to_dataset(columns: dict[str, list[Any]]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_dict(columns)
