from gtpo.grading.compare import equivalent


def extract_answer(text: str) -> str | None:
    """The content of the last complete ``<answer>...</answer>`` block, stripped; in time linear in the text.

    None if there is no such block, if the last one is empty, or if blocks disagree: listing several answers is not
    answering. A block starts at the last ``<answer>`` before its ``</answer>``.
    """
    blocks: list[str] = []
    position = 0
    while (end := text.find("</answer>", position)) >= 0:
        start = text.rfind("<answer>", position, end)
        if start >= 0:
            block = text[start + len("<answer>") : end].strip()
            if blocks and block != blocks[-1] and not equivalent(block, blocks[-1]):
                return None
            blocks[:] = [block]
        position = end + len("</answer>")
    return blocks[0] or None if blocks else None


def gsm8k_gold(answer_text: str) -> str | None:
    """The gold number of a GSM8K solution: the text after its last ``#### ``, commas removed; None if there is none."""
    _, mark, gold = answer_text.rpartition("#### ")
    return gold.replace(",", "").strip() or None if mark else None
