"""A tensor with few entries, as it travels: the values, and where they stand in the shorter of two ways."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.protocol.messages import message

VALUE_BYTES, INDEX_BYTES = 4, 4


@message
class Sparse:
    """A tensor of `shape` that is 0 outside some places.

    values: (k,), in the order of the flat tensor. places: their flat positions, int32 (k,) ascending; or, where that is
    shorter, one bit for each entry, uint8 (ceil(entries / 8),), the first entry in the highest bit.
    """

    values: Tensor
    places: Tensor
    shape: tuple[int, ...]

    @classmethod
    def at(cls, tensor: Tensor, mask: Tensor) -> Sparse:
        """The entries of `tensor` where `mask` (bool, the same shape) is set; a 0 among them travels too."""
        flat = mask.flatten()
        if flat.numel() > 2**31:
            raise ModelError(f"a sparse tensor of {flat.numel()} entries; int32 positions reach 2147483648")
        chosen = flat.nonzero().flatten()
        places = chosen.to(torch.int32)
        if not _listed(len(chosen), flat.numel()):
            places = torch.from_numpy(np.packbits(flat.cpu().numpy()))
        return cls(tensor.flatten()[chosen].clone(), places, tuple(tensor.shape))

    @property
    def mask(self) -> Tensor:
        """bool, `shape`: the places."""
        entries = math.prod(self.shape)
        if self.places.dtype == torch.uint8:
            bits = np.unpackbits(self.places.cpu().numpy(), count=entries).astype(bool)
            return torch.from_numpy(bits).view(self.shape)
        flat = torch.zeros(entries, dtype=torch.bool)
        flat[self.places.long()] = True
        return flat.view(self.shape)

    @property
    def positions(self) -> Tensor:
        """int64 (k,), ascending: the places in the flat tensor."""
        if self.places.dtype != torch.uint8:
            return self.places.long()
        bits = np.unpackbits(self.places.cpu().numpy(), count=math.prod(self.shape))
        return torch.from_numpy(np.flatnonzero(bits.view(bool)))

    def dense(self) -> Tensor:
        """The whole tensor, in the dtype of the values."""
        made = torch.zeros(self.shape, dtype=self.values.dtype)
        made.view(-1)[self.positions] = self.values
        return made

    def check(self, where: str) -> None:
        """Raises ModelError unless values and places belong together and are written in the shorter way."""
        k, entries = self.values.numel(), math.prod(self.shape)
        listed = _listed(k, entries)
        wanted = (torch.int32, (k,)) if listed else (torch.uint8, (-(-entries // 8),))
        if (self.places.dtype, tuple(self.places.shape)) != wanted or self.values.dim() != 1:
            raise ModelError(
                f"{where}: values {tuple(self.values.shape)} at places {tuple(self.places.shape)} {self.places.dtype} "
                f"do not make a sparse {self.shape}; expected places {wanted[1]} {wanted[0]}"
            )
        if listed and k:
            rising = bool((self.places[1:] > self.places[:-1]).all())
            if not rising or int(self.places[0]) < 0 or int(self.places[-1]) >= entries:
                raise ModelError(f"{where}: places must rise and lie below {entries}")
        elif int(self.mask.sum()) != k:
            raise ModelError(f"{where}: {k} values at {int(self.mask.sum())} places")


def sparse_bytes(count: int, entries: int) -> int:
    """Payload bytes of a `Sparse` of so many values in fp32, out of so many entries."""
    return count * VALUE_BYTES + min(count * INDEX_BYTES, -(-entries // 8))


def _listed(count: int, entries: int) -> bool:
    """Whether positions are no longer than a bitmap."""
    return count * INDEX_BYTES <= -(-entries // 8)
