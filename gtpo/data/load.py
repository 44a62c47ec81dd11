"""Training rows and benchmark problems: the datasets of the paper, generated arithmetic, and your own data.

Every source is read as :class:`gtpo.data.tables.Row`. A dataset for training has the columns ``prompt`` (a
conversation), ``answer`` (the gold answer as text) and ``solution`` (the reference completion, for SFT). Rows that
cannot be used and prompts over the length limit are dropped and counted by reason. ``datasets`` is imported when rows
are read.
"""

import json
import logging
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gtpo.arguments import BENCHMARK_TITLES, DataArguments, Settings, SourceArguments, Values
from gtpo.data.arithmetic import arithmetic
from gtpo.data.preview import check_first_rows
from gtpo.data.tables import (
    COLUMNS,
    DATASETS,
    Columns,
    Row,
    Table,
    check_source,
    columns_of,
    is_on_hub,
    named_columns,
    read_file,
    read_hub,
    read_table,
    refuse_flags,
    value_of,
)
from gtpo.data.tokenizer import encode_prompt
from gtpo.data.values import (
    DECIMAL_COMMA,
    elements_of,
    is_answered,
    is_empty,
    is_missing,
    to_answer,
    to_question,
    to_text,
)
from gtpo.errors import UsageError
from gtpo.files import read_yaml
from gtpo.grading import alternatives, gsm8k_gold, is_correct, last_boxed, shared_worker
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
    columns: Values = field(default_factory=dict)  # of its row, for --grader


# The datasets of the paper


class Source(NamedTuple):
    """Where a split is stored, and the columns of its rows."""

    hub_id: str
    hub_split: str
    file: str  # in --data_dir
    columns: Columns
    rows: int  # with a readable gold answer
    configs: Sequence[str] = ("default",)
    form: str = "answer"  # of the gold answer
    left_out: str = "(?!)"  # of the solution, a regular expression


_READERS = {"gsm8k": gsm8k_gold, "boxed": last_boxed}
SOURCES = {  # SPLIT/NAME -> source
    name: Source(**fields) for name, fields in read_yaml(Path(__file__).with_name("sources.yaml")).items()
}


class Picked(NamedTuple):
    """The usable rows of a source."""

    rows: list[Row]
    fields: Collection[str]  # of a row, that have a column
    dropped: dict[str, int]  # reason -> number of rows

    def columns_of(self, row: Row) -> Values:
        """What rewards and graders get of a row, besides the prompt: its columns, without those that it lacks."""
        return {COLUMNS[name]: getattr(row, name) for name in self.fields if name != "prompt"} | row.others


def data_directory(data_dir: str | None) -> str | None:
    """``--data_dir``, by default what GTPO_DATA_DIR names; None: the Hub."""
    return data_dir or os.environ.get("GTPO_DATA_DIR") or None


@cache
def _arithmetic(*arguments: Any) -> tuple[Row, ...]:
    return tuple(arithmetic(*arguments))


def read_named(name: str, split: str, data_dir: str | None, seed: int = 0) -> list[Row]:
    """The rows of a dataset of the paper, or of arithmetic: split train, or its test."""
    if name in ARITHMETIC_STEPS:
        size, seed = (ARITHMETIC_TRAIN_ROWS, seed) if split == "train" else (ARITHMETIC_TEST_ROWS, 0)
        return [*_arithmetic(split, size, seed, ARITHMETIC_STEPS[name])]
    source = SOURCES[f"{split}/{name}"]
    if directory := data_directory(data_dir):
        table = read_file(Path(directory) / source.file)
    else:
        table = read_hub(source.hub_id, source.configs, source.hub_split)
    form = _READERS.get(source.form, str)

    def read(value: Any, place: str) -> str | None:
        return form(to_text(value, place))

    picked = _pick(table, source.columns, required=source.columns, needed=source.columns, read=read)
    if "solution" not in picked.fields:
        return picked.rows
    return [replace(row, solution=re.sub(source.left_out, "", row.solution)) for row in picked.rows]


