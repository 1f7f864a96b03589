"""A fake engine on spec-kernels alone: greedy steps over a paged cache give what dense attention gives."""

import spec_kernels as sk
import torch
from torch.nn import functional

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 8
torch.manual_seed(0)
vocabulary = torch.randn(50, HEADS * DIM)
to_key, to_value = (torch.randn(HEADS * DIM, KV_HEADS * DIM) / 8 for _ in range(2))
requests = [([5, 3], [7, 1, 4, 9, 2]), ([2, 6], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20])]  # pages, tokens
key_cache, value_cache = (torch.full((8, PAGE, KV_HEADS, DIM), torch.nan) for _ in range(2))


def write(pages: list[int], position: int, token: int) -> None:
    """Put K and V of one token where the block table says."""
    place = pages[position // PAGE], position % PAGE
    key_cache[place] = (vocabulary[token] @ to_key).view(KV_HEADS, DIM)
    value_cache[place] = (vocabulary[token] @ to_value).view(KV_HEADS, DIM)


def dense(tokens: list[int]) -> torch.Tensor:
    """The newest token's attention over all tokens, without pages."""
    x = vocabulary[tokens]
    key, value = ((x @ w).view(-1, KV_HEADS, DIM).transpose(0, 1).repeat_interleave(2, 0) for w in (to_key, to_value))
    return functional.scaled_dot_product_attention(x[-1].view(HEADS, 1, DIM), key, value, scale=0.25).view(-1)


for pages, tokens in requests:
    for position, token in enumerate(tokens):
        write(pages, position, token)
for _ in range(5):
    lengths = [len(tokens) for _, tokens in requests]
    metadata = sk.build_paged_metadata([pages for pages, _ in requests], [1, 1], lengths, page_size=PAGE, rows=4)
    query = torch.zeros(4, 1, HEADS, DIM)
    query[:2, 0] = torch.stack([vocabulary[tokens[-1]].view(HEADS, DIM) for _, tokens in requests])
    out = sk.paged_attention(
        query, key_cache.nan_to_num(), value_cache.nan_to_num(), metadata, scale=0.25, page_size=PAGE
    )
    assert not out[2:].any(), "padded rows are zeros"
    for row, (pages, tokens) in enumerate(requests):
        torch.testing.assert_close(out[row].view(-1), dense(tokens), rtol=1e-4, atol=1e-4)
        tokens.append(int((vocabulary @ out[row].view(-1)).argmax()))
        write(pages, len(tokens) - 1, tokens[-1])
print("spec-kernels on", sk.choose("paged_attention", "cpu"), [tokens[-5:] for _, tokens in requests])
