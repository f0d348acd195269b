"""Messages as bytes, and the ledger of what travelled."""

from coterie.wire.codec import Size, decode, digest, encode, size
from coterie.wire.ledger import Ledger

__all__ = ["Ledger", "Size", "decode", "digest", "encode", "size"]