def load_rows(settings: Settings) -> tuple["Dataset", "Dataset | None"]:
    """Training rows and held-out rows, which have the same columns; None without ``eval_dataset`` and ``eval_rows``.

    The seed of the run also chooses the rows that are held out. A dry run does not ask the Hub. The rows of gsm8k and
    math are empty then, and their number and columns are enough for a plan; of another dataset of the Hub neither is
    known, and the result has no columns.
    """
    data = settings.data
    seed = settings.trainer.seed
    if getattr(settings.trainer, "use_vllm", False) and not settings.run.dry_run:
        shared_worker.start()  # its imports take the first reward of a GPU seven seconds, and the model is loaded first
    rows = _load("dataset", data, settings)
    if data.eval_dataset is not None:
        other = replace(data, dataset=data.eval_dataset, split=data.eval_split, limit=None)
        held_out = _load("eval_dataset", other, settings)
    elif data.eval_rows is None:
        return rows, None
    else:
        held_out = rows
    if not rows.column_names or not held_out.column_names:  # a dry run of the Hub
        return rows, None
    if data.eval_dataset is None or data.eval_rows not in (None, len(held_out)):
        rest, held_out = hold_out(held_out, data.eval_rows or 0, seed)
        if data.eval_dataset is None:
            rows = rest
    held_out = held_out.select_columns([name for name in rows.column_names if name in held_out.column_names])
    known = {*map(json.dumps, rows["prompt"])} & {*map(json.dumps, held_out["prompt"])}
    if known and not settings.run.dry_run:
        logger.warning("%d of %d held-out prompts are also prompts of training rows", len(known), len(held_out))
    return rows, held_out


class Named(NamedTuple):
    """What a flag can name that is not your data."""

    known: Collection[str]
    splits: Sequence[str]  # the first one by default, also of a dataset of the Hub
    split_flag: str
    unused: Sequence[str] = ()  # flags without an effect


NAMED = {
    "dataset": Named(
        DATASETS, ["train", "test"], "split", ["prompt_column", "answer_column", "solution_column", "dataset_config"]
    ),
    "eval_dataset": Named(BENCHMARK_TITLES, ["test"], "eval_split"),  # other flags may be for --dataset
}


def _load(flag: str, data: DataArguments, settings: Settings) -> "Dataset":
    """The rows of ``data.dataset``, which ``flag`` names: dataset or eval_dataset."""
    named = NAMED[flag]
    name, form, is_dry_run = data.dataset, settings.prompt.format, settings.run.dry_run
    split = data.split or named.splits[0]
    if name not in named.known:
        check_source(flag, name, named.known)
        if is_dry_run and is_on_hub(name):
            return _to_dataset([])
        return load_own(data, named.splits[0], form, "accuracy" in settings.scored, settings.method == "sft")
    refuse_flags(data, named.unused, name)
    if split not in named.splits:
        expected = " or ".join(named.splits)
        raise UsageError(f"--{named.split_flag} is {split!r}: expected {expected} of {name}.")
    if is_dry_run and not data_directory(data.data_dir) and name not in ARITHMETIC_STEPS:
        unread = [dict.fromkeys(COLUMNS.values(), "")] * SOURCES[f"{split}/{name}"].rows
        return _to_dataset(unread[: data.limit])
    return load_named(data, split, settings.trainer.seed, form)


def load_named(
    data: DataArguments, split: str = "train", seed: int = 0, prompt_format: PromptFormat = PAPER
) -> "Dataset":
    """A dataset of the paper, or arithmetic, whose training problems ``seed`` generates: prompt, answer, solution."""
    made = []
    for row in read_named(data.dataset, split, data.data_dir, seed)[: data.limit]:
        columns = {"prompt": prompt_format.to_messages(row.prompt), "answer": row.gold}
        if row.solution is not None:
            columns["solution"] = prompt_format.to_completion(row.solution, row.gold)
        made.append(columns)
    return _to_dataset(made)


def load_own(
    data: DataArguments,
    default_split: str = "train",
    prompt_format: PromptFormat = PAPER,
    graded: bool = True,
    for_sft: bool = False,
) -> "Dataset":
    """Your data: columns prompt, answer and solution, where it has them, and all others under their names.

    A prompt that is a conversation is not changed. The number of dropped rows is logged.

    Args:
        data: ``dataset`` is a file or a Hub id.
        default_split: Of a dataset of the Hub, without ``data.split``.
        prompt_format: How a prompt that is text becomes a conversation.
        graded: Answers are read as gold answers, and a row is dropped whose answer no completion can give; else they
            are any text, for a reward of your own, and no column of answers is needed.
        for_sft: Without a column of solutions, the last turn of a conversation is one where it is the assistant's.
    """
    picked = read_own(data.dataset, data, default_split, graded)
    takes_answers = for_sft and "solution" not in picked.fields
    made = []
    for row in picked.rows[: data.limit]:
        question = to_question(row.prompt, row.place, takes_answers)
        solution = row.solution
        if is_answered(question):
            *question, answer = question
            solution = answer["content"]
        columns = {"prompt": prompt_format.to_messages(question), **picked.columns_of(row)}
        if "solution" in picked.fields or takes_answers:
            columns["solution"] = None if is_empty(solution) else to_text(solution, row.place)
        made.append(columns)
    return _to_dataset(made)


