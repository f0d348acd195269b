"""Encoders of the BERT family that compute no padding, and in their last block no more than the head reads.

A batch of texts is filled up to its longest, and of mixed lengths easily a third is padding. Here states lie packed
(S, n, d) from the first block on, token after token; only within attention they are spread to (texts, length) again.
The head reads nothing but the first token's state, so the last block computes keys and values of all tokens and
everything else of the first alone, (texts, 1, d). What a network says is the same to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.adapters.places import Places, places_of

if TYPE_CHECKING:
    from coterie.adapters.inject import Binding, Slots

ATTENTIONS = frozenset(
    f"{family}SelfAttention"
    for family in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "Ernie", "RoCBert", "Data2VecText")
)
"""The classes of transformers whose arithmetic `attended` is, with nothing else inside; others may be alike at short
texts only."""
_TEXTS, _LENGTH = 8, 8


def pack(network: nn.Module, slots: Slots) -> bool:
    """Have passes inside `slots.bound` compute packed, where the network answers random texts alike; tells whether."""
    blocks = _blocks(network)
    if not blocks:
        return False
    _install(network, blocks, slots.binding)
    alike = _answers_alike(network, slots)
    if not alike:
        unpack(network)
    return alike


def unpack(network: nn.Module) -> None:
    """Undo `pack`."""
    for module in network.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _Locating | _Packing | _Ending):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        for name in ("forward", "feed_forward_chunk"):
            if isinstance(vars(module).get(name), _Attention | _FeedForward):
                delattr(module, name)


@dataclass(frozen=True)
class _Locating:
    """Before the encoder: find the places of the coming pass by its mask."""

    binding: Binding

    def __call__(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        mask = named.get("attention_mask")
        fits = self.binding.active and isinstance(mask, Tensor) and mask.dim() == 2
        self.binding.places = self._places(mask) if fits and mask is not None else None

    def _places(self, mask: Tensor) -> Places:
        binding = self.binding
        # Usage counts positions, and shares of a mix are told row by row.
        if binding.everywhere or binding.usage is not None or binding.mix is not None:
            return Places(binding.size, mask.shape[0], mask.shape[1], None, None)
        return places_of(mask, binding.size)


@dataclass(frozen=True)
class _Packing:
    """Before a block's attention: pack its states, if the block before has not."""

    binding: Binding

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        places = self.binding.places
        if places is None:
            return None
        if args:
            return (places.packed(args[0]), *args[1:]), named
        return args, named | {"hidden_states": places.packed(named["hidden_states"])}


@dataclass(frozen=True)
class _Ending:
    """Before what follows the last block's attention: of the states that are added, take the first tokens' too."""

    binding: Binding

    def __call__(self, _: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        places = self.binding.places
        return None if places is None else (args[0], places.ending(args[1]))


@dataclass(frozen=True)
class _FeedForward:
    """In the place of a method whose signature transformers works out in each pass: a tenth of a millisecond."""

    block: nn.Module
    __signature__: ClassVar = Signature([Parameter("attention_output", Parameter.POSITIONAL_OR_KEYWORD)])

    def __call__(self, attention_output: Tensor) -> Tensor:
        made: Tensor = type(self.block).feed_forward_chunk(self.block, attention_output)  # type: ignore[attr-defined]
        return made


@dataclass(frozen=True)
class _Attention:
    """In the place of a self-attention's forward: the same of packed states, where there are places."""

    module: nn.Module
    binding: Binding
    is_last: bool

    def __call__(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        module, places = self.module, self.binding.places
        if places is None:
            plain: tuple[Tensor, Tensor | None] = type(module).forward(
                module, hidden_states, attention_mask=attention_mask, **named
            )
            return plain
        size, config = int(module.attention_head_size), module.config  # type: ignore[arg-type]
        asking, mask = hidden_states, attention_mask if places.padded else None
        ends = self.is_last and places.first is not None
        if ends:
            asking, mask = places.ending(hidden_states), None if mask is None else mask[:, :, :1]

        def heads(states: Tensor) -> Tensor:
            return states.view(places.texts, -1, states.shape[-1] // size, size).transpose(1, 2)

        asked = module.query(asking)  # type: ignore[operator]
        queries = heads(asked if ends else places.spread(asked))
        keys, values = (heads(places.spread(part(hidden_states))) for part in (module.key, module.value))  # type: ignore[operator]
        seen = attended(queries, keys, values, mask, str(config._attn_implementation))  # type: ignore[union-attr]
        context = seen.transpose(1, 2).flatten(2)
        return context if ends else places.packed(context), None


def attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, attention: str) -> Tensor:
    """What queries (texts, heads, m, size) see of keys and values (texts, heads, L, size), in their shape.

    mask: (texts, 1, m or 1, L), added to the scores; with "sdpa" it may be bool, True at what is seen.
    """
    if attention == "sdpa":
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    # Laid out first, lest the product lay out their transpose, which takes longer.
    scores = (queries * keys.shape[-1] ** -0.5) @ keys.contiguous().mT
    if keys.shape[-2] % 32:
        # PyTorch's softmax of bfloat16 is several times as slow as this at other lengths.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    seen: Tensor = scores.softmax(dim=-1).to(values.dtype) @ values
    return seen


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The attention of each block, in order, where all are those of an encoder that is known."""
    found = [module for name, module in network.named_modules() if name.rpartition(".")[2] == "attention"]
    config = getattr(network, "config", None)
    known = all(_is_known(getattr(module, "self", None)) and hasattr(module, "output") for module in found)
    return found if known and config is not None and not getattr(config, "is_decoder", False) else []


def _is_known(inner: nn.Module | None) -> bool:
    kind = type(inner)
    own = kind.__module__.startswith("transformers.") and kind.__name__ in ATTENTIONS
    return own and inner is not None and "forward" not in vars(inner)  # which some other library may have put there


def _install(network: nn.Module, blocks: list[nn.Module], binding: Binding) -> None:
    network.base_model.register_forward_pre_hook(_Locating(binding), with_kwargs=True)  # type: ignore[union-attr]
    for block in blocks:
        block.register_forward_pre_hook(_Packing(binding), with_kwargs=True)
        inner: nn.Module = block.self  # type: ignore[assignment]
        inner.forward = _Attention(inner, binding, block is blocks[-1])
    for module in network.modules():
        if hasattr(type(module), "feed_forward_chunk") and "feed_forward_chunk" not in vars(module):
            module.feed_forward_chunk = _FeedForward(module)  # type: ignore[assignment]
    blocks[-1].output.register_forward_pre_hook(_Ending(binding))  # type: ignore[union-attr]


@torch.no_grad()
def _answers_alike(network: nn.Module, slots: Slots) -> bool:
    """Whether logits of short random texts are the same as without packing, in half of their digits at least."""
    like = next(network.parameters())
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(1, _TEXTS + 1, device=like.device).unsqueeze(1)
    mask = (torch.arange(_LENGTH, device=like.device) < lengths).long()
    try:
        words = int(network.config.vocab_size)  # type: ignore[union-attr, arg-type]
        ids = torch.randint(words, (_TEXTS, _LENGTH), generator=generator).to(like.device)
        plain = network(input_ids=ids, attention_mask=mask).logits
        with slots.bound(1, None, None):
            packed = network(input_ids=ids, attention_mask=mask).logits
    except Exception:  # a network of another make may fail in any way; it goes on as it is
        return False
    if packed.shape != plain.shape:
        return False
    allowed = torch.finfo(plain.dtype).eps ** 0.5 * plain.abs().max()
    return bool((packed - plain).abs().max() < allowed)
