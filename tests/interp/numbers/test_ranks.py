"""The largest of many numbers."""

import pytest
import torch

from interp.numbers.ranks import largest_rows


@pytest.mark.parametrize("shape", [(7,), (7, 3), (11, 2, 5), (2, 3)])
@pytest.mark.parametrize("k", [1, 2, 5, 13])
@pytest.mark.parametrize("of", [2, 5, 1000])
def test_the_largest_match_python_and_equal_values_keep_their_order(shape, k, of):
    values = torch.randint(of, shape, generator=torch.Generator().manual_seed(k + of)).double()
    rows = largest_rows(values, k)
    columns, chosen = values.reshape(len(values), -1), rows.reshape(len(rows), -1)
    assert rows.shape == (min(k, len(values)), *shape[1:])
    for column in range(columns.shape[1]):
        order = sorted(range(len(values)), key=lambda row: (-columns[row, column].item(), row))
        assert chosen[:, column].tolist() == order[:k]


def test_no_rows_have_no_largest_values():
    assert largest_rows(torch.zeros(0), 3).shape == (0,)
    assert largest_rows(torch.zeros(0, 2), 3).shape == (0, 2)