def hold_out(rows: "Dataset", count: int, seed: int) -> tuple["Dataset", "Dataset"]:
    """(rest, held out): rows chosen by the seed, and the others; both in the order of the rows."""
    places = range(len(rows))
    if count >= len(rows):
        raise UsageError(f"--eval_rows is {count}: expected fewer than the {len(rows)} rows.")
    chosen = sorted(random.Random(seed).sample(places, count))
    rest = sorted({*places}.difference(chosen))
    return rows.select(rest), rows.select(chosen)


def load_benchmark(name: str, data_dir: str | None = None) -> list[Problem]:
    """The problems of a benchmark of ``BENCHMARK_TITLES``, in the order of the source."""
    return [
        Problem(f"{name}/{number}", row.prompt, row.gold)
        for number, row in enumerate(read_named(name, "test", data_dir))
    ]


def load_user_benchmark(
    name: str, source: str, flags: SourceArguments, with_grader: bool = False, limit: int | None = None
) -> tuple[list[Problem], dict[str, int]]:
    """The problems of your benchmark, and why rows were dropped -> their number.

    A question may be a conversation. A row whose gold answer the grader cannot read, so that no completion could be
    right, is dropped and counted. ``limit``: only the first usable ones.

    With your ``--grader`` a gold answer can be anything, or missing, and a problem has the columns of its row.
    """
    picked = read_own(source, flags, "test", None if with_grader else True)
    problems = []
    for number, row in enumerate(picked.rows[:limit]):
        question = to_question(row.prompt, row.place)
        gold = row.gold if isinstance(row.gold, str) else repr(row.gold)
        problems.append(Problem(f"{name}/{number}", question, gold, picked.columns_of(row) if with_grader else {}))
    return problems, picked.dropped


def prepare_prompts(
    rows: "Dataset", held_out: "Dataset | None", tokenizer: Any, settings: Settings
) -> tuple["Dataset", "Dataset | None"]:
    """The rows that fit, after one look at the first ones (preview.py)."""
    rows = drop_long_prompts(rows, tokenizer, settings)
    held_out = held_out and drop_long_prompts(held_out, tokenizer, settings)
    if is_main_process():
        golds = rows["answer"] if "answer" in rows.column_names else [None] * len(rows)
        check_first_rows(tokenizer, rows["prompt"], golds, settings.prompt, settings.scored)
    return rows, held_out


def drop_long_prompts(rows: "Dataset", tokenizer: Any, settings: Settings) -> "Dataset":
    """Drop prompts of more than ``max_prompt_length`` tokens, chat template included; their number is logged.

    Of demonstrations also those of more than SFT's ``max_length``, which TRL would cut.
    """
    options = settings.prompt.template_kwargs
    lengths = [len(encode_prompt(tokenizer, prompt, **options)) for prompt in rows["prompt"]]
    rows = _drop_long(rows, lengths, settings.data.max_prompt_length, "prompts", "--max_prompt_length")
    longest = getattr(settings.trainer, "max_length", None)
    if longest is not None and "completion" in rows.column_names:
        options = options | {"add_generation_prompt": False}
        lengths = [len(encode_prompt(tokenizer, row["prompt"] + row["completion"], **options)) for row in rows]
        rows = _drop_long(rows, lengths, longest, "prompts with their solution", "--max_length")
    return rows


def _drop_long(rows: "Dataset", lengths: Sequence[int], most: int, what: str, flag: str) -> "Dataset":
    kept = [i for i, length in enumerate(lengths) if length <= most]
    dropped = len(lengths) - len(kept)
    if not kept:
        raise UsageError(f"all {dropped} {what} are over {most} tokens: raise {flag}.")
    if dropped:
        logger.warning("%d of %d %s dropped: over %d tokens (%s)", dropped, len(lengths), what, most, flag)
    return rows.select(kept)


def to_demonstrations(rows: "Dataset", template_kwargs: Values | None = None) -> "Dataset":
    """Prompts with their reference solutions: columns prompt and completion, as TRL's SFTTrainer expects.

    Rows without a solution are dropped and counted. Arguments of the chat template are a third column, from which TRL
    takes them.
    """
    taken = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}
    made = [
        {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["solution"]}], **taken}
        for row in rows
        if row.get("solution") is not None
    ]
    dropped = len(rows) - len(made)
    if len(rows) and not made:
        raise UsageError(
            "no row has a reference solution, which SFT trains on: name its column with --solution_column, or end the "
            "conversations with an answer."
        )
    if dropped:
        logger.warning("%d of %d rows dropped: with an empty solution", dropped, len(rows))
    return _to_dataset(made)


