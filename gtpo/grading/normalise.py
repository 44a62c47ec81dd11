import re
import unicodedata
from functools import lru_cache
from itertools import accumulate

MAX_LENGTH = 1_000  # characters; the longest answer in MATH has 168


_MAX_DEPTH = 40  # nested brackets; the grammar is recursive


def last_boxed(text: str) -> str | None:
    r"""The gold answer of a MATH solution: the content of its last ``\boxed`` or ``\fbox``, None if missing or empty.

    Braces are matched, because 23 % of MATH golds nest them; ``\boxed 2`` and ``\boxed {17}`` occur as well.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        bare = re.match(r"[^\s$\\{}.,]+", rest)
        return bare[0] if bare else None
    end = _closing(rest, 0)
    return rest[1:end].strip() or None if end else None


_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"


_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|pi|rho|sigma|tau|phi|omega"


_TEXT = r"\\(text(?:normal|rm|bf|it)?|mbox|math(?:rm|bf|it|sf)|operatorname)\s*\{([^{}]*)\}"


_AND = r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"


_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑﹣－", "-"),
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "±": r"\pm "},
        **{"π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "º": r"^\circ "},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap "},
        **{"∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"'},
        **{**dict.fromkeys("€£¥", "$"), "。": "."},
    }
)


_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789-+n0123456789")


_PROSE = re.compile(
    r"(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:answer|result|solution|value)s?\s*(?:(?:is|are)\b|=|:)\s*:?\s*",
    re.IGNORECASE,
)


_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))


# In this order. Each line: what it rewrites, and into what.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),  # sizes of brackets
        (
            r"(?<=\d)\s*(?:,\s*\\!|\{\s*,\s*\}|\\[,;:!])\s*(?=\d{3}(?!\d))",
            "",
        ),  # 1,\!234  1{,}234  1\,234: surely thousands
        (r"(?:\\\\)+\s*$|(?<!\\)\\!|\\(?:display|text)style(?![a-zA-Z])|\\(?:limits|phantom)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[,;:>\s]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\s+", " "),  # runs of blanks would cost the patterns below cubic time
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\[dt]binom(?![a-z])", r"\\binom"),
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
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"(?:[a-zA-Z]\s*\\in\s*)?\\mathbb\s*\{?R\}?$|(?i:^(?:\\text\{)?all real numbers\}?$)", r"(-\\infty,\\infty)"),
        (r"\\?%|\s*(?:\\text\{)?\s*\bper\s?cent\b\s*\}?", "%"),
        (r"\\?\$|\\text\{\s*\$\s*\}", ""),  # currency, or math delimiters in a sentence
        (r"[(\[]?\s*\\begin\{(?:[bB]matrix|smallmatrix|matrix|array)\}(?:\{[lcr| ]*\})?", r"\\begin{pmatrix}"),
        (r"\\end\{(?:[bB]matrix|smallmatrix|matrix|array)\}\s*[)\]]?", r"\\end{pmatrix}"),
        (rf"\s*,?\s*(?:\\(?:text|mbox)\s*\{{\s*,?\s*{_AND}\s*\}}|{_AND})\s*", ", "),  # a list; 18 or 20 is not 18
        (r"(?<![a-zA-Z\\])(?:infinity|inf|oo)(?![a-zA-Z])|\\inf(?![a-zA-Z])", r"\\infty "),
        (rf"(?<![a-zA-Z\\])({_FUNCTIONS}|sqrt|{_GREEK})(?![a-zA-Z])", r"\\\1 "),  # plain-text mathematics
        (r"(?<=\d)\^\{?\\(?:text|mathrm)?\{?(?:st|nd|rd|th)\}?\}?$|(?<=\d)(?:st|nd|rd|th)\b", ""),  # ordinals
        (r"^\s*\\approx(?![a-zA-Z])", ""),
        (r"(?<=\S)\s*\\approx(?![a-zA-Z])[^,;]*$", ""),  # 2/3 \approx 0.67: the exact value stands first
        (r"^(\s*[-+]?\s*\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # 3 1/2
        (r"(?<![\w.})^/])(\d+)\s*/\s*(\d+)(?!\s*[\d.!^_])", r"\\frac{\1}{\2}"),  # 1/2x is half of x, as in y = 1/2x + 3
        (r"\s*[({]?(?:\\text\{)?\s*(?:in )?\bbase[ -](\d+)\}?[)}]?$", r"_{\1}"),  # 204 (base 5)
        (r"\\text\s*\{\s*(\w+)\s*\}(?=\s*_)|\\(?:mathrm|text)\{([ie])\}", r"\1\2"),  # \text{A5}_{11}, \mathrm{i}
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),  # x^(1/2)
        (r"\^\s*(-?\d+|[a-zA-Z])", r"^{\1}"),  # x^10 is written by people who mean ten
        (r"_\s*(\d+|[a-zA-Z])(?![a-zA-Z])", r"_{\1}"),
        (r"_\{\s*\(?\s*(?:\\text\{)?(\w+)\}?\s*\)?\s*\}", r"_{\1}"),
    )
]


_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z]))")


_THOUSANDS = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d|,\d)")


_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")


def _repeating(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` as 15/90."""
    once, block = match[1] + match[2], match[3]
    top, bottom = int(once + block) - int(once or 0), 10 ** len(match[2]) * (10 ** len(block) - 1)
    return rf"\frac{{{top}}}{{{bottom}}}"


