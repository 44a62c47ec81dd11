r"""Answer grading: reads the answer out of a completion and decides whether two answers are equivalent.

Rewards, evaluation, majority voting and data loading all use this package, so a training curve and an evaluation table
always agree. Cheap exact rules run first and decide almost every pair; sympy comes last, in a separate process:

1. equal strings after `normalise` (delimiters, LaTeX spellings, thousands separators);
2. exact numbers: decimals, fractions, mixed numbers and percentages as `fractions.Fraction`, without a tolerance;
3. the value that is claimed last: ``x = 5``, ``|z| = 5``, ``P = \frac{2}{4} = \frac12``; and structure, element by
   element: tuples and intervals in order and with their brackets, sets and lists in any order, unions, matrices;
4. what stands beside a value, read whole by a closed grammar: units, labels, remarks; number bases, words;
5. math-verify for the rest (surds, polynomials, equations), in one worker process limited to 5 seconds per comparison
   and per completion, and 2 GiB of memory.

The files, in the order of reading: normal_form.py (the text; its rules are rewrites.yaml), number_words.py, subject.py
and remark.py (what stands before and behind a value), numerals.py and units.py (the value and its unit), structure.py,
piecewise.py and named.py (its elements), compare.py; the words of the grammar are words.yaml and tables.yaml.

Model output is untrusted input and is never evaluated as code: the worker parses it with a LaTeX grammar. If the worker
exceeds a limit it is killed and the answer counts as wrong. A text longer than 1,000 characters is not an answer.
`is_correct` and `equivalent` accept any text, and work from any thread and in forked processes.

All comparisons of a completion, between its answer blocks and with the gold answer, share one `TimeBudget` of 5
seconds. The last one may overrun it, so a completion takes less than 10 seconds, and the worker some 2 to restart; a
batch takes at most the sum. All threads share the worker: each may wait that long for a completion of every other.

Conventions where public graders differ: ``10\%`` equals both ``10`` and ``0.1``, and the answer ``0.5\%`` not the gold
answer ``0.5``; a unit may be missing but not wrong
(75 cents is ``\$0.75``, 18 cents is not ``\$18``, 18 apples neither); ``1, 2`` equals ``2, 1`` and ``\{2, 1\}``, but
``(1, 2)`` only in that order, and no set; ``3-4`` and ``2024-01-05`` as a whole equal only themselves; ``204_5`` equals
only ``204_5``; a decimal equals an exact value if it is exact, or correct to the last of at least 10 significant
digits; ``AB = 18`` and ``m + n = 18`` equal 18. ``2x = 18``, ``x + 1 = 18`` and ``1 = 18`` do not: an equation to
solve, or a false statement, has no value.
"""

from gtpo.grading.algebra import TimeBudget as TimeBudget
from gtpo.grading.algebra import alternatives as alternatives
from gtpo.grading.algebra import listed as listed
from gtpo.grading.algebra import math_verify_accepts as math_verify_accepts
from gtpo.grading.compare import equivalent as equivalent
from gtpo.grading.compare import is_correct as is_correct
from gtpo.grading.extract import extract_answer as extract_answer
from gtpo.grading.extract import gsm8k_gold as gsm8k_gold
from gtpo.grading.latex import last_boxed as last_boxed
from gtpo.grading.lenient import Verdicts as Verdicts
from gtpo.grading.lenient import grade_text as grade_text
from gtpo.grading.lenient import lenient_answer as lenient_answer
from gtpo.grading.normal_form import normalise as normalise
from gtpo.grading.worker import shared_worker as shared_worker
from gtpo.grading.worker import timeouts as timeouts
