"""What attends to what: the kinds of attention that engines tell apart."""

import enum
from typing import Any


class AttentionType(enum.StrEnum):
    """Equal to the strings of vLLM's class of this name; `of` also takes the members of Aphrodite's enum."""

    DECODER = "decoder"
    """Causal self-attention."""
    ENCODER = "encoder"
    """An encoder's self-attention, to both sides, in a model that has a decoder as well."""
    ENCODER_ONLY = "encoder_only"
    """Self-attention to both sides in a model without a decoder."""
    ENCODER_DECODER = "encoder_decoder"
    """A decoder's attention to an encoder's output."""

    @classmethod
    def of(cls, attn_type: Any) -> "AttentionType":
        """The member for a string, or for a member of an engine's own enum, which is known by its name."""
        name = attn_type.name.lower() if isinstance(attn_type, enum.Enum) else attn_type
        if name not in list(cls):
            raise MetadataError(f"attn_type: expected one of {', '.join(map(repr, map(str, cls)))}, got {attn_type!r}")
        return cls(name)


class MetadataError(ValueError, AttributeError):
    """Metadata that lack what a kind of attention needs; an AttributeError as well, which engines may expect."""