@lru_cache(maxsize=2**14)
def normalise(text: str) -> str:
    """One spelling for what is written in many: the form in which answers are compared and cached.

    The empty string if there is nothing to compare: a blank text, or one of more than 1,000 characters.
    """
    text = text.strip()
    if not text or len(text) > MAX_LENGTH:
        return ""
    text = _unwrap(" ".join(_ascii(text).split()))
    if len(text) > MAX_LENGTH or _depth(text) or _deepest(text) > _MAX_DEPTH:
        return ""
    text = _REPEATING.sub(_repeating, text)
    text = _THOUSANDS.sub(lambda m: m[0] if _depth(text[: m.start()]) else m[0].replace(",", ""), text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    # Degrees of a plain angle are a unit; inside a function they are a factor, and sin 15 is not sin 15°.
    if re.search(rf"\\(?:{_FUNCTIONS})", text):
        text = re.sub(rf"(\d+(?:\.\d+)?){_DEGREES.pattern}", r"(\\frac{\1\\pi}{180})", text)
    text = _DEGREES.sub("", text)
    text = _brace_arguments(text)
    text = re.sub(r"\s*([^\w\s\\]|\\[{}])\s*", r"\1", text)  # white space matters between words and digits only
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?![a-zA-Z])|\s+(?=\\[a-zA-Z])", r"\1", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;:").removeprefix("+").strip()


def _ascii(text: str) -> str:
    """ASCII for the mathematics of Unicode; NFKC alone would read ``5²`` as 52 and ``1½`` as 11/2."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(_SCRIPTS) + "}", text)
    text = re.sub(r"[₀-₉]+", lambda m: "_{" + m[0].translate(_SCRIPTS) + "}", text)
    text = re.sub(
        r"[¼-¾⅐-⅞]", lambda m: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", m[0]).split("⁄")), text
    )
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    return "".join(
        " " if unicodedata.category(char) == "Cc" else char for char in text if unicodedata.category(char) != "Cf"
    )


def _unwrap(text: str) -> str:
    """Takes off what surrounds an answer: delimiters, bold, "The answer is", one box, the final period."""
    text = re.sub(r"\*\*([A-Za-z][A-Za-z :]*)\*\*", r"\1", text)  # **Answer:** 18
    for _ in range(8):  # layers
        before = text
        text = text.strip().rstrip(".,;:").strip().removeprefix("=")
        prose = _PROSE.match(text)
        text = text[prose.end() :] if prose else text
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and closing not in inner:
                text = inner
        if text.count("\\boxed") + text.count("\\fbox") == 1:
            box = last_boxed(text)
            outside = text.replace(box, "", 1) if box else text
            if box and not re.search(r"\d", outside):  # a number beside the box is a second answer
                text = box
        if text == before:
            break
    return text


def _brace_arguments(text: str) -> str:
    r"""``\frac12``, ``\frac 9{20}``, ``\sqrt3``, ``\sqrt(2)`` with the braces that TeX lets one leave out."""
    out: list[str] = []
    position = 0
    for match in re.finditer(r"\\(frac|binom|sqrt)(?![a-zA-Z])\s*(\[[^\[\]]*\])?", text):
        if match.start() < position:
            continue
        out.append(text[position : match.end()].rstrip())
        position = match.end()
        for _ in range(1 if match[1] == "sqrt" else 2):
            # \frac123 is 1/2 times 3, but nobody writes \sqrt12 for the root of 1 times 2
            bare = re.compile(r"\s*(\\[a-zA-Z]+|\d+|[^\s{}()\[\]\\])" if match[1] == "sqrt" else r"\s*(\\[a-zA-Z]+|\w)")
            group = re.compile(r"\s*([{(])").match(text, position)
            if group and (group[1] == "{" or match[1] == "sqrt") and (end := _closing(text, group.end() - 1)):
                out.append("{" + _brace_arguments(text[group.end() : end]) + "}")
                position = end + 1
            elif argument := bare.match(text, position):
                if argument[1] == r"\sqrt":  # \frac\sqrt32: leave the inner command its own argument
                    break
                out.append("{" + argument[1] + "}")
                position = argument.end()
            else:
                break
    return "".join(out) + text[position:]


_OPENING, _CLOSING = "([{", ")]}"


def _depth(text: str) -> int:
    return sum((char in _OPENING) - (char in _CLOSING) for char in text)


def _deepest(text: str) -> int:
    return max(accumulate((char in _OPENING) - (char in _CLOSING) for char in text), default=0)


def _closing(text: str, start: int) -> int:
    """Index of the brace or bracket that closes the one at `start`; 0 if none does."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPENING) - (text[i] in _CLOSING)
        if depth == 0:
            return i
    return 0
