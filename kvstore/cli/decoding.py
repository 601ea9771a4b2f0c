"""Answers of a node as values: what an older node does not say is empty."""

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from kvstore.protocol.errors import PeerUnreachable, ProtocolError

T = TypeVar("T")

_OBJECTS: Final = (
    msgspec.inspect.StructType, msgspec.inspect.DataclassType, msgspec.inspect.TypedDictType,
)  # fmt: skip
_EMPTY: Final[dict[type, Any]] = {
    msgspec.inspect.BoolType: False, msgspec.inspect.IntType: 0, msgspec.inspect.FloatType: 0.0,
    msgspec.inspect.StrType: "",
}  # fmt: skip
_KNOWN_SHARE: Final = 0.5
"""An answer with fewer of the fields than this is of something else than a node."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """An answer, as it came and as a value.

    Attributes:
        raw: its JSON as plain values, with all that a newer node may say.
        kind: type of the value.
    """

    raw: Any
    kind: type[T]

    @property
    def value(self) -> T:
        """The answer as a value.

        Raises:
            PeerUnreachable: it is of something else than a node.
            ProtocolError: a field has another type than this version knows.
        """
        try:
            return msgspec.convert(self.raw, self.kind)
        except msgspec.ValidationError as error:
            return self._of_older_node(error)

    def _of_older_node(self, error: msgspec.ValidationError) -> T:
        if not _is_of(self.raw, self.kind):
            raise PeerUnreachable("what answers there is not the HTTP API of a node") from error
        try:
            return completed(self.raw, self.kind)
        except msgspec.ValidationError as unknown:
            message = f"the node is of another version ({unknown}): print its answer with --json"
            raise ProtocolError(message) from error


def completed(raw: Any, kind: type[T]) -> T:
    """An answer in which missing fields are empty: 0, an empty text, None where it may be.

    Raises:
        msgspec.ValidationError: a field has another type.
    """
    shape = msgspec.inspect.type_info(kind)
    return msgspec.convert(_filled(raw, shape), kind)


def _is_of(raw: Any, kind: type) -> bool:
    """Whether a JSON value has at least half of a type's fields."""
    shape = msgspec.inspect.type_info(kind)
    if not (isinstance(raw, dict) and isinstance(shape, _OBJECTS)):
        return False
    needed = [field.encode_name for field in shape.fields if field.required]
    return sum(name in raw for name in needed) >= _KNOWN_SHARE * len(needed)


def _filled(raw: Any, shape: msgspec.inspect.Type) -> Any:
    match shape:
        case (
            msgspec.inspect.StructType()
            | msgspec.inspect.DataclassType()
            | msgspec.inspect.TypedDictType()
        ) if isinstance(raw, dict):
            fields = {
                one.encode_name: _filled(raw[one.encode_name], one.type)
                if one.encode_name in raw
                else _empty(one.type)
                for one in shape.fields
                if one.encode_name in raw or one.required
            }
            return raw | fields
        case msgspec.inspect.ListType() if isinstance(raw, list):
            return [_filled(one, shape.item_type) for one in raw]
        case msgspec.inspect.DictType() if isinstance(raw, dict):
            return {name: _filled(one, shape.value_type) for name, one in raw.items()}
        case msgspec.inspect.UnionType() if raw is not None:
            parts = [one for one in shape.types if isinstance(one, _OBJECTS)]
            part = next((one for one in parts if _is_tagged(raw, one)), None)
            return raw if part is None else _filled(raw, part)
    return raw


def _is_tagged(raw: Any, shape: msgspec.inspect.Type) -> bool:
    """Whether a JSON value is of this type in a union; a type without a tag is the only one."""
    if not isinstance(shape, msgspec.inspect.StructType) or shape.tag_field is None:
        return True
    return isinstance(raw, dict) and raw.get(shape.tag_field) == shape.tag


def _empty(shape: msgspec.inspect.Type) -> Any:
    """What stands for a field that is missing."""
    found: Any
    match shape:
        case msgspec.inspect.UnionType():
            found = None if shape.includes_none else _empty(shape.types[0])
        case msgspec.inspect.LiteralType():
            found = shape.values[0]
        case msgspec.inspect.ListType():
            found = []
        case msgspec.inspect.TupleType():
            found = [_empty(one) for one in shape.item_types]
        case msgspec.inspect.DictType():
            found = {}
        case msgspec.inspect.StructType() if shape.tag_field is not None:
            found = _filled({shape.tag_field: shape.tag}, shape)
        case _:
            found = _EMPTY[type(shape)] if type(shape) in _EMPTY else _filled({}, shape)
    return found
