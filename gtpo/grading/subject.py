r"""What comes before a value, read whole: ``The total number of eggs is``, ``She pays``, ``Area of \triangle ABC =``.

A subject is a quantity of words.yaml with words of it before, and after it ``of``, ``in``, ``for`` and nouns. What is
said of the answer itself (plus two, squared, after it) makes another value of it, and is no part of this grammar.
"""

import re
from functools import lru_cache

from gtpo.grading.latex import TABLES, TEXT_COMMANDS

CLOSED = frozenset(TABLES["closed"].split())


def _any(name: str) -> str:
    """The words of a list of words.yaml as alternatives, the longest first."""
    return "|".join(sorted(TABLES[name].split(), key=len, reverse=True))


_POINTS = "(?-i:[A-Z]{1,4})"
_MATH = rf"\\(?:triangle|angle|overline)\s*\{{?{_POINTS}\}}?|{_POINTS}|[a-zA-Z](?:_\{{?\w\}}?|\([a-z\d]\))?"
_MATH += rf"|\$(?:{_MATH}|[a-z](?:\s*\+\s*[a-z])+)\$"
_DETERMINER = r"(?:the|an?|each|every|its|his|her|their|our|my|your|this|that|(?:the )?[a-z]+'s)\s+"
_PRONOUNS = "he|she|it|they|we|you"
_TIMES = rf"(?:double|triple|quadruple|negative)\s+(?:the|{_MATH})(?![a-z])"  # double x; not double rooms
_WORD = rf"(?!(?:{_PRONOUNS})\s|{_TIMES})[a-z][a-z'-]+"
_NOUNS = rf"(?:{_DETERMINER})?(?:(?:{_WORD}\s+){{0,3}}{_WORD}|(?:{_MATH})(?![a-z]))(?:\s+(?:{_MATH})(?![a-z]))?"
_LINKS = "of|in|for|on|per|between"
_TOTAL = r"(?:\s+(?:in total|in all|altogether))?"
_FINAL = rf"(?:(?:{_any('modifiers of a subject')})\s+)*"
_ANSWER = re.compile(
    rf"(?:(?:the|my|our|this)\s+)?{_FINAL}(?:{_any('answers')})s?"
    r"(?:\s+(?:to|for|of)\s+(?:the|this|your|our)\s+(?:problem|question|exercise|task|puzzle|equation|system|expression)"
    r"|\s+(?:to|for)\s+part\s+\(?[a-z0-9]\)?|\s+choice|\s+option)?",
    re.IGNORECASE,
)
_CLAUSE = rf"(?:\s+(?:that\s+)?(?:{_PRONOUNS}|(?-i:[A-Z])[a-z]+)\s+(?:{_any('verbs')})(?![a-zA-Z]))?"
_QUANTITY = re.compile(
    rf"(?:{_DETERMINER})?{_FINAL}(?:(?:{_any('quantities')})(?:\s+{_FINAL}(?:{_any('quantities')}))?|(?:{_MATH})(?![a-z]))"
    rf"(?P<of>(?:\s+(?:{_LINKS})\s+{_NOUNS}(?:\s+and\s+(?:{_MATH})(?![a-z]))?)*)"
    r"(?:(?<=\sways)\s+to\s+[a-z]+(?P<to>(?:\s+(?:the|an?|all|these))?(?:\s+[a-z-]+){0,3}))?"
    rf"{_CLAUSE}",
    re.IGNORECASE,
)
_SOMEBODY = rf"(?:he|she|it|they|we|you|i|(?P<who>{_DETERMINER}[a-z]+|[A-Z][a-z]+))"
_MODAL = r"(?:will|would|can|must|should|(?:need|needs|needed|has|have|had)\s+to)"
_SENTENCE = re.compile(
    rf"{_SOMEBODY}(?:\s+{_MODAL})?\s+(?:{_any('verbs')}|is(?=\s+\d+\s+years))(?![a-zA-Z])"
    rf"(?:\s+(?:him|her|them|us|me))?{_TOTAL}",
    re.IGNORECASE,
)
_WE_GET = "(?:we|i) (?:get|got|have|find|obtain|see|conclude)\\b(?: that)?:?"
_EXACTLY = "exactly|precisely|simply|only|just|a total of"
_OPENING = re.compile(  # so, we get that; there are exactly; the final answer is
    rf"(?:{'|'.join(TABLES['connectives'])})\b,?\s*(?:{_WE_GET}\s*)?(?=.)|{_WE_GET}(?<=that)\s+(?=.)"
    rf"|(?:{_WE_GET}|(?:this|that|it|which) (?:gives|yields|equals|leaves|comes to|amounts to)"
    rf"|there (?:are|is|were|(?:will|would) be)|(?:it|this|[a-z]) (?:is|must be|should be)"
    rf"|ans\b[.:]*)\s*(?:(?:{_EXACTLY})\s+)?(?=[-\d\\$])"
    rf"|(?:{_EXACTLY}|which is|equals|is|it's|that's|(?:the )?(?:point|numbers|values))\s+(?=[-\d\\$(])"
    r"|only\s+(?=[a-z]\s*=)"
    rf"|(?:(?:the|my|our)\s+)?{_FINAL}(?:{_any('answers')})s?\s*(?:(?:is|are)\b|=|:|(?=[-\d$]))\s*:?\s*",
    re.IGNORECASE,
)
_COPULA = re.compile(
    r"\s+(?:is|are|was|were|equals|will be|would be|must be|should be)\s+"
    r"(?:equal to\s+|(?:located )?at\s+(?=\()|(?:exactly|simply)\s+)?(?=\S)"
)
_ATTEMPTS = frozenset(TABLES["answers"].split())


