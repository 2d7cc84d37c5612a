"""Training batches: pure functions of their index, exact sizes, right borders and shares."""

import time
from itertools import islice

import numpy as np
import pytest

from examples.tinyflash.mixture import SHARES, Batch, Stage, batches, make_batch
from examples.tinyflash.tokenizer import encoder

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def same(a: Batch, b: Batch) -> bool:
    arrays = all(np.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    return arrays and a.tasks == b.tasks


def test_a_batch_is_a_function_of_its_index() -> None:
    run = list(islice(batches(3, 8192, 1024, "short"), 6))
    assert same(run[4], make_batch(3, 4, 8192, 1024, "short"))
    assert not same(run[4], run[5])
    assert not same(run[0], make_batch(4, 0, 8192, 1024, "short"))
    workers = [list(islice(batches(3, 8192, 1024, "short", first=w, step=2), 3)) for w in (0, 1)]
    for index, batch in enumerate(run):
        assert same(batch, workers[index % 2][index // 2])


@pytest.mark.parametrize(("stage", "seq_len"), [("short", 1024), ("long", 8192)])
def test_borders_masks_and_shares(stage: Stage, seq_len: int) -> None:
    size = 32768
    tokens_of = dict.fromkeys(SHARES[stage], 0)
    padding = 0
    longest = 0
    for index in range(6):
        batch = make_batch(0, index, size, seq_len, stage)
        assert batch.tokens.dtype == np.int32
        assert batch.mask.dtype == np.bool_
        assert batch.query_start.dtype == np.int32
        assert batch.tokens.shape == batch.mask.shape == (size,)
        assert batch.query_start[0] == 0
        assert batch.query_start[-1] == size
        assert len(batch.tasks) == len(batch.query_start) - 1
        assert batch.tokens.min() >= 0
        assert batch.tokens.max() < 4096
        borders = zip(batch.query_start, batch.query_start[1:], batch.tasks, strict=False)
        for start, end, task in borders:
            assert 0 < end - start <= seq_len or task == "padding"
            if task == "padding":
                assert end == size
                assert np.all(batch.tokens[start:end] == 2)
                assert not batch.mask[start:end].any()
                padding += end - start
                continue
            tokens_of[task] += int(end - start)
            longest = max(longest, int(end - start))
            assert not batch.mask[start]
            assert batch.mask[end - 1]
            text = encoder().decode(batch.tokens[start:end].tolist())
            assert text.startswith(BOS)
            assert text.count(BOS) == 1
            assert text.endswith(EOS)
    assert padding < 0.01 * 6 * size
    assert longest > 0.7 * seq_len
    total = sum(tokens_of.values())
    for task, share in SHARES[stage].items():
        assert abs(tokens_of[task] / total - share) < 0.03, (task, tokens_of)


def test_shares_sum_to_one() -> None:
    for shares in SHARES.values():
        assert abs(sum(shares.values()) - 1) < 1e-9


def test_sizes_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="got seq_len 8192 and tokens_per_batch 4096"):
        make_batch(0, 0, 4096, 8192, "long")
    with pytest.raises(ValueError, match="512 <= seq_len"):
        make_batch(0, 0, 4096, 256, "short")


def test_speed_is_printed() -> None:
    """Not a bound: shared machines vary. The aim is 300,000 tokens/s and core."""
    sizes: dict[Stage, int] = {"short": 1024, "long": 8192}
    for stage, seq_len in sizes.items():
        make_batch(0, 0, 32768, seq_len, stage)
        start = time.perf_counter()
        made = sum(len(make_batch(0, i, 32768, seq_len, stage).tokens) for i in range(1, 9))
        rate = made / (time.perf_counter() - start)
        print(f"{stage}: {rate:,.0f} tokens/s on one core")


def test_long_conversations_in_a_row_do_not_end_a_batch() -> None:
    """At this index three conversations in a row are longer than 512 tokens."""
    batch = make_batch(0, 79, 32768, 512, "short")
    lengths = np.diff(batch.query_start)
    assert lengths.max() <= 512
    assert lengths.sum() == 32768
