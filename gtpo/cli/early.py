"""Wrong inputs, refused before PyTorch, Transformers and TRL are imported, which takes seconds.

What passes is checked again where it is used: of a file only the first rows are read here.
"""

from collections.abc import Collection
from pathlib import Path

from gtpo.arguments import (
    BENCHMARK_TITLES,
    DataArguments,
    FormatArguments,
    RewardArguments,
    Values,
    fields_of,
    split_function,
)
from gtpo.data.tables import DATASETS, check_source, columns_of, is_on_hub, named_columns, read_file
from gtpo.errors import UsageError

FIRST_ROWS = 1000  # of a file: its columns, and whether it is short


def check_inputs(method: str, values: Values) -> tuple[int, int]:
    """Refuse wrong tags, rewards, a wrong file and its columns; the rows of a short file, and the prompts of a step.

    ``values`` are the settings of preset, file and command line, without the defaults; code is named on the latter.
    """
    FormatArguments(tags=values.get("tags", FormatArguments.tags))  # raises
    known = RewardArguments().reward
    rewards = values.get("reward") or known
    if isinstance(rewards, list):
        for name in {*rewards} - {*known}:
            module, _ = split_function(name, known, "reward")
            if module.endswith(".py") and not Path(module).is_file():
                raise UsageError(f"--reward {name}: {module} is not a file.")
    given = {name: values[name] for name in fields_of([DataArguments]) if values.get(name) is not None}
    data = DataArguments(**given)
    needs_answers = method != "sft" and "accuracy" in rewards
    required = ("prompt", "answer") if needs_answers else ("prompt",)
    count = _check_data(data, data.dataset, DATASETS, "dataset", required)
    _check_data(data, data.eval_dataset or DATASETS[0], BENCHMARK_TITLES, "eval_dataset", required)
    of_step = values.get("gradient_accumulation_steps") if method == "sft" else None
    return min(count, data.limit or count), values.get("prompts_per_step") or of_step or 1


def _check_data(data: DataArguments, source: str, known: Collection[str], flag: str, required: Collection[str]) -> int:
    """The number of rows of a short file."""
    check_source(flag, source, known)
    if source in known or is_on_hub(source):
        return FIRST_ROWS**2
    table = read_file(Path(source), FIRST_ROWS)
    try:
        columns_of(table, named_columns(data), required)
    except UsageError:  # a later row may have it
        columns_of(read_file(Path(source)), named_columns(data), required)
    return len(table.rows) if len(table.rows) < FIRST_ROWS else FIRST_ROWS**2
