"""The paper's experiments: the matrix of runs, their execution, figures and Table 1."""
