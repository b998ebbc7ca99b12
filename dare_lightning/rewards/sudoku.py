"""4x4 Sudoku: the share of empty cells that the completion fills correctly."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dare_lightning.rewards.base import Example, Form, Verdict, check_form, judge_each, sample_name
from dare_lightning.rewards.text import stated

CELLS = 16
_PUZZLE = re.compile(r"[0-4]{16}")
_SOLUTION = re.compile(r"[1-4]{16}")


class SudokuReward:
    """Share of the originally empty cells that hold the right digit; "right" only for the whole grid.

    `extra["puzzle"]` holds the 16 clues (0 = empty), the ground truth the 16 digits of the solution. The digits of the
    answer are read in order, separators are skipped; missing cells count as wrong, cells after the 16th do not
    count. Clues are not scored, but a grid that changes one, or has more than 16 digits, is not "right".

    The grid is compared with the reference alone, as the paper does: of a puzzle with several solutions (a quarter of
    the published test file) only that one is right.

    Args:
        form: where the answer stands: "paper" in the last `<answer>…</answer>`, "compact" the completion is the answer.

    Source: Zhao et al. 2025 (d1), arXiv:2504.12216, Sudoku reward.
    """

    def __init__(self, form: Form = "paper") -> None:
        check_form(form)
        self.form: Form = form

    def __call__(self, completions: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict for each completion; reward in [0, 1].

        Raises:
            ValueError: an example has no `extra["puzzle"]`, or the lengths differ.
        """
        return judge_each(self._judge, completions, examples, "the puzzle or its solution is not 16 matching digits")

    def _judge(self, completion: str, example: Example) -> Verdict:
        if "puzzle" not in example.extra:
            raise ValueError(
                f"{sample_name(example)} has no extra['puzzle'] (found {sorted(example.extra)}): this reward needs "
                "Sudoku rows; choose the reward that belongs to the data"
            )
        puzzle, solution = str(example.extra["puzzle"]), example.ground_truth
        if not _is_task(puzzle, solution):
            return Verdict(0.0, "excluded")
        answer = stated(completion, self.form)
        digits = re.sub(r"[^0-9]", "", answer or "")
        if not digits:
            return Verdict(0.0, "unparsed", answer)
        empty = [cell for cell in range(CELLS) if puzzle[cell] == "0"]
        correct = sum(digits[cell : cell + 1] == solution[cell] for cell in empty)
        return Verdict(correct / len(empty), "right" if digits == solution else "wrong", digits)


def _is_task(puzzle: str, solution: str) -> bool:
    """Both are well formed, at least one cell is empty, and the solution keeps the clues."""
    if not _PUZZLE.fullmatch(puzzle) or not _SOLUTION.fullmatch(solution) or "0" not in puzzle:
        return False
    return all(clue in ("0", cell) for clue, cell in zip(puzzle, solution, strict=True))