def read_own(source: str, flags: SourceArguments, default_split: str, graded: bool | None) -> Picked:
    """The rows of your data. ``graded``: answers are gold answers; False: any text; None: any value."""
    needed = ("prompt",) if graded is None else ("prompt", "gold")
    required = needed if graded else ("prompt",)
    answers = _Answers(flags, bool(graded))
    table = read_table(source, flags, default_split)
    picked = _pick(table, named_columns(flags), required=required, needed=needed, read=answers.read)
    answers.warn(source, len(table.rows))
    return picked


class _Answers:
    """Reads the answers of your data, and notes those of which a user should know how they are read.

    ``graded``: they are gold answers, else any text.
    """

    def __init__(self, flags: SourceArguments, graded: bool) -> None:
        self.flags = flags
        self.graded = graded
        self.lists: list[str] = []
        self.sentences: list[str] = []

    def read(self, value: Any, place: str) -> str | None:
        """An answer as text; None for a gold answer that no completion can give."""
        graded = self.graded
        if graded and is_missing(value):
            return None
        elements = elements_of(value) if graded or isinstance(value, list) else None
        column = f"{place}: column {self.flags.answer_column!r}"
        answer = to_answer(value, elements, column, self.flags.answer_list, graded)
        if graded and not any(is_correct(each, answer) for each in alternatives(answer)):
            return None
        if (elements and len(elements) > 1) or DECIMAL_COMMA.fullmatch(answer):
            self.lists.append(f"{answer!r} ({place})")
        elif graded and is_sentence(answer):
            self.sentences.append(f"{answer!r} ({place})")
        return answer

    def warn(self, source: str, rows: int) -> None:
        """Log the first list and the first sentence, with their numbers."""
        if self.lists:
            logger.warning(
                "%s: %d answers such as %s are lists (--answer_list %s); write a decimal comma as a point",
                source,
                len(self.lists),
                self.lists[0],
                self.flags.answer_list,
            )
        if self.sentences:
            what = f"{len(self.sentences)} of {rows} gold answers are sentences, such as {self.sentences[0]}"
            logger.warning("%s: %s: only the same words are right; write the value alone", source, what)


def is_sentence(answer: str) -> bool:
    """Whether a gold answer has four words or more, and is not equal to the last number in it."""
    numbers = re.findall(r"-?\d+(?:[.,]\d+)*", answer)
    has_words = len(answer.split()) >= 4 and len(re.findall(r"[^\W\d_]{2,}", answer)) >= 3
    return has_words and not any(is_correct(number, answer) for number in numbers[-1:])


def _pick(
    table: Table,
    named: Columns,
    *,
    required: Collection[str],
    needed: Collection[str],
    read: Callable[[Any, str], str | None],
) -> Picked:
    """The usable rows; those that are dropped are logged, by reason and with the first place of each.

    ``named`` are field of a row -> column, or a field of the objects in a column, as COLUMN.FIELD. One that is not in
    ``required``, and has its usual name, needs no column; those in ``needed`` are not empty. ``read`` is called for
    each gold answer that is needed, with its place; None: it cannot be read.
    """
    found = columns_of(table, named, required)
    taken = {*found.values(), *(COLUMNS[name] for name in found)}
    reads_gold = "gold" in found and "gold" in needed
    kept = []
    dropped = defaultdict(list)  # reason -> places
    for stored, place in table.rows:
        values = {"gold": None} | {name: value_of(stored, column) for name, column in found.items()}
        reason = _empty_field(values, [name for name in needed if name in found])
        if reads_gold and not reason:
            values["gold"] = read(values["gold"], place)
            reason = "without a readable gold answer" if values["gold"] is None else ""
        if reason:
            dropped[reason].append(place)
            continue
        others = {name: stored.get(name) for name in table.columns if name not in taken}
        kept.append(Row(**values, others=others, place=place))
    _log_dropped(table, dropped, len(kept))
    return Picked(kept, found, {reason: len(places) for reason, places in dropped.items()})


def _empty_field(values: Values, needed: Collection[str]) -> str:
    """Which of these fields of a row is empty, as the reason to drop it; empty where none is."""
    return next((f"with an empty {COLUMNS[name]}" for name in needed if is_empty(values[name])), "")


def _log_dropped(table: Table, dropped: Mapping[str, Sequence[str]], kept: int) -> None:
    """Log how many rows were dropped, by reason; UsageError if no row is left."""
    told = ", ".join(f"{len(places)} {reason} (first: {places[0]})" for reason, places in dropped.items())
    if not kept:
        raise UsageError(f"{table.name} has no usable row: {told}.")
    if told:
        total = len(table.rows)
        logger.warning("%s: %d of %d rows dropped: %s", table.name, total - kept, total, told)


def _to_dataset(rows: list[Values]) -> "Dataset":
    from datasets import Dataset

    return Dataset.from_list(rows)
