"""The runs of each figure of the paper."""

from helpers.files import tables_of

FIGURES = {figure: set(runs) for figure, runs in tables_of(__file__).items()}
