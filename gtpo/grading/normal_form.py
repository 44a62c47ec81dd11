"""Rule 1: the normal form of an answer. Two answers with the same normal form are equal."""
# ruff: noqa: RUF001 (the tables hold Unicode characters that look like ASCII)

import re
import unicodedata
from functools import lru_cache

from gtpo.grading.latex import FUNCTIONS, bracket_balance, closing_index, last_boxed, nesting_depth
from gtpo.grading.numerals import digits_for_words

MAX_LENGTH = 1_000  # characters; the longest answer in MATH has 168
_MAX_DEPTH = 40  # nested brackets; the LaTeX grammar is recursive
_MAX_LAYERS = 8  # delimiters, bold, box and prose around one answer

_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|pi|rho|sigma|tau|phi|omega"
_AND = r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑﹣－", "-"),
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "±": r"\pm "},
        **{"π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "º": r"^\circ "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap "},
        **{"∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"'},
        **{"¢": " cents", "。": "."},
    }
)
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789-+n0123456789")

_PROSE = re.compile(
    r"(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:answer|result|solution|value)s?\s*(?:(?:is|are)\b|=|:)\s*:?\s*",
    re.IGNORECASE,
)
_TEXT_PROSE = re.compile(rf"^\\text\s*\{{{_PROSE.pattern}\}}\s*(?=\S)", re.IGNORECASE)
_END = re.compile(r"(?:(?<!\\)\\[,;:!]|[.,;:\s])+$")  # punctuation and the spaces of LaTeX
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))

