"""Greedy speculation with trees on the demo's model is lossless: whatever is drafted, the tokens are those of plain
decoding.

SmolLM2 runs over a paged pool on the CPU. Every step drafts a tree with siblings, verifies it in one pass under the
tree's mask, and moves the accepted branch's KV together. The judge is the demo's own plain forward.
"""

from __future__ import annotations

import random

import pytest
import spec_kernels as sk
import torch
from disaggregated_serving.reference import judge
from disaggregated_serving.setup import kv_layout
from disaggregated_serving.stage import Stage
from disaggregated_serving.weights import Weights, load_smollm2
from kv_pool import MhaPool

PAGE, COLUMNS, NEW = 16, 4, 20
PROMPTS = ([504, 2353, 282, 260], [1093, 253, 1732, 5345, 28, 665, 436])  # two short beginnings
# Candidates 0 and 1 follow the root, 2 and 3 follow 0, 4 follows 1, 6 follows 2.
PARENTS, SELECTED = [-1, 0, 1, 2], [0, 1, 2, 3, 4, 6]
ABOVE = {0: None, 1: None, 2: 0, 3: 0, 4: 1, 6: 2}
WIDTH, DEPTH = len(SELECTED) + 1, 4


class Server:
    """The model over one pool, with both requests' pages interleaved."""

    def __init__(self, weights: Weights) -> None:
        shape = weights.shape
        self.pool = MhaPool(kv_layout(shape, PAGE, torch.float16), size=PAGE * (2 * COLUMNS + 1), device="cpu")
        self.model = Stage(weights, self.pool, device=torch.device("cpu"), kv_dtype=torch.float16)
        self.layers = range(shape.layers)
        self.pages = torch.tensor([[7, 2, 5, 4], [1, 8, 3, 6]], dtype=torch.int32)
        offsets = torch.arange(PAGE, dtype=torch.int32)
        self.table = (self.pages.unsqueeze(2) * PAGE + offsets).flatten(1)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, metadata: sk.PagedAttentionMetadata
    ) -> torch.Tensor:
        """The greedy token after each of a batch's tokens."""
        model = self.model
        hidden = model.run(model.embed(ids), positions=positions, slots=slots, metadata=metadata)
        return model.next_tokens(hidden)

    def prefill(self, row: int, prompt: list[int]) -> int:
        """Write a prompt's KV; the first new token."""
        count = len(prompt)
        slots = self.table[row, :count].long()
        metadata = sk.PagedAttentionMetadata(self.pages[row : row + 1], [count], [count])
        return int(self.forward(torch.tensor(prompt), torch.arange(count), slots, metadata)[-1])

    def verify(self, candidates: torch.Tensor, lens: torch.Tensor) -> sk.TreeAccept:
        """One pass over both trees; afterwards the accepted tokens' KV lies side by side."""
        parents, selected = (torch.tensor([numbers] * 2) for numbers in (PARENTS, SELECTED))
        tree = sk.build_tree(parents, selected, lens, topk=2)
        slots = sk.uniform_cache_locs(self.table, torch.arange(2), lens, width=WIDTH).locs.long()
        ends = lens + WIDTH
        mask = sk.tree_attention_mask(tree.visible, ends, columns=COLUMNS, page_size=PAGE)
        metadata = sk.PagedAttentionMetadata(self.pages, [WIDTH] * 2, ends.tolist(), mask)
        predicted = self.forward(candidates.flatten(), tree.positions.flatten(), slots, metadata)
        accepted = sk.verify_tree_greedy(
            candidates, predicted.view(2, WIDTH), tree.next_token, tree.next_sibling, depth=DEPTH
        )
        moves = sk.accepted_moves(slots, accepted.accept_index, width=WIDTH)
        caches = [cache for layer in self.layers for cache in (self.pool.key(layer), self.pool.value(layer))]
        sk.move_kv(caches, moves)
        return accepted


def plain(weights: Weights) -> list[list[int]]:
    """Token by token, as without drafts."""
    server, found = Server(weights), []
    for row, prompt in enumerate(PROMPTS):
        tokens = [server.prefill(row, prompt)]
        while len(tokens) < NEW:
            place = len(prompt) + len(tokens) - 1
            metadata = sk.PagedAttentionMetadata(server.pages[row : row + 1], [1], [place + 1])
            slot = server.table[row, place : place + 1].long()
            tokens.append(int(server.forward(torch.tensor(tokens[-1:]), torch.tensor([place]), slot, metadata)))
        found.append(tokens)
    return found


def draft(numbers: random.Random, future: list[int], quality: float) -> list[int]:
    """Tokens of the candidates: those of the true continuation on one random branch, as far as luck goes."""
    tokens = {name: numbers.randrange(2, 40_000) for name in SELECTED}
    branch: int | None = None
    for step in range(DEPTH - 1):
        children = [name for name, above in ABOVE.items() if above == branch]
        if not children or step >= len(future) or numbers.random() > quality:
            break
        branch = numbers.choice(children)
        tokens[branch] = future[step]
    return [tokens[name] for name in SELECTED]


@pytest.mark.timeout(600)
@torch.inference_mode()
def test_trees_give_the_tokens_of_plain_decoding() -> None:
    weights = load_smollm2()
    expected = plain(weights)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert not judge(weights, prompt, tokens, kv_dtype=torch.float16).wrong
    server, numbers = Server(weights), random.Random(5)
    found = [[server.prefill(row, prompt)] for row, prompt in enumerate(PROMPTS)]
    lengths, siblings = [], 0
    while min(map(len, found)) < NEW:
        lens = torch.tensor([len(prompt) + len(tokens) - 1 for prompt, tokens in zip(PROMPTS, found, strict=True)])
        futures = [truth[len(tokens) :] for truth, tokens in zip(expected, found, strict=True)]
        drafts = [draft(numbers, future, 0.8) for future in futures]
        candidates = torch.tensor([[tokens[-1], *chosen] for tokens, chosen in zip(found, drafts, strict=True)])
        accepted = server.verify(candidates, lens)
        for row in range(2):
            path = [int(index) - row * WIDTH for index in accepted.accept_index[row] if index >= 0]
            found[row] += [int(candidates[row, column]) for column in path[1:]] + [int(accepted.bonus[row])]
            lengths.append(len(path))
            siblings += any(SELECTED[column - 1] in (1, 3) for column in path[1:])
    assert [tokens[:NEW] for tokens in found] == expected
    assert max(lengths) == DEPTH and min(lengths) == 1 and siblings >= 2, (lengths, siblings)
