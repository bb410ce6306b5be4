"""Segments of packed documents see the keys that a mask of all pairs of a row would leave them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from meshtrain.compat.transformers import attention_function
from meshtrain.parallel.documents import attention
from meshtrain.parallel.documents.attention import attend_at_once, attend_by_segments
from meshtrain.parallel.documents.mask import SegmentedMask
from meshtrain.parallel.documents.segments import Document, Piece, find_documents, find_segments

ROWS, SEQ, HEADS, KEYS, WIDTH = 2, 40, 4, 2, 8
WHOLE, PIECES = [(0, SEQ)], [(0, 10), (30, 40)]


def even_distance(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % 2 == 0


RULES: dict[str, tuple[Callable[..., Any], int | None]] = {
    "causal": (causal_mask_function, None),
    "window": (sliding_window_causal_mask_function(5), 5),
    "chunks": (chunked_causal_mask_function(6, torch.zeros(ROWS, dtype=torch.long)), 6),
    "other": (and_masks(causal_mask_function, even_distance), None),
    # A size that is not that of the window decides nothing.
    "narrower": (sliding_window_causal_mask_function(4), 5),
}


def packed() -> Tensor:
    """Return the (ROWS, SEQ) positions of documents of many lengths; the first one goes on."""
    lengths = ((3, 17, 1, 12, 7), (29, 1, 1, 9))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    positions[0, :3] += 4
    return positions


def tensors(dtype: torch.dtype, queries: int) -> list[Tensor]:
    stream = torch.Generator().manual_seed(0)
    shapes = ((HEADS, queries), (KEYS, SEQ), (KEYS, SEQ))
    return [torch.randn(ROWS, *it, WIDTH, generator=stream).to(dtype).requires_grad_() for it in shapes]


def dense(function: Callable[..., Any], pieces: list[Piece], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with a mask of all pairs, (batch, queries, heads, width)."""
    positions = packed()
    number = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)
    b = torch.arange(ROWS)[:, None, None]
    q, k = positions[:, :, None], positions[:, None, :]
    mask = function(b, 0, q, k) & (number[:, :, None] == number[:, None, :])
    columns = torch.cat([torch.arange(*piece) for piece in pieces])
    mask = mask[:, columns].unsqueeze(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, scale=0.3).transpose(1, 2)


def mask_of(rule: str, pieces: list[Piece], base: str = "sdpa", device: str = "cpu") -> SegmentedMask:
    function, size = RULES[rule]
    if rule == "chunks":
        function = chunked_causal_mask_function(size, torch.zeros(ROWS, dtype=torch.long, device=device))
    segments = find_segments(find_documents(packed().to(device)), pieces)
    return SegmentedMask(base, segments, mask_function=function, local_size=size, dtype=torch.float64, device=device)


def alone(mask: SegmentedMask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    module = nn.Module()
    module.num_key_value_groups = HEADS // KEYS
    inner = attention_function("sdpa", module)
    output, weights = attend_by_segments(inner, module, query, key, value, mask, scaling=0.3)
    assert weights is None
    return output


def at_once(mask: SegmentedMask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_at_once(query, key, value, mask, 0.3)


def with_gradients(compute: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    output = compute(*inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(
        float((one.double() - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True)
    )


def by_lengths(query: Tensor, key: Tensor, value: Tensor, borders: Any, longest: Any, **options: Any) -> Tensor:
    """Compute what torch's kernel for documents of any lengths does, without a GPU."""
    queries, keys = (it.diff().tolist() for it in borders)
    assert (max(queries), max(keys)) == longest
    assert borders[0].dtype == torch.int32
    left, right = options["window_size"]
    assert right == 0
    outputs = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        # The last query belongs to the last key.
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        distance = distance.to(q.device)
        mask = (distance >= 0) & (distance <= (left if left >= 0 else len(k)))
        transposed = (x.transpose(0, 1) for x in (q, k, v))
        output = F.scaled_dot_product_attention(*transposed, attn_mask=mask, enable_gqa=True, scale=options["scale"])
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def test_documents_begin_where_positions_do_not_go_on() -> None:
    (first, second) = find_documents(packed())
    assert first[:3] == [Document(0, 3, 4), Document(3, 20, 0), Document(20, 21, 0)]
    assert [it.end for it in second] == [29, 30, 31, 40]
    assert find_documents(torch.arange(5).expand(2, -1)) == [[Document(0, 5, 0)]] * 2


@pytest.mark.parametrize("pieces", [WHOLE, PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize("rule", RULES)
def test_segments_compute_what_a_mask_does(rule: str, pieces: list[Piece]) -> None:
    inputs = tensors(torch.float64, sum(end - begin for begin, end in pieces))
    wanted = with_gradients(partial(dense, RULES[rule][0], pieces), inputs)
    assert largest_error(with_gradients(partial(alone, mask_of(rule, pieces)), inputs), wanted) < 1e-12
    assert mask_of(rule, pieces).rule == ("other" if rule == "narrower" else rule)


@pytest.mark.parametrize("rule", RULES)
def test_segments_in_bfloat16_are_as_near_as_a_mask(rule: str) -> None:
    wanted = with_gradients(partial(dense, RULES[rule][0], WHOLE), tensors(torch.float64, SEQ))
    found = with_gradients(partial(alone, mask_of(rule, WHOLE)), tensors(torch.bfloat16, SEQ))
    assert largest_error(found, wanted) < 1e-2


@pytest.mark.parametrize("pieces", [WHOLE, PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize("rule", ["causal", "window", "chunks"])
def test_one_kernel_for_all_segments_gets_their_borders(
    rule: str, pieces: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attend_to_lengths", by_lengths)
    inputs = tensors(torch.float64, sum(end - begin for begin, end in pieces))
    wanted = with_gradients(partial(dense, RULES[rule][0], pieces), inputs)
    assert largest_error(with_gradients(partial(at_once, mask_of(rule, pieces)), inputs), wanted) < 1e-12


def test_only_what_needs_a_mask_gets_one() -> None:
    for rule in ("causal", "chunks"):
        mask = mask_of(rule, WHOLE)
        assert all(mask.within(it, torch.float64) is None for it in mask.blocks)
        assert all(mask_of(rule, WHOLE, "eager").within(it, torch.float64) is not None for it in mask.blocks)
    window = mask_of("window", WHOLE)
    shapes = {found.shape for it in window.blocks if (found := window.within(it, torch.float64)) is not None}
    # No block of a window has more keys than two windows.
    assert shapes
    assert all(shape[-1] < 2 * 5 for shape in shapes)


def test_equal_blocks_share_a_mask() -> None:
    window = mask_of("window", WHOLE)
    found = [window.within(it, torch.float32) for it in window.blocks if (it.num_queries, it.num_keys) == (5, 9)]
    assert len(found) > 1
    assert len({id(it) for it in found}) == 1
    assert found[0] is not None
    # Attention would turn a bool mask into numbers in every layer.
    assert found[0].dtype == torch.float32
