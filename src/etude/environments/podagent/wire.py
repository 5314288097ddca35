"""The pod's side of the wire: frames of a 4-byte big-endian length and a MessagePack value.

A subset of MessagePack by hand (nil, bool, int, str, bytes, array, map), because importing `json` costs more than the
whole start of the agent. Knows nothing of verbs; the host's side is `etude.environments.protocol`.
"""

MAX_FRAME = 96 << 20


class WireError(Exception):
    """Bytes that are no message of ours."""


def pack(value: object) -> bytes:
    """MessagePack bytes of nested None, bool, int, str, bytes, list, tuple, dict."""
    parts: list[bytes] = []
    _pack(value, parts)
    return b"".join(parts)


def frame(value: object) -> bytes:
    """`pack(value)` behind its length."""
    body = pack(value)
    return len(body).to_bytes(4, "big") + body


def _sized(size: int, short: tuple[int, int] | None, codes: tuple[int | None, int, int]) -> bytes:
    if short is not None and size < short[1]:
        return bytes((short[0] | size,))
    if codes[0] is not None and size < 1 << 8:
        return bytes((codes[0], size))
    if size < 1 << 16:
        return bytes((codes[1],)) + size.to_bytes(2, "big")
    return bytes((codes[2],)) + size.to_bytes(4, "big")


def _pack(value: object, parts: list[bytes]) -> None:
    if value is None:
        parts.append(b"\xc0")
    elif value is True:
        parts.append(b"\xc3")
    elif value is False:
        parts.append(b"\xc2")
    elif isinstance(value, int):
        if 0 <= value < 128:
            parts.append(bytes((value,)))
        else:
            parts.append(b"\xd3" + value.to_bytes(8, "big", signed=True))
    elif isinstance(value, str):
        data = value.encode("utf-8", "replace")
        parts += (_sized(len(data), (0xA0, 32), (0xD9, 0xDA, 0xDB)), data)
    elif isinstance(value, (bytes, bytearray)):
        parts += (_sized(len(value), None, (0xC4, 0xC5, 0xC6)), bytes(value))
    elif isinstance(value, (list, tuple)):
        parts.append(_sized(len(value), (0x90, 16), (None, 0xDC, 0xDD)))
        for item in value:
            _pack(item, parts)
    elif isinstance(value, dict):
        parts.append(_sized(len(value), (0x80, 16), (None, 0xDE, 0xDF)))
        for key, item in value.items():
            _pack(key, parts)
            _pack(item, parts)
    else:
        raise WireError("cannot pack " + type(value).__name__)


def unpack(data: bytes) -> object:
    """The one value in `data`. Raises WireError when it is cut, has a tail or a type outside the subset."""
    try:
        value, end = _unpack(data, 0)
    except (IndexError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise WireError(str(error)) from error
    if end != len(data):
        raise WireError("bytes after the message")
    return value


_UINT = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_INT = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_STR = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise IndexError("message is cut")
    return data[at : at + size], at + size


def _size(data: bytes, at: int, width: int) -> tuple[int, int]:
    raw, at = _take(data, at, width)
    return int.from_bytes(raw, "big"), at


def _unpack(data: bytes, at: int) -> tuple[object, int]:
    code = data[at]
    at += 1
    if code < 0x80:
        return code, at
    if code >= 0xE0:
        return code - 256, at
    if 0xA0 <= code < 0xC0 or code in _STR:
        size, at = (code & 31, at) if code < 0xC0 else _size(data, at, _STR[code])
        raw, at = _take(data, at, size)
        return raw.decode("utf-8"), at
    if code in _BIN:
        size, at = _size(data, at, _BIN[code])
        return _take(data, at, size)
    if 0x90 <= code < 0xA0 or code in _ARRAY:
        size, at = (code & 15, at) if code < 0xA0 else _size(data, at, _ARRAY[code])
        items: list[object] = []
        for _ in range(size):
            item, at = _unpack(data, at)
            items.append(item)
        return items, at
    if code < 0x90 or code in _MAP:
        size, at = (code & 15, at) if code < 0x90 else _size(data, at, _MAP[code])
        table: dict[object, object] = {}
        for _ in range(size):
            key, at = _unpack(data, at)
            table[key], at = _unpack(data, at)
        return table, at
    if code in _UINT:
        return _size(data, at, _UINT[code])
    if code in _INT:
        raw, at = _take(data, at, _INT[code])
        return int.from_bytes(raw, "big", signed=True), at
    simple = {0xC0: None, 0xC2: False, 0xC3: True}
    if code in simple:
        return simple[code], at
    raise TypeError("unknown type byte " + hex(code))
