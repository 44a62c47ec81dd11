"""One value of each setting: the preset's, over it the file's, over it the command line's. Nothing is read here."""

from collections.abc import Mapping, Sequence

from gtpo.arguments import Values

RIVALS = (  # settings that exclude each other
    ("max_steps", "num_train_epochs"),
    ("generation_batch_size", "steps_per_generation"),
)
LEAVES_IT = {"max_steps": -1}  # the value of a setting that leaves it to its rival; of the others that of the preset


def resolve(plain: Values, machine: Values, file: Values, named: Values) -> Values:
    """The settings of a run, the later over the earlier; the last that has one of two rivals unsets the other.

    Args:
        plain: Every setting, by the preset or by default.
        machine: What this machine needs otherwise.
        file: What a file has.
        named: What the command line has.
    """
    values = plain | machine | file | named
    for pair in RIVALS:
        counts = given_of(pair, named) or given_of(pair, file)
        for rival in {*pair} - {*counts} if counts else ():
            values[rival] = LEAVES_IT.get(rival, plain.get(rival))
    return values


def given_of(names: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    """Those of some settings that have a value, and do not leave it to their rival."""
    return [name for name in names if settings.get(name) not in (None, LEAVES_IT.get(name))]