# Applied in this order: (pattern, replacement).
_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),  # sizes of brackets
        # thousands separators of LaTeX: 1,\!234  1{,}234  1\,234
        (r"(?<=\d)\s*(?:,\s*\\!|\{\s*,\s*\}|\\[,;:!])\s*(?=\d{3}(?!\d))", ""),
        (r"\\\\\s*\[\s*-?[\d.]*\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),  # the space between two rows: \\[4pt]
        (r"(?:\\\\)+\s*$|(?<!\\)\\!|\\(?:display|text)style(?![a-zA-Z])|\\(?:limits|phantom)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[,;:>\s]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\s+", " "),  # the patterns below take cubic time on runs of blanks
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\[dt]binom(?![a-z])", r"\\binom"),
        (r"^<([^<>]*,[^<>]*)>$", r"(\1)"),  # a vector
        (r"<=|\\leq?(?:slant)?(?![a-zA-Z])", r"\\leq "),
        (r">=|\\geq?(?:slant)?(?![a-zA-Z])", r"\\geq "),
        (r"!=|\\neq?(?![a-zA-Z])", r"\\neq "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\*\*", "^"),
        (r"\\(?:cdot|times|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])|\\lparen(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])|\\rparen(?![a-zA-Z])", ")"),
        (r"\\[lr]vert(?![a-zA-Z])|\\vert(?![a-zA-Z])", "|"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}|^(?:\\text\{)?\s*(?:[tT]he )?[eE]mpty set\s*\}?$", r"\\emptyset "),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (  # {x | x > 2} is x > 2
            r"^\\\{\s*[a-zA-Z](?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid(?![a-zA-Z])|[:|])"
            r"([^:|]*(?:[<>]|\\[lg]eq |\\neq )[^:|]*)\\\}$",
            r"\1",
        ),
        (r"(?:[a-zA-Z]\s*\\in\s*)?\\mathbb\s*\{?R\}?$|(?i:^(?:\\text\{)?all real numbers\}?$)", r"(-\\infty,\\infty)"),
        (r"\\?%|\s*(?:\\text\{)?\s*(?<![a-zA-Z\\])(?:per\s?cent|pct)\b\.?\s*\}?", "%"),
        # an amount, which is not one of cents
        (r"^([-+]?)\s*(?:USD|US\s?\\?\$|\\?\$)\s*([-+]?\d[\d.]*)$", r"\1\2 dollars"),
        *(
            (rf"^([-+]?)\s*(?:{sign}\s*([-+]?\d[\d.]*)|(\d[\d.]*)\s*{sign})$", rf"\1\2\3 {name}")
            for sign, name in (("€", "euros"), ("£", "sterling"), ("¥", "yen"))
        ),
        (r"\\?[$€£¥]|\\text\{\s*\$\s*\}", ""),  # currency, or math delimiters in a sentence
        (r"[(\[]?\s*\\begin\{(?:[bB]matrix|smallmatrix|matrix|array)\}(?:\{[lcr| ]*\})?", r"\\begin{pmatrix}"),
        (r"\\end\{(?:[bB]matrix|smallmatrix|matrix|array)\}\s*[)\]]?", r"\\end{pmatrix}"),
        (rf"\s*,?\s*(?:\\(?:text|mbox)\s*\{{\s*,?\s*{_AND}\s*\}}|{_AND})\s*", ", "),  # "18 or 20" is a list
        (r"(?<![a-zA-Z\\])(?:infinity|infty|inf|oo)(?![a-zA-Z])|\\inf(?![a-zA-Z])", r"\\infty "),
        (rf"(?<![a-zA-Z\\])({FUNCTIONS}|sqrt|{_GREEK})(?![a-zA-Z])", r"\\\1 "),  # plain-text mathematics
        (r"(?<=\d)\^\{?\\(?:text|mathrm)?\{?(?:st|nd|rd|th)\}?\}?$|(?<=\d)(?:st|nd|rd|th)\b", ""),  # ordinals
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", "*"),  # 6.02 x 10^23
        (r"^(?:negative|minus)\s+(?=[\d\\])", "-"),
        (r"^(\d+)\s+to\s+(\d+)$", r"\1:\2"),  # a ratio
        (r"\\frac\s*\{\s*\\text\s*\{([a-z]+)\}\s*\}\s*\{\s*\\text\s*\{([a-z]+)\}\s*\}", r"\\text{\1/\2}"),  # m/s
        (r"^\s*\\approx(?![a-zA-Z])", ""),
        (r"(?<=\S)\s*\\approx(?![a-zA-Z])[^,;]*$", ""),  # 2/3 \approx 0.67: the exact value comes first
        (r"(?<![\w.})^/])(\d+)\s*/\s*(\d+)(?!\s*[\d.!^_])", r"\\frac{\1}{\2}"),  # 1/2x is x/2
        (r"\s*[({]?(?:\\text\{)?\s*(?:in )?\bbase[ -](\d+)\}?[)}]?$", r"_{\1}"),  # 204 (base 5)
        (r"\\text\s*\{\s*(\w+)\s*\}(?=\s*_)|\\(?:mathrm|text)\{([ie])\}", r"\1\2"),  # \text{A5}_{11}, \mathrm{i}
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),  # x^(1/2)
        (r"\^\s*(-?\d+|[a-zA-Z])", r"^{\1}"),  # x^10 means x^{10}
        (r"_\s*(\d+|[a-zA-Z])(?![a-zA-Z])", r"_{\1}"),
        (r"_\s*\\(?:text|mathrm)\s*\{\s*(\w+)\s*\}", r"_{\1}"),
        (r"^([a-zA-Z][a-zA-Z' ]{3,}):(?=\s)", r"\1="),  # Total: 18
        (r"(?<![a-zA-Z\\])C\s*\((\d+),\s*(\d+)\)", r"\\binom{\1}{\2}"),
        (r"_\{\s*\(?\s*(?:\\text\{)?(\w+)\}?\s*\)?\s*\}", r"_{\1}"),
        (r"^\(([0-9A-Z.]+)\)(?=_\{\d+\}$)", r"\1"),  # (1011)_2
    )
]
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z]))(?:\s*[CF]$)?")
_SCALE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?:\\text\{\s*)?([CF])\}?$")
_SCALES = {"C": "celsius", "F": "fahrenheit"}
_THOUSANDS = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_SPACED = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")  # 10 000, if it is the whole answer
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")


