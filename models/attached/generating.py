"""Generation: the facts about a call of `generate` of `transformers` that edits and caches need.

1. `Generation` reads the arguments of the call before the first run.
2. Each run of the model asks it for the text of a row (`copies`), and for the reason why positions
   cannot count from the end (`why_no_end`).
3. After the call, `running` returns where each row ended, for the cache of the generation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookError
from hooks.base import Piece, Prompt, Scoped
from models.attached.original import is_encoder_decoder

_PARAMETERS = ("inputs", "generation_config", "logits_processor", "stopping_criteria")
"""The first parameters of `generate`, in order."""

_ASSISTANTS = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")
"""The arguments of `generate` that make runs read candidates for the next tokens."""


class Generation:
    """Facts about a call of `generate`.

    Args:
        model: the model that generates.
        args, kwargs: the arguments of `generate`.

    Attributes:
        why_no_end: the reason why positions cannot count from the end of a text; empty if they can.
        began: for a generation without a cache, in which every run reads the whole text again: the
            number of columns that its first run read.
    """

    def __init__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._model = model
        self._named = dict(zip(_PARAMETERS, args, strict=False)) | {**kwargs}
        self._is_of_decoder = is_encoder_decoder(model)
        self.began: int | None = None
        self._n_runs = 0
        self.why_no_end = self._why_no_end()
        names = ("inputs", "input_ids", "inputs_embeds", getattr(model, "main_input_name", ""))
        given = [self._named.get(name) for name in names]
        # The texts of an encoder may be given as its output.
        given += [*(self._named.get("encoder_outputs") or {}).values()]
        self._n_texts = next((len(texts) for texts in given if isinstance(texts, Tensor)), 0)
        numbers = [self._setting(name) for name in ("num_beams", "num_return_sequences")]
        self._most = max(number or 1 for number in numbers)
        # A hook may run another model.
        self._modules = {*model.modules()}

    def _setting(self, name: str) -> Any:
        """Return a setting of the call: its argument, or the value in the configuration."""
        if name in self._named:
            return self._named[name]
        of_call = getattr(self._named.get("generation_config"), name, None)
        of_model = getattr(getattr(self._model, "generation_config", None), name, None)
        return of_model if of_call is None else of_call

    @property
    def _tokens(self) -> Tensor | None:
        """The tokens that the generation continues, [batch, pos]; None without such tokens.

        In a model with an encoder, these are the tokens of the decoder.
        """
        names = ("decoder_input_ids",) if self._is_of_decoder else ("inputs", "input_ids")
        given = [self._named.get(name) for name in names]
        return next((tokens for tokens in given if isinstance(tokens, Tensor)), None)

    @property
    def _mask(self) -> Tensor | None:
        """The mask of the prompts [batch, pos], if it was given."""
        mask = self._named.get("attention_mask")
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def prompt(self) -> Prompt | None:
        """Return the prompt that runs read in chunks; None if it is read at once, or unknown."""
        if self._setting("prefill_chunk_size") is None or self._is_of_decoder:
            return None
        if self._mask is not None:
            rows = self._mask.bool().repeat_interleave(self._most, 0)
            return Prompt(Piece(0, rows), rows.shape[1])
        return None if self._tokens is None else Prompt(Piece(0), self._tokens.shape[1])

    def _why_no_end(self) -> str:
        """Return the reason why positions cannot count from the end of a text; see the class."""
        for name in _ASSISTANTS:
            if self._setting(name):
                return (
                    f"{name}= makes runs read candidate tokens after the text (leave out {name}= "
                    "to count from the end)"
                )
        if self._setting("prefill_chunk_size") is None:
            return ""
        if self._tokens is None or self._is_of_decoder:
            return (
                "prefill_chunk_size= divides prompts of unknown length (leave out "
                "prefill_chunk_size= to count from the end)"
            )
        pad = self._setting("pad_token_id")
        if self._mask is None and pad is not None and bool((self._tokens == pad).any()):
            return "prefill_chunk_size= divides prompts of unknown padding (pass attention_mask=)"
        return ""

    def copies(self, n_rows: int, forward: Any) -> int:
        """Return the number of rows of each text in a run: beams, or returned texts.

        The rows of a text follow one another. The result is 0 if the rows are of unknown texts.

        Args:
            n_rows: the number of rows of the run.
            forward: the forward of the module that reads the texts.
        """
        if self._most == 1 or getattr(forward, "__self__", None) not in self._modules:
            return 1
        if n_rows == self._n_texts:
            return 1
        return self._most if n_rows == self._n_texts * self._most else 0

    def columns_read(self, n_rows: int, end: int, forward: Any) -> Tensor | None:
        """Return the mask of real tokens up to a column, for a run whose mask has another form.

        With a static cache, `generate` gives the model a mask of queries and keys. The columns
        after the prompt are real.

        Args:
            n_rows: the number of rows of the run.
            end: the column after the last column that the run reads.
            forward: the forward of the module that reads the texts.

        Returns:
            The mask [batch, end]; None if the prompts, or the texts of the rows, are unknown.
        """
        copies = self.copies(n_rows, forward)
        is_own = getattr(forward, "__self__", None) in self._modules
        mask = self._mask_of_prompts()
        if mask is None or self._is_of_decoder or not is_own or n_rows != copies * len(mask):
            return None
        mask = mask.repeat_interleave(copies, 0)
        return nn.functional.pad(mask, [0, max(0, end - mask.shape[1])], value=1)[:, :end]

    def _mask_of_prompts(self) -> Tensor | None:
        """Return the mask of the prompts that `generate` uses; None if the prompts are unknown.

        Without an argument `attention_mask`, `generate` takes the padding token for padding, unless
        it also ends texts.
        """
        if self._mask is not None:
            return self._mask.long()
        if self._tokens is None:
            return None
        pad, ends = (self._setting(name) for name in ("pad_token_id", "eos_token_id"))
        ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
        if pad is None or pad in ends:
            return torch.ones_like(self._tokens)
        return (self._tokens != pad).long()

    def count(self, forward: Any) -> None:
        """Count a run, if it is a run of the model that generates.

        Args:
            forward: the forward of the module that reads the texts.
        """
        self._n_runs += getattr(forward, "__self__", None) in self._modules

    def running(self, output: Any) -> Tensor | None:
        """Return which new columns belong to the text of each row, [batch, pos].

        The last token of a row, such as its stop token, is not read if the row is alone. So its
        column does not belong to the text. The result is None if no column was read after the
        prompt.

        Args:
            output: the output of `generate`.

        Raises:
            HookError: if rows may have ended at other tokens than the end-of-text tokens of the
                call, and the tokens do not show where.
        """
        tokens: Tensor = getattr(output, "sequences", output)
        width = int(self._is_of_decoder) if self._tokens is None else self._tokens.shape[1]
        new = tokens[:, width:]
        # The last new token of all rows has no column. On some devices, the model reads it before
        # it knows that all rows have ended.
        chunk = self._setting("prefill_chunk_size")
        n_chunks = -(-width // chunk) if chunk and width else 1
        n_unneeded = int(self._n_runs == n_chunks + new.shape[1])
        if len(new) == 1 or new.shape[1] < 2:
            running = torch.ones_like(new[:, :-1], dtype=torch.bool)
        else:
            # A row continues while it has no end up to this token.
            running = (self._is_end(new).cumsum(1) == 0)[:, :-1]
        running = nn.functional.pad(running, [0, n_unneeded], value=False)
        return running if running.shape[1] else None

    def _is_end(self, new: Tensor) -> Tensor:
        """Return a mask that is True at tokens that end a row.

        Args:
            new: the new tokens of each row.
        """
        ends = self._setting("eos_token_id")
        pad = self._setting("pad_token_id")
        ends = torch.as_tensor([] if ends is None else ends, device=new.device).flatten()
        pads = torch.as_tensor([] if pad is None else pad, device=new.device).flatten()
        is_end = torch.isin(new, ends)
        if not self._setting("stop_strings") and not self._named.get("stopping_criteria"):
            return is_end
        if not len(ends) or not len(pads) or bool(torch.isin(pads, ends).any()):
            raise HookError(
                "a cached generation of several texts with stop_strings= or stopping_criteria= "
                "must show where each text ends: pass eos_token_id=, and a pad_token_id= that is "
                "not one of its tokens"
            )
        # The padding after the end of a row reaches the last column.
        later = torch.isin(new, pads).int().flip(1).cummin(1).values.flip(1).bool()
        return is_end | (later.roll(-1, 1) & ~later)


generation_now = Scoped[Generation | None]("generation", None)
"""The generation that runs now, or None."""