def without_subject(text: str) -> str:
    """What is said of a subject, after "so" and "we get"; a text without one as it is."""
    if not text[:1].isalpha():
        return text
    if opening := _OPENING.match(text):
        text = text[opening.end() :]
    is_said, sentence = _COPULA.search(text), _SENTENCE.match(text)
    if is_said and is_subject(text[: is_said.start()]):
        return text[is_said.end() :]
    if not sentence or not _are_open(sentence["who"] or ""):
        return text
    value = re.match(r"\s*(?:exactly\s+|only\s+|a total of\s+)?([-\d$\\].*)", text[sentence.end() :])
    return value[1] if value else text


@lru_cache(maxsize=2**12)
def is_subject(text: str) -> bool:
    """True for the answer, for a quantity, and for somebody who has or does something."""
    text = plain(text)
    if text.lower() == "it" or _ANSWER.fullmatch(text):
        return True
    if sentence := _SENTENCE.fullmatch(text):
        return _are_open(sentence["who"] or "")
    quantity = _QUANTITY.fullmatch(text)
    return quantity is not None and _are_open(f"{quantity['of']} {quantity['to'] or ''}")


def is_name(text: str) -> bool:
    """True for what may stand before ``=`` or ``:``: a subject."""
    text = re.sub(r"(?<![A-Za-z])(P|Pr|E)\([^()]*\)", r"\1", plain(text))  # P(at least 2 heads); not Total (wrong)
    return is_subject(re.sub(r"\([^()]*\)", lambda part: "" if _are_open(part[0]) else part[0], text))


def plain(text: str) -> str:
    r"""The text without ``\text`` and the braces of its argument."""
    return " ".join(re.sub(rf"\\(?:{TEXT_COMMANDS})(?![a-zA-Z])\s*\{{([^{{}}]*)\}}", r" \1 ", text).split())


def _are_open(text: str) -> bool:
    """True if no word is of a closed class or speaks of the answer itself."""
    words = re.sub(rf"(?i)\$[^$]*\$|\b(?:in total|in all|{_LINKS}|and)\b|(?<![a-z]){_DETERMINER}", " ", text).lower()
    found = re.findall(r"[a-z'-]{2,}", words)
    return not any(word in CLOSED or word.removesuffix("s") in _ATTEMPTS or word.endswith("ly") for word in found)
