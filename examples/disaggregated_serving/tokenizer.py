"""SmolLM2's tokenizer, rebuilt from the vocabulary and merges that the GGUF file carries.

The chat format is the model's own; no other template is known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL_TOKEN = 3  # GGUF's token type for control tokens
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatTokenizer:
    """Text to ids and back, with the model's chat markers."""

    def __init__(self, reader: GGUFReader) -> None:
        """Build from the metadata of `reader`."""

        def strings(key: str) -> list[str]:
            field = reader.get_field(key)
            if field is None:
                raise KeyError(f"the GGUF file has no field {key}")
            return [str(item) for item in field.contents()]

        tokens = strings("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in strings("tokenizer.ggml.merges")]
        types = reader.get_field("tokenizer.ggml.token_type")
        eos = reader.get_field("tokenizer.ggml.eos_token_id")
        if types is None or eos is None:
            raise KeyError("the GGUF file lacks token types or the end token")
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))  # type: ignore[arg-type]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        control = [token for token, kind in zip(tokens, types.contents(), strict=True) if kind == CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        self._tokenizer = tokenizer
        self.end_token = int(eos.contents())

    def chat(self, user: str) -> list[int]:
        """Ids of one user turn, ready for the assistant's answer."""
        text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, control tokens left out."""
        return str(self._tokenizer.decode(ids))