@lru_cache(maxsize=2**14)
def normalise(text: str) -> str:
    """The normal form of an answer: one spelling for all the ways to write the same thing.

    Returns an empty string if there is nothing to compare: blank text, over 1,000 characters, or unmatched brackets.
    """
    text = text.strip()
    if not text or len(text) > MAX_LENGTH:
        return ""
    text = _unwrap(" ".join(_to_ascii(text).split()))
    if len(text) > MAX_LENGTH or bracket_balance(text) or nesting_depth(text) > _MAX_DEPTH:
        return ""
    text = _rewrite_numbers(digits_for_words(text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _strip_spaces(_brace_arguments(_rewrite_degrees(text)))


def _to_ascii(text: str) -> str:
    """LaTeX or ASCII for Unicode mathematics. NFKC alone would read ``5²`` as 52 and ``1½`` as 11/2."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SCRIPTS) + "}", text)
    text = re.sub(r"[₀-₉]+", lambda m: "_{" + m[0].translate(_SCRIPTS) + "}", text)
    parts = r"\frac{{{}}}{{{}}}"  # of ½
    text = re.sub(r"[¼-¾⅐-⅞]", lambda m: parts.format(*unicodedata.normalize("NFKC", m[0]).split("⁄")), text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    categories = ((char, unicodedata.category(char)) for char in text)
    return "".join(" " if category == "Cc" else char for char, category in categories if category != "Cf")


def _unwrap(text: str) -> str:
    """Remove what surrounds an answer: delimiters, bold, "The answer is", one box, the final period."""
    text = re.sub(r"\*\*([A-Za-z][A-Za-z :]*)\*\*", r"\1", text)  # **Answer:** 18
    for _ in range(_MAX_LAYERS):
        before = text
        text = _END.sub("", text).strip().removeprefix("=")
        text = re.sub(r"^([A-J])[.)](?=\s|$)", r"(\1)", re.sub(r"^#+\s+", "", text))  # C) 15; #### 18, as in GSM8K
        text = _TEXT_PROSE.sub("", text)
        text = re.sub(r"\s+is (?:the|my|our) (?:final |correct )?(?:answer|result)$", "", text)
        prose = _PROSE.match(text)
        text = text[prose.end() :] if prose else text
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and closing not in inner:
                text = inner
        text = _unbox(text)
        if text == before:
            break
    return text


def _unbox(text: str) -> str:
    """The content of the only box. A number outside the box is a second answer, so the text is returned as it is."""
    if text.count("\\boxed") + text.count("\\fbox") != 1:
        return text
    box = last_boxed(text)
    return box if box and not re.search(r"\d", text.replace(box, "", 1)) else text


def _rewrite_numbers(text: str) -> str:
    """Repeating decimals as fractions, and no thousands separators; (1,234) is a pair and keeps its comma."""
    text = _REPEATING.sub(_repeating_decimal, text)
    if _SPACED.fullmatch(text):
        return text.replace(" ", "")
    return _THOUSANDS.sub(lambda m: m[0] if bracket_balance(text[: m.start()]) else m[0].replace(",", ""), text)


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as 15/90."""
    once, block = match[1] + match[2], match[3]
    top, bottom = int(once + block) - int(once or 0), 10 ** len(match[2]) * (10 ** len(block) - 1)
    return rf"\frac{{{top}}}{{{bottom}}}"


def _rewrite_degrees(text: str) -> str:
    """Degrees are a factor inside a function (sin 15 is not sin 15°) and a unit, removed, elsewhere."""
    if re.search(rf"\\(?:{FUNCTIONS})", text):
        text = re.sub(rf"(\d+(?:\.\d+)?){_DEGREES.pattern}", r"(\\frac{\1\\pi}{180})", text)
    text = re.sub(rf"(?<=\d){_SCALE.pattern}", lambda m: rf"\text{{ {_SCALES[m[1]]}}}", text)
    return _DEGREES.sub("", text)


def _brace_arguments(text: str) -> str:
    r"""Add the braces that TeX makes optional: ``\frac12``, ``\frac 9{20}``, ``\sqrt3``, and also ``\sqrt(2)``."""
    out: list[str] = []
    position = 0
    for match in re.finditer(r"\\(frac|binom|sqrt)(?![a-zA-Z])\s*(\[[^\[\]]*\])?", text):
        if match.start() < position:  # inside an argument that is already done
            continue
        out.append(text[position : match.end()].rstrip())
        position = match.end()
        for _ in range(1 if match[1] == "sqrt" else 2):
            argument = _read_argument(text, position, is_root=match[1] == "sqrt")
            if argument is None:
                break
            content, position = argument
            out.append("{" + content + "}")
    return "".join(out) + text[position:]


# \frac123 is 1/2 times 3, but \sqrt12 is always meant as the root of 12.
_FRACTION_ARGUMENT = re.compile(r"\s*(\\[a-zA-Z]+|\w)")
_ROOT_ARGUMENT = re.compile(r"\s*(\\[a-zA-Z]+|\d+|[^\s{}()\[\]\\])")


def _read_argument(text: str, position: int, *, is_root: bool) -> tuple[str, int] | None:
    r"""The argument of ``\frac``, ``\binom`` or ``\sqrt`` at `position`, and the position after it."""
    group = re.compile(r"\s*([{(])").match(text, position)
    if group and (group[1] == "{" or is_root) and (end := closing_index(text, group.end() - 1)):
        return _brace_arguments(text[group.end() : end]), end + 1
    bare = (_ROOT_ARGUMENT if is_root else _FRACTION_ARGUMENT).match(text, position)
    if not bare or bare[1] == r"\sqrt":  # in \frac\sqrt32 the 3 belongs to the root
        return None
    return bare[1], bare.end()


def _strip_spaces(text: str) -> str:
    """Spaces matter between words and digits only; trailing punctuation and a plus sign in front do not matter."""
    text = re.sub(r"\s*([^\w\s\\]|\\[{}])\s*", r"\1", text)
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?![a-zA-Z])|\s+(?=\\[a-zA-Z])", r"\1", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;:").removeprefix("+").strip()
