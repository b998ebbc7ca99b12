from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor

from dare_lightning.replay.batch import SequenceBatch
from dare_lightning.replay.loader import MicroBatchLoader, Window
from tests.replay.test_batch import batch

LENGTH = 5
"""Windows of 2, 2 and 1 micro-batches."""


def _micro_batch(epoch: int, place: int) -> SequenceBatch:
    one = batch(1 + place, start=100 * epoch + 10 * place)
    one.completion_mask[:, 2 + place % 2 :] = False
    return one


def _windows(epoch: int) -> list[Window]:
    makers: list[Callable[[], SequenceBatch]] = [partial(_micro_batch, epoch, place) for place in range(LENGTH)]
    return [makers[:2], makers[2:4], makers[4:]]


def _count(one: SequenceBatch) -> Tensor:
    return torch.stack([one.completion_mask.sum(), torch.tensor(len(one))]).double()


def _loader(reduce: Callable[[Tensor], Tensor] = lambda total: total) -> MicroBatchLoader:
    return MicroBatchLoader(_windows, LENGTH, _count, reduce)


def _seen(batches: Sequence[SequenceBatch]) -> list[tuple[int, list[float]]]:
    found = []
    for one in batches:
        assert one.denominator is not None
        found.append((int(one.sample_index[0]), one.denominator.tolist()))
    return found


def test_every_micro_batch_carries_the_denominators_of_its_whole_window() -> None:
    got = _seen(list(_loader()))
    # Of micro-batch p, 1 + p rows count p % 2 tokens each.
    assert got == [(0, [2, 3]), (10, [2, 3]), (20, [4, 7]), (30, [4, 7]), (40, [0, 5])]


def test_denominators_are_summed_over_ranks_once_a_window() -> None:
    asked: list[list[float]] = []

    def double(total: Tensor) -> Tensor:
        asked.append(total.tolist())
        return 2 * total

    got = _seen(list(_loader(double)))
    assert asked == [[2, 3], [4, 7], [0, 5]]
    assert got[0] == (0, [4, 6])


@pytest.mark.parametrize("taken", range(1, LENGTH))
def test_a_loader_goes_on_where_its_state_was_taken(taken: int) -> None:
    loader, whole = _loader(), _seen(list(_loader()))
    assert _seen(list(islice(loader, taken))) == whole[:taken]
    again = _loader()
    again.load_state_dict(loader.state_dict())
    assert _seen(list(again)) == whole[taken:]


def test_epochs_are_counted_where_a_pass_is_complete() -> None:
    loader = _loader()
    passes = [[int(one.sample_index[0]) for one in islice(loader, LENGTH)] for _ in range(3)]
    assert passes == [[100 * epoch + 10 * place for place in range(LENGTH)] for epoch in range(3)]
    assert loader.state_dict() == {"epoch": 3, "position": 0}


def test_a_state_from_the_end_of_an_epoch_starts_the_next() -> None:
    loader = _loader()
    loader.load_state_dict({"epoch": 4, "position": LENGTH})
    assert int(next(iter(loader)).sample_index[0]) == 500
    assert loader.state_dict() == {"epoch": 5, "position": 1}


def test_the_position_covers_a_micro_batch_as_soon_as_it_is_out() -> None:
    loader = _loader()
    batches = iter(loader)
    for position in range(1, LENGTH):
        next(batches)
        assert loader.state_dict() == {"epoch": 0, "position": position}
    next(batches)
    assert loader.state_dict() == {"epoch": 1, "position": 0}  # wherever the next one ends


def test_batches_of_other_windows_are_not_made_for_a_resume() -> None:
    made: list[int] = []

    def windows(epoch: int) -> list[Window]:
        def make(place: int) -> SequenceBatch:
            made.append(place)
            return _micro_batch(epoch, place)

        makers = [partial(make, place) for place in range(LENGTH)]
        return [makers[:2], makers[2:4], makers[4:]]

    loader = MicroBatchLoader(windows, LENGTH, _count, lambda total: total)
    loader.load_state_dict({"epoch": 0, "position": 3})
    assert [int(one.sample_index[0]) for one in loader] == [30, 40]
    assert made == [2, 3, 4]  # the window's denominators need its first one
