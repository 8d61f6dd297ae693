"""The bar of a run that generates answers."""

from __future__ import annotations

import time

from tqdm.auto import tqdm

_EVERY = 1.0  # seconds between two drawings


class AnswerBar:
    """Counts answers and tokens; it is drawn from the first token on, not from the first answer.

    Args:
        answer_count: The number of answers to come.
        kept: The number of answers that an earlier run has left.
        title: What is counted.
    """

    def __init__(self, answer_count: int, kept: int = 0, title: str = "answers") -> None:
        # miniters=0: also drawn where tokens have come and no answer has ended.
        self._bar = tqdm(
            desc=title,
            initial=kept,
            total=kept + answer_count,
            unit="answer",
            miniters=0,
            mininterval=_EVERY,
        )
        self._start = time.monotonic()
        self._tokens = 0

    def add_tokens(self, count: int) -> None:
        """Count new tokens."""
        self._tokens += count
        seconds = max(time.monotonic() - self._start, 1e-3)
        text = f"{self._tokens:,} tokens, {self._tokens / seconds:,.0f} tokens/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(0)

    def add_answer(self) -> None:
        """Count an answer that has ended."""
        self._bar.update()

    def __enter__(self) -> AnswerBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
